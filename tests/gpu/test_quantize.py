"""Quantisation kernels against the CPU reference, bit for bit, and folding on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support import mxfp8 as oracle
from support.inputs import poison_allocator
from support.launches import launch
from support.mxfp8_inputs import every_bfloat16, padded_buffer, random_float32, special_blocks, spread
from support.routing import catalogue
from torch import Tensor

import glulam
from cute_kernels.specs import QuantizeMxfp8Spec
from glulam import MXFP8Tensor, quantize_mxfp8
from glulam.formats.mxfp8 import layout, prepare_mxfp8_weight
from glulam.formats.scaled import SCALE_DTYPE

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BLOCKS = ("1x32", "1x128")
LAYOUTS = ("plain", "swizzled")
DTYPES = [BF16, F16, F32]
AXES = ["row", "col", "both"]
FORMS = list(itertools.product(BLOCKS, LAYOUTS))


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.cpu().view(torch.uint8)


def copies(result: Any) -> tuple[MXFP8Tensor, ...]:
    return tuple(result) if isinstance(result, tuple) else (result,)


def empty_like(result: Any, fill: int) -> Any:
    """Return GPU buffers of the result's shapes, every byte `fill`."""
    made = [
        MXFP8Tensor(
            torch.full(one.data.shape, fill, dtype=torch.uint8, device="cuda").view(layout.DATA_DTYPE),
            torch.full(one.scale.shape, fill, dtype=torch.uint8, device="cuda").view(SCALE_DTYPE),
            one.axis, one.block, one.scale_layout,
        )
        for one in copies(result)
    ]  # fmt: skip
    return made if len(made) > 1 else made[0]


def assert_same(got: Any, wanted: Any, rows: int | None = None) -> None:
    """Compare all bytes, or if `rows` is given, the bytes and scales of the first `rows` rows."""
    for one, other in zip(copies(got), copies(wanted), strict=True):
        assert torch.equal(bytes_of(one.data)[:rows], bytes_of(other.data)[:rows]), one
        if rows is None:
            assert torch.equal(bytes_of(one.scale), bytes_of(other.scale)), one
        else:
            last = rows if one.axis == "row" else -(-rows // 32)
            scales = (bytes_of(q.cpu().plain().scale)[:last] for q in (one, other))
            assert torch.equal(*scales), one


def compare(x: Tensor, offs: Tensor | None = None, rows: int | None = None, **options: Any) -> None:
    """Quantise into new memory, then into given buffers, and compare both with the CPU reference."""
    wanted = quantize_mxfp8(x, offs=offs, **options)
    groups = None if offs is None else offs.cuda()
    poison_allocator("cuda", 8 << 20)
    assert_same(quantize_mxfp8(x.cuda(), offs=groups, **options), wanted, rows)
    out = empty_like(wanted, 0xA5)
    assert quantize_mxfp8(x.cuda(), offs=groups, out=out, **options) is out
    assert_same(tuple(out) if isinstance(out, list) else out, wanted, rows)


class TestRules:
    def test_a_scale_for_every_bfloat16(self) -> None:
        compare(every_bfloat16())
        x = every_bfloat16().view(-1, 32, 32).mT.reshape(-1, 32)  # the same blocks, along columns
        compare(x, axis="both")

    @pytest.mark.parametrize("axis", AXES)
    def test_random_float32(self, axis: str) -> None:
        compare(random_float32(1 << 16), axis=axis)

    @pytest.mark.parametrize("axis", AXES)
    def test_every_float16(self, axis: str) -> None:
        compare(torch.arange(2**16).to(torch.int32).to(torch.int16).view(F16).view(-1, 32), axis=axis)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("block", "scale_layout"), FORMS)
    def test_special_blocks(self, block: str, scale_layout: str, dtype: torch.dtype) -> None:
        x = special_blocks(dtype)
        compare(x, axis="row", block=block, scale_layout=scale_layout)
        turned = torch.nn.functional.pad(x.mT.contiguous(), (0, -x.shape[0] % 32))
        compare(turned, axis="both", block=block, scale_layout=scale_layout)

    def test_against_the_definition(self) -> None:
        """Once without the reference between."""
        x = spread(300, 160)
        got = quantize_mxfp8(x.cuda(), axis="both", block="1x128")
        for one in got:
            wanted = oracle.quantized(x, one.axis, 128)
            assert torch.equal(bytes_of(one.data), wanted.data)
            scales = bytes_of(one.scale)
            assert torch.equal(scales if one.axis == "row" else scales.mT, wanted.scales)


class TestQuantize:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("axis", AXES)
    @pytest.mark.parametrize("shape", [(1, 32), (31, 64), (128, 128), (257, 736), (300, 1504), (1000, 2880)], ids=str)
    def test_every_form(self, shape: tuple[int, int], axis: str, dtype: torch.dtype) -> None:
        x = spread(*shape, dtype)
        for block, scale_layout in FORMS:
            compare(x, axis=axis, block=block, scale_layout=scale_layout)

    @pytest.mark.parametrize("axis", AXES)
    def test_padded_rows(self, axis: str) -> None:
        wide = torch.full((200, 168), torch.nan, dtype=BF16, device="cuda")
        wide[:, :160] = spread(200, 160).cuda()
        x = wide[:, :160]
        assert_same(quantize_mxfp8(x, axis=axis), quantize_mxfp8(x.cpu(), axis=axis))

    @pytest.mark.parametrize("axis", AXES)
    @pytest.mark.parametrize("name", catalogue(700, 8))
    def test_routings(self, name: str, axis: str) -> None:
        sizes = catalogue(700, 8)[name]
        for tail in (0, 77, 300):
            x, ends = padded_buffer(sizes, tail)
            if not x.shape[0]:
                continue
            offs = torch.tensor(ends, dtype=torch.int32)
            last = ends[-1] if axis == "row" else min(x.shape[0], -(-ends[-1] // 128) * 128)
            for block, scale_layout in FORMS:
                compare(x, offs, last, axis=axis, block=block, scale_layout=scale_layout)

    def test_many_groups(self) -> None:
        x, ends = padded_buffer([e % 3 for e in range(512)], tail=5, columns=32)
        offs = torch.tensor(ends, dtype=torch.int32)
        for axis in AXES:
            last = ends[-1] if axis == "row" else min(x.shape[0], -(-ends[-1] // 128) * 128)
            compare(x, offs, last, axis=axis)

    @pytest.mark.parametrize("axis", AXES)
    def test_rows_behind_the_groups_are_left_alone(self, axis: str) -> None:
        x, ends = padded_buffer([100, 60], tail=400)
        offs = torch.tensor(ends, dtype=torch.int32)
        last = ends[-1] if axis == "row" else 256
        out = empty_like(quantize_mxfp8(x, axis=axis, offs=offs), 0xA5)
        quantize_mxfp8(x.cuda(), axis=axis, offs=offs.cuda(), out=out)
        for one in out if isinstance(out, list) else [out]:
            assert bool((bytes_of(one.data)[last:] == 0xA5).all())
            assert bool((bytes_of(one.scale)[last if one.axis == "row" else last // 32 :] == 0xA5).all())

    def test_offs_out_of_range_stay_in_the_buffers(self) -> None:
        x = spread(300, 64).cuda()
        wanted = quantize_mxfp8(x, axis="both")
        for ends in ([2**31 - 1], [-5, 2**30], [300, 301]):
            offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
            assert_same(quantize_mxfp8(x, axis="both", offs=offs), wanted)

    def test_large(self) -> None:
        """Elements whose numbers no 32-bit integer holds."""
        x = torch.ones(1, 128, dtype=BF16, device="cuda").expand(2**24 + 130, 128).contiguous()
        x[-1] = 448
        for one in quantize_mxfp8(x, axis="both"):
            assert bool((bytes_of(one.data[-1:]) == 0x7E).all())
            assert bool((bytes_of(one.scale[-1:]) == 127).all())
            assert bool((one.scale.view(torch.uint8)[: 2**19 - 1] == 119).all())

    @pytest.mark.parametrize("axis", AXES)
    def test_captured(self, axis: str) -> None:
        """Captured with one routing, replayed with others, no memory of its own."""
        x, ends = padded_buffer([100, 200, 60, 128], tail=128)
        x = x.nan_to_num(0.5).cuda()
        offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
        options = {"axis": axis, "block": "1x128", "scale_layout": "plain"}
        result = quantize_mxfp8(x, offs=offs, **options)
        out = empty_like(result, 0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            quantize_mxfp8(x, offs=offs, out=out, **options)
        rows = x.shape[0]
        for others in ([0, 0, 0, rows], [7, 130, 300, 301], [rows] * 4, [0, 0, 0, 0]):
            offs.copy_(torch.tensor(others, dtype=torch.int32))
            eager = empty_like(result, 0x11)
            quantize_mxfp8(x, offs=offs, out=eager, **options)
            for one in out if isinstance(out, list) else [out]:
                one.data.view(torch.uint8).fill_(0x11)
                one.scale.view(torch.uint8).fill_(0x11)
            graph.replay()
            assert_same(*(tuple(r) if isinstance(r, list) else r for r in (out, eager)))

    def test_on_a_stream_of_its_own(self) -> None:
        x = spread(4096, 2048).cuda()
        wanted = quantize_mxfp8(x, axis="both")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            late = x * 1
            got = quantize_mxfp8(late, axis="both")
        torch.cuda.current_stream().wait_stream(stream)
        assert_same(got, wanted)

    def test_compiled(self) -> None:
        x = spread(200, 96).cuda()
        call = torch.compile(lambda x: quantize_mxfp8(x * 2).data.float().sum(), backend="aot_eager", fullgraph=True)
        assert call(x) == quantize_mxfp8(x * 2).data.float().sum()

    def test_preload_loads_it(self) -> None:
        assert glulam.preload() > 0


class TestRounded:
    @pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
    @pytest.mark.parametrize("shape", [(1, 32), (31, 64), (257, 736), (300, 1504), (1000, 2880)], ids=str)
    def test_the_values_of_a_row_copy(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.compare(spread(*shape, dtype))

    def test_special_numbers(self) -> None:
        self.compare(every_bfloat16())
        self.compare(random_float32(1 << 14))
        for dtype in (BF16, F32):
            self.compare(special_blocks(dtype))

    def test_padded_rows_and_groups(self) -> None:
        wide = torch.full((200, 168), torch.nan, dtype=BF16, device="cuda")
        wide[:, :160] = spread(200, 160).cuda()
        wanted = quantize_mxfp8(wide[:, :160].cpu()).dequantize(BF16)
        for ends in ([0, 50, 150], [200], [0], [2**30], [-3]):
            used = min(max(ends[-1], 0), 200)
            got = self.rounded(wide[:, :160], torch.tensor(ends, dtype=torch.int32, device="cuda"))
            assert torch.equal(got[:used].cpu(), wanted[:used]) and bool((got[used:] == 7).all())

    def rounded(self, x: Tensor, offs: Tensor | None = None) -> Tensor:
        spec = QuantizeMxfp8Spec(str(x.dtype).removeprefix("torch."), rounded=True)
        out = torch.full(x.shape, 7, dtype=x.dtype, device="cuda")
        launch(spec, x=x, out=out, offs=offs, num_groups=1 if offs is None else offs.shape[0])
        return out

    def compare(self, x: Tensor) -> None:
        """Compare with the reference bit for bit, except for the payload of NaN."""
        got, wanted = self.rounded(x.cuda()).cpu(), quantize_mxfp8(x).dequantize(x.dtype)
        assert torch.equal(got.isnan(), wanted.isnan())
        bits = torch.int16 if x.dtype == BF16 else torch.int32
        assert torch.equal(got.nan_to_num(0).view(bits), wanted.nan_to_num(0).view(bits))


class TestFold:
    @pytest.mark.parametrize("axis", ["row", "col"])
    def test_the_same_as_on_the_cpu(self, axis: str) -> None:
        w = torch.randn(3, 256, 512, generator=torch.Generator().manual_seed(0)).to(BF16) * 0.02
        w[1, :, 5] *= 2.0**7
        wanted, got = prepare_mxfp8_weight(w, axis=axis), prepare_mxfp8_weight(w.cuda(), axis=axis)
        assert torch.equal(bytes_of(got.data), bytes_of(wanted.data))
        assert torch.equal(bytes_of(got.scale), bytes_of(wanted.scale))
        assert got.report.binades == wanted.report.binades and got.report.changed == wanted.report.changed
        assert got.report.error_bound == pytest.approx(wanted.report.error_bound, rel=1e-4)
        assert torch.equal(got.dequantize().cpu(), wanted.dequantize())

    @pytest.mark.parametrize("scale_layout", LAYOUTS)
    def test_dequantize(self, scale_layout: str) -> None:
        for axis in ("row", "col"):
            q = quantize_mxfp8(spread(300, 160).cuda(), axis=axis, scale_layout=scale_layout)
            assert torch.equal(q.dequantize().cpu(), q.cpu().dequantize())
