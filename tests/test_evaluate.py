"""eval, calibrate, report: statistics, teacher-forced KL, drift, and the sentences of what goes wrong."""

import contextlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

from replayssm import evaluate
from replayssm.cli import app
from replayssm.compare import Host, load_model
from replayssm.evaluate_report import write_report
from replayssm.integrations.transformers import disable, enable

MODELS = Path(__file__).parents[1] / "models"
SAMPLES = evaluate.read_samples(MODELS / "heldout.jsonl")


@pytest.fixture(scope="module")
def host() -> Host:
    return load_model(MODELS / "qwen3.5-gsm", torch.float32)


def test_there_are_enough_problems() -> None:
    assert len(SAMPLES) >= 1000 and all(sample.solution and sample.answer for sample in SAMPLES)


def test_paired_statistics() -> None:
    """Wilson's interval and McNemar's exact test as tables have them (95 of 100; 2 lost, 9 won)."""
    assert evaluate.wilson(95, 100) == pytest.approx([0.88825, 0.97846], abs=1e-4)
    reference = [True] * 90 + [False] * 10
    got = [True] * 88 + [False] * 2 + [True] * 9 + [False]
    found = evaluate.paired(got, reference)
    assert (found["lost"], found["won"], found["difference"]) == (2, 9, pytest.approx(0.07))
    assert found["p_value"] == pytest.approx(0.06543, abs=1e-4)
    low, high = found["difference_95"]
    assert low < 0.07 < high and high - low == pytest.approx(
        2 * 1.96 * math.sqrt(13 / 102 - (7 / 102) ** 2) / 102**0.5, rel=1e-3
    )
    assert evaluate.paired(reference, reference)["p_value"] == 1


def test_growth_is_the_slope_of_logarithms() -> None:
    marks = [512 << i for i in range(7)]
    assert evaluate._slope(marks, [1e-3 * n**0.5 for n in marks]) == pytest.approx(0.5)
    assert evaluate._slope(marks[:3], [1.0, 2.0, 3.0]) is None


def test_the_cheapest_choice_within_a_budget() -> None:
    alone = {"fp32": [0, 0, 0], "a": [1e-5, 5e-5, 9e-5], "b": [6e-5, 2e-4, 9e-5]}
    costs = {"fp32": 4.0, "a": 2.0, "b": 1.0}
    assert evaluate._knapsack(alone, costs, 1e-9) == ["fp32"] * 3
    assert evaluate._knapsack(alone, costs, 1.05e-4) == ["a", "fp32", "b"]
    assert evaluate._knapsack(alone, costs, 1.0) == ["b"] * 3


def test_streams_know_their_solutions(host: Host) -> None:
    ids, worked = evaluate.token_rows(host, SAMPLES, 2, 400)
    solutions = host.tokenizer.decode(ids[0, 1:][worked[0, :-1]]).split("\n\n")
    assert solutions[:2] == [sample.solution for sample in SAMPLES[:2]]


def test_kl_is_that_of_plain_decoding(host: Host) -> None:
    """Pieces of a window are folded and read as single tokens are: the same log-probabilities, token by token."""
    streams = evaluate.token_rows(host, SAMPLES, 2, 64)
    ids = streams.ids
    fp32, fp4 = evaluate.kl(host, streams, ["fp32", "fp32+mxfp4"])
    assert fp32["kl"] == 0 and fp32["top1"] == 1 and fp32["nll"] == fp32["nll_fp32"]
    assert 0 < fp4["kl"] < 0.1 and fp4["kl_95"][0] < fp4["kl"] < fp4["kl_95"][1]
    pieces = torch.cat(list(evaluate.logprobs(host, ids, "fp32+mxfp4", 16)), 1)
    enable(host.model, window=16, format="fp32+mxfp4", staggered=False)  # a token a step: flushes keep nothing
    with contextlib.ExitStack() as stack:
        stack.callback(disable, host.model)
        cache = DynamicCache(config=host.model.config)
        mask = torch.ones_like(ids)
        plain = [evaluate.forward(host, ids[:, :16], mask[:, :16], cache)]
        plain += [evaluate.forward(host, ids[:, i : i + 1], mask[:, : i + 1], cache) for i in range(16, 64)]
    assert float((torch.cat(plain, 1).log_softmax(-1) - pieces).abs().max()) < 1e-3


def test_drift_of_a_copy_is_that_of_fp32(host: Host) -> None:
    layers = evaluate.layer_inputs(host, evaluate.token_rows(host, SAMPLES, 1, 512).ids, piece=100)
    fp32, copy, shared = evaluate.drift(layers, ["fp32", "fp32+fp4", "fp4"])
    assert fp32["state_error"] < 1e-6 and copy["bitwise_fp32"] and copy["state_error"] == fp32["state_error"]
    assert shared["state_error"] > 1e-3 and not shared["bitwise_fp32"]
    assert copy["layers"][0]["output_error"] > 10 * fp32["layers"][0]["output_error"]


def test_problems_are_solved_late(host: Host) -> None:
    assert sum(evaluate.solve(host, SAMPLES, 2, 1, "fp16+fp4/residual", batch=2)) >= 1


def test_calibrate_writes_what_generate_takes(tmp_path: Path) -> None:
    file = tmp_path / "format.json"
    command = ["-m", str(MODELS / "qwen3.5-gsm"), "--rows", "1", "--tokens", "64", "--out", str(file)]
    done = CliRunner().invoke(app, ["calibrate", *command, "-f", "fp4", "-f", "split16", "--budget", "1e-6"])
    assert done.exit_code == 0, done.output
    document = json.loads(file.read_text())
    assert document["kl"] <= 1e-6 and set(document["format"].values()) <= {"fp32", "split16", "fp4"}
    assert evaluate.read_format(str(file)) == document["format"]
    done = CliRunner().invoke(
        app, ["generate", "Q: 1+1?\nA:\n", "-m", str(MODELS / "qwen3.5-gsm"), "-n", "2", "--format", str(file)]
    )
    assert done.exit_code == 0, done.output


def test_report_from_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = [
        "eval",
        "-m",
        str(MODELS / "qwen3.5-gsm"),
        "-f",
        "fp32",
        "-f",
        "fp8+fp4",
        "--rows",
        "2",
        "--tokens",
        "64",
    ]
    command += ["--drift-tokens", "512", "--count", "2", "--late", "0", "--new-tokens", "4", "--out", str(rows)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["measure"] for line in rows.read_text().splitlines()] == [
        "kl",
        "kl",
        "drift",
        "drift",
        "task",
        "task",
    ]
    table, picture = write_report(rows, tmp_path / "none", tmp_path)
    assert "| `fp8+fp4` | 1.69 |" in table.read_text() and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "command, sentence",
    [
        (["eval", "-f", "fp99"], "unknown format 'fp99'"),
        (["eval", "--measure", "speed"], "--measure takes kl, drift, task"),
        (["eval", "--tasks", "gsm8k"], "need --model"),
        (["eval", "-m", str(MODELS), "--tasks", "gsm8k"], "lm-evaluation-harness"),
        (["eval", "-f", "nothing.json"], "is not a file that `replayssm calibrate` wrote"),
        (["calibrate", "--budget", "0"], "--budget must be more than 0"),
        (["accuracy", "nothing.jsonl"], "is not a file: `replayssm eval` writes it"),
    ],
)
def test_what_goes_wrong_is_one_sentence(command: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and sentence in " ".join(done.output.split())
