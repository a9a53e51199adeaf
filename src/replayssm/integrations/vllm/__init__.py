"""vLLM plugin: recurrent layers decode by replay where `additional_config` holds "replayssm". See docs/vllm.md.

Installed with the package (entry point group vllm.general_plugins) and inert unless asked.
"""

import logging


def register() -> None:
    """vLLM calls this in every process, before models are built."""
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.version import __version__

    from replayssm.integrations.vllm.settings import KEY, supported

    if not supported(__version__):
        _refuse_when_asked(__version__)
        return
    from replayssm.integrations.vllm.engine import LAYERS

    for name, layer in LAYERS.items():
        if op_registry_oot.get(name) is None:
            PluggableLayer.register_oot(layer, name=name)
        elif op_registry_oot[name] is not layer:
            logging.getLogger(__name__).warning("another plugin replaces %s: %s is not available for it", name, KEY)


def _refuse_when_asked(version: str) -> None:
    """Another vLLM: nothing is replaced. A configuration that asks for us is refused where it is made."""
    from vllm.config import VllmConfig

    from replayssm.integrations.vllm.settings import parse, unsupported

    own = VllmConfig.__post_init__

    def __post_init__(self: VllmConfig) -> None:
        own(self)
        if parse(self.additional_config) is not None:
            raise ValueError(f"replayssm refuses to start: {unsupported(version)}")

    VllmConfig.__post_init__ = __post_init__
