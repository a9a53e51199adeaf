"""Kimi Delta Attention on a GPU: as gdn, with a decay per key channel, so decays stand inside the products over K.

One program per row and head.
"""

import triton
import triton.language as tl

from replayssm.kernels import channels, is_seen, load_row, product, sigmoid, softplus


@triton.jit
def gates(inputs, weights, i_b, i, i_h, o_k, m_k, K: tl.constexpr):
    """g [BK] and w = beta of head i_h, fp32."""
    b_w = tl.load(inputs.w.data + i_b.to(tl.int64) * inputs.w.row + i * inputs.w.token + i_h).to(tl.float32)
    p_g = inputs.g.data + i_b.to(tl.int64) * inputs.g.row + i * inputs.g.token + i_h * K + o_k
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
def corrected(b_b, b_back):
    """b (I + back) for records [BR], back [BR, BR]."""
    return b_b + tl.sum(b_b[:, None] * b_back, 0)


@triton.jit
def carry(
    inputs, ring, weights, table, parent, kin, t, c, i_b, i_g, i_j, B,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """c and t as in gdn, for one head: BJ is 1."""
    C: tl.constexpr = 2 * G * K + H * V
    slot, first, before, length, end = load_row(table, i_b, B)
    folded = tl.load(table + 4 * B + i_b)
    i_h = i_g * (H // G) + i_j
    o_k, o_r = tl.arange(0, BK), tl.arange(0, BR)
    m_k = o_k < K
    p_k = ring.k.data + slot * ring.k.slot + i_g * R * K + o_k
    p_norm = ring.norm.data + slot * ring.norm.slot + i_g * R
    p_g = ring.g.data + slot * ring.g.slot + i_h * R * K + o_k
    p_w = ring.w.data + slot * ring.w.slot + i_h * R
    p_back = ring.back.data + slot * ring.back.slot + i_h * R * R
    # (1) the step's own records
    b_n, norm_n, g_n, w_n = tl.zeros([BK], tl.float32), 0.0, tl.zeros([BK], tl.float32), 0.0
    for i in range(T):
        m = i < length
        own = (first + before + i) % R
        b_n = channels(
            inputs.k, ring.conv, weights, parent, i_b, i, slot, end, i_g * K + o_k, m_k & m, G * K, C, L, W, T
        )
        norm_n = 1 / tl.sqrt(tl.sum(b_n * b_n, 0) + 1e-6)
        g_n, w_n = gates(inputs, weights, i_b, i, i_h, o_k, m_k, K)
        tl.store(p_k + own * K, b_n.to(ring.k.data.dtype.element_ty), mask=m_k & m)
        tl.store(p_norm + own, norm_n, mask=m)
        tl.store(p_g + own * K, g_n, mask=m_k & m)
        tl.store(p_w + own, w_n, mask=m)
    if T > 1:
        tl.debug_barrier()
    # (2) all records but the last token's
    place = (first + o_r) % R
    m_r = o_r < before + (length - 1 if T > 1 else 0)
    b_norm = tl.load(p_norm + place, mask=m_r, other=0.0)
    b_k = tl.load(p_k[None, :] + place[:, None] * K, mask=m_r[:, None] & m_k, other=0.0)
    b_w = tl.load(p_w + place, mask=m_r, other=0.0)
    m_back = (o_r < before)[:, None] & m_r
    b_back = tl.load(p_back + place[:, None] * R + place[None, :], mask=m_back, other=0.0)
    for i in range(T):
        m = i < length
        b_q = channels(inputs.q, ring.conv, weights, parent, i_b, i, slot, end, i_g * K + o_k, m_k & m, 0, C, L, W, T)
        b_q *= 1 / tl.sqrt((tl.sum(b_q * b_q, 0) + 1e-6) * K)
        seen = is_seen(o_r, before, i, kin, i_b, T) & m_r
        seen_next = is_seen(o_r + 1, before, i, kin, i_b, T) & (o_r + 1 < before + length)
        own = (first + before + i) % R
        if T > 1:
            b_n = tl.load(p_k + own * K, mask=m_k & m, other=0.0).to(tl.float32)
            norm_n = tl.load(p_norm + own, mask=m, other=0.0)
            g_n, w_n = tl.load(p_g + own * K, mask=m_k & m, other=0.0), tl.load(p_w + own, mask=m, other=0.0)
        b_own = b_n * norm_n
        keys = tl.where(seen[:, None], b_k.to(tl.float32) * b_norm[:, None], 0.0)
        # (3) keys decayed to the token, [BR, BK]: sums of g behind every record
        b_g = tl.load(p_g[None, :] + ((place + 1) % R)[:, None] * K, mask=seen_next[:, None] & m_k, other=0.0)
        b_d = keys * tl.exp(tl.cumsum(b_g, 0, reverse=True) + g_n[None, :])
        # (4) scores of the query and of the own key, corrected
        weight = tl.where(seen, b_w, 0.0)
        b_row = corrected(-weight * tl.sum(b_d * b_own, 1), b_back)
        b_row = tl.where(b_row == b_row, b_row, 0.0)  # never NaN, see batched.carry
        c_n = w_n * tl.sum(b_own * b_q, 0)
        b_c = corrected(weight * tl.sum(b_d * b_q, 1), b_back) + c_n * b_row
        p_c = c + ((i_b * H + i_h) * T + i) * (1 + R)
        tl.store(p_c + 1 + o_r, b_c, mask=(o_r < R) & (o_r != before + i))
        tl.store(p_c + 1 + before + i, c_n)
        tl.store(p_c, 1.0)
        # of records that this step folds nothing is kept
        tl.store(p_back + own * R + place, tl.where(o_r < folded, 0.0, b_row), mask=(o_r < R) & m)
        if BR < R:
            tl.store(p_back + own * R + (first + R - 1) % R, 0.0, mask=m)
        if T > 1:
            b_back = tl.where((o_r == before + i)[:, None] & m, b_row[None, :], b_back)
        # (5) the carried query: sums of g up to every record
        b_g = tl.load(p_g[None, :] + place[:, None] * K, mask=seen[:, None] & m_k, other=0.0)
        b_t = tl.exp(tl.sum(b_g, 0) + g_n) * (b_q - c_n * b_own)
        b_t -= tl.sum(b_c[:, None] * keys * tl.exp(tl.cumsum(b_g, 0)), 0)
        tl.store(t + ((i_b * H + i_h) * T + i) * K + o_k, b_t, mask=m_k)


@triton.jit
def fold(
    b_s, ring, slot, first, count, i_h, o_v, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """U and S as in gdn, decays inside the products over K; a tile as in mamba2."""
    o_r, o_k = tl.arange(0, BR), tl.arange(0, BK)
    i_g = i_h // (H // G)
    place = (first + o_r) % R
    m_r, m_v, m_k = o_r < count, o_v < V, o_k < K
    p_g = ring.g.data + slot * ring.g.slot + i_h * R * K + o_k
    b_g = tl.load(p_g + place[:, None] * K, mask=m_r[:, None] & m_k, other=0.0)
    b_d = tl.load(p_g + (place[:, None] + 1) % R * K, mask=(o_r[:, None] + 1 < count) & m_k, other=0.0)
    b_d = tl.cumsum(b_d, 0, reverse=True)
    p_k = ring.k.data + slot * ring.k.slot + (i_g * R + place[:, None]) * K + o_k
    b_k = tl.load(p_k, mask=m_r[:, None] & m_k, other=0.0).to(tl.float32)
    b_k *= tl.load(ring.norm.data + slot * ring.norm.slot + i_g * R + place, mask=m_r, other=0.0)[:, None]
    p_v = ring.v.data + slot * ring.v.slot + (i_h * R + place[:, None]) * V + o_v
    b_v = tl.load(p_v, mask=m_r[:, None] & m_v, other=0.0).to(tl.float32)
    p_back = ring.back.data + slot * ring.back.slot + (i_h * R + place[:, None]) * R + place[None, :]
    b_back = tl.load(p_back, mask=m_r[:, None] & m_r[None, :], other=0.0)
    b_w = tl.load(ring.w.data + slot * ring.w.slot + i_h * R + place, mask=m_r, other=0.0)
    # (1) what the checkpoint does not recall yet: V - exp(P) K S0^T
    b_u = b_v - tl.dot(tl.exp(tl.cumsum(b_g, 0)) * b_k, tl.trans(b_s), input_precision=DOT)
    # (2) corrected values
    b_u = b_w[:, None] * (b_u + tl.dot(b_back, b_u, input_precision=DOT))
    # (3) S = S0 Diag(exp(P_n)) + u^T (exp(D) k)
    return tl.exp(tl.sum(b_g, 0))[None, :] * b_s + product(tl.trans(b_u), tl.exp(b_d) * b_k, DOT)
