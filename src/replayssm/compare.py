"""The host's own cache and the replayed cache side by side: one model, the same prompts, the same `generate`.

1. The host decodes greedily; its tokens and its log-probabilities are the reference.
2. Each replayed cache is fed exactly those tokens, and its log-probabilities are compared at every step (teacher
   forcing). Tokens chosen freely would part at the first tie and then say nothing.
   With drafts, the tokens are free: it is compared as far as they are the host's.
3. The caches take turns, each then decoding freely, which gives its own answers. All runs are timed, prefill excluded
   and flushes included, and the fastest counts. Every row decodes the same number of tokens, past the end of its
   answer, so that a batch stays a batch.

State traffic is counted, not measured. The host reads every state element once and writes it once per token, in the
dtype it keeps it in (fp32), and does the same with its convolution window. The replayed cache's figures are its own
`bytes_per_token()`, flushes amortised. Weights, activations and attention's keys and values are the same for both, and
in neither figure.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from replayssm.files import whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from replayssm.integrations.transformers import Generation

SCHEMA = "replayssm.compare/1"


@dataclass(frozen=True)
class Problem:
    """A prompt and, where it is known, the final answer."""

    prompt: str
    answer: str | None = None


@dataclass(frozen=True)
class Row:
    """What one cache did on one model. Bytes are per row (request); `None`: does not apply, or is not known."""

    model: str
    model_type: str
    cache: str  # "host" or "replay"
    format: str  # storage of the recurrent state
    window: int | None
    dtype: str
    batch: int
    problems: int
    new_tokens: int  # per problem
    tokens_per_second: float  # all rows of the batch together
    state_bytes_read_per_token: float
    state_bytes_written_per_token: float
    state_memory_bytes: int
    max_logprob_difference: float | None
    equal_tokens: int | None  # teacher-forced: steps whose most probable token is the host's; drafts: tokens before the
    # first that differs
    compared_tokens: int | None
    right: int | None  # answers right, decoding freely
    answers: int | None  # problems whose answer is known
    draft: str | None = None  # where drafts came from
    tree: str | None = None  # their shape
    tokens_per_forward: float | None = None  # with drafts


@dataclass(frozen=True)
class Comparison:
    rows: list[Row]
    example: tuple[Problem, str] | None  # a problem, and what the first replayed cache wrote for it


# --- models and problems ----------------------------------------------------------------------------------------------


class Host(NamedTuple):
    """A model of the host library, with its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def inputs(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        encoded = self.tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        return dict(encoded.to(self.model.device))


def load_model(folder: Path, dtype: torch.dtype) -> Host:
    """A model and its tokenizer from a local folder; a `ValueError` of one sentence where it cannot be."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: --model takes a folder with config.json, weights and a tokenizer.")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: it is not a Transformers model folder.")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ValueError(f"{folder} holds a config.json but no weights (*.safetensors or pytorch_model*.bin).")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a malformed or unknown config raises
        raise ValueError(f"{folder}/config.json is no config that Transformers knows: {_first_line(error)}") from error
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, local_files_only=True)
    except Exception as error:
        raise ValueError(f"the weights in {folder} could not be loaded: {_first_line(error)}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    except Exception as error:
        raise ValueError(f"{folder} holds no tokenizer that Transformers can load: {_first_line(error)}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Host(folder.resolve().name, model.to(device).eval(), tokenizer)


def check_support(host: Host, formats: Sequence[str], window: int) -> None:
    """`ValueError` where the replayed cache can't serve this model, or lacks a format."""
    from replayssm.integrations.transformers import disable, enable

    for name in formats:
        disable(enable(host.model, window=window, format=name))


class Drafting(NamedTuple):
    """Where drafts come from, and their tree."""

    name: str
    source: Any  # as replayssm.generate takes it
    shape: tuple[int, ...]


def load_draft(host: Host, name: str, tree: str, *, window: int, format: str) -> Drafting:
    """The drafts that `name` (ngram, mtp, a folder) and `tree` (4, or 3x2x1) mean; `ValueError` where it cannot be."""
    from replayssm.integrations.transformers import disable, enable
    from replayssm.integrations.transformers.adapter import decoder_of, is_recurrent
    from replayssm.integrations.transformers.generation import draft_source, tree_shape
    from replayssm.integrations.transformers.ragged import RaggedBatch

    try:
        shape = tree_shape(int(tree) if tree.isdigit() else [int(width) for width in tree.split("x")])
    except ValueError as error:
        raise ValueError(
            f"--tree must be a number of drafts in a row such as 4, or children per depth such as 3x2x1; got {tree}."
        ) from error
    source: Any = name
    if name not in ("ngram", "mtp"):
        try:
            draft = load_model(Path(name), host.model.dtype)
        except ValueError as error:
            raise ValueError(f"--draft must be ngram, mtp or a model folder: {error}") from error
        if draft.tokenizer.get_vocab() != host.tokenizer.get_vocab():
            raise ValueError(
                f"the draft model must have the model's tokenizer: {name} has another one than {host.name}. Train or "
                "choose a draft model with the same vocabulary."
            )
        source, name = draft.model, draft.name
        if is_recurrent(decoder_of(source)):
            enable(source, window=window, format=format)
    draft_source(host.model, source, shape)
    enable(host.model, window=window, format=format)
    RaggedBatch(host.model, 1)
    disable(host.model)
    return Drafting(name, source, shape)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".") + "."


def end_tokens(model: PreTrainedModel) -> list[int]:
    """Ids that end an answer."""
    ids = model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def final_number(text: str) -> str | None:
    """The number after the first `####` (how worked answers mark it), else the last number: `$1,250.` gives `1250`."""
    _, mark, rest = text.partition("####")
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", rest if mark else text)
    if not numbers:
        return None
    number = numbers[0 if mark else -1].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


# --- measuring --------------------------------------------------------------------------------------------------------


class _Watch:
    """A logits processor that times every step of `generate` and keeps its logits.

    With `force` [B, n], it feeds those tokens, whatever the model would choose.
    """

    def __init__(self, force: torch.Tensor | None = None) -> None:
        self.times: list[float] = []
        self.logits: list[torch.Tensor] = []  # per step [B, vocabulary]
        self.force = force

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.is_cuda:
            torch.cuda.synchronize(scores.device)
        step = len(self.times)
        self.times.append(time.perf_counter())
        self.logits.append(scores.clone())
        if self.force is None:
            return scores
        return torch.full_like(scores, float("-inf")).scatter_(1, self.force[:, step, None], 0.0)

    @property
    def decode_seconds(self) -> float:
        """From the first new token, which prefill gave, to the last."""
        return self.times[-1] - self.times[0]

    def logprobs(self) -> Iterator[torch.Tensor]:
        """Of every token after the first: [B, vocabulary] each."""
        return (logits.float().log_softmax(-1) for logits in self.logits[1:])


def _generate(model: PreTrainedModel, inputs: Any, new_tokens: int, watch: _Watch) -> tuple[torch.Tensor, Any]:
    """New tokens [B, n] and the host's cache object."""
    from transformers import LogitsProcessorList

    out = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=new_tokens,
        logits_processor=LogitsProcessorList([watch]),
        return_dict_in_generate=True,
    )
    cache = out["past_key_values"] if "past_key_values" in out else out["cache"]
    return out["sequences"][:, inputs["input_ids"].shape[1] :], cache


def _host_state_bytes(cache: Any) -> tuple[int, int]:
    """Bytes of recurrent state and of convolution windows in the host's cache, all rows."""
    state = window = 0
    for layer in cache.layers:
        for tensor in getattr(layer, "recurrent_states", {}).values():
            state += 0 if tensor is None else tensor.nbytes
        for tensor in getattr(layer, "conv_states", {}).values():
            window += 0 if tensor is None else tensor.nbytes
    return state, window


@dataclass
class _Tally:
    """What one cache did, summed over the batches."""

    format: str
    draft: Drafting | None = None
    rounds: int = 0  # row-forwards with drafts, and the tokens they gave
    made: int = 0
    fastest: float = 0.0  # decoding the newest batch, seconds
    seconds: float = 0.0  # decoding every batch, each at its fastest
    read: float = 0.0
    written: float = 0.0
    memory: int = 0
    difference: float = 0.0
    equal: int = 0
    compared: int = 0
    right: int = 0

    def count_against(self, generation: Generation, tokens: torch.Tensor, reference: _Watch) -> None:
        """Compare a generation with drafts with the host's tokens [B, n] and log-probabilities, and its traffic."""
        from replayssm.integrations.transformers.drafts import nodes

        assert self.draft is not None and generation.logits is not None and generation.cache is not None
        new = generation.sequences[:, -tokens.shape[1] :]
        differs = (new != tokens).cumsum(1) > 0
        same = torch.cat([torch.zeros_like(differs[:, :1]), differs[:, :-1]], 1).logical_not()  # the text before it
        for i, theirs in enumerate(reference.logprobs(), 1):
            gap = (generation.logits[:, i].float().log_softmax(-1) - theirs).abs().amax(1)
            self.difference = max(self.difference, float(torch.where(same[:, i], gap, 0).max()))
        self.equal += int((~differs[:, 1:]).sum())
        self.compared += differs[:, 1:].numel()
        self.rounds += int(generation.rounds.sum())
        self.made += len(new) * (new.shape[1] - 1)
        cache, accepted = generation.cache, self.made / self.rounds
        traffic = cache.bytes_per_token(1 + nodes(self.draft.shape), accepted)
        self.read, self.written = traffic.read, traffic.written
        self.memory = cache.nbytes.total // cache.num_slots

    def count_right(
        self, problems: Sequence[Problem], tokens: torch.Tensor, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
    ) -> list[str]:
        """Add the right answers among a batch's new tokens [B, n]; the answers as text."""
        texts = [_answer_text(tokenizer, row.tolist(), ends) for row in tokens]
        for problem, text in zip(problems, texts, strict=True):
            self.right += problem.answer is not None and final_number(text) == final_number(problem.answer)
        return texts


def compare(
    host: Host,
    problems: Sequence[Problem],
    *,
    formats: Sequence[str] = ("fp32",),
    drafts: Sequence[Drafting] = (),
    window: int = 16,
    batch: int = 16,
    new_tokens: int = 160,
    repeats: int = 2,
    advance: Callable[[str, int], None] = lambda doing, done: None,
) -> Comparison:
    """One row for the host's cache, then one per format, then one per source of drafts, in the first format.

    `advance` is told what runs next, and how many of all `passes(...)` are done.
    """
    from replayssm.integrations.transformers import disable, enable, generate, replay_cache

    model, tokenizer = host.model, host.tokenizer
    ends = end_tokens(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = tokenizer.pad_token_id

    own = _Tally("fp32")
    replays = [_Tally(name) for name in formats]
    drafted = [_Tally(formats[0], draft) for draft in drafts]
    example = None
    done = 0

    def run(tally: _Tally, inputs: dict[str, torch.Tensor], watch: _Watch) -> tuple[torch.Tensor, Any]:
        nonlocal done
        advance("host cache" if tally is own else f"replayed, {tally.format}", done)
        if tally is not own:
            enable(model, window=window, format=tally.format)
        try:
            return _generate(model, inputs, new_tokens, watch)
        finally:
            disable(model)
            done += 1

    def speculate(tally: _Tally, inputs: dict[str, torch.Tensor], output_logits: bool) -> Generation:
        nonlocal done
        assert tally.draft is not None
        advance(f"drafts, {tally.draft.name}", done)
        enable(model, window=window, format=tally.format)
        try:
            return generate(
                model,
                inputs["input_ids"],
                inputs["attention_mask"],
                draft=tally.draft.source,
                tree=tally.draft.shape,
                max_new_tokens=new_tokens,
                eos_token_id=(),
                output_logits=output_logits,
            )
        finally:
            disable(model)
            done += 1

    for first in range(0, len(problems), batch):
        some = problems[first : first + batch]
        inputs = host.inputs([problem.prompt for problem in some])

        reference = _Watch()
        tokens, cache = run(own, inputs, reference)
        own.fastest = reference.decode_seconds
        own.count_right(some, tokens, tokenizer, ends)
        state, conv = _host_state_bytes(cache)
        own.read = own.written = (state + conv) / len(some)
        own.memory = (state + conv) // len(some)

        for tally in replays:
            forced = _Watch(force=tokens)
            _, cache = run(tally, inputs, forced)
            tally.fastest = forced.decode_seconds
            replayed = replay_cache(cache)
            if replayed is None:
                raise RuntimeError(f"{host.name}: generate ran without a replayed cache although it was enabled")
            traffic = replayed.bytes_per_token()
            tally.read, tally.written = traffic.read, traffic.written
            tally.memory = replayed.nbytes.total // replayed.num_slots
            for ours, theirs in zip(forced.logprobs(), reference.logprobs(), strict=True):
                tally.difference = max(tally.difference, float((ours - theirs).abs().max()))
                tally.equal += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
                tally.compared += len(some)

        for tally in drafted:
            generation = speculate(tally, inputs, output_logits=True)
            tally.fastest = generation.seconds
            tally.count_against(generation, tokens, reference)
            tally.count_right(some, generation.sequences[:, inputs["input_ids"].shape[1] :], tokenizer, ends)

        for repeat in range(1, repeats):
            for tally in drafted:
                tally.fastest = min(tally.fastest, speculate(tally, inputs, output_logits=False).seconds)
            for tally in [own, *replays]:
                watch = _Watch()
                tokens, _ = run(tally, inputs, watch)
                tally.fastest = min(tally.fastest, watch.decode_seconds)
                if repeat == 1 and tally is not own:
                    texts = tally.count_right(some, tokens, tokenizer, ends)
                    example = example or (some[0], texts[0])

        for tally in [own, *replays, *drafted]:
            tally.seconds += tally.fastest

    answers = sum(problem.answer is not None for problem in problems)

    def row(tally: _Tally) -> Row:
        is_own = tally is own
        return Row(
            model=host.name,
            model_type=model.config.model_type,
            cache="host" if is_own else "replay",
            format=tally.format,
            window=None if is_own else window,
            dtype=str(model.dtype).removeprefix("torch."),
            batch=min(batch, len(problems)),
            problems=len(problems),
            new_tokens=new_tokens,
            tokens_per_second=len(problems) * (new_tokens - 1) / tally.seconds,
            state_bytes_read_per_token=tally.read,
            state_bytes_written_per_token=tally.written,
            state_memory_bytes=tally.memory,
            max_logprob_difference=None if is_own else tally.difference,
            equal_tokens=None if is_own else tally.equal,
            compared_tokens=None if is_own else tally.compared,
            right=tally.right if answers else None,
            answers=answers or None,
            draft=None if tally.draft is None else tally.draft.name,
            tree=None if tally.draft is None else "x".join(map(str, tally.draft.shape)),
            tokens_per_forward=None if tally.draft is None else tally.made / tally.rounds,
        )

    return Comparison([row(tally) for tally in [own, *replays, *drafted]], example)


def passes(problems: int, *, caches: int, batch: int, repeats: int) -> int:
    """How often `compare` calls `advance` for one model; `caches` beside the host's own."""
    return -(-problems // batch) * repeats * (1 + caches)


def _answer_text(tokenizer: PreTrainedTokenizerBase, tokens: list[int], ends: Sequence[int]) -> str:
    """New tokens as text, up to an end token or through the line that holds the marked answer."""
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    worked, mark, rest = str(tokenizer.decode(tokens[:stop], skip_special_tokens=True)).partition("####")
    return worked + mark + rest.split("\n")[0]


# --- rows to JSON and to a picture ------------------------------------------------------------------------------------


def provenance(commit: str | None = None) -> dict[str, Any]:
    """What a figure needs beside it to be repeated; `commit` where there is no git, which can't say what changed."""
    versions: dict[str, str | None] = {}
    for name in ("replayssm", "torch", "transformers", "triton"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    module = sys.modules["__main__"].__spec__
    program = f"python -m {module.name.removesuffix('.__main__')}" if module else Path(sys.argv[0]).name
    changed = None if commit else git("status", "--porcelain", "--untracked-files=no", "--", "src", ":/src")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"{program} {shlex.join(sys.argv[1:])}",
        "commit": commit or git("rev-parse", "HEAD"),
        "source_changed": None if changed is None else bool(changed),
        "python": platform.python_version(),
        "versions": versions,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name(),
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_json(path: Path, rows: Sequence[Row]) -> None:
    document = {"schema": SCHEMA, "provenance": provenance(), "rows": [asdict(row) for row in rows]}
    with whole(path) as part:
        part.write_text(json.dumps(document, indent=2) + "\n")


# Okabe and Ito's colours, told apart by colour-blind readers; the host is grey.
_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]


def label(row: Row) -> str:
    if row.cache == "host":
        return "host cache"
    if row.draft is not None:
        return f"drafts, {row.draft} {row.tree}"
    return f"replayed, {row.format}"


def write_plot(path: Path, rows: Sequence[Row]) -> None:
    """Four panels: speed, state traffic, state memory, difference of log-probabilities; one group of bars per model."""
    import matplotlib.ticker

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row.model for row in rows))
    labels = list(dict.fromkeys(label(row) for row in rows))
    colours = {"host cache": "#777777"} | dict(
        zip([name for name in labels if name != "host cache"], _COLOURS, strict=False)
    )
    height = 0.8 / len(labels)
    figure, axes = plt.subplots(2, 2, figsize=(12, 2.6 + 0.42 * len(models) * len(labels) * 2), layout="constrained")

    def panel(
        ax: Any, title: str, unit: str, values: Callable[[Row], list[float]], text: str, floor: float | None = None
    ) -> None:
        """Bars of `values`, stacked, the first solid; on a log axis from `floor` where there is one."""
        for row in rows:
            parts = values(row)
            if not parts:
                continue
            y = models.index(row.model) + height * (labels.index(label(row)) - (len(labels) - 1) / 2)
            for i, part in enumerate(parts):
                ax.barh(y, part, height * 0.92, left=sum(parts[:i]), color=colours[label(row)], alpha=0.5 if i else 1.0)
            end = max(sum(parts), floor or 0.0)
            ax.annotate(text.format(sum(parts)), (end, y), (4, 0), textcoords="offset points", va="center", fontsize=9)
        largest = max(sum(values(row)) for row in rows)
        if floor is None:
            ax.set_xlim(0, largest * 1.2)
            ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
        else:
            ax.set_xscale("log")
            ax.set_xlim(floor, max(largest, floor) * 30)
        ax.set_title(title, loc="left", fontsize=11)
        ax.set_xlabel(unit)
        ax.set_yticks(range(len(models)), models)
        ax.set_ylim(len(models) - 0.5, -0.5)
        ax.spines[["top", "right"]].set_visible(False)

    panel(axes[0, 0], "Speed (higher is better)", "tokens/s, whole batch", lambda r: [r.tokens_per_second], "{:,.0f}")
    panel(
        axes[0, 1],
        "State read (solid) and written (pale), lower is better",
        "kB per token and row",
        lambda r: [r.state_bytes_read_per_token / 1e3, r.state_bytes_written_per_token / 1e3],
        "{:,.0f}",
    )
    panel(axes[1, 0], "State memory", "kB per row", lambda r: [r.state_memory_bytes / 1e3], "{:,.0f}")
    panel(
        axes[1, 1],
        "Largest difference from the host's log-probabilities",
        "nats, same tokens fed to both (log scale)",
        lambda r: [] if r.max_logprob_difference is None else [r.max_logprob_difference],
        "{:.1e}",
        floor=1e-8,
    )
    row = rows[0]
    figure.suptitle(f"batch {row.batch}, {row.new_tokens} new tokens per row, {provenance()['device']}", fontsize=11)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[name]) for name in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    with whole(path) as part:
        figure.savefig(part, dpi=140)
    plt.close(figure)
