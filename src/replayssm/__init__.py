"""replayssm: faster decoding of hybrid language models. The state stays a checkpoint; each token adds a small record.

cache = ReplayCache("mamba2", Geometry(H=64, G=8, V=64, K=128), layers=24, slots=256)
slots = cache.allocate(32)
cache.reset(slots)                                       # or load(layer, slots, state, window) after a prefill
step = cache.begin(slots)                                # once per model step
y = decode(cache, layer, step, q, k, v, g, w)            # every layer; or decode_layer from raw projections
cache.commit(step)                                       # once per model step

replayssm.generate(model, ids, draft="ngram")            # a Transformers model, with drafts
"""

from typing import Any

from replayssm.api import convolve, decode, decode_layer
from replayssm.cache import ConvGeometry, ReplayCache, page_bytes
from replayssm.recurrences import Geometry
from replayssm.ring import PAD_SLOT

__version__ = "0.1.0"

__all__ = ["PAD_SLOT", "ConvGeometry", "Geometry", "ReplayCache", "convolve", "decode", "decode_layer", "page_bytes"]


def __getattr__(name: str) -> Any:
    """`generate` needs Transformers, and is imported when it is asked for."""
    if name == "generate":
        from replayssm.integrations.transformers.generation import generate

        return generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
