"""Mamba-2 on a GPU: gates, carry and fold in Triton. Equations and letters as in reference.py and math.md.

Records are taken oldest first (place = (start + age) mod R); o_r is a record's age. Decays are sums of their own from a
record's successor on, so that no large sums are subtracted.
"""

import triton
import triton.language as tl

from replayssm.kernels import append, channels, expm1, is_seen, keep, load_row, softplus


@triton.jit
def gates(inputs, weights, row, i, i_h, m_h):
    """g and w = dt of heads i_h, fp32."""
    b_w = tl.load(inputs.w.data + row * inputs.w.row + i * inputs.w.token + i_h, mask=m_h, other=0.0)
    b_w = b_w.to(tl.float32)
    if weights.conv_weight is None:
        b_g = tl.load(inputs.g.data + row * inputs.g.row + i * inputs.g.token + i_h, mask=m_h, other=0.0)
    else:
        if weights.dt_bias is not None:
            b_w += tl.load(weights.dt_bias + i_h, mask=m_h, other=0.0).to(tl.float32)
        b_w = softplus(b_w)
        b_w = tl.where(b_w < weights.low, weights.low, tl.where(b_w > weights.high, weights.high, b_w))
        b_g = -tl.exp(tl.load(weights.A_log + i_h, mask=m_h, other=0.0).to(tl.float32)) * b_w
    return b_g, b_w


@triton.jit
def carry(
    inputs, ring, weights, table, parent, kin, t, c, i_b, i_g, i_j, from_c, count, B,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, BC: tl.constexpr,
    CHANNEL: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """The step's records are appended; t = q, c_0 = exp(P_n) and c_j = w_j exp(D_j) (k_j . q).

    For row i_b, key group i_g and BJ of its heads, the i_j-th such part, and for the `count` channels of v
    (at most BC) from `from_c` on. Other arguments as in kernels.carry_kernel: t [B, G, T, K].

    A single token's record is stored last: no load has to wait for it.
    """
    J: tl.constexpr = H // G
    C: tl.constexpr = 2 * G * K + H * V
    K_FIRST: tl.constexpr = H * V
    Q_FIRST: tl.constexpr = H * V + G * K
    slot, first, before, length, end, row = load_row(table, i_b, B)
    o_j, o_k, o_r = i_j * BJ + tl.arange(0, BJ), tl.arange(0, BK), tl.arange(0, BR)
    o_x, o_c = i_g * K + o_k, from_c + tl.arange(0, BC)
    i_h = i_g * J + o_j
    m_j, m_k, m_c = o_j < J, o_k < K, tl.arange(0, BC) < count
    p_k = ring.k.data + slot * ring.k.slot + i_g * R * K + o_k
    p_g = ring.g.data + slot * ring.g.slot + i_h * R
    p_w = ring.w.data + slot * ring.w.slot + i_h * R
    # (1) several tokens' own records
    if T > 1:
        for i in range(T):
            m, own = i < length, (first + before + i) % R
            b_n, b_xk = channels(
                inputs.k, ring.conv, weights, parent, row, i, slot, end, o_x, m_k & m, K_FIRST, C, L, W, T
            )
            b_v, b_xv = channels(inputs.v, ring.conv, weights, parent, row, i, slot, end, o_c, m_c & m, 0, C, L, W, T)
            g_n, w_n = GATES(inputs, weights, row, i, i_h, m_j & m)
            append(
                ring, weights, slot, end, i, own, i_g, o_k, o_c, b_n, b_xk, b_v, b_xv, m_k & m, m_c & m,
                K_FIRST, 0, C, L, V, K, R,
            )  # fmt: skip
            tl.store(p_g + own, g_n, mask=m_j & m)
            tl.store(p_w + own, w_n, mask=m_j & m)
        tl.debug_barrier()
    # (2) all records but the last token's
    place = (first + o_r) % R
    m_r = o_r < before + (length - 1 if T > 1 else 0)
    b_k = tl.load(p_k[None, :] + place[:, None] * K, mask=m_r[:, None] & m_k, other=0.0)
    b_w = tl.load(p_w[:, None] + place, mask=m_j[:, None] & m_r, other=0.0)
    for i in range(T):
        m, own = i < length, (first + before + i) % R
        b_q, b_xq = channels(inputs.q, ring.conv, weights, parent, row, i, slot, end, o_x, m_k & m, Q_FIRST, C, L, W, T)
        seen = is_seen(o_r, before, i, kin, row, T) & m_r
        seen_next = is_seen(o_r + 1, before, i, kin, row, T) & (o_r + 1 < before + length)
        b_g = tl.load(p_g[:, None] + place, mask=m_j[:, None] & seen, other=0.0)
        b_d = tl.load(p_g[:, None] + (place + 1) % R, mask=m_j[:, None] & seen_next, other=0.0)
        if T > 1:
            b_n = tl.load(p_k + own * K, mask=m_k & m, other=0.0).to(tl.float32)
            g_n, w_n = tl.load(p_g + own, mask=m_j & m, other=0.0), tl.load(p_w + own, mask=m_j & m, other=0.0)
        else:
            b_n, b_xk = channels(inputs.k, ring.conv, weights, parent, row, i, slot, end, o_x, m_k, K_FIRST, C, L, W, T)
            b_v, b_xv = channels(inputs.v, ring.conv, weights, parent, row, i, slot, end, o_c, m_c, 0, C, L, W, T)
            g_n, w_n = GATES(inputs, weights, row, i, i_h, m_j)
        # (3) sums of g behind every record, [BJ, BR]
        b_d = tl.cumsum(b_d, 1, reverse=True) + g_n[:, None]
        # (4) c_j = w_j exp(D_j) (k_j . q), c_0 = exp(P_n)
        score = tl.sum(tl.where(seen[:, None], b_k.to(tl.float32) * b_q, 0.0), 1)
        b_c = tl.where(seen, b_w * tl.exp(b_d) * score[None, :], 0.0)
        p_c = c + ((row * H + i_h) * T + i) * (1 + R)
        tl.store(p_c[:, None] + 1 + o_r, b_c, mask=m_j[:, None] & (o_r < R) & (o_r != before + i))
        tl.store(p_c + 1 + before + i, w_n * tl.sum(b_n * b_q, 0), mask=m_j)
        tl.store(p_c, tl.exp(tl.sum(b_g, 1) + g_n), mask=m_j)
        tl.store(t + ((row * G + i_g) * T + i) * K + o_k, b_q, mask=m_k)
        keep(ring.conv, weights, slot, end, i, o_x, b_xq, m_k & m, Q_FIRST, C, L)
        if T == 1:
            append(
                ring, weights, slot, end, i, own, i_g, o_k, o_c, b_n, b_xk, b_v, b_xv, m_k, m_c,
                K_FIRST, 0, C, L, V, K, R,
            )  # fmt: skip
            tl.store(p_g + own, g_n, mask=m_j)
            tl.store(p_w + own, w_n, mask=m_j)


@triton.jit
def step(b_s, b_k, b_v, b_g, weight):
    """S = a S + w v k^T for a tile [BV, BK]."""
    return b_s + expm1(b_g) * b_s + (weight * b_v)[:, None] * b_k
