"""Gated DeltaNet on a GPU: gates, carry and fold in Triton. Equations as in math.md, layout as in mamba2/kernel.py.

The carry is the walk, newest record first: by products it needs registers that a GPU would rather spend on more rows at
a time (docs/log.md). So nothing here needs the ring's `back`.
"""

import triton
import triton.language as tl

from replayssm.kernels import append, channels, expm1, keep, load_row, sigmoid, softplus


@triton.jit
def gates(inputs, weights, row, i, i_h, o_k, m_k, K: tl.constexpr):
    """g and w = beta of head i_h, fp32."""
    b_w = tl.load(inputs.w.data + row * inputs.w.row + i * inputs.w.token + i_h).to(tl.float32)
    b_g = tl.load(inputs.g.data + row * inputs.g.row + i * inputs.g.token + i_h).to(tl.float32)
    if weights.conv_weight is not None:
        b_w = weights.scale * sigmoid(b_w)
        rate = tl.exp(tl.load(weights.A_log + i_h).to(tl.float32))
        b_g = -rate * softplus(b_g + tl.load(weights.dt_bias + i_h).to(tl.float32))
    return b_g, b_w


@triton.jit
def carry(
    inputs, ring, weights, table, parent, kin, t, c, i_b, i_g, i_j, from_c, count, B,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, BC: tl.constexpr,
    CHANNEL: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """c_j = w_j (k_j . t), t <- a_j (t - c_j k_j), from the newest record to the oldest; c_0 = 1.

    For one head (BJ is 1), t [B, H, T, K]; arguments as in mamba2. A gate per record, or (CHANNEL, kda) one per key
    channel. The next record is on its way while the present one is applied.
    """
    E: tl.constexpr = K if CHANNEL else 1
    C: tl.constexpr = 2 * G * K + H * V
    K_FIRST: tl.constexpr = G * K
    V_FIRST: tl.constexpr = 2 * G * K
    slot, first, before, length, end, row = load_row(table, i_b, B)
    i_h = i_g * (H // G) + i_j
    o_k, o_r = tl.arange(0, BK), tl.arange(0, BR)
    o_x, o_c = i_g * K + o_k, from_c + tl.arange(0, BC)
    m_k, m_c = o_k < K, tl.arange(0, BC) < count
    m_e = m_k if CHANNEL else length > 0
    p_k = ring.k.data + slot * ring.k.slot + i_g * R * K + o_k
    p_norm = ring.norm.data + slot * ring.norm.slot + i_g * R
    p_g = ring.g.data + slot * ring.g.slot + i_h * R * E + (o_k if CHANNEL else 0)
    p_w = ring.w.data + slot * ring.w.slot + i_h * R
    # (1) several tokens' own records
    if T > 1:
        for i in range(T):
            m, own = i < length, (first + before + i) % R
            b_k, b_xk = channels(
                inputs.k, ring.conv, weights, parent, row, i, slot, end, o_x, m_k & m, K_FIRST, C, L, W, T
            )
            b_v, b_xv = channels(
                inputs.v, ring.conv, weights, parent, row, i, slot, end, o_c, m_c & m, V_FIRST, C, L, W, T
            )
            b_g, weight = GATES(inputs, weights, row, i, i_h, o_k, m_k, K)
            append(
                ring, weights, slot, end, i, own, i_g, o_k, o_c, b_k, b_xk, b_v, b_xv, m_k & m, m_c & m,
                K_FIRST, V_FIRST, C, L, V, K, R,
            )  # fmt: skip
            tl.store(p_norm + own, 1 / tl.sqrt(tl.sum(b_k * b_k, 0) + 1e-6), mask=m)
            tl.store(p_g + own * E, b_g, mask=m_e & m)
            tl.store(p_w + own, weight, mask=m)
        tl.debug_barrier()
    for i in range(T):
        m, own = i < length, (first + before + i) % R
        place, more = (own + R - 1) % R, before + i > 0
        b_next = tl.load(p_k + place * K, mask=m_k & more, other=0.0)
        next_norm, next_w = tl.load(p_norm + place, mask=more, other=0.0), tl.load(p_w + place, mask=more, other=0.0)
        b_next_g = tl.load(p_g + place * E, mask=m_e & more, other=0.0)
        b_q, b_xq = channels(inputs.q, ring.conv, weights, parent, row, i, slot, end, o_x, m_k & m, 0, C, L, W, T)
        if T > 1:
            b_k = tl.load(p_k + own * K, mask=m_k & m, other=0.0).to(tl.float32)
            norm = tl.load(p_norm + own, mask=m, other=0.0)
            b_g, weight = tl.load(p_g + own * E, mask=m_e & m, other=0.0), tl.load(p_w + own, mask=m, other=0.0)
        else:
            b_k, b_xk = channels(inputs.k, ring.conv, weights, parent, row, i, slot, end, o_x, m_k, K_FIRST, C, L, W, T)
            b_v, b_xv = channels(inputs.v, ring.conv, weights, parent, row, i, slot, end, o_c, m_c, V_FIRST, C, L, W, T)
            b_g, weight = GATES(inputs, weights, row, i, i_h, o_k, m_k, K)
            norm = 1 / tl.sqrt(tl.sum(b_k * b_k, 0) + 1e-6)
        own_k, own_g, own_w = b_k, b_g, weight
        b_q *= 1 / tl.sqrt((tl.sum(b_q * b_q, 0) + 1e-6) * K)
        # (2) the token's own record
        b_k *= norm
        own_c = weight * tl.sum(b_k * b_q, 0)
        b_t = tl.exp(b_g) * (b_q - own_c * b_k)
        b_c = tl.zeros([BR], tl.float32)
        # (3) all records before it; of a tree, those that it sees
        age = before + i - 1
        while age >= 0:
            b_k, b_g, weight = b_next.to(tl.float32) * next_norm, b_next_g, next_w
            if kin is not None:
                seen = tl.load(kin + (row * T + i) * T + age - before, mask=age >= before, other=1) != 0
                weight = tl.where(seen, weight, 0.0)
                b_g = tl.where(seen, b_g, 0.0)
                b_k = tl.where(seen, b_k, 0.0)
            place = (place + R - 1) % R
            more = age > 0
            b_next = tl.load(p_k + place * K, mask=m_k & more, other=0.0)
            next_norm = tl.load(p_norm + place, mask=more, other=0.0)
            next_w = tl.load(p_w + place, mask=more, other=0.0)
            b_next_g = tl.load(p_g + place * E, mask=m_e & more, other=0.0)
            c_j = weight * tl.sum(b_k * b_t, 0)
            b_t = tl.exp(b_g) * (b_t - c_j * b_k)
            b_c = tl.where(o_r == age, c_j, b_c)
            age -= 1
        p_c = c + ((row * H + i_h) * T + i) * (1 + R)
        tl.store(p_c, 1.0)
        tl.store(p_c + 1 + o_r, b_c, mask=(o_r < R) & (o_r != before + i))
        tl.store(p_c + 1 + before + i, own_c)
        tl.store(t + ((row * H + i_h) * T + i) * K + o_k, b_t, mask=m_k)
        keep(ring.conv, weights, slot, end, i, o_x, b_xq, m_k & m, 0, C, L)
        if T == 1:
            append(
                ring, weights, slot, end, i, own, i_g, o_k, o_c, own_k, b_xk, b_v, b_xv, m_k, m_c,
                K_FIRST, V_FIRST, C, L, V, K, R,
            )  # fmt: skip
            tl.store(p_norm + own, norm)
            tl.store(p_g + own * E, own_g, mask=m_e)
            tl.store(p_w + own, own_w)


@triton.jit
def step(b_s, b_k, b_v, b_g, weight):
    """S = a S + w (v - a S k) k^T for a tile [BV, BK]."""
    b_s += expm1(b_g) * b_s
    return b_s + (weight * (b_v - tl.sum(b_s * b_k, 1)))[:, None] * b_k
