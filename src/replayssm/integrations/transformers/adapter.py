"""enable and disable: one Transformers model decodes with the replayed cache.

Two kinds of module are hooked, on their instances only:

    the decoder   (the module that owns `layers`) decides for each forward, or for pieces of it, who runs the
                  recurrence, and brackets a replayed piece with begin and commit: once per model step, not per layer
    each mixer    in a replayed piece: family.inputs -> decode_layer -> family.finish; else the host's own forward

Who runs what, for T new tokens per row:

    no state yet (prefill)                     host; the states are loaded as its layers finish
    T <= max_tokens                            replay
    T > max_tokens, columns that are padding   replay, in pieces of max_tokens columns: rows bring 0..T tokens each
    T > max_tokens, none                       host, after the records are folded
    drafts follow (assisted generation)        as above, but the last max_tokens columns replay, so that crop reaches
"""

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from replayssm import ConvGeometry, ReplayCache, decode_layer
from replayssm.integrations.transformers.families import MIXERS, MODEL_TYPES, Family
from replayssm.integrations.transformers.host_cache import ADOPTED, Recipe, adopt, open_for_host, rows_of

CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # 5.24 and newer, then 5.17
HOOK = "_replayssm"


class MixerHook(NamedTuple):
    """What a hooked mixer keeps."""

    host_forward: Callable[..., Tensor]
    family: Family
    layer: int  # its number among the recurrent layers
    config: Any


class DecoderHook(NamedTuple):
    """What a hooked decoder keeps."""

    host_forward: Callable[..., Any]
    signature: inspect.Signature
    cache_name: str
    recipe: Recipe


def enable(
    model: PreTrainedModel,
    window: int = 16,
    format: str | Mapping[Any, str] = "fp32",
    max_tokens: int = 1,
    staggered: bool = True,
    seed: int = 0,
    implementation: str | None = None,
) -> PreTrainedModel:
    """Let this model decode with the replayed cache; `model.generate` is called as before.

    Args:
        model: in eval mode, of one of the supported types.
        window: how many tokens may wait in the ring before they are folded into the checkpoint; at least max_tokens
            is taken, since the newest max_tokens must not be folded yet.
        format: how the checkpoint is stored, see replayssm.formats; or by recurrent layer, {"default": name, 0: name}.
        max_tokens: tokens per row that one replayed forward may bring. With drafts + 1 here, assisted generation
            (prompt lookup, an assistant model) works, which Transformers refuses for recurrent models.
        staggered: rows flush at different steps.
        seed: of formats that round stochastically.
        implementation: "reference", "torch" or "triton"; None takes the fast one for the model's device.

    Returns:
        The model. Calling it again changes the options; caches made before keep theirs.

    Raises:
        ValueError: the model or an option is not supported; nothing has been changed.
    """
    if model.training:
        raise ValueError(
            "enable: decoding has no gradients, and the model is in training mode: call model.eval() first."
        )
    decoder, mixers = _recurrent_layers(model)
    families = [MIXERS[type(mixer).__name__] for mixer in mixers]
    recipe = _recipe(decoder, mixers, families[0], window, format, max_tokens, staggered, seed, implementation)
    recipe.cache(1)  # the core's own checks of format, window and sizes
    recipe = recipe._replace(window=max(window, max_tokens))

    disable(model)
    for index, (mixer, family) in enumerate(zip(mixers, families, strict=True)):
        _hook(mixer, _mixer_forward, MixerHook(mixer.forward, family, index, decoder.config))
    signature = inspect.signature(decoder.forward)
    cache_name = next(name for name in CACHE_NAMES if name in signature.parameters)
    _hook(decoder, _decoder_forward, DecoderHook(decoder.forward, signature, cache_name, recipe))
    if max_tokens > 1:
        model._is_stateful = False  # this instance can take tokens back
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo enable. Caches in use are not carried over."""
    for module in model.modules():
        if HOOK in module.__dict__:
            hook = module.__dict__.pop(HOOK)
            del module.__dict__["forward"]
            if hook.host_forward != module.forward:  # an instance's own forward, e.g. Accelerate's
                module.forward = hook.host_forward
    model.__dict__.pop("_is_stateful", None)
    return model


def replay_cache(host_cache: Cache | None) -> ReplayCache | None:
    """The ReplayCache behind a host cache, one slot per batch row; None if it holds none (yet)."""
    rows = rows_of(host_cache)
    return None if rows is None else rows.cache


def decoder_of(model: PreTrainedModel) -> Any:
    """The module of a model that owns `layers`: the one with recurrent layers, or the first where none has any.

    Raises:
        ValueError: there is none.
    """
    owners = [module for module in model.modules() if isinstance(getattr(module, "layers", None), nn.ModuleList)]
    for module in owners:
        if any(type(part).__name__ in MIXERS for part in module.layers.modules()):
            return module
    if not owners:
        raise ValueError(f"replayssm: model type {model.config.model_type!r} has no list of layers.")
    return owners[0]


def is_recurrent(decoder: Any) -> bool:
    """Whether its cache holds states, which can't go back unless the model is enabled."""
    return any(type(layer) in ADOPTED for layer in DynamicCache(config=decoder.config).layers)


def recipe_of(decoder: Any) -> Recipe | None:
    """What the caches of an enabled model are made of; None for a decoder without recurrent layers.

    Raises:
        ValueError: it has recurrent layers and is not enabled.
    """
    hook: DecoderHook | None = decoder.__dict__.get(HOOK)
    if hook is not None:
        return _placed(hook.recipe, decoder)
    if is_recurrent(decoder):
        raise ValueError(
            "generate: the model's recurrent layers keep states that can't go back: call enable(model) first."
        )
    return None


def _recurrent_layers(model: PreTrainedModel) -> tuple[PreTrainedModel, list[Any]]:
    """The decoder and its mixers, in the order of its layers."""
    decoder = decoder_of(model)
    mixers: list[Any] = [part for part in decoder.layers.modules() if type(part).__name__ in MIXERS]
    if mixers:
        return decoder, sorted(mixers, key=lambda mixer: mixer.layer_idx)
    raise ValueError(
        f"enable: model type {model.config.model_type!r} has no recurrent layer that replayssm knows; supported are "
        f"{MODEL_TYPES}."
    )


def _recipe(
    decoder: PreTrainedModel,
    mixers: list[Any],
    family: Family,
    window: int,
    format: str | Mapping[Any, str],
    max_tokens: int,
    staggered: bool,
    seed: int,
    implementation: str | None,
) -> Recipe:
    geometries = {family.geometry(mixer) for mixer in mixers}
    geometry = geometries.pop()
    if geometries or geometry.H % geometry.G:
        raise ValueError(
            "enable: all recurrent layers must have the same H, G, V, K, with G key groups dividing H value heads; got "
            f"{', '.join(str(tuple(sizes)) for sizes in (geometry, *geometries))}."
        )
    activations = {mixer.activation for mixer in mixers}
    if not activations <= {"silu", "swish"}:
        raise ValueError(f"enable: the convolution must be followed by silu; got {', '.join(sorted(activations))}.")
    devices = {parameter.device for mixer in mixers for parameter in mixer.parameters()}
    if len(devices) > 1:
        raise ValueError(
            "enable: all recurrent layers must be on one device, since they share one cache; got "
            f"{', '.join(sorted(map(str, devices)))}."
        )
    return Recipe(
        recurrence=family.recurrence,
        geometry=geometry,
        conv=ConvGeometry(channels=mixers[0].conv_dim, width=mixers[0].conv_kernel_size),
        layer_indices=tuple(mixer.layer_idx for mixer in mixers),
        transposed=family.transposed,
        window=window,
        max_tokens=max_tokens,
        format=format,
        staggered=staggered,
        seed=seed,
        implementation=implementation,
        dtype=decoder.dtype,
        device=devices.pop(),
    )


def _placed(recipe: Recipe, decoder: Any) -> Recipe:
    """The recipe for where the model is now: it may have been moved since enable."""
    parameter = next(decoder.layers[recipe.layer_indices[0]].parameters())
    return recipe._replace(dtype=decoder.dtype, device=parameter.device)


def _hook(module: nn.Module, forward: Callable[..., Any], hook: MixerHook | DecoderHook) -> None:
    """Bound methods, not closures: a deep copy of the model then runs its own weights."""
    setattr(module, HOOK, hook)
    module.forward = MethodType(forward, module)


def _mixer_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    hook: MixerHook = self.__dict__[HOOK]
    rows = rows_of(next((kwargs[name] for name in CACHE_NAMES if name in kwargs), None))
    if rows is None or rows.step is None:
        return hook.host_forward(hidden_states, *args, **kwargs)
    hidden_states = _columns(hidden_states, rows.order)
    x, raw_g, raw_w, gate = hook.family.inputs(self, hidden_states)
    weights = hook.family.weights(self, hook.config)
    y = decode_layer(rows.cache, hook.layer, rows.step, x, raw_g, raw_w, weights)  # [B, T, H, V]
    return _columns(hook.family.finish(self, y, gate), rows.back)


def _columns(x: Tensor, order: Tensor | None) -> Tensor:
    """Columns of [B, T, D] in another order, row by row."""
    return x if order is None else x.take_along_dim(order[..., None], dim=1)


def _decoder_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    hook: DecoderHook = self.__dict__[HOOK]
    call = dict(hook.signature.bind_partial(*args, **kwargs).arguments)
    call |= call.pop("kwargs", {})
    name = next((name for name in CACHE_NAMES if call.get(name) is not None), None)
    gradients = self.training or (torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()))
    if name is None:
        use_cache = call.get("use_cache")
        if gradients or not (self.config.use_cache if use_cache is None else use_cache):
            return hook.host_forward(**call)
        name = hook.cache_name
        call[name] = DynamicCache(config=self.config)
    elif gradients:
        raise ValueError(
            "replayssm: decoding with a cache has no gradients: call model.eval() and run it under "
            "torch.inference_mode() or torch.no_grad(), or disable(model) first."
        )
    cache = call[name]
    inputs = call["input_ids"] if call.get("input_ids") is not None else call["inputs_embeds"]
    batch, tokens = inputs.shape[:2]
    rows = rows_of(cache) or adopt(cache, _placed(hook.recipe, self))
    rows.require(batch)
    if rows.step is not None:  # begun by the caller, who also commits it
        return hook.host_forward(**call)
    valid = _valid(call.get("attention_mask"), tokens)
    recording = cache.layers[rows.recipe.layer_indices[0]].record_past
    pieces = _pieces(tokens, rows.cache is not None, rows.recipe.max_tokens, recording, valid)
    outputs = []
    for piece in pieces:
        part = call if len(pieces) == 1 else _part(call, piece, tokens)
        if piece.replayed:
            with rows.stepping(piece.stop - piece.start, _valid(part.get("attention_mask"), piece.stop - piece.start)):
                outputs.append(hook.host_forward(**part))
        else:
            if rows.cache is not None:
                open_for_host(cache, rows)
            outputs.append(hook.host_forward(**part))
    return outputs[0] if len(outputs) == 1 else _joined(outputs, call.get("return_dict"))


class Piece(NamedTuple):
    """Columns start..stop of a forward, and whether they go by replay."""

    start: int
    stop: int
    replayed: bool


def _pieces(tokens: int, has_state: bool, max_tokens: int, recording: bool, valid: Tensor | None) -> list[Piece]:
    """Who runs which columns: the table of the module's docstring."""
    if has_state and tokens <= max_tokens:
        return [Piece(0, tokens, True)]
    if has_state and valid is not None and not valid.all():
        return [Piece(i, min(i + max_tokens, tokens), True) for i in range(0, tokens, max_tokens)]
    head = max(tokens - max_tokens, 0 if has_state else 1) if recording else tokens
    return [piece for piece in (Piece(0, head, False), Piece(head, tokens, True)) if piece.start < piece.stop]


def _valid(mask: Any, tokens: int) -> Tensor | None:
    """Which of the new columns hold a token, [B, T], as far as a mask tells; None: all."""
    mask = mask.get("linear_attention") if isinstance(mask, dict) else mask
    return mask[:, -tokens:] if mask is not None and mask.ndim == 2 else None


def _part(call: dict[str, Any], piece: Piece, tokens: int) -> dict[str, Any]:
    """The arguments of one piece of a forward of `tokens` columns."""
    part = dict(call, return_dict=True)
    for name, value in call.items():
        if name in ("input_ids", "inputs_embeds") and value is not None:
            part[name] = value[:, piece.start : piece.stop]
        elif name == "position_ids" and value is not None:
            part[name] = value[..., piece.start : piece.stop]
        elif name == "attention_mask" and isinstance(value, Tensor) and value.ndim == 2:
            part[name] = value[:, : value.shape[1] - tokens + piece.stop]
        elif isinstance(value, Tensor | dict) and name not in CACHE_NAMES:
            raise ValueError(
                f"replayssm: a forward of {tokens} columns that is run in pieces takes a 2D attention_mask and no "
                f"other inputs by column; got {name}. enable(model, max_tokens={tokens}) runs it in one."
            )
    return part


def _joined(outputs: list[Any], return_dict: bool | None) -> Any:
    """The outputs of all pieces as those of one forward."""
    whole = outputs[-1]
    for name in whole:
        if name == "last_hidden_state":
            whole[name] = torch.cat([output[name] for output in outputs], dim=1)
        elif name == "hidden_states":
            whole[name] = tuple(
                torch.cat(parts, dim=1) for parts in zip(*(output[name] for output in outputs), strict=True)
            )
        elif name not in CACHE_NAMES:
            raise ValueError(
                f"replayssm: {name} cannot be returned for a forward that is run in pieces; ask for it in "
                "forwards of max_tokens tokens."
            )
    return whole.to_tuple() if return_dict is False else whole
