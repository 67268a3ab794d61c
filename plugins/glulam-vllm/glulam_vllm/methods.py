"""MoE methods for quantised experts: vLLM's parameters and loading, and Glulam's computation.

A method creates the same parameters as vLLM's class of the same format, so checkpoints load unchanged. After loading,
the elements are reordered in place for Glulam's kernels (`glulam.integrations.serving`). Constructors do not call
vLLM's constructors, which would choose one of vLLM's own kernels and raise an error if none fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig, biased_moe_quant_config
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend, make_unquantized_moe_kernel
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_mxfp4 import (  # noqa: E501
    CompressedTensorsW4A4Mxfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (  # noqa: E501
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a8_mxfp4 import (  # noqa: E501
    CompressedTensorsW4A8Mxfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    CompressedTensorsW8A8Fp8MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_mxfp8 import (  # noqa: E501
    CompressedTensorsW8A8Mxfp8MoEMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8FusedMoE, ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod, Mxfp4MoEMethod
from vllm.utils.math_utils import round_up

from glulam.integrations.serving import NotServed, ServedExperts

from .choice import ENV, FP8, MXFP4, MXFP8, NVFP4
from .experts import GlulamExperts
from .layers import constructor_of

PACKED = "_packed"
"""Suffix of the names that compressed-tensors gives to parameters with 4-bit elements."""
IS_PROCESSED = "_already_called_process_weights_after_loading"
"""Attribute by which vLLM marks a layer whose weights are prepared; vLLM removes it before it loads weights again."""


class Served(FusedMoEMethodBase):
    """Base of the MoE methods below. Their second base is vLLM's class, whose parameters and `apply` they keep.

    Attributes:
        format: the format of weights, one of `choice.FORMATS`.
        tensors: names of the parameters that ServedExperts' constructor takes, in its order.
        multiple: I is rounded up to a multiple of this number, and padded with zeros.
        rows: for MXFP4 weights, the dtype of activations for which the checkpoint was made, "bf16" or "fp8".
    """

    format: ClassVar[str]
    rows: ClassVar[str] = "bf16"
    tensors: ClassVar[tuple[str, ...]] = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    multiple: ClassVar[int] = 1
    supports_pre_processed_weights = False
    supports_eplb = False
    skip_forward_padding = False
    has_unpadded_output = False
    experts_cls = GlulamExperts
    moe_kernel: Any

    def __init__(self, moe: FusedMoEConfig, **attributes: Any) -> None:
        """Initialise only vLLM's common base class, FusedMoEMethodBase.

        `attributes`: the attributes that the constructor of vLLM's class would set and its other methods read.
        """
        FusedMoEMethodBase.__init__(self, moe)
        for name, value in attributes.items():
            setattr(self, name, value)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any
    ) -> tuple[int, int]:
        return hidden_size, round_up(intermediate_size_per_partition, self.multiple)

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        """Return a configuration with the biases and the activation's constants, but without quantised formats.

        If the configuration named a quantised format for activations, vLLM's prepare step would quantise them.
        """
        numbers = {f"gemm1_{key}": getattr(layer, f"swiglu_{key}", None) for key in ("alpha", "beta")}
        limit = getattr(layer, "swiglu_limit", None)
        return biased_moe_quant_config(*_biases(layer), gemm1_clamp_limit=limit, **numbers)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weights in place, and make the kernel at the first load.

        A later load copies the new weights into the tensors of the first one, because CUDA graphs read these.

        Raises:
            RuntimeError: Glulam does not run the loaded weights.
        """
        if getattr(layer, IS_PROCESSED, False):
            return
        setattr(layer, IS_PROCESSED, True)
        if self.moe_kernel is None:
            self.moe_quant_config = self.get_fused_moe_quant_config(layer)
            self.moe_kernel = make_unquantized_moe_kernel(
                self.moe_quant_config, self.moe, UnquantizedMoeBackend.TRITON, GlulamExperts,
                layer._expert_routing_tables(),
            )  # fmt: skip
        experts = self.moe_kernel.fused_experts
        try:
            served = self.experts_of(layer, experts.gate)
        except NotServed as reason:
            raise RuntimeError(
                f"glulam_vllm: {layer.layer_name}: {reason}; leave {self.format} out of {ENV}, for vLLM's own kernels"
            ) from reason
        if experts.held is None:
            experts.held = served
        else:
            _refill(experts.held, served)

    def experts_of(self, layer: Any, gate: Any) -> ServedExperts:
        make = getattr(ServedExperts, constructor_of(self.format, self.rows))
        tensors = [getattr(layer, name) for name in self.tensors]
        made: ServedExperts = make(*tensors, *_biases(layer), gate=gate, dtype=self.moe.in_dtype)
        return made


def _biases(layer: Any) -> tuple[Tensor | None, Tensor | None]:
    return getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None)


def _refill(kept: ServedExperts, new: ServedExperts) -> None:
    """Copy reloaded experts into the tensors of the same layer's first load.

    Raises:
        RuntimeError: the new weights need another recipe or other shapes, which captured graphs could not follow.
    """
    pairs = list(zip(_tensors(kept), _tensors(new), strict=True)) if kept.recipe == new.recipe else []
    if not pairs or any(old.shape != made.shape for old, made in pairs):
        raise RuntimeError(
            f"glulam_vllm: weights that were loaded again need recipe {new.recipe} and other tensors than the layer's "
            f"first ones, which had {kept.recipe}; start vLLM anew"
        )
    for old, made in pairs:
        if old.data_ptr() != made.data_ptr():
            old.copy_(made)


def _tensors(experts: ServedExperts) -> Iterator[Tensor]:
    for weight in (experts.w1, experts.w2):
        yield from (part for part in weight.parts if part is not None)
    yield from (bias for bias in (experts.b1, experts.b2) if bias is not None)


class GlulamGptOssMxfp4MoEMethod(Served, GptOssMxfp4MoEMethod):
    format = MXFP4
    multiple = 32

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe, weight_dtype="gpt_oss_mxfp4")


class GlulamMxfp4MoEMethod(Served, Mxfp4MoEMethod):
    """MoE method for DeepSeek-V4's MXFP4 experts."""

    format = MXFP4

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe, weight_dtype="mxfp4")


class GlulamFp8MoEMethod(Served, Fp8MoEMethod):
    """MoE method for FP8 experts with one scale for each block of 128 x 128."""

    format = FP8
    tensors = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")

    def __init__(self, moe: FusedMoEConfig, quant_config: Any) -> None:
        block = quant_config.weight_block_size
        super().__init__(
            moe, quant_config=quant_config, weight_block_size=block, moe_block_shape=block, block_quant=True,
            weight_scale_name="weight_scale_inv", weight_scale_refine=None,
        )  # fmt: skip


class GlulamModelOptMxFp8FusedMoE(Served, ModelOptMxFp8FusedMoE):
    format = MXFP8

    def __init__(self, moe: FusedMoEConfig, quant_config: Any) -> None:
        super().__init__(moe, quant_config=quant_config)


class GlulamModelOptNvFp4FusedMoE(Served, ModelOptNvFp4FusedMoE):
    """MoE method for modelopt's NVFP4 experts.

    It loads a checkpoint's activation scales, but does not use them: activations stay in 16 bits.
    """

    format = NVFP4
    tensors = (
        "w13_weight", "w13_weight_scale", "w13_weight_scale_2", "w2_weight", "w2_weight_scale", "w2_weight_scale_2",
    )  # fmt: skip

    def __init__(self, moe: FusedMoEConfig, quant_config: Any) -> None:
        super().__init__(moe, quant_config=quant_config, use_global_sf=False)


class GlulamCompressedTensorsMxfp8MoEMethod(Served, CompressedTensorsW8A8Mxfp8MoEMethod):
    format = MXFP8


class GlulamCompressedTensorsFp8MoEMethod(Served, CompressedTensorsW8A8Fp8MoEMethod):
    """MoE method for compressed-tensors' FP8 experts with one scale for each block of 128 x 128."""

    format = FP8

    def __init__(self, moe: FusedMoEConfig, weights: Any, rows: Any) -> None:
        super().__init__(
            moe, weight_quant=weights, input_quant=rows, weight_block_size=weights.block_structure, block_quant=True,
            static_input_scales=False,
        )  # fmt: skip


class CompressedInBytes(Served):
    """Base of the MoE methods for compressed-tensors' 4-bit experts.

    After loading, the parameters `w13_weight_packed` and `w2_weight_packed` lose the suffix `_packed`.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in ("w13_weight", "w2_weight"):  # vLLM's `apply` reads them under this name
            if (packed := getattr(layer, name + PACKED, None)) is not None:
                delattr(layer, name + PACKED)
                layer.register_parameter(name, Parameter(packed.data, requires_grad=False))
        super().process_weights_after_loading(layer)


class GlulamCompressedTensorsMxfp4MoEMethod(CompressedInBytes, CompressedTensorsW4A4Mxfp4MoEMethod):
    format = MXFP4

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe, group_size=32)


class GlulamCompressedTensorsW4A8Mxfp4MoEMethod(CompressedInBytes, CompressedTensorsW4A8Mxfp4MoEMethod):
    """MoE method for compressed-tensors' MXFP4 experts whose checkpoint asks for activations in 8 bits."""

    format = MXFP4
    rows = "fp8"

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe, weight_dtype="mxfp4")


class GlulamCompressedTensorsNvfp4MoEMethod(CompressedInBytes, CompressedTensorsW4A4Nvfp4MoEMethod):
    """MoE method for compressed-tensors' NVFP4 experts.

    Their global scales divide values, so they are inverted for Glulam, whose scales multiply.
    """

    format = NVFP4

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe, group_size=16, use_global_sf=False)

    def experts_of(self, layer: Any, gate: Any) -> ServedExperts:
        of_w13, of_w2 = (1.0 / getattr(layer, f"{name}_weight_global_scale").detach() for name in ("w13", "w2"))
        w13, w13_scale, w2, w2_scale = (getattr(layer, name) for name in self.tensors)
        tensors = w13, w13_scale, of_w13, w2, w2_scale, of_w2
        return ServedExperts.nvfp4(*tensors, *_biases(layer), gate=gate, dtype=self.moe.in_dtype)
