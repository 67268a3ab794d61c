"""Humming's experts as vLLM calls them: names and arguments of humming-kernels 0.1.19 and vLLM 0.33.0.

Humming has grouped GEMMs, and kernels that activate, quantise and scatter rows. vLLM calls the indexed GEMM where all
experts are here, and the contiguous one where tokens choose among experts of several GPUs. Alignment of rows to blocks
and sums of rows are vLLM's own; here a routing of ours and `serving_rows` stand for them. Kernels are compiled by NVRTC
at the first call, all of a layer's at once.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import glulam

from .serving_cases import ServingCase
from .serving_data import ROWS_16_BITS, ROWS_FP8, Batch, Call, Contestant

SWIGLU = {"activation_type": "binary_split", "activation_impl": "a / (1.f + expf(-a)) * b"}
ROW_BLOCK = 128  # elements of a row that share a scale
INDEXED, CONTIGUOUS = "indexed", "grouped_contiguous"
PADDING = {"pad_n_to_multiple": 256, "pad_k_to_multiple": 128}
LOCKS_PER_SM = 8


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A pair of formats. weights: the recipe whose checkpoint format it reads."""

    name: str
    recipes: tuple[str, ...]
    weights: str
    has_fp8_rows: bool


SCHEMES = (
    Scheme("Humming W8A8", ("mxfp8", "fp8_block"), "fp8_block", True),
    Scheme("Humming W8A16", ("mxfp8_weight_only",), "mxfp8_weight_only", False),
    Scheme("Humming W4A16", ("mxfp4_weight_only",), "mxfp4_weight_only", False),
    Scheme("Humming W4A8", ("mxfp4_weight_only",), "mxfp4_weight_only", True),
)


def _loaded(weights: str, w: Any) -> tuple[Any, dict[str, Tensor]]:
    """Humming's schema of a checkpoint, and the tensors that it has. Copies, since Humming changes some in place."""
    schema: Any = importlib.import_module("humming.schema")
    if weights == "fp8_block":
        tensors = {"weight": w.data.clone(), "weight_scale_inv": w.scale.clone()}
        return schema.Fp8WeightSchema(weight_block_size=(ROW_BLOCK, ROW_BLOCK)), tensors
    tensors = {"weight": w.data.clone(), "weight_scale": w.scale.view(torch.uint8).clone()}
    if weights == "mxfp8_weight_only":
        return importlib.import_module("humming.schema.modelopt").ModeloptMxfp8WeightSchema(), tensors
    return schema.Mxfp4WeightSchema(), tensors


def _input_schema(has_fp8_rows: bool) -> Any:
    schema: Any = importlib.import_module("humming.schema")
    if not has_fp8_rows:
        return schema.HummingInputSchema(input_quant_mode="none")
    return schema.HummingInputSchema(
        a_dtype="float8e4m3", input_scale_group_size=ROW_BLOCK, input_scale_dtype="float32",
        input_quant_mode="dynamic_group",
    )  # fmt: skip


class Linear:
    """One of the two layers: its configuration, tensors as kernels read them, and tiles by numbers of rows."""

    def __init__(self, scheme: Scheme, gemm: str, w: Any, stacks: int) -> None:
        self.forward: Any = importlib.import_module("humming.forward")
        transform: Any = importlib.import_module("humming.transform")
        tune: Any = importlib.import_module("humming.tune")
        schema, loaded = _loaded(scheme.weights, w)
        experts, n, k = w.shape
        schema, loaded = schema.convert_humming(
            tensors=loaded, shape_n_stacks=[n // stacks] * stacks, shape_k_stacks=[k], param_dtype=torch.bfloat16,
            num_experts=experts,
        )  # fmt: skip
        self.config, self.tensors = transform.prepare_and_transform_humming_tensors(
            tensors=loaded, shape_n=n, shape_k=k, weight_schema=schema, input_schema=_input_schema(scheme.has_fp8_rows),
            num_experts=experts, torch_dtype=torch.bfloat16, device=w.device, **PADDING,
        )  # fmt: skip
        self.tiles = tune.get_heuristics_config(layer_config=self.config, gemm_type=gemm)
        numbers = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": gemm}
        self.options = {"compute_config": json.dumps(numbers), "tuning_config": json.dumps(self.tiles)}

    def block(self, rows: int) -> int:
        """Rows of a tile."""
        return next(tile["block_shape"][0] for low, high, tile in self.tiles if low < rows <= high)

    def rows(self, x: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Rows as the GEMM reads them, and their scales; x itself if nothing is to be done."""
        rows, scales, _ = self.forward.may_process_input(self.config, inputs=x, **options)
        return rows, scales

    def __call__(self, rows: tuple[Tensor, Tensor | None], locks: Tensor, **options: Any) -> Tensor:
        x, scales = rows
        y: Tensor = self.forward.humming_forward(
            self.config, inputs=x, input_scale=scales, locks=locks, **self.tensors, **self.options, **options
        )
        return y


class Experts:
    """Both layers of one model."""

    def __init__(self, scheme: Scheme, case: ServingCase, w1: Any, w2: Any) -> None:
        self.case = case
        self.around: Any = importlib.import_module(f"{__package__}.serving_rows")
        gemm = CONTIGUOUS if case.is_part else INDEXED
        self.fc1, self.fc2 = Linear(scheme, gemm, w1, stacks=2), Linear(scheme, gemm, w2, stacks=1)
        count = LOCKS_PER_SM * torch.cuda.get_device_properties(w1.device).multi_processor_count
        self.locks = torch.zeros(count, dtype=torch.int32, device=w1.device)
        self.rows_dtype = torch.float8_e4m3fn if scheme.has_fp8_rows else torch.bfloat16

    def __call__(self, b: Batch) -> Tensor:
        case = self.case
        routing = glulam.Routing.from_topk(b.ids, b.weights, case.experts, world_experts=case.world)
        expected_rows = math.ceil(b.ids.numel() * case.experts / case.world)
        call = self._contiguous if case.is_part else self._indexed
        return call(b, routing, expected_rows)

    def _indexed(self, b: Batch, routing: glulam.Routing, rows: int) -> Tensor:
        """Rows stay in the order of choices, and GEMMs find them by index."""
        blocks = self.fc1.block(rows), self.fc2.block(rows)
        aligned = {block: self.around.align(routing, block) for block in dict.fromkeys(blocks)}
        names = "sorted_ids", "expert_ids", "num_tokens_padded"
        of1, of2 = (dict(zip(names, aligned[block], strict=True)) for block in blocks)
        h = self.fc1(self.fc1.rows(b.x), self.locks, top_k=self.case.top_k, valid_shape_m=rows, **of1)
        y = self.fc2(self.fc2.rows(h, **SWIGLU), self.locks, top_k=1, valid_shape_m=rows, **of2)
        return self._sums(y, b, b.ids, by_choice=True)

    def _contiguous(self, b: Batch, routing: glulam.Routing, rows: int) -> Tensor:
        """Rows of an expert lie together; rows of experts elsewhere are left out."""
        layout = F.pad(routing.offs, (1, 0))
        count = layout[-1:]
        options = {"expert_layout": layout, "valid_shape_m": rows}
        x = b.x.new_empty((b.ids.numel(), b.x.shape[1]), dtype=self.rows_dtype)
        scattered = self.fc1.rows(b.x, outputs=x, layout="scatter", scatter_idx=routing.row_of, num_valid_tokens=count)
        h = self.fc1(scattered, self.locks, **options)
        y = self.fc2(self.fc2.rows(h, num_valid_tokens=count, **SWIGLU), self.locks, **options)
        return self._sums(y, b, routing.row_of, by_choice=False)

    def _sums(self, y: Tensor, b: Batch, places: Tensor, *, by_choice: bool) -> Tensor:
        sums: Tensor = self.around.weighted_sums(y, places, b.weights, b.out, by_choice=by_choice)
        return sums


def _make(scheme: Scheme, case: ServingCase, w1: Any, w2: Any) -> Call:
    return Experts(scheme, case, w1, w2)


def contestants() -> list[Contestant]:
    """Return Humming's experts by every scheme. Raises ImportError if the package cannot be imported."""
    importlib.import_module("humming.forward")
    return [
        Contestant(
            scheme.name, scheme.recipes, scheme.weights, partial(_make, scheme),
            ROWS_FP8 if scheme.has_fp8_rows else ROWS_16_BITS,
        )
        for scheme in SCHEMES
    ]  # fmt: skip
