"""On a GPU: the kernels against the fp64 reference on the CPU, at real sizes, and what only a GPU can show."""

import pytest
import torch

from replayssm import PAD_SLOT, ConvGeometry, Geometry, ReplayCache, decode_layer, launch_choices, recurrences
from replayssm.bench import kernels as bench
from replayssm.testing import captured, cast, make_inputs, make_weights

pytestmark = pytest.mark.gpu
SIZES = {
    "mamba2": [Geometry(64, 8, 64, 128), Geometry(12, 2, 80, 128), Geometry(8, 1, 64, 256)],
    "gdn": [Geometry(32, 16, 128, 128), Geometry(6, 6, 192, 96)],
    "kda": [Geometry(8, 8, 128, 128)],
}
CASES = [(name, geometry) for name, sizes in SIZES.items() for geometry in sizes]


def caches(name: str, geometry: Geometry, slots: int, **options) -> tuple[ReplayCache, ReplayCache]:
    """The kernels' cache, poisoned, and the fp64 yardstick."""
    conv = ConvGeometry(recurrences.get(name).conv_channels(geometry), 4)
    options = {"layers": 1, "slots": slots, "window": 16, "conv": conv} | options
    ours = ReplayCache(name, geometry, device="cuda", **options)
    for layer in ours.layers:
        for pool in (*layer.checkpoint, *layer.ring, layer.conv):
            pool.fill_(torch.nan if pool.is_floating_point() else 77)
    exact = ReplayCache(name, geometry, **(options | {"format": "fp64", "dtype": torch.float64}))
    for cache in (ours, exact):
        cache.reset(cache.allocate(slots))
    return ours, exact


def moved(x, to):
    return None if x is None else x.to(to)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double().cpu() - b.double()).norm() / b.double().norm())


def check_outputs(y: torch.Tensor, expected: torch.Tensor, slots: torch.Tensor) -> None:
    """Finite, zero for padding, and those of fp64 (or zero, where all are)."""
    assert torch.isfinite(y).all() and not y[(slots == PAD_SLOT).cuda()].any()
    if expected.any():
        assert relative(y, expected) < 1e-5
    else:
        assert not y.any()


@pytest.mark.parametrize("format", ["fp32", "split16", "bf16", "fp16"])
@pytest.mark.parametrize("name, geometry", CASES, ids=str)
def test_kernels_equal_fp64(name: str, geometry: Geometry, format: str, generator: torch.Generator) -> None:
    """40 steps: plain, drafts with random acceptance, padding rows, rows without tokens."""
    ours, exact = caches(name, geometry, 4, format=format, max_tokens=4)
    weights = make_weights(exact, generator)
    on_gpu, in_fp64 = cast(weights, "cuda"), cast(weights, torch.float64)
    state_bound = {"fp32": 2e-6, "split16": 2e-6, "bf16": 2e-2, "fp16": 4e-3}[
        format
    ]  # 16 bit: 2^-8, 2^-11, few flushes
    output_bound = {"fp32": 1e-5, "split16": 8e-3, "bf16": 2e-2, "fp16": 4e-3}[format]
    for i in range(40):
        T = 1 if i % 3 else 4
        slots = torch.tensor([3, PAD_SLOT, 0, 2])
        lengths = torch.randint(0, T + 1, (4,), generator=generator)
        counted = (torch.rand(4, generator=generator) * (lengths + 1)).long()
        inputs = make_inputs(ours, 4, T, generator)
        step = ours.begin(slots.cuda(), lengths.cuda(), tokens=T)
        y = decode_layer(ours, 0, step, *(moved(x, "cuda") for x in inputs), on_gpu)
        ours.commit(step, counted.cuda())
        step = exact.begin(slots, lengths, tokens=T)
        expected = decode_layer(exact, 0, step, *(moved(x, torch.float64) for x in inputs), in_fp64)
        exact.commit(step, counted)
        assert torch.isfinite(y).all() and not y[1].any()
        if expected.any():
            assert relative(y, expected) < output_bound
    live = torch.tensor([0, 2, 3])
    assert relative(ours.materialize(0, live.cuda()), exact.materialize(0, live)) < state_bound


@pytest.mark.parametrize("format", ["fp32", "split16"])
@pytest.mark.parametrize("name, geometry", CASES, ids=str)
def test_checkpoints_updated_at_every_token(
    name: str, geometry: Geometry, format: str, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """24 steps: as at most batches, then at once, a padding row and a row without tokens among them, and back."""
    ours, exact = caches(name, geometry, 3, format=format)
    weights, chosen = make_weights(exact, generator), launch_choices.launch
    on_gpu, in_fp64 = cast(weights, "cuda"), cast(weights, torch.float64)
    for i in range(24):
        few = 5 <= i < 19
        monkeypatch.setattr(launch_choices, "launch", lambda *cell, few=few: chosen(*cell)._replace(at_once=few))
        slots, lengths = torch.tensor([2, PAD_SLOT, 0, 1]), torch.tensor([1, 1, i % 4 != 3, 1])
        inputs = make_inputs(ours, 4, 1, generator)
        step = ours.begin(slots.cuda(), lengths.cuda())
        assert step.at_once == few
        y = decode_layer(ours, 0, step, *(moved(x, "cuda") for x in inputs), on_gpu)
        ours.commit(step)
        step = exact.begin(slots, lengths)
        expected = decode_layer(exact, 0, step, *(moved(x, torch.float64) for x in inputs), in_fp64)
        exact.commit(step)
        check = y.double().cpu()
        assert torch.isfinite(check).all() and not check[1].any()
        assert relative(check, expected) < (1e-5 if few or format == "fp32" else 8e-3)
    live = torch.arange(3)
    assert relative(ours.materialize(0, live.cuda()), exact.materialize(0, live)) < 2e-6


SCALED = {
    "mamba2-h64": ("fp8", "fp4", "fp16+fp4/residual"),
    "qwen3.5-4b": ("int8", "fp16+fp4", "fp8+fp4/residual"),
    "kimi-linear": ("mxfp4", "fp32+fp8", "fp16+fp8/residual"),
    "nano-4b": ("fp8+mxfp4",),
}


@pytest.mark.parametrize("case, format", [(case, format) for case, some in SCALED.items() for format in some])
@pytest.mark.parametrize("rows", [1, 24, 70], ids=["one launch", "two launches", "three launches"])
def test_scaled_formats_equal_torch(case: str, format: str, rows: int) -> None:
    """Real sizes, bf16 activations, two flushes; the same encoding and noise, so only sums differ."""
    errors = bench.check(case, rows, format, bench.Steps(), steps=36)
    assert errors["state_torch"] < max(bench.ROUNDING["state"], bench.SHARE * errors["state"])


# real sizes, and a ratio of heads, a head dim and a key dim that are no powers of two
DRAFTED = [
    ("mamba2", Geometry(64, 8, 64, 128)),
    ("mamba2", Geometry(96, 8, 80, 128)),
    ("gdn", Geometry(32, 16, 128, 128)),
    ("gdn", Geometry(48, 16, 128, 128)),
    ("gdn", Geometry(6, 6, 192, 96)),
    ("kda", Geometry(32, 32, 128, 128)),
]


@pytest.mark.parametrize("tree", [False, True], ids=["chain of 5", "tree of 8"])
@pytest.mark.parametrize("rows", [2, 12], ids=["few rows", "more rows"])
@pytest.mark.parametrize(
    "format, dtype", [("fp32", torch.float32), ("fp32", torch.bfloat16), ("split16", torch.bfloat16)]
)
@pytest.mark.parametrize("name, geometry", DRAFTED, ids=str)
def test_drafts_equal_fp64(
    name: str, geometry: Geometry, format: str, dtype: torch.dtype, rows: int, tree: bool, generator: torch.Generator
) -> None:
    """14 steps, more than two windows: random lengths and acceptance, a padding row, a plain step now and then."""
    T = 8 if tree else 5
    ours, _ = caches(name, geometry, rows, format=format, dtype=dtype, max_tokens=T)
    exact = ReplayCache(
        name, geometry, layers=1, slots=rows, window=16, max_tokens=T, conv=ours.conv, format="fp64", dtype=dtype,
        device="cuda", implementation="reference",
    )  # fmt: skip
    exact.reset(exact.allocate(rows))
    weights = cast(make_weights(exact, generator), "cuda")
    output_bound = {torch.float32: 1e-5, torch.bfloat16: 4e-3 if format == "fp32" else 8e-3}[dtype]
    slots = torch.arange(rows, device="cuda")
    slots[1] = PAD_SLOT
    for i in range(14):
        tokens = 1 if i % 5 == 4 else T
        drafts = tree and tokens > 1
        parent = torch.tensor(bench.TREE).expand(rows, -1).cuda() if drafts else None
        lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
        counts = 1 + (torch.rand(rows, generator=generator) * lengths.clamp(max=5)).long().clamp(max=4)
        path = torch.tensor(bench.DEEPEST).expand(rows, -1)
        counts = torch.minimum(counts, (path < lengths[:, None]).sum(1) if drafts else lengths)
        path = torch.where(torch.arange(5) < counts[:, None], path, -1)
        inputs = make_inputs(ours, rows, tokens, generator)
        answers = []
        for cache in (ours, exact):
            step = cache.begin(slots, lengths.cuda(), tokens=tokens, parent=parent)
            answers.append(decode_layer(cache, 0, step, *(moved(x, "cuda") for x in inputs), weights))
            if drafts:
                cache.commit(step, path=path.cuda())
            else:
                cache.commit(step, counts.cuda())
        y, expected = answers
        assert torch.isfinite(y).all() and not y[1].any()
        assert relative(y, expected.cpu()) < output_bound
    live = slots[slots >= 0]
    state_bound = 2e-6 if dtype == torch.float32 else 2e-4  # an activation may round to its neighbour
    assert relative(ours.materialize(0, live), exact.materialize(0, live).cpu()) < state_bound


@pytest.mark.parametrize("rows", [3, 24])
@pytest.mark.parametrize("name", recurrences.names())
def test_one_captured_step_serves_every_tree(name: str, rows: int, generator: torch.Generator) -> None:
    """Slots, lengths, parents and paths change between replays, through device tensors only."""
    geometry, T, P = SIZES[name][0], 8, 5
    ours, exact = caches(name, geometry, rows, max_tokens=T)
    weights = make_weights(exact, generator)
    on_gpu, in_fp64 = cast(weights, "cuda"), cast(weights, torch.float64)
    slots = torch.full((rows,), PAD_SLOT, device="cuda")
    lengths = torch.zeros(rows, dtype=torch.int64, device="cuda")
    parent, path = (torch.full((rows, n), -1, device="cuda") for n in (T, P))
    inputs = [moved(x, "cuda") for x in make_inputs(ours, rows, T, generator)]

    def run() -> torch.Tensor:
        step = ours.begin(slots, lengths, tokens=T, parent=parent)
        y = decode_layer(ours, 0, step, *inputs, on_gpu)
        ours.commit(step, path=path)
        return y

    outputs = []
    graph = captured(lambda: outputs.append(run()))
    for _ in range(20):
        new, long = torch.randperm(rows, generator=generator), torch.randint(1, T + 1, (rows,), generator=generator)
        new[torch.rand(rows, generator=generator) < 0.2] = PAD_SLOT
        above = torch.stack([torch.randint(-1, max(i, 1), (rows,), generator=generator) for i in range(T)], 1)
        above[:, 0] = -1
        taken = torch.full((rows, P), -1)
        for b in range(rows):  # from a random node up to its root
            node, nodes = int(torch.randint(0, int(long[b]), (), generator=generator)), []
            while node >= 0:
                nodes, node = [node, *nodes], int(above[b, node])
            taken[b, : len(nodes[:P])] = torch.tensor(nodes[:P])
        fresh = make_inputs(ours, rows, T, generator)
        for static, value in zip(
            (slots, lengths, parent, path, *inputs), (new, long, above, taken, *fresh), strict=True
        ):
            if static is not None:
                static.copy_(value)
        graph.replay()
        step = exact.begin(new, long, tokens=T, parent=above)
        expected = decode_layer(exact, 0, step, *(moved(x, torch.float64) for x in fresh), in_fp64)
        exact.commit(step, path=torch.where(new[:, None] >= 0, taken, -1))
        check_outputs(outputs[-1], expected, new)
    everyone = torch.arange(rows)
    assert relative(ours.materialize(0, everyone.cuda()), exact.materialize(0, everyone)) < 2e-6
    assert ours.num_committed.tolist() == exact.num_committed.tolist()


@pytest.mark.parametrize("rows", [2, 24], ids=["one launch", "two launches"])
@pytest.mark.parametrize("last", ["copy", "stream"])
def test_a_captured_layer_may_follow_any_work(last: str, rows: int, generator: torch.Generator) -> None:
    """Launches that begin early await what is in front of them: a copy, another stream's kernel."""
    geometry = SIZES["gdn"][0]
    ours, exact = caches("gdn", geometry, rows)
    weights = make_weights(exact, generator)
    on_gpu, in_fp64 = cast(weights, "cuda"), cast(weights, torch.float64)
    slots, side, outputs = torch.arange(rows, device="cuda"), torch.cuda.Stream(), []
    x, raw_g, raw_w = (moved(part, "cuda") for part in make_inputs(ours, rows, 1, generator))
    new_x, half_w = x.clone(), raw_w / 2

    def on_another_stream() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.add(half_w, half_w, out=raw_w)
        torch.cuda.current_stream().wait_stream(side)

    def run() -> None:
        step = ours.begin(slots)
        work = {"copy": lambda: x.copy_(new_x), "stream": on_another_stream}
        for name in sorted(work, key=lambda name: name == last):
            work[name]()
        outputs.append(decode_layer(ours, 0, step, x, raw_g, raw_w, on_gpu))
        ours.commit(step)

    graph = captured(run)
    ours.reset(slots)
    for _ in range(20):
        fresh = make_inputs(ours, rows, 1, generator)
        new_x.copy_(fresh.x)
        half_w.copy_(fresh.raw_w / 2)
        graph.replay()
        step = exact.begin(slots.cpu())
        inputs = (moved(part, torch.float64) for part in (fresh.x, raw_g.cpu(), fresh.raw_w))
        expected = decode_layer(exact, 0, step, *inputs, in_fp64)
        exact.commit(step)
        assert relative(outputs[-1], expected) < 1e-5


@pytest.mark.parametrize("sizes", [(3, 4), (24, 60), (70, 140)], ids=["one launch", "two", "three"])
@pytest.mark.parametrize("format", ["fp32", "split16"])
@pytest.mark.parametrize("name", recurrences.names())
def test_bitwise_repeatable_and_independent_of_the_batch(
    name: str, format: str, sizes: tuple[int, int], generator: torch.Generator
) -> None:
    geometry = Geometry(32, 4 if name != "kda" else 32, 64, 128)
    inputs, results = None, []
    for run in range(20):
        cache, _ = caches(name, geometry, max(sizes), format=format)
        inputs = inputs or [make_inputs(cache, max(sizes), 1, generator) for _ in range(20)]
        weights = cast(make_weights(cache, torch.Generator().manual_seed(1)), "cuda")
        rows = sizes[run % 2]
        slots = torch.arange(rows, device="cuda")
        for x in inputs:
            step = cache.begin(slots)
            y = decode_layer(cache, 0, step, *(None if part is None else part[:rows].to("cuda") for part in x), weights)
            cache.commit(step)
        results.append((y[2].cpu(), cache.materialize(0, slots[2:3]).cpu()))
    assert all(torch.equal(a, results[0][0]) and torch.equal(b, results[0][1]) for a, b in results)


@pytest.mark.parametrize("name", recurrences.names())
def test_state_error_after_32k_tokens(name: str, generator: torch.Generator) -> None:
    geometry = Geometry(2, 1 if name != "kda" else 2, 64, 64)
    ours, exact = caches(name, geometry, 1, format="split16", max_tokens=16)
    weights = make_weights(exact, generator, A_log=torch.full((2,), -7.0))
    on_gpu, in_fp64 = cast(weights, "cuda"), cast(weights, torch.float64)
    slot = torch.tensor([0])
    errors = []
    for i in range(2048):
        inputs = make_inputs(ours, 1, 16, generator)
        step = ours.begin(slot.cuda(), tokens=16)
        decode_layer(ours, 0, step, *(moved(x, "cuda") for x in inputs), on_gpu)
        ours.commit(step)
        step = exact.begin(slot, tokens=16)
        decode_layer(exact, 0, step, *(moved(x, torch.float64) for x in inputs), in_fp64)
        exact.commit(step)
        if i % 256 == 255:
            errors.append(relative(ours.materialize(0, slot.cuda()), exact.materialize(0, slot)))
    assert max(errors[-2:]) < 2 * max(errors[:2]) + 1e-6, errors
    assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("rows", [4, 24])
@pytest.mark.parametrize("name", recurrences.names())
def test_one_captured_step_serves_every_step(name: str, rows: int, T: int, generator: torch.Generator) -> None:
    """Slots, live rows, lengths and accepted counts change between replays, through device tensors only."""
    geometry, count = SIZES[name][0], 24
    ours, exact = caches(name, geometry, count, max_tokens=T)
    weights = make_weights(exact, generator)
    on_gpu, in_fp64 = cast(weights, "cuda"), cast(weights, torch.float64)
    slots, lengths, counts = (torch.full((rows,), PAD_SLOT, device="cuda"), *torch.zeros(2, rows, device="cuda").long())
    inputs = [moved(x, "cuda") for x in make_inputs(ours, rows, T, generator)]

    def run() -> torch.Tensor:
        step = ours.begin(slots, lengths, tokens=T)
        y = decode_layer(ours, 0, step, *inputs, on_gpu)
        ours.commit(step, counts)
        return y

    outputs, at_once = [], ours.begin(slots, lengths, tokens=T).at_once
    graph = captured(lambda: outputs.append(run()))  # with padding rows only: nothing changes
    for i in range(36):
        live = 1 + i * 7 % rows  # the batch shrinks and grows
        new = torch.full((rows,), PAD_SLOT)
        new[torch.randperm(rows, generator=generator)[:live]] = torch.randperm(count, generator=generator)[:live]
        long = torch.randint(0, T + 1, (rows,), generator=generator)
        counted = (torch.rand(rows, generator=generator) * (long + 1)).long()
        for static, value in ((slots, new), (lengths, long), (counts, counted)):
            static.copy_(value)
        fresh = make_inputs(ours, rows, T, generator)
        for static, value in zip(inputs, fresh, strict=True):
            if static is not None:
                static.copy_(value)
        graph.replay()
        step = exact.begin(new, long, tokens=T)
        expected = decode_layer(exact, 0, step, *(moved(x, torch.float64) for x in fresh), in_fp64)
        exact.commit(step, counted)
        check_outputs(outputs[-1], expected, new)
    everyone = torch.arange(count)
    assert relative(ours.materialize(0, everyone.cuda()), exact.materialize(0, everyone)) < 2e-6
    if not at_once:  # else records are folded sooner
        assert ours.num_committed.tolist() == exact.num_committed.tolist()


@pytest.mark.parametrize("name", recurrences.names())
def test_a_hundred_runs_of_one_step_agree_bitwise(name: str, generator: torch.Generator) -> None:
    """A replayed graph on the same memory, rows that flush among them."""
    ours, _ = caches(name, SIZES[name][0], 64, format="split16", dtype=torch.bfloat16)
    weights = cast(make_weights(ours, generator), "cuda")
    slots = torch.arange(64, device="cuda")
    inputs = [moved(x, "cuda") for x in make_inputs(ours, 64, 1, generator)]
    outputs = []

    def run() -> None:
        step = ours.begin(slots)
        outputs.append(decode_layer(ours, 0, step, *inputs, weights))
        ours.commit(step)

    graph = captured(run)
    for _ in range(20):
        graph.replay()
    pools = [*ours.layers[0].checkpoint, *ours.layers[0].ring, ours.layers[0].conv, ours.cursor_tensor]
    before, first = [pool.clone() for pool in pools], None
    for _ in range(100):
        for pool, kept in zip(pools, before, strict=True):
            pool.copy_(kept)
        graph.replay()
        after = [outputs[-1].clone(), *(pool.clone() for pool in pools)]
        first = first or after
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, after, strict=True))


def test_counts_out_of_range_are_clamped_and_counted(generator: torch.Generator) -> None:
    cache, _ = caches("gdn", Geometry(4, 2, 16, 16), 3, max_tokens=2)
    weights = cast(make_weights(cache, generator), "cuda")
    slots = torch.tensor([2, PAD_SLOT, 0], device="cuda")
    step = cache.begin(slots, torch.tensor([7, 9, 2], device="cuda"), tokens=2)
    y = decode_layer(cache, 0, step, *(moved(x, "cuda") for x in make_inputs(cache, 3, 2, generator)), weights)
    cache.commit(step, torch.tensor([9, 5, -3], device="cuda"))
    assert torch.isfinite(y).all()
    assert cache.num_committed.tolist() == [0, 0, 2]
    assert cache.cursors.clamped.tolist() == [1, 0, 2]
