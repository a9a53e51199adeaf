"""The cache by hand: one layer's decode steps, drafts that are rejected, and the same from the plain recurrence.

python examples/cache_by_hand.py
"""

import torch

from replayssm import Geometry, ReplayCache, decode, recurrences

H, G, V, K = 4, 2, 16, 16


def inputs(rows: int, tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """q, k [B, T, G, K], v [B, T, H, V], log decay g and weight w [B, T, H]."""
    q, k = torch.randn(2, rows, tokens, G, K, generator=generator)
    v = torch.randn(rows, tokens, H, V, generator=generator)
    g, w = torch.rand(2, rows, tokens, H, generator=generator)
    return q, k, v, -g, w


def main(steps: int = 40) -> float:
    """Decode, and return the largest difference between the cache's state and the plain recurrence's."""
    generator = torch.Generator().manual_seed(0)
    cache = ReplayCache("mamba2", Geometry(H, G, V, K), layers=1, slots=4, window=16, max_tokens=4)
    slots = cache.allocate(2)
    cache.reset(slots)
    state = torch.zeros(2, H, V, K, dtype=torch.float64)
    plain = recurrences.get("mamba2").reference.step

    for _ in range(steps):
        tokens = inputs(2, 4, generator)  # one token and three drafts per row
        step = cache.begin(slots, tokens=4)
        y = decode(cache, 0, step, *tokens)  # [2, 4, H, V]: every draft sees those before it
        cache.commit(step, [3, 1])  # row 0 keeps three of its tokens, row 1 keeps one; the others never happened
        for row, kept in enumerate([3, 1]):
            for i in range(kept):
                q, k, v, g, w = (x[row : row + 1, i].double() for x in tokens)
                answer, state[row : row + 1] = plain(state[row : row + 1], q, k, v, g[..., None], w)
                assert torch.allclose(y[row, i].double(), answer[0], atol=1e-4)

    traffic = cache.bytes_per_token()
    print(f"plain decoding would move {traffic.read + traffic.written:,.0f} bytes of state a token and row")
    print(f"the stock scheme {2 * H * V * K * 4:,} bytes; {cache.nbytes.total // cache.num_slots:,} bytes kept a slot")
    return float((cache.materialize(0, slots).double() - state).abs().max())


if __name__ == "__main__":
    print(f"largest difference of states after 40 steps: {main():.1e}")
