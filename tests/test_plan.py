"""The planner: its bytes are the cache's own, its times those of measured rows, its memory what others ran out of."""

import json
import sys
from pathlib import Path

import pytest
import torch

from replayssm import ConvGeometry, Geometry, ReplayCache, catalogue, formats, plan, recurrences

ROWS = [json.loads(line) for line in (Path(__file__).parents[1] / "results" / "kernels.jsonl").read_text().splitlines()]
ROWS = [row for row in ROWS if row["tokens"] == 1]  # drafts are not fitted to
MIB, GIB = 2**20, 2**30
H200 = catalogue.gpu("h200")


def layer(name: str) -> plan.Layer:
    return plan.on_device(catalogue.find(name), 1)


# ---- bytes ----


@pytest.mark.parametrize("format", ["fp32", "split16", "bf16"])
@pytest.mark.parametrize("name", ["Nemotron-3-Nano-4B", "Qwen3.5-27B", "Kimi-Linear-48B-A3B"])
@pytest.mark.parametrize("window", [4, 16])
def test_bytes_are_those_of_the_cache(name: str, format: str, window: int) -> None:
    """On the meta device, where the implementation is the GPU's and nothing is allocated."""
    pytest.importorskip("triton")
    one = layer(name)
    options = {"layers": 1, "slots": 1, "window": window, "format": format, "dtype": torch.bfloat16, "device": "meta"}
    conv = ConvGeometry(one.channels, one.conv_width)
    plain = ReplayCache(one.recurrence, one.geometry, conv=conv, **options)
    moved, traffic = plan.replayed_bytes(one, format, window), plain.bytes_per_token()
    assert moved.read == pytest.approx(traffic.read)
    assert moved.written == pytest.approx(traffic.written)
    for drafts in (0, 4):
        cache = ReplayCache(one.recurrence, one.geometry, conv=conv, max_tokens=1 + drafts, **options)
        held = cache.nbytes.total - cache.nbytes.cursors
        assert plan.replayed_memory(one, format, window, drafts) == pytest.approx(held)


def test_a_record_is_a_small_part_of_a_state() -> None:
    """What docs/method.md says, of all known models."""
    shares = []
    for model in catalogue.models():
        one = plan.on_device(model, 1)
        shares.append(one.record / (4 * one.elements))
    assert (round(100 * min(shares), 1), round(100 * max(shares), 1)) == (0.2, 1.6)


def test_bytes_are_those_of_measured_rows() -> None:
    for row in plan.kernel_rows(ROWS):
        sizes = dict(row["geometry"])
        rows = sizes.pop("B")
        one = plan.Layer(row["recurrence"], Geometry(**sizes), 4)
        moved = plan.replayed_bytes(one, row["format"], row["window"], rows=rows)
        assert rows * moved.total == pytest.approx(row["bytes"])


def test_drafts_share_one_read_and_write_no_states() -> None:
    one = layer("Qwen3.5-4B")
    plain, drafted = (plan.replayed_bytes(one, "fp32", 16, tokens, tokens) for tokens in (1, 5))
    assert drafted.checkpoint == plain.checkpoint
    assert plan.stock_bytes(one, 4, 5).flush_written == 5 * plan.stock_bytes(one, 4, 1).flush_written


@pytest.mark.parametrize(("window", "tokens"), [(16, 1), (16, 5), (32, 5), (16, 8), (3, 5)])
def test_flushes_come_as_often_as_cursors_make_them(window: int, tokens: int, generator: torch.Generator) -> None:
    """1 to T tokens accepted at random, in the cache's own cursor rules, against the planner's averages."""
    cache = ReplayCache("mamba2", Geometry(1, 1, 2, 2), layers=1, slots=64, window=window, max_tokens=tokens)
    slots = cache.allocate(64)
    cache.reset(slots)
    steps, folded, flushes, seen = 300, 0, 0, 0.0
    for i in range(steps):
        before = cache.num_committed.clone()
        step = cache.begin(slots, tokens=tokens)
        after = cache.num_committed.clone()
        cache.commit(step, torch.randint(1, tokens + 1, (64,), generator=generator))
        if i >= 50:
            folded += int((before - after).sum())
            flushes += int((after < before).sum())
            seen += float((after + tokens).float().mean())
    moved = plan.replayed_bytes(plan.Layer("mamba2", Geometry(1, 1, 2, 2), 4), "fp32", window, tokens, (1 + tokens) / 2)
    assert folded / flushes == pytest.approx(moved.folded, rel=0.08)
    assert flushes / 64 / (steps - 50) == pytest.approx(moved.due, rel=0.08)
    per_record = plan.Layer("mamba2", Geometry(1, 1, 2, 2), 4).record
    assert seen / (steps - 50) == pytest.approx(moved.ring_read / per_record, rel=0.08)


# ---- times ----


def test_kernel_times_are_those_of_the_measured_rows() -> None:
    """After results/kernels.jsonl was measured anew: replayssm plan --fit results/kernels.jsonl."""
    pytest.importorskip("scipy")
    kept = catalogue.data("kernel_times.json")
    fitted = plan.fit(ROWS, kept["command"])
    assert kept["gpus"].keys() == fitted["gpus"].keys()
    for row in plan.kernel_rows(ROWS):
        device = next(gpu for gpu in catalogue.gpus().values() if gpu.device == row["gpu"])
        mine, again = (plan.predicted(plan.times(device, table), row) for table in (kept, fitted))
        assert mine == pytest.approx(again, rel=0.02), "kernel_times.json is older than the rows: run the command above"


@pytest.mark.parametrize(
    "row",
    [row for row in plan.kernel_rows(ROWS) if row["geometry"]["B"] >= 32],
    ids=lambda row: f"{row['case']}-{row['geometry']['B']}-{row['format']}",
)
def test_kernels_are_predicted_within_15_percent(row: dict) -> None:
    device = next(gpu for gpu in catalogue.gpus().values() if gpu.device == row["gpu"])
    replayed, stock = plan.predicted(plan.times(device), row)
    assert replayed == pytest.approx(row["us"], rel=0.15)
    assert stock == pytest.approx(row["baseline_us"], rel=0.15)


def test_times_follow_the_rows() -> None:
    """Kernels that take 0.7 of the time beyond their bytes' floor are predicted so: nothing is typed in."""
    pytest.importorskip("scipy")

    def floor(row: dict) -> float:
        return row["bytes"] / row["ceilings"]["read_gbps"] / 1e3

    faster = [row | {"us": floor(row) + 0.7 * (row["us"] - floor(row))} for row in ROWS]
    of = plan.times(H200, plan.fit(faster, "test"))
    for row in plan.kernel_rows(faster):
        if row["gpu"] == H200.device and row["geometry"]["B"] >= 32:
            assert plan.predicted(of, row)[0] == pytest.approx(row["us"], rel=0.15)


def test_a_format_that_a_recurrence_has_no_rows_of_costs_what_it_costs_the_others() -> None:
    of = plan.times(H200)
    layer = plan.Layer("kda", plan.Geometry(32, 32, 128, 128), 4)
    assert "fp8" not in of.replayed["kda"].decode
    others = [c.decode["fp8"] for c in of.replayed.values() if "fp8" in c.decode]
    moved = plan.replayed_bytes(layer, "fp8", 16)
    free = of._replace(replayed=of.replayed | {"kda": of.replayed["kda"]._replace(decode={"fp8": 0.0})})
    more = plan.replayed_us(of, layer, 256, "fp8", moved) - plan.replayed_us(free, layer, 256, "fp8", moved)
    assert more == pytest.approx(256 * layer.elements / 1e6 * sum(others) / len(others))


@pytest.mark.parametrize("case", sorted({row["case"] for row in plan.kernel_rows(ROWS)}))
def test_a_geometry_without_rows_is_predicted_within_20_percent(case: str) -> None:
    """Constants fitted to the other geometries of a recurrence: what a plan for any other model rests on.

    A format with a scale can be asked only where another geometry was measured with the same kernels.
    """
    pytest.importorskip("scipy")
    rows = [row for row in plan.kernel_rows(ROWS) if row["gpu"] == H200.device]
    mine = [row for row in rows if row["case"] == case]
    others = [row for row in rows if row["case"] != case]
    if mine[0]["recurrence"] not in {row["recurrence"] for row in others}:
        with pytest.raises(ValueError, match="no measured times for"):
            plan.predicted(plan.times(H200, plan.fit(others, "test")), mine[0])
        return
    of = plan.times(H200, plan.fit(others, "test"))
    for row in mine:
        if row["geometry"]["B"] >= 32:
            replayed, stock = plan.predicted(of, row)
            scaled = formats.get(row["format"]).reads.parts is not None
            alike = (row["format"], row["commit"]) in {(other["format"], other["commit"]) for other in others}
            assert (scaled and not alike) or replayed == pytest.approx(row["us"], rel=0.2)
            assert stock == pytest.approx(row["baseline_us"], rel=0.2)


def test_a_gpu_without_rows_takes_bytes_at_its_own_speed() -> None:
    h200, b200 = plan.times(H200), plan.times(catalogue.gpu("b200"))
    assert b200.read / h200.read == pytest.approx(8000 / 4800)
    assert "NOT measured" in b200.origin and "NVIDIA H200" in b200.origin
    one, rows = layer("Qwen3.5-4B"), 256
    moved = plan.replayed_bytes(one, "fp32", 16)
    fast, slow = (plan.replayed_us(of, one, rows, "fp32", moved) for of in (b200, h200))
    assert 0.6 < fast / slow < 1


def test_experts_are_read_as_far_as_a_batch_takes_them() -> None:
    """Super: 120e9 parameters, 12e9 per token, 22 of 512 experts."""
    model = catalogue.find("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4")
    one, many = (plan.rest_ms(model, H200, 4400, rows, 1, 0, 1, 16)[0] for rows in (1, 512))
    assert one == pytest.approx(12e9 * 2 / 4400e6, rel=1e-6)
    assert many == pytest.approx(120e9 * 2 / 4400e6, rel=1e-3)


def test_weights_that_are_there_are_read_as_they_are() -> None:
    """A quantised checkpoint beside its config, whatever --weight-bits says."""
    model = catalogue.find("Qwen3.5-27B")._replace(weight_bytes=15_000_000_000)
    assert plan.rest_ms(model, H200, 4400, 1, 1, 0, 1, 16)[0] == pytest.approx(15e9 / 4400e6)


def test_every_draft_walks_the_ring() -> None:
    one = layer("Qwen3.5-4B")
    moved = plan.replayed_bytes(one, "fp32", 16, 5, 3.5)
    (_, _, single, *_), (_, _, five, *_) = (plan._beyond(one, 1, moved, tokens) for tokens in (1, 5))
    assert five - single == pytest.approx(4 * moved.ring_read / 1e6)


# ---- memory: the planner cases ----


def test_27b_with_drafts_runs_all_requests_where_state_copies_let_three_run() -> None:
    """Memory for 3 requests with 1 + 4 states each holds 8 replayed ones."""
    one = layer("Qwen3.5-27B")
    stock, ours = plan.stock_memory(one, drafts=4), plan.replayed_memory(one, "fp32", 16, drafts=4)
    budget = 3.9 * stock
    assert budget // stock == 3
    assert budget // ours >= 8


def test_27b_with_eight_draft_states_for_32_rows_does_not_start() -> None:
    """151.5 MiB a state (144 of it fp32 state, 7.5 convolution inputs), 37.9 GiB in all."""
    model, one = catalogue.find("Qwen3.5-27B"), layer("Qwen3.5-27B")
    state = model.layers * plan.stock_memory(one, drafts=0, conv_places=8)
    assert state / MIB == pytest.approx(151.5)
    assert 8 * 32 * state / GIB == pytest.approx(37.9, abs=0.05)
    made = plan.make(model, catalogue.gpu("h100"), plan.Options(batches=(32,), drafts=(7,), bits=8, context=2048))
    (case, *_) = made.cases
    assert (case.stock_fits, case.fits) == (False, True)


def test_kimi_k3_with_seven_drafts_on_eight_gpus() -> None:
    """8 slots of 57.81 MiB per request and GPU, against one."""
    model = catalogue.find("Kimi-K3")
    one = plan.on_device(model, 8)
    assert one.geometry == Geometry(12, 12, 128, 128)
    stock = model.layers * plan.stock_memory(one, drafts=7)
    assert stock / 8 / MIB == pytest.approx(57.81, abs=0.01)
    ours = model.layers * plan.replayed_memory(one, "fp32", 16, drafts=7)
    assert stock / ours > 5


# ---- what a plan says ----


def test_a_plan_says_from_which_batch_on_it_pays() -> None:
    made = plan.make(catalogue.find("Qwen3.5-4B"), H200, plan.Options(formats=("fp32", "split16")))
    one, of = layer("Qwen3.5-4B"), plan.times(H200)
    for pay in made.pays:
        moved = plan.replayed_bytes(one, pay.format, 16)

        def speedup(rows: int, moved: plan.Moved = moved, format: str = pay.format) -> float:
            stock = plan.stock_us(of, one, rows, plan.stock_bytes(one))
            return stock / plan.replayed_us(of, one, rows, format, moved)

        assert pay.from_batch is not None
        assert all(speedup(rows) > 1 for rows in range(pay.from_batch, plan.MOST_ROWS + 1))
        assert pay.from_batch == 1 or speedup(pay.from_batch - 1) <= 1
        assert pay.slower_from is None or speedup(pay.slower_from) <= 1


def test_a_plan_advises_the_fastest_window_and_format() -> None:
    made = plan.make(catalogue.find("Nemotron-3-Nano-4B"), H200, plan.Options(batches=(256,)))
    (best,) = made.advice
    assert best.kernel_speedup >= max(case.kernel_speedup for case in made.cases)
    assert best.exact_format in ("fp32", "split16")


def test_a_step_is_the_rest_and_the_layers() -> None:
    model = catalogue.find("Nemotron-3-Nano-4B")
    (case,) = plan.make(model, H200, plan.Options(batches=(256,), formats=("fp32",), rest=5.6)).cases
    assert case.stock_step_ms == pytest.approx(5.6 + 21 * case.stock_kernel_us / 1e3)
    assert case.step_speedup == case.step_speedup_low
    assert case.step_speedup == pytest.approx(case.stock_step_ms / case.step_ms)
    (case,) = plan.make(model, H200, plan.Options(batches=(256,), formats=("fp32",))).cases
    assert 1 < case.step_speedup_low < case.step_speedup < case.kernel_speedup


def test_more_drafts_than_any_window_and_no_rest() -> None:
    made = plan.make(catalogue.find("Qwen3.5-4B"), H200, plan.Options(drafts=(64,), batches=(8,), window=8, rest=0.0))
    assert made.advice[0].window == 8 and made.cases[0].step_speedup == pytest.approx(made.cases[0].kernel_speedup)


def test_every_known_model_has_a_plan() -> None:
    known = catalogue.models()
    assert len(known) >= 35 and {model.recurrence for model in known} == set(recurrences.names())
    for model in known:
        assert model.source and model.confidence
        made = plan.make(model, H200, plan.Options(batches=(64,), formats=("fp32",)))
        assert model.confidence in made.assumptions[0]
        if model.size is None:
            assert made.cases[0].step_speedup is None
            assert any("size is unknown" in line for line in made.assumptions)
    json.dumps(made.document())


# ---- models by folder ----


@pytest.mark.parametrize("with_transformers", [True, False])
@pytest.mark.parametrize(
    ("folder", "geometry", "layers"),
    [("nemotron-h-gsm", Geometry(4, 2, 64, 128), 6), ("qwen3.5-gsm", Geometry(4, 2, 64, 64), 6)],
)
def test_a_folder_gives_its_model(folder, geometry, layers, with_transformers, monkeypatch) -> None:
    if not with_transformers:
        monkeypatch.setitem(sys.modules, "transformers", None)
    path = Path(__file__).parents[1] / "models" / folder
    model = catalogue.find(str(path))
    assert (model.geometry, model.layers, model.conv_width) == (geometry, layers, 4)
    assert model.weight_bytes == (path / "model.safetensors").stat().st_size
    assert model.kv_bytes == 2 * 2 * 2 * 64 * 2  # attention layers, keys and values, heads, head dim, bytes


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Nemotron-3-Super-120B-A12B", (120e9, 12e9)),
        ("Qwen3.5-0.8B", (0.8e9, 0.8e9)),
        ("Granite-4.0-H-350M", (350e6, 350e6)),
        ("Granite-4.0-H-Tiny", None),
        ("Kimi-K3", None),
        ("Mamba2-2.7b", (2.7e9, 2.7e9)),
    ],
)
def test_a_name_says_the_size(name: str, size: tuple[float, float] | None) -> None:
    assert catalogue.parameters(name) == size


# ---- refusals ----


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: catalogue.find("Qwen3.5-5B"), "no model 'Qwen3.5-5B': --model takes a name.*Near: Qwen3.5-"),
        (lambda: catalogue.gpu("h300"), "unknown GPU 'h300': choose one of a100, h100"),
        (
            lambda: plan.on_device(catalogue.find("Qwen3.5-4B"), 3),
            "--tp must divide the 32 value heads of Qwen3.5-4B; got 3",
        ),
        (
            lambda: plan.make(catalogue.find("Qwen3.5-4B"), H200, plan.Options(batches=(0,))),
            "--batch takes whole numbers, 1 or more; got 0",
        ),
        (
            lambda: plan.make(catalogue.find("Qwen3.5-4B"), H200, plan.Options(formats=("fp5",))),
            "unknown format 'fp5': choose one of",
        ),
        (
            lambda: plan.make(catalogue.find("Qwen3.5-4B"), H200, plan.Options(accepted=0.5, drafts=(4,))),
            "--accepted counts the committed tokens of a step, 1 or more; got 0.5",
        ),
        (lambda: plan.fit([], "test"), "no rows to fit"),
    ],
)
def test_refusals_teach(call, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


def test_configs_that_say_too_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="holds no config.json: --model takes a name of `replayssm plan --list`"):
        catalogue.find(str(tmp_path))
    config = tmp_path / "config.json"
    config.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        catalogue.find(str(tmp_path))
    config.write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="unknown model_type in .* 'llama': choose one of nemotron_h, mamba2"):
        catalogue.find(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)  # which knows the class's defaults
    config.write_text('{"model_type": "olmo_hybrid", "linear_num_value_heads": null, "num_hidden_layers": 2}')
    with pytest.raises(ValueError, match="lacks .*which a plan for olmo_hybrid needs"):
        catalogue.find(str(config))
