"""The gated delta rule, by definition: plain step, carried query and fold, in whatever precision the inputs have.

Queries and keys come L2-normalised. Letters as everywhere: B rows, T tokens, N records (oldest first), G key groups,
H value heads, K key dim, V value dim, E gates per
head (1 here; K in kda, whose definition this is too).
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
        g: [B, H, E]
        w: [B, H]

    Returns:
        y [B, H, V] and the new state.
    """
    H = S.shape[1]
    k = heads(k, H)[..., None, :]
    # (1) decay: S <- S_{t-1} Diag(a_t)
    S = g.exp()[..., None, :] * S
    # (2) what the key recalls is replaced: u = w_t (v_t - S k_t), S_t = S + u k_t^T
    u = w[..., None] * (v - (S * k).sum(-1))
    S = S + u[..., :, None] * k
    # (3) y_t = S_t q_t
    return (S * heads(q, H)[..., None, :]).sum(-1), S


def carry(q: Tensor, k: Tensor, g: Tensor, w: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Carry queries back through the records, newest first.

    Args:
        q: [B, T, G, K], or [B, T, H, K] where every head has its own.
        k: [B, N, G, K]
        g: [B, N, H, E]
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
        k_j = heads(k[:, None, j], H)
        # (1) c_j = w_j (k_j . t)
        c[..., j] = torch.where(mine, w[:, None, j] * (k_j * t).sum(-1), 0)
        # (2) t <- Diag(a_j) (t - c_j k_j)
        t = torch.where(mine[..., None], g[:, None, j].exp() * (t - c[..., j, None] * k_j), t)
    return t, c


def back(k: Tensor, g: Tensor, w: Tensor, sees: Tensor, record: Tensor) -> Tensor:
    """Rows of `back` for new records: what each takes, through the delta rule, from the weight of the older ones.

    Record l's row is minus the c of its own key, decayed by its own gate and carried through the records before it.

    Args:
        record: [B, T], the number of the record that each token of the step appends.

    Returns:
        [B, T, H, N], zero at the record itself and at records that it does not see.
    """
    rows = torch.arange(k.shape[0], device=k.device)[:, None]
    own = g[rows, record].exp() * heads(k[rows, record], g.shape[2])
    older = sees & (torch.arange(k.shape[1], device=k.device) != record[..., None])
    return -carry(own, k, g, w, older)[1]


fold = partial(fold_by_steps, step)
