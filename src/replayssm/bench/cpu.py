"""CPU: one recurrent layer of a host model, its own torch step against the replayed one, and the bundled models whole.

Layers are measured inside a host model of four of them and one of attention, which the host needs to count tokens
(hidden size 64, so that all else is small beside the state), called as generate calls it: one token per row and step,
the same inputs for both caches. A layer's time is a fourth of the model's, all else included. A sample is a whole
window of 16 steps, in which every row flushes once; rows flush in different steps. A row is written only if the first
layer's states agree after all steps (the inputs of later layers carry the rounding of the first one's outputs).

The host's step makes many tensors as large as the state, and glibc by default maps and unmaps each, which costs it ten
times more than its arithmetic. A tuned server would not have that (jemalloc, or these settings), so both sides run with
large blocks kept; the program starts itself again to set that.
"""

import copy
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from replayssm.bench import append_rows
from replayssm.compare import Problem, compare, load_model, provenance
from replayssm.integrations.transformers import disable, enable, replay_cache

WINDOW = 16
COUNT = 4
KEEP_LARGE_BLOCKS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 36), "MALLOC_TOP_PAD_": str(1 << 30)}
_BASE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
LAYERS: dict[str, dict[str, Any]] = {
    "mamba2": _BASE | {
        "model_type": "nemotron_h", "layers_block_type": [*COUNT * ["linear_attention"], "full_attention"],
        "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "chunk_size": 8,
    },
    "gdn": _BASE | {
        "model_type": "qwen3_5_text", "num_hidden_layers": COUNT + 1,
        "layer_types": [*COUNT * ["linear_attention"], "full_attention"],
        "head_dim": 32,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}  # fmt: skip


def main(
    batch: Annotated[int, typer.Option(help="Rows.")] = 64,
    samples: Annotated[int, typer.Option(help="Windows of 16 steps that are timed, for each cache.", min=2)] = 7,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    formats: Annotated[list[str], typer.Option("--format", help="Storage formats of the checkpoint.")] = [  # noqa: B006
        "fp32",
        "split16",
    ],
    models: Annotated[Path, typer.Option(help="Folder with the bundled models; skipped if it has none.")] = Path(
        "models"
    ),
    out: Annotated[Path, typer.Option(help="Rows are appended here.")] = Path("results/cpu.jsonl"),
) -> None:
    """One recurrent layer on a CPU against the host library's own torch step, then tokens/s of the bundled models."""
    if os.environ.get("MALLOC_MMAP_MAX_") != "0":
        os.execve(sys.executable, [*sys.orig_argv], os.environ | KEEP_LARGE_BLOCKS)
    torch.set_num_threads(threads)
    origin, rows = provenance(), []
    folders = sorted(path.parent for path in models.glob("*/model.safetensors"))
    parts = [partial(layer_rows, name, batch, samples, formats) for name in LAYERS]
    parts += [partial(model_rows, folder, models / "heldout.jsonl", formats) for folder in folders]
    # the bar is drawn seldom: it shares the CPU with what is timed
    for part in track(parts, "measuring", console=Console(stderr=True), transient=True, refresh_per_second=0.5):
        measured = part()
        append_rows(out, measured, origin)
        rows += measured
    table = Table("bench", "geometry", "format", "baseline", "ours", "speedup")
    for row in rows:
        sizes = " ".join(f"{name}{size}" for name, size in row["geometry"].items())
        table.add_row(
            row["bench"],
            sizes,
            row["format"],
            f"{row['baseline_us']:,.0f} us",
            f"{row['us']:,.0f} us",
            f"{row['speedup']:.2f}x",
        )
    console = Console(width=120)
    console.print(table, f"{len(rows)} rows appended to {out} · {origin['device']} · {threads} threads", sep="\n")


@torch.inference_mode()
def layer_rows(name: str, batch: int, samples: int, formats: list[str]) -> list[dict[str, Any]]:
    """One row per format for one layer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**LAYERS[name])
    model = AutoModelForCausalLM.from_config(config).eval()
    prompt = torch.randint(0, 64, (batch, 8))
    tokens = torch.randint(0, 64, (batch, WINDOW * (samples + 1)))
    prefilled = DynamicCache(config=config)
    model(prompt, past_key_values=prefilled)

    own = copy.deepcopy(prefilled)
    baseline = _steps(model, own, tokens)
    host_state = own.layers[0].recurrent_states
    expected = host_state[0] if isinstance(host_state, dict) else host_state
    rows = []
    for format in formats:
        cache = copy.deepcopy(prefilled)
        enable(model, window=WINDOW, format=format)
        try:
            ours = _steps(model, cache, tokens)
        finally:
            disable(model)
        replayed = replay_cache(cache)
        assert replayed is not None
        state = replayed.materialize(0, torch.arange(batch))
        difference = (state - (expected if name == "mamba2" else expected.transpose(2, 3))).norm() / expected.norm()
        if not difference < 1e-5:
            raise RuntimeError(f"{name} {format}: states differ by {difference:.2g} after {tokens.shape[1]} steps")
        traffic = replayed.bytes_per_token()
        rows.append(
            {
                "bench": "cpu layer",
                "recurrence": name,
                "geometry": {"B": batch} | replayed.geometry._asdict(),
                "tokens": 1,
                "format": format,
                "window": WINDOW,
                "staggered": True,
                "hidden_size": config.hidden_size,
                "layers": COUNT,
                "threads": torch.get_num_threads(),
                "allocator": KEEP_LARGE_BLOCKS,
                "baseline": f"transformers {LAYERS[name]['model_type']} torch step, fp32 state",
                **_figures(ours, baseline),
                "gbps": batch * (traffic.read + traffic.written) / COUNT / ours[len(ours) // 2] / 1e9,
                "state_difference": float(difference),
            }
        )
    return rows


def _steps(model: PreTrainedModel, cache: Any, tokens: torch.Tensor) -> list[float]:
    """Mean seconds per step and recurrent layer of every window but the first, sorted."""
    times = []
    for first in range(0, tokens.shape[1], WINDOW):
        start = time.perf_counter()
        for i in range(first, first + WINDOW):
            model(tokens[:, i : i + 1], past_key_values=cache)
        times.append((time.perf_counter() - start) / WINDOW / COUNT)
    return sorted(times[1:])


def _figures(ours: list[float], baseline: list[float]) -> dict[str, float]:
    """Medians and 20/80 percentiles in us, and what they make together."""
    (low, _, _, high), (base_low, _, _, base_high) = quantiles(ours, n=5), quantiles(baseline, n=5)
    us, base = ours[len(ours) // 2] * 1e6, baseline[len(baseline) // 2] * 1e6
    return {
        "us": us,
        "us_p20": low * 1e6,
        "us_p80": high * 1e6,
        "baseline_us": base,
        "baseline_us_p20": base_low * 1e6,
        "baseline_us_p80": base_high * 1e6,
        "speedup": base / us,
    }


def model_rows(folder: Path, problems_file: Path, formats: list[str]) -> list[dict[str, Any]]:
    """Tokens/s of a whole model at batch 1 and 16, generate with the host's cache and with the replayed one."""

    host = load_model(folder, torch.float32)
    lines = [json.loads(line) for line in problems_file.read_text().splitlines()[:16]]
    rows = []
    for batch in (1, 16):
        problems = [Problem(line["prompt"]) for line in lines[:batch]]
        own, *replays = compare(
            host, problems, formats=formats, window=WINDOW, batch=batch, new_tokens=97, repeats=2
        ).rows
        for row in replays:
            rows.append(
                {
                    "bench": "cpu model",
                    "model": row.model,
                    "geometry": {"B": batch},
                    "tokens": 1,
                    "format": row.format,
                    "window": WINDOW,
                    "staggered": True,
                    "baseline": "transformers generate with its own cache",
                    "us": 1e6 * batch / row.tokens_per_second,
                    "baseline_us": 1e6 * batch / own.tokens_per_second,
                    "speedup": row.tokens_per_second / own.tokens_per_second,
                    "tokens_per_second": row.tokens_per_second,
                    "baseline_tokens_per_second": own.tokens_per_second,
                    "max_logprob_difference": row.max_logprob_difference,
                }
            )
    return rows
