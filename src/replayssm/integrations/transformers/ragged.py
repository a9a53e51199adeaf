"""A model and its caches for a batch whose rows have different lengths, as after drafts that some rows accept and
others don't.

    step(ids, lengths, parent)   logits [B, T, vocabulary] of a chain or tree of tokens per row; nothing counts yet
    commit(path)                 the tokens on every row's path count
    forget()                     none of them does

Recurrent layers: a step of the ReplayCache, committed by path. Attention layers keep their keys and values in columns
of one tensor: a step appends T columns, its mask lets a token see its row's own columns and its own ancestors, and
commit moves what was accepted behind the row's last column:

    row 0   . a b c | d e x        d, e accepted:  . a b c d e
    row 1   . f g . | h x x        h accepted:     . f g h . .       (. holds nothing: hidden by the mask)
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from replayssm import ring
from replayssm.integrations.transformers.adapter import CACHE_NAMES, decoder_of, recipe_of
from replayssm.integrations.transformers.host_cache import Rows, adopt

NO_COLUMN_LAYERS = ("glm5_next",)  # attention that chooses keys by an index of its own


class Columns:
    """Which columns of a batch's keys and values hold a token, row by row.

    Attributes:
        valid: bool [B, columns].
        end: [B] one past every row's newest column; count: [B] how many it has.
    """

    def __init__(self, valid: Tensor) -> None:
        self.valid = valid.bool()
        self.count = self.valid.sum(1)
        self.end = torch.full_like(self.count, valid.shape[1])

    def mask(self, kin: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of new tokens: [B, 1, T, columns + n].

        Args:
            kin: bool [B, T, n], which of the n columns behind `valid` each new token sees.
        """
        seen = torch.cat([self.valid[:, None].expand(-1, kin.shape[1], -1), kin], 2)[:, None]
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)

    def keep(self, layers: list[Any], path: Tensor) -> None:
        """Of the columns behind `valid`, those on every row's path count, in its order; all others are dropped.

        Args:
            layers: keys and values [B, heads, columns, dim] each.
            path: [B, P] columns counted from the first new one, padded with -1.
        """
        old = self.valid.shape[1]
        taken = path >= 0
        end = self.end + taken.sum(1)
        length = int(end.max())
        order = torch.arange(path.shape[1], device=path.device)
        places = self.end[:, None] + order
        moved = taken & (old + path != places)
        if bool(moved.any()):
            rows, at = moved.nonzero(as_tuple=True)
            source, place = old + path[rows, at], places[rows, at]
            for layer in layers:
                for pool in (layer.keys, layer.values):
                    pool[rows, :, place] = pool[rows, :, source]
        valid = torch.zeros(len(path), max(length, old), dtype=torch.bool, device=path.device)
        valid[:, :old] = self.valid
        rows, at = taken.nonzero(as_tuple=True)
        valid[rows, places[rows, at]] = True
        self.valid, self.end, self.count = valid[:, :length], end, self.count + taken.sum(1)
        cut(layers, length)


def cut(layers: list[Any], length: int) -> None:
    """Drop the columns from `length` on."""
    for layer in layers:
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]


def chain_kin(rows: int, tokens: int, device: torch.device) -> Tensor:
    """Every token sees itself and those before it: bool [rows, tokens, tokens]."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril().expand(rows, -1, -1)


class RaggedBatch:
    """One model decoding one batch.

    Args:
        model: enabled, if it has recurrent layers.
        max_tokens: T, most tokens per row and step.

    Raises:
        ValueError: the model is not enabled, or keeps what columns cannot hold.
    """

    def __init__(self, model: PreTrainedModel, max_tokens: int) -> None:
        decoder = decoder_of(model)
        kind = model.config.model_type
        if kind in NO_COLUMN_LAYERS:
            raise ValueError(
                f"generate: {kind} models choose the keys that they attend to by an index of their own, which takes no "
                "mask for drafts; use model.generate(prompt_lookup_num_tokens=...) with enable(model, max_tokens=...)."
            )
        if "flash" in str(decoder.config._attn_implementation):
            raise ValueError(
                "generate: drafts need an attention that takes a mask, sdpa or eager; got "
                f"{decoder.config._attn_implementation}. Load the model with attn_implementation='sdpa'."
            )
        self.model, self.decoder, self.max_tokens = model, decoder, max_tokens
        names = inspect.signature(model.forward).parameters
        self._cache_name = next(name for name in CACHE_NAMES if name in names)
        self._takes_positions = "position_ids" in inspect.signature(type(decoder).forward).parameters
        self.cache: Any = DynamicCache(config=decoder.config)
        recipe = recipe_of(decoder)
        self.rows: Rows | None = None
        if recipe is not None:
            self.rows = adopt(self.cache, recipe._replace(max_tokens=max(recipe.max_tokens, max_tokens)))
        self.columns: Any = None  # after prefill
        self._parent: Tensor | None = None

    @property
    def attention(self) -> list[Any]:
        """The cache's layers with keys and values."""
        return [layer for layer in self.cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]

    def _run(self, ids: Tensor, mask: Tensor, positions: Tensor, **options: Any) -> Tensor:
        if self._takes_positions:
            options["position_ids"] = positions
        out = self.model(ids, attention_mask=mask, use_cache=True, **{self._cache_name: self.cache}, **options)
        return out.logits

    def prefill(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Run the prompts [B, L], padded on the left where mask [B, L] is 0; logits [B, vocabulary] of the last."""
        logits = self._run(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), logits_to_keep=1)
        self.columns = Columns(mask)
        return logits[:, -1]

    def step(self, ids: Tensor, lengths: Tensor, parent: Tensor | None = None) -> Tensor:
        """Logits [B, T, vocabulary] of the first `lengths` of ids [B, T], which follow what was committed.

        Args:
            parent: [B, T] index of every token's parent, -1 for none; None for a chain.
        """
        rows, tokens = ids.shape
        kin = chain_kin(rows, tokens, ids.device) if parent is None else ring.ancestors(parent)
        positions = self.columns.count[:, None] + kin.sum(2) - 1
        mask = self.columns.mask(kin, self.decoder.dtype)
        self._parent = parent
        if self.rows is None:
            return self._run(ids, mask, positions)
        self.rows.begin(tokens, lengths, parent)
        try:
            return self._run(ids, mask, positions)
        except BaseException:
            self.rows.forget_step()
            raise

    def commit(self, path: Tensor) -> None:
        """Tokens of the newest step on path [B, P] count: indices from a root down, padded with -1."""
        if self.rows is not None:
            if self._parent is None:
                self.rows.commit(n=(path >= 0).sum(1))
            else:
                self.rows.commit(path=path)
        self.columns.keep(self.attention, path)

    def forget(self) -> None:
        """The newest step never happened."""
        if self.rows is not None:
            self.rows.forget_step()
        cut(self.attention, self.columns.valid.shape[1])
