"""The implementations of one interface: carry, read, fold and flush of one layer.

reference   the recurrences' definitions, any device and precision
torch       batched products, made for CPUs
triton      GPU kernels; on a CPU only in Triton's interpreter (TRITON_INTERPRET=1), for tests
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm import checks, read
from replayssm.formats import Format
from replayssm.recurrences import Recurrence, batched, walked
from replayssm.ring import LayerState

NAMES = ("reference", "torch", "triton")


class Implementation(NamedTuple):
    """What a cache calls; signatures as in recurrences/batched.py and read.py.

    Attributes:
        carry: (recurrence, records, step, q) -> t [B, H, T, K], c [B, H, T, R]
        read: (format, layer, step, t, c) -> y [B, H, T, V]
        fold: (recurrence, format, layer, slots, start, counts) -> states [n, H, V, K]
        flush: the same arguments; the folded states replace the checkpoints.
    """

    name: str
    carry: Callable[..., tuple[Tensor, Tensor]]
    read: Callable[..., Tensor]
    fold: Callable[..., Tensor]
    flush: Callable[..., None]


def choose(name: str | None, device: torch.device, fmt: Format) -> Implementation:
    """The implementation called `name`, or (None) the fast one for the device.

    Raises:
        ValueError: there is none of that name, or it cannot run here.
    """
    name = name or ("torch" if device.type == "cpu" else "triton")
    if name not in NAMES:
        raise checks.unknown("implementation", name, NAMES)
    if name == "reference":
        return Implementation(name, walked.carry, read.read_reference, walked.fold, _flush_by(walked.fold))
    if name == "torch":
        return Implementation(name, batched.carry, read.read_torch, batched.fold, _flush_by(batched.fold))
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "ReplayCache: implementation 'triton' needs a GPU, and the cache is on cpu. Leave implementation out, or "
            "set TRITON_INTERPRET=1 before triton is imported, to run the kernels in its interpreter (slow, for tests)."
        )
    if fmt.compute != torch.float32:
        raise ValueError(
            f"ReplayCache: implementation 'triton' computes in fp32; format {fmt.name!r} needs {fmt.compute}. "
            "Use implementation 'reference' or 'torch'."
        )
    from replayssm import kernels

    return Implementation(name, kernels.carry, kernels.read, kernels.fold, kernels.flush)


def _flush_by(fold: Callable[..., Tensor]) -> Callable[..., None]:
    def flush(
        recurrence: Recurrence, fmt: Format, layer: LayerState, slots: Tensor, start: Tensor, counts: Tensor
    ) -> None:
        state = fold(recurrence, fmt, layer, slots, start, counts)
        for plane, value in zip(layer.checkpoint, fmt.encode(state), strict=True):
            plane[slots] = value

    return flush
