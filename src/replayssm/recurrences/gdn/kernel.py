"""Gated DeltaNet on a GPU: gates, carry and fold in Triton. Equations as in math.md, layout as in mamba2/kernel.py.

Everything is a product, nothing a walk: all records are on their way at once.
"""

import triton
import triton.language as tl

from replayssm.kernels import (
    append,
    channels,
    expm1,
    is_seen,
    keep,
    load_keys,
    load_row,
    load_update,
    load_values,
    product,
    sigmoid,
    softplus,
    tile,
)  # fmt: skip


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
    """c = b (I + back), b_j = w_j exp(P_n - P_j) (k_j . q), t = exp(P_n) q - sum_j c_j exp(P_j) k_j; c_0 = 1.

    For one head (BJ is 1), t [B, H, T, K]; arguments as in mamba2. A gate per record, or (CHANNEL, kda) one per key
    channel. The own key, scored likewise, gives its row of `back`.
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
    p_g = ring.g.data + slot * ring.g.slot + i_h * R * E
    p_w = ring.w.data + slot * ring.w.slot + i_h * R
    p_back = ring.back.data + slot * ring.back.slot + i_h * R * R
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
            tl.store(p_g + own * E + (o_k if CHANNEL else 0), b_g, mask=m_e & m)
            tl.store(p_w + own, weight, mask=m)
        tl.debug_barrier()
    # (2) all records but the last token's
    place = (first + o_r) % R
    m_r = o_r < before + (length - 1 if T > 1 else 0)
    b_keys = tl.load(p_k[None, :] + place[:, None] * K, mask=m_r[:, None] & m_k, other=0.0)
    b_norm = tl.load(p_norm + place, mask=m_r, other=0.0)
    b_w = tl.load(p_w + place, mask=m_r, other=0.0)
    m_back = (o_r < before)[:, None] & (o_r[None, :] < o_r[:, None])
    b_back = tl.load(p_back + place[:, None] * R + place[None, :], mask=m_back, other=0.0)
    for i in range(T):
        m, own = i < length, (first + before + i) % R
        seen = is_seen(o_r, before, i, kin, row, T) & m_r
        seen_next = is_seen(o_r + 1, before, i, kin, row, T) & (o_r + 1 < before + length)
        if CHANNEL:
            b_g = tl.load(p_g + place[:, None] * K + o_k, mask=seen[:, None] & m_k, other=0.0)
            b_d = tl.load(p_g + ((place + 1) % R)[:, None] * K + o_k, mask=seen_next[:, None] & m_k, other=0.0)
        else:
            b_g = tl.load(p_g + place, mask=seen, other=0.0)
            b_d = tl.load(p_g + (place + 1) % R, mask=seen_next, other=0.0)
        b_q, b_xq = channels(inputs.q, ring.conv, weights, parent, row, i, slot, end, o_x, m_k & m, 0, C, L, W, T)
        if T > 1:
            b_k = tl.load(p_k + own * K, mask=m_k & m, other=0.0).to(tl.float32)
            norm = tl.load(p_norm + own, mask=m, other=0.0)
            own_g = tl.load(p_g + own * E + (o_k if CHANNEL else 0), mask=m_e & m, other=0.0)
            weight = tl.load(p_w + own, mask=m, other=0.0)
        else:
            b_k, b_xk = channels(inputs.k, ring.conv, weights, parent, row, i, slot, end, o_x, m_k, K_FIRST, C, L, W, T)
            b_v, b_xv = channels(inputs.v, ring.conv, weights, parent, row, i, slot, end, o_c, m_c, V_FIRST, C, L, W, T)
            own_g, weight = GATES(inputs, weights, row, i, i_h, o_k, m_k, K)
            norm = 1 / tl.sqrt(tl.sum(b_k * b_k, 0) + 1e-6)
        b_q *= 1 / tl.sqrt((tl.sum(b_q * b_q, 0) + 1e-6) * K)
        b_n = b_k * norm
        own_c = weight * tl.sum(b_n * b_q, 0)
        # (3) scores of query and own key, decayed: b_until exp(P_n - P_j), b_since exp(P_j), of which whole is the last
        b_until, b_since = tl.exp(tl.cumsum(b_d, 0, reverse=True)), tl.exp(tl.cumsum(b_g, 0))
        last, whole = tl.exp(own_g), tl.exp(tl.sum(b_g, 0) + own_g)
        b_x = tl.where(seen[:, None], b_keys.to(tl.float32), 0.0)
        scale = tl.where(seen, b_w * b_norm, 0.0)
        if CHANNEL:
            b_x *= b_until
            b_b, b_nb = scale * tl.sum(b_x * (last * b_q)[None, :], 1), scale * tl.sum(b_x * (last * b_n)[None, :], 1)
            b_x = tl.where(seen[:, None], b_keys.to(tl.float32), 0.0) * b_since
        else:
            scale *= b_until * last
            b_b, b_nb = scale * tl.sum(b_x * b_q[None, :], 1), scale * tl.sum(b_x * b_n[None, :], 1)
        # (4) the own row of back, never NaN, so that forgotten records do not reach their siblings; c; t
        b_row = -b_nb - tl.sum(b_nb[:, None] * b_back, 0)
        b_row = tl.where(b_row == b_row, b_row, 0.0)
        b_c = b_b + tl.sum(b_b[:, None] * b_back, 0) + own_c * b_row
        b_f = b_c * b_norm
        if not CHANNEL:
            b_f *= b_since
        b_t = whole * (b_q - own_c * b_n) - tl.sum(b_f[:, None] * b_x, 0)
        p_c = c + ((row * H + i_h) * T + i) * (1 + R)
        tl.store(p_c, 1.0)
        tl.store(p_c + 1 + o_r, b_c, mask=(o_r < R) & (o_r != before + i))
        tl.store(p_c + 1 + before + i, own_c)
        tl.store(t + ((row * H + i_h) * T + i) * K + o_k, b_t, mask=m_k)
        tl.store(p_back + own * R + place, b_row, mask=(o_r < before + i) & m)
        keep(ring.conv, weights, slot, end, i, o_x, b_xq, m_k & m, 0, C, L)
        if T > 1:
            b_back = tl.where((o_r == before + i)[:, None], b_row[None, :], b_back)
        else:
            append(
                ring, weights, slot, end, i, own, i_g, o_k, o_c, b_k, b_xk, b_v, b_xv, m_k, m_c,
                K_FIRST, V_FIRST, C, L, V, K, R,
            )  # fmt: skip
            tl.store(p_norm + own, norm)
            tl.store(p_g + own * E + (o_k if CHANNEL else 0), own_g, mask=m_e)
            tl.store(p_w + own, weight)


@triton.jit
def corrected(
    p_high, p_low, ring, slot, place, count, i_h, o_v, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """U = diag(w) (I + back) (V - exp(P) K S^T), of the `count` records at `place` [BR]: [BV, BR]; keys' norms in it.

    Decays to the end are in it too, but for a gate per channel (`faded` has those).
    """
    o_r = tl.arange(0, BR)
    m_r = o_r < count
    b_v, b_w = load_values(ring, slot, place, m_r, i_h, o_v, V, R)
    norm = tl.load(ring.norm.data + slot * ring.norm.slot + i_h // (H // G) * R + place, mask=m_r, other=0.0)
    p_back = ring.back.data + slot * ring.back.slot + i_h * R * R + place[:, None] * R + place[None, :]
    b_back = tl.load(p_back, mask=m_r[:, None] & (o_r[None, :] < o_r[:, None]), other=0.0)
    b_back += (o_r[:, None] == o_r[None, :]).to(tl.float32)
    scale = b_w * norm
    if CHANNEL:
        since = norm
    else:
        p_g = ring.g.data + slot * ring.g.slot + i_h * R
        b_later = tl.load(p_g + (place + 1) % R, mask=o_r + 1 < count, other=0.0)
        since = norm * tl.exp(tl.cumsum(tl.load(p_g + place, mask=m_r, other=0.0), 0))
        scale *= tl.exp(tl.cumsum(b_later, 0, reverse=True))
    b_seen = tl.zeros_like(b_v)
    for from_k in range(0, K, BC):
        o_k = from_k + tl.arange(0, BC)
        b_k = load_keys(ring, slot, place, m_r, i_h, o_k, H, G, K, R)
        if CHANNEL:
            b_g = load_gates(ring, slot, place, m_r, i_h, o_k, K, R)
            b_k = b_k.to(tl.float32) * tl.exp(tl.cumsum(b_g, 0))
        at, mask = tile(i_h, o_v, o_k, V, K)
        b_seen += product(load_update(p_high + at, p_low + at, mask, FORMAT), tl.trans(b_k))
    return product(b_v - since[None, :] * b_seen, tl.trans(b_back)) * scale[None, :]


@triton.jit
def faded(
    ring, slot, place, count, i_h, o_k, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    CHANNEL: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Channels o_k of the keys [BR, BC], with a gate per channel decayed to the end, and exp(P_n) - 1."""
    o_r = tl.arange(0, BR)
    b_k = load_keys(ring, slot, place, o_r < count, i_h, o_k, H, G, K, R)
    if CHANNEL:
        b_g = load_gates(ring, slot, place, o_r < count, i_h, o_k, K, R)
        b_later = load_gates(ring, slot, (place + 1) % R, o_r + 1 < count, i_h, o_k, K, R)
        b_k = b_k.to(tl.float32) * tl.exp(tl.cumsum(b_later, 0, reverse=True))
        grown = expm1(tl.sum(b_g, 0))[None, :]
    else:
        b_g = tl.load(ring.g.data + slot * ring.g.slot + i_h * R + place, mask=o_r < count, other=0.0)
        grown = expm1(tl.sum(b_g, 0))
    return b_k, grown


@triton.jit
def load_gates(ring, slot, place, m_r, i_h, o_k, K: tl.constexpr, R: tl.constexpr):
    """Channels o_k of the gates of the records at some places: [BR, BC]."""
    p_g = ring.g.data + slot * ring.g.slot + (i_h * R + place[:, None]) * K + o_k
    return tl.load(p_g, mask=m_r[:, None] & (o_k < K), other=0.0)
