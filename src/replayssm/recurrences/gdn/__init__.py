"""Gated DeltaNet: S_t = a_t S_{t-1} (I - w_t k_t k_t^T) + w_t v_t k_t^T, one decay per head. Math in math.md."""

from typing import NamedTuple

from torch import Tensor

from replayssm.recurrences import Recurrence, sigmoid, softplus, wide
from replayssm.recurrences.gdn import reference


class Weights(NamedTuple):
    """Parameters of a Gated DeltaNet layer between its two projections.

    Attributes:
        conv_weight: [C, W], channels in the order q | k | v.
        conv_bias: [C] or None.
        A_log, dt_bias: [H]
        beta_scale: 2.0 where the model lets I - beta k k^T have negative eigenvalues (OLMo-Hybrid), 1.0 otherwise.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    beta_scale: float = 1.0


def gates(raw_g: Tensor | None, raw_w: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(raw_g + dt_bias) and w = beta = beta_scale sigmoid(raw_w), both [B, T, H] in fp32."""
    if raw_g is None:
        raise ValueError("gdn.gates: raw_g must be the layer's gate projection (a) [B, T, H]; got None.")
    step = softplus(wide(raw_g) + wide(weights.dt_bias))
    return -wide(weights.A_log).exp() * step, weights.beta_scale * sigmoid(wide(raw_w))


RECURRENCE = Recurrence(
    name="gdn",
    delta=True,
    channel_gate=False,
    conv_order="qkv",
    weights=Weights,
    gates=gates,
    reference=reference,
)
