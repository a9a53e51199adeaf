"""GPU: what a layer's step is made of: the read, the carry and the flush, each by itself, beside the bytes they move.

    python -m replayssm.bench parts --case mamba2-h64 --format fp32,split16

Steps are those of `bench kernels`: whole windows, staggered, cold L2, in CUDA graphs. What is not asked for is not
launched: a read then awaits nothing and takes all rows, also those whose flush answers their tokens; a carry has no
programs that flush. A flush is what a step without its read takes more than its carry, and without a read to hide it
has all the programs it may have; `begin` and `commit` are measured by themselves and are in no part. Nothing is checked
here: outputs of a step that lacks a part mean nothing. At so small a batch that all is one launch there are no parts.
"""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

from replayssm import kernels, launch_choices, plan, read_kernel, recurrences
from replayssm.bench import append_rows, launches
from replayssm.bench import kernels as kernels_bench
from replayssm.bench.kernels import (
    CASES,
    WINDOW,
    AcceptedOption,
    BatchOption,
    CaseOption,
    CommitOption,
    FormatOption,
    Steps,
    TokensOption,
    WindowOption,
    cells_of,
)
from replayssm.catalogue import ACTIVATION
from replayssm.compare import provenance


class _Left:
    """A kernel that is not launched."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: None


class _Alone:
    """kernels.read_kernel, awaiting nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        at = self.kernel.arg_names.index("ready")

        def launch(*arguments: Any, **constants: Any) -> None:
            awaited = (*arguments[:at], None, *arguments[at + 1 :])
            self.kernel[grid](*awaited, **constants | {"BESIDE": False})

        return launch


def only(part: str) -> ExitStack:
    """Inside, a layer's step is only this part: read, carry, prepare (carry and flush) or none."""
    stack, left = ExitStack(), _Left()
    if part in ("read", "none"):
        stack.enter_context(mock.patch.object(kernels, "prepare_kernel", left))
    if part == "read":
        stack.enter_context(launches.changed({"answers": False}))  # of all rows
        stack.enter_context(mock.patch.object(kernels, "read_kernel", _Alone(read_kernel.read_kernel)))
    else:
        stack.enter_context(mock.patch.object(kernels, "read_kernel", left))
    if part == "carry":
        stack.enter_context(launches.changed({"flush_programs": 0}))
    if part == "prepare":
        stack.enter_context(launches.changed({"flush_parts": 1}))
    return stack


def main(
    case: CaseOption = list(CASES),  # noqa: B006
    batch: BatchOption = "256",
    formats: FormatOption = "fp32,split16",
    window: WindowOption = WINDOW,
    tokens: TokensOption = 1,
    accepted: AcceptedOption = 1.0,
    commit: CommitOption = None,
    seconds: Annotated[float, typer.Option(help="Start nothing more after so long.")] = 3600.0,
    only_compile: Annotated[
        str | None, typer.Option(help="I/N: compile the kernels of every N-th cell from the I-th, measure nothing.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Rows are appended here.")] = Path("results/parts.jsonl"),
) -> None:
    """The parts of a layer's step on a GPU: times, bytes, share of the read ceiling."""
    steps, started = Steps(window, tokens, accepted), time.monotonic()
    cells = cells_of(case, batch, formats)
    for name, rows, fmt in cells:
        kind, geometry = CASES[name]
        chosen = launch_choices.launch(recurrences.get(kind), geometry, fmt, rows, tokens, window)
        if chosen.together or chosen.at_once:
            raise typer.BadParameter(f"--batch must be larger: {rows} rows of {name} are one launch, without parts.")
    if only_compile:
        for cell in kernels_bench.share(cells, only_compile):
            for part in ("read", "carry"):
                with only(part):
                    kernels_bench._Ours(*cell, layers=1, staggered=True, steps=steps).step()
        torch.cuda.synchronize()
        return
    console, origin = Console(width=120), provenance(commit) | {"gpu": torch.cuda.get_device_name()}
    ceiling = kernels_bench.ceilings()
    table = Table(
        "case", "B", "format", "tokens", "all us", *(f"{part} us (share)" for part in ("read", "carry", "flush"))
    )
    for cell in cells:
        if time.monotonic() - started > seconds:
            console.print("out of time: the rest was not measured")
            break
        row = measure(*cell, steps, ceiling)
        append_rows(out, [row], origin)
        found = [f"{part['us']:.1f} ({part['share_of_read_ceiling']:.0%})" for part in row["parts"].values()]
        table.add_row(cell[0], str(cell[1]), cell[2], str(tokens), f"{row['us']:.1f}", *found)
    console.print(table)


def measure(case: str, rows: int, fmt: str, of: Steps, ceiling: dict[str, float]) -> dict[str, Any]:
    """One row: microseconds of a step and of its parts, bytes and share of the read ceiling of each part."""
    us = {part: timed(case, rows, fmt, of, part) for part in ("all", "none", "read", "carry", "prepare")}
    (name, geometry), none = CASES[case], us["none"]
    layer, (H, _, V, K) = plan.Layer(name, geometry, 4), geometry
    moved = plan.replayed_bytes(layer, fmt, of.window, of.tokens, of.accepted)
    stored, _ = plan.element_bytes(fmt, K)
    values = (max(of.window - of.tokens, 0) / 2 + of.tokens) + of.tokens  # of records, and outputs
    parts = {
        "read": (us["read"] - none, moved.checkpoint + values * H * V * ACTIVATION),
        "carry": (us["carry"] - none, moved.beside),
        "flush": (us["prepare"] - us["carry"], moved.due * (2 * stored * layer.elements + moved.folded * layer.record)),
    }
    return {
        "bench": "parts",
        "case": case,
        "recurrence": recurrences.get(name).name,
        "geometry": {"B": rows} | geometry._asdict(),
        "tokens": of.tokens,
        "format": fmt,
        "window": of.window,
        "us": us["all"],
        "us_begin_and_commit": none,
        "parts": {
            part: {
                "us": spent,
                "bytes": rows * size,
                "share_of_read_ceiling": rows * size / spent / 1e3 / ceiling["read_gbps"],
            }
            for part, (spent, size) in parts.items()
        },
        "ceilings": ceiling,
    }


def timed(case: str, rows: int, fmt: str, of: Steps, part: str) -> float:
    """Microseconds per layer step of one part (all: the whole step)."""
    with ExitStack() if part == "all" else only(part):
        return launches.timed(case, rows, fmt, of, {})
