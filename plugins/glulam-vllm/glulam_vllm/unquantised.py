"""The MoE method for experts in 16 bits, which replaces vLLM's own."""

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
    """vLLM's method for 16-bit experts; it uses Glulam's experts if Glulam runs the layer, else vLLM's."""

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
    """Make vLLM create GlulamUnquantizedMoEMethod instead of its own UnquantizedFusedMoEMethod.

    Raises:
        RuntimeError: another plugin has already replaced vLLM's method.
    """
    found = op_registry_oot.get(NAME)
    if found is None:
        UnquantizedFusedMoEMethod.register_oot(GlulamUnquantizedMoEMethod)
    elif found is not GlulamUnquantizedMoEMethod:
        raise RuntimeError(
            f"glulam_vllm: another plugin has replaced {NAME} by {found.__module__}.{found.__qualname__}; leave bf16 "
            "out of GLULAM_VLLM, or the other plugin out of VLLM_PLUGINS"
        )
