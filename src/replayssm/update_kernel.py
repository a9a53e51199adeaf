"""The smallest batches, on a GPU: a step of one token in one launch, with the checkpoint updated at every token.

With so few rows a step is a chain of trips to memory; bytes are nothing. So no record waits longer than until the next
step: that folds it into the tile that it reads anyway, and no query is carried through records.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.fold_kernel import fold_record, load_some
from replayssm.formats_kernel import load_part, load_update, noise_words, store
from replayssm.read_kernel import store_output, zero_tile
from replayssm.step_kernel import append_key, append_value, channels, keep, load_row


@triton.jit
def update_kernel(
    planes, key, inputs, ring, weights, table, y, skip, gate,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    W: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, CHANNEL: tl.constexpr, DELTA: tl.constexpr,
    Q_FIRST: tl.constexpr, K_FIRST: tl.constexpr, V_FIRST: tl.constexpr, FORMAT: tl.constexpr, CARRY: tl.constexpr,
    GATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Fold what waits (a row has no committed records then), y = S t + own v, append: grid (V / BV, H, B).

    For checkpoints that hold what they are given (fp32, split16): others would be rounded at every token. Arguments as
    in kernels.prepare_kernel and read_kernel.read_tile; *_FIRST are the convolution's channels of q, k and v. Programs
    of one key group write the same key.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i_v, i_h, i_b, B = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    C: tl.constexpr = 2 * G * K + H * V
    slot, first, before, length, end, row = load_row(table, i_b, B)
    folds, flush = tl.load(table + 4 * B + i_b), tl.load(table + 8 * B + i_b)
    if slot < 0:
        zero_tile(y, row, i_h, i_v, 1, H, V, BV)
    else:
        i_g, o_v, o_k = i_h // (H // G), i_v * BV + tl.arange(0, BV), tl.arange(0, BK)
        o_c, o_x, m_v, m_k = i_h * V + o_v, i_g * K + o_k, o_v < V, o_k < K
        # (1) all that is in memory, asked for at once
        b_s = load_update(planes, slot, i_h, o_v, V, K, BV, BK, FORMAT)
        oldest = first + R - folds
        records = load_some(ring, slot, oldest, folds, i_h, o_v, o_k, H, G, V, K, R, CHANNEL, DELTA, 1)
        b_d, b_z = 0.0, 0.0
        if skip is not None:
            b_d = load_part(skip.data + i_h * skip.row + o_v * skip.token, m_v)
        if gate is not None:
            b_z = load_part(gate.data + row * gate.row + o_c, m_v)
        b_q, b_xq = channels(inputs.q, ring.conv, weights, None, row, 0, slot, end, o_x, m_k, Q_FIRST, C, L, W, 1)
        b_k, b_xk = channels(inputs.k, ring.conv, weights, None, row, 0, slot, end, o_x, m_k, K_FIRST, C, L, W, 1)
        b_v, b_xv = channels(inputs.v, ring.conv, weights, None, row, 0, slot, end, o_c, m_v, V_FIRST, C, L, W, 1)
        # (2) flush: usually one record, more where there were more rows before
        i = 0
        while i < folds:
            i += 1
            following = load_some(
                ring, slot, oldest + i, folds - i, i_h, o_v, o_k, H, G, V, K, R, CHANNEL, DELTA, 1
            )  # fmt: skip
            b_n, norm, b_u, b_g, w = records[0]
            b_s = fold_record(b_s, b_n, norm, b_u, b_g, w, CHANNEL, DELTA)
            records = following
        if folds > 0:
            tl.debug_barrier()  # all threads have loaded what is written over: of a small tile several hold the same
            store(planes, slot, i_h, o_v, b_s, noise_words(key, slot, flush), V, K, BV, BK, FORMAT)
        # (3) the token
        b_t, own, norm, g, w = CARRY(inputs, weights, row, i_h, o_k, m_k, b_q, b_k, K, GATES)
        b_y = tl.sum(b_s * b_t[None, :], 1)
        store_output(y, skip, gate, b_y, own, b_v, b_d, b_z, (row * H + i_h) * V + o_v, m_v)
        # (4) its record
        at = (first + before) % R
        keep(ring.conv, weights, slot, end, 0, o_x, b_xq, m_k, Q_FIRST, C, L)
        append_key(ring, weights, slot, end, at, i_g, o_k, b_k, b_xk, m_k, K_FIRST, C, L, K, R)
        append_value(ring, weights, slot, end, at, o_c, b_v, b_xv, m_v, V_FIRST, C, L, V, R)
        i_r = i_h * R + at
        if DELTA:
            tl.store(ring.norm.data + slot * ring.norm.slot + i_g * R + at, norm)
        if CHANNEL:
            tl.store(ring.g.data + slot * ring.g.slot + i_r * K + o_k, g, mask=m_k)
        else:
            tl.store(ring.g.data + slot * ring.g.slot + i_r, g)
        tl.store(ring.w.data + slot * ring.w.slot + i_r, w)
