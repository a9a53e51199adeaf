"""Implementation `torch`: the carry and the fold of every recurrence as batched matrix products, for CPUs.

No walk and no solve. Scores of the whole ring are one product; decays are differences of running sums; the delta rule's
corrections are one product with the ring's `back` rows, which grow by one row per token (derivation in gdn/math.md):

    b_j = w_j exp(P_i - P_j) (k_j . q_i)        P: running sum of g on a token's path, in fp64 (long sums differ)
    c   = b (I + back)                          mamba2: c = b
    t_i = exp(P_i) q_i - sum_j c_j exp(P_j) k_j mamba2: without the sum

Everything stays in ring order; only the small running sums are put in age order and back.
"""

import torch
from torch import Tensor

from replayssm import ring
from replayssm.recurrences import Recurrence
from replayssm.ring import LayerState, Records, Step

BLOCK_BYTES = 8 << 20  # decoded states held at a time: stays in a CPU's last-level cache
_LEAST_LOG_DECAY = -1.0e4  # exp of it is 0 in fp64 as well; keeps differences of running sums finite and exact


def carry(recurrence: Recurrence, records: Records, step: Step, q: Tensor) -> tuple[Tensor, Tensor]:
    """Carry the step's queries back through the ring; its own records are already there.

    Args:
        q: [B, T, G, K] in the compute dtype, normalised where the recurrence does that.

    Returns:
        t [B, H, T, K] and c [B, H, T, R] by ring place. Writes the new records' rows of `back`.
    """
    B, T, G, K = q.shape
    k, g = step.take(records.k).to(q.dtype), step.take(records.g)
    w = step.take(records.w)[:, :, None]
    H, R, E = g.shape[1:]
    q = q.transpose(1, 2)  # [B, G, T, K]
    at_place = step.place[:, None, :, None]  # [B, 1, T, 1]
    seen = step.sees[:, None]  # [B, 1, T, R]

    # (1) running sums along every path, P [B, H, R, E] by place, and the tokens' own [B, H, T, E]
    sums = _path_sums(g, step.paths)
    own_sums = sums.gather(2, at_place.expand(B, H, T, E))
    # (2) decay from record j to token i, [B, H, T, R, E], and from the checkpoint to token i, [B, G, H / G, T, E]
    decay = (own_sums[:, :, :, None] - sums[:, :, None]).clamp_(max=0).to(q.dtype).exp_()
    whole = own_sums.to(q.dtype).exp_().view(B, G, -1, T, E)
    t = (whole * q[:, :, None]).view(B, H, T, K)
    # (3) decayed scores times w
    if not recurrence.delta:
        return t, torch.where(seen, w * _scores(q, k, decay), 0)

    # (4) the same with the new keys as queries, without the records themselves: rows of back
    norm = step.take(records.norm).to(q.dtype)
    own = (step.slots[:, None], slice(None), step.place)
    keys = (records.k[own].to(q.dtype) * records.norm[own][..., None].to(q.dtype)).transpose(1, 2)
    scores = w * _scores(torch.cat([q, keys], 2), k, decay.repeat(1, 1, 2, 1, 1), norm)
    itself = (step.place[:, :, None] == torch.arange(R, device=q.device))[:, None]
    b = torch.where(seen, scores[:, :, :T], 0)
    rows = torch.where(seen & ~itself, -scores[:, :, T:], 0)
    old = step.take(records.back)
    back = old if step.base is not None and old.dtype == q.dtype else old.to(q.dtype, copy=True)
    at = torch.arange(B, device=q.device)
    for i in range(T):
        row = rows[:, :, i : i + 1]
        # never NaN, so that forgotten records do not reach their siblings; a record's own NaN stays in k, v, g or w
        back[at, :, step.place[:, i]] = (row + row @ back).squeeze(2).nan_to_num_(0.0)
    if back is not old:
        records.back[step.slots[:, None], :, step.place] = back[at[:, None], :, step.place].to(records.back.dtype)
    # (5) corrected weights, and the carried query
    c = b + b @ back
    return t - _weighted_keys(c, sums.to(q.dtype).exp_(), k, norm), c


def fold(recurrence: Recurrence, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor) -> Tensor:
    """The state of every slot after its first `counts` committed records: [n, H, V, K] in the compute dtype.

    U = diag(w) (I + back) (V - exp(P) K S0^T) (delta rule) or diag(w) V,
    then S = exp(P_n) S0 + sum_j exp(P_n - P_j) u_j k_j^T.
    """
    records, fmt = layer.ring, layer.format
    k, g = records.k[slots].to(fmt.compute), records.g[slots]
    n, H, R, E = g.shape
    age = ring.ages(start, R)
    folded = (age < counts[:, None])[:, None, :, None]  # [n, 1, R, 1] by place
    k = torch.where(folded, k, 0)
    # (1) running sums P [n, H, R, E] by place, and the whole [n, H, 1, E], 0 where nothing is folded
    sums = _path_sums(g, folded[:, 0] & folded[:, 0].transpose(1, 2) & (age[:, None] <= age[:, :, None]))
    whole = sums.amin(2, keepdim=True)
    decay = (whole - sums).clamp_(max=0).to(fmt.compute).exp_()
    # (2) corrected values u [n, H, R, V]
    state = fmt.update(tuple(plane[slots] for plane in layer.checkpoint))
    u = torch.where(folded, records.v[slots].to(fmt.compute), 0)
    if recurrence.delta:
        k = k * torch.where(folded[..., 0], records.norm[slots], 0)[..., None].to(fmt.compute)
        u -= _recalled(state, k, sums.to(fmt.compute).exp_())
        u += torch.where(folded, records.back[slots].to(fmt.compute), 0) @ u
    u *= torch.where(folded, records.w[slots][..., None], 0).to(fmt.compute)
    # (3) S = exp(P_n) S0 + u^T (exp(P_n - P_j) k_j), in place: update gave a tensor of our own
    state *= whole.to(fmt.compute).exp_()
    if E == 1:
        left, right = (decay * u).transpose(2, 3), k
    else:
        left, right = u.transpose(2, 3), decay * _per_head(k, H)
    per_group = state.view(n * right.shape[1], -1, state.shape[-1])
    per_group.baddbmm_(left.reshape(len(per_group), -1, R), right.flatten(0, 1))
    return state


def _recalled(state: Tensor, k: Tensor, grown: Tensor) -> Tensor:
    """What the checkpoint recalls for every key, decayed to the key's own time: exp(P_j) k_j S0^T, [n, H, R, V].

    Args:
        state: [n, H, V, K]
        k: [n, G, R, K]
        grown: exp(P), [n, H, R, E]
    """
    n, H, V, K = state.shape
    G, R = k.shape[1:3]
    if grown.shape[-1] > 1:
        return (grown * _per_head(k, H)) @ state.transpose(2, 3)
    recalled = k @ state.view(n, G, -1, K).transpose(2, 3)  # [n, G, R, H / G * V]
    return grown * recalled.unflatten(-1, (-1, V)).transpose(2, 3).reshape(n, H, R, V)


def _weighted_keys(c: Tensor, grown: Tensor, k: Tensor, norm: Tensor) -> Tensor:
    """sum_j c_j exp(P_j) k_j, keys times norm: c [B, H, T, R], exp(P) [B, H, R, E], k [B, G, R, K] -> [B, H, T, K]."""
    B, H, T, R = c.shape
    G, K = k.shape[1], k.shape[3]
    if grown.shape[-1] > 1:
        return c @ (grown * _per_head(k * norm[..., None], H))
    weights = (c * grown.transpose(2, 3)).reshape(B, G, -1, R) * norm[:, :, None]
    return (weights @ k).view(B, H, T, K)


def _per_head(k: Tensor, H: int) -> Tensor:
    """Keys of groups as keys of heads: [B, G, R, K] -> [B, H, R, K]."""
    B, G, R, K = k.shape
    return k[:, :, None].expand(B, G, H // G, R, K).reshape(B, H, R, K)


def _path_sums(g: Tensor, paths: Tensor) -> Tensor:
    """Sums of g [B, H, R, E] over every record's path, bool [B, R, R]: [B, H, R, E] in fp64, 0 for an empty path.

    A gate that is not a number makes its own sum so, and no other record's: that record may be forgotten.
    """
    B, H, R, E = g.shape
    used = paths.diagonal(dim1=1, dim2=2)[:, None, :, None]
    g = torch.where(used, g, 0).to(torch.float64).clamp_(min=_LEAST_LOG_DECAY)
    by_record = g.nan_to_num(0.0).transpose(1, 2).reshape(B, R, H * E)
    return (paths.to(torch.float64) @ by_record).view(B, R, H, E).transpose(1, 2) + 0 * g


def _scores(q: Tensor, k: Tensor, decay: Tensor, norm: Tensor | None = None) -> Tensor:
    """Decayed scores of keys times norm: q [B, G, T, K], k [B, G, R, K], decay [B, H, T, R, E] -> [B, H, T, R]."""
    B, G, T, K = q.shape
    H, R, E = decay.shape[1], k.shape[2], decay.shape[-1]
    split = decay.view(B, G, H // G, T, R, E)
    if E == 1:
        scores = q @ k.transpose(2, 3)
        scores = scores if norm is None else scores * norm[:, :, None]
        return (split[..., 0] * scores[:, :, None]).view(B, H, T, R)
    k = k if norm is None else k * norm[..., None]
    return (split * (q[:, :, :, None] * k[:, :, None])[:, :, None]).sum(-1).view(B, H, T, R)
