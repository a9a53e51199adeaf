"""Storage formats: what comes back, and what a token reads."""

import pytest
import torch

from replayssm import formats

SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 3.4028235e38, -3.4028235e38, 1e-45, 1.17549435e-38, 1.00390625, 1.0039062]
)


@pytest.fixture
def state(generator: torch.Generator) -> torch.Tensor:
    """fp32 values of every size, random bits and special ones."""
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    return torch.cat([SPECIAL, values[torch.isfinite(values)]])


@pytest.mark.parametrize("name", formats.FORMATS)
def test_planes_have_the_declared_dtypes(name: str) -> None:
    fmt = formats.get(name)
    planes = fmt.encode(torch.randn(3, 4, 5, dtype=fmt.compute))
    assert tuple(plane.dtype for plane in planes) == fmt.planes
    assert all(plane.shape == (3, 4, 5) for plane in planes)
    assert fmt.read(planes[: fmt.read_planes]).dtype == fmt.update(planes).dtype == fmt.compute


def test_split16_gives_every_fp32_back_bit_for_bit(state: torch.Tensor) -> None:
    fmt = formats.get("split16")
    assert torch.equal(fmt.update(fmt.encode(state)).view(torch.int32), state.view(torch.int32))


def test_split16_reads_fp32_rounded_to_bf16(state: torch.Tensor) -> None:
    """To nearest: half a unit in the last place. Values above the largest bf16 may read as infinite."""
    fmt = formats.get("split16")
    read = fmt.read(fmt.encode(state)[:1])
    normal = (state.abs() > 1.2e-38) & (state.abs() < 3.38e38)
    error = ((read - state).abs() / state.abs())[normal]
    assert float(error.max()) <= 2**-8
    exact = state.bfloat16().float()
    ties = (state.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(read[normal & ~ties], exact[normal & ~ties])


@pytest.mark.parametrize("name", ["fp32", "split16", "bf16", "fp16"])
def test_a_nan_stays_a_nan_and_infinity_infinite(name: str) -> None:
    fmt = formats.get(name)
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int64).to(torch.int32).view(torch.float32)
    planes = fmt.encode(nans)
    assert bool(fmt.update(planes).isnan().all()) and bool(fmt.read(planes[: fmt.read_planes]).isnan().all())
    if name in ("fp32", "split16"):
        infinite = torch.tensor([torch.inf, -torch.inf])
        assert torch.equal(fmt.update(fmt.encode(infinite)), infinite)


def test_fp16_saturates() -> None:
    fmt = formats.get("fp16")
    assert fmt.update(fmt.encode(torch.tensor([1e6, -1e6, 65520.0]))).tolist() == [65504.0, -65504.0, 65504.0]


@pytest.mark.parametrize(
    "name, stored, read", [("fp64", 8, 8), ("fp32", 4, 4), ("split16", 4, 2), ("bf16", 2, 2), ("fp16", 2, 2)]
)
def test_bytes_per_element(name: str, stored: int, read: int) -> None:
    assert (formats.get(name).stored_bytes, formats.get(name).read_bytes) == (stored, read)
