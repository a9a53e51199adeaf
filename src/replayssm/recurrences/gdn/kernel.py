"""Gated DeltaNet on a GPU: carry and fold in Triton. Equations as in math.md, records as in mamba2/kernel.py."""

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
    """The walk, newest record first, of a query and of the step's own key, one program per row and head.

    c_j = w_j (k_j . t), t <- a_j (t - c_j k_j); the key's c, negated, are the new row of back. E gates a
    record: 1, and K for kda.

    Arguments as in mamba2; besides, norm [S, G, R] is read and back [S, H, R, R] gets the step's new rows. The next
    record is loaded while the present one is applied.
    """
    i_b, i_h = tl.program_id(0), tl.program_id(1)
    i_g = i_h // (H // G)
    slot = tl.load(slots + i_b).to(tl.int64)
    first, before = tl.load(start + i_b), tl.load(committed + i_b)
    o_r, o_k = tl.arange(0, BR), tl.arange(0, BK)
    m_k = o_k < K
    o_e = o_k if E > 1 else 0 * o_k
    p_k = k + slot * k_slot + i_g * R * K + o_k
    p_g = g + slot * g_slot + i_h * R * E + o_e
    p_w, p_norm = w + slot * w_slot + i_h * R, norm + slot * norm_slot + i_g * R
    for i in range(T):
        own_age = before + i
        own = (first + own_age) % R
        row = (i_b * T + i) * R
        # (1) the step's own record: with its correction for the query, decayed only for its key
        b_k = tl.load(p_k + own * K, mask=m_k, other=0.0).to(tl.float32) * tl.load(p_norm + own)
        b_a = tl.exp(tl.load(p_g + own * E, mask=m_k, other=0.0))
        b_q = tl.load(q + ((i_b * T + i) * G + i_g) * K + o_k, mask=m_k, other=0.0)
        own_c = tl.load(p_w + own) * tl.sum(b_k * b_q, 0)
        b_t = b_a * (b_q - own_c * b_k)
        b_s = b_a * b_k
        b_c = tl.where(o_r == own_age, own_c, 0.0)
        b_row = tl.zeros([BR], tl.float32)
        # (2) all records before it; for a tree, those that it sees
        place = (first + own_age - 1 + R) % R
        more = own_age > 0
        b_next = tl.load(p_k + place * K, mask=m_k & more, other=0.0).to(tl.float32)
        next_norm, next_w = tl.load(p_norm + place, mask=more, other=0.0), tl.load(p_w + place, mask=more, other=0.0)
        b_next_g = tl.load(p_g + place * E, mask=m_k & more, other=0.0)
        age = own_age - 1
        while age >= 0:
            b_k, b_g, weight = b_next * next_norm, b_next_g, next_w
            if TREE:
                seen = tl.load(sees + row + place) != 0
                weight = tl.where(seen, weight, 0.0)
                b_g = tl.where(seen, b_g, 0.0)
            place = (place + R - 1) % R
            more = age > 0
            b_next = tl.load(p_k + place * K, mask=m_k & more, other=0.0).to(tl.float32)
            next_norm = tl.load(p_norm + place, mask=more, other=0.0)
            next_w = tl.load(p_w + place, mask=more, other=0.0)
            b_next_g = tl.load(p_g + place * E, mask=m_k & more, other=0.0)
            b_a = tl.exp(b_g)
            c_t, c_s = weight * tl.sum(b_k * b_t, 0), weight * tl.sum(b_k * b_s, 0)
            b_t = b_a * (b_t - c_t * b_k)
            b_s = b_a * (b_s - c_s * b_k)
            b_c = tl.where(o_r == age, c_t, b_c)
            b_row = tl.where(o_r == age, -c_s, b_row)
            age -= 1
        b_row = tl.where(b_row == b_row, b_row, 0.0)  # never NaN, see batched.carry
        places = (first + o_r) % R
        tl.store(back + slot * back_slot + (i_h * R + own) * R + places, b_row, mask=o_r < R)
        tl.store(c + ((i_b * H + i_h) * T + i) * R + places, b_c, mask=o_r < R)
        tl.store(t + ((i_b * H + i_h) * T + i) * K + o_k, b_t, mask=m_k)


@triton.jit
def fold_kernel(
    high, low, out_high, out_low, k, v, g, w, norm, back, slots, start, counts,
    plane_slot, out_slot, k_slot, v_slot, g_slot, w_slot, norm_slot, back_slot,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, OUT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """U = diag(w) (I + back) (V - exp(P) K S0^T), S = exp(P_n) S0 + sum_j exp(D_j) u_j k_j^T. As in mamba2."""
    i_n, i_h, i_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + i_n).to(tl.int64)
    i_g = i_h // (H // G)
    o_r, o_v, o_k = tl.arange(0, BR), i_v * BV + tl.arange(0, BV), tl.arange(0, BK)
    place = (tl.load(start + i_n) + o_r) % R
    count = tl.load(counts + i_n)
    m_r, m_v, m_k = o_r < count, o_v < V, o_k < K
    p_g = g + slot * g_slot + i_h * R
    b_g = tl.load(p_g + place, mask=m_r, other=0.0)
    b_d = tl.cumsum(tl.load(p_g + (place + 1) % R, mask=o_r + 1 < count, other=0.0), 0, reverse=True)
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
    b_u = b_v - tl.exp(tl.cumsum(b_g, 0))[:, None] * tl.dot(b_k, tl.trans(b_s), input_precision=DOT)
    # (2) corrected values
    b_u = b_w[:, None] * (b_u + tl.dot(b_back, b_u, input_precision=DOT))
    # (3) S = exp(P_n) S0 + (exp(D) u)^T k
    b_u = tl.exp(b_d)[:, None] * b_u
    b_s = tl.exp(tl.sum(b_g, 0)) * b_s + tl.dot(tl.trans(b_u), b_k, input_precision=DOT)
    out = (slot if OUT == "planes" else i_n) * out_slot
    store_planes(out_high + out + at, out_low + out + at, b_s, m_s, FORMAT if OUT == "planes" else "fp32")
