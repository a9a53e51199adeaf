"""One self-contained HTML page of measured rows: results, pictures, where they come from, what gets no faster.

Reads a folder: every *.jsonl (rows with `bench`), every *.json of `replayssm compare`, every *.png. Rows of `bench
kernels` become tables by case and batch; rows of other measurements are shown as they are. Nothing is fetched when the
page is opened: styles and pictures are in it.
"""

import base64
import json
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from jinja2 import Environment

from replayssm import __version__, evaluate_report
from replayssm.compare import SCHEMA, label

WHERE = ("gpu", "device", "date", "commit", "command")  # of a row, beside its versions


class Grid(NamedTuple):
    """A table: its title, column names, cells, and what is the same in all of its rows."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    common: str = ""

    def figures(self, i: int) -> bool:
        """Whether a column holds figures, which are set to the right."""
        return all(not row[i] or row[i][0].isdigit() for row in self.rows)


def page(results: Path) -> str:
    """The page of a folder of results.

    Raises:
        ValueError: the folder is not there, or holds no rows.
    """
    if not results.is_dir():
        raise ValueError(f"{results} is not a folder: --results takes the folder with measured rows (results/).")
    rows: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(results.glob("*.jsonl")):
        rows[path.name] = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    documents = {path.name: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    compared = {
        name: found for name, found in documents.items() if isinstance(found, dict) and found.get("schema") == SCHEMA
    }
    everything = [row for found in rows.values() for row in found]
    if not everything and not compared:
        raise ValueError(
            f"{results} holds no rows: measure some (`replayssm bench kernels`, `replayssm compare --json`)."
        )
    decode = _newest([row for row in everything if _is_decode(row)])
    others = {
        name: [row for row in found if not _is_decode(row) and "measure" not in row]
        for name, found in rows.items()
        if not name.startswith(".")
    }
    measured = evaluate_report.keyed(row for row in everything if "measure" in row)
    grids = [*_decode_grids(decode)]
    for model, (head, lines) in evaluate_report.tables(measured, evaluate_report.speeds(decode)).items():
        grids.append(Grid(f"Formats: what they cost and keep, {model}", head, lines))
    grids += [_compare_grid(name, found) for name, found in compared.items()]
    grids += [_plain_grid(name, found) for name, found in others.items() if found]
    pictures = [
        (path.stem.replace("-", " "), base64.b64encode(path.read_bytes()).decode())
        for path in sorted(results.glob("*.png"))
    ]
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        resources.files("replayssm").joinpath("report.html").read_text()
    )
    return template.render(
        version=__version__,
        summary=_summary(decode),
        grids=grids,
        slower=_slower(decode, compared),
        pictures=pictures,
        provenance=_provenance(rows, compared),
    )


def _is_decode(row: dict[str, Any]) -> bool:
    """Plain decoding of `bench kernels`."""
    return row.get("bench") == "decode" and row.get("tokens") == 1


def _newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every case the newest row, flushes staggered."""
    found = {(row["gpu"], row["case"], row["format"], row["geometry"]["B"]): row for row in rows if row["staggered"]}
    return list(found.values())


def _sizes(row: dict[str, Any]) -> str:
    return f"{row['recurrence']} " + " ".join(f"{name}{row['geometry'][name]}" for name in "HGVK")


def _decode_grids(rows: list[dict[str, Any]]) -> list[Grid]:
    """For every GPU and format: speedup and time by case and batch."""
    grids = []
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        for fmt in dict.fromkeys(row["format"] for row in rows if row["gpu"] == gpu):
            some = [row for row in rows if (row["gpu"], row["format"]) == (gpu, fmt)]
            batches = sorted({row["geometry"]["B"] for row in some})
            cells = {(row["case"], row["geometry"]["B"]): row for row in some}
            lines = []
            for case in dict.fromkeys(row["case"] for row in some):
                first = next(row for row in some if row["case"] == case)
                line = [f"{case} ({_sizes(first)})"]
                for batch in batches:
                    row = cells.get((case, batch))
                    line.append(
                        "" if row is None else f"{row['baseline_us']:.1f} to {row['us']:.1f} ({row['speedup']:.2f}x)"
                    )
                lines.append(line)
            title = f"{gpu}, {fmt}: us per step of one recurrent layer, fastest public kernel to replayed, by rows"
            grids.append(Grid(title, ["case", *map(str, batches)], lines))
    return grids


def _cache(row: dict[str, Any]) -> str:
    """Which cache a row of `replayssm compare` is of, or where its drafts came from."""
    named: Any = SimpleNamespace(**{"draft": None} | row)
    return label(named)


def _compare_grid(name: str, document: dict[str, Any]) -> Grid:
    origin, lines = document["provenance"], []
    hosts = {row["model"]: row for row in document["rows"] if row["cache"] == "host"}
    for row in document["rows"]:
        ratio = row["tokens_per_second"] / hosts[row["model"]]["tokens_per_second"]
        traffic = (row["state_bytes_read_per_token"] + row["state_bytes_written_per_token"]) / 1e3
        difference = row["max_logprob_difference"]
        lines.append(
            [
                row["model"],
                _cache(row),
                str(row["batch"]),
                f"{row['tokens_per_second']:,.0f} ({ratio:.2f}x)",
                f"{traffic:,.0f}",
                f"{row['state_memory_bytes'] / 1e3:,.0f}",
                "reference" if difference is None else f"{difference:.1e}",
                "" if row["right"] is None else f"{row['right']} of {row['answers']}",
            ]
        )
    columns = [
        "model",
        "cache",
        "batch",
        "tokens/s",
        "state kB per token",
        "state kB per row",
        "log-probabilities off by",
    ]
    return Grid(f"Whole models, {origin['device']} ({name})", [*columns, "answers right"], lines)


def _plain_grid(name: str, rows: list[dict[str, Any]]) -> Grid:
    """Rows as they are, without where they come from; fields that are nested too deep for a cell are left out."""
    flat = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    same = [name for name in columns if len(flat) > 1 and len({row.get(name) for row in flat}) == 1]
    columns = [name for name in columns if name not in same]
    common = ", ".join(f"{name} {flat[0][name]}" for name in same)
    return Grid(f"Other rows ({name})", columns, [[row.get(column, "") for column in columns] for row in flat], common)


def _flat(row: dict[str, Any]) -> dict[str, str]:
    left_out = {*WHERE, "versions", "python", "source_changed", "threads", "allocator"}
    found = {}
    for key, value in row.items():
        if isinstance(value, dict) and key == "geometry":
            found[key] = " ".join(f"{name}{size}" for name, size in value.items())
        elif isinstance(value, float):
            found[key] = f"{value:.4g}"
        elif not isinstance(value, (dict, list)) and key not in left_out:
            found[key] = "" if value is None else str(value)
    return found


def _summary(rows: list[dict[str, Any]]) -> list[str]:
    """One sentence per GPU and format: the range of speedups at the largest batch that all cases have."""
    lines = []
    for gpu, fmt in dict.fromkeys((row["gpu"], row["format"]) for row in rows):
        some = [row for row in rows if (row["gpu"], row["format"]) == (gpu, fmt)]
        cases = {row["case"] for row in some}
        batches = {row["geometry"]["B"] for row in some}
        common = [batch for batch in batches if cases == {row["case"] for row in some if row["geometry"]["B"] == batch}]
        if not common:
            continue
        at = [row["speedup"] for row in some if row["geometry"]["B"] == max(common)]
        lines.append(
            f"{fmt} on {gpu}, {max(common)} rows: {min(at):.2f} to {max(at):.2f} times the fastest public kernel, over "
            f"{len(cases)} layer geometries."
        )
    return lines


def _slower(rows: list[dict[str, Any]], compared: dict[str, Any]) -> list[str]:
    """Measured cells in which replay is not faster, worst first."""
    lines = []
    for row in sorted(rows, key=lambda row: row["speedup"]):
        if row["speedup"] < 1:
            where = f"{row['case']}, {row['format']}, {row['geometry']['B']} rows on {row['gpu']}"
            lines.append(f"{where}: {row['speedup']:.2f}x ({row['us']:.1f} against {row['baseline_us']:.1f} us)")
    for name, document in compared.items():
        hosts = {row["model"]: row["tokens_per_second"] for row in document["rows"] if row["cache"] == "host"}
        for row in document["rows"]:
            ratio = row["tokens_per_second"] / hosts[row["model"]]
            if row["cache"] != "host" and ratio < 1:
                where = f"{row['model']}, {_cache(row)}, batch {row['batch']} on {document['provenance']['device']}"
                lines.append(f"{where}: {ratio:.2f}x, whole model ({name})")
    return lines


def _provenance(rows: dict[str, list[dict[str, Any]]], compared: dict[str, Any]) -> list[dict[str, str]]:
    """Where figures come from: one entry per file, command, commit and device."""
    entries: dict[tuple[str, ...], dict[str, str]] = {}
    sources = [(name, row) for name, found in rows.items() for row in found]
    sources += [(name, document["provenance"]) for name, document in compared.items()]
    for name, origin in sources:
        versions = ", ".join(f"{package} {number}" for package, number in origin.get("versions", {}).items() if number)
        device = str(origin.get("gpu") or origin.get("device") or "")
        key = (name, str(origin.get("command", "")), str(origin.get("commit", ""))[:12], device, versions)
        changed = " (source changed)" if origin.get("source_changed") else ""
        entries.setdefault(
            key,
            {
                "file": name,
                "command": key[1],
                "commit": key[2] + changed,
                "device": device,
                "date": str(origin.get("date", ""))[:10],
                "versions": versions,
            },
        )
    return list(entries.values())
