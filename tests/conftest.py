"""Every test runs with a fixed seed and one thread; caches come poisoned (replayssm.testing.make_cache)."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded source of random numbers."""
    return torch.Generator().manual_seed(20261129)
