"""Subclasses of vLLM's quantisation configurations that create Glulam's MoE methods for layers that Glulam runs.

Each subclass extends the class that vLLM has registered under the same name when this module is imported. That may be
another plugin's class.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from . import methods
from .layers import is_served, log_left

BLOCK = [128, 128]
READ = "MXFP4, NVFP4, MXFP8 and FP8 in blocks"
DeepSeekV4Base: Any = get_quantization_config("deepseek_v4_fp8")
Fp8Base: Any = get_quantization_config("fp8")
GptOssBase: Any = get_quantization_config("gpt_oss_mxfp4")
Mxfp4Base: Any = get_quantization_config("mxfp4")
MxFp8Base: Any = get_quantization_config("modelopt_mxfp8")
NvFp4Base: Any = get_quantization_config("modelopt_fp4")
MixedBase: Any = get_quantization_config("modelopt_mixed")
CompressedBase: Any = get_quantization_config("compressed-tensors")


def served(
    config: Any, method: type[methods.Served], moe: Any, *given: Any, reason: str | None = None
) -> FusedMoEMethodBase | None:
    """Return Glulam's MoE method for a layer's experts; None: vLLM runs the layer.

    Args:
        config: the model's quantisation configuration.
        method: the class of the method.
        moe: the layer's FusedMoEConfig.
        given: further arguments of the method's constructor.
        reason: a reason known to the caller why vLLM must run the layer. None: no such reason.
    """
    if config.online_quantization_config is not None:
        reason = "--quantization asks for another format than the checkpoint's"
    made: Any = method
    return made(moe, *given) if is_served(moe, method.format, reason, method.multiple) else None


def served_fp8(config: Any, moe: Any, own: Any) -> FusedMoEMethodBase | None:
    """Return Glulam's MoE method for FP8 experts; None: vLLM runs the layer.

    Args:
        config: the model's quantisation configuration.
        moe: the layer's FusedMoEConfig.
        own: the FP8 configuration of these experts; `config` itself, unless the model has several.
    """
    reason = _against_blocks(own.weight_block_size, moe)
    return served(config, methods.GlulamFp8MoEMethod, moe, own, reason=reason)


def _against_blocks(block: list[int] | None, moe: Any) -> str | None:
    """Return the reason why Glulam does not run FP8 experts with one scale for each `block`; None: Glulam runs them."""
    width = moe.intermediate_size_per_partition
    if block != BLOCK:
        return f"blocks of scales are {block or 'whole tensors or rows'}; served are {BLOCK}"
    return f"a rank's intermediate size {width} ends inside a block of {BLOCK[0]}" if width % BLOCK[0] else None


def served_nvfp4(config: Any, moe: Any, own: Any) -> FusedMoEMethodBase | None:
    """Return Glulam's MoE method for NVFP4 experts; None: vLLM runs the layer.

    Args:
        config: the model's quantisation configuration.
        moe: the layer's FusedMoEConfig.
        own: the NVFP4 configuration of these experts; `config` itself, unless the model has several.
    """
    override = own.moe_activation_override
    reason = f"activations are to be quantised as {override}" if override else None
    return served(config, methods.GlulamModelOptNvFp4FusedMoE, moe, own, reason=reason)


class GlulamGptOssMxfp4Config(GptOssBase):
    def _make_moe_method(self, moe: Any) -> FusedMoEMethodBase:
        return served(self, methods.GlulamGptOssMxfp4MoEMethod, moe) or super()._make_moe_method(moe)


class GlulamMxfp4Config(Mxfp4Base):
    def _make_moe_method(self, moe: Any) -> FusedMoEMethodBase:
        return served(self, methods.GlulamMxfp4MoEMethod, moe) or super()._make_moe_method(moe)


class GlulamMxFp8Config(MxFp8Base):
    def FusedMoEMethodCls(self, quant_config: Any, moe_config: Any) -> FusedMoEMethodBase:
        made = served(self, methods.GlulamModelOptMxFp8FusedMoE, moe_config, quant_config)
        return made or super().FusedMoEMethodCls(quant_config=quant_config, moe_config=moe_config)


class GlulamNvFp4Config(NvFp4Base):
    def FusedMoEMethodCls(self, quant_config: Any, moe_config: Any) -> FusedMoEMethodBase:
        made = served_nvfp4(self, moe_config, quant_config)
        return made or super().FusedMoEMethodCls(quant_config=quant_config, moe_config=moe_config)


class ByLayer(QuantizationConfig):
    """Base of configurations in which the experts' format depends on the layer.

    Subclasses define `_served`, which returns Glulam's method for a layer, or None if vLLM runs it.
    """

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        made = self._served(layer, prefix) if isinstance(layer, RoutedExperts) else None
        return made or super().get_quant_method(layer, prefix)

    def _served(self, layer: Any, prefix: str) -> FusedMoEMethodBase | None:
        raise NotImplementedError


class GlulamFp8Config(ByLayer, Fp8Base):
    def _served(self, layer: Any, prefix: str) -> FusedMoEMethodBase | None:
        if _is_skipped(self, prefix, match_mode=self.ignored_layers_match_mode):
            return None
        if self.store_dtype == "mxfp4":
            return served(self, methods.GlulamMxfp4MoEMethod, layer.moe_config)
        return served_fp8(self, layer.moe_config, self)


class GlulamDeepSeekV4Config(ByLayer, DeepSeekV4Base):
    def _served(self, layer: Any, prefix: str) -> FusedMoEMethodBase | None:
        if _is_skipped(self, prefix):
            return None
        if self.expert_dtype != "fp4":
            return served_fp8(self, layer.moe_config, self)
        if self._is_nvfp4(prefix):
            return served_nvfp4(self, layer.moe_config, self._get_nvfp4_config())
        return served(self, methods.GlulamMxfp4MoEMethod, layer.moe_config)

    def _is_nvfp4(self, prefix: str) -> bool:
        by_layer = getattr(self, "_is_nvfp4_expert_layer", None)  # DeepSeek-V4.1's configuration
        return bool(by_layer(prefix)) if by_layer else self.moe_quant_algo == "NVFP4"


class GlulamModelOptMixedConfig(ByLayer, MixedBase):
    def _served(self, layer: Any, prefix: str) -> FusedMoEMethodBase | None:
        if self.is_layer_excluded(prefix):
            return None
        algorithm, moe = self._resolve_quant_algo(prefix), layer.moe_config
        if algorithm in ("FP8_PB_WO", "FP8_BLOCK_SCALES"):
            return served_fp8(self, moe, self.fp8_block_config)
        if algorithm in ("NVFP4", "W4A16_NVFP4"):
            own = self.nvfp4_config if algorithm == "NVFP4" else self.w4a16_nvfp4_config
            return served_nvfp4(self, moe, own)
        if algorithm == "MXFP8":
            return served(self, methods.GlulamModelOptMxFp8FusedMoE, moe, self.mxfp8_config)
        if algorithm:
            log_left(algorithm, f"served are {READ}")
        return None


class GlulamCompressedTensorsConfig(ByLayer, CompressedBase):
    def _served(self, layer: Any, prefix: str) -> FusedMoEMethodBase | None:
        self._add_fused_moe_to_target_scheme_map()
        projections = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
        schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in projections]
        if schemes[0] is None or any(scheme != schemes[0] for scheme in schemes):
            return None
        weights, rows = schemes[0].get("weights"), schemes[0].get("input_activations")
        method: type[methods.Served]
        if self._is_mxfp4_w4a8_fp8(weights, rows):
            method = methods.GlulamCompressedTensorsW4A8Mxfp4MoEMethod
        elif self._is_mxfp4(weights):
            method = methods.GlulamCompressedTensorsMxfp4MoEMethod
        elif self._is_mxfp8(weights):
            method = methods.GlulamCompressedTensorsMxfp8MoEMethod
        elif self._is_nvfp4_format(weights):
            method = methods.GlulamCompressedTensorsNvfp4MoEMethod
        elif self._is_fp8_w8a8(weights, rows):
            reason = _against_blocks(weights.block_structure, layer.moe_config)
            method = methods.GlulamCompressedTensorsFp8MoEMethod
            return served(self, method, layer.moe_config, weights, rows, reason=reason)
        else:
            log_left("compressed-tensors'", f"served are {READ}")
            return None
        return served(self, method, layer.moe_config)


def _is_skipped(config: Any, prefix: str, **options: Any) -> bool:
    return bool(is_layer_skipped(
        prefix=prefix, ignored_layers=config.ignored_layers, fused_mapping=config.packed_modules_mapping, **options
    ))  # fmt: skip


CONFIGS: dict[str, type] = {
    "gpt_oss_mxfp4": GlulamGptOssMxfp4Config,
    "mxfp4": GlulamMxfp4Config,
    "fp8": GlulamFp8Config,
    "deepseek_v4_fp8": GlulamDeepSeekV4Config,
    "modelopt_mxfp8": GlulamMxFp8Config,
    "mxfp8": GlulamMxFp8Config,
    "modelopt_fp4": GlulamNvFp4Config,
    "modelopt_mixed": GlulamModelOptMixedConfig,
    "compressed-tensors": GlulamCompressedTensorsConfig,
}
"""Glulam's configurations, by vLLM's names of quantisation methods."""


def register() -> None:
    """Register these configurations under vLLM's own names. Further calls change nothing."""
    for name, config in CONFIGS.items():
        if get_quantization_config(name) is not config:
            register_quantization_config(name)(config)
