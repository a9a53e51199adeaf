"""Whole models in vLLM with the plugin, on a GPU: what decoding says must be what a prefill says of the same tokens.

Every case is an engine in a process of its own: it generates with the bundled models, then scores what it generated as
prompts. A prefill runs vLLM's own kernels from an empty state, so it knows nothing of rings and cursors. How far a
decode may differ is what vLLM without the plugin differs by, in the same test.

    python tests/integrations/test_vllm_models.py '{"model": "models/nemotron-h-gsm", "format": "fp32"}'
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
}  # fmt: skip
TOKENS = 96  # new ones: six windows


def child(case: dict[str, Any]) -> dict[str, Any]:
    """One engine: mean and largest difference of log-probabilities, and what is known of its memory."""
    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(case.get("runner", "v2") == "v2"))
    try:
        import vllm_torch211_shim  # noqa: F401  (vLLM 0.33 on an older torch)
    except ImportError:
        pass
    import torch
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {
        "model": case["model"], "dtype": case.get("dtype", "float32"), "max_model_len": 1024, "max_num_seqs": 24,
        "enable_prefix_caching": False, "attention_backend": "TRITON_ATTN", "seed": 0,
        "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05,  # so that several cases share a GPU
        "gdn_prefill_backend": "triton", "skip_tokenizer_init": True, "disable_log_stats": False,
    }  # fmt: skip
    if case.get("format"):
        options["additional_config"] = {"replayssm": {"format": case["format"], "window": 16}}
    if case.get("drafts"):
        options["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": case["drafts"], "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        }  # fmt: skip
    options |= case.get("options", {})
    engine = LLM(**options)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 90, (20,), generator=generator).tolist() + [1, 2, 33, 64]
    prompts = []
    for n in lengths:
        piece = torch.randint(10, 250, (-(-n // 2),), generator=generator).tolist()
        prompts.append({"prompt_token_ids": (piece * 2)[:n]})  # n-grams find something
    counts = [TOKENS - (7 * i) % 40 for i in range(len(prompts))]
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
            differences.append(abs(said[token].logprob - score.prompt_logprobs[n + i][token].logprob))
    config = engine.llm_engine.vllm_config
    counters = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    return {
        "preemptions": counters.get("vllm:num_preemptions"),
        "accepted": counters.get("vllm:spec_decode_num_accepted_tokens"),
        "mean": sum(differences) / len(differences), "worst": max(differences), "tokens": len(differences),
        "graphs": str(config.compilation_config.cudagraph_mode), "runner": 2 if config.use_v2_model_runner else 1,
        "blocks": config.cache_config.num_gpu_blocks,
    }  # fmt: skip


@cache
def run(text: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, text], capture_output=True, text=True, cwd=ROOT, timeout=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    print(text, lines[-1])
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


EAGER = {"enforce_eager": True}
CASES: dict[str, dict[str, Any]] = {
    "graphs and torch.compile": {"format": "fp32"},
    "eager": {"format": "fp32", "options": EAGER},
    "runner V1": {"format": "fp32", "runner": "v1"},
    "prefills in pieces beside decodes": {"format": "fp32", "options": {"max_num_batched_tokens": 32}},
    "preempted": {"format": "fp32", "options": {"preempt": 1}},
    "drafts": {"format": "fp32", "drafts": 3},
    "drafts, runner V1": {"format": "fp32", "drafts": 3, "runner": "v1"},
    "drafts, eager, prefills in pieces": {
        "format": "fp32", "drafts": 3, "options": EAGER | {"max_num_batched_tokens": 128},
    },
    "split16": {"format": "split16"},
    "fp8 copy": {"format": "fp32+fp8"},
    "bf16 model": {"format": "fp32", "dtype": "bfloat16"},
}  # fmt: skip
# How much further than vLLM's own a format's reads may be from a prefill, mean and worst, in nats
LOSSY = {"split16": (2e-3, 0.1), "fp32+fp8": (2e-2, 1.0)}


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["models/nemotron-h-gsm", "models/qwen3.5-gsm"])
@pytest.mark.parametrize("name", list(CASES))
def test_decoding_says_what_a_prefill_says(model: str, name: str) -> None:
    pytest.importorskip("vllm")
    case = {"model": model} | CASES[name]
    if case.get("options", {}).get("preempt"):
        blocks = run(json.dumps({"model": model, "format": "fp32"}))["blocks"]
        case["options"] = {"num_gpu_blocks_override": min(blocks, 60)}
    stock = run(json.dumps({"model": model, "dtype": case.get("dtype", "float32")}))
    ours = run(json.dumps(case))
    mean, worst = LOSSY.get(case["format"], (1e-4, 2e-3))
    if case.get("dtype") == "bfloat16":
        mean, worst = 2e-3, 0.1
    assert ours["tokens"] > 1000
    assert ours["preemptions"] or name != "preempted", ours
    assert ours["accepted"] or not case.get("drafts"), ours
    assert ours["mean"] < 1.5 * stock["mean"] + mean, (stock, ours)
    assert ours["worst"] < 2 * stock["worst"] + worst, (stock, ours)


if __name__ == "__main__":
    print("RESULT", json.dumps(child(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # engines' threads need no goodbye
