"""Mamba-2 on a GPU: carry and fold in Triton. Equations and letters as in reference.py and math.md.

Records are taken oldest first (place = (start + age) mod R), padded to BR rows; o_r is a record's age. Running sums are
taken over what a token sees: P_j forwards, and D_j = P_n - P_j as a sum of its own from the newest record back, so that
no large sums are subtracted.
"""

import triton
import triton.language as tl

from replayssm.kernels import load_update, store_planes


@triton.jit
def carry_kernel(
    q, k, g, w, norm, back, t, c, slots, start, committed, sees,
    k_slot, g_slot, w_slot, norm_slot, back_slot,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    TREE: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """t = exp(P_n) q and c_j = w_j exp(D_j) (k_j . q), one program per row and BJ heads of a key group.

    | Name             | Shape        | Dtype      | Dir | Meaning                                   |
    | q                | [B, T, G, K] | fp32       | in  | queries                                   |
    | k, g, w          | ring         |            | in  | the records, the step's own among them    |
    | norm, back       |              |            | -   | not used: the delta rule's                |
    | t                | [B, H, T, K] | fp32       | out | queries for the checkpoint                |
    | c                | [B, H, T, R] | fp32       | out | weights of v, by ring place               |
    | sees             | [B, T, R]    | bool       | in  | by ring place, read for a TREE only       |
    """
    i_b = tl.program_id(0)
    J: tl.constexpr = H // G
    tiles: tl.constexpr = (J + BJ - 1) // BJ
    i_g = tl.program_id(1) // tiles
    slot = tl.load(slots + i_b).to(tl.int64)
    first, before = tl.load(start + i_b), tl.load(committed + i_b)
    o_r, o_k = tl.arange(0, BR), tl.arange(0, BK)
    o_j = tl.program_id(1) % tiles * BJ + tl.arange(0, BJ)
    i_h = i_g * J + o_j
    place = (first + o_r) % R
    next_place = (place + 1) % R
    m_r, m_k, m_j = (o_r < R) & (o_r < before + T), o_k < K, o_j < J
    p_k = k + slot * k_slot + (i_g * R + place[:, None]) * K + o_k
    b_k = tl.load(p_k, mask=m_r[:, None] & m_k, other=0.0).to(tl.float32)
    p_g, p_w = g + slot * g_slot + i_h[:, None] * R, w + slot * w_slot + i_h[:, None] * R
    for i in range(T):
        m_see = m_r & (o_r <= before + i)
        m_next = (o_r + 1 < R) & (o_r + 1 <= before + i)
        if TREE:
            m_see &= tl.load(sees + (i_b * T + i) * R + place, mask=o_r < R, other=0) != 0
            m_next &= tl.load(sees + (i_b * T + i) * R + next_place, mask=o_r < R, other=0) != 0
        b_q = tl.load(q + ((i_b * T + i) * G + i_g) * K + o_k, mask=m_k, other=0.0)
        b_g = tl.load(p_g + place, mask=m_j[:, None] & m_see, other=0.0)
        # (1) D_j: sum of g over what is seen behind record j, [BJ, BR]
        b_d = tl.cumsum(tl.load(p_g + next_place, mask=m_j[:, None] & m_next, other=0.0), 1, reverse=True)
        # (2) c_j = w_j exp(D_j) (k_j . q)
        b_w = tl.load(p_w + place, mask=m_j[:, None] & m_see, other=0.0)
        b_c = tl.where(m_see, b_w * tl.exp(b_d) * tl.sum(b_k * b_q, 1)[None, :], 0.0)
        row = (i_b * H + i_h[:, None]) * T + i
        tl.store(c + row * R + place, b_c, mask=m_j[:, None] & (o_r < R))
        # (3) t = exp(P_n) q
        tl.store(t + row * K + o_k, tl.exp(tl.sum(b_g, 1))[:, None] * b_q, mask=m_j[:, None] & m_k)


@triton.jit
def fold_kernel(
    high, low, out_high, out_low, k, v, g, w, norm, back, slots, start, counts,
    plane_slot, out_slot, k_slot, v_slot, g_slot, w_slot, norm_slot, back_slot,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, OUT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """S = exp(P_n) S0 + sum_j exp(D_j) w_j v_j k_j^T, one program per row, head and tile of V.

    | Name              | Shape           | Dir | Meaning                                             |
    | high, low         | [S, H, V, K]    | in  | planes of the checkpoint (low is high with one)     |
    | out_high, out_low | [*, H, V, K]    | out | the same planes, or fp32 states [n, H, V, K]        |
    | k, v, g, w        | ring            | in  | the records                                         |
    | counts            | [n]             | in  | how many of them                                    |
    """
    i_n, i_h, i_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + i_n).to(tl.int64)
    o_r, o_v, o_k = tl.arange(0, BR), i_v * BV + tl.arange(0, BV), tl.arange(0, BK)
    place = (tl.load(start + i_n) + o_r) % R
    m_r, m_v, m_k = o_r < tl.load(counts + i_n), o_v < V, o_k < K
    m_next = o_r + 1 < tl.load(counts + i_n)
    p_g = g + slot * g_slot + i_h * R
    b_g = tl.load(p_g + place, mask=m_r, other=0.0)
    b_d = tl.cumsum(tl.load(p_g + (place + 1) % R, mask=m_next, other=0.0), 0, reverse=True)
    p_k = k + slot * k_slot + (i_h // (H // G) * R + place[:, None]) * K + o_k
    b_k = tl.load(p_k, mask=m_r[:, None] & m_k, other=0.0).to(tl.float32)
    p_v = v + slot * v_slot + (i_h * R + place[:, None]) * V + o_v
    b_v = tl.load(p_v, mask=m_r[:, None] & m_v, other=0.0).to(tl.float32)
    # (1) u_j = w_j v_j
    b_u = tl.load(w + slot * w_slot + i_h * R + place, mask=m_r, other=0.0)[:, None] * b_v
    # (2) S = exp(P_n) S0 + (exp(D) u)^T k
    at = (i_h * V + o_v[:, None]) * K + o_k
    m_s = m_v[:, None] & m_k
    b_s = load_update(high + slot * plane_slot + at, low + slot * plane_slot + at, m_s, FORMAT)
    b_u = tl.exp(b_d)[:, None] * b_u
    b_s = tl.exp(tl.sum(b_g, 0)) * b_s + tl.dot(tl.trans(b_u), b_k, input_precision=DOT)
    out = (slot if OUT == "planes" else i_n) * out_slot
    store_planes(out_high + out + at, out_low + out + at, b_s, m_s, FORMAT if OUT == "planes" else "fp32")
