"""What README.md and docs/ say is so: paths exist, commands and options exist, Python examples run."""

import json
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "models" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language, pages=PAGES):
    """Fenced blocks of a language, each with a name."""
    found = []
    for page in pages:
        fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
        found += [
            pytest.param(text, id=f"{page.name}-{i}") for i, (name, text) in enumerate(fenced) if name == language
        ]
    return found


@pytest.mark.parametrize("block", blocks("python"))
def test_python_examples_run(block, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(ROOT)
    exec(compile(block, "example", "exec"), {})


@pytest.mark.parametrize("block", blocks("sh"))
def test_commands_and_their_options_exist(block):
    pytest.importorskip("typer")
    from typer.main import get_command

    from replayssm.cli import app

    for line in block.splitlines():
        program, name, *words = shlex.split(line, comments=True)
        assert program == "replayssm"
        commands = get_command(app).commands
        if name == "bench":
            from replayssm.bench.__main__ import app as benches

            commands, name = get_command(benches).commands, words.pop(0)
        known = {
            option for parameter in commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words if word.startswith("-")} <= known, line


def test_make_targets_exist():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    for page in PAGES:
        assert set(re.findall(r"^    make ([a-z]+)", page.read_text(), re.M)) <= set(targets)


@pytest.mark.parametrize("tree", blocks("", [README]))
def test_tree_exists(tree):
    parents = []
    for line in tree.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        parents[depth:] = [name]
        path = ROOT.joinpath(*parents)
        assert path.is_dir() if name.endswith("/") else path.is_file(), path


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_specification_names_every_field():
    from replayssm.ring import Cursors, LayerState, Records

    text = (ROOT / "docs" / "cache.md").read_text()
    for field in (*Cursors._fields, *Records._fields, *LayerState._fields):
        assert f"`{field}`" in text, field


def test_figures_are_those_of_the_measured_rows():
    text = README.read_text()
    document = json.loads((ROOT / "results" / "compare.json").read_text())
    assert document["provenance"]["command"] in text
    for row in document["rows"]:
        if row["format"] == "bf16":  # in the picture only
            continue
        traffic = row["state_bytes_read_per_token"] + row["state_bytes_written_per_token"]
        for figure in (row["tokens_per_second"], traffic / 1e3, row["state_memory_bytes"] / 1e3):
            assert re.search(rf"\| {figure:,.0f}( \(| \|)", text), (row["model"], row["format"], figure)
        if row["max_logprob_difference"] is not None:
            assert f"| {row['max_logprob_difference']:.1e} |".replace("e-0", "e-") in text


def test_gpu_figures_are_those_of_the_measured_rows():
    text, cells = README.read_text(), {}
    for line in (ROOT / "results" / "kernels.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["tokens"] == 1 and row["staggered"]:
            cells[row["case"], row["geometry"]["B"], row["format"]] = row
    for case in dict.fromkeys(case for case, _, _ in cells):
        large = [cells[case, 256, format] for format in ("fp32", "split16", "bf16")]
        fp32, split16, bf16 = (f"{row['us']:.0f} ({row['speedup']:.2f}x)" for row in large)
        public, public_bf16 = (f"{large[i]['baseline_us']:.0f}" for i in (0, 2))
        assert f"| {public} | {fp32} | {split16} | {public_bf16} | {bf16} |" in text, case
        by_batch = [
            ", ".join(f"{cells[case, rows, format]['speedup']:.2f}x" for format in ("fp32", "split16"))
            for rows in (1, 8, 32, 256)
        ]
        assert f"| {' | '.join(by_batch)} |" in text, case


def test_figures_of_drafts_are_those_of_the_measured_rows():
    text, cells = README.read_text(), {}
    for line in (ROOT / "results" / "kernels.jsonl").read_text().splitlines():
        row = json.loads(line)
        if (row["tokens"], row["geometry"]["B"]) == (5, 256) and row["tree"] is None:
            cells[row["case"], row["window"], row["format"]] = row
        if row.get("tree"):
            assert f" {row['us'] / row['chain_us']:.2f} times a chain of 8" in text, row["case"]
    assert cells
    for case, window in dict.fromkeys((case, window) for case, window, format in cells if format == "split16"):
        fp32, split16 = (cells[case, window, format] for format in ("fp32", "split16"))
        figures = (f"{row['us']:.0f} ({row['speedup']:.2f}x)" for row in (fp32, split16))
        assert f"| {fp32['baseline_us']:.0f} | {' | '.join(figures)} |" in text, (case, window)


def test_figures_of_whole_models_are_those_of_the_measured_rows():
    text, cells = README.read_text(), {}
    for line in (ROOT / "results" / "e2e.jsonl").read_text().splitlines():
        row = json.loads(line)
        cells[row["model"], row["runner"], row["drafts"], row["batch"], row["mode"], row["format"]] = row
    assert cells
    for (model, runner, drafts, batch, mode, format), row in cells.items():
        if drafts:
            gain = "" if mode == "stock" else f", {row['speedup']:.2f}x"
            figure = f"| {row['tokens_per_second']:,.0f} ({row['requests_that_fit']:,}){gain} |"
        elif runner == "v1":
            figure = f"{row['step_ms']:.2f}"
        else:
            gain = "" if mode == "stock" else f" ({row['speedup']:.2f}x)"
            figure = f"| {row['step_ms']:.2f}{gain} |"
        assert figure in text, (model, batch, mode, format)
        if runner == "v2" and not drafts:
            stock = cells[model, runner, drafts, batch, "stock", None]
            gain = "" if mode == "stock" else f" ({stock['graph_ms'] / row['graph_ms']:.2f}x)"
            assert f"| {row['graph_ms']:.2f}{gain} |" in text, (model, batch, mode, format)


@pytest.mark.parametrize("name", ["compare-batch-1", "compare", "compare-batch-64"])
def test_speeds_by_batch_are_those_of_the_measured_rows(name):
    rows = [
        row for row in json.loads((ROOT / "results" / f"{name}.json").read_text())["rows"] if row["format"] == "fp32"
    ]
    speeds = [row["tokens_per_second"] for row in rows]
    host_m, replay_m, host_q, replay_q = speeds
    cells = [f"{host_m:,.0f}", f"{replay_m:,.0f} ({replay_m / host_m:.2f}x)"]
    cells += [f"{host_q:,.0f}", f"{replay_q:,.0f} ({replay_q / host_q:.2f}x)"]
    assert f"| {' | '.join(cells)} |" in README.read_text()
