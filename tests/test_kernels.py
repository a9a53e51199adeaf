"""Triton kernels: every recurrence with every format in the interpreter, and compiled for GPUs that are not here."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from test_contract import SMALL, Life

from replayssm import PAD_SLOT, Geometry, arithmetic_kernel, launch_choices, recurrences
from replayssm.testing import make_cache

FORMATS = ("fp32", "split16", "bf16", "fp16")
ODD = Geometry(H=3, G=1, V=20, K=24)  # nothing is a power of two
BLOCKS = Geometry(H=2, G=1, V=20, K=96)


@pytest.mark.parametrize("name, format", [*itertools.product(recurrences.names(), FORMATS)])
def test_every_format_in_every_kernel(name: str, format: str, generator: torch.Generator) -> None:
    cache = make_cache(name, ODD, format=format, implementation="triton", slots=2, window=3, max_tokens=2)
    life = Life(cache, generator)
    for lengths in ([2, 1], [1, 2], [2, 2]):
        life.run([1, 0], lengths, [1, 1])
    life.twin.check_states()


@pytest.mark.parametrize("apart", [False, True], ids=["one launch", "three launches"])
@pytest.mark.parametrize(
    "name, format",
    [
        ("mamba2", "fp16+fp4/residual"),
        ("mamba2", "int8"),
        ("gdn", "fp8+mxfp4"),
        ("gdn", "fp32+fp4"),
        ("kda", "int8"),
    ],
)
def test_kernels_hold_what_torch_holds(
    name: str, format: str, apart: bool, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """Copies, residuals and noise in a slot's life: states as near to those of torch as sums in another order.

    Columns of K beyond its end count for nothing.
    """
    if apart:
        chosen = launch_choices.launch
        monkeypatch.setattr(launch_choices, "in_one_launch", lambda rows, heads: False)
        monkeypatch.setattr(launch_choices, "launch", lambda *cell: chosen(*cell)._replace(apart=True, fold_heads=True))
    caches = [
        make_cache(name, BLOCKS, format=format, implementation=implementation, slots=2, window=2)
        for implementation in ("torch", "triton")
    ]
    lives = [Life(cache, torch.Generator().manual_seed(5)) for cache in caches]
    for life in lives:
        life.plain(5)
        life.twin.check_states()
    states = [cache.materialize(0, life.slots) for cache, life in zip(caches, lives, strict=True)]
    # the noise is the same, so only few values are sent to the other side of a step by a sum's last bit
    assert float((states[0] - states[1]).abs().mean()) < 1e-4 * float(states[0].abs().max())


EVEN = Geometry(H=4, G=1, V=32, K=16)  # tiles need no masks, a key group's heads are done two at a time


@pytest.mark.parametrize("geometry", [ODD, EVEN], ids=["odd", "even"])
@pytest.mark.parametrize("format, tokens", [("fp32", 1), ("fp32", 2), ("split16", 2), ("fp8", 2)])
@pytest.mark.parametrize("name", recurrences.names())
def test_prepare_and_read_as_launches_of_their_own(
    name: str,
    format: str,
    tokens: int,
    geometry: Geometry,
    monkeypatch: pytest.MonkeyPatch,
    generator: torch.Generator,
) -> None:
    """As many rows are served; steps of one token and, in a cache for them, of several; rows due, one row padding."""
    monkeypatch.setattr(launch_choices, "in_one_launch", lambda rows, heads: False)
    life = Life(
        make_cache(name, geometry, format=format, implementation="triton", slots=2, window=3, max_tokens=tokens),
        generator,
    )
    for lengths in ([1, 1], [2, 1], [1, 1], [1, 1], [0, 1], [1, 1], [1, 2]):
        life.run([1, 0], [min(length, tokens) for length in lengths])
    life.twin.check_states()


@pytest.mark.parametrize("geometry", [ODD, EVEN], ids=["odd", "even"])
@pytest.mark.parametrize("format", ["fp32", "split16", "fp32+fp8"])
@pytest.mark.parametrize("name", recurrences.names())
def test_checkpoints_updated_at_every_token(
    name: str, format: str, geometry: Geometry, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """As with the fewest rows: some bring nothing, some tokens do not count; there are more rows before and after."""
    cache = make_cache(name, geometry, format=format, implementation="triton", slots=3, window=4)
    life = Life(cache, generator)
    life.plain(3)
    chosen = launch_choices.launch
    with monkeypatch.context() as few:
        few.setattr(launch_choices, "launch", lambda *cell: chosen(*cell)._replace(at_once=True))
        life.plain(2)
        assert cache.cursors.num_committed.tolist() == [1, 1, 1]  # all three records before were folded at once
        life.run([2, PAD_SLOT, 0], [1, 1, 0])
        life.run([1, 0], [1, 1], [0, 1])
        life.twin.check_states()
        life.plain(3)
        cache.reset(torch.tensor([1]))
        life.twin.reset([1])
        life.plain(2)
    life.twin.check_states()
    life.plain(6)
    life.twin.check_states()


def test_formats_that_round_are_not_updated_at_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = launch_choices.launch
    monkeypatch.setattr(launch_choices, "launch", lambda *cell: chosen(*cell)._replace(at_once=True))
    for format, options, expected in (
        ("split16", {}, True), ("fp32+fp8", {}, True), ("fp16", {}, False), ("fp16+fp8/residual", {}, False),
        ({"default": "fp32", 1: "bf16"}, {}, False), ("fp32", {"max_tokens": 2}, False),
    ):  # fmt: skip
        cache = make_cache("gdn", Geometry(2, 1, 4, 32), format=format, implementation="triton", layers=2, **options)
        cache.reset(cache.allocate(1))
        assert cache.begin(torch.tensor([0])).at_once == expected, format


@pytest.mark.parametrize("launches", [1, 2, 3], ids=["one launch", "two launches", "three launches"])
@pytest.mark.parametrize(
    "window, columns, tokens",
    [(3, 32, 2), (3, 16, 2), (3, 16, 1), (20, 32, 2), (20, 32, 1), (36, 16, 2)],
    ids=["whole", "in blocks", "no drafts", "32 at once", "two chunks of 16", "two chunks of 32"],
)
@pytest.mark.parametrize("name", recurrences.names())
def test_all_ways_to_fold(
    name: str,
    window: int,
    columns: int,
    tokens: int,
    launches: int,
    monkeypatch: pytest.MonkeyPatch,
    generator: torch.Generator,
) -> None:
    """Keys in blocks of columns or whole, one chunk of records and more, in all kinds of launches.

    In three, as with many rows: flushes answer, in fewer programs than there could be, 32 rows of V at a time, and a
    program reads two tiles.
    """
    chosen = launch_choices.launch
    monkeypatch.setattr(launch_choices, "in_one_launch", lambda rows, heads: launches == 1)
    changes = {"fold_k": columns, "flush_v": 32, "apart": launches == 3, "answers": launches == 3}
    if launches == 3:
        changes |= {"flush_parts": 2, "fold_v": 32, "fold_heads": True, "read_run": 2}
    monkeypatch.setattr(launch_choices, "launch", lambda *cell: chosen(*cell)._replace(**changes))
    wide = Geometry(H=3, G=1, V=20, K=32)
    life = Life(make_cache(name, wide, implementation="triton", slots=2, window=window, max_tokens=tokens), generator)
    for lengths in ([1, 1], [2, 1], [1, 1], [1, 1], [0, 1], [1, 1], [1, 2]) * (1 + window // 7):
        life.run([1, 0], [min(length, tokens) for length in lengths])
    life.twin.check_states()


@pytest.mark.parametrize("name", recurrences.names())
def test_no_row_of_a_state_is_folded_by_two_programs(name: str) -> None:
    """What is folded at a time lies in the part of one program, whatever the sizes."""
    recurrence = recurrences.get(name)
    for H, V, rows, tokens in itertools.product((1, 2, 32), (20, 32, 64, 80, 128), (1, 63, 64, 65, 128, 256), (1, 5)):
        for fmt in ("fp32", "split16", "fp8"):
            chosen = launch_choices.launch(recurrence, Geometry(H, 1, V, 128), fmt, rows, tokens)
            part = chosen.read_v if chosen.together else max(chosen.flush_v, 16)
            assert chosen.fold_v <= part, (H, V, rows, chosen)


@pytest.mark.parametrize("name", recurrences.names())
def test_16_bit_activations(name: str, generator: torch.Generator) -> None:
    life = Life(make_cache(name, SMALL, dtype=torch.float16, implementation="triton", slots=1, window=2), generator)
    life.plain(5)
    life.twin.check_states()


@triton.jit
def expm1_of(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, arithmetic_kernel.expm1(tl.load(x + o)))


def test_decays_near_one_keep_their_digits() -> None:
    """exp(g) - 1 to 3 units in the last place, from g = -1e-30 to -100: thousands of such factors must not drift."""
    N = 1 << 14
    x = -torch.logspace(-30, 2, N, dtype=torch.float64).float()
    y = torch.empty_like(x)
    expm1_of[(1,)](x, y, N=N)
    exact = torch.expm1(x.double())
    unit = torch.nextafter(exact.abs().float(), torch.tensor(torch.inf)).double() - exact.abs().float().double()
    assert float(((y.double() - exact).abs() / unit).max()) <= 3


def test_without_a_gpu_triton_is_refused_outside_the_interpreter() -> None:
    code = (
        "from replayssm import *\nReplayCache('gdn', Geometry(2, 1, 4, 4), layers=1, slots=1, implementation='triton')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "implementation 'triton' needs a GPU, and the cache is on cpu" in done.stderr


def test_formats_that_need_fp64_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"implementation 'triton' computes in fp32; format 'fp64' needs torch.float64"
    ):
        make_cache("gdn", SMALL, format="fp64", implementation="triton")


def test_kernels_of_several_tokens_fit_their_registers() -> None:
    """No read spills. What prepares does, up to 8 tokens: with fewer registers more of it runs (docs/log.md)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name("compile_kernels.py"), "90", "5", "9"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * 3 * 7
    for line in lines:
        most = 700 if " carry " in line else 64 if " flush " in line else 0 if " read " in line else 32
        assert int(line.split()[-1]) <= most, done.stdout


@pytest.mark.parametrize("arch", ["90", "100", "gfx942"])
def test_kernels_compile_without_a_gpu(arch: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_kernels.py"), arch],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    # cursors' two kernels; of six geometries (three on AMD) in four formats decode (B = 1), read, carry, flush and
    # fold, in two update; of three these five in two formats more, and carry and flush at once (B = 32) in four
    geometries = 3 if arch == "gfx942" else 6
    assert len(lines) == 2 + geometries * (4 * 5 + 2) + 3 * 2 * 5 + 3 * 4
    for line in lines if arch != "gfx942" else []:
        # a few spill, where more programs then fit on a processor (docs/log.md)
        most = 128 if any(f" {part} " in line for part in ("carry", "flush", "both")) else 0
        most = 32 if " read fp16+fp4/residual " in line else most
        assert int(line.split()[-1]) <= most, line
