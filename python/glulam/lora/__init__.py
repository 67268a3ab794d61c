"""LoRA on experts, computed by Glulam's operators; `expert_lora.ExpertLora` holds the adapters."""
