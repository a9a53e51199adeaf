"""The cursor rules of ring.py on a GPU: begin and commit, one launch each for all layers, without a wait.

Everything they need is in device tensors, so that both can be captured in a CUDA graph: slots, lengths and accepted
counts may change between replays. What is out of range is clamped and counted, since an error would mean to wait: a
length, a count, a slot that was not loaded (its row then brings no token).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.ring import Cursors, DeviceStep, Records, Sizes

BLOCK = 128
BLOCK_ELEMENTS = 1024
# Rows of the cursor tensor [9, S], by their names in Cursors
RING_START, COMMITTED, PENDING, FLUSH_AT, CONV_END, REACH, LIVE, CLAMPED, FLUSHES = map(
    tl.constexpr, range(len(Cursors._fields))
)


@triton.jit
def count_up(p, S, m, pending, wanted, CONV: tl.constexpr):
    """The first `wanted` of each slot's pending records count, all at most: returns how many."""
    n = tl.minimum(tl.maximum(wanted, 0), pending)
    committed = tl.load(p + COMMITTED * S, mask=m, other=0) + n
    reach = tl.load(p + REACH * S, mask=m, other=0)
    conv_end = tl.load(p + CONV_END * S, mask=m, other=0)
    tl.store(p + COMMITTED * S, committed, mask=m)
    tl.store(p + CONV_END * S, (conv_end + n) % CONV, mask=m)
    tl.store(p + REACH * S, tl.minimum(reach + n, committed), mask=m)
    return n


@triton.jit
def begin_kernel(
    cursors, clock, given, lengths, accepted, table, S, B,
    T: tl.constexpr, R: tl.constexpr, MOST: tl.constexpr, WINDOW: tl.constexpr, CONV: tl.constexpr,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Commit (where it waited for this), flush and begin of ring.py for B rows; one program, BLOCK rows at a time.

    AT_ONCE: all committed records are folded, and when windows end stays as it was.

    | Name     | Shape  | Dtype | Dir    | Meaning                                              |
    | cursors  | [9, S] | int64 | in/out | the pool's cursors, rows as in Cursors               |
    | clock    | [1]    | int32 | in/out | the number of the newest step                        |
    | given    | [B]    | int64 | in     | slots, negative for padding                          |
    | lengths  | [B]    | int64 | in     | tokens of every row, or None for T                   |
    | accepted | [B]    | int64 | in     | what counts of each slot's pending tokens, or None   |
    | table    | [10, B]| int32 | out    | DeviceStep.table                                     |
    """
    number = tl.load(clock) + 1
    tl.store(clock, number)
    num_due, num_other, from_row = 0, 0, 0
    while from_row < B:
        i = from_row + tl.arange(0, BLOCK)
        m = i < B
        slot = tl.load(given + i, mask=m, other=-1)
        wanted = tl.zeros([BLOCK], tl.int64) + T
        if lengths is not None:
            wanted = tl.load(lengths + i, mask=m, other=0)
        inside = m & (slot >= 0) & (slot < S)
        p = cursors + tl.where(inside, slot, 0)
        live = tl.load(p + LIVE * S, mask=inside, other=0) == 1
        length = tl.where(live, tl.minimum(tl.maximum(wanted, 0), T), 0)
        clamped = tl.load(p + CLAMPED * S, mask=inside, other=0)
        tl.store(p + CLAMPED * S, clamped + 1, mask=inside & (length != wanted))
        if accepted is not None:
            pending = tl.load(p + PENDING * S, mask=inside, other=0)
            count_up(p, S, inside, pending, tl.load(accepted + i, mask=inside, other=0), CONV)
        tl.store(p + PENDING * S, length, mask=inside)
        active = inside & (length > 0)
        start = tl.load(p + RING_START * S, mask=active, other=0)
        committed = tl.load(p + COMMITTED * S, mask=active, other=0)
        flush_at = tl.load(p + FLUSH_AT * S, mask=active, other=0)
        reach = tl.load(p + REACH * S, mask=active, other=0)
        conv_end = tl.load(p + CONV_END * S, mask=active, other=0)
        # (1) flush
        due = active & (committed > 0)
        if not AT_ONCE:
            due = due & (committed + length > flush_at)
            tl.store(p + FLUSH_AT * S, 0 * committed + WINDOW, mask=due)
        folds = tl.where(due, committed, 0)
        start, committed = (start + folds) % R, committed - folds
        tl.store(p + RING_START * S, start, mask=due)
        tl.store(p + COMMITTED * S, committed, mask=due)
        flushes = tl.load(p + FLUSHES * S, mask=active, other=0) + tl.where(due, 1, 0)
        tl.store(p + FLUSHES * S, flushes, mask=due)
        # (2) begin
        tl.store(p + REACH * S, tl.minimum(tl.where(due, 0, reach), MOST - length), mask=active)
        # (3) its place: those that are due come last
        due = due.to(tl.int32)
        other = m.to(tl.int32) - due
        place = tl.where(due == 1, B - num_due - tl.cumsum(due, 0), num_other + tl.cumsum(other, 0) - 1)
        num_due += tl.sum(due, 0)
        num_other += tl.sum(other, 0)
        at = table + place
        tl.store(at, tl.where(active, slot, -1).to(tl.int32), mask=m)
        tl.store(at + B, start.to(tl.int32), mask=m)
        tl.store(at + 2 * B, committed.to(tl.int32), mask=m)
        tl.store(at + 3 * B, length.to(tl.int32), mask=m)
        tl.store(at + 4 * B, folds.to(tl.int32), mask=m)
        tl.store(at + 5 * B, conv_end.to(tl.int32), mask=m)
        tl.store(at + 6 * B, i, mask=m)
        tl.store(at + 7 * B, 0 * i + number, mask=m)
        tl.store(at + 8 * B, flushes.to(tl.int32), mask=m)
        from_row += BLOCK
    from_row = 0
    while from_row < B:
        i = from_row + tl.arange(0, BLOCK)
        tl.store(table + 9 * B + i, 0 * i + num_due, mask=i < B)
        from_row += BLOCK


@triton.jit
def commit_kernel(cursors, table, counts, S, B, CONV: tl.constexpr, BLOCK: tl.constexpr):
    """Commit of ring.py: the first `counts` [B] pending records of every row count, or (None) all of its tokens."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < B
    slot = tl.load(table + i, mask=m, other=-1).to(tl.int64)
    active = slot >= 0
    p = cursors + tl.where(active, slot, 0)
    wanted = tl.load(table + 3 * B + i, mask=m, other=0).to(tl.int64)
    if counts is not None:
        wanted = tl.load(counts + tl.load(table + 6 * B + i, mask=m, other=0), mask=m, other=0)
    pending = tl.load(p + PENDING * S, mask=active, other=0)
    n = count_up(p, S, active, pending, wanted, CONV)
    clamped = tl.load(p + CLAMPED * S, mask=active, other=0)
    tl.store(p + CLAMPED * S, clamped + 1, mask=active & (n != wanted))
    tl.store(p + PENDING * S, 0 * n, mask=active)


@triton.jit
def ancestors_kernel(parent, tree, kin, T: tl.constexpr, BT: tl.constexpr):
    """parent [B, T] with what does not come before its child as -1, and kin [B, T, T] of it; one program per row."""
    row, o_t = tl.program_id(0).to(tl.int64), tl.arange(0, BT)
    m = o_t < T
    for i in range(T):
        above = tl.load(parent + row * T + i).to(tl.int32)
        above = tl.where((above >= 0) & (above < i), above, -1)
        tl.store(tree + row * T + i, above)
        # a thread reads only what it wrote itself
        b_kin = tl.load(kin + (row * T + above) * T + o_t, mask=m & (above >= 0), other=0)
        tl.store(kin + (row * T + i) * T + o_t, tl.where(o_t == i, 1, b_kin), mask=m)


@triton.jit
def move(
    pool, path, row, first, inside, i, OUTER: tl.constexpr, R: tl.constexpr, INNER: tl.constexpr, P: tl.constexpr,
    T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In a slot's [OUTER, R, INNER], what lies at place first + path[p] comes to first + p: block i of all elements.

    All are loaded before any is stored, since a load would wait for the store before it.
    """
    o_e = i * BLOCK + tl.arange(0, BLOCK)
    m = (o_e < OUTER * INNER) & inside
    p_e = pool + o_e // INNER * (R * INNER) + o_e % INNER
    moved = ()
    for p in tl.static_range(P):
        node = tl.load(path + row * P + p)
        moves = m & (node > p) & (node < T)
        b_e = tl.load(p_e + (first + node) % R * INNER, mask=moves, other=0)
        moved = moved + ((b_e, moves),)  # type: ignore[assignment]
    for p in tl.static_range(P):
        b_e, moves = moved[p]
        tl.store(p_e + (first + p) % R * INNER, b_e, mask=moves)


@triton.jit
def move_back(
    pool, path, row, first, inside, i, H: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, P: tl.constexpr,
    T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for `back` [H, R, R]: a path's rows move, and in them the columns of its own nodes.

    Columns of places behind a node belong to no record before it: what comes there is never read. A column comes from
    another thread's, so a head is one program's, and all have read a row before any goes on to where it is written.
    """
    o_e = tl.arange(0, BLOCK)
    i_h, column = i * (BLOCK // BR) + o_e // BR, o_e % BR
    m = (i_h < H) & (column < R) & inside
    depth = (column + R - first % R) % R  # of the path's node that comes to this column
    own = m & (depth < P)
    above = tl.load(path + row * P + depth, mask=own, other=-1)
    source = tl.where(own & (above >= 0) & (above < T), (first + above) % R, column)
    p_e = pool + i_h * (R * R)
    for p in range(P):
        node = tl.load(path + row * P + p)
        moves = m & (node > p) & (node < T)
        b_e = tl.load(p_e + (first + node) % R * R + source, mask=moves, other=0.0)
        tl.debug_barrier()
        tl.store(p_e + (first + p) % R * R + column, b_e, mask=moves)


@triton.jit
def compact_kernel(
    k, v, g, w, norm, back, conv, table, path, B,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, C: tl.constexpr, P: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    BACK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Records and convolution inputs of a path [B, P] move behind the committed ones; pools as (tensor, slot stride).

    Grid (B, blocks of BLOCK elements of all pools, one after the other).
    """
    i_b, i = tl.program_id(0), tl.program_id(1)
    slot, row = tl.load(table + i_b).to(tl.int64), tl.load(table + 6 * B + i_b).to(tl.int64)
    inside = slot >= 0
    first = tl.load(table + B + i_b) + tl.load(table + 2 * B + i_b)
    end = tl.load(table + 5 * B + i_b)
    slot = tl.maximum(slot, 0)
    move(k[0] + slot * k[1], path, row, first, inside, i, G, R, K, P, T, BLOCK)
    i -= (G * K + BLOCK - 1) // BLOCK
    if i >= 0:
        move(v[0] + slot * v[1], path, row, first, inside, i, H, R, V, P, T, BLOCK)
    i -= (H * V + BLOCK - 1) // BLOCK
    if i >= 0:
        move(g[0] + slot * g[1], path, row, first, inside, i, H, R, E, P, T, BLOCK)
    i -= (H * E + BLOCK - 1) // BLOCK
    if i >= 0:
        move(w[0] + slot * w[1], path, row, first, inside, i, H, R, 1, P, T, BLOCK)
    i -= (H + BLOCK - 1) // BLOCK
    if NORM:
        if i >= 0:
            move(norm[0] + slot * norm[1], path, row, first, inside, i, G, R, 1, P, T, BLOCK)
        i -= (G + BLOCK - 1) // BLOCK
    if BACK:
        if i >= 0:
            move_back(back[0] + slot * back[1], path, row, first, inside, i, H, R, BR, P, T, BLOCK)
        i -= (H * BR + BLOCK - 1) // BLOCK
    if C > 0:
        if i >= 0:
            move(conv[0] + slot * conv[1], path, row, end, inside, i, 1, L, C, P, T, BLOCK)


def begin(
    cursors: Tensor, clock: Tensor, sizes: Sizes, given: Tensor, lengths: Tensor | None, accepted: Tensor | None,
    tokens: int, at_once: bool,
) -> Tensor:  # fmt: skip
    """DeviceStep.table for rows of the slots `given`: cursors [9, S] move as ring.flush and ring.begin say.

    Where `accepted` is given, ring.commit comes first.
    """
    rows = len(given)
    table = torch.empty(10, rows, dtype=torch.int32, device=given.device)
    if rows:
        begin_kernel[(1,)](
            cursors, clock, given, lengths, accepted, table, cursors.shape[1], rows,
            T=tokens, R=sizes.ring, MOST=sizes.most_reach, WINDOW=sizes.window, CONV=max(sizes.conv, 1), BLOCK=BLOCK,
            AT_ONCE=at_once,
        )  # fmt: skip
    return table


def commit(cursors: Tensor, sizes: Sizes, table: Tensor, counts: Tensor | None) -> None:
    """Cursors [9, S] move as ring.commit says, for the rows of a step's table."""
    rows = table.shape[1]
    if rows:
        commit_kernel[(triton.cdiv(rows, BLOCK),)](
            cursors, table, counts, cursors.shape[1], rows, CONV=max(sizes.conv, 1), BLOCK=BLOCK,
        )  # fmt: skip


def compact(records: Records, conv: Tensor, table: Tensor, path: Tensor, tokens: int) -> None:
    """Records of a layer that lie on a path [rows, P] of the step's tree move behind those that are committed."""
    rows, P = path.shape
    (_, G, R, K), (_, H, _, V), E = records.k.shape, records.v.shape, records.g.shape[3]
    L, C = conv.shape[1:]
    NORM, BACK, BR = records.norm.numel() > 0, records.back.numel() > 0, triton.next_power_of_2(R)
    blocks = sum(triton.cdiv(n, BLOCK_ELEMENTS) for n in (G * K, H * V, H * E, H, G * NORM, H * BR * BACK, C))
    if rows:
        pools = [(pool, pool.stride(0)) for pool in (*records, conv)]
        compact_kernel[(rows, blocks)](
            *pools, table, path, rows,
            H=H, G=G, V=V, K=K, E=E, R=R, L=max(L, 1), C=C if L else 0, P=P, T=tokens, BLOCK=BLOCK_ELEMENTS, NORM=NORM,
            BACK=BACK, BR=BR,
        )  # fmt: skip


def step(table: Tensor, tokens: int, parent: Tensor | None, at_once: bool) -> DeviceStep:
    """A step with its tree, parent [rows, T] or None; a parent that does not come before its child is a root."""
    rows = table.shape[1]
    if parent is None:
        return DeviceStep(rows, tokens, table, None, None, at_once)
    tree = torch.empty(rows, tokens, dtype=torch.int32, device=parent.device)
    kin = torch.empty(rows, tokens, tokens, dtype=torch.int8, device=parent.device)
    if rows:
        ancestors_kernel[(rows,)](
            parent.contiguous(), tree, kin, T=tokens, BT=triton.next_power_of_2(tokens), num_warps=1
        )
    return DeviceStep(rows, tokens, table, tree, kin)
