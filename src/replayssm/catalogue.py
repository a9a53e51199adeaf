"""What is known of public models and of GPUs, with where it is from: models.json, gpus.json; and any config.json.

Unknown figures are None, never guessed.
"""

import json
import re
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from replayssm import checks, recurrences
from replayssm.recurrences import Geometry

ACTIVATION = 2  # bytes of an activation, and of an attention key or value: bf16 or fp16
CALL = {"gated_delta_net": "gdn"}  # models.json's words for recurrences, where they are not ours


# --- models -----------------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    """Parameters of a model, and of them those that one token takes."""

    total: float
    active: float


class Model(NamedTuple):
    """What a plan needs of a model, at tensor parallelism 1.

    Attributes:
        source: where the figures come from, and `confidence` how sure they are.
        layers: recurrent ones.
        conv_width: taps of the convolution in front.
        kv_bytes: keys and values of one token in all attention layers, 16-bit; None: unknown.
        kv_heads: by which they can be split; 1 for latent attention.
        size: None: unknown.
        experts: how many, and how many a token takes; None: not a mixture, or unknown.
        weight_bytes: of the files, where they are there; None: from `size`.
    """

    name: str
    source: str
    confidence: str
    note: str
    recurrence: str
    geometry: Geometry
    layers: int
    conv_width: int
    kv_bytes: int | None
    kv_heads: int
    size: Size | None
    experts: tuple[int, int] | None
    weight_bytes: int | None


def parameters(name: str) -> Size | None:
    """Of a name such as Nemotron-3-Super-120B-A12B, Qwen3.5-4B or Granite-4.0-H-350M; None if it says none."""
    found = re.search(r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)([BM])(?:-A(\d+(?:\.\d+)?)B)?(?![A-Za-z\d])", name, re.I)
    if not found:
        return None
    total = float(found[1]) * (1e9 if found[2].upper() == "B" else 1e6)
    return Size(total, float(found[3]) * 1e9 if found[3] else total)


def data(name: str) -> dict[str, Any]:
    """A JSON file of the package."""
    return json.loads(resources.files("replayssm").joinpath(name).read_text())


def entry(name: str) -> dict[str, Any]:
    """What models.json says of a model, by its name there."""
    return next(found for found in data("models.json")["models"] if found["name"] == name)


def models() -> list[Model]:
    """The public models whose sizes are known (models.json) and whose recurrence the library has."""
    known = data("models.json")
    found = [_known(entry, known["sources"]) for entry in known["models"]]
    return [model for model in found if model is not None]


def _known(entry: dict[str, Any], sources: dict[str, str]) -> Model | None:
    recurrence = CALL.get(entry["recurrence"], entry["recurrence"])
    part = entry.get("ssm") or entry.get("linear_attention") or {}
    names = ("nheads", "ngroups", "head_dim", "d_state") if "nheads" in part else (
        "num_v_heads", "num_k_heads", "head_v_dim", "head_k_dim")  # fmt: skip
    if recurrence not in recurrences.names() or not all(part.get(name) for name in names):
        return None
    attention, layers = entry["attention"] or {}, entry["layers"]
    heads = attention.get("kv_heads")
    count = sum(number for kind, number in layers.items() if kind.startswith("attention"))
    width: int | None = None
    if "kv_lora_rank" in attention:
        heads, width = 1, attention["kv_lora_rank"] + attention["qk_rope_head_dim"]
    elif heads and attention.get("head_dim"):
        width = 2 * heads * attention["head_dim"]
    elif not count:
        width = 0
    mixture = entry["moe"] or {}
    ids = entry["source"] if isinstance(entry["source"], list) else [entry["source"]]
    return Model(
        name=entry["name"],
        source="; ".join(sources[i] for i in ids),
        confidence=entry["confidence"],
        note=entry["note"],
        recurrence=recurrence,
        geometry=Geometry(*(part[name] for name in names)),
        layers=layers.get(recurrence) or layers[entry["recurrence"]],
        conv_width=part["conv_width"],
        kv_bytes=None if width is None else count * width * ACTIVATION,
        kv_heads=heads or 1,
        size=parameters(entry["name"]),
        experts=(mixture["experts"], mixture["top_k"]) if mixture.get("experts") else None,
        weight_bytes=None,
    )


# config.json's words by model type: H, G, V, K, convolution width
_MAMBA2 = ("mamba_n_heads", "mamba_n_groups", "mamba_d_head", "mamba_d_state", "mamba_d_conv")
_DELTA = ("linear_num_value_heads", "linear_num_key_heads", "linear_value_head_dim", "linear_key_head_dim")
_KDA = ("linear_num_heads", "linear_num_heads", "linear_head_dim", "linear_head_dim", "linear_conv_kernel_dim")
_CONFIGS = {
    "nemotron_h": ("mamba2", ("mamba_num_heads", "n_groups", "mamba_head_dim", "ssm_state_size", "conv_kernel")),
    "mamba2": ("mamba2", ("num_heads", "n_groups", "head_dim", "state_size", "conv_kernel")),
    "bamba": ("mamba2", _MAMBA2),
    "granitemoehybrid": ("mamba2", _MAMBA2),
    "falcon_h1": ("mamba2", _MAMBA2),
    "zamba2": ("mamba2", ("n_mamba_heads", "mamba_ngroups", "mamba_headdim", "mamba_d_state", "mamba_d_conv")),
    "qwen3_5": ("gdn", (*_DELTA, "linear_conv_kernel_dim")),
    "qwen3_5_moe": ("gdn", (*_DELTA, "linear_conv_kernel_dim")),
    "qwen3_next": ("gdn", (*_DELTA, "linear_conv_kernel_dim")),
    "olmo_hybrid": ("gdn", (*_DELTA, "linear_conv_kernel_dim")),
    "kimi_linear": ("kda", _KDA),
    "glm5_next": ("kda", _KDA),
}
_RECURRENT = {"linear_attention", "mamba", "mamba2", "hybrid", "M"}
_ATTENTION = {"full_attention", "attention", "hybrid", "sliding_attention", "*"}


def from_config(folder: Path) -> Model:
    """A model by the config.json in a folder, or by the file itself; with the class's defaults where transformers is.

    Raises:
        ValueError: there is none, or it lacks what a plan needs.
    """
    path = folder if folder.is_file() else folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no config.json: --model takes a name of `replayssm plan --list`, or a folder."
        )
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    config = _with_defaults(path, raw)
    kind = str(config.get("model_type", "")).removesuffix("_text")
    if kind not in _CONFIGS:
        raise checks.unknown(f"model_type in {path},", kind, _CONFIGS)
    recurrence, words = _CONFIGS[kind]
    missing = [word for word in words if not isinstance(config.get(word), int)]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}, which a plan for {kind} needs: add them as numbers.")
    H, G, V, K, width = (config[word] for word in words)
    kinds = config.get("layer_types") or config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if not kinds:
        kinds = ["hybrid" if kind == "falcon_h1" else "linear_attention"] * config["num_hidden_layers"]
    count = sum(layer in _ATTENTION for layer in kinds)
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or 1
    dim = config.get("head_dim") or config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
    kv = 2 * heads * dim
    if config.get("kv_lora_rank"):
        heads, kv = 1, config["kv_lora_rank"] + config.get("qk_rope_head_dim", 0)
    name = path.absolute().parent.name
    files = list(path.parent.glob("model*.safetensors"))
    weights = sum(file.stat().st_size for file in files) or None
    experts = config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts")
    chosen = config.get("num_experts_per_tok") if "moe" in kinds or "moe" in kind or "E" in kinds else None
    return Model(
        name=name,
        source=str(path),
        confidence="config",
        note="",
        recurrence=recurrence,
        geometry=Geometry(H, G, V, K),
        layers=sum(layer in _RECURRENT for layer in kinds),
        conv_width=width,
        kv_bytes=count * kv * ACTIVATION,
        kv_heads=heads,
        size=parameters(name) or (Size(weights / 2, weights / 2) if weights else None),
        experts=(experts, chosen) if experts and chosen else None,
        weight_bytes=weights,
    )


def _with_defaults(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The text part of a config.json; where transformers knows its class, with the class's names and defaults."""
    text = raw.get("text_config", raw)
    try:
        from transformers import AutoConfig
    except ImportError:
        return text
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    except Exception:  # a class that is not known, or a value that it refuses: the file's own words then
        return text
    names = {*config.to_dict(), "layer_types", "layers_block_type"}
    return {name: getattr(config, name, None) for name in names} | {"model_type": text.get("model_type")}


def find(name: str) -> Model:
    """A model by its name in the catalogue, part of a hub's name (nvidia/...-BF16), or a folder with a config.json.

    Raises:
        ValueError: none of these.
    """
    if Path(name).exists():
        return from_config(Path(name))
    known = {model.name.lower(): model for model in models()}
    inside = [key for key in known if re.search(rf"(?<![a-z\d.]){re.escape(key)}(?![a-z\d.])", name.lower())]
    if inside:
        return known[max(inside, key=len)]
    near = get_close_matches(name.lower().split("/")[-1], known, 3, 0.5)
    hint = f" Near: {', '.join(known[key].name for key in near)}." if near else ""
    raise ValueError(
        f"no model {name!r}: --model takes a name of `replayssm plan --list`, or a folder with a config.json.{hint}"
    )


# --- GPUs -------------------------------------------------------------------------------------------------------------


class Gpu(NamedTuple):
    """A GPU's nominal figures: memory in GB, bandwidth in GB/s, dense 16-bit TFLOP/s."""

    key: str
    name: str
    device: str
    memory: float
    bandwidth: float
    tflops: float
    source: str


def gpus() -> dict[str, Gpu]:
    """GPUs with nominal figures (gpus.json), by the name that --gpu takes."""
    return {key: Gpu(key, **entry) for key, entry in data("gpus.json")["gpus"].items()}


def gpu(name: str) -> Gpu:
    """The GPU called `name`.

    Raises:
        ValueError: there is none of that name.
    """
    known = gpus()
    if name.lower() not in known:
        raise checks.unknown("GPU", name, known)
    return known[name.lower()]
