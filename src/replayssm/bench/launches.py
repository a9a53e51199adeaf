"""GPU: which launch choices are fastest, one field of a Launch after the other: where launch_choices.launch is from.

    python -m replayssm.bench launches --case mamba2-h64 --format fp32,split16
    python -m replayssm.bench launches --case qwen3.5-4b --tokens 5 --accepted 3.5 --change '{"carry_programs": 8}'

Steps are those of `bench kernels`: whole windows with their flushes, staggered, cold L2. A choice is kept where it is
faster by half a percent; then the next group of fields is tried on top of it. With `--change` only those are tried,
each by itself. Nothing is checked here: `bench kernels` checks what it measures.
"""

import json
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

from replayssm import formats, launch_choices
from replayssm.bench import append_rows
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
from replayssm.compare import provenance
from replayssm.formats_kernel import needs_whole_rows
from replayssm.launch_choices import Launch

GROUPS: dict[str, list[dict[str, int]]] = {
    "read": [
        {"read_v": v, "read_warps": warps}
        for v, warps in ((16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 1), (64, 2), (64, 4), (128, 4))
    ]
    + [{"read_k": columns, "read_stages": n} for columns, n in ((32, 3), (64, 2), (64, 3))]
    + [{"read_run": n} for n in (2, 4)],
    "flush": [
        {"fold_k": columns, "fold_v": 16, "flush_v": v, "flush_programs": n}
        for columns in (32, 64)
        for v in (16, 32, 64, 128)
        for n in (8, 12, 16)
    ]
    + [{"flush_registers": n} for n in (128, 168, 255)]
    + [{"flush_parts": n} for n in (1, 2, 4, 8)]
    + [{"fold_v": 32, "flush_v": 64, "flush_programs": n} for n in (6, 8)]
    + [{"answers": 0}],
    "carry": [
        {"carry_heads": heads, "carry_warps": warps, "carry_programs": n}
        for heads in (1, 2, 4, 8)
        for warps in (1, 2)
        for n in (8, 12, 24)
    ]
    + [{"carry_registers": n} for n in (80, 96, 128, 168)]
    + [{"apart": 0}],
    "together": [
        {"together": 1, "read_v": v, "read_warps": warps}
        for v in (16, 32, 64)
        for warps in (1, 2, 4)
        if v <= 16 * warps
    ]
    + [{"together": 0}]
    + [
        {"at_once": 1, "update_v": v, "update_warps": warps}
        for v, warps in ((4, 1), (8, 1), (8, 2), (16, 2), (16, 4), (32, 4), (32, 8))
    ],
}


def main(
    case: CaseOption = list(CASES),  # noqa: B006
    batch: BatchOption = "256",
    formats: FormatOption = "fp32,split16",
    window: WindowOption = WINDOW,
    tokens: TokensOption = 1,
    accepted: AcceptedOption = 1.0,
    group: Annotated[list[str], typer.Option(help=f"Of {', '.join(GROUPS)}.")] = list(GROUPS)[:-1],  # noqa: B006
    change: Annotated[list[str], typer.Option(help="Fields of Launch as JSON, instead of groups; repeatable.")] = [],  # noqa: B006
    commit: CommitOption = None,
    seconds: Annotated[float, typer.Option(help="Start nothing more after so long.")] = 3600.0,
    only_compile: Annotated[
        str | None, typer.Option(help="I/N: compile every N-th choice from the I-th, measure nothing.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Rows are appended here.")] = Path("results/launches.jsonl"),
) -> None:
    """Times of launch choices on a GPU."""
    steps, started = Steps(window, tokens, accepted), time.monotonic()
    cells, asked = cells_of(case, batch, formats), asked_for(change)
    tried = asked or [one for name in group for one in GROUPS[name]]
    if only_compile:
        choices = [(cell, one) for cell in cells for one in ({}, *tried)]
        for cell, one in kernels_bench.share(choices, only_compile):
            if allowed(cell[0], cell[2], one):
                with changed(one):
                    kernels_bench._Ours(*cell, layers=1, staggered=True, steps=steps).step()
        torch.cuda.synchronize()
        return
    console = Console(width=120)
    origin = provenance(commit) | {"gpu": torch.cuda.get_device_name()}
    for name, rows, fmt in cells:
        table = Table("change", "us", title=f"{name} B={rows} {fmt}, {tokens} tokens")
        best: dict[str, Any] = {}
        least = as_chosen = timed(name, rows, fmt, steps, best)
        table.add_row("as chosen", f"{as_chosen:.1f}")
        for one in tried:
            if time.monotonic() - started > seconds or not allowed(name, fmt, one):
                continue
            us = timed(name, rows, fmt, steps, best | one)
            row = {
                "bench": "launches", "case": name, "geometry": {"B": rows} | CASES[name][1]._asdict(), "format": fmt,
                "tokens": tokens, "window": window, "change": best | one, "us": us, "us_as_chosen": as_chosen,
            }  # fmt: skip
            append_rows(out, [row], origin)
            table.add_row(", ".join(f"{field} {value}" for field, value in (best | one).items()), f"{us:.1f}")
            if not asked and us < 0.995 * least:
                least, best = us, best | one
        console.print(table)
        if not asked:
            console.print(f"fastest: {best or 'as chosen'}: {least:.1f} us")


def asked_for(texts: list[str]) -> list[dict[str, int]]:
    """Changes that were given as JSON.

    Raises:
        BadParameter: one is not an object of fields of Launch.
    """
    found = []
    for text in texts:
        try:
            one = dict(json.loads(text))
        except (ValueError, TypeError):
            one = {text: None}
        if not one or not one.keys() <= set(Launch._fields):
            raise typer.BadParameter(
                f"--change must be a JSON object of fields of Launch ({', '.join(Launch._fields)}), as "
                f'{{"read_v": 32}}; got {text}.'
            )
        found.append(one)
    return found


def allowed(case: str, fmt: str, change: dict[str, int]) -> bool:
    """Whether a change can be made to this geometry and format: rows of K with a scale are read whole; some round."""
    H, G, V, _ = CASES[case][1]
    if "read_k" in change and needs_whole_rows(fmt):
        return False
    if change.get("at_once") and not formats.get(fmt).exact:
        return False
    most = 1 << (V - 1).bit_length()
    if change.get("read_v", 0) > most or change.get("flush_v", 0) > V:
        return False
    return change.get("carry_heads", 1) <= H // G


def timed(case: str, rows: int, fmt: str, steps: Steps, change: dict[str, Any]) -> float:
    """Microseconds per layer step with a change."""
    with changed(change):
        times = kernels_bench.timed(case, rows, fmt, steps, True, windows=4)[1]
    torch.cuda.empty_cache()
    return median(kernels_bench.means(times, steps.window))


def changed(change: dict[str, Any]) -> Any:
    """Inside, some fields of Launch are others."""
    chosen = launch_choices.launch

    def launch(*arguments: Any) -> Launch:
        return chosen(*arguments)._replace(**change)

    return mock.patch.object(launch_choices, "launch", launch)
