"""Flushing, on a GPU: a row's records folded into its checkpoint in place, in whatever format it is stored.

`flush_rows` is a step's: some rows of V of one head, in blocks of columns. `fold_kernel` folds slots outside of steps,
`store_kernel` stores states that come from elsewhere.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import num_warps

from replayssm.arithmetic_kernel import INTERPRETED
from replayssm.fold_kernel import (
    ask,
    fold_in,
    fold_tile,
    gather,
    gather_walked,
    growth,
    load_keys,
    load_values,
    values,
    values_walked,
)
from replayssm.formats_kernel import (
    in_bf16,
    load_update,
    needs_whole_rows,
    noise_words,
    overwrites_scales,
    store,
    store_block,
    store_scales,
    update_parts,
    widest,
)
from replayssm.read_kernel import await_number, multiplied, unit_of
from replayssm.step_kernel import load_row


@triton.jit
def flush_rows(
    planes, key, ring, table, ready, t, answer, scratch, i_b, i_h, from_v, behind_v, B,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, PT: tl.constexpr, CHANNEL: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    BB: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr, DELTA: tl.constexpr, FORMAT: tl.constexpr,
    CHUNKS: tl.constexpr, CN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Fold the records in front of ring_start of column i_b's row into rows from_v to behind_v of head i_h, in place.

    Tiles of BV rows, in blocks of BB columns. There are CHUNKS chunks of CN records at most. With one, a tile is read
    again for every pass, so that little waits in registers: gdn asks it, rows with a scale are folded to see how wide
    they become, then it is folded and stored. kda needs scratch for what gather_walked leaves there; without it
    (None) every tile is walked through the records.
    S0 t of the new S0, as it is stored, goes into `answer` (or None) once t is there.
    """
    slot, first, _, length, _, row = load_row(table, i_b, B)
    folds, number, flush = tl.load(table + 4 * B + i_b), tl.load(table + 7 * B + i_b), tl.load(table + 8 * B + i_b)
    words = noise_words(key, slot, flush)
    first = (first + R - folds) % R
    PARTS: tl.constexpr = PT if T > 1 or in_bf16(FORMAT) else 1
    WARPS: tl.constexpr = 1 if INTERPRETED else num_warps()
    TILE: tl.constexpr = [BV, BN] if T > 1 or in_bf16(FORMAT) else [BV]
    p_t = t + (row * N + i_h // (H // N)) * (PARTS * T * K)
    p_y = None if answer is None else answer + (row * H + i_h) * (T * V)
    if CHUNKS == 1 and (not CHANNEL or scratch is not None):
        if scratch is None:
            gathered = gather(ring, slot, first, folds, i_h, H, G, K, R, BB, DELTA, CN)
        else:
            gathered = gather_walked(ring, slot, first, folds, i_h, scratch, H, G, K, R, BK, CN)
        if answer is not None:
            await_number(ready, slot, number, unit_of(i_h, H // G, BJ))
        if T == 1:  # values of a tile are on their way while the one before is folded; with several tokens that spills
            following = load_values(ring, slot, first, folds, i_h, from_v, behind_v, V, R, BV, CN)
        while from_v < behind_v:
            o_v, b_w = from_v + tl.arange(0, BV), 0.0
            if T == 1:
                b_v = following
                following = load_values(ring, slot, first, folds, i_h, from_v + BV, behind_v, V, R, BV, CN)
            else:
                b_v = load_values(ring, slot, first, folds, i_h, from_v, behind_v, V, R, BV, CN)
            if DELTA:
                b_w = tl.zeros([BV, CN], tl.float32)
                for n in tl.range((K + BB - 1) // BB, num_stages=3):
                    b_s = load_update(planes, slot, i_h, o_v, V, K, BV, BB, FORMAT, n * BB)
                    b_k = load_keys(ring, slot, first, folds, i_h, scratch, n * BB, H, G, K, R, BB, DELTA, CN, False)
                    b_w = ask(b_w, b_s, b_k, update_parts(FORMAT))
            if scratch is None:
                b_u = values(b_v.to(tl.float32), b_w, gathered, DELTA)
            else:
                b_u = values_walked(b_v, b_w, gathered)
            most = tl.zeros([BV], tl.int32)
            if needs_whole_rows(FORMAT):
                for n in tl.range((K + BB - 1) // BB, num_stages=3):
                    b_s = load_update(planes, slot, i_h, o_v, V, K, BV, BB, FORMAT, n * BB)
                    b_k = load_keys(ring, slot, first, folds, i_h, scratch, n * BB, H, G, K, R, BB, DELTA, CN, True)
                    grown = growth(gathered, scratch, n * BB, K, BB, CN)
                    most = widest(most, fold_in(b_s, b_u, b_k, grown), n * BB, K)
            b_y = tl.zeros(TILE, tl.float32)
            for n in tl.range((K + BB - 1) // BB, num_stages=3):
                b_s = load_update(planes, slot, i_h, o_v, V, K, BV, BB, FORMAT, n * BB)
                b_k = load_keys(ring, slot, first, folds, i_h, scratch, n * BB, H, G, K, R, BB, DELTA, CN, True)
                b_s = fold_in(b_s, b_u, b_k, growth(gathered, scratch, n * BB, K, BB, CN))
                if overwrites_scales(FORMAT) or (needs_whole_rows(FORMAT) and WARPS > 1):
                    tl.debug_barrier()  # all threads have loaded what is written over; the loop is no pipeline then
                b_s = store_block(planes, slot, i_h, o_v, b_s, most, words, n * BB, V, K, BV, BB, FORMAT)
                if answer is not None:
                    b_y = multiplied(b_y, b_s, p_t, n * BB, length, T, K, P, PT, BN, BB, FORMAT)
            if needs_whole_rows(FORMAT):
                tl.debug_barrier()
                store_scales(planes, slot, i_h, o_v, most, V, FORMAT)
            store_answer(p_y, b_y, o_v, length, T, V, BN)
            from_v += BV
    else:
        if answer is not None:
            await_number(ready, slot, number, unit_of(i_h, H // G, BJ))
        while from_v < behind_v:
            o_v = from_v + tl.arange(0, BV)
            b_s = load_update(planes, slot, i_h, o_v, V, K, BV, BK, FORMAT)
            b_s = fold_tile(b_s, ring, slot, first, folds, i_h, from_v, H, G, V, K, R, CHANNEL, BV, BK, DELTA, AHEAD)
            if needs_whole_rows(FORMAT):
                tl.debug_barrier()
            b_s = store(planes, slot, i_h, o_v, b_s, words, V, K, BV, BK, FORMAT)
            if answer is not None:
                b_y = multiplied(tl.zeros(TILE, tl.float32), b_s, p_t, 0, length, T, K, P, PT, BN, BK, FORMAT)
                store_answer(p_y, b_y, o_v, length, T, V, BN)
            from_v += BV


@triton.jit
def store_answer(p, b_y, o_v, length, T: tl.constexpr, V: tl.constexpr, BN: tl.constexpr):
    """S0 t of rows o_v, as `multiplied` has it, into [T, V]; p may be None."""
    if p is not None:
        if T > 1:
            o_n = tl.arange(0, BN)
            tl.store(p + o_n * V + o_v[:, None], b_y, mask=(o_n < length) & (o_v < V)[:, None])
        else:
            tl.store(p + o_v, b_y if len(b_y.shape) == 1 else tl.sum(b_y, 1), mask=o_v < V)


@triton.jit
def fold_kernel(
    planes, into, key, ring, slots, start, counts, flushes,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, CHANNEL: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr, FORMAT: tl.constexpr, OUT: tl.constexpr,
    IN_PLACE: tl.constexpr,
):  # fmt: skip
    """The state of n slots after their first `counts` records, in place or as [n, H, V, K]: flush and materialize.

    One program per slot, head and tile of V. In place, slots without records are left alone.
    """
    i_n, i_h, i_v = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    slot, count = tl.load(slots + i_n).to(tl.int64), tl.load(counts + i_n)
    i_out = slot if IN_PLACE else i_n.to(tl.int64)
    if (not IN_PLACE) or ((slot >= 0) & (count > 0)):
        o_v = i_v * BV + tl.arange(0, BV)
        b_s = load_update(planes, slot, i_h, o_v, V, K, BV, BK, FORMAT)
        b_s = fold_tile(
            b_s, ring, slot, tl.load(start + i_n), count, i_h, i_v * BV, H, G, V, K, R, CHANNEL, BV, BK, DELTA
        )  # fmt: skip
        flush = 0
        if IN_PLACE:
            flush = tl.load(flushes + i_n)
            if needs_whole_rows(FORMAT):
                tl.debug_barrier()  # all threads have loaded what is written over
        store(into, i_out, i_h, o_v, b_s, noise_words(key, slot, flush), V, K, BV, BK, OUT)


@triton.jit
def store_kernel(
    state, planes, key, slots,
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """States [n, H, V, K] in fp32 into the planes of n slots, as flush number 0; grid (V / BV, H, n)."""
    i_v, i_h, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + i_n).to(tl.int64)
    o_v, o_k = i_v * BV + tl.arange(0, BV), tl.arange(0, BK)
    p_s = state + ((i_n * H + i_h) * V + o_v[:, None]) * K + o_k
    b_s = tl.load(p_s, mask=(o_v < V)[:, None] & (o_k < K), other=0.0)
    store(planes, slot, i_h, o_v, b_s, noise_words(key, slot, 0), V, K, BV, BK, FORMAT)
