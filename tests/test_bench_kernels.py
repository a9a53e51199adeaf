"""What the GPU benchmark needs no GPU for: accepted counts, and which kernels it compares with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from replayssm import Geometry
from replayssm.bench import baselines, kernels
from replayssm.bench.__main__ import app


@pytest.mark.parametrize(
    ("tokens", "accepted", "tree", "most"), [(5, 3.5, False, 5), (8, 3.5, True, 5), (3, 2.0, True, 2)]
)
def test_accepted_counts_have_the_mean_that_was_asked_for(tokens: int, accepted: float, tree: bool, most: int) -> None:
    steps = kernels.Steps(16, tokens, accepted, tree)
    counts = steps.counts(64)
    assert counts.shape == (kernels.DRAWS, 64)
    assert (int(counts.min()), int(counts.max())) == (1 if accepted < most else most, most)
    assert float(counts.double().mean()) == pytest.approx(accepted, abs=0.03)
    assert torch.equal(counts, steps.counts(64))


def test_plain_steps_count_their_token() -> None:
    assert kernels.Steps().counts(3).eq(1).all()


def test_trees_are_trees_and_their_path_goes_down() -> None:
    assert all(above < node for node, above in enumerate(kernels.TREE))
    assert [kernels.TREE[node] for node in kernels.DEEPEST] == [-1, *kernels.DEEPEST[:-1]]


def test_drafts_have_kernels_of_their_own() -> None:
    plain, drafted = (set(baselines.kinds("gdn", drafts)) for drafts in (False, True))
    assert drafted == {"vllm_gdn_drafts", "vllm_gdn_drafts_cuda"} and not plain & drafted
    assert baselines.kinds("mamba2", drafts=True) == ["vllm_mamba2_drafts"] and not baselines.kinds("kda", drafts=True)


def test_kernels_are_compiled_for_a_gpu_without_one(tmp_path):
    """The four launches of a decode step, as machine code in Triton's cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).parents[1] / "benchmarks" / "precompile.py", "kernels"]
    command += ["--case", "mamba2-h64", "--batch", "16", "--format", "bf16", "--only-compile", "0/1"]
    done = subprocess.run(
        command, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = {path.stem for path in tmp_path.glob("*/*.cubin")}
    assert compiled == {"begin_kernel", "prepare_kernel", "read_kernel", "commit_kernel"}


@pytest.mark.parametrize("part", ["read", "carry", "prepare", "none"])
def test_a_part_is_all_that_is_launched(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read changes no ring and writes outputs, a carry changes no checkpoint, a prepare does where rows are due."""
    pytest.importorskip("triton")
    from replayssm import kernels as launched
    from replayssm import launch_choices
    from replayssm.bench import parts

    monkeypatch.setitem(kernels.CASES, "small", ("gdn", Geometry(4, 2, 16, 16)))
    monkeypatch.setattr(launch_choices, "in_one_launch", lambda rows, heads: False)
    ours = kernels._Ours("small", 2, "fp32", 1, False, kernels.Steps(window=2), device="cpu")
    layer = ours.cache.layers[0]
    for tensor in (*layer.checkpoint, layer.ring.k):
        tensor.normal_()
    for _ in range(2):
        ours.step()
    checkpoint, keys = layer.checkpoint[0].clone(), layer.ring.k.clone()
    with parts.only(part):
        y = ours.step()  # every row is due
    assert torch.equal(layer.ring.k, keys) == (part in ("read", "none"))
    assert torch.equal(layer.checkpoint[0], checkpoint) == (part != "prepare")
    assert y.shape == (2, 1, 4, 16)
    assert launched.prepare_kernel is not None and type(launched.read_kernel).__name__ != "_Left"


def test_parts_need_launches_of_their_own() -> None:
    """One launch has no parts: refused before anything is measured."""
    done = CliRunner().invoke(app, ["parts", "--case", "mamba2-h64", "--batch", "1"])
    assert done.exit_code == 2 and "one launch" in done.output


def test_a_check_knows_of_steps_that_read_what_they_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rows tokens read the checkpoint and no copy: outputs are as exact as with fp32."""
    pytest.importorskip("triton")
    monkeypatch.setitem(kernels.CASES, "small", ("gdn", Geometry(4, 2, 16, 16)))
    small = {"of": kernels.Steps(window=2), "device": "cpu", "dtype": torch.float32, "steps": 5}
    copied = kernels.check("small", 2, "fp32+fp8", **small)
    monkeypatch.setattr("replayssm.launch_choices.updates_at_once", lambda *case: True)
    exact = kernels.check("small", 2, "fp32+fp8", **small)
    assert 8 * exact["y"] < copied["y"] and exact["y_torch"] < 1e-5
