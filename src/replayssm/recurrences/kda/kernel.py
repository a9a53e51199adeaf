"""Kimi Delta Attention on a GPU: carry and fold in Triton. As gdn/kernel.py with decays [R, K] per head."""

import triton
import triton.language as tl

from replayssm.kernels import load_update, store_planes


@triton.jit
def carry_kernel(
    q, k, g, w, norm, back, t, c, slots, start, committed, sees,
    k_slot, g_slot, w_slot, norm_slot, back_slot,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """c = b (I + back) and t = exp(P_n) q - sum_j c_j exp(P_j) k_j, one program per row and key group.

    Arguments as in mamba2; besides, norm [S, G, R] is read and back [S, H, R, R] is read and gets the step's new rows.
    """
    i_b, i_g = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + i_b).to(tl.int64)
    o_r, o_k = tl.arange(0, BR), tl.arange(0, BK)
    place = (tl.load(start + i_b) + o_r) % R
    next_place = (place + 1) % R
    before = tl.load(committed + i_b)
    m_r, m_k = (o_r < R) & (o_r < before + T), o_k < K
    p_k = k + slot * k_slot + (i_g * R + place[:, None]) * K + o_k
    b_k = tl.load(p_k, mask=m_r[:, None] & m_k, other=0.0).to(tl.float32)
    b_k *= tl.load(norm + slot * norm_slot + i_g * R + place, mask=m_r, other=0.0)[:, None]
    for i in range(T):
        b_q = tl.load(q + ((i_b * T + i) * G + i_g) * K + o_k, mask=m_k, other=0.0)
        m_see = (tl.load(sees + (i_b * T + i) * R + place, mask=m_r, other=0) != 0) & m_r
        m_next = (o_r + 1 < R) & (tl.load(sees + (i_b * T + i) * R + next_place, mask=o_r + 1 < R, other=0) != 0)
        is_own = o_r == before + i
        m_old = m_see & (o_r != before + i)
        b_own = tl.sum(tl.where(is_own[:, None], b_k, 0.0), 0)
        for j in range(H // G):
            i_h = i_g * (H // G) + j
            p_g = g + slot * g_slot + i_h * R * K + o_k
            b_g = tl.load(p_g + place[:, None] * K, mask=m_see[:, None] & m_k, other=0.0)
            # (1) decay per channel: D_j from record j to the token, P_j from the checkpoint to record j
            b_d = tl.load(p_g + next_place[:, None] * K, mask=m_next[:, None] & m_k, other=0.0)
            b_d = tl.exp(tl.cumsum(b_d, 0, reverse=True)) * b_k
            # (2) decayed scores of all records, with the query and with the step's own key
            b_w = tl.load(w + slot * w_slot + i_h * R + place, mask=m_see, other=0.0)
            b_b = tl.where(m_see, b_w * tl.sum(b_d * b_q, 1), 0.0)
            b_row = tl.where(m_old, -b_w * tl.sum(b_d * b_own, 1), 0.0)
            # (3) the new row of back, and c = b (I + back); record l in rows, j in columns
            p_back = back + slot * back_slot + i_h * R * R
            m_back = m_old[:, None] & m_r[None, :]
            b_back = tl.load(p_back + place[:, None] * R + place[None, :], mask=m_back, other=0.0)
            b_row += tl.sum(b_row[:, None] * b_back, 0)
            b_c = b_b + tl.sum(b_b[:, None] * b_back, 0) + tl.sum(tl.where(is_own, b_b, 0.0), 0) * b_row
            b_row = tl.where(b_row == b_row, b_row, 0.0)  # never NaN, see batched.carry
            own_place = (tl.load(start + i_b) + before + i) % R
            tl.store(p_back + own_place * R + place, b_row, mask=o_r < R)
            tl.store(c + ((i_b * H + i_h) * T + i) * R + place, b_c, mask=o_r < R)
            # (4) t = exp(P_n) q - sum_j c_j exp(P_j) k_j
            b_taken = tl.sum(b_c[:, None] * tl.exp(tl.cumsum(b_g, 0)) * b_k, 0)
            b_t = tl.exp(tl.sum(b_g, 0)) * b_q - b_taken
            tl.store(t + ((i_b * H + i_h) * T + i) * K + o_k, b_t, mask=m_k)
        tl.debug_barrier()  # the next token reads this one's row of back


@triton.jit
def fold_kernel(
    high, low, out_high, out_low, k, v, g, w, norm, back, slots, start, counts,
    plane_slot, out_slot, k_slot, v_slot, g_slot, w_slot, norm_slot, back_slot,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, OUT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """U and S as in gdn, decays inside the products over K. Arguments as in mamba2."""
    i_n, i_h, i_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + i_n).to(tl.int64)
    i_g = i_h // (H // G)
    o_r, o_v, o_k = tl.arange(0, BR), i_v * BV + tl.arange(0, BV), tl.arange(0, BK)
    place = (tl.load(start + i_n) + o_r) % R
    count = tl.load(counts + i_n)
    m_r, m_v, m_k = o_r < count, o_v < V, o_k < K
    p_g = g + slot * g_slot + i_h * R * K + o_k
    b_g = tl.load(p_g + place[:, None] * K, mask=m_r[:, None] & m_k, other=0.0)
    b_d = tl.load(p_g + (place[:, None] + 1) % R * K, mask=(o_r[:, None] + 1 < count) & m_k, other=0.0)
    b_d = tl.cumsum(b_d, 0, reverse=True)
    p_k = k + slot * k_slot + (i_g * R + place[:, None]) * K + o_k
    b_k = tl.load(p_k, mask=m_r[:, None] & m_k, other=0.0).to(tl.float32)
    b_k *= tl.load(norm + slot * norm_slot + i_g * R + place, mask=m_r, other=0.0)[:, None]
    p_v = v + slot * v_slot + (i_h * R + place[:, None]) * V + o_v
    b_v = tl.load(p_v, mask=m_r[:, None] & m_v, other=0.0).to(tl.float32)
    p_back = back + slot * back_slot + (i_h * R + place[:, None]) * R + place[None, :]
    b_back = tl.load(p_back, mask=m_r[:, None] & m_r[None, :], other=0.0)
    b_w = tl.load(w + slot * w_slot + i_h * R + place, mask=m_r, other=0.0)
    at = (i_h * V + o_v[:, None]) * K + o_k
    m_s = m_v[:, None] & m_k
    b_s = load_update(high + slot * plane_slot + at, low + slot * plane_slot + at, m_s, FORMAT)
    # (1) what the checkpoint does not recall yet: V - exp(P) K S0^T
    b_u = b_v - tl.dot(tl.exp(tl.cumsum(b_g, 0)) * b_k, tl.trans(b_s), input_precision=DOT)
    # (2) corrected values
    b_u = b_w[:, None] * (b_u + tl.dot(b_back, b_u, input_precision=DOT))
    # (3) S = S0 Diag(exp(P_n)) + u^T (exp(D) k)
    b_s = tl.exp(tl.sum(b_g, 0))[None, :] * b_s + tl.dot(tl.trans(b_u), tl.exp(b_d) * b_k, input_precision=DOT)
    out = (slot if OUT == "planes" else i_n) * out_slot
    store_planes(out_high + out + at, out_low + out + at, b_s, m_s, FORMAT if OUT == "planes" else "fp32")
