"""The short causal convolution in front of a recurrence, rolled back by the same step as the records.

    y_i = silu( bias + sum_d weight[:, d] x_{i - (W-1) + d} )       a tree's node: its own W - 1 ancestors

A slot keeps its newest W - 1 + max_tokens raw inputs in a ring of that length. A step writes its inputs behind the
committed ones, over the oldest; commit and trim only move `conv_end`, so a rejected draft leaves no trace: the W - 1
inputs before every possible `conv_end` are still there.
"""

import torch
from torch import Tensor

from replayssm.recurrences import silu_
from replayssm.ring import Step


def convolve(pool: Tensor, step: Step, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve the step's inputs behind each slot's own past, and keep them.

    Args:
        pool: [S, W - 1 + max_tokens, C] the inputs kept, written here.
        x: [B, T, C] raw inputs of the living rows.
        weight: [C, W]
        bias: [C] or None.

    Returns:
        [B, T, C] in the dtype of x, after silu. Arithmetic in fp32 (fp64 for fp64 inputs).
    """
    B, T, _ = x.shape
    W, length = weight.shape[1], pool.shape[1]
    back = torch.arange(1 - W, T, device=x.device)
    place = (step.conv_end[:, None] + back) % length  # [B, W - 1 + T]
    slots = step.slots[:, None]
    if step.whole:
        pool[slots, place[:, W - 1 :]] = x
    else:
        valid = step.valid()
        pool[slots.expand(B, T)[valid], place[:, W - 1 :][valid]] = x[valid]
    window = pool[slots, place]  # [B, W - 1 + T, C]; where a row has no token, whatever is there
    wide = torch.promote_types(x.dtype, torch.float32)
    kernel = weight.to(wide).t()  # [W, C]
    if step.parent is None:
        taps = [window[:, d : d + T] for d in range(W)]
    else:
        taps = _ancestor_taps(window, step.parent, W)
    y = taps[0].to(wide) * kernel[0]
    for d in range(1, W):
        y += (
            taps[d].to(wide) * kernel[d]
        )  # not addcmul: it fuses or not by layout, so a row would depend on its neighbours
    if bias is not None:
        y += bias.to(wide)
    return silu_(y).to(x.dtype)


def _ancestor_taps(window: Tensor, parent: Tensor, W: int) -> list[Tensor]:
    """The W inputs of every tree node, oldest first, each [B, T, C]: itself, its ancestors, then the committed inputs.

    Args:
        window: [B, W - 1 + T, C] committed inputs, then the step's.
        parent: [B, T]
    """
    B, T = parent.shape
    # the position before each one: committed inputs follow one another; a root (-1) follows the newest of them
    before = torch.cat([torch.arange(-1, W - 2, device=parent.device).expand(B, -1), parent + W - 1], 1).clamp(min=0)
    at = torch.arange(W - 1, W - 1 + T, device=parent.device).expand(B, T)
    taps = []
    for _ in range(W):
        taps.append(window.gather(1, at[..., None].expand(-1, -1, window.shape[2])))
        at = before.gather(1, at)
    return taps[::-1]
