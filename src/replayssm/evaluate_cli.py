"""`replayssm eval`, `replayssm calibrate` and `replayssm accuracy`: the commands around evaluate.py."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from replayssm import evaluate, files, formats
from replayssm.bench import append_rows
from replayssm.compare import Host, load_model, provenance
from replayssm.evaluate import FormatChoice
from replayssm.evaluate_report import write_report

out = Console()
err = Console(stderr=True)

# What is compared by default: fp32 and the control that is rounded to 4 bits and read there, then what is in between.
FORMATS = (
    "fp32", "split16", "fp16+fp4", "fp8+fp4", "fp16+fp4/residual", "fp8+fp4/residual", "fp16+fp8/residual", "fp8",
    "fp4", "mxfp4",
)  # fmt: skip
CANDIDATES = ("split16", "fp16+fp8/residual", "fp16+fp4/residual", "fp8+fp4/residual")
MEASURES = ("kl", "drift", "task")

ModelOption = Annotated[list[str] | None, typer.Option("--model", "-m", help="Model folder; repeatable.")]
FormatOption = Annotated[
    list[str] | None, typer.Option("--format", "-f", help="Format, or a file that calibrate wrote; repeatable.")
]
ProblemsOption = Annotated[
    Path | None, typer.Option("--problems", help="JSONL of prompt, solution, answer (default: the bundled ones).")
]
WindowOption = Annotated[int, typer.Option(help="Committed tokens that may wait before a flush.", min=1)]
RowsOption = Annotated[int, typer.Option(help="Streams that are teacher-forced.", min=1)]
TokensOption = Annotated[int, typer.Option(help="Tokens of each.", min=64)]
BatchOption = Annotated[int, typer.Option("--batch", "-b", help="Rows at once.", min=1)]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")]
SeedOption = Annotated[int, typer.Option(help="Of stochastic rounding.")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads.", min=1)]


def eval_command(
    model: ModelOption = None,
    format: FormatOption = None,
    measure: Annotated[str, typer.Option(help="Which of kl, drift, task; several with commas.")] = "kl,drift,task",
    tasks: Annotated[
        str, typer.Option(help="gsm_symbolic, or tasks of lm-evaluation-harness, several with commas.")
    ] = "gsm_symbolic",
    task_folder: Annotated[str | None, typer.Option(help="Folder with the harness's tasks of one's own.")] = None,
    problems: ProblemsOption = None,
    count: Annotated[int, typer.Option(help="Problems of the task (of the harness: per task).", min=1)] = 1024,
    late: Annotated[str, typer.Option(help="Solved problems in front of each; several with commas.")] = "0,15",
    new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 200,
    rows: RowsOption = 16,
    tokens: TokensOption = 2048,
    drift_tokens: Annotated[int, typer.Option(help="Tokens over which states drift.", min=512)] = 32768,
    window: WindowOption = 16,
    batch: BatchOption = 64,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    dtype: Annotated[str, typer.Option(help="Of the harness: weights and activations.")] = "bfloat16",
    threads: ThreadsOption = None,
    seconds: Annotated[float, typer.Option(help="Start nothing further after so long.")] = 36000.0,
    commit: Annotated[str | None, typer.Option(help="The commit that runs, where there is no git.")] = None,
    rows_file: Annotated[Path, typer.Option("--out", help="Rows are appended here.")] = Path("results/accuracy.jsonl"),
) -> None:
    """What storage formats cost in accuracy: KL, drift of states, a task. `report` draws what this wrote."""
    from replayssm.cli import _one_sentence

    with _one_sentence():
        choices = [(text, evaluate.read_format(text)) for text in format or FORMATS]
        chosen = measure.split(",")
        if not set(chosen) <= set(MEASURES):
            raise ValueError(f"--measure takes {', '.join(MEASURES)}; got {measure}.")
        started = time.monotonic()
        origin = provenance(commit)
        if tasks != "gsm_symbolic":
            found = _harness(model, tasks.split(","), choices, window, batch, count, device, dtype, task_folder)
        else:
            hosts = _hosts(model, device, threads)
            samples = evaluate.read_samples(problems or _bundled_problems())
            found = (
                row
                for host in hosts
                for row in _rows(
                    host, samples, choices, chosen, count, [int(n) for n in late.split(",")], new_tokens, rows, tokens,
                    drift_tokens, window, batch, seed, started + seconds,
                )
            )  # fmt: skip
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=err) as progress:
            task = progress.add_task("")
            for row in found:
                if "doing" in row:
                    progress.update(task, description=row["doing"])
                    continue
                append_rows(rows_file, [row], origin)
                out.print(_line(row), soft_wrap=True, highlight=False)


def _rows(
    host: Host, samples: list[evaluate.Sample], choices: Sequence[tuple[str, FormatChoice]], measures: Sequence[str],
    count: int, late: Sequence[int], new_tokens: int, rows: int, tokens: int, drift_tokens: int, window: int,
    batch: int, seed: int, end: float,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows of one model, and what is being done between them."""
    about = {
        name: {"model": host.name, "format": name, "window": window, "seed": seed}
        | ({} if isinstance(choice, str) else {"by_layer": dict(choice)})
        | evaluate.describe(host, choice, window)
        for name, choice in choices
    }
    if "kl" in measures:
        streams = evaluate.token_rows(host, samples, rows, tokens)
        yield {"doing": f"{host.name}: KL of {len(choices)} formats"}
        found = evaluate.kl(host, streams, [choice for _, choice in choices], window, batch, seed)
        yield from (about[name] | row for (name, _), row in zip(choices, found, strict=True))
    if "drift" in measures and time.monotonic() < end:
        yield {"doing": f"{host.name}: inputs of recurrent layers over {drift_tokens} tokens"}
        layers = evaluate.layer_inputs(host, evaluate.token_rows(host, samples, 1, drift_tokens).ids)
        for (name, _), row in zip(
            choices, evaluate.drift(layers, [choice for _, choice in choices], window, seed), strict=True
        ):
            yield about[name] | row
            yield {"doing": f"{host.name}: drift"}
            if time.monotonic() >= end:
                break
    if "task" in measures:
        count = min(count, len(samples))
        for before in late:
            reference: list[bool] | None = None
            for name, choice in [("fp32", "fp32"), *((n, c) for n, c in choices if c != "fp32")]:
                if time.monotonic() >= end:
                    return
                yield {"doing": f"{host.name}: {count} problems behind {before} others, {name}"}
                right = evaluate.solve(host, samples, count, before, choice, window, batch, new_tokens, seed)
                reference = right if reference is None else reference
                if name in about:
                    task = {"measure": "task", "task": "gsm_symbolic", "late": before}
                    yield about[name] | task | evaluate.paired(right, reference)


def _harness(
    models: Sequence[str] | None, tasks: Sequence[str], choices: Sequence[tuple[str, FormatChoice]], window: int,
    batch: int, limit: int, device: str | None, dtype: str, task_folder: str | None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows of lm-evaluation-harness."""
    if not models:
        raise ValueError("--tasks of lm-evaluation-harness need --model: a local folder or a hub name.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    for model in models:
        for name, choice in choices:
            found = evaluate.harness(model, tasks, choice, window, batch, limit, device, dtype, task_folder)
            for task, metrics in found.items():
                yield {"measure": "harness", "model": model, "format": name, "window": window, "task": task} | {
                    "metrics": {key: value for key, value in metrics.items() if isinstance(value, int | float)}
                }


def _hosts(models: Sequence[str] | None, device: str | None, threads: int | None) -> list[Host]:
    from replayssm.cli import _bundled, _set_up

    _set_up(threads)
    folders = [Path(m) for m in models] if models else sorted(c.parent for c in _bundled().glob("*/config.json"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no GPU that torch can use here; leave --device out.")
    hosts = [load_model(folder, torch.float32) for folder in folders]
    return [host if device is None else host._replace(model=host.model.to(device)) for host in hosts]


def _bundled_problems() -> Path:
    from replayssm.cli import _bundled

    return _bundled("heldout.jsonl")


def _line(row: dict[str, Any]) -> str:
    head = f"{row['model']}  {row['format']:20s} {row['measure']:7s}"
    if row["measure"] == "kl":
        inside = row.get("solutions")
        more = (
            f"; solutions KL {inside['kl']:.2e}, nll {inside['nll']:.6f} ({inside['nll_fp32']:.6f})" if inside else ""
        )
        return f"{head} KL {row['kl']:.2e}, top 1 equal {row['top1']:.3%}{more}"
    if row["measure"] == "drift":
        laws = ", ".join(str(layer["law"]) for layer in row["layers"])
        same = "bitwise fp32" if row["bitwise_fp32"] else "not fp32's"
        return f"{head} state error {row['state_error']:.2e} after {row['tokens']:,} tokens, {same}; growth {laws}"
    if row["measure"] == "task":
        low, high = row["difference_95"]
        return (
            f"{head} {row['right']} of {row['problems']} right behind {row['late']} others, fp32 {row['right_fp32']}: "
            f"{row['difference']:+.2%} ({low:+.2%} to {high:+.2%}), p {row['p_value']:.3f}"
        )
    return f"{head} {row['task']}: {json.dumps(row['metrics'])}"


def calibrate_command(
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model folder (default: a bundled one).")] = None,
    budget: Annotated[float, typer.Option(help="Most mean KL from fp32, in nats per token.")] = 1e-4,
    candidate: Annotated[
        list[str] | None,
        typer.Option("--format", "-f", help=f"Candidate; repeatable (default: {', '.join(CANDIDATES)})."),
    ] = None,
    problems: ProblemsOption = None,
    rows: RowsOption = 4,
    tokens: TokensOption = 512,
    window: WindowOption = 16,
    batch: BatchOption = 16,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    file: Annotated[Path, typer.Option("--out", help="The choice is written here.")] = Path("format.json"),
) -> None:
    """Choose every recurrent layer's format: the least bytes per token whose KL from fp32 stays within a budget."""
    from replayssm.cli import _default_model, _one_sentence

    with _one_sentence():
        if not budget > 0:
            raise ValueError(f"--budget must be more than 0 nats per token; got {budget}.")
        names = [formats.get(name).name for name in candidate or CANDIDATES]
        (host,) = _hosts([model or str(_default_model())], device, threads)
        streams = evaluate.token_rows(host, evaluate.read_samples(problems or _bundled_problems()), rows, tokens)
        with err.status("") as status:
            found = evaluate.calibrate(host, streams, names, budget, window, batch, seed, status.update)
        plain = evaluate.describe(host, "fp32", window)
        table = Table("layer", *found.alone, title=f"{host.name}: KL from fp32 with one layer in another format")
        for i in range(plain["layers"]):
            chosen = found.format.get(str(i), found.format["default"])
            cells = [f"{found.alone[n][i]:.1e}" for n in found.alone]
            table.add_row(
                str(i),
                *(f"[bold]{cell}[/]" if n == chosen else cell for n, cell in zip(found.alone, cells, strict=True)),
            )
        out.print(table)
        moved, whole = (cost["bytes_read_per_token"] + cost["bytes_written_per_token"] for cost in (found.cost, plain))
        out.print(
            f"chosen (bold): {found.format}\nKL {found.kl:.2e} of {budget:.0e} allowed; {moved / 1e3:,.0f} kB a token "
            f"instead of {whole / 1e3:,.0f}; {found.cost['state_bytes'] / 1e3:,.0f} kB of state instead of "
            f"{plain['state_bytes'] / 1e3:,.0f}",
            soft_wrap=True,
            highlight=False,
        )
        document = {"format": found.format, "model": host.name, "window": window, "budget": budget, "kl": found.kl}
        document |= {"kl_alone": found.alone, "rows": rows, "tokens": tokens, "provenance": provenance()}
        with files.whole(file) as part:
            part.write_text(json.dumps(document, indent=1) + "\n")
        out.print(f"written to {file}: enable(model, format=json.load(open({str(file)!r}))['format'])", soft_wrap=True)


def accuracy_command(
    rows: Annotated[Path, typer.Argument(help="Rows of `replayssm eval`.")] = Path("results/accuracy.jsonl"),
    kernels: Annotated[Path, typer.Option(help="Rows of `python -m replayssm.bench kernels`.")] = Path(
        "results/kernels.jsonl"
    ),
    folder: Annotated[Path, typer.Option("--out", help="Folder for accuracy.md and accuracy.png.")] = Path("results"),
) -> None:
    """Table and picture of what `eval` measured; of several rows of one cell the newest counts."""
    from replayssm.cli import _one_sentence

    with _one_sentence():
        for path in write_report(rows, kernels, folder):
            out.print(f"written to {path}", soft_wrap=True)
