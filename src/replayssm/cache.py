"""ReplayCache: checkpoints, rings and cursors of a pool of slots; the whole life of a request.

    allocate -> reset | load -> ( begin -> decode every layer -> commit )* -> free
                                 flush, trim, materialize, copy, export, restore in between

One cache serves all recurrent layers of a model. Tensors are per layer, cursors are shared: they move once per step.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm import checks, formats, implementations, recurrences, ring
from replayssm.formats import Format
from replayssm.implementations import AnyStep, Implementation
from replayssm.recurrences import Geometry, Recurrence, batched
from replayssm.ring import PAD_SLOT, Cursors, LayerState, Records, Step

ALIGN = 128  # bytes: where every tensor of a page begins


class ConvGeometry(NamedTuple):
    """The convolution in front of the recurrence: channels C and width W."""

    channels: int
    width: int


class Nbytes(NamedTuple):
    """Memory of a cache in bytes, by part."""

    checkpoint: int
    ring: int
    conv: int
    cursors: int

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self)


class Prefill(NamedTuple):
    """Slots whose next tokens another kernel computes, and their cursors as they were: where the state before lies."""

    slots: Tensor
    cursors: Cursors


class Traffic(NamedTuple):
    """Bytes of state that one token of one slot reads and writes, over all layers, flushes included."""

    read: float
    written: float


class ReplayCache:
    """A pool of S slots, each the recurrent state of one request in every layer.

    Args:
        recurrence: "mamba2", "gdn" or "kda".
        geometry: heads and dims of one layer.
        layers: recurrent layers of the model, counted 0..layers-1 here.
        slots: S, requests that fit.
        window: committed records that may wait before a flush, 1 or more.
        max_tokens: T, most tokens per row and step (1 + drafts); the ring has R = window + T places.
        format: storage of the checkpoint, a name of replayssm.formats; or one by layer, {"default": name, layer: name}.
        dtype: of k, v and convolution inputs, the model's activations. Never changes the state's precision.
        conv: the convolution in front, or None where there is none.
        staggered: spread the first flush of neighbouring slots over a window.
        seed: of formats that round stochastically; the same seed and the same calls give the same bits.
        device: where everything lives.
        implementation: "reference", "torch" or "triton"; None takes the fast one for the device.
        pages: memory of an engine that keeps its own: per layer a tensor [S, n] of bytes, n >= page_bytes of the same
            arguments. A slot's tensors lie one after the other in its page; nothing else of a page is touched.

    Raises:
        ValueError: an unknown name, a size that cannot be, or pages that are too small.
    """

    def __init__(
        self,
        recurrence: str,
        geometry: Geometry,
        layers: int,
        slots: int,
        window: int = 16,
        max_tokens: int = 1,
        format: str | Mapping[Any, str] = "fp32",
        dtype: torch.dtype = torch.float32,
        conv: ConvGeometry | None = None,
        staggered: bool = True,
        seed: int = 0,
        device: torch.device | str = "cpu",
        implementation: str | None = None,
        pages: Sequence[Tensor] | None = None,
    ) -> None:
        self.recurrence = recurrences.get(recurrence)
        self.geometry = Geometry(*geometry)
        self.window, self.max_tokens, self.dtype, self.conv = window, max_tokens, dtype, conv
        self.staggered = staggered
        self.device = torch.empty(0, device=device).device  # "cuda" becomes cuda:0, as tensors name it
        self._check_sizes(layers, slots)
        self.format, self.formats = formats.by_layer(format, layers)  # the default, and every layer's
        for fmt in set(self.formats):
            formats.check_dims("ReplayCache", fmt, self.geometry.K)
            self.implementation = implementations.choose(implementation, self.device, fmt)
        self.sizes = _sizes(window, max_tokens, conv)
        self.num_slots = slots
        if pages is not None:
            self._check_pages(pages, layers)
        self.layers = [
            self._new_layer(fmt, formats.layer_key(seed, i), None if pages is None else pages[i])
            for i, fmt in enumerate(self.formats)
        ]
        self.cursor_tensor = torch.zeros(len(Cursors._fields), slots, dtype=torch.int64, device=self.device)
        self.cursors = Cursors(*self.cursor_tensor)
        self.clock = torch.zeros(1, dtype=torch.int32, device=self.device)  # steps begun on a device
        self._decoded: set[int] = set()  # layers, in the newest step
        self._free = deque(range(slots))
        self._allocated: set[int] = set()

    def _check_sizes(self, layers: int, slots: int) -> None:
        H, G, V, K = self.geometry
        wanted = {"layers": layers, "slots": slots, "window": self.window, "max_tokens": self.max_tokens}
        for name, got in (wanted | self.geometry._asdict()).items():
            if not isinstance(got, int) or got < 1:
                raise ValueError(f"ReplayCache: {name} must be a whole number, 1 or more; got {got!r}.")
        if H % G:
            raise ValueError(
                f"ReplayCache: H value heads must be a multiple of G key groups; got H = {H}, G = {G}. "
                "Both count heads on this device, after tensor parallelism."
            )
        if not self.dtype.is_floating_point:
            raise ValueError(f"ReplayCache: dtype must be a floating dtype; got {self.dtype}.")
        if self.conv and (self.conv.width < 2 or self.conv.channels != self.recurrence.conv_channels(self.geometry)):
            raise ValueError(
                f"ReplayCache: conv must have width 2 or more and 2 G K + H V = "
                f"{self.recurrence.conv_channels(self.geometry)} channels; got {tuple(self.conv)}."
            )

    def _check_pages(self, pages: Sequence[Tensor], layers: int) -> None:
        least = [_page_size(self._tensors(fmt)) for fmt in self.formats]
        if len(pages) != layers:
            raise ValueError(f"ReplayCache: pages must be one tensor per layer, {layers}; got {len(pages)}.")
        for i, (page, n) in enumerate(zip(pages, least, strict=True)):
            right = page.ndim == 2 and page.shape[0] == self.num_slots and page.shape[1] >= n and page.itemsize == 1
            if not right or page.stride(1) != 1 or page.stride(0) % 16 or page.data_ptr() % 16:
                raise ValueError(
                    f"ReplayCache: pages[{i}] must be [{self.num_slots}, {n} or more] bytes, every row dense and at a "
                    f"multiple of 16 bytes; got {checks.describe(page.shape, page.dtype)}, strides "
                    f"{tuple(page.stride())}. See replayssm.page_bytes."
                )
            if page.device != self.device:
                raise ValueError(f"ReplayCache: pages[{i}] must be on {self.device}; got {page.device}.")

    def _tensors(self, fmt: Format) -> dict[str, "_Tensor"]:
        return _tensors(self.recurrence, self.geometry, self.sizes, self.conv, fmt, self.dtype, self.implementation)

    def _new_layer(self, fmt: Format, key: tuple[int, int], page: Tensor | None) -> LayerState:
        """A layer's tensors, one allocation each, or cut from a page."""
        found, offset = {}, 0
        for name, (shape, dtype) in self._tensors(fmt).items():
            if page is None:
                found[name] = torch.empty(self.num_slots, *shape, dtype=dtype, device=self.device)
            else:
                size = math.prod(shape) * dtype.itemsize
                part = page[:, offset : offset + size].view(dtype)
                found[name] = part.as_strided((self.num_slots, *shape), (part.stride(0), *_dense(shape)))
                offset += -(-size // ALIGN) * ALIGN
        return LayerState(
            checkpoint=tuple(found[f"checkpoint.{i}"] for i in range(len(fmt.planes))),
            ring=Records(*(found[name] for name in Records._fields)),
            conv=found["conv"],
            ready=found["ready"],
            key=torch.tensor(key, device=self.device),
            format=fmt,
        )

    # ---- slots ----

    def allocate(self, n: int) -> Tensor:
        """Take n free slots: int64 [n]. They hold nothing until reset or load.

        Raises:
            ValueError: fewer than n are free.
        """
        if not 0 <= n <= len(self._free):
            raise ValueError(
                f"ReplayCache.allocate: {n} slots were asked for and {len(self._free)} of {self.num_slots} are free. "
                "Free finished requests, or make the cache with more slots."
            )
        taken = [self._free.popleft() for _ in range(n)]
        self._allocated.update(taken)
        return torch.tensor(taken, dtype=torch.int64, device=self.device)

    def free(self, slots: Tensor) -> None:
        """Give slots back. Whatever they hold is forgotten.

        Raises:
            ValueError: a slot was not allocated.
        """
        slots = checks.slots("ReplayCache.free", slots, self.num_slots, self.device)
        given = slots.tolist()
        wrong = [slot for slot in given if slot not in self._allocated]
        if wrong or len(set(given)) != len(given):
            raise ValueError(
                f"ReplayCache.free: slots {wrong or given} are not allocated once each; free a slot one time."
            )
        self._allocated.difference_update(given)
        self._free.extend(given)
        self.cursors.live[slots] = 0

    @property
    def free_slots(self) -> int:
        """How many slots allocate could give."""
        return len(self._free)

    # ---- what a slot starts from ----

    def reset(self, slots: Tensor) -> None:
        """Zero state, empty ring, zero convolution inputs: every per-slot field, whatever the memory held."""
        slots = checks.slots("ReplayCache.reset", slots, self.num_slots, self.device)
        for layer in self.layers:
            for pool in (*layer.checkpoint, *layer.ring, layer.conv, layer.ready):
                pool[slots] = 0
        self.cursors.put(slots, ring.reset(slots, self.sizes, self.staggered))

    def load(self, layer: int, slots: Tensor, state: Tensor, window: Tensor | None = None) -> None:
        """Start slots from a full state, as a prefill leaves it; the ring is emptied. Call it for every layer.

        Cursors are shared, so the first layer's load restarts them for all: take what you still need of the slots'
        old contents (materialize, conv_window) from every layer before.

        Args:
            state: [n, H, V, K], any floating dtype (fp32 is what a state should have).
            window: [n, C, W - 1] raw convolution inputs, oldest first; None where there is no convolution.

        Raises:
            ValueError: a shape that is not the cache's; on a CPU also a state that is not finite (a GPU would have to
                wait to see it; there it stays in its own slot). Nothing changes.
        """
        where = f"{self.recurrence.name}.load"
        slots = checks.slots(where, slots, self.num_slots, self.device)
        H, _, V, K = self.geometry
        shape = (len(slots), H, V, K)
        checks.tensor(where, "state", state, "[n, H, V, K]", shape, None, self.device, "Engines keep [V, K], see docs.")
        into = self._layer(where, layer)
        if (window is None) != (self.conv is None):
            raise ValueError(
                f"{where}: a window is needed exactly where the cache was made with conv; "
                f"got window {'None' if window is None else 'given'}, conv {self.conv}."
            )
        if self.conv and window is not None:
            C, W = self.conv
            checks.tensor(where, "window", window, "[n, C, W - 1]", (len(slots), C, W - 1), None, self.device)
        if self.device.type == "cpu" and not bool(state.isfinite().all()):
            bad = slots[~state.isfinite().flatten(1).all(1)].tolist()
            raise ValueError(
                f"{where}: the state must be finite; that for slots {bad} is not. Look for what made it so (an "
                "overflow in a 16-bit prefill, a NaN among the inputs); other slots can be loaded."
            )
        self._put(into, slots, state, window)
        self.cursors.put(slots, ring.reset(slots, self.sizes, self.staggered))

    def _put(self, into: LayerState, slots: Tensor, state: Tensor, window: Tensor | None) -> None:
        """A layer's part of fresh slots. Kernels on a device never read a place of the ring that holds no record."""
        for pool in (into.ready,) if self.implementation.on_device else (*into.ring, into.conv):
            pool[slots] = 0
        self.implementation.store(into, slots, state.to(self.format.compute))
        if window is not None:
            # conv_end is 0: the newest input lies at the ring's last place.
            into.conv[slots, -window.shape[2] :] = window.transpose(1, 2).to(self.dtype)

    # ---- a prefill by other kernels ----

    def begin_prefill(self, slots: Tensor, accepted: Tensor | Sequence[int] | int | None = None) -> Prefill:
        """Start a piece of prefill, whose tokens another kernel takes from state to state: once, for all layers.

            prefill = cache.begin_prefill(slots)
            state, window = cache.prefill_state(layer, prefill)      # every layer: before, and
            cache.end_prefill(layer, prefill, state, window)         # after the tokens

        Cursors restart here, so slots may be fresh ones; what they hold then means nothing.

        Args:
            accepted: as in begin.
        """
        where = f"{self.recurrence.name}.begin_prefill"
        slots = checks.slots(where, slots, self.num_slots, self.device)
        cursors = Cursors(*self.cursor_tensor[:, slots])
        if accepted is not None:
            accepted = checks.counts(where, "accepted", accepted, len(slots), self.device)
            cursors = ring.commit_late(cursors, accepted, self.sizes)
        self.cursor_tensor[:, slots] = torch.stack(ring.reset(slots, self.sizes, self.staggered))
        return Prefill(slots, cursors)

    def prefill_state(self, layer: int, prefill: Prefill) -> tuple[Tensor, Tensor | None]:
        """What the slots held in a layer: state [n, H, V, K] in fp32 and window [n, C, W - 1], before end_prefill."""
        state = self._layer(f"{self.recurrence.name}.prefill_state", layer)
        slots, cursors = prefill
        window = self._window(state, slots, cursors.conv_end) if self.conv else None
        return self._folded(state, slots, cursors.ring_start, cursors.num_committed), window

    def end_prefill(self, layer: int, prefill: Prefill, state: Tensor, window: Tensor | None) -> None:
        """The state and convolution window after the piece, as load takes them; without load's checks."""
        self._put(self._layer(f"{self.recurrence.name}.end_prefill", layer), prefill.slots, state, window)

    def _folded(self, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor) -> Tensor:
        H, _, V, K = self.geometry
        out = torch.empty(len(slots), H, V, K, dtype=self.format.compute, device=self.device)
        for block in self._blocks(len(slots)):
            out[block] = self.implementation.fold(self.recurrence, layer, slots[block], start[block], counts[block])
        return out

    def _window(self, layer: LayerState, slots: Tensor, conv_end: Tensor) -> Tensor:
        assert self.conv is not None
        back = torch.arange(1 - self.conv.width, 0, device=self.device)
        place = (conv_end[:, None] + back) % self.sizes.conv
        return layer.conv[slots[:, None], place].transpose(1, 2)

    # ---- a step ----

    def begin(
        self,
        slots: Tensor,
        lengths: Tensor | Sequence[int] | int | None = None,
        tokens: int = 1,
        parent: Tensor | None = None,
        accepted: Tensor | Sequence[int] | int | None = None,
    ) -> AnyStep:
        """Start one step of the model for a batch of rows, for all layers. Slots that are due are flushed first.

        Args:
            slots: [rows] slot of every row; PAD_SLOT (-1) for a row to ignore.
            lengths: [rows] tokens that every row brings, 0..tokens, the first of its T; None for all of them.
            tokens: T of the tensors that decode will get, at most max_tokens.
            parent: [rows, T] index of every token's parent within the step, -1 for none; None for a chain.
            accepted: [rows] how many tokens of every slot's last step count, for engines that know it only now: begin
                then commits them first, and commit is not called. At most so many as are pending; a slot with none
                pending has nothing to commit. For chains.

        Returns:
            The step, to be given to decode, once in every layer, and then to commit. If it is never committed it leaves
            no trace. Until the last layer's decode, no other verb may touch the step's slots but reset, load and free:
            on a GPU, a slot that is due is folded by each layer's own decode.

        Raises:
            ValueError: a slot out of range, given twice or not loaded; an impossible length or tree. Nothing changes.
        """
        where = f"{self.recurrence.name}.begin"
        given = checks.slots(where, slots, self.num_slots, self.device, padding=True)
        if not 1 <= tokens <= self.max_tokens:
            raise ValueError(
                f"{where}: tokens must be between 1 and max_tokens = {self.max_tokens}, what the ring "
                f"of {self.sizes.ring} places leaves behind a window of {self.window}; got {tokens}. "
                "Make the cache with a larger max_tokens."
            )
        if lengths is not None:
            lengths = checks.counts(where, "lengths", lengths, len(given), self.device)
        if not self.implementation.on_device:
            used = given[given != PAD_SLOT]
            if lengths is not None:
                checks.within(where, "lengths", lengths, tokens, given, "A row brings 0 to T tokens.")
            self._check_live(where, used)
            if len(used.unique()) != len(used):
                raise ValueError(f"{where}: every slot may be given once a step; got {used.tolist()}.")
        if parent is not None:
            parent = self._check_tree(where, parent, len(given), tokens)
        if accepted is not None:
            accepted = checks.counts(where, "accepted", accepted, len(given), self.device)
        self._decoded.clear()
        return self.implementation.begin(self, given, lengths, tokens, parent, accepted)

    def commit(
        self,
        step: AnyStep,
        n: Tensor | Sequence[int] | int | None = None,
        path: Tensor | Sequence[Sequence[int]] | None = None,
    ) -> None:
        """The first n tokens of every row count, or those on a path of its tree; the others never happened.

        Once per step, for all layers. A chain only moves cursors; of a tree, accepted records move together first.

        Args:
            n: [rows], 0..lengths, for a chain; None for all. Rows that were padding are ignored.
            path: [rows, P] for a tree: node indices from a root downwards, padded with -1.

        Raises:
            ValueError: n out of range, a path that is not in the tree, or the step is not the slots' newest.
                Nothing changes.
        """
        where = f"{self.recurrence.name}.commit"
        if (path is None) != (step.parent is None) or (path is not None and n is not None):
            raise ValueError(f"{where}: a tree is committed by path, a chain by n; this step is a {step.kind}.")
        if isinstance(step, Step) and not torch.equal(self.cursors.num_pending[step.slots], step.lengths):
            raise ValueError(
                f"{where}: this step was committed already, or another began after it; commit a step once."
            )
        if path is not None:
            n = self.implementation.compact(self, step, self._check_path(where, step, path))
        elif n is not None:
            n = checks.counts(where, "n", n, step.rows, self.device)
            if isinstance(step, Step):
                why = "Only tokens of the step can count."
                checks.within(where, "n", step.select(n), step.lengths, step.slots, why)
        self.implementation.commit(self, step, n)

    # ---- what happens to a slot between steps ----

    def flush(self, slots: Tensor | None = None, keep: int = 0) -> None:
        """Fold committed records into the checkpoint, in every layer: of these slots, or (None) of those full.

        Args:
            keep: how many of the newest records stay in the ring, where trim can forget them.
        """
        where = f"{self.recurrence.name}.flush"
        if slots is None:
            slots = ring.due(self.cursors, 1).nonzero().squeeze(1)
        slots = checks.slots(where, slots, self.num_slots, self.device)
        if keep < 0:
            raise ValueError(f"{where}: keep must be a number of records, 0 or more; got {keep}.")
        self._check_live(where, slots)
        slots = slots[self.cursors.num_committed[slots] > keep]
        if not len(slots):
            return
        cursors = self.cursors.at(slots)
        folded = cursors.num_committed - keep
        if keep:
            at, place = (ring.ages(cursors.ring_start, self.sizes.ring) < folded[:, None]).nonzero(as_tuple=True)
        for layer in self.layers:
            for block in self._blocks(len(slots)):
                rows = slots[block], cursors.ring_start[block], folded[block]
                self.implementation.flush(self.recurrence, layer, *rows, cursors.flushes[block] + 1)
            if keep and layer.ring.back.numel():  # what those that stay would correct is in the checkpoint
                layer.ring.back[slots[at], :, :, place] = 0
        self.cursors.put(slots, ring.flush(cursors, self.sizes, folded))

    def trim(self, slots: Tensor, n: Tensor | Sequence[int] | int) -> None:
        """Forget the newest n committed records of every slot: state and convolution window go back together.

        Raises:
            ValueError: further back than the ring reaches. Nothing changes.
        """
        where = f"{self.recurrence.name}.trim"
        slots = checks.slots(where, slots, self.num_slots, self.device)
        self._check_live(where, slots)
        n = checks.counts(where, "n", n, len(slots), self.device)
        cursors = self.cursors.at(slots)
        why = "Older tokens are in the checkpoint, or their convolution inputs are gone; load an earlier state instead."
        checks.within(where, "n", n, cursors.reach, slots, why)
        self.cursors.put(slots, ring.trim(cursors, n, self.sizes))

    def materialize(self, layer: int, slots: Tensor, n: Tensor | Sequence[int] | int | None = None) -> Tensor:
        """The full state of slots after their first n committed records (None: all): [len, H, V, K], cache unchanged.

        Returns:
            fp32 (fp64 for format fp64).
        """
        where = f"{self.recurrence.name}.materialize"
        slots = checks.slots(where, slots, self.num_slots, self.device)
        self._check_live(where, slots)
        cursors = self.cursors.at(slots)
        if n is None:
            n = cursors.num_committed
        else:
            n = checks.counts(where, "n", n, len(slots), self.device)
            checks.within(
                where, "n", n, cursors.num_committed, slots, "So many records are committed since the last flush."
            )
        return self._folded(self._layer(where, layer), slots, cursors.ring_start, n)

    def conv_window(self, layer: int, slots: Tensor) -> Tensor:
        """The convolution's newest W - 1 committed inputs, oldest first: [len, C, W - 1]."""
        where = f"{self.recurrence.name}.conv_window"
        slots = checks.slots(where, slots, self.num_slots, self.device)
        self._check_live(where, slots)
        if self.conv is None:
            raise ValueError(f"{where}: this cache was made without conv, so it keeps no convolution inputs.")
        return self._window(self._layer(where, layer), slots, self.cursors.conv_end[slots])

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Make every slot of dst what the slot of src at the same place is: state, ring, cursors, convolution inputs.

        Sources may repeat and may be destinations as well (beam reorder): all are read before any is written.
        """
        where = f"{self.recurrence.name}.copy"
        src = checks.slots(where, src, self.num_slots, self.device)
        dst = checks.slots(where, dst, self.num_slots, self.device)
        if len(src) != len(dst) or len(dst.unique()) != len(dst):
            raise ValueError(
                f"{where}: src and dst must have the same length and dst no slot twice; "
                f"got {src.tolist()} to {dst.tolist()}."
            )
        self._check_live(where, src)
        for layer in self.layers:
            for pool in (*layer.checkpoint, *layer.ring, layer.conv):
                pool[dst] = pool[src]
            layer.ready[dst] = 0
        self.cursors.put(dst, self.cursors.at(src))

    def export(self, slots: Tensor) -> dict[str, Tensor]:
        """All that slots hold, as named tensors (safetensors can save them): for restore, here or in another cache."""
        where = f"{self.recurrence.name}.export"
        slots = checks.slots(where, slots, self.num_slots, self.device)
        self._check_live(where, slots)
        return {name: pool[slots] for name, pool in self._pools().items()}

    def restore(self, slots: Tensor, snapshot: dict[str, Tensor]) -> None:
        """Put what export gave into slots, of this cache or of one made alike.

        Raises:
            ValueError: the snapshot is of another shape, format or number of layers. Nothing changes.
        """
        where = f"{self.recurrence.name}.restore"
        slots = checks.slots(where, slots, self.num_slots, self.device)
        pools = self._pools()
        if snapshot.keys() != pools.keys():
            odd = sorted(snapshot.keys() ^ pools.keys())
            raise ValueError(
                f"{where}: the snapshot must hold the tensors of a cache made alike; these are in one only: {odd}."
            )
        for name, pool in pools.items():
            shape = (len(slots), *pool.shape[1:])
            if tuple(snapshot[name].shape) != shape or snapshot[name].dtype != pool.dtype:
                raise ValueError(
                    f"{where}: {name} must be {checks.describe(shape, pool.dtype)}; "
                    f"got {checks.describe(snapshot[name].shape, snapshot[name].dtype)}. Make both caches alike."
                )
        for name, pool in pools.items():
            pool[slots] = snapshot[name].to(self.device)
        for layer in self.layers:
            layer.ready[slots] = 0

    # ---- what it costs ----

    @property
    def num_committed(self) -> Tensor:
        """Records since the last flush: [S]."""
        return self.cursors.num_committed

    @property
    def nbytes(self) -> Nbytes:
        """Memory of all slots and layers."""

        def size(*pools: Tensor) -> int:
            return sum(pool.numel() * pool.element_size() for pool in pools)

        return Nbytes(
            checkpoint=sum(size(*layer.checkpoint) for layer in self.layers),
            ring=sum(size(*layer.ring) for layer in self.layers),
            conv=sum(size(layer.conv) for layer in self.layers),
            cursors=size(*self.cursors),
        )

    def bytes_per_token(self, tokens: int = 1, accepted: float = 1.0) -> Traffic:
        """State traffic of steps that bring `tokens` tokens, of which `accepted` count on average, per counted token:
        checkpoint read, ring read at its mean fill, records written, flush / window.

        The convolution reads its W - 1 newest inputs and writes the new ones.
        """
        H, _, V, K = self.geometry
        elements = H * V * K
        one = {
            name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in self._tensors(self.formats[0]).items()
        }
        per_record = sum(one[name] for name in Records._fields) / self.sizes.ring
        fill = (self.window - 1) / 2 + tokens  # records that a step sees, its own included, mean over a window
        back = one["back"] / self.sizes.ring * max(0.0, 1 - fill / self.sizes.ring)
        inputs = (self.conv.channels if self.conv else 0) * self.dtype.itemsize
        flushes = accepted / self.window  # per step
        read = fill * (per_record - back) + flushes * self.window * per_record
        read = len(self.layers) * (read + inputs * (self.conv.width - 1 if self.conv else 0))
        written = len(self.layers) * tokens * (per_record + inputs)
        for fmt in self.formats:
            per_token, again = elements * fmt.read_bytes(K), elements * fmt.update_bytes(K)
            if self.implementation.on_device and not fmt.reads_apart:
                again -= per_token  # a checkpoint that was just folded is read for its tokens from a cache
            read += per_token + flushes * again
            written += flushes * elements * fmt.stored_bytes(K)
        return Traffic(read / accepted, written / accepted)

    # ---- inside ----

    def _layer(self, where: str, layer: int, step: AnyStep | None = None) -> LayerState:
        """A layer's tensors; with a step, for its one decode in it (graphs and compilers repeat theirs by replay)."""
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"{where}: layer must be between 0 and {len(self.layers) - 1}; got {layer}.")
        if step is None or torch.compiler.is_compiling():
            return self.layers[layer]
        if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            if layer in self._decoded:
                raise ValueError(f"{where}: layer {layer} was decoded in this step already; begin another step first.")
            self._decoded.add(layer)
        return self.layers[layer]

    def _check_live(self, where: str, slots: Tensor) -> None:
        if self.device.type == "cpu" and not bool(self.cursors.live[slots].all()):
            dead = slots[self.cursors.live[slots] == 0].tolist()
            raise ValueError(f"{where}: slots {dead} are not loaded; reset or load a slot before its first token.")

    def _check_tree(self, where: str, parent: Tensor, rows: int, tokens: int) -> Tensor:
        parent = torch.as_tensor(parent, device=self.device)
        if tuple(parent.shape) != (rows, tokens) or parent.is_floating_point():
            raise ValueError(
                f"{where}: parent must be [B, T] = [{rows}, {tokens}] in an integer dtype; "
                f"got {checks.describe(parent.shape, parent.dtype)}."
            )
        parent = parent.to(torch.int64)
        if not self.implementation.on_device and bool(
            ((parent < -1) | (parent >= torch.arange(tokens, device=self.device))).any()
        ):
            raise ValueError(
                f"{where}: a token's parent must come before it, or be -1 for the newest committed token; "
                f"got {parent.tolist()}."
            )
        return parent

    def _check_path(self, where: str, step: AnyStep, path: Tensor | Sequence[Sequence[int]]) -> Tensor:
        path = torch.as_tensor(path, device=self.device)
        if (
            path.ndim != 2
            or len(path) != step.rows
            or not 1 <= path.shape[1] <= step.tokens
            or path.is_floating_point()
        ):
            raise ValueError(
                f"{where}: path must be [B, P] = [{step.rows}, 1 to {step.tokens}] in an integer dtype, "
                f"padded with -1; got {checks.describe(path.shape, path.dtype)}."
            )
        path = path.to(torch.int64)
        if isinstance(step, Step) and step.parent is not None:
            right = ring.is_path(step.parent, step.select(path), step.lengths)
            if not bool(right.all()):
                bad = int((~right).nonzero()[0])
                raise ValueError(
                    f"{where}: path must go from a root of the tree from parent to child; "
                    f"got {step.select(path)[bad].tolist()} for slot {int(step.slots[bad])}, "
                    f"whose parents are {step.parent[bad].tolist()}."
                )
        return path

    def _blocks(self, n: int) -> list[slice]:
        """Slices of n rows whose states fit in batched.BLOCK_BYTES; on a GPU all at once."""
        if self.device.type != "cpu":
            return [slice(0, n)]
        H, _, V, K = self.geometry
        rows = max(1, batched.BLOCK_BYTES // (H * V * K * self.format.compute.itemsize))
        return [slice(i, min(i + rows, n)) for i in range(0, n, rows)]

    def _pools(self) -> dict[str, Tensor]:
        """Every per-slot tensor by name."""
        pools = {f"cursor.{name}": cursor for name, cursor in self.cursors._asdict().items()}
        for i, layer in enumerate(self.layers):
            pools |= {f"{i}.checkpoint.{j}": plane for j, plane in enumerate(layer.checkpoint)}
            pools |= {f"{i}.ring.{name}": pool for name, pool in layer.ring._asdict().items()}
            pools[f"{i}.conv"] = layer.conv
        return pools


_Tensor = tuple[tuple[int, ...], torch.dtype]


def page_bytes(
    recurrence: str,
    geometry: Geometry,
    window: int = 16,
    max_tokens: int = 1,
    format: str = "fp32",
    dtype: torch.dtype = torch.float32,
    conv: ConvGeometry | None = None,
    device: torch.device | str = "cpu",
    implementation: str | None = None,
) -> int:
    """Bytes of one slot's page in one layer, for ReplayCache(..., pages=): checkpoint, ring, convolution inputs, flags.

    Arguments as ReplayCache takes them.
    """
    fmt = formats.get(format)
    found = implementations.choose(implementation, torch.device(device), fmt)
    sizes = _sizes(window, max_tokens, conv)
    return _page_size(_tensors(recurrences.get(recurrence), Geometry(*geometry), sizes, conv, fmt, dtype, found))


def _sizes(window: int, max_tokens: int, conv: ConvGeometry | None) -> ring.Sizes:
    return ring.Sizes(
        ring=window + max_tokens,
        conv=conv.width - 1 + max_tokens if conv else 0,
        window=window,
        most_reach=max_tokens if conv else window + max_tokens,
    )


def _tensors(
    recurrence: Recurrence, geometry: Geometry, sizes: ring.Sizes, conv: ConvGeometry | None, fmt: Format,
    dtype: torch.dtype, implementation: Implementation,
) -> dict[str, _Tensor]:  # fmt: skip
    """Shape behind S and dtype of every tensor of a layer; see ring.LayerState and ring.Records."""
    (H, G, V, K), R, wide = geometry, sizes.ring, fmt.compute
    products = R if recurrence.delta and implementation.needs_back(recurrence, sizes.ring - sizes.window) else 0
    planes = {f"checkpoint.{i}": ((H, V, plane.columns(K)), plane.dtype) for i, plane in enumerate(fmt.planes)}
    return planes | {
        "k": ((G, R, K), dtype),
        "v": ((H, R, V), dtype),
        "g": ((H, R, recurrence.gate_dim(geometry)), wide),
        "w": ((H, R), wide),
        "norm": ((G, R if recurrence.delta else 0), wide),
        "back": ((H, products, products), wide),
        "conv": ((sizes.conv, conv.channels if conv else 0), dtype),
        "ready": ((H * (1 + -(-V // 16)) if implementation.on_device else 0,), torch.int32),
    }


def _page_size(tensors: dict[str, _Tensor]) -> int:
    return sum(-(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN for shape, dtype in tensors.values())


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
