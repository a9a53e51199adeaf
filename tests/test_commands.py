"""plan, info, check, report, bench, plot: what they print and write, and that nothing is left half-written."""

import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

pytest.importorskip("typer")

import replayssm  # noqa: E402
from replayssm import check, commands, files, read  # noqa: E402
from replayssm.cli import app  # noqa: E402

ROOT = Path(__file__).parents[1]
runner = CliRunner(env={"COLUMNS": "100"})


def run(*arguments: object, code: int = 0):
    result = runner.invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result


def test_version() -> None:
    assert run("--version").output == f"{replayssm.__version__}\n"


# ---- plan ----


def test_plan_prints_every_assumption_and_writes_what_it_prints(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    out = run(
        "plan", "-m", "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16", "--gpu", "b300", "--drafts", "0,4", "--json", file,
        "--plot", picture,
    ).output  # fmt: skip
    document = json.loads(file.read_text())
    assert document["schema"] == "replayssm.plan/1" and len(document["cases"]) == 3 * 2 * 3
    flowing = " ".join(out.split())
    for line in document["assumptions"]:
        assert line in flowing
    assert "NOT measured on NVIDIA B300" in flowing
    for case in document["cases"]:
        assert f"{case['kernel_speedup']:.2f}x" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == [file, picture]


def test_plan_fits_80_columns() -> None:
    """Where output is no terminal, tables are as wide as that: nothing may be cut off."""
    for arguments in (
        ["--list"],
        ["-m", "Kimi-K3", "--tp", "8", "--drafts", "0,7", "-b", "1,512", "--params", "1000B-A32B"],
    ):
        out = runner.invoke(app, ["plan", *arguments], env={"COLUMNS": "80"}).output
        assert "…" not in out and max(map(len, out.splitlines())) <= 80


def test_plan_list_names_source_of_confidence() -> None:
    out = run("plan", "--list").output
    for words in ("Qwen3.5-397B-A17B", "Kimi-K3", "config", "quoted", "h200", "measured", "scaled", "data sheet"):
        assert words in out


def test_plan_fits_times_to_rows(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    target = tmp_path / "times.json"
    rows = ROOT / "results" / "kernels.jsonl"
    out = run("plan", "--fit", rows, "--fit-out", target).output
    assert "NVIDIA H200" in out and json.loads(target.read_text())["gpus"]


def test_plan_for_a_gpu_that_is_not_listed() -> None:
    given = ["plan", "-m", "Qwen3.5-4B", "-b", "256", "--bandwidth", "4800", "--memory", "96"]
    out = " ".join(run(*given).output.split())
    assert "NOT measured on a GPU of 4,800 GB/s" in out and "96 GB, 4,800 GB/s nominal" in out


def test_plan_of_a_step_that_was_measured() -> None:
    out = run("plan", "-m", "Qwen3.5-4B", "-b", "256", "--rest-ms", "8.5", "--format", "split16").output
    assert "measured time that you gave" in " ".join(out.split()) and " to " not in out.split("State of a request")[0]


# ---- info ----


def test_info_says_what_would_run_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    out = " ".join(run("info").output.split())
    for words in (replayssm.__version__, torch.__version__.split("+")[0], "split16", "gdn, kda, mamba2"):
        assert words in out
    if not torch.cuda.is_available():
        monkeypatch.delenv("TRITON_INTERPRET")
        assert commands.facts()["implementation triton"].startswith("does not run: there is no GPU")
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    assert commands.facts()["implementation triton"] == "does not run: triton is not installed"


# ---- check ----


def test_check_passes_here() -> None:
    out = run("check", "--device", "cpu", "--format", "split16").output
    assert "6 of 6 cases keep the contract on cpu." in out and out.count("right") == 6


def test_check_finds_a_wrong_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that are a thousandth off."""
    torch_read = read.read_torch
    monkeypatch.setattr(read, "read_torch", lambda *arguments: torch_read(*arguments) * 1.001)
    result = run("check", "--device", "cpu", "--implementation", "torch", "--format", "fp32", code=1)
    assert "3 of 3 cases broke the contract on cpu." in result.stderr and "y is off by" in " ".join(
        result.output.split()
    )


def test_check_finds_a_wrong_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush that loses a millionth part of a thousand: outputs hardly show it, states do."""
    from replayssm.recurrences import batched

    fold = batched.fold
    monkeypatch.setattr(batched, "fold", lambda *arguments: fold(*arguments) * 1.001)
    outcome = check.live(check.Case("gdn", "fp32", "torch", "cpu"), 0)
    assert outcome.fault is not None and "off by" in outcome.fault


def test_check_says_what_it_did_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, 20))
    monkeypatch.setattr(commands.time, "monotonic", lambda: next(ticks))
    out = run("check", "--device", "cpu", "--implementation", "torch", "--format", "fp32", "--seconds", "30").output
    assert "1 of 3 cases keep the contract" in out and "were not reached in 30 s" in out


# ---- report ----


class Page(HTMLParser):
    """Tags that are open at the end, addresses that something is fetched from, cells per table row."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.rows: list[int] = []
        self.ids: set[str] = set()
        self.targets: set[str] = set()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)
        if tag in ("img", "script", "link", "iframe"):
            self.fetched.append(given.get("src") or given.get("href") or "")
        self.ids.add(given.get("id", ""))
        if given.get("href", "").startswith("#"):
            self.targets.add(given["href"][1:])
        if tag == "table":
            self.rows = []
        if tag == "tr":
            self.rows.append(0)
        if tag in ("td", "th"):
            self.rows[-1] += 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "table":
            assert len(set(self.rows)) == 1, self.rows


def test_report_is_one_page_with_every_figure_and_where_it_comes_from(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    run("report", "--results", ROOT / "results", "--out", target)
    text = target.read_text()
    page = Page()
    page.feed(text)
    assert not page.open and page.targets <= page.ids
    assert page.fetched and all(source.startswith("data:image/png;base64,") for source in page.fetched)
    rows = [json.loads(line) for line in (ROOT / "results" / "kernels.jsonl").read_text().splitlines()]
    newest = {(row["case"], row["format"], row["geometry"]["B"]): row for row in rows if _plain(row)}
    for row in newest.values():
        cell = f"{row['baseline_us']:.1f} to {row['us']:.1f} ({row['speedup']:.2f}x)"
        assert cell in text
        listed = f"{row['case']}, {row['format']}, {row['geometry']['B']} rows on {row['gpu']}" in text
        assert listed == (row["speedup"] < 1)
    for path in (ROOT / "results").glob("compare*.json"):
        for row in json.loads(path.read_text())["rows"]:
            assert row.get("draft") is None or f"drafts, {row['draft']} {row['tree']}" in text
    assert {row["commit"][:12] for row in rows if row["commit"]} <= set(
        text.replace("<", " ").replace(">", " ").split()
    )
    for line in (ROOT / "results" / "accuracy.md").read_text().splitlines():
        assert not line.startswith("| ") or all(f">{cell.strip(' `')}<" in text for cell in line.split("|")[1:-1]), line
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def _plain(row: dict) -> bool:
    return row["bench"] == "decode" and row["tokens"] == 1 and row["staggered"]


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium; the test above reads the page without one")
@pytest.mark.parametrize("width", [400, 1280])
def test_report_in_a_browser(width: int, tmp_path: Path) -> None:
    """Nothing is wider than the window but tables, which scroll by themselves; every picture is shown."""
    run("report", "--results", ROOT / "results", "--out", tmp_path / "report.html")
    asked = """<script>addEventListener("load", () => {
      const wide = document.documentElement.scrollWidth > innerWidth
      const dark = [...document.images].filter(image => !image.naturalWidth).length
      document.title = `wide ${wide} dark ${dark} of ${document.images.length}`
    })</script></body>"""
    page = tmp_path / "asked.html"
    page.write_text((tmp_path / "report.html").read_text().replace("</body>", asked))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    pictures = len(list((ROOT / "results").glob("*.png")))
    assert f"<title>wide false dark 0 of {pictures}</title>" in shown, shown[:300]


def test_report_escapes_what_rows_say(tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text(json.dumps({"bench": "<script>alert(1)</script>", "us": 1.0}) + "\n")
    run("report", "--results", tmp_path, "--out", tmp_path / "report.html")
    assert "<script>" not in (tmp_path / "report.html").read_text()


# ---- bench, plot ----


def test_bench_passes_on_to_its_programs() -> None:
    assert "kernels" in run("bench", "--help").output
    assert "--launches" in run("bench", "kernels", "--help").output
    assert "--group" in run("bench", "launches", "--help").output


def test_launch_choices_fit_their_geometry() -> None:
    pytest.importorskip("triton")
    from replayssm.bench.kernels import CASES
    from replayssm.bench.launches import GROUPS, allowed, asked_for
    from replayssm.launch_choices import Launch

    for changes in GROUPS.values():
        assert all(field in Launch._fields for change in changes for field in change)
    assert allowed("qwen3.5-4b", "fp32", {"read_v": 128, "read_warps": 4})
    assert not allowed("mamba2-h64", "fp32", {"read_v": 128, "read_warps": 4})  # V is 64
    assert allowed("nano-4b", "fp32", {"read_v": 128, "read_warps": 4})  # V is 80: one tile of 128
    assert allowed("mamba2-h64", "fp8", {"carry_heads": 8}) and not allowed("kimi-linear", "fp8", {"carry_heads": 2})
    assert allowed("mamba2-h64", "bf16", {"read_k": 32}) and not allowed("mamba2-h64", "fp8", {"read_k": 32})
    assert all(
        any(allowed(case, "fp32", change) for change in changes) for case in CASES for changes in GROUPS.values()
    )
    assert asked_for(['{"read_v": 32, "read_warps": 1}']) == [{"read_v": 32, "read_warps": 1}]
    for text in ("read_v=32", "{}", "[1]", '{"speed": 1}'):
        with pytest.raises(typer.BadParameter, match=r"--change must be a JSON object of fields of Launch"):
            asked_for([text])


def test_bench_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in ("replayssm.bench.__main__", "replayssm.bench.cpu"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("replayssm.bench.cpu", raising=False)
    assert "this needs transformers: pip install 'replayssm[bench]'." in run("bench", "cpu", code=2).stderr


def test_plot_draws_measured_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = ROOT / "results"
    run("plot", "--rows", measured / "kernels.jsonl", "--whole-models", measured / "e2e.jsonl", "--out", tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in measured.glob("*.png") if path.name.startswith(("kernels-", "e2e-"))}


# ---- files ----


def test_an_interrupted_file_is_as_before(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    target.write_text("before")
    with pytest.raises(KeyboardInterrupt), files.whole(target) as part:
        part.write_text("half of")
        raise KeyboardInterrupt
    assert target.read_text() == "before" and list(tmp_path.iterdir()) == [target]


def test_an_interrupted_plan_leaves_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")

    def interrupted(made: object, path: Path) -> None:
        path.write_bytes(b"half a picture")
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "draw_plan", interrupted)
    runner.invoke(app, ["plan", "-m", "Qwen3.5-4B", "--plot", str(tmp_path / "plan.png")])
    assert not list(tmp_path.iterdir())


# ---- what a user got wrong: one sentence, exit code 2 ----


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan"], "--model is missing: `replayssm plan --list` shows the models that are known."),
        (["plan", "-m", "Qwen3.5-4"], "no model 'Qwen3.5-4'"),
        (["plan", "-m", "Qwen3.5-4B", "--gpu", "h300"], "unknown GPU 'h300'"),
        (
            ["plan", "-m", "Qwen3.5-4B", "--batch", "1;2"],
            "--batch takes whole numbers, several with commas; got '1;2'.",
        ),
        (["plan", "-m", "Qwen3.5-4B", "--params", "many"], "--params takes a size such as 7B, 350M or 120B-A12B"),
        (["plan", "-m", "Qwen3.5-4B", "--state", "fp8"], "unknown stock state 'fp8'"),
        (["plan", "--fit", "none.jsonl"], "none.jsonl is not a file"),
        (
            ["plan", "-m", "Qwen3.5-4B", "--json", "none/plan.json"],
            "none/plan.json can't be written: none is not a folder.",
        ),
        (["check", "--device", "tpu"], "unknown device 'tpu': choose one of cpu, cuda."),
        (["check", "--format", "fp3"], "unknown format 'fp3'"),
        (["report", "--results", "none"], "none is not a folder: --results takes the folder with measured rows"),
        (["plot", "--rows", "none.jsonl"], "none.jsonl is not a file: --rows takes rows of `replayssm bench kernels`."),
    ],
)
def test_refusals(arguments: list[str], sentence: str) -> None:
    result = run(*arguments, code=2)
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ") and line.endswith(".") and sentence in line


def test_check_on_a_gpu_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "torch sees no GPU here (`replayssm info` says why)" in run("check", "--device", "cuda", code=2).stderr


def test_an_empty_folder_has_no_report(tmp_path: Path) -> None:
    assert "holds no rows" in run("report", "--results", tmp_path, "--out", tmp_path / "r.html", code=2).stderr
    assert not list(tmp_path.iterdir())
