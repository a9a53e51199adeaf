"""Storage formats of the checkpoint: how a state is kept, and which part of it a token reads.

A format is a block of planes. `encode` turns a state into planes (at a flush), `update` turns planes back into the
state that the next flush starts from, `read` turns planes into what tokens are answered from. Reading never touches the
update value, so a coarse `read` costs output accuracy only and the state stays as good as `update(encode(state))`.

    name      stored B/element   read B/element   update value
    fp64      8                  8                fp64: the yardstick of the tests
    fp32      4                  4                fp32
    split16   4                  2                fp32, exactly: bf16 high plane + int16 low plane
    bf16      2                  2                bf16, rounded to nearest at every flush
    fp16      2                  2                fp16, rounded to nearest at every flush, saturating at 65504

All planes have the shape of the state, [..., H, V, K].
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm import checks


class Format(NamedTuple):
    """One storage format.

    Attributes:
        planes: dtype of every stored plane; the first `read_planes` of them are what a token reads.
        read_planes: how many planes a token reads.
        encode: state [..., K] in the compute dtype -> planes.
        update: planes -> state in the compute dtype, for flush and materialize.
        read: the first `read_planes` planes -> state in the compute dtype, for decode.
        compute: dtype of all arithmetic on states, gates and carried queries.
    """

    name: str
    planes: tuple[torch.dtype, ...]
    read_planes: int
    encode: Callable[[Tensor], tuple[Tensor, ...]]
    update: Callable[[tuple[Tensor, ...]], Tensor]
    read: Callable[[tuple[Tensor, ...]], Tensor]
    compute: torch.dtype = torch.float32

    @property
    def stored_bytes(self) -> int:
        """Bytes kept per state element."""
        return sum(dtype.itemsize for dtype in self.planes)

    @property
    def read_bytes(self) -> int:
        """Bytes read per state element and token."""
        return sum(dtype.itemsize for dtype in self.planes[: self.read_planes])


def _plain(name: str, dtype: torch.dtype, compute: torch.dtype = torch.float32) -> Format:
    """One plane that holds the state in `dtype`; values beyond its range saturate."""
    limit = torch.finfo(dtype).max

    def encode(state: Tensor) -> tuple[Tensor, ...]:
        return (state if state.dtype == dtype else state.clamp(-limit, limit).to(dtype),)

    def value(planes: tuple[Tensor, ...]) -> Tensor:
        return planes[0].to(compute)

    return Format(name, (dtype,), 1, encode, value, value, compute)


def _split16_encode(state: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 bits = (high << 16) + low, high rounded to nearest (half away from zero) so that low fits in an int16.

    A NaN becomes the standard quiet one first: rounding its bits up could carry into the sign and hide it.
    """
    bits = torch.where(state.isnan(), 0x7FC00000, state.view(torch.int32))
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def _split16_update(planes: tuple[Tensor, ...]) -> Tensor:
    high, low = planes
    return ((high.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


FORMATS: dict[str, Format] = {
    "fp64": _plain("fp64", torch.float64, torch.float64),
    "fp32": _plain("fp32", torch.float32),
    "split16": Format(
        "split16",
        (torch.bfloat16, torch.int16),
        1,
        _split16_encode,
        _split16_update,
        lambda planes: planes[0].to(torch.float32),
    ),
    "bf16": _plain("bf16", torch.bfloat16),
    "fp16": _plain("fp16", torch.float16),
}


def get(name: str) -> Format:
    """The format called `name`.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in FORMATS:
        raise checks.unknown("format", name, FORMATS)
    return FORMATS[name]
