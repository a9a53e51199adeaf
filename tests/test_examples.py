"""examples/ run, and do what they say."""

import importlib.util
import sys
from copy import deepcopy
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested() -> None:
    text = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'load("{path.stem}")' in text, path


def test_cache_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("cache_by_hand").main(steps=10) < 1e-5
    assert "bytes" in capsys.readouterr().out


def test_continuous_batching_gives_what_every_request_gives_alone() -> None:
    """More requests than slots, prompts longer than a piece, preemption in the middle of a window."""
    example = load("continuous_batching")
    assert len((EXAMPLES / "continuous_batching.py").read_text().splitlines()) <= 60
    requests = [example.Request([(7 * i + j) % 64 for j in range(3 + 5 * i)], 3 + 5 * i + 25) for i in range(9)]
    together = example.serve(deepcopy(requests))
    assert any(request.snapshot is not None for request in together), "nobody was preempted"
    for request, mine in zip(requests, together, strict=True):
        (alone,) = example.serve([deepcopy(request)])
        assert mine.tokens == alone.tokens and len(mine.tokens) == request.wanted


def test_with_transformers() -> None:
    pytest.importorskip("transformers")
    host, replayed = load("with_transformers").main(new_tokens=24)
    assert host == replayed


def test_vllm_offline_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit, match=r"needs vllm, on a machine with a GPU: pip install 'replayssm\[vllm\]'"):
        load("vllm_offline").main()


def test_speculative_gives_the_plain_tokens_in_fewer_forwards() -> None:
    pytest.importorskip("transformers")
    plain, drafted, forwards = load("speculative").main(new_tokens=40)
    assert drafted == plain and forwards < 40
