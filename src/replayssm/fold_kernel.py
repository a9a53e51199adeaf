"""Folding records into a state on a GPU: a chunk of them at once, by products on tensor cores.

For a chunk of n records, oldest first, with P_j the sum of g up to record j and D_j the sum behind it:

    S = exp(P_n) S0 + sum_j exp(D_j) u_j k_j^T
    u_j = w_j v_j                                       Mamba-2
    U = X^T (V - exp(P) K S0^T)                         delta rule: X = ((I + A)^-1 Diag(w))^T,
                                                        A_ij = w_i exp(D_ij) (k_j . k_i) for j before i
with D_ij the sum of g behind j up to i. (I + A)^-1 is found by substitution, once for all rows of V. What the state
is asked (`ask`) and what it gets (`fold_in`) is worked out in blocks of K, so that little waits in registers. Sums of g
are sums, never differences of larger ones. Keys in bf16 stay exact, and exp(P_n) S0 stays out of tensor cores, which
round towards zero. With CHANNEL (kda) there is a g for every key channel: exp(P) and exp(D) go to the keys, in fp32.
"""

import triton
import triton.language as tl

from replayssm.arithmetic_kernel import add_product, expm1, parts_of
from replayssm.formats_kernel import divides

CHUNK = tl.constexpr(16)


@triton.jit
def load_chunk(
    ring, slot, first, count, i_h, from_k,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr, BK: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    """The first `count` (at most CHUNK) records from place `first` on, zero beyond; BK key channels from `from_k` on.

    k [CHUNK, BK] as stored, 1 / |k| (1 without the delta rule), g and the successor's g [CHUNK] or (CHANNEL)
    [CHUNK, BK], and w.
    """
    o_p, o_k = tl.arange(0, CHUNK), from_k + tl.arange(0, BK)
    place, after, i_g = (first + o_p) % R, (first + o_p + 1) % R, i_h // (H // G)
    m_p, m_after = o_p < count, o_p + 1 < tl.minimum(count, CHUNK)
    m_k = m_p[:, None] if divides(BK, K) else m_p[:, None] & (o_k < K)
    b_k = tl.load(ring.k.data + slot * ring.k.slot + (i_g * R + place)[:, None] * K + o_k, mask=m_k, other=0.0)
    b_w = tl.load(ring.w.data + slot * ring.w.slot + i_h * R + place, mask=m_p, other=0.0)
    p_g = ring.g.data + slot * ring.g.slot
    if CHANNEL:
        m_after = m_after[:, None] if divides(BK, K) else m_after[:, None] & (o_k < K)
        b_g = tl.load(p_g + (i_h * R + place)[:, None] * K + o_k, mask=m_k, other=0.0)
        b_d = tl.load(p_g + (i_h * R + after)[:, None] * K + o_k, mask=m_after, other=0.0)
    else:
        b_g = tl.load(p_g + i_h * R + place, mask=m_p, other=0.0)
        b_d = tl.load(p_g + i_h * R + after, mask=m_after, other=0.0)
    norm = 1.0
    if DELTA:
        norm = tl.load(ring.norm.data + slot * ring.norm.slot + i_g * R + place, mask=m_p, other=0.0)
    return b_k, norm, b_g, b_d, b_w


@triton.jit
def load_values(
    ring, slot, first, count, i_h, o_v, V: tl.constexpr, R: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """v of the same records at rows o_v: [BV, CHUNK] fp32."""
    o_p = tl.arange(0, CHUNK)
    m_v = (o_p < count)[None, :] if divides(BV, V) else (o_p < count) & (o_v < V)[:, None]
    p_v = ring.v.data + slot * ring.v.slot + i_h * (R * V) + o_v[:, None]
    return tl.load(p_v + (first + o_p) % R * V, mask=m_v, other=0.0).to(tl.float32)


@triton.jit
def gather(
    ring, slot, first, count, i_h,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr, BK: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    """What every tile of a head needs of a chunk: X [CHUNK, CHUNK], exp(P) / |k|, exp(D) / |k| and P_n.

    Keys are taken BK channels at a time. Mamba-2: no X, exp(D) w instead. With CHANNEL: X alone is used.
    """
    _, norm, b_g, b_d, b_w = load_chunk(ring, slot, first, count, i_h, 0, H, G, K, R, CHANNEL, BK, DELTA)
    b_x, o_p = 0.0, tl.arange(0, CHUNK)
    if DELTA:
        before = o_p[:, None] < o_p
        b_x = tl.zeros([CHUNK, CHUNK], tl.float32)  # A^T
        for n in range((K + BK - 1) // BK):
            block = load_chunk(ring, slot, first, count, i_h, n * BK, H, G, K, R, CHANNEL, BK, DELTA)
            b_k, b_e = block[0], block[2]
            if CHANNEL:
                b_k = b_k.to(tl.float32)
                for j in range(CHUNK - 1):
                    key = tl.sum(tl.where(o_p[:, None] == j, b_k, 0.0), 0)
                    decay = tl.exp(tl.cumsum(tl.where(o_p[:, None] > j, b_e, 0.0), 0))
                    b_x += tl.where(o_p[:, None] == j, tl.sum(decay * b_k * key, 1), 0.0)
            else:
                b_x = add_product(b_x, b_k, tl.trans(b_k), parts_of(b_k.dtype), parts_of(b_k.dtype))
        if not CHANNEL:
            b_x *= tl.exp(tl.cumsum(tl.where(before, b_g, 0.0), 1))
        b_x = inverse(tl.where(before, b_x * norm[:, None] * (norm * b_w), 0.0)) * b_w[:, None]
    if CHANNEL:
        return b_x, 1.0, 1.0, 0.0
    elif DELTA:
        return b_x, tl.exp(tl.cumsum(b_g, 0)) * norm, tl.exp(tl.cumsum(b_d, 0, reverse=True)) * norm, tl.sum(b_g, 0)
    else:
        return b_x, 1.0, tl.exp(tl.cumsum(b_d, 0, reverse=True)) * b_w, tl.sum(b_g, 0)


@triton.jit
def inverse(b_a):
    """(I + A)^-1 of an upper triangle A [CHUNK, CHUNK] without diagonal, by substitution: stable, as walking is."""
    o_p = tl.arange(0, CHUNK)
    b_x = tl.where(o_p[:, None] == o_p, 1.0, 0.0)
    for j in range(CHUNK - 1):
        column = tl.sum(tl.where(o_p == j, b_x, 0.0), 1)
        b_x -= column[:, None] * tl.sum(tl.where(o_p[:, None] == j, b_a, 0.0), 0)
    return b_x


@triton.jit
def ask(b_w, b_s, chunk, CHANNEL: tl.constexpr, PARTS: tl.constexpr):
    """b_w [BV, CHUNK] + S0 K^T (CHANNEL: of decayed unit keys) for a block of K: b_s [BV, BK] of PARTS bf16 numbers."""
    b_k, norm, b_g, _, _ = chunk
    if CHANNEL:
        b_k = tl.exp(tl.cumsum(b_g, 0)) * b_k.to(tl.float32) * norm[:, None]
    return add_product(b_w, b_s, tl.trans(b_k), PARTS, parts_of(b_k.dtype))


@triton.jit
def values(b_v, b_w, gathered, DELTA: tl.constexpr):
    """exp(D) U^T [BV, CHUNK], what the records add, from their values and what the state was asked."""
    b_x, inward, outward, _ = gathered
    if DELTA:
        b_v = add_product(tl.zeros(b_v.shape, tl.float32), b_v - b_w * inward, b_x, 3, 3)
    return b_v * outward


@triton.jit
def fold_in(b_s, b_u, chunk, gathered, CHANNEL: tl.constexpr):
    """exp(P_n) S0 + U^T K for a block of K: b_s [BV, BK]."""
    b_k, norm, b_g, b_d, _ = chunk
    _, _, _, total = gathered
    if CHANNEL:
        b_k = tl.exp(tl.cumsum(b_d, 0, reverse=True)) * b_k.to(tl.float32) * norm[:, None]
        total = tl.sum(b_g, 0)
    b_n = add_product(tl.zeros(b_s.shape, tl.float32), b_u, b_k, 3, parts_of(b_k.dtype))
    return b_s + expm1(total) * b_s + b_n


@triton.jit
def fold_tile(
    b_s, ring, slot, first, count, i_h, o_v,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """The tile b_s [BV, BK] after `count` records from place `first`, a chunk after the other."""
    i = 0
    while i < count:
        gathered = gather(ring, slot, first + i, count - i, i_h, H, G, K, R, CHANNEL, BK, DELTA)
        b_v = load_values(ring, slot, first + i, count - i, i_h, o_v, V, R, BV)
        chunk = load_chunk(ring, slot, first + i, count - i, i_h, 0, H, G, K, R, CHANNEL, BK, DELTA)
        b_w = 0.0
        if DELTA:
            b_w = ask(tl.zeros([BV, CHUNK], tl.float32), b_s, chunk, CHANNEL, 3)
        b_s = fold_in(b_s, values(b_v, b_w, gathered, DELTA), chunk, gathered, CHANNEL)
        i += CHUNK
    return b_s
