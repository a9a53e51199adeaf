"""Implementation `triton`: what all recurrences share on a GPU. Imported only when a cache asks for it.

One layer's step is three launches that overlap; at small batch the first two are one, then all of them:

    carry   convolution, gates, norms, append (step_kernel.py), then t and c (`carry` of recurrences/<name>/kernel.py),
            for a row and some heads of a key group. Some programs go through the rows, in order
    flush   records of rows that are due are folded into their states (flush_kernel.py, fold_kernel.py), some rows of V
            of a head at a time, and the new state is multiplied by t at once. A few programs go through these parts
    read    y = c_0 S0 t + c . v, skip, output gate: one program per row, head and tile of V (read_kernel.py)

A launch begins when all programs of the one before have begun (programmatic dependence). What it needs it awaits by
name: `ready` holds, per slot and head, the newest step that was carried (or flushed). Where launches don't overlap,
nothing is ever awaited. At the smallest batch every program does the carry that it needs by itself.

Everything that changes from step to step is in device tensors (DeviceStep.table, cursors, rings). In Triton's
interpreter (TRITON_INTERPRET=1) the same kernels run on a CPU, for tests. Layouts inside a slot are dense; the stride
from slot to slot may be anything, and slot arithmetic is int64.
"""

import functools
import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm import launch_choices
from replayssm.arithmetic_kernel import INTERPRETED
from replayssm.flush_kernel import flush_rows, fold_kernel, store_kernel
from replayssm.fold_kernel import chunk_size, scratch_size
from replayssm.formats_kernel import fetch_read, in_bf16, needs_whole_rows, stores_floats
from replayssm.launch_choices import columns
from replayssm.read_kernel import (
    fetch_beside,
    fetch_carried,
    publish,
    read_kernel,
    read_tile,
    read_tokens,
    zero_tile,
)
from replayssm.ring import DeviceStep, LayerState, folds_beside
from replayssm.step_kernel import Field, Inputs, LayerWeights, Pool, Ring, channels, keep, load_row
from replayssm.update_kernel import update_kernel


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


def tiles(recurrence: Any, window: int, tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """Tiles of records before a step and of tokens (of one token: of parts), and the bf16 parts of a carried query.

    Without the delta rule a carried query is the query, which is an activation.
    """
    past = max(16, triton.next_power_of_2(window))
    if tokens == 1:
        return {"PT": triton.next_power_of_2(exactness(dtype)), "BP": past, "BT": 8}
    PT = 1 if dtype == torch.bfloat16 and not recurrence.delta else exactness(dtype)
    return {"PT": PT, "BP": past, "BT": max(8, triton.next_power_of_2(tokens))}


def first_channels(recurrence: Any, geometry: Any) -> dict[str, int]:
    """Where channels of q, k and v begin in a convolution's."""
    sizes = recurrence.conv_sizes(geometry)
    ends = itertools.accumulate(sizes.values())
    return {f"{name.upper()}_FIRST": end - sizes[name] for name, end in zip(sizes, ends, strict=True)}


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
    if skip is not None:
        skip = (skip[:, None] if skip.ndim == 1 else skip).expand(H, V)
    outputs = (y, None if skip is None else Field(skip, *skip.stride()), None if gate is None else field(gate))
    checkpoint, ring, table, format = planes(layer.checkpoint), pools(layer), step.table, layer.format.name
    chosen = launch_choices.launch(recurrence, geometry, format, B, T, window)
    sizes = {"H": H, "G": G, "V": V, "K": K, "R": R, "BK": columns(K)}
    bringing = {
        "L": layer.conv.shape[1], "W": 1 if weights.conv_weight is None else weights.conv_weight.shape[1],
        "CHANNEL": recurrence.channel_gate, "GATES": module.gates,
    }  # fmt: skip
    PDL = dependent_launches(device)
    early = {"launch_pdl": True} if PDL else {}
    if step.at_once:
        update_kernel[(triton.cdiv(V, chosen.update_v), H, B)](
            checkpoint, layer.key, inputs, ring, weights, table, *outputs, **(sizes | bringing),
            **first_channels(recurrence, geometry), DELTA=recurrence.delta, FORMAT=format, CARRY=module.carry_alone,
            PDL=PDL, BV=chosen.update_v, num_warps=chosen.update_warps, **early,
        )  # fmt: skip
        return y
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
    beside = folds_beside(R, window)
    if not beside:
        # as many tokens as records may wait: those are folded first, to make room
        start = (table[1] - table[4]) % R
        _launch_fold(recurrence, layer, table[0], start, table[4], table[8], layer.checkpoint, format)
    sizes |= {"N": N, "P": exactness(y.dtype)}
    carrying = sizes | tile | bringing | {
        "T": T, "CARRY": module.carry_tokens if T > 1 or products else module.carry,
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
    run = 1 if T > 1 or chosen.together else math.gcd(chosen.read_run, triton.cdiv(V, chosen.read_v))
    grid = (triton.cdiv(V, chosen.read_v) // run, H, B)
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
