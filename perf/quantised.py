"""Weights in a recipe's format, and the MLP by each recipe and by torch's FP8 grouped GEMM, unfused.

torch._scaled_grouped_mm has one float32 scale for each row of both operands: coarser than MXFP8, and no partial sums to
promote. To compute the same MLP, torch also quantises the input, and activates and quantises between the GEMMs. Each of
these two steps is one compiled kernel where torch.compile works, as a careful user of torch would write it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import glulam
from ffi_bridge import BundleError
from glulam.formats.form import Form
from glulam.formats.prepared import prepare
from glulam.formats.scaled import Parts
from glulam.ops.quantized_weights import FORMS

from .contest import Contestant, relative_error, rotating
from .mlp import Buffers, our_mlp, swiglu, torch_mlp
from .targets import BF16, FP8_RECIPES, TORCH_FP8

CONTESTANTS = (BF16, *FP8_RECIPES, TORCH_FP8)
# Of the result against BF16's: three quantised operands on the way to it, or two; a wrong scale or group is about 1.
MAX_RELATIVE_ERROR = {
    BF16: 0.02, "mxfp8": 0.08, "mxfp8_exact": 0.08, "mxfp8_weight_only": 0.06, "mxfp4": 0.3, "mxfp4_weight_only": 0.3,
    "nvfp4_weight_only": 0.25, "fp8_block": 0.08, "fp8_block_weight_only": 0.06, TORCH_FP8: 0.08,
}  # fmt: skip
E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0

Mlp = Callable[[Buffers], Tensor]


def quantised(name: str, w: Tensor, is_gate: bool = False) -> tuple[Any, Any]:
    """Return a weight as kernels read it, and as its format's `dequantize` does.

    is_gate: w is the w1 of a gated activation, its halves one after the other.
    """
    form = FORMS[name].of_gate(w.shape[1]) if is_gate else FORMS[name]
    made = form.quantized_tensor(w)
    parts = Parts(*made.parts)
    return form.tensor_of(parts if form.is_ready(parts) else prepare(form, parts, report=True)), made


def _compiled(what: str, function: Callable[..., Any], *example: Tensor) -> Callable[..., Any]:
    """Return a function compiled by torch.compile; if compiling fails here, warn and return the function itself."""
    made: Callable[..., Any] = torch.compile(function, dynamic=False)
    try:
        made(*example)
    except Exception as error:  # a compiler that is missing must not cost the run
        warnings.warn(f"{what} is not compiled: {type(error).__name__}", stacklevel=2)
        return function
    return made


def dequantising(w: Any) -> Callable[[], Tensor]:
    """Return a function that dequantises w to 16 bits, by one kernel where torch.compile works."""
    return _compiled("dequantising", lambda: w.dequantize(torch.bfloat16))


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [T, C] to E4M3; return the elements and a float32 scale for each row."""
    wide = x.float()
    scale = wide.abs().amax(dim=1).clamp(min=1e-12) / E4M3_MAX
    return (wide / scale[:, None]).to(E4M3), scale


def _fp8_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight [E, N, K] for the second operand: return [E, K, N], a transposed view, and scales [E, N]."""
    data, scale = torch.empty(w.shape, dtype=E4M3, device=w.device), torch.empty(w.shape[:2], device=w.device)
    for expert, one in enumerate(w):
        data[expert], scale[expert] = quantise_rows(one)
    return data.mT, scale


def _torch_fp8(sets: Sequence[Buffers]) -> Mlp:
    torch._dynamo.reset()  # else it gives up after so many shapes of the cases before
    first = sets[0]
    weights = {id(b): (_fp8_weight(b.w1), _fp8_weight(b.w2)) for b in sets}
    quantise = _compiled(TORCH_FP8, quantise_rows, first.x)
    h = first.x.new_zeros(first.x.shape[0], first.w1.shape[1])
    activate = _compiled(TORCH_FP8, lambda h: quantise_rows(swiglu(h.float())), h)
    scaled_mm = partial(torch._scaled_grouped_mm, out_dtype=torch.bfloat16, use_fast_accum=True)

    def gemm(x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], offs: Tensor) -> Tensor:
        return scaled_mm(x[0], w[0], x[1], w[1], offs=offs)

    def mlp(b: Buffers) -> Tensor:
        w1, w2 = weights[id(b)]
        return gemm(activate(gemm(quantise(b.x), w1, b.offs)), w2, b.offs)

    return mlp


def mlp_by(name: Any, sets: Sequence[Buffers]) -> Mlp:
    """Return the MLP of the contestant `name`, with the weights of all sets of tensors prepared beforehand."""
    if name in (BF16, TORCH_FP8):
        return our_mlp if name == BF16 else _torch_fp8(sets)
    form = FORMS[name]

    def prepared(w: Tensor, form: Form) -> Any:
        return form.tensor_of(prepare(form, Parts(w), report=True))

    weights = {id(b): (prepared(b.w1, form.of_gate(b.w1.shape[1])), prepared(b.w2, form)) for b in sets}
    return lambda b: glulam.grouped_mlp(b.x, *weights[id(b)], offs=b.offs, out=b.y, recipe=name)


def error(result: Tensor, b: Buffers) -> float:
    """Return the relative error against torch in BF16."""
    return relative_error(result, torch_mlp(b))


def contestants(names: Sequence[str], sets: Sequence[Buffers]) -> Iterator[Contestant]:
    """Yield the contestants. torch's FP8 may fail or be wrong; a recipe is left out only if the bundle lacks it."""
    for name in names:
        yield Contestant(
            name, lambda name=name: rotating(mlp_by(name, sets), sets), partial(error, b=sets[0]),  # type: ignore[misc]
            MAX_RELATIVE_ERROR[name], required=name != TORCH_FP8, unless=(BundleError,),
        )  # fmt: skip
