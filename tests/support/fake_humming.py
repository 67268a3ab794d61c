"""Stand-in in torch for the functions of Humming that perf calls: indexed and contiguous GEMMs, and operations on rows.

Rows keep 16 bits. Weights are dequantised from the tensors that perf passes, so that a wrong part gives a wrong result.
"""

from __future__ import annotations

import json
import sys
import types
from typing import ClassVar

import torch
import torch.nn.functional as F

from glulam.formats.scaled import scales_of

ROWS = 4  # rows of a tile


class CheckpointSchema:
    """Stand-in for Humming's schema of an MXFP8 checkpoint."""

    def __init__(self, weight_block_size=None):
        self.of_blocks = weight_block_size

    def shape(self, weight):
        return weight.shape

    def values(self, tensors):
        data, scale = tensors["weight"].float(), scales_of(tensors["weight_scale"])
        return data * scale.repeat_interleave(32, -1)

    def convert_humming(self, *, tensors, shape_n_stacks, shape_k_stacks, param_dtype, num_experts):
        assert tensors["weight"].shape[:2] == (num_experts, sum(shape_n_stacks)) and param_dtype == torch.bfloat16
        values = torch.empty(self.shape(tensors["weight"]), device="meta")
        return self, {"weight": values if tensors["weight"].is_meta else self.values(tensors), "weight_scale": None}


class BlockSchema(CheckpointSchema):
    def values(self, tensors):
        assert self.of_blocks == (128, 128)
        scale = tensors["weight_scale_inv"].repeat_interleave(128, -2).repeat_interleave(128, -1)
        return tensors["weight"].float() * scale


class Fp4Schema(CheckpointSchema):
    def shape(self, weight):
        return (*weight.shape[:-1], 2 * weight.shape[-1])

    def values(self, tensors):
        codes = torch.stack((tensors["weight"] & 15, tensors["weight"] >> 4), dim=-1).flatten(-2).long()
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        numbers = torch.cat((numbers, -numbers))[codes]
        return numbers * scales_of(tensors["weight_scale"]).repeat_interleave(32, -1)


class Config:
    """Stand-in for Humming's configuration of a layer."""

    def __init__(self, *, tensors, shape_n, shape_k, weight_schema, input_schema, num_experts, torch_dtype, **padding):
        assert tensors["weight"].shape == (num_experts, shape_n, shape_k) and torch_dtype == torch.bfloat16
        assert padding == {"pad_n_to_multiple": 256, "pad_k_to_multiple": 128}

    def to_str(self):
        return "layer"


class Kernel:
    """Stand-in for Humming's kernel class; it records which kernels were compiled."""

    compiled: ClassVar[list] = []

    @classmethod
    def prepare_kernels(cls, layer_config, compute_config, tuning_config, device):
        cls.compiled.append((layer_config, json.loads(compute_config)["gemm_type"], json.loads(tuning_config)))


def process(config, *, inputs, outputs=None, layout="normal", scatter_idx=None, num_valid_tokens=None, **activation):
    if activation:
        assert activation["activation_type"] == "binary_split"
        gate, up = inputs.float().chunk(2, dim=1)
        rows = (F.silu(gate) * up).to(inputs.dtype)
        if num_valid_tokens is not None:
            rows[int(num_valid_tokens) :] = float("nan")
        return rows, None, None
    if layout == "scatter":
        outputs = torch.full(outputs.shape, float("nan"), dtype=inputs.dtype)
        for token, places in enumerate(scatter_idx.tolist()):
            for place in places:
                if place >= 0:
                    outputs[place] = inputs[token]
        return outputs, None, None
    return inputs, None, None


def forward(
    config, *, inputs, weight, weight_scale, input_scale, locks, compute_config, tuning_config, valid_shape_m,
    sorted_ids=None, expert_ids=None, num_tokens_padded=None, expert_layout=None, top_k=1,
):  # fmt: skip
    gemm = json.loads(compute_config)["gemm_type"]
    assert json.loads(tuning_config) and locks.dtype == torch.int32 and valid_shape_m > 0
    y = torch.full((len(inputs) * top_k, weight.shape[1]), float("nan"), dtype=torch.bfloat16)
    if gemm == "grouped_contiguous":
        assert len(expert_layout) == len(weight) + 1
        for expert, (first, last) in enumerate(zip(expert_layout[:-1], expert_layout[1:], strict=True)):
            y[first:last] = (inputs[first:last].float() @ weight[expert].T).to(y.dtype)
        return y
    for block, start in enumerate(range(0, int(num_tokens_padded), ROWS)):
        ids = sorted_ids[start : start + ROWS]
        ids = ids[ids < len(y)].long()
        y[ids] = (inputs[ids // top_k].float() @ weight[expert_ids[block]].T).to(y.dtype)
    return y


def install(monkeypatch):
    """Install the stand-in modules, so that perf can import them."""
    tile = {"block_shape": [ROWS, 64, 64]}
    tiles = [[0, 1 << 20, tile], [1 << 20, 1 << 30, tile]]
    monkeypatch.setattr(Kernel, "compiled", [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    modules = {
        "humming": {},
        "humming.forward": {"may_process_input": process, "humming_forward": forward},
        "humming.transform": {
            "prepare_layer_config": Config,
            "check_and_pad_tensors": lambda config, tensors: tensors,
            "transform_humming_tensors": lambda config, tensors: tensors,
        },
        "humming.kernel": {},
        "humming.kernel.humming": {"HummingKernel": Kernel},
        "humming.tune": {"get_heuristics_config": lambda *, layer_config, gemm_type: tiles},
        "humming.schema": {
            "HummingInputSchema": lambda **given: types.SimpleNamespace(**given),
            "Fp8WeightSchema": BlockSchema, "Mxfp4WeightSchema": Fp4Schema,
        },
        "humming.schema.modelopt": {"ModeloptMxfp8WeightSchema": CheckpointSchema},
    }  # fmt: skip
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        module.__spec__ = types.SimpleNamespace(name=name)
        monkeypatch.setitem(sys.modules, name, module)
