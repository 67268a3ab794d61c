"""vLLM's own experts, in Triton and by Marlin: names and arguments of vLLM 0.33.0."""

from __future__ import annotations

import importlib
import types
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .cases import ServingCase
from .suites.serving import ROWS_FP8, Batch, Experts, OfBatch
from .targets import BF16

LAYERS = "vllm.model_executor.layers"
MOE, MARLIN = f"{LAYERS}.fused_moe", f"{LAYERS}.quantization.utils.marlin_utils"
FP8_BLOCK = [128, 128]


def _of_world(case: ServingCase, b: Batch) -> dict[str, Any]:
    """Return the arguments about other GPUs' experts: ids count all GPUs' experts, and a map leads to those here."""
    return {"global_num_experts": case.world, "expert_map": b.expert_map}


def _triton(case: ServingCase, w1: Any, w2: Any) -> OfBatch:
    fused: Any = importlib.import_module(f"{MOE}.fused_moe").fused_experts
    if isinstance(w1, torch.Tensor):
        return lambda b: fused(b.x, w1, w2, b.weights, b.world_ids, **_of_world(case, b))
    config = importlib.import_module(f"{MOE}.config").fp8_w8a8_moe_quant_config(
        w1_scale=w1.scale, w2_scale=w2.scale, block_shape=FP8_BLOCK
    )
    return lambda b: fused(b.x, w1.data, w2.data, b.weights, b.world_ids, quant_config=config, **_of_world(case, b))


def _repacked(weights: str, w1: Any, w2: Any) -> Any:
    """Return both weights and both scales as Marlin reads them."""
    scales = w1.scale.view(torch.uint8), w2.scale.view(torch.uint8)
    layer = types.SimpleNamespace(params_dtype=torch.bfloat16)
    if weights == "mxfp4_weight_only":
        prepare = importlib.import_module(f"{MARLIN}_fp4").prepare_moe_mxfp4_layer_for_marlin
        return prepare(layer, w1.data, w2.data, *scales, None, None)[:4]
    prepare = importlib.import_module(f"{MARLIN}_fp8").prepare_mxfp8_moe_layer_for_marlin
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # the dtype that vLLM gives the scales
    try:
        return prepare(layer, w1.data, w2.data, *scales)
    finally:
        torch.set_default_dtype(default)


def _marlin(weights: str, type_name: str, case: ServingCase, w1: Any, w2: Any) -> OfBatch:
    fused: Any = importlib.import_module(f"{MOE}.experts.marlin_moe").fused_marlin_moe
    type_id = getattr(importlib.import_module("vllm.scalar_type").scalar_types, type_name).id
    first, second, *scales = _repacked(weights, w1, w2)
    workspace = importlib.import_module(MARLIN).marlin_make_workspace_new(w1.device, 4)
    return lambda b: fused(
        b.x, first, second, None, None, *scales, b.weights, b.world_ids, quant_type_id=type_id, workspace=workspace,
        **_of_world(case, b),
    )  # fmt: skip


def peers(models: Sequence[ServingCase], recipes: Sequence[str]) -> list[Experts]:
    """Return vLLM's experts, of all recipes. Raises ImportError if its modules, or what these need, are missing."""
    for module in (f"{MOE}.fused_moe", f"{MOE}.experts.marlin_moe"):
        importlib.import_module(module)
    return [
        Experts("vLLM Triton", (BF16,), BF16, _triton),
        Experts("vLLM Triton FP8", ("mxfp8", "fp8_block"), "fp8_block", _triton, ROWS_FP8),
        *(
            Experts(f"Marlin {name}", (recipe,), recipe, partial(_marlin, recipe, type_name))
            for name, recipe, type_name in (
                ("W8A16", "mxfp8_weight_only", "float8_e4m3fn"),
                ("W4A16", "mxfp4_weight_only", "float4_e2m1f"),
            )
        ),
    ]
