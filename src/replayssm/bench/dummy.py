"""A model's geometry without its weights: a config.json for engines that fill in random numbers, cut in depth at will.

The words are those of a model folder's own config.json, or they are written from the catalogue (models.json), which
knows sizes only. What it does not know is filled in by rule, and every such filling is said.
"""

import json
import math
from pathlib import Path
from typing import Any

from replayssm import catalogue

NEMOTRON_VOCABULARY = 131072
CONTEXT = 262144
WORDS = ("hybrid_override_pattern", "layers_block_type", "layer_types")  # where a config.json lists its layers


def config(model: str, layers: int | None = None) -> tuple[dict[str, Any], str]:
    """The config.json of a model folder or of a catalogue's name, and in words where it is from and what was done.

    Args:
        model: a folder with a config.json, a name of `replayssm plan --list`, or a hub's name that holds one.
        layers: how many to keep, all kinds in proportion; None: all.

    Raises:
        ValueError: the model is not known, too little of it is known, or it cannot be cut so.
    """
    path = Path(model)
    if path.exists():
        path = path if path.is_file() else path / "config.json"
        if not path.is_file():
            raise ValueError(f"{model} holds no config.json: --model-id takes a name of the catalogue, or a folder.")
        found, source = json.loads(path.read_text()), f"config.json of {path.absolute().parent.name}"
    else:
        found, source = _from_catalogue(catalogue.find(model).name)
    if layers is not None:
        found, whole = cut(found, layers)
        source += f"; cut to {layers} of {whole} layers"
    return found, source


def cut(whole: dict[str, Any], layers: int) -> tuple[dict[str, Any], int]:
    """A config with `layers` of its layers, all kinds in proportion and in their order, and how many it had.

    Raises:
        ValueError: it lists no layers, has fewer, or there is no room for one of each kind.
    """
    part = dict(whole.get("text_config", whole))
    word = next((word for word in WORDS if part.get(word)), None)
    if word is None:
        raise ValueError(f"--layers needs a config with one of {', '.join(WORDS)}; this one has none.")
    kinds = list(part[word])
    places = {kind: [i for i, other in enumerate(kinds) if other == kind] for kind in dict.fromkeys(kinds)}
    if not len(places) <= layers <= len(kinds):
        raise ValueError(
            f"--layers must be between {len(places)} (one of each kind: {', '.join(places)}) and {len(kinds)}; "
            f"got {layers}."
        )
    counts = {kind: max(1, layers * len(there) // len(kinds)) for kind, there in places.items()}
    while sum(counts.values()) != layers:
        step = 1 if sum(counts.values()) < layers else -1
        lacks = {kind: layers * len(places[kind]) / len(kinds) - count for kind, count in counts.items()}
        some = [kind for kind in counts if step > 0 or counts[kind] > 1]
        counts[max(some, key=lambda kind: step * lacks[kind])] += step
    kept = sorted(places[k][(2 * j + 1) * len(places[k]) // (2 * n)] for k, n in counts.items() for j in range(n))
    part[word] = "".join(kinds[i] for i in kept) if isinstance(part[word], str) else [kinds[i] for i in kept]
    part["num_hidden_layers"] = layers
    return (whole | {"text_config": part} if "text_config" in whole else part), len(kinds)


def _from_catalogue(name: str) -> tuple[dict[str, Any], str]:
    entry = catalogue.entry(name)
    makers = {"nemotron_h": _nemotron_h, "qwen3_5": _qwen3_5}
    if entry["family"] not in makers or (entry["family"] == "qwen3_5" and entry["moe"]):
        raise ValueError(
            f"the catalogue knows too little of {name} for --dummy-weights: give a folder with its config.json."
        )
    made, notes = makers[entry["family"]](entry)
    return made, "; ".join([f"sizes of the catalogue ({entry['confidence']})", *notes])


def _nemotron_h(entry: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    ssm, heads, layers, notes = entry["ssm"], entry["attention"], entry["layers"], []
    pattern = entry.get("layer_string")
    if pattern is None:
        pattern = _alternating(layers["mamba2"], "E" if layers["moe"] else "-", layers["attention"])
        notes.append("order of layers made up")
    made = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "dtype": "bfloat16",
        "vocab_size": entry["vocab_size"] or NEMOTRON_VOCABULARY,
        "hidden_size": entry["hidden_size"],
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "intermediate_size": entry["ffn"],
        "mlp_hidden_act": "relu2",
        "num_attention_heads": heads["q_heads"],
        "num_key_value_heads": heads["kv_heads"],
        "head_dim": heads["head_dim"],
        "max_position_embeddings": CONTEXT,
        "mamba_num_heads": ssm["nheads"],
        "mamba_head_dim": ssm["head_dim"],
        "ssm_state_size": ssm["d_state"],
        "n_groups": ssm["ngroups"],
        "conv_kernel": ssm["conv_width"],
        "chunk_size": ssm.get("chunk_size") or 128,
        "use_conv_bias": True,
        "mamba_ssm_cache_dtype": "float32",
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": entry["mtp_layers"] or 0,
        "mtp_hybrid_override_pattern": "*E",
    }
    if layers["moe"]:
        latent = _latent(entry)
        if latent is not None:
            notes.append(f"latent size {latent} of the experts follows from the number of parameters")
        made |= {
            "n_routed_experts": entry["moe"]["experts"],
            "num_experts_per_tok": entry["moe"]["top_k"],
            "moe_intermediate_size": entry["ffn"],
            "moe_latent_size": latent,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 2 * entry["ffn"],
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        }
    return made, notes


def _alternating(mamba: int, second: str, attention: int) -> str:
    """Mamba layers, each with a second layer behind it, and attention between the two at even distances."""
    with_attention = {(2 * i + 1) * mamba // (2 * attention) for i in range(attention)}
    return "".join(f"M*{second}" if i in with_attention else f"M{second}" for i in range(mamba))


def _latent(entry: dict[str, Any]) -> int | None:
    """Width that experts work in, where at the model's own width they would be more than all of the model."""
    size = catalogue.parameters(entry["name"])
    per_width = entry["layers"]["moe"] * entry["moe"]["experts"] * 2 * entry["ffn"]
    if size is None or per_width * entry["hidden_size"] <= size.total:
        return None
    return int(2 ** round(math.log2(size.total / per_width)))


def _qwen3_5(entry: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    part, heads, layers = entry["linear_attention"], entry["attention"], entry["layers"]
    interval = layers["total"] // layers["attention"]
    kinds = (["linear_attention"] * (interval - 1) + ["full_attention"]) * layers["attention"]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": entry["vocab_size"],
        "hidden_size": entry["hidden_size"],
        "intermediate_size": entry["ffn"],
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "num_attention_heads": heads["q_heads"],
        "num_key_value_heads": heads["kv_heads"],
        "head_dim": heads["head_dim"],
        "linear_num_key_heads": part["num_k_heads"],
        "linear_num_value_heads": part["num_v_heads"],
        "linear_key_head_dim": part["head_k_dim"],
        "linear_value_head_dim": part["head_v_dim"],
        "linear_conv_kernel_dim": part["conv_width"],
        "max_position_embeddings": CONTEXT,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": entry["hidden_size"] <= 2560,
    }, ["without the vision part"]
