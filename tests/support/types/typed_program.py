"""A user's program that a strict type checker must accept. The file is type-checked, not run."""

from __future__ import annotations

from typing import Any, cast

import torch
from typing_extensions import assert_type

import glulam
from ffi_bridge import BundleError
from glulam.formats.mxfp8.fold import FoldedWeight, FoldedWeights
from glulam.formats.mxfp8.tensor import MXFP8Copies
from glulam.names import ActivationName, Axes, RecipeName

t = torch.empty(0)


def operators(up: bool) -> None:
    gate = glulam.GateUp(t, t)
    assert_type(glulam.grouped_mm(t, [t, t], splits=[1, 2], bias=t), torch.Tensor)
    assert_type(glulam.grouped_mlp(t, t, t, offs=t), torch.Tensor)
    assert_type(glulam.grouped_mlp(t, gate, [t, t], splits=[1, 2], activation="geglu", b2=t), torch.Tensor)
    assert_type(glulam.grouped_glu(t, gate, offs=t, activation="situ", gate_cap=2.0, up_cap=None), torch.Tensor)
    assert_type(glulam.grouped_glu(t, t, offs=t, return_preact=True), tuple[torch.Tensor, torch.Tensor])
    glulam.grouped_glu(t, t, offs=t, return_preact=up).dim()
    assert_type(glulam.grouped_dglu(t, t, t, offs=t, glu_layout="interleaved32").dpreact, torch.Tensor)
    assert_type(glulam.grouped_wgrad(t, t, offs=t), torch.Tensor)
    assert_type(glulam.grouped_wgrad(t, t, offs=t, out=t), torch.Tensor)
    assert_type(glulam.grouped_wgrad(t, t, offs=t, out=[t, t], recipe="mxfp8_wgrad")[0], torch.Tensor)


def formats(axis: Axes, config: dict[str, Any]) -> None:
    assert_type(glulam.quantize_mxfp8(t), glulam.MXFP8Tensor)
    assert_type(glulam.quantize_mxfp8(t, axis="col", block="1x128"), glulam.MXFP8Tensor)
    assert_type(glulam.quantize_mxfp8(t, axis="both", scale_layout="swizzled"), MXFP8Copies)
    assert_type(glulam.quantize_mxfp8(t, axis=axis), glulam.MXFP8Tensor | MXFP8Copies)
    assert_type(glulam.prepare_mxfp8_weight(t), FoldedWeight)
    assert_type(glulam.prepare_mxfp8_weight(t, axis="both"), FoldedWeights)
    assert_type(glulam.prepare_mxfp8_weight(t, axis=axis), FoldedWeight | FoldedWeights)
    assert_type(glulam.quantize_nvfp4(t), glulam.NVFP4Tensor)
    rows, folded = glulam.quantize_mxfp8(t), glulam.prepare_mxfp8_weight(t)
    glulam.grouped_mlp(rows, folded, folded, offs=t, recipe="mxfp8")
    glulam.grouped_mlp(t, glulam.quantize_nvfp4(t), glulam.quantize_nvfp4(t), offs=t, recipe="nvfp4_weight_only")
    glulam.grouped_mlp(t, glulam.prepare_mxfp4_weight(t), glulam.prepare_mxfp4_weight(t), offs=t, recipe="mxfp4")
    glulam.grouped_mlp(t, t, t, offs=t, recipe=glulam.recipes.MXFP8)
    glulam.grouped_mlp(t, t, t, offs=t, recipe=cast(RecipeName, config["recipe"]))


def layers(ep: glulam.distributed.ExpertParallel, activation: ActivationName) -> None:
    routing = glulam.route(t, 2, score="sigmoid")
    assert_type(routing, glulam.Routing)
    assert_type(glulam.moe(t, routing, t, t, recipe="mxfp8", activation=activation, parallel=ep), torch.Tensor)
    mlp = glulam.nn.GroupedMLP(8, 64, 32, activation=activation, glu_layout="interleaved", recipe="mxfp8")
    moe = glulam.nn.MoE(64, 32, 8, 2, activation="clamped_swiglu", limit=7.0, bias=True, recipe="mxfp4_weight_only")
    moe.add_lora(8)
    mlp.to(torch.bfloat16)
    glulam.nn.MoE(64, 32, 8, top_k=2, score="topk_softmax", parallel=ep)
    glulam.distributed.ExpertParallel(None, 8, 2, 64, 1024, dtype=torch.bfloat16, transport="all_to_all")


def tools() -> None:
    report = glulam.tune("grouped_mlp", experts=8, in_features=64, intermediate=32, recipe="mxfp4_weight_only")
    assert_type(report.gain, float)
    assert_type(str(glulam.explain("grouped_mm", (64, 256), (8, 512, 256), dtype=torch.float16)), str)
    assert_type(glulam.preload("cuda"), int)


errors: list[RuntimeError] = [glulam.UnsupportedDevice(), BundleError()]
