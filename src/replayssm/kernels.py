"""Implementation `triton`: what all recurrences share on a GPU. Imported only when a cache asks for it.

One layer's step is three launches that overlap; at small batch the first two are one, then all of them:

    carry   convolution, gates, norms, append, then t and c (`carry` of recurrences/<name>/kernel.py), for a row and
            some heads of a key group. Some programs go through the rows, in order
    flush   records of rows that are due are folded into their states (fold_kernel.py), some rows of V of a head at a
            time, and the new state is multiplied by t at once. A few programs go through these parts
    read    y = c_0 S0 t + c . v, skip, output gate: one program per row, head and tile of V

A launch begins when all programs of the one before have begun (programmatic dependence). What it needs it awaits by
name: `ready` holds, per slot and head, the newest step that was carried (or flushed). Where launches don't overlap,
nothing is ever awaited. At the smallest batch every program does the carry that it needs by itself.

Everything that changes from step to step is in device tensors (DeviceStep.table, cursors, rings). In Triton's
interpreter (TRITON_INTERPRET=1) the same kernels run on a CPU, for tests. Layouts inside a slot are dense; the stride
from slot to slot may be anything, and slot arithmetic is int64.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_warps

from replayssm import formats
from replayssm.arithmetic_kernel import INTERPRETED, add_product, parts_of, sigmoid, store_parts
from replayssm.fold_kernel import (
    ask,
    chunk_size,
    fold_in,
    fold_tile,
    gather,
    gather_walked,
    growth,
    load_keys,
    load_values,
    scratch_size,
    values,
    values_walked,
)
from replayssm.formats_kernel import (
    decode_read,
    divides,
    fetch_read,
    in_bf16,
    load_part,
    load_update,
    needs_whole_rows,
    noise_words,
    overwrites_scales,
    read_kind,
    read_parts,
    scaled,
    store,
    store_block,
    store_scales,
    stores_floats,
    summed,
    update_parts,
    widest,
)
from replayssm.ring import DeviceStep, LayerState, folds_beside, in_one_launch


class Field(NamedTuple):
    """A caller's tensor [B, T, ...], dense behind T, with its strides from row to row and token to token."""

    data: Tensor
    row: int
    token: int


class Pool(NamedTuple):
    """A tensor of the cache [S, ...], dense behind S, with its stride from slot to slot."""

    data: Tensor
    slot: int


class Ring(NamedTuple):
    """The pools of ring.Records and the convolution's; None where they hold nothing."""

    k: Pool
    v: Pool
    g: Pool
    w: Pool
    norm: Pool
    back: Pool | None
    conv: Pool | None


class Inputs(NamedTuple):
    """What a step brings: convolution inputs and raw gates, or (without weights) q, k, v, g, w ready to be used."""

    q: Field
    k: Field
    v: Field
    g: Field | None
    w: Field


class LayerWeights(NamedTuple):
    """Parameters of convolution and gates; scale, low and high as the recurrence's `gates` uses them.

    All None where inputs are ready to be used.
    """

    conv_weight: Tensor | None = None  # [C, W] with its strides; fastest where that of C is 1
    conv_channel: int = 0
    conv_tap: int = 0
    conv_bias: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    scale: float | None = None
    low: float | None = None
    high: float | None = None


# ---- carried queries ----


@triton.jit
def store_query(t, i, o_k, b_t, m_k, K: tl.constexpr, P: tl.constexpr):
    """A carried query, number i: as it is, or its parts (where t is bf16)."""
    if t.dtype.element_ty == tl.bfloat16:
        store_parts(t + (i * K + o_k) * P, b_t, m_k, 1, P)
    else:
        tl.store(t + i * K + o_k, b_t, mask=m_k)


@triton.jit
def load_columns(p, o, BN: tl.constexpr, P: tl.constexpr):
    """Parts side by side (store_parts) of entries o as a tile [len(o), BN] for a product: zero beyond the P."""
    o_n = tl.arange(0, BN)
    return tl.load(p + o[:, None] * P + o_n, mask=o_n < P, other=0.0)


@triton.jit
def multiplied(
    b_y, b_s, p_t, from_k, length,
    T: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PT: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """b_y + S0 t for BB columns from from_k on: b_s [BV, BB] as fetch_read has it or (PARTS below) decoded.

    b_y is [BV, BN], of tokens or (T = 1) of t's parts, by products on tensor cores. Or (T = 1, S0 not in bf16) [BV].
    """
    o_k, o_n = from_k + tl.arange(0, BB), tl.arange(0, BN)
    if T > 1:
        PARTS: tl.constexpr = read_parts(FORMAT)
        m = o_n < length if divides(BB, K) else (o_n < length) & (o_k < K)[:, None]
        for i in tl.static_range(PT):
            b_t = tl.load(p_t + i * T * K + o_n * K + o_k[:, None], mask=m, other=0.0)
            b_y = add_product(b_y, b_s, b_t, min(PARTS, P - i), 1)
    elif in_bf16(FORMAT):
        m = o_n < PT if divides(BB, K) else (o_n < PT) & (o_k < K)[:, None]
        b_y = add_product(b_y, b_s, tl.load(p_t + o_k[:, None] * PT + o_n, mask=m, other=0.0), 1, 1)
    else:
        b_y += tl.sum(b_s.to(tl.float32) * load_part(p_t + o_k, None if divides(BB, K) else o_k < K), 1)
    return b_y


# ---- a step's inputs ----


@triton.jit
def load_row(table, i_b, B):
    """Column i_b of a step's table: slot, ring_start, num_committed, tokens, conv_end, and the caller's row."""
    return (
        tl.load(table + i_b).to(tl.int64), tl.load(table + B + i_b), tl.load(table + 2 * B + i_b),
        tl.load(table + 3 * B + i_b), tl.load(table + 5 * B + i_b), tl.load(table + 6 * B + i_b).to(tl.int64),
    )  # fmt: skip


@triton.jit
def channels(
    field, conv, weights, parent, row, i, slot, end, o_c, m_c, FIRST: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    W: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Channels o_c of a field for token i: as the recurrence takes them, fp32, rounded as activations are; and raw.

    With weights: y = silu(bias + sum_d weight[:, W - 1 - d] x_d), x_0 the token's input, x_d the one d before it:
    another token's of the step, or one of the convolution's ring of L places, whose channels begin at FIRST for this
    field.
    """
    p_x = field.data + row * field.row + o_c
    b_x = tl.load(p_x + i * field.token, mask=m_c, other=0.0)
    b_y = b_x
    if weights.conv_weight is not None:
        o_w = FIRST + o_c
        p_pool = conv.data + slot * conv.slot + o_w
        p_w = weights.conv_weight + o_w * weights.conv_channel
        b_sum = b_x.to(tl.float32) * tl.load(p_w + (W - 1) * weights.conv_tap, mask=m_c, other=0.0).to(tl.float32)
        at = i
        for d in tl.static_range(1, W):
            if parent is not None:
                # behind a root come the committed inputs, -1 the newest
                at = tl.where(at >= 0, tl.load(parent + row * T + tl.maximum(at, 0)), at - 1)
            else:
                at = at - 1
            p_d = p_pool + (end + at + L) % L * C
            if T > 1:
                p_d = tl.where(at < 0, p_d, p_x + at * field.token)
                b_d = tl.load(p_d, mask=m_c, other=0.0).to(tl.float32)
            else:
                b_d = tl.load(p_d, mask=m_c & (at < 0), other=0.0).to(tl.float32)
            b_sum += b_d * tl.load(p_w + (W - 1 - d) * weights.conv_tap, mask=m_c, other=0.0).to(tl.float32)
        if weights.conv_bias is not None:
            b_sum += tl.load(weights.conv_bias + o_w, mask=m_c, other=0.0).to(tl.float32)
        b_y = (b_sum * sigmoid(b_sum)).to(b_x.dtype)
    return b_y.to(tl.float32), b_x


@triton.jit
def keep(
    conv, weights, slot, end, i, o_c, b_x, m_c, FIRST: tl.constexpr, C: tl.constexpr, L: tl.constexpr
):  # fmt: skip
    """Raw inputs of token i into the convolution's ring, for later steps."""
    if weights.conv_weight is not None:
        tl.store(conv.data + slot * conv.slot + (end + i) % L * C + FIRST + o_c, b_x, mask=m_c)


@triton.jit
def append_key(
    ring, weights, slot, end, place, i_g, o_k, b_k, b_x, m_k, FIRST: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Key of a group into the ring, and the raw inputs it came from, channels FIRST on, into the convolution's."""
    keep(ring.conv, weights, slot, end, 0, i_g * K + o_k, b_x, m_k, FIRST, C, L)
    p_k = ring.k.data + slot * ring.k.slot + (i_g * R + place) * K + o_k
    tl.store(p_k, b_k.to(ring.k.data.dtype.element_ty), mask=m_k)


@triton.jit
def append_value(
    ring, weights, slot, end, place, o_c, b_v, b_x, m_c, FIRST: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    V: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The same of value channels o_c."""
    keep(ring.conv, weights, slot, end, 0, o_c, b_x, m_c, FIRST, C, L)
    p_v = ring.v.data + slot * ring.v.slot + (o_c // V * R + place) * V + o_c % V
    tl.store(p_v, b_v.to(ring.v.data.dtype.element_ty), mask=m_c)


@triton.jit
def ancestors(parent, row, W: tl.constexpr, T: tl.constexpr):
    """Of each of a tree's T tokens the W - 1 before it, the nearest first; -1, -2, ... are committed, -1 the newest.

    Looked up once for all channels: each is a chain of loads.
    """
    found = ()
    for i in tl.static_range(T):
        at, path = i, ()
        for _ in tl.static_range(W - 1):
            at = tl.where(at >= 0, tl.load(parent + row * T + tl.maximum(at, 0)), at - 1)
            path = path + (at,)  # type: ignore[assignment]
        found = found + (path,)  # type: ignore[assignment]
    return found


@triton.jit
def convolved(
    field, conv, weights, paths, row, slot, end, o_c, m_c, length, FIRST: tl.constexpr, C: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """What `channels` says of each of T tokens, as a tuple, both as activations; every weight is loaded once.

    All loads come before any store, so that none waits for one; those of a chain (no `paths`, see ancestors) once.
    """
    p_x = field.data + row * field.row + o_c
    p_pool = conv.data + slot * conv.slot + FIRST + o_c if weights.conv_weight is not None else p_x
    raw, found, taps, old = (), (), (), ()
    for i in tl.static_range(T):
        b_x = tl.load(p_x + i * field.token, mask=m_c & (i < length), other=0.0)
        raw = raw + (b_x,)  # type: ignore[assignment]
    if weights.conv_weight is None:
        for i in tl.static_range(T):
            found = found + ((raw[i], raw[i]),)  # type: ignore[assignment]
        return found
    p_w = weights.conv_weight + (FIRST + o_c) * weights.conv_channel
    for d in tl.static_range(W):
        b_w = tl.load(p_w + (W - 1 - d) * weights.conv_tap, mask=m_c, other=0.0).to(tl.float32)
        taps = taps + (b_w,)  # type: ignore[assignment]
    for d in tl.static_range(1, W):
        b_x = tl.load(p_pool + (end + L - d) % L * C, mask=m_c, other=0.0)
        old = old + (b_x,)  # type: ignore[assignment]
    for i in tl.static_range(T):
        b_sum = taps[0] * raw[i].to(tl.float32)  # type: ignore[misc]
        for d in tl.static_range(1, W):
            if paths is not None:
                at = paths[i][d - 1]
                p_d = tl.where(at < 0, p_pool + (end + at + L) % L * C, p_x + at * field.token)
                b_d = tl.load(p_d, mask=m_c & (i < length), other=0.0)
            elif i >= d:
                b_d = raw[i - d]
            else:
                b_d = old[d - i - 1]
            b_sum += taps[d] * b_d.to(tl.float32)
        if weights.conv_bias is not None:
            b_sum += tl.load(weights.conv_bias + FIRST + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_y = (b_sum * sigmoid(b_sum)).to(b_x.dtype)
        found = found + ((b_y, raw[i]),)
    return found


@triton.jit
def append_tokens(
    inputs, ring, weights, parent, q, row, slot, end, place, length, i_g, from_c, count,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, Q_FIRST: tl.constexpr, K_FIRST: tl.constexpr,
    V_FIRST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """`append` of several tokens, from place `place` on, with NORM the keys' inverse norms as well; and q [B, G, T, K].

    For a key group and the `count` (at most BC) channels of v from `from_c` on.
    """
    C: tl.constexpr = 2 * G * K + H * V
    BX: tl.constexpr = min(BC, 128)
    o_k = tl.arange(0, BK)
    m_k, o_x = o_k < K, i_g * K + o_k
    paths = None if parent is None or W == 1 else ancestors(parent, row, W, T)
    keys = convolved(inputs.k, ring.conv, weights, paths, row, slot, end, o_x, m_k, length, K_FIRST, C, L, W, T)
    for i in tl.static_range(T):
        own, m = (place + i) % R, m_k & (i < length)
        b_k, b_x = keys[i]
        p_k = ring.k.data + slot * ring.k.slot + (i_g * R + own) * K + o_k
        tl.store(p_k, b_k.to(ring.k.data.dtype.element_ty), mask=m)
        keep(ring.conv, weights, slot, end, i, o_x, b_x, m, K_FIRST, C, L)
        if NORM:
            b_k = b_k.to(tl.float32)
            p_norm = ring.norm.data + slot * ring.norm.slot + i_g * R + own
            tl.store(p_norm, 1 / tl.sqrt(tl.sum(b_k * b_k, 0) + 1e-6), mask=i < length)
    queries = convolved(inputs.q, ring.conv, weights, paths, row, slot, end, o_x, m_k, length, Q_FIRST, C, L, W, T)
    for i in tl.static_range(T):
        b_q, b_x = queries[i]
        tl.store(q + ((row * G + i_g) * T + i) * K + o_k, b_q.to(q.dtype.element_ty), mask=m_k)
        keep(ring.conv, weights, slot, end, i, o_x, b_x, m_k & (i < length), Q_FIRST, C, L)
    for part in tl.static_range(BC // BX):
        o_x = part * BX + tl.arange(0, BX)
        o_c, m_c = from_c + o_x, o_x < count
        values = convolved(inputs.v, ring.conv, weights, paths, row, slot, end, o_c, m_c, length, V_FIRST, C, L, W, T)
        for i in tl.static_range(T):
            b_v, b_x = values[i]
            p_v = ring.v.data + slot * ring.v.slot + (o_c // V * R + (place + i) % R) * V + o_c % V
            tl.store(p_v, b_v.to(ring.v.data.dtype.element_ty), mask=m_c & (i < length))
            keep(ring.conv, weights, slot, end, i, o_c, b_x, m_c & (i < length), V_FIRST, C, L)


# ---- a row's step ----


@triton.jit
def publish(ready, table, i_b, at, B):
    """What this program has stored for column i_b is in memory: the slot's ready gets the step's number at `at`."""
    tl.debug_barrier()
    slot, number = tl.load(table + i_b).to(tl.int64), tl.load(table + 7 * B + i_b)
    tl.atomic_xchg(ready.data + slot * ready.slot + at, number, sem="release")


@triton.jit
def unit_of(i_h, J: tl.constexpr, BJ: tl.constexpr):
    """The first of the heads that are carried with head i_h, J to a key group and BJ at a time: its place in ready."""
    return i_h // J * J + i_h % J // BJ * BJ


@triton.jit
def await_number(ready, slot, number, at):
    """Until place `at` was published. Who publishes runs before, or (PDL) has begun before, in all its programs."""
    while tl.atomic_add(ready.data + slot * ready.slot + at, 0, sem="acquire") != number:
        pass


@triton.jit
def prepare_kernel(
    planes, key, inputs, ring, weights, table, ready, parent, kin, q, t, c, ends, answer, scratch, B, flushers, part,
    least, T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, W: tl.constexpr, P: tl.constexpr, PT: tl.constexpr, BP: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, FORMAT: tl.constexpr, CARRY: tl.constexpr, GATES: tl.constexpr,
    CHUNKS: tl.constexpr, CN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, ROLE: tl.constexpr,
):  # fmt: skip
    """All that a read awaits: the last flushers programs flush, those before carry; each goes through its share. Where
    these are launches of their own, ROLE says which: it needs fewer registers then.

    Append and carry: BJ heads of a key group and row; rows that are due come first, since flushes await them. Flush:
    `part` rows of V of a head of a row that is due, BF at a time, in as many programs as get `least` such parts. While
    a tile is there it is also multiplied by the carried queries, once they are there (programs that carry have begun
    before): a read of that row needs no checkpoint. The first of a layer's launches begins before the one in front of
    it has ended, and awaits that.

    | Name       | Shape          | Dtype  | Dir    | Meaning                                                  |
    | planes     | by format      |        | in/out | checkpoints of the rows that are due                     |
    | inputs     | Inputs         |        | in     | what the step brings                                     |
    | ring       | Ring           |        | in/out | records; the step's own are written                      |
    | weights    | LayerWeights   |        | in     | of convolution and gates                                 |
    | table      | [10, B]        | int32  | in     | DeviceStep.table                                         |
    | ready      | [S, H + n]     | int32  | out    | the step's number, once t, c, v of a head (a flushed     |
    |            |                |        |        | part of a head) are in memory                            |
    | parent     | [B, T]         | int32  | in     | of a tree, else None; kin [B, T, T] likewise             |
    | q          | [B, G, T, K]   |        | out    | scratch where T > 1: queries as the convolution left them|
    | answer     | [B, H, T, V]   | fp32   | out    | S0 t of the rows that were due, or None                  |
    | scratch    | [flushers, n]  | fp32   | out    | for gather_walked (kda), or None: tiles are walked       |
    | Of one token (T = 1):
    | t          | [B, N, K]      | fp32   | out    | carried queries of N = G or H heads,                     |
    |            | or [B, N, K,PT]| bf16   |        | or their parts side by side                              |
    | c          | [B, H, BP, PT] | bf16   | out    | parts of the weights of v by record number, 0 beyond     |
    | ends       | [B, H, 2]      | fp32   | out    | weights of S0 t and of the token's own v                 |
    | Of several:
    | t          | [B, N,PT, T, K]| bf16   | out    | in PT parts that add up to them                          |
    | c          | [B, H, T, 1+R] | fp32   | out    | weights of S0 t, then of v by record number              |
    """
    i, carriers = tl.program_id(0), tl.num_programs(0) - flushers
    if PDL:
        if ROLE != "flush":
            gdc_wait()
        gdc_launch_dependents()
    if ROLE == "flush" or (ROLE == "both" and i >= carriers):
        if CHUNKS > 0:
            i -= carriers
            own = None if scratch is None else scratch + i * scratch_size(CN, K)
            parts = (V + part - 1) // part
            behind = tl.load(table + 9 * B) * (H * parts)
            active = tl.minimum(flushers, (behind + least - 1) // least)
            if i >= active:
                behind = 0
            while i < behind:
                i_b, i_h, i_v = B - 1 - i // (H * parts), i // parts % H, i % parts
                flush_rows(
                    planes, key, ring, table, ready, t, answer, own, i_b, i_h, i_v * part,
                    tl.minimum((i_v + 1) * part, V), B,
                    T, H, G, N, V, K, R, P, PT, CHANNEL, BF, BK, BB, BT, BJ, DELTA, FORMAT, CHUNKS, CN, AHEAD,
                )  # fmt: skip
                publish(ready, table, i_b, H + i_h * parts + i_v, B)
                i += active
        if PDL and ROLE == "flush":
            if tl.program_id(0) == flushers - 1:
                gdc_wait()
    else:
        J: tl.constexpr = H // G
        units: tl.constexpr = (J + BJ - 1) // BJ
        others = B - tl.load(table + 9 * B)
        while i < B * (G * units):
            i_b, i_u = i // (G * units) + others, i % (G * units)
            i_b = tl.where(i_b < B, i_b, i_b - B)
            if tl.load(table + i_b) >= 0:
                i_g, i_j = i_u // units, i_u % units
                i_h = i_g * J + i_j * BJ
                count = tl.minimum(BJ, J - i_j * BJ) * V
                CARRY(
                    inputs, ring, weights, table, parent, kin, q, t, c, ends, i_b, i_g, i_j, i_h * V, count, B,
                    T, H, G, V, K, R, L, W, PT, BP, BT, BK, BJ, BC, CHANNEL, GATES,
                )  # fmt: skip
                publish(ready, table, i_b, i_h, B)
            i += carriers


@triton.jit
def fetch_beside(
    ring, skip, gate, slot, first, before, row, i_h, i_v, V: tl.constexpr, R: tl.constexpr, BP: tl.constexpr,
    BV: tl.constexpr, FLUSHED: tl.constexpr,
):  # fmt: skip
    """Of what read_tile needs, all that is there before the carry: values of records (unless FLUSHED), D, z."""
    o_p, o_x = tl.arange(0, BP), tl.arange(0, BV)
    o_v = i_v * BV + o_x
    m_v = None if V % BV == 0 else o_v < V
    b_v, b_d, b_z = 0.0, 0.0, 0.0
    if not FLUSHED:
        m_p = (o_p < before)[:, None] if V % BV == 0 else (o_p < before)[:, None] & (o_v < V)
        p_v = ring.v.data + slot * ring.v.slot + (i_h * (R * V) + i_v * BV)
        b_v = tl.load(p_v + ((first + o_p) % R * V)[:, None] + o_x, mask=m_p, other=0.0)
    if skip is not None:
        b_d = load_part(skip.data + i_h * skip.row + o_v * skip.token, m_v)
    if gate is not None:
        b_z = load_part(gate.data + row * gate.row + i_h * V + o_v, m_v)
    return b_v, b_d, b_z


@triton.jit
def fetch_carried(
    slot, row, number, ready, t, c, ends, answer, i_h,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """What the carry left for a head, once it is there: weights of S0 t and of the own v; c, and t if it is in fp32."""
    if ready is not None:
        await_number(ready, slot, number, unit_of(i_h, H // G, BJ))
    p_ends = ends + (row * H + i_h) * 2
    b_c, b_t = 0.0, 0.0
    if answer is None:
        b_c = load_columns(c + (row * H + i_h) * (BP * P), tl.arange(0, BP), BN, P)
        if not in_bf16(FORMAT):
            o_k = tl.arange(0, BK)
            b_t = load_part(t + (row * N + i_h // (H // N)) * K + o_k, None if K == BK else o_k < K)
    return tl.load(p_ends), tl.load(p_ends + 1), b_c, b_t


@triton.jit
def read_tile(
    planes, codes, blocks, rows, beside, carried, ring, slot, first, before, row, t, answer, y, skip, gate, i_h, i_v,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    FORMAT: tl.constexpr, BB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = (c_0 S0 t + sum_j c_j v_j + D v) silu(z) for the caller's row `row`, head i_h, part i_v of V.

    S0 [BV, BK] comes as stored (fetch_read) and is decoded when the carry is there: few registers wait. Or (BB < BK, no
    scales) it is fetched here, BB columns at a time, STAGES such blocks on their way at most. Of a row that was flushed
    S0 t may be there already (answer); it has no records but the token's own.

    | Name          | Shape          | Dtype  | Dir | Meaning                                       |
    | beside        | fetch_beside   |        | in  |                                               |
    | ring          | Ring           |        | in  | records                                       |
    | carried       | fetch_carried  |        | in  |                                               |
    | t             | prepare_kernel |        | in  | in parts                                      |
    | answer        | prepare_kernel |        | in  | None where the checkpoint is read             |
    | y             | [B, T, H, V]   |        | out | T is 1                                        |
    | skip          | [H, V]         |        | in  | D as a Field (strides of H and V), or None    |
    | gate          | [B, T, H, V]   |        | in  | z as a Field, or None                         |

    A checkpoint in bf16 is multiplied by t's parts on tensor cores, so are the records' values by c's; any other is
    multiplied as it is. What counts is how few instructions a tile takes (docs/log.md).
    """
    b_v, b_d, b_z = beside
    decay, own, b_c, b_t = carried
    o_x = tl.arange(0, BV)
    o_v = i_v * BV + o_x
    m_v = None if V % BV == 0 else o_v < V
    p_v = ring.v.data + slot * ring.v.slot + (i_h * (R * V) + i_v * BV)
    b_own = load_part(p_v + (first + before) % R * V + o_x, m_v).to(tl.float32)
    # (1) y = c_0 S0 t + c . v
    p_t = t + (row * N + i_h // (H // N)) * (K * (P if in_bf16(FORMAT) else 1))
    if answer is not None:
        b_y = load_part(answer + (row * H + i_h) * V + o_v, m_v) * decay
    elif in_bf16(FORMAT):
        b_y = tl.zeros([BV, BN], tl.float32)
        for n in tl.range((K + BB - 1) // BB, num_stages=STAGES):
            b_s = codes if BB == BK else fetch_read(planes, slot, i_h, o_v, V, K, BB, FORMAT, n * BB)[0]
            b_y = multiplied(b_y, b_s, p_t, n * BB, 1, 1, K, P, P, BN, BB, FORMAT)
        b_y = tl.sum(add_product(b_y * decay, tl.trans(b_v), b_c, parts_of(b_v.dtype), 1), 1)
    else:
        tile, scale = decode_read(codes, blocks, rows, BV, BK, FORMAT)
        b_y = summed(tile, scale, b_t, read_kind(FORMAT)) * decay
        b_y += tl.sum(add_product(tl.zeros([BV, BN], tl.float32), tl.trans(b_v), b_c, parts_of(b_v.dtype), 1), 1)
    # (2) skip and output gate
    if skip is not None:
        b_y += (b_d.to(tl.float32) + own) * b_own
    else:
        b_y += own * b_own
    if gate is not None:
        b_z = b_z.to(tl.float32)
        b_y *= b_z * sigmoid(b_z)
    p_y = y + (row * H + i_h) * V + o_v
    if m_v is None:
        tl.store(p_y, b_y.to(y.dtype.element_ty))
    else:
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_v)


@triton.jit
def read_tokens(
    planes, codes, blocks, rows, ring, slot, first, before, length, row, number, ready, t, c, answer, y, skip, gate,
    i_h, i_v,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, PT: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr, BJ: tl.constexpr, FORMAT: tl.constexpr, BB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """read_tile of several tokens at once, by products on tensor cores.

    Products are as exact as P parts: 2 for an output of 16 bits, 3 for fp32.
    """
    KIND: tl.constexpr = read_kind(FORMAT)
    o_r, o_t, o_v = tl.arange(0, BR), tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
    m_r, m_t, m_v = o_r < before + length, o_t < length, (o_v < V)[:, None]
    b_d, b_z = 0.0, 0.0
    if skip is not None:
        b_d = tl.load(skip.data + i_h * skip.row + o_v * skip.token, mask=o_v < V, other=0.0)
    if gate is not None:
        p_z = gate.data + row * gate.row + o_t * gate.token + i_h * V + o_v[:, None]
        b_z = tl.load(p_z, mask=m_v & m_t, other=0.0)
    if ready is not None:
        await_number(ready, slot, number, unit_of(i_h, H // G, BJ))
    p_v = ring.v.data + slot * ring.v.slot + i_h * R * V + o_v[:, None]
    b_v = tl.load(p_v + (first + o_r) % R * V, mask=m_v & m_r, other=0.0)
    p_c = c + (row * H + i_h) * (T * (1 + R)) + o_t * (1 + R)
    b_c = tl.load(p_c + 1 + o_r[:, None], mask=m_r[:, None] & m_t, other=0.0)
    # (1) y = c_0 S0 t + c . v; scales of rows multiply sums, those of blocks do not
    scale = 1.0
    if BB == BK and answer is None:
        if in_bf16(FORMAT):
            whole = codes
        else:
            whole, scale = decode_read(codes, blocks, rows, BV, BK, FORMAT)
            if KIND == "fp4" or KIND == "mxfp4":
                whole, scale = scaled(whole, scale, KIND), 1.0
    p_t = t + (row * N + i_h // (H // N)) * (PT * T * K)
    if answer is not None:
        b_y = tl.load(answer + ((row * H + i_h) * T + o_t) * V + o_v[:, None], mask=m_v & m_t, other=0.0)
    else:
        b_y = tl.zeros([BV, BT], tl.float32)
        for n in tl.range((K + BB - 1) // BB, num_stages=STAGES):
            b_s = whole if BB == BK else fetch_read(planes, slot, i_h, o_v, V, K, BB, FORMAT, n * BB)[0]
            b_y = multiplied(b_y, b_s, p_t, n * BB, length, T, K, P, PT, BT, BB, FORMAT)
    b_y *= (scale * tl.full([BV], 1.0, tl.float32))[:, None] * tl.load(p_c, mask=m_t, other=0.0)
    b_y = add_product(b_y, b_v, b_c, min(parts_of(b_v.dtype), P), P)
    # (2) skip and output gate
    if skip is not None:
        own = (o_r[:, None] == before + o_t).to(tl.float32)
        own = add_product(tl.zeros([BV, BT], tl.float32), b_v, own, min(parts_of(b_v.dtype), P), 1)
        b_y += b_d.to(tl.float32)[:, None] * own  # type: ignore[attr-defined]
    if gate is not None:
        b_z = b_z.to(tl.float32)  # type: ignore[attr-defined]
        b_y *= b_z * sigmoid(b_z)
    b_y = tl.where(m_t, b_y, 0.0)
    p_y = y + (row * T * H + i_h) * V + o_t * (H * V) + o_v[:, None]
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_v & (o_t < T))


@triton.jit
def zero_tile(y, row, i_h, i_v, T: tl.constexpr, H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Outputs of a padding row."""
    o_v = i_v * BV + tl.arange(0, BV)
    for i in range(T):
        p_y = y + ((row * T + i) * H + i_h) * V + o_v
        tl.store(p_y, tl.zeros([BV], tl.float32).to(y.dtype.element_ty), mask=o_v < V)


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
def read_part(
    planes, ring, slot, first, before, length, row, number, ready, t, c, ends, answer, y, skip, gate, i_h, i_v,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, PT: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, FORMAT: tl.constexpr, BB: tl.constexpr, STAGES: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """read_tile of RUN tiles, or read_tokens; the checkpoint (unless there is an answer) is fetched before the carry is
    awaited.
    """
    tile = fetch_part(
        planes, ring, skip, gate, slot, first, before, row, answer, i_h, i_v, T, V, K, R, BP, BV, BK, FORMAT
    )  # fmt: skip
    if T > 1:
        codes, blocks, rows, _ = tile
        read_tokens(
            planes, codes, blocks, rows, ring, slot, first, before, length, row, number, ready, t, c, answer, y, skip,
            gate, i_h, i_v, T, H, G, N, V, K, R, P, PT, BR, BT, BV, BK, BJ, FORMAT, BB, STAGES,
        )  # fmt: skip
    else:
        carried = fetch_carried(
            slot, row, number, ready, t, c, ends, answer, i_h, H, G, N, K, PT, BP, BT, BK, BJ, FORMAT
        )  # fmt: skip
        for n in tl.static_range(RUN):
            codes, blocks, rows, beside = tile
            if n + 1 < RUN:  # on its way while this one is answered
                tile = fetch_part(
                    planes, ring, skip, gate, slot, first, before, row, answer, i_h, i_v + n + 1,
                    T, V, K, R, BP, BV, BK, FORMAT,
                )  # fmt: skip
            read_tile(
                planes, codes, blocks, rows, beside, carried, ring, slot, first, before, row, t, answer, y, skip, gate,
                i_h, i_v + n, H, G, N, V, K, R, PT, BP, BT, BV, BK, FORMAT, BB, STAGES,
            )  # fmt: skip


@triton.jit
def fetch_part(
    planes, ring, skip, gate, slot, first, before, row, answer, i_h, i_v,
    T: tl.constexpr, V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """fetch_read (unless there is an answer) and, of one token, fetch_beside."""
    codes, blocks, rows, beside = 0, 1.0, 1.0, (0.0, 0.0, 0.0)
    if answer is None:  # first: what else is loaded is waited for at once, to go through shared memory
        codes, blocks, rows = fetch_read(planes, slot, i_h, i_v * BV + tl.arange(0, BV), V, K, BK, FORMAT)
    if T == 1:
        beside = fetch_beside(ring, skip, gate, slot, first, before, row, i_h, i_v, V, R, BP, BV, answer is not None)
    return codes, blocks, rows, beside


@triton.jit
def read_kernel(
    planes, ring, table, ready, t, c, ends, answer, y, skip, gate, part,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, PT: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, BESIDE: tl.constexpr, FORMAT: tl.constexpr,
    PDL: tl.constexpr, BB: tl.constexpr, STAGES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """read_part for every RUN tiles, head and row: grid (V / BV / RUN, H, B).

    planes: those of the format, as Pools. Bytes: V K read_bytes + (committed + T) V itemsize per row and head, and t,
    c, y. A row that is due is awaited first, where it was flushed BESIDE, by `part` rows of V; with `answer` its
    checkpoint is not read.
    """
    if PDL:
        gdc_launch_dependents()
    i_v, i_h, i_b, B = tl.program_id(0) * RUN, tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    # all at once: a trip to memory less
    slot, first, before, length, _, row = load_row(table, i_b, B)
    folds, number = tl.load(table + 4 * B + i_b), tl.load(table + 7 * B + i_b)
    if slot < 0:
        for n in tl.static_range(RUN):
            zero_tile(y, row, i_h, i_v + n, T, H, V, BV)
    else:
        if BESIDE:
            if folds > 0:
                parts = (V + part - 1) // part
                i_w = i_v * BV // part
                while i_w * part < tl.minimum((i_v + RUN) * BV, V):
                    await_number(ready, slot, number, H + i_h * parts + i_w)
                    i_w += 1
        if answer is None:
            read_part(
                planes, ring, slot, first, before, length, row, number, ready, t, c, ends, None, y, skip, gate, i_h,
                i_v, T, H, G, N, V, K, R, P, PT, BP, BR, BT, BV, BK, BJ, FORMAT, BB, STAGES, RUN,
            )  # fmt: skip
        elif folds > 0:
            read_part(
                planes, ring, slot, first, before, length, row, number, ready, t, c, ends, answer, y, skip, gate, i_h,
                i_v, T, H, G, N, V, K, R, P, PT, BP, BR, BT, BV, BK, BJ, FORMAT, BB, STAGES, RUN,
            )  # fmt: skip
        else:
            read_part(
                planes, ring, slot, first, before, length, row, number, ready, t, c, ends, None, y, skip, gate, i_h,
                i_v, T, H, G, N, V, K, R, P, PT, BP, BR, BT, BV, BK, BJ, FORMAT, BB, STAGES, RUN,
            )  # fmt: skip
    if PDL:
        if (i_b == B - 1) & (i_h == H - 1) & (tl.program_id(0) == tl.num_programs(0) - 1):
            gdc_wait()


@triton.jit
def decode_kernel(
    planes, key, inputs, ring, weights, table, parent, kin, q, t, c, ends, y, skip, gate,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, W: tl.constexpr, P: tl.constexpr, PT: tl.constexpr, BP: tl.constexpr,
    BR: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr, BB: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, FORMAT: tl.constexpr, CARRY: tl.constexpr, GATES: tl.constexpr,
    CHUNKS: tl.constexpr, CN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Carry, flush and read in one launch, for small batches: grid (V / BV, H, B), arguments as in both.

    Every program does its head's carry itself; those of one head write the same numbers. BF rows of V are folded at a
    time.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i_v, i_h, i_b, B = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    J: tl.constexpr = H // G
    slot, first, before, length, _, row = load_row(table, i_b, B)
    folds = tl.load(table + 4 * B + i_b)
    if slot < 0:
        zero_tile(y, row, i_h, i_v, T, H, V, BV)
    else:
        if CHUNKS > 0:
            if folds > 0:
                flush_rows(
                    planes, key, ring, table, None, t, None, None, i_b, i_h, i_v * BV, tl.minimum((i_v + 1) * BV, V), B,
                    T, H, G, N, V, K, R, P, PT, CHANNEL, BF, BK, BB, BT, 1, DELTA, FORMAT, CHUNKS, CN, AHEAD,
                )  # fmt: skip
                tl.debug_barrier()  # for other threads of this program
        codes, blocks, rows = fetch_read(planes, slot, i_h, i_v * BV + tl.arange(0, BV), V, K, BK, FORMAT)
        from_c, count = i_h * V + i_v * BV, tl.minimum(BV, V - i_v * BV)
        CARRY(
            inputs, ring, weights, table, parent, kin, q, t, c, ends, i_b, i_h // J, i_h % J, from_c, count, B,
            T, H, G, V, K, R, L, W, PT, BP, BT, BK, 1, BV, CHANNEL, GATES,
        )  # fmt: skip
        tl.debug_barrier()  # t, c and v are in memory, for other threads of this program
        if T > 1:
            read_tokens(
                planes, codes, blocks, rows, ring, slot, first, before, length, row, 0, None, t, c, None, y, skip, gate,
                i_h, i_v, T, H, G, N, V, K, R, P, PT, BR, BT, BV, BK, 1, FORMAT, BK, 1,
            )  # fmt: skip
        else:
            beside = fetch_beside(ring, skip, gate, slot, first, before, row, i_h, i_v, V, R, BP, BV, False)
            carried = fetch_carried(slot, row, 0, None, t, c, ends, None, i_h, H, G, N, K, PT, BP, BT, BK, 1, FORMAT)
            read_tile(
                planes, codes, blocks, rows, beside, carried, ring, slot, first, before, row, t, None, y, skip, gate,
                i_h, i_v, H, G, N, V, K, R, PT, BP, BT, BV, BK, FORMAT, BK, 1,
            )  # fmt: skip


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


@triton.jit
def convolve_kernel(
    x, conv, weights, table, parent, y,
    T: tl.constexpr, C: tl.constexpr, L: tl.constexpr, W: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The convolution by itself: y [B, T, C], zero for padding; one program per row and BC channels."""
    i_b, i_c, B = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    slot, _, _, length, end, row = load_row(table, i_b, B)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = (o_c < C) & (slot >= 0)
    for i in range(T):
        m = m_c & (i < length)
        b_y, b_x = channels(x, conv, weights, parent, row, i, tl.maximum(slot, 0), end, o_c, m, 0, C, L, W, T)
        keep(conv, weights, tl.maximum(slot, 0), end, i, o_c, b_x, m, 0, C, L)
        b_y = tl.where(m, b_y, 0.0).to(y.dtype.element_ty)
        tl.store(y + (row * T + i) * C + o_c, b_y, mask=o_c < C)


# ---- launches ----


class Launch(NamedTuple):
    """Launch choices of one geometry; tiles are powers of two, programs are per processor of the GPU.

    Attributes:
        together: carry, flush and read are one launch.
        read_v, read_warps: rows of V of a program of the read (or of the one launch), and its warps.
        read_k, read_stages: columns of K that it takes at a time, and how many such blocks are on their way at most.
            All at once, they are fetched before the carry is awaited.
        read_registers: the most registers of its threads (NVIDIA). None: as it likes.
        read_run: so many tiles of a head are read by one program, one after the other, the next on its way (one token).
        apart: carry and flush are a launch each, with warps and registers of their own; else the carry's warps serve
            both.
        carry_warps, flush_warps: warps of a program that carries or flushes.
        carry_registers, flush_registers: the same of these, if apart.
        carry_heads, carry_programs: heads of a key group that are carried at a time; so many programs go through rows.
        answers: a flush also answers the row's tokens, where a format can (stores_floats). With few rows it is slower.
        flush_v, flush_programs: rows of V of one part of a flush, at least fold_v; so many programs go through parts.
        flush_parts: where that were fewer parts for each, fewer programs do. The read has more room then, and hides a
            flush that is not due in all rows at once.
        fold_v, fold_k: rows of V and columns of K that are folded at a time.
        fold_heads: what a head's records come to is worked out once for its part of a flush (KDA), else by every tile.
        fold_ahead: records that are on their way while as many are folded (KDA, by every tile).
    """

    together: bool
    read_v: int
    read_warps: int
    read_k: int
    read_stages: int
    read_registers: int | None
    read_run: int
    apart: bool
    carry_warps: int
    carry_registers: int | None
    flush_warps: int
    flush_registers: int | None
    carry_heads: int
    carry_programs: int
    answers: bool
    flush_v: int
    flush_programs: int
    flush_parts: int
    fold_v: int
    fold_k: int
    fold_heads: bool
    fold_ahead: int


def launch(
    recurrence: Any, geometry: Any, format: str, rows: int, tokens: int, window: int = 16
) -> Launch:  # fmt: skip
    """Launch choices, found on an NVIDIA H200 (docs/log.md, 2026-11-30). KDA's of several tokens were not measured.

    What decides the order of a sum is one choice for every number of rows, so a row's result does not depend on how
    many there are, but for one launch against more, and for flushes that answer.
    """
    H, G, V, K = geometry
    most, scaled, heads = triton.next_power_of_2(V), needs_whole_rows(format), triton.next_power_of_2(H // G)
    together, stored = in_one_launch(rows, H), formats.get(format)
    bits, halves = stored.reads.bits, in_bf16(format)
    read_k, read_stages = columns(K), 1
    if together:
        # in more than one warp, every sum of a carry goes through shared memory and a barrier
        if scaled:
            read_v, read_warps = 32, 8 if stored.copy else 4
        elif tokens > 1:
            read_v, read_warps = 16, 2
        else:
            read_v, read_warps = (32, 4) if halves and not recurrence.delta else (16, 1)
    elif bits <= 8:  # instructions decide: with many rows to a warp, addresses and sums are worked out seldom
        read_v, read_warps = 64 if bits == 4 and V % 64 == 0 else 32, 1
        if tokens > 1:
            read_v, read_warps = (64, 4) if V % 64 == 0 else (32, 2)
    elif tokens > 1:
        read_v, read_warps = (64, 2) if halves and V % 64 == 0 else (32, 1)
        read_k, read_stages = 32, 3
    elif halves:
        # a product's order of sums does not depend on blocks
        read_v, read_warps = 32, 1
        if rows >= 128:
            read_k, read_stages = 64, 2
    elif format == "fp16":
        read_v, read_warps = 16 if recurrence.channel_gate else 32, 2
    else:
        read_v, read_warps = 16, 1
    # carries and flushes are short of programs that run at once: with fewer registers some spill, and are faster
    carry_warps, flush_warps = 1, 1
    flush_registers: int | None = 208 if recurrence.channel_gate and tokens > 8 else 168
    by_tile = recurrence.channel_gate and rows <= 64
    if scaled and by_tile:
        flush_warps, flush_registers = 4 if stored.copy else 2, None
    elif stored.copy and bits == 4:
        flush_registers = None if stored.residual else 168
    elif scaled and not recurrence.delta and tokens == 1:
        flush_registers = 128
    if tokens > 8 or (tokens > 1 and recurrence.channel_gate):
        carry_warps = 2
    if tokens > 8 or (tokens > 1 and by_tile):
        flush_warps = max(flush_warps, 2)
    if recurrence.channel_gate:
        carry_registers = 96 if tokens == 1 else 128
    elif tokens > 8:
        carry_registers = None
    else:
        carry_registers = 168 if tokens > 1 and (recurrence.delta or window > 16) else 128
    if recurrence.delta:
        carry_heads = 2
    else:
        carry_heads = 8 if V <= 64 and rows >= (32 if halves else 128) else 4
    flush_v = 16 if rows <= 64 else V if V < 128 else 64
    flush_programs, flush_parts, fold_v = 8, 1, 16
    if bits == 4 and not stored.copy and not recurrence.delta and tokens == 1 and rows > 64:
        flush_v, flush_programs = 32, 16  # what a part costs is encoding
    if by_tile:
        flush_programs = 8 if scaled else 12
    elif tokens == 1 and rows >= 64:
        # a program is done with its parts, each 31 us of it, 42 or (kda) 65, when two thirds of the step are over
        reading = rows * H * V * K * stored.read_bytes(K) / 4.2e6
        long = 65 if recurrence.channel_gate else 42 if recurrence.delta else 31
        flush_parts = max(1, round(reading / long * 64 / flush_v))
    elif not together and not recurrence.delta and not scaled and flush_v % 32 == 0:
        flush_programs, fold_v = 6, 32
    return Launch(
        together=together,
        read_v=min(most, read_v),
        read_warps=read_warps,
        read_k=min(columns(K), read_k),
        read_stages=read_stages,
        read_registers=128 if tokens > 8 else None,  # left alone, the assembler may spill to use fewer
        read_run=1,
        apart=rows >= 64 or (scaled and by_tile),
        carry_warps=carry_warps,
        carry_registers=carry_registers,
        flush_warps=flush_warps,
        flush_registers=flush_registers,
        carry_heads=min(carry_heads, heads),
        carry_programs=24,
        answers=rows >= 64,
        flush_v=flush_v,
        flush_programs=flush_programs,
        flush_parts=flush_parts,
        fold_v=fold_v,
        fold_k=min(columns(K), 32 if recurrence.delta or format == "fp32" or scaled or tokens > 1 else 64),
        fold_heads=not by_tile,
        fold_ahead=1 if rows >= 64 else 4,
    )


def most_registers(count: int | None, PDL: bool) -> dict[str, int]:
    """The option that keeps a kernel's threads to so many registers, on GPUs that have it."""
    return {"maxnreg": count} if PDL and count else {}


def dependent_launches(device: torch.device) -> bool:
    """Whether a launch may begin before the one in front of it has ended: NVIDIA, Hopper or newer."""
    return not INTERPRETED.value and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a few in the interpreter."""
    return 2 if INTERPRETED.value else torch.cuda.get_device_properties(device).multi_processor_count


def pools(layer: LayerState) -> Ring:
    """A layer's pools as kernels take them."""
    found = (Pool(pool, pool.stride(0)) if pool.numel() else None for pool in (*layer.ring, layer.conv))
    return Ring(*found)  # type: ignore[arg-type]


def planes(tensors: tuple[Tensor, ...]) -> tuple[Pool, ...]:
    """A checkpoint's planes as kernels take them."""
    return tuple(Pool(plane, plane.stride(0)) for plane in tensors)


def field(x: Tensor) -> Field:
    """[B, T, ...] as kernels take it; copied where what is behind T is not dense."""
    dense = x[0, 0].is_contiguous() if x.numel() else True
    x = x if dense else x.contiguous()
    return Field(x, x.stride(0), x.stride(1))


def layer_weights(conv_weight: Tensor, conv_bias: Tensor | None, *gates: Any) -> LayerWeights:
    """A layer's parameters as kernels take them: gates are A_log, dt_bias, scale, low and high."""
    return LayerWeights(conv_weight, conv_weight.stride(0), conv_weight.stride(1), conv_bias, *gates)


def exactness(dtype: torch.dtype) -> int:
    """How many bf16 parts of a number an output shows: two are 16 bits, three fp32."""
    return 3 if dtype == torch.float32 else 2


def columns(K: int) -> int:
    """Columns of a tile: a power of two, and no fewer than a product on tensor cores sums over."""
    return max(16, int(triton.next_power_of_2(K)))


def tiles(recurrence: Any, window: int, tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """Tiles of records before a step and of tokens (of one token: of parts), and the bf16 parts of a carried query.

    Without the delta rule a carried query is the query, which is an activation.
    """
    past = max(16, triton.next_power_of_2(window))
    if tokens == 1:
        return {"PT": triton.next_power_of_2(exactness(dtype)), "BP": past, "BT": 8}
    PT = 1 if dtype == torch.bfloat16 and not recurrence.delta else exactness(dtype)
    return {"PT": PT, "BP": past, "BT": max(8, triton.next_power_of_2(tokens))}


def decode(
    recurrence: Any, geometry: Any, window: int, layer: LayerState, step: DeviceStep, inputs: Inputs,
    weights: LayerWeights, skip: Tensor | None, gate: Tensor | None, y: Tensor,
) -> Tensor:  # fmt: skip
    """y [B, T, H, V] of one layer, dense, is written; the step's records are appended, rows that are due are flushed.

    Args:
        window: the most committed records that a step may find.
        inputs, weights: raw, or ready with no weights.
        skip: D, [H] or [H, V]; gate: z, [B, T, H, V].
    """
    (H, G, V, K), B, T = geometry, step.rows, step.tokens
    device = step.table.device
    if not B:
        return y
    R, module = layer.ring.w.shape[2], recurrence.kernel()
    N = H if recurrence.delta else G
    tile = tiles(recurrence, window, T, y.dtype)
    q = ends = None
    products = layer.ring.back.numel() > 0
    if T > 1 or products:
        q = torch.empty(B, G, T, K, dtype=layer.ring.k.dtype, device=device)
    if T > 1:
        t = torch.empty(B, N, tile["PT"], T, K, dtype=torch.bfloat16, device=device)
        c = torch.empty(B, H, T, 1 + R, dtype=torch.float32, device=device)
    else:
        if in_bf16(layer.format.name):
            t = torch.empty(B, N, K, tile["PT"], dtype=torch.bfloat16, device=device)
        else:
            t = torch.empty(B, N, K, dtype=torch.float32, device=device)
        c = torch.empty(B, H, tile["BP"], tile["PT"], dtype=torch.bfloat16, device=device)
        ends = torch.empty(B, H, 2, dtype=torch.float32, device=device)
    checkpoint, ring, table, format = planes(layer.checkpoint), pools(layer), step.table, layer.format.name
    chosen = launch(recurrence, geometry, format, B, T, window)
    beside = folds_beside(R, window)
    if not beside:
        # as many tokens as records may wait: those are folded first, to make room
        start = (table[1] - table[4]) % R
        _launch_fold(recurrence, layer, table[0], start, table[4], table[8], layer.checkpoint, format)
    sizes = {"H": H, "G": G, "N": N, "V": V, "K": K, "R": R, "BK": columns(K), "P": exactness(y.dtype)}
    carrying = sizes | tile | {
        "T": T, "L": layer.conv.shape[1], "W": 1 if weights.conv_weight is None else weights.conv_weight.shape[1],
        "CHANNEL": recurrence.channel_gate, "CARRY": module.carry_tokens if T > 1 or products else module.carry,
        "GATES": module.gates,
    }  # fmt: skip
    reading = sizes | tile | {
        "T": T, "BR": max(16, triton.next_power_of_2(window + T)),
    }  # fmt: skip
    CN = chunk_size(window, recurrence.delta and not products)
    flushing = sizes | {
        "CHANNEL": recurrence.channel_gate, "DELTA": recurrence.delta, "FORMAT": format,
        "CHUNKS": triton.cdiv(window, CN) if beside else 0, "CN": CN, "BF": chosen.fold_v, "BB": chosen.fold_k,
        "AHEAD": chosen.fold_ahead,
    }  # fmt: skip
    if skip is not None:
        skip = (skip[:, None] if skip.ndim == 1 else skip).expand(H, V)
    outputs = (y, None if skip is None else Field(skip, *skip.stride()), None if gate is None else field(gate))
    run = 1 if T > 1 or chosen.together else math.gcd(chosen.read_run, triton.cdiv(V, chosen.read_v))
    grid = (triton.cdiv(V, chosen.read_v) // run, H, B)
    PDL = dependent_launches(device)
    early = {"launch_pdl": True} if PDL else {}
    if chosen.together:
        decode_kernel[grid](
            checkpoint, layer.key, inputs, ring, weights, table, step.parent, step.kin, q, t, c, ends, *outputs,
            **(carrying | reading | flushing), PDL=PDL, BV=chosen.read_v, num_warps=chosen.read_warps,
            **early, **most_registers(255, PDL),
        )  # fmt: skip
        return y
    ready = Pool(layer.ready, layer.ready.stride(0))
    units, most = B * G * triton.cdiv(H // G, chosen.carry_heads), B * H * triton.cdiv(V, chosen.flush_v)
    flushers = min(most, chosen.flush_programs * processors(device)) if beside else 0
    answer = None
    if beside and chosen.answers and stores_floats(format):
        answer = torch.empty(B, H, T, V, dtype=torch.float32, device=device)
    scratch = None
    if flushers and recurrence.channel_gate and chosen.fold_heads and flushing["CHUNKS"] == 1:
        scratch = torch.empty(flushers, scratch_size(CN, K), dtype=torch.float32, device=device)
    carriers = min(units, chosen.carry_programs * processors(device)) if PDL else units
    parts: list[tuple[str, int, int, int, int | None]] = [("both", carriers, flushers, chosen.carry_warps, None)]
    if chosen.apart:
        parts = [
            ("carry", carriers, 0, chosen.carry_warps, chosen.carry_registers),
            ("flush", 0, flushers, chosen.flush_warps, chosen.flush_registers),
        ]
    for role, first, last, warps, registers in parts:
        if first + last:
            prepare_kernel[(first + last,)](
                checkpoint, layer.key, inputs, ring, weights, table, ready, step.parent, step.kin, q, t, c, ends,
                answer, scratch, B, last, chosen.flush_v, chosen.flush_parts, **(carrying | flushing), PDL=PDL,
                ROLE=role, BJ=chosen.carry_heads,
                BC=triton.next_power_of_2(chosen.carry_heads * V), num_warps=warps,
                **early, **most_registers(registers, PDL),
            )  # fmt: skip
    read_kernel[grid](
        checkpoint, ring, table, ready, t, c, ends, answer, *outputs, chosen.flush_v, **reading, PDL=PDL, FORMAT=format,
        BV=chosen.read_v, BJ=chosen.carry_heads, BESIDE=beside, num_warps=chosen.read_warps,
        BB=chosen.read_k, STAGES=chosen.read_stages, RUN=run,
        **early, **most_registers(chosen.read_registers, PDL),
    )  # fmt: skip
    return y


def decode_raw(
    recurrence: Any, geometry: Any, window: int, layer: LayerState, step: DeviceStep, x: Tensor, raw_g: Tensor | None,
    raw_w: Tensor, weights: LayerWeights, skip: Tensor | None, gate: Tensor | None, y: Tensor,
) -> Tensor:  # fmt: skip
    """As decode, from raw projections: x [B, T, C], raw_g [B, T, H(, K)] or None, raw_w [B, T, H]."""
    q, k, v = (field(part) for part in recurrence.split_flat(x if x.stride(-1) == 1 else x.contiguous(), geometry))
    inputs = Inputs(q, k, v, None if raw_g is None else field(raw_g), field(raw_w))
    return decode(recurrence, geometry, window, layer, step, inputs, weights, skip, gate, y)


def convolve(pool: Tensor, step: DeviceStep, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[B, T, C] in the dtype of x: see conv.convolve."""
    (B, T, C), W = x.shape, weight.shape[1]
    y = torch.empty(B, T, C, dtype=x.dtype, device=x.device)
    if B:
        convolve_kernel[(B, triton.cdiv(C, 256))](
            field(x), Pool(pool, pool.stride(0)), layer_weights(weight, bias), step.table, step.parent, y,
            T=T, C=C, L=pool.shape[1], W=W, BC=256, num_warps=2,
        )  # fmt: skip
    return y


def fold(recurrence: Any, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor) -> Tensor:
    """The state of every slot after its first `counts` committed records: [n, H, V, K] in fp32. As batched.fold."""
    (H, V), K = layer.checkpoint[0].shape[1:3], layer.ring.k.shape[3]
    state = torch.empty(len(slots), H, V, K, dtype=torch.float32, device=slots.device)
    _launch_fold(recurrence, layer, slots, start, counts, None, (state,), "fp32")
    return state


def flush(recurrence: Any, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor, flushes: Tensor) -> None:
    """Fold in place: the planes are read, folded and written by one launch; slots below 0 are left alone."""
    _launch_fold(recurrence, layer, slots, start, counts, flushes, layer.checkpoint, layer.format.name)


def store_states(layer: LayerState, slots: Tensor, state: Tensor) -> None:
    """States [n, H, V, K] become the checkpoints of n slots, encoded as flush number 0."""
    n, H, V, K = state.shape
    if n:
        scaled = needs_whole_rows(layer.format.name)
        BV = min(16, triton.next_power_of_2(V))
        store_kernel[(triton.cdiv(V, BV), H, n)](
            state.contiguous(), planes(layer.checkpoint), layer.key, slots,
            H=H, V=V, K=K, BV=BV, BK=columns(K), FORMAT=layer.format.name, num_warps=8 if scaled else 2,
        )  # fmt: skip


def _launch_fold(
    recurrence: Any, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor, flushes: Tensor | None,
    into: tuple[Tensor, ...], out: str,
) -> None:  # fmt: skip
    H, V = layer.checkpoint[0].shape[1:3]
    G, R, K = layer.ring.k.shape[1:]
    if not len(slots):
        return
    BV = min(16, triton.next_power_of_2(V))
    fold_kernel[(triton.cdiv(V, BV), H, len(slots))](
        planes(layer.checkpoint), planes(into), layer.key, pools(layer), slots, start, counts, flushes,
        H=H, G=G, V=V, K=K, R=R, BV=BV, BK=columns(K), CHANNEL=recurrence.channel_gate,
        DELTA=recurrence.delta, FORMAT=layer.format.name, OUT=out, IN_PLACE=into is layer.checkpoint,
        num_warps=8 if needs_whole_rows(layer.format.name) or recurrence.channel_gate else 4,
    )  # fmt: skip
