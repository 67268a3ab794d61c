"""FP8 with block scales on the host: tensor class, quantiser, rows, and grouped_mlp by its recipes, against float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from support import fp8_block as oracle
from support import oracle as exact_mlp
from support.criterion import assert_close
from support.fake_gpu import FakeGpu
from support.inputs import Case, make_case, poisoned
from support.round_trips import WAYS, round_trip, same
from support.routing import catalogue
from torch import Tensor

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.specs import GATED
from glulam import FP8BlockTensor, MXFP8Tensor, mxfp8_of_square_blocks, quantize_fp8_block
from glulam.formats.fp8_block.form import FP8_ROWS

pytest_plugins = ["support.fixtures"]

BF16, E4M3, E8M0 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu
FP8, WEIGHT_ONLY = "fp8_block", "fp8_block_weight_only"
RECIPES = (FP8, WEIGHT_ONLY)
SIZES = [5, 0, 17, 1, 0, 40, 8]
HIDDEN = 272  # two blocks and 16
WIDTHS = (128, 80, 160)
"""Halves of whole blocks; halves with as many grid rows as one grid over all rows has; halves with more of them."""


def random_weights(experts: int, rows: int, k: int, layout: str = "", seed: int = 0) -> oracle.Weights:
    return oracle.any_weights(np.random.default_rng(seed), experts, rows, k, layout)


def tensor_of(w: oracle.Weights) -> FP8BlockTensor:
    """Return the weight as an FP8BlockTensor; scales of a concatenated w1 get a dimension for its two halves."""
    scale = w.scale.unflatten(1, (2, -1)) if w.layout == "concat" else w.scale
    return FP8BlockTensor(w.data, scale)


# The tensor -----------------------------------------------------------------------------------------------------------


class TestTensor:
    @pytest.mark.parametrize("rows", [1, 127, 128, 129, 300])
    @pytest.mark.parametrize("k", [16, 128, 144, 272])
    def test_values_are_elements_times_their_block(self, rows: int, k: int) -> None:
        w = random_weights(3, rows, k)
        q = tensor_of(w)
        assert q.shape == (3, rows, k) and q.scale.shape == (3, -(-rows // 128), -(-k // 128))
        assert torch.equal(q.dequantize(torch.float64), w.values())
        assert torch.equal(q.dequantize(), w.values().float()) and torch.equal(q.dequantize(BF16), w.in_bfloat16())
        one = FP8BlockTensor(w.data[1], w.scale[1])
        assert torch.equal(one.dequantize(torch.float64), w.values()[1]) and same(one, q[1])

    @pytest.mark.parametrize("width", [16, *WIDTHS, 200])
    def test_halves_have_grids_of_their_own(self, width: int) -> None:
        w = random_weights(3, 2 * width, 144, "concat")
        q = tensor_of(w)
        assert torch.equal(q.dequantize(torch.float64), w.values())
        assert q.has_grid_of_halves == (width % 128 != 0)
        whole = (3, 2 * width // 128, 2) if width % 128 == 0 else (3, 2, -(-width // 128), 2)
        assert q.scale.shape == whole
        assert torch.equal(q[1:].dequantize(torch.float64), w.values()[1:])
        assert torch.equal(q[2].dequantize(torch.float64), w.values()[2])

    def test_grids_are_told_apart_where_they_are_of_one_size(self) -> None:
        """2 x 200 rows have four grid rows either way: only the shape says which."""
        w = random_weights(2, 400, 144, "concat")
        whole, halves = FP8BlockTensor(w.data, w.scale), tensor_of(w)
        assert whole.scale.numel() == halves.scale.numel() and halves.scale.shape == (2, 2, 2, 2)
        assert not torch.equal(whole.dequantize(), halves.dequantize())
        assert torch.equal(halves.dequantize(torch.float64), w.values())

    @pytest.mark.parametrize("halves", [False, True])
    @pytest.mark.parametrize("way", WAYS)
    def test_round_trips(self, way: str, halves: bool) -> None:
        q = tensor_of(random_weights(2, 160, 48, "concat" if halves else ""))
        assert q.tensors("experts.w1_")["experts.w1_scale"].dtype == torch.float32 and q.metadata() == {}
        other = round_trip(q, way)
        assert same(q, other) and other.data.data_ptr() != q.data.data_ptr() and other.parts.scale is other.scale

    def test_moves(self) -> None:
        q = tensor_of(random_weights(2, 136, 48))
        assert q.to("cpu") is q and same(q.clone(), q) and q.nbytes == 2 * (136 * 48 + 4 * 2)
        with pytest.raises(TypeError, match="FP8 blocks has no other dtype"):
            q.to(BF16)  # type: ignore[arg-type]
        assert repr(q) == "FP8BlockTensor([2, 136, 48], device='cpu')"
        with pytest.raises(IndexError, match="a single matrix"):
            q[0][0]

    @pytest.mark.parametrize(
        ("data", "scale", "message"),
        [
            (
                torch.zeros(2, 16),
                torch.zeros(1, 1),
                "data is torch.float32; it must be a tensor of torch.float8_e4m3fn",
            ),
            (torch.zeros(2, 16).to(E4M3), torch.zeros(1, 1).to(BF16), "scale is torch.bfloat16"),
            (torch.zeros(2, 16).to(E4M3), torch.zeros(1, 1).to(E8M0), "scale is torch.float8_e8m0fnu"),
            (torch.zeros(2, 24).to(E4M3), torch.zeros(1, 1), "K a multiple of 16, so pad it"),
            (torch.zeros(16).to(E4M3), torch.zeros(1), r"give \[N, K\] or \[E, N, K\]"),
            (torch.zeros(1, 1, 2, 16).to(E4M3), torch.zeros(1, 1, 1, 1), r"give \[N, K\] or \[E, N, K\]"),
            (
                torch.zeros(2, 144).to(E4M3),
                torch.zeros(1, 1),
                r"\[1, 2\] or, .* half of the rows, \[2, 1, 2\]: a number",
            ),
            (torch.zeros(3, 144).to(E4M3), torch.zeros(2, 1, 2), r"data \[3, 144\] it is \[1, 2\]: a number"),
            (torch.zeros(300, 144).to(E4M3), torch.zeros(2, 3), r"it is \[3, 2\] or"),
        ],
    )
    def test_parts_that_do_not_fit(self, data: Tensor, scale: Tensor, message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            FP8BlockTensor(data, scale)

    def test_bytes_of_a_file_are_no_float32_scales(self) -> None:
        """Four bytes would become a scale that fits."""
        parts = {"data": torch.zeros(256, 16).to(E4M3), "scale": torch.zeros(2, 4, dtype=torch.uint8)}
        with pytest.raises(TypeError, match="scale is torch.uint8; it must be a tensor of torch.float32"):
            FP8BlockTensor.from_tensors(parts, {})

    def test_parts_on_two_devices(self) -> None:
        with pytest.raises(ValueError, match="scale is on meta but data is on cpu"):
            FP8BlockTensor(torch.zeros(2, 16).to(E4M3), torch.zeros(1, 1, device="meta"))


class TestSquareBlocks:
    @pytest.mark.parametrize("shape", [(64, 96), (3, 64, 32), (2, 40, 72), (1, 1, 1, 1)])
    @pytest.mark.parametrize("as_bytes", [False, True])
    def test_every_row_has_its_blocks_scale(self, shape: tuple[int, ...], as_bytes: bool) -> None:
        *lead, n, k = shape
        codes = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
        codes[codes % 128 == 127] = 3
        rows, columns = -(-n // 32), -(-k // 32)
        bytes_ = (torch.arange(math.prod((*lead, rows, columns))) * 7 % 255).to(torch.uint8).view(*lead, rows, columns)
        q = mxfp8_of_square_blocks(codes.view(E4M3), bytes_ if as_bytes else bytes_.view(E8M0))
        assert isinstance(q, MXFP8Tensor) and (q.axis, q.block, q.scale_layout) == ("row", "1x32", "plain")
        assert q.data.data_ptr() == codes.data_ptr()
        wanted = torch.empty(*lead, n, columns, dtype=torch.uint8)
        for i, j in itertools.product(range(n), range(columns)):
            wanted[..., i, j] = bytes_[..., i // 32, j]
        assert torch.equal(q.scale.view(torch.uint8), wanted)

    def test_operators_take_them(self) -> None:
        w = torch.randn(2, 64, 96).to(E4M3)
        scale = torch.tensor([[[120, 126, 119], [125, 127, 121]]] * 2, dtype=torch.uint8)
        q = mxfp8_of_square_blocks(w, scale)
        x, w2 = torch.randn(9, 96, dtype=BF16), torch.randn(2, 96, 32, dtype=BF16)
        made = glulam.grouped_mlp(x, q, w2, splits=[4, 5], recipe="mxfp8_weight_only")
        wide = torch.exp2(scale.double() - 127).repeat_interleave(32, 1).repeat_interleave(32, 2) * w.double()
        other = glulam.grouped_mlp(x, wide.to(BF16), w2, splits=[4, 5], recipe="mxfp8_weight_only")
        assert torch.equal(made, other) and made.abs().max() > 0.1

    @pytest.mark.parametrize(
        ("data", "scale", "message"),
        [
            (torch.zeros(32, 32), torch.zeros(1, 1, dtype=torch.uint8), "data is torch.float32"),
            (torch.zeros(32, 32).to(E4M3), torch.zeros(1, 1), "scale is torch.float32; give a tensor of .*e8m0fnu"),
            (
                torch.zeros(64, 32).to(E4M3),
                torch.zeros(1, 1, dtype=torch.uint8),
                r"it is \[2, 1\], a number for each 32",
            ),
            (torch.zeros(64, 32).to(E4M3), torch.zeros(64, 1, dtype=torch.uint8), r"scale has shape \[64, 1\]"),
            (torch.zeros(32).to(E4M3), torch.zeros(1, dtype=torch.uint8), r"give \[..., N, K\]"),
        ],
    )
    def test_parts_that_do_not_fit(self, data: Tensor, scale: Tensor, message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            mxfp8_of_square_blocks(data, scale)


# The quantiser --------------------------------------------------------------------------------------------------------


def quantized_block(block: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.float32]:
    """Quantise a block of float32 to the nearest finite E4M3 numbers, ties to the even code; return them and their
    scale.
    """
    amax = np.abs(block).max()
    if not np.isfinite(amax):
        return np.full(block.shape, np.nan), np.float32(np.nan)
    scale = np.float32(1) if amax == 0 else max(np.float32(amax) / np.float32(448), np.float32(2.0**-126))
    scaled = block * (np.float32(1) / scale)
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    numbers = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0), mantissa / 8 * 2.0**-6)
    distance = np.abs(np.abs(scaled.astype(np.float64))[..., None] - numbers)
    nearest = np.where(distance == distance.min(-1, keepdims=True), codes % 2, 2).argmin(-1)
    return np.copysign(numbers[nearest], scaled), scale


def hostile(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """Return a weight whose rows and blocks differ in scale, with blocks of zeros, NaN, Inf and the smallest
    numbers.
    """
    generator = torch.Generator().manual_seed(rows * 1000 + k)
    w = torch.randn(rows, k, generator=generator)
    w *= torch.exp2(torch.arange(rows) * 5 % 13 - 6.0)[:, None] * torch.exp2(torch.arange(k) // 40 % 7 - 3.0)
    w = w.to(dtype)
    if rows > 128 and k > 128:
        w[:128, :128] = 0
        w[129, 3] = torch.nan
        w[128:, 128:] *= 2.0**-100 if dtype == torch.float32 else 2.0**-14
        w[5, 140] = -torch.inf
    return w


class TestQuantiser:
    @pytest.mark.parametrize("shape", [(1, 16), (128, 128), (130, 144), (260, 272)], ids=str)
    @pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
    def test_bit_for_bit(self, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        w = hostile(*shape, dtype)
        q = quantize_fp8_block(w)
        wide = w.float().numpy()
        for i, j in itertools.product(range(0, shape[0], 128), range(0, shape[1], 128)):
            block = slice(i, i + 128), slice(j, j + 128)
            with np.errstate(all="ignore"):
                numbers, scale = quantized_block(wide[block])
            made = q.data[block].double().numpy()
            assert np.array_equal(q.scale[i // 128, j // 128].numpy(), scale, equal_nan=True)
            assert np.array_equal(made, numbers, equal_nan=True)
            assert np.array_equal(np.signbit(made), np.signbit(numbers)) or np.isnan(scale)
        if shape == (260, 272):
            assert q.scale[0, 0] == 1 and q.scale[1, 0].isnan() and q.scale[0, 1].isnan() and q.scale[1, 1] > 0

    def test_least_numbers_keep_a_finite_reciprocal(self) -> None:
        q = quantize_fp8_block(torch.full((1, 16), 2.0**-140))
        assert q.scale.item() == 2.0**-126 and not q.data.float().isnan().any()
        assert q.data.float().abs().max() == 0, "2^-14 of the least E4M3 number"

    @pytest.mark.parametrize("rows", [3, 400, 2 * 128 * 128 + 7])
    def test_long_and_strided_weights(self, rows: int) -> None:
        """Rows that are quantised some at a time, and memory in another order."""
        w = torch.randn(rows, 16)
        q, strided = quantize_fp8_block(w), quantize_fp8_block(w.mT.contiguous().mT)
        assert same(q, strided)
        blocks = [w[first : first + 128].abs().max() / 448 for first in range(0, rows, 128)]
        assert torch.equal(q.scale[:, 0], torch.stack(blocks))

    def test_experts_one_by_one(self) -> None:
        w = make_case([1, 1, 1], 144, 80).w1
        q = quantize_fp8_block(w)
        for expert in range(3):
            assert same(q[expert], quantize_fp8_block(w[expert]))
        assert quantize_fp8_block(w[:0]).shape == (0, 160, 144)
        assert quantize_fp8_block(w[:, :0]).scale.shape == (3, 0, 2)

    @pytest.mark.parametrize("width", WIDTHS)
    def test_in_halves(self, width: int) -> None:
        w = make_case([1, 1], 144, width).w1
        w[:, width:] *= 16
        q = quantize_fp8_block(w, in_halves=True)
        first, second = quantize_fp8_block(w[:, :width]), quantize_fp8_block(w[:, width:])
        assert torch.equal(q.dequantize(), torch.cat((first.dequantize(), second.dequantize()), dim=1))
        assert q.scale.numel() == 2 * first.scale.numel()
        assert same(q[1], quantize_fp8_block(w[1], in_halves=True))
        if width % 128 == 0:
            assert same(q, quantize_fp8_block(w))

    @pytest.mark.parametrize(
        ("w", "options", "message"),
        [
            ([1.0], {}, "w is list"),
            (torch.zeros(2, 16, dtype=torch.float64), {}, "w is torch.float64"),
            (torch.zeros(2, 24), {}, "K a multiple of 16, so pad it with zeros"),
            (torch.zeros(16), {}, r"give \[N, K\] or \[E, N, K\]"),
            (torch.zeros(3, 16), {"in_halves": True}, "an odd number; leave in_halves out"),
            (torch.zeros(4, 16), {"in_halves": 2}, "in_halves is 2; give True or False"),
        ],
    )
    def test_refusals(self, w: Any, options: dict[str, Any], message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            quantize_fp8_block(w, **options)

    def test_a_gradient_is_refused(self) -> None:
        w = torch.randn(2, 16, requires_grad=True)
        with pytest.raises(glulam.GradientNotSupported, match="quantize_fp8_block has no gradient, and w requires"):
            quantize_fp8_block(w)
        with torch.no_grad():
            assert quantize_fp8_block(w).shape == (2, 16)


class TestRows:
    @pytest.mark.parametrize("columns", [16, 128, 144, 400])
    def test_values_of_rows(self, columns: int) -> None:
        x = hostile(60, columns, torch.float32)
        x[3], x[5, columns // 2], x[7, 0] = 0, torch.nan, torch.inf
        x[9] *= 2.0**-130
        wanted = oracle.quantized_rows(x)
        assert torch.equal(FP8_ROWS.rounded(x).nan_to_num(7), wanted.values().float().nan_to_num(7))
        made = FP8_ROWS.rounded(x.double())
        assert made.dtype == torch.float64 and torch.equal(made.nan_to_num(7), wanted.values().nan_to_num(7))
        assert made[5, columns // 2 : columns // 2 + 3].isnan().all() and made[3].eq(0).all()
        error = (made - x.double()).abs()[8] / x[8].abs().max()
        assert 0 < error.max() < 2.0**-4

    def test_rounding_again_changes_little(self) -> None:
        once = FP8_ROWS.rounded(hostile(20, 144, torch.float32))
        assert torch.allclose(FP8_ROWS.rounded(once), once, rtol=1e-6)


# The recipes ----------------------------------------------------------------------------------------------------------


def case(form: tuple[str, str] = ("swiglu", "concat"), width: int = 160, **options: Any) -> Case:
    return make_case(SIZES, HIDDEN, width, gated=form[0] in GATED, tail=6, **options)


def weights_of(c: Case, form: tuple[str, str]) -> tuple[oracle.Weights, oracle.Weights]:
    """Return w1 and w2 of random finite elements, with scales that differ by expert and block."""
    layout = form[1] if form[0] in GATED else ""
    made = []
    for seed, (w, its_layout) in enumerate(((c.w1, layout), (c.w2, ""))):
        one = random_weights(*w.shape, its_layout, seed)
        made.append(one._replace(scale=one.scale / one.values().abs().mean()))
    return made[0], made[1]


def expected(
    c: Case, recipe: str, weights: tuple[Tensor, Tensor], form: tuple[str, str], everything: dict[str, Any],
    dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """Compute the exact result. dtype: of FC2's arithmetic; not float64: torch's result on the same operands."""
    x = c.x.nan_to_num()
    s = everything.get("row_scale")
    s = None if s is None else s.nan_to_num()

    def rounded(rows: Tensor) -> Tensor:
        return rows.double() if recipe == WEIGHT_ONLY else oracle.quantized_rows(rows.float()).values()

    act, _ = exact_mlp.grouped_glu(
        rounded(x), weights[0], c.ends, bias=everything.get("b1"), row_scale=s, form=form
    )  # fmt: skip
    return exact_mlp.grouped_mm(
        rounded(act.nan_to_num()), weights[1], c.ends, bias=everything.get("b2"), bias_scale=s, dtype=dtype
    )


def values_of(w: oracle.Weights, recipe: str) -> Tensor:
    return w.in_bfloat16().double() if recipe == WEIGHT_ONLY else w.values()


def wide(c: Case) -> dict[str, Any]:
    return {name: value.double() if name != "row_scale" else value for name, value in c.addends.items()}


def check_exactly(y: Tensor, wanted: Tensor, rows: int) -> None:
    """Check float64 rows: sums have no visible rounding, so every activation rounds to the same number.

    One row may differ, if 1e-7 of a sum decides between two numbers.
    """
    scale = wanted[:rows].abs().amax(dim=1, keepdim=True)
    assert y.dtype == torch.float64 and (scale > 0).all()
    *others, worst = ((y - wanted)[:rows] / scale).abs().amax(dim=1).sort().values.tolist()
    assert worst < 1e-5 and all(one < 1e-6 for one in others)


class TestReference:
    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("form", activation_forms(), ids="-".join)
    def test_every_activation(self, form: tuple[str, str], width: int, recipe: str) -> None:
        if form[1] == "interleaved32" and width % 32:
            pytest.skip("interleaved32 has halves of whole 32")
        c = case(form, width)
        weights = weights_of(c, form)
        y = glulam.grouped_mlp(
            c.x.double(), *map(tensor_of, weights), offs=c.offs, activation=form[0], glu_layout=form[1], recipe=recipe,
            **wide(c),
        )  # fmt: skip
        values = values_of(weights[0], recipe), values_of(weights[1], recipe)
        check_exactly(y, expected(c, recipe, values, form, c.addends), c.rows)

    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("routing", catalogue(60, 7))
    def test_every_routing(self, routing: str, recipe: str) -> None:
        c = make_case(catalogue(60, 7)[routing], HIDDEN, 80, tail=3)
        weights = weights_of(c, ("swiglu", "concat"))
        out = poisoned(c.x.shape[0], HIDDEN, c.x, padding=8).double()
        assert glulam.grouped_mlp(c.x.double(), *map(tensor_of, weights), splits=c.sizes, recipe=recipe, out=out) is out
        values = values_of(weights[0], recipe), values_of(weights[1], recipe)
        if c.rows:
            check_exactly(out, expected(c, recipe, values, ("swiglu", "concat"), {}), c.rows)
        assert bool(out[c.rows :].isnan().all()), "the tail was written"

    @pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_rows_of_16_bits(self, recipe: str, dtype: torch.dtype) -> None:
        form = ("swiglu", "concat")
        c = case(form, dtype=dtype)
        q1, q2 = quantize_fp8_block(c.w1, in_halves=True), quantize_fp8_block(c.w2)
        call = {"offs": c.offs, "recipe": recipe, **c.addends}
        if (recipe, dtype) == (WEIGHT_ONLY, torch.float16):
            with pytest.raises(TypeError, match="takes bfloat16, but the dtype is float16; cast to bfloat16"):
                glulam.grouped_mlp(c.x, q1, q2, **call)
            return
        y = glulam.grouped_mlp(c.x, q1, q2, **call)
        values = [q.dequantize(BF16 if recipe == WEIGHT_ONLY else torch.float64).double() for q in (q1, q2)]
        exact, same_dtype = (
            expected(c, recipe, (values[0], values[1]), form, c.addends, kind) for kind in (torch.float64, dtype)
        )
        assert y.dtype == dtype
        if recipe == WEIGHT_ONLY:
            assert_close(y, exact, same_dtype, c.rows)
        else:  # an activation may round to the other of two neighbours
            error = (y.double() - exact)[: c.rows].norm(dim=1) / exact[: c.rows].norm(dim=1)
            assert float(error.max()) < 0.02

    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("layout", ["concat", "interleaved"])
    def test_weights_in_16_bits_are_quantised(self, layout: str, width: int, recipe: str) -> None:
        c = case(width=width)
        c.w1[:, 1::2] *= 8
        c.w1[:, width:] *= 16
        q = quantize_fp8_block(c.w1, in_halves=layout == "concat"), quantize_fp8_block(c.w2)
        call = {"offs": c.offs, "recipe": recipe, "glu_layout": layout}
        wanted = glulam.grouped_mlp(c.x, *q, **call)[: c.rows]
        assert torch.equal(glulam.grouped_mlp(c.x, c.w1, c.w2, **call)[: c.rows], wanted)
        assert torch.equal(glulam.grouped_mlp(c.x, list(c.w1), list(c.w2), **call)[: c.rows], wanted)

    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("in_16_bits", [False, True])
    @pytest.mark.parametrize("layout", ["concat", "interleaved"])
    def test_kernels_read_the_grids_that_weights_have(
        self, layout: str, in_16_bits: bool, width: int, recipe: str, fake_gpu: FakeGpu
    ) -> None:
        form = ("swiglu", layout)
        c = case(form, width)
        c.w1[:, width:] *= 16
        q = quantize_fp8_block(c.w1, in_halves=layout == "concat"), quantize_fp8_block(c.w2)
        weights = (c.w1, c.w2) if in_16_bits else q
        values = [w.dequantize(BF16 if recipe == WEIGHT_ONLY else torch.float64).double() for w in q]
        wanted = expected(c, recipe, (values[0], values[1]), form, {})[: c.rows]
        for _ in range(2):  # by checks, then by the plan
            fake_gpu.launches.clear()
            y = glulam.grouped_mlp(c.x, *weights, offs=c.offs, recipe=recipe, glu_layout=layout)[: c.rows]
            assert fake_gpu.launches
            assert float(((y.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max()) < 0.03

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_a_nan_block_reaches_its_columns_alone(self, recipe: str) -> None:
        c = case(("none", "concat"))
        w2 = c.w2.clone()
        w2[2, 130, 3] = torch.nan
        y = glulam.grouped_mlp(
            c.x, quantize_fp8_block(c.w1), quantize_fp8_block(w2), offs=c.offs, activation="none", recipe=recipe
        )[: c.rows]
        bad = torch.zeros_like(y, dtype=torch.bool)
        bad[5:22, 128:256] = True  # expert 2's rows
        assert torch.equal(y.isnan(), bad)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_the_layer(self, recipe: str) -> None:
        c = case()
        tokens = c.x[:12]
        routing = glulam.route(torch.randn(12, len(SIZES)), 3)
        q = quantize_fp8_block(c.w1, in_halves=True), quantize_fp8_block(c.w2)
        y = glulam.moe(tokens, routing, *q, recipe=recipe)
        rows = glulam.grouped_mlp(
            tokens, *q, offs=routing.offs, rows=routing.token_of_row, row_scale=routing.weight_of_row, recipe=recipe
        )
        assert (
            torch.allclose(y, glulam.combine(rows, routing), atol=0.05 * float(y.abs().max())) and y.abs().max() > 0.1
        )

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_modules(self, recipe: str) -> None:
        c = case()
        mlp = glulam.nn.GroupedMLP(len(SIZES), HIDDEN, 160, recipe=recipe, dtype=BF16).requires_grad_(False)
        mlp.load_state_dict({"fc1.weight": c.w1, "fc2.weight": c.w2})
        y = mlp(c.x, offs=c.offs)[: c.rows]
        assert torch.equal(y, glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, recipe=recipe)[: c.rows])


class TestRefusals:
    @pytest.mark.parametrize("width", [80, 160])
    def test_a_grid_over_both_halves(self, width: int) -> None:
        c = case(width=width)
        q2 = quantize_fp8_block(c.w2)
        call = {"offs": c.offs, "recipe": FP8}
        with pytest.raises(ValueError, match=rf"w1 has halves of {width} rows.*in_halves=True"):
            glulam.grouped_mlp(c.x, quantize_fp8_block(c.w1), q2, **call)
        halves = quantize_fp8_block(c.w1, in_halves=True)
        with pytest.raises(
            ValueError, match="no halves of a gate in glu_layout 'concat'; quantise it without in_halves"
        ):
            glulam.grouped_mlp(c.x, halves, q2, glu_layout="interleaved", **call)
        with pytest.raises(ValueError, match="w2's scale has a grid for each half"):
            glulam.grouped_mlp(c.x, halves, quantize_fp8_block(c.w2, in_halves=True), **call)

    def test_rows_in_mxfp8(self) -> None:
        c = case()
        x = glulam.quantize_mxfp8(torch.randn(8, 288))
        for recipe in RECIPES:
            with pytest.raises(TypeError, match=f"x is an MXFP8Tensor, but recipe '{recipe}' takes 16-bit rows"):
                glulam.grouped_mlp(x, c.w1, c.w2, offs=c.offs, recipe=recipe)

    def test_other_recipes(self) -> None:
        c = case()
        q = quantize_fp8_block(c.w1, in_halves=True), quantize_fp8_block(c.w2)
        with pytest.raises(
            TypeError, match="w1 is an FP8BlockTensor, but recipe 'mxfp8' takes .*choose recipe 'fp8_block'"
        ):
            glulam.grouped_mlp(c.x, *q, offs=c.offs, recipe="mxfp8")
        with pytest.raises(TypeError, match="w1 is in FP8 blocks, and recipe is 'bf16'; choose .*'fp8_block'"):
            glulam.grouped_mlp(c.x, *q, offs=c.offs)
        with pytest.raises(TypeError, match="w2 is an MXFP8Tensor, but recipe 'fp8_block' takes an FP8BlockTensor"):
            glulam.grouped_mlp(
                c.x, q[0], MXFP8Tensor(q[1].data, q[1].scale.new_ones(7, 272, 5).to(E8M0)), offs=c.offs, recipe=FP8
            )

    def test_widths_and_gradients(self) -> None:
        c = make_case([3, 4], 40, 32)
        with pytest.raises(ValueError, match="is 40; recipe 'fp8_block' takes multiples of 16, so pad it with zeros"):
            glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, recipe=FP8)
        with pytest.raises(ValueError, match="takes multiples of 16"):
            glulam.nn.GroupedMLP(2, 40, 32, recipe=WEIGHT_ONLY, dtype=BF16)
        c = case()
        with pytest.raises(glulam.GradientNotSupported, match="recipe 'fp8_block' has no gradient, and x requires one"):
            glulam.grouped_mlp(c.x.requires_grad_(), c.w1, c.w2, offs=c.offs, recipe=FP8)

    def test_scales_of_another_shape(self) -> None:
        c = case()
        q = quantize_fp8_block(c.w1, in_halves=True), quantize_fp8_block(c.w2)
        broken = FP8BlockTensor.unchecked(q[1].data, q[1].scale[:, :2].contiguous())
        with pytest.raises(ValueError, match=r"w2's scale has shape \[7, 2, 2\]; it must be \[7, 3, 2\]"):
            glulam.grouped_mlp(c.x, q[0], broken, offs=c.offs, recipe=FP8)
        strided = FP8BlockTensor(q[1].data, q[1].scale.mT.contiguous().mT)
        with pytest.raises(ValueError, match="w2's scale must be contiguous"):
            glulam.grouped_mlp(c.x, q[0], strided, offs=c.offs, recipe=FP8)
