"""Measurements. Each writes rows of JSON with provenance; pictures are made from rows by another command."""

import json
from pathlib import Path
from typing import Any


def append_rows(path: Path, rows: list[dict[str, Any]], origin: dict[str, Any]) -> None:
    """Append rows, each with where it comes from, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row | origin) + "\n" for row in rows)
