"""The cursor rules, against a ring that is a plain list."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from replayssm import ring

SIZES = ring.Sizes(ring=9, conv=6, window=6, most_reach=3)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.none() | st.integers(0, 3), st.integers(0, 3)), max_size=40
    )
)
def test_cursors_follow_a_list(moves: list[tuple[int, int, int | None, int]]) -> None:
    """The records between ring_start and num_committed are the list's, and reach never passes what is still there."""
    c = ring.reset(torch.tensor([0]), SIZES, staggered=False)
    places: list[int] = []  # where each committed record lies
    inputs, newest = list(range(-3, 0)), 0  # convolution inputs that are still in their ring, by token number
    for length, accepted, keep, back in moves:
        if keep is not None:
            c, places = (
                ring.flush(c, SIZES, (c.num_committed - keep).clamp(min=0)),
                places[max(0, len(places) - keep) :],
            )
        if bool(ring.due(c, length)):
            c, places = ring.flush(c, SIZES), []
        c = ring.begin(c, torch.tensor([length]), SIZES)
        at = ring.places(c.ring_start, c.num_committed, 3, SIZES.ring)[0].tolist()
        assert not set(at) & set(places), "a step's records must not lie on committed ones"
        accepted = min(accepted, length)
        inputs = (inputs + list(range(newest, newest + length)))[-SIZES.conv :]
        c = ring.commit(c, torch.tensor([accepted]), SIZES)
        places += at[:accepted]
        newest += accepted
        inputs = [i for i in inputs if i < newest]
        assert int(c.num_committed) == len(places) <= SIZES.ring
        order = ring.places(c.ring_start, torch.tensor([0]), len(places), SIZES.ring)[0].tolist()
        assert order == places
        assert int(c.conv_end) == newest % SIZES.conv
        reach = int(c.reach)
        assert reach <= len(places)
        if reach:
            assert newest - reach - 3 in inputs, "trim would need inputs that are gone"
        n = min(back, reach)
        c = ring.trim(c, torch.tensor([n]), SIZES)
        newest, places = newest - n, places[: len(places) - n]
        inputs = [i for i in inputs if i < newest]
        assert int(c.num_committed) == len(places)


@given(st.integers(0, 8), st.integers(0, 8))
def test_ages_invert_places(start: int, first: int) -> None:
    age = ring.ages(torch.tensor([start]), 9)[0]
    place = ring.places(torch.tensor([start]), torch.tensor([first]), 9, 9)[0]
    assert age[place].tolist() == [(first + i) % 9 for i in range(9)]


@given(st.lists(st.integers(-1, 6), min_size=7, max_size=7))
def test_ancestors_by_following_parents(parents: list[int]) -> None:
    parents = [min(p, i - 1) for i, p in enumerate(parents)]
    kin = ring.ancestors(torch.tensor([parents]))[0]
    for i in range(7):
        mine, node = set(), i
        while node >= 0:
            mine.add(node)
            node = parents[node]
        assert {j for j in range(7) if kin[i, j]} == mine


def test_staggered_slots_spread_over_the_window() -> None:
    first = ring.first_flush(torch.arange(64), 16, staggered=True)
    assert sorted(first.tolist()) == sorted(list(range(1, 17)) * 4)
    assert ring.first_flush(torch.arange(64), 16, staggered=False).unique().tolist() == [16]
