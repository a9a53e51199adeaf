"""`replayssm check --vllm`: a model in vLLM with its own states against the same with the plugin, token by token.

1. Stock vLLM decodes greedily, more requests than rows: they come in two at a time, are prefilled beside running ones
   and take over rows that others left. Its tokens and log-probabilities are the reference.
2. The same engine is fed its own tokens again, one request at a time, and then takes them as prompts: a prefill says
   the same by other kernels. What differs is rounding, each time elsewhere: the larger of both is the noise. The first
   would be too little: a kernel may well round the same whatever runs beside it, another kernel does not.
3. vLLM with the plugin is fed the same tokens as in 1, in the same order, one token a step. Choosing freely it would
   part at the first tie and then say nothing. With drafts tokens are free, and compared as far as they are the same.

Log-probabilities are the raw model's, of the tokens that are among the likeliest of a position on both sides.
Activations are the most exact that vLLM has for the model: in bf16, rounding alone is more than half a nat, and hides
faults.
"""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from replayssm import formats
from replayssm.bench import vllm_process
from replayssm.bench.e2e import needs_vllm, prompt_texts
from replayssm.bench.vllm_process import Job
from replayssm.commands import _table

out = Console()
err = Console(stderr=True)

SLACK = 4  # the plugin may differ by so many times what stock differs from itself
# Spacing of numbers relative to their size. Logits are rounded to it whatever computes them: no noise is below it
SPACING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
SEATS = 8
PARTS = 6  # of the positions, for the growth of differences
SECONDS = 1800.0


class Difference(NamedTuple):
    """How far the log-probabilities of one run are from another's. A position's difference is that of its worst token.

    Attributes:
        largest, mean: over all positions.
        agree: share of positions whose likeliest token is the same.
        positions: compared; parted: requests whose tokens differed before their end.
        growth: means over equal parts of the positions, first to last; nan where none was compared.
        scale: the largest absolute log-probability that was compared.
    """

    largest: float
    mean: float
    agree: float
    positions: int
    parted: int
    growth: list[float]
    scale: float


def compare(reference: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> Difference:
    """Two runs of the same requests, as `vllm_process.logprobs` tells them.

    Raises:
        ValueError: there is no position to compare.
    """
    length = max((len(row["tokens"]) for row in reference), default=0)
    gaps: list[list[float]] = [[] for _ in range(length)]
    agree = parted = 0
    scale = 0.0
    for mine, theirs in zip(reference, other, strict=True):
        for i, (a, b) in enumerate(zip(mine["logprobs"], theirs["logprobs"], strict=False)):
            left, right = dict(map(tuple, a)), dict(map(tuple, b))
            gaps[i].append(max(abs(left[token] - right[token]) for token in left.keys() & right.keys()))
            agree += max(left, key=left.__getitem__) == max(right, key=right.__getitem__)
            scale = max(scale, *map(abs, left.values()))
            if mine["tokens"][i] != theirs["tokens"][i]:  # from here on the texts are others
                parted += 1
                break
    every = [gap for at in gaps for gap in at]
    if not every:
        raise ValueError("there is no position to compare: no request got a token.")
    parts = [[gap for at in gaps[k * length // PARTS : (k + 1) * length // PARTS] for gap in at] for k in range(PARTS)]
    growth = [mean(part) if part else float("nan") for part in parts]
    return Difference(max(every), mean(every), agree / len(every), len(every), parted, growth, scale)


def exact(folder: Path) -> dict[str, Any]:
    """The engine argument that makes activations as exact as vLLM can; none where weights are quantized."""
    words = json.loads((folder / "config.json").read_text())
    if "quantization_config" in words:
        return {}
    delta_net = "linear_num_key_heads" in words.get("text_config", words)
    return {"dtype": "float16" if delta_net else "float32"}  # vLLM's chunked gated delta rule refuses float32


def allowed(noise: Sequence[Difference], dtype: str, name: str) -> tuple[float, float]:
    """Largest and mean difference that rounding explains.

    Args:
        noise: of stock against itself.
        dtype: of activations.
        name: storage format. One that tokens read in 16 bits or less rounds as bf16 does.
    """
    spacing = SPACING["bfloat16"] if formats.get(name).read_bytes(64) < 4 else SPACING[dtype]
    floor = spacing * max(each.scale for each in noise)
    largest, average = (max(each.largest for each in noise), max(each.mean for each in noise))
    return SLACK * max(largest, floor), max(SLACK * average, floor)


def check(
    folder: Path, names: Sequence[str], tokens: int, window: int, drafts: int, tolerance: float | None,
    runner: str | None, engine: dict[str, Any], logs: Path | None,
) -> bool:  # fmt: skip
    """Compare, print, and say whether all formats are within the tolerance.

    Args:
        folder: a model folder with weights.
        names: storage formats, an engine each.
        tokens: new tokens of every request.
        drafts: with drafts (n-grams), so many per step.
        tolerance: largest difference of a log-probability, whatever the mean; None: `allowed`.
        engine: further arguments of LLM(...); its dtype wins over `exact`.

    Raises:
        ValueError: no such folder or format, or vLLM is missing.
        Failed: an engine ended without a result.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: --vllm takes a model folder with weights.")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds no weights (*.safetensors), which --vllm needs.")
    for name in names:
        formats.get(name)
    needs_vllm()
    try:
        asked, texts = prompt_texts("gsm_symbolic", 2 * SEATS)
    except ValueError:
        asked, texts = prompt_texts("random", 2 * SEATS)
    stock = Job(
        "logprobs", str(folder), "stock", window=window, batches=(SEATS,), steps=tokens, runner=runner, texts=texts,
        seats=SEATS, ways=("free", "alone", "prefill"), engine=exact(folder) | engine, compiled=False,
    )  # fmt: skip
    place = logs or Path(tempfile.mkdtemp(prefix="replayssm-check-"))
    place.mkdir(parents=True, exist_ok=True)
    with err.status("vLLM as it is"):
        reference = vllm_process.run(stock, place / "stock.log", SECONDS)
    free = reference["ways"]["free"]
    noise = {way: compare(free, reference["ways"][way]) for way in ("alone", "prefill")}
    columns = ("parted", "positions", "largest", "allowed", "mean", "allowed", "top-1 agree")
    view = _table(f"{folder.name} in vLLM: differences of log-probabilities", "case", *columns, "")
    growth = _table("Mean difference by position", "case", *_spans(tokens))
    for way, each in noise.items():
        _add(view, growth, f"stock, {way}", each, None, Text("the noise"))
    wrong = 0
    for name in names:
        way = "free" if drafts else "together"
        job = replace(stock, mode="replay", format=name, sequences=reference["sequences"], ways=(way,))
        if drafts:
            job = replace(job, drafts=drafts, method="ngram")
        with err.status(f"with the plugin, {name}"):
            replayed = vllm_process.run(job, place / f"replay-{name.replace('/', '-')}.log", SECONDS)
        found = compare(free, replayed["ways"][way])
        most = allowed(list(noise.values()), reference["dtype"], name) if tolerance is None else (tolerance, math.inf)
        over = not (found.largest <= most[0] and found.mean <= most[1])  # nan is over
        wrong += over
        verdict = Text("over", style="red") if over else Text("within", style="green")
        _add(view, growth, f"replay, {name}", found, most, verdict)
    out.print(view)
    out.print(growth)
    how = "as given" if tolerance is not None else f"{SLACK} times the noise, or what one rounding of a logit explains"
    out.print(
        f"Activations: {reference['dtype']} (--engine sets dtype). Allowed: {how}. Window {window}, "
        f"{reference['runner']}, prompts: {asked}"
        + (f"; {drafts} n-gram drafts, compared while the tokens are the same." if drafts else "; tokens are forced."),
        style="dim",
        soft_wrap=True,
    )
    return not wrong


def _spans(tokens: int) -> list[str]:
    edges = [k * tokens // PARTS for k in range(PARTS + 1)]
    return [f"to {edge}" for edge in edges[1:]]


def _add(view: Any, growth: Any, name: str, found: Difference, most: tuple[float, float] | None, verdict: Text) -> None:
    largest, average = ("", "") if most is None else (f"{each:.1e}" for each in most)
    view.add_row(
        name, str(found.parted), f"{found.positions:,}", f"{found.largest:.2e}", largest, f"{found.mean:.2e}", average,
        f"{found.agree:.2%}", verdict,
    )  # fmt: skip
    growth.add_row(name, *(f"{part:.1e}" for part in found.growth))
