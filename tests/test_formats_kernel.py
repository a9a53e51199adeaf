"""The Triton twins of the storage formats: every plane and every value, bit for bit."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from test_formats import NAMES, states

from replayssm import Geometry, ReplayCache, formats
from replayssm.bench import kernels as bench
from replayssm.formats_kernel import decode_read, fetch_read, load_update, noise_words, read_kind, scaled, store
from replayssm.step_kernel import Pool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, V = 2, 5


@triton.jit
def encode(state, planes, key, flushes, V: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr):
    i_h, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_v, o_k = tl.arange(0, 8), tl.arange(0, BK)
    p = state + ((slot * tl.num_programs(0) + i_h) * V + o_v[:, None]) * K + o_k
    b_s = tl.load(p, mask=(o_v < V)[:, None] & (o_k < K), other=0.0)
    store(planes, slot, i_h, o_v, b_s, noise_words(key, slot, tl.load(flushes + slot)), V, K, 8, BK, FORMAT)


@triton.jit
def decode(planes, read, update, V: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr):
    i_h, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_v, o_k = tl.arange(0, 8), tl.arange(0, BK)
    at = ((slot * tl.num_programs(0) + i_h) * V + o_v[:, None]) * K + o_k
    mask = (o_v < V)[:, None] & (o_k < K)
    codes, blocks, rows = fetch_read(planes, slot, i_h, o_v, V, K, BK, FORMAT)
    tile, scale = decode_read(codes, blocks, rows, 8, BK, FORMAT)
    tl.store(read + at, scaled(tile, scale, read_kind(FORMAT)), mask=mask)
    tl.store(update + at, load_update(planes, slot, i_h, o_v, V, K, 8, BK, FORMAT), mask=mask)


@pytest.mark.parametrize("name, K", [*((name, 96) for name in NAMES if name != "fp64"), ("fp16+fp4/residual", 16)])
def test_kernels_and_torch_agree_bit_for_bit(name: str, K: int, generator: torch.Generator) -> None:
    fmt = formats.get(name)
    state = states(generator, H, V, K).to(DEVICE)
    n = len(state)
    key = torch.tensor(formats.layer_key(7, 3), device=DEVICE)
    slots, flushes = torch.arange(n, device=DEVICE), torch.arange(n, device=DEVICE) * 3 + 1
    expected = fmt.encode(state, formats.noise_keys(key, slots, flushes))
    planes = fmt.empty(n, H, V, K=K, device=DEVICE)
    pools = tuple(Pool(plane, plane.stride(0)) for plane in planes)
    sizes = {"V": V, "K": K, "BK": triton.next_power_of_2(K), "FORMAT": name}
    encode[(H, n)](state, pools, key, flushes, **sizes)
    for i, (got, right) in enumerate(zip(planes, expected, strict=True)):
        assert torch.equal(_bits(got), _bits(right)), f"plane {i}"
    read, update = torch.empty_like(state), torch.empty_like(state)
    decode[(H, n)](pools, read, update, **sizes)
    assert torch.equal(_bits(read), _bits(fmt.read(expected[: fmt.read_planes])))
    assert torch.equal(_bits(update), _bits(fmt.update(expected)))


@pytest.mark.parametrize("name", ["fp32", "fp8", "fp16+fp4/residual"])
def test_a_speed_row_passes_with_the_same_encoding_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside torch with the same noise errors are rounding; with other noise no row would be written."""
    monkeypatch.setitem(bench.CASES, "tiny", ("gdn", Geometry(2, 1, 16, 32)))
    errors = bench.check("tiny", 3, name, bench.Steps(), DEVICE, torch.float16)
    assert errors["state_torch"] < bench.ROUNDING["state"]
    if name != "fp8":
        return

    def other(*arguments: Any, **options: Any) -> ReplayCache:
        return ReplayCache(*arguments, **options, seed=int(options["implementation"] == "torch"))

    monkeypatch.setattr(bench, "ReplayCache", other)
    with pytest.raises(RuntimeError, match="no row is written"):
        bench.check("tiny", 3, name, bench.Steps(), DEVICE, torch.float16)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The bits, with one NaN for all."""
    if not x.is_floating_point():
        return x
    x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return x.contiguous().view(torch.uint8)
