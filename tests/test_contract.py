"""One contract: every claim on every recurrence, format and implementation, against the plain recurrence in fp64."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch

import replayssm
from replayssm import PAD_SLOT, Geometry, ReplayCache, decode_layer, page_bytes, recurrences
from replayssm.testing import LayerInputs, Twin, cast, checksum, make_cache, make_inputs, make_weights, same_bits

SMALL = Geometry(H=4, G=2, V=6, K=8)


class Case(NamedTuple):
    recurrence: str
    format: str
    implementation: str
    at_once: bool = False  # checkpoints are updated at every token, as a GPU does with the fewest rows

    def cache(self, geometry: Geometry = SMALL, **options: Any) -> ReplayCache:
        dtype = torch.float64 if self.format == "fp64" else torch.float32
        options = {"format": self.format, "implementation": self.implementation, "dtype": dtype} | options
        return make_cache(self.recurrence, geometry, **options)

    def choose_launches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if self.at_once:
            monkeypatch.setattr("replayssm.launch_choices.updates_at_once", lambda *case: True)

    @property
    def label(self) -> str:
        return "-".join(self[:3]) + ("-at once" if self.at_once else "")


UNSCALED = ("fp64", "fp32", "split16", "bf16", "fp16")
CASES = [Case(*c) for c in itertools.product(recurrences.names(), UNSCALED, ("reference", "torch"))]
# The others differ in formats.py alone: each part of a name once (test_formats.py has every pair with a recurrence)
CASES += [
    Case("mamba2", "fp8", "torch"),
    Case("gdn", "fp16+int8/residual", "torch"),
    Case("kda", "fp32+fp8", "reference"),
]
# Triton's interpreter is slow: every kernel with one format each (test_kernels.py has the other pairs)
CASES += [Case("mamba2", "split16", "triton"), Case("gdn", "fp32", "triton"), Case("kda", "fp16", "triton")]
CASES += [Case("gdn", "split16", "triton", at_once=True), Case("kda", "fp32", "triton", at_once=True)]


@pytest.fixture(params=CASES, ids=lambda c: c.label)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    request.param.choose_launches(monkeypatch)
    return request.param


class Life:
    """A cache and its twin, moved together; every output and state is compared."""

    def __init__(
        self, cache: ReplayCache, generator: torch.Generator, slots: int | None = None, **changes: Any
    ) -> None:
        self.cache, self.generator = cache, generator
        self.weights = make_weights(cache, generator, **changes)
        self.layer_weights = cast(self.weights, cache.format.compute)
        self.twin = Twin(cache, self.weights)
        self.slots = cache.allocate(slots or cache.num_slots)
        cache.reset(self.slots)
        self.twin.reset(self.slots.tolist())

    def run(self, slots, lengths, counted=None, tokens=None, parent=None, path=None, inputs=None) -> torch.Tensor:
        """One step: rows of `slots` bring `lengths` tokens, of which `counted` (or those on `path`) count."""
        tokens = tokens or max(1, *lengths)
        counted = lengths if counted is None else counted
        inputs = inputs or make_inputs(self.cache, len(slots), tokens, self.generator)
        step = self.cache.begin(torch.tensor(slots), torch.tensor(lengths), tokens=tokens, parent=parent)
        y = decode_layer(self.cache, 0, step, *inputs, self.layer_weights)
        if parent is None:
            self.cache.commit(step, torch.tensor(counted))
        else:
            self.cache.commit(step, path=torch.tensor(path))
        for b, slot in enumerate(slots):
            if slot == PAD_SLOT:
                assert not y[b].any()
                continue
            tree = None if parent is None else parent[b].tolist()
            answers = self.twin.step(slot, inputs.row(b), lengths[b], tree)
            self.twin.check_outputs(y[b, : lengths[b]], *answers)
            assert not y[b, lengths[b] :].any(), "tokens beyond a row's length must answer zero"
            self.twin.commit(slot, range(counted[b]) if parent is None else [i for i in path[b] if i >= 0])
        return y

    def plain(self, steps: int, slots=None) -> None:
        """Plain decoding: one token a row and step."""
        slots = self.slots.tolist() if slots is None else slots
        for _ in range(steps):
            self.run(slots, [1] * len(slots))

    def random(self, *size: int, high: int) -> list:
        return torch.randint(0, high, size, generator=self.generator).tolist()


# ---- plain decoding ----


def test_replay_equals_recurrence(case: Case, generator: torch.Generator) -> None:
    life = Life(case.cache(window=5, slots=3), generator)
    life.plain(31)  # six flushes
    life.twin.check_states()


def test_poisoned_slot_equals_fresh_pool_after_reset(case: Case, generator: torch.Generator) -> None:
    life = Life(case.cache(), generator)
    fresh = case.cache(poison=False)
    for layer in fresh.layers:
        for pool in (*layer.checkpoint, *layer.ring, layer.conv):
            pool.zero_()
    fresh.reset(fresh.allocate(4))
    for _ in range(2 * life.cache.sizes.ring):
        inputs = make_inputs(fresh, 4, 1, generator)
        y = life.run([0, 1, 2, 3], [1] * 4, inputs=inputs)
        step = fresh.begin(torch.arange(4))
        assert torch.equal(y, decode_layer(fresh, 0, step, *inputs, life.layer_weights))
        fresh.commit(step)


def test_load_starts_from_a_state_on_poisoned_memory(case: Case, generator: torch.Generator) -> None:
    cache = case.cache(window=3)
    life = Life(cache, generator)
    life.plain(7)
    H, _, V, K = cache.geometry
    state = torch.randn(2, H, V, K, generator=generator)
    window = torch.randn(2, cache.conv.channels, cache.conv.width - 1, generator=generator).to(cache.dtype)
    cache.free(torch.tensor([1, 3]))  # preempted
    for layer in cache.layers:
        for pool in (*layer.checkpoint, *layer.ring, layer.conv):
            pool[[1, 3]] = torch.nan if pool.is_floating_point() else torch.iinfo(pool.dtype).max
    again = cache.allocate(2)
    assert again.tolist() == [1, 3]
    cache.load(0, again, state, window)
    life.twin.load([1, 3], state, window)
    life.plain(9)
    life.twin.check_states()


def test_rows_of_any_length_in_one_step(case: Case, generator: torch.Generator) -> None:
    life = Life(case.cache(max_tokens=3, slots=4), generator)
    for lengths in ([0, 2, 3, 1], [1, 0, 0, 3], [3, 1, 2, 0], [0, 0, 0, 0], [3, 3, 3, 3], [0, 0, 0, 1]) * 2:
        life.run([2, 0, 3, 1], lengths, tokens=3)
        life.twin.check_states()


def test_padding_rows_touch_nothing(case: Case, generator: torch.Generator) -> None:
    life = Life(case.cache(max_tokens=2, slots=4), generator)
    life.run([0, 1, 2, 3], [2, 1, 2, 1])
    before = checksum(life.cache)
    life.run([PAD_SLOT] * 3, [2, 2, 2])
    assert same_bits(before, checksum(life.cache))
    life.run([PAD_SLOT, 0, PAD_SLOT, 2], [2, 2, 1, 1])
    others = [pool[[1, 3]] for pool in checksum(life.cache)]
    assert same_bits([pool[[1, 3]] for pool in before], others)
    life.plain(6)
    life.twin.check_states()


def test_a_row_depends_on_nothing_but_itself(case: Case, generator: torch.Generator) -> None:
    """Bitwise: alone or among others, in whatever slot, at whatever place in the batch.

    Stochastic rounding draws by the slot, so there the slot is the same.
    """
    alone, among = case.cache(slots=7, staggered=False), case.cache(slots=7, staggered=False)
    slot = torch.tensor([5 if alone.format.stochastic else 0])
    weights = cast(make_weights(alone, generator), alone.format.compute)
    alone.reset(alone.allocate(7))
    among.reset(among.allocate(7))
    order = torch.tensor([6, 3, 0, 5, 2])  # the row of interest is slot 5, at place 3
    for _ in range(11):
        inputs = make_inputs(among, 5, 1, generator)
        mine = LayerInputs(*(None if x is None else x[3:4] for x in inputs))
        step = alone.begin(slot)
        y = decode_layer(alone, 0, step, *mine, weights)
        alone.commit(step)
        step = among.begin(order)
        assert torch.equal(y[0], decode_layer(among, 0, step, *inputs, weights)[3])
        among.commit(step)
    assert torch.equal(alone.materialize(0, slot)[0], among.materialize(0, torch.tensor([5]))[0])


# ---- drafts ----


def test_rejected_drafts_leave_no_trace(case: Case, generator: torch.Generator) -> None:
    """300 steps of random draft lengths and acceptance, steps without drafts and rows without tokens among them."""
    life = Life(case.cache(window=6, max_tokens=4, slots=2), generator)
    for i in range(300 if case.implementation != "triton" else 40):
        lengths = [1, 1] if i % 7 == 0 else life.random(2, high=5)
        counted = [int(torch.randint(0, n + 1, (), generator=generator)) for n in lengths]
        life.run([1, 0], lengths, counted)
        if i % 10 == 0:
            life.twin.check_states()
    life.twin.check_states()


@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 5, 6])
def test_state_and_convolution_roll_back_together(case: Case, drafts: int, generator: torch.Generator) -> None:
    """Draft lengths from 1 to convolution width + 2, every number of accepted tokens."""
    life = Life(case.cache(max_tokens=drafts, slots=1, window=4), generator)
    for accepted in range(drafts + 1):
        life.run([0], [drafts], [accepted])
        life.twin.check_states()
    life.plain(3)
    life.twin.check_states()


@pytest.mark.parametrize("drafts", [16, 32, 64])
def test_long_drafts_with_one_checkpoint(case: Case, drafts: int, generator: torch.Generator) -> None:
    if case.implementation == "triton" and drafts > 16:
        pytest.skip("the GPU kernels are made for up to 16 nodes")
    life = Life(case.cache(max_tokens=drafts, slots=1), generator)
    for accepted in (drafts, 5, drafts // 2):
        life.run([0], [drafts], [accepted])
        life.twin.check_states()


@pytest.mark.parametrize("forget", ["reject", "trim"])
def test_drafts_that_are_not_finite_leave_no_trace(case: Case, forget: str, generator: torch.Generator) -> None:
    life = Life(case.cache(max_tokens=4, slots=2, window=5), generator)
    for i in range(8):
        inputs = make_inputs(life.cache, 2, 4, generator)
        for x in inputs:
            if x is not None:
                x[:, 2:] = torch.nan
        step = life.cache.begin(torch.tensor([0, 1]), tokens=4)
        decode_layer(life.cache, 0, step, *inputs, life.layer_weights)  # this step's own outputs may not be finite
        life.cache.commit(step, 2 if forget == "reject" else 4)
        if forget == "trim":
            life.cache.trim(torch.tensor([0, 1]), 2)
        for slot in (0, 1):
            life.twin.step(slot, inputs.row(slot), 2)
            life.twin.commit(slot, range(2))
        life.twin.check_states()
        life.run([0, 1], [1, i % 3])  # fewer tokens than were forgotten
        life.twin.check_states()


TREE = torch.tensor([-1, 0, 0, 1, 2, 2, 4, -1])  # two roots, a node with two children
PATHS = [[0, 2, 4, 6, -1], [0, 1, 3, -1, -1], [7, -1, -1, -1, -1], [-1, -1, -1, -1, -1], [0, 2, 5, -1, -1]]


@pytest.mark.parametrize("window", [6, 24])
def test_tree_nodes_see_their_ancestors_only(case: Case, window: int, generator: torch.Generator) -> None:
    """In a long window a path's records are used after they were moved, in a short one they are folded at once."""
    life = Life(case.cache(max_tokens=8, slots=2, window=window), generator)
    for path in itertools.islice(itertools.cycle(PATHS), 12 if case.implementation != "triton" else 5):
        parent = torch.stack([TREE, torch.arange(-1, 7)])
        chain = [0, 1, 2, -1, -1]
        life.run([1, 0], [8, 8], parent=parent, path=[path, chain])
        life.twin.check_states()


def random_tree(life: Life, tokens: int, length: int) -> tuple[list[int], list[int]]:
    """Parents of `tokens` nodes, and a path of any length among the first `length`, padded to `tokens`."""
    parent = [-1] + [life.random(1, high=i + 1)[0] - 1 for i in range(1, tokens)]
    path: list[int] = []
    while True:
        below = [i for i in range(length) if parent[i] == (path[-1] if path else -1)]
        choice = life.random(1, high=len(below) + 1)[0]
        if choice == len(below):
            return parent, path + [-1] * (tokens - len(path))
        path.append(below[choice])


def test_random_trees_equal_plain_decoding(case: Case, generator: torch.Generator) -> None:
    """Trees of their own shape and size in every row, chains and plain steps between them."""
    life = Life(case.cache(window=6, max_tokens=6, slots=2), generator)
    for i in range(24 if case.implementation != "triton" else 6):
        if i % 4 == 3:
            life.run([0, 1], [1, 3], [1, life.random(1, high=4)[0]])
            continue
        lengths = life.random(2, high=7)
        trees = [random_tree(life, 6, n) for n in lengths]
        parent = torch.tensor([parent for parent, _ in trees])
        life.run([1, 0], lengths, tokens=6, parent=parent, path=[path for _, path in trees])
        life.twin.check_states()


@pytest.mark.parametrize("drafts", [16, 32, 64])
def test_large_trees_with_one_checkpoint(case: Case, drafts: int, generator: torch.Generator) -> None:
    if case.implementation == "triton" and drafts > 16:
        pytest.skip("the GPU kernels are made for up to 16 nodes")
    life = Life(case.cache(max_tokens=drafts, slots=1), generator)
    for _ in range(2):
        parent, path = random_tree(life, drafts, drafts)
        life.run([0], [drafts], parent=torch.tensor([parent]), path=[path])
        life.twin.check_states()


# ---- between steps ----


def test_copy_with_every_number_of_records(case: Case, generator: torch.Generator) -> None:
    life = Life(case.cache(window=4, max_tokens=2, slots=3, staggered=False), generator)
    for _ in range(life.cache.sizes.ring):
        before = [pool[:1].clone() for pool in checksum(life.cache)]
        life.cache.copy(torch.tensor([0]), torch.tensor([2]))
        life.twin.copy([0], [2])
        assert same_bits(before, [pool[:1] for pool in checksum(life.cache)])
        life.run([2, 1, 0], [2, 1, 1], [1, 1, 1])
        life.twin.check_states()


def test_beam_reorder_with_duplicates(case: Case, generator: torch.Generator) -> None:
    life = Life(case.cache(slots=4), generator)
    for source in ([1, 1, 0, 3], [3, 2, 1, 0], [2, 2, 2, 2], [0, 3, 3, 1]) * 2:
        life.plain(2)
        life.cache.copy(torch.tensor(source), torch.arange(4))
        life.twin.copy(source, range(4))
        life.twin.check_states()


def test_materialize_at_every_record_leaves_the_source(case: Case, generator: torch.Generator) -> None:
    """A prefix boundary may lie inside the ring."""
    life = Life(case.cache(window=8, slots=2, staggered=False), generator)
    life.plain(15)
    waiting = 1 if case.at_once else 7
    assert life.cache.num_committed.tolist() == [waiting, waiting]
    before = checksum(life.cache)
    for back in range(1 + waiting):
        life.twin.check_states(back=back)
    assert same_bits(before, checksum(life.cache))


def test_export_and_restore_into_another_slot(case: Case, generator: torch.Generator) -> None:
    life = Life(case.cache(window=4, slots=3), generator, slots=2)
    life.plain(6)
    kept = life.cache.export(torch.tensor([1]))
    life.cache.free(torch.tensor([1]))
    assert life.cache.allocate(1).tolist() == [2]
    life.cache.reset(torch.tensor([2]))
    life.twin.reset([2])
    history = life.twin.history.pop(1)
    life.plain(5, slots=[2, 0])  # another request lives on
    assert life.cache.allocate(1).tolist() == [1]
    life.cache.restore(torch.tensor([2]), kept)
    life.twin.history[2] = history
    life.plain(6, slots=[2, 0])
    life.twin.check_states()


def test_trim_forgets_tokens_and_their_convolution_inputs(case: Case, generator: torch.Generator) -> None:
    life = Life(case.cache(window=9, max_tokens=3, slots=2, staggered=False), generator)
    for i in range(12):
        life.run([0, 1], [3, 1 + i % 3])
        n = min(i % 4, int(life.cache.cursors.reach.min()))
        life.cache.trim(torch.tensor([0, 1]), n)
        for slot in (0, 1):
            life.twin.trim(slot, n)
        life.twin.check_states()


def test_flush_when_asked(case: Case, generator: torch.Generator) -> None:
    life = Life(case.cache(window=8, slots=2), generator)
    life.plain(3)
    life.cache.flush(torch.tensor([1]))
    assert life.cache.num_committed.tolist() == [1 if case.at_once else 3, 0]
    life.cache.flush(torch.tensor([1]))
    life.twin.check_states()
    life.plain(3)
    life.twin.check_states()


def test_flush_keeps_the_newest_records(case: Case, generator: torch.Generator) -> None:
    """They can still be taken back, and what follows does not see the others twice."""
    life = Life(case.cache(window=8, max_tokens=3, slots=2, staggered=False), generator)
    for i in range(8 if case.implementation != "triton" else 2):
        life.plain(2)
        life.cache.flush(torch.tensor([0, 1]), keep=2)
        assert life.cache.num_committed.tolist() == [2, 2]
        life.twin.check_states()
        life.cache.trim(torch.tensor([0, 1]), [i % 3, 1])
        life.twin.trim(0, i % 3)
        life.twin.trim(1, 1)
        life.run([0, 1], [3, 2], [1, 2])
        life.twin.check_states()


def test_staggered_slots_flush_in_different_steps(case: Case, generator: torch.Generator) -> None:
    cache = case.cache(window=4, slots=4)
    life = Life(cache, generator)
    flushed = []
    for _ in range(12):
        life.plain(1)
        flushed.append((cache.num_committed >= cache.cursors.flush_at).tolist())
    assert all(sum(slots) == 1 for slots in flushed[3:]), flushed
    life.twin.check_states()


# ---- shapes ----


@pytest.mark.parametrize("window, max_tokens", [(4, 1), (5, 2), (7, 5), (15, 1), (16, 4), (31, 1)])
def test_ring_lengths(case: Case, window: int, max_tokens: int, generator: torch.Generator) -> None:
    life = Life(case.cache(window=window, max_tokens=max_tokens, slots=2), generator)
    for _ in range(2 * window // max_tokens + 3):
        life.run([0, 1], [max_tokens, 1])
    life.twin.check_states()


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(2, 1, 32, 16),
        Geometry(15, 3, 2, 64),
        Geometry(2, 2, 80, 128),
        Geometry(3, 1, 128, 96),
        Geometry(24, 8, 4, 16),
        Geometry(30, 30, 2, 16),
        Geometry(48, 1, 2, 16),
        Geometry(2, 1, 4, 256),
        Geometry(112, 8, 2, 4),
        Geometry(1, 1, 1, 1),
    ],
    ids=str,
)
def test_geometries(case: Case, geometry: Geometry, generator: torch.Generator) -> None:
    slots = 1 if case.implementation == "triton" else 2
    life = Life(case.cache(geometry, window=2, slots=slots), generator)
    life.plain(5 if slots == 2 else 3)
    life.twin.check_states()


def test_inputs_of_any_strides(case: Case, generator: torch.Generator) -> None:
    """Slices of one fused projection, transposed batches, expanded tensors."""
    life = Life(case.cache(slots=3, max_tokens=2), generator)
    for i in range(6):
        dense = make_inputs(life.cache, 3, 2, generator)
        if i % 2:
            wide = torch.cat([x.flatten(2) for x in dense if x is not None], -1)
            sizes = [x[0, 0].numel() for x in dense if x is not None]
            parts = iter(wide.split(sizes, -1))
            odd = [None if x is None else next(parts).unflatten(-1, x.shape[2:]) for x in dense]
        else:
            odd = [None if x is None else x.transpose(0, 1).contiguous().transpose(0, 1) for x in dense]
            odd[0] = odd[0][:1].expand(3, -1, -1)
        life.run([2, 0, 1], [2, 2, 2], inputs=LayerInputs(*odd))
    life.twin.check_states()


def test_layers_share_cursors_and_nothing_else(case: Case, generator: torch.Generator) -> None:
    cache = case.cache(layers=3, slots=2)
    weights = [make_weights(cache, generator) for _ in range(3)]
    twins = [Twin(cache, w, layer) for layer, w in enumerate(weights)]
    cache.reset(cache.allocate(2))
    for twin in twins:
        twin.reset([0, 1])
    for _ in range(9):
        step = cache.begin(torch.tensor([1, 0]))
        for layer, twin in enumerate(twins):
            inputs = make_inputs(cache, 2, 1, generator)
            y = decode_layer(cache, layer, step, *inputs, cast(weights[layer], cache.format.compute))
            for b, slot in enumerate((1, 0)):
                twin.check_outputs(y[b], *twin.step(slot, inputs.row(b), 1))
                twin.commit(slot, [0])
        cache.commit(step)
        for twin in twins:
            twin.check_states()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", recurrences.names())
def test_state_precision_does_not_follow_activations(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    cache = make_cache(name, SMALL, dtype=dtype, format="split16", slots=2)
    assert cache.layers[0].ring.g.dtype == torch.float32
    life = Life(cache, generator)
    life.plain(13)
    life.twin.check_states()
    assert cache.materialize(0, torch.tensor([0])).dtype == torch.float32


# ---- parameters ----


@pytest.mark.parametrize(
    "changes",
    [
        {"D": None},
        {"D": torch.linspace(-1, 1, 24).view(4, 6)},
        {"dt_bias": None},
        {"dt_bias": torch.full((4,), -12.0)},
        {"dt_limit": (0.01, 0.5)},
        {"conv_bias": None},
        {"A_log": torch.tensor([-float("inf"), -8.0, 0.0, 3.0])},
        {"A_log": torch.tensor([0.0, 1.0, 2.0, 2.75]).bfloat16()},
    ],
    ids=lambda c: next(iter(c)),
)
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_mamba2_parameters(implementation: str, changes: dict, generator: torch.Generator) -> None:
    life = Life(make_cache("mamba2", SMALL, slots=2, implementation=implementation), generator, **changes)
    life.plain(10)
    life.twin.check_states()


@pytest.mark.parametrize("name", ["gdn", "kda"])
@pytest.mark.parametrize("changes", [{"conv_bias": None}, {"beta_scale": 1.0}, {"A_log": torch.full((4,), -9.0)}])
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_delta_rule_parameters(implementation: str, name: str, changes: dict, generator: torch.Generator) -> None:
    life = Life(make_cache(name, SMALL, slots=2, implementation=implementation), generator, **changes)
    life.plain(10)
    life.twin.check_states()


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_kda_lower_bounded_gate(implementation: str, generator: torch.Generator) -> None:
    life = Life(make_cache("kda", SMALL, slots=2, implementation=implementation), generator, lower_bound=-5.0)
    life.plain(10)
    life.twin.check_states()


@pytest.mark.parametrize("name", recurrences.names())
@pytest.mark.parametrize("raw", [-100.0, 20.0, 20.001, 88.0, 89.0, 1e4])
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_extreme_gates(implementation: str, name: str, raw: float, generator: torch.Generator) -> None:
    """A decay of exp(-1e4) next to one of nearly 1: no overflow in softplus, no small gate lost in a sum."""
    cache = make_cache(name, SMALL, slots=1, implementation=implementation)
    life = Life(cache, generator, A_log=torch.tensor([-6.0, -2.0, 0.0, 2.0]))
    for i in range(10):
        inputs = make_inputs(life.cache, 1, 1, generator)
        raw_g, raw_w = inputs.raw_g, inputs.raw_w
        if i % 3 == 1:
            raw_g, raw_w = (torch.full_like(raw_g, raw), raw_w) if raw_g is not None else (None, raw_w.fill_(raw))
        life.run([0], [1], inputs=LayerInputs(inputs.x, raw_g, raw_w))
        life.twin.check_states()


# ---- at length ----


@pytest.mark.parametrize("format", ["fp32", "split16"])
@pytest.mark.parametrize("name", recurrences.names())
def test_state_error_does_not_grow_with_length(name: str, format: str, generator: torch.Generator) -> None:
    """32k tokens, decay near 1 (0.9998): the error against fp64 after all of them is that after the first 2k, and
    split16 holds the very bits that fp32 holds."""
    tokens, geometry = 16, Geometry(2, 1, 4, 16)
    cache, twin = (
        make_cache(name, geometry, format=f, dtype=d, slots=1, window=16, max_tokens=tokens)
        for f, d in ((format, torch.float32), ("fp64", torch.float64))
    )
    weights = make_weights(cache, generator, A_log=torch.full((2,), -7.0))
    slot = torch.tensor([0])
    for c in (cache, twin):
        c.reset(c.allocate(1))
    errors = []
    for i in range(2048):
        inputs = make_inputs(cache, 1, tokens, generator)
        for c in (cache, twin):
            step = c.begin(slot, tokens=tokens)
            mine = LayerInputs(*(None if x is None else x.to(c.dtype) for x in inputs))
            decode_layer(c, 0, step, *mine, cast(weights, c.format.compute))
            c.commit(step)
        if i % 128 == 127:
            exact = twin.materialize(0, slot)
            errors.append(float((cache.materialize(0, slot).double() - exact).norm() / exact.norm()))
    early, late = max(errors[:4]), max(errors[-4:])
    assert late < 2 * early + 1e-6, errors
    assert late < 32 * torch.finfo(torch.float32).eps, errors


@pytest.mark.parametrize("name", recurrences.names())
def test_split16_holds_the_bits_of_fp32(name: str, generator: torch.Generator) -> None:
    """Reads differ, states never: what was computed from a read copy does not enter the state."""
    caches = [make_cache(name, SMALL, format=f, slots=2) for f in ("fp32", "split16")]
    weights = make_weights(caches[0], generator)
    for cache in caches:
        cache.reset(cache.allocate(2))
    for _ in range(37):
        inputs = make_inputs(caches[0], 2, 1, generator)
        for cache in caches:
            step = cache.begin(torch.tensor([0, 1]))
            decode_layer(cache, 0, step, *inputs, weights)
            cache.commit(step)
    a, b = (cache.materialize(0, torch.tensor([0, 1])) for cache in caches)
    assert torch.equal(a, b)


def test_public_names() -> None:
    assert set(replayssm.__all__) <= set(dir(replayssm))


def test_output_gate_is_silu_of_z(case: Case, generator: torch.Generator) -> None:
    """The same step with and without z, in two caches."""
    caches = case.cache(slots=2), case.cache(slots=2)
    weights = cast(make_weights(caches[0], generator), caches[0].format.compute)
    inputs = make_inputs(caches[0], 3, 1, generator)
    z = torch.randn(3, 1, SMALL.H, SMALL.V, generator=generator).to(caches[0].dtype)
    outputs = []
    for cache, gate in zip(caches, (None, z), strict=True):
        cache.reset(cache.allocate(2))
        step = cache.begin(torch.tensor([1, PAD_SLOT, 0]))
        outputs.append(decode_layer(cache, 0, step, *inputs, weights, gate))
    torch.testing.assert_close(outputs[1], outputs[0] * torch.nn.functional.silu(z), rtol=1e-5, atol=1e-6)


def test_a_layer_is_decoded_once_a_step(case: Case, generator: torch.Generator) -> None:
    cache = case.cache(slots=1)
    weights = cast(make_weights(cache, generator), cache.format.compute)
    cache.reset(cache.allocate(1))
    inputs = make_inputs(cache, 1, 1, generator)
    step = cache.begin(torch.tensor([0]))
    decode_layer(cache, 0, step, *inputs, weights)
    before = checksum(cache)
    with pytest.raises(ValueError, match="layer 0 was decoded in this step already; begin another step first"):
        decode_layer(cache, 0, step, *inputs, weights)
    assert same_bits(before, checksum(cache))


# ---- an engine's own memory, and what it knows late ----


def test_a_cache_in_an_engines_pages(case: Case, generator: torch.Generator) -> None:
    """Tensors cut from pages hold what tensors of their own hold, bit for bit; the rest of a page is not touched."""
    own = case.cache(layers=2, window=3, max_tokens=2)
    least = page_bytes(
        case.recurrence, SMALL, 3, 2, case.format, own.dtype, own.conv, implementation=case.implementation
    )
    memory = torch.full((4, 3 * (least + 128)), 0xA5, dtype=torch.uint8)
    pages = [memory[:, i * (least + 128) : i * (least + 128) + least] for i in (0, 2)]
    engine = case.cache(layers=2, window=3, max_tokens=2, pages=pages)
    weights = cast(make_weights(own, generator), own.format.compute)
    for cache in (own, engine):
        cache.reset(cache.allocate(4))
    for lengths in ([1, 2, 0, 2], [2, 2, 1, 0], [2, 0, 1, 2]):
        inputs = make_inputs(own, 4, 2, generator)
        answers = []
        for cache in (own, engine):
            step = cache.begin(torch.arange(4), lengths, tokens=2)
            answers.append([decode_layer(cache, layer, step, *inputs, weights) for layer in range(2)])
            cache.commit(step)
        assert same_bits(*answers)
    for layer in range(2):
        assert same_bits(*([cache.materialize(layer, torch.arange(4))] for cache in (own, engine)))
    gaps = torch.cat([memory[:, least : 2 * (least + 128)], memory[:, -128:]], 1)
    assert bool((gaps == 0xA5).all())
    with pytest.raises(ValueError, match="pages"):
        case.cache(layers=2, window=4, max_tokens=2, pages=pages)


def test_counts_that_come_with_the_next_step(case: Case, generator: torch.Generator) -> None:
    """begin(accepted=...) is commit of the last step: rows may have rested between, other rows beside them."""
    late, prompt = (case.cache(window=3, max_tokens=3) for _ in range(2))
    weights = cast(make_weights(late, generator), late.format.compute)
    for cache in (late, prompt):
        cache.reset(cache.allocate(4))
    waits: dict[int, int] = {}
    for rows in ([0, 1, 2, 3], [2, 0], [3, 1], [1, 2, PAD_SLOT, 0], [3], [0, 1, 2, 3]):
        lengths = torch.randint(0, 4, (len(rows),), generator=generator).tolist()
        counted = [int(torch.randint(0, n + 1, (), generator=generator)) for n in lengths]
        inputs = make_inputs(late, len(rows), 3, generator)
        step = late.begin(torch.tensor(rows), lengths, tokens=3, accepted=[waits.pop(slot, 5) for slot in rows])
        y = decode_layer(late, 0, step, *inputs, weights)
        step = prompt.begin(torch.tensor(rows), lengths, tokens=3)
        assert torch.equal(y, decode_layer(prompt, 0, step, *inputs, weights))
        prompt.commit(step, counted)
        waits |= {slot: n for slot, n in zip(rows, counted, strict=True) if slot != PAD_SLOT}
    step = late.begin(torch.arange(4), 0, accepted=[waits[slot] for slot in range(4)])
    everything = torch.arange(4)
    assert torch.equal(late.num_committed, prompt.num_committed)
    assert torch.equal(late.materialize(0, everything), prompt.materialize(0, everything))
    assert torch.equal(late.conv_window(0, everything), prompt.conv_window(0, everything))


def test_a_prefill_by_other_kernels_in_pieces(case: Case, generator: torch.Generator) -> None:
    """Records that wait, some of them not committed, are part of the state that the next piece starts from."""
    cache, other = (case.cache(window=4, max_tokens=2, slots=4) for _ in range(2))
    life, both = Life(cache, generator), torch.tensor([1, 3])
    life.plain(6)
    step = cache.begin(both, tokens=2)
    decode_layer(cache, 0, step, *make_inputs(cache, 2, 2, generator), life.layer_weights)
    other.restore(other.allocate(4), cache.export(torch.arange(4)))
    other.commit(step, [1, 2])
    prefill = cache.begin_prefill(both, accepted=[1, 2])
    state, window = cache.prefill_state(0, prefill)
    assert torch.equal(state, other.materialize(0, both))
    assert torch.equal(window, other.conv_window(0, both))
    state, window = torch.randn(state.shape, generator=generator).to(state.dtype), window.flip(2)
    cache.end_prefill(0, prefill, state, window)
    life.twin.load([1, 3], state, window)
    life.plain(9)
    life.twin.check_states()
