"""Kernels of FP8 with block scales in the emulator, against float64 computed from the format's definition."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from emulator.launch import Emulator
from support import fp8_block
from support.fp8_block import E4M3
from torch import Tensor

from cute_kernels.portable import configs as portable
from cute_kernels.sm90 import configs as sm90
from cute_kernels.specs import (
    BLOCK_ROWS,
    GLU_LAYOUTS,
    KINDS,
    LAYOUTS,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    QuantizeFp8BlockSpec,
)
from cute_kernels.tiles import TileConfig

BF16, F32 = torch.bfloat16, torch.float32
SIZES = (17, 0, 1, 30)
"""Rows of each expert: more than a tile of 16, none, one, less than a tile of 64."""
TAIL = 3
ROWS, EXPERTS = sum(SIZES) + TAIL, len(SIZES)
WEIGHT_ONLY = "fp8_block_weight_only"
FP8 = "fp8_block"


def _tiles(arch: str, tiles: Sequence[TileConfig], everyday: TileConfig) -> list[Any]:
    """Return test parameters of an architecture's tiles: `everyday` runs always, the others only with mark
    `emulator`.
    """
    others = pytest.mark.emulator
    return [
        pytest.param(arch, tile, id=f"{arch}-{tile.name}", marks=() if tile == everyday else others) for tile in tiles
    ]


DECODING = _tiles("sm_90a", sm90.DECODING_TILES["fp8_block_weight_only"], sm90.TINY_W8)
DECODING += _tiles("sm_90", portable.TILES, portable.SMALL)
FP8_TILES = _tiles("sm_90a", (*sm90.TILES8, sm90.SMALL8_FC2), sm90.SMALL8)
FORMS = {"sm_90a": sm90.glu_form, "sm_90": portable.glu_form}

emulator = cache(Emulator)


def groups() -> dict[str, Any]:
    return {"groups": torch.tensor(np.cumsum(SIZES), dtype=torch.int32), "group_form": 0, "num_groups": EXPERTS}


def with_tail(x: Tensor) -> Tensor:
    """Return a copy of x with NaN after the last group."""
    x = x.clone()
    if x.dtype == E4M3:
        x.view(torch.uint8)[ROWS - TAIL :] = 0x7F
    else:
        x[ROWS - TAIL :] = torch.nan
    return x


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.float32).to(dtype)


def assert_same(made: Tensor, wanted: Tensor) -> None:
    """Check that results have the same bits, or NaN in both, and that rows after the last group are not written."""
    assert made.dtype == wanted.dtype
    assert torch.isnan(made[ROWS - TAIL :].float()).all()
    made, wanted = made[: ROWS - TAIL], wanted[: ROWS - TAIL]
    assert torch.equal(torch.isnan(made.float()), torch.isnan(wanted.float()))
    assert torch.equal(made.float().nan_to_num(), wanted.float().nan_to_num())
    assert wanted.float().nan_to_num().unique().numel() > 10


def mm_decoded(arch: str, tile: TileConfig, x: Tensor, w: fp8_block.Weights, **more: Any) -> Tensor:
    spec = GroupedMmSpec("bfloat16", False, tile, arch, WEIGHT_ONLY)
    y = poisoned(ROWS, w.data.shape[1])
    emulator(arch).function(spec)(x=with_tail(x), w=w.data, y=y, w_scale=w.scale, **groups(), **more)
    return y


def glu_decoded(arch: str, tile: TileConfig, x: Tensor, w: fp8_block.Weights, layout: str, **more: Any) -> Tensor:
    width = w.data.shape[1] // 2
    form = FORMS[arch]("reglu", layout, width, WEIGHT_ONLY, tile, False)
    spec = GroupedGluSpec("bfloat16", *form, False, tile, arch, WEIGHT_ONLY)
    act = poisoned(ROWS, width)
    emulator(arch).function(spec)(
        x=with_tail(x), w=w.data, act=act, w_scale=w.scale, kind=KINDS["reglu"], glu_layout=LAYOUTS[layout],
        **groups(), **more,
    )  # fmt: skip
    return act


def reglu(h: Tensor, layout: str, scale: Tensor) -> Tensor:
    """Compute reglu of exact preactivations in float32."""
    a, u = (h[:, rows].float() for rows in fp8_block.halves(h.shape[1], layout))
    return torch.relu(a) * u * scale[:, None]


# Weights decoded to bfloat16 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "tile"), DECODING)
def test_weights_are_decoded_by_their_own_blocks(arch: str, tile: TileConfig) -> None:
    random = np.random.default_rng(1)
    x = fp8_block.integers(random, ROWS, 272).to(BF16) / 4
    w = fp8_block.exact_weights(random, EXPERTS, 328, 272)
    bias, scale = fp8_block.integers(random, EXPERTS, 328).to(BF16), fp8_block.powers(random, ROWS)
    y = mm_decoded(arch, tile, x, w, bias=bias, scale=scale)
    added = torch.repeat_interleave(bias, torch.tensor((*SIZES[:-1], SIZES[-1] + TAIL)), 0).double()
    assert_same(y, (fp8_block.product(x, w.values(), SIZES) + added * scale[:, None]).to(BF16))


@pytest.mark.parametrize(("arch", "tile"), DECODING)
def test_an_element_is_the_float32_product_rounded_to_bfloat16(arch: str, tile: TileConfig) -> None:
    """Rows of x that choose one column each: results are elements of the dequantised weight."""
    random = np.random.default_rng(2)
    k = 144
    w = fp8_block.any_weights(random, EXPERTS, 136, k)
    chosen = torch.from_numpy(random.permutation(k)[:ROWS])
    x = torch.nn.functional.one_hot(chosen, k).to(BF16)
    wanted = fp8_block.product(x, w.in_bfloat16(), SIZES).to(BF16)
    assert not torch.equal(wanted.double().nan_to_num(), fp8_block.product(x, w.values(), SIZES).nan_to_num())
    assert_same(mm_decoded(arch, tile, x, w), wanted)


@pytest.mark.parametrize("width", [80, 160], ids="I={}".format)
@pytest.mark.parametrize("layout", GLU_LAYOUTS)
@pytest.mark.parametrize(("arch", "tile"), DECODING)
def test_both_halves_are_decoded_by_their_own_blocks(arch: str, tile: TileConfig, layout: str, width: int) -> None:
    if width % BLOCK_ROWS and layout == "interleaved32":
        pytest.skip("interleaved32 has halves of whole 32")
    random = np.random.default_rng(3)
    x = fp8_block.integers(random, ROWS, 272).to(BF16) / 4
    w = fp8_block.exact_weights(random, EXPERTS, 2 * width, 272, layout)
    scale = fp8_block.powers(random, ROWS)
    act = glu_decoded(arch, tile, x, w, layout, scale=scale)
    assert_same(act, reglu(fp8_block.product(x, w.values(), SIZES), layout, scale).to(BF16))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("arch", "tile"), DECODING)
def test_a_bad_scale_spoils_the_rows_of_its_block(arch: str, tile: TileConfig, bad: float) -> None:
    random = np.random.default_rng(4)
    x = fp8_block.integers(random, ROWS, 272).to(BF16)
    w = fp8_block.exact_weights(random, EXPERTS, 328, 272)
    w.scale[3, 1, 2] = bad
    w.data.view(torch.uint8)[0, 200, 7] = 0xFF  # NaN
    y = mm_decoded(arch, tile, x, w)
    assert_same(y, fp8_block.product(x, w.values(), SIZES).to(BF16))
    assert torch.isnan(y[:17, 200]).all() and not torch.isfinite(y[18:48, 128:256]).all()


# FP8 rows and weights -------------------------------------------------------------------------------------------------


def mm_fp8(tile: TileConfig, x: fp8_block.Rows, w: fp8_block.Weights, **more: Any) -> Tensor:
    y = poisoned(ROWS, w.data.shape[1])
    function = emulator("sm_90a").function(GroupedMmSpec("bfloat16", False, tile, operands=FP8))
    function(x=x.data, w=w.data, y=y, x_scale=x.scale, w_scale=w.scale, **groups(), **more)
    return y


def glu_fp8(
    tile: TileConfig, x: fp8_block.Rows, w: fp8_block.Weights, layout: str, **more: Any
) -> fp8_block.Rows:  # fmt: skip
    width = w.data.shape[1] // 2
    form = sm90.glu_form("reglu", layout, width, FP8, tile, False)
    spec = GroupedGluSpec("bfloat16", *form, False, tile, operands=FP8)
    act = fp8_block.Rows(poisoned(ROWS, width, dtype=E4M3), poisoned(ROWS, -(-width // 128), dtype=F32))
    emulator("sm_90a").function(spec)(
        x=x.data, w=w.data, act=act.data, x_scale=x.scale, w_scale=w.scale, act_scale=act.scale, kind=KINDS["reglu"],
        glu_layout=LAYOUTS[layout], **groups(), **more,
    )  # fmt: skip
    return act


def rows_with_tail(random: np.random.Generator, k: int) -> fp8_block.Rows:
    """Return random exact rows, with NaN after the last group."""
    x = fp8_block.exact_rows(random, ROWS, k)
    x.scale[ROWS - TAIL :] = torch.nan
    return x._replace(data=with_tail(x.data))


def assert_same_rows(made: fp8_block.Rows, wanted: fp8_block.Rows) -> None:
    for one, other in zip(made, wanted, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(("arch", "tile"), FP8_TILES)
def test_promotions_multiply_by_the_scales_of_rows_and_blocks(arch: str, tile: TileConfig) -> None:
    random = np.random.default_rng(5)
    x, w = rows_with_tail(random, 400), fp8_block.exact_weights(random, EXPERTS, 328, 400)
    y = mm_fp8(tile, x, w)
    assert_same(y, fp8_block.product(x.values(), w.values(), SIZES).to(BF16))


@pytest.mark.emulator
@pytest.mark.parametrize("seed", [0, 1])
def test_warpgroups_and_paired_ctas_have_scales_of_their_own(seed: int) -> None:
    """Row tiles of 128 in pairs, one with and one without a second half; and the race check."""
    random = np.random.default_rng(12)
    sizes, k = (200, 0, 70), 272
    x, w = fp8_block.exact_rows(random, 270, k), fp8_block.exact_weights(random, 3, 648, k)
    y, offs = poisoned(270, 648), torch.tensor(np.cumsum(sizes), dtype=torch.int32)
    function = Emulator("sm_90a", seed=seed, num_sms=4, check_races=seed > 0).function(
        GroupedMmSpec("bfloat16", False, sm90.LARGE8, operands=FP8)
    )
    function(
        x=x.data, w=w.data, y=y, x_scale=x.scale, w_scale=w.scale, groups=offs, group_form=0, num_groups=3
    )  # fmt: skip
    assert torch.equal(y, fp8_block.product(x.values(), w.values(), sizes).to(BF16))


def test_scales_come_with_rows_by_index() -> None:
    random = np.random.default_rng(6)
    x, w = fp8_block.exact_rows(random, 9, 272), fp8_block.exact_weights(random, EXPERTS, 136, 272)
    rows = torch.from_numpy(random.integers(0, 9, ROWS)).int()
    y = mm_fp8(sm90.SMALL8, x, w, rows=rows)
    assert_same(y, fp8_block.product(x.values()[rows], w.values(), SIZES).to(BF16))


@pytest.mark.parametrize("width", [80, 224], ids="I={}".format)
@pytest.mark.parametrize("layout", GLU_LAYOUTS)
@pytest.mark.parametrize(("arch", "tile"), FP8_TILES[:2])
def test_an_activation_is_quantised_where_it_is_made(arch: str, tile: TileConfig, layout: str, width: int) -> None:
    if width % BLOCK_ROWS and (layout == "interleaved32" or tile == sm90.LARGE8):
        pytest.skip("halves of whole 32")
    random = np.random.default_rng(7)
    x, w = rows_with_tail(random, 272), fp8_block.exact_weights(random, EXPERTS, 2 * width, 272, layout)
    bias, scale = fp8_block.integers(random, EXPERTS, 2 * width).to(BF16), fp8_block.powers(random, ROWS)
    act = glu_fp8(tile, x, w, layout, bias=bias, scale=scale)
    added = torch.repeat_interleave(bias, torch.tensor((*SIZES[:-1], SIZES[-1] + TAIL)), 0).double()
    h = fp8_block.product(x.values(), w.values(), SIZES) + added
    assert_same_rows(act, fp8_block.quantized_rows(reglu(h, layout, scale)))


def test_blocks_of_zeros_and_of_nan_are_quantised() -> None:
    random = np.random.default_rng(8)
    x, w = rows_with_tail(random, 272), fp8_block.exact_weights(random, EXPERTS, 448, 272, "concat")
    x.data[3], x.scale[4, 1], w.scale[3, 1, 0] = 0, torch.nan, torch.inf
    act = glu_fp8(sm90.SMALL8, x, w, "concat")
    wanted = fp8_block.quantized_rows(
        reglu(fp8_block.product(x.values(), w.values(), SIZES), "concat", torch.ones(ROWS))
    )  # fmt: skip
    assert_same_rows(act, wanted)
    assert (act.scale[3] == 1).all() and torch.isnan(act.scale[4]).all()
    assert torch.isnan(act.scale[18:48, 1]).any() and torch.isfinite(act.scale[18:48, 0]).all()


# Rows -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [144, 1168], ids="K={}".format)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_rows_are_quantised_by_the_maxima_of_128(dtype: torch.dtype, columns: int) -> None:
    random = np.random.default_rng(9)
    x = torch.from_numpy(random.standard_normal((ROWS, columns))).float()
    x *= torch.exp2(torch.from_numpy(random.integers(-9, 10, (ROWS, 1)))) * (torch.arange(columns) // 100 + 1)
    x[1], x[2, :128], x[3, 130], x[4, 3], x[5, 9] = 0, 0, torch.nan, torch.inf, -torch.inf
    x[6, :128] *= 2.0**-130  # nothing in float16
    x, y = (
        x.to(dtype),
        fp8_block.Rows(poisoned(ROWS, columns, dtype=E4M3), poisoned(ROWS, -(-columns // 128), dtype=F32)),
    )
    spec = QuantizeFp8BlockSpec(str(dtype).removeprefix("torch."))
    offs = torch.tensor(np.cumsum(SIZES), dtype=torch.int32)
    emulator("sm_90a").function(spec)(x=with_tail(x), data=y.data, scale=y.scale, offs=offs, num_groups=EXPERTS)
    wanted = fp8_block.quantized_rows(x.float())
    assert_same_rows(y, wanted)
    assert torch.equal(
        y.data[: ROWS - TAIL].view(torch.uint8) & 0x7F == 0x7F, torch.isnan(wanted.data[: ROWS - TAIL].float())
    )
    assert torch.isnan(y.scale[[3, 4, 5], [1, 0, 0]]).all() and y.scale[1, 0] == 1 == y.scale[2, 0]


# Chains ---------------------------------------------------------------------------------------------------------------


def mlp_weights(random: np.random.Generator, hidden: int, inter: int) -> tuple[fp8_block.Weights, fp8_block.Weights]:
    w1 = fp8_block.exact_weights(random, EXPERTS, 2 * inter, hidden, "concat")
    return w1, fp8_block.exact_weights(random, EXPERTS, hidden, inter)


def assert_near(y: Tensor, wanted: Tensor) -> None:
    """Check a result of float32 sums rounded to bfloat16 once."""
    assert torch.isnan(y[ROWS - TAIL :]).all()
    y, wanted = y[: ROWS - TAIL].double(), wanted[: ROWS - TAIL]
    assert ((y - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-5 * wanted.abs().max()).all()
    assert wanted.abs().mean() > 1e-3 * wanted.abs().max()


def test_an_mlp_quantises_its_rows_and_its_activation() -> None:
    random = np.random.default_rng(10)
    hidden, inter, layout = 144, 160, "concat"
    w1, w2 = mlp_weights(random, hidden, inter)
    x = with_tail(torch.from_numpy(random.standard_normal((ROWS, hidden))).to(BF16))
    form = sm90.glu_form("reglu", layout, inter, FP8, sm90.SMALL8, False)
    fc1 = GroupedGluSpec("bfloat16", *form, False, sm90.SMALL8, operands=FP8)
    spec = GroupedMlpSpec(fc1, GroupedMmSpec("bfloat16", False, sm90.SMALL8_FC2, operands=FP8))
    x8 = fp8_block.Rows(poisoned(ROWS, hidden, dtype=E4M3), poisoned(ROWS, 2, dtype=F32))
    mid = fp8_block.Rows(poisoned(ROWS, inter, dtype=E4M3), poisoned(ROWS, 2, dtype=F32))
    y = poisoned(ROWS, hidden)
    emulator("sm_90a").function(spec)(
        x=x, x8=x8.data, x8_scale=x8.scale, w1=w1.data, w1_scale=w1.scale, mid=mid.data, mid_scale=mid.scale,
        w2=w2.data, w2_scale=w2.scale, y=y, kind=KINDS["reglu"], glu_layout=LAYOUTS[layout], **groups(),
    )  # fmt: skip
    assert_same_rows(x8, fp8_block.quantized_rows(x.float()))
    h = fp8_block.product(x8.values(), w1.values(), SIZES)
    a, u = (h[: ROWS - TAIL, rows] for rows in fp8_block.halves(2 * inter, layout))
    act, wanted = mid.values()[: ROWS - TAIL], torch.relu(a) * u
    greatest = torch.nn.functional.pad(wanted.abs(), (0, 96)).view(-1, 2, 128).amax(2).repeat_interleave(128, 1)
    assert ((act - wanted).abs() <= 2.0**-4 * wanted.abs() + 2.0**-17 * greatest[:, :inter]).all()
    assert_near(y, fp8_block.product(mid.values(), w2.values(), SIZES))


@pytest.mark.parametrize(("arch", "tile"), [DECODING[3], DECODING[4]])
def test_an_mlp_decodes_its_weights(arch: str, tile: TileConfig) -> None:
    random = np.random.default_rng(11)
    hidden, inter, layout = 144, 160, "concat"
    w1, w2 = mlp_weights(random, hidden, inter)
    x = fp8_block.integers(random, ROWS, hidden).to(BF16)
    form = FORMS[arch]("reglu", layout, inter, WEIGHT_ONLY, tile, False)
    fc1 = GroupedGluSpec("bfloat16", *form, False, tile, arch, WEIGHT_ONLY)
    spec = GroupedMlpSpec(fc1, GroupedMmSpec("bfloat16", False, tile, arch, WEIGHT_ONLY))
    mid, y = poisoned(ROWS, inter), poisoned(ROWS, hidden)
    emulator(arch).function(spec)(
        x=with_tail(x), w1=w1.data, w1_scale=w1.scale, mid=mid, w2=w2.data, w2_scale=w2.scale, y=y,
        kind=KINDS["reglu"], glu_layout=LAYOUTS[layout], **groups(),
    )  # fmt: skip
    h = fp8_block.product(x, w1.values(), SIZES)
    assert_same(mid, reglu(h, layout, torch.ones(ROWS)).to(BF16))
    assert_near(y, fp8_block.product(mid, w2.values(), SIZES))
