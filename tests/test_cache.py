"""Sizes, traffic and refusals of the cache: what it costs, and one clear sentence for every misuse, state untouched."""

import copy
import json
import re
from importlib import resources

import pytest
import torch

from replayssm import PAD_SLOT, ConvGeometry, Geometry, ReplayCache, convolve, decode, decode_layer, recurrences
from replayssm.testing import checksum, make_cache, make_inputs, make_weights, same_bits

SMALL = Geometry(H=4, G=2, V=6, K=8)
MOST_MEMORY = {"mamba2": 1.10, "gdn": 1.16, "kda": 1.30}  # checkpoint + ring over one fp32 state, at window 16
# d_state 64: the raw v of 17 records alone are 17 * 2 / (4 * 64) = 0.133 of a state; 1.10 takes window 10 (docs/log.md)
MOST_MEMORY_D_STATE_64 = 1.145


def models() -> list[tuple[str, str, Geometry]]:
    """Name, recurrence and geometry of every model that we have figures for."""
    found = []
    fields = {"ssm": ("nheads", "ngroups", "head_dim", "d_state")}
    fields["linear_attention"] = ("num_v_heads", "num_k_heads", "head_v_dim", "head_k_dim")
    recurrence = {"mamba2": "mamba2", "gated_delta_net": "gdn", "kda": "kda"}
    for model in json.loads(resources.files("replayssm").joinpath("models.json").read_text())["models"]:
        for part, names in fields.items():
            sizes = [(model.get(part) or {}).get(name) for name in names]
            if model["recurrence"] in recurrence and all(sizes):
                found.append((model["name"], recurrence[model["recurrence"]], Geometry(*sizes)))
    return found


@pytest.mark.parametrize("name, recurrence, geometry", models(), ids=lambda x: x if isinstance(x, str) else "")
def test_memory_at_window_16(name: str, recurrence: str, geometry: Geometry) -> None:
    cache = ReplayCache(recurrence, geometry, layers=1, slots=1, window=16, dtype=torch.bfloat16)
    state = geometry.H * geometry.V * geometry.K * 4
    ratio = (cache.nbytes.checkpoint + cache.nbytes.ring) / state
    most = MOST_MEMORY_D_STATE_64 if recurrence == "mamba2" and geometry.K == 64 else MOST_MEMORY[recurrence]
    assert ratio <= most, f"{name}: {ratio:.3f}"
    if recurrence == "mamba2" and geometry.K == 64:
        smaller = ReplayCache(recurrence, geometry, layers=1, slots=1, window=10, dtype=torch.bfloat16)
        assert (smaller.nbytes.checkpoint + smaller.nbytes.ring) / state <= MOST_MEMORY[recurrence]


def test_nbytes_counts_every_tensor() -> None:
    cache = make_cache("gdn", SMALL, layers=3, format="split16", dtype=torch.bfloat16)
    tensors = checksum(cache)
    assert cache.nbytes.total == sum(x.numel() * x.element_size() for x in tensors)
    assert cache.nbytes.checkpoint == 3 * 4 * (4 * 6 * 8) * 4


def test_bytes_per_token_by_hand() -> None:
    """mamba2, fp32 records, window 4: checkpoint read, mean 2.5 records read, one written, a flush every 4 tokens."""
    cache = make_cache("mamba2", SMALL, window=4, conv_width=4)
    state, record, channels = 4 * 6 * 8 * 4, 4 * (2 * 8 + 4 * 6 + 4 + 4), 2 * 2 * 8 + 4 * 6
    traffic = cache.bytes_per_token()
    assert traffic.read == pytest.approx(state + 2.5 * record + (state + 4 * record) / 4 + 3 * channels * 4)
    assert traffic.written == pytest.approx(record + state / 4 + channels * 4)
    # four drafts, half of the five tokens count: 1.5 records wait on average, a flush every 1.6 steps
    drafted = cache.bytes_per_token(tokens=5, accepted=2.5)
    read = state + 6.5 * record + (state + 4 * record) * 2.5 / 4 + 3 * channels * 4
    assert drafted.read == pytest.approx(read / 2.5)
    assert drafted.written == pytest.approx((5 * record + state * 2.5 / 4 + 5 * channels * 4) / 2.5)


# ---- refusals ----


@pytest.fixture
def cache(generator: torch.Generator) -> ReplayCache:
    cache = make_cache("gdn", SMALL, slots=4, max_tokens=2)
    cache.reset(cache.allocate(3))
    return cache


def refused(cache: ReplayCache, sentence: str, call, *args, **kwargs) -> None:
    """The call raises one sentence that matches, and nothing in the cache has changed."""
    before = checksum(cache)
    with pytest.raises(ValueError, match=sentence) as caught:
        call(*args, **kwargs)
    assert same_bits(before, checksum(cache))
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_wrong_tensors_are_refused(cache: ReplayCache, generator: torch.Generator) -> None:
    step = cache.begin(torch.tensor([0, 1]), tokens=2)
    good = {
        "q": torch.zeros(2, 2, 2, 8),
        "k": torch.zeros(2, 2, 2, 8),
        "v": torch.zeros(2, 2, 4, 6),
        "g": torch.zeros(2, 2, 4),
        "w": torch.zeros(2, 2, 4),
    }

    def call(**changes: object) -> None:
        decode(cache, 0, step, **(good | changes))

    refused(
        cache,
        re.escape(
            "gdn.decode: k must be [B, T, G, K] = [2, 2, 2, 8] in float32 (from the cache); "
            "got [2, 2, 4, 8] in float32. G is the number of key groups after tensor parallelism."
        ),
        call,
        k=torch.zeros(2, 2, 4, 8),
    )
    refused(cache, r"q must be .* got \[2, 2, 2, 8\] in bfloat16", call, q=good["q"].bfloat16())
    refused(cache, r"v must be \[B, T, H, V\] = \[2, 2, 4, 6\]", call, v=torch.zeros(2, 2, 6, 4))
    refused(cache, r"g must be .* Gates are kept in fp32", call, g=good["g"].bfloat16())
    refused(cache, r"w must be \[B, T, H\]", call, w=torch.zeros(2, 1, 4))
    refused(cache, r"k must be on cpu .* got meta", call, k=good["k"].to("meta"))
    refused(cache, r"q must be a tensor \[B, T, G, K\]; got list", call, q=[1.0])
    refused(cache, r"layer must be between 0 and 0; got 1", decode, cache, 1, step, **good)
    x = torch.zeros(2, 2, 56)
    refused(cache, r"x must be \[B, T, C\] = \[2, 2, 56\]", convolve, cache, 0, step, x[..., :-1], torch.zeros(56, 4))
    refused(cache, r"weight must be \[C, W\] = \[56, 4\]", convolve, cache, 0, step, x, torch.zeros(56, 3))
    inputs, weights = make_inputs(cache, 2, 2, generator), make_weights(cache, generator)
    other = recurrences.get("kda").weights(*weights[:4])
    refused(cache, r"weights must be a gdn.Weights; got Weights", decode_layer, cache, 0, step, *inputs, other)
    refused(cache, r"raw_g must be .*got None", decode_layer, cache, 0, step, inputs.x, None, inputs.raw_w, weights)


def test_wrong_slots_are_refused(cache: ReplayCache) -> None:
    begin = cache.begin
    refused(cache, r"begin: slot 4 is outside the pool: slots go from 0 to 3, or PAD_SLOT", begin, torch.tensor([0, 4]))
    refused(cache, r"slot -2 is outside the pool", begin, torch.tensor([-2]))
    refused(cache, r"slots \[3\] are not loaded; reset or load a slot", begin, torch.tensor([1, 3]))
    refused(cache, r"every slot may be given once a step; got \[1, 1\]", begin, torch.tensor([1, 1]))
    refused(cache, r"slots must be \[B\] in an integer dtype; got \[2\] in float32", begin, torch.tensor([0.0, 1.0]))
    refused(cache, r"slot -1 is outside the pool: slots go from 0 to 3\.", cache.flush, torch.tensor([PAD_SLOT]))
    refused(cache, r"not loaded", cache.materialize, 0, torch.tensor([3]))
    refused(cache, r"not loaded", cache.copy, torch.tensor([3]), torch.tensor([0]))
    refused(cache, r"dst no slot twice", cache.copy, torch.tensor([0, 1]), torch.tensor([2, 2]))
    refused(cache, r"slots \[3\] are not allocated once each", cache.free, torch.tensor([3]))
    refused(cache, r"2 slots were asked for and 1 of 4 are free", cache.allocate, 2)


def test_wrong_counts_are_refused(cache: ReplayCache) -> None:
    refused(
        cache, r"tokens must be between 1 and max_tokens = 2, what the ring", cache.begin, torch.tensor([0]), tokens=3
    )
    refused(
        cache, r"lengths must be between 0 and 2 for slot 1; got 3", cache.begin, torch.tensor([0, 1]), [2, 3], tokens=2
    )
    refused(
        cache, r"lengths must be \[B\] = \[2\] in an integer dtype", cache.begin, torch.tensor([0, 1]), [1], tokens=2
    )
    step = cache.begin(torch.tensor([0, 1]), [2, 1], tokens=2)
    refused(cache, r"n must be between 0 and 1 for slot 1; got 2\. Only tokens of the step", cache.commit, step, 2)
    refused(cache, r"n must be between 0 and 2 for slot 0; got -1", cache.commit, step, [-1, 0])
    cache.commit(step, [2, 1])
    refused(cache, r"committed already", cache.commit, step, [2, 1])
    refused(
        cache, r"n must be between 0 and 1 for slot 1; got 2\. Older tokens are in", cache.trim, torch.tensor([0, 1]), 2
    )
    refused(cache, r"n must be between 0 and 2 for slot 0; got 3\. So many", cache.materialize, 0, torch.tensor([0]), 3)


def test_wrong_trees_are_refused(cache: ReplayCache) -> None:
    slots = torch.tensor([0, 1])

    def begin(parent: list) -> None:
        cache.begin(slots, tokens=2, parent=torch.tensor(parent))

    refused(cache, r"parent must come before it", begin, [[-1, 1], [-1, 0]])  # a cycle
    refused(cache, r"parent must come before it", begin, [[1, -1], [-1, 0]])  # parent after child
    refused(cache, r"parent must be \[B, T\] = \[2, 2\]", begin, [[-1, 0]])
    step = cache.begin(slots, tokens=2, parent=torch.tensor([[-1, 0], [-1, -1]]))
    refused(cache, r"a tree is committed by path, a chain by n; this step is a tree", cache.commit, step, 1)
    refused(cache, r"from parent to child; got \[0, 1\] for slot 1", cache.commit, step, path=[[0, 1], [0, 1]])
    refused(cache, r"from parent to child; got \[1, -1\] for slot 0", cache.commit, step, path=[[1, -1], [1, -1]])
    refused(cache, r"path must be \[B, P\]", cache.commit, step, path=[[0, 1]])
    chain = cache.begin(slots, tokens=2)
    refused(cache, r"this step is a chain", cache.commit, chain, path=[[0], [0]])


def test_wrong_states_are_refused(cache: ReplayCache) -> None:
    slots, state, window = torch.tensor([0]), torch.zeros(1, 4, 6, 8), torch.zeros(1, 56, 3)
    refused(
        cache, r"state must be \[n, H, V, K\] = \[1, 4, 6, 8\]", cache.load, 0, slots, state.transpose(2, 3), window
    )
    refused(cache, r"window must be \[n, C, W - 1\] = \[1, 56, 3\]", cache.load, 0, slots, state, torch.zeros(1, 56, 4))
    refused(cache, r"a window is needed exactly where .* window None", cache.load, 0, slots, state)
    snapshot = cache.export(slots)
    other = make_cache("gdn", SMALL, slots=4, max_tokens=2, format="split16")
    other.reset(other.allocate(1))
    refused(other, r"these are in one only: \['0.checkpoint.1'\]", other.restore, slots, snapshot)
    other = make_cache("gdn", SMALL, slots=4, max_tokens=3)
    other.reset(other.allocate(1))
    refused(other, r"0.ring.k must be \[1, 2, 7, 8\] in float32; got \[1, 2, 6, 8\]", other.restore, slots, snapshot)
    bare = ReplayCache("gdn", SMALL, layers=1, slots=1)
    bare.reset(bare.allocate(1))
    refused(bare, r"made without conv", bare.conv_window, 0, slots)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"recurrence": "mamba3"}, r"unknown recurrence 'mamba3': choose one of gdn, kda, mamba2\."),
        ({"format": "fp5"}, r"unknown format 'fp5': choose one of .*split16"),
        ({"implementation": "cuda"}, r"unknown implementation 'cuda': choose one of reference, torch, triton\."),
        ({"geometry": Geometry(5, 2, 4, 4)}, r"multiple of G key groups; got H = 5, G = 2"),
        ({"window": 0}, r"window must be a whole number, 1 or more; got 0"),
        ({"slots": 2.5}, r"slots must be a whole number"),
        ({"dtype": torch.int8}, r"dtype must be a floating dtype"),
        ({"conv": ConvGeometry(10, 4)}, r"2 G K \+ H V = 56 channels; got \(10, 4\)"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_impossible_caches_are_refused(changes: dict, sentence: str) -> None:
    options = {"recurrence": "gdn", "geometry": SMALL, "layers": 1, "slots": 1} | changes
    with pytest.raises(ValueError, match=sentence):
        ReplayCache(**options)


def test_a_cache_can_be_copied_whole(cache: ReplayCache) -> None:
    twin = copy.deepcopy(cache)
    assert same_bits(checksum(cache), checksum(twin))
    twin.reset(torch.tensor([0, 1]))
    assert cache.layers[0].conv.data_ptr() != twin.layers[0].conv.data_ptr()


def test_every_model_with_known_sizes_is_measured() -> None:
    assert len(models()) >= 36


def test_a_cache_without_convolution_trims_the_whole_ring(generator: torch.Generator) -> None:
    cache = ReplayCache("mamba2", SMALL, layers=1, slots=1, window=8, staggered=False)
    slot = cache.allocate(1)
    cache.reset(slot)
    states = [cache.materialize(0, slot)]
    for _ in range(7):
        step = cache.begin(slot)
        q, k = (torch.randn(1, 1, 2, 8, generator=generator) for _ in "qk")
        v = torch.randn(1, 1, 4, 6, generator=generator)
        g, w = -torch.rand(1, 1, 4, generator=generator), torch.rand(1, 1, 4, generator=generator)
        decode(cache, 0, step, q, k, v, g, w)
        cache.commit(step)
        states.append(cache.materialize(0, slot))
    for n in (3, 4):
        cache.trim(slot, n)
        states = states[:-n]
        assert torch.equal(cache.materialize(0, slot), states[-1])
