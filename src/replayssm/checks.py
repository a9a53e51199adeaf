"""The sentences of our errors: where, what was needed, what came, what to do.

Checks run once, at the border, before anything is written, so a refused call leaves the state as it was.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_SHORT = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.bool: "bool",
}


def describe(shape: Iterable[int], dtype: torch.dtype) -> str:
    """A shape and dtype as our sentences write them: [32, 4, 8, 128] in bfloat16."""
    return f"[{', '.join(str(n) for n in shape)}] in {_SHORT.get(dtype, str(dtype).removeprefix('torch.'))}"


def unknown(what: str, got: object, known: Iterable[str]) -> ValueError:
    """An unknown name, with the names that exist."""
    return ValueError(f"unknown {what} {got!r}: choose one of {', '.join(known)}.")


def tensor(
    where: str,
    name: str,
    got: Tensor,
    letters: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    device: torch.device,
    hint: str = "",
) -> None:
    """Refuse a tensor whose shape, dtype or device is not the one the cache was made for.

    Args:
        where: the call, as the user wrote it, e.g. "mamba2.decode".
        letters: the shape in the library's letters, e.g. "[B, T, G, K]".
        dtype: None if any floating dtype will do.
        hint: what to do, one sentence.
    """
    if not isinstance(got, Tensor):
        raise ValueError(f"{where}: {name} must be a tensor {letters}; got {type(got).__name__}.")
    right = tuple(got.shape) == shape
    right &= got.is_floating_point() if dtype is None else got.dtype == dtype
    if not right:
        needed = describe(shape, dtype) if dtype is not None else f"[{', '.join(map(str, shape))}] in a float dtype"
        sentence = (
            f"{where}: {name} must be {letters} = {needed} (from the cache); got {describe(got.shape, got.dtype)}."
        )
        raise ValueError(f"{sentence} {hint}".rstrip())
    if got.device != device:
        raise ValueError(f"{where}: {name} must be on {device} with the cache; got {got.device}. Move it with .to().")


def slots(where: str, got: Tensor, pool: int, device: torch.device, padding: bool = False) -> Tensor:
    """A vector of slot numbers, as int64, each inside the pool (or PAD_SLOT = -1 where `padding`)."""
    got = torch.as_tensor(got, device=device)
    if got.ndim != 1 or got.is_floating_point() or got.dtype == torch.bool:
        raise ValueError(f"{where}: slots must be [B] in an integer dtype; got {describe(got.shape, got.dtype)}.")
    got = got.to(torch.int64).contiguous()
    lowest = -1 if padding else 0
    if device.type == "cpu" and got.numel() and (int(got.min()) < lowest or int(got.max()) >= pool):
        bad = got[(got < lowest) | (got >= pool)][0].item()
        extra = ", or PAD_SLOT (-1) for a row to ignore" if padding else ""
        raise ValueError(f"{where}: slot {bad} is outside the pool: slots go from 0 to {pool - 1}{extra}.")
    return got


def counts(where: str, name: str, got: Tensor | Sequence[int] | int, rows: int, device: torch.device) -> Tensor:
    """A vector of token counts [rows], as int64; one number serves every row."""
    values = torch.as_tensor(got, device=device)
    if values.ndim == 0:
        values = values.expand(rows)
    if tuple(values.shape) != (rows,) or values.is_floating_point() or values.dtype == torch.bool:
        raise ValueError(
            f"{where}: {name} must be [B] = [{rows}] in an integer dtype; got {describe(values.shape, values.dtype)}."
        )
    return values.to(torch.int64).contiguous()


def within(where: str, name: str, got: Tensor, most: Tensor | int, slots: Tensor, why: str) -> None:
    """Refuse counts below 0 or above `most`, naming the first slot that is wrong. Waits for the device."""
    most = torch.as_tensor(most, device=got.device).expand_as(got)
    bad = ((got < 0) | (got > most)).nonzero()
    if bad.numel():
        i = int(bad[0])
        raise ValueError(
            f"{where}: {name} must be between 0 and {int(most[i])} for slot {int(slots[i])}; got {int(got[i])}. {why}"
        )
