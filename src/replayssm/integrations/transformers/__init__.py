"""Transformers models that decode with the replayed cache.

    from replayssm.integrations.transformers import enable, generate

    enable(model)
    model.generate(...)                        the host's own; with max_tokens > 1 also assisted
    generate(model, ids, draft=..., tree=...)  batches, trees, prediction heads; also as replayssm.generate

`families` translates the words of each model family, `host_cache` keeps the states of a host cache in a ReplayCache,
and `adapter` hooks one model's modules. For drafts: `ragged` decodes batches whose rows have different lengths,
`drafts` and `mtp` propose, `generation` verifies.
"""

from replayssm.integrations.transformers.adapter import disable, enable, replay_cache
from replayssm.integrations.transformers.drafts import DraftSource, HeadDraft, ModelDraft, NGram
from replayssm.integrations.transformers.generation import Generation, generate

__all__ = [
    "DraftSource", "Generation", "HeadDraft", "ModelDraft", "NGram", "disable", "enable", "generate", "replay_cache",
]  # fmt: skip
