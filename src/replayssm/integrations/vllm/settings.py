"""What a user of vLLM may ask for, and what is refused: plain values in, sentences out. Imports no engine."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from replayssm import checks, formats

VERSION = "0.33"  # of vLLM; what depends on it is in engine.py
KEY = "replayssm"
MOST_TOKENS = 16  # of a row and step: one sampled and its drafts


class Settings(NamedTuple):
    """`--additional-config '{"replayssm": {...}}'`, or LLM(additional_config={"replayssm": {...}}).

    Attributes:
        format: storage of the states, a name of replayssm.formats, for all layers.
        window: committed tokens that may wait in the ring before they are folded into the state.
        seed: of formats that round stochastically.
    """

    format: str = "fp32"
    window: int = 16
    seed: int = 0


def parse(additional_config: Any) -> Settings | None:
    """The settings under our key; None where nobody asks for us.

    Raises:
        ValueError: a key or value that does not exist.
    """
    if not isinstance(additional_config, Mapping) or additional_config.get(KEY) is None:
        return None
    given = additional_config[KEY]
    if not isinstance(given, Mapping):
        raise ValueError(f'additional_config["{KEY}"] must be a mapping such as {{"format": "fp32"}}; got {given!r}.')
    for name in given:
        if name not in Settings._fields:
            raise checks.unknown(f'key of additional_config["{KEY}"]', name, Settings._fields)
    settings = Settings(**given)
    formats.get(settings.format)
    for name, least in (("window", 1), ("seed", 0)):
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f'additional_config["{KEY}"]: {name} must be a whole number, {least} or more; got {value!r}.'
            )
    return settings


def supported(version: str) -> bool:
    """Whether the plugin is made for this vLLM."""
    return version.startswith(f"{VERSION}.")


def unsupported(version: str) -> str:
    """Why another vLLM is refused."""
    return f"vLLM {version} is not supported: install vllm=={VERSION}.*, or remove the setting."


def refusals(settings: Settings, version: str, config: Any, device: str) -> list[str]:
    """Why this engine must not start with these settings, one sentence each; empty where it may.

    Args:
        config: vLLM's VllmConfig.
        device: type of the platform's device.
    """
    cache, parallel = config.cache_config, config.parallel_config
    tokens = 1 + config.num_speculative_tokens
    found = [
        (not supported(version), unsupported(version)),
        (device != "cuda", f"needs an NVIDIA or AMD GPU; this platform is {device!r}."),
        (
            bool(cache.enable_prefix_caching),
            "prefix caching is not supported (a block would be shared while its newest tokens are still in the ring): "
            "start with --no-enable-prefix-caching, or enable_prefix_caching=False.",
        ),
        (
            bool(cache.use_replayssm),
            "--use-replayssm is vLLM's own replay mode; use one of the two.",
        ),
        (
            tokens > MOST_TOKENS,
            f"at most {MOST_TOKENS - 1} draft tokens; num_speculative_tokens is {tokens - 1}.",
        ),
        (
            tokens > settings.window,
            f"the window must hold a step's {tokens} tokens; it is {settings.window}: set "
            f'"window" to {tokens} or more.',
        ),
        (
            config.kv_transfer_config is not None,
            "KV connectors (disaggregation, offload) would copy states without their rings: remove kv_transfer_config.",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism is not supported; tensor, pipeline and data parallelism are.",
        ),
        (bool(parallel.use_ubatching), "dual batch overlap is not supported: remove --enable-dbo."),
    ]
    return [why for refused, why in found if refused]
