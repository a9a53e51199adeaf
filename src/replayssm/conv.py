"""The short causal convolution in front of a recurrence, rolled back by the same step as the records.

    y_i = silu( bias + sum_d weight[:, d] x_{i - (W-1) + d} )

A slot keeps its newest W - 1 + max_tokens raw inputs in a ring of that length. A step writes its inputs behind the
committed ones, over the oldest; commit and trim only move `conv_end`, so a rejected draft leaves no trace: the W - 1
inputs before every possible `conv_end` are still there.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

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
    window = torch.cat([pool[slots, place[:, : W - 1]], x], 1)  # [B, W - 1 + T, C]
    if step.whole:
        pool[slots, place[:, W - 1 :]] = x
    else:
        valid = step.valid()
        pool[slots.expand(B, T)[valid], place[:, W - 1 :][valid]] = x[valid]
    wide = torch.promote_types(x.dtype, torch.float32)
    kernel = weight.to(wide).t()  # [W, C]
    y = window[:, :T].to(wide) * kernel[0]
    for d in range(1, W):
        y.addcmul_(window[:, d : d + T].to(wide), kernel[d])
    if bias is not None:
        y += bias.to(wide)
    return F.silu(y, inplace=True).to(x.dtype)
