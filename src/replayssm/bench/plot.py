"""Pictures from rows: speedup and share of the read ceiling of a layer over the batch; tokens/s of whole models."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from replayssm.files import whole

COLORS = {"fp32": "#0072B2", "split16": "#D55E00", "bf16": "#009E73", "fp16": "#CC79A7"}
MARKS = {"fp32": "o", "split16": "s", "bf16": "^", "fp16": "v"}


def main(
    rows: Annotated[Path, typer.Option(help="Rows of `bench kernels`.")] = Path("results/kernels.jsonl"),
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("results"),
    whole_models: Annotated[
        Path, typer.Option(help="Rows of the end-to-end scripts; not drawn where there are none.")
    ] = Path("results/e2e.jsonl"),
) -> None:
    """Draw kernels-speedup.png, kernels-ceiling.png and one picture for every whole model; newest rows count."""
    draw_layers(rows, out)
    if whole_models.is_file():
        draw_models(whole_models, out)


def draw_models(rows: Path, out: Path) -> None:
    """e2e-MODEL.png, e2e-MODEL-drafts.png: rows of one model and runner; -v1 where it is not vLLM's newest."""
    from replayssm.bench.e2e import draw, name_of

    pictures: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        name = f"e2e-{row['model'].lower()}{'-drafts' * bool(row['drafts'])}{'-v1' * (row['runner'] == 'v1')}"
        pictures.setdefault(name, {})[row["batch"], name_of(row)] = row
    for name, newest in pictures.items():
        with whole(out / f"{name}.png") as part:
            draw(list(newest.values()), part)
        print(out / f"{name}.png")


def draw_layers(rows: Path, out: Path) -> None:
    """The two pictures of single layers; of several rows of one cell the newest counts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        if row["bench"] == "decode" and row["tokens"] == 1 and row["staggered"]:
            newest[row["case"], row["format"], row["geometry"]["B"]] = row
    cases = list(dict.fromkeys(case for case, _, _ in newest))
    for name, field, label, title in (
        ("kernels-speedup", "speedup", "speedup", "against the fastest public kernel"),
        ("kernels-ceiling", "share_of_read_ceiling", "share of read ceiling", "bytes moved per time"),
    ):
        figure, axes = plt.subplots(
            2, (len(cases) + 1) // 2, figsize=(12, 6.5), sharex=True, sharey=True, squeeze=False
        )
        for axis, case in zip(axes.flat, cases, strict=False):
            for fmt, color in COLORS.items():
                points = sorted((B, row[field]) for (c, f, B), row in newest.items() if (c, f) == (case, fmt))
                if points:
                    axis.plot(*zip(*points, strict=True), color=color, marker=MARKS[fmt], label=fmt)
            axis.axhline(1.0, color="black", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set_xticks([1, 8, 32, 256], ["1", "8", "32", "256"])
            axis.set_title(case)
            axis.grid(alpha=0.3)
        for axis in axes[-1]:
            axis.set_xlabel("batch (rows)")
        for line in axes:
            line[0].set_ylabel(label)
        axes[0][0].legend(title="checkpoint format")
        gpu = next(iter(newest.values()))["gpu"]
        figure.suptitle(f"Plain decoding of one layer, {title}; window 16, flushes counted, {gpu}")
        figure.tight_layout()
        with whole(out / f"{name}.png") as part:
            figure.savefig(part, dpi=120)
        print(out / f"{name}.png")
