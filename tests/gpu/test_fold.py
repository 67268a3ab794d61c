"""The kernels of `prepare_mxfp8_weight` (fold), against the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch
from support.inputs import poison_allocator
from support.mxfp8_inputs import folding_cases, spread
from torch import Tensor

from glulam.formats.mxfp8 import FoldedWeight, FoldError, prepare_mxfp8_weight
from glulam.formats.mxfp8.forms import Folded
from glulam.formats.prepared import PreparedWeights
from glulam.formats.scaled import Parts

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
AXES = ["row", "col"]
# Strips and vectors cut short; one warp, two, four and eight a row, and rows that no registers hold.
SHAPES = [(1, 32, 32), (3, 64, 96), (2, 1504, 736), (1, 736, 1504), (2, 96, 2880), (1, 64, 4128), (1, 32, 7168),
          (1, 32, 20512), (40, 256, 64)]  # fmt: skip


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.cpu().view(torch.uint8)


def assert_same(got: FoldedWeight, wanted: FoldedWeight) -> None:
    assert got.data.is_contiguous() and got.data.shape == wanted.data.shape
    assert torch.equal(bytes_of(got.scale), bytes_of(wanted.scale))
    assert torch.equal(bytes_of(got.data), bytes_of(wanted.data))


def compare(w: Tensor, axis: str) -> None:
    poison_allocator("cuda", 8 << 20)
    got = prepare_mxfp8_weight(w.cuda(), axis=axis, report=False)
    assert got.report is None
    assert_same(got, prepare_mxfp8_weight(w, axis=axis, report=False))


@pytest.mark.parametrize("axis", AXES)
class TestFold:
    @pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_sizes(self, shape: tuple[int, int, int], dtype: torch.dtype, axis: str) -> None:
        experts, n, k = shape
        compare((spread(experts * n, k, F32).view(shape) * 0.02).to(dtype), axis)
        compare((torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.05).to(dtype), axis)

    def test_adverse_numbers(self, axis: str) -> None:
        for w in folding_cases(n=128, k=192):
            compare(w, axis)

    def test_an_infinity_stays_one(self, axis: str) -> None:
        w = torch.ones(1, 64, 64)
        w[0, 3, 5] = -torch.inf
        compare(w, axis)

    def test_a_nan_stays_in_its_row(self, axis: str) -> None:
        w = torch.ones(1, 64, 64)
        w[0, 3, 5] = torch.nan
        got = prepare_mxfp8_weight(w.cuda(), axis=axis, report=False).dequantize().cpu()
        assert bool(got[0, 3, 5].isnan())
        other = torch.arange(64) != (3 if axis == "row" else 5)
        assert bool(((got[0] if axis == "row" else got[0].mT)[other] == 1).all())

    def test_lists_and_strides(self, axis: str) -> None:
        w = spread(3 * 64, 96).view(3, 64, 96)
        wanted = prepare_mxfp8_weight(w, axis=axis, report=False)
        gpu = w.cuda()
        odd = torch.empty(w.numel() + 1, dtype=BF16, device="cuda")[1:].view(w.shape).copy_(w)
        experts = [torch.nn.Parameter(one.clone()) for one in gpu]
        for given in (experts, list(gpu), gpu.mT.contiguous().mT, odd, torch.nn.Parameter(gpu)):
            assert_same(prepare_mxfp8_weight(given, axis=axis, report=False), wanted)

    def test_nothing_beside_the_results_is_written(self, axis: str) -> None:
        from support.launches import launch

        from cute_kernels.specs import FoldMxfp8Spec

        w = spread(96, 96).cuda()
        room = torch.full((3, 96, 96), 0x55, dtype=torch.uint8, device="cuda")
        scales = torch.full((3, 96), 0x55, dtype=torch.uint8, device="cuda")
        data = room.view(torch.float8_e4m3fn)
        given = {"w": w, "data": data[1]} if axis == "row" else {"w": w[None], "data": data[1:2]}
        launch(FoldMxfp8Spec("bfloat16", axis), **given, scale=scales[1])
        wanted = prepare_mxfp8_weight(w.cpu()[None], axis=axis, report=False)
        assert torch.equal(room[1].cpu(), bytes_of(wanted.data)[0])
        assert torch.equal(scales[1].cpu(), bytes_of(wanted.scale)[0])
        for outside in (room[::2], scales[::2]):
            assert bool((outside == 0x55).all())

    def test_captured(self, axis: str) -> None:
        w = torch.zeros(2, 64, 96, dtype=BF16, device="cuda")
        prepare_mxfp8_weight(w, axis=axis, report=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            folded = prepare_mxfp8_weight(w, axis=axis, report=False)
        w.copy_(spread(128, 96).view(2, 64, 96))
        graph.replay()
        assert_same(folded, prepare_mxfp8_weight(w.cpu(), axis=axis, report=False))

    def test_large(self, axis: str) -> None:
        """Elements whose numbers no 32-bit integer holds."""
        w = torch.full((1025, 2048, 1024), 0.5, dtype=BF16, device="cuda")
        w[-1, -1, -1] = 3.0
        folded = prepare_mxfp8_weight(w, axis=axis, report=False)
        last = prepare_mxfp8_weight(w[-1:].cpu(), axis=axis, report=False)
        assert torch.equal(bytes_of(folded.data[-1]), bytes_of(last.data)[0])
        assert torch.equal(bytes_of(folded.scale[-1]), bytes_of(last.scale)[0])
        first = folded.data.view(torch.uint8)
        assert bool((first[0, 0] == first[0, 0, 0]).all()) and torch.equal(first[:-1].amin(), first[:-1].amax())

    def test_the_report_and_what_it_refuses(self, axis: str) -> None:
        w = (torch.randn(3, 128, 256, generator=torch.Generator().manual_seed(0)) * 0.05).to(BF16)
        folded, wanted = prepare_mxfp8_weight(w.cuda(), axis=axis), prepare_mxfp8_weight(w, axis=axis)
        assert_same(folded, wanted)
        assert folded.report is not None and wanted.report is not None
        assert folded.report.changed == wanted.report.changed and folded.report.binades == wanted.report.binades
        w[1, 2, 3] = torch.nan
        with pytest.raises(FoldError, match="expert 1"):
            prepare_mxfp8_weight(w.cuda(), axis=axis)


@pytest.mark.parametrize("axis", AXES)
def test_trained_weights_are_prepared_by_the_kernel(axis: str) -> None:
    cache, w = PreparedWeights(), torch.nn.Parameter(spread(64, 96).view(1, 64, 96).cuda())
    for _ in range(2):
        data, scale, _ = cache.get(Folded(axis), Parts(w), trained=True)
        assert cache.get(Folded(axis), Parts(w), trained=True).data is data
        wanted = prepare_mxfp8_weight(w.detach().cpu(), axis=axis, report=False)
        assert_same(FoldedWeight(data, scale, axis, None), wanted)
        with torch.no_grad():
            w.mul_(3)
