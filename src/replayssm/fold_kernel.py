"""Folding records into a state on a GPU.

A chunk of N records at once, by products on tensor cores; oldest first, with P_j the sum of g up to record j and D_j
the sum behind it:

    S = exp(P_n) S0 + sum_j exp(D_j) u_j k_j^T
    u_j = w_j v_j                                       Mamba-2
    U = X^T (V - exp(P) K S0^T)                         gdn: X = ((I + A)^-1 Diag(w))^T,
                                                        A_ij = w_i exp(D_ij) (k_j . k_i) for j before i
with D_ij the sum of g behind j up to i. (I + A)^-1 is found by substitution, once for all rows of V; where the ring
has `back`, X is (Diag(w) (I + back))^T (math.md). What the state is asked (`ask`) and what it gets (`fold_in`) is
worked out in blocks of K, so that little waits in registers. Sums of g are sums, never differences of larger ones.
Keys in bf16 stay exact. Tensor cores round towards zero after every few products: exp(P_n) S0 stays out of them, and
what blocks of K give is added outside.

With a g per key channel (kda) exp(D_ij) belongs to every product of channels, and A costs more than it saves
(docs/log.md): there a tile is walked through the records, by the recurrence itself.
"""

import triton
import triton.language as tl

from replayssm.arithmetic_kernel import add_product, expm1, parts_of
from replayssm.formats_kernel import divides

CHUNK = tl.constexpr(16)


def chunk_size(window: int, inverted: bool) -> int:
    """N for flushes of up to `window` records: 16, or all of 32 where no triangle is inverted for it."""
    return 16 if window <= 16 or inverted else 32


@triton.jit
def load_chunk(
    ring, slot, first, count, i_h, from_k,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The first `count` (at most N) records from place `first` on, zero beyond; BK key channels from `from_k` on.

    k [N, BK] as stored, 1 / |k| (1 without the delta rule), g, the successor's g, and w.
    """
    o_p, o_k = tl.arange(0, N), from_k + tl.arange(0, BK)
    place, i_g, m_p = (first + o_p) % R, i_h // (H // G), o_p < count
    m_k = m_p[:, None] if divides(BK, K) else m_p[:, None] & (o_k < K)
    b_k = tl.load(ring.k.data + slot * ring.k.slot + (i_g * R + place)[:, None] * K + o_k, mask=m_k, other=0.0)
    b_w = tl.load(ring.w.data + slot * ring.w.slot + i_h * R + place, mask=m_p, other=0.0)
    p_g = ring.g.data + slot * ring.g.slot + i_h * R
    b_g = tl.load(p_g + place, mask=m_p, other=0.0)
    b_d = tl.load(p_g + (first + o_p + 1) % R, mask=o_p + 1 < tl.minimum(count, N), other=0.0)
    norm = 1.0
    if DELTA:
        norm = tl.load(ring.norm.data + slot * ring.norm.slot + i_g * R + place, mask=m_p, other=0.0)
    return b_k, norm, b_g, b_d, b_w


@triton.jit
def load_values(
    ring, slot, first, count, i_h, o_v, V: tl.constexpr, R: tl.constexpr, BV: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """v of the same records at rows o_v: [BV, N] fp32."""
    o_p = tl.arange(0, N)
    m_v = (o_p < count)[None, :] if divides(BV, V) else (o_p < count) & (o_v < V)[:, None]
    p_v = ring.v.data + slot * ring.v.slot + i_h * (R * V) + o_v[:, None]
    return tl.load(p_v + (first + o_p) % R * V, mask=m_v, other=0.0).to(tl.float32)


@triton.jit
def gather(
    ring, slot, first, count, i_h,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """What every tile of a head needs of a chunk: X [N, N], exp(P) / |k|, exp(D) / |k| and P_n.

    X is there where the ring has `back`, else it comes from keys, BK channels at a time. Mamba-2: no X, exp(D) w
    instead.
    """
    _, norm, b_g, b_d, b_w = load_chunk(ring, slot, first, count, i_h, 0, H, G, K, R, BK, DELTA, N)
    outward = tl.exp(tl.cumsum(b_d, 0, reverse=True))
    if DELTA:
        o_p = tl.arange(0, N)
        before = o_p[:, None] < o_p
        if ring.back is not None:
            place = (first + o_p) % R
            p_back = ring.back.data + slot * ring.back.slot + i_h * (R * R) + place * R + place[:, None]
            b_x = tl.load(p_back, mask=before & (o_p < count), other=0.0)
            b_x = tl.where(o_p[:, None] == o_p, 1.0, b_x) * b_w
        else:
            b_x = tl.zeros([N, N], tl.float32)  # A^T
            for n in range((K + BK - 1) // BK):
                b_k = load_chunk(ring, slot, first, count, i_h, n * BK, H, G, K, R, BK, DELTA, N)[0]
                PARTS: tl.constexpr = parts_of(b_k.dtype)
                b_x += add_product(tl.zeros([N, N], tl.float32), b_k, tl.trans(b_k), PARTS, PARTS)
            b_x *= norm[:, None] * (norm * b_w) * tl.exp(tl.cumsum(tl.where(before, b_g, 0.0), 1))
            b_x = inverse(tl.where(before, b_x, 0.0)) * b_w[:, None]
        return b_x, tl.exp(tl.cumsum(b_g, 0)) * norm, outward * norm, tl.sum(b_g, 0)
    else:
        return 0.0, 1.0, outward * b_w, tl.sum(b_g, 0)


@triton.jit
def inverse(b_a):
    """(I + A)^-1 of an upper triangle A [N, N] without diagonal, by substitution: stable, as walking is."""
    o_p = tl.arange(0, b_a.shape[0])
    b_x = tl.where(o_p[:, None] == o_p, 1.0, 0.0)
    for j in range(b_a.shape[0] - 1):
        column = tl.sum(tl.where(o_p == j, b_x, 0.0), 1)
        b_x -= column[:, None] * tl.sum(tl.where(o_p[:, None] == j, b_a, 0.0), 0)
    return b_x


@triton.jit
def ask(b_w, b_s, chunk, PARTS: tl.constexpr):
    """b_w [BV, N] + S0 K^T for a block of K: b_s [BV, BK], of PARTS bf16 numbers each."""
    b_k, _, _, _, _ = chunk
    return b_w + add_product(tl.zeros(b_w.shape, tl.float32), b_s, tl.trans(b_k), PARTS, parts_of(b_k.dtype))


@triton.jit
def values(b_v, b_w, gathered, DELTA: tl.constexpr):
    """exp(D) U^T [BV, N], what the records add, from their values and what the state was asked."""
    b_x, inward, outward, _ = gathered
    if DELTA:
        b_v = add_product(tl.zeros(b_v.shape, tl.float32), b_v - b_w * inward, b_x, 3, 3)
    return b_v * outward


@triton.jit
def fold_in(b_s, b_u, chunk, gathered):
    """exp(P_n) S0 + U^T K for a block of K: b_s [BV, BK]."""
    b_k, _, _, _, _ = chunk
    _, _, _, total = gathered
    b_n = add_product(tl.zeros(b_s.shape, tl.float32), b_u, b_k, 3, parts_of(b_k.dtype))
    return b_s + expm1(total) * b_s + b_n


@triton.jit
def load_some(
    ring, slot, first, count, i_h, o_v, o_k,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """kda: k [BK], 1 / |k|, v [BV], g [BK] and w of N records from place `first` on, zero beyond `count`.

    As stored, so that none is waited for.
    """
    records = ()
    for d in tl.static_range(N):
        place, more = (first + d) % R, d < count
        i_g, i_r = i_h // (H // G) * R + place, i_h * R + place
        m_k = (o_k < K) & more
        b_k = tl.load(ring.k.data + slot * ring.k.slot + i_g * K + o_k, mask=m_k, other=0.0)
        norm = tl.load(ring.norm.data + slot * ring.norm.slot + i_g, mask=more, other=0.0)
        b_v = tl.load(ring.v.data + slot * ring.v.slot + i_r * V + o_v, mask=(o_v < V) & more, other=0.0)
        b_g = tl.load(ring.g.data + slot * ring.g.slot + i_r * K + o_k, mask=m_k, other=0.0)
        beta = tl.load(ring.w.data + slot * ring.w.slot + i_r, mask=more, other=0.0)
        records = records + ((b_k, norm, b_v, b_g, beta),)  # type: ignore[assignment]
    return records


@triton.jit
def fold_tile(
    b_s, ring, slot, first, count, i_h, o_v,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr, AHEAD: tl.constexpr = 1,
):  # fmt: skip
    """The tile b_s [BV, BK] after `count` records from place `first`: a chunk after the other, or (kda) one by one.

    kda: AHEAD records are on their way while as many are folded. A record of zeros changes nothing.
    """
    i = 0
    if CHANNEL:
        o_k = tl.arange(0, BK)
        records = load_some(ring, slot, first, count, i_h, o_v, o_k, H, G, V, K, R, AHEAD)
        while i < count:
            i += AHEAD
            following = load_some(ring, slot, first + i, count - i, i_h, o_v, o_k, H, G, V, K, R, AHEAD)
            for d in tl.static_range(AHEAD):
                b_k, norm, b_v, b_g, beta = records[d]
                # S = S Diag(a), then S + w (v - S k) k^T
                b_s += expm1(b_g)[None, :] * b_s
                b_x = b_k.to(tl.float32) * norm
                b_s += (beta * (b_v.to(tl.float32) - tl.sum(b_s * b_x[None, :], 1)))[:, None] * b_x
            records = following
    else:
        while i < count:
            gathered = gather(ring, slot, first + i, count - i, i_h, H, G, K, R, BK, DELTA, CHUNK)
            b_v = load_values(ring, slot, first + i, count - i, i_h, o_v, V, R, BV, CHUNK)
            chunk = load_chunk(ring, slot, first + i, count - i, i_h, 0, H, G, K, R, BK, DELTA, CHUNK)
            b_w = 0.0
            if DELTA:
                b_w = ask(tl.zeros([BV, CHUNK], tl.float32), b_s, chunk, 3)
            b_s = fold_in(b_s, values(b_v, b_w, gathered, DELTA), chunk, gathered)
            i += CHUNK
    return b_s
