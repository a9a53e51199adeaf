"""Whole models in vLLM: steady decoding with this library's plugin against vLLM as it is, each in its own process.

What is timed are steps in which all rows decode: none is in prefill, none ends, rows flush in different steps, flushes
are counted. A row of results is a mode at a batch: the median of its repeats. Where fewer rows fit than were asked for,
those that fit are timed, and that is said: it is what the memory of a scheme buys.

The two commands are those of benchmarks/replayssm/, and differ in defaults only; vllm_process.py holds what happens
inside the engine.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.text import Text

from replayssm import catalogue, checks, files, formats
from replayssm.bench import append_rows, dummy, vllm_process
from replayssm.bench.plot import COLORS
from replayssm.bench.vllm_process import MODES, Failed, Job
from replayssm.commands import GREY, SPARE, _needs, _numbers, _table
from replayssm.compare import provenance

out = Console()
err = Console(stderr=True)

SCHEMA = "replayssm.e2e/1"
PROMPTS = ("auto", "gsm8k", "gsm_symbolic", "random")
STATES = ("float32", "bfloat16", "float16")
METHODS = ("auto", "mtp", "ngram")


def run(
    model_id: Annotated[str, typer.Option("--model-id", help="Hub's name, or a model folder.")],
    modes: Annotated[
        str, typer.Option(help="Of stock, replay, vllm-replay (vLLM's own) and, with drafts, plain; with commas.")
    ] = "stock,replay",
    format: Annotated[str, typer.Option(help="Storage formats of replay, with commas.")] = "fp32,split16",
    batch_size: Annotated[str, typer.Option("--batch-size", help="Requests at once, with commas.")] = "1,32,128,256",
    draft_tokens: Annotated[int, typer.Option(help="Draft tokens per step; 0: plain decoding.", min=0)] = 0,
    draft_method: Annotated[
        str, typer.Option(help="mtp (the model's own head), ngram, or auto: mtp where there is one.")
    ] = "auto",
    acceptance_length: Annotated[
        float | None, typer.Option(help="Force the mean of tokens per step: 1 to drafts + 1.")
    ] = None,
    window: Annotated[int, typer.Option(help="Committed tokens that may wait before a flush.", min=1)] = 16,
    steps: Annotated[int, typer.Option(help="Steps of a timed run.", min=1)] = 128,
    repeats: Annotated[int, typer.Option(help="Timed runs; their median counts.", min=1)] = 3,
    state: Annotated[str, typer.Option(help="vLLM's own state: float32, bfloat16 or float16.")] = "float32",
    dummy_weights: Annotated[
        bool, typer.Option("--dummy-weights", help="Random weights, in the sizes of a folder or of the catalogue.")
    ] = False,
    layers: Annotated[
        int | None, typer.Option(help="Cut to so many layers, kinds in proportion. Weights are random then.", min=1)
    ] = None,
    prompts: Annotated[str, typer.Option(help=f"{', '.join(PROMPTS)}. auto: the first that can be had.")] = "auto",
    runner: Annotated[str | None, typer.Option(help="Model runner of all modes: v1 or v2.")] = None,
    eager: Annotated[bool, typer.Option("--eager", help="Without CUDA graphs.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="torch.compile, as vLLM does; without, it starts faster.")
    ] = True,
    tensor_parallel: Annotated[int, typer.Option("--tp", help="GPUs that share the model.", min=1)] = 1,
    engine: Annotated[str, typer.Option(help='More for LLM(...), as JSON: {"quantization": "fp8"}.')] = "{}",
    tuned: Annotated[
        Path | None, typer.Option(help="Folder that keeps launches of vLLM's kernels (default: tuned anew).")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder for what the engines print.")] = None,
    seconds: Annotated[float, typer.Option(help="Longest time of one engine.", min=1.0)] = 1800.0,
    commit: Annotated[str | None, typer.Option(help="The commit that runs, where there is no git.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows of this run here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them here (PNG).")] = None,
    rows_file: Annotated[Path, typer.Option("--out", help="Rows are appended here.")] = Path("results/e2e.jsonl"),
) -> None:
    """Measure a whole model in vLLM, mode by mode."""
    from replayssm.cli import _one_sentence

    with _one_sentence(), tempfile.TemporaryDirectory() as scratch:
        for target in (json_file, plot):
            if target is not None and not target.absolute().parent.is_dir():
                raise ValueError(f"{target} can't be written: {target.parent} is not a folder.")
        if plot is not None:
            _needs("matplotlib")
        shared = Job(
            "decode", model_id, "stock", window=window, state=_one_of("--state", state, STATES),
            batches=_numbers("--batch-size", batch_size), steps=steps, repeats=repeats, drafts=draft_tokens,
            method=_one_of("--draft-method", draft_method, METHODS), acceptance=acceptance_length,
            runner=None if runner is None else _one_of("--runner", runner, ("v1", "v2")), eager=eager,
            compiled=compiled, dummy=dummy_weights or layers is not None, tensor_parallel=tensor_parallel,
            engine=json_object("--engine", engine),
        )  # fmt: skip
        _one_of("--prompts", prompts, PROMPTS)
        if shared.dummy and prompts in ("gsm8k", "gsm_symbolic"):
            raise ValueError(f"--prompts {prompts} needs the model's own weights: random ones have no text.")
        job, about = prepare(shared, layers, tuned or Path(scratch) / "tuned", Path(scratch) / "model")
        chosen = _modes(modes, about, bool(draft_tokens))
        jobs = [(mode, single) for mode in chosen for single in _engines(job, mode, format.split(","))]
        needs_vllm()
        about["prompts"], texts = prompt_texts("random" if job.dummy else prompts, max(job.batches))
        jobs = [(mode, replace(single, texts=texts)) for mode, single in jobs]
        folder = logs or Path(tempfile.mkdtemp(prefix="replayssm-e2e-"))
        folder.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        failed = []
        origin = provenance(commit)
        names = [mode if mode != "replay" else f"replay-{single.format.replace('/', '-')}" for mode, single in jobs]
        logged = [(single, folder / f"{name}.log") for (_, single), name in zip(jobs, names, strict=True)]
        documents = vllm_process.run_all(logged, seconds)
        for (mode, single), name in zip(jobs, names, strict=True):
            with err.status(f"{about['model']}: {name}"):
                document = next(documents)
            if isinstance(document, Failed):
                err.print(Text(f"error: {document}", style="red"), soft_wrap=True)
                failed.append(name)
                continue
            versions = origin["versions"] | document["versions"]
            new = make_rows(mode, single, about, document, rows)
            append_rows(rows_file, new, origin | {"versions": versions})
            rows += new
        if rows:
            out.print(table(rows))
            if json_file is not None:
                with files.whole(json_file) as part:
                    part.write_text(json.dumps({"schema": SCHEMA, "provenance": origin, "rows": rows}, indent=1) + "\n")
                out.print(f"rows written to {json_file}", soft_wrap=True)
            if plot is not None:
                with files.whole(plot) as part:
                    draw(rows, part)
                out.print(f"picture drawn to {plot}", soft_wrap=True)
        if failed:
            raise typer.Exit(1)


def _command(text: str, **defaults: Any) -> Callable[..., None]:
    """`run` with other defaults and its own text."""

    def command(**given: Any) -> None:
        run(**given)

    parameters = inspect.signature(run, eval_str=True).parameters.values()
    changed = [each.replace(default=defaults.get(each.name, each.default)) for each in parameters]
    command.__signature__ = inspect.Signature(changed)  # type: ignore[attr-defined]
    command.__doc__ = text
    return command


decode = _command("""Plain decoding of a whole model: step time and tokens/s of vLLM's states and of replayed ones.""")
speculative = _command(
    """Speculative decoding of a whole model: tokens/s of vLLM's states, one per draft, and of replayed ones.""",
    batch_size="512",
    draft_tokens=4,
    steps=64,
)


# --- from options to jobs ---------------------------------------------------------------------------------------------


def _one_of(option: str, given: str, known: Sequence[str]) -> str:
    if given not in known:
        raise checks.unknown(option, given, known)
    return given


def json_object(option: str, text: str) -> dict[str, Any]:
    """The JSON object in an option.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} takes a JSON object; got {text!r}: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{option} takes a JSON object; got {text!r}.")
    return found


def needs_vllm() -> None:
    """Refuse where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ValueError("this needs vllm, and a GPU that it runs on: pip install 'replayssm[vllm]'.")


def prepare(shared: Job, layers: int | None, tuned: Path, folder: Path) -> tuple[Job, dict[str, Any]]:
    """A job that all modes share, with its model and kernels, and what rows say of them.

    Args:
        shared: with the model as the user named it.
        tuned: folder for launches of vLLM's kernels, made where it is not there.
        folder: gets the config.json of a model without weights.

    Raises:
        ValueError: an option that cannot be.
    """
    if min(shared.batches) < 1:
        raise ValueError(f"--batch-size must be 1 or more; got {min(shared.batches)}.")
    if shared.acceptance is not None and not (shared.drafts and 1 <= shared.acceptance <= shared.drafts + 1):
        raise ValueError(
            f"--acceptance-length must be between 1 and {shared.drafts + 1}, the drafts and one more; "
            f"got {shared.acceptance:g}."
        )
    if shared.dummy and shared.drafts and shared.acceptance is None:
        raise ValueError(
            "random weights accept no drafts: with --dummy-weights or --layers give --acceptance-length, for example "
            "what the real model reached."
        )
    model = catalogue.find(shared.model)
    family, head = _family(shared.model, model)
    source = "the model's own"
    if shared.dummy:
        sizes, source = dummy.config(shared.model, layers)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(sizes))
    H, G, V, K = model.geometry
    here = {"H": H // shared.tensor_parallel, "G": max(1, G // shared.tensor_parallel), "V": V, "K": K}
    method = shared.method if shared.method != "auto" else "mtp" if head else "ngram"
    return replace(
        shared,
        model=str(folder) if shared.dummy else shared.model,
        tuned=str(tuned),
        kernel=here if model.recurrence == "mamba2" else None,
        method=method if shared.drafts else None,
    ), {
        "model": shared.model.rstrip("/").split("/")[-1],
        "family": family,
        "weights": "random" if shared.dummy else "the model's own",
        "sizes": source,
        "cut_to_layers": layers,
    }


def _family(name: str, model: catalogue.Model) -> tuple[str, bool]:
    """The model's type, and whether it has a head that predicts further tokens (multi-token prediction)."""
    if Path(name).exists():
        words, _ = dummy.config(name)
        text = words.get("text_config", words)
        return words["model_type"], bool(text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers"))
    entry = catalogue.entry(model.name)
    return entry["family"], bool(entry["mtp_layers"]) or entry["family"] == "qwen3_5"


def _modes(text: str, about: dict[str, Any], drafted: bool) -> list[str]:
    """Modes in the order in which they run, first what others are compared with.

    Raises:
        ValueError: an unknown mode, or one that this model cannot have.
    """
    known = (*MODES, "plain") if drafted else MODES
    names = [_one_of("mode", name, known) for name in text.split(",")]
    if "vllm-replay" in names and about["family"] != "nemotron_h":
        raise ValueError(
            f"vllm-replay can't run {about['model']}: vLLM replays the Mamba-2 layers of NemotronH models only. "
            "Take it out of --modes."
        )
    return [name for name in known if name in names]


def _engines(job: Job, mode: str, names: Sequence[str]) -> list[Job]:
    """The engines of a mode: one for each format where it has formats."""
    for name in names:
        formats.get(name)
    if mode == "plain":
        return [replace(job, drafts=0, method=None, acceptance=None)]
    return [replace(job, mode=mode, format=name) for name in (names if mode == "replay" else ["fp32"])]


def prompt_texts(kind: str, count: int) -> tuple[str, list[str] | None]:
    """What the prompts are, and their texts: GSM8K where it can be loaded, gsm_symbolic problems, or None for random.

    Raises:
        ValueError: a kind was asked for that cannot be had.
    """
    makers: dict[str, Callable[[int], list[str]]] = {"gsm8k": _gsm8k, "gsm_symbolic": _gsm_symbolic}
    for name, maker in makers.items():
        if kind in (name, "auto"):
            try:
                return name, maker(count)[:count]
            except Exception as error:  # no package, no network, no file: whatever a loader raises
                if kind == name:
                    raise ValueError(f"--prompts {name} can't be had: {error}") from error
    return "random token ids", None


def _gsm8k(count: int) -> list[str]:
    from datasets import load_dataset

    return list(load_dataset("openai/gsm8k", "main", split="test")["question"])


def _gsm_symbolic(count: int) -> list[str]:
    """The repository's held-out problems, or new ones of the generator that made them."""
    from replayssm.cli import _bundled

    try:
        lines = _bundled("heldout.jsonl").read_text().splitlines()
    except (ValueError, OSError):
        import reasoning_gym

        return [entry["question"] for entry in reasoning_gym.create_dataset("gsm_symbolic", seed=1, size=count)]
    return [json.loads(line)["question"] for line in lines]


# --- rows, table, picture ---------------------------------------------------------------------------------------------


def make_rows(
    mode: str, job: Job, about: dict[str, Any], document: dict[str, Any], before: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of one engine, a batch each.

    Args:
        document: what its process wrote.
        before: rows of this run so far; those of mode stock are what speed-ups are against.
    """
    stock = {row["batch"]: row["tokens_per_second"] for row in before if row["mode"] == "stock"}
    made = []
    for found in document["rows"]:
        rates = [tokens / taken for tokens, taken in zip(found["tokens"], found["seconds"], strict=True)]
        rate, taken = median(rates), median(found["seconds"])
        graphs = None if None in found["graph_seconds"] else median(found["graph_seconds"])
        base = rate if mode == "stock" else stock.get(found["batch"])
        made.append(
            {
                "bench": "e2e_spec" if job.drafts or mode == "plain" else "e2e_decode",
                **about,
                "mode": mode,
                "format": job.format if mode == "replay" else None,
                "state": None if mode == "replay" else job.state,
                "window": None if mode in ("stock", "plain") else job.window,
                "batch": found["batch"],
                "rows": found["rows"],
                "runner": document["runner"],
                "graphs": document["graphs"],
                "compiled": document["compiled"],
                "async_scheduling": document["async_scheduling"],
                "tensor_parallel": job.tensor_parallel,
                "drafts": job.drafts,
                "draft_method": job.method,
                "acceptance_forced": job.acceptance,
                "acceptance_length": median(found["tokens"]) / found["steps"] / found["rows"] if job.drafts else None,
                "steps": found["steps"],
                "step_ms": 1e3 * taken / found["steps"],
                "graph_ms": graphs and 1e3 * graphs / found["steps"],
                "step_ms_all": [1e3 * each / found["steps"] for each in found["seconds"]],
                "tokens_per_second": rate,
                "speedup": None if base is None else rate / base,
                "state_bytes_per_request": document["state_bytes_per_request"],
                "kv_bytes_per_token": document["kv_bytes_per_token"],
                "tokens_per_request": document["tokens_per_request"],
                "requests_that_fit": document["requests_that_fit"],
                "steps_with_rows_missing": found["steps_with_rows_missing"],
                "rows_past_their_end": found["rows_past_their_end"],
                "prompt_tokens": found["prompt_tokens"],
                "replayed_layers": document["replayed_layers"],
                "stock_launch": document["launches"].get(str(found["batch"])),
                "gpu": document["gpu"],
            }
        )
    return made


def name_of(row: dict[str, Any]) -> str:
    """A row's mode, with its format or its state."""
    return f"{row['mode']}, {row['format'] or row['state']}"


def table(rows: Sequence[dict[str, Any]]) -> Group:
    """All rows, by batch, and what a reader must know of them."""
    first = rows[0]
    drafted = any(row["drafts"] for row in rows)
    columns = [
        "case",
        "batch",
        "runner",
        "step: ms",
        "graphs: ms",
        *(["accepted"] if drafted else []),
        "tokens/s",
        "gain",
    ]
    view = _table(f"{first['model']} in vLLM, {first['gpu']}", *columns, "state: MB", "fit")
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    for batch in batches:
        some = [row for row in rows if row["batch"] == batch]
        for row in some:
            mark = "" if row["rows"] == batch else f" ({row['rows']})"
            cells = [name_of(row), f"{batch}{mark}", row["runner"], f"{row['step_ms']:.2f}"]
            cells.append("" if row["graph_ms"] is None else f"{row['graph_ms']:.2f}")
            if drafted:
                cells.append("1" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}")
            gain = "" if row["speedup"] is None else f"{row['speedup']:.2f}x"
            cells += [f"{row['tokens_per_second']:,.0f}", gain, f"{row['state_bytes_per_request'] / 1e6:,.1f}"]
            view.add_row(*cells, f"{row['requests_that_fit']:,}", end_section=row is some[-1])
    return Group(view, Text("\n".join(_notes(rows)), style="dim"))


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    first, lines = rows[0], []
    lines.append(f"Weights: {first['weights']}. Sizes: {first['sizes']}. Prompts: {first['prompts']}. Greedy.")
    if first["cut_to_layers"] is not None:
        lines.append("A CUT MODEL: embedding and head weigh more in its step than in the whole model's.")
    for row in rows:
        if row["drafts"]:
            forced = row["acceptance_forced"]
            how = f"FORCED to accept {forced:g} tokens a step" if forced else "accepting as the model does"
            lines.append(
                f"Drafts: {row['drafts']} by {row['draft_method']}, {how}; accepted: tokens of a row and step."
            )
            break
    lengths = " or ".join(f"{n:,}" for n in dict.fromkeys(row["tokens_per_request"] for row in rows))
    lines.append(
        f"Steps in which all rows decode, flushes counted; state: of one request; fit: requests of {lengths} "
        f"tokens. Graphs {first['graphs']}, torch.compile "
        f"{'on' if first['compiled'] else 'off'}."
    )
    if any(row["graph_ms"] for row in rows):
        lines.append(
            "graphs: what the GPU takes for a step's CUDA graphs, all but logits, sampling and drafts by n-grams. "
            "The host prepares the next step meanwhile; where it takes longer, the step does."
        )
    if any(row["rows"] != row["batch"] for row in rows):
        lines.append("In brackets: as many rows as fit, fewer than were asked for.")
    if any(row["steps_with_rows_missing"] for row in rows):
        lines.append("SOME STEPS LACKED ROWS (preempted or ended): their times are not those of the batch.")
    late = max((row["rows_past_their_end"] or 0.0 for row in rows), default=0.0)
    if late:
        lines.append(f"Up to {late:.0%} of the rows had ended their text and were made to go on.")
    if len({row["runner"] for row in rows}) > 1:
        lines.append("Runners differ: give --runner v1 to have all modes on one.")
    if any(row["stock_launch"] for row in rows):
        lines.append("Launches of vLLM's state kernel were tuned for each batch.")
    return lines


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens/s of every mode, a group of bars for each batch, with the speed-up over stock."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(map(name_of, rows)))
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    spare, colors = iter(SPARE), {}
    for row in rows:
        if name_of(row) not in colors:
            known = COLORS.get(row["format"]) if row["mode"] == "replay" else GREY if row["mode"] == "stock" else None
            colors[name_of(row)] = known or next(spare, GREY)
    width = max(7.0, 2.2 + 2.4 * len(batches))
    figure, axes = plt.subplots(1, len(batches), figsize=(width, 4), layout="constrained", squeeze=False)
    for axis, batch in zip(axes[0], batches, strict=True):
        for row in (row for row in rows if row["batch"] == batch):
            place, rate = names.index(name_of(row)), row["tokens_per_second"]
            axis.bar(place, rate, color=colors[name_of(row)])
            gain = "" if row["speedup"] is None else f"{row['speedup']:.2f}x"
            fewer = "" if row["rows"] == batch else f"\n{row['rows']} rows"
            axis.annotate(gain + fewer, (place, rate), ha="center", va="bottom", fontsize=9)
        axis.set_title(f"batch {batch}", loc="left", fontsize=11)
        axis.set_xticks([])
        axis.set_xlim(-0.6, len(names) - 0.4)
        axis.margins(y=0.12)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("tokens/s")
    first = rows[0]
    weights = "" if first["weights"] != "random" else ", random weights"
    most = max(row["drafts"] for row in rows)
    drafts = f", {most} drafts" if most else ""
    cut = "" if first["cut_to_layers"] is None else f", cut to {first['cut_to_layers']} layers"
    figure.suptitle(f"{first['model']} in vLLM, {first['gpu']}{drafts}{weights}{cut}", fontsize=11)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colors[name]) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
