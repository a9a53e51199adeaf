"""The bundled, trained models: their decays sit near 1, which no random weights imitate."""

import json
from pathlib import Path

import pytest
import torch
from test_transformers import CLOSE, _no_gradients, _rounded_run, assert_same_states, replayed, rms, run, steps
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from replayssm.compare import final_number
from replayssm.integrations.transformers import enable, generate

MODELS = Path(__file__).parents[2] / "models"
NAMES = ("nemotron-h-gsm", "qwen3.5-gsm")
__all__ = ["_no_gradients"]


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODELS / request.param, dtype=torch.float32).eval()


def problems(count: int) -> list[dict]:
    lines = (MODELS / "heldout.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:count]]


def streams(rows: int, columns: int) -> Tensor:
    """Token streams [rows, columns], problems and their solutions one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / NAMES[0])
    found = problems(4 * rows)
    texts = ["".join(p["prompt"] + p["solution"] for p in found[4 * b : 4 * b + 4]) for b in range(rows)]
    return torch.tensor([tokenizer(text)["input_ids"][:columns] for text in texts])


def test_decoding_equals_the_hosts_own_steps(model: PreTrainedModel) -> None:
    """Left-padded rows, 96 steps: 6 flushes of every row at window 16."""
    ids = streams(3, 112)
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :9] = 0
    want, host_cache = run(model, ids, steps(16, 112), mask)
    with replayed(model, window=16):
        got, cache = run(model, ids, steps(16, 112), mask)
    assert (got - want)[mask.bool()].abs().max() <= CLOSE
    assert_same_states(cache, host_cache)


@pytest.mark.parametrize("format", ["split16", "bf16", "fp16"])
def test_low_precision_costs_no_more_than_its_rounding(model: PreTrainedModel, format: str) -> None:
    """bf16, fp16: the host with its states rounded at the same steps. split16: fp32 states, outputs read in bf16."""
    ids = streams(2, 48)
    exact, host_cache = run(model, ids, steps(16, 48))
    rounded, _ = _rounded_run(model, ids, 16, torch.float16 if format == "fp16" else torch.bfloat16)
    with replayed(model, format=format, staggered=False):
        got, cache = run(model, ids, steps(16, 48))  # 8 flushes at window 4
    assert rms(got - (exact if format == "split16" else rounded)) <= rms(rounded - exact) + CLOSE
    if format == "split16":
        assert_same_states(cache, host_cache, layers=1)


@pytest.mark.parametrize("format", ["fp32", "split16"])
def test_problems_are_solved(model: PreTrainedModel, format: str) -> None:
    """Prompts of different lengths in one batch, left-padded, decoded freely."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / NAMES[0], padding_side="left")
    asked = problems(6)
    inputs = tokenizer([p["prompt"] for p in asked], return_tensors="pt", padding=True, return_token_type_ids=False)
    end = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("x\n\n")[-1])
    with replayed(model, window=16, format=format):
        made = model.generate(**inputs, max_new_tokens=200, eos_token_id=end, do_sample=False)
    answers = [tokenizer.decode(row[inputs["input_ids"].shape[1] :]).split("####")[-1].split("\n")[0] for row in made]
    right = sum(
        final_number("#### " + answer) == final_number(f"#### {p['answer']}")
        for answer, p in zip(answers, asked, strict=True)
    )
    assert right >= 5, answers


DRAFTS = [
    ("nemotron-h-gsm", "ngram", 3, 1.0),
    ("nemotron-h-gsm", "nemotron-h-gsm-draft", 5, 3.5),
    ("nemotron-h-gsm", "nemotron-h-gsm-draft", (2, 1, 1), 3.0),
    ("qwen3.5-gsm", "ngram", 3, 1.0),
    ("qwen3.5-gsm", "nemotron-h-gsm-draft", 5, 3.5),  # another family, the same tokenizer
]
DRAFTS += [case for case in [("qwen3.5-gsm", "qwen3.5-gsm-draft", (2, 1, 1), 3.0)] if (MODELS / case[1]).is_dir()]
if (MODELS / "qwen3.5-gsm" / "mtp.safetensors").is_file():
    DRAFTS += [("qwen3.5-gsm", "mtp", 4, 3.0), ("qwen3.5-gsm", "mtp", (2, 1, 1), 3.0)]


@pytest.mark.parametrize(("name", "draft", "tree", "least"), DRAFTS)
def test_drafts_equal_plain_decoding(name: str, draft: str, tree: object, least: float) -> None:
    """At least so many tokens per forward; results/speculation.jsonl has 50 problems, with states in every round."""
    model = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name, padding_side="left")
    inputs = tokenizer([p["prompt"] for p in problems(2)], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    want = model.generate(**inputs, max_new_tokens=40, do_sample=False, eos_token_id=None)
    source = draft
    if draft not in ("ngram", "mtp"):
        source = enable(AutoModelForCausalLM.from_pretrained(MODELS / draft, dtype=torch.float32).eval())
    with replayed(model, window=16):
        got = generate(model, **inputs, draft=source, tree=tree, max_new_tokens=40, eos_token_id=())
    assert torch.equal(got.sequences, want)
    assert got.acceptance_length >= least


@pytest.mark.parametrize("name", NAMES)
def test_an_assistant_equals_plain_decoding(name: str) -> None:
    """Transformers' own generate, with its default confidence threshold off, so that drafts are wrong now and then."""
    model, small = (
        AutoModelForCausalLM.from_pretrained(MODELS / folder, dtype=torch.float32).eval()
        for folder in (name, "nemotron-h-gsm-draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    inputs = tokenizer(problems(1)[0]["prompt"], return_tensors="pt", return_token_type_ids=False)
    want = model.generate(**inputs, max_new_tokens=40, do_sample=False, eos_token_id=None)
    with replayed(model, window=16, max_tokens=6), replayed(small, window=16, max_tokens=6):
        config = small.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = 5, "constant"
        config.assistant_confidence_threshold = 0.0
        got = model.generate(**inputs, max_new_tokens=40, do_sample=False, eos_token_id=None, assistant_model=small)
    assert torch.equal(got, want)
