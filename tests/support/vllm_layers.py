"""MoE layers of vLLM's own classes on the CPU: created, loaded from checkpoints, prepared and called as by vLLM.

A fixture imports this module, since it imports vLLM. One process is one rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import distributed
from vllm.config import DeviceConfig, VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.quantization import get_quantization_config

from .serving import Held, held

BF16 = torch.bfloat16
EXPERTS, HIDDEN, WIDTH, K = 5, 160, 96, 3
WIDTHS = {"fp8": 128, "compressed_fp8": 128}
"""The intermediate size I of checkpoints for which it is not WIDTH."""
NAME = "model.layers.0.mlp.experts"
SHARDS = "gate_proj", "up_proj"
ALONE = FusedMoEParallelConfig.make_no_parallel()
SECOND_OF_TWO = dataclasses.replace(ALONE, ep_size=2, ep_rank=1, use_ep=True)


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """Context with vLLM's state of a process: its configuration, and a group of one rank."""
    with (
        tempfile.TemporaryDirectory() as folder,
        set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))),
    ):
        distributed.init_distributed_environment(1, 0, f"file://{Path(folder, 'ranks')}", 0, "gloo")
        distributed.initialize_model_parallel(1)
        try:
            yield
        finally:
            distributed.cleanup_dist_env_and_memory()


def compressed(weights: dict[str, Any], rows: dict[str, Any] | None, format: str) -> dict[str, Any]:
    """Return a configuration of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows, "format": format}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, "ignore": []}


def _numbers(bits: int, group: int, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "group_size": group, "symmetric": True, "strategy": "group", **others}


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
_ROWS_IN_16 = _numbers(4, 16, strategy="tensor_group", dynamic="local")
_SCALES = {"scale_dtype": "torch.uint8"}


class Checkpoint(NamedTuple):
    """A checkpoint's format of experts.

    Attributes:
        kind: the format, see `serving.held`.
        parts: names of a weight's tensors, after the projection's name.
        method: vLLM's name of the quantisation method; "": none.
        config: the configuration as in config.json.
    """

    kind: str
    parts: tuple[str, ...]
    method: str = ""
    config: dict[str, Any] | None = None


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CHECKPOINTS = {
    "bf16": Checkpoint("bf16", ("weight",)),
    "fp8": Checkpoint("fp8_block", ("weight", "weight_scale_inv"), "fp8", FP8),
    "deepseek_v4": Checkpoint("mxfp4", ("weight", "weight_scale"), "deepseek_v4_fp8", FP8),
    "mxfp4": Checkpoint("mxfp4", ("weight", "weight_scale"), "mxfp4", {"quant_method": "mxfp4"}),
    "mxfp8": Checkpoint("mxfp8", ("weight", "weight_scale"), "mxfp8", {"quant_method": "mxfp8"}),
    "mxfp8_wide": Checkpoint("mxfp8_wide", ("weight", "weight_scale"), "mxfp8", {"quant_method": "mxfp8"}),
    "modelopt_fp4": Checkpoint("nvfp4", ("weight", "weight_scale", "weight_scale_2"), "modelopt_fp4", MODELOPT),
    "modelopt_mixed": Checkpoint(
        "nvfp4", ("weight", "weight_scale", "weight_scale_2"), "modelopt_mixed",
        {
            "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {f"{NAME}.{e}.{p}": {"quant_algo": "NVFP4", "group_size": 16}
                                 for e in range(8) for p in (*SHARDS, "down_proj")},
        },
    ),
    "compressed_mxfp4": Checkpoint(
        "mxfp4", ("weight_packed", "weight_scale"), "compressed-tensors",
        compressed(_numbers(4, 32, **_SCALES), None, "mxfp4-pack-quantized"),
    ),
    "compressed_mxfp4_fp8": Checkpoint(
        "mxfp4_fp8", ("weight_packed", "weight_scale"), "compressed-tensors",
        compressed(_numbers(4, 32, **_SCALES), _numbers(8, 32, dynamic=True), "mxfp4-pack-quantized"),
    ),
    "compressed_fp8": Checkpoint(
        "fp8_block", ("weight", "weight_scale"), "compressed-tensors",
        compressed(
            {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [128, 128]},
            _numbers(8, 128, dynamic=True), "float-quantized",
        ),
    ),
    "compressed_mxfp8": Checkpoint(
        "mxfp8", ("weight", "weight_scale"), "compressed-tensors",
        compressed(_numbers(8, 32, **_SCALES), _numbers(8, 32, dynamic=True, **_SCALES), "mxfp8-quantized"),
    ),
    "compressed_nvfp4": Checkpoint(
        "nvfp4", ("weight_packed", "weight_scale", "weight_global_scale"), "compressed-tensors",
        compressed(_numbers(4, 16, strategy="tensor_group"), _ROWS_IN_16, "nvfp4-pack-quantized"),
    ),
}  # fmt: skip


def config_of(checkpoint: Checkpoint) -> Any:
    if not checkpoint.method:
        return None
    return get_quantization_config(checkpoint.method).from_config(checkpoint.config)


def moe_config(
    width: int = WIDTH, k: int = K, *, activation: str = "silu", parallel: FusedMoEParallelConfig = ALONE,
    in_dtype: torch.dtype = BF16, **options: Any,
) -> FusedMoEConfig:  # fmt: skip
    gate = MoEActivation(activation)
    made = FusedMoEConfig(
        num_experts=EXPERTS, num_logical_experts=EXPERTS, num_local_experts=EXPERTS, experts_per_token=k,
        hidden_dim=HIDDEN, intermediate_size=width, device="cpu", in_dtype=in_dtype,
        activation=gate if gate.is_gated else MoEActivation.SILU, routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel, **options,
    )  # fmt: skip
    made.activation = gate  # vLLM refuses to construct a configuration without a gate on a CPU
    return made


def layer_of(
    quant_config: Any, width: int = WIDTH, k: int = K, *, parallel: FusedMoEParallelConfig = ALONE,
    on_input: bool = False, numbers: dict[str, float] | None = None, **options: Any,
) -> RoutedExperts:  # fmt: skip
    """Return a layer without loaded weights.

    numbers: swiglu_limit and other constants, set on the layer and its configuration.
    """
    numbers = numbers or {}
    manager = ExpertMapManager(64, k, EXPERTS, 0, 2, parallel, "round_robin", False)
    moe = moe_config(width, k, parallel=parallel, **options, **numbers)
    moe.num_local_experts = manager.local_num_experts
    up = {} if moe.is_act_and_mul else {"ckpt_up_proj_name": None}
    of_layer = {name: value for name, value in numbers.items() if name.startswith("swiglu")}
    return RoutedExperts(
        NAME, moe.in_dtype, moe, quant_config, expert_map_manager=manager, apply_router_weight_on_input=on_input, **up,
        **of_layer,
    )  # fmt: skip


def empty(name: str, width: int | None = None, k: int = K, **options: Any) -> RoutedExperts:
    """Return an unloaded layer for one of CHECKPOINTS."""
    return layer_of(config_of(CHECKPOINTS[name]), width or WIDTHS.get(name, WIDTH), k, **options)


def weights_of(name: str, gated: bool = True, seed: int = 1) -> tuple[Held, Held]:
    """Return random w13 and w2 for one of CHECKPOINTS."""
    kind, width, halves = CHECKPOINTS[name].kind, WIDTHS.get(name, WIDTH), 2 if gated else 1
    return (
        held(kind, EXPERTS, halves * width, HIDDEN, seed=seed, halves=halves),
        held(kind, EXPERTS, HIDDEN, width, seed=seed + 1),
    )


def tensors_of(checkpoint: Checkpoint, w13: Held, w2: Held) -> Iterator[tuple[str, Tensor]]:
    """Yield a checkpoint's tensors, expert by expert, with their names relative to the layer."""
    of_gates = len(w13.values[0]) != w2.values.shape[2]
    for expert in range(len(w2.values)):
        for part, first, second in zip(checkpoint.parts, w13.parts, w2.parts, strict=True):
            halves = first[expert].chunk(2) if of_gates else (first[expert],)
            for name, tensor in (*zip(SHARDS, halves, strict=False), ("down_proj", second[expert])):
                stored = tensor.squeeze() if tensor.numel() == 1 else tensor
                if checkpoint.method == "compressed-tensors":
                    stored = _as_compressed(part, stored)
                yield f"{expert}.{name}.{part}", stored


def _as_compressed(part: str, tensor: Tensor) -> Tensor:
    """Return a part as compressed-tensors stores it: reciprocals of global scales, and E8M0 scales as bytes."""
    if part == "weight_global_scale":
        return 1.0 / tensor
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor


def load(layer: RoutedExperts, name: str, w13: Held, w2: Held) -> RoutedExperts:
    """Load weights under the names of one of CHECKPOINTS, and prepare them."""
    checkpoint = CHECKPOINTS[name]
    with torch.no_grad():
        loaded = set(layer.load_weights(tensors_of(checkpoint, w13, w2)))
    assert len(loaded) == 2 * len(checkpoint.parts)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def forward(layer: RoutedExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    result: Tensor = layer.quant_method.apply(layer, x, weights, ids, None, None)
    return result


def run(name: str, w13: Held, w2: Held, x: Tensor, logits: Tensor) -> Tensor:
    """Run a layer with vLLM's router and runner, as a model creates and calls it."""
    config = get_current_vllm_config()
    runner = FusedMoEFactory(
        num_experts=EXPERTS, top_k=K, hidden_size=HIDDEN, intermediate_size=WIDTHS.get(name, WIDTH), params_dtype=BF16,
        quant_config=config_of(CHECKPOINTS[name]), prefix=f"{name}.experts", renormalize=True,
    )  # fmt: skip
    load(runner.routed_experts, name, w13, w2)
    with set_forward_context(None, config, num_tokens=len(x)):
        result: Tensor = runner(x, logits)
    return result
