"""Mamba-2, by definition: plain step, carried query and fold, in whatever precision the inputs have.

Letters as everywhere: B rows, T tokens, N records (oldest first), G key groups, H value heads, K key dim, V value dim.
"""

from functools import partial

import torch
from torch import Tensor

from replayssm.recurrences import fold_by_steps, heads


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the plain recurrence.

    Args:
        S: [B, H, V, K]
        q, k: [B, G, K]
        v: [B, H, V]
        g: [B, H, 1]
        w: [B, H]

    Returns:
        y [B, H, V] and the new state.
    """
    H = S.shape[1]
    # (1) S_t = a_t S_{t-1} + w_t v_t k_t^T
    S = g.exp()[..., None, :] * S + (w[..., None] * v)[..., :, None] * heads(k, H)[..., None, :]
    # (2) y_t = S_t q_t
    return (S * heads(q, H)[..., None, :]).sum(-1), S


def carry(q: Tensor, k: Tensor, g: Tensor, w: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Carry queries back through the records, newest first.

    Args:
        q: [B, T, G, K]
        k: [B, N, G, K]
        g: [B, N, H, 1]
        w: [B, N, H]
        sees: bool [B, T, N], which records a token sees.

    Returns:
        t [B, T, H, K], the query as the checkpoint must answer it, and c [B, T, H, N], the weight of every record's v.
    """
    H = g.shape[2]
    t = heads(q, H)
    c = t.new_zeros(*t.shape[:3], k.shape[1])
    for j in reversed(range(k.shape[1])):
        mine = sees[:, :, j, None]
        # (1) c_j = w_j (k_j . t)
        c[..., j] = torch.where(mine, w[:, None, j] * (heads(k[:, None, j], H) * t).sum(-1), 0)
        # (2) t <- a_j t
        t = torch.where(mine[..., None], g[:, None, j].exp() * t, t)
    return t, c


fold = partial(fold_by_steps, step)
