"""decode, convolve, decode_layer: check once, then call the cache's implementation."""

from typing import Any

from torch import Tensor

from replayssm import checks
from replayssm.cache import ReplayCache
from replayssm.implementations import AnyStep, Raw, Ready


def decode(
    cache: ReplayCache, layer: int, step: AnyStep, q: Tensor, k: Tensor, v: Tensor, g: Tensor, w: Tensor
) -> Tensor:
    """Outputs for the step's tokens in one layer; their records are appended. The checkpoint is only read.

    Args:
        q, k: [B, T, G, K] as they leave the convolution (the delta rule's L2 norm and K^-0.5 are applied here).
        v: [B, T, H, V]
        g: [B, T, H], or [B, T, H, K] for kda: log decay, at most 0.
        w: [B, T, H], dt (mamba2) or beta (gdn, kda).

    q, k, v are in the cache's dtype, g and w in its format's compute dtype (fp32). Any strides.

    Returns:
        y [B, T, H, V] in the cache's dtype; zero for rows and tokens that are padding.

    Raises:
        ValueError: a shape, dtype or device that is not the cache's. Nothing changes.

    Source: DESIGN of this library, after ReplaySSM (Dao AI Lab and NVIDIA, 2026); math in recurrences/<name>/math.md.
    """
    recurrence, (H, G, V, K) = cache.recurrence, cache.geometry
    B, T = step.rows, step.tokens
    where = f"{recurrence.name}.decode"
    groups = "G is the number of key groups after tensor parallelism."
    for name, x in (("q", q), ("k", k)):
        checks.tensor(where, name, x, "[B, T, G, K]", (B, T, G, K), cache.dtype, cache.device, groups)
    checks.tensor(where, "v", v, "[B, T, H, V]", (B, T, H, V), cache.dtype, cache.device)
    wide = cache.format.compute
    letters, shape = ("[B, T, H, K]", (B, T, H, K)) if recurrence.channel_gate else ("[B, T, H]", (B, T, H))
    checks.tensor(
        where, "g", g, letters, shape, wide, cache.device, "Gates are kept in fp32 whatever the activations are."
    )
    checks.tensor(where, "w", w, "[B, T, H]", (B, T, H), wide, cache.device)
    state = cache._layer(where, layer, step)
    return cache.implementation.decode(cache, state, step, Ready(q, k, v, g, w))


def convolve(
    cache: ReplayCache, layer: int, step: AnyStep, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The short convolution and its silu for the step's tokens in one layer; raw inputs are kept for later steps.

    Args:
        x: [B, T, C] in the cache's dtype.
        weight: [C, W]
        bias: [C] or None.

    Returns:
        [B, T, C], zero for rows and tokens that are padding.

    Raises:
        ValueError: a shape, dtype or device that is not the cache's. Nothing changes.
    """
    where = f"{cache.recurrence.name}.convolve"
    _check_convolution(where, cache, step, x, weight, bias)
    return cache.implementation.convolve(cache._layer(where, layer), step, x, weight, bias)


def decode_layer(
    cache: ReplayCache,
    layer: int,
    step: AnyStep,
    x: Tensor,
    raw_g: Tensor | None,
    raw_w: Tensor,
    weights: Any,
    gate: Tensor | None = None,
) -> Tensor:
    """A whole recurrent layer between its two projections: convolution, gates, norms, carry, read, append, skip.

    Args:
        x: [B, T, C] convolution inputs, in the recurrence's order (v | k | q for mamba2, q | k | v for gdn and kda).
        raw_g: the decay's projection before any nonlinearity: None (mamba2), [B, T, H] (gdn), [B, T, H, K] (kda).
        raw_w: the projection of dt (mamba2) or beta (gdn, kda) before any nonlinearity, [B, T, H].
        weights: replayssm.recurrences.<name>.Weights. On a GPU a conv_weight that is contiguous over C loads fastest:
            lay it out once with conv_weight.t().contiguous().t().
        gate: z [B, T, H, V], or None: outputs are multiplied by silu(z).

    Returns:
        y [B, T, H, V] in the cache's dtype, D v included where there is a skip.

    Raises:
        ValueError: as decode and convolve. Nothing changes.
    """
    recurrence, (H, _, V, K) = cache.recurrence, cache.geometry
    where = f"{recurrence.name}.decode_layer"
    B, T = step.rows, step.tokens
    if not isinstance(weights, recurrence.weights):
        raise ValueError(f"{where}: weights must be a {recurrence.name}.Weights; got {type(weights).__name__}.")
    _check_convolution(where, cache, step, x, weights.conv_weight, weights.conv_bias)
    if (raw_g is None) == recurrence.delta:
        needed = "given" if recurrence.delta else "None, since dt decides the decay"
        raise ValueError(f"{where}: raw_g must be {needed}; got {'None' if raw_g is None else 'a tensor'}.")
    if raw_g is not None:
        shape = (B, T, H, K) if recurrence.channel_gate else (B, T, H)
        checks.tensor(where, "raw_g", raw_g, "[B, T, H(, K)]", shape, None, cache.device)
    checks.tensor(where, "raw_w", raw_w, "[B, T, H]", (B, T, H), None, cache.device)
    if gate is not None:
        checks.tensor(where, "gate", gate, "[B, T, H, V]", (B, T, H, V), None, cache.device)
    state = cache._layer(where, layer, step)
    return cache.implementation.decode_layer(cache, state, step, Raw(x, raw_g, raw_w), weights, gate)


def _check_convolution(
    where: str, cache: ReplayCache, step: AnyStep, x: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    if cache.conv is None:
        raise ValueError(f"{where}: this cache was made without conv; give ReplayCache a ConvGeometry.")
    C, W = cache.conv
    checks.tensor(where, "x", x, "[B, T, C]", (step.rows, step.tokens, C), cache.dtype, cache.device)
    checks.tensor(where, "weight", weight, "[C, W]", (C, W), None, cache.device)
    if bias is not None:
        checks.tensor(where, "bias", bias, "[C]", (C,), None, cache.device)
