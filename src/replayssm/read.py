"""The read: y = S0 t + sum_j c_j v_j, nearly all the bytes of a step. One for every recurrence and every format.

    t [B, H, T, K]   carried queries       S0 [B, H, V, K]  the checkpoint's read planes
    c [B, H, T, R]   weights by ring place  v  [B, H, R, V]  the ring
    y [B, H, T, V]

Bytes per token and head: V K read_bytes for the checkpoint, R (V itemsize + 4) for the ring.
"""

import torch
from torch import Tensor

from replayssm.recurrences.batched import BLOCK_BYTES
from replayssm.ring import LayerState, Step


def read_reference(layer: LayerState, step: Step, t: Tensor, c: Tensor) -> Tensor:
    """y by definition, in the dtype of t."""
    fmt = layer.format
    state = fmt.read(tuple(plane[step.slots] for plane in layer.checkpoint[: fmt.read_planes])).to(t.dtype)
    used = step.sees.any(1)[:, None, :, None]
    v = torch.where(used, layer.ring.v[step.slots].to(t.dtype), 0)
    return torch.einsum("bhvk,bhtk->bhtv", state, t) + torch.einsum("bhtr,bhrv->bhtv", c, v)


def read_torch(layer: LayerState, step: Step, t: Tensor, c: Tensor) -> Tensor:
    """y by batched products, without a copy of the checkpoint.

    It is read in place where its plane is what the products take and the slots follow one another, otherwise decoded a
    few rows at a time into memory that stays in the processor's cache.
    """
    (B, H, _, K), fmt = t.shape, layer.format
    y = c @ step.take(layer.ring.v).to(t.dtype)  # [B, H, T, V]
    planes = layer.checkpoint[: fmt.read_planes]
    in_place = step.base is not None and planes[0].dtype == t.dtype
    V = y.shape[3]
    rows = B if in_place else max(1, BLOCK_BYTES // (H * V * K * t.element_size()))
    for i in range(0, B, rows):
        block = slice(i, min(i + rows, B))
        if step.base is not None:
            part = tuple(plane[step.base + block.start : step.base + block.stop] for plane in planes)
        else:
            part = tuple(plane[step.slots[block]] for plane in planes)
        state = fmt.read(part)
        # [V, K] times [K, T]: the checkpoint as the left operand streams a quarter faster than as the right one
        y[block] += (state @ t[block].transpose(2, 3)).transpose(2, 3)
    return y
