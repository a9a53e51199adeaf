"""replayssm.generate: drafts change how fast tokens come, not which (greedy) or how they are distributed (sampling)."""

import copy
import json
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from test_transformers import CLOSE, SHAPES, _no_gradients, forward, left_padded, replayed, tokens
from tiny_hosts import FAMILIES, VOCAB, make
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import replayssm
from replayssm.integrations.transformers.drafts import (
    Drafts,
    HeadDraft,
    Levels,
    ModelDraft,
    News,
    NGram,
    nodes,
    parents,
)
from replayssm.integrations.transformers.generation import Rounds, Sampler, generate, verify
from replayssm.integrations.transformers.mtp import MTPHead, load_head
from replayssm.integrations.transformers.ragged import RaggedBatch

__all__ = ["_no_gradients"]
TREE = (2, 2, 1)


def similar(model: PreTrainedModel, noise: float = 0.05) -> PreTrainedModel:
    """A draft model that is right some of the time."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for parameter in twin.parameters():
        if parameter.ndim > 1:
            parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return twin


def prompts() -> tuple[Tensor, Tensor]:
    """Three rows that repeat themselves, padded on the left by 0, 2 and 4 columns."""
    return tokens(3, 4).repeat(1, 3), left_padded(3, 12)


def plain_greedy(model: PreTrainedModel, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    return model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)


# ---- greedy ----


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "glm5_next"])
def test_trees_of_a_draft_model_equal_plain_greedy(family: str) -> None:
    """Rows accept different counts; both models are of the family, so both kinds of layer see trees."""
    model, (ids, mask) = make(family), prompts()
    want = plain_greedy(model, ids, mask, 16)
    with replayed(model), replayed(similar(make(family))) as draft:
        got = generate(model, ids, mask, draft=draft, tree=TREE, max_new_tokens=16)
    assert torch.equal(got.sequences, want)
    assert 0 < got.accepted.sum() < 3 * got.rounds.sum()
    assert len(set(zip(got.rounds.tolist(), got.accepted.tolist(), strict=True))) > 1


@pytest.mark.parametrize("draft", ["plain", "ngram", "ngram tree", "model", "attention"])
@pytest.mark.parametrize("family", SHAPES)
def test_every_source_equals_plain_greedy(family: str, draft: str) -> None:
    model, (ids, mask) = make(family), prompts()
    want = plain_greedy(model, ids, mask, 20)
    twin = similar(model)
    with replayed(model), replayed(twin, window=7):
        source = {
            "plain": None,
            "ngram": NGram((1, 1, 1), least=1),
            "ngram tree": NGram((3, 2), least=1),
            "model": twin,
            "attention": llama(),
        }[draft]
        got = generate(model, ids, mask, draft=source, tree=3, max_new_tokens=20)
    assert torch.equal(got.sequences, want)
    assert got.lengths.tolist() == [20] * 3
    if draft == "plain":
        assert got.acceptance_length == 1 and not got.drafted.any()


def llama(vocabulary: int = VOCAB) -> LlamaForCausalLM:
    """A draft model without recurrent layers."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=vocabulary)).eval()


@pytest.mark.parametrize("family", SHAPES)
def test_logits_states_and_windows_in_every_round(family: str) -> None:
    """Against the host, one token at a time; tiny models can give equal tokens from a wrong state."""
    model, (ids, mask) = make(family), prompts()
    text, whole = ids, mask
    cache, states, logprobs = DynamicCache(config=model.config), [], []
    new = ids
    for _ in range(18):
        out = forward(model, new, cache, whole)
        logprobs.append(out[:, -1])
        kept = [layer for layer in cache.layers if getattr(layer, "recurrent_states", {}).get(0) is not None]
        states.append([(layer.recurrent_states[0].clone(), layer.conv_states[0].clone()) for layer in kept])
        new = out[:, -1:].argmax(2)
        text, whole = torch.cat([text, new], 1), torch.cat([whole, torch.ones_like(new)], 1)
    with replayed(model), replayed(similar(make(family))) as draft:
        batch = RaggedBatch(model, 1 + nodes(TREE))
        rounds = Rounds(batch, ModelDraft(draft, TREE), Sampler(0, 0, 1, None), ids, mask)
        made = torch.zeros(3, dtype=torch.long)
        for new, counts, logits in rounds:
            for b, count in enumerate(counts.tolist()):
                at = int(made[b])
                for j in range(min(count, 18 - at)):
                    assert new[b, j] == text[b, 12 + at + j]
                    assert (logits[b, j].log_softmax(-1) - logprobs[at + j][b]).abs().max() <= CLOSE
            made += counts
            for b, count in enumerate(made.tolist()):  # the newest token is not in the state yet
                if count > 18:
                    rounds.alive[b] = False
                    continue
                for layer, (state, window) in enumerate(states[count - 1]):
                    ours = batch.rows.recipe.turned(batch.rows.cache.materialize(layer, batch.rows.slots[b : b + 1]))
                    assert (ours[0] - state[b]).norm() <= 1e-5 * state[b].norm()
                    ours = batch.rows.cache.conv_window(layer, batch.rows.slots[b : b + 1])[0]
                    want = window[b, :, -ours.shape[1] :]
                    assert (ours - want).norm() <= 1e-5 * want.norm()
        assert made.min() > 18


def test_a_draft_model_that_is_the_model_is_always_right() -> None:
    """Its own tree and its memory of what was accepted are then right in every round, too."""
    model, (ids, mask) = make("qwen3_5_text"), prompts()
    with replayed(model), replayed(make("qwen3_5_text")) as twin:
        chain = generate(model, ids, mask, draft=twin, tree=4, max_new_tokens=21)
        tree = generate(model, ids, mask, draft=twin, tree=(2, 1, 2), max_new_tokens=21)
    assert chain.acceptance_length == 5 and chain.rounds.tolist() == [4] * 3 and chain.drafted.tolist() == [16] * 3
    assert tree.acceptance_length == 4 and tree.accepted.tolist() == [15] * 3


# ---- a prediction head ----


@pytest.fixture
def headed(tmp_path) -> Callable[[str], PreTrainedModel]:
    """Makes a model whose folder holds a prediction head."""

    def with_head(family: str) -> PreTrainedModel:
        model = make(family)
        torch.manual_seed(2)
        MTPHead(model.model).save(tmp_path / "mtp.safetensors", torch.float32)
        model.name_or_path = str(tmp_path)
        return model

    return with_head


@pytest.mark.parametrize("tree", [3, TREE])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_prediction_head_equals_plain_greedy(headed: Callable, family: str, tree: object) -> None:
    model, (ids, mask) = headed(family), prompts()
    want = plain_greedy(model, ids, mask, 12)
    with replayed(model):
        got = generate(model, ids, mask, draft="mtp", tree=tree, max_new_tokens=12)
    assert torch.equal(got.sequences, want)
    assert (got.drafted % nodes((1,) * tree if isinstance(tree, int) else tree) == 0).all()


def test_a_head_is_found_in_the_shards_of_a_checkpoint(tmp_path) -> None:
    """Only those that the index names are opened."""
    model = make("qwen3_next")
    empty = torch.empty
    with mock.patch.object(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(torch.nan)):
        head = MTPHead(model.model)
    assert all(value.isfinite().all() for value in head.state_dict().values())
    head.save(tmp_path / "model-2.safetensors", torch.float32)
    (tmp_path / "model-1.safetensors").write_bytes(b"not opened")
    names = {f"mtp.{name}": "model-2.safetensors" for name in head.state_dict()} | {
        "lm_head.weight": "model-1.safetensors"
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    loaded = load_head(model.model, tmp_path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in head.state_dict().items())


def test_prediction_head_goes_on_as_if_it_had_read_the_text_at_once(headed: Callable) -> None:
    """Its ragged cache, rejected drafts and left padding leave no trace in what it proposes."""
    model, (ids, mask) = headed("qwen3_5_text"), prompts()
    torch.manual_seed(2)
    head = MTPHead(model.model).eval()
    seen: list[tuple[News, Drafts]] = []

    class Watched(HeadDraft):
        def propose(self, news: News) -> Drafts:
            seen.append((news, super().propose(news)))
            return seen[-1][1]

    with replayed(model):
        got = generate(model, ids, mask, draft=Watched(head, model, TREE), max_new_tokens=9)
    assert len(seen) >= 4
    for b in range(3):
        text = ids[b, mask[b].bool()].tolist()
        for news, drafts in seen:
            text += news.tokens[b, : news.counts[b]].tolist()
            row = torch.tensor([text])
            hidden = model.model(row[:, :-1], use_cache=False).last_hidden_state
            fresh = HeadDraft(head, model, TREE)
            fresh.start(row[:, :-1], torch.ones_like(row[:, :-1]), None, None)
            want = fresh.propose(News(row[:, -1:], torch.tensor([1]), hidden))
            if news.counts[b]:
                assert torch.equal(drafts.tokens[b], want.tokens[0])
    assert got.lengths.tolist() == [9] * 3


# ---- n-grams ----


def test_ngrams_continue_earlier_text() -> None:
    source = NGram((2, 1, 1), most=3, least=1)
    #                        5 6 7 | 5 6 8 | 5 6        longest and newest match first: 8 5 6, then 7 5 6
    text = torch.tensor([[5, 6, 7, 5, 6, 8, 5]])
    source.start(text, torch.ones_like(text), None, None)
    drafts = source.propose(News(torch.tensor([[6]]), torch.tensor([1]), None))
    assert drafts.tokens.tolist() == [[8, 5, 6, 7, 5, 6]]
    assert drafts.parent.tolist() == [[-1, 0, 1, -1, 3, 4]]
    drafts = source.propose(News(torch.tensor([[9]]), torch.tensor([0]), None))
    assert drafts.lengths.tolist() == [0]  # the row has ended


def test_ngrams_repeat_a_text_that_repeats_itself_and_read_a_corpus() -> None:
    source = NGram((1,) * 6, corpus=[[40, 41, 42, 43]])
    text = torch.tensor([[0, 7, 8, 7, 8], [0, 0, 9, 40, 41]])
    source.start(text[:, :-1], torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]), None, None)
    drafts = source.propose(News(text[:, -1:], torch.tensor([1, 1]), None))
    assert drafts.tokens[0].tolist() == [7, 8, 7, 8, 7, 8]
    assert drafts.tokens[1, : drafts.lengths[1]].tolist() == [42, 43]


def test_tree_shapes() -> None:
    assert parents((2, 2, 1)) == [-1, -1, 0, 0, 1, 1, 2, 3, 4, 5] and nodes((2, 2, 1)) == 10
    assert parents((1, 1, 1)) == [-1, 0, 1] and nodes((1, 1, 1)) == 3


# ---- sampling ----


def assert_same_distribution(counts: Tensor, p: Tensor) -> None:
    """Chi-square of counts [n] against p [n]: within five standard deviations of its mean."""
    assert not counts[p == 0].any()
    counts, p = counts[p > 0].double(), p[p > 0].double()
    expected = p * counts.sum()
    chi, freedom = float(((counts - expected) ** 2 / expected).sum()), len(p) - 1
    assert chi < freedom + 5 * (2 * freedom) ** 0.5, (chi, freedom)


@pytest.mark.parametrize("shape", [(1,), (3,), (1, 1), (2, 2), (4, 2), "chosen"])
def test_verify_keeps_the_models_distribution(shape: object) -> None:
    """A model and a draft that know the last token only, 60,000 rows: the two tokens after the newest one."""
    rows, V, generator = 60_000, 5, torch.Generator().manual_seed(0)
    p, q = torch.randn(2, V, V, generator=generator).mul(1.5).softmax(2)
    p[:, 4] = 0  # what the model never says, the draft may
    p, q[:, 3] = p / p.sum(1, keepdim=True), 0
    q = q / q.sum(1, keepdim=True)
    alive, root = torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.long)
    if shape == "chosen":
        fixed = torch.tensor([2, 4, 0, 1, 1, 3]).expand(rows, -1)
        parent = torch.tensor([-1, -1, 0, 0, 1, -1]).expand(rows, -1)
        drafts = Drafts(fixed, parent, torch.full((rows,), 6), None)
    else:
        levels = Levels(shape, rows, lambda x: x, generator)
        newest = root[:, None]
        while not levels.done:
            newest = levels.choose(q[newest])
        drafts = levels.drafts(alive)
    scores = p[torch.cat([root[:, None], drafts.tokens], 1)]
    path, last = verify(drafts, alive, scores, False, generator)
    count = (path >= 0).sum(1)
    accepted = drafts.tokens.gather(1, (path[:, 1:] - 1).clamp(min=0))
    first = torch.where(count > 1, accepted[:, 0], last)
    second = torch.where(count > 2, accepted[:, min(1, accepted.shape[1] - 1)], last)
    later = torch.multinomial(p[first], 1, generator=generator)[:, 0]
    second = torch.where(count == 1, later, second)
    joint = torch.bincount(first * V + second, minlength=V * V)
    assert_same_distribution(joint, (p[0][:, None] * p).flatten())
    assert (count > 1).any()


@pytest.mark.parametrize("draft", ["ngram", "model", "tree"])
def test_sampled_texts_have_the_models_distribution(draft: str) -> None:
    """Three tokens of at most three choices each, 600 rows, against the model's own probabilities of all 27 texts."""
    model, ids = make("qwen3_5_text"), tokens(1, 4).repeat(1, 2)
    limits = {"temperature": 1.3, "top_k": 3}
    probability: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, before in probability.items():
            logits = model(torch.cat([ids, torch.tensor([text], dtype=torch.long)], 1)).logits[0, -1] / 1.3
            top = logits.topk(3)
            for token, p in zip(top.indices.tolist(), top.values.softmax(0).tolist(), strict=True):
                longer[(*text, token)] = before * p
        probability = longer
    texts = list(probability)
    twin = similar(model, 0.3)
    with replayed(model), replayed(twin):
        source = {"ngram": NGram((2, 1), least=1), "model": ModelDraft(twin, (1, 1)), "tree": ModelDraft(twin, (2, 2))}
        generator = torch.Generator().manual_seed(4)
        got = generate(model, ids.repeat(600, 1), draft=source[draft], max_new_tokens=3, generator=generator, **limits)
    counts = torch.zeros(27)
    for row in got.sequences[:, 8:].tolist():
        counts[texts.index(tuple(row))] += 1
    assert_same_distribution(counts, torch.tensor([probability[text] for text in texts]))
    assert draft == "ngram" or 0 < got.accepted.sum() < got.drafted.sum()


def test_one_seed_gives_one_text() -> None:
    model, (ids, mask) = make("nemotron_h"), prompts()
    with replayed(model), replayed(similar(model)) as draft:
        a, b, c = (
            generate(
                model, ids, mask, draft=draft, tree=(2, 1), max_new_tokens=10, temperature=1.0, top_p=0.9,
                generator=torch.Generator().manual_seed(seed),
            ).sequences
            for seed in (1, 1, 2)
        )  # fmt: skip
    assert torch.equal(a, b) and not torch.equal(a, c)


# ---- what a generation is ----


class Collect:
    """A streamer."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_rows_end_at_an_end_token_and_stream_as_they_are_made() -> None:
    model, (ids, mask) = make("nemotron_h"), prompts()
    want = plain_greedy(model, ids, mask, 18)[:, 12:]
    end = int(want[1, 6])
    ends = [next((i + 1 for i, t in enumerate(row) if t == end), 18) for row in want.tolist()]
    with replayed(model), replayed(similar(model)) as draft:
        got = generate(model, ids, mask, draft=draft, max_new_tokens=18, eos_token_id=end, output_logits=True)
        assert got.lengths.tolist() == ends and min(ends) < 18
        for b, n in enumerate(ends):
            assert torch.equal(got.sequences[b, 12 : 12 + n], want[b, :n])
            assert (got.sequences[b, 12 + n :] == 0).all()  # padding
            assert torch.equal(got.logits[b, :n].argmax(1), want[b, :n]) and got.logits[b, n:].isnan().all()
        assert got.cache.num_committed.shape == (3,)
        streamer = Collect()
        one = generate(model, ids[:1], mask[:1], draft=draft, max_new_tokens=18, eos_token_id=end, streamer=streamer)
        assert streamer.ended and streamer.parts[0] == ids[0].tolist()
        assert sum(streamer.parts[1:], []) == one.sequences[0, 12:].tolist()
        assert len(streamer.parts) == 2 + int(one.rounds[0])
        stop = want[0, :5].tolist()
        stopped = generate(
            model, ids[:1], draft=draft, max_new_tokens=18,
            stopping_criteria=lambda text, scores: torch.tensor([text[0, -5:].tolist() == stop]),
        )  # fmt: skip
        assert stopped.sequences[0, 12:].tolist() == stop


def test_generate_is_a_name_of_the_package() -> None:
    assert replayssm.generate is generate
    with pytest.raises(AttributeError, match="has no attribute 'generat'"):
        _ = replayssm.generat


# ---- Transformers' own generate ----


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5_text"])
def test_assistant_takes_drafts_back_across_its_flushes(family: str) -> None:
    """No draft is held back for lack of confidence, so most are wrong, and taken back after any number of flushes."""
    model, ids = make(family), tokens(1, 8)
    want = model.generate(ids, max_new_tokens=40, do_sample=False)
    with replayed(model, max_tokens=6), replayed(similar(model), max_tokens=6) as assistant:
        assistant.generation_config.assistant_confidence_threshold = 0.0
        assistant.generation_config.num_assistant_tokens = 5
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        got = model.generate(ids, max_new_tokens=40, do_sample=False, assistant_model=assistant)
        assert torch.equal(got, want)
        torch.manual_seed(0)
        sampled = model.generate(ids, max_new_tokens=20, do_sample=True, top_k=5, assistant_model=assistant)
        assert sampled.shape == (1, 28)


# ---- errors ----


def refused(sentence: str, *args: object, **options: object) -> None:
    with pytest.raises(ValueError, match=sentence):
        generate(*args, **options)


def test_what_cannot_be_is_refused(tmp_path) -> None:
    model, (ids, mask) = make("qwen3_5_text"), prompts()
    refused(r"recurrent layers keep states that can't go back: call enable\(model\) first", model, ids, draft="ngram")
    with replayed(make("glm5_next")) as glm:
        refused("glm5_next models choose the keys", glm, ids, draft="ngram")
    with replayed(model):
        for tree in (0, (), (2, 0), (1.5,), -3):
            refused(
                r"tree must be a number of drafts in a row, 1 or more, or children",
                model,
                ids,
                draft="ngram",
                tree=tree,
            )
        refused('draft must be "ngram", "mtp", a model', model, ids, draft="bigram")
        refused("temperature must be 0", model, ids, temperature=-1.0)
        refused("max_new_tokens must be 1 or more; got 0", model, ids, max_new_tokens=0)
        refused("1 in its last column; pad prompts on the left", model, ids, mask.flip(1))
        refused(r"input_ids must be \[B, L\] with at least one token; got \[3, 0\]", model, ids[:, :0])
        refused("a streamer takes one row; got 3", model, ids, streamer=Collect())
        refused("the model has 83 tokens and the draft model 84", model, ids, draft=llama(84))
        refused(r"call enable\(model\) first", model, ids, draft=make("nemotron_h"))
        model.name_or_path = str(tmp_path)
        refused(r"needs the tensors mtp\.\* of a head with one layer; none are there", model, ids, draft="mtp")
        MTPHead(make("qwen3_5_text", hidden_size=32).model).save(tmp_path / "mtp.safetensors", torch.float32)
        refused(r"these differ: fc.weight", model, ids, draft="mtp")
        model.decoder_config = model.model.config._attn_implementation
        model.model.config._attn_implementation = "flash_attention_2"
        refused("an attention that takes a mask, sdpa or eager; got flash_attention_2", model, ids, draft="ngram")
        model.model.config._attn_implementation = "eager"
    with replayed(make("nemotron_h")) as nemotron:
        refused("model type 'nemotron_h' has no multi-token-prediction head", nemotron, ids, draft="mtp")


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path) -> None:
    from tokenizers import Tokenizer, models

    model, draft = make("qwen3_5_text"), llama()
    for name, words, owner in (("a", "xyz", model), ("b", "xzy", draft)):
        (tmp_path / name).mkdir()
        Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)})).save(
            str(tmp_path / name / "tokenizer.json")
        )
        owner.name_or_path = str(tmp_path / name)
    with replayed(model):
        refused(
            r"the model's tokenizer; 2 tokens differ between .*a/tokenizer.json and", model, tokens(1, 5), draft=draft
        )
        (tmp_path / "b" / "tokenizer.json").write_text((tmp_path / "a" / "tokenizer.json").read_text())
        assert generate(model, tokens(1, 5), draft=draft, max_new_tokens=3).lengths.tolist() == [3]


def test_an_error_in_a_forward_leaves_the_batch_as_it_was() -> None:
    model, (ids, mask) = make("qwen3_5_text"), prompts()
    with replayed(model):
        batch = RaggedBatch(model, 3)
        batch.prefill(ids, mask)
        step = tokens(3, 3, seed=5)
        want = batch.step(step, torch.tensor([3, 2, 1]))
        batch.forget()
        with pytest.raises(ValueError, match="tokens must be between 1 and max_tokens = 3, what the ring"):
            batch.step(tokens(3, 4), torch.tensor([4, 4, 4]))
        with pytest.raises(ValueError, match="parent must come before it"):
            batch.step(step, torch.tensor([3, 3, 3]), torch.tensor([[-1, 2, 0]] * 3))
        got = batch.step(step, torch.tensor([3, 2, 1]))
    for b, n in enumerate((3, 2, 1)):
        assert torch.equal(got[b, :n], want[b, :n])
