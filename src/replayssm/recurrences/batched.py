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
from replayssm.formats import Format
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
    g, w = step.take(records.g), step.take(records.w)
    H, R, E = g.shape[1:]
    k = _keys(step.take(records.k), step.take(records.norm), q.dtype)  # [B, G, R, K]
    qs = q.transpose(1, 2)  # [B, G, T, K]
    seen = step.sees[:, None]  # [B, 1, T, R]

    # (1) running sums along every path, P [B, H, R, E] by place, and the tokens' own [B, H, T, E]
    sums = _path_sums(g, step.paths)
    own_sums = sums.gather(2, step.place[:, None, :, None].expand(B, H, T, E))
    # (2) decay from record j to token i, [B, H, T, R, E]
    decay = (own_sums[:, :, :, None] - sums[:, :, None]).clamp_(max=0).to(q.dtype).exp_()
    # (3) decayed scores times w
    w = w[:, :, None]
    b = torch.where(seen, w * _scores(qs, k, decay, H), 0)
    if not recurrence.delta:
        return (own_sums.to(q.dtype).exp_().view(B, G, -1, T, 1) * qs[:, :, None]).view(B, H, T, K), b

    # (4) rows of back for the new records: the same scores with the key as query, without the record itself
    keys = k.gather(2, step.place[:, None, :, None].expand(B, G, T, K))
    itself = (step.place[:, :, None] == torch.arange(R, device=q.device))[:, None]
    rows = torch.where(seen & ~itself, -w * _scores(keys, k, decay, H), 0)
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
    grown = sums.to(q.dtype).exp_()  # [B, H, R, E]
    t = own_sums.to(q.dtype).exp_().view(B, G, -1, T, E) * qs[:, :, None]
    if recurrence.channel_gate:
        taken = c @ (grown.view(B, G, -1, R, K) * k[:, :, None]).view(B, H, R, K)
    else:
        taken = (c * grown.transpose(2, 3)).reshape(B, G, -1, R) @ k
    return t.view(B, H, T, K) - taken.view(B, H, T, K), c


def fold(
    recurrence: Recurrence,
    fmt: Format,
    layer: LayerState,
    slots: Tensor,
    start: Tensor,
    counts: Tensor,
) -> Tensor:
    """The state of every slot after its first `counts` committed records: [n, H, V, K] in the compute dtype.

    U = diag(w) (I + back) (V - exp(P) K S0^T) (delta rule) or diag(w) V,
    then S = exp(P_n) S0 + sum_j exp(P_n - P_j) u_j k_j^T.
    """
    records = layer.ring
    H, R, E = records.g.shape[1:]
    age = ring.ages(start, R)
    folded = (age < counts[:, None])[:, None, :, None]  # [n, 1, R, 1] by place
    paths = folded[:, 0] & folded[:, 0].transpose(1, 2) & (age[:, None] <= age[:, :, None])
    state = fmt.update(tuple(plane[slots] for plane in layer.checkpoint))
    k = _keys(records.k[slots], records.norm[slots], fmt.compute)
    G, K = k.shape[1], k.shape[3]
    k = k[:, :, None].expand(-1, -1, H // G, -1, -1).reshape(-1, H, R, K)
    # (1) running sums P [n, H, R, E] by place, and the whole [n, H, 1, E], 0 where nothing is folded
    sums = _path_sums(records.g[slots], paths)
    whole = sums.amin(2, keepdim=True)
    # (2) corrected values u [n, H, R, V]
    u = torch.where(folded, records.v[slots].to(fmt.compute), 0)
    if recurrence.delta:
        u = torch.where(folded, u - (sums.to(fmt.compute).exp() * k) @ state.transpose(2, 3), 0)
        u = u + torch.where(folded, records.back[slots].to(fmt.compute), 0) @ u
    u = records.w[slots][..., None].to(fmt.compute) * u
    u = torch.where(folded, u, 0)
    # (3) S = exp(P_n) S0 + u^T (exp(P_n - P_j) k_j)
    left = torch.where(folded, (whole - sums).clamp_(max=0).to(fmt.compute).exp() * k, 0)
    state = state * whole.to(fmt.compute).exp()
    return torch.baddbmm(state.flatten(0, 1), u.flatten(0, 1).transpose(1, 2), left.flatten(0, 1)).view_as(state)


def _keys(k: Tensor, norm: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys in the compute dtype, normalised where the ring keeps their norms: [B, G, R, K]."""
    k = k.to(dtype)
    return k * norm[..., None].to(dtype) if norm.shape[-1] else k


def _path_sums(g: Tensor, paths: Tensor) -> Tensor:
    """Sums of g [B, H, R, E] over every record's path, bool [B, R, R]: [B, H, R, E] in fp64, 0 for an empty path.

    A gate that is not a number makes its own sum so, and no other record's: that record may be forgotten.
    """
    B, H, R, E = g.shape
    used = paths.diagonal(dim1=1, dim2=2)[:, None, :, None]
    g = torch.where(used, g, 0).to(torch.float64).clamp_(min=_LEAST_LOG_DECAY)
    by_record = g.nan_to_num(0.0).transpose(1, 2).reshape(B, R, H * E)
    return (paths.to(torch.float64) @ by_record).view(B, R, H, E).transpose(1, 2) + 0 * g


def _scores(q: Tensor, k: Tensor, decay: Tensor, H: int) -> Tensor:
    """Decayed scores: q [B, G, T, K], k [B, G, R, K], decay [B, H, T, R, E] -> [B, H, T, R]."""
    B, G, T, K = q.shape
    R = k.shape[2]
    split = decay.view(B, G, H // G, T, R, -1)
    if split.shape[-1] == 1:
        return (split[..., 0] * (q @ k.transpose(2, 3))[:, :, None]).view(B, H, T, R)
    return (split * (q[:, :, :, None] * k[:, :, None])[:, :, None]).sum(-1).view(B, H, T, R)
