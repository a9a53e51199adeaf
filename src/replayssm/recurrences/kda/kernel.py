"""Kimi Delta Attention on a GPU: gdn's walk with a decay per key channel, for several tokens as well."""

import triton
import triton.language as tl

from replayssm.arithmetic_kernel import sigmoid, softplus, store_parts
from replayssm.fold_kernel import pass_by
from replayssm.recurrences.gdn.kernel import carry, carry_alone, load_records
from replayssm.step_kernel import append_tokens, load_row

__all__ = ["carry", "carry_alone", "carry_tokens", "gates"]


@triton.jit
def gates(inputs, weights, row, i, i_h, o_k, m_k, K: tl.constexpr):
    """g [BK] and w = beta of head i_h, fp32."""
    b_w = tl.load(inputs.w.data + row * inputs.w.row + i * inputs.w.token + i_h).to(tl.float32)
    p_g = inputs.g.data + row * inputs.g.row + i * inputs.g.token + i_h * K + o_k
    b_g = tl.load(p_g, mask=m_k, other=0.0).to(tl.float32)
    if weights.conv_weight is not None:
        b_w = weights.scale * sigmoid(b_w)
        rate = tl.exp(tl.load(weights.A_log + i_h).to(tl.float32))
        b_g += tl.load(weights.dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        if weights.low is None:
            b_g = -rate * softplus(b_g)
        else:
            b_g = weights.low * sigmoid(rate * b_g)
    return b_g, b_w


@triton.jit
def carry_tokens(
    inputs, ring, weights, table, parent, kin, q, t, c, ends, i_b, i_g, i_j, from_c, count, B,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BJ: tl.constexpr, BC: tl.constexpr, CHANNEL: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """carry of several tokens at once, of BJ heads one after the other: all queries [BT, BK] walk together.

    N records are on their way at a time. A query passes by the records of tokens that it does not see.
    """
    J: tl.constexpr = H // G
    N: tl.constexpr = 4 if BT <= 8 else 2  # more need more registers than there are
    slot, first, before, length, end, row = load_row(table, i_b, B)
    o_k, o_t = tl.arange(0, BK), tl.arange(0, BT)
    i_t, m_k = tl.minimum(o_t, T - 1), o_k < K
    m_x = m_k[None, :] & (o_t < T)[:, None]
    p_k = ring.k.data + slot * ring.k.slot + i_g * R * K + o_k
    p_norm = ring.norm.data + slot * ring.norm.slot + i_g * R
    # (1) the tokens' own records
    append_tokens(
        inputs, ring, weights, parent, q, row, slot, end, first + before, length, i_g, from_c, count,
        T, H, G, V, K, R, L, W, BK, BC, 0, G * K, 2 * G * K, True,
    )  # fmt: skip
    i_h = i_g * J + i_j * BJ
    behind = i_g * J + tl.minimum(i_j * BJ + BJ, J)
    while i_h < behind:
        p_g = ring.g.data + slot * ring.g.slot + i_h * R * K + o_k
        p_w = ring.w.data + slot * ring.w.slot + i_h * R
        for i in range(T):  # all at once need more registers than there are
            b_g, beta = GATES(inputs, weights, row, i, i_h, o_k, m_k, K)
            place = (first + before + i) % R
            tl.store(p_g + place * K, b_g, mask=m_k & (i < length))
            tl.store(p_w + place, beta, mask=i < length)
        tl.debug_barrier()  # the records are in memory, for other threads of this program
        # (2) all records, the newest first: the tokens' own, then those before them
        p_c = c + (row * H + i_h) * (T * (1 + R)) + o_t * (1 + R)
        tl.store(p_c, tl.full([BT], 1.0, tl.float32), mask=o_t < T)
        b_t = tl.load(q + ((row * G + i_g) * T + o_t[:, None]) * K + o_k, mask=m_x, other=0.0).to(tl.float32)
        b_t *= (1 / tl.sqrt((tl.sum(b_t * b_t, 1) + 1e-6) * K))[:, None]
        age = length - 1
        while age >= 0:
            records = load_records(p_k, p_norm, p_g, p_w, first + before, age, 0, m_k, m_k, K, R, K, 1, N)
            for d in tl.static_range(N):
                i = tl.maximum(age - d, 0)
                if kin is not None:
                    seen = tl.load(kin + (row * T + i_t) * T + i) != 0
                else:
                    seen = o_t >= i
                seen &= age >= d
                key, norm, g, w = records[d]
                new_t, b_c = pass_by(b_t, key.to(tl.float32) * norm, g[0], w[0])
                b_t = tl.where(seen[:, None], new_t, b_t)
                tl.store(p_c + 1 + before + age - d, tl.where(seen, b_c, 0.0), mask=(o_t < T) & (age >= d))
            age -= N
        age = before - 1
        while age >= 0:
            records = load_records(p_k, p_norm, p_g, p_w, first, age, 0, m_k, m_k, K, R, K, 1, N)
            for d in tl.static_range(N):
                key, norm, g, w = records[d]
                b_t, b_c = pass_by(b_t, key.to(tl.float32) * norm, g[0], w[0])
                tl.store(p_c + 1 + age - d, b_c, mask=(o_t < T) & (age >= d))
            age -= N
        p_t = t + (row * H + i_h) * (P * T * K) + o_t[:, None] * K + o_k[None, :]
        store_parts(p_t, b_t, m_x, T * K, P)
        i_h += 1
