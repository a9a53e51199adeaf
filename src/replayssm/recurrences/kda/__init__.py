"""Kimi Delta Attention: S_t = S_{t-1} Diag(a_t) (I - w_t k_t k_t^T) + w_t v_t k_t^T, a decay per key channel.

Math in math.md.
"""

from typing import NamedTuple

from torch import Tensor

from replayssm.recurrences import Recurrence, sigmoid, softplus, wide
from replayssm.recurrences.kda import reference


class Weights(NamedTuple):
    """Parameters of a Kimi Delta Attention layer between its projections.

    Attributes:
        conv_weight: [C, W], channels in the order q | k | v.
        conv_bias: [C] or None.
        A_log: [H]
        dt_bias: [H, K] or [H * K]
        lower_bound: None for the gate -exp(A_log) softplus(x); a negative number for
            lower_bound * sigmoid(exp(A_log) x). Comes from the model's config.
        beta_scale: 2.0 where the model lets I - beta k k^T have negative eigenvalues, 1.0 otherwise.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None = None
    beta_scale: float = 1.0


def gates(raw_g: Tensor | None, raw_w: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """g [B, T, H, K] in one of the two gate forms, and w = beta = beta_scale sigmoid(raw_w) [B, T, H], in fp32."""
    if raw_g is None:
        raise ValueError("kda.gates: raw_g must be the layer's gate projection [B, T, H, K]; got None.")
    x = wide(raw_g) + wide(weights.dt_bias).view(raw_g.shape[-2:])
    rate = wide(weights.A_log).exp().view(-1, 1)
    if weights.lower_bound is None:
        g = -rate * softplus(x)
    else:
        g = weights.lower_bound * sigmoid(rate * x)
    return g, weights.beta_scale * sigmoid(wide(raw_w))


RECURRENCE = Recurrence(
    name="kda",
    delta=True,
    channel_gate=True,
    conv_order="qkv",
    weights=Weights,
    gates=gates,
    reference=reference,
)
