"""The cursor rules of the ring: where records lie, which of them count, and what each verb does to the cursors.

A slot keeps its newest records in a ring of R = window + max_tokens places. Record number a (0 = oldest) lies at place
(ring_start + a) mod R. The first `num_committed` of them count; the next `num_pending` belong to the step in flight:

    place   ring_start            + num_committed          + num_pending
            | committed, oldest first | this step's tokens | free ... (mod R)

    verb        ring_start        num_committed      num_pending   reach                       flush_at
    begin(t)    -                 -                  t             min(reach, most - t)        -
    commit(n)   -                 + n                0             min(reach + n, committed)   -
    flush(n)    + n               - n                -             min(reach, committed)       window
    trim(n)     -                 - n                0             - n                         -
    reset       0                 0                  0             0                           first_flush(slot)

`flushes` counts a slot's flushes since its start: formats that round stochastically draw by it.

`reach` is how many of the newest records trim may forget. The convolution's own ring (W - 1 + max_tokens inputs) bounds
it: t new inputs overwrite the t oldest, so `most` = max_tokens where there is a convolution and R where there is none.
`conv_end` is the place after the newest committed input in that ring; it moves by +n and -n with commit and trim.

A slot is due, and flushed by begin, when its committed records and the step's tokens would pass `flush_at`. Its cursors
then move at once. The checkpoint itself is folded at once as well, or (on a GPU, beside the step's other work) by each
layer's decode.

All cursors are int64 tensors [S] keyed by slot; the functions below work on any shape, elementwise. The same rules for
a GPU are in ring_kernel.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.formats import Format

PAD_SLOT = -1


class Cursors(NamedTuple):
    """Per-slot cursors, int64 [S] each."""

    ring_start: Tensor
    num_committed: Tensor
    num_pending: Tensor
    flush_at: Tensor
    conv_end: Tensor
    reach: Tensor
    live: Tensor  # 1 once the slot was reset or loaded, 0 while it is free
    clamped: (
        Tensor  # how many counts out of range a device has met since then: they are clamped there, refused on a CPU
    )
    flushes: Tensor  # since reset or load, whose own encoding is number 0

    def at(self, slots: Tensor) -> "Cursors":
        """The cursors of some slots, copied: [len(slots)] each."""
        return Cursors(*(cursor[slots] for cursor in self))

    def put(self, slots: Tensor, values: "Cursors") -> None:
        """Write the cursors of some slots back."""
        for cursor, value in zip(self, values, strict=True):
            cursor[slots] = value


class Sizes(NamedTuple):
    """What the rules need to know of a cache: lengths of both rings, the window, and the most that trim may reach."""

    ring: int
    conv: int
    window: int
    most_reach: int


def first_flush(slots: Tensor, window: int, staggered: bool) -> Tensor:
    """The number of records at which a fresh slot flushes first.

    Staggered, neighbouring slots start at different counts, so that requests which begin together do not flush
    together; from their first flush on every slot waits a whole window.
    """
    return window - slots % window if staggered else torch.full_like(slots, window)


def reset(slots: Tensor, sizes: Sizes, staggered: bool) -> Cursors:
    """Cursors of slots whose whole history is in their checkpoint and convolution window."""
    zero = torch.zeros_like(slots)
    first = first_flush(slots, sizes.window, staggered)
    return Cursors(zero, zero, zero, first, zero, zero, torch.ones_like(slots), zero, zero)


def begin(c: Cursors, lengths: Tensor, sizes: Sizes) -> Cursors:
    """A step brings `lengths` tokens; records that were pending are forgotten."""
    return c._replace(num_pending=lengths, reach=torch.minimum(c.reach, sizes.most_reach - lengths))


def commit(c: Cursors, n: Tensor, sizes: Sizes) -> Cursors:
    """The first n pending records count, the others are forgotten."""
    committed = c.num_committed + n
    return c._replace(
        num_committed=committed,
        num_pending=torch.zeros_like(n),
        conv_end=(c.conv_end + n) % max(sizes.conv, 1),
        reach=torch.minimum(c.reach + n, committed),
    )


def commit_late(c: Cursors, n: Tensor, sizes: Sizes) -> Cursors:
    """commit of counts that come with the next step: as many as are pending at most, none below 0."""
    return commit(c, torch.minimum(n.clamp(min=0), c.num_pending), sizes)


def flush(c: Cursors, sizes: Sizes, n: Tensor | None = None) -> Cursors:
    """The oldest n (None: all) committed records are in the checkpoint; the others and pending ones stay."""
    n = c.num_committed if n is None else n
    left = c.num_committed - n
    return c._replace(
        ring_start=(c.ring_start + n) % sizes.ring,
        num_committed=left,
        reach=torch.minimum(c.reach, left),
        flush_at=torch.full_like(n, sizes.window),
        flushes=c.flushes + 1,
    )


def trim(c: Cursors, n: Tensor, sizes: Sizes) -> Cursors:
    """The newest n committed records are forgotten, with whatever was pending."""
    return c._replace(
        num_committed=c.num_committed - n,
        num_pending=torch.zeros_like(n),
        conv_end=(c.conv_end - n) % max(sizes.conv, 1),
        reach=c.reach - n,
    )


def due(c: Cursors, lengths: Tensor | int) -> Tensor:
    """Which slots must flush before their next `lengths` tokens: bool, elementwise."""
    return (c.live == 1) & (c.num_committed > 0) & (c.num_committed + lengths > c.flush_at)


def folds_beside(length: int, window: int) -> bool:
    """Whether a layer on a device may append a step's records while it folds those that are due: all fit in the ring.

    True where max_tokens <= window, with a ring of `length` = window + max_tokens places.
    """
    return length - window <= window


def in_one_launch(rows: int, heads: int) -> bool:
    """Whether a layer's step on a device is one launch: so few programs that each may do its own carry (H200)."""
    return rows * heads <= 128


def updates_at_once(rows: int, values: int, delta: bool, format: Format) -> bool:
    """Whether a step of one token on a device updates checkpoints itself: so few rows that bytes are nothing (H200).

    Args:
        values: H V, rows of a state; delta: of the delta rule, whose carry through records takes longer.
    """
    most = 8192 if not delta else 32768 if format.name == "fp32" else 16384
    return format.exact and rows * values <= most


def places(start: Tensor, first: Tensor, count: int, length: int) -> Tensor:
    """Ring places of `count` records in a row, from record number `first`: [B], [B] -> [B, count]."""
    return ((start + first)[:, None] + torch.arange(count, device=start.device)) % length


def ages(start: Tensor, length: int) -> Tensor:
    """Record number at every ring place (0 = oldest): [B] -> [B, length]. Inverse of places(start, 0, ...)."""
    return (torch.arange(length, device=start.device) - start[:, None]) % length


def paths(committed: Tensor, lengths: Tensor, tokens: int, length: int, parent: Tensor | None = None) -> Tensor:
    """Which records lie on each record's path, by record number, itself included: bool [B, R, R].

    A committed record's path is all that came before it. A token of the step adds the step's tokens before it (a chain)
    or its ancestors (a tree). Rows that are neither are empty.

    Args:
        committed, lengths: [B]
        parent: [B, T] index of each token's parent within the step, -1 for a root; None for a chain.
    """
    record = torch.arange(length, device=committed.device)
    past = record < committed[:, None]  # [B, R]
    index = record - committed[:, None]  # which token of the step a record is
    inside = (index >= 0) & (index < lengths[:, None])
    counted = (past | inside)[:, :, None]
    before = record <= record[:, None]  # [R, R]
    if parent is None:
        return before & counted
    kin = ancestors(parent)  # [B, T, T]
    at = index.clamp(0, tokens - 1)
    own = kin.gather(1, at[:, :, None].expand(-1, -1, tokens)).gather(2, at[:, None].expand(-1, length, -1))
    own = own & inside[:, :, None] & inside[:, None]
    return torch.where(past[:, None], before & counted, own)


def ancestors(parent: Tensor) -> Tensor:
    """Ancestry of a tree whose parents precede their children: parent [B, T] -> bool [B, T, T], itself included."""
    rows, tokens = parent.shape
    kin = torch.eye(tokens, dtype=torch.bool, device=parent.device).repeat(rows, 1, 1)
    for i in range(1, tokens):
        above = kin.gather(1, parent[:, i].clamp(min=0)[:, None, None].expand(-1, 1, tokens))[:, 0]
        kin[:, i] |= above & (parent[:, i] >= 0)[:, None]
    return kin


class DeviceStep(NamedTuple):
    """One step of a model as kernels take it: made on the device, without a wait, by ring_kernel.begin.

    Attributes:
        rows, tokens: sizes of the caller's tensors, [rows, tokens, ...].
        table: int32 [10, rows], a column for each row; rows that are due come last. (0) The slot, -1 if the row brings
            no token, (1) ring_start and (2) num_committed after the flush, (3) tokens, (4) records in front of
            ring_start that each layer's decode folds into the checkpoint, (5) conv_end, (6) the caller's row, (7) the
            number of this step, (8) flushes of the slot, that of (4) included, (9) how many rows are due.
        parent: int32 [rows, T] for a draft tree, None for a chain.
        kin: int8 [rows, T, T], which of the step's tokens each sees, itself included; None for a chain.
        at_once: all committed records are in front of ring_start, and a layer is one launch of update_kernel.
    """

    rows: int
    tokens: int
    table: Tensor
    parent: Tensor | None
    kin: Tensor | None
    at_once: bool = False

    @property
    def kind(self) -> str:
        """chain or tree."""
        return "chain" if self.parent is None else "tree"


class Step(NamedTuple):
    """One step of a model, made by ReplayCache.begin for all layers: which rows live and where their records go.

    Rows that bring no token (padding, zero length) are left out: B counts the rows that are left, `living` says where
    they were among the `rows` given.

    Attributes:
        rows, tokens: sizes of the caller's tensors, [rows, tokens, ...].
        living: [B] of the caller's rows, or None where all of them live.
        slots, lengths, start, committed, conv_end: [B]
        base: the first slot where slots are base, base + 1, ...; tensors are then read as views. None otherwise.
        whole: every row brings all `tokens`.
        place: [B, T] ring place of every token's record.
        order: [B, R] ring place of every record, oldest first; age: [B, R] its inverse.
        paths: bool [B, R, R], by ring place: which records lie on a record's path; sees: its rows of the step's tokens,
            [B, T, R].
        parent: [B, T] for a draft tree, None for a chain.
    """

    rows: int
    tokens: int
    living: Tensor | None
    slots: Tensor
    base: int | None
    lengths: Tensor
    whole: bool
    start: Tensor
    committed: Tensor
    conv_end: Tensor
    place: Tensor
    order: Tensor
    age: Tensor
    paths: Tensor
    sees: Tensor
    parent: Tensor | None

    @property
    def kind(self) -> str:
        """chain or tree."""
        return "chain" if self.parent is None else "tree"

    def select(self, x: Tensor) -> Tensor:
        """The living rows of a caller's tensor: [rows, ...] -> [B, ...]."""
        return x if self.living is None else x[self.living]

    def spread(self, x: Tensor) -> Tensor:
        """Back to the caller's rows, zero where no row lives: [B, ...] -> [rows, ...]."""
        if self.living is None:
            return x
        return x.new_zeros(self.rows, *x.shape[1:]).index_copy_(0, self.living, x)

    def take(self, pool: Tensor) -> Tensor:
        """The living rows of a pool's tensor: [S, ...] -> [B, ...], a view where the slots follow one another."""
        return pool[self.slots] if self.base is None else pool[self.base : self.base + len(self.slots)]

    def valid(self) -> Tensor:
        """Which tokens are real: bool [B, T]."""
        return torch.arange(self.tokens, device=self.lengths.device) < self.lengths[:, None]

    def zero_padding(self, x: Tensor) -> Tensor:
        """Zero the tokens beyond every row's length: [B, T, ...]."""
        return x if self.whole else torch.where(self.valid()[(..., *[None] * (x.ndim - 2))], x, 0)


def plan(
    c: Cursors, given: Tensor, living: Tensor | None, lengths: Tensor, tokens: int, sizes: Sizes, parent: Tensor | None
) -> Step:
    """A step from the cursors of its living rows, as begin left them.

    Args:
        given: slots of all rows; living: which of them bring tokens, None for all.
        lengths: [B] of the living rows.
        parent: [B, T] of the living rows, or None.
    """
    slots = given if living is None else given[living]
    start, committed, R = c.ring_start, c.num_committed, sizes.ring
    age, place = ages(start, R), places(start, committed, tokens, R)
    by_age = paths(committed, lengths, tokens, R, parent)
    by_place = by_age.gather(1, age[:, :, None].expand_as(by_age)).gather(2, age[:, None].expand_as(by_age))
    return Step(
        rows=len(given),
        tokens=tokens,
        living=living,
        slots=slots,
        base=consecutive(slots),
        lengths=lengths,
        whole=bool((lengths == tokens).all()),
        start=start,
        committed=committed,
        conv_end=c.conv_end,
        place=place,
        order=places(start, torch.zeros_like(start), R, R),
        age=age,
        paths=by_place,
        sees=by_place.gather(1, place[:, :, None].expand(-1, -1, R)),
        parent=parent,
    )


def is_path(parent: Tensor, path: Tensor, lengths: Tensor) -> Tensor:
    """Which rows of path [B, P] (node indices, padded with -1) go from a root down, parent to child: bool [B]."""
    inside = (path >= -1) & (path < lengths[:, None])
    above = parent.gather(1, path.clamp(0, parent.shape[1] - 1))
    before = torch.cat([torch.full_like(path[:, :1], -1), path[:, :-1]], 1)
    follows = (above == before) & ((before >= 0) | (torch.arange(path.shape[1], device=path.device) == 0))
    return (inside & (follows | (path == -1))).all(1)


def consecutive(slots: Tensor) -> int | None:
    """The first slot, where slots on a CPU are first, first + 1, ...; None otherwise."""
    if slots.device.type != "cpu" or not len(slots):
        return None
    first = int(slots[0])
    return first if torch.equal(slots, torch.arange(first, first + len(slots))) else None


class Records(NamedTuple):
    """The ring of one layer: the raw inputs of recent tokens. S slots, R places.

    Attributes:
        k: [S, G, R, K] and v: [S, H, R, V], activation dtype, as they left the convolution.
        g: [S, H, R, E] log decay and w: [S, H, R], fp32.
        norm: [S, G, R] fp32, 1 / |k| (delta rule), else [S, G, 0].
        back: [S, H, R, R] fp32 (delta rule), else [S, H, 0, 0]: back[l, j] times record l's own score is what record
            j's weight gains through l's correction. Written once with record l; zero where l does not see j.
            Derivation in recurrences/gdn/math.md.
    """

    k: Tensor
    v: Tensor
    g: Tensor
    w: Tensor
    norm: Tensor
    back: Tensor


class LayerState(NamedTuple):
    """One layer of a cache.

    Attributes:
        checkpoint: the planes of its format, [S, H, V, columns] each.
        conv: convolution inputs [S, W - 1 + T, C].
        ready: int32 [S, n] on a device, else [S, 0]: the newest step whose carry of a head, or whose flush of a part of
            it, is in memory. Scratch.
        key: int64 [2], what formats.layer_key says: noise of stochastic rounding begins from it.
        format: how this layer's checkpoint is stored.
    """

    checkpoint: tuple[Tensor, ...]
    ring: Records
    conv: Tensor
    ready: Tensor
    key: Tensor
    format: Format
