"""generate: speculative decoding of a Transformers model, of batches whose rows accept different numbers of drafts.

    a round   drafts follow the newest token of every row: a chain, or a tree
              one forward of all of them gives the model's distribution after each       (RaggedBatch.step)
              from the newest token down, a draft is accepted or not                     (verify)
              accepted tokens count, and one more, drawn where the path ended            (RaggedBatch.commit)

Greedy, the tokens are those of plain greedy decoding. Sampling, their distribution is that of plain sampling, whatever
the drafts are: rejection sampling after Leviathan et al. (2023), for siblings one after the other as in SpecInfer
(Miao et al., 2024). A round gives 1 to depth + 1 tokens per row.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from replayssm import ReplayCache
from replayssm.integrations.transformers.adapter import decoder_of
from replayssm.integrations.transformers.drafts import (
    Drafts,
    DraftSource,
    HeadDraft,
    ModelDraft,
    News,
    NGram,
    Shape,
    nodes,
)
from replayssm.integrations.transformers.mtp import load_head
from replayssm.integrations.transformers.ragged import RaggedBatch


@dataclass(frozen=True)
class Generation:
    """What generate made of B prompts.

    Attributes:
        sequences: [B, L + N] prompts and new tokens, padded at their end.
        lengths: [B] new tokens of every row.
        rounds: [B] forwards of the model that a row took part in after its prefill.
        drafted: [B] draft tokens that were verified; accepted: [B] those that counted.
        seconds: from the end of prefill (the draft model's too) to the last token.
        logits: [B, N, vocabulary] what each new token was chosen from, if asked for; NaN behind a row's end.
        cache: the model's ReplayCache, one slot per row; None for a model without recurrent layers.
    """

    sequences: Tensor
    lengths: Tensor
    rounds: Tensor
    drafted: Tensor
    accepted: Tensor
    seconds: float
    logits: Tensor | None
    cache: ReplayCache | None

    @property
    def acceptance_length(self) -> float:
        """New tokens per forward, mean over the batch: 1 without drafts, at most depth + 1."""
        made = int((self.lengths - (self.lengths > 0).long()).sum())  # the first token is prefill's
        return made / max(1, int(self.rounds.sum()))


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    draft: "str | PreTrainedModel | DraftSource | None" = None,
    tree: int | Sequence[int] = 4,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    stopping_criteria: Callable[..., Any] | None = None,
    streamer: Any = None,
    output_logits: bool = False,
) -> Generation:
    """Continue prompts, with drafts verified in one forward each round.

    Args:
        model: an enabled model (`enable(model)`); its window and format hold, the ring is made to fit the drafts.
        input_ids: [B, L], padded on the left; attention_mask: [B, L], 0 where padding is. None: no padding.
        draft: None (plain decoding), "ngram" (the row's own text), "mtp" (the head in the model's folder), a smaller
            model with the same tokenizer (enabled, if it has recurrent layers), or a DraftSource of your own.
        tree: n for a chain of n drafts, (n_1, n_2, ...) for a tree whose nodes at depth i have n_i children; a
            DraftSource of your own has its own shape.
        max_new_tokens: per row.
        temperature: 0 is greedy. top_k, top_p: as in Transformers; 0 and 1 mean no limit.
        generator: of the sampling, on the model's device.
        eos_token_id: ends a row; None: what the model's generation_config says, () for nothing.
        stopping_criteria: Transformers' criteria, asked after every new token of every row.
        streamer: Transformers' streamer, for one row.
        output_logits: keep what every token was chosen from.

    Raises:
        ValueError: the model is not enabled, the tree or the prompts cannot be, or the draft model has other tokens.
    """
    ids, mask = _checked_prompts(input_ids, attention_mask, streamer, max_new_tokens)
    source = draft_source(model, draft, tree)
    sampler = Sampler(temperature, top_k, top_p, generator)
    batch = RaggedBatch(model, 1 + (nodes(source.shape) if source else 0))
    ends = _ends(model, eos_token_id)
    with torch.no_grad():
        rounds = Rounds(batch, source, sampler, ids, mask)
        return _collect(rounds, ids, ends, max_new_tokens, stopping_criteria, streamer, output_logits)


# ---- what was asked for ----


def _checked_prompts(ids: Tensor, mask: Tensor | None, streamer: Any, max_new_tokens: int) -> tuple[Tensor, Tensor]:
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(f"generate: input_ids must be [B, L] with at least one token; got {list(ids.shape)}.")
    mask = torch.ones_like(ids) if mask is None else mask.to(ids.device)
    if mask.shape != ids.shape or not bool(mask[:, -1].all()):
        raise ValueError(
            "generate: attention_mask must be [B, L] like input_ids and 1 in its last column; pad prompts on the left "
            "(tokenizer.padding_side = 'left')."
        )
    if streamer is not None and len(ids) != 1:
        raise ValueError(f"generate: a streamer takes one row; got {len(ids)}. Leave it out, or generate row by row.")
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens must be 1 or more; got {max_new_tokens}.")
    return ids, mask


def tree_shape(tree: int | Sequence[int]) -> Shape:
    """n drafts in a row, or children per depth, as a tuple.

    Raises:
        ValueError: a number below 1, or none.
    """
    shape = (1,) * tree if isinstance(tree, int) else tuple(tree)
    if not shape or not all(isinstance(n, int) and n >= 1 for n in shape):
        raise ValueError(
            f"generate: tree must be a number of drafts in a row, 1 or more, or children per depth, such as (3, 2, 1); "
            f"got {tree!r}."
        )
    return shape


def draft_source(model: PreTrainedModel, draft: Any, tree: int | Sequence[int]) -> DraftSource | None:
    """The source that `draft` names.

    Raises:
        ValueError: there is none, or its tokens are not the model's.
    """
    if draft is None:
        return None
    if not isinstance(draft, str | PreTrainedModel):
        return draft
    shape = tree_shape(tree)
    if draft == "ngram":
        return NGram(shape)
    if draft == "mtp":
        return HeadDraft(load_head(decoder_of(model), Path(model.name_or_path)), model, shape)
    if isinstance(draft, str):
        raise ValueError(f'generate: draft must be "ngram", "mtp", a model or a DraftSource; got {draft!r}.')
    check_same_tokens(model, draft)
    return ModelDraft(draft, shape)


def check_same_tokens(model: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Refuse a draft model whose token ids mean something else, as far as both models tell, or that is elsewhere."""
    if draft.device != model.device:
        raise ValueError(f"generate: the draft model must be on {model.device} with the model; got {draft.device}.")
    sizes = [m.get_output_embeddings().weight.shape[0] for m in (model, draft)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"generate: the draft model must have the model's tokenizer; the model has {sizes[0]} tokens and the draft "
            f"model {sizes[1]}. Train or choose a draft model with the same vocabulary."
        )
    files = [Path(m.name_or_path or ".") / "tokenizer.json" for m in (model, draft)]
    if files[0] != files[1] and all(file.is_file() for file in files):
        from tokenizers import Tokenizer

        ours, theirs = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
        if ours != theirs:
            other = sorted(word for word in ours.keys() | theirs.keys() if ours.get(word) != theirs.get(word))
            raise ValueError(
                f"generate: the draft model must have the model's tokenizer; {len(other)} tokens differ between "
                f"{files[0]} and {files[1]}, {other[0]!r} among them. Train or choose a draft model with the same "
                "vocabulary."
            )


def _ends(model: PreTrainedModel, given: int | Sequence[int] | None) -> set[int]:
    if given is None:
        config = getattr(model, "generation_config", None)
        given = None if config is None else config.eos_token_id
    return set() if given is None else {given} if isinstance(given, int) else set(given)


class Sampler:
    """How a token is chosen from logits."""

    def __init__(self, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None) -> None:
        if temperature < 0 or not 0 < top_p <= 1 or top_k < 0:
            raise ValueError(
                "generate: temperature must be 0 (greedy) or more, top_p in (0, 1] and top_k 0 (no limit) or more; got "
                f"{temperature}, {top_p}, {top_k}."
            )
        self.greedy, self.generator = temperature == 0, generator
        self._warp = LogitsProcessorList()
        if not self.greedy and temperature != 1:
            self._warp.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            self._warp.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self._warp.append(TopPLogitsWarper(top_p))

    def probabilities(self, logits: Tensor) -> Tensor:
        """[..., vocabulary] in fp32, temperature and limits applied."""
        flat = logits.float().flatten(0, -2)
        return self._warp(None, flat).softmax(-1).view(logits.shape)

    def draw(self, probabilities: Tensor) -> Tensor:
        """One token per row: [B, vocabulary] -> [B]."""
        return torch.multinomial(probabilities, 1, generator=self.generator).squeeze(1)


# ---- the verdict on drafts ----


def verify(
    drafts: Drafts, alive: Tensor, scores: Tensor, greedy: bool, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Which drafts are accepted, and the token after them.

    A draft x of the accepted node's children is accepted with probability min(1, p(x) / q(x)); after a rejection p
    becomes what q did not cover, max(0, p - q) normalised, and the next sibling is tried. q is the distribution x was
    drawn from, or 1 for x where it was chosen without chance. Then the last p gives one more token, so that every
    token is distributed as p was. Greedy is the case of p = 1 for the most probable token.

    Args:
        alive: bool [B], rows that go on.
        scores: [B, 1 + M, vocabulary] of the newest token and of every draft: logits if greedy, else probabilities.

    Returns:
        path [B, 1 + M] in the step's tokens (0 is the newest token, draft j is 1 + j), padded with -1, and the token
        after it [B].
    """
    rows = torch.arange(len(scores), device=scores.device)
    best = scores.argmax(2) if greedy else None
    path = torch.full(scores.shape[:2], -1, device=scores.device)
    path[:, 0] = torch.where(alive, 0, -1)
    node, count, p = torch.zeros_like(rows), alive.long(), scores[:, 0]
    chance = None if greedy else torch.rand(drafts.tokens.shape, generator=generator, device=scores.device)
    for j in range(drafts.tokens.shape[1]):
        x = drafts.tokens[:, j]
        tried = alive & (j < drafts.lengths) & (drafts.parent[:, j] + 1 == node)
        if best is not None:
            taken = tried & (x == best[rows, node])
        else:
            assert chance is not None
            if drafts.drawn_from is None:
                q = torch.zeros_like(p).scatter_(1, x[:, None], 1.0)
            else:
                q = drafts.drawn_from[:, j]
            taken = tried & (chance[:, j] * q[rows, x] < p[rows, x])
            rest = (p - q).clamp(min=0)
            total = rest.sum(1, keepdim=True)
            rest = torch.where(total > 0, rest / total, p)
            p = torch.where(taken[:, None], scores[:, j + 1], torch.where(tried[:, None], rest, p))
        node = torch.where(taken, j + 1, node)
        path[rows, count] = torch.where(taken, j + 1, path[rows, count])
        count = count + taken
    if best is not None:
        return path, best[rows, node]
    return path, torch.multinomial(p, 1, generator=generator).squeeze(1)


class Rounds:
    """The rounds of one batch. Iterating gives what each adds: tokens [B, N], of which the first counts [B] of every
    row are new, and the logits [B, N, vocabulary] that they were chosen from.

    Attributes:
        alive: bool [B]; set a row to False to end it.
        drafted: [B] in the newest round.
    """

    def __init__(
        self, batch: RaggedBatch, source: DraftSource | None, sampler: Sampler, ids: Tensor, mask: Tensor
    ) -> None:
        self.batch, self.source, self.sampler = batch, source, sampler
        self.alive = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        self.drafted = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
        self._hidden: Tensor | None = None
        hook = batch.decoder.register_forward_hook(self._keep_hidden) if source and source.needs_hidden else None
        self._unhook = hook.remove if hook else lambda: None
        try:
            self.first = batch.prefill(ids, mask)
            if source:
                source.start(ids, mask, None if sampler.greedy else sampler.probabilities, sampler.generator)
        except BaseException:
            self._unhook()
            raise

    def _keep_hidden(self, module: Any, inputs: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state

    def _first_token(self) -> Tensor:
        if self.sampler.greedy:
            return self.first.argmax(1)
        return self.sampler.draw(self.sampler.probabilities(self.first))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        try:
            root = self._first_token()
            news = News(root[:, None], torch.ones_like(root), self._hidden)
            yield news.tokens, news.counts, self.first[:, None]
            while bool(self.alive.any()):
                news = news._replace(counts=news.counts * self.alive)
                root, news, logits = self._round(root, news)
                yield news.tokens, news.counts, logits
        finally:
            self._unhook()

    def _round(self, root: Tensor, news: News) -> tuple[Tensor, News, Tensor]:
        B, alive, batch, greedy = len(root), self.alive.clone(), self.batch, self.sampler.greedy
        if self.source is None:
            none = torch.zeros(B, 0, dtype=torch.long, device=root.device)
            drafts = Drafts(none, none, torch.zeros_like(root), None)
        else:
            drafts = self.source.propose(news)
        M = drafts.tokens.shape[1]
        self.drafted = drafts.lengths * alive
        chain = torch.arange(-1, M - 1, device=root.device)
        parent = torch.cat([torch.full_like(root, -1)[:, None], drafts.parent + 1], 1)
        is_chain = bool(((drafts.parent == chain) | (chain >= drafts.lengths[:, None] - 1)).all())
        ids = torch.cat([root[:, None], drafts.tokens], 1)
        logits = batch.step(ids, alive * (1 + drafts.lengths), None if is_chain else parent)
        hidden = self._hidden
        scores = logits if greedy else self.sampler.probabilities(logits)
        path, bonus = verify(drafts, alive, scores, greedy, self.sampler.generator)
        counts = (path >= 0).sum(1)
        path = path[:, : max(1, int(counts.max()))]
        batch.commit(path)
        safe = path.clamp(min=0)
        tokens = ids.gather(1, safe).roll(-1, 1)
        tokens[torch.arange(B), (counts - 1).clamp(min=0)] = bonus
        if hidden is not None:
            hidden = hidden.gather(1, safe[..., None].expand(-1, -1, hidden.shape[2]))
        chosen_from = logits.gather(1, safe[..., None].expand(-1, -1, logits.shape[2]))
        return bonus, News(tokens, counts, hidden), chosen_from


def _collect(
    rounds: Rounds,
    ids: Tensor,
    ends: set[int],
    max_new_tokens: int,
    stopping_criteria: Callable[..., Any] | None,
    streamer: Any,
    output_logits: bool,
) -> Generation:
    B, device = len(ids), ids.device
    made: list[list[int]] = [[] for _ in range(B)]
    kept: list[list[Tensor]] = [[] for _ in range(B)]
    taken_part, drafted, accepted = (torch.zeros(B, dtype=torch.long, device=device) for _ in range(3))
    if streamer is not None:
        streamer.put(ids.cpu())
    started = time.perf_counter()
    for i, (tokens, counts, logits) in enumerate(rounds):
        if i:
            taken_part += rounds.alive
            drafted += rounds.drafted
            accepted += (counts - 1).clamp(min=0)
        before = len(made[0])
        for b, (row, count) in enumerate(zip(tokens.tolist(), counts.tolist(), strict=True)):
            for j, token in enumerate(row[: count if rounds.alive[b] else 0]):
                made[b].append(token)
                if output_logits:
                    kept[b].append(logits[b, j])
                stopped = token in ends or len(made[b]) == max_new_tokens
                if not stopped and stopping_criteria is not None:
                    text = torch.cat([ids[b], torch.tensor(made[b], device=device)])[None]
                    stopped = bool(torch.as_tensor(stopping_criteria(text, None)).all())
                if stopped:
                    rounds.alive[b] = False
                    break
        if streamer is not None:
            streamer.put(torch.tensor(made[0][before:]))
    seconds = time.perf_counter() - started
    if streamer is not None:
        streamer.end()
    lengths = [len(row) for row in made]
    N = max(lengths)
    config = getattr(rounds.batch.model, "generation_config", None)
    pad = getattr(config, "pad_token_id", None)
    pad = min(ends, default=0) if pad is None else pad
    new = torch.tensor([row + [pad] * (N - len(row)) for row in made], device=device)
    whole = None
    if output_logits:
        whole = torch.full((B, N, kept[0][0].shape[-1]), torch.nan, device=device)
        for b, row_logits in enumerate(kept):
            whole[b, : len(row_logits)] = torch.stack(row_logits)
    lengths_tensor = torch.tensor(lengths, device=device)
    sequences, replayed = torch.cat([ids, new], 1), rounds.batch.rows
    cache = None if replayed is None else replayed.cache
    return Generation(sequences, lengths_tensor, taken_part, drafted, accepted, seconds, whole, cache)
