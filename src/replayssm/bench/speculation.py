"""Speculative decoding of whole models: every source of drafts, through both doors, checked and then timed.

    host          Transformers' own cache and its own plain greedy steps: the reference
    transformers  the enabled model's own generate, with prompt lookup or an assistant model (one row at a time)
    replayssm     replayssm.generate, plain and with every source, chains and trees, batches of any size

Checked in every round: the log-probabilities that every token was chosen from, the recurrent state and the convolution
window of every layer, against those of the host after the same number of tokens. Tokens are compared to the end.
Speed: tokens per second from the end of prefill, the fastest of `repeats` runs for each batch; with 0 there is none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from replayssm.bench import append_rows
from replayssm.compare import Drafting, Host, load_draft, load_model, provenance

CACHE = "past_key_values"


class Reference(NamedTuple):
    """What the host made of one prompt, token by token.

    Attributes:
        prompt: tokens of it; text: [prompt + N] with the new ones.
        logprobs: [N, vocabulary] that each new token was chosen from.
        states: per number of tokens, from the prompt's on, and per layer: the state (our layout) and the window.
    """

    prompt: int
    text: Tensor
    logprobs: Tensor
    states: list[list[tuple[Tensor, Tensor]]]


class Stray:
    """Largest differences to the reference so far; states and windows relative to their norm."""

    def __init__(self) -> None:
        self.logprob = self.state = self.window = 0.0
        self.states = self.equal = self.compared = self.forwards = 0

    def add(self, other: Stray) -> None:
        """Both together."""
        for name in ("logprob", "state", "window"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for name in ("states", "equal", "compared", "forwards"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def note_state(self, reference: Reference, tokens: int, rows: Any, row: int) -> None:
        """Every layer of one row, which has taken in `tokens` tokens."""
        index = tokens - reference.prompt
        if not 0 <= index < len(reference.states):
            return
        slot = rows.slots[row : row + 1]
        for layer, (state, window) in enumerate(reference.states[index]):
            ours = rows.cache.materialize(layer, slot)[0]
            self.state = max(self.state, float((ours - state).norm() / state.norm()))
            ours = rows.cache.conv_window(layer, slot)[0]
            self.window = max(self.window, float((ours - window).norm() / window.norm()))
        self.states += 1

    def note_logits(self, reference: Reference, index: int, logits: Tensor) -> None:
        """What new token `index` was chosen from."""
        if index < len(reference.logprobs):
            gap = (logits.float().log_softmax(-1) - reference.logprobs[index]).abs().max()
            self.logprob = max(self.logprob, float(gap))

    def note_text(self, reference: Reference, new: Tensor) -> None:
        """The new tokens [N]."""
        want = reference.text[reference.prompt :]
        self.equal += int((new[: len(want)].to(want.device) == want).sum())
        self.compared += len(want)


def make_reference(host: Host, prompt: str, new_tokens: int, recipe: Any) -> Reference:
    """Plain greedy decoding with the host's own cache."""
    from transformers import DynamicCache

    ids = host.inputs([prompt])["input_ids"]
    cache = DynamicCache(config=host.model.config)
    text, newest, logprobs, states = ids, ids, [], []
    for _ in range(new_tokens):
        logits = host.model(newest, **{CACHE: cache}, use_cache=True).logits[:, -1]
        layers = [cache.layers[i] for i in recipe.layer_indices]
        keep = recipe.conv.width - 1
        states.append(
            [(recipe.turned(x.recurrent_states[0])[0].clone(), x.conv_states[0][0, :, -keep:].clone()) for x in layers]
        )
        logprobs.append(logits[0].float().log_softmax(-1))
        newest = logits.argmax(1)[:, None]
        text = torch.cat([text, newest], 1)
    return Reference(ids.shape[1], text[0], torch.stack(logprobs), states)


# ---- doors ----


def check_replayssm(
    model: Any, references: list[Reference], inputs: dict[str, Tensor], draft: Drafting | None
) -> Stray:
    """Every round of replayssm.generate for a batch."""
    from replayssm.integrations.transformers.drafts import nodes
    from replayssm.integrations.transformers.generation import Rounds, Sampler, draft_source
    from replayssm.integrations.transformers.ragged import RaggedBatch

    source = None if draft is None else draft_source(model, draft.source, draft.shape)
    batch = RaggedBatch(model, 1 + (0 if draft is None else nodes(draft.shape)))
    stray, N = Stray(), len(references[0].logprobs)
    made: list[list[int]] = [[] for _ in references]
    rounds = Rounds(batch, source, Sampler(0.0, 0, 1.0, None), inputs["input_ids"], inputs["attention_mask"])
    for i, (tokens, counts, logits) in enumerate(rounds):
        stray.forwards += int(rounds.alive.sum()) if i else 0  # the first is prefill
        for b, count in enumerate(counts.tolist()):
            for j in range(count):
                stray.note_logits(references[b], len(made[b]), logits[b, j])
                made[b].append(int(tokens[b, j]))
            if count:  # the newest token waits for its forward
                stray.note_state(references[b], references[b].prompt + len(made[b]) - 1, batch.rows, b)
            rounds.alive[b] = len(made[b]) < N
    for reference, row in zip(references, made, strict=True):
        stray.note_text(reference, torch.tensor(row[:N]))
    return stray


@contextmanager
def watching(model: Any, reference: Reference, stray: Stray) -> Iterator[None]:
    """Compare states before and logits after every forward of an enabled model, for one row."""
    from replayssm.integrations.transformers.adapter import decoder_of
    from replayssm.integrations.transformers.host_cache import rows_of

    seen = [0]

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache: Any = kwargs[CACHE]
        rows = rows_of(cache)
        seen[0] = cache.get_seq_length()
        if rows is not None and rows.cache is not None:
            stray.note_state(reference, seen[0], rows, 0)

    def after(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        ids = kwargs["input_ids"][0]
        text = reference.text[seen[0] : seen[0] + len(ids)]
        right = int((ids[: len(text)] == text).long().cumprod(0).sum())
        first = len(ids) - out.logits.shape[1]
        for j in range(first, right):
            stray.note_logits(reference, seen[0] + j + 1 - reference.prompt, out.logits[0, j - first])

    hooks = [
        decoder_of(model).register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Clock:
    """Transformers' streamer that says when the first and the newest tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """The prompt, then tokens."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing."""

    def seconds(self) -> float:
        """From the first new tokens on."""
        return self.times[-1] - self.times[1]


# ---- the command ----


def main(
    model: Annotated[list[Path], typer.Option("--model", "-m", help="Model folder; repeatable.")],
    prompts: Annotated[Path, typer.Option(help='JSONL of {"prompt"}.')] = Path("models/heldout.jsonl"),
    count: Annotated[int, typer.Option(help="How many of them.", min=1)] = 50,
    new_tokens: Annotated[int, typer.Option(min=2)] = 96,
    batch: Annotated[list[int], typer.Option(help="Rows at once in replayssm.generate; repeatable.")] = [1, 10],  # noqa: B006
    draft: Annotated[list[str], typer.Option(help="ngram, mtp or a folder; {model} is the model's.")] = ["ngram"],  # noqa: B006
    tree: Annotated[list[str], typer.Option(help="Shapes for every draft; repeatable.")] = ["4", "2x2x1"],  # noqa: B006
    window: int = 16,
    repeats: int = 2,
    threads: int = 1,
    out: Path = Path("results/speculation.jsonl"),
) -> None:
    """Check and time speculative decoding with every source of drafts; appends rows."""
    from transformers.utils import logging

    from replayssm.cli import _problems

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    asked = [problem.prompt for problem in _problems(prompts, count)]
    for folder in model:
        host = load_model(folder, torch.float32)
        host.model.generation_config.eos_token_id = None
        rows = list(_rows(host, folder, asked, new_tokens, batch, draft, tree, window, repeats))
        append_rows(out, rows, provenance())


def _rows(
    host: Host,
    folder: Path,
    asked: list[str],
    new_tokens: int,
    batches: list[int],
    drafts: list[str],
    trees: list[str],
    window: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    from replayssm.integrations.transformers import disable, enable
    from replayssm.integrations.transformers.adapter import decoder_of, recipe_of

    model, N = host.model, len(asked) * (new_tokens - 1)
    enable(model, window=window)
    recipe = recipe_of(decoder_of(model))
    disable(model)
    references = [make_reference(host, prompt, new_tokens, recipe) for prompt in asked]
    common = {
        "model": host.name,
        "problems": len(asked),
        "new_tokens": new_tokens,
        "window": window,
        "dtype": "float32",
    }

    def row(
        door: str, rows: int, draft: str | None, tree: str | None, stray: Stray | None, **more: Any
    ) -> dict[str, Any]:
        line = common | {"door": door, "batch": rows, "draft": draft, "tree": tree} | more
        if stray is not None:
            line |= {
                "equal_tokens": stray.equal, "compared_tokens": stray.compared,
                "states_compared": stray.states, "max_state_error": stray.state,
                "max_logprob_difference": stray.logprob, "max_window_error": stray.window,
            }  # fmt: skip
        print({k: round(v, 8) if isinstance(v, float) else v for k, v in line.items()}, flush=True)
        return line

    def through_transformers(**options: Any) -> float | None:
        """Tokens per second over all prompts, one at a time."""
        total = 0.0
        for prompt in asked:
            fastest = float("inf")
            for _ in range(repeats):
                clock = Clock()
                model.generate(
                    **host.inputs([prompt]), max_new_tokens=new_tokens, do_sample=False, streamer=clock, **options
                )
                fastest = min(fastest, clock.seconds())
            total += fastest
        return N / total if repeats else None

    if repeats:
        yield row("host", 1, None, None, None, tokens_per_second=through_transformers(), tokens_per_forward=1.0)

    loaded = [
        load_draft(host, name.format(model=folder), shape, window=window, format="fp32")
        for name in drafts
        for shape in trees
    ]
    for rows in batches:
        for drafting in [None, *loaded]:
            yield _through_replayssm(host, asked, references, rows, drafting, window, repeats, row)

    for drafting in loaded:
        if set(drafting.shape) != {1} or drafting.name == "mtp":
            continue
        depth = len(drafting.shape)
        enable(model, window=window, max_tokens=depth + 1)
        if drafting.name == "ngram":
            options: dict[str, Any] = {"prompt_lookup_num_tokens": depth}
        else:
            enable(drafting.source, window=window, max_tokens=depth + 1)
            config = drafting.source.generation_config
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = depth, "constant"
            config.assistant_confidence_threshold = 0.0
            options = {"assistant_model": drafting.source}
        stray = Stray()
        for prompt, reference in zip(asked, references, strict=True):
            with watching(model, reference, stray):
                made = model.generate(**host.inputs([prompt]), max_new_tokens=new_tokens, do_sample=False, **options)
            stray.note_text(reference, made[0, reference.prompt :])
        speed = through_transformers(**options)
        disable(model)
        yield row("transformers", 1, drafting.name, str(depth), stray, tokens_per_second=speed)


def _through_replayssm(
    host: Host,
    asked: list[str],
    references: list[Reference],
    rows: int,
    drafting: Drafting | None,
    window: int,
    repeats: int,
    row: Any,
) -> dict[str, Any]:
    from replayssm.integrations.transformers import disable, enable, generate

    model, new_tokens = host.model, len(references[0].logprobs)
    whole, seconds = Stray(), 0.0
    enable(model, window=window)
    for first in range(0, len(asked), rows):
        inputs = host.inputs(asked[first : first + rows])
        stray = check_replayssm(model, references[first : first + rows], inputs, drafting)
        whole.add(stray)
        fastest = float("inf")
        for _ in range(repeats):
            got = generate(
                model,
                inputs["input_ids"],
                inputs["attention_mask"],
                draft=None if drafting is None else drafting.source,
                tree=1 if drafting is None else drafting.shape,
                max_new_tokens=new_tokens,
                eos_token_id=(),
            )
            fastest = min(fastest, got.seconds)
        seconds += fastest
    disable(model)
    made = len(asked) * (new_tokens - 1)
    speed = {"tokens_per_forward": made / whole.forwards, "tokens_per_second": made / seconds if repeats else None}
    if drafting is None:
        return row("replayssm", rows, None, None, whole, **speed)
    return row("replayssm", rows, drafting.name, "x".join(map(str, drafting.shape)), whole, **speed)
