"""Whole models in vLLM with the plugin, on a GPU: what decoding says must be what a prefill says of the same tokens.

Every case is an engine in a process of its own: it generates with the bundled models, then scores what it generated as
prompts. A prefill runs vLLM's own kernels from an empty state, so it knows nothing of rings and cursors. How far a
decode may differ is what vLLM without the plugin differs by, in the same test. What an engine came to lies in a file
that all workers of pytest-xdist share, so none is started twice.

    python tests/integrations/test_vllm_models.py '{"model": "models/nemotron-h-gsm", "format": "fp32"}' result.json
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    # vLLM's prefill kernels take the first of their launches: to time a hundred is most of an engine's start, and two
    # engines that choose differently round differently
    "VLLM_TRITON_FORCE_FIRST_CONFIG": "1",
}  # fmt: skip
TOKENS = 96  # new ones: six windows
EXACT = {"models/nemotron-h-gsm": "float32", "models/qwen3.5-gsm": "float16"}  # vLLM's gated delta rule refuses float32


def with_head(model: str) -> str:
    """The model in a folder whose configuration names the head beside it, as published checkpoints' do."""
    folder, config = Path(tempfile.mkdtemp()), Path(model, "config.json")
    for file in Path(model).resolve().iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(json.loads(config.read_text()) | {"mtp_num_hidden_layers": 1}))
    return str(folder)


def child(case: dict[str, Any]) -> dict[str, Any]:
    """One engine: mean and largest difference of log-probabilities, and what is known of its memory."""
    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(case.get("runner", "v2") == "v2"))
    try:
        import vllm_torch211_shim  # noqa: F401  (vLLM 0.33 on an older torch)
    except ImportError:
        pass
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {
        "model": with_head(case["model"]) if case.get("head") else case["model"], "dtype": case["dtype"],
        "mamba_ssm_cache_dtype": "float32", "max_model_len": 1024,
        "max_num_seqs": 16,  # of 24 requests: the others take over blocks, and are prefilled beside decodes
        "enable_prefix_caching": False, "attention_backend": "TRITON_ATTN", "seed": 0,
        "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05,  # so that several cases share a GPU
        "gdn_prefill_backend": "triton", "skip_tokenizer_init": True, "disable_log_stats": False,
    }  # fmt: skip
    if case.get("format"):
        options["additional_config"] = {"replayssm": {"format": case["format"], "window": 16}}
    if case.get("drafts"):
        lookup = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        method = {"method": "mtp"} if case.get("head") else lookup
        options["speculative_config"] = method | {"num_speculative_tokens": case["drafts"]}
    options |= case.get("options", {})
    engine = LLM(**options)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 90, (20,), generator=generator).tolist() + [1, 2, 33, 64]
    prompts = []
    for n in lengths:
        piece = torch.randint(10, 250, (-(-n // 2),), generator=generator).tolist()
        prompts.append({"prompt_token_ids": (piece * 2)[:n]})  # n-grams find something
    counts = [case.get("tokens", TOKENS) - (7 * i) % 40 for i in range(len(prompts))]
    wanted = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0)
        for i, n in enumerate(counts)
    ]
    if case.get("drafts"):
        wanted = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0) for n in counts
        ]
    outputs = engine.generate(prompts, wanted, use_tqdm=False)
    whole = [
        {"prompt_token_ids": [*prompt["prompt_token_ids"], *output.outputs[0].token_ids]}
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    scored = engine.generate(
        whole, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False
    )
    differences = []
    for prompt, output, score in zip(prompts, outputs, scored, strict=True):
        n = len(prompt["prompt_token_ids"])
        for i, (token, said) in enumerate(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)):
            off = abs(said[token].logprob - score.prompt_logprobs[n + i][token].logprob)
            differences.append((off, n, i))
    config = engine.llm_engine.vllm_config
    counters = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    return {
        "preemptions": counters.get("vllm:num_preemptions"),
        "accepted": counters.get("vllm:spec_decode_num_accepted_tokens"),
        "mean": sum(off for off, *_ in differences) / len(differences), "worst": max(differences)[0],
        "worst_at": sorted(differences)[-6:],  # [off, tokens of the prompt, tokens since]
        "tokens": len(differences),
        "graphs": str(config.compilation_config.cudagraph_mode), "runner": 2 if config.use_v2_model_runner else 1,
        "dtype": str(config.model_config.dtype), "blocks": config.cache_config.num_gpu_blocks,
    }  # fmt: skip


def start(case: dict[str, Any], path: Path) -> None:
    """An engine in a process of its own; what it printed lies beside its result."""
    log = path.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(case), str(path)], stdout=output, stderr=subprocess.STDOUT, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        with suppress(subprocess.TimeoutExpired):
            process.wait(400)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # workers of tensor parallelism too
        process.wait()
    if not path.is_file():
        path.write_text(json.dumps({"failed": log.read_text(errors="replace")[-6000:]}))


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The result of a case, by the first worker that asks for it."""
    base = tmp_path_factory.getbasetemp()
    place = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def once(case: dict[str, Any]) -> dict[str, Any]:
        name = hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:16]
        path = place / f"vllm-{name}.json"
        with FileLock(f"{path}.lock"):
            if not path.is_file():
                start(case, path)
        result = dict(json.loads(path.read_text()))
        assert "failed" not in result, f"{case}\n{result['failed']}"
        print("RESULT", case, result)
        return result

    return once


def eager(**options: Any) -> dict[str, Any]:
    """Starts three times as fast as with graphs and torch.compile, which two cases have."""
    return {"enforce_eager": True} | options


# 14 requests get in, with 4 blocks each; most need a fifth before they end
PREEMPTED = {"format": "fp32", "tokens": 200, "options": eager(num_gpu_blocks_override=60)}
CASES: dict[str, dict[str, Any]] = {
    "graphs and torch.compile": {"format": "fp32"},
    "drafts, prefills in pieces, graphs": {"format": "fp32", "drafts": 3, "options": {"max_num_batched_tokens": 128}},
    "drafts of the model's head, graphs": {"format": "fp32", "drafts": 3, "head": True},
    "runner V1": {"format": "fp32", "runner": "v1", "options": eager()},
    "prefills in pieces beside decodes": {"format": "fp32", "options": eager(max_num_batched_tokens=32)},
    "preempted": PREEMPTED,
    "drafts, preempted": PREEMPTED | {"drafts": 3},
    "drafts, runner V1": {"format": "fp32", "drafts": 3, "runner": "v1", "options": eager()},
    "drafts of the model's head, runner V1": {
        "format": "fp32", "drafts": 3, "head": True, "runner": "v1", "options": eager(),
    },
    "two GPUs": {"format": "fp32", "options": {"tensor_parallel_size": 2}},
    "split16": {"format": "split16", "options": eager()},
    "fp8 copy": {"format": "fp32+fp8", "options": eager()},
    "bf16 model": {"format": "fp32", "dtype": "bfloat16", "options": eager()},
}  # fmt: skip
# How much further than vLLM's own a format's reads may be from a prefill, mean and worst, in nats
LOSSY = {"split16": (2e-3, 0.1), "fp32+fp8": (2e-2, 1.0)}


@pytest.mark.gpu
@pytest.mark.parametrize("model", list(EXACT))
@pytest.mark.parametrize("name", list(CASES))
def test_decoding_says_what_a_prefill_says(model: str, name: str, run: Any) -> None:
    pytest.importorskip("vllm")
    if name == "two GPUs" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = {"model": model, "dtype": EXACT[model]} | CASES[name]
    if case.get("head") and not (ROOT / model / "mtp.safetensors").is_file():
        pytest.skip("has no head")
    stock = run({"model": model, "dtype": case["dtype"], "options": eager()})
    ours = run(case)
    mean, worst = LOSSY.get(case["format"], (1e-4, 2e-3))
    if case["dtype"] == "bfloat16":
        mean, worst = 2e-3, 0.1
    assert ours["tokens"] > 1000
    assert ours["preemptions"] or "preempted" not in name, ours
    assert ours["accepted"] or not case.get("drafts"), ours
    assert ours["mean"] < 1.5 * stock["mean"] + mean, (stock, ours)
    assert ours["worst"] < 2 * stock["worst"] + worst, (stock, ours)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(child(json.loads(sys.argv[1]))))
    os._exit(0)  # engines' threads need no goodbye
