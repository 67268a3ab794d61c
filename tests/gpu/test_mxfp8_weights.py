"""Kernels that decode quantised weights, called by their exported functions, against float64 of the decoded weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import mxfp4, mxfp8, oracle
from support.launches import groups_of, launch, sm_count
from support.served import ARCH, decoding_tiles, glu_form
from torch import Tensor

from cute_kernels.accumulation import Accumulation
from cute_kernels.formats import E8M0, OPERANDS, next_operands
from cute_kernels.shipped import activation_forms
from cute_kernels.specs import DECODED, GATED, GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec
from cute_kernels.stages import accumulations_of
from cute_kernels.tiles import TileConfig
from glulam.activations import Activation
from glulam.formats.words import words_of

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
BLOCK, ONE = 32, 127
SIZES = [5, 0, 130, 1, 64, 257]
OFFS, SPLITS, SPLITS64 = 0, 1, 2

POWERS_OF_TWO = [name for name in DECODED if OPERANDS[name].w.scale == E8M0]
"""Operands whose weights' scales are; `test_formats.py` tries the others."""


def name_of(value: Any) -> str:
    return value.name if isinstance(value, TileConfig) else str(value)


mm_tiles = pytest.mark.parametrize("tile", decoding_tiles("mxfp8_weight_only"), ids=name_of)
exact_tiles = pytest.mark.parametrize("tile", decoding_tiles("mxfp8_exact"), ids=name_of)
mlps = pytest.mark.parametrize(
    ("tile", "operands"), [(tile, one) for one in POWERS_OF_TWO for tile in decoding_tiles(one)], ids=name_of
)


def values(data: Tensor, scales: Tensor) -> Tensor:
    """Dequantise E4M3 bytes [..., K] and E8M0 bytes [..., K / 32] to float64 on the CPU."""
    data, scales = data.long().cpu(), scales.cpu()
    magnitude = torch.cat((mxfp8.MAGNITUDES, torch.tensor([math.nan], dtype=torch.float64)))[data % 128]
    powers = torch.where(scales == mxfp8.NAN_SCALE, math.nan, torch.exp2(scales.double() - ONE))
    return torch.where(data < 128, magnitude, -magnitude) * powers.repeat_interleave(BLOCK, dim=-1)


class Weight:
    """E4M3 and E8M0 bytes [E, N, K] and [E, N, K / 32] on the GPU.

    last_scale: greatest scale byte whose elements are all bfloat16 numbers. log2_element: approximate log2 of an
    element's magnitude.
    """

    operands = "mxfp8_weight_only"
    elements_a_byte = 1
    last_scale, log2_element = 246, 7

    def __init__(self, data: Tensor, scales: Tensor):
        self.data, self.scales = data.to(torch.uint8).cuda(), scales.to(torch.uint8).cuda()

    @property
    def tensor(self) -> Tensor:
        return self.data.view(torch.float8_e4m3fn)

    @property
    def k(self) -> int:
        return self.data.shape[2] * self.elements_a_byte

    def exact(self) -> Tensor:
        return values(self.data, self.scales)

    @staticmethod
    def without_nan(data: Tensor) -> Tensor:
        return torch.where(data % 128 == 127, data - 1, data)


class Weight4(Weight):
    """MXFP4 weight: E2M1 elements, two per byte, [E, N, K / 2], and E8M0 bytes. Kernels read elements as 32-bit
    words.
    """

    operands = "mxfp4_weight_only"
    elements_a_byte = 2
    last_scale, log2_element = 252, 1

    @property
    def tensor(self) -> Tensor:
        return words_of(self.data)

    def exact(self) -> Tensor:
        return mxfp4.values(self.data, self.scales)

    @staticmethod
    def without_nan(data: Tensor) -> Tensor:
        return data


kinds = pytest.mark.parametrize("kind", [Weight, Weight4], ids=lambda kind: kind.operands)


def kind_of(operands: str) -> type[Weight]:
    return Weight4 if operands == Weight4.operands else Weight


def random_weight(experts: int, n: int, k: int, spread: int = 0, kind: type[Weight] = Weight) -> Weight:
    """Return a weight of random bytes without NaN; scales make results about 1, times 2^-spread to 2^spread."""
    data = kind.without_nan(torch.randint(0, 256, (experts, n, k // kind.elements_a_byte)))
    middle = ONE - kind.log2_element - round(math.log2(k) / 2)
    return kind(data, torch.randint(middle - spread, middle + spread + 1, (experts, n, k // BLOCK)))


def group_argument(sizes: Sequence[int], form: int) -> Tensor:
    splits = torch.tensor(sizes, dtype=torch.int64 if form == SPLITS64 else torch.int32, device="cuda")
    return splits.cumsum(0).int() if form == OFFS else splits


def ends_of(sizes: Sequence[int]) -> list[int]:
    return torch.tensor(sizes).cumsum(0).tolist()


def rows_of_x(sizes: Sequence[int], k: int, tail: int = 3) -> Tensor:
    """Return random bfloat16 rows, with `tail` rows of NaN after the last group."""
    x = torch.randn(sum(sizes) + tail, k, device="cuda").to(BF16)
    x[sum(sizes) :] = math.nan
    return x


def nan_rows(rows: int, columns: int) -> Tensor:
    """Return a bfloat16 buffer of NaN whose row stride is padded."""
    return torch.full((rows, columns + 8), math.nan, dtype=BF16, device="cuda")[:, :columns]


def run_mm(
    tile: TileConfig, x: Tensor, w: Weight, sizes: Sequence[int], *, bias: Tensor | None = None,
    scale: Tensor | None = None, form: int = OFFS, ctas: int = 0,
) -> Tensor:  # fmt: skip
    y = nan_rows(x.shape[0], w.data.shape[1])
    launch(
        GroupedMmSpec("bfloat16", False, tile, ARCH, w.operands), x=x, w=w.tensor, y=y,
        **groups_of(group_argument(sizes, form), form), w_scale=w.scales, bias=bias, scale=scale,
        num_sms=ctas or sm_count(),
    )  # fmt: skip
    assert bool(y[sum(sizes) :].isnan().all()), "the tail was written"
    return y


def run_mlp(
    tile: TileConfig, operands: str, form: tuple[str, str], x: Tensor, w1: Weight, w2: Weight, sizes: Sequence[int],
    *, b1: Tensor | None = None, b2: Tensor | None = None, scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch FC1 and FC2 as separate functions; return mid and y."""
    mid, y = nan_rows(x.shape[0], w2.k), nan_rows(x.shape[0], w2.data.shape[1])
    fc2 = GroupedMmSpec("bfloat16", False, tile, ARCH, next_operands(operands))
    made = glu_form(*form, w2.k, operands, tile, False)
    launch(
        GroupedMlpSpec(GroupedGluSpec("bfloat16", *made, False, tile, ARCH, operands), fc2),
        x=x, w1=w1.tensor, w2=w2.tensor, mid=mid, y=y, **groups_of(group_argument(sizes, OFFS), OFFS),
        w1_scale=w1.scales, b1=b1, w2_scale=w2.scales, b2=b2, scale=scale, **Activation.named(*form).kernel_params,
    )  # fmt: skip
    assert bool(mid[sum(sizes) :].isnan().all() and y[sum(sizes) :].isnan().all()), "the tail was written"
    return mid, y


def check_sum(
    y: Tensor, x: Tensor, w: Weight, sizes: Sequence[int], bias: Tensor | None = None, scale: Tensor | None = None
) -> None:
    """Check that each element is a float32-accumulated sum rounded to bfloat16 once."""
    rows, exact = sum(sizes), w.exact()
    x = x.double().cpu()
    bias, scale = (None if t is None else t.double().cpu() for t in (bias, scale))
    wanted = oracle.grouped_mm(x, exact, ends_of(sizes), bias=bias, bias_scale=scale)[:rows]
    if bias is not None:
        bias = bias.abs()
    terms = oracle.grouped_mm(x.abs(), exact.abs(), ends_of(sizes), bias=bias, bias_scale=scale)[:rows]
    error = (y.double().cpu()[:rows] - wanted).abs()
    allowed = wanted.abs() * 2**-8 + terms * 1e-5
    assert bool((error <= allowed).all()), f"{float((error / allowed).nan_to_num(math.inf).max()):.3g} times the bound"


@mm_tiles
@pytest.mark.parametrize(("n", "k"), [(32, 32), (1504, 736), (736, 1504), (256, 2048), (96, 4128), (2880, 64)])
@kinds
def test_sizes_that_no_tile_divides(tile: TileConfig, n: int, k: int, kind: type[Weight]) -> None:
    x, w = rows_of_x(SIZES, k), random_weight(len(SIZES), n, k, kind=kind)
    check_sum(run_mm(tile, x, w, SIZES), x, w, SIZES)


@mm_tiles
@kinds
def test_scales_far_apart(tile: TileConfig, kind: type[Weight]) -> None:
    """A scale of another row, block or expert is a wrong result by powers of two."""
    x, w = rows_of_x(SIZES, 736), random_weight(len(SIZES), 1504, 736, spread=20, kind=kind)
    check_sum(run_mm(tile, x, w, SIZES), x, w, SIZES)


@mm_tiles
@pytest.mark.parametrize("k", [32, 288, 1056])
@kinds
def test_scales_stay_with_their_tile(tile: TileConfig, k: int, kind: type[Weight]) -> None:
    """One CTA has all tiles, and asks for the scales of each in the one before."""
    sizes, n = [5, 0, 40, 3, 300, 1], 600
    x, w = rows_of_x(sizes, k), random_weight(len(sizes), n, k, spread=9, kind=kind)
    check_sum(run_mm(tile, x, w, sizes, ctas=1), x, w, sizes)
    w.scales[2, 30, 0], w.scales[2, 520, -1] = mxfp8.NAN_SCALE, kind.last_scale + 1
    y = run_mm(tile, x, w, sizes, ctas=1)[: sum(sizes)].isnan().cpu()
    wanted = torch.zeros_like(y)
    wanted[5:45, [30, 520]] = True
    assert torch.equal(y, wanted)


@mm_tiles
@pytest.mark.parametrize("form", [OFFS, SPLITS, SPLITS64])
@pytest.mark.parametrize("sizes", [[3], [0, 0, 7], [1] * 70, [300, 0, 0, 2], [16] * 40, [64, 128, 32, 31, 33]])
@kinds
def test_routings_with_bias(tile: TileConfig, form: int, sizes: list[int], kind: type[Weight]) -> None:
    x, w = rows_of_x(sizes, 288), random_weight(len(sizes), 352, 288, kind=kind)
    bias = torch.randn(len(sizes), 352, device="cuda").to(BF16)
    scale = torch.rand(x.shape[0], device="cuda") + 0.5
    check_sum(run_mm(tile, x, w, sizes, bias=bias, form=form), x, w, sizes, bias)
    check_sum(run_mm(tile, x, w, sizes, bias=bias, scale=scale, form=form), x, w, sizes, bias, scale)
    # Without a bias the scale has nothing to multiply.
    plain = run_mm(tile, x, w, sizes, scale=torch.full_like(scale, math.inf), form=form)
    check_sum(plain, x, w, sizes)


@mm_tiles
@kinds
def test_every_element_and_scale_is_decoded_exactly(tile: TileConfig, kind: type[Weight]) -> None:
    """x is the unit matrix, so that y is w, transposed."""
    n, k = 480, 512
    row, column = torch.arange(n)[:, None], torch.arange(k // kind.elements_a_byte)
    data = kind.without_nan((row + 37 * column) % 256)
    for lowest in (10, kind.last_scale - 31):
        scales = lowest + (7 * row + 11 * torch.arange(k // BLOCK)) % (kind.last_scale + 1 - lowest)
        w = kind(data[None], scales[None])
        y = run_mm(tile, torch.eye(k, device="cuda").to(BF16), w, [k])
        assert torch.equal(y.cpu(), w.exact()[0].T.to(BF16))


@mm_tiles
@kinds
def test_tiny_scales(tile: TileConfig, kind: type[Weight]) -> None:
    """Under 2^-117 elements become subnormals of bfloat16, and are rounded; those of E2M1 need not be."""
    n = k = 256
    columns = k // kind.elements_a_byte
    data, scales = torch.arange(n * columns).view(1, n, -1) % 127, torch.arange(n * k // BLOCK).view(1, n, -1) % 12
    w = kind(data, scales)
    y = run_mm(tile, torch.eye(k, device="cuda").to(BF16), w, [k])
    assert bool((y.double().cpu() - w.exact()[0].T).abs().max() <= (2.0**-133 if kind is Weight else 0))


@mm_tiles
@kinds
def test_nan_reaches_its_column_and_no_other(tile: TileConfig, kind: type[Weight]) -> None:
    sizes, n, k = [40, 20, 33], 300 // 8 * 8, 416
    x = rows_of_x(sizes, k)
    clean = random_weight(3, n, k, kind=kind)
    for place in range(0, k, 13):
        w = kind(clean.data.clone(), clean.scales.clone())
        element = {place % n: "element"} if kind is Weight else {}
        rows = {**element, (place * 5 + 100) % n: "scale", (place * 3 + 201) % n: "large"}
        for at, what in rows.items():
            if what == "element":
                w.data[1, at, place] = 0x7F if place % 2 else 0xFF
            else:
                large = w.last_scale + 1 + place % (255 - w.last_scale)
                w.scales[1, at, place // BLOCK] = 0xFF if what == "scale" else large
        y = run_mm(tile, x, w, sizes)[: sum(sizes)].isnan().cpu()
        wanted = torch.zeros_like(y)
        wanted[40:60, list(rows)] = True
        assert torch.equal(y, wanted)


def row_in_w1(layout: str, column: int, part: int, inter: int) -> int:
    """Return the row of w1 that computes a column of the gate (part 0) or of the linear half (part 1)."""
    interleaved32 = column // 32 * 64 + part * 32 + column % 32
    return {"concat": part * inter + column, "interleaved": 2 * column + part, "interleaved32": interleaved32}[layout]


@mlps
@pytest.mark.parametrize("layout", ["concat", "interleaved", "interleaved32"])
def test_nan_of_either_half_reaches_its_output_and_no_other(tile: TileConfig, operands: str, layout: str) -> None:
    """Rounded to MXFP8, its block of 32."""
    sizes, hidden, inter = [40, 20, 33], 160, 352
    kind = kind_of(operands)
    x, w2 = rows_of_x(sizes, hidden), random_weight(3, hidden, inter, kind=kind)
    clean = random_weight(3, 2 * inter, hidden, kind=kind)
    for column in range(0, inter, 11):
        w1 = kind(clean.data.clone(), clean.scales.clone())
        places = {column: column % 2, (column + 139) % inter: 1 - column % 2}
        for i, (at, part) in enumerate(places.items()):
            row = row_in_w1(layout, at, part, inter)
            if i and kind is Weight:
                w1.data[1, row, column % hidden] = 0xFF
            else:
                w1.scales[1, row, column % (hidden // BLOCK)] = 0xFF
        mid, _ = run_mlp(tile, operands, ("swiglu", layout), x, w1, w2, sizes)
        wanted = torch.zeros(sum(sizes), inter, dtype=torch.bool)
        wanted[40:60, list(places)] = True
        if operands == "mxfp8_exact":
            wanted = wanted.view(-1, inter // BLOCK, BLOCK).any(dim=2).repeat_interleave(BLOCK, dim=1)
        assert torch.equal(mid[: sum(sizes)].isnan().cpu(), wanted)


@kinds
def test_results_repeat_and_depend_on_the_order_of_sums_alone(kind: type[Weight]) -> None:
    x, w = rows_of_x(SIZES, 736), random_weight(len(SIZES), 1504, 736, kind=kind)
    results: dict[Accumulation, list[Tensor]] = {}
    for tile in 2 * decoding_tiles(kind.operands):
        (order,) = accumulations_of(GroupedMmSpec("bfloat16", False, tile, ARCH, kind.operands))
        results.setdefault(order, []).append(run_mm(tile, x, w, SIZES)[: sum(SIZES)])
    for first, *others in results.values():
        assert others and all(torch.equal(first, other) for other in others)


def check_mid(mid: Tensor, act: Tensor, rounded: bool) -> None:
    """Check that mid is the activation in bfloat16, or if `rounded`, its MXFP8 values, except where a sum lies between
    two of them.
    """
    got = mid.double().cpu()
    scale = act.abs().amax(dim=1, keepdim=True)
    if not rounded:
        assert bool(((got - act).abs() <= act.abs() * 2**-8 + scale * 1e-4).all())
        return
    again = values(*mxfp8.quantized_rows(mid.float().cpu(), BLOCK))
    assert torch.equal(again, got), "mid holds other numbers than MXFP8's"
    wanted = values(*mxfp8.quantized_rows(act.float(), BLOCK))
    other = got != wanted
    assert float(other.double().mean()) < 0.01
    assert bool(((got - wanted).abs() <= act.abs() * 2**-3 + scale * 2**-10)[other].all())


@mlps
@pytest.mark.parametrize("form", activation_forms(), ids="-".join)
def test_every_activation(tile: TileConfig, operands: str, form: tuple[str, str]) -> None:
    hidden, inter, out, experts = 352, 224, 288, len(SIZES)
    x = rows_of_x(SIZES, hidden)
    kind = kind_of(operands)
    w1 = random_weight(experts, inter * (2 if form[0] in GATED else 1), hidden, kind=kind)
    w2 = random_weight(experts, out, inter, kind=kind)
    b1, b2 = (torch.randn(experts, w.data.shape[1], device="cuda").to(BF16) for w in (w1, w2))
    scale = torch.rand(x.shape[0], device="cuda") + 0.5
    for extra in ({}, {"b1": b1, "b2": b2, "scale": scale}):
        check_mlp(tile, operands, form, x, (w1, w2), SIZES, **extra)


def check_mlp(
    tile: TileConfig, operands: str, form: tuple[str, str], x: Tensor, weights: tuple[Weight, Weight],
    sizes: Sequence[int], **extra: Any,
) -> None:  # fmt: skip
    w1, w2 = weights
    rows = sum(sizes)
    mid, y = run_mlp(tile, operands, form, x, w1, w2, sizes, **extra)
    b1, scale = (None if t is None else t.double().cpu() for t in (extra.get("b1"), extra.get("scale")))
    act, _ = oracle.grouped_glu(x.double().cpu(), w1.exact(), ends_of(sizes), bias=b1, row_scale=scale, form=form)
    check_mid(mid[:rows], act[:rows], operands == "mxfp8_exact")
    check_sum(y, mid, w2, sizes, extra.get("b2"), extra.get("scale"))


@mlps
@pytest.mark.parametrize("layout", ["concat", "interleaved", "interleaved32"])
@pytest.mark.parametrize(("hidden", "inter"), [(32, 32), (736, 1504), (1504, 736), (64, 2880)])
def test_mlps_that_no_tile_divides(tile: TileConfig, operands: str, layout: str, hidden: int, inter: int) -> None:
    x, experts = rows_of_x(SIZES, hidden), len(SIZES)
    kind = kind_of(operands)
    weights = (random_weight(experts, *shape, kind=kind) for shape in ((2 * inter, hidden), (hidden, inter)))
    check_mlp(tile, operands, ("swiglu", layout), x, tuple(weights), SIZES)


@exact_tiles
def test_blocks_of_an_activation_have_scales_of_their_own(tile: TileConfig) -> None:
    hidden, inter = 256, 320
    x, w1 = rows_of_x(SIZES, hidden), random_weight(len(SIZES), inter, hidden)
    powers = torch.arange(inter).div(BLOCK, rounding_mode="floor") * 7 % 23 - 11
    w1.scales += powers[:, None].cuda().to(torch.int64).to(torch.uint8)
    weights = w1, random_weight(len(SIZES), hidden, inter)
    mid, _ = run_mlp(tile, "mxfp8_exact", ("none", "concat"), x, *weights, SIZES)
    act = oracle.grouped_mm(x.double().cpu(), w1.exact(), ends_of(SIZES))
    for begin in range(0, inter, BLOCK):  # else the greatest block's tolerance would serve them all
        part = slice(begin, begin + BLOCK)
        check_mid(mid[: sum(SIZES), part].contiguous(), act[: sum(SIZES), part], True)


@exact_tiles
def test_nan_and_infinity_of_an_activation(tile: TileConfig) -> None:
    """A NaN makes its block NaN, an Inf stays one and its neighbours are near zero, as the quantiser has them."""
    hidden = inter = 96
    x = rows_of_x([50], hidden)
    unit = torch.zeros(1, inter, hidden, dtype=torch.long)
    unit[0].fill_diagonal_(0x38)
    w1, w2 = Weight(unit, torch.full((1, inter, hidden // BLOCK), ONE)), random_weight(1, hidden, inter)
    x[:50] = x[:50].clamp(-3, 3)
    scale = torch.ones(x.shape[0], device="cuda")
    scale[7], scale[9] = math.nan, math.inf
    mid, _ = run_mlp(tile, "mxfp8_exact", ("none", "concat"), x, w1, w2, [50], scale=scale)
    act = x[:50].float().cpu() * scale[:50, None].cpu()
    wanted = values(*mxfp8.quantized_rows(act, BLOCK)).to(BF16)
    assert torch.equal(mid[:50].cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))
