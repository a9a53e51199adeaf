"""The implementations of one interface: what a cache calls to begin, decode, commit and fold.

reference   the recurrences' definitions, any device and precision
torch       batched products, made for CPUs
triton      GPU kernels; on a CPU only in Triton's interpreter (TRITON_INTERPRET=1), for tests

The first two are `Hosted`: a step is planned on the host, in PyTorch operations. The third is device.Device: a step is
a table on the device, and nothing waits for it.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from replayssm import checks, conv, read, ring
from replayssm.formats import Format, noise_keys
from replayssm.recurrences import Recurrence, batched, inverse_norm, silu_, walked
from replayssm.ring import PAD_SLOT, DeviceStep, LayerState, Step

NAMES = ("reference", "torch", "triton")
AnyStep = Step | DeviceStep


class Ready(NamedTuple):
    """Inputs as the recurrence takes them: q, k [B, T, G, K], v [B, T, H, V], g [B, T, H(, K)], w [B, T, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    w: Tensor


class Raw(NamedTuple):
    """Projections before convolution and gates: x [B, T, C], raw_g [B, T, H(, K)] or None, raw_w [B, T, H]."""

    x: Tensor
    raw_g: Tensor | None
    raw_w: Tensor


class Implementation(Protocol):
    """What a cache calls. Arguments are checked before."""

    @property
    def name(self) -> str:
        """As implementation= takes it."""

    @property
    def on_device(self) -> bool:
        """Steps are tables on the device; counts out of range are clamped there, not refused."""

    def needs_back(self, recurrence: Recurrence, max_tokens: int) -> bool:
        """Carries and folds a delta rule by products, with the ring's `back`."""

    def begin(
        self,
        cache: Any,
        given: Tensor,
        lengths: Tensor | None,
        tokens: int,
        parent: Tensor | None,
        accepted: Tensor | None,
    ) -> AnyStep:
        """A step for rows of slots `given`, lengths [rows] or None for `tokens` each; what is due is flushed.

        accepted: [rows], what counts of every slot's pending tokens is committed first; None where none is pending.
        """

    def commit(self, cache: Any, step: Any, n: Tensor | None) -> None:
        """The first n [rows] tokens of every row count, or (None) all of them."""

    def compact(self, cache: Any, step: Any, path: Tensor) -> Tensor:
        """Records of a path [rows, P] move behind the committed ones, in every layer: how many they are, [rows]."""

    def convolve(self, layer: LayerState, step: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[rows, T, C]"""

    def decode(self, cache: Any, layer: LayerState, step: Any, inputs: Ready) -> Tensor:
        """y [rows, T, H, V]"""

    def decode_layer(
        self, cache: Any, layer: LayerState, step: Any, inputs: Raw, weights: Any, gate: Tensor | None
    ) -> Tensor:
        """y [rows, T, H, V], skip and output gate included"""

    def fold(self, recurrence: Recurrence, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor) -> Tensor:
        """States [n, H, V, K] after the first `counts` records."""

    def flush(
        self, recurrence: Recurrence, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor, flushes: Tensor
    ) -> None:
        """The folded states replace the checkpoints, as flush number `flushes` [n] of every slot."""

    def store(self, layer: LayerState, slots: Tensor, state: Tensor) -> None:
        """States [n, H, V, K] in the compute dtype become the checkpoints, as flush number 0."""


class Hosted(NamedTuple):
    """Implementations in PyTorch operations.

    Attributes:
        carry: (recurrence, records, step, q) -> t [B, H, T, K], c [B, H, T, R]; see recurrences/batched.py.
        read: (layer, step, t, c) -> y [B, H, T, V]; see read.py.
        fold: (recurrence, layer, slots, start, counts) -> states [n, H, V, K].
    """

    name: str
    carry: Callable[..., tuple[Tensor, Tensor]]
    read: Callable[..., Tensor]
    fold: Callable[..., Tensor]
    on_device: bool = False

    def needs_back(self, recurrence: Recurrence, max_tokens: int) -> bool:
        return True

    def begin(
        self,
        cache: Any,
        given: Tensor,
        lengths: Tensor | None,
        tokens: int,
        parent: Tensor | None,
        accepted: Tensor | None,
    ) -> Step:
        """Commit what was pending, flush what is due, move the cursors, plan the step."""
        if accepted is not None:
            used = given[given != PAD_SLOT]
            late = ring.commit_late(cache.cursors.at(used), accepted[given != PAD_SLOT], cache.sizes)
            cache.cursors.put(used, late)
        lengths = torch.full_like(given, tokens) if lengths is None else lengths
        lives = (given != PAD_SLOT) & (lengths > 0)
        living = None if bool(lives.all()) else lives.nonzero().squeeze(1)
        slots, parent = (
            (given, parent) if living is None else (given[living], None if parent is None else parent[living])
        )
        lengths = lengths if living is None else lengths[living]
        cache.flush(slots[ring.due(cache.cursors.at(slots), lengths)])
        cache.cursors.num_pending[given[given != PAD_SLOT]] = 0
        cursors = ring.begin(cache.cursors.at(slots), lengths, cache.sizes)
        cache.cursors.put(slots, cursors)
        if cache.max_tokens > 1:
            places = ring.places(cursors.ring_start, cursors.num_committed, cache.max_tokens, cache.sizes.ring)
            _clear(cache.layers, slots, places)
        return ring.plan(cursors, given, living, lengths, tokens, cache.sizes, parent)

    def commit(self, cache: Any, step: Step, n: Tensor | None) -> None:
        """Cursors move."""
        n = step.lengths if n is None else step.select(n)
        cache.cursors.put(step.slots, ring.commit(cache.cursors.at(step.slots), n, cache.sizes))

    def compact(self, cache: Any, step: Step, path: Tensor) -> Tensor:
        """Of `back` the columns move as well, and those of tokens off the path are cleared."""
        P, T, R = path.shape[1], step.tokens, cache.sizes.ring
        slots, start, committed, conv_end = step.slots, step.start, step.committed, step.conv_end
        nodes = step.select(path)
        place = ring.places(start, committed, T, R)
        source = torch.where(nodes >= 0, nodes, torch.arange(P, device=path.device))
        places, moved = place[:, :P], place.gather(1, source)
        conv_places = (conv_end[:, None] + torch.arange(P, device=path.device)) % max(cache.sizes.conv, 1)
        conv_moved = (conv_end[:, None] + source) % max(cache.sizes.conv, 1)
        at = slots[:, None]
        for layer in cache.layers:
            for pool in layer.ring[:-1]:
                if pool.numel():
                    pool[at, :, places] = pool[at, :, moved]
            if layer.ring.back.numel():
                rows = layer.ring.back[at, :, moved]  # [B, P, H, R]
                columns = moved[:, None, None].expand(*rows.shape[:3], P)
                kept = rows.gather(3, columns).where(nodes[:, None, None] >= 0, 0)
                rows.scatter_(3, place[:, None, None].expand(*rows.shape[:3], T), 0)
                rows.scatter_(3, places[:, None, None].expand_as(kept), kept)
                layer.ring.back[at, :, places] = rows
            if cache.conv:
                layer.conv[at, conv_places] = layer.conv[at, conv_moved]
        return (path >= 0).sum(1)

    def convolve(self, layer: LayerState, step: Step, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See conv.convolve."""
        return step.spread(step.zero_padding(conv.convolve(layer.conv, step, step.select(x), weight, bias)))

    def decode(self, cache: Any, layer: LayerState, step: Step, inputs: Ready) -> Tensor:
        """Norms, append, carry, read."""
        recurrence, fmt = cache.recurrence, layer.format
        if not len(step.slots):
            return torch.zeros_like(inputs.v)
        q, k, v, g, w = (step.select(x) for x in inputs)
        q, norm = q.to(fmt.compute), None
        if recurrence.delta:
            q = q * (inverse_norm(q) * cache.geometry.K**-0.5)[..., None]
            norm = inverse_norm(k.to(fmt.compute))
        fields = {"k": k, "v": v, "g": g if recurrence.channel_gate else g[..., None], "w": w}
        for name, x in (fields if norm is None else fields | {"norm": norm}).items():
            pool = getattr(layer.ring, name)
            pool[step.slots[:, None], :, step.place] = step.zero_padding(x).to(pool.dtype)
        t, c = self.carry(recurrence, layer.ring, step, q)
        y = self.read(layer, step, t, c).transpose(1, 2).to(cache.dtype)
        return step.spread(step.zero_padding(y))

    def decode_layer(
        self, cache: Any, layer: LayerState, step: Step, inputs: Raw, weights: Any, gate: Tensor | None
    ) -> Tensor:
        """Gates, convolution, decode, skip, output gate."""
        wide = cache.format.compute
        g, w = cache.recurrence.gates(inputs.raw_g, inputs.raw_w, weights)
        x = self.convolve(layer, step, inputs.x, weights.conv_weight, weights.conv_bias)
        q, k, v = cache.recurrence.split(x, cache.geometry)
        y = self.decode(cache, layer, step, Ready(q, k, v, g.to(wide), w.to(wide)))
        D = getattr(weights, "D", None)
        if D is not None:
            y = (y + (D[:, None] if D.ndim == 1 else D) * v).to(y.dtype)
        return y if gate is None else (y * silu_(gate.to(wide, copy=True))).to(y.dtype)

    def flush(
        self, recurrence: Recurrence, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor, flushes: Tensor
    ) -> None:
        """Fold, encode, put."""
        self._encode(layer, slots, self.fold(recurrence, layer, slots, start, counts), flushes)

    def store(self, layer: LayerState, slots: Tensor, state: Tensor) -> None:
        """Encode, put."""
        self._encode(layer, slots, state, torch.zeros_like(slots))

    def _encode(self, layer: LayerState, slots: Tensor, state: Tensor, flushes: Tensor) -> None:
        planes = layer.format.encode(state, noise_keys(layer.key, slots, flushes))
        for plane, value in zip(layer.checkpoint, planes, strict=True):
            plane[slots] = value


def choose(name: str | None, device: torch.device, fmt: Format) -> Implementation:
    """The implementation called `name`, or (None) the fast one for the device.

    Raises:
        ValueError: there is none of that name, or it cannot run here.
    """
    name = name or ("torch" if device.type == "cpu" else "triton")
    if name not in NAMES:
        raise checks.unknown("implementation", name, NAMES)
    if name == "reference":
        return Hosted(name, walked.carry, read.read_reference, walked.fold)
    if name == "torch":
        return Hosted(name, batched.carry, read.read_torch, batched.fold)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "ReplayCache: implementation 'triton' needs a GPU, and the cache is on cpu. Leave implementation out, or "
            "set TRITON_INTERPRET=1 before triton is imported, to run the kernels in its interpreter (slow, for tests)."
        )
    if fmt.compute != torch.float32:
        raise ValueError(
            f"ReplayCache: implementation 'triton' computes in fp32; format {fmt.name!r} needs {fmt.compute}. "
            "Use implementation 'reference' or 'torch'."
        )
    from replayssm.device import Device

    return Device()


def _clear(layers: list[LayerState], slots: Tensor, places: Tensor) -> None:
    """Zero ring places [B, n]: a forgotten draft may have left values that are not finite, and 0 * NaN is NaN."""
    for layer in layers:
        for pool in layer.ring:
            if pool.numel():
                pool[slots[:, None], :, places] = 0
