"""The vLLM plugin as far as it needs no vLLM: settings, refusals, the sorting of rows, and a group's life in pages."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm import ConvGeometry, Geometry, page_bytes
from replayssm.integrations.vllm.pool import Layer, Pool, Rows
from replayssm.integrations.vllm.rows import ragged, split
from replayssm.integrations.vllm.settings import Settings, parse, refusals
from replayssm.testing import Twin, make_cache, make_inputs, make_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# ---- what is asked for ----


def test_inert_unless_asked() -> None:
    for config in ({}, {"kda_prefill_backend": "triton"}, None, {"replayssm": None}):
        assert parse(config) is None
    assert parse({"replayssm": {}}) == Settings("fp32", 16, 0)
    assert parse({"replayssm": {"format": "split16", "window": 8}}) == Settings("split16", 8, 0)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"fromat": "fp32"}, "unknown key.*fromat.*format, window, seed"),
        ({"format": "fp7"}, "fp7"),
        ({"window": 0}, "window must be a whole number, 1 or more; got 0"),
        ({"window": 1.5}, "window must be"),
        ({"seed": True}, "seed must be"),
        ("split16", "must be a mapping"),
    ],
)
def test_a_setting_that_does_not_exist_is_refused(given: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse({"replayssm": given})


def engine(**changes: Any) -> SimpleNamespace:
    """As much of a VllmConfig as refusals looks at."""
    cache = {"enable_prefix_caching": False, "use_replayssm": False}
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "use_ubatching": False}
    whole = {"num_speculative_tokens": 0, "kv_transfer_config": None}
    parts = [{name: changes.get(name, value) for name, value in part.items()} for part in (cache, parallel, whole)]
    return SimpleNamespace(
        cache_config=SimpleNamespace(**parts[0]), parallel_config=SimpleNamespace(**parts[1]), **parts[2]
    )


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"enable_prefix_caching": True}, "--no-enable-prefix-caching"),
        ({"use_replayssm": True}, "use one of the two"),
        ({"num_speculative_tokens": 16}, "at most 15"),
        ({"num_speculative_tokens": 9}, '"window" to 10 or more'),
        ({"kv_transfer_config": object()}, "kv_transfer_config"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"use_ubatching": True}, "--enable-dbo"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_and_said(changes: dict[str, Any], sentence: str) -> None:
    asked = Settings(window=8)
    assert refusals(asked, "0.33.0", engine(), "cuda") == []
    (why,) = [why for why in refusals(asked, "0.33.0", engine(**changes), "cuda") if sentence in why]
    assert why


def test_another_version_or_device_is_refused() -> None:
    assert "0.34.1 is not supported" in refusals(Settings(), "0.34.1", engine(), "cuda")[0]
    assert "GPU" in refusals(Settings(), "0.33.0", engine(), "cpu")[0]


def test_a_page_is_smaller_than_the_states_that_drafts_need() -> None:
    """Qwen3.5-4B, 4 drafts: one page with its ring against five states."""
    geometry, conv = Geometry(32, 16, 128, 128), ConvGeometry(8192, 4)
    ours = page_bytes("gdn", geometry, 16, 5, "fp32", torch.bfloat16, conv, device="cuda")
    state = 32 * 128 * 128 * 4
    assert state < ours < 1.25 * state
    assert page_bytes("gdn", geometry, 16, 1, "fp32", torch.bfloat16, conv, device="cuda") < 1.14 * state


# ---- rows ----


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.integers(-1, 4)), min_size=1, max_size=9), st.booleans())
def test_every_token_belongs_to_one_kind_of_row(rows: list[tuple[int, bool, int]], drafting: bool) -> None:
    lengths, beginning, drafts = (np.array(column) for column in zip(*rows, strict=True))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    found = split(starts, beginning, drafts if drafting else None, 5 if drafting else 1)
    for i, (length, begins, draft) in enumerate(rows):
        decoded = length == 1 or (drafting and draft >= 1 and length == draft + 1)
        assert (i in found.prefills) == (length > 0 and not decoded)
        assert not decoded or i in found.decodes
        assert (i in found.fresh) == (decoded and begins)
    taken = np.arange(starts[-1])[found.prefill_tokens] if len(found.prefills) else np.arange(0)
    gather, answers, places = ragged(starts, found.decodes, found.tokens)
    assert sorted([*taken, *answers]) == list(range(starts[-1]))
    assert gather.shape == (len(found.decodes), found.tokens) and (gather.flatten()[places] == answers).all()
    if found.dense:
        bring = int((lengths[found.decodes] > 0).sum())
        assert (gather[:bring].flatten() == np.arange(bring * found.tokens)).all()


# ---- a group's life ----

SMALL = Geometry(4, 2, 16, 16)


class Engine:
    """A small engine: requests come, are prefilled in pieces, decode with drafts, are preempted, and leave.

    Blocks are recycled as they are, rows mix, and what a step's drafts came to is said one step later. Every answer and
    every state is compared with the recurrence.
    """

    def __init__(self, name: str, drafts: int, generator: torch.Generator) -> None:
        self.generator, self.most, blocks = generator, 1 + drafts, 7
        self.helper = make_cache(name, SMALL, slots=blocks, window=6, max_tokens=self.most, dtype=torch.float32)
        self.weights = [make_weights(self.helper, generator) for _ in range(2)]
        self.twins = [Twin(self.helper, w) for w in self.weights]
        size = page_bytes(name, SMALL, 6, self.most, conv=self.helper.conv, device="cuda")
        memory = torch.full((blocks, 2 * size), 255, dtype=torch.uint8, device=DEVICE)
        self.pool = Pool(
            [
                Layer(name, SMALL, self.helper.conv, torch.float32, memory[:, i * size : (i + 1) * size], w)
                for i, w in enumerate(self.weights)
            ],
            Settings(window=6),
            self.most,
        )
        self.accepted: dict[int, int] = {}  # by block, of its last step

    def step(self, lengths: dict[int, int], begin: set[int] = frozenset(), padded: set[int] = frozenset()) -> None:
        """Blocks bring tokens; those that `begin` have none before; of those `padded` all but the first are none."""
        blocks, mine = list(lengths), np.array(list(lengths.values()))
        starts = np.concatenate([[0], np.cumsum(mine)])
        begins = np.array([block in begin for block in blocks])
        drafts = np.array([-1 if block in begin - padded else n - 1 for block, n in lengths.items()])
        found = split(starts, begins, drafts if self.most > 1 else None, self.most)
        table, accepted = torch.tensor(blocks), torch.tensor([self.accepted.pop(block, 1) for block in blocks])
        if len(found.fresh):
            self.pool.reset(table[found.fresh])
        parts = () if found.dense else map(torch.from_numpy, ragged(starts, found.decodes, found.tokens))
        rows = Rows(
            found.tokens, table[found.decodes], torch.tensor(mine[found.decodes]), accepted[found.decodes], *parts
        )
        counted = {
            block: (
                int(torch.randint(1, 2 if block in padded else lengths[block] + 1, (), generator=self.generator))
                if i in found.decodes
                else lengths[block]
            )
            for i, block in enumerate(blocks)
        }
        for layer, twin in enumerate(self.twins):
            inputs = make_inputs(self.helper, 1, int(starts[-1]), self.generator).row(0)
            out = torch.full((int(starts[-1]), SMALL.H, SMALL.V), torch.nan)
            self.pool.decode(layer, rows, *inputs, out)
            for block in begin:
                twin.reset([block])
            for i, block in enumerate(blocks):
                own = type(inputs)(*(None if x is None else x[starts[i] : starts[i + 1]] for x in inputs))
                answers = twin.step(block, own, lengths[block])
                if i in found.decodes:
                    twin.check_outputs(out[starts[i] : starts[i + 1]], *answers)
                twin.commit(block, range(counted[block]))
            if len(found.prefills):
                self.prefill(layer, twin, found, table, accepted, begin, counted)
        self.accepted |= {block: counted[block] for i, block in enumerate(blocks) if i in found.decodes}

    def prefill(self, layer: int, twin: Twin, found: Any, table: Any, accepted: Any, begin: Any, counted: Any) -> None:
        """The twin is the engine's own kernels: it must be handed its own state, and gives back the later one."""
        at = torch.from_numpy(found.prefills)
        anew = all(int(block) in begin for block in table[at])
        state, window = self.pool.before_prefill(layer, table[at], accepted[at], anew)
        for i, block in enumerate(table[at].tolist()):
            if block not in begin:
                before = twin.history[block][-1 - counted[block]]
                twin._note("state", before.exact, before.low)
                twin._compare("state", state[i : i + 1], before.exact)
                assert torch.equal(window[i], torch.stack(before.inputs, 1))
        now = [twin.history[block][-1] for block in table[at].tolist()]
        window = torch.stack([torch.stack(node.inputs, 1) for node in now])
        self.pool.after_prefill(layer, torch.cat([node.low for node in now]), window)


@pytest.mark.parametrize(
    "name, drafts, at_once",
    [("mamba2", 0, 0), ("gdn", 3, 0), ("kda", 2, 0), ("mamba2", 0, 2), ("gdn", 0, 2), ("kda", 0, 3)],
)
def test_a_groups_life_in_an_engines_pages(
    name: str, drafts: int, at_once: int, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """Steps of up to `at_once` rows update checkpoints at once, between others that do not."""
    monkeypatch.setattr("replayssm.launch_choices.updates_at_once", lambda rows, *case: rows <= at_once)
    life = Engine(name, drafts, generator)
    life.step({1: 5, 4: 1}, begin={1, 4})  # a prefill, and a prompt of one token
    life.step({4: 1, 1: 7})  # the prompt's next piece beside a decode
    life.step({1: 1, 4: 1, 2: 9}, begin={2})
    if drafts:
        life.step({1: 3, 2: 3, 4: 3})
        life.step({4: 1, 1: 3, 2: 2})  # who drafted, and who did not
        life.step({2: 3, 5: 4, 1: 1}, begin={5})
        life.step({2: 3, 5: 3, 1: 3}, begin={5}, padded={5})  # a prompt of one token on a block as another left it
    for _ in range(5):
        life.step(dict.fromkeys((1, 2, 4), 1 + drafts if drafts != 3 else 3))
    life.step({2: 1, 1: 6}, begin={1})  # preempted, and prefilled again on the block as it lies
    life.step({1: 1, 6: 1, 2: 1}, begin={6})
    for twin_block in (1, 2, 6):
        life.step({twin_block: 1})
