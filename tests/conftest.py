"""Every test runs with a fixed seed and one thread; caches come poisoned (replayssm.testing.make_cache).

Without a GPU, Triton kernels run in Triton's interpreter, which must be chosen before they are imported.
"""

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter

    interpreter.hasten()
torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded source of random numbers."""
    return torch.Generator().manual_seed(20261129)


@pytest.fixture(autouse=True)
def many_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests without a GPU have few rows, and mean the kernels of many, unless they say otherwise."""
    if importlib.util.find_spec("triton") and not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr("replayssm.launch_choices.updates_at_once", lambda *case: False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
