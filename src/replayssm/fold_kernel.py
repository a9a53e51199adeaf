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

With a g per key channel (kda) exp(D_ij) belongs to every product of channels. There records are carried as queries are
(gdn/math.md): keys walk through the records before them, all at once, and what comes out is what the state is asked,

    U = Diag(w) (M V - T S0^T)          t_i and M from the walk of a_i k_i: M_ij = -c_ij, M_ii = 1

Once for a head, and left in memory for its tiles (`gather_walked`). With few rows of batch, where every tile is another
program's, each is walked through the records itself, by the recurrence (`fold_tile`).
"""

from typing import Any

import triton
import triton.language as tl

from replayssm.arithmetic_kernel import add_product, expm1, parts_of
from replayssm.formats_kernel import divides, load_part

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
    ring, slot, first, count, i_h, from_v, behind_v, V: tl.constexpr, R: tl.constexpr, BV: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """v of the same records at BV rows from from_v on, zero from behind_v (None: V) on: [BV, N] as stored."""
    o_p, o_x = tl.arange(0, N), tl.arange(0, BV)
    if behind_v is None and divides(BV, V):
        m_v = (o_p < count)[None, :]
    else:
        m_v = (o_p < count)[None, :] & (from_v + o_x < (V if behind_v is None else behind_v))[:, None]
    p_v = ring.v.data + slot * ring.v.slot + i_h * (R * V) + from_v + o_x[:, None]
    return tl.load(p_v + (first + o_p) % R * V, mask=m_v, other=0.0)


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


@triton.constexpr_function
def scratch_size(N: Any, K: Any) -> int:
    """Numbers that gather_walked leaves for a head."""
    return (2 * int(N) + 1) * int(K) + int(N) * int(N)


@triton.jit
def load_record(
    ring, slot, at, there, i_g, i_h, o_k, K: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr, DELTA: tl.constexpr
):  # fmt: skip
    """k [BK], 1 / |k| (1 without the delta rule), g, one or (CHANNEL) [BK], and w of the record at place `at` (modulo
    R), as stored; zeros if not `there`.
    """
    i_k, i_r, m_k = i_g * R + at % R, i_h * R + at % R, (o_k < K) & there
    b_k = tl.load(ring.k.data + slot * ring.k.slot + i_k * K + o_k, mask=m_k, other=0.0)
    norm = 1.0
    if DELTA:
        norm = tl.load(ring.norm.data + slot * ring.norm.slot + i_k, mask=there, other=0.0)
    p_g = ring.g.data + slot * ring.g.slot
    if CHANNEL:
        b_g = tl.load(p_g + i_r * K + o_k, mask=m_k, other=0.0)
    else:
        b_g = tl.load(p_g + i_r, mask=there, other=0.0)
    return b_k, norm, b_g, tl.load(ring.w.data + slot * ring.w.slot + i_r, mask=there, other=0.0)


@triton.jit
def pass_by(b_t, b_k, b_g, w):
    """kda: queries b_t [n, BK] carried over a record (key b_k, g b_g [BK], w, one or [n]), and its weights c [n]."""
    b_c = w * tl.sum(b_t * b_k[None, :], 1)
    return (b_t - b_c[:, None] * b_k[None, :]) * tl.exp(b_g)[None, :], b_c


@triton.jit
def gather_walked(
    ring, slot, first, count, i_h, scratch,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """kda's gather: M^T [N, N] and w [N]; in `scratch`, rows of K in fp32: T, keys times exp(D), expm1(P_n)."""
    o_p, o_k, i_g = tl.arange(0, N), tl.arange(0, BK), i_h // (H // G)
    m_k = o_k < K
    p_m = scratch + (2 * N + 1) * K
    b_t, b_d = tl.zeros([N, BK], tl.float32), tl.zeros([BK], tl.float32)  # t of records behind i, the sum of their g
    record, i = load_record(ring, slot, first + N - 1, N <= count, i_g, i_h, o_k, K, R, True, True), N - 1
    while i >= 0:
        b_k, norm, b_g, w = record
        # on its way while this one is worked on
        record = load_record(ring, slot, first + i - 1, (i > 0) & (i <= count), i_g, i_h, o_k, K, R, True, True)
        b_k = b_k.to(tl.float32) * norm
        tl.store(scratch + (N + i) * K + o_k, b_k * tl.exp(b_d), mask=m_k)
        b_t, b_c = pass_by(tl.where((o_p == i)[:, None], b_k, b_t), b_k, b_g, tl.where(o_p > i, w, 0.0))
        tl.store(p_m + i * N + o_p, tl.where(o_p > i, -b_c, tl.where(o_p == i, 1.0, 0.0)))
        b_d += b_g
        i -= 1
    tl.store(scratch + o_p[:, None] * K + o_k, b_t, mask=(o_p >= 0)[:, None] & m_k)
    tl.store(scratch + 2 * N * K + o_k, expm1(b_d), mask=m_k)
    tl.debug_barrier()  # in memory, for other threads of this program
    p_w = ring.w.data + slot * ring.w.slot + i_h * R
    w = tl.load(p_w + (first + o_p) % R, mask=o_p < count, other=0.0)
    return tl.load(p_m + o_p[:, None] * N + o_p), w


@triton.jit
def load_keys(
    ring, slot, first, count, i_h, scratch, from_k,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr,
    N: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """What the state is asked or (ADDED) what is added to it: keys or scratch's rows, [N, BK] from column from_k on."""
    if scratch is None:
        return load_chunk(ring, slot, first, count, i_h, from_k, H, G, K, R, BK, DELTA, N)[0]
    else:
        o_p, o_k = tl.arange(0, N)[:, None], from_k + tl.arange(0, BK)
        m_k = None if divides(BK, K) else (o_p >= 0) & (o_k < K)
        return load_part(scratch + ADDED * N * K + o_p * K + o_k, m_k)


@triton.jit
def growth(gathered, scratch, from_k, K: tl.constexpr, BK: tl.constexpr, N: tl.constexpr):
    """expm1(P_n), or of columns from from_k on."""
    if scratch is None:
        return expm1(gathered[3])
    else:
        o_k = from_k + tl.arange(0, BK)
        return load_part(scratch + 2 * N * K + o_k, None if divides(BK, K) else o_k < K)[None, :]


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
def ask(b_w, b_s, b_k, PARTS: tl.constexpr):
    """b_w [BV, N] + S0 K^T for a block of K: b_s [BV, BK], of PARTS bf16 numbers each."""
    return b_w + add_product(tl.zeros(b_w.shape, tl.float32), b_s, tl.trans(b_k), PARTS, parts_of(b_k.dtype))


@triton.jit
def values(b_v, b_w, gathered, DELTA: tl.constexpr):
    """exp(D) U^T [BV, N], what the records add, from their values and what the state was asked."""
    b_x, inward, outward, _ = gathered
    if DELTA:
        b_v = add_product(tl.zeros(b_v.shape, tl.float32), b_v - b_w * inward, b_x, 3, 3)
    return b_v * outward


@triton.jit
def values_walked(b_v, b_w, walked):
    """U^T [BV, N] of kda: its exp(D) is in the keys."""
    b_m, w = walked
    return (add_product(tl.zeros(b_v.shape, tl.float32), b_v, b_m, parts_of(b_v.dtype), 3) - b_w) * w


@triton.jit
def fold_in(b_s, b_u, b_k, grown):
    """exp(P_n) S0 + U^T K for a block of K: b_s [BV, BK]."""
    b_n = add_product(tl.zeros(b_s.shape, tl.float32), b_u, b_k, 3, parts_of(b_k.dtype))
    return b_s + grown * b_s + b_n


@triton.jit
def load_some(
    ring, slot, first, count, i_h, o_v, o_k,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr,
    DELTA: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """load_record and v [BV] of N records from place `first` on, zero beyond `count`.

    As stored, so that none is waited for.
    """
    records = ()
    for d in tl.static_range(N):
        place, more, i_g = (first + d) % R, d < count, i_h // (H // G)
        b_k, norm, b_g, w = load_record(ring, slot, place, more, i_g, i_h, o_k, K, R, CHANNEL, DELTA)
        p_v = ring.v.data + slot * ring.v.slot + (i_h * R + place) * V + o_v
        b_v = tl.load(p_v, mask=(o_v < V) & more, other=0.0)
        records = records + ((b_k, norm, b_v, b_g, w),)  # type: ignore[assignment]
    return records


@triton.jit
def fold_record(b_s, b_k, norm, b_v, b_g, w, CHANNEL: tl.constexpr, DELTA: tl.constexpr):
    """The tile b_s [BV, BK] after one record of load_some, by the recurrence; one of zeros changes nothing."""
    # S = S Diag(a), then S + w (v - S k) k^T
    b_s += (expm1(b_g)[None, :] if CHANNEL else expm1(b_g)) * b_s
    b_x, b_u = b_k.to(tl.float32) * norm, b_v.to(tl.float32)
    if DELTA:
        b_u -= tl.sum(b_s * b_x[None, :], 1)
    return b_s + (w * b_u)[:, None] * b_x


@triton.jit
def fold_tile(
    b_s, ring, slot, first, count, i_h, from_v,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr, AHEAD: tl.constexpr = 1,
):  # fmt: skip
    """The tile b_s [BV, BK], rows from from_v on, after `count` records from place `first`: a chunk after the other, or
    (kda) one by one.

    kda: AHEAD records are on their way while as many are folded.
    """
    i = 0
    if CHANNEL:
        o_v, o_k = from_v + tl.arange(0, BV), tl.arange(0, BK)
        records = load_some(ring, slot, first, count, i_h, o_v, o_k, H, G, V, K, R, True, DELTA, AHEAD)
        while i < count:
            i += AHEAD
            following = load_some(
                ring, slot, first + i, count - i, i_h, o_v, o_k, H, G, V, K, R, True, DELTA, AHEAD
            )  # fmt: skip
            for d in tl.static_range(AHEAD):
                b_k, norm, b_v, b_g, w = records[d]
                b_s = fold_record(b_s, b_k, norm, b_v, b_g, w, True, DELTA)
            records = following
    else:
        while i < count:
            gathered = gather(ring, slot, first + i, count - i, i_h, H, G, K, R, BK, DELTA, CHUNK)
            b_v = load_values(ring, slot, first + i, count - i, i_h, from_v, None, V, R, BV, CHUNK).to(tl.float32)
            b_k = load_chunk(ring, slot, first + i, count - i, i_h, 0, H, G, K, R, BK, DELTA, CHUNK)[0]
            b_w = 0.0
            if DELTA:
                b_w = ask(tl.zeros([BV, CHUNK], tl.float32), b_s, b_k, 3)
            b_s = fold_in(b_s, values(b_v, b_w, gathered, DELTA), b_k, expm1(gathered[3]))
            i += CHUNK
    return b_s
