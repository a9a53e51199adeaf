"""Kimi Delta Attention on a GPU: gdn's carry with K gates a record, and a fold with decays [R, K] per head."""

import triton
import triton.language as tl

from replayssm.kernels import load_update, store_planes
from replayssm.recurrences.gdn.kernel import carry_kernel

__all__ = ["carry_kernel", "fold_kernel"]


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
