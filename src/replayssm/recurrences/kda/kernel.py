"""Kimi Delta Attention on a GPU: gdn's walk with a decay per key channel."""

import triton
import triton.language as tl

from replayssm.arithmetic_kernel import sigmoid, softplus
from replayssm.recurrences.gdn.kernel import carry, carry_tokens

__all__ = ["carry", "carry_tokens", "gates"]


@triton.jit
def gates(inputs, weights, row, i, i_h, o_k, m_k, K: tl.constexpr):
    """g [BK] and w = beta of head i_h, fp32."""
    b_w = tl.load(inputs.w.data + row * inputs.w.row + i * inputs.w.token + i_h).to(tl.float32)
    p_g = inputs.g.data + row * inputs.g.row + i * inputs.g.token + i_h * K + o_k
    b_g = tl.load(p_g, mask=m_k, other=0.0).to(tl.float32)
    if weights.conv_weight is not None:
        b_w = weights.scale * sigmoid(b_w)
        rate = tl.exp(tl.load(weights.A_log + i_h).to(tl.float32))
        b_g += tl.load(weights.dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        if weights.low is None:
            b_g = -rate * softplus(b_g)
        else:
            b_g = weights.low * sigmoid(rate * b_g)
    return b_g, b_w
