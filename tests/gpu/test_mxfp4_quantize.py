"""The kernel that quantises to MXFP4, against torch's operators on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import glulam
from glulam import MXFP4Tensor

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def check(w: Tensor) -> None:
    got, wanted = glulam.quantize_mxfp4(w), glulam.quantize_mxfp4(w.cpu())
    assert torch.equal(got.scale.view(torch.uint8).cpu(), wanted.scale.view(torch.uint8))
    assert torch.equal(got.data.cpu(), wanted.data)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (3, 160), (5, 7, 96), (2, 3, 4, 2880), (33, 32), (0, 64)], ids=str)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    powers = torch.exp2(torch.randint(-10, 10, (*shape[:-1], 1), device="cuda").float())
    check((torch.randn(shape, device="cuda") * powers).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_as_the_greatest(dtype: torch.dtype) -> None:
    """NaN, infinities and subnormals included."""
    greatest = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    most = torch.finfo(dtype).max
    others = (torch.rand(2**16, 32, device="cuda") * 2 - 1) * greatest.float().abs().nan_to_num(0.0, most)[:, None]
    w = others.to(dtype)
    w[:, 5] = greatest
    check(w)
    check(w.float())


def test_any_float32() -> None:
    check(torch.randint(-(2**31), 2**31 - 1, (2**16, 32), device="cuda", dtype=torch.int32).view(torch.float32))


def test_float32_beside_the_midpoints() -> None:
    """Where rounding twice would be wrong."""
    near = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0], device="cuda")
    bits = near[torch.randint(0, len(near), (2**14, 32), device="cuda")].view(torch.int32)
    numbers = (bits + torch.randint(-1, 2, bits.shape, device="cuda", dtype=torch.int32)).view(torch.float32)
    signs = torch.randint(0, 2, bits.shape, device="cuda") * 2.0 - 1
    check(numbers * signs * torch.exp2(torch.randint(-100, 100, (2**14, 1), device="cuda").float()))


def test_what_lies_apart_is_copied() -> None:
    w = torch.randn(3, 40, 128, device="cuda", dtype=torch.bfloat16)
    check(w[:, 1:31, 32:96])
    check(w.mT.contiguous().mT)
    check(w.flatten()[3 : 3 + 64 * 32].view(64, 32))


def test_out_is_written_and_no_more() -> None:
    w = torch.randn(6, 64, device="cuda", dtype=torch.bfloat16)
    data = torch.full((8, 32), 0xA5, dtype=torch.uint8, device="cuda")
    scale = torch.full((8, 2), 0xA5, dtype=torch.uint8, device="cuda")
    out = MXFP4Tensor(data[1:7], scale[1:7])
    assert glulam.quantize_mxfp4(w, out=out) is out
    wanted = glulam.quantize_mxfp4(w.cpu())
    assert torch.equal(out.data.cpu(), wanted.data)
    for edge in (data, scale):
        assert bool((edge[0] == 0xA5).all() and (edge[7] == 0xA5).all())


def test_under_capture() -> None:
    w = torch.randn(6, 64, device="cuda", dtype=torch.bfloat16)
    out = glulam.quantize_mxfp4(torch.zeros_like(w))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        glulam.quantize_mxfp4(w, out=out)
    w.mul_(3.0)
    graph.replay()
    assert torch.equal(out.data.cpu(), glulam.quantize_mxfp4(w.cpu()).data)
