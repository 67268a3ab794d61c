"""Humming's experts as vLLM calls them: names and arguments of humming-kernels 0.1.19 and vLLM 0.33.0.

Humming has grouped GEMMs, and kernels that activate, quantise and scatter rows. vLLM calls the indexed GEMM where all
experts are here, and the contiguous one where tokens choose among experts of several GPUs. Alignment of rows to blocks
and sums of rows are vLLM's own; here a Glulam routing and `serving_rows` take their place. NVRTC compiles the kernels.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import glulam
from glulam.ops.quantized_weights import FORMS

from .cases import SERVING_TOKENS, ServingCase
from .suites.serving import ROWS_16_BITS, ROWS_FP8, Batch, Experts

SWIGLU = {"activation_type": "binary_split", "activation_impl": "a / (1.f + expf(-a)) * b"}
ROW_BLOCK = 128  # elements of a row that share a scale
FP8_ROWS: dict[str, Any] = {
    "a_dtype": "float8e4m3", "input_scale_group_size": ROW_BLOCK, "input_scale_dtype": "float32",
    "input_quant_mode": "dynamic_group",
}  # fmt: skip
INDEXED, CONTIGUOUS = "indexed", "grouped_contiguous"
PADDING = {"pad_n_to_multiple": 256, "pad_k_to_multiple": 128}
LOCKS_PER_SM = 8
COMPILED_AT_ONCE = 4  # pairs of a scheme and a model; each has as many compilers as there are cores


class Scheme(NamedTuple):
    """A way to compute by Humming: the formats of weights and of the GEMMs' input rows.

    Attributes:
        name: the contestant's name.
        recipes: our recipes with which it is compared.
        weights: name of our recipe whose checkpoint format its weights have.
        has_fp8_rows: True: input rows are quantised to FP8. False: they have 16 bits.
    """

    name: str
    recipes: tuple[str, ...]
    weights: str
    has_fp8_rows: bool


SCHEMES = (
    Scheme("Humming W8A8", ("mxfp8", "fp8_block"), "fp8_block", True),
    Scheme("Humming W8A16", ("mxfp8_weight_only",), "mxfp8_weight_only", False),
    Scheme("Humming W4A16", ("mxfp4_weight_only",), "mxfp4_weight_only", False),
    Scheme("Humming W4A8", ("mxfp4",), "mxfp4_weight_only", True),
)


def _loaded(weights: str, w: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return Humming's schema of a checkpoint, and its tensors as copies, since Humming changes some in place."""
    schema: Any = importlib.import_module("humming.schema")
    if weights == "fp8_block":
        tensors = {"weight": w.data.clone(), "weight_scale_inv": w.scale.clone()}
        return schema.Fp8WeightSchema(weight_block_size=(ROW_BLOCK, ROW_BLOCK)), tensors
    tensors = {"weight": w.data.clone(), "weight_scale": w.scale.view(torch.uint8).clone()}
    if weights == "mxfp8_weight_only":
        return importlib.import_module("humming.schema.modelopt").ModeloptMxfp8WeightSchema(), tensors
    return schema.Mxfp4WeightSchema(), tensors


def _converted(scheme: Scheme, w: Any, is_gate: bool) -> tuple[Any, dict[str, Tensor]]:
    """Return the schema of Humming's own format, and the weight's tensors in it, not yet in kernels' order."""
    schema, loaded = _loaded(scheme.weights, w)
    experts, n, k = w.shape
    stacks = [n // 2] * 2 if is_gate else [n]
    return schema.convert_humming(
        tensors=loaded, shape_n_stacks=stacks, shape_k_stacks=[k], param_dtype=torch.bfloat16, num_experts=experts
    )


class Plan(NamedTuple):
    """Humming's settings for one linear layer.

    Attributes:
        config: the layer's configuration.
        tiles: for each range of rows, its tile.
        options: keywords of the GEMM, which hold the tiles as JSON.
    """

    config: Any
    tiles: list[Any]
    options: dict[str, str]


@functools.cache
def plan(scheme: Scheme, case: ServingCase, is_gate: bool) -> Plan:
    """Return the plan (settings) of FC1 (is_gate) or FC2.

    Humming would compile all of a layer's 30 to 100 tiles at the first call. Only tiles for the suite's numbers of
    tokens are in the plan, so that compiling takes seconds.
    """
    transform: Any = importlib.import_module("humming.transform")
    tune: Any = importlib.import_module("humming.tune")
    n, k = (2 * case.intermediate, case.hidden) if is_gate else (case.hidden, case.intermediate)
    form = FORMS[scheme.weights]
    form = form.of_gate(n) if is_gate else form
    w = form.quantized_tensor(torch.empty(case.experts, n, k, dtype=torch.bfloat16, device="meta"))
    schema, loaded = _converted(scheme, w, is_gate)
    mode = FP8_ROWS if scheme.has_fp8_rows else {"input_quant_mode": "none"}
    rows = importlib.import_module("humming.schema").HummingInputSchema(**mode)
    config = transform.prepare_layer_config(
        shape_n=n, shape_k=k, weight_schema=schema, input_schema=rows,
        num_experts=case.experts, torch_dtype=torch.bfloat16, tensors=loaded, **PADDING,
    )  # fmt: skip
    transform.check_and_pad_tensors(config, loaded)
    gemm = CONTIGUOUS if case.is_part else INDEXED
    counts = [case.expected_rows(tokens) for tokens in (*SERVING_TOKENS, case.tokens)]
    every = tune.get_heuristics_config(layer_config=config, gemm_type=gemm)
    tiles = [tile for tile in every if any(tile[0] < count <= tile[1] for count in counts)]
    numbers = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": gemm}
    return Plan(config, tiles, {"compute_config": json.dumps(numbers), "tuning_config": json.dumps(tiles)})


def _compile(scheme: Scheme, case: ServingCase) -> None:
    """Compile both layers' GEMMs, as their first calls would. Exceptions are dropped: the first call fails again."""
    kernel: Any = importlib.import_module("humming.kernel.humming").HummingKernel
    with contextlib.suppress(Exception):
        for is_gate in (True, False):
            config, _, options = plan(scheme, case, is_gate)
            kernel.prepare_kernels(config.to_str(), **options, device=torch.cuda.current_device())


class Linear:
    """One of the two layers: its plan, and its tensors as kernels read them."""

    def __init__(self, scheme: Scheme, case: ServingCase, w: Any, is_gate: bool) -> None:
        self.forward: Any = importlib.import_module("humming.forward")
        transform: Any = importlib.import_module("humming.transform")
        self.config, self.tiles, self.options = plan(scheme, case, is_gate)
        self.tensors = transform.transform_humming_tensors(self.config, _converted(scheme, w, is_gate)[1])

    def block(self, rows: int) -> int:
        """Return the rows of the tile that the GEMM takes for so many rows."""
        return next(tile["block_shape"][0] for low, high, tile in self.tiles if low < rows <= high)

    def rows(self, x: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return the rows of x as the GEMM reads them, and their scales; x itself if nothing is to be done."""
        rows, scales, _ = self.forward.may_process_input(self.config, inputs=x, **options)
        return rows, scales

    def __call__(self, rows: tuple[Tensor, Tensor | None], locks: Tensor, **options: Any) -> Tensor:
        given = {"inputs": rows[0], "input_scale": rows[1], "locks": locks}
        return self.forward.humming_forward(self.config, **given, **self.tensors, **self.options, **options)


class Layers:
    """Both layers of one model's experts, called as vLLM calls them."""

    def __init__(self, scheme: Scheme, case: ServingCase, w1: Any, w2: Any) -> None:
        self.case = case
        self.around: Any = importlib.import_module(f"{__package__}.serving_rows")
        self.fc1, self.fc2 = Linear(scheme, case, w1, is_gate=True), Linear(scheme, case, w2, is_gate=False)
        count = LOCKS_PER_SM * torch.cuda.get_device_properties(w1.device).multi_processor_count
        self.locks = torch.zeros(count, dtype=torch.int32, device=w1.device)
        self.rows_dtype = torch.float8_e4m3fn if scheme.has_fp8_rows else torch.bfloat16

    def __call__(self, b: Batch) -> Tensor:
        case = self.case
        routing = glulam.Routing.from_topk(b.ids, b.weights, case.experts, world_experts=case.world)
        call = self._contiguous if case.is_part else self._indexed
        return call(b, routing, case.expected_rows(len(b.x)))

    def _indexed(self, b: Batch, routing: glulam.Routing, rows: int) -> Tensor:
        """Run the experts on rows in the order of choices, which the GEMMs find by index."""
        blocks = self.fc1.block(rows), self.fc2.block(rows)
        aligned = {block: self.around.align(routing, block) for block in dict.fromkeys(blocks)}
        names = "sorted_ids", "expert_ids", "num_tokens_padded"
        of1, of2 = (dict(zip(names, aligned[block], strict=True)) for block in blocks)
        h = self.fc1(self.fc1.rows(b.x), self.locks, top_k=self.case.top_k, valid_shape_m=rows, **of1)
        y = self.fc2(self.fc2.rows(h, **SWIGLU), self.locks, top_k=1, valid_shape_m=rows, **of2)
        return self.around.weighted_sums(y, b.ids, b.weights, b.out, by_choice=True)

    def _contiguous(self, b: Batch, routing: glulam.Routing, rows: int) -> Tensor:
        """Run the experts on rows sorted by expert; rows of experts on other GPUs are left out."""
        layout = F.pad(routing.offs, (1, 0))
        count = layout[-1:]
        options = {"expert_layout": layout, "valid_shape_m": rows}
        x = b.x.new_empty((b.ids.numel(), b.x.shape[1]), dtype=self.rows_dtype)
        scattered = self.fc1.rows(b.x, outputs=x, layout="scatter", scatter_idx=routing.row_of, num_valid_tokens=count)
        h = self.fc1(scattered, self.locks, **options)
        y = self.fc2(self.fc2.rows(h, num_valid_tokens=count, **SWIGLU), self.locks, **options)
        return self.around.weighted_sums(y, routing.row_of, b.weights, b.out, by_choice=False)


def peers(models: Sequence[ServingCase], recipes: Sequence[str]) -> list[Experts]:
    """Return Humming's experts by the schemes that recipes ask for, with GEMMs compiled for these models. Raises
    ImportError if the package cannot be imported.
    """
    importlib.import_module("humming.forward")
    wanted = [scheme for scheme in SCHEMES if set(scheme.recipes) & set(recipes)]
    with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
        list(pool.map(lambda pair: _compile(*pair), itertools.product(wanted, models)))
    return [
        Experts(s.name, s.recipes, s.weights, partial(Layers, s), ROWS_FP8 if s.has_fp8_rows else ROWS_16_BITS)
        for s in wanted
    ]
