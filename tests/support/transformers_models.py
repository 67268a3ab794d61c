"""Small mixture-of-experts models of transformers, by the first part of their class names."""

from __future__ import annotations

from typing import Any

HIDDEN, INTER, EXPERTS, TOP_K = 32, 24, 6, 2
ATTENTION = {
    "vocab_size": 64, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"moe_intermediate_size": INTER, "intermediate_size": 48, "num_experts": EXPERTS},
    "Mixtral": {"intermediate_size": INTER, "num_local_experts": EXPERTS},
    "GptOss": {"intermediate_size": INTER, "num_local_experts": EXPERTS},
    "DeepseekV3": {
        "moe_intermediate_size": INTER, "intermediate_size": 48, "n_routed_experts": EXPERTS, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 2,
    },
}  # fmt: skip


def config_of(name: str, **sizes: int) -> Any:
    import transformers

    options = {**ATTENTION, "num_experts_per_tok": TOP_K, **MODELS[name], **sizes}
    return getattr(transformers, f"{name}Config")(**options)


def class_of(name: str) -> Any:
    import transformers

    return getattr(transformers, f"{name}ForCausalLM")
