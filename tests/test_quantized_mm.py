"""grouped_mm of quantised weights equals grouped_mm of the dequantised weights, in every supported format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks import check_mm
from support.fake_gpu import FakeGpu
from support.inputs import make_case
from torch import Tensor

import glulam
from cute_kernels.specs import GroupedMmSpec
from glulam import MXFP8Tensor
from glulam.ops.quantized_mm import QuantizedMmCall

pytest_plugins = ["support.fixtures"]

BF16 = torch.bfloat16
SIZES = [5, 0, 9, 3]


def _in_mxfp8(w: Tensor) -> MXFP8Tensor:
    made = glulam.quantize_mxfp8(w.flatten(0, 1))
    return MXFP8Tensor(made.data.view(w.shape), made.scale.view(*w.shape[:2], -1))


MAKERS: dict[str, Callable[[Tensor], Any]] = {
    "MXFP8Tensor": _in_mxfp8,
    "MXFP4Tensor": glulam.quantize_mxfp4,
    "NVFP4Tensor": glulam.quantize_nvfp4,
    "FP8BlockTensor": glulam.quantize_fp8_block,
}


def test_every_class_is_tried() -> None:
    assert {kind.__name__ for kind in QuantizedMmCall.classes} == set(MAKERS)


@pytest.mark.parametrize("kind", MAKERS)
def test_the_result_is_that_of_the_dequantised_weight(kind: str, anywhere: FakeGpu | None) -> None:
    c = make_case(SIZES, 96, 64)
    w = (
        torch.randn(4, 80, 96, generator=torch.Generator().manual_seed(3))
        * torch.tensor([0.1, 1, 5, 20])[:, None, None]
    )
    quantised = MAKERS[kind](w)
    exact = quantised.dequantize(torch.float64 if kind == "FP8BlockTensor" else torch.float32).double()
    if kind == "FP8BlockTensor":  # which kernels round to bfloat16
        exact = exact.float().to(BF16).double()
    bias = torch.randn(4, 80).to(BF16)
    for _ in range(2):
        check_mm(c, exact, glulam.grouped_mm(c.x, quantised, offs=c.offs, bias=bias), bias=bias)
    assert glulam.explain("grouped_mm", c.x, quantised, offs=c.offs).op == "grouped_mm"
    if anywhere is not None:
        assert {spec.operands for spec in anywhere.specs if isinstance(spec, GroupedMmSpec)} == {quantised.weight_only}


@pytest.mark.parametrize("kind", MAKERS)
def test_other_widths_are_refused_by_name(kind: str) -> None:
    x, w = torch.zeros(17, 96, dtype=BF16), MAKERS[kind](torch.randn(4, 80, 96))
    with pytest.raises(
        ValueError, match=r"\[4, 80, 96\].*\[4, 96, 96\], since x has 96 columns, or give transpose_w=False"
    ):
        glulam.grouped_mm(x, w, splits=SIZES, transpose_w=True)
    with pytest.raises(ValueError, match=r"w .*x has 80 columns.*transpose_w=True"):
        glulam.grouped_mm(x[:, :80], w, splits=SIZES)
