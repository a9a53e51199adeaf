"""The contract test of an installation: random lives of slots on a device, against the plain recurrence in fp64.

Every case is one recurrence, format and implementation. Its life mixes plain steps, padding rows, drafts with random
acceptance, trees, trim, copy, export and restore, and flushes; every output and state is compared with
testing.Twin, which derives what rounding allows. It needs nothing but the package: no models, no rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm import PAD_SLOT, Geometry, ReplayCache, checks, decode_layer, formats, implementations, recurrences
from replayssm.testing import LayerInputs, Twin, cast, make_cache, make_inputs, make_weights

# A head dim that is no power of two; groups; one key group per head where the recurrence has it so.
SIZES = {"mamba2": Geometry(4, 2, 80, 32), "gdn": Geometry(4, 2, 32, 64), "kda": Geometry(2, 2, 32, 64)}
STEPS = 24
TOKENS = 3
WINDOW = 5


class Case(NamedTuple):
    """What one life runs."""

    recurrence: str
    format: str
    implementation: str
    device: str


class Outcome(NamedTuple):
    """What a life showed: largest errors against fp64, what rounding allows, and what was wrong (None: nothing)."""

    tokens: int
    output: float
    output_allowed: float
    state: float
    state_allowed: float
    fault: str | None


def cases(device: str | None, names: Sequence[str], implementation: str | None) -> list[Case]:
    """Every recurrence and format on a device, by the implementations that run there.

    Raises:
        ValueError: an unknown name, or a device that is not there.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise checks.unknown("device", device, ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here (`replayssm info` says why).")
    some = [implementation] if implementation else ["triton"] if device == "cuda" else ["torch", "reference"]
    for name in some:
        for fmt in names:
            implementations.choose(name, torch.device(device), formats.get(fmt))
    return [Case(recurrence, fmt, name, device) for fmt in names for name in some for recurrence in recurrences.names()]


class _OnCpu:
    """A cache whose states and cursors are seen on the CPU, where its twin lives. All else is the cache's."""

    def __init__(self, cache: ReplayCache) -> None:
        self.cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    @property
    def num_committed(self) -> Tensor:
        return self.cache.num_committed.cpu()

    def materialize(self, layer: int, slots: Tensor, n: Tensor) -> Tensor:
        device = self.cache.device
        return self.cache.materialize(layer, slots.to(device), n.to(device)).cpu()

    def conv_window(self, layer: int, slots: Tensor) -> Tensor:
        return self.cache.conv_window(layer, slots.to(self.cache.device)).cpu()


class _Life:
    """A cache and its twin, moved together."""

    def __init__(self, case: Case, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = make_cache(
            case.recurrence, SIZES[case.recurrence], slots=4, window=WINDOW, max_tokens=TOKENS, format=case.format,
            implementation=case.implementation, device=case.device,
        )  # fmt: skip
        weights = make_weights(self.cache, self.generator)
        self.weights = cast(weights, self.cache.device)
        self.seen: Any = _OnCpu(self.cache)
        self.twin = Twin(self.seen, weights)  # type: ignore[arg-type]  # it asks for what _OnCpu answers
        self.tokens, self.output, self.state = 0, 0.0, 0.0
        self.cache.reset(self.cache.allocate(4))
        self.twin.reset(range(4))

    def at(self, *values: int) -> Tensor:
        return torch.tensor(values, device=self.cache.device)

    def draw(self, below: int) -> int:
        return int(torch.randint(0, below, (), generator=self.generator))

    def step(self, rows: list[int], lengths: list[int], counted: list[int], tokens: int) -> None:
        """One step of a chain; rows of PAD_SLOT must answer zero."""
        inputs = make_inputs(self.cache, len(rows), tokens, self.generator)
        step = self.cache.begin(self.at(*rows), self.at(*lengths), tokens=tokens)
        y = self.decode(step, inputs)
        self.cache.commit(step, self.at(*counted))
        for b, slot in enumerate(rows):
            if slot == PAD_SLOT:
                assert not y[b].any(), "a padding row answered"
                continue
            self.compare(y[b, : lengths[b]], *self.twin.step(slot, inputs.row(b), lengths[b]))
            self.twin.commit(slot, range(counted[b]))

    def tree(self, slot: int) -> None:
        """Two branches below one root; the second is taken."""
        inputs = make_inputs(self.cache, 1, 3, self.generator)
        step = self.cache.begin(self.at(slot), self.at(3), tokens=3, parent=self.at(-1, 0, 0)[None])
        y = self.decode(step, inputs)
        self.cache.commit(step, path=self.at(0, 2, -1)[None])
        self.compare(y[0], *self.twin.step(slot, inputs.row(0), 3, [-1, 0, 0]))
        self.twin.commit(slot, [0, 2])

    def decode(self, step: Any, inputs: LayerInputs) -> Tensor:
        there = [None if x is None else x.to(self.cache.device) for x in inputs]
        return decode_layer(self.cache, 0, step, there[0], there[1], there[2], self.weights).cpu()  # type: ignore[arg-type]

    def compare(self, y: Tensor, exact: Tensor, low: Tensor) -> None:
        self.tokens += len(y)
        if len(y):
            self.output = max(self.output, float((y.double() - exact).abs().max()))
        self.twin.check_outputs(y, exact, low)

    def states(self, slots: list[int], back: int = 0) -> None:
        """States after all committed records but the newest `back`."""
        at = torch.tensor(slots)
        state = self.seen.materialize(0, at, self.seen.num_committed[at] - back)
        for i, slot in enumerate(slots):
            error = (state[i].double() - self.twin.history[slot][-1 - back].exact[0]).abs().max()
            self.state = max(self.state, float(error))
        self.twin.check_states(slots, back)

    def live(self) -> None:
        """All verbs."""
        for i in range(STEPS):
            order = torch.randperm(4, generator=self.generator).tolist()
            a, b = order[:2]
            if i % 3 == 2:
                lengths = [self.draw(TOKENS + 1) for _ in order]
                self.step(order, lengths, [self.draw(n + 1) for n in lengths], TOKENS)
            else:
                self.step([*order[:3], PAD_SLOT], [1] * 4, [1] * 4, 1)
            if i % 4 == 1:
                n = self.draw(int(self.cache.cursors.reach[a]) + 1)
                self.cache.trim(self.at(a), n)
                self.twin.trim(a, n)
            if i % 5 == 2:
                self.tree(b)
            if i % 6 == 3:
                self.cache.copy(self.at(a), self.at(b))
                self.twin.copy([a], [b])
            if i % 8 == 5:
                snapshot = self.cache.export(self.at(a))
                self.cache.reset(self.at(a))
                self.cache.restore(self.at(a), snapshot)
            if i % 8 == 7:
                self.cache.flush(self.at(a))
                self.states([a])
        self.states([0, 1, 2, 3])
        slot = int(self.seen.num_committed.argmax())
        self.states([slot], int(self.seen.num_committed[slot]))


def live(case: Case, seed: int) -> Outcome:
    """A whole life of a case; what was wrong is in the outcome, not raised."""
    life, fault = _Life(case, seed), None
    try:
        life.live()
    except AssertionError as wrong:
        fault = str(wrong)
    allowed = life.twin.tolerance("y"), life.twin.tolerance("state")
    return Outcome(life.tokens, life.output, allowed[0], life.state, allowed[1], fault)
