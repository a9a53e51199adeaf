"""Measurements. Each writes rows of JSON with provenance; pictures are made from rows by another command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from replayssm.testing import captured


def append_rows(path: Path, rows: list[dict[str, Any]], origin: dict[str, Any]) -> None:
    """Append rows, each with where it comes from, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row | origin) + "\n" for row in rows)


def replay(
    step: Callable[[], Any], warm: int, count: int, before: Callable[[], None] | None = None
) -> list[float]:  # fmt: skip
    """Microseconds of `count` replays of a CUDA graph of step(), after `warm` runs of it.

    What `before` puts on the device before every run is not in them.
    """
    graph = captured(step)
    for _ in range(warm - 1):  # the run before the capture was one
        if before:
            before()
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count)]
    for i in range(count):
        if before:
            before()
        if before or not i:
            events[2 * i].record()
        graph.replay()
        events[2 * i + 1].record()
    torch.cuda.synchronize()
    starts = events[::2] if before else [events[0], *events[1:-1:2]]
    return [1e3 * a.elapsed_time(b) for a, b in zip(starts, events[1::2], strict=True)]
