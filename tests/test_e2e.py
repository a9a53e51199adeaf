"""Whole models in vLLM, up to the engine: options, jobs, configs without weights, rows, tables, what is refused.

The engine's process is played by a small script that reads the same job and writes the same kind of document.
"""

import json
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner  # noqa: E402

from replayssm import catalogue, report  # noqa: E402
from replayssm.bench import dummy, e2e, vllm_check, vllm_process  # noqa: E402
from replayssm.bench.vllm_process import Job  # noqa: E402
from replayssm.cli import app as cli  # noqa: E402

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks" / "replayssm"
NANO, QWEN = "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16", "Qwen/Qwen3.5-4B"
SUPER = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"
PUBLISHED = [
    ("e2e_decode_speedup", "--model-id", NANO),
    ("e2e_decode_speedup", "--model-id", QWEN),
    ("e2e_spec_decode_throughput", "--batch-size", "512", "--model-id", SUPER),
]

# Plays the engine: steps take 2 ms (stock) or 1 ms, a state of 8 or 3 MB, one request of three does not fit.
PLAYED = """
import json, sys
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_text())
print("engine of", job["mode"])
if job["format"] == "bf16":
    sys.exit("RuntimeError: the plugin refuses bf16.")
stock = job["mode"] != "replay"
drafts = job["drafts"]
made = dict(
    gpu="a GPU", dtype=job["engine"].get("dtype", "bfloat16"), versions=dict(vllm="0.33.0"),
    runner="v1" if job["mode"] == "vllm-replay" else "v2",
    async_scheduling=True, graphs="FULL_DECODE_ONLY", compiled=job["compiled"], replayed_layers=0 if stock else 21,
    start_seconds=1.0, launches={"1": dict(BLOCK_SIZE_M=8, num_warps=2)} if job["kernel"] and stock else {},
    state_bytes_per_request=(8e6 if stock else 3e6) * (1 + drafts * stock), kv_bytes_per_token=1000.0,
    tokens_per_request=500, requests_that_fit=2 if stock else 300, num_gpu_blocks=7, rows=[],
)
if job["task"] == "decode":
    for batch in job["batches"]:
        rows = min(batch, made["requests_that_fit"])
        taken = job["steps"] * (2e-3 if stock else 1e-3)
        tokens = job["steps"] * rows * (2 if drafts else 1)
        made["rows"].append(dict(
            batch=batch, rows=rows, steps=job["steps"], seconds=[3 * taken, taken, taken], tokens=[tokens] * 3,
            graph_seconds=[taken / 2] * 3, steps_with_rows_missing=0,
            rows_past_their_end=None if job["dummy"] else 0.25, prompt_tokens=40.0,
        ))
else:
    off = dict(fp8=0.5, fp16=0.1, fp32=1e-3).get(job["format"], 0.0) if not stock else 0.0
    def told(way):
        off_here = off + dict(alone=1e-4, prefill=1e-3).get(way, 0)
        tokens = [5] * job["steps"]
        if drafts:
            tokens[3] = 6
        at = [[[5, -0.1 - off_here * i / job["steps"]], [6, -3.0], [7 + i, -9.0]] for i in range(job["steps"])]
        return [dict(tokens=tokens, logprobs=at)] * 4
    made |= dict(sequences=[[[1, 2], [5] * job["steps"]]] * 4, ways={way: told(way) for way in job["ways"]})
Path(sys.argv[2]).write_text(json.dumps(made))
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """vLLM is there, played by a script; the folder in which it is."""
    script = tmp_path / "played.py"
    script.write_text(PLAYED)
    monkeypatch.setattr(vllm_process, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(e2e, "needs_vllm", lambda: None)
    monkeypatch.setattr(vllm_check, "needs_vllm", lambda: None)
    monkeypatch.setattr(vllm_check.out, "width", 120)  # whatever COLUMNS was when it was made
    return tmp_path


def bench(command, *arguments, code=0):
    import typer

    app = typer.Typer()
    app.command()(command)
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result


def refused(command, *arguments) -> str:
    (line,) = bench(command, *arguments, code=2).stderr.strip().splitlines()
    assert line.startswith("error: ") and line.endswith(".")
    return line


# --- the scripts ------------------------------------------------------------------------------------------------------


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"COLUMNS": "80", "PATH": "", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py"), *arguments], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_help_shows_whole_option_names_at_80_columns(name):
    text = script(name, "--help").stdout
    assert all(len(line) <= 80 for line in text.splitlines()) and "…" not in text
    for option in (
        "--model-id", "--modes", "--format", "--batch-size", "--window", "--repeats", "--dummy-weights", "--layers",
        "--acceptance-length", "--runner", "--eager", "--no-compile", "--json", "--plot", "--steps", "--engine",
    ):  # fmt: skip
        assert f"  {option} " in text or f"/ {option} " in text, option


@pytest.mark.skipif(find_spec("vllm") is not None, reason="would run where vLLM is")
@pytest.mark.parametrize("command", PUBLISHED, ids=lambda command: command[-1])
def test_published_commands_get_as_far_as_vllm(command):
    result = script(*command)
    assert result.returncode == 2
    assert result.stderr.strip().endswith("this needs vllm, and a GPU that it runs on: pip install 'replayssm[vllm]'.")


# --- sizes without weights --------------------------------------------------------------------------------------------


def known_sizes():
    for model in catalogue.models():
        try:
            yield model, dummy.config(model.name)[0]
        except ValueError:
            continue


def test_configs_of_the_catalogue_have_its_sizes(tmp_path):
    found = 0
    for model, sizes in known_sizes():
        (tmp_path / "config.json").write_text(json.dumps(sizes))
        back = catalogue.from_config(tmp_path)
        for name in ("recurrence", "geometry", "layers", "conv_width", "kv_bytes"):
            assert getattr(back, name) == getattr(model, name), (model.name, name)
        found += 1
    assert found >= 12


def test_configs_of_the_catalogue_say_what_was_made_up():
    sizes, source = dummy.config(SUPER)
    assert "order of layers made up" in source and "latent size 1024" in source
    assert Counter(sizes["hybrid_override_pattern"]) == {"M": 40, "E": 40, "*": 8}
    assert sizes["moe_latent_size"] == 1024 and sizes["num_nextn_predict_layers"] == 1
    experts = 40 * 512 * 2 * 2688 * sizes["moe_latent_size"]
    assert 0.9 < experts / 120e9 < 1
    assert dummy.config("Nemotron-3-Nano-30B-A3B")[0]["moe_latent_size"] is None


def test_the_known_config_and_the_catalogue_agree_where_both_speak():
    sizes, source = dummy.config(NANO)
    assert sizes["hybrid_override_pattern"] == "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-" and "made up" not in source


@pytest.mark.parametrize("layers", [3, 4, 11, 41, 42])
def test_a_cut_keeps_all_kinds_in_proportion_and_in_order(layers):
    whole = dummy.config(NANO)[0]["hybrid_override_pattern"]
    sizes, source = dummy.config(NANO, layers)
    pattern = sizes["hybrid_override_pattern"]
    assert len(pattern) == sizes["num_hidden_layers"] == layers and f"cut to {layers} of 42 layers" in source
    rest = iter(whole)
    assert all(kind in rest for kind in pattern), "not a part of the whole in its order"
    for kind, count in Counter(whole).items():
        assert abs(Counter(pattern)[kind] - max(1, count * layers / 42)) < 1.5


def test_a_cut_of_a_folder_is_made_where_its_layers_are_listed(tmp_path):
    sizes, source = dummy.config(str(ROOT / "models" / "qwen3.5-gsm"), 4)
    assert Counter(sizes["layer_types"]) == {"linear_attention": 3, "full_attention": 1}
    assert source == "config.json of qwen3.5-gsm; cut to 4 of 8 layers"
    nested = {"model_type": "qwen3_5", "vision_config": {"depth": 2}, "text_config": sizes}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    cut = dummy.config(str(tmp_path / "config.json"), 2)[0]
    assert cut["vision_config"] == {"depth": 2} and len(cut["text_config"]["layer_types"]) == 2
    assert json.loads((ROOT / "models" / "qwen3.5-gsm" / "config.json").read_text())["num_hidden_layers"] == 8


# --- jobs -------------------------------------------------------------------------------------------------------------


def job(mode="stock", **more) -> Job:
    return Job("decode", "folder", mode, batches=(1, 256), **more)


def test_modes_differ_only_in_what_makes_them():
    stock, ours = (vllm_process.engine_arguments(job(mode)) for mode in ("stock", "replay"))
    theirs = vllm_process.engine_arguments(job("vllm-replay"))
    assert ours == stock | {"additional_config": {"replayssm": {"format": "fp32", "window": 16}}}
    assert theirs == stock | {"use_replayssm": True, "replayssm_buffer_len": 16}
    assert stock["enable_prefix_caching"] is False and stock["mamba_ssm_cache_dtype"] == "float32"


def test_graphs_hold_every_batch_and_drafts_multiply_their_tokens():
    sizes = vllm_process.engine_arguments(job(drafts=4, method="mtp"))["compilation_config"]["cudagraph_capture_sizes"]
    assert {5, 256 * 5} <= set(sizes) and all(size % 5 == 0 for size in sizes)
    fast = vllm_process.engine_arguments(job(compiled=False))["compilation_config"]
    assert fast["mode"] == 0 and fast["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert vllm_process.engine_arguments(job(eager=True))["enforce_eager"] is True


def test_drafts_reach_vllm():
    ngram = vllm_process.engine_arguments(job(drafts=4, method="ngram", acceptance=2.5))["speculative_config"]
    assert ngram == {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5,
    }  # fmt: skip
    assert vllm_process.engine_arguments(job("vllm-replay", drafts=4, method="mtp"))["mamba_backend"] == "flashinfer"


def test_requests_are_long_enough_for_all_steps():
    plain, drafted = job(steps=100, repeats=3), job(steps=100, repeats=3, drafts=4, acceptance=2.5)
    assert vllm_process.new_tokens(plain) >= 300 + 3 * 16
    assert vllm_process.new_tokens(drafted) == 3 * vllm_process.new_tokens(plain)
    longest = vllm_process.engine_arguments(plain)["max_model_len"]
    assert longest >= vllm_process.new_tokens(plain) + vllm_process.RANDOM_TOKENS


def test_what_the_user_says_of_the_engine_wins():
    assert vllm_process.engine_arguments(job(engine={"max_model_len": 64}))["max_model_len"] == 64


def test_runners_and_launches_reach_the_process(monkeypatch):
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    found = vllm_process.environment(job("vllm-replay", runner="v2", tuned="launches", drafts=4))
    assert found["VLLM_USE_V2_MODEL_RUNNER"] == "0"  # it has no other
    assert found["VLLM_TUNED_CONFIG_FOLDER"] == str(Path("launches") / "tokens-5")
    assert found["VLLM_USE_FLASHINFER_SAMPLER"] == "1" and found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert vllm_process.environment(job(runner="v2"))["VLLM_USE_V2_MODEL_RUNNER"] == "1"


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_say_all_that_a_figure_needs(engine):
    result = bench(
        e2e.decode, "--model-id", NANO, "--layers", 11, "--batch-size", "1,3", "--modes", "replay,vllm-replay,stock",
        "--steps", 10, "--json", engine / "rows.json", "--plot", engine / "rows.png", "--out", engine / "e2e.jsonl",
        "--commit", "abc", "--logs", engine / "logs",
    )  # fmt: skip
    rows = [json.loads(line) for line in (engine / "e2e.jsonl").read_text().splitlines()]
    assert [(row["mode"], row["format"], row["batch"]) for row in rows] == [
        ("stock", None, 1), ("stock", None, 3), ("replay", "fp32", 1), ("replay", "fp32", 3),
        ("replay", "split16", 1), ("replay", "split16", 3), ("vllm-replay", None, 1), ("vllm-replay", None, 3),
    ]  # fmt: skip
    for row in rows:
        assert row["bench"] == "e2e_decode" and row["weights"] == "random" and row["cut_to_layers"] == 11
        assert row["commit"] == "abc" and row["versions"]["vllm"] == "0.33.0" and row["prompts"] == "random token ids"
    stock, crowded, ours, room, *_ = rows
    assert (stock["step_ms"], ours["step_ms"]) == (2.0, 1.0) and ours["speedup"] == 2.0 and stock["speedup"] == 1.0
    assert (crowded["rows"], room["rows"]) == (2, 3) and room["speedup"] == 3.0  # of three rows, two fit in stock
    assert stock["stock_launch"] == {"BLOCK_SIZE_M": 8, "num_warps": 2} and ours["replayed_layers"] == 21
    for words in ("A CUT MODEL", "cut to 11 of 42 layers", "3 (2)", "2.00x", "Runners differ", "vllm-replay, float32"):
        assert words in result.output, words
    document = json.loads((engine / "rows.json").read_text())
    assert document["schema"] == e2e.SCHEMA and len(document["rows"]) == 8
    assert (engine / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert (engine / "logs" / "replay-split16.log").read_text() == "engine of replay\n"


def test_drafts_are_counted_per_row_and_forced_ones_are_marked(engine):
    result = bench(
        e2e.speculative, "--model-id", SUPER, "--dummy-weights", "--acceptance-length", 2, "--batch-size", 2,
        "--modes", "plain,stock,replay", "--format", "fp32", "--out", engine / "e2e.jsonl",
    )  # fmt: skip
    stock, ours, plain = (json.loads(line) for line in (engine / "e2e.jsonl").read_text().splitlines())
    assert {row["bench"] for row in (stock, ours, plain)} == {"e2e_spec"}
    assert stock["acceptance_length"] == ours["acceptance_length"] == 2.0 and plain["acceptance_length"] is None
    assert stock["draft_method"] == "mtp" and stock["drafts"] == 4 and plain["drafts"] == 0
    assert plain["speedup"] == 0.5 and "FORCED to accept 2 tokens a step" in result.output
    assert stock["state_bytes_per_request"] == 5 * plain["state_bytes_per_request"]


def test_real_weights_get_text_and_say_how_many_rows_had_ended(engine):
    result = bench(
        e2e.decode, "--model-id", ROOT / "models" / "qwen3.5-gsm", "--batch-size", 2, "--prompts", "gsm_symbolic",
        "--out", engine / "e2e.jsonl",
    )  # fmt: skip
    row = json.loads((engine / "e2e.jsonl").read_text().splitlines()[0])
    assert row["prompts"] == "gsm_symbolic" and row["weights"] == "the model's own" and row["family"] == "qwen3_5_text"
    assert "Up to 25% of the rows had ended their text" in result.output


def test_a_mode_that_fails_is_said_and_the_others_are_kept(engine):
    result = bench(
        e2e.decode,
        "--model-id",
        QWEN,
        "--dummy-weights",
        "--format",
        "fp32,bf16",
        "--out",
        engine / "e2e.jsonl",
        code=1,
    )
    assert "replay ended with code 1: RuntimeError: the plugin refuses bf16." in result.stderr
    rows = [json.loads(line) for line in (engine / "e2e.jsonl").read_text().splitlines()]
    assert {(row["mode"], row["format"]) for row in rows} == {("stock", None), ("replay", "fp32")}


def test_an_engine_that_hangs_is_ended(tmp_path, monkeypatch):
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(vllm_process, "COMMAND", (sys.executable, str(slow)))
    with pytest.raises(vllm_process.Failed, match="stock took more than 0.5 s and was ended"):
        vllm_process.run(job(), tmp_path / "log", 0.5)


def test_an_engine_starts_while_the_one_before_has_the_gpu(engine):
    """Each tells when it was there, had its turn, and ended: the next one is there before, no two turns overlap."""
    waits = f"""
import time
from pathlib import Path
from replayssm.bench.vllm_process import Job, await_turn
there, turns = Path({str(engine / "there")!r}), Path({str(engine / "turns")!r})
with there.open("a") as told:
    told.write("x")
times = [time.time()]
await_turn(Job(**job))
times.append(time.time())
with turns.open("a") as told:
    told.write("x")
while len(there.read_text()) < min(3, len(turns.read_text()) + 1) and time.time() < times[1] + 60:
    time.sleep(0.05)  # with the turn, until the next one is there
"""
    tells = f"""
with open({str(engine / "times")!r}, "a") as told:
    print(*times, time.time(), file=told)
"""
    (engine / "played.py").write_text(PLAYED.replace("stock =", waits + "stock =", 1) + tells)
    bench(e2e.decode, "--model-id", NANO, "--dummy-weights", "--batch-size", 1, "--out", engine / "e2e.jsonl")
    first, second, third = (tuple(map(float, line.split())) for line in (engine / "times").read_text().splitlines())
    assert second[0] < first[2] <= second[1] and third[0] < second[2] <= third[1]


def test_an_engine_whose_starter_is_gone_ends(tmp_path, monkeypatch):
    folder = tmp_path / "turns"
    folder.mkdir()
    monkeypatch.setattr(vllm_process.time, "sleep", lambda seconds: shutil.rmtree(folder))
    with pytest.raises(RuntimeError, match="who started this process has ended"):
        vllm_process.await_turn(job(turn=str(folder / "turn")))


def test_the_report_shows_the_rows(engine):
    bench(e2e.decode, "--model-id", NANO, "--dummy-weights", "--batch-size", 1, "--out", engine / "rows" / "e2e.jsonl")
    page = report.page(engine / "rows")
    assert "e2e_decode" in page and "vllm 0.33.0" in page


# --- steps of an engine -----------------------------------------------------------------------------------------------


class Engine:
    """As vLLM's with asynchronous scheduling: a call queues a step and tells what came of the one before.

    A request is prefilled in one step, which gives its first token, and gets `per_step` tokens in each after that.
    """

    def __init__(self, per_step: int = 1, room: int = 99) -> None:
        self.per_step, self.room = per_step, room
        self.requests: dict[str, list[int]] = {}  # tokens so far, tokens wanted
        self.most = self.mixed = 0
        self.queued: list[list[SimpleNamespace]] | None = None

    def add_request(self, name, prompt, parameters):
        assert name not in self.requests and prompt["prompt_token_ids"]
        self.requests[name] = [0, parameters.most, parameters.forced]

    def abort_request(self, names):
        for name in names:
            self.requests.pop(name, None)

    @property
    def engine_core(self):
        return self

    def get_output(self):
        """What the core gives: new tokens by row."""
        told = self.step()
        rows = [SimpleNamespace(request_id=row.request_id, new_token_ids=row.outputs[0].token_ids) for row in told]
        return SimpleNamespace(outputs=rows)

    def step(self):
        made = []
        running = list(self.requests)[: self.room]
        self.most = max(self.most, len(running))
        self.mixed += len({self.requests[name][0] > 0 for name in running}) == 2
        for name in running:
            request = self.requests[name]
            n = min(self.per_step if request[0] else 1, request[1] - request[0])
            ids = [request[2][request[0] + i] if request[2] else 7 for i in range(n)]
            request[0] += n
            told = [{token: SimpleNamespace(logprob=-1.0 * len(name))} for token in ids]
            end = request[0] == request[1]
            output = SimpleNamespace(token_ids=ids, logprobs=told)
            made.append(SimpleNamespace(request_id=name, outputs=[output], finished=end))
            if end:
                del self.requests[name]
        before, self.queued = self.queued, made
        return [] if before is None else before


@pytest.fixture
def parameters(monkeypatch):
    """Sampling parameters without vLLM's class."""

    def greedy(most, **more):
        return SimpleNamespace(most=most, forced=more.get("trace_decode_token_ids"))

    monkeypatch.setattr(vllm_process, "_greedy", greedy)


def model(engine, ends=7):
    config = SimpleNamespace(
        get_vocab_size=lambda: 1000, max_model_len=300, hf_text_config=SimpleNamespace(eos_token_id=ends)
    )
    return SimpleNamespace(llm_engine=engine, model_config=config)


@pytest.mark.parametrize("per_step", [1, 3])
def test_only_steps_of_whole_batches_are_timed(parameters, per_step):
    more = {"drafts": 2, "method": "ngram"} if per_step > 1 else {}
    timed = Job("decode", "", "stock", batches=(40,), steps=20, repeats=3, dummy=True, **more)
    engine = Engine(per_step)
    for batch in timed.batches * 2:  # the second batch finds the engine empty
        row = vllm_process._steady(model(engine), timed, batch, room=99)
        assert row["steps_with_rows_missing"] == 0 and row["tokens"] == [20 * 40 * per_step] * 3
        assert row["graph_seconds"] == [None] * 3, "there are no graphs here"
        assert row["rows"] == 40 and len(row["seconds"]) == 3 and 24 <= row["prompt_tokens"] <= 48
        assert not engine.requests
    assert engine.mixed >= 2 * (timed.window - 3), "requests came all at once"


def test_as_many_rows_as_fit_are_timed(parameters):
    timed = Job("decode", "", "stock", steps=4, window=4)
    row = vllm_process._steady(model(Engine()), timed, 64, room=10)
    assert (row["batch"], row["rows"], row["tokens"]) == (64, 10, [40]) and row["rows_past_their_end"] == 1.0
    assert vllm_process._steady(model(Engine(), ends=[8, 9]), timed, 2, 99)["rows_past_their_end"] == 0.0
    with pytest.raises(RuntimeError, match="not one request of 300 tokens fits"):
        vllm_process._steady(model(Engine()), timed, 64, room=0)
    engine = Engine()
    engine.add_request("0", {"prompt_token_ids": [1]}, vllm_process._greedy(5))
    with pytest.raises(RuntimeError, match="all requests ended while steps were being timed"):
        vllm_process._run(engine, 10, set(), set())
    with pytest.raises(RuntimeError, match="only 3 of 8 requests run"):
        vllm_process._steady(model(Engine(room=3)), Job("decode", "", "stock", steps=400), 8, room=99)


def test_forced_tokens_are_told_for_every_request(parameters):
    engine = Engine()
    texts = [[[1, 2], [10 * i + j for j in range(5 + i)]] for i in range(12)]
    rows = vllm_process._told(model(engine), Job("logprobs", "", "stock", steps=9), texts, seats=4, forced=True)
    for i, row in enumerate(rows):
        assert row["tokens"] == texts[i][1]
        assert row["logprobs"] == [[[token, -1.0 * len(str(i))]] for token in texts[i][1]]
    assert engine.most == 4 and engine.mixed > 3, "rows were not taken over while others ran"
    free = vllm_process._told(model(Engine()), Job("logprobs", "", "stock", steps=9), texts[:3], seats=4, forced=False)
    assert [row["tokens"] for row in free] == [[7] * 9] * 3


def test_a_prefill_tells_of_the_new_tokens_alone(monkeypatch):
    """Position n of a prompt is its n-th token, told by what comes before it."""

    def generate(prompts, parameters, use_tqdm):
        told = [prompt["prompt_token_ids"] for prompt in prompts]
        at = [[None, *({i: SimpleNamespace(logprob=-float(i))} for i in ids[1:])] for ids in told]
        return [SimpleNamespace(prompt_logprobs=each) for each in at]

    monkeypatch.setattr(vllm_process, "_greedy", lambda most, **more: (most, more))
    rows = vllm_process._scored(SimpleNamespace(generate=generate), [[[1, 2], [3, 4]], [[5], [6]]])
    assert rows == [
        {"tokens": [3, 4], "logprobs": [[[3, -3.0]], [[4, -4.0]]]}, {"tokens": [6], "logprobs": [[[6, -6.0]]]},
    ]  # fmt: skip


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model-id", "none/such"], "no model 'none/such'"),
        (
            ["--model-id", NANO, "--modes", "stock,fast"],
            "unknown mode 'fast': choose one of stock, replay, vllm-replay.",
        ),
        (["--model-id", NANO, "--modes", "plain"], "unknown mode 'plain'"),
        (["--model-id", QWEN, "--modes", "vllm-replay"], "vLLM replays the Mamba-2 layers of NemotronH models only"),
        (["--model-id", NANO, "--format", "fp3"], "unknown format 'fp3'"),
        (["--model-id", NANO, "--state", "fp32"], "unknown --state 'fp32': choose one of float32, bfloat16, float16."),
        (["--model-id", NANO, "--runner", "v3"], "unknown --runner 'v3'"),
        (["--model-id", NANO, "--batch-size", "1;2"], "--batch-size takes whole numbers"),
        (["--model-id", NANO, "--batch-size", "0,2"], "--batch-size must be 1 or more; got 0."),
        (
            ["--model-id", NANO, "--layers", "2"],
            "--layers must be between 3 (one of each kind: M, -, *) and 42; got 2.",
        ),
        (["--model-id", NANO, "--layers", "43"], "and 42; got 43."),
        (["--model-id", "Kimi-Linear-48B-A3B", "--dummy-weights"], "knows too little of Kimi-Linear-48B-A3B"),
        (["--model-id", "Qwen3.5-122B-A10B", "--dummy-weights"], "give a folder with its config.json"),
        (["--model-id", NANO, "--dummy-weights", "--prompts", "gsm8k"], "needs the model's own weights"),
        (["--model-id", NANO, "--prompts", "wiki"], "unknown --prompts 'wiki'"),
        (["--model-id", NANO, "--engine", "[1]"], "--engine takes a JSON object; got '[1]'."),
        (["--model-id", NANO, "--engine", "{"], "--engine takes a JSON object; got '{'"),
        (["--model-id", NANO, "--json", "none/rows.json"], "none/rows.json can't be written"),
        (["--model-id", NANO, "--acceptance-length", "2"], "--acceptance-length must be between 1 and 1"),
    ],
)
def test_refusals(arguments, sentence):
    assert sentence in refused(e2e.decode, *arguments)


def test_drafts_of_random_weights_need_a_forced_acceptance():
    line = refused(e2e.speculative, "--model-id", SUPER, "--layers", "11")
    assert "random weights accept no drafts" in line
    line = refused(e2e.speculative, "--model-id", SUPER, "--layers", "11", "--acceptance-length", "6")
    assert "between 1 and 5, the drafts and one more; got 6." in line


def test_text_that_cannot_be_had(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="--prompts gsm8k can't be had"):
        e2e.prompt_texts("gsm8k", 2)
    name, texts = e2e.prompt_texts("auto", 3)
    assert name == "gsm_symbolic" and len(texts) == 3
    assert e2e.prompt_texts("random", 3) == ("random token ids", None)


# --- check --vllm -----------------------------------------------------------------------------------------------------


def told(*gaps: float, tokens=None):
    """A request whose log-probabilities are off by so much, position by position."""
    logprobs = [[[1, -1.0 - gap], [2, -2.0]] for gap in gaps]
    return {"tokens": tokens or [1] * len(gaps), "logprobs": logprobs}


def test_differences_are_the_worst_tokens_of_positions():
    found = vllm_check.compare([told(*[0.0] * 12)], [told(*[0.0] * 10, 0.5, 1.5)])
    assert (found.largest, found.positions, found.parted) == (1.5, 12, 0) and found.mean == 2 / 12
    assert found.agree == 11 / 12  # at the last, the other token is likelier
    assert found.growth == [0.0] * 5 + [1.0] and found.scale == 2.0


def test_texts_are_compared_until_they_part():
    found = vllm_check.compare([told(0.0, 0.0, 0.0)], [told(0.0, 0.1, 9.0, tokens=[1, 2, 1])])
    assert (found.positions, found.parted) == (2, 1) and found.largest == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no position to compare"):
        vllm_check.compare([told()], [told()])


def test_the_tolerance_is_of_the_noise_and_never_below_rounding():
    loud, silent = (vllm_check.compare([told(0.0, 0.0)], [told(gap, 0.0)]) for gap in (0.5, 0.0))
    assert vllm_check.allowed([silent, loud], "float32", "fp32") == (4 * 0.5, 4 * 0.25)
    for dtype, name, bits in (("float32", "fp32", 24), ("float16", "fp32", 11), ("float16", "split16", 8)):
        assert vllm_check.allowed([silent], dtype, name) == (4 * 2.0**-bits * 2.0, 2.0**-bits * 2.0)


def test_activations_are_as_exact_as_vllm_has_them(tmp_path):
    assert vllm_check.exact(BUNDLED) == {"dtype": "float32"}
    assert vllm_check.exact(BUNDLED.with_name("qwen3.5-gsm")) == {"dtype": "float16"}
    for words, dtype in (({"text_config": {"linear_num_key_heads": 2}}, "float16"), ({}, "float32")):
        (tmp_path / "config.json").write_text(json.dumps(words))
        assert vllm_check.exact(tmp_path) == {"dtype": dtype}
    (tmp_path / "config.json").write_text('{"quantization_config": {}}')
    assert vllm_check.exact(tmp_path) == {}


def check(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "120"}).invoke(cli, ["check", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


BUNDLED = ROOT / "models" / "nemotron-h-gsm"


def row_of(text, name):
    return next(line for line in text.splitlines() if line.startswith(f"replay, {name} ")).split()


def test_check_says_what_is_within_and_what_is_over(engine):
    text = check("--vllm", BUNDLED, "--format", "fp32", "--tokens", 64, "--logs", engine / "logs").output
    assert "stock, alone" in text and "within" in text and "gsm_symbolic" in text and "to 64" in text
    assert "stock, prefill" in text and "Activations: float32" in text
    coarse = ("--engine", '{"dtype": "bfloat16"}')
    assert "Activations: bfloat16" in check("--vllm", BUNDLED, "--format", "fp32", "--tokens", 64, *coarse).output
    result = check("--vllm", BUNDLED, "--format", "fp32,fp8", "--tokens", 64, code=1)
    assert "over" in result.output and "further off than allowed" in result.stderr
    check("--vllm", BUNDLED, "--format", "fp8", "--tolerance", 1, "--tokens", 64)
    row = row_of(check("--vllm", BUNDLED, "--format", "fp16", "--tokens", 64, code=1).output, "fp16")
    assert float(row[4]) < float(row[5]), "the mean alone is too large"
    check("--vllm", BUNDLED, "--format", "fp32", "--tolerance", 1e-6, "--tokens", 64, code=1)


def test_check_with_drafts_compares_what_is_the_same(engine):
    text = check("--vllm", BUNDLED, "--format", "fp32", "--tokens", 64, "--drafts", 3).output
    assert row_of(text, "fp32")[2:4] == ["4", "16"]  # all four requests parted, after four positions each


def test_check_says_that_an_engine_failed(engine):
    assert "the plugin refuses bf16" in check("--vllm", BUNDLED, "--format", "bf16", code=1).stderr


def test_check_refuses(tmp_path):
    def sentence(*arguments):
        return check(*arguments, code=2).stderr

    assert "holds no config.json: --vllm takes a model folder with weights." in sentence("--vllm", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "holds no weights" in sentence("--vllm", tmp_path)
    assert "unknown format 'fp3'" in sentence("--vllm", BUNDLED, "--format", "fp3")
    assert "unknown --runner 'v3'" in sentence("--vllm", BUNDLED, "--runner", "v3")
    assert "pip install 'replayssm[vllm]'" in sentence("--vllm", BUNDLED)
