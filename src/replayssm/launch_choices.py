"""How a layer's step is launched: tiles, warps, programs, by geometry, format and rows."""

from typing import Any, NamedTuple

import triton

from replayssm import formats
from replayssm.formats_kernel import in_bf16, needs_whole_rows
from replayssm.ring import in_one_launch, updates_at_once


class Launch(NamedTuple):
    """Launch choices of one geometry; tiles are powers of two, programs are per processor of the GPU.

    Attributes:
        together: carry, flush and read are one launch.
        at_once: the checkpoint is updated at every token, by one launch (update_kernel.py), if all layers' formats are
            exact and no more than a step's record can be taken back.
        update_v, update_warps: rows of V of its programs, and their warps.
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
    at_once: bool
    update_v: int
    update_warps: int
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


def columns(K: int) -> int:
    """Columns of a tile: a power of two, and no fewer than a product on tensor cores sums over."""
    return max(16, int(triton.next_power_of_2(K)))


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
    read_k, read_stages, read_run = columns(K), 1, 1
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
        if rows >= 64:
            read_run = max(n for n in range(1, 6) if triton.cdiv(V, 16) % n == 0)
    few = rows * H * V <= 4096
    if format == "fp32" and rows * H * V > 8192:
        update_v, update_warps = 32, 2
    elif recurrence.channel_gate:
        update_v, update_warps = 16, 4 if few else 2
    elif format != "fp32":
        update_v, update_warps = 16, 2
    else:
        update_v, update_warps = (8, 2 if few else 1) if recurrence.delta else (16, 1)
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
        at_once=tokens == 1 and updates_at_once(rows, H * V, recurrence.delta, stored),
        update_v=min(most, update_v),
        update_warps=update_warps,
        read_v=min(most, read_v),
        read_warps=read_warps,
        read_k=min(columns(K), read_k),
        read_stages=read_stages,
        read_registers=128 if tokens > 8 else None,  # left alone, the assembler may spill to use fewer
        read_run=read_run,
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
