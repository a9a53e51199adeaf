"""Continuous batching on the cache alone: requests wait, run side by side, are preempted, go on, and end."""

from collections import deque
from dataclasses import dataclass

import torch

from replayssm import Geometry, ReplayCache, decode

H, G, V, K, VOCABULARY = 4, 2, 16, 16, 64
EMBED = torch.randn(VOCABULARY, 2 * G * K + H * V + 2 * H, generator=torch.Generator().manual_seed(0))
HEAD = EMBED[:, : H * V].T  # a toy model: one recurrent layer


def model(cache, step, tokens):
    """Logits [B, T, vocabulary] of tokens [B, T]."""
    q, k, v, g, w = EMBED[tokens].split([G * K, G * K, H * V, H, H], -1)
    q, k, v = q.unflatten(-1, (G, K)), k.unflatten(-1, (G, K)), v.unflatten(-1, (H, V))
    return decode(cache, 0, step, q, k, v, -g.exp(), w.sigmoid()).flatten(2) @ HEAD


@dataclass
class Request:
    tokens: list  # the prompt, then what the model adds
    wanted: int  # how long `tokens` shall be
    done: int = 0  # tokens that the cache has seen
    slot: torch.Tensor | None = None
    snapshot: dict | None = None  # what its slot held when it was preempted


def serve(requests, slots=4, chunk=8, turn=12):
    """Run all requests to their end. Rows of one step are decodes (1 token) and pieces of prompts (up to `chunk`)."""
    cache = ReplayCache("gdn", Geometry(H, G, V, K), layers=1, slots=slots, window=16, max_tokens=chunk)
    waiting, running, count = deque(requests), deque(), 0
    while waiting or running:
        while waiting and cache.free_slots:
            request = waiting.popleft()
            request.slot = cache.allocate(1)
            cache.restore(request.slot, request.snapshot) if request.snapshot else cache.reset(request.slot)
            running.append(request)
        pieces = [request.tokens[request.done : request.done + chunk] for request in running]
        lengths = [len(piece) for piece in pieces]
        padded = torch.tensor([piece + [0] * (max(lengths) - len(piece)) for piece in pieces])
        step = cache.begin(torch.cat([request.slot for request in running]), lengths, max(lengths))
        logits = model(cache, step, padded)  # a real model: decode in every recurrent layer, attention in the others
        cache.commit(step)
        for request, length, row in zip(list(running), lengths, logits, strict=True):
            request.done += length
            if request.done == len(request.tokens):
                request.tokens.append(int(row[length - 1].argmax()))
            if len(request.tokens) >= request.wanted:
                running.remove(request)
                cache.free(request.slot)
        count += 1
        if waiting and running and count % turn == 0:  # nothing is flushed: pending records travel with the request
            request = running.popleft()
            request.snapshot = cache.export(request.slot)
            cache.free(request.slot)
            waiting.append(request)
    return requests
