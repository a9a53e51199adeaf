"""Implementation `triton`: kernels behind torch.library operators, for torch.compile and CUDA graphs.

    replayssm::begin          cursors move, a step's table comes out
    replayssm::commit         cursors move
    replayssm::compact        a path's records of a layer move together
    replayssm::decode_layer   a layer from raw projections; replayssm::decode from q, k, v, g, w; replayssm::convolve

Each says which tensors it changes, and each has a fake, by which a compiler knows shapes. Nothing waits for the device.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm import formats, kernels, launch_choices, recurrences, ring_kernel
from replayssm.recurrences import Geometry, Recurrence
from replayssm.ring import DeviceStep, LayerState, Records, Sizes
from replayssm.step_kernel import Inputs, LayerWeights


class Device(NamedTuple):
    """Implementation `triton`. See implementations.Implementation."""

    name: str = "triton"
    on_device: bool = True

    def needs_back(self, recurrence: Recurrence, max_tokens: int) -> bool:
        """Of one token, or with a gate per key channel, it is the walk."""
        return not recurrence.channel_gate and max_tokens > 1

    def begin(
        self,
        cache: Any,
        given: Tensor,
        lengths: Tensor | None,
        tokens: int,
        parent: Tensor | None,
        accepted: Tensor | None,
    ) -> DeviceStep:
        """One launch. Slots that are due are folded by each layer's decode."""
        # no more than a step's own record can be taken back then
        at_once = cache.max_tokens == cache.sizes.most_reach == 1 and all(
            format.exact and launch_choices.launch(cache.recurrence, cache.geometry, format.name, len(given), 1).at_once
            for format in set(cache.formats)
        )
        table = torch.ops.replayssm.begin(
            cache.cursor_tensor, cache.clock, given, lengths, accepted, tokens, *cache.sizes, at_once
        )
        return ring_kernel.step(table, tokens, parent, at_once)

    def commit(self, cache: Any, step: DeviceStep, n: Tensor | None) -> None:
        """One launch."""
        torch.ops.replayssm.commit(cache.cursor_tensor, step.table, n, *cache.sizes)

    def compact(self, cache: Any, step: DeviceStep, path: Tensor) -> Tensor:
        """One launch per layer."""
        for layer in cache.layers:
            torch.ops.replayssm.compact(list(layer.ring), layer.conv, step.table, path, step.tokens)
        return (path >= 0).sum(1)

    def convolve(self, layer: LayerState, step: DeviceStep, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One launch."""
        return torch.ops.replayssm.convolve(layer.conv, step.table, step.parent, x, weight, bias)

    def decode(self, cache: Any, layer: LayerState, step: DeviceStep, inputs: Any) -> Tensor:
        """One launch, or two that overlap."""
        return torch.ops.replayssm.decode(*_names(cache, layer), *_tensors(layer, step), *inputs)

    def decode_layer(
        self, cache: Any, layer: LayerState, step: DeviceStep, inputs: Any, weights: Any, gate: Tensor | None
    ) -> Tensor:
        """One launch, or two that overlap."""
        conv_weight, conv_bias, A_log, dt_bias, scale, low, high = recurrences.constants(weights)
        return torch.ops.replayssm.decode_layer(
            *_names(cache, layer), *_tensors(layer, step), *inputs, conv_weight, conv_bias, A_log, dt_bias,
            getattr(weights, "D", None), gate, scale, low, high,
        )  # fmt: skip

    def fold(self, recurrence: Recurrence, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor) -> Tensor:
        """One launch."""
        return kernels.fold(recurrence, layer, slots, start, counts)

    def flush(
        self, recurrence: Recurrence, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor, flushes: Tensor
    ) -> None:
        """One launch."""
        kernels.flush(recurrence, layer, slots, start, counts, flushes)

    def store(self, layer: LayerState, slots: Tensor, state: Tensor) -> None:
        """One launch."""
        kernels.store_states(layer, slots, state)


def _names(cache: Any, layer: LayerState) -> tuple[str, str, list[int], int]:
    return cache.recurrence.name, layer.format.name, list(cache.geometry), cache.window


def _tensors(layer: LayerState, step: DeviceStep) -> tuple[Any, ...]:
    state = list(layer.checkpoint), list(layer.ring), layer.conv, layer.ready, layer.key
    return *state, step.table, step.parent, step.kin, step.at_once


# ---- operators ----


@torch.library.custom_op("replayssm::begin", mutates_args=("cursors", "clock"))
def begin(
    cursors: Tensor, clock: Tensor, given: Tensor, lengths: Tensor | None, accepted: Tensor | None, tokens: int,
    ring: int, conv: int, window: int, reach: int, at_once: bool,
) -> Tensor:  # fmt: skip
    """DeviceStep.table [10, rows] for slots `given`; see ring_kernel.begin_kernel."""
    return ring_kernel.begin(
        cursors, clock, Sizes(ring, conv, window, reach), given, lengths, accepted, tokens, at_once
    )


@begin.register_fake
def _(
    cursors: Tensor, clock: Tensor, given: Tensor, lengths: Tensor | None, accepted: Tensor | None, tokens: int,
    ring: int, conv: int, window: int, reach: int, at_once: bool,
) -> Tensor:  # fmt: skip
    return given.new_empty(10, given.shape[0], dtype=torch.int32)


@torch.library.custom_op("replayssm::commit", mutates_args=("cursors",))
def commit(cursors: Tensor, table: Tensor, n: Tensor | None, ring: int, conv: int, window: int, reach: int) -> None:
    """See ring_kernel.commit_kernel."""
    ring_kernel.commit(cursors, Sizes(ring, conv, window, reach), table, n)


@commit.register_fake
def _(cursors: Tensor, table: Tensor, n: Tensor | None, ring: int, conv: int, window: int, reach: int) -> None:
    return None


@torch.library.custom_op("replayssm::compact", mutates_args=("records", "conv"))
def compact(records: list[Tensor], conv: Tensor, table: Tensor, path: Tensor, tokens: int) -> None:
    """See ring_kernel.compact_kernel."""
    ring_kernel.compact(Records(*records), conv, table, path, tokens)


@compact.register_fake
def _(records: list[Tensor], conv: Tensor, table: Tensor, path: Tensor, tokens: int) -> None:
    return None


@torch.library.custom_op("replayssm::convolve", mutates_args=("pool",))
def convolve(
    pool: Tensor, table: Tensor, parent: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The short convolution of x [B, T, C]; see conv.convolve."""
    return kernels.convolve(pool, DeviceStep(x.shape[0], x.shape[1], table, parent, None), x, weight, bias)


@convolve.register_fake
def _(pool: Tensor, table: Tensor, parent: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("replayssm::decode", mutates_args=("planes", "records", "ready"))
def decode(
    recurrence: str, format: str, geometry: list[int], window: int,
    planes: list[Tensor], records: list[Tensor], conv: Tensor, ready: Tensor, key: Tensor, table: Tensor,
    parent: Tensor | None, kin: Tensor | None, at_once: bool,
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, w: Tensor,
) -> Tensor:  # fmt: skip
    """y [B, T, H, V] from inputs that are ready; see api.decode."""
    step = DeviceStep(v.shape[0], v.shape[1], table, parent, kin, at_once)
    layer = LayerState(tuple(planes), Records(*records), conv, ready, key, formats.get(format))
    inputs = Inputs(*map(kernels.field, (q, k, v, g, w)))
    return kernels.decode(
        recurrences.get(recurrence),
        Geometry(*geometry),
        window,
        layer,
        step,
        inputs,
        LayerWeights(),
        None,
        None,
        v.new_empty(v.shape),
    )


@decode.register_fake
def _(
    recurrence: str, format: str, geometry: list[int], window: int,
    planes: list[Tensor], records: list[Tensor], conv: Tensor, ready: Tensor, key: Tensor, table: Tensor,
    parent: Tensor | None, kin: Tensor | None, at_once: bool,
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, w: Tensor,
) -> Tensor:  # fmt: skip
    return v.new_empty(v.shape)


@torch.library.custom_op("replayssm::decode_layer", mutates_args=("planes", "records", "conv", "ready"))
def decode_layer(
    recurrence: str, format: str, geometry: list[int], window: int,
    planes: list[Tensor], records: list[Tensor], conv: Tensor, ready: Tensor, key: Tensor, table: Tensor,
    parent: Tensor | None, kin: Tensor | None, at_once: bool,
    x: Tensor, raw_g: Tensor | None, raw_w: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, A_log: Tensor,
    dt_bias: Tensor | None, D: Tensor | None, gate: Tensor | None, scale: float, low: float | None, high: float | None,
) -> Tensor:  # fmt: skip
    """y [B, T, H, V] from raw projections; see api.decode_layer."""
    step = DeviceStep(x.shape[0], x.shape[1], table, parent, kin, at_once)
    layer = LayerState(tuple(planes), Records(*records), conv, ready, key, formats.get(format))
    weights = kernels.layer_weights(conv_weight, conv_bias, A_log, dt_bias, scale, low, high)
    y = x.new_empty(x.shape[0], x.shape[1], geometry[0], geometry[2])
    return kernels.decode_raw(
        recurrences.get(recurrence), Geometry(*geometry), window, layer, step, x, raw_g, raw_w, weights, D, gate, y
    )


@decode_layer.register_fake
def _(
    recurrence: str, format: str, geometry: list[int], window: int,
    planes: list[Tensor], records: list[Tensor], conv: Tensor, ready: Tensor, key: Tensor, table: Tensor,
    parent: Tensor | None, kin: Tensor | None, at_once: bool,
    x: Tensor, raw_g: Tensor | None, raw_w: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, A_log: Tensor,
    dt_bias: Tensor | None, D: Tensor | None, gate: Tensor | None, scale: float, low: float | None, high: float | None,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], x.shape[1], geometry[0], geometry[2])
