"""Tiny random models of every supported family, with the geometries that broke other implementations.

Head dim 80 (nemotron_h), 3 value heads per key head (qwen3_5), K = 96 and V = 192 (olmo_hybrid), d_state 64 (zamba2)
and 256 (bamba), one group, and inner sizes that are not expand x hidden (nemotron_h, falcon_h1). Random initialisation
would make every decay forget at once; here decays near 1 and near 0 both occur.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

VOCAB = 83
_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip
_MOE = {
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
_ATTENTION_LAST = {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]}
_GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "head_dim": 16,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip

CONFIGS = {
    "mamba2": {
        "vocab_size": VOCAB, "hidden_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "state_size": 32, "n_groups": 2, "expand": 2,
        "chunk_size": 8, "use_bias": True,
    },
    "nemotron_h": _COMMON | {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"], "head_dim": 16,
        "mamba_num_heads": 6, "mamba_head_dim": 80, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8,
    },
    "bamba": _COMMON | _MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_d_state": 256},
    "granitemoehybrid": _COMMON | _MAMBA | {
        **_ATTENTION_LAST, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48,
        "residual_multiplier": 0.5, "position_embedding_type": "rope",
    },
    "falcon_h1": _COMMON | _MAMBA | {
        "num_hidden_layers": 2, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2,
        "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.7, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        "lm_head_multiplier": 0.9, "embedding_multiplier": 1.5,
    },
    "zamba2": _COMMON | {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "mamba_d_state": 64, "n_mamba_heads": 4, "mamba_headdim": 32, "mamba_ngroups": 1, "chunk_size": 8,
        "num_mem_blocks": 1, "adapter_rank": 8, "use_mem_rope": True,
    },
    "qwen3_5_text": _COMMON | _GDN | _ATTENTION_LAST,
    "qwen3_5_moe_text": _COMMON | _GDN | _ATTENTION_LAST | _MOE,
    "qwen3_next": _COMMON | _GDN | _ATTENTION_LAST | _MOE,
    "olmo_hybrid": _COMMON | _ATTENTION_LAST | {
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
    },
    "kimi_linear": _COMMON | _ATTENTION_LAST | {
        "linear_head_dim": 32, "linear_num_heads": 3, "num_key_value_heads": 4, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32,
        "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    },
    "glm5_next": {
        "text_config": _COMMON | _ATTENTION_LAST | {
            "num_key_value_heads": 4, "linear_head_dim": 32, "linear_num_heads": 3, "kv_lora_rank": 16,
            "q_lora_rank": 16, "v_head_dim": 16, "qk_nope_head_dim": 16, "moe_intermediate_size": 32,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse", "dense"],
            "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2, "index_kpool": 4,
        },
        "vision_config": {
            "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64,
        },
    },
}  # fmt: skip
FAMILIES = tuple(CONFIGS)


def make(model_type: str, dtype: torch.dtype = torch.float32, **options: object) -> PreTrainedModel:
    """A tiny model in eval mode, the same on every call; options override its config."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(CONFIGS[model_type] | options))
    kind = AutoModelForImageTextToText if "vision_config" in CONFIGS[model_type] else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            last = name.rsplit(".", 1)[-1]
            if last == "A_log":  # exp(-exp(A_log) dt): from hardly any decay to hardly any memory
                parameter.copy_(torch.linspace(-6.0, 2.0, parameter.numel()).view_as(parameter))
            elif last == "dt_bias":
                parameter.copy_(torch.linspace(-3.0, 1.0, parameter.numel())[torch.randperm(parameter.numel())])
            elif parameter.ndim > 1:  # large enough that layers and gates matter
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.generation_config.eos_token_id = None
    return model.to(dtype)
