"""`replayssm plan`, `info`, `check`, `report`, `bench`, `plot`: what they take and print. Their modules do the work.

A command raises ValueError with one sentence for what a user got wrong; cli.py prints it.
"""

import importlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from replayssm import __version__, catalogue, checks, files, implementations, recurrences
from replayssm import plan as planning
from replayssm.bench.plot import COLORS, MARKS

out = Console()
err = Console(stderr=True)

SPARE = ["#56B4E9", "#E69F00", "#F0E442", "#000000"]  # Okabe and Ito's, beside those that formats have in bench.plot
GREY = "#666666"


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{option} takes whole numbers, several with commas; got {text!r}.") from error


# --- plan -------------------------------------------------------------------------------------------------------------


def plan(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Name from --list, a hub's name, or a folder with a config.json."),
    ] = None,
    gpu: Annotated[str, typer.Option(help="GPU, of --list.")] = "h200",
    batch: Annotated[
        str, typer.Option("--batch", "-b", help="Requests decoded at once, several with commas.")
    ] = "1,32,256",
    drafts: Annotated[str, typer.Option(help="Draft tokens per step, several with commas.")] = "0",
    format: Annotated[str, typer.Option(help="Storage formats, several with commas.")] = "fp32,split16,bf16",
    window: Annotated[int, typer.Option(help="Committed tokens that may wait before a flush.")] = 16,
    accepted: Annotated[float | None, typer.Option(help="With drafts: tokens committed per step.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of a request, for attention's keys and values.")] = 4096,
    tp: Annotated[int, typer.Option(help="Tensor parallelism; figures are per GPU.")] = 1,
    weight_bits: Annotated[int, typer.Option(help="Bits of a weight.")] = 16,
    params: Annotated[
        str | None, typer.Option(help="Parameters, such as 7B or 120B-A12B (default: the name's).")
    ] = None,
    state: Annotated[str, typer.Option(help="The stock scheme's state: fp32 or bf16.")] = "fp32",
    rest_ms: Annotated[float | None, typer.Option(help="Measured step without the recurrent layers.", min=0.0)] = None,
    memory: Annotated[float | None, typer.Option(help="GB of the GPU, instead of the data sheet's.", min=0.0)] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="GB/s of the GPU, to stand for one not listed.", min=1.0)
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Show the models and GPUs that are known.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it here (PNG).")] = None,
    fit: Annotated[
        Path | None, typer.Option(help="Fit kernel times to these rows of `bench kernels`; no plan.")
    ] = None,
    fit_out: Annotated[Path | None, typer.Option(help="Where --fit writes (default: the package's table).")] = None,
) -> None:
    """What replay gives for a model, a GPU and a batch, before anything is run: bytes, times, memory."""
    if fit is not None:
        _fit(fit, fit_out or Path(planning.__file__).with_name("kernel_times.json"))
        return
    if list_all:
        out.print(_catalogue())
        return
    if model is None:
        raise ValueError("--model is missing: `replayssm plan --list` shows the models that are known.")
    chosen, device = catalogue.find(model), catalogue.gpu(gpu)
    if params is not None:
        size = catalogue.parameters(params)
        if size is None:
            raise ValueError(f"--params takes a size such as 7B, 350M or 120B-A12B; got {params!r}.")
        chosen = chosen._replace(size=size, weight_bytes=None)
    if memory is not None:
        device = device._replace(memory=memory)
    if bandwidth is not None:
        device = device._replace(name=f"a GPU of {bandwidth:,.0f} GB/s", device="", bandwidth=bandwidth, source="given")
    options = planning.Options(
        _numbers("--batch", batch), _numbers("--drafts", drafts), tuple(format.split(",")), window, accepted,
        context, tp, weight_bits, state, rest_ms,
    )  # fmt: skip
    made = planning.make(chosen, device, options)
    out.print(_plan_view(made))
    if json_file is not None:
        with files.whole(json_file) as part:
            part.write_text(json.dumps(made.document(), indent=1) + "\n")
        out.print(f"plan written to {json_file}", soft_wrap=True)
    if plot is not None:
        _needs("matplotlib")
        with files.whole(plot) as part:
            draw_plan(made, part)
        out.print(f"picture drawn to {plot}", soft_wrap=True)


def _fit(rows: Path, target: Path) -> None:
    _needs("scipy")
    if not rows.is_file():
        raise ValueError(f"{rows} is not a file: --fit takes rows of `replayssm bench kernels`.")
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    table = planning.fit(measured, f"replayssm plan --fit {rows}")
    with files.whole(target) as part:
        part.write_text(json.dumps(table, indent=1) + "\n")
    view = _table("Largest relative errors", "name", "rows", "B >= 32: replayed", "stock", "any B: replayed", "stock")
    for device, entry in table["gpus"].items():
        errors = entry["largest_error"]
        view.add_row(
            device, str(entry["rows"]), *(f"{errors[size][side]:.1%}" for size in errors for side in errors[size])
        )
    out.print(view, f"kernel times written to {target}", soft_wrap=True)


def _needs(package: str) -> None:
    if find_spec(package) is None:
        raise ValueError(f"this needs {package}: pip install 'replayssm[bench]'.")


def _catalogue() -> Group:
    known = _table(
        "Models (recurrent layers and their sizes; MiB: state of one request, fp32)",
        *("model", "recurrence", "layers x H G V K", "MiB", "confidence"),
    )
    for model in catalogue.models():
        H, _, V, K = model.geometry
        state = f"{model.layers * H * V * K * 4 / 2**20:,.0f}"
        sizes = f"{model.layers} x {' '.join(map(str, model.geometry))}"
        known.add_row(model.name, model.recurrence, sizes, state, model.confidence)
    chips = _table("GPUs", "--gpu", "name", "GB", "GB/s", "kernel times", "source")
    for key, gpu in catalogue.gpus().items():
        kind = "measured" if planning.times(gpu).origin.startswith("fitted") else "scaled"
        chips.add_row(key, gpu.name, f"{gpu.memory:g}", f"{gpu.bandwidth:,.0f}", kind, gpu.source)
    return Group(known, chips)


def _microseconds(us: float) -> str:
    return f"{us:,.1f}" if us < 100 else f"{us:,.0f}"


def _gain(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "unknown"
    low, high = sorted((low, high))
    return f"{high:.2f}x" if high - low < 0.005 else f"{low:.2f} to {high:.2f}x"


def _plan_view(made: planning.Plan) -> Group:
    model, options = made.model, made.options
    H, G, V, K = model.geometry
    head = Text(
        f"{model.name}: {model.layers} {model.recurrence} layers of H {H} G {G} V {V} K {K}, on {made.gpu.name}\n",
        style="bold",
    )
    moved = _table(
        "State that a step moves per request, MB",
        *("drafts", "format", "read: stock", "replayed", "written: stock", "replayed", "fewer by"),
    )
    for case in made.cases:
        if case.batch == options.batches[0]:
            sizes = [size / case.batch / 1e6 for size in (case.stock_read, case.read, case.stock_written, case.written)]
            less = (case.stock_read + case.stock_written) / (case.read + case.written)
            moved.add_row(str(case.drafts), case.format, *(f"{size:,.1f}" for size in sizes), f"{less:.2f}x")
    layers = _table("One recurrent layer, us a step", "batch", "drafts", "format", "stock", "replayed", "speedup")
    steps = _table(
        "The model's step, ms, and who has room", "batch", "drafts", "format", "stock", "replayed", "speedup", "fits"
    )
    room = {(True, True): "both", (False, True): "replayed", (True, False): "stock", (False, False): "neither"}
    for i, case in enumerate(made.cases):
        end = (i + 1) % len(options.formats) == 0
        names = str(case.batch), str(case.drafts), case.format
        us = _microseconds(case.stock_kernel_us), _microseconds(case.kernel_us)
        layers.add_row(*names, *us, f"{case.kernel_speedup:.2f}x", end_section=end)
        ms = ["unknown", "unknown"]
        if case.step_speedup is not None:
            ms = [f"{case.stock_step_ms:.2f}", f"{case.step_ms:.2f}"]
        gain = _gain(case.step_speedup_low, case.step_speedup)
        steps.add_row(*names, *ms, gain, room[case.stock_fits, case.fits], end_section=end)
    memory = _table("State of a request in MiB, and requests that fit", "drafts", "format", "MiB: stock", "replayed",
                    "requests: stock", "replayed")  # fmt: skip
    for entry in made.memory:
        memory.add_row(
            str(entry.drafts), entry.format, f"{entry.stock / 2**20:,.1f}", f"{entry.replayed / 2**20:,.1f}",
            f"{entry.stock_requests:,}", f"{entry.requests:,}",
        )  # fmt: skip
    lines = []
    for best in made.advice:
        text = f"Fastest at batch {best.batch}, {best.drafts} drafts: "
        text += _choice(*best[2:5], best.measured)
        if best.exact_format not in (None, best.format):
            text += f"; with an fp32 state {_choice(*best[5:])}"
        lines.append(text + ".")
    for pay in made.pays:
        where = f"{pay.format}, window {options.window}, {pay.drafts} drafts:"
        if pay.from_batch is None:
            lines.append(f"{where} slower from batch {pay.slower_from} up to {planning.MOST_ROWS}: does not pay.")
        elif pay.slower_from is None:
            lines.append(f"{where} pays at every batch.")
        else:
            lines.append(f"{where} pays from batch {pay.from_batch} on; slower from {pay.slower_from} to below that.")
    assumed = Text("Assumptions\n" + "\n".join(f"- {line}" for line in made.assumptions), style="dim")
    space = Text()
    return Group(head, moved, space, layers, space, steps, space, memory, space, Text("\n".join(lines)), space, assumed)


_SHORT = ("case", "model", "recurrence", "layers x H G V K", "--gpu")  # columns that are not to be broken


def _table(title: str, *columns: str) -> Table:
    """Names to the left, figures to the right, narrow enough for 80 columns."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name in columns:
        words = name in (*_SHORT, "batch", "drafts", "format", "fits", "name", "confidence", "source")
        table.add_column(
            name.replace(": ", ":\n"),
            justify="left" if words else "right",
            vertical="bottom",
            no_wrap=name in _SHORT,
            overflow="fold",
        )
    return table


def _choice(format: str | None, window: int | None, speedup: float | None, measured: tuple[int, ...]) -> str:
    extrapolated = "" if window in measured else ", extrapolated"
    return f"{format}, window {window} ({speedup:.2f}x{extrapolated})"


def draw_plan(made: planning.Plan, path: Path) -> None:
    """Kernel time, speedup and requests that fit, over the batch, for the plan's first number of drafts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    drafts = made.options.drafts[0]
    batches = tuple(2**i for i in range(11))
    curve = planning.make(made.model, made.gpu, made.options._replace(batches=batches, drafts=(drafts,)))
    figure, ((kernel, gain), (step, room)) = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    stock = [case.stock_kernel_us for case in curve.cases if case.format == made.options.formats[0]]
    kernel.plot(batches, stock, color=GREY, linestyle="--", label=f"stock, {made.options.state}")
    for (color, mark), name in zip(_series(made.options.formats), made.options.formats, strict=True):
        cases = [case for case in curve.cases if case.format == name]
        kernel.plot(batches, [case.kernel_us for case in cases], color=color, marker=mark, label=name)
        gain.plot(batches, [case.kernel_speedup for case in cases], color=color, marker=mark, label=name)
        if cases[0].step_speedup is not None:
            low, high = ([getattr(case, field) for case in cases] for field in ("step_speedup_low", "step_speedup"))
            step.plot(batches, high, color=color, marker=mark, markersize=4)
            step.plot(batches, low, color=color, marker=mark, markersize=4, linestyle=":")
            step.fill_between(batches, low, high, color=color, alpha=0.12, linewidth=0)
    for axis in (kernel, gain, step):
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches[::2], [str(rows) for rows in batches[::2]])
        axis.set_xlabel("batch (requests decoded at once)")
        axis.grid(alpha=0.3)
    kernel.set_yscale("log")
    kernel.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:g}"))
    kernel.set_ylabel("us per step and layer")
    kernel.set_title("Recurrent layer, predicted time", loc="left", fontsize=11)
    kernel.legend(title="checkpoint format")
    for axis, title in ((gain, "Recurrent layer, speedup"), (step, "Whole step, speedup")):
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_ylabel("times the stock scheme")
        axis.set_title(title, loc="left", fontsize=11)
    if made.options.rest is None:
        step.set_title("Whole step, speedup (dotted: rest at 4 times its limits)", loc="left", fontsize=11)
    memory = [entry for entry in made.memory if entry.drafts == drafts]
    names = [f"stock, {made.options.state}", *(entry.format for entry in memory)]
    counts = [memory[0].stock_requests, *(entry.requests for entry in memory)]
    colors = [GREY, *(color for color, _ in _series(made.options.formats))]
    room.barh(names, counts, color=colors)
    for i, count in enumerate(counts):
        room.annotate(f" {count:,}", (count, i), va="center")
    room.set_xlim(0, max(1, *counts) * 1.2)
    room.invert_yaxis()
    room.set_xlabel(f"requests of {made.options.context:,} tokens")
    room.set_title("Requests that fit", loc="left", fontsize=11)
    for side in ("top", "right"):
        room.spines[side].set_visible(False)
    scaled = (
        "" if planning.times(made.gpu).origin.startswith("fitted") else " (kernel times scaled, not measured there)"
    )
    figure.suptitle(
        f"{made.model.name} on {made.gpu.name}{scaled}: {drafts} drafts, window {made.options.window}", fontsize=12
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _series(names: Sequence[str]) -> list[tuple[str, str]]:
    """Colour and mark of every format, told apart by colour-blind readers; the same as in measured pictures."""
    spare = iter(SPARE)
    return [(COLORS[name], MARKS[name]) if name in COLORS else (next(spare, GREY), "D") for name in names]


# --- info -------------------------------------------------------------------------------------------------------------


def info() -> None:
    """Versions, devices, and which implementation would run here, and why."""
    table = Table(show_header=False)
    for name, value in facts().items():
        table.add_row(name, Text(value))
    out.print(table)


def facts() -> dict[str, str]:
    """What `replayssm info` shows, by name."""
    found = {"replayssm": __version__, "python": f"{platform.python_version()} on {platform.platform(terse=True)}"}
    for package in ("torch", "triton", "transformers", "vllm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            chip = torch.cuda.get_device_properties(i)
            found[f"GPU {i}"] = f"{chip.name}, {chip.total_memory / 2**30:,.0f} GiB"
        measured = [gpu for gpu in catalogue.gpus().values() if gpu.device == torch.cuda.get_device_name()]
        known = bool(measured) and planning.times(measured[0]).origin.startswith("fitted")
        found["kernel times"] = "measured on this GPU" if known else "none of this GPU: `plan` scales another one's"
    else:
        reason = "this torch has no CUDA or ROCm" if not _gpu_build() else "torch sees none"
        found["GPU"] = f"none ({reason})"
    found["CPU threads"] = str(torch.get_num_threads())
    for name in implementations.NAMES:
        found[f"implementation {name}"] = _why(name)
    found["by default"] = "triton on a GPU, torch on the CPU; ask for another with ReplayCache(implementation=...)"
    found["recurrences"] = ", ".join(recurrences.names())
    sizes = {name: planning.element_bytes(name, 128) for name in ("fp32", "split16", "bf16", "fp16")}
    found["formats"] = ", ".join(f"{name} ({kept:g} B kept, {read:g} B read)" for name, (kept, read) in sizes.items())
    return found


def _gpu_build() -> bool:
    return torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None


def _why(name: str) -> str:
    if name != "triton":
        return {"reference": "runs: the definition, on any device", "torch": "runs: the fast one on a CPU"}[name]
    if find_spec("triton") is None:
        return "does not run: triton is not installed"
    if torch.cuda.is_available():
        return "runs: the fast one on a GPU"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "runs on the CPU, in Triton's interpreter (TRITON_INTERPRET=1): for tests, slow"
    return "does not run: there is no GPU (TRITON_INTERPRET=1 runs its kernels in the interpreter, slowly)"


# --- check ------------------------------------------------------------------------------------------------------------


def check(
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: the GPU if there is one).")] = None,
    format: Annotated[
        str | None,
        typer.Option(help="Storage formats, several with commas (default: fp32,split16,bf16; --vllm: fp32,split16)."),
    ] = None,
    implementation: Annotated[
        str | None, typer.Option(help="reference, torch or triton (default: all that run).")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Start nothing more after so long.", min=1.0)] = 50.0,
    seed: Annotated[int, typer.Option(help="Of inputs and lives.")] = 0,
    vllm: Annotated[
        Path | None, typer.Option(help="Instead: this model folder in vLLM, its own states against the plugin's.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="With --vllm: new tokens of every request.", min=2)] = 256,
    window: Annotated[int, typer.Option(help="With --vllm: tokens that may wait before a flush.", min=1)] = 16,
    drafts: Annotated[int, typer.Option(help="With --vllm: n-gram drafts per step.", min=0)] = 0,
    tolerance: Annotated[
        float | None, typer.Option(help="With --vllm: largest difference of a log-probability (default: derived).")
    ] = None,
    runner: Annotated[str | None, typer.Option(help="With --vllm: model runner v1 or v2.")] = None,
    engine: Annotated[str, typer.Option(help="With --vllm: more for LLM(...), as JSON.")] = "{}",
    logs: Annotated[Path | None, typer.Option(help="With --vllm: folder for what the engines print.")] = None,
) -> None:
    """Does this installation keep its contract on this machine? Random lives against the plain recurrence in fp64."""
    if vllm is not None:
        names = (format or "fp32,split16").split(",")
        _check_vllm(vllm, names, tokens, window, drafts, tolerance, runner, engine, logs)
        return
    from replayssm import check as contract

    cases = contract.cases(device, tuple((format or "fp32,split16,bf16").split(",")), implementation)
    table = _table("", "case", "tokens", "output: error", "allowed", "state: error", "allowed", "")
    wrong = done = 0
    started, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)  # sizes are too small for two, which would wait for each other on a busy machine
    with _progress() as progress:
        task = progress.add_task("check", total=len(cases))
        for case in cases:
            if time.monotonic() - started > seconds:
                break
            name = f"{case.recurrence} {case.format} {case.implementation}"
            progress.update(task, completed=done, description=name)
            outcome = contract.live(case, seed)
            done += 1
            wrong += outcome.fault is not None
            table.add_row(
                name, str(outcome.tokens), f"{outcome.output:.1e}", f"{outcome.output_allowed:.1e}",
                f"{outcome.state:.1e}", f"{outcome.state_allowed:.1e}",
                Text("right", style="green") if outcome.fault is None else Text(outcome.fault, style="red"),
            )  # fmt: skip
    torch.set_num_threads(threads)
    out.print(table)
    where = cases[0].device
    if wrong:
        err.print(Text(f"{wrong} of {done} cases broke the contract on {where}.", style="red"))
        raise typer.Exit(1)
    out.print(f"{done} of {len(cases)} cases keep the contract on {where}.")
    if done < len(cases):
        out.print(f"The others were not reached in {seconds:g} s: raise --seconds.")


def _check_vllm(
    folder: Path, names: list[str], tokens: int, window: int, drafts: int, tolerance: float | None,
    runner: str | None, engine: str, logs: Path | None,
) -> None:  # fmt: skip
    from replayssm.bench import e2e, vllm_check
    from replayssm.bench.vllm_process import Failed

    if runner not in (None, "v1", "v2"):
        raise checks.unknown("--runner", runner, ("v1", "v2"))
    more = e2e.json_object("--engine", engine)
    try:
        right = vllm_check.check(folder, names, tokens, window, drafts, tolerance, runner, more, logs)
    except Failed as failure:
        err.print(Text(f"error: {failure}", style="red"), soft_wrap=True)
        raise typer.Exit(1) from failure
    if not right:
        err.print(Text(f"{folder.name}: the plugin's log-probabilities are further off than allowed.", style="red"))
        raise typer.Exit(1)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=err, transient=True, refresh_per_second=4)


# --- report, bench, plot ----------------------------------------------------------------------------------------------


def report(
    results: Annotated[Path, typer.Option(help="Folder with measured rows and pictures.")] = Path("results"),
    to: Annotated[Path, typer.Option("--out", help="The page.")] = Path("report.html"),
) -> None:
    """One self-contained HTML page of measured rows: results, pictures, where they come from, what gets no faster."""
    from replayssm import report as reporting

    with files.whole(to) as part:
        part.write_text(reporting.page(results))
    out.print(f"page written to {to}", soft_wrap=True)


def bench(context: typer.Context) -> None:
    """Measure, and append rows to results/; `replayssm bench --help` lists what can be measured."""
    try:
        app = importlib.import_module("replayssm.bench.__main__").app
    except ImportError as error:
        raise ValueError(f"this needs {error.name}: pip install 'replayssm[bench]'.") from error
    app(args=context.args, prog_name="replayssm bench")


def plot(
    rows: Annotated[Path, typer.Option(help="Rows of `bench kernels`.")] = Path("results/kernels.jsonl"),
    to: Annotated[Path, typer.Option("--out", help="Folder for the pictures.")] = Path("results"),
    whole_models: Annotated[
        Path, typer.Option(help="Rows of the end-to-end scripts; not drawn where there are none.")
    ] = Path("results/e2e.jsonl"),
) -> None:
    """Draw the pictures of measured GPU rows."""
    _needs("matplotlib")
    if not rows.is_file():
        raise ValueError(f"{rows} is not a file: --rows takes rows of `replayssm bench kernels`.")
    if not to.is_dir():
        raise ValueError(f"{to} is not a folder: --out takes the folder for the pictures.")
    importlib.import_module("replayssm.bench.plot").main(rows, to, whole_models)


def register(app: typer.Typer, one_sentence: Callable[[], Any]) -> None:
    """Add the commands to an app, each inside one_sentence()."""
    for command in (plan, info, check, report, plot):
        app.command(command.__name__)(one_sentence()(command))
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command("bench", context_settings=anything)(one_sentence()(bench))
