"""Transformers models that decode with the replayed cache.

    from replayssm.integrations.transformers import enable

    enable(model)
    model.generate(...)

`families` translates the words of each model family, `host_cache` keeps the states of a host cache in a ReplayCache,
and `adapter` hooks one model's modules.
"""

from replayssm.integrations.transformers.adapter import disable, enable, replay_cache

__all__ = ["disable", "enable", "replay_cache"]
