"""Where draft tokens come from: n-grams of the text so far, a smaller model, the model's own prediction head.

Each source answers `propose` with a tree of drafts per row, root nodes following the newest token. What it proposes is
either a fixed choice (the most probable tokens, a continuation found in the text) or drawn from distributions that it
returns; `generation.verify` needs to know which, to keep the model's own distribution.

`shape` = (n_1, n_2, ...): n_1 first tokens, each with n_2 continuations, and so on; (1, 1, 1, 1) is a chain of four.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayssm import ring
from replayssm.integrations.transformers.mtp import MTPHead
from replayssm.integrations.transformers.ragged import Columns, RaggedBatch, chain_kin, cut

Shape = tuple[int, ...]
Probabilities = Callable[[Tensor], Tensor]  # logits [..., vocabulary] -> what is sampled from; greedy: not called


class Drafts(NamedTuple):
    """Trees of M drafts for B rows. Parents come before children, siblings in the order in which they are tried.

    Attributes:
        tokens: [B, M]
        parent: [B, M] index of every draft's parent, -1 where it follows the newest token.
        lengths: [B] drafts per row, the first of its M.
        drawn_from: [B, M, vocabulary] the distribution each token was drawn from, its elder siblings left out; None
            where tokens were chosen without chance.
    """

    tokens: Tensor
    parent: Tensor
    lengths: Tensor
    drawn_from: Tensor | None


class News(NamedTuple):
    """What a round made: tokens [B, N], the first `counts` [B] of every row, and (for a prediction head) the hidden
    states [B, N, D] that predicted them. Rows that have ended bring none."""

    tokens: Tensor
    counts: Tensor
    hidden: Tensor | None


class DraftSource(Protocol):
    """What generate asks for drafts."""

    @property
    def shape(self) -> Shape:
        """At most so many drafts per depth."""

    @property
    def needs_hidden(self) -> bool:
        """Whether News must bring hidden states."""

    def start(self, ids: Tensor, mask: Tensor, probabilities: Probabilities | None, generator: Any) -> None:
        """A batch begins with prompts [B, L], padded on the left; probabilities is None for greedy drafts."""

    def propose(self, news: News) -> Drafts:
        """Drafts that follow everything so far, `news` included."""


def nodes(shape: Sequence[int]) -> int:
    """How many drafts a tree of this shape has."""
    total, level = 0, 1
    for width in shape:
        level *= width
        total += level
    return total


def parents(shape: Sequence[int]) -> list[int]:
    """Every draft's parent, level by level; -1 on the first."""
    found: list[int] = []
    above = [-1]
    for width in shape:
        first = len(found)
        found += [parent for parent in above for _ in range(width)]
        above = list(range(first, len(found)))
    return found


# ---- n-grams ----


class NGram:
    """Continuations that the row's own text (and `corpus`) had after its newest n tokens; longest n first, then newest.

    Args:
        shape: of the tree; continuations that share their beginning share its nodes.
        most, least: n.
        corpus: texts as token ids that drafts may also come from.
    """

    needs_hidden = False

    def __init__(self, shape: Shape, most: int = 4, least: int = 2, corpus: Sequence[Sequence[int]] = ()) -> None:
        self.shape, self.most, self.least = shape, most, least
        self._corpus = _Index(most)
        for text in corpus:
            self._corpus.extend(text)
            self._corpus.cut()

    def start(self, ids: Tensor, mask: Tensor, probabilities: Probabilities | None, generator: Any) -> None:
        """Read the prompts."""
        self._rows = []
        for row, valid in zip(ids.tolist(), mask.tolist(), strict=True):
            index = _Index(self.most)
            index.extend([token for token, real in zip(row, valid, strict=True) if real])
            self._rows.append(index)
        self._device = ids.device

    def propose(self, news: News) -> Drafts:
        """Drafts for rows that go on."""
        counts = news.counts.tolist()
        trees = []
        for index, new, count in zip(self._rows, news.tokens.tolist(), counts, strict=True):
            index.extend(new[:count])
            trees.append(self._tree(index) if count else ([], []))
        width = max(len(tokens) for tokens, _ in trees)
        tokens = [row + [0] * (width - len(row)) for row, _ in trees]
        parent = [row + list(range(len(row) - 1, width - 1)) for _, row in trees]
        lengths = [len(row) for row, _ in trees]
        as_tensor = partial(torch.tensor, dtype=torch.long, device=self._device)
        return Drafts(as_tensor(tokens), as_tensor(parent), as_tensor(lengths), None)

    def _tree(self, index: "_Index") -> tuple[list[int], list[int]]:
        """Tokens and parents."""
        tokens: list[int] = []
        parent: list[int] = []
        children: dict[int, dict[int, int]] = {-1: {}}
        depth, text = len(self.shape), index.text
        for source, end in self._matches(index):
            node = -1
            continuation: list[int] = []
            for level in range(depth):
                at = end + level
                if at < len(source):
                    token = source[at]
                elif source is text:
                    token = continuation[at - len(source)]  # a text that repeats itself up to its end goes on repeating
                else:
                    break
                if token < 0:  # the end of a text in the corpus
                    break
                continuation.append(token)
                if token not in children[node]:
                    if len(children[node]) == self.shape[level]:
                        break
                    children[node][token] = len(tokens)
                    children[len(tokens)] = {}
                    tokens.append(token)
                    parent.append(node)
                node = children[node][token]
            if len(tokens) == nodes(self.shape):
                break
        return tokens, parent

    def _matches(self, index: "_Index") -> Iterator[tuple[list[int], int]]:
        """(text, where it goes on) of earlier places with the same newest tokens; longest match first, then newest."""
        seen = set()
        for n in range(min(self.most, len(index.text) - 1), self.least - 1, -1):
            key = tuple(index.text[-n:])
            for source in (index, self._corpus):
                for end in reversed(source.ends.get(key, ())):
                    if end < len(source.text) and (id(source), end) not in seen:
                        seen.add((id(source), end))
                        yield source.text, end


class _Index:
    """A text, and where each of its n-grams ends."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.text: list[int] = []
        self.ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.text.append(token)
            for n in range(1, min(self.most, len(self.text)) + 1):
                self.ends.setdefault(tuple(self.text[-n:]), []).append(len(self.text))

    def cut(self) -> None:
        """What follows does not continue what is there."""
        self.text.append(-1)


# ---- models ----


class Levels:
    """A tree drafted level by level from logits: the part that a model and a prediction head share."""

    def __init__(self, shape: Shape, rows: int, probabilities: Probabilities | None, generator: Any) -> None:
        self.shape, self._probabilities, self._generator = shape, probabilities, generator
        self.parent = torch.tensor(parents(shape)).expand(rows, -1)
        self.tokens: list[Tensor] = []
        self._drawn_from: list[Tensor] = []

    def choose(self, logits: Tensor) -> Tensor:
        """Children of the newest level's nodes, from their logits [B, n, vocabulary]: [B, n * width]."""
        width = self.shape[len(self.tokens)]
        if self._probabilities is None:
            chosen = logits.topk(width, dim=2).indices
        else:
            q = self._probabilities(logits)
            # the order of a race of exponential clocks is that of drawing one after the other, without replacement
            race = q / torch.empty_like(q).exponential_(generator=self._generator)
            chosen = race.topk(width, dim=2).indices
            left = []
            for i in range(width):
                left.append(q)
                q = q.scatter(2, chosen[..., i : i + 1], 0)
                q = q / q.sum(2, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
            self._drawn_from.append(torch.stack(left, 2).flatten(1, 2))
        self.tokens.append(chosen.flatten(1))
        return self.tokens[-1]

    @property
    def done(self) -> bool:
        """Whether every level has its tokens."""
        return len(self.tokens) == len(self.shape)

    def drafts(self, alive: Tensor) -> Drafts:
        """The whole tree, for rows that are `alive` [B]."""
        tokens = torch.cat(self.tokens, 1)
        drawn_from = torch.cat(self._drawn_from, 1) if self._drawn_from else None
        return Drafts(tokens, self.parent.to(tokens.device), alive * tokens.shape[1], drawn_from)


class ModelDraft:
    """Drafts of a smaller model with the same tokens. Its accepted tokens are replayed as the model's own are.

    Every level is one forward of the tree so far, which is then forgotten: nothing has to be taken back.
    """

    needs_hidden = False

    def __init__(self, model: PreTrainedModel, shape: Shape) -> None:
        self.model, self.shape = model, shape

    def start(self, ids: Tensor, mask: Tensor, probabilities: Probabilities | None, generator: Any) -> None:
        """Prefill."""
        self._batch = RaggedBatch(self.model, nodes(self.shape) + 1)
        self._batch.prefill(ids, mask)
        self._levels = (len(ids), probabilities, generator)

    def propose(self, news: News) -> Drafts:
        """What is new is committed; then level by level."""
        batch, alive = self._batch, news.counts > 0
        logits = batch.step(news.tokens, news.counts)
        order = torch.arange(news.tokens.shape[1], device=news.tokens.device)
        batch.commit(torch.where(order < news.counts[:, None], order, -1))
        last = (news.counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, logits.shape[2])
        levels = Levels(self.shape, *self._levels)
        levels.choose(logits.gather(1, last))
        while not levels.done:
            tokens, width = torch.cat(levels.tokens, 1), levels.tokens[-1].shape[1]
            parent = None if set(self.shape) == {1} else levels.parent[:, : tokens.shape[1]].to(tokens.device)
            logits = batch.step(tokens, alive * tokens.shape[1], parent)
            batch.forget()
            levels.choose(logits[:, -width:])
        return levels.drafts(alive)


class HeadDraft:
    """Drafts of a model's own multi-token-prediction head; see mtp.MTPHead.

    Entry i of the head's cache is made of the hidden state at token i and the embedding of token i + 1.
    """

    needs_hidden = True

    def __init__(self, head: MTPHead, model: PreTrainedModel, shape: Shape) -> None:
        self.head, self.output, self.shape = head, model.get_output_embeddings(), shape

    def start(self, ids: Tensor, mask: Tensor, probabilities: Probabilities | None, generator: Any) -> None:
        """The prompts' entries wait for their hidden states, which come with the first news."""
        self._prompt, self._cache = (ids, mask), self.head.new_cache()
        self._levels = (len(ids), probabilities, generator)
        self._columns: Any = None

    def _enter(self, news: News) -> Tensor:
        """Entries of what is new; the newest one's hidden state [B, 1, D]."""
        assert news.hidden is not None
        counts, rows = news.counts, len(news.counts)
        if self._columns is None:  # the prompt's columns, left padding hidden; the first new token is the last's next
            (ids, mask), tokens = self._prompt, news.tokens
            tokens = torch.cat([ids[:, 1:], tokens[:, :1]], 1)
            kin = chain_kin(rows, ids.shape[1], ids.device) & mask.bool()[:, None]
            kin = kin | torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
            self._columns = Columns(mask[:, :0])
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            out = self.head(tokens, news.hidden, positions, self._columns.mask(kin, news.hidden.dtype), self._cache)
            self._columns = Columns(mask)
            return out[:, -1:]
        order = torch.arange(news.tokens.shape[1], device=counts.device)
        kin = chain_kin(rows, len(order), counts.device)
        positions = self._columns.count[:, None] + order
        mask = self._columns.mask(kin, news.hidden.dtype)
        out = self.head(news.tokens, news.hidden, positions, mask, self._cache)
        self._columns.keep(self._cache.layers, torch.where(order < counts[:, None], order, -1))
        return out.gather(1, (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, out.shape[2]))

    def propose(self, news: News) -> Drafts:
        """Level by level, every level's entries behind those before."""
        hidden, columns = self._enter(news), self._columns
        levels = Levels(self.shape, *self._levels)
        tokens = levels.choose(self.output(hidden))
        kin = ring.ancestors(levels.parent).to(tokens.device)
        end = 0
        while not levels.done:
            start, end = end, end + tokens.shape[1]
            depth = len(levels.tokens)
            hidden = hidden.repeat_interleave(self.shape[depth - 1], 1)  # a child starts from its parent's
            positions = (columns.count[:, None] + depth - 1).expand(-1, end - start)
            mask = columns.mask(kin[:, start:end, :end], hidden.dtype)
            hidden = self.head(tokens, hidden, positions, mask, self._cache)
            tokens = levels.choose(self.output(hidden))
        cut(self._cache.layers, columns.valid.shape[1])
        return levels.drafts(news.counts > 0)
