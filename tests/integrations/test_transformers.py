"""The Transformers adapter: a model decodes as its host does, whatever arrives and in whatever pieces.

The reference everywhere is the host itself, run one token at a time: its prefill clamps dt where its step does not.
"""

import copy
import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tiny_hosts import CONFIGS, FAMILIES, VOCAB, make
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache

from replayssm.integrations.transformers import disable, enable, replay_cache
from replayssm.integrations.transformers.host_cache import ReplayLayer, rows_of

SHAPES = ("nemotron_h", "falcon_h1", "qwen3_5_text", "kimi_linear")  # each recurrence, placeholders, hybrid layers
CLOSE = 1e-4  # of fp32 log-probabilities, a few hundred roundings
WINDOW = 4


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    """And one thread: these tensors are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@contextmanager
def replayed(model: PreTrainedModel, **options: object) -> Iterator[PreTrainedModel]:
    enable(model, **({"window": WINDOW} | options))
    try:
        yield model
    finally:
        disable(model)


def tokens(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (rows, columns), generator=torch.Generator().manual_seed(seed))


def cache_name(model: PreTrainedModel) -> str:
    names = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in names)


def forward(model: PreTrainedModel, ids: Tensor, cache: Cache, mask: Tensor) -> Tensor:
    """Log-probabilities [B, T, vocabulary] of new columns behind a cache; mask [B, past + T] gives the positions."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    options = {} if model.config.model_type == "mamba2" else {"position_ids": positions}
    out = model(ids, attention_mask=mask, use_cache=True, **{cache_name(model): cache}, **options)
    return out.logits.log_softmax(-1)


def run(
    model: PreTrainedModel, ids: Tensor, pieces: list[int], mask: Tensor | None = None, cache: Cache | None = None
) -> tuple[Tensor, Cache]:
    """Log-probabilities of ids [B, N] fed in pieces of these sizes, and the cache after."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    mask = torch.ones_like(ids) if mask is None else mask
    past, out, end = mask.shape[1] - ids.shape[1], [], 0
    for size in pieces:
        start, end = end, end + size
        out.append(forward(model, ids[:, start:end], cache, mask[:, : past + end]))
    assert end == ids.shape[1]
    return torch.cat(out, 1), cache


def steps(prefill: int, total: int) -> list[int]:
    return [prefill] + [1] * (total - prefill)


def left_padded(rows: int, columns: int) -> Tensor:
    """A mask whose row b starts with 2 b padding columns."""
    return (torch.arange(columns) >= 2 * torch.arange(rows)[:, None]).long()


def rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def assert_same_states(replayed_cache: Cache, host_cache: Cache, rtol: float = 1e-5, layers: int | None = None) -> None:
    """States and convolution windows of the first (None: all) recurrent layers are the host's."""
    core, rows = replay_cache(replayed_cache), rows_of(replayed_cache)
    for layer, index in enumerate(rows.recipe.layer_indices[:layers]):
        host = host_cache.layers[index]
        state = rows.recipe.turned(core.materialize(layer, rows.slots))
        assert (state - host.recurrent_states[0]).norm() <= rtol * host.recurrent_states[0].norm()
        window = core.conv_window(layer, rows.slots)
        want = host.conv_states[0][..., -window.shape[-1] :]
        assert (window - want).norm() <= rtol * want.norm()


# ---- the same numbers ----


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_equals_the_hosts_own_steps(family: str) -> None:
    model, ids, mask = make(family), tokens(2, 30), left_padded(2, 30)
    want, host_cache = run(model, ids, steps(6, 30), mask)
    with replayed(model):
        got, cache = run(model, ids, steps(6, 30), mask)  # 24 steps, 5 or more flushes per row
    valid = mask.bool()
    assert (got - want)[valid].abs().max() <= CLOSE
    assert_same_states(cache, host_cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_equals_the_hosts(family: str) -> None:
    model, ids, mask = make(family), tokens(2, 6), left_padded(2, 6)
    want = model.generate(ids, attention_mask=mask, max_new_tokens=14, do_sample=False)
    with replayed(model):
        got = model.generate(ids, attention_mask=mask, max_new_tokens=14, do_sample=False)
    assert torch.equal(got, want)


def test_ring_keeps_key_groups_not_value_heads() -> None:
    with replayed(make("qwen3_5_text")) as model:
        _, cache = run(model, tokens(1, 5), [5])
    assert replay_cache(cache).geometry._asdict() == {"H": 6, "G": 2, "V": 32, "K": 16}


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_falcon_h1_with_its_gated_norm(norm_before_gate: bool) -> None:
    """One row: with more, the step of Transformers 5.17 mixes up the rows of this norm."""
    model = make("falcon_h1", mamba_rms_norm=True, mamba_norm_before_gate=norm_before_gate)
    ids = tokens(1, 14)
    want, _ = run(model, ids, steps(6, 14))
    with replayed(model):
        got, _ = run(model, ids, steps(6, 14))
    assert (got - want).abs().max() <= CLOSE


def test_dt_limits_come_from_the_config() -> None:
    """The host clamps dt in its full pass only; we follow the config in every step."""
    ids = tokens(1, 14)
    model = make("mamba2", time_step_limit=(0.1, 0.3))
    want, _ = run(model, ids, [14])
    unlimited, _ = run(make("mamba2"), ids, [14])
    with replayed(model):
        got, _ = run(model, ids, steps(3, 14))
    assert (got - want).abs().max() <= CLOSE < (unlimited - want).abs().max()


@pytest.mark.parametrize("negative", [False, True])
def test_olmo_hybrid_beta_up_to_two(negative: bool) -> None:
    model, ids = make("olmo_hybrid", linear_allow_neg_eigval=negative), tokens(1, 12)
    want, _ = run(model, ids, steps(3, 12))
    with replayed(model):
        got, _ = run(model, ids, steps(3, 12))
    assert (got - want).abs().max() <= CLOSE


def _rounded_run(model: PreTrainedModel, ids: Tensor, prefill: int, dtype: torch.dtype) -> tuple[Tensor, Cache]:
    """The host's steps, its states rounded where ours are: when they are loaded and at every flush."""
    out, cache = run(model, ids[:, :prefill], [prefill])
    out = [out]
    for step, column in enumerate(range(prefill, ids.shape[1])):
        if step % WINDOW == 0:
            for layer in cache.layers:
                state = getattr(layer, "recurrent_states", {0: None})[0]
                if state is not None:
                    state.copy_(state.to(dtype))
        mask = torch.ones_like(ids[:, : column + 1])
        out.append(forward(model, ids[:, column : column + 1], cache, mask))
    return torch.cat(out, 1), cache


@pytest.mark.parametrize("format", ["bf16", "fp16", "split16"])
@pytest.mark.parametrize("family", ["mamba2", "qwen3_5_text", "kimi_linear"])
def test_low_precision_costs_no_more_than_its_rounding(family: str, format: str) -> None:
    """bf16, fp16: the host with its states rounded at the same steps. split16: fp32 states, outputs read in bf16."""
    model, ids = make(family), tokens(2, 28)
    exact, host_cache = run(model, ids, steps(4, 28))
    rounded, rounded_cache = _rounded_run(model, ids, 4, torch.float16 if format == "fp16" else torch.bfloat16)
    with replayed(model, format=format, staggered=False):
        got, cache = run(model, ids, steps(4, 28))
    assert rms(got - (exact if format == "split16" else rounded)) <= rms(rounded - exact) + CLOSE
    if format == "split16":  # later layers see what this one put out, read in bf16
        assert_same_states(cache, host_cache, layers=1)
    else:
        eps = torch.finfo(torch.float16 if format == "fp16" else torch.bfloat16).eps
        assert_same_states(cache, rounded_cache, rtol=eps)


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5_text", "kimi_linear"])
def test_bf16_model_is_as_close_to_fp32_as_its_host(family: str) -> None:
    ids = tokens(2, 20)
    exact, _ = run(make(family), ids, steps(4, 20))
    model = make(family, torch.bfloat16)
    host, _ = run(model, ids, steps(4, 20))
    with replayed(model):
        got, cache = run(model, ids, steps(4, 20))
    assert replay_cache(cache).dtype == torch.bfloat16
    assert (got - exact).abs().mean() <= 1.5 * (host - exact).abs().mean()


# ---- pieces ----


@pytest.mark.parametrize("piece", [1, 3, 17, 7, 8, 9])  # the hosts' chunk is 8 here, but for gated delta rules
@pytest.mark.parametrize("family", SHAPES)
def test_prefill_in_pieces_equals_step_by_step(family: str, piece: int) -> None:
    model, ids = make(family), tokens(2, 26)
    want, host_cache = run(model, ids, steps(1, 26))
    sizes = [piece] * (20 // piece) + ([20 % piece] if 20 % piece else []) + [1] * 6
    with replayed(model):
        got, cache = run(model, ids, sizes)
    assert (got - want).abs().max() <= CLOSE
    assert_same_states(cache, host_cache)


@pytest.mark.parametrize("piece", [63, 64, 65])
def test_prefill_around_the_chunk_of_the_delta_rule(piece: int) -> None:
    model, ids = make("qwen3_5_text"), tokens(1, 70)
    want, host_cache = run(model, ids, [70])
    with replayed(model):
        got, cache = run(model, ids, [70 - piece, piece - 2, 1, 1])
    assert (got - want).abs().max() <= CLOSE
    assert_same_states(cache, host_cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_tokens_at_once_equal_one_by_one(family: str) -> None:
    model, ids = make(family), tokens(2, 24)
    want, host_cache = run(model, ids, steps(5, 24))
    with replayed(model, max_tokens=4):
        got, cache = run(model, ids, [5, 4, 1, 3, 2, 4, 4, 1])
    assert (got - want).abs().max() <= CLOSE
    assert_same_states(cache, host_cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_long_continuation_of_a_decoded_cache(family: str) -> None:
    """A second prompt behind generated tokens: more than max_tokens, nothing padded, so the host runs it."""
    model, ids, mask = make(family), tokens(2, 24), left_padded(2, 24)
    want, host_cache = run(model, ids, steps(5, 24), mask)
    with replayed(model):
        got, cache = run(model, ids, [5, 1, 1, 1, 1, 1, 1, 9, 1, 1, 1, 1], mask)
    assert (got - want)[mask.bool()].abs().max() <= CLOSE
    assert_same_states(cache, host_cache)


def _mixed_mask(columns: int, side: str) -> Tensor:
    """Three rows with all, one and none of the new columns; padding before, behind or around the tokens."""
    mask = torch.zeros(3, columns, dtype=torch.long)
    mask[0] = 1
    mask[1, {"left": columns - 1, "right": 0, "around": columns // 2}[side]] = 1
    return mask


@pytest.mark.parametrize(
    ("family", "side", "max_tokens"),
    [(family, "left", 1) for family in FAMILIES if family != "glm5_next"]  # its attention sees padding in its past
    + [*itertools.product(SHAPES, ["right"], [2]), *itertools.product(SHAPES, ["around"], [8])],
)
def test_mixed_rows_equal_each_row_by_itself(family: str, side: str, max_tokens: int) -> None:
    model, rows, T, after = make(family), 3, 5, 6
    prompt = left_padded(rows, 7)
    mask = torch.cat([prompt, torch.ones(rows, 3).long(), _mixed_mask(T, side), torch.ones(rows, after).long()], 1)
    ids = tokens(*mask.shape)
    with replayed(model, max_tokens=max_tokens):
        got, cache = run(model, ids, [7, 1, 1, 1, T] + [1] * after, mask)
    for row in range(rows):
        valid = mask[row].bool()
        want, host_cache = run(model, ids[row : row + 1, valid], steps(int(prompt[row].sum()), int(valid.sum())))
        assert (got[row, valid] - want[0]).abs().max() <= CLOSE
        alone = copy.deepcopy(cache)
        alone.batch_select_indices(torch.tensor([row]))
        assert_same_states(alone, host_cache)


# ---- what generate asks of a cache ----


@pytest.mark.parametrize("family", SHAPES)
def test_beam_search_equals_the_hosts(family: str) -> None:
    model, ids = make(family), tokens(2, 5)
    options = {"max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    want = model.generate(ids, **options)
    with replayed(model):
        assert torch.equal(model.generate(ids, **options), want)


@pytest.mark.parametrize("family", SHAPES)
def test_sampling_with_one_seed_equals_the_hosts(family: str) -> None:
    model, ids = make(family), tokens(2, 5)
    options = {"max_new_tokens": 12, "num_return_sequences": 2, "do_sample": True, "top_k": 20}
    torch.manual_seed(5)
    want = model.generate(ids, **options)
    with replayed(model):
        torch.manual_seed(5)
        assert torch.equal(model.generate(ids, **options), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_speculative_generation_equals_greedy(family: str) -> None:
    """Transformers refuses it for recurrent models. Random ids repeat too rarely, so the prompt repeats itself."""
    model, ids = make(family), tokens(1, 4).repeat(1, 3)
    if cache_name(model) == "cache_params":
        pytest.skip("assisted generation of Transformers 5.17 knows no cache_params, the name in mamba2")
    want = model.generate(ids, max_new_tokens=16, do_sample=False)
    with replayed(model, max_tokens=4):
        got = model.generate(ids, max_new_tokens=16, do_sample=False, prompt_lookup_num_tokens=3)
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match="not supported with stateful"):
        model.generate(ids, max_new_tokens=4, prompt_lookup_num_tokens=3)


def test_more_drafts_than_max_tokens_are_refused() -> None:
    with replayed(make("qwen3_5_text"), max_tokens=3) as model:
        with pytest.raises(ValueError, match=r"crop: cannot take back \d tokens: .* enable\(model, max_tokens=T\)"):
            model.generate(tokens(1, 4).repeat(1, 3), max_new_tokens=16, prompt_lookup_num_tokens=6)


def test_assistant_model_drafts_for_generate() -> None:
    model, assistant, ids = make("qwen3_5_text"), make("nemotron_h"), tokens(1, 8)
    want = model.generate(ids, max_new_tokens=16, do_sample=False)
    with replayed(model, max_tokens=6), replayed(assistant, max_tokens=6):
        assistant.generation_config.num_assistant_tokens = 4
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        got = model.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=assistant)
    assert torch.equal(got, want)


def test_generate_goes_on_from_a_returned_cache() -> None:
    model, ids = make("qwen3_5_text"), tokens(1, 8)
    want = model.generate(ids, max_new_tokens=16, do_sample=False)
    with replayed(model):
        first = model.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
        kept = {cache_name(model): first[cache_name(model)]}
        got = model.generate(first.sequences, max_new_tokens=8, do_sample=False, **kept)
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", SHAPES)
def test_rows_are_selected_repeated_and_reordered(family: str) -> None:
    model, ids = make(family), tokens(3, 20)
    rows = torch.tensor([2, 0, 2, 0, 0, 2])  # of the three rows that the prefill had
    want, _ = run(model, ids[rows], steps(6, 20))
    with replayed(model):
        _, cache = run(model, ids[:, :9], steps(6, 9))
        cache.batch_select_indices(torch.tensor([0, 2]))
        cache.batch_repeat_interleave(3)
        cache.reorder_cache(torch.tensor([3, 0, 4, 1, 2, 5]))
        got, _ = run(model, ids[rows, 9:], [1] * 11, torch.ones(6, 20).long(), cache)
    assert (got - want[:, 9:]).abs().max() <= CLOSE


@pytest.mark.parametrize("family", SHAPES)
def test_copied_cache_goes_its_own_way(family: str) -> None:
    model, ids, other = make(family), tokens(2, 18), tokens(2, 18, seed=1)
    other[:, :9] = ids[:, :9]
    with replayed(model):
        _, cache = run(model, ids[:, :9], steps(4, 9))
        twin = copy.deepcopy(cache)
        for line, its_cache in ((ids, cache), (other, twin)):
            got, _ = run(model, line[:, 9:], [1] * 9, torch.ones_like(line), its_cache)
            want, _ = run(model, line, steps(4, 18))
            assert (got - want[:, 9:]).abs().max() <= CLOSE


@pytest.mark.parametrize("family", SHAPES)
def test_reset_cache_starts_anew(family: str) -> None:
    model, ids = make(family), tokens(2, 12)
    with replayed(model):
        want, _ = run(model, ids, steps(4, 12))
        _, cache = run(model, tokens(2, 9, seed=1), steps(4, 9))
        cache.reset()
        assert replay_cache(cache) is None
        for layer in cache.layers:  # 5.17 zeroes the keys of its attention layers and keeps their number
            if getattr(layer, "is_initialized", False) and layer.keys is not None:
                layer.keys, layer.values = layer.keys[..., :0, :], layer.values[..., :0, :]
        got, _ = run(model, ids, steps(4, 12), cache=cache)
    assert (got - want).abs().max() <= CLOSE


@pytest.mark.parametrize("family", ("mamba2", *SHAPES))
def test_cropped_drafts_leave_no_trace(family: str) -> None:
    model, ids = make(family), tokens(2, 20)
    want, host_cache = run(model, ids, steps(4, 20))
    drafts = tokens(2, 3, seed=1)
    with replayed(model, max_tokens=4):
        _, cache = run(model, ids[:, :4], [4])
        out = []
        for column in range(4, 20):
            line = torch.cat([ids[:, column : column + 1], drafts], 1)
            out.append(forward(model, line, cache, torch.ones(2, column + 4).long())[:, :1])
            cache.crop(-3)
            cache.crop(0)
    assert (torch.cat(out, 1) - want[:, 4:]).abs().max() <= CLOSE
    assert_same_states(cache, host_cache)


@pytest.mark.parametrize("family", SHAPES)
def test_crop_beyond_reach_changes_nothing(family: str) -> None:
    model, ids = make(family), tokens(2, 12)
    want, _ = run(model, ids, steps(4, 12))
    with replayed(model, max_tokens=2):
        _, cache = run(model, ids[:, :9], [4, 1, 2, 2])
        with pytest.raises(ValueError, match=r"crop: cannot take back 3 tokens: .* enable\(model, max_tokens=T\)"):
            cache.crop(-3)
        with pytest.raises(ValueError, match="crop: needs minus the number of tokens to remove, e.g. -3"):
            cache.crop(3)
        got, _ = run(model, ids[:, 9:], [1] * 3, torch.ones_like(ids), cache)
    assert (got - want[:, 9:]).abs().max() <= CLOSE


# ---- one instance, and back ----


def test_host_copies_are_dropped() -> None:
    with replayed(make("zamba2")) as model:
        _, cache = run(model, tokens(2, 8), steps(5, 8))
    for layer in cache.layers:
        assert isinstance(layer, ReplayLayer)
        assert {name for name, x in vars(layer).items() if isinstance(x, Tensor)} <= {"keys", "values"}
    assert replay_cache(cache).num_slots == 2
    assert replay_cache(DynamicCache()) is None and replay_cache(None) is None


def test_only_the_instance_is_hooked() -> None:
    model, other = make("bamba"), make("bamba")
    before = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    with replayed(model):
        assert not any("forward" in module.__dict__ for module in other.modules())
        enable(model, window=7)  # again, other options
        _, cache = run(model, tokens(1, 5), [5])
        assert replay_cache(cache).window == 7
        assert sum("forward" in module.__dict__ for module in model.modules()) == 3  # two mixers and the decoder
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == before
    assert "_is_stateful" not in model.__dict__


def test_model_moved_after_enable_keeps_records_in_its_new_dtype() -> None:
    model, ids = make("qwen3_5_text"), tokens(1, 8)
    with replayed(model):
        _, cache = run(model.to(torch.bfloat16), ids, steps(4, 8))
    assert replay_cache(cache).dtype == torch.bfloat16


def test_copied_model_runs_its_own_weights() -> None:
    model, ids = make("nemotron_h"), tokens(1, 12)
    with replayed(model):
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()
        got, _ = run(twin, ids, steps(4, 12))
    want, _ = run(make("nemotron_h"), ids, steps(4, 12))
    assert (got - want).abs().max() <= CLOSE


@pytest.mark.parametrize("family", SHAPES)
def test_cache_filled_before_enable_is_taken_over(family: str) -> None:
    model, ids = make(family), tokens(2, 16)
    want, _ = run(model, ids, steps(4, 16))
    _, cache = run(model, ids[:, :7], steps(4, 7))
    with replayed(model):
        got, _ = run(model, ids[:, 7:], [1] * 9, torch.ones_like(ids), cache)
    assert (got - want[:, 7:]).abs().max() <= CLOSE


def test_model_makes_its_own_cache_and_takes_embeddings() -> None:
    model, ids = make("qwen3_5_text"), tokens(2, 12)
    want, _ = run(model, ids, [12])
    with replayed(model):
        out = model(inputs_embeds=model.get_input_embeddings()(ids[:, :7]))
        cache = out[cache_name(model)]
        got, _ = run(model, ids[:, 7:], [1] * 5, torch.ones_like(ids), cache)
        assert replay_cache(cache) is not None
        without = model(ids, use_cache=False)
    assert (got - want[:, 7:]).abs().max() <= CLOSE
    assert (without.logits.log_softmax(-1) - want).abs().max() <= CLOSE


def test_pieces_return_hidden_states_and_tuples() -> None:
    model, ids = make("bamba"), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 5:8] = 0
    with replayed(model):
        _, cache = run(model, ids[:, :4], [4], mask[:, :4])
        inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1)[:, 4:], cache_name(model): cache}
        twin = copy.deepcopy(cache)
        whole = model(ids[:, 4:], output_hidden_states=True, **inputs)
        as_tuple = model(ids[:, 4:], return_dict=False, **(inputs | {cache_name(model): twin}))
    assert {tuple(x.shape) for x in whole.hidden_states} == {(2, 5, 64)}
    assert torch.equal(as_tuple[0], whole.logits)


# ---- errors ----


def test_unsupported_model_type_is_named() -> None:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    with pytest.raises(
        ValueError, match=r"enable: model type 'llama' has no recurrent layer .*supported are bamba, falcon"
    ):
        enable(LlamaForCausalLM(LlamaConfig(**sizes)).eval())


def test_every_family_is_in_the_error_message() -> None:
    from replayssm.integrations.transformers.families import MODEL_TYPES

    assert MODEL_TYPES.split(", ") == sorted(name.removesuffix("_text") for name in CONFIGS)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"format": "fp7"}, "unknown format 'fp7'"), ({"window": 0}, "window must be"), ({"max_tokens": 0}, "max_tokens")],
)
def test_unknown_options_are_refused_and_nothing_is_hooked(options: dict[str, object], sentence: str) -> None:
    model = make("mamba2")
    with pytest.raises(ValueError, match=sentence):
        enable(model, **options)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_unsupported_dims_are_refused() -> None:
    with pytest.raises(ValueError, match="G key groups dividing H value heads; got"):
        enable(make("mamba2", n_groups=3))
    with pytest.raises(ValueError, match="the convolution must be followed by silu; got gelu"):
        enable(make("qwen3_5_text", hidden_act="gelu"))


def test_training_and_gradients_are_refused() -> None:
    with torch.inference_mode(False):
        model, ids = make("mamba2"), tokens(1, 4)
        with pytest.raises(ValueError, match=r"training mode: call model.eval\(\) first"):
            enable(model.train())
        with replayed(model.eval()):
            with torch.no_grad():
                _, cache = run(model, ids, [4])
            with pytest.raises(ValueError, match="decoding with a cache has no gradients"):
                run(model, ids, [4], cache=cache)
            model(ids).logits.sum().backward()  # a full pass without a cache of ours still has its gradients
            assert all(parameter.grad is not None for parameter in model.parameters())
            with pytest.raises(ValueError, match="decoding with a cache has no gradients"):
                run(model.train(), ids, [4])


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5_text"])
def test_static_caches_are_refused(family: str) -> None:
    with replayed(make(family)) as model:
        cache = StaticCache(config=model.config, max_cache_len=32)
        with pytest.raises(ValueError, match=r"must be a DynamicCache\(config=model.config\); got StaticCache of"):
            run(model, tokens(1, 4), [4], cache=cache)
        with pytest.raises(ValueError, match=r"got DynamicCache of no layers"):
            run(model, tokens(1, 4), [4], cache=DynamicCache())


def test_another_number_of_rows_is_refused() -> None:
    with replayed(make("mamba2")) as model:
        _, cache = run(model, tokens(2, 4), [4])
        with pytest.raises(ValueError, match="the cache holds 2 rows and the input brings 3"):
            run(model, tokens(3, 1), [1], cache=cache)


def test_replayed_cache_is_refused_without_enable() -> None:
    model = make("qwen3_5_text")
    with replayed(model):
        _, cache = run(model, tokens(2, 5), [4, 1])
    with pytest.raises(ValueError, match="checkpoint and ring, and this model is not enabled"):
        run(model, tokens(2, 1), [1], torch.ones(2, 6).long(), cache)


def test_outputs_that_pieces_cannot_join_are_refused() -> None:
    model, ids = make("bamba"), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with replayed(model):
        _, cache = run(model, ids[:, :4], [4], mask[:, :4])
        inputs = {"attention_mask": mask, cache_name(model): cache}
        with pytest.raises(ValueError, match="attentions cannot be returned for a forward that is run in pieces"):
            model(ids[:, 4:], output_attentions=True, **inputs)
