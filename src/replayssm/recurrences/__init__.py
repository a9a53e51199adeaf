"""The recurrences that the library knows: one folder each, found by its name.

A folder holds the record of the recurrence (`RECURRENCE` in its `__init__.py`, with its `Weights` and `gates`), the
math (`math.md`) and the definition (`reference.py`: step, carry, fold). `walked.py` runs the definitions on a cache;
`batched.py` is the fast implementation for CPUs and serves all of them.
"""

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm import checks


class Geometry(NamedTuple):
    """Sizes of one recurrent layer: H value heads of V, G key groups of K. Head h reads key group h // (H / G)."""

    H: int
    G: int
    V: int
    K: int


class Recurrence(NamedTuple):
    """The record of a recurrence S_t = S_{t-1} A_t + w_t v_t k_t^T.

    Attributes:
        delta: A_t = Diag(a_t) (I - w_t k_t k_t^T); otherwise A_t = Diag(a_t). Keys and queries of the delta rule are
            L2-normalised, and queries scaled by K^-0.5, by the library.
        channel_gate: a_t has one value per key channel; otherwise one per head. Inside the library g has a last dim E
            for that, [..., H, E] with E = K or 1; callers give [..., H] where it is 1.
        conv_order: how a layer's convolution output is laid out, e.g. "qkv".
        weights: the NamedTuple class of a layer's parameters that decode_layer takes.
        gates: (raw_g, raw_w, weights) -> g, w in fp32.
        reference: the module with step, carry and fold.
    """

    name: str
    delta: bool
    channel_gate: bool
    conv_order: str
    weights: Any
    gates: Callable[[Tensor | None, Tensor, Any], tuple[Tensor, Tensor]]
    reference: ModuleType

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recurrence":
        """A record is a constant: copies of a cache share it."""
        return self

    def kernel(self) -> ModuleType:
        """The module with the recurrence's Triton kernels; importing it needs Triton."""
        return importlib.import_module(f"{__name__}.{self.name}.kernel")

    def gate_dim(self, geometry: Geometry) -> int:
        """E, gates per head: 1, or K where every key channel has its own."""
        return geometry.K if self.channel_gate else 1

    def conv_channels(self, geometry: Geometry) -> int:
        """Channels of the convolution in front: q, k and v of one token."""
        return 2 * geometry.G * geometry.K + geometry.H * geometry.V

    def conv_sizes(self, geometry: Geometry) -> dict[str, int]:
        """How many of those are "q", "k" and "v", in the order in which they lie."""
        H, G, V, K = geometry
        return {name: H * V if name == "v" else G * K for name in self.conv_order}

    def split_flat(self, x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        """Cut a convolution's channels [B, T, C] into q, k and v: views [B, T, G K], [B, T, G K], [B, T, H V]."""
        sizes = self.conv_sizes(geometry)
        part = dict(zip(sizes, x.split(list(sizes.values()), dim=-1), strict=True))
        return part["q"], part["k"], part["v"]

    def split(self, x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        """Cut a convolution output [B, T, C] into q [B, T, G, K], k [B, T, G, K], v [B, T, H, V]."""
        H, G, V, K = geometry
        q, k, v = self.split_flat(x, geometry)
        return q.unflatten(-1, (G, K)), k.unflatten(-1, (G, K)), v.unflatten(-1, (H, V))


def names() -> list[str]:
    """Names of all recurrences: the folders beside this file."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


def get(name: str) -> Recurrence:
    """The recurrence called `name`.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in names():
        raise checks.unknown("recurrence", name, names())
    return importlib.import_module(f"{__name__}.{name}").RECURRENCE


def constants(weights: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, float, float | None, float | None]:
    """Any recurrence's Weights in one order: conv_weight, conv_bias, A_log, dt_bias, and the gates' numbers.

    Those are beta_scale (1 where there is none) and the bounds: dt_limit, or lower_bound and None.
    """
    low, high = getattr(weights, "dt_limit", (getattr(weights, "lower_bound", None), None))
    scale = getattr(weights, "beta_scale", 1.0)
    return weights.conv_weight, weights.conv_bias, weights.A_log, weights.dt_bias, scale, low, high


def heads(x: Tensor, H: int, dim: int = -2) -> Tensor:
    """Repeat key groups to value heads: [..., G, K] -> [..., H, K]."""
    return x.repeat_interleave(H // x.shape[dim], dim=dim)


def wide(x: Tensor) -> Tensor:
    """Gate arithmetic runs in fp32, or in fp64 for fp64 inputs, whatever the activations are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). PyTorch's own rounds by an element's place in the tensor: rows would depend on the batch."""
    return 1 / (1 + torch.exp(-x))


def silu_(x: Tensor) -> Tensor:
    """x sigmoid(x) in place. Own for the same reason as sigmoid."""
    return x.div_(torch.exp(-x).add_(1))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), the identity above 20 as in the models; never overflows. Own for the same reason as sigmoid."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def inverse_norm(k: Tensor, eps: float = 1e-6) -> Tensor:
    """1 / sqrt(sum k^2 + eps) over the last dim: [..., K] -> [...]. The delta rule's norm, as in the models."""
    return torch.rsqrt(k.square().sum(-1) + eps)


def fold_by_steps(
    step: Callable[..., tuple[Tensor, Tensor]], S: Tensor, k: Tensor, v: Tensor, g: Tensor, w: Tensor, counts: Tensor
) -> Tensor:
    """The state after the first `counts` of N records, one plain step each.

    Args:
        S: [B, H, V, K]
        k: [B, N, G, K]
        v: [B, N, H, V]
        g: [B, N, H, E]
        w: [B, N, H]
        counts: [B]
    """
    for j in range(k.shape[1]):
        _, after = step(S, k[:, j], k[:, j], v[:, j], g[:, j], w[:, j])
        S = torch.where((j < counts)[:, None, None, None], after, S)
    return S
