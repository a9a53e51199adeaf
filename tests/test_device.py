"""Steps on the device: cursor kernels against ring.py, operators under torch.compile. Interpreter or GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import SMALL

from replayssm import PAD_SLOT, convolve, decode, decode_layer, recurrences, ring
from replayssm.ring import Cursors
from replayssm.testing import cast, checksum, make_cache, make_inputs, make_weights, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.lists(st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 5), st.integers(-2, 5)), max_size=5), max_size=8),
)
def test_cursor_kernels_equal_the_rules(window: int, tokens: int, steps: list[list[tuple[int, int, int]]]) -> None:
    """Random slots, padding among them, lengths and accepted counts, out of range as well."""
    cache = make_cache("mamba2", SMALL, window=window, max_tokens=tokens, implementation="triton", device=DEVICE)
    slots = torch.arange(3)
    cache.reset(cache.allocate(3))  # slot 3 is not live
    c = Cursors(*torch.zeros(len(Cursors._fields), 4, dtype=torch.int64))
    c.put(slots, ring.reset(slots, cache.sizes, True))
    for rows in steps:
        rows = list({slot: (slot, length, n) for slot, length, n in rows if slot != PAD_SLOT}.values()) + [
            (PAD_SLOT, 1, 1)
        ]
        given_slots, lengths, counts = (torch.tensor(x) for x in zip(*rows, strict=True))
        step = cache.begin(given_slots.to(DEVICE), lengths.to(DEVICE), tokens=tokens)
        folds = []
        for slot, length, n in rows:
            if slot == PAD_SLOT:
                continue
            at = torch.tensor([slot])
            mine = c.at(at)
            right = min(max(length, 0), tokens) if int(mine.live) else 0
            mine = mine._replace(clamped=mine.clamped + int(right != length), num_pending=torch.tensor([right]))
            if right:
                due = bool(ring.due(mine, right))
                folds.append(int(mine.num_committed) if due else 0)
                mine = ring.begin(ring.flush(mine, cache.sizes) if due else mine, torch.tensor([right]), cache.sizes)
                accepted = min(max(n, 0), right)
                mine = ring.commit(mine, torch.tensor([accepted]), cache.sizes)
                mine = mine._replace(clamped=mine.clamped + int(accepted != n))
            c.put(at, mine)
        slot_of, folded, row, num_due = (step.table[i].tolist() for i in (0, 4, 6, 9))
        by_row = {r: n for r, slot, n in zip(row, slot_of, folded, strict=True) if slot >= 0}
        assert sorted(row) == list(range(len(rows))) and [by_row[r] for r in sorted(by_row)] == folds
        assert [n > 0 for n in folded] == sorted(n > 0 for n in folded)  # those that are due come last
        assert num_due == [sum(n > 0 for n in folded)] * len(rows)
        cache.commit(step, counts.to(DEVICE))
        for name, ours, rule in zip(Cursors._fields, cache.cursors, c, strict=True):
            assert ours[:3].tolist() == rule[:3].tolist(), name
        assert cache.cursors.num_pending[3] == 0 and cache.cursors.num_committed[3] == 0


@pytest.mark.parametrize("name", recurrences.names())
def test_compiled_whole_and_without_breaks(name: str, generator: torch.Generator) -> None:
    """Two layers under torch.compile(fullgraph=True) equal eager, states as well."""
    caches = [
        make_cache(name, SMALL, layers=2, slots=2, window=2, implementation="triton", device=DEVICE) for _ in range(2)
    ]
    weights = make_weights(caches[0], generator)
    weights = cast(weights, DEVICE)
    for cache in caches:
        cache.reset(cache.allocate(2))

    def model(cache, step, x, raw_g, raw_w):
        y = decode_layer(cache, 0, step, x, raw_g, raw_w, weights)
        return y + decode_layer(cache, 1, step, x + 1, raw_g, raw_w, weights)

    compiled = torch.compile(model, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    for _ in range(5):
        inputs = [None if x is None else x.to(DEVICE) for x in make_inputs(caches[0], 2, 1, generator)]
        outputs = []
        for cache, run in zip(caches, (model, compiled), strict=True):
            step = cache.begin(torch.tensor([1, 0], device=DEVICE))
            outputs.append(run(cache, step, *inputs))
            cache.commit(step)
        assert torch.equal(*outputs)
    assert same_bits(*map(checksum, caches))


def test_operators_are_what_they_say(generator: torch.Generator) -> None:
    """Schemas (what is changed) and fakes, by torch.library.opcheck."""
    cache = make_cache("gdn", SMALL, slots=2, window=2, poison=False, implementation="triton", device=DEVICE)
    cache.reset(cache.allocate(2))
    slots = torch.tensor([1, 0], device=DEVICE)
    ops, sizes = torch.ops.replayssm, tuple(cache.sizes)
    tests = ("test_schema", "test_faketensor")
    for accepted in (None, torch.ones(2, dtype=torch.int64, device=DEVICE)):
        arguments = (cache.cursor_tensor, cache.clock, slots, None, accepted, 1, *sizes, False)
        torch.library.opcheck(ops.begin.default, arguments, test_utils=tests)
    step = cache.begin(slots)
    torch.library.opcheck(ops.commit.default, (cache.cursor_tensor, step.table, None, *sizes), test_utils=tests)
    layer = cache.layers[0]
    q, k = (torch.randn(2, 1, 2, 8, generator=generator).to(DEVICE) for _ in range(2))
    v = torch.randn(2, 1, 4, 6, generator=generator).to(DEVICE)
    g, w = -torch.rand(2, 1, 4, generator=generator).to(DEVICE), torch.rand(2, 1, 4, generator=generator).to(DEVICE)
    pools = (list(layer.checkpoint), list(layer.ring), layer.conv, layer.ready, layer.key)
    state = (*pools, step.table, step.parent, step.kin, step.at_once)
    arguments = ("gdn", "fp32", list(cache.geometry), 2, *state, q, k, v, g, w)
    torch.library.opcheck(ops.decode.default, arguments, test_utils=tests)
    weights = make_weights(cache, generator)
    x, raw_g, raw_w = (x.to(DEVICE) for x in make_inputs(cache, 2, 1, generator))
    parameters = (*(y.to(DEVICE) for y in (weights.conv_weight, weights.conv_bias, weights.A_log, weights.dt_bias)),)
    arguments = (
        "gdn",
        "fp32",
        list(cache.geometry),
        2,
        *state,
        x,
        raw_g,
        raw_w,
        *parameters,
        None,
        None,
        1.0,
        None,
        None,
    )
    torch.library.opcheck(ops.decode_layer.default, arguments, test_utils=tests)
    convolution = (layer.conv, step.table, None, x, weights.conv_weight.to(DEVICE), None)
    torch.library.opcheck(ops.convolve.default, convolution, test_utils=tests)


def test_ready_inputs_equal_raw_ones(generator: torch.Generator) -> None:
    """convolve, gates and decode one after the other are decode_layer."""
    for name in recurrences.names():
        caches = [make_cache(name, SMALL, slots=2, implementation="triton", device=DEVICE) for _ in range(2)]
        weights = make_weights(caches[0], generator, **({"D": None} if name == "mamba2" else {}))
        weights = cast(weights, DEVICE)
        x, raw_g, raw_w = (None if x is None else x.to(DEVICE) for x in make_inputs(caches[0], 2, 1, generator))
        for cache in caches:
            cache.reset(cache.allocate(2))
        first, second = (cache.begin(torch.tensor([0, 1], device=DEVICE)) for cache in caches)
        whole = decode_layer(caches[0], 0, first, x, raw_g, raw_w, weights)
        mixed = convolve(caches[1], 0, second, x, weights.conv_weight, weights.conv_bias)
        q, k, v = caches[1].recurrence.split(mixed, SMALL)
        g, w = caches[1].recurrence.gates(raw_g, raw_w, weights)
        parts = decode(caches[1], 0, second, q, k, v, g, w)
        torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-6)
