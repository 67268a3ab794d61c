"""MXFP8 without a GPU: the reference against the definition bit for bit, the tensor class, the host path, folded
weights.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import mxfp8 as oracle
from support.fake_gpu import FakeGpu
from support.mxfp8_inputs import every_bfloat16, folding_cases, padded_buffer, random_float32, special_blocks, spread
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import glulam
from cute_kernels.specs import QuantizeMxfp8Spec
from glulam import GradientNotSupported, MXFP8Tensor, quantize_mxfp8
from glulam.formats.mxfp8 import FoldedWeight, FoldError, MXFP8Copies, layout, prepare_mxfp8_weight, rebase_mxfp8
from glulam.formats.mxfp8.reference import dequantized, multipliers_of, scale_exponents, scales_of
from glulam.formats.mxfp8.tensor import LAYOUT_FIELDS
from glulam.formats.scaled import SCALE_DTYPE

pytest_plugins = ["support.fixtures"]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BLOCKS = {"1x32": 32, "1x128": 128}
LAYOUTS = ("plain", "swizzled")
SHAPES = [(1, 32), (5, 64), (33, 736), (128, 128), (300, 160), (257, 2880)]


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def assert_copy(got: MXFP8Tensor, wanted: oracle.Quantized) -> None:
    """Compare all bytes that a quantiser wrote with the definition."""
    rows = wanted.rows
    assert torch.equal(bytes_of(got.data)[:rows], wanted.data)
    plain = bytes_of(got.plain().scale)
    scales = plain[:rows] if got.axis == "row" else plain[: wanted.scales.shape[1]].mT
    assert torch.equal(scales, wanted.scales)


def copies(result: Any) -> tuple[MXFP8Tensor, ...]:
    return tuple(result) if isinstance(result, tuple) else (result,)


class TestRules:
    def test_a_scale_for_every_bfloat16(self) -> None:
        x = every_bfloat16()
        assert_copy(quantize_mxfp8(x), oracle.quantized(x, "row", 32))

    @pytest.mark.parametrize("dtype", [F16, F32])
    def test_random_bits(self, dtype: torch.dtype) -> None:
        x = random_float32()
        if dtype == F16:
            x = torch.arange(2**16).to(torch.int32).to(torch.int16).view(F16).view(-1, 32)
        assert_copy(quantize_mxfp8(x), oracle.quantized(x, "row", 32))
        assert_copy(quantize_mxfp8(x, axis="col"), oracle.quantized(x, "col", 32))

    @pytest.mark.parametrize("dtype", [BF16, F16, F32])
    @pytest.mark.parametrize("block", BLOCKS)
    def test_special_blocks(self, block: str, dtype: torch.dtype) -> None:
        x = special_blocks(dtype)
        for axis, matrix in (("row", x), ("col", x.mT.contiguous())):
            matrix = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % 32))
            assert_copy(quantize_mxfp8(matrix, axis=axis, block=block), oracle.quantized(matrix, axis, BLOCKS[block]))

    def test_elements_are_the_nearest_numbers(self) -> None:
        """Each number, each midpoint, and what lies next to them."""
        numbers = oracle.MAGNITUDES
        midpoints = (numbers[1:] + numbers[:-1]) / 2
        places = torch.arange(len(numbers))
        assert oracle.elements(numbers).tolist() == places.tolist()
        for towards, wanted in ((0.0, places[:-1]), (math.inf, places[1:])):
            beside = torch.nextafter(midpoints, torch.tensor(towards, dtype=torch.float64))
            assert oracle.elements(beside).tolist() == wanted.tolist()
        assert oracle.elements(midpoints).tolist() == [n + n % 2 for n in range(len(midpoints))]
        assert oracle.elements(torch.tensor([448.1, 1e300, math.inf, math.nan]).double()).tolist() == [126] * 3 + [127]
        signed = torch.cat((numbers, midpoints))
        assert torch.equal(oracle.elements(-signed), oracle.elements(signed) + 128)

    def test_the_rules_in_numbers(self) -> None:
        """Maxima and the bytes that the format's rules give them, worked out by hand."""
        maxima = [0.0, 448.0, 448.1, 224.0, 1.0, torch.inf, torch.nan, 448 * 2.0**-127, 449 * 2.0**-127, 2.0**-149]
        wanted = [0, 127, 128, 126, 119, 0xFE, 0xFF, 0, 1, 0]
        assert scale_exponents(torch.tensor(maxima)).tolist() == wanted

    def test_what_scales_mean(self) -> None:
        every = torch.arange(256, dtype=torch.uint8)
        assert torch.equal(scales_of(every).nan_to_num(-1), every.view(SCALE_DTYPE).float().nan_to_num(-1))
        products = scales_of(every[:-1]).double() * multipliers_of(every[:-1]).double()
        assert bool((products == 1).all()) and bool(multipliers_of(every[-1:]).isnan())

    def test_nothing_saturates(self) -> None:
        x = every_bfloat16()
        x = x[(x.abs() < 2.0**127).all(dim=1)]  # rounded up, the largest of all are infinite in float32
        values = quantize_mxfp8(x).dequantize().double()
        error = (values - x.double()).abs().amax(dim=1)
        amax = x.double().abs().amax(dim=1)
        assert bool((error <= torch.maximum(amax / 16, torch.tensor(2.0**-137))).all())

    def test_infinities_stay_and_nan_poisons_its_block_alone(self) -> None:
        x = torch.ones(1, 96)
        x[0, 3], x[0, 40] = torch.inf, torch.nan
        values = quantize_mxfp8(x).dequantize()
        assert values[0, 3] == torch.inf and bool(values[0, 32:64].isnan().all()) and bool((values[0, 64:] == 1).all())


class TestQuantize:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("scale_layout", LAYOUTS)
    @pytest.mark.parametrize("block", BLOCKS)
    def test_every_form(self, shape: tuple[int, int], scale_layout: str, block: str) -> None:
        x = spread(*shape)
        both = quantize_mxfp8(x, axis="both", block=block, scale_layout=scale_layout)
        assert isinstance(both, MXFP8Copies)
        for axis, copy_ in (("row", both.row), ("col", both.col)):
            alone = quantize_mxfp8(x, axis=axis, block=block, scale_layout=scale_layout)
            assert torch.equal(bytes_of(alone.data), bytes_of(copy_.data))
            assert torch.equal(bytes_of(alone.scale), bytes_of(copy_.scale))
            assert (alone.axis, alone.block, alone.scale_layout) == (axis, block, scale_layout)
            assert alone.data.shape == x.shape and alone.data.is_contiguous() and alone.scale.is_contiguous()
            assert_copy(alone, oracle.quantized(x, axis, BLOCKS[block]))

    def test_shapes_of_scales(self) -> None:
        row, col = quantize_mxfp8(spread(70, 96), axis="both")
        assert row.scale.shape == (70, 3) and col.scale.shape == (3, 96)
        row, col = quantize_mxfp8(spread(130, 160), axis="both", scale_layout="swizzled")
        assert row.scale.shape == (2 * 2 * 512,) and col.scale.shape == (2 * 2 * 512,)

    def test_padded_rows(self) -> None:
        wide = torch.full((40, 72), torch.nan, dtype=BF16)
        wide[:, :64] = spread(40, 64)
        x = wide[:, :64]
        for axis in ("row", "col"):
            assert_copy(quantize_mxfp8(x, axis=axis), oracle.quantized(x, axis, 32))

    def test_without_rows(self) -> None:
        for axis, scale_layout in itertools.product(("row", "col", "both"), LAYOUTS):
            for one in copies(quantize_mxfp8(torch.empty(0, 64), axis=axis, scale_layout=scale_layout)):
                assert one.shape == (0, 64) and one.dequantize().shape == (0, 64)

    @settings(max_examples=60)
    @given(
        sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
        tail=st.sampled_from([0, 5, 128, 200]),
        axis=st.sampled_from(["row", "col", "both"]),
        block=st.sampled_from(list(BLOCKS)),
        scale_layout=st.sampled_from(LAYOUTS),
    )
    def test_ragged_groups(self, sizes: list[int], tail: int, axis: str, block: str, scale_layout: str) -> None:
        x, ends = padded_buffer(sizes, tail)
        offs = torch.tensor(ends, dtype=torch.int32)
        result = quantize_mxfp8(x, axis=axis, offs=offs, block=block, scale_layout=scale_layout)
        for one in copies(result):
            assert_copy(one, oracle.quantized(x, one.axis, BLOCKS[block], ends, padded=axis != "row"))

    def test_a_group_is_quantised_as_if_alone(self) -> None:
        sizes = [100, 0, 128, 1, 300]
        x, ends = padded_buffer(sizes, tail=50)
        offs = torch.tensor(ends, dtype=torch.int32)
        for scale_layout in LAYOUTS:
            grouped = quantize_mxfp8(x, axis="both", offs=offs, scale_layout=scale_layout)
            for e, size in enumerate(sizes):
                begin = ends[e] - size
                alone = quantize_mxfp8(x[begin : ends[e]].clone(), axis="col").dequantize()
                part = grouped.col.group(e, offs)
                assert part.shape == (size, 96) and torch.equal(part.dequantize(), alone)

    def test_rows_behind_the_groups_are_left_alone(self) -> None:
        x, ends = padded_buffer([100, 60], tail=300)
        offs = torch.tensor(ends, dtype=torch.int32)
        for axis, last in (("row", ends[-1]), ("both", 256)):
            out = quantize_mxfp8(torch.ones(x.shape), axis=axis)
            before = copy.deepcopy(out)
            assert quantize_mxfp8(x, axis=axis, offs=offs, out=out) is out
            for one, old in zip(copies(out), copies(before), strict=True):
                assert torch.equal(bytes_of(one.data)[last:], bytes_of(old.data)[last:])
                first = last if one.axis == "row" else -(-last // 32)
                assert torch.equal(bytes_of(one.scale)[first:], bytes_of(old.scale)[first:])
                assert not torch.equal(bytes_of(one.data)[:last], bytes_of(old.data)[:last])

    @pytest.mark.parametrize("scale_layout", LAYOUTS)
    def test_out(self, scale_layout: str) -> None:
        x = spread(70, 96)
        for axis in ("row", "col", "both"):
            wanted = quantize_mxfp8(x, axis=axis, scale_layout=scale_layout)
            out = quantize_mxfp8(x * 3, axis=axis, scale_layout=scale_layout)
            assert quantize_mxfp8(x, axis=axis, scale_layout=scale_layout, out=out) is out
            for one, other in zip(copies(out), copies(wanted), strict=True):
                assert torch.equal(bytes_of(one.data), bytes_of(other.data))
                assert torch.equal(bytes_of(one.scale), bytes_of(other.scale))


def x96() -> Tensor:
    return torch.ones(64, 96)


REFUSALS: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "no tensor": (TypeError, "x is a list", lambda: quantize_mxfp8([1.0])),
    "dtype": (TypeError, "x is torch.float64.*torch.float32", lambda: quantize_mxfp8(torch.ones(1, 32).double())),
    "rank": (ValueError, "give \\[T, K\\]", lambda: quantize_mxfp8(torch.ones(2, 2, 32))),
    "width": (ValueError, "x has 40 columns.*multiple of 32", lambda: quantize_mxfp8(torch.ones(1, 40))),
    "axis": (ValueError, "axis is 'rows'; choose one of row, col, both", lambda: quantize_mxfp8(x96(), axis="rows")),
    "block": (ValueError, "block is '32'; choose one of 1x32, 1x128", lambda: quantize_mxfp8(x96(), block="32")),
    "layout": (ValueError, "scale_layout is None", lambda: quantize_mxfp8(x96(), scale_layout=None)),
    "offs dtype": (TypeError, "offs is torch.int64", lambda: quantize_mxfp8(x96(), offs=torch.tensor([3]))),
    "offs rank": (ValueError, "offs has shape", lambda: quantize_mxfp8(x96(), offs=torch.tensor(3, dtype=torch.int32))),
    "no groups": (ValueError, "0 groups", lambda: quantize_mxfp8(x96(), offs=torch.empty(0, dtype=torch.int32))),
    "offs range": (
        ValueError, "offs end at 65", lambda: quantize_mxfp8(x96(), offs=torch.tensor([65], dtype=torch.int32)),
    ),
    "falling offs": (
        ValueError, "never fall", lambda: quantize_mxfp8(x96(), offs=torch.tensor([9, 3], dtype=torch.int32)),
    ),
    "offs inside padding": (
        ValueError,
        "offs\\[1\\] is 40, but by columns that group begins at row 128",
        lambda: quantize_mxfp8(x96(), axis="both", offs=torch.tensor([30, 40], dtype=torch.int32)),
    ),
    "out's type": (TypeError, "out is Tensor", lambda: quantize_mxfp8(x96(), out=x96())),
    "one out for both": (
        TypeError, "a pair \\(row, col\\)", lambda: quantize_mxfp8(x96(), axis="both", out=quantize_mxfp8(x96())),
    ),
    "out's form": (
        ValueError, "it must have axis 'row'", lambda: quantize_mxfp8(x96(), out=quantize_mxfp8(x96(), axis="col")),
    ),
    "out's shape": (
        ValueError, "out has shape \\[32, 96\\]", lambda: quantize_mxfp8(x96(), out=quantize_mxfp8(x96()[:32])),
    ),
    "gradient": (GradientNotSupported, "no gradient", lambda: quantize_mxfp8(x96().requires_grad_())),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    error, words, call = REFUSALS[name]
    with pytest.raises(error, match=words):
        call()


class TestLayout:
    @pytest.mark.parametrize(("outer", "blocks"), [(1, 1), (128, 4), (129, 5), (300, 23), (256, 8)])
    def test_every_scale_has_its_place(self, outer: int, blocks: int) -> None:
        scales = torch.randint(1, 255, (outer, blocks), dtype=torch.uint8)
        atoms = layout.swizzled(scales)
        assert atoms.shape == layout.scale_shape(outer, blocks * 32, "row", "swizzled")
        for i, j in itertools.product(range(outer), range(blocks)):
            assert atoms[oracle.swizzled_index(i, j, blocks)] == scales[i, j]
        assert int(atoms.count_nonzero()) == outer * blocks

    @settings(max_examples=50)
    @given(outer=st.integers(1, 400), blocks=st.integers(1, 40), batch=st.sampled_from([(), (2,), (2, 3)]))
    def test_round_trip(self, outer: int, blocks: int, batch: tuple[int, ...]) -> None:
        scales = torch.randint(0, 256, (*batch, outer, blocks), dtype=torch.uint8)
        assert torch.equal(layout.unswizzled(layout.swizzled(scales), outer, blocks), scales)

    def test_padding_is_zero_though_wide_blocks_reach_into_it(self) -> None:
        row, col = quantize_mxfp8(torch.ones(70, 160), axis="both", block="1x128", scale_layout="swizzled")
        for one, outer, blocks in ((row, 70, 5), (col, 160, 3)):
            assert int(bytes_of(one.scale).count_nonzero()) == outer * blocks


def sample(axis: str = "row", scale_layout: str = "plain") -> MXFP8Tensor:
    result: MXFP8Tensor = quantize_mxfp8(spread(200, 96), axis=axis, scale_layout=scale_layout)
    return result


def same(a: MXFP8Tensor, b: MXFP8Tensor) -> bool:
    return (
        all(getattr(a, name) == getattr(b, name) for name in LAYOUT_FIELDS)
        and torch.equal(bytes_of(a.data), bytes_of(b.data))
        and torch.equal(bytes_of(a.scale), bytes_of(b.scale))
    )


class TestTensor:
    @pytest.mark.parametrize("axis", ["row", "col"])
    def test_dequantize(self, axis: str) -> None:
        x = spread(200, 96)
        for scale_layout in LAYOUTS:
            q = quantize_mxfp8(x, axis=axis, scale_layout=scale_layout)
            values = q.dequantize()
            assert values.dtype == F32 and values.shape == x.shape and values.is_contiguous()
            scales = bytes_of(q.plain().scale)
            by_element = scales.repeat_interleave(32, dim=1 if axis == "row" else 0)[:200, :96]
            assert torch.equal(values.double(), q.data.double() * torch.exp2(by_element.double() - 127))
            assert q.dequantize(BF16).dtype == BF16

    def test_plain_and_swizzled_are_inverse(self) -> None:
        for axis in ("row", "col"):
            plain, atoms = sample(axis), sample(axis, "swizzled")
            assert same(plain.swizzled(), atoms) and same(atoms.plain(), plain)
            assert plain.plain() is plain and atoms.swizzled() is atoms

    def test_groups_of_rows(self) -> None:
        q = sample()
        offs = torch.tensor([64, 64, 128, 200], dtype=torch.int32)
        whole, start = q.dequantize(), 0
        for e, end in enumerate(offs.tolist()):
            part = q.group(e, offs)
            assert torch.equal(part.dequantize(), whole[start:end])
            if end > start:
                assert part.data.data_ptr() == q.data[start:].data_ptr(), "a copy"
            start = end
        atoms = sample(scale_layout="swizzled")
        assert torch.equal(atoms.group(3, offs).dequantize(), whole[128:])
        assert atoms.group(1, offs).shape == (0, 96)
        with pytest.raises(ValueError, match="begins at row 64, inside a 128-row atom.*plain"):
            atoms.group(2, offs)

    def test_group_refuses(self) -> None:
        q = sample()
        for error, words, call in (
            (IndexError, "there are 2 groups", lambda: q.group(2, [1, 2])),
            (IndexError, "index is -1", lambda: q.group(-1, [1, 2])),
            (ValueError, "rows 1 to 300, but data has 200", lambda: q.group(1, [1, 300])),
            (ValueError, "take one matrix", lambda: batch_of(2).group(0, [1])),
            (IndexError, "no leading dimension", lambda: q[0]),
        ):
            with pytest.raises(error, match=words):
                call()

    def test_a_batch_of_matrices(self) -> None:
        q = batch_of(3)
        assert q.shape == (3, 64, 96) and same(q[1].plain(), MXFP8Tensor(q.data[1], q.scale[1]))
        assert torch.equal(q.swizzled().dequantize(), q.dequantize())
        assert torch.equal(q.swizzled()[2].dequantize(), q.dequantize()[2])

    def test_moving(self) -> None:
        q = sample()
        assert q.to("cpu") is q and q.cpu() is q and q.device == torch.device("cpu")
        meta = q.to("meta")
        assert meta.device.type == "meta" and meta.data.shape == q.data.shape and meta.scale.shape == q.scale.shape
        assert same(q.clone(), q) and q.clone().data is not q.data
        assert q.nbytes == 200 * 96 + 200 * 3
        with pytest.raises(TypeError, match="dequantize\\(torch.bfloat16\\)"):
            q.to(BF16)  # type: ignore[arg-type]

    def test_repr(self) -> None:
        text = "MXFP8Tensor([200, 96], axis='col', block='1x32', scale_layout='swizzled', device='cpu')"
        assert repr(sample("col", "swizzled")) == text

    @pytest.mark.parametrize("weights_only", [True, False])
    def test_pickles(self, weights_only: bool) -> None:
        q = sample("col", "swizzled")
        assert same(pickle.loads(pickle.dumps(q)), q) and same(copy.deepcopy(q), q)
        file = io.BytesIO()
        torch.save({"w": q}, file)
        file.seek(0)
        assert same(torch.load(file, weights_only=weights_only)["w"], q)

    def test_safetensors(self) -> None:
        safetensors = pytest.importorskip("safetensors.torch")
        a, b = sample(), sample("col", "swizzled")
        raw = safetensors.save({**a.tensors("a."), **b.tensors("b.")}, {**a.metadata("a."), **b.metadata("b.")})
        tensors = safetensors.load(raw)
        for prefix, q in (("a.", a), ("b.", b)):
            assert same(MXFP8Tensor.from_tensors(tensors, q.metadata(prefix), prefix), q)

    def test_safetensors_keeps_the_metadata(self, tmp_path: Any) -> None:
        safetensors = pytest.importorskip("safetensors.torch")
        safe_open = pytest.importorskip("safetensors").safe_open
        q = sample("col", "swizzled")
        safetensors.save_file(q.tensors(), tmp_path / "q", q.metadata())
        with safe_open(tmp_path / "q", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            assert same(MXFP8Tensor.from_tensors(tensors, file.metadata()), q)

    def test_state_dict(self) -> None:
        """Of a module that keeps the parts as buffers."""

        class Holder(torch.nn.Module):
            def __init__(self, q: MXFP8Tensor) -> None:
                super().__init__()
                for name, tensor in q.tensors("w_").items():
                    self.register_buffer(name, tensor)
                self.form = q.metadata("w_")

        q, other = sample(), sample().clone()
        other.data.view(torch.uint8).zero_()
        holder = Holder(other)
        holder.load_state_dict(Holder(q).state_dict())
        assert same(MXFP8Tensor.from_tensors(dict(holder.named_buffers()), holder.form, "w_"), q)

    def test_refuses_parts_that_do_not_fit(self) -> None:
        q = sample()
        for error, words, call in (
            (TypeError, "data is torch.uint8", lambda: MXFP8Tensor(bytes_of(q.data), q.scale)),
            (TypeError, "scale is torch.uint8", lambda: MXFP8Tensor(q.data, bytes_of(q.scale))),
            (TypeError, "scale is NoneType", lambda: MXFP8Tensor(q.data, None)),  # type: ignore[arg-type]
            (ValueError, "give \\[..., T, K\\]", lambda: MXFP8Tensor(q.data[0], q.scale[0])),
            (ValueError, "plain scales by col of data \\[200, 96\\] are \\[7, 96\\]",
             lambda: MXFP8Tensor(q.data, q.scale, "col")),
            (ValueError, "scale is on meta", lambda: MXFP8Tensor(q.data, q.scale.to("meta"))),
            (ValueError, "axis is 'both'; choose one of row, col", lambda: MXFP8Tensor(q.data, q.scale, "both")),
            (KeyError, "no entry 'p.scale'", lambda: MXFP8Tensor.from_tensors({"p.data": q.data}, {}, "p.")),
            (KeyError, "no entry 'axis'", lambda: MXFP8Tensor.from_tensors(q.tensors(), {})),
        ):  # fmt: skip
            with pytest.raises(error, match=words):
                call()

    def test_passes_through_pytrees(self) -> None:
        from torch.utils import _pytree as pytree

        q = sample()
        leaves, spec = pytree.tree_flatten({"w": q})
        assert len(leaves) == 2 and same(pytree.tree_unflatten(leaves, spec)["w"], q)

    def test_is_an_input_of_an_exported_program(self) -> None:
        exported_with(sample("col", "swizzled"))


def exported_with(argument: Any) -> None:
    """Check that a module taking this argument gives the same results after export, saving and loading."""

    class Doubles(torch.nn.Module):
        def forward(self, w: Any) -> torch.Tensor:
            doubled: torch.Tensor = w.data.float() * 2
            return doubled

    file = io.BytesIO()
    torch.export.save(torch.export.export(Doubles(), (argument,)), file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(argument), Doubles()(argument))


def same_folded(a: FoldedWeight, b: FoldedWeight) -> bool:
    parts = all(torch.equal(bytes_of(x), bytes_of(y)) for x, y in ((a.data, b.data), (a.scale, b.scale)))
    return parts and (a.axis, a.report, type(a)) == (b.axis, b.report, type(b))


@pytest.mark.parametrize("report", [True, False])
class TestFoldedWeightsAreKept:
    """Folded weights support copy, pickle, torch.save and pytrees, as MXFP8Tensor does."""

    def both(self, report: bool) -> Any:
        return prepare_mxfp8_weight(weight(), axis="both", report=report)

    def test_copies(self, report: bool) -> None:
        for folded in self.both(report):
            assert same_folded(pickle.loads(pickle.dumps(folded)), folded)
            deep, shallow = copy.deepcopy(folded), copy.copy(folded)
            assert same_folded(deep, folded) and deep.data.data_ptr() != folded.data.data_ptr()
            assert same_folded(shallow, folded) and shallow.data.data_ptr() == folded.data.data_ptr()

    @pytest.mark.parametrize("weights_only", [True, False])
    def test_files(self, report: bool, weights_only: bool) -> None:
        file, both = io.BytesIO(), self.both(report)
        torch.save({"w1": both, "w2": both.row}, file)
        file.seek(0)
        read = torch.load(file, weights_only=weights_only)
        assert type(read["w1"]) is type(both) and all(map(same_folded, read["w1"], both))
        assert same_folded(read["w2"], both.row)

    def test_pytrees(self, report: bool) -> None:
        from torch.utils import _pytree as pytree

        both = self.both(report)
        leaves, spec = pytree.tree_flatten({"w": both})
        assert len(leaves) == 4 and all(map(same_folded, pytree.tree_unflatten(leaves, spec)["w"], both))
        assert pytree.tree_map(lambda t: t.to("meta"), both).row.data.is_meta
        exported_with(both.col)


def test_copies_of_an_mxfp8_tensor_in_files() -> None:
    file, both = io.BytesIO(), quantize_mxfp8(spread(64, 96), axis="both")
    torch.save(both, file)
    file.seek(0)
    assert all(map(same, torch.load(file, weights_only=True), both))


def test_what_a_file_holds_is_checked() -> None:
    """A pickle can hold any state."""
    for value, change, words in (
        (sample(), {"scale": torch.zeros(3, dtype=torch.uint8)}, "MXFP8Tensor: scale has shape"),
        (sample(), {"axis": "both"}, "axis is 'both'"),
        (prepare_mxfp8_weight(weight()), {"scale": torch.zeros(3, dtype=torch.uint8)}, r"FoldedWeight: .*\[3\]"),
        (prepare_mxfp8_weight(weight()), {"axis": "both"}, "FoldedWeight: axis is 'both'"),
        (prepare_mxfp8_weight(weight()), {"to": 1}, "unexpected keyword argument 'to'"),
    ):
        state = {**value.__getstate__(), **change}  # type: ignore[attr-defined]
        with pytest.raises((ValueError, TypeError), match=words):
            object.__new__(type(value)).__setstate__(state)


def batch_of(count: int) -> MXFP8Tensor:
    parts = [quantize_mxfp8(spread(64, 96, seed=e)) for e in range(count)]
    data = torch.stack([bytes_of(p.data) for p in parts]).view(layout.DATA_DTYPE)
    return MXFP8Tensor(data, torch.stack([bytes_of(p.scale) for p in parts]).view(SCALE_DTYPE))


class TestLibrary:
    @pytest.mark.parametrize("axis", ["row", "col", "both"])
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compiled_equals_eager(self, axis: str, dynamic: bool) -> None:
        torch.compiler.reset()
        x, offs = padded_buffer([100, 60], tail=0)
        offs_ = torch.tensor(offs, dtype=torch.int32)

        def call(x: Tensor) -> Any:
            result = quantize_mxfp8(x * 2, axis=axis, offs=offs_, block="1x128", scale_layout="swizzled")
            return [part for one in copies(result) for part in (one.data, one.scale)]

        compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for got, want in zip(compiled(x), call(x), strict=True):
            assert torch.equal(bytes_of(got), bytes_of(want))

    def test_a_compiled_function_may_return_it(self) -> None:
        torch.compiler.reset()
        x = spread(64, 64)
        q = torch.compile(lambda x: quantize_mxfp8(x + 1), backend="aot_eager", fullgraph=True)(x)
        assert same(q, quantize_mxfp8(x + 1))

    def test_compiled_with_out(self) -> None:
        torch.compiler.reset()
        x = spread(64, 64)
        out = quantize_mxfp8(x * 5)

        def call(x: Tensor, data: Tensor, scale: Tensor) -> Tensor:
            quantize_mxfp8(x, out=MXFP8Tensor(data, scale))
            return data.float().sum()

        total = torch.compile(call, backend="aot_eager", fullgraph=True)(x, out.data, out.scale)
        wanted = quantize_mxfp8(x)
        assert same(out, wanted) and total == wanted.data.float().sum()

    def test_fake_tensors(self) -> None:
        with FakeTensorMode() as mode:
            x = mode.from_tensor(spread(70, 96))
            q = quantize_mxfp8(x, axis="both", scale_layout="swizzled")
        assert q.row.data.shape == (70, 96) and q.col.scale.shape == (512,)
        assert quantize_mxfp8(torch.empty(70, 96, device="meta")).scale.shape == (70, 3)


class TestHostPath:
    """The host path of quantize_mxfp8 to a fake function that reads its arguments as the kernel does."""

    @pytest.mark.parametrize("dtype", [BF16, F16, F32])
    @pytest.mark.parametrize("axis", ["row", "col", "both"])
    def test_what_a_kernel_is_given(self, fake_gpu: FakeGpu, axis: str, dtype: torch.dtype) -> None:
        x, ends = padded_buffer([100, 0, 60], tail=100)
        x = x.to(dtype)
        offs = torch.tensor(ends, dtype=torch.int32)
        for block, scale_layout in itertools.product(BLOCKS, LAYOUTS):
            for groups in (None, offs):
                matrix = x.nan_to_num(0.5) if groups is None else x
                result = quantize_mxfp8(matrix, axis=axis, offs=groups, block=block, scale_layout=scale_layout)
                again = quantize_mxfp8(
                    matrix, axis=axis, offs=groups, block=block, scale_layout=scale_layout, out=result
                )
                for one in copies(again):
                    told = None if groups is None else ends
                    assert_copy(one, oracle.quantized(matrix, one.axis, BLOCKS[block], told, padded=axis != "row"))
        assert set(fake_gpu.specs) == {QuantizeMxfp8Spec(str(dtype).removeprefix("torch."), axis)}
        assert len(fake_gpu.launches) == 16

    def test_plans_are_reused(self, fake_gpu: FakeGpu) -> None:
        for _ in range(3):
            quantize_mxfp8(spread(70, 96))
        assert len(fake_gpu.specs) == 1 and len(fake_gpu.launches) == 3

    def test_one_row_of_any_stride_and_none_at_all(self, fake_gpu: FakeGpu) -> None:
        row = spread(1, 64).as_strided((1, 64), (7, 1))
        assert_copy(quantize_mxfp8(row), oracle.quantized(row, "row", 32))
        assert quantize_mxfp8(torch.empty(0, 64, dtype=BF16), axis="both").col.shape == (0, 64)
        assert len(fake_gpu.launches) == 1

    def test_refusals_of_a_gpu(self, fake_gpu: FakeGpu) -> None:
        buffer = torch.zeros(200, dtype=BF16)
        with pytest.raises(ValueError, match="x starts 2 bytes after"):
            quantize_mxfp8(buffer[1:65].view(2, 32))
        with pytest.raises(ValueError, match="rows 36 elements apart"):
            quantize_mxfp8(buffer.as_strided((4, 32), (36, 1)))
        q = quantize_mxfp8(torch.zeros(4, 64, dtype=F32))
        inside = MXFP8Tensor(torch.zeros(1024, dtype=layout.DATA_DTYPE)[:256].view(4, 64), q.scale)
        x = inside.data.view(torch.uint8).view(-1)[:128].view(BF16).view(2, 32)
        with pytest.raises(ValueError, match="out.* overlaps x"):
            quantize_mxfp8(x, out=MXFP8Tensor(inside.data.view(-1)[:64].view(2, 32), q.scale.view(-1)[:2].view(2, 1)))

    def test_explain(self, fake_gpu: FakeGpu) -> None:
        told = glulam.explain(quantize_mxfp8, spread(70, 96), axis="both")
        assert told.spec == QuantizeMxfp8Spec("bfloat16", "both") and told.why
        assert glulam.explain("quantize_mxfp8", (70, 96), dtype=F32).spec == QuantizeMxfp8Spec("float32", "row")


def weight(experts: int = 3, n: int = 64, k: int = 256, seed: int = 0) -> Tensor:
    return torch.randn(experts, n, k, generator=torch.Generator().manual_seed(seed)).to(BF16) * 0.02


def massive(ratio: float, n: int = 64) -> Tensor:
    """Return a weight whose expert 1 has one input channel `ratio` times larger than the others."""
    w = weight(n=n)
    w[1, :, 5] = 0.05 * ratio
    return w


def quantized_values(w: Tensor, axis: str) -> Tensor:
    return torch.stack([quantize_mxfp8(one, axis=axis).dequantize() for one in w])


class TestFold:
    @pytest.mark.parametrize("axis", ["row", "col"])
    def test_values_stay_but_for_the_last_bits(self, axis: str) -> None:
        w = weight()
        folded = prepare_mxfp8_weight(w, axis=axis)
        contraction = 2 if axis == "row" else 1
        wanted = quantized_values(w, axis)
        limit = wanted.abs().amax(dim=contraction, keepdim=True) * 2.0**-17.8
        lost = (folded.dequantize() - wanted).abs()
        assert bool((lost <= limit).all())
        assert folded.data.shape == ((3, 64, 256) if axis == "row" else (3, 256, 64)) and folded.data.is_contiguous()
        assert folded.scale.shape == folded.data.shape[:2] and folded.scale.dtype == SCALE_DTYPE
        changed = int((lost > 0).sum()) / int((wanted != 0).sum())
        assert folded.report.changed == pytest.approx(changed) and changed < 1e-3

    def test_exact_where_no_block_is_far_below(self) -> None:
        """Within 2^6 of the row's maximum no element of these loses a bit."""
        w = (torch.randint(-15, 16, (2, 64, 128)) * torch.exp2(torch.randint(0, 3, (2, 64, 128)))).to(BF16)
        folded = prepare_mxfp8_weight(w)
        assert torch.equal(folded.dequantize(), quantized_values(w, "row"))
        assert (folded.report.changed, folded.report.error, folded.report.error_bound) == (0, 0, 0)

    def test_a_row_carries_its_own_power(self) -> None:
        """A row a million times the others costs them nothing."""
        w = weight()
        w[0, 7] *= 2.0**20
        assert prepare_mxfp8_weight(w).report.error_bound == prepare_mxfp8_weight(weight()).report.error_bound

    def test_the_least_scale_that_holds_the_row(self) -> None:
        folded = prepare_mxfp8_weight(weight())
        largest = folded.data.float().abs().amax(dim=2)
        assert bool((largest > 224).all()) and bool((largest <= 448).all())

    @pytest.mark.parametrize("axis", ["row", "col"])
    def test_the_report_is_true(self, axis: str) -> None:
        w = massive(2.0**7)
        report = prepare_mxfp8_weight(w, axis=axis).report
        wanted, got = quantized_values(w, axis), prepare_mxfp8_weight(w, axis=axis).dequantize()
        if axis == "col":
            wanted, got = wanted.mT, got.mT
        lost = (got - wanted).double()
        row_error = (lost.norm(dim=2) / wanted.double().norm(dim=2)).max()
        blocks, values = lost.unflatten(2, (-1, 32)).norm(dim=3), wanted.double().unflatten(2, (-1, 32)).norm(dim=3)
        errors = torch.where(values > 0, blocks / values, 0)
        assert report.error == pytest.approx(float(row_error), rel=1e-4)
        assert report.error_bound == pytest.approx(float(errors.max()), rel=1e-4)
        assert errors[tuple(report.worst[:3])] == errors.max()
        assert sum(report.binades) == int((values > 0).sum()) and len(report.binades) == 32
        assert str(report).count("%") == sum(count > 0 for count in report.binades)
        if axis == "row":
            assert report.worst.expert == 1 and report.worst.binades >= 7 and sum(report.binades[7:]) > 0

    def test_the_documented_bound_holds_for_massive_channels(self) -> None:
        """However large the channel, and whatever the activations, no result moves by more than the reported share."""
        generator = torch.Generator().manual_seed(2)
        for ratio in (1.0, 2.0**6, 2.0**12, 2.0**16):
            w = massive(ratio)
            folded, exact = prepare_mxfp8_weight(w, max_error=2.0), quantized_values(w, "row").double()
            x = torch.randn(16, 256, generator=generator).double()
            x[:, 5] = 0  # the massive channel hides nothing
            moved = (x @ (folded.dequantize().double() - exact).mT).abs()
            norms = exact.unflatten(2, (-1, 32)).norm(dim=3) @ x.unflatten(1, (-1, 32)).norm(dim=2).mT
            assert bool((moved <= folded.report.error_bound * norms.mT.permute(2, 0, 1).movedim(0, 2) * 1.001).all())

    def test_a_normal_weight_moves_results_by_a_millionth(self) -> None:
        w, x = weight(n=128, k=1024), torch.randn(64, 1024, generator=torch.Generator().manual_seed(4)).double()
        exact = x @ quantized_values(w, "row").double().mT
        moved = x @ prepare_mxfp8_weight(w).dequantize().double().mT - exact
        assert 0 < float(moved.norm() / exact.norm()) < 1e-6

    def test_refuses_what_it_would_spoil(self) -> None:
        words = (
            "expert 1: folding would change .* max_error = 0.01: row .* binades under the row's maximum.*mxfp8_exact"
        )
        with pytest.raises(FoldError, match=words):
            prepare_mxfp8_weight(massive(2.0**15))
        assert prepare_mxfp8_weight(massive(2.0**15), max_error=1.0).report.error_bound > 0.01

    def test_what_float32_would_not_keep_is_no_reason_to_refuse(self) -> None:
        assert prepare_mxfp8_weight(massive(2.0**30)).report.error_bound < 1e-2

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_refuses_what_is_not_finite(self, bad: float) -> None:
        w = weight()
        w[2, 3, 4] = bad
        for axis in ("row", "col"):
            with pytest.raises(FoldError, match="expert 2 has a NaN or an Inf"):
                prepare_mxfp8_weight(w, axis=axis)

    def test_zeros_and_subnormals(self) -> None:
        w = weight().float()
        w[0, 0] = 0
        w[0, 1] = 0
        w[0, 1, 3] = 2.0**-149
        w[1] = 0
        folded = prepare_mxfp8_weight(w)
        assert torch.equal(folded.dequantize()[1], torch.zeros(64, 256)) and bool(
            (folded.dequantize()[0, 0] == 0).all()
        )

    def test_lists_chunks_and_ready_weights_give_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        w = weight()
        wanted = prepare_mxfp8_weight(w, axis="both")
        ready = {
            axis: MXFP8Tensor(
                torch.stack([bytes_of(quantize_mxfp8(one, axis=axis).data) for one in w]).view(layout.DATA_DTYPE),
                torch.stack([bytes_of(quantize_mxfp8(one, axis=axis).scale) for one in w]).view(SCALE_DTYPE),
                axis,
            )
            for axis in ("row", "col")
        }
        monkeypatch.setattr("glulam.formats.mxfp8.fold.CHUNK_ELEMENTS", 5 * 256)
        listed = prepare_mxfp8_weight(list(w), axis="both")
        for axis in ("row", "col"):
            one = getattr(wanted, axis)
            for other in (getattr(listed, axis), prepare_mxfp8_weight(ready[axis], axis=axis)):
                assert torch.equal(bytes_of(other.data), bytes_of(one.data))
                assert torch.equal(bytes_of(other.scale), bytes_of(one.scale))
                assert other.report.worst == one.report.worst and other.report.binades == one.report.binades
        assert torch.equal(dequantized(wanted.row.data, bytes_of(wanted.row.scale)[..., None].expand(-1, -1, 8)),
                           wanted.row.dequantize())  # fmt: skip

    def test_parameters(self) -> None:
        folded = prepare_mxfp8_weight(torch.nn.Parameter(weight()))
        assert not folded.data.requires_grad and repr(folded).startswith("FoldedWeight([3, 64, 256], axis='row'")
        assert folded.to("cpu") is folded and folded.to("meta").scale.device.type == "meta"
        assert folded.shape == (3, 64, 256) and folded.nbytes == 3 * 64 * 257 and folded.device.type == "cpu"
        with pytest.raises(TypeError, match="dequantize\\(torch.bfloat16\\)"):
            folded.to(BF16)

    @pytest.mark.parametrize("axis", ["row", "col"])
    def test_against_the_definition(self, axis: str) -> None:
        for w in folding_cases():
            folded = prepare_mxfp8_weight(w, axis=axis, report=False)
            assert folded.report is None
            for matrix, data, scale in zip(w if axis == "row" else w.mT, folded.data, folded.scale, strict=True):
                wanted = oracle.folded_rows(matrix)
                assert torch.equal(bytes_of(data), wanted[0]) and torch.equal(bytes_of(scale), wanted[1])

    @pytest.mark.parametrize("axis", ["row", "col", "both"])
    def test_kernels_are_called_for_packed_weights_and_lists(self, axis: str, fake_gpu: FakeGpu) -> None:
        w = weight()
        axes = ("row", "col") if axis == "both" else (axis,)
        wanted = [oracle.folded_rows(m) for one in axes for m in (w if one == "row" else w.mT)]
        apart = torch.zeros(3, 80, 256, dtype=BF16)[:, :64].copy_(w)
        sources = ((w, 1), (list(w), 3), (w.mT.contiguous().mT, 3), (apart, 3), (torch.nn.Parameter(w), 1))
        for source, calls in sources:
            fake_gpu.work.clear()
            folded = prepare_mxfp8_weight(source, axis=axis, report=False)
            copies = folded if axis == "both" else (folded,)
            assert fake_gpu.work == ["fold_mxfp8"] * (calls * len(axes)) and copies[0].report is None
            made = [pair for one in copies for pair in zip(one.data, one.scale, strict=True)]
            for (data, scale), (its_data, its_scale) in zip(made, wanted, strict=True):
                assert torch.equal(bytes_of(data), its_data) and torch.equal(bytes_of(scale), its_scale)

    def test_the_report_is_made_beside_the_kernel(self, fake_gpu: FakeGpu) -> None:
        assert prepare_mxfp8_weight(weight()).report.error_bound > 0 and fake_gpu.work == ["fold_mxfp8"]
        with pytest.raises(FoldError, match="expert 1"):
            prepare_mxfp8_weight(massive(2.0**15))
        assert prepare_mxfp8_weight(massive(2.0**15), report=False).report is None

    def test_refusals(self) -> None:
        w = weight()
        for error, words, call in (
            (ValueError, "axis is 'rows'; choose one of row, col, both", lambda: prepare_mxfp8_weight(w, axis="rows")),
            (ValueError, "max_error is nan", lambda: prepare_mxfp8_weight(w, max_error=float("nan"))),
            (ValueError, "w has shape \\[64, 256\\]; it must be \\[E, N, K\\]", lambda: prepare_mxfp8_weight(w[0])),
            (ValueError, "multiples of 32", lambda: prepare_mxfp8_weight(w[:, :, :40])),
            (TypeError, "w holds torch.float64", lambda: prepare_mxfp8_weight(w.double())),
            (TypeError, "w is int", lambda: prepare_mxfp8_weight(3)),
            (TypeError, "w is list", lambda: prepare_mxfp8_weight([])),
            (ValueError, "different shapes", lambda: prepare_mxfp8_weight([w[0], w[0, :32]])),
            (ValueError, "quantised along its row", lambda: prepare_mxfp8_weight(batch_of(2), axis="col")),
        ):
            with pytest.raises(error, match=words):
                call()


class TestRebase:
    @pytest.mark.parametrize("columns", [32, 128, 736])
    def test_values_stay_and_scales_are_equal_over_128(self, columns: int) -> None:
        x = torch.randn(50, columns, generator=torch.Generator().manual_seed(1))
        x[7], x[:, 40:45] = 0, x[:, 40:45] * 64
        q = quantize_mxfp8(x)
        wide = rebase_mxfp8(q)
        assert (wide.block, wide.axis, wide.shape) == ("1x128", "row", q.shape) and rebase_mxfp8(wide) is wide
        scales = bytes_of(wide.scale)
        for start in range(0, scales.shape[1], 4):
            assert bool((scales[:, start : start + 4] == scales[:, start : start + 1]).all())
        before, after = q.dequantize(), wide.dequantize()
        padded = torch.nn.functional.pad(before, (0, -columns % 128)).unflatten(1, (-1, 128))
        limit = padded.abs().amax(dim=2).repeat_interleave(128, dim=1)[:, :columns] * 2.0**-17.8
        assert bool(((after - before).abs() <= limit).all())

    def test_what_is_not_finite(self) -> None:
        x = torch.ones(3, 256)
        x[0, 3], x[1, 200] = torch.nan, torch.inf
        values = rebase_mxfp8(quantize_mxfp8(x)).dequantize()
        assert bool(values[0, :128].isnan().all()) and bool((values[0, 128:] == 1).all())
        assert values[1, 200] == torch.inf and bool((values[1, :128] == 1).all()) and bool((values[2] == 1).all())

    def test_batches(self) -> None:
        q = batch_of(2)
        assert torch.equal(rebase_mxfp8(q)[1].dequantize(), rebase_mxfp8(q[1]).dequantize())

    def test_refuses_other_scales(self) -> None:
        for other in (sample("col"), sample(scale_layout="swizzled")):
            with pytest.raises(ValueError, match="quantised by rows, with plain scales"):
                rebase_mxfp8(other)
