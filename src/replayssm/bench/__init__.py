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


def replay(step: Callable[[], Any], warm: int, count: int) -> list[float]:
    """Microseconds of `count` replays of a CUDA graph of step(), after `warm` runs of it."""
    graph = captured(step)
    for _ in range(warm - 1):  # the run before the capture was one
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]
