"""Mamba-2 (state space duality): S_t = a_t S_{t-1} + w_t v_t k_t^T, one decay per head. Math in math.md."""

from typing import NamedTuple

from torch import Tensor

from replayssm.recurrences import Recurrence, softplus, wide
from replayssm.recurrences.mamba2 import reference


class Weights(NamedTuple):
    """Parameters of a Mamba-2 layer between its two projections.

    Attributes:
        conv_weight: [C, W], channels in the order x | B | C, which is v | k | q.
        conv_bias: [C] or None.
        A_log: [H]; the decay rate is exp(A_log).
        dt_bias: [H] or None.
        D: skip, [H] per head, [H, V] per channel, or None.
        dt_limit: least and most time step, from the model's config.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor | None
    D: Tensor | None
    dt_limit: tuple[float, float] = (0.0, float("inf"))


def gates(raw_g: Tensor | None, raw_w: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """w = dt = clamp(softplus(raw_w + dt_bias), dt_limit) and g = -exp(A_log) dt, both [B, T, H] in fp32.

    raw_g is unused. softplus is the identity above 20, as in the model's own code.
    """
    raw = wide(raw_w)
    if weights.dt_bias is not None:
        raw = raw + wide(weights.dt_bias)
    dt = softplus(raw).clamp(*weights.dt_limit)
    return -wide(weights.A_log).exp() * dt, dt


RECURRENCE = Recurrence(
    name="mamba2",
    delta=False,
    channel_gate=False,
    conv_order="vkq",
    weights=Weights,
    gates=gates,
    reference=reference,
)
