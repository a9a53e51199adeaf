"""Which rows of an engine's step are decoded by replay, and which are prefills: host arithmetic. Imports no engine."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Split(NamedTuple):
    """Rows of a step, by number.

    Attributes:
        decodes: rows that bring one token, or one and its drafts, in the engine's order. Rows without a token are
            among them where no row is a prefill (a CUDA graph has them at its end).
        prefills: all others that bring tokens.
        fresh: those of `decodes` that begin (a prompt of one token, alone or with placeholders for drafts beside it):
            their slot is reset first.
        tokens: T, the most tokens of a decode row, 1 at least.
        dense: the decode rows are the step's first rows and bring T tokens each, but for rows without one at the end:
            their tokens can be taken as [B, T] without a copy.
        prefill_tokens: indices of the prefills' tokens in the step, or a slice where they lie together.
    """

    decodes: Ints
    prefills: Ints
    fresh: Ints
    tokens: int
    dense: bool
    prefill_tokens: Ints | slice


def split(starts: Ints, beginning: NDArray[np.bool_], drafts: Ints | None, most: int) -> Split:
    """Sort rows into decodes and prefills.

    A row is decoded by replay if it brings one token (whatever the engine calls it: the last piece of a prompt too), or
    as many as it drafted and one more. Everything else is a prefill, whose tokens all count.

    Args:
        starts: [rows + 1] first token of every row.
        beginning: [rows] nothing of the request was computed before, and these are tokens of its prompt.
        drafts: [rows] draft tokens of every row, -1 where it cannot have any; None where the engine never drafts.
        most: T at most, 1 + the engine's number of drafts.
    """
    lengths = np.diff(starts)
    decodes = lengths <= 1
    if drafts is not None:
        decodes |= (drafts >= 1) & (lengths == drafts + 1) & (lengths <= most)
    rows, others = np.flatnonzero(decodes), np.flatnonzero(~decodes)
    if len(others):
        rows = rows[lengths[rows] > 0]
    mine = lengths[rows]
    tokens = max(1, int(mine.max(initial=1)))
    bring = int((mine > 0).sum())
    dense = bool((rows == np.arange(len(rows))).all() and (mine[:bring] == tokens).all())
    if len(others) and int(others[-1]) - int(others[0]) + 1 == len(others):
        taken: Ints | slice = slice(int(starts[others[0]]), int(starts[others[-1] + 1]))
    else:
        taken = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in others] or [np.arange(0)])
    return Split(rows, others, np.flatnonzero(decodes & beginning & (lengths > 0)), tokens, dense, taken)


def ragged(starts: Ints, decodes: Ints, tokens: int) -> tuple[Ints, Ints, Ints]:
    """Decode rows that are not dense, as [B, T]: where every place's token comes from, and where the answers go.

    Returns:
        gather [B, T]: the token of every place (a row's last one, or token 0, where it brings fewer). Then for all of
        the rows' tokens their index in the step, and in [B T].
    """
    lengths = starts[decodes + 1] - starts[decodes]
    places = np.arange(tokens)
    last = np.maximum(lengths - 1, 0)[:, None]
    gather = np.where(lengths[:, None] > 0, starts[decodes][:, None] + np.minimum(places, last), 0)
    real = places < lengths[:, None]
    return gather, gather[real], np.flatnonzero(real)
