"""Gated DeltaNet on a GPU: gates and carry in Triton. Equations as in math.md, layout as in mamba2/kernel.py.

The carry is the walk, newest record first: by products it needs registers that a GPU would rather spend on more rows at
a time (docs/log.md). So nothing here needs the ring's `back`.
"""

import triton
import triton.language as tl

from replayssm.arithmetic_kernel import sigmoid, softplus, store_parts
from replayssm.kernels import append, append_tokens, channels, keep, load_row, store_query


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
    inputs, ring, weights, table, t, c, ends, i_b, i_g, i_j, from_c, count, B,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr,
    BC: tl.constexpr, CHANNEL: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """c_j = w_j (k_j . t), t <- a_j (t - c_j k_j), from the newest record to the oldest; c_0 = 1.

    For BJ heads of a key group at once, t of N = H heads; arguments as in mamba2. A gate per record and head, or
    (CHANNEL, kda) one per key channel. N records are on their way together: with one at a time, each was waited for.
    Vectors of one head lie over one warp's threads, so that nothing goes through shared memory.
    """
    J: tl.constexpr = H // G
    N: tl.constexpr = 8
    E: tl.constexpr = K if CHANNEL else 1
    C: tl.constexpr = 2 * G * K + H * V
    K_FIRST: tl.constexpr = G * K
    V_FIRST: tl.constexpr = 2 * G * K
    slot, first, before, length, end, row = load_row(table, i_b, B)
    o_k, o_p = tl.arange(0, BK), tl.arange(0, BP)
    o_x, o_c = i_g * K + o_k, from_c + tl.arange(0, BC)
    m_k, m_c = o_k < K, tl.arange(0, BC) < count
    m_e = m_k if CHANNEL else length > 0
    i_h, most = i_g * J + i_j * BJ, J - 1 - i_j * BJ
    p_k = ring.k.data + slot * ring.k.slot + i_g * R * K + o_k
    p_norm = ring.norm.data + slot * ring.norm.slot + i_g * R
    p_g = ring.g.data + slot * ring.g.slot + i_h * (R * E) + (o_k if CHANNEL else 0)
    p_w = ring.w.data + slot * ring.w.slot + i_h * R
    m, own, age = length > 0, (first + before) % R, before - 1
    records = load_records(p_k, p_norm, p_g, p_w, first, age, most, m_k, m_e, K, R, E, BJ, N)
    b_q, b_xq = channels(inputs.q, ring.conv, weights, None, row, 0, slot, end, o_x, m_k & m, 0, C, L, W, 1)
    b_k, b_xk = channels(inputs.k, ring.conv, weights, None, row, 0, slot, end, o_x, m_k, K_FIRST, C, L, W, 1)
    b_v, b_xv = channels(inputs.v, ring.conv, weights, None, row, 0, slot, end, o_c, m_c, V_FIRST, C, L, W, 1)
    norm, own_k = 1 / tl.sqrt(tl.sum(b_k * b_k, 0) + 1e-6), b_k
    b_q *= 1 / tl.sqrt((tl.sum(b_q * b_q, 0) + 1e-6) * K)
    # (1) the token's own record
    b_k *= norm
    score = tl.sum(b_k * b_q, 0)
    b_t, b_c, own_g, own_w = (), (), (), ()
    for h in tl.static_range(BJ):
        g, w = GATES(inputs, weights, row, 0, i_h + tl.minimum(h, most), o_k, m_k, K)
        own_g, own_w = own_g + (g,), own_w + (w,)  # type: ignore[assignment]
        b_t = b_t + (tl.exp(g) * (b_q - w * score * b_k),)  # type: ignore[assignment]
        b_c = b_c + (tl.zeros([BP], tl.float32),)  # type: ignore[assignment]
    # (2) all records before it
    b_t, b_c = pass_records(b_t, b_c, records, age, o_p, BJ, N)
    age -= N
    while age >= 0:
        records = load_records(p_k, p_norm, p_g, p_w, first, age, most, m_k, m_e, K, R, E, BJ, N)
        b_t, b_c = pass_records(b_t, b_c, records, age, o_p, BJ, N)
        age -= N
    for h in tl.static_range(BJ):
        m_h, at = h <= most, row * H + i_h + h
        store_parts(c + (at * BP + o_p) * P, b_c[h], m_h & (o_p < BP), 1, P)
        tl.store(ends + at * 2, 1.0, mask=m_h)
        tl.store(ends + at * 2 + 1, own_w[h] * score, mask=m_h)
        store_query(t, at, o_k, b_t[h], m_h & m_k, K, P)
    keep(ring.conv, weights, slot, end, 0, o_x, b_xq, m_k & m, 0, C, L)
    append(
        ring, weights, slot, end, 0, own, i_g, o_k, o_c, own_k, b_xk, b_v, b_xv, m_k, m_c, K_FIRST, V_FIRST, C, L, V,
        K, R,
    )  # fmt: skip
    tl.store(p_norm + own, norm)
    for h in tl.static_range(BJ):
        tl.store(p_g + (h * R + own) * E, own_g[h], mask=(h <= most) & m_e)
        tl.store(p_w + h * R + own, own_w[h], mask=h <= most)


@triton.jit
def load_records(
    p_k, p_norm, p_g, p_w, first, age, most, m_k, m_e, K: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    BJ: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N records from number `age` downwards: k, 1 / |k|, and g and w of BJ heads (at most `most` + 1 are different)."""
    records = ()
    for d in tl.static_range(N):
        place, more = (first + tl.maximum(age - d, 0)) % R, age >= d
        g, w = (), ()
        for h in tl.static_range(BJ):
            at = tl.minimum(h, most) * R + place
            g = g + (tl.load(p_g + at * E, mask=m_e & more, other=0.0),)  # type: ignore[assignment]
            w = w + (tl.load(p_w + at, mask=more, other=0.0),)  # type: ignore[assignment]
        b_k, norm = tl.load(p_k + place * K, mask=m_k & more, other=0.0), tl.load(p_norm + place, mask=more, other=0.0)
        records = records + ((b_k, norm, g, w),)  # type: ignore[assignment]
    return records


@triton.jit
def pass_records(b_t, b_c, records, age, o_p, BJ: tl.constexpr, N: tl.constexpr):
    """Queries of BJ heads carried over N records, and their weights into b_c [BP] at the records' numbers."""
    for d in tl.static_range(N):
        b_k, norm, g, w = records[d]
        b_k = b_k.to(tl.float32) * norm
        new_t, new_c = (), ()
        for h in tl.static_range(BJ):
            c_j = w[h] * tl.sum(b_k * b_t[h], 0)
            new_t = new_t + (tl.exp(g[h]) * (b_t[h] - c_j * b_k),)  # type: ignore[assignment]
            new_c = new_c + (tl.where(o_p == age - d, c_j, b_c[h]),)  # type: ignore[assignment]
        b_t, b_c = new_t, new_c
    return b_t, b_c


@triton.jit
def carry_tokens(
    inputs, ring, weights, table, parent, kin, q, t, c, i_b, i_g, i_j, from_c, count, B,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BJ: tl.constexpr, BC: tl.constexpr, CHANNEL: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """carry of several tokens at once, of BJ heads one after the other: all queries [BT, BK] walk together.

    N records are on their way at a time. A query passes by the records of tokens that it does not see.
    """
    J: tl.constexpr = H // G
    N: tl.constexpr = 4 if BT <= 8 else 2  # more need more registers than there are
    E: tl.constexpr = K if CHANNEL else 1
    slot, first, before, length, end, row = load_row(table, i_b, B)
    o_k, o_t = tl.arange(0, BK), tl.arange(0, BT)
    i_t, m_k, m_t = tl.minimum(o_t, T - 1), o_k < K, o_t < length
    own, m_x = (first + before + o_t) % R, m_k[None, :] & (o_t < T)[:, None]
    m_e = m_k if CHANNEL else length > 0
    p_k = ring.k.data + slot * ring.k.slot + i_g * R * K + o_k
    p_norm = ring.norm.data + slot * ring.norm.slot + i_g * R
    # (1) the tokens' own records
    append_tokens(
        inputs, ring, weights, parent, q, row, slot, end, first + before, length, i_g, from_c, count,
        T, H, G, V, K, R, L, W, BK, BC, 0, G * K, 2 * G * K, True,
    )  # fmt: skip
    i_h = i_g * J + i_j * BJ
    behind = i_g * J + tl.minimum(i_j * BJ + BJ, J)
    while i_h < behind:
        p_g = ring.g.data + slot * ring.g.slot + i_h * R * E + (o_k if CHANNEL else 0)
        p_w = ring.w.data + slot * ring.w.slot + i_h * R
        if CHANNEL:
            for i in range(T):  # all at once need more registers than there are
                b_g, beta = GATES(inputs, weights, row, i, i_h, o_k, m_k, K)
                place = (first + before + i) % R
                tl.store(p_g + place * E, b_g, mask=m_k & (i < length))
                tl.store(p_w + place, beta, mask=i < length)
        else:
            b_g, beta = GATES(inputs, weights, row, i_t, i_h, o_k, m_k, K)
            tl.store(p_g + own, b_g, mask=m_t)
            tl.store(p_w + own, beta, mask=m_t)
        tl.debug_barrier()  # the records are in memory, for other threads of this program
        # (2) all records, the newest first: the tokens' own, then those before them
        p_c = c + (row * H + i_h) * (T * (1 + R)) + o_t * (1 + R)
        tl.store(p_c, tl.full([BT], 1.0, tl.float32), mask=o_t < T)
        b_t = tl.load(q + ((row * G + i_g) * T + o_t[:, None]) * K + o_k, mask=m_x, other=0.0).to(tl.float32)
        b_t *= (1 / tl.sqrt((tl.sum(b_t * b_t, 1) + 1e-6) * K))[:, None]
        b_sum = tl.zeros([BT], tl.float32)
        age = length - 1
        while age >= 0:
            records = load_records(p_k, p_norm, p_g, p_w, first + before, age, 0, m_k, m_e, K, R, E, 1, N)
            for d in tl.static_range(N):
                i = tl.maximum(age - d, 0)
                if kin is not None:
                    seen = tl.load(kin + (row * T + i_t) * T + i) != 0
                else:
                    seen = o_t >= i
                seen &= age >= d
                new_t, new_sum, b_c = pass_by(b_t, b_sum, records[d], CHANNEL)
                b_t, b_sum = tl.where(seen[:, None], new_t, b_t), tl.where(seen, new_sum, b_sum)
                tl.store(p_c + 1 + before + age - d, tl.where(seen, b_c, 0.0), mask=(o_t < T) & (age >= d))
            age -= N
        age = before - 1
        while age >= 0:
            records = load_records(p_k, p_norm, p_g, p_w, first, age, 0, m_k, m_e, K, R, E, 1, N)
            for d in tl.static_range(N):
                b_t, b_sum, b_c = pass_by(b_t, b_sum, records[d], CHANNEL)
                tl.store(p_c + 1 + age - d, b_c, mask=(o_t < T) & (age >= d))
            age -= N
        b_t *= tl.exp(b_sum)[:, None]
        p_t = t + (row * H + i_h) * (P * T * K) + o_t[:, None] * K + o_k[None, :]
        store_parts(p_t, b_t, m_x, T * K, P)
        i_h += 1


@triton.jit
def pass_by(b_t, b_sum, record, CHANNEL: tl.constexpr):
    """Queries exp(b_sum) b_t carried over one record, and its weights c [BT]. A gate of one number goes into b_sum."""
    key, norm, g, w = record
    gate, beta = g[0], w[0]
    key = key.to(tl.float32)[None, :] * norm
    b_c = beta * tl.sum(b_t * key, 1)
    b_t -= b_c[:, None] * key
    if CHANNEL:
        return b_t * tl.exp(gate)[None, :], b_sum, b_c
    else:
        return b_t, b_sum + gate, b_c * tl.exp(b_sum)
