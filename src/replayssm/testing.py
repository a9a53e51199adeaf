"""What tests, benchmarks and `replayssm check` share: random layers, inputs, and a twin that knows what must come out.

The Twin runs the plain recurrence token by token, in fp64 and once more in the precision of the cache under test. The
second run says how far an honest implementation strays; that, times MARGIN, is every tolerance. None is typed by hand.
(For format fp64 the second run is in fp32, and its straying scaled by the ratio of the two roundings.)
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.cache import ConvGeometry, ReplayCache
from replayssm.recurrences import Geometry, get, inverse_norm

MARGIN = 8.0


class LayerInputs(NamedTuple):
    """Raw projections of one step: x [B, T, C], raw_g [B, T, H(, K)] (None for mamba2), raw_w [B, T, H]."""

    x: Tensor
    raw_g: Tensor | None
    raw_w: Tensor

    def row(self, b: int) -> "LayerInputs":
        """One row, [T, ...]."""
        return LayerInputs(self.x[b], None if self.raw_g is None else self.raw_g[b], self.raw_w[b])


def make_cache(
    recurrence: str, geometry: Geometry, conv_width: int = 4, poison: bool = True, **options: Any
) -> ReplayCache:
    """A cache with a convolution, all of its memory NaN (or the largest integer) first."""
    channels = get(recurrence).conv_channels(geometry)
    options = {"layers": 1, "slots": 4, "window": 4} | options
    cache = ReplayCache(recurrence, geometry, conv=ConvGeometry(channels, conv_width), **options)
    if poison:
        for layer in cache.layers:
            for pool in (*layer.checkpoint, *layer.ring, layer.conv):
                pool.fill_(math.nan if pool.is_floating_point() else torch.iinfo(pool.dtype).max)
    return cache


def make_weights(cache: ReplayCache, generator: torch.Generator, **changes: Any) -> Any:
    """Random parameters of one layer; decays from near 1 (most heads of trained models) to near 0."""
    assert cache.conv is not None
    H, (C, W) = cache.geometry.H, cache.conv

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    E = cache.recurrence.gate_dim(cache.geometry)
    fields: dict[str, Any] = {
        "conv_weight": normal(C, W) * 0.5,
        "conv_bias": normal(C) * 0.1,
        "A_log": torch.linspace(-4, 1.5, H) if H > 1 else torch.tensor([-2.0]),
        "dt_bias": normal(H, E) - 1.0 if cache.recurrence.channel_gate else normal(H) - 1.0,
    }
    if "D" in cache.recurrence.weights._fields:
        fields["D"] = normal(H)
    if "beta_scale" in cache.recurrence.weights._fields:
        fields["beta_scale"] = 2.0
    return cache.recurrence.weights(**(fields | changes))


def make_inputs(cache: ReplayCache, rows: int, tokens: int, generator: torch.Generator) -> LayerInputs:
    """Random raw projections in the cache's dtype."""
    (H, _, _, K), dtype = cache.geometry, cache.dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, *shape, generator=generator).to(dtype)

    gate = None
    if cache.recurrence.delta:
        gate = normal(H, K) if cache.recurrence.channel_gate else normal(H)
    return LayerInputs(normal(cache.recurrence.conv_channels(cache.geometry)), gate, normal(H))


class _Node(NamedTuple):
    """A request after some token: the state in both runs, the raw convolution inputs before the next token, its age."""

    exact: Tensor  # [1, H, V, K] fp64
    low: Tensor  # [1, H, V, K] as the cache's format keeps it
    inputs: tuple[Tensor, ...]  # the newest W - 1, [C] each
    age: int


class Twin:
    """What one layer of a cache must hold and answer, by the plain recurrence.

    Keeps every state since a slot's start, so that any materialize and trim can be checked.
    """

    def __init__(self, cache: ReplayCache, weights: Any, layer: int = 0) -> None:
        assert cache.conv is not None
        self.cache, self.layer, self.conv = cache, layer, cache.conv
        self.recurrence, self.geometry, self.format = cache.recurrence, cache.geometry, cache.layers[layer].format
        self.roundings = 0  # how often the low run was, for noise of its own
        self.weights = {dtype: cast(weights, dtype) for dtype in (torch.float64, torch.float32)}
        self.history: dict[int, list[_Node]] = {}
        self.pending: dict[int, list[_Node]] = {}
        self.stray = {"y": 0.0, "state": 0.0}
        self.largest = {"y": 0.0, "state": 0.0}

    # ---- the life of a slot ----

    def reset(self, slots: Sequence[int]) -> None:
        """Zero state and inputs."""
        H, _, V, K = self.geometry
        zero = torch.zeros(len(slots), H, V, K)
        self.load(slots, zero, torch.zeros(len(slots), self.conv.channels, self.conv.width - 1))

    def load(self, slots: Sequence[int], state: Tensor, window: Tensor) -> None:
        """Start from full states [n, H, V, K] and raw inputs [n, C, W - 1]."""
        for i, slot in enumerate(slots):
            low = self.format.update(self._encoded(state[i : i + 1]))
            node = _Node(state[i : i + 1].double(), low, tuple(window[i].t().to(self.cache.dtype)), 0)
            self.history[slot], self.pending[slot] = [node], []

    def step(
        self, slot: int, inputs: LayerInputs, length: int, parent: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs of one row's tokens in both runs: [length, H, V] each. Their states wait for commit."""
        nodes: list[_Node] = []
        answers: list[tuple[Tensor, Tensor]] = []
        for i in range(length):
            above = i - 1 if parent is None else parent[i]
            node, *y = self._token(nodes[above] if above >= 0 else self.history[slot][-1], inputs, i)
            nodes.append(node)
            answers.append((y[0], y[1]))
        self.pending[slot] = nodes
        H, _, V, _ = self.geometry
        if not answers:
            return torch.zeros(0, H, V, dtype=torch.float64), torch.zeros(0, H, V, dtype=torch.float64)
        return torch.cat([y for y, _ in answers]), torch.cat([y for _, y in answers])

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """These tokens of the step count."""
        self.history[slot] += [self.pending[slot][i] for i in path]
        self.pending[slot] = []

    def trim(self, slot: int, n: int) -> None:
        """Forget the newest n tokens."""
        if n:
            del self.history[slot][-n:]

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Slot to slot, all sources read first."""
        taken = [list(self.history[slot]) for slot in src]
        for slot, nodes in zip(dst, taken, strict=True):
            self.history[slot], self.pending[slot] = nodes, []

    def _encoded(self, state: Tensor) -> tuple[Tensor, ...]:
        """Planes of a state [1, H, V, K] of the low run."""
        self.roundings += 1
        return self.format.encode(state.to(self.format.compute), torch.tensor([[self.roundings, 0]]))

    # ---- comparisons ----

    def check_outputs(self, y: Tensor, exact: Tensor, low: Tensor) -> None:
        """One row's outputs [length, H, V] against both runs."""
        self._note("y", exact, low)
        self._compare("y", y, exact)

    def check_states(self, slots: Sequence[int] | None = None, back: int = 0) -> None:
        """The cache's states and convolution windows after all committed records but the newest `back`."""
        slots = list(self.history if slots is None else slots)
        if not slots:
            return
        at = torch.tensor(slots)
        n = self.cache.num_committed[at] - back
        state = self.cache.materialize(self.layer, at, n)
        window = self.cache.conv_window(self.layer, at)
        for i, slot in enumerate(slots):
            node = self.history[slot][-1 - back]
            self._note("state", node.exact, self.format.update(self._encoded(node.low)))
            self._compare("state", state[i : i + 1], node.exact)
            if not back:
                assert torch.equal(window[i], torch.stack(node.inputs, 1)), f"convolution window of slot {slot}"

    def tolerance(self, what: str) -> float:
        """Largest difference to fp64 that is still rounding: MARGIN times what the low run has shown so far.

        Never below the rounding of one sum over the ring.
        """
        eps = torch.finfo(self.format.compute).eps
        stray = self.stray[what] * (eps / torch.finfo(torch.float32).eps if self.format.name == "fp64" else 1.0)
        return MARGIN * (stray + eps * math.sqrt(self.cache.sizes.ring) * self.largest[what])

    def _note(self, what: str, exact: Tensor, low: Tensor) -> None:
        if exact.numel():
            self.stray[what] = max(self.stray[what], float((exact - low.double()).abs().max()))
            self.largest[what] = max(self.largest[what], float(exact.abs().max()))

    def _compare(self, what: str, got: Tensor, exact: Tensor) -> None:
        assert bool(torch.isfinite(got).all()), f"{what} is not finite"
        if got.numel():
            error = float((got.double() - exact).abs().max())
            assert error <= self.tolerance(what), f"{what} is off by {error:.3g}, tolerance {self.tolerance(what):.3g}"

    # ---- one token ----

    def _token(self, node: _Node, inputs: LayerInputs, i: int) -> tuple[_Node, Tensor, Tensor]:
        taps = (*node.inputs, inputs.x[i])
        exact_y, exact = self._plain(torch.float64, node.exact, taps, inputs, i)
        low_y, low = self._plain(torch.float32, node.low, taps, inputs, i)
        age = node.age + 1
        if age % self.cache.window == 0:
            low = self.format.update(self._encoded(low))
        return _Node(exact, low, taps[1:], age), exact_y, low_y.to(self.cache.dtype)

    def _plain(
        self, dtype: torch.dtype, S: Tensor, taps: tuple[Tensor, ...], inputs: LayerInputs, i: int
    ) -> tuple[Tensor, Tensor]:
        """(1) convolution and silu (2) gates (3) norms (4) the recurrence's plain step (5) skip."""
        weights, (_, _, _, K) = self.weights[dtype], self.geometry
        x = (torch.stack(taps, 1).to(dtype) * weights.conv_weight).sum(1)
        x = F.silu(x if weights.conv_bias is None else x + weights.conv_bias)
        if dtype == torch.float32:
            x = x.to(self.cache.dtype).to(dtype)
        raw_g = None if inputs.raw_g is None else inputs.raw_g[i].to(dtype)[None, None]
        g, w = self.recurrence.gates(raw_g, inputs.raw_w[i].to(dtype)[None, None], weights)
        g, w = (g if self.recurrence.channel_gate else g[..., None])[:, 0], w[:, 0]
        q, k, v = (part[:, 0] for part in self.recurrence.split(x[None, None], self.geometry))
        if self.recurrence.delta:
            q, k = q * (inverse_norm(q) * K**-0.5)[..., None], k * inverse_norm(k)[..., None]
        y, after = self.recurrence.reference.step(S.to(dtype), q, k, v, g, w)
        if dtype == torch.float32:
            read = self.format.read(self._encoded(after)[: self.format.read_planes])
            y, _ = self.recurrence.reference.step(read.to(dtype), q, k, v, torch.zeros_like(g), torch.zeros_like(w))
        D = getattr(weights, "D", None)
        if D is not None:
            y = y + (D[:, None] if D.ndim == 1 else D) * v
        return y, after


def cast(weights: Any, to: torch.dtype | torch.device | str) -> Any:
    """A recurrence's Weights in another dtype or on another device."""
    return type(weights)(*(x.to(to) if isinstance(x, Tensor) else x for x in weights))


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of step(), which runs once before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def checksum(cache: ReplayCache) -> list[Tensor]:
    """Copies of every bit of a cache, to be compared after something that must touch nothing."""
    return [pool.clone() for layer in cache.layers for pool in (*layer.checkpoint, *layer.ring, layer.conv)] + [
        cursor.clone() for cursor in cache.cursors
    ]


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether tensors agree bit for bit, NaN included."""
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(a, b, strict=True)
    )
