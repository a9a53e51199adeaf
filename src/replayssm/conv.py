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
    T, W, length = x.shape[1], weight.shape[1], pool.shape[1]
    at = torch.arange(W - 1, W - 1 + T, device=x.device).expand(len(x), T)  # where tokens stand behind the W - 1 before
    place = (step.conv_end[:, None] + torch.arange(1 - W, T, device=x.device)) % length
    slots = step.slots[:, None]
    if step.whole:
        pool[slots, place[:, W - 1 :]] = x
    else:
        valid = step.valid()
        pool[slots.expand_as(valid)[valid], place[:, W - 1 :][valid]] = x[valid]
    wide = torch.promote_types(x.dtype, torch.float32)
    kernel = weight.to(wide).t()  # [W, C]
    y = pool[slots, place.gather(1, at)].to(wide).mul_(kernel[-1])
    for d in reversed(range(W - 1)):
        at = at - 1 if step.parent is None else _before(step.parent, W).gather(1, at)
        # not addcmul: it fuses or not by layout, so that a row would depend on its neighbours
        y += pool[slots, place.gather(1, at)].to(wide).mul_(kernel[d])
    if bias is not None:
        y += bias.to(wide)
    return silu_(y).to(x.dtype)


def _before(parent: Tensor, W: int) -> Tensor:
    """What stands before every input of a tree: the W - 1 committed ones in a row, then each node's parent.

    Args:
        parent: [B, T], -1 for a root, which follows the newest committed input.

    Returns:
        [B, W - 1 + T]
    """
    committed = torch.arange(-1, W - 2, device=parent.device).clamp(min=0)
    return torch.cat([committed.expand(len(parent), -1), parent + W - 1], 1)
