"""One KV-cache group of an engine: its layers' pages as a ReplayCache, moved once per step. Imports no engine.

The engine calls its layers in order. The first one begins the step for all: counts that the engine knows only now are
committed, the cursors move. So under a CUDA graph the whole step is in the graph, and everything that changes is in the
tensors of Rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm import ConvGeometry, Geometry, ReplayCache, kernels, recurrences
from replayssm.cache import Prefill
from replayssm.integrations.vllm.settings import Settings
from replayssm.step_kernel import LayerWeights


class Layer(NamedTuple):
    """What a recurrent layer of an engine is to us.

    Attributes:
        recurrence, geometry, conv: after tensor parallelism.
        dtype: of activations.
        page: [S, n] bytes, a row per block.
        weights: the recurrence's Weights.
    """

    recurrence: str
    geometry: Geometry
    conv: ConvGeometry
    dtype: torch.dtype
    page: Tensor
    weights: Any


class Rows(NamedTuple):
    """Decode rows of a step.

    Attributes:
        tokens: T.
        slots, lengths, accepted: int64 [B] block of every row, tokens it brings, how many of its last step's count.
        gather: [B, T] token of every place, answers, places: see rows.ragged; None where tokens are dense.
    """

    tokens: int
    slots: Tensor
    lengths: Tensor
    accepted: Tensor
    gather: Tensor | None = None
    answers: Tensor | None = None
    places: Tensor | None = None


class Pool:
    """The replayed states of a group of layers.

    Args:
        layers: in the order in which a step runs them.
        max_tokens: T at most.
    """

    def __init__(self, layers: list[Layer], settings: Settings, max_tokens: int) -> None:
        first = layers[0]
        for layer in layers[1:]:
            if layer[:4] != first[:4]:
                raise ValueError(f"layers of one group must be alike; got {layer[:4]} beside {first[:4]}.")
        self.cache = ReplayCache(
            first.recurrence, first.geometry, layers=len(layers), slots=first.page.shape[0], window=settings.window,
            max_tokens=max_tokens, format=settings.format, dtype=first.dtype, conv=first.conv, seed=settings.seed,
            device=first.page.device, pages=[layer.page for layer in layers], implementation="triton",
        )  # fmt: skip
        self.pages, self._conv = [layer.page for layer in layers], first.conv
        self._skips = [getattr(layer.weights, "D", None) for layer in layers]
        self._weights = [_kernel_weights(layer.weights) for layer in layers]
        self._step: Any = None
        self._prefill: Prefill | None = None

    def decode(self, layer: int, rows: Rows, x: Tensor, raw_g: Tensor | None, raw_w: Tensor, out: Tensor) -> None:
        """Answers of a layer for the decode rows' tokens, from raw projections of all the step's tokens.

        Args:
            x: [n, C], raw_g: [n, H(, K)] or None, raw_w: [n, H], any row stride.
            out: [n, H, V], written where the rows' tokens are.
        """
        B, T = len(rows.slots), rows.tokens
        if layer == 0:
            self._step = self.cache.begin(rows.slots, rows.lengths, T, accepted=rows.accepted)
        if rows.gather is None:
            y = out[: B * T].unflatten(0, (B, T))
            x, raw_w = x[: B * T].unflatten(0, (B, T)), raw_w[: B * T].unflatten(0, (B, T))
            raw_g = None if raw_g is None else raw_g[: B * T].unflatten(0, (B, T))
        else:
            y = out.new_empty(B, T, *out.shape[1:])
            x, raw_w = x[rows.gather], raw_w[rows.gather]
            raw_g = None if raw_g is None else raw_g[rows.gather]
        kernels.decode_raw(
            self.cache.recurrence, self.cache.geometry, self.cache.window, self.cache.layers[layer], self._step, x,
            raw_g, raw_w, self._weights[layer], self._skips[layer], None, y,
        )  # fmt: skip
        if rows.answers is not None:
            out[rows.answers] = y.flatten(0, 1)[rows.places]

    def reset(self, slots: Tensor) -> None:
        """Blocks of requests that begin with a single token."""
        self.cache.reset(slots)

    def before_prefill(self, layer: int, slots: Tensor, accepted: Tensor, anew: bool) -> tuple[Tensor, Tensor]:
        """What the engine's own prefill starts from: states [n, H, V, K] in fp32 and windows [n, C, W - 1].

        Args:
            anew: all of the rows begin, and what is returned means nothing.
        """
        if layer == 0:
            self._prefill = self.cache.begin_prefill(slots, accepted)
        assert self._prefill is not None
        if anew:
            n, (H, _, V, K), device = len(slots), self.cache.geometry, self.cache.device
            state = torch.empty(n, H, V, K, device=device)
            return state, torch.empty(
                n, self._conv.channels, self._conv.width - 1, dtype=self.cache.dtype, device=device
            )
        state, window = self.cache.prefill_state(layer, self._prefill)
        assert window is not None
        return state, window

    def after_prefill(self, layer: int, state: Tensor, window: Tensor) -> None:
        """What the engine's own prefill ended with, in the same form."""
        assert self._prefill is not None
        self.cache.end_prefill(layer, self._prefill, state, window)


def _kernel_weights(weights: Any) -> LayerWeights:
    conv_weight, conv_bias, *gates = recurrences.constants(weights)
    return kernels.layer_weights(conv_weight.t().contiguous().t(), conv_bias, *gates)  # taps lie side by side: fastest
