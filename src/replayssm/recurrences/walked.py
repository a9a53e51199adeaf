"""Implementation `reference`: records put in order, then the recurrence's own definition, walked record by record.

Any device, any precision, slow. What `batched` and the kernels are compared with.
"""

import torch
from torch import Tensor

from replayssm import ring
from replayssm.recurrences import Recurrence
from replayssm.ring import LayerState, Records, Step


def carry(recurrence: Recurrence, records: Records, step: Step, q: Tensor) -> tuple[Tensor, Tensor]:
    """Carry the step's queries back through the ring; its own records are already there.

    Args:
        q: [B, T, G, K] in the compute dtype, normalised where the recurrence does that.

    Returns:
        t [B, H, T, K] and c [B, H, T, R] by ring place. Writes the new records' rows of `back`.
    """
    k, _, g, w = _ordered(records, step.slots, step.order, step.sees.any(1), q.dtype)
    by_age = step.sees.gather(2, step.order[:, None].expand_as(step.sees))
    t, c = recurrence.reference.carry(q, k, g, w, by_age)
    place = step.age[:, None, None]
    if recurrence.delta:
        record = step.committed[:, None] + torch.arange(step.tokens, device=q.device)
        rows = recurrence.reference.back(k, g, w, by_age, record)
        rows = rows.gather(3, place.expand_as(rows))
        records.back[step.slots[:, None], :, step.place] = rows.nan_to_num(0.0).to(records.back.dtype)
    return t.transpose(1, 2), c.gather(3, place.expand_as(c)).transpose(1, 2)


def fold(recurrence: Recurrence, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor) -> Tensor:
    """The state of every slot after its first `counts` committed records: [n, H, V, K] in the compute dtype."""
    length, fmt = layer.ring.w.shape[2], layer.format
    order, age = ring.places(start, torch.zeros_like(start), length, length), ring.ages(start, length)
    k, v, g, w = _ordered(layer.ring, slots, order, age < counts[:, None], fmt.compute)
    state = fmt.update(tuple(plane[slots] for plane in layer.checkpoint))
    return recurrence.reference.fold(state, k, v, g, w, counts)


def _ordered(
    records: Records, slots: Tensor, order: Tensor, used: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k [B, R, G, K], v [B, R, H, V], g [B, R, H, E], w [B, R, H], oldest first, zero where not `used` (by place)."""

    def pick(x: Tensor) -> Tensor:
        x = x[slots].to(dtype)  # [B, heads, R, ...]
        x = torch.where(used[:, None, :, *([None] * (x.ndim - 3))], x, 0)
        return x.transpose(1, 2)[torch.arange(len(slots), device=slots.device)[:, None], order]

    k = pick(records.k)
    if records.norm.shape[-1]:
        k = k * pick(records.norm)[..., None]
    return k, pick(records.v), pick(records.g), pick(records.w)
