"""How each model family's recurrent layer ("mixer") speaks the library's words.

A family is four small translations, so that one replayed forward serves every model:

    inputs     hidden [B, T, hidden]   ->  x [B, T, C], raw_g, raw_w, gate   the host's projections, nothing after them
    weights    the mixer's parameters  ->  the recurrence's Weights          views of the live parameters, no copies
    finish     y [B, T, H, V], gate    ->  hidden [B, T, hidden]             the host's gated norm and output projection
    geometry   the mixer               ->  H, G, V, K

Mamba-2 families share one shape and differ in where their input projection is scaled; gated delta families differ in
how their projections are fused. The host's step never clamps dt; its prefill does, with `time_step_limit` of the mixer.
We follow the config's `time_step_limit`: nemotron_h and zamba2 mixers put `time_step_min` there, which is a range for
initialisation and no limit of the model.

Layouts. Convolution inputs come in the host's order, which is ours: Mamba-2 (x | B | C), delta rule (q | k | v).
Recurrent states: Mamba-2 hosts keep [B, H, V, K] as we do; delta rule hosts keep [B, H, K, V] (`transposed`).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayssm import Geometry
from replayssm.recurrences import gdn, kda, mamba2


class Inputs(NamedTuple):
    """What a mixer's projections make of its hidden states."""

    x: Tensor  # [B, T, C] convolution inputs
    raw_g: Tensor | None  # delta rule: decay gate, [B, T, H] (GDN) or [B, T, H, K] (KDA)
    raw_w: Tensor  # [B, T, H] dt or beta
    gate: Tensor  # [B, T, H * V] gate of the output


class Family(NamedTuple):
    """The record of a family; see the module's docstring."""

    recurrence: str
    inputs: Callable[[Any, Tensor], Inputs]
    weights: Callable[[Any, Any], NamedTuple]  # (mixer, config)
    finish: Callable[[Any, Tensor, Tensor], Tensor]
    geometry: Callable[[Any], Geometry]
    transposed: bool


def _normed(norm: nn.Module, y: Tensor, gate: Tensor, width: int) -> Tensor:
    """A host's gated norm over the last `width` of [B, T, H * V], called with flat rows: every host takes those."""
    return norm(y.reshape(-1, width), gate.reshape(-1, width)).reshape(gate.shape)


# Mamba-2


def _mamba2_split(mixer: Any, projected: Tensor) -> Inputs:
    gate, x, dt = projected.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
    return Inputs(x, None, dt, gate)


def _mamba2_weights(mixer: Any, config: Any) -> mamba2.Weights:
    limit = getattr(config, "time_step_limit", None) or (0.0, math.inf)
    conv = mixer.conv1d
    return mamba2.Weights(conv.weight.squeeze(1), conv.bias, mixer.A_log, mixer.dt_bias, mixer.D, tuple(limit))


def _falcon_finish(mixer: Any, y: Tensor, gate: Tensor) -> Tensor:
    y = y.flatten(2)
    return mixer.out_proj(
        _normed(mixer.norm, y, gate, mixer.intermediate_size) if mixer.mamba_rms_norm else y * F.silu(gate)
    )


MAMBA2 = Family(
    recurrence="mamba2",
    inputs=lambda mixer, hidden: _mamba2_split(mixer, mixer.in_proj(hidden)),
    weights=_mamba2_weights,
    finish=lambda mixer, y, gate: mixer.out_proj(_normed(mixer.norm, y, gate, mixer.intermediate_size)),
    geometry=lambda mixer: Geometry(H=mixer.num_heads, G=mixer.n_groups, V=mixer.head_dim, K=mixer.ssm_state_size),
    transposed=False,
)
FALCON_H1 = MAMBA2._replace(
    inputs=lambda mixer, hidden: _mamba2_split(
        mixer, mixer.in_proj(hidden * mixer.ssm_in_multiplier) * mixer.mup_vector
    ),
    finish=_falcon_finish,
)

# Gated delta net


def _qwen3_next_inputs(mixer: Any, hidden: Tensor) -> Inputs:
    parts = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden))
    query, key, value, gate = (part.flatten(2) for part in parts[:4])
    return Inputs(torch.cat((query, key, value), dim=-1), parts[5], parts[4], gate)


def _separate_qkv(mixer: Any, hidden: Tensor) -> Tensor:
    return torch.cat((mixer.q_proj(hidden), mixer.k_proj(hidden), mixer.v_proj(hidden)), dim=-1)


def _gdn_weights(mixer: Any, config: Any) -> gdn.Weights:
    scale = 2.0 if getattr(config, "linear_allow_neg_eigval", False) else 1.0
    return gdn.Weights(mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, mixer.A_log, mixer.dt_bias, scale)


QWEN3_5 = Family(
    recurrence="gdn",
    inputs=lambda mixer, hidden: Inputs(
        mixer.in_proj_qkv(hidden), mixer.in_proj_a(hidden), mixer.in_proj_b(hidden), mixer.in_proj_z(hidden)
    ),
    weights=_gdn_weights,
    finish=lambda mixer, y, gate: mixer.out_proj(_normed(mixer.norm, y, gate, mixer.head_v_dim)),
    geometry=lambda mixer: Geometry(H=mixer.num_v_heads, G=mixer.num_k_heads, V=mixer.head_v_dim, K=mixer.head_k_dim),
    transposed=True,
)
QWEN3_NEXT = QWEN3_5._replace(inputs=_qwen3_next_inputs)
OLMO_HYBRID = QWEN3_5._replace(
    inputs=lambda mixer, hidden: Inputs(
        _separate_qkv(mixer, hidden), mixer.a_proj(hidden), mixer.b_proj(hidden), mixer.g_proj(hidden)
    ),
    finish=lambda mixer, y, gate: mixer.o_proj(_normed(mixer.o_norm, y, gate, mixer.head_v_dim)),
)

# Kimi delta attention


def _kda_inputs(mixer: Any, hidden: Tensor) -> Inputs:
    forget = mixer.forget_gate
    raw_g = forget.f_b_proj(forget.f_a_proj(hidden)).unflatten(-1, (mixer.num_heads, mixer.head_dim))
    return Inputs(_separate_qkv(mixer, hidden), raw_g, mixer.b_proj(hidden), mixer.g_b_proj(mixer.g_a_proj(hidden)))


def _kda_weights(mixer: Any, config: Any) -> kda.Weights:
    forget = mixer.forget_gate
    bound = getattr(config, "linear_lower_bound", None)
    conv = mixer.conv1d
    return kda.Weights(conv.weight.squeeze(1), conv.bias, forget.A_log.flatten(), forget.dt_bias, bound)


KDA = Family(
    recurrence="kda",
    inputs=_kda_inputs,
    weights=_kda_weights,
    finish=lambda mixer, y, gate: mixer.o_proj(_normed(mixer.o_norm, y, gate, mixer.head_dim)),
    geometry=lambda mixer: Geometry(H=mixer.num_heads, G=mixer.num_heads, V=mixer.head_dim, K=mixer.head_dim),
    transposed=True,
)

# The mixer's class, in Transformers, names its family. The model types are for our error message.
MIXERS = {
    "Mamba2Mixer": MAMBA2,
    "NemotronHMamba2Mixer": MAMBA2,
    "BambaMixer": MAMBA2,
    "GraniteMoeHybridMambaLayer": MAMBA2,
    "Zamba2MambaMixer": MAMBA2,
    "FalconH1Mixer": FALCON_H1,
    "Qwen3_5GatedDeltaNet": QWEN3_5,
    "Qwen3_5MoeGatedDeltaNet": QWEN3_5,
    "Qwen3NextGatedDeltaNet": QWEN3_NEXT,
    "OlmoHybridGatedDeltaNet": OLMO_HYBRID,
    "KimiLinearDeltaAttention": KDA,
    "Glm5NextTextLinearAttention": KDA,
}
MODEL_TYPES = (
    "bamba, falcon_h1, glm5_next, granitemoehybrid, kimi_linear, mamba2, nemotron_h, olmo_hybrid, qwen3_5, "
    "qwen3_5_moe, qwen3_next, zamba2"
)
