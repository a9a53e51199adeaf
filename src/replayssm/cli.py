"""The `replayssm` command. Here: `generate` and `compare`, the replayed cache on a Transformers model folder.

What a user got wrong ends in one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise SystemExit(f"the replayssm command needs {error.name}: pip install 'replayssm[transformers]'") from error

import torch

from replayssm import __version__, commands, evaluate_cli
from replayssm.compare import (
    Comparison,
    Drafting,
    Host,
    Problem,
    Row,
    check_support,
    compare,
    label,
    load_draft,
    load_model,
    passes,
    write_json,
    write_plot,
)
from replayssm.evaluate import read_format

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Faster decoding of hybrid language models: plan it, check it, run it, measure it.",
)
out = Console()
err = Console(stderr=True)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ModelOption = Annotated[
    Path | None, typer.Option("--model", "-m", help="Model folder (default: the first bundled one).")
]
WindowOption = Annotated[int, typer.Option(help="Committed tokens that may wait in the ring before a flush.", min=1)]
NewTokensOption = Annotated[int, typer.Option("--max-new-tokens", "-n", help="New tokens per prompt.", min=1)]
DtypeOption = Annotated[str, typer.Option(help="Weights and activations: float32, bfloat16 or float16.")]
DraftOption = Annotated[
    str | None,
    typer.Option(help="Speculative decoding: ngram, mtp (the model's own head), or the folder of a smaller model."),
]
TreeOption = Annotated[
    str,
    typer.Option(help="With --draft: 4 is four drafts in a row, 3x2x1 three first drafts, each with two, and so on."),
]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads (default: torch's own choice).", min=1)]


@contextmanager
def _one_sentence() -> Iterator[None]:
    """A `ValueError`'s sentence instead of its traceback."""
    try:
        yield
    except ValueError as error:
        err.print(Text(f"error: {error}", style="red"), soft_wrap=True)
        raise typer.Exit(2) from error


def _bundled(name: str = "") -> Path:
    """`models/name` of the repository, beside the source or in the current folder."""
    for models in (Path(__file__).resolve().parents[2] / "models", Path("models")):
        if models.is_dir():
            return models / name
    raise ValueError(
        "there are no bundled models here (they come with the repository): pass --model FOLDER and a prompt."
    )


def _default_model() -> Path:
    folders = sorted(config.parent for config in _bundled().glob("*/config.json"))
    if not folders:
        raise ValueError(f"{_bundled()} holds no model: pass --model FOLDER.")
    return folders[0]


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}; got {name}.")
    return DTYPES[name]


def _set_up(threads: int | None) -> None:
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise ValueError(f"this command needs {error.name}: pip install 'replayssm[transformers]'.") from error

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)


def _problems(path: Path, count: int) -> list[Problem]:
    """The first `count` rows of a JSONL file of objects with `prompt` and, where it is known, `answer`."""
    if not path.is_file():
        raise ValueError(
            f"{path} is not a file: --prompts takes a JSONL file of objects with a prompt and perhaps an answer."
        )
    problems = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            problems.append(Problem(row["prompt"], None if row.get("answer") is None else str(row["answer"])))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f'{path}, line {number} is not a JSON object with a "prompt".') from error
        if len(problems) == count:
            break
    return problems


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version.")] = False,
) -> None:
    if version:
        out.print(__version__, highlight=False)
        raise typer.Exit


# --- generate ---------------------------------------------------------------------------------------------------------


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt (default: --file, or standard input).")] = None,
    model: ModelOption = None,
    file: Annotated[Path | None, typer.Option("--file", help="Read the prompt from this file.")] = None,
    replay: Annotated[bool, typer.Option("--replay/--host-cache", help="Replayed cache, or the host's own.")] = True,
    format: Annotated[str, typer.Option(help="Storage format of the checkpoint, or a file of calibrate.")] = "fp32",
    window: WindowOption = 16,
    max_new_tokens: NewTokensOption = 256,
    stop: Annotated[str | None, typer.Option(help=r"End where this text was written; \n is a new line.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="With a temperature: nucleus sampling.", min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option(help="With a temperature: seed of the sampling.")] = 0,
    draft: DraftOption = None,
    tree: TreeOption = "4",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = None,
) -> None:
    """Continue one prompt, as it comes, with the replayed cache (or the host's own)."""
    with _one_sentence():
        text = _prompt(prompt, file)
        if draft is not None and not replay:
            raise ValueError("--draft needs the replayed cache: the host's own cannot take drafts back.")
        _set_up(threads)
        host = load_model(model or _default_model(), _dtype(dtype))
        drafting = None if draft is None else load_draft(host, draft, tree, window=window, format=format)
        if replay:
            from replayssm.integrations.transformers import enable

            enable(host.model, window=window, format=read_format(format))
    from transformers import TextStreamer

    torch.manual_seed(seed)
    if drafting is not None:
        _generate_drafted(host, drafting, text, max_new_tokens, stop, temperature, top_p)
        return
    host.model.generate(
        **host.inputs([text]),
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        **({"temperature": temperature, "top_p": top_p} if temperature > 0 else {}),
        **({"stop_strings": [stop.replace(r"\n", "\n")], "tokenizer": host.tokenizer} if stop else {}),
        pad_token_id=host.tokenizer.pad_token_id,
        streamer=TextStreamer(host.tokenizer, skip_prompt=True, skip_special_tokens=True),
    )


def _generate_drafted(
    host: Host, drafting: Drafting, text: str, max_new_tokens: int, stop: str | None, temperature: float, top_p: float
) -> None:
    """The text on stdout as it is made, how well the drafts did on stderr."""
    from transformers import StoppingCriteriaList, StopStringCriteria, TextStreamer

    from replayssm.integrations.transformers import generate as generate_with_drafts

    stops = [StopStringCriteria(host.tokenizer, [stop.replace(r"\n", "\n")])] if stop else []
    inputs = host.inputs([text])
    made = generate_with_drafts(
        host.model,
        inputs["input_ids"],
        inputs["attention_mask"],
        draft=drafting.source,
        tree=drafting.shape,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        stopping_criteria=StoppingCriteriaList(stops) if stops else None,
        streamer=TextStreamer(host.tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    err.print(
        f"{int(made.lengths[0])} tokens in {int(made.rounds[0]) + 1} forwards, {made.acceptance_length:.2f} in each "
        f"after prefill; {int(made.accepted[0])} of {int(made.drafted[0])} drafts of {drafting.name} accepted",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ValueError("a prompt and --file were both given: give one of them.")
    if file is not None:
        if not file.is_file():
            raise ValueError(f"{file} is not a file: --file takes a text file with the prompt.")
        prompt = file.read_text()
    elif prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is None or not prompt.strip():
        raise ValueError("the prompt is empty: give it as an argument, with --file FILE, or on standard input.")
    return prompt


# --- compare ----------------------------------------------------------------------------------------------------------


@app.command("compare")
def compare_command(
    model: Annotated[
        list[Path] | None,
        typer.Option("--model", "-m", help="Model folder; repeatable (default: a bundled one)."),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; repeatable.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help='JSONL of {"prompt", "answer"} (default: the bundled held-out problems).'),
    ] = None,
    count: Annotated[int, typer.Option(help="How many prompts of the file.", min=1)] = 16,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Prompts decoded at once.", min=1)] = 16,
    max_new_tokens: NewTokensOption = 160,
    format: Annotated[
        list[str] | None, typer.Option(help="Storage format of the checkpoint; repeatable (default: fp32).")
    ] = None,
    window: WindowOption = 16,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="A column with drafts: ngram, mtp, or a model folder ({model} is the model's own); repeatable."
        ),
    ] = None,
    tree: TreeOption = "4",
    repeats: Annotated[int, typer.Option(help="Timed runs of each cache; the fastest counts.", min=2)] = 2,
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows and their provenance here.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the rows here (PNG).")] = None,
    show_example: Annotated[
        bool, typer.Option("--show-example", help="Print one prompt with the model's answer.")
    ] = False,
) -> None:
    """Decode the same prompts with the host's own cache and with the replayed cache, side by side."""
    with _one_sentence():
        if prompt and prompts:
            raise ValueError("--prompt and --prompts were both given: give one of them.")
        problems = (
            [Problem(text) for text in prompt] if prompt else _problems(prompts or _bundled("heldout.jsonl"), count)
        )
        if not problems or not all(problem.prompt.strip() for problem in problems):
            raise ValueError("a prompt is empty: every prompt needs at least one character.")
        if max_new_tokens < 2:
            raise ValueError(
                "--max-new-tokens must be at least 2: the first new token comes from prefill, which is not timed."
            )
        for file in (json_file, plot):
            if file is not None and not file.absolute().parent.is_dir():
                raise ValueError(f"{file} can't be written: {file.parent} is not a folder.")
        folders, formats, precision = model or [_default_model()], format or ["fp32"], _dtype(dtype)
        _set_up(threads)
        hosts, drafts = [], []
        for folder in folders:
            with err.status(f"loading {folder.name}"):
                hosts.append(load_model(folder, precision))
                check_support(hosts[-1], formats, window)
                drafts.append(
                    [
                        load_draft(hosts[-1], name.format(model=folder), tree, window=window, format=formats[0])
                        for name in draft or []
                    ]
                )

    comparisons = []
    runs = passes(len(problems), caches=len(formats) + len(draft or []), batch=batch, repeats=repeats)
    with _progress() as progress:
        for host, sources in zip(hosts, drafts, strict=True):
            task = progress.add_task(host.name, total=runs)

            def advance(doing: str, done: int, task: TaskID = task, name: str = host.name) -> None:
                progress.update(task, description=f"{name}: {doing}", completed=done)

            comparisons.append(
                compare(
                    host,
                    problems,
                    formats=formats,
                    drafts=sources,
                    window=window,
                    batch=batch,
                    new_tokens=max_new_tokens,
                    repeats=repeats,
                    advance=advance,
                )
            )

    for comparison in comparisons:
        out.print(_table(comparison.rows))
        if show_example:
            out.print(_example(comparison))
    out.print(_legend(window, max_new_tokens))
    rows = [row for comparison in comparisons for row in comparison.rows]
    if json_file is not None:
        write_json(json_file, rows)
        out.print(f"rows written to {json_file}", soft_wrap=True)
    if plot is not None:
        write_plot(plot, rows)
        out.print(f"picture drawn to {plot}", soft_wrap=True)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        *columns, console=err, transient=True, refresh_per_second=2
    )  # seldom: it shares the CPU with what it times


def _table(rows: list[Row]) -> Group:
    host = rows[0]
    title = f"{host.model}: {host.problems} prompts, {host.batch} at once, {host.new_tokens} tokens each, {host.dtype}"
    table = Table("", *[label(row) for row in rows])
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"

    def line(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    def ratio(value: float, reference: float) -> str:
        return f" ({value / reference:.2f}x)"

    line(
        "tokens/s",
        f"{host.tokens_per_second:,.0f}",
        *[f"{r.tokens_per_second:,.0f}" + ratio(r.tokens_per_second, host.tokens_per_second) for r in rows[1:]],
    )
    line("state read / token", *[_bytes(r.state_bytes_read_per_token) for r in rows])
    line("state written / token", *[_bytes(r.state_bytes_written_per_token) for r in rows])
    both = [r.state_bytes_read_per_token + r.state_bytes_written_per_token for r in rows]
    line("read + written", _bytes(both[0]), *[_bytes(size) + ratio(size, both[0]) for size in both[1:]])
    line(
        "state memory / row",
        _bytes(host.state_memory_bytes),
        *[_bytes(r.state_memory_bytes) + ratio(r.state_memory_bytes, host.state_memory_bytes) for r in rows[1:]],
    )
    line(
        "log-prob difference",
        "reference",
        *[f"{r.max_logprob_difference:.1e}" for r in rows[1:]],
    )
    line("equal tokens", "reference", *[f"{r.equal_tokens} of {r.compared_tokens}" for r in rows[1:]])
    if any(r.tokens_per_forward is not None for r in rows):
        line(
            "tokens / forward",
            *["1" if r.tokens_per_forward is None else f"{r.tokens_per_forward:.2f}" for r in rows],
        )
    if host.answers:
        line("answers right", *[f"{r.right} of {r.answers}" for r in rows])
    return Group(Text(title, style="bold"), table)


def _bytes(size: float) -> str:
    return f"{size / 1e6:,.2f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"


def _example(comparison: Comparison) -> Panel:
    assert comparison.example is not None
    problem, answer = comparison.example
    text = Text.assemble((problem.prompt.rstrip(), "dim"), "\n", answer.strip())
    if problem.answer is not None:
        text.append(f"\n(right answer: {problem.answer})", "italic")
    return Panel(text, title=f"one problem, as {label(comparison.rows[1])} answered it", title_align="left")


def _legend(window: int, new_tokens: int) -> Text:
    flushes = (new_tokens - 1) // window
    return Text(
        "Host: every state element is read once and written once per token, in fp32, its convolution window too. "
        f"Replayed: checkpoint, ring and window, each flush spread over its {window} tokens; {flushes} flushes or more "
        "per row. Weights, attention and activations are in no byte figure. Speed excludes prefill, includes flushes. "
        "Log-probabilities (the largest difference) and equal tokens: the host's tokens fed to both, step by step. "
        "Answers: each decodes on its own. Speculative: decodes on its own, compared as far as its tokens are the "
        "host's; its draft model's state is in no figure but the speed.",
        style="dim",
    )


commands.register(app, _one_sentence)

# --- eval, calibrate, accuracy ---

app.command("eval")(evaluate_cli.eval_command)
app.command("calibrate")(evaluate_cli.calibrate_command)
app.command("accuracy")(evaluate_cli.accuracy_command)

if __name__ == "__main__":
    app()
