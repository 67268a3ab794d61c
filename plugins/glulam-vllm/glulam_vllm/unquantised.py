"""Experts in 16 bits: a method that vLLM makes in place of its own."""

from __future__ import annotations

from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from .choice import BF16
from .experts import GlulamExperts
from .layers import is_served

NAME = UnquantizedFusedMoEMethod.__name__


class GlulamUnquantizedMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's method with Glulam's experts, where they compute the layer."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        if not is_served(moe, BF16):
            super().__init__(moe)
            return
        # vLLM's own constructor chooses among vLLM's kernels, and raises an error where none fits.
        super(UnquantizedFusedMoEMethod, self).__init__(moe)
        self.experts_cls = GlulamExperts
        self.unquantized_backend = UnquantizedMoeBackend.TRITON  # leaves weights as they were loaded
        self.supports_pre_processed_weights = True


def register() -> None:
    """Have vLLM make the method above where it would make its own.

    Raises:
        RuntimeError: another plugin did so with a method of its own.
    """
    found = op_registry_oot.get(NAME)
    if found is None:
        UnquantizedFusedMoEMethod.register_oot(GlulamUnquantizedMoEMethod)
    elif found is not GlulamUnquantizedMoEMethod:
        raise RuntimeError(
            f"glulam_vllm: another plugin has replaced {NAME} by {found.__module__}.{found.__qualname__}; leave bf16 "
            "out of GLULAM_VLLM, or the other plugin out of VLLM_PLUGINS"
        )
