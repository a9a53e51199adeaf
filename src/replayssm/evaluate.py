"""What a storage format costs in accuracy: the same model, the same tokens, another checkpoint format.

    kl      teacher-forced: every token goes through the replayed cache; KL divergence and top-1 agreement with the
            fp32 format, by position
    drift   states after up to 32k tokens, layer by layer, against the recurrence in fp64 with the same inputs; how
            the error grows; whether the state is bitwise that of fp32
    task    problems solved by greedy decoding, alone or late in a stream whose earlier problems went through the
            replayed cache as well; against fp32, paired

Everything is fed in pieces of `window` tokens (kl, drift, the task's prompt), so a checkpoint is folded and rounded
after every `window` tokens, exactly as in plain decoding with unstaggered flushes, and a token reads a checkpoint that
is at most `window` tokens old. Only the first piece is the host's own prefill.

Rows (dicts) go to results/accuracy.jsonl; the report (a picture and a table) is made from rows only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm import formats
from replayssm.cache import ConvGeometry, ReplayCache
from replayssm.compare import Host, end_tokens, final_number
from replayssm.testing import LayerInputs, cast

FormatChoice = str | Mapping[Any, str]
BINS = 32  # of positions in a row
# Which implementation measures, by device. Accuracy is a format's, not an implementation's (their formats agree bit for
# bit), and dozens of formats would be dozens of kernels to compile.
IMPLEMENTATION = {"cpu": "torch", "cuda": "torch"}
Z95 = 1.959963984540054


class Sample(NamedTuple):
    """A problem with its worked solution and answer."""

    prompt: str
    solution: str
    answer: str


def read_samples(path: Path) -> list[Sample]:
    """All rows of a JSONL file of objects with `prompt` and, for tasks, `solution` and `answer`.

    Raises:
        ValueError: the file or a prompt is missing.
    """
    if not path.is_file():
        raise ValueError(
            f"{path} is not a file: --problems takes JSONL with prompt and, for tasks, solution and answer."
        )
    samples = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            samples.append(Sample(row["prompt"], row.get("solution", ""), str(row.get("answer", ""))))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f'{path}, line {number} is not a JSON object with a "prompt".') from error
    if not samples:
        raise ValueError(f"{path} is empty: give at least one prompt.")
    return samples


def read_format(text: str) -> FormatChoice:
    """A format's name, or what `replayssm calibrate` wrote to the file FILE.json.

    Raises:
        ValueError: there is no such format or file.
    """
    if not text.endswith(".json"):
        return formats.get(text).name
    try:
        return json.loads(Path(text).read_text())["format"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{text} is not a file that `replayssm calibrate` wrote: {error!r}.") from error


def stream(samples: Sequence[Sample], first: int, count: int) -> str:
    """`count` solved problems one after the other, beginning with number `first`; the list is a circle."""
    some = (samples[(first + i) % len(samples)] for i in range(count))
    return "".join(f"{sample.prompt}{sample.solution}\n\n" for sample in some)


class Streams(NamedTuple):
    """Token streams of solved problems.

    Attributes:
        ids: [B, N]
        worked: bool [B, N], the columns whose next token belongs to a solution (a question's cannot be known).
    """

    ids: Tensor
    worked: Tensor


def token_rows(host: Host, samples: Sequence[Sample], rows: int, tokens: int) -> Streams:
    """Streams of solved problems (or of prompts alone, where no solution is known), each from another problem on."""

    def encoded(text: str) -> list[int]:
        return host.tokenizer(text, return_token_type_ids=False)["input_ids"]

    found, worked = [], []
    for b in range(rows):
        number, ids, inside = b * len(samples) // rows, list[int](), list[bool]()
        while len(ids) < tokens + 1:
            sample = samples[number % len(samples)]
            question, solution = encoded(sample.prompt), encoded(f"{sample.solution}\n\n")
            ids += question + solution
            inside += [False] * len(question) + [True] * len(solution)
            number += 1
        found.append(ids[:tokens])
        worked.append(inside[1 : tokens + 1])
    device = host.model.device
    return Streams(torch.tensor(found, device=device), torch.tensor(worked, device=device))


# ---- forced decoding ----


@contextmanager
def replaying(host: Host, format: FormatChoice, window: int, seed: int = 0) -> Iterator[Any]:
    """An empty host cache that the replayed cache serves, `window` tokens a step at most, for as long as the block."""
    from transformers import DynamicCache

    from replayssm.integrations.transformers import disable, enable

    enable(
        host.model,
        window=window,
        format=format,
        max_tokens=window,
        staggered=False,
        seed=seed,
        implementation=IMPLEMENTATION[host.model.device.type],
    )
    try:
        yield DynamicCache(config=host.model.config)
    finally:
        disable(host.model)


def feed(host: Host, ids: Tensor, mask: Tensor, cache: Any, window: int) -> Iterator[Tensor]:
    """Feed ids [B, N] (left-padded: mask [B, N]) `window` columns at a time: their logits [B, columns, vocabulary]."""
    for start in range(0, ids.shape[1], window):
        end = min(start + window, ids.shape[1])
        yield forward(host, ids[:, start:end], mask[:, :end], cache)


def logprobs(host: Host, ids: Tensor, format: FormatChoice, window: int, seed: int = 0) -> Iterator[Tensor]:
    """Log-probabilities [B, columns, vocabulary] behind every column of ids [B, N], `window` columns at a time."""
    with replaying(host, format, window, seed) as cache:
        for logits in feed(host, ids, torch.ones_like(ids), cache, window):
            yield logits.float().log_softmax(-1)


@torch.inference_mode()
def forward(host: Host, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
    """Logits [B, T, vocabulary] of new columns behind a host cache; mask [B, past + T]."""
    model = host.model
    name = "cache_params" if model.config.model_type == "mamba2" else "past_key_values"
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    options = {} if model.config.model_type == "mamba2" else {"position_ids": positions}
    return model(ids, attention_mask=mask, use_cache=True, **{name: cache}, **options).logits


# ---- kl ----


def kl(
    host: Host, streams: Streams, choices: Sequence[FormatChoice], window: int = 16, batch: int = 16, seed: int = 0
) -> list[dict[str, Any]]:
    """One row per format: KL(fp32 || format) in nats and top-1 agreement, by position and over all.

    The first piece, which the host prefills, is left out. `solutions` holds the same for tokens of solutions, their
    surprise (nats a token) and its paired difference from fp32. Intervals (95 %) are over streams.
    """
    B, N = streams.ids.shape
    measured: list[list[Tensor]] = [[] for _ in choices]  # per batch [4, B, N]: KL, top 1 equal, surprise, fp32's
    for first in range(0, B, batch):
        ids = streams.ids[first : first + batch]
        reference = list(logprobs(host, ids, "fp32", window))
        for i, choice in enumerate(choices):
            pieces, start = [], 0
            for p, q in zip(reference, logprobs(host, ids, choice, window, seed), strict=True):
                following = torch.nn.functional.pad(ids, (0, 1))[:, start + 1 : start + 1 + p.shape[1], None]
                surprise = (-x.gather(2, following)[..., 0] for x in (q, p))
                pieces.append(
                    torch.stack([(p.exp() * (p - q)).sum(-1), (p.argmax(-1) == q.argmax(-1)).float(), *surprise])
                )
                start += p.shape[1]
            measured[i].append(torch.cat(pieces, 2).double().cpu())
    edges = [window + i * (N - 1 - window) // BINS for i in range(BINS + 1)]
    worked = streams.worked[:, window:-1].cpu()
    rows = []
    for parts in measured:
        whole = torch.cat(parts, 1)[:, :, window:-1]  # the last column's next token is not there
        divergence, equal, surprise_here, surprise_fp32 = whole
        by_bin = [torch.cat(parts, 1)[:2, :, a:b].mean((1, 2)).tolist() for a, b in zip(edges, edges[1:], strict=False)]
        row = {
            "measure": "kl",
            "rows": B,
            "tokens": N,
            "kl": float(divergence.mean()),
            "kl_95": interval(divergence.mean(1).tolist()),
            "kl_largest": float(divergence.max()),
            "top1": float(equal.mean()),
            "nll": float(surprise_here.mean()),
            "nll_fp32": float(surprise_fp32.mean()),
            "positions": edges,
            "kl_by_position": [k for k, _ in by_bin],
            "top1_by_position": [t for _, t in by_bin],
        }
        if worked.any(1).all():
            mean = [(torch.where(worked, x, 0.0).sum(1) / worked.sum(1)) for x in whole]  # by stream
            row["solutions"] = {
                "kl": float(mean[0].mean()),
                "kl_95": interval(mean[0].tolist()),
                "top1": float(mean[1].mean()),
                "nll": float(mean[2].mean()),
                "nll_fp32": float(mean[3].mean()),
                "nll_difference_95": interval((mean[2] - mean[3]).tolist()),
            }
        rows.append(row)
    return rows


# ---- drift ----


class Recorded(NamedTuple):
    """What the recurrent layers of a model take in over N tokens of one row: per layer x [1, N, C], raw_g, raw_w."""

    recurrence: str
    geometry: Any
    conv: ConvGeometry
    weights: list[Any]
    inputs: list[LayerInputs]


@torch.inference_mode()
def layer_inputs(host: Host, ids: Tensor, piece: int = 512) -> Recorded:
    """Run the host over ids [1, N] and keep what every recurrent layer takes in."""
    from transformers import DynamicCache

    from replayssm.integrations.transformers.adapter import _recurrent_layers
    from replayssm.integrations.transformers.families import MIXERS

    decoder, mixers = _recurrent_layers(host.model)
    family = MIXERS[type(mixers[0]).__name__]
    kept: list[list[Any]] = [[] for _ in mixers]

    def keep(i: int) -> Callable[..., None]:
        def hook(mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            kept[i].append(family.inputs(mixer, hidden)[:3])

        return hook

    handles = [mixer.register_forward_pre_hook(keep(i), with_kwargs=True) for i, mixer in enumerate(mixers)]
    try:
        cache = DynamicCache(config=host.model.config)
        for start in range(0, ids.shape[1], piece):
            some = ids[:, start : start + piece]
            forward(host, some, torch.ones_like(ids[:, : start + some.shape[1]]), cache)
    finally:
        for handle in handles:
            handle.remove()
    return Recorded(
        family.recurrence,
        family.geometry(mixers[0]),
        ConvGeometry(mixers[0].conv_dim, mixers[0].conv_kernel_size),
        [cast(family.weights(mixer, decoder.config), torch.float32) for mixer in mixers],
        [_each(lambda *parts: torch.cat(parts, 1).float(), *some) for some in kept],
    )


def _each(of: Callable[..., Tensor], *inputs: Any) -> LayerInputs:
    """A function of the tensors at the same place of several LayerInputs; None stays None."""
    parts = [None if some[0] is None else of(*some) for some in zip(*inputs, strict=True)]
    return LayerInputs(*parts)  # type: ignore[arg-type]


@torch.inference_mode()
def run_layers(
    layers: Recorded, format: FormatChoice, marks: Sequence[int], window: int = 16, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """All recurrent layers over the same inputs: states at `marks` tokens, [marks, H, V, K] a layer, and outputs."""
    from replayssm.api import decode_layer

    exact = format == "fp64"
    dtype = torch.float64 if exact else torch.float32
    device = layers.inputs[0][0].device
    cache = ReplayCache(
        layers.recurrence,
        layers.geometry,
        layers=len(layers.inputs),
        slots=1,
        window=window,
        max_tokens=window,
        format=format,
        dtype=dtype,
        conv=layers.conv,
        staggered=False,
        seed=seed,
        device=device,
        implementation=IMPLEMENTATION[device.type],
    )
    slots = cache.allocate(1)
    cache.reset(slots)
    weights = [cast(some, dtype) for some in layers.weights]
    states: list[list[Tensor]] = [[] for _ in weights]
    outputs: list[list[Tensor]] = [[] for _ in weights]
    for start in range(0, layers.inputs[0][0].shape[1], window):
        step = cache.begin(slots, tokens=window)
        for i, inputs in enumerate(layers.inputs):
            now = _each(lambda x: x[:, start : start + window].to(dtype), inputs)  # noqa: B023
            outputs[i].append(decode_layer(cache, i, step, now.x, now.raw_g, now.raw_w, weights[i])[0])
        cache.commit(step)
        if start + window in marks:
            for i, found in enumerate(states):
                found.append(cache.materialize(i, slots)[0])
    return [torch.stack(found) for found in states], [torch.cat(found) for found in outputs]


def drift(
    layers: Recorded, choices: Sequence[FormatChoice], window: int = 16, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """One row per format: relative error of every layer's state against fp64 at 512, 1024, ... tokens, its growth.

    `law` says how the error goes with the number of tokens n: "bounded" where a fit of error ~ n^slope over the marks
    from 2,048 on has a slope below 0.1, else "n^slope".
    """
    N = layers.inputs[0][0].shape[1] // window * window
    layers = layers._replace(inputs=[_each(lambda x: x[:, :N], some) for some in layers.inputs])
    marks = [n for n in (512 << i for i in range(16)) if n <= N]
    truth, right = run_layers(layers, "fp64", marks, window)
    plain, _ = run_layers(layers, "fp32", marks, window)
    for choice in choices:
        states, outputs = (plain, _) if choice == "fp32" else run_layers(layers, choice, marks, window, seed)
        found = []
        for i, (got, exact) in enumerate(zip(states, truth, strict=True)):
            errors = [float((g.double() - e).norm() / e.norm()) for g, e in zip(got, exact, strict=True)]
            slope = _slope(marks, errors)
            y = outputs[i].double() - right[i]
            found.append(
                {
                    "layer": i,
                    "errors": errors,
                    "slope": slope,
                    "law": None if slope is None else "bounded" if slope < 0.1 else f"n^{slope:.2f}",
                    "output_error": float(y.norm() / right[i].norm()),
                    "bitwise_fp32": bool(torch.equal(got, plain[i])),
                }
            )
        yield {
            "measure": "drift",
            "tokens": N,
            "marks": marks,
            "layers": found,
            "state_error": max(layer["errors"][-1] for layer in found),  # type: ignore[index]
            "bitwise_fp32": all(layer["bitwise_fp32"] for layer in found),
        }


def _slope(marks: Sequence[int], errors: Sequence[float]) -> float | None:
    """Least squares of log error over log n, n >= 2048; None with fewer than three marks or without an error."""
    points = [(math.log(n), math.log(e)) for n, e in zip(marks, errors, strict=True) if n >= 2048 and e > 0]
    if len(points) < 3:
        return None
    mx, my = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points)


# ---- task ----


def solve(
    host: Host,
    samples: Sequence[Sample],
    count: int,
    late: int,
    format: FormatChoice,
    window: int = 16,
    batch: int = 64,
    new_tokens: int = 200,
    seed: int = 0,
    advance: Callable[[int], None] = lambda done: None,
) -> list[bool]:
    """Which of the first `count` problems are answered right, each behind `late` solved ones that were decoded too."""
    ends, device = torch.tensor([host.tokenizer.encode("\n\n")[0], *end_tokens(host.model)]), host.model.device
    ends = ends.to(device)
    prompts = [stream(samples, i + 1, late) + samples[i].prompt for i in range(count)]
    ids = [host.tokenizer(prompt, return_token_type_ids=False)["input_ids"] for prompt in prompts]
    order = sorted(range(count), key=lambda i: len(ids[i]))
    right = [False] * count
    for first in range(0, count, batch):
        some = order[first : first + batch]
        width = max(len(ids[i]) for i in some)
        rows = torch.tensor(
            [[host.tokenizer.pad_token_id] * (width - len(ids[i])) + ids[i] for i in some], device=device
        )
        length = torch.tensor([len(ids[i]) for i in some], device=device)
        mask = (torch.arange(width, device=device) >= width - length[:, None]).long()
        tokens: list[Tensor] = []
        with replaying(host, format, window, seed) as cache:
            *_, logits = feed(host, rows, mask, cache, window)
            ended = torch.zeros(len(some), dtype=torch.bool, device=device)
            for _ in range(new_tokens):
                tokens.append(logits[:, -1].argmax(-1, keepdim=True))
                ended |= torch.isin(tokens[-1][:, 0], ends)
                if bool(ended.all()):
                    break
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                logits = forward(host, tokens[-1], mask, cache)
        for i, row in zip(some, torch.cat(tokens, 1).tolist(), strict=True):
            stop = next((j for j, token in enumerate(row) if token in ends.tolist()), len(row))
            text = str(host.tokenizer.decode(row[:stop], skip_special_tokens=True))
            right[i] = "####" in text and final_number(text) == final_number(samples[i].answer)
        advance(first + len(some))
    return right


def interval(values: Sequence[float]) -> list[float] | None:
    """95 % interval of a mean, from its standard error; None for a single value."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return None
    half = Z95 * math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1) / n)
    return [mean - half, mean + half]


def wilson(right: int, n: int) -> list[float]:
    """95 % interval of a share."""
    p, z = right / n, Z95
    centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return [max(0.0, (centre - spread) / (1 + z * z / n)), min(1.0, (centre + spread) / (1 + z * z / n))]


def paired(got: Sequence[bool], reference: Sequence[bool]) -> dict[str, Any]:
    """Accuracy against a reference on the same problems: difference with its 95 % interval, exact McNemar test.

    The interval is Bonett and Price's (2012) for paired proportions, which adds one to both discordant counts.
    """
    n = len(got)
    lost = sum(r and not g for g, r in zip(got, reference, strict=True))
    won = sum(g and not r for g, r in zip(got, reference, strict=True))
    p_lost, p_won = (lost + 1) / (n + 2), (won + 1) / (n + 2)
    half = Z95 * math.sqrt((p_lost + p_won - (p_won - p_lost) ** 2) / (n + 2))
    odd = lost + won
    tail = sum(math.comb(odd, i) for i in range(min(lost, won) + 1)) / 2**odd if odd else 1.0
    return {
        "problems": n,
        "right": sum(got),
        "right_95": wilson(sum(got), n),
        "right_fp32": sum(reference),
        "lost": lost,
        "won": won,
        "difference": (sum(got) - sum(reference)) / n,
        "difference_95": [p_won - p_lost - half, p_won - p_lost + half],
        "p_value": min(1.0, 2 * tail),
    }


# ---- what a format costs, and calibration ----


def describe(host: Host, choice: FormatChoice, window: int) -> dict[str, Any]:
    """Bytes of a format on a model: stored per state element, and read and written per token over all layers."""
    from replayssm.integrations.transformers import disable, enable
    from replayssm.integrations.transformers.adapter import HOOK, _recurrent_layers

    enable(host.model, window=window, format=choice)
    try:
        recipe = _recurrent_layers(host.model)[0].__dict__[HOOK].recipe
        cache = recipe.cache(1)
    finally:
        disable(host.model)
    H, _, V, K = cache.geometry
    traffic = cache.bytes_per_token()
    return {
        "stored_bytes_per_element": cache.nbytes.checkpoint / (len(cache.layers) * H * V * K),
        "bytes_read_per_token": traffic.read,
        "bytes_written_per_token": traffic.written,
        "state_bytes": cache.nbytes.checkpoint,
        "layers": len(cache.layers),
    }


class Calibration(NamedTuple):
    """What calibrate found: a format for every layer, its KL, and the KL of every layer and format alone."""

    format: dict[str, str]
    kl: float
    cost: dict[str, Any]
    alone: dict[str, list[float]]
    tried: int


def calibrate(
    host: Host,
    streams: Streams,
    candidates: Sequence[str],
    budget: float,
    window: int = 16,
    batch: int = 16,
    seed: int = 0,
    advance: Callable[[str], None] = lambda doing: None,
) -> Calibration:
    """The cheapest format for every recurrent layer with which the mean KL from fp32 stays within `budget` nats.

    (1) The KL of every layer in every format alone, all others in fp32. (2) KLs of several layers add up nearly, so the
    cheapest choice within the budget is a knapsack over layers: solved exactly on a grid of 1,000 parts of the budget.
    (3) What was chosen is measured as a whole; where it is over the budget, it is chosen again with a smaller one.

    Cost is bytes read and written per token (flushes spread over the window).
    """
    total = describe(host, "fp32", window)["layers"]
    costs = {name: _cost(host, name, window) for name in ("fp32", *candidates)}
    alone: dict[str, list[float]] = {"fp32": [0.0] * total}
    for name in candidates:
        if formats.get(name).name != "fp32":
            advance(f"each layer in {name}")
            choices = [{"default": "fp32", str(i): name} for i in range(total)]
            alone[name] = [row["kl"] for row in kl(host, streams, choices, window, batch, seed)]
    allowed, tried = budget, 0
    while True:
        chosen = _knapsack(alone, costs, allowed)
        choice = {"default": max(set(chosen), key=chosen.count)} | {str(i): name for i, name in enumerate(chosen)}
        tried += 1
        advance(f"the choice as a whole, try {tried}")
        exact = set(chosen) == {"fp32"}
        measured = 0.0 if exact else kl(host, streams, [choice], window, batch, seed)[0]["kl"]
        if measured <= budget:
            short = {k: v for k, v in choice.items() if k == "default" or v != choice["default"]}
            return Calibration(short, measured, describe(host, short, window), alone, tried)
        allowed *= min(0.8, 0.9 * budget / measured)


def _cost(host: Host, name: str, window: int) -> float:
    found = describe(host, name, window)
    return (found["bytes_read_per_token"] + found["bytes_written_per_token"]) / found["layers"]


def _knapsack(
    alone: Mapping[str, Sequence[float]], costs: Mapping[str, float], budget: float, parts: int = 1000
) -> list[str]:
    """A format per layer with the least sum of costs and a sum of KLs, each rounded up to budget / parts, in budget."""
    best: dict[int, tuple[float, list[str]]] = {0: (0.0, [])}
    for i in range(len(alone["fp32"])):
        grown: dict[int, tuple[float, list[str]]] = {}
        for used, (cost, names) in best.items():
            for name, layers in alone.items():
                now = used + math.ceil(max(layers[i], 0.0) / budget * parts) if name != "fp32" else used
                if now <= parts and (now not in grown or cost + costs[name] < grown[now][0]):
                    grown[now] = (cost + costs[name], [*names, name])
        best = grown
    return min(best.values(), key=lambda entry: entry[0])[1]


# ---- real checkpoints through lm-evaluation-harness ----


def harness(
    model: str,
    tasks: Sequence[str],
    choice: FormatChoice,
    window: int,
    batch: int,
    limit: int | None,
    device: str,
    dtype: str,
    task_folder: str | None = None,
) -> dict[str, Any]:
    """Results of lm-evaluation-harness tasks with the replayed cache: {task: metrics}.

    Tasks that generate decode token by token as always. Tasks that compare log-probabilities of given answers would be
    one prefill, which no format touches: they are forced through the cache in pieces of `window` tokens instead.
    `task_folder` holds tasks of one's own, as the harness writes them (YAML).

    Raises:
        ValueError: lm_eval is not installed, or weights or data cannot be reached.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(
            f"--tasks {','.join(tasks)} needs lm-evaluation-harness ({error.name} is missing): "
            "pip install 'replayssm[eval]'."
        ) from error
    from replayssm.integrations.transformers import disable, enable

    class Replayed(HFLM):
        """Every log-probability goes through the replayed cache."""

        def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Any = None) -> Tensor:
            disable(self.model)
            try:
                return torch.cat(list(logprobs(Host("", self.model, self.tokenizer), inps, choice, window)), 1)
            finally:
                enable(self.model, window=window, format=choice)

    try:
        adapter = Replayed(pretrained=model, device=device, batch_size=batch, dtype=dtype, trust_remote_code=False)
        enable(adapter.model.eval(), window=window, format=choice)
        manager = TaskManager(include_path=task_folder)
        found = lm_eval.simple_evaluate(model=adapter, tasks=list(tasks), limit=limit, task_manager=manager)
    except (OSError, ConnectionError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--tasks {','.join(tasks)}: weights of {model} or the tasks' data can't be reached: {reason} Give --model "
            "a local folder, and fetch the data once where there is a network (HF_HOME keeps it, HF_HUB_OFFLINE=1 then "
            "uses it)."
        ) from error
    except KeyError as error:
        raise ValueError(f"--tasks: lm-evaluation-harness has no task {error}.") from error
    return found["results"]
