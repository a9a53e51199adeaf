"""The carried form is the plain recurrence, in fp64 to 1e-12: for chains, for trees, and for the fold."""

import pytest
import torch
import torch.nn.functional as F

from replayssm import recurrences, ring
from replayssm.recurrences import Geometry, inverse_norm

SIZES = Geometry(H=6, G=3, V=5, K=8)


def make(name: str, generator: torch.Generator, B: int, N: int) -> tuple[torch.Tensor, ...]:
    """S, q, k, v, g, w in fp64: N records per row, decays from near 0 to near 1, beta up to 2."""
    recurrence, (H, G, V, K) = recurrences.get(name), SIZES

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = normal(B, N, G, K), normal(B, N, G, K)
    if recurrence.delta:
        k = k * inverse_norm(k)[..., None]
    g = -8 * torch.rand(B, N, H, recurrence.gate_dim(SIZES), generator=generator, dtype=torch.float64) ** 6
    w = 2 * torch.rand(B, N, H, generator=generator, dtype=torch.float64)
    return normal(B, H, V, K), q, k, normal(B, N, H, V), g, w


@pytest.mark.parametrize("name", recurrences.names())
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_carry_and_read_equal_the_plain_recurrence(name: str, tree: bool, generator: torch.Generator) -> None:
    B, past, T = 4, 9, 7
    N = past + T
    reference = recurrences.get(name).reference
    S0, q, k, v, g, w = make(name, generator, B, N)
    committed, lengths = torch.tensor([9, 9, 9, 9]), torch.tensor([7, 7, 3, 0])
    parent = torch.tensor([[-1, 0, 1, 1, 0, 4, -1], [-1, 0, 0, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0, 0], [-1] * 7])
    sees = ring.paths(committed, lengths, T, N, parent if tree else None)[:, past:]
    t, c = reference.carry(q[:, past:], k, g, w, sees)
    y = torch.einsum("bhvk,bthk->bthv", S0, t) + torch.einsum("bthn,bnhv->bthv", c, v)
    for b in range(B):
        states = {}
        S = S0[b : b + 1]
        for j in range(past):
            _, S = reference.step(S, *(x[b : b + 1, j] for x in (q, k, v, g, w)))
        for i in range(int(lengths[b])):
            above = int(parent[b, i]) if tree else i - 1
            plain, states[i] = reference.step(states.get(above, S), *(x[b : b + 1, past + i] for x in (q, k, v, g, w)))
            torch.testing.assert_close(y[b, i], plain[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", recurrences.names())
def test_fold_is_the_state_after_the_first_records(name: str, generator: torch.Generator) -> None:
    S0, _, k, v, g, w = make(name, generator, 5, 4)
    reference = recurrences.get(name).reference
    folded = reference.fold(S0, k, v, g, w, torch.arange(5))
    for n in range(5):
        S = S0[n : n + 1]
        for j in range(n):
            _, S = reference.step(S, k[n : n + 1, j], *(x[n : n + 1, j] for x in (k, v, g, w)))
        assert torch.equal(folded[n : n + 1], S)


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_back_rows_replace_the_walk(name: str, generator: torch.Generator) -> None:
    """c = b (I + back) and u = diag(w) (I + back) (v - S k): what walks and solves give, in products."""
    B, N = 3, 11
    reference = recurrences.get(name).reference
    S0, q, k, v, g, w = make(name, generator, B, N)
    sees = torch.ones(N, N, dtype=torch.bool).tril().expand(B, N, N)
    record = torch.arange(N).expand(B, N)
    back = reference.back(k, g, w, sees, record).transpose(1, 2)  # [B, H, N, N]
    _, c = reference.carry(q, k, g, w, sees)
    H = g.shape[2]
    sums = g.cumsum(1).transpose(1, 2)  # [B, H, N, E]
    decay = (sums[:, :, :, None] - sums[:, :, None]).exp()
    qh, kh = recurrences.heads(q, H).transpose(1, 2), recurrences.heads(k, H).transpose(1, 2)
    b = w.transpose(1, 2)[:, :, None] * (decay * qh[:, :, :, None] * kh[:, :, None]).sum(-1)
    b = torch.where(sees[:, None], b, 0)
    torch.testing.assert_close(c.transpose(1, 2), b + b @ back, rtol=1e-12, atol=1e-12)
    u = v.transpose(1, 2) - (sums.exp() * kh) @ S0.transpose(2, 3)
    u = w.transpose(1, 2)[..., None] * (u + back @ u)
    folded = S0 * sums[:, :, -1:].exp() + u.transpose(2, 3) @ ((sums[:, :, -1:] - sums).exp() * kh)
    plain = reference.fold(S0, k, v, g, w, torch.full((B,), N))
    torch.testing.assert_close(folded, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", recurrences.names())
def test_carried_query_never_grows(name: str, generator: torch.Generator) -> None:
    """For |k| = 1 and beta in [0, 2] every step of the carry is a contraction, which is why fp32 is enough."""
    _, q, k, _, g, w = make(name, generator, 2, 64)
    sees = torch.ones(64, 64, dtype=torch.bool).tril().expand(2, 64, 64)
    t, _ = recurrences.get(name).reference.carry(q, k, g, w, sees)
    assert bool((t.norm(dim=-1) <= recurrences.heads(q, 6).norm(dim=-1) * (1 + 1e-12)).all())


RAW = torch.tensor([[-100.0, -8.0, 0.0, 20.0, 20.001, 88.0, 89.0, 1e4]])


def test_gates_of_mamba2() -> None:
    weights = recurrences.get("mamba2").weights
    A_log = torch.linspace(-3, 3, 8)
    g, w = recurrences.get("mamba2").gates(None, RAW, weights(None, None, A_log, torch.full((8,), -8.0), None))
    torch.testing.assert_close(w, F.softplus(RAW.double() - 8).float())
    torch.testing.assert_close(g, (-A_log.double().exp() * F.softplus(RAW.double() - 8)).float())
    limited = recurrences.get("mamba2").gates(None, RAW, weights(None, None, A_log, None, None, (0.001, 0.1)))[1]
    assert float(limited.min()) == pytest.approx(0.001) and float(limited.max()) == pytest.approx(0.1)
    still = recurrences.get("mamba2").gates(None, RAW, weights(None, None, torch.full((8,), -torch.inf), None, None))[0]
    assert not still.any() and bool(torch.isfinite(still).all())


def test_gates_of_gdn() -> None:
    record = recurrences.get("gdn")
    A_log = torch.linspace(-3, 3, 8).bfloat16()
    g, w = record.gates(RAW, RAW, record.weights(None, None, A_log, torch.zeros(8), 2.0))
    assert g.dtype == w.dtype == torch.float32
    torch.testing.assert_close(g, (-A_log.double().exp() * F.softplus(RAW.double())).float())
    torch.testing.assert_close(w, (2 * RAW.double().sigmoid()).float())


def test_gates_of_kda_in_both_forms() -> None:
    record = recurrences.get("kda")
    raw, A_log, dt_bias = RAW.view(1, 1, 2, 4), torch.tensor([-1.0, 2.0]), torch.arange(8.0)
    rate = A_log.double().exp()[:, None]
    x = raw.double() + dt_bias.view(2, 4)
    g, _ = record.gates(raw, RAW[:, None, :2], record.weights(None, None, A_log, dt_bias))
    torch.testing.assert_close(g, (-rate * F.softplus(x)).float())
    g, _ = record.gates(raw, RAW[:, None, :2], record.weights(None, None, A_log, dt_bias, -5.0))
    torch.testing.assert_close(g, (-5 * (rate * x).sigmoid()).float())


def test_recurrences_are_found_by_their_folder() -> None:
    assert recurrences.names() == ["gdn", "kda", "mamba2"]
    for name in recurrences.names():
        assert recurrences.get(name).name == name
