"""LoRA on experts, made of operators; `expert_lora.ExpertLora` holds the adapters."""
