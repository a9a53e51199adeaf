"""Gated DeltaNet on a GPU: gates, carry and fold in Triton. Equations as in math.md, layout as in mamba2/kernel.py.

The carry is the one by products: scores, one product with the ring's `back`, one with its keys; no walk, no solve.
"""

import triton
import triton.language as tl

from replayssm.kernels import channels, is_seen, load_row, product, sigmoid, softplus


@triton.jit
def gates(inputs, weights, i_b, i, i_h, m_h):
    """g and w = beta of heads i_h, fp32."""
    b_w = tl.load(inputs.w.data + i_b.to(tl.int64) * inputs.w.row + i * inputs.w.token + i_h, mask=m_h, other=0.0)
    b_g = tl.load(inputs.g.data + i_b.to(tl.int64) * inputs.g.row + i * inputs.g.token + i_h, mask=m_h, other=0.0)
    b_w, b_g = b_w.to(tl.float32), b_g.to(tl.float32)
    if weights.conv_weight is not None:
        b_w = weights.scale * sigmoid(b_w)
        rate = tl.exp(tl.load(weights.A_log + i_h, mask=m_h, other=0.0).to(tl.float32))
        b_g = -rate * softplus(b_g + tl.load(weights.dt_bias + i_h, mask=m_h, other=0.0).to(tl.float32))
    return b_g, b_w


@triton.jit
def corrected(b_b, b_back):
    """b (I + back) for heads and records [BJ, BR], back [BJ, BR, BR]."""
    return b_b + tl.sum(b_b[:, :, None] * b_back, 1)


@triton.jit
def carry(
    inputs, ring, weights, table, parent, kin, t, c, i_b, i_g, i_j, B,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """c = b (I + back) and t = exp(P_n) q - sum_j c_j exp(P_j) k_j; c_0 = 1. The own key's c, negated, is a row of back.

    For heads as in mamba2; t [B, H, T, K].
    """
    J: tl.constexpr = H // G
    C: tl.constexpr = 2 * G * K + H * V
    slot, first, before, length, end = load_row(table, i_b, B)
    folded = tl.load(table + 4 * B + i_b)
    o_j, o_k, o_r = i_j * BJ + tl.arange(0, BJ), tl.arange(0, BK), tl.arange(0, BR)
    i_h = i_g * J + o_j
    m_j, m_k = o_j < J, o_k < K
    p_k = ring.k.data + slot * ring.k.slot + i_g * R * K + o_k
    p_norm = ring.norm.data + slot * ring.norm.slot + i_g * R
    p_g = ring.g.data + slot * ring.g.slot + i_h * R
    p_w = ring.w.data + slot * ring.w.slot + i_h * R
    p_back = ring.back.data + slot * ring.back.slot + i_h * R * R
    # (1) the step's own records
    b_n, norm_n = tl.zeros([BK], tl.float32), 0.0
    g_n, w_n = tl.zeros([BJ], tl.float32), tl.zeros([BJ], tl.float32)
    for i in range(T):
        m = i < length
        own = (first + before + i) % R
        b_n = channels(
            inputs.k, ring.conv, weights, parent, i_b, i, slot, end, i_g * K + o_k, m_k & m, G * K, C, L, W, T
        )
        norm_n = 1 / tl.sqrt(tl.sum(b_n * b_n, 0) + 1e-6)
        g_n, w_n = gates(inputs, weights, i_b, i, i_h, m_j & m)
        tl.store(p_k + own * K, b_n.to(ring.k.data.dtype.element_ty), mask=m_k & m)
        tl.store(p_norm + own, norm_n, mask=m)
        tl.store(p_g + own, g_n, mask=m_j & m)
        tl.store(p_w + own, w_n, mask=m_j & m)
    if T > 1:
        tl.debug_barrier()
    # (2) all records but the last token's
    place = (first + o_r) % R
    m_r = o_r < before + (length - 1 if T > 1 else 0)
    b_k = tl.load(p_k[None, :] + place[:, None] * K, mask=m_r[:, None] & m_k, other=0.0)
    b_norm = tl.load(p_norm + place, mask=m_r, other=0.0)
    b_g = tl.load(p_g[:, None] + place, mask=m_j[:, None] & m_r, other=0.0)
    b_w = tl.load(p_w[:, None] + place, mask=m_j[:, None] & m_r, other=0.0)
    b_back = tl.load(
        p_back[:, None, None] + place[None, :, None] * R + place[None, None, :],
        mask=m_j[:, None, None] & (o_r < before)[None, :, None] & m_r[None, None, :], other=0.0,
    )  # fmt: skip
    newer = o_r[:, None] > o_r[None, :]
    for i in range(T):
        m = i < length
        b_q = channels(inputs.q, ring.conv, weights, parent, i_b, i, slot, end, i_g * K + o_k, m_k & m, 0, C, L, W, T)
        norm_q = 1 / tl.sqrt((tl.sum(b_q * b_q, 0) + 1e-6) * K)
        seen = is_seen(o_r, before, i, kin, i_b, T) & m_r
        own = (first + before + i) % R
        if T > 1:
            b_n = tl.load(p_k + own * K, mask=m_k & m, other=0.0).to(tl.float32)
            norm_n = tl.load(p_norm + own, mask=m, other=0.0)
            g_n, w_n = tl.load(p_g + own, mask=m_j & m, other=0.0), tl.load(p_w + own, mask=m_j & m, other=0.0)
        # (3) sums of g: behind every record and up to it, [BJ, BR]; decays
        b_path = tl.where(seen, b_g, 0.0)
        b_d = tl.exp(g_n[:, None] + tl.sum(tl.where(newer[None], b_path[:, :, None], 0.0), 1))
        b_p = tl.exp(tl.sum(tl.where(newer[None], 0.0, b_path[:, :, None]), 1))
        whole = tl.exp(g_n + tl.sum(b_path, 1))
        # (4) decayed scores of the query and of the own key, corrected
        keys = tl.where(seen[:, None], b_k.to(tl.float32), 0.0)
        s_q = tl.sum(keys * b_q, 1) * b_norm * norm_q
        s_n = tl.sum(keys * b_n, 1) * b_norm * norm_n
        weight = tl.where(seen, b_w * b_d, 0.0)
        b_row = corrected(-weight * s_n[None, :], b_back)
        b_row = tl.where(b_row == b_row, b_row, 0.0)  # never NaN, see batched.carry
        c_n = w_n * (tl.sum(b_n * b_q, 0) * norm_n * norm_q)
        b_c = corrected(weight * s_q[None, :], b_back) + c_n[:, None] * b_row
        p_c = c + ((i_b * H + i_h) * T + i) * (1 + R)
        tl.store(p_c[:, None] + 1 + o_r, b_c, mask=m_j[:, None] & (o_r < R) & (o_r != before + i))
        tl.store(p_c + 1 + before + i, c_n, mask=m_j)
        tl.store(p_c, 1.0 + 0.0 * c_n, mask=m_j)
        # of records that this step folds nothing is kept
        b_kept = tl.where(o_r < folded, 0.0, b_row)
        tl.store(p_back[:, None] + own * R + place, b_kept, mask=m_j[:, None] & (o_r < R) & m)
        if BR < R:
            tl.store(p_back + own * R + (first + R - 1) % R, tl.zeros([BJ], tl.float32), mask=m_j & m)
        if T > 1:
            b_back = tl.where((o_r == before + i)[None, :, None] & m, b_row[:, None, :], b_back)
        # (5) the carried query
        b_t = (whole[:, None] * norm_q) * b_q - (whole * c_n * norm_n)[:, None] * b_n
        keys = tl.where(seen[:, None], b_k, 0.0) if T > 1 else b_k
        b_t -= product(b_c * b_p * b_norm, keys, DOT)
        tl.store(t + ((i_b * H + i_h[:, None]) * T + i) * K + o_k, b_t, mask=m_j[:, None] & m_k)


@triton.jit
def fold(
    b_s, ring, slot, first, count, i_h, o_v, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """U = diag(w) (I + back) (V - exp(P) K S0^T), S = exp(P_n) S0 + sum_j exp(D_j) u_j k_j^T, a tile as in mamba2."""
    o_r, o_k = tl.arange(0, BR), tl.arange(0, BK)
    i_g = i_h // (H // G)
    place = (first + o_r) % R
    m_r, m_v, m_k = o_r < count, o_v < V, o_k < K
    p_g = ring.g.data + slot * ring.g.slot + i_h * R
    b_g = tl.load(p_g + place, mask=m_r, other=0.0)
    b_d = tl.cumsum(tl.load(p_g + (place + 1) % R, mask=o_r + 1 < count, other=0.0), 0, reverse=True)
    b_k = tl.load(
        ring.k.data + slot * ring.k.slot + (i_g * R + place[:, None]) * K + o_k, mask=m_r[:, None] & m_k, other=0.0
    )
    b_norm = tl.load(ring.norm.data + slot * ring.norm.slot + i_g * R + place, mask=m_r, other=0.0)
    p_v = ring.v.data + slot * ring.v.slot + (i_h * R + place[:, None]) * V + o_v
    b_v = tl.load(p_v, mask=m_r[:, None] & m_v, other=0.0).to(tl.float32)
    p_back = ring.back.data + slot * ring.back.slot + (i_h * R + place[:, None]) * R + place[None, :]
    b_back = tl.load(p_back, mask=m_r[:, None] & m_r[None, :], other=0.0)
    b_w = tl.load(ring.w.data + slot * ring.w.slot + i_h * R + place, mask=m_r, other=0.0)
    # (1) what the checkpoint does not recall yet: V - exp(P) K S0^T
    b_u = b_v - (tl.exp(tl.cumsum(b_g, 0)) * b_norm)[:, None] * product(b_k, tl.trans(b_s), DOT)
    # (2) corrected values
    b_u = b_w[:, None] * (b_u + tl.dot(b_back, b_u, input_precision=DOT))
    # (3) S = exp(P_n) S0 + (exp(D) u)^T k
    b_u = (tl.exp(b_d) * b_norm)[:, None] * b_u
    return tl.exp(tl.sum(b_g, 0)) * b_s + product(tl.trans(b_u), b_k, DOT)
