"""Gated DeltaNet on a GPU: gates and carry in Triton. Equations as in math.md, layout as in mamba2/kernel.py.

Where steps bring one token the carry is the walk, newest record first: by products it takes as long (docs/log.md), and
the ring needs no `back`. A cache for drafts has it, and carries by products.
"""

import triton
import triton.language as tl

from replayssm.arithmetic_kernel import add_product, parts_of, sigmoid, softplus, store_parts
from replayssm.step_kernel import append_key, append_tokens, append_value, channels, keep, load_row, store_query

BN = tl.constexpr(16)  # a step's tokens as records


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
def normalized(b_q, b_k, K: tl.constexpr):
    """Query and key of a token as the delta rule takes them, and 1 / |k|."""
    norm = 1 / tl.sqrt(tl.sum(b_k * b_k, 0) + 1e-6)
    return b_q * (1 / tl.sqrt((tl.sum(b_q * b_q, 0) + 1e-6) * K)), b_k * norm, norm


@triton.jit
def carry_alone(inputs, weights, row, i_h, o_k, m_k, b_q, b_k, K: tl.constexpr, GATES: tl.constexpr):
    """As mamba2's: t = a (q - w (k . q) k), with a gate per head or, as GATES has it, per key channel."""
    g, w = GATES(inputs, weights, row, 0, i_h, o_k, m_k, K)
    b_q, b_k, norm = normalized(b_q, b_k, K)
    score = w * tl.sum(b_k * b_q, 0)
    return tl.exp(g) * (b_q - score * b_k), score, norm, g, w


@triton.jit
def carry(
    inputs, ring, weights, table, parent, kin, q, t, c, ends, i_b, i_g, i_j, from_c, count, B,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BJ: tl.constexpr, BC: tl.constexpr, CHANNEL: tl.constexpr, GATES: tl.constexpr,
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
    # (1) the token's own record
    own_k = b_k
    b_q, b_k, norm = normalized(b_q, b_k, K)
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
    append_key(ring, weights, slot, end, own, i_g, o_k, own_k, b_xk, m_k, K_FIRST, C, L, K, R)
    append_value(ring, weights, slot, end, own, o_c, b_v, b_xv, m_c, V_FIRST, C, L, V, R)
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
def finite(x):
    """0 where a number is none: what times a weight of 0 must be nothing."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def load_head(ring, slot, first, place, before, i_h, o_p, R: tl.constexpr):
    """Of a head's records before the step: g, the successor's g, w [BP], and back transposed [BP, BP]."""
    m_p = o_p < before
    p_g = ring.g.data + slot * ring.g.slot + i_h * R
    b_g = tl.load(p_g + place, mask=m_p, other=0.0)
    b_d = tl.load(p_g + (place + 1) % R, mask=o_p + 1 < before, other=0.0)
    b_w = tl.load(ring.w.data + slot * ring.w.slot + i_h * R + place, mask=m_p, other=0.0)
    p_back = ring.back.data + slot * ring.back.slot + i_h * (R * R)
    b_back = tl.load(p_back + place * R + place[:, None], mask=(o_p[:, None] < o_p) & m_p, other=0.0)
    return b_g, b_d, b_w, b_back


@triton.jit
def carry_tokens(
    inputs, ring, weights, table, parent, kin, q, t, c, ends, i_b, i_g, i_j, from_c, count, B,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BJ: tl.constexpr, BC: tl.constexpr, CHANNEL: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """carry of several tokens at once, by products on tensor cores.

    A row of back is minus what a carry gives for the token's own key, so keys are carried as queries are: column 2i of
    a tile [records, BM] is token i's query, column 2i + 1 its key. Records before the step are BP rows of one tile, the
    step's own BN rows of another.
    """
    J: tl.constexpr = H // G
    BM: tl.constexpr = 2 * BT
    BB: tl.constexpr = min(BK, 64)
    slot, first, before, length, end, row = load_row(table, i_b, B)
    o_p, o_n, o_m, o_t = tl.arange(0, BP), tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BT)
    i_n, i_m, as_key = tl.minimum(o_n, T - 1), tl.minimum(o_m // 2, T - 1), o_m % 2 == 1
    place, own, own_m = (first + o_p) % R, (first + before + o_n) % R, (first + before + i_m) % R
    m_p, m_n, m_m = o_p < before, o_n < length, o_m // 2 < length
    p_k = ring.k.data + slot * ring.k.slot + i_g * R * K
    p_norm = ring.norm.data + slot * ring.norm.slot + i_g * R
    # (1) records before the step, those of all heads on their way at once
    norm_old = tl.load(p_norm + place, mask=m_p, other=0.0)
    heads = ()
    for h in tl.static_range(BJ):
        i_h = i_g * J + tl.minimum(i_j * BJ + h, J - 1)
        heads = heads + (load_head(ring, slot, first, place, before, i_h, o_p, R),)  # type: ignore[assignment]
    append_tokens(
        inputs, ring, weights, parent, q, row, slot, end, first + before, length, i_g, from_c, count,
        T, H, G, V, K, R, L, W, BK, BC, 0, G * K, 2 * G * K, True,
    )  # fmt: skip
    tl.debug_barrier()  # in memory, for other threads of this program
    # (2) scores of queries and keys with all records
    norm_new = tl.load(p_norm + own, mask=m_n, other=0.0)
    p_q = q + (row * G + i_g) * T * K
    p_m = tl.where(as_key, p_k + own_m * K, p_q + i_m * K)
    PARTS: tl.constexpr = parts_of(ring.k.data.dtype.element_ty)
    old_score, new_score = tl.zeros([BP, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    for n in range((K + BB - 1) // BB):
        o_b = n * BB + tl.arange(0, BB)
        b_m = tl.load(p_m + o_b[:, None], mask=m_m & (o_b < K)[:, None], other=0.0)
        b_k = tl.load(p_k + place[:, None] * K + o_b, mask=m_p[:, None] & (o_b < K), other=0.0)
        old_score = add_product(old_score, b_k, b_m, PARTS, PARTS)
        b_k = tl.load(p_k + own[:, None] * K + o_b, mask=m_n[:, None] & (o_b < K), other=0.0)
        new_score = add_product(new_score, b_k, b_m, PARTS, PARTS)
        squares += tl.sum(b_m.to(tl.float32) * b_m.to(tl.float32), 0)
    norm_m = tl.where(
        as_key, -tl.load(p_norm + own_m, mask=m_m, other=0.0), 1 / tl.sqrt((squares + 1e-6) * K)
    )  # a row of back is minus what a carry gives
    norm_q, _norm = tl.split(tl.reshape(norm_m, [BT, 2]))
    old_score *= norm_old[:, None] * norm_m
    new_score *= norm_new[:, None] * norm_m
    if kin is not None:
        seen = tl.load(kin + (row * T + i_m) * T + i_n[:, None]) != 0
    else:
        seen = i_n[:, None] <= i_m
    seen &= m_n[:, None] & m_m & ((i_n[:, None] != i_m) | (o_m % 2 == 0))
    for h in tl.static_range(BJ):
        if i_j * BJ + h < J:
            i_h = i_g * J + i_j * BJ + h
            b_g, b_d, b_w, b_back = heads[h]  # type: ignore[var-annotated]
            # (3) gates, and their sums on the way to every token: from the checkpoint on, from other tokens on
            own_g, own_w = GATES(inputs, weights, row, i_n, i_h, None, None, K)
            own_g = tl.where(m_n, own_g, 0.0)
            p_own = slot * ring.g.slot + i_h * R + own
            tl.store(ring.g.data + p_own, own_g, mask=m_n)
            tl.store(ring.w.data + slot * ring.w.slot + i_h * R + own, own_w, mask=m_n)
            b_sum, own_sum, b_on = (
                tl.zeros([BM], tl.float32),
                tl.zeros([BN], tl.float32),
                tl.zeros([BN, BM], tl.float32),
            )
            for i in range(T):
                g_i = tl.sum(tl.where(o_n == i, own_g, 0.0), 0)
                if kin is not None:
                    above = tl.load(kin + (row * T + i_m) * T + i) != 0
                    own_above = tl.load(kin + (row * T + i_n) * T + i) != 0
                    behind = (tl.load(kin + (row * T + i) * T + i_n) != 0) & (o_n != i)
                else:
                    above, own_above, behind = i_m >= i, i_n >= i, o_n < i
                b_sum += tl.where(above, g_i, 0.0)
                own_sum += tl.where(own_above, g_i, 0.0)
                b_on += tl.where(behind[:, None] & above, g_i, 0.0)
            total = tl.sum(b_g, 0)
            # (4) b, then c = b (I + back): by the records before the step, then by its tokens, the oldest first
            b_x = (b_w * tl.exp(tl.cumsum(b_d, 0, reverse=True)))[:, None] * tl.exp(b_sum) * old_score
            b_n = tl.where(seen, own_w[:, None] * tl.exp(b_on) * new_score, 0.0)
            b_x += add_product(tl.zeros([BP, BM], tl.float32), b_back, b_x, 3, 3)
            b_y = b_n
            for i in range(T):
                weight = tl.sum(tl.where(o_n[:, None] == i, b_n, 0.0), 0)
                x_i = tl.sum(tl.where(o_m == 2 * i + 1, b_x, 0.0), 1)
                y_i = tl.sum(tl.where(o_m == 2 * i + 1, b_y, 0.0), 1)
                b_x += finite(x_i)[:, None] * weight
                b_y += finite(y_i)[:, None] * weight
            old_c, old_row = tl.split(tl.reshape(b_x, [BP, BT, 2]))
            own_c, own_row = tl.split(tl.reshape(b_y, [BN, BT, 2]))
            p_row = ring.back.data + slot * ring.back.slot + i_h * (R * R) + (first + before + o_t) % R * R
            m_t = o_t < length
            tl.store(p_row + place[:, None], old_row, mask=m_p[:, None] & m_t)
            tl.store(p_row + own[:, None], own_row, mask=(o_n[:, None] < o_t) & m_t)
            # (5) t, and what a read takes
            grown, _grown = tl.split(tl.reshape(tl.exp(total + b_sum), [BT, 2]))
            old_k = old_c * (tl.exp(tl.cumsum(b_g, 0)) * norm_old)[:, None]
            own_k = own_c * (tl.exp(total + own_sum) * norm_new)[:, None]
            scale, at = norm_q * grown, row * H + i_h
            for n in range((K + BB - 1) // BB):
                o_b = n * BB + tl.arange(0, BB)
                m_b = (o_b < K)[:, None]
                b_q = tl.load(p_q + o_t * K + o_b[:, None], mask=m_b & m_t, other=0.0)
                b_k = tl.load(p_k + place * K + o_b[:, None], mask=m_b & m_p, other=0.0)
                b_t = add_product(tl.zeros([BB, BT], tl.float32), b_k, old_k, PARTS, 3)
                b_k = finite(tl.load(p_k + own * K + o_b[:, None], mask=m_b & m_n, other=0.0))
                b_t = b_q.to(tl.float32) * scale - add_product(b_t, b_k, own_k, PARTS, 3)
                if T == 1:
                    store_query(t, at, o_b, tl.sum(tl.where(o_t == 0, b_t, 0.0), 1), o_b < K, K, P)
                else:
                    store_parts(t + at * (P * T * K) + o_t * K + o_b[:, None], b_t, m_b & (o_t < T), T * K, P)
            if T == 1:
                store_parts(c + (at * BP + o_p) * P, tl.sum(tl.where(o_t == 0, old_c, 0.0), 1), o_p < BP, 1, P)
                tl.store(ends + at * 2, 1.0)
                tl.store(ends + at * 2 + 1, tl.sum(tl.sum(tl.where(o_t == 0, own_c, 0.0), 1), 0))
            else:
                p_c = c + at * (T * (1 + R)) + o_t * (1 + R)
                tl.store(p_c, tl.full([BT], 1.0, tl.float32), mask=o_t < T)
                tl.store(p_c + 1 + o_p[:, None], old_c, mask=m_p[:, None] & (o_t < T))
                tl.store(p_c + 1 + before + o_n[:, None], own_c, mask=m_n[:, None] & (o_t < T))
