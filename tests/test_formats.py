"""Storage formats: what comes back, what a token reads, how rounding behaves, and what is refused."""

import itertools
import math

import pytest
import torch

from replayssm import Geometry, ReplayCache, decode, formats
from replayssm.formats import Format

SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 3.4028235e38, -3.4028235e38, 1e-45, 1.17549435e-38, 1.00390625, 1.0039062]
)
COPIES = ("fp8", "int8", "fp4", "mxfp4")
RESIDUALS = [f"{u}+{c}/residual" for u, c in itertools.product(("fp16", "fp8"), COPIES) if (u, c[-1]) != ("fp8", "8")]
# every kind alone, every rounding, every copy beside some update, every residual
NAMES = [
    "fp64", "fp32", "split16", "bf16", "fp16", "bf16/stochastic", "fp16/stochastic", "fp8", "fp8/nearest", "int8",
    "int8/nearest", "fp4", "fp4/nearest", "mxfp4", "fp32+bf16", "fp32+fp8", "split16+int8", "fp16+fp4", "fp8+mxfp4",
    "bf16+fp8", "fp16/nearest+fp4/residual", *RESIDUALS,
]  # fmt: skip


def states(generator: torch.Generator, H: int, V: int, K: int) -> torch.Tensor:
    """States [6, H, V, K]: rows of all sizes, rows with elements of all sizes, zeros, extremes, values not finite."""
    x = torch.randn(6, H, V, K, generator=generator)
    x[1] *= torch.exp2(torch.randint(-20, 20, (H, V, 1), generator=generator).float())
    x[2] *= torch.exp2(torch.randint(-30, 10, (H, V, K), generator=generator).float())
    x[3] = 0
    x[4, 0, :, ::2] = torch.tensor([448.0, 6.0, 127.0, 0.25, 2.5])[:V, None]  # ties and ends of ranges
    x[4, -1, 0] = SPECIAL[torch.randint(0, len(SPECIAL), (K,), generator=generator)]
    x[5, 0, 1, 3], x[5, 0, 2, 1], x[5, -1, 0, 0] = torch.nan, torch.inf, -torch.inf
    return x


@pytest.fixture
def state(generator: torch.Generator) -> torch.Tensor:
    """fp32 values of every size, random bits and special ones."""
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    return torch.cat([SPECIAL, values[torch.isfinite(values)]])


def keys(n: int, flush: int = 1, seed: int = 0) -> torch.Tensor:
    """Keys of slots 0..n-1."""
    return formats.noise_keys(torch.tensor(formats.layer_key(seed, 0)), torch.arange(n), torch.full((n,), flush))


def both(fmt: Format, state: torch.Tensor, flush: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """What is updated and what is read, after encoding."""
    planes = fmt.encode(state, keys(len(state), flush))
    return fmt.update(planes), fmt.read(planes[: fmt.read_planes])


@pytest.mark.parametrize("name", NAMES)
def test_planes_are_as_declared_and_errors_within_a_step(name: str, generator: torch.Generator) -> None:
    fmt = formats.get(name)
    state = torch.randn(3, 4, 5, 64, generator=generator).to(fmt.compute)
    planes = fmt.encode(state, keys(3))
    for plane, empty in zip(planes, fmt.empty(3, 4, 5, K=64), strict=True):
        assert plane.shape == empty.shape and plane.dtype == empty.dtype
    stored = sum(plane.nbytes for plane in planes) / state.numel()
    assert stored == fmt.stored_bytes(64)
    update, read = both(fmt, state)
    assert update.dtype == read.dtype == fmt.compute
    steps = {"bf16": 2**-7, "fp16": 2**-10, "fp8": 2**-3, "int8": 2**-6, "fp4": 1 / 3, "mxfp4": 2 / 3}
    amax = state.abs().amax(-1, keepdim=True)
    assert float(((update - state).abs() / amax).max()) <= steps.get(fmt.kind.name, 0)
    assert float(((read - state).abs() / amax).max()) <= steps.get(fmt.reads.name, 2**-8)


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


@pytest.mark.parametrize("name", NAMES)
def test_a_value_not_finite_stays_in_its_row(name: str, generator: torch.Generator) -> None:
    """It reads as NaN (the infinite one in unscaled kinds as itself, or saturated), and changes no other row of K."""
    fmt = formats.get(name)
    state = torch.randn(2, 3, 4, 32, generator=generator).to(fmt.compute)
    clean = both(fmt, state)
    state[1, 2, 3, 5], state[0, 0, 1, 7] = torch.nan, torch.inf
    for got, right, kind in zip(
        both(fmt, state), clean, (fmt.reads if fmt.residual else fmt.kind, fmt.reads), strict=True
    ):
        assert bool(got[1, 2, 3, 5].isnan())
        if kind.parts:
            assert bool(got[1, 2, 3].isnan().all()) and bool(got[0, 0, 1].isnan().all())
        same = torch.ones(2, 3, 4, dtype=torch.bool)
        same[1, 2, 3] = same[0, 0, 1] = False
        assert torch.equal(got[same], right[same])


def test_16_bits_saturate() -> None:
    fmt = formats.get("fp16")
    assert fmt.update(fmt.encode(torch.tensor([1e6, -1e6, 65520.0]))).tolist() == [65504.0, -65504.0, 65504.0]


@pytest.mark.parametrize(
    "name, stored, read",
    [
        ("fp64", 8, 8), ("fp32", 4, 4), ("split16", 4, 2), ("bf16", 2, 2), ("fp16", 2, 2),
        ("fp8", 1 + 1 / 32, 1 + 1 / 32), ("fp4", 0.5 + 1 / 16 + 1 / 32, 0.5 + 1 / 16 + 1 / 32),
        ("mxfp4", 0.5 + 1 / 32, 0.5 + 1 / 32), ("fp16+fp4", 2.5 + 3 / 32, 0.5 + 3 / 32),
        ("fp16+fp4/residual", 2 + 3 / 32, 0.5 + 3 / 32), ("fp8+fp4/residual", 1 + 3 / 32, 0.5 + 3 / 32),
    ],
)  # fmt: skip
def test_bytes_per_element(name: str, stored: float, read: float) -> None:
    """K = 128. With a residual: the bits of fp16 or fp8, and scales."""
    assert (formats.get(name).stored_bytes(128), formats.get(name).read_bytes(128)) == (stored, read)


# ---- stochastic rounding ----


@pytest.mark.parametrize("name", ["bf16/stochastic", "fp16/stochastic", "fp8", "int8", "fp4", "mxfp4", *RESIDUALS])
def test_stochastic_rounding_is_right_on_average(name: str, generator: torch.Generator) -> None:
    """The mean of 2,000 roundings: within 5 of its standard errors of the value."""
    fmt = formats.get(name)
    state = torch.randn(1, 1, 4, 64, generator=generator).clamp(-2, 2)
    got = both(fmt, state.expand(2000, -1, -1, -1))[0].double()
    error = (got.mean(0) - state[0]) / (got.std(0) / math.sqrt(len(got)) + 1e-30)
    moved = got.std(0) > 0
    assert moved.double().mean() > 0.9
    inside = error[moved].abs() < 5
    ends = 0.1 if fmt.residual or name == "fp4" else 0.0  # at the very end of a block's range a value is clipped
    assert inside.double().mean() >= 1 - ends
    # the squares' mean is 1 +- 0.09; a bias of a twentieth of a step would double it
    assert float(error[moved][inside].square().mean()) < 1.5


def test_noise_depends_on_every_part_of_its_key() -> None:
    shape = (2, 8, 64)
    key = torch.tensor(formats.layer_key(5, 1))
    zero = torch.zeros(1, dtype=torch.int64)

    def bits(key: torch.Tensor, slot: int, flush: int) -> torch.Tensor:
        return formats.noise(formats.noise_keys(key, zero + slot, zero + flush), shape)

    base = bits(key, 3, 9)
    assert torch.equal(base, bits(key, 3, 9))
    others = [bits(key, 4, 9), bits(key, 3, 10), bits(key, 9, 3)]
    others += [bits(torch.tensor(formats.layer_key(*which)), 3, 9) for which in ((6, 1), (5, 2), (1, 5))]
    for other in others:
        flipped = sum(int(((base ^ other) >> i & 1).sum()) for i in range(16)) / (16 * base.numel())
        assert abs(flipped - 0.5) < 0.01, "half of all bits differ"
    ones = torch.stack([(base >> i & 1).double().mean() for i in range(16)])
    assert float((ones - 0.5).abs().max()) < 4 * 0.5 / math.sqrt(base.numel())


# ---- names and refusals ----


@pytest.mark.parametrize(
    "name, canonical",
    [
        ("fp8/stochastic", "fp8"),
        ("fp16/nearest", "fp16"),
        ("fp8/nearest", "fp8/nearest"),
        ("fp16/stochastic+fp4", "fp16+fp4"),
        ("fp16/nearest+fp4/residual", "fp16/nearest+fp4/residual"),
    ],
)
def test_a_name_says_nothing_that_is_so_by_default(name: str, canonical: str) -> None:
    assert formats.get(name).name == canonical


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("fp7", "unknown format 'fp7': choose one of fp64, fp32"),
        ("fp16++fp4", r"unknown format 'fp16\+\+fp4': a format is KIND\[/nearest"),
        ("fp16+fp5", "unknown format 'fp5'"),
        ("fp8+fp16", "the copy, so it must be smaller than the checkpoint"),
        ("fp64+fp8", "the copy, so it must be smaller"),
        ("bf16+fp4/residual", "with /residual the checkpoint's size is that of fp16 or fp8"),
        ("fp32/stochastic", "fp32 rounds nothing"),
    ],
)
def test_names_that_make_no_sense_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        formats.get(name)


def test_a_format_that_the_dims_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="keeps mxfp4 in blocks of 32 along K; got K = 48. Take one without mxfp4."):
        ReplayCache("gdn", Geometry(2, 1, 4, 48), layers=1, slots=1, format="fp16+mxfp4")


def test_formats_by_layer() -> None:
    by_layer = {"default": "fp32+fp4", "2": "fp16", 0: "fp8"}
    cache = ReplayCache("gdn", Geometry(2, 1, 4, 16), layers=4, slots=1, format=by_layer)
    assert [layer.format.name for layer in cache.layers] == ["fp8", "fp32+fp4", "fp16", "fp32+fp4"]
    assert cache.nbytes.checkpoint == sum(f.stored_bytes(16) for f in cache.formats) * 2 * 4 * 16
    for wrong, sentence in (
        ({0: "fp8"}, "give the other layers' format as 'default'"),
        ({"default": "fp32", 4: "fp8"}, r"counted from 0 to 3; got \['4'\]"),
        ({"default": "fp32", 1: "fp64"}, "fp64 is for all layers or none"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ReplayCache("gdn", Geometry(2, 1, 4, 16), layers=4, slots=1, format=wrong)


# ---- in a cache ----


def run(format: str, steps: int, seed: int = 0, spoil: int | None = None) -> tuple[ReplayCache, torch.Tensor]:
    """Plain decoding of two slots with the same inputs each time; outputs [steps, 2, ...]."""
    generator = torch.Generator().manual_seed(3)
    cache = ReplayCache("gdn", Geometry(2, 1, 8, 32), layers=1, slots=2, window=5, format=format, seed=seed)
    slots = cache.allocate(2)
    cache.reset(slots)
    outputs = []
    for i in range(steps):
        q, k = torch.randn(2, 2, 1, 1, 32, generator=generator)
        v = torch.randn(2, 1, 2, 8, generator=generator)
        g, w = -0.05 * torch.rand(2, 1, 2, generator=generator), torch.rand(2, 1, 2, generator=generator)
        if i == spoil:
            v[1] = torch.nan
        step = cache.begin(slots)
        outputs.append(decode(cache, 0, step, q, k, v, g, w)[:, 0])
        cache.commit(step)
    return cache, torch.stack(outputs)


@pytest.mark.parametrize("copy", ["fp8", "int8", "fp4", "mxfp4", "bf16"])
def test_errors_of_a_copy_never_reach_the_state(copy: str) -> None:
    """Bitwise the state of fp32, whatever tokens read; outputs differ. (`replayssm eval drift` runs 32k tokens.)"""
    slots = torch.arange(2)
    exact, y = run("fp32", 512)
    got, other = run(f"fp32+{copy}", 512)
    assert torch.equal(exact.materialize(0, slots), got.materialize(0, slots))
    assert not torch.equal(y, other)


def test_the_same_seed_gives_the_same_run() -> None:
    slots = torch.arange(2)
    first, again, other = (run("fp8+fp4", 40, seed)[0].materialize(0, slots) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("name", ["fp8", "fp16+fp4/residual", "fp4"])
def test_a_row_that_is_not_finite_spoils_no_other(name: str) -> None:
    clean, y = run(name, 30)
    spoiled, got = run(name, 30, spoil=11)
    assert bool(got[11:, 1].isnan().any()) and torch.equal(y[:, 0], got[:, 0])
    assert torch.equal(clean.materialize(0, torch.tensor([0])), spoiled.materialize(0, torch.tensor([0])))
    state = torch.zeros(2, 2, 8, 32)
    state[1, 0, 3, 4] = torch.inf
    with pytest.raises(ValueError, match=r"gdn.load: the state must be finite; that for slots \[1\] is not"):
        clean.load(0, torch.arange(2), state)
