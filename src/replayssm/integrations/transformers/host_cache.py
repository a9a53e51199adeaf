"""A Transformers cache whose recurrent layers live in one ReplayCache.

    host cache          cache.layers[i]      rows              core
    DynamicCache   ->   ReplayLayer 0   \\
                        ReplayLayer 1   ->  Rows (shared)  ->  ReplayCache, one slot per batch row
                        ...             /

`adopt` replaces the recurrent layer objects of one cache instance; attention layers stay the host's. A layer's state
is in the ReplayCache as soon as the host's prefill of that layer ends, and nowhere else. When the host's own forward
goes on from it (a prefill in pieces), it reads and writes it through the layer object; from `open_for_host` until that
layer's `update_recurrent_state` the layer also holds its convolution window, because loading one layer restarts the
cursors that all layers share.

Verbs on the whole cache arrive once per layer; the layer with index 0 carries them out for all.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    StaticCache,
)

from replayssm import ConvGeometry, Geometry, ReplayCache, ring


class Recipe(NamedTuple):
    """What the ReplayCache of a model is made of."""

    recurrence: str
    geometry: Geometry
    conv: ConvGeometry
    layer_indices: tuple[int, ...]  # the model's numbers of its recurrent layers
    transposed: bool  # the host keeps its states [B, H, K, V]
    window: int
    max_tokens: int
    format: str | Mapping[Any, str]
    staggered: bool
    seed: int
    implementation: str | None
    dtype: torch.dtype
    device: torch.device

    def cache(self, rows: int) -> ReplayCache:
        """An empty cache with one slot per batch row."""
        return ReplayCache(
            recurrence=self.recurrence,
            geometry=self.geometry,
            layers=len(self.layer_indices),
            slots=rows,
            window=self.window,
            max_tokens=self.max_tokens,
            format=self.format,
            dtype=self.dtype,
            conv=self.conv,
            staggered=self.staggered,
            seed=self.seed,
            implementation=self.implementation,
            device=self.device,
        )

    def turned(self, state: Tensor) -> Tensor:
        """A state between the host's layout and ours, either way."""
        return state.transpose(-1, -2) if self.transposed else state


class Rows:
    """The ReplayCache behind one host cache: batch row b is slot `slots[b]`.

    Attributes:
        cache, slots: None until the first prefill loads its states.
        step: the core's step while a replayed forward runs, else None.
        order, back: in such a forward, the permutation of columns [B, T] that brings each row's valid tokens to the
            front, and its inverse; None where there is nothing to permute.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.forget()

    def forget(self) -> None:
        """Back to before the first prefill; the memory is free."""
        self.cache: Any = None
        self.slots: Any = None
        self.step: Any = None
        self.order: Tensor | None = None
        self.back: Tensor | None = None

    def _allocate(self, count: int) -> None:
        self.cache = self.recipe.cache(count)
        self.slots = self.cache.allocate(count)

    def load(self, index: int, state: Tensor, window: Tensor) -> None:
        """Take over a layer's state: host layout, window [B, C, W - 1]."""
        if self.cache is None:
            self._allocate(len(state))
        self.cache.load(index, self.slots, self.recipe.turned(state).float(), window)

    def require(self, batch: int) -> None:
        """Refuse a forward of another number of rows."""
        if self.slots is not None and len(self.slots) != batch:
            raise ValueError(
                f"replayssm: the cache holds {len(self.slots)} rows and the input brings {batch}: use "
                "cache.batch_repeat_interleave or cache.batch_select_indices first."
            )

    def take(self, rows: Tensor) -> None:
        """The batch becomes these of its rows, in this order; rows may repeat or be missing."""
        if self.cache is None:
            return
        rows = rows.to(self.slots.device)
        if len(rows) == len(self.slots):
            self.cache.copy(self.slots[rows], self.slots)
            return
        snapshot = self.cache.export(self.slots[rows])
        self._allocate(len(rows))
        self.cache.restore(self.slots, snapshot)

    def begin(self, tokens: int, lengths: Tensor | None, parent: Tensor | None = None) -> None:
        """Start a replayed step of the whole model: rows bring the first `lengths` of `tokens` columns each."""
        self.step = self.cache.begin(self.slots, lengths, tokens, parent)

    def commit(self, n: Tensor | None = None, path: Tensor | None = None) -> None:
        """End it: the first n tokens of every row count, or those on a path of its tree; None: all."""
        step = self.step
        self.forget_step()
        self.cache.commit(step, n, path)

    def forget_step(self) -> None:
        """End it as if it had never been."""
        self.step = self.order = self.back = None

    @contextmanager
    def stepping(self, tokens: int, valid: Tensor | None) -> Iterator[None]:
        """One replayed step of the whole model: what it appends counts when its block ends without an error.

        A step of fewer tokens than max_tokens flushes by itself and keeps some, so that the newest max_tokens stay
        removable: an assistant model drafts token by token, and its host takes drafts back by the piece.

        Args:
            valid: [B, T], nonzero where a column holds a token of its row; None: everywhere.
        """
        lengths = None
        if valid is not None:
            valid = valid.to(torch.bool)
            lengths = valid.sum(1)
            if tokens > 1:
                self.order = valid.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
                self.back = self.order.argsort(dim=1)
        keep = self.recipe.max_tokens - tokens
        if keep:
            due = ring.due(self.cache.cursors.at(self.slots), tokens)
            self.cache.flush(self.slots[due], keep)
        try:
            self.begin(tokens, lengths)
            yield
        except BaseException:
            self.forget_step()
            raise
        self.commit()


class ReplayLayer(LinearAttentionLayer):
    """A recurrent layer of a host cache, as the host sees it; its state is layer `index` of the ReplayCache."""

    is_compileable = False

    def __init__(self, rows: Rows, index: int) -> None:
        self.rows = rows
        self.index = index
        self.window: Any = None  # [B, C, W - 1] while the host's forward runs
        self.number_of_states = 1
        self.has_previous_state = {0: False}
        self.record_past = False

    def _require_open(self) -> None:
        if self.window is None:
            raise ValueError(
                "replayssm: this cache keeps its recurrent states as checkpoint and ring, and this model is not "
                "enabled: call enable(model) again, or start from a new cache. To look at a state, use "
                "replay_cache(cache).materialize(layer, slots)."
            )

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """For the host's own forward: the newest W - 1 inputs of the convolution, {0: [B, C, W - 1]}."""
        if self.has_previous_state[0]:
            self._require_open()
        return {0: self.window}

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """For the host's own forward: the state in the host's layout, {0: [B, H, V, K]} or {0: [B, H, K, V]}."""
        if not self.has_previous_state[0]:
            return {0: None}
        self._require_open()
        return {0: self.rows.recipe.turned(self.rows.cache.materialize(self.index, self.rows.slots))}

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Append new inputs [B, C, T]; returns them behind those kept, as the host's layer does."""
        keep = self.rows.recipe.conv.width - 1
        if self.has_previous_state[0]:
            self._require_open()
            conv_states = torch.cat([self.window, conv_states], dim=-1)
        self.window = F.pad(conv_states, (keep, 0))[..., -keep:]
        self.has_previous_state[0] = True
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Take over the state at the end of the host's forward, host layout; it closes the layer."""
        self.rows.load(self.index, recurrent_states, self.window)
        self.window = None
        return recurrent_states

    @property
    def is_croppable(self) -> bool:
        """Whether rejected drafts can be taken back."""
        return self.rows.recipe.max_tokens > 1

    def crop(self, tokens_to_remove: int) -> None:
        """Done once for all layers, before any of them: see `_crop`."""

    def offload(self) -> None:
        """Nothing: the state stays on its device."""

    def prefetch(self) -> None:
        """Nothing: the state stays on its device."""

    def reset(self) -> None:
        """Forget the past; the next forward is a prefill."""
        self.has_previous_state[0] = False
        self.window = None
        if self.index == 0:
            self.rows.forget()

    def _take(self, select: Callable[[Tensor], Tensor]) -> None:
        if self.index == 0 and self.rows.slots is not None:
            self.rows.take(select(torch.arange(len(self.rows.slots), device=self.rows.slots.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b continues what row beam_idx[b] was."""
        self._take(lambda rows: rows[beam_idx.to(rows.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, side by side."""
        self._take(lambda rows: rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._take(lambda rows: rows[indices])


class ReplayHybridLayer(ReplayLayer, LinearAttentionAndFullAttentionLayer):
    """A recurrent layer with full attention beside it (Falcon-H1, Zamba2): the attention part is the host's."""

    lazy_initialization = DynamicLayer.lazy_initialization
    get_max_length = DynamicLayer.get_max_length

    def __init__(self, rows: Rows, index: int) -> None:
        DynamicLayer.__init__(self)
        ReplayLayer.__init__(self, rows, index)


def _in_both(name: str) -> Callable[..., None]:
    def method(self: ReplayHybridLayer, *args: Any) -> None:
        getattr(ReplayLayer, name)(self, *args)
        getattr(DynamicLayer, name)(self, *args)

    return method


for _name in (
    "offload", "prefetch", "reset", "crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices",
):  # fmt: skip
    setattr(ReplayHybridLayer, _name, _in_both(_name))


ADOPTED = {LinearAttentionLayer: ReplayLayer, LinearAttentionAndFullAttentionLayer: ReplayHybridLayer}


class Placeholder(LinearAttentionLayer):
    """What 5.17 keeps for a layer without a state (MLP, MoE), able to do what it asks of every layer: nothing."""

    is_croppable = True

    def crop(self, tokens_to_remove: int) -> None: ...

    def batch_repeat_interleave(self, repeats: int) -> None: ...

    def batch_select_indices(self, indices: Tensor) -> None: ...


def _crop(cache: Cache, tokens_to_remove: int) -> None:
    """`Cache.crop` of a replayed cache: the recurrent layers first, since only they can refuse; then all others."""
    if tokens_to_remove > 0:
        raise ValueError(
            f"crop: needs minus the number of tokens to remove, e.g. -{tokens_to_remove}; got {tokens_to_remove}, a "
            "length, which recurrent layers do not know."
        )
    rows = rows_of(cache)
    if tokens_to_remove and rows is not None and rows.cache is not None:
        try:
            rows.cache.trim(rows.slots, torch.full_like(rows.slots, -tokens_to_remove))
        except ValueError as error:
            raise ValueError(
                f"crop: cannot take back {-tokens_to_remove} tokens: {error} enable(model, max_tokens=T) keeps the "
                "newest T tokens of the last forward removable; a prefill is not."
            ) from error
    type(cache).crop(cache, tokens_to_remove)


def rows_of(cache: Cache | None) -> Rows | None:
    """The rows behind a host cache, None if it is not replayed."""
    layers = getattr(cache, "layers", ())
    return next((layer.rows for layer in layers if isinstance(layer, ReplayLayer)), None)


def open_for_host(cache: Cache, rows: Rows) -> None:
    """Let the host's own forward continue from the states: everything is folded, every layer holds its window."""
    rows.cache.flush(rows.slots)
    for layer in cache.layers:
        if isinstance(layer, ReplayLayer):
            layer.window = rows.cache.conv_window(layer.index, rows.slots)


def adopt(cache: Cache, recipe: Recipe) -> Rows:
    """Replace the recurrent layers of a host cache, with what states they hold.

    Raises:
        ValueError: the cache is of another kind.
    """
    layers = list(getattr(cache, "layers", ()))
    hosts: list[Any] = [layers[i] if i < len(layers) else None for i in recipe.layer_indices]
    if isinstance(cache, StaticCache) or any(type(host) not in ADOPTED for host in hosts):
        got = f"{type(cache).__name__} of " + (
            ", ".join(sorted({type(layer).__name__ for layer in layers})) or "no layers"
        )
        raise ValueError(
            f"replayssm: the cache must be a DynamicCache(config=model.config); got {got}. Leave cache_implementation "
            "at its default."
        )
    rows = Rows(recipe)
    for index, (i, host) in enumerate(zip(recipe.layer_indices, hosts, strict=True)):
        layer = ADOPTED[type(host)](rows, index)
        layer.record_past = host.record_past
        if isinstance(layer, DynamicLayer) and host.is_initialized:
            layer.lazy_initialization(host.keys, host.values)
            layer.keys, layer.values = host.keys, host.values
        if host.has_previous_state[0]:
            layer.update_conv_state(host.conv_states[0])
            layer.update_recurrent_state(host.recurrent_states[0])
        cache.layers[i] = layer
    for i, layer in enumerate(layers):
        if type(layer) is LinearAttentionLayer and i not in recipe.layer_indices:
            cache.layers[i] = Placeholder()
    cache.crop = MethodType(_crop, cache)
    return rows
