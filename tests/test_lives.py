"""Random lives of slots, drawn by hypothesis, against the fp64 recurrence: any verb in any order."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_contract import CASES, SMALL, Case, Life

from replayssm import PAD_SLOT
from replayssm.testing import make_cache

VERBS = ["step", "step", "step", "draft", "tree", "copy", "flush", "trim", "load", "preempt", "restore", "materialize"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.label)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 2**16)), min_size=5, max_size=25),
)
def test_random_lives(
    case: Case, monkeypatch: pytest.MonkeyPatch, window: int, tokens: int, staggered: bool, verbs: list[tuple[str, int]]
) -> None:
    case.choose_launches(monkeypatch)
    generator = torch.Generator().manual_seed(len(verbs))
    life = Life(case.cache(window=window, max_tokens=tokens, slots=3, staggered=staggered), generator)
    cache, twin = life.cache, life.twin
    kept = None
    for verb, seed in verbs:
        generator.manual_seed(seed)
        order = torch.randperm(3, generator=generator).tolist()
        a, b = order[:2]
        if verb == "step":
            rows = [slot if seed % 5 else PAD_SLOT for slot in order[: 1 + seed % 3]]
            life.run(rows, [1] * len(rows))
        elif verb == "draft":
            lengths = [int(torch.randint(0, tokens + 1, (), generator=generator)) for _ in order]
            life.run(order, lengths, [seed % (n + 1) for n in lengths], tokens=tokens)
        elif verb == "tree":
            parent = torch.tensor(
                [[int(torch.randint(-1, i, (), generator=generator)) if i else -1 for i in range(tokens)]]
            )
            path, node = [], seed % (tokens + 1) - 1
            while node >= 0:
                path.insert(0, node)
                node = int(parent[0, node])
            life.run([a], [tokens], tokens=tokens, parent=parent, path=[path + [-1] * (tokens - len(path))])
        elif verb == "copy":
            cache.copy(torch.tensor([a, a]), torch.tensor([b, order[2]]))
            twin.copy([a, a], [b, order[2]])
        elif verb == "flush":
            cache.flush(torch.tensor([a]) if seed % 2 else None, keep=seed % 3)
        elif verb == "trim":
            n = seed % (int(cache.cursors.reach[a]) + 1)
            cache.trim(torch.tensor([a]), n)
            twin.trim(a, n)
        elif verb in ("load", "preempt"):
            if verb == "preempt":
                cache.free(torch.tensor([a]))
                assert cache.allocate(1).tolist() == [a]
            state = torch.randn(1, *cache.layers[0].checkpoint[0].shape[1:], generator=generator)
            window_inputs = torch.randn(1, cache.conv.channels, cache.conv.width - 1, generator=generator).to(
                cache.dtype
            )
            cache.load(0, torch.tensor([a]), state, window_inputs)
            twin.load([a], state, window_inputs)
        elif verb == "restore":
            if kept is not None:
                cache.restore(torch.tensor([b]), kept[0])
                twin.history[b] = list(kept[1])
            kept = cache.export(torch.tensor([a])), list(twin.history[a])
        elif verb == "materialize":
            back = seed % (int(cache.num_committed[a]) + 1)
            twin.check_states([a], back=back)
    twin.check_states()


def test_free_count_returns_to_capacity() -> None:
    """1e5 random allocations, frees and aborts."""
    cache = make_cache("mamba2", SMALL, slots=64)
    generator = torch.Generator().manual_seed(0)
    held: list[int] = []
    draws = torch.rand(100_000, generator=generator).tolist()
    for draw in draws:
        if draw < 0.5 and cache.free_slots:
            held += cache.allocate(1 + int(draw * 1000) % min(3, cache.free_slots)).tolist()
        elif held:
            cache.free(torch.tensor([held.pop(int(draw * 1e6) % len(held))]))
        assert cache.free_slots + len(held) == 64
    cache.free(torch.tensor(held))
    assert cache.free_slots == 64 and sorted(cache.allocate(64).tolist()) == list(range(64))
