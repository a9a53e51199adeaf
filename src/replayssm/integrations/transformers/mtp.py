"""A model's own multi-token-prediction head, which Transformers leaves out when it loads a checkpoint.

The layout of Qwen3-Next and Qwen3.5 checkpoints (`mtp.*`): of the next token's embedding and the hidden state that
predicted it (the model's last one, after its final norm)

    h' = norm( layer( fc [ norm(embedding) | norm(hidden) ] ) )       one decoder layer with full attention

and the model's own output matrix turns h' into logits for the token after. Drafting on, h' is the next hidden state.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache

PREFIX = "mtp."
MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


class MTPHead(nn.Module):
    """A multi-token-prediction head beside the decoder that it drafts for, whose embeddings and rotation it uses.

    Args:
        decoder: the model's decoder (the module that owns `layers`), of one of MODEL_TYPES.

    Raises:
        ValueError: the model type has no such head.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        if decoder.config.model_type not in MODEL_TYPES:
            raise ValueError(
                f"MTPHead: model type {decoder.config.model_type!r} has no multi-token-prediction head that replayssm "
                f"knows; supported are {', '.join(MODEL_TYPES)}."
            )
        config = copy.deepcopy(decoder.config)
        config.num_hidden_layers = 1
        config.layer_types = ["full_attention"]
        D, eps = config.hidden_size, config.rms_norm_eps
        norm = type(decoder.norm)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(D, eps=eps) for _ in range(3))
        self.fc = nn.Linear(2 * D, D, bias=False)
        self.layers = nn.ModuleList([type(decoder.layers[0])(config, 0)])
        for weight in (self.fc.weight, *self.layers.parameters()):
            if weight.ndim > 1:  # experts and routers come with whatever memory holds
                nn.init.normal_(weight, std=config.initializer_range)
        self.config = config
        self._decoder = (decoder,)  # not a part of this module

    def new_cache(self) -> DynamicCache:
        """An empty cache for forward."""
        return DynamicCache(config=self.config)

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """Hidden states [B, T, D] that predict the tokens after `ids`.

        Args:
            ids: [B, T] tokens.
            hidden: [B, T, D] hidden states that predicted them.
            positions: [B, T], those of the hidden states.
            mask: bool [B, 1, T, keys], which keys of the cache (those appended here included) each entry attends to.
            cache: the entries before, a DynamicCache of one layer; these are appended.
        """
        (decoder,) = self._decoder
        embedding = self.pre_fc_norm_embedding(decoder.embed_tokens(ids))
        x = self.fc(torch.cat([embedding, self.pre_fc_norm_hidden(hidden.to(embedding.dtype))], dim=-1))
        if decoder.config.model_type != "qwen3_next":  # time, height and width are the same in a text
            positions = positions.expand(3, *positions.shape)
        turns = decoder.rotary_emb(x, positions)
        x = self.layers[0](x, position_embeddings=turns, attention_mask=mask, past_key_values=cache)
        return self.norm(x)

    def save(self, path: Path, dtype: torch.dtype) -> None:
        """Write the weights as a checkpoint names them."""
        state = {
            PREFIX + name: value.detach().to("cpu", dtype).contiguous() for name, value in self.state_dict().items()
        }
        save_file(state, path, metadata={"format": "pt"})


def load_head(decoder: Any, folder: Path) -> MTPHead:
    """The head in a checkpoint's folder, in the decoder's dtype and on its device.

    Raises:
        ValueError: the folder holds none, or its tensors are not those of this model.
    """
    head = MTPHead(decoder)
    found: dict[str, Tensor] = {}
    for path in _files(folder):
        with safe_open(path, framework="pt") as tensors:
            found |= {n.removeprefix(PREFIX): tensors.get_tensor(n) for n in tensors.keys() if n.startswith(PREFIX)}
    wanted = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    got = {name: tuple(value.shape) for name, value in found.items()}
    if got != wanted:
        differing = sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))
        raise ValueError(
            f"load_head: {folder} needs the tensors {PREFIX}* of a head with one layer; "
            + ("none are there." if not got else f"these differ: {', '.join(differing)}.")
        )
    head.load_state_dict(found)
    parameter = next(decoder.parameters())
    return head.to(parameter.device, parameter.dtype).eval().requires_grad_(False)


def _files(folder: Path) -> list[Path]:
    """The files of a checkpoint that may hold the head: those its index names, or all."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = {file for name, file in json.loads(index.read_text())["weight_map"].items() if name.startswith(PREFIX)}
        return sorted(folder / shard for shard in shards)
    return sorted(folder.glob("*.safetensors"))
