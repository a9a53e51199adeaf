"""Mamba-2 on a GPU: gates and carry in Triton. Equations and letters as in reference.py and math.md.

Records are taken oldest first (place = (start + age) mod R); o_r is a record's age. Decays are sums of their own from a
record's successor on, so that no large sums are subtracted.
"""

import triton
import triton.language as tl

from replayssm.arithmetic_kernel import add_product, parts_of, softplus, store_parts
from replayssm.step_kernel import append_key, append_tokens, append_value, channels, keep, load_row, store_query


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
def carry_alone(inputs, weights, row, i_h, o_k, m_k, b_q, b_k, K: tl.constexpr, GATES: tl.constexpr):
    """A step's only token as a record of head i_h, for a checkpoint that holds all before it.

    The carried query t = exp(g) q, the weight w (k . q) of the own v, and 1 / |k| (1 here), g and w of the record.
    """
    g, w = GATES(inputs, weights, row, 0, i_h, i_h >= 0)
    return tl.exp(g) * b_q, w * tl.sum(b_k * b_q, 0), 1.0, g, w


@triton.jit
def carry(
    inputs, ring, weights, table, parent, kin, q, t, c, ends, i_b, i_g, i_j, from_c, count, B,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BJ: tl.constexpr, BC: tl.constexpr, CHANNEL: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """The step's record is appended; t = q, c_0 = exp(P_n) and c_j = w_j exp(D_j) (k_j . q).

    For row i_b, key group i_g and BJ of its heads, the i_j-th such part, and for the `count` channels of v
    (at most BC) from `from_c` on. Other arguments as in kernels.prepare_kernel: t of N = G heads.

    The token's record is stored last: no load has to wait for it.
    """
    J: tl.constexpr = H // G
    C: tl.constexpr = 2 * G * K + H * V
    K_FIRST: tl.constexpr = H * V
    Q_FIRST: tl.constexpr = H * V + G * K
    slot, first, before, length, end, row = load_row(table, i_b, B)
    o_j, o_k, o_p = i_j * BJ + tl.arange(0, BJ), tl.arange(0, BK), tl.arange(0, BP)
    o_x, o_c = i_g * K + o_k, from_c + tl.arange(0, BC)
    i_h = i_g * J + o_j
    m_j, m_k, m_c = o_j < J, o_k < K, tl.arange(0, BC) < count
    p_k = ring.k.data + slot * ring.k.slot + i_g * R * K + o_k
    p_g = ring.g.data + slot * ring.g.slot + i_h * R
    p_w = ring.w.data + slot * ring.w.slot + i_h * R
    # (1) all records before it
    place = (first + o_p) % R
    m_p = o_p < before
    b_k = tl.load(p_k[None, :] + place[:, None] * K, mask=m_p[:, None] & m_k, other=0.0)
    b_w = tl.load(p_w[:, None] + place, mask=m_j[:, None] & m_p, other=0.0)
    m, own = length > 0, (first + before) % R
    b_q, b_xq = channels(
        inputs.q, ring.conv, weights, None, row, 0, slot, end, o_x, m_k & m, Q_FIRST, C, L, W, 1
    )  # fmt: skip
    b_g = tl.load(p_g[:, None] + place, mask=m_j[:, None] & m_p, other=0.0)
    b_d = tl.load(p_g[:, None] + (place + 1) % R, mask=m_j[:, None] & (o_p + 1 < before), other=0.0)
    b_n, b_xk = channels(inputs.k, ring.conv, weights, None, row, 0, slot, end, o_x, m_k, K_FIRST, C, L, W, 1)
    b_v, b_xv = channels(inputs.v, ring.conv, weights, None, row, 0, slot, end, o_c, m_c, 0, C, L, W, 1)
    g_n, w_n = GATES(inputs, weights, row, 0, i_h, m_j)
    # (2) sums of g behind every record, [BJ, BP]
    b_d = tl.cumsum(b_d, 1, reverse=True) + g_n[:, None]
    # (3) c_j = w_j exp(D_j) (k_j . q), c_0 = exp(P_n)
    score = tl.sum(tl.where(m_p[:, None], b_k.to(tl.float32) * b_q, 0.0), 1)
    b_c = tl.where(m_p, b_w * tl.exp(b_d) * score[None, :], 0.0)
    store_parts(c + ((row * H + i_h)[:, None] * BP + o_p) * P, b_c, m_j[:, None], 1, P)
    p_ends = ends + (row * H + i_h) * 2
    tl.store(p_ends, tl.exp(tl.sum(b_g, 1) + g_n), mask=m_j)
    tl.store(p_ends + 1, w_n * tl.sum(b_n * b_q, 0), mask=m_j)
    store_query(t, row * G + i_g, o_k, b_q, m_k, K, P)
    keep(ring.conv, weights, slot, end, 0, o_x, b_xq, m_k & m, Q_FIRST, C, L)
    append_key(ring, weights, slot, end, own, i_g, o_k, b_n, b_xk, m_k, K_FIRST, C, L, K, R)
    append_value(ring, weights, slot, end, own, o_c, b_v, b_xv, m_c, 0, C, L, V, R)
    tl.store(p_g + own, g_n, mask=m_j)
    tl.store(p_w + own, w_n, mask=m_j)


@triton.jit
def carry_tokens(
    inputs, ring, weights, table, parent, kin, q, t, c, ends, i_b, i_g, i_j, from_c, count, B,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BJ: tl.constexpr, BC: tl.constexpr, CHANNEL: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """carry of several tokens at once: one pass over the keys of all records, scores on tensor cores."""
    J: tl.constexpr = H // G
    slot, first, before, length, end, row = load_row(table, i_b, B)
    o_j, o_k, o_p, o_t = i_j * BJ + tl.arange(0, BJ), tl.arange(0, BK), tl.arange(0, BP), tl.arange(0, BT)
    i_h, i_t = i_g * J + o_j, tl.minimum(o_t, T - 1)
    m_j, m_k, m_p, m_t = o_j < J, o_k < K, o_p < before, o_t < length
    p_k = ring.k.data + slot * ring.k.slot + i_g * R * K + o_k
    p_g = ring.g.data + slot * ring.g.slot + i_h[:, None] * R
    p_w = ring.w.data + slot * ring.w.slot + i_h[:, None] * R
    # (1) the records before the step, and the tokens' own
    place, own, m = (first + o_p) % R, (first + before + o_t) % R, m_j[:, None] & m_p
    m_x, m_c = m_j[:, None] & m_t, m_j[:, None] & (o_t < T)
    b_old = tl.load(p_k + place[:, None] * K, mask=m_p[:, None] & m_k, other=0.0)
    b_w = tl.load(p_w + place, mask=m, other=0.0)
    b_g = tl.load(p_g + place, mask=m, other=0.0)
    b_d = tl.load(p_g + (place + 1) % R, mask=m & (o_p + 1 < before), other=0.0)
    b_n, b_u = GATES(inputs, weights, row, i_t, i_h[:, None], m_j[:, None])
    tl.store(p_g + own, b_n, mask=m_x)
    tl.store(p_w + own, b_u, mask=m_x)
    append_tokens(
        inputs, ring, weights, parent, q, row, slot, end, first + before, length, i_g, from_c, count,
        T, H, G, V, K, R, L, W, BK, BC, H * V + G * K, H * V, 0, False,
    )  # fmt: skip
    tl.debug_barrier()  # in memory, for other threads of this program
    # (2) scores, and t = q
    b_k = tl.load(p_k + own[:, None] * K, mask=m_t[:, None] & m_k, other=0.0)
    b_q = tl.load(q + ((row * G + i_g) * T + o_t) * K + o_k[:, None], mask=(o_t < T) & m_k[:, None], other=0.0)
    b_u = tl.load(p_w + own, mask=m_x, other=0.0)
    PARTS: tl.constexpr = parts_of(b_k.dtype)
    old_score = tl.trans(add_product(tl.zeros([BP, BT], tl.float32), b_old, b_q, PARTS, PARTS))
    score = tl.trans(add_product(tl.zeros([BT, BT], tl.float32), b_k, b_q, PARTS, PARTS))
    b_t = tl.load(q + ((row * G + i_g) * T + o_t[:, None]) * K + o_k, mask=(o_t < T)[:, None] & m_k, other=0.0)
    p_t = t + ((row * G + i_g) * (P * T) + o_t[:, None]) * K + o_k
    store_parts(p_t, b_t, (o_t < T)[:, None] & m_k, T * K, P)
    # (3) sums of g on the way to every token, from the checkpoint on and from other tokens on: [BJ, BT], [BJ, BT, BT]
    b_sum, b_on = tl.zeros([BJ, BT], tl.float32), tl.zeros([BJ, BT, BT], tl.float32)
    for i in range(T):
        b_i = tl.load(p_g + (first + before + i) % R, mask=m_j[:, None] & (i < length), other=0.0)
        if kin is not None:
            above = tl.load(kin + (row * T + i_t) * T + i) != 0
            behind = (tl.load(kin + (row * T + i) * T + i_t) != 0) & (o_t != i)
        else:
            above, behind = o_t >= i, o_t < i
        b_sum += tl.where(above, b_i, 0.0)
        b_on += tl.where((above[:, None] & behind)[None, :, :], b_i[:, :, None], 0.0)
    # (4) c_j = w_j exp(D_j) (k_j . q), c_0 = exp(P_n)
    p_c = c + (row * H + i_h[:, None]) * (T * (1 + R)) + o_t * (1 + R)
    tl.store(p_c, tl.exp(tl.sum(b_g, 1)[:, None] + b_sum), mask=m_c)
    b_d = tl.cumsum(b_d, 1, reverse=True)[:, None, :] + b_sum[:, :, None]
    b_c = b_w[:, None, :] * tl.exp(b_d) * old_score[None, :, :]
    tl.store(p_c[:, :, None] + 1 + o_p, b_c, mask=m_c[:, :, None] & m_p)
    if kin is not None:
        seen = tl.load(kin + (row * T + i_t[:, None]) * T + i_t) != 0
    else:
        seen = o_t <= o_t[:, None]
    b_c = tl.where(seen, b_u[:, None, :] * tl.exp(b_on) * score[None, :, :], 0.0)
    tl.store(p_c[:, :, None] + 1 + before + o_t, b_c, mask=m_c[:, :, None] & m_t)
