"""Table and picture of accuracy: rows of `replayssm eval` (and speeds of `bench kernels`) to accuracy.md and .png."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from replayssm.files import whole

# Okabe and Ito's colours, then the same again with dashed lines.
COLOURS = ["#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]
Row = dict[str, Any]


def newest(path: Path) -> dict[tuple[Any, ...], Row]:
    """The newest row of every (measure, model, format, late or task).

    Raises:
        ValueError: there is no such file, or it has no rows.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file: `replayssm eval` writes it.")
    rows = keyed(_read(path))
    if not rows:
        raise ValueError(f"{path} has no rows: `replayssm eval` writes them.")
    return rows


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def keyed(rows: Iterable[Row]) -> dict[tuple[Any, ...], Row]:
    """Rows by measure, model, format and late or task; the last of each."""
    return {(row["measure"], row["model"], row["format"], row.get("late", row.get("task"))): row for row in rows}


def speeds(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Speed against the fastest public kernel in fp32 at B = 256 with one token, by format and case, newest rows."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["bench"] == "decode" and row["tokens"] == 1 and row["staggered"] and row["geometry"]["B"] == 256:
            found.setdefault(row["format"], {})[row["case"]] = row["speedup_fp32"]
    return found


def write_report(rows_file: Path, kernels_file: Path, folder: Path) -> list[Path]:
    """Write folder/accuracy.md and folder/accuracy.png."""
    rows, fast = newest(rows_file), speeds(_read(kernels_file))
    paths = [folder / "accuracy.md", folder / "accuracy.png"]
    with whole(paths[0]) as part:
        part.write_text(table(rows, fast))
    with whole(paths[1]) as part:
        draw(rows, part)
    return paths


def table(rows: dict[tuple[Any, ...], Row], fast: dict[str, dict[str, float]]) -> str:
    """A Markdown table per model."""
    text = []
    for model, (head, lines) in tables(rows, fast).items():
        text += [f"**{model}**", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        text += [f"| `{name}` | " + " | ".join(cells) + " |" for name, *cells in lines]
        text.append("")
    return "\n".join(text)


def tables(
    rows: dict[tuple[Any, ...], Row], fast: dict[str, dict[str, float]]
) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Head and lines per model: bytes, speed, KL, drift and accuracy of every format."""
    found = {}
    for model in sorted({key[1] for key in rows}):
        mine = {(m, f, x): row for (m, name, f, x), row in rows.items() if name == model and m != "harness"}
        lates = sorted({x for m, _, x in mine if m == "task"})
        head = [
            "format",
            "stored B/element",
            "moved kB/token",
            "speed from fp32, H200",
            "KL from fp32",
            "in solutions",
            "top 1 equal",
            "state error",
        ]
        head += [f"right, {'alone' if not n else f'behind {n}'}" for n in lates]
        lines = []
        about = {f: row for (_, f, _), row in sorted(mine.items(), key=lambda x: x[0][0] == "kl")}
        for name, some in sorted(about.items(), key=lambda x: (x[0] != "fp32", -x[1]["stored_bytes_per_element"])):
            moved = some["bytes_read_per_token"] + some["bytes_written_per_token"]
            cells = [name, f"{some['stored_bytes_per_element']:.2f}", f"{moved / 1e3:,.0f}"]
            speed = fast.get(name, {})
            cells.append(f"{min(speed.values()):.2f}x to {max(speed.values()):.2f}x" if speed else "")
            kl, drift = mine.get(("kl", name, None)), mine.get(("drift", name, None))
            inside = kl.get("solutions") if kl else None
            cells += (
                [f"{kl['kl']:.1e}", f"{inside['kl']:.1e}" if inside else "", f"{kl['top1']:.2%}"] if kl else [""] * 3
            )
            cells.append("" if not drift else f"{drift['state_error']:.1e}" + (" =" if drift["bitwise_fp32"] else ""))
            for late in lates:
                task = mine.get(("task", name, late))
                cells.append("" if not task else _right(task))
            lines.append(cells)
        found[model] = head, lines
    return found


def _right(row: Row) -> str:
    low, high = row["difference_95"]
    share = f"{row['right'] / row['problems']:.1%} of {row['problems']}"
    return share if row["format"] == "fp32" else f"{share} ({100 * low:+.1f} to {100 * high:+.1f})"


def draw(rows: dict[tuple[Any, ...], Row], path: Path) -> None:
    """Per model: KL by position, disagreement by position, state error by tokens, difference in accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = sorted({key[1] for key in rows if key[0] != "harness"})
    names = list(dict.fromkeys(key[2] for key in rows if key[0] != "harness"))
    style = {
        name: {"color": COLOURS[i % len(COLOURS)], "linestyle": "-" if i < len(COLOURS) else "--"}
        for i, name in enumerate(names)
    }
    figure, axes = plt.subplots(len(models), 4, figsize=(19, 4.2 * len(models)), squeeze=False, layout="constrained")
    for line, model in zip(axes, models, strict=True):
        mine = [row for key, row in rows.items() if key[1] == model]
        for row in mine:
            look = style.get(row["format"], {})
            if row["measure"] == "kl" and row["kl"] > 0:
                at = [(a + b) / 2 for a, b in zip(row["positions"], row["positions"][1:], strict=False)]
                line[0].plot(at, [max(x, 1e-12) for x in row["kl_by_position"]], label=row["format"], **look)
                line[1].plot(at, [100 * (1 - x) for x in row["top1_by_position"]], **look)
            elif row["measure"] == "drift":
                worst = max(row["layers"], key=lambda layer: layer["errors"][-1])
                line[2].plot(row["marks"], worst["errors"], marker=".", **look)
        task = [row for row in mine if row["measure"] == "task" and row["format"] != "fp32"]
        for i, row in enumerate(task):
            low, high = (100 * x for x in row["difference_95"])
            line[3].plot([low, high], [i, i], color=style[row["format"]]["color"])
            line[3].plot(100 * row["difference"], i, "o", color=style[row["format"]]["color"])
        line[3].set_yticks(range(len(task)), [f"{row['format']}, behind {row['late']}" for row in task], fontsize=7)
        line[3].axvline(0, color="black", linewidth=0.8)
        titles = ("KL from fp32, nats", "top 1 differs, %", "state error, worst layer", "points from fp32 (95 %)")
        for axis, title in zip(line, titles, strict=True):
            axis.set_title(f"{model}: {title}", fontsize=10)
            axis.grid(alpha=0.3)
        line[0].set_yscale("log")
        for axis in line[:2]:
            axis.set_xlabel("position")
        line[2].set_xscale("log", base=2)
        line[2].set_yscale("log")
        line[2].set_xlabel("tokens")
    handles = [plt.Line2D([], [], **style[name]) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=min(6, len(names)), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
