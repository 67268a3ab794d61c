"""NVFP4 weight GEMMs in the emulator, called by name: bit for bit equal to float64 computed from the format's
definition.

With these inputs every partial sum is a float32 number, in any order of its terms.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from emulator.launch import Emulator
from support import nvfp4
from torch import Tensor

from cute_kernels.chains import signature_of
from cute_kernels.formats import MXFP4, NVFP4, OPERANDS
from cute_kernels.portable.configs import TILES
from cute_kernels.signatures import stage_signature
from cute_kernels.sm90.configs import DECODING_TILES
from cute_kernels.specs import KINDS, LAYOUTS, GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, Spec
from ffi_bridge import profiles
from glulam.formats.words import words_of

BF16, F32 = torch.bfloat16, torch.float32
ARCHS = ("sm_90a", "sm_90")
OPERANDS_NAME = "nvfp4_weight_only"
SIZES = (0, 17, 1, 0, 40)
TAIL = 5
WIDTH = 136
COLUMNS = (288, *(pytest.param(columns, marks=pytest.mark.emulator) for columns in (192, 256)))
"""Neither, half and whole tiles of 128; scales of a row are no words, words that end within a tile, whole tiles."""


def _shipped(kind: type) -> list[Any]:
    specs = [spec for arch in ARCHS for spec in profiles.shipped_specs(arch, "full")]
    return [spec for spec in specs if isinstance(spec, kind) and _operands(spec) == OPERANDS_NAME]


def _operands(spec: Any) -> str:
    return str(spec.fc1.operands if isinstance(spec, GroupedMlpSpec) else spec.operands)


EVERY_MM: list[GroupedMmSpec] = _shipped(GroupedMmSpec)
MM = [spec for spec in EVERY_MM if not spec.transpose_w]
OVER_ROWS = [spec for spec in EVERY_MM if spec.transpose_w]
MLP: list[GroupedMlpSpec] = _shipped(GroupedMlpSpec)


def _fc1(gated: bool, layout: str) -> list[GroupedGluSpec]:
    """Return one FC1 spec per tile, with reglu or no activation, for weights in a layout."""
    activations = ("reglu", "gated") if gated else ("none", "ungated")
    layouts = (layout, "strided") if layout == "interleaved" else (layout, "blocked")
    fc1s = dict.fromkeys(spec.fc1 for spec in MLP)
    return [fc1 for fc1 in fc1s if fc1.activation in activations and (not gated or fc1.glu_layout in layouts)]


def _by_name(specs: list[Any]) -> Any:
    return pytest.mark.parametrize("spec", specs, ids=[spec.name for spec in specs])


def _rows(columns: int, sizes: tuple[int, ...], seed: int = 3) -> Tensor:
    """Return random integer rows from -2 to 2, with NaN after the last group."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (sum(sizes) + TAIL, columns), generator=generator).to(BF16)
    x[sum(sizes) :] = math.nan
    return x


def _call(spec: Spec, sizes: tuple[int, ...], check_races: bool = False, **given: Any) -> None:
    groups = torch.tensor(sizes, dtype=torch.int32)
    function = Emulator(spec.arch, check_races=check_races).function(spec)
    function(groups=groups, group_form=1, num_groups=len(sizes), **given)


def _weights(w: nvfp4.Weights, global_scale: Tensor, name: str = "w") -> dict[str, Any]:
    """Return a weight's kernel arguments. global_scale: float32 [], [E] or [E,2]."""
    words = words_of(w.bytes)
    named = {"": words, "_scale": w.scale, "_global_scale": global_scale, "_global_count": 0}
    if global_scale.dim():
        named["_global_count"] = global_scale[0].numel()
    return {f"{name}{part}": value for part, value in named.items()}


def _products(x: Tensor, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the exact grouped product, float64 [sum of sizes, N]."""
    rows = x[: sum(sizes)].double().split(list(sizes))
    return torch.cat([of_expert @ w.T for of_expert, w in zip(rows, values, strict=True)])


def _of_rows(per_expert: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return per_expert.repeat_interleave(torch.tensor(sizes), dim=0)


def _assert_same(got: Tensor, wanted: Tensor) -> None:
    """Check that `got` has the bits of `wanted` (float64, each exactly a float32 number) rounded once."""
    finite = wanted.nan_to_num(0.0)
    assert torch.equal(finite.float().double(), finite), "sums that float32 does not hold"
    assert float(finite.abs().max()) > 1.0
    rows = wanted.shape[0]
    assert torch.equal(got[:rows].isnan(), wanted.isnan())
    assert torch.equal(got[:rows].nan_to_num(0.0), finite.float().to(BF16))
    assert got[rows:].isnan().all(), "rows after the last group were written"


def test_its_kernels_ship_on_the_tiles_of_mxfp4() -> None:
    names = {"mm": [spec.name for spec in MM], "mlp": [spec.name for spec in MLP]}
    every = {spec.name for arch in ARCHS for spec in profiles.shipped_specs(arch, "full")}
    assert len(names["mm"]) == len((*DECODING_TILES[OPERANDS_NAME], *TILES)) and names["mlp"]
    for name in sum(names.values(), []):
        assert name.replace("_nvfp4w_", "_mxfp4w_") in every


def test_what_a_function_takes() -> None:
    """Global scales after the scales; for a chain, the global scales of either weight."""
    names = stage_signature(MM[0]).names
    assert names[names.index("w_scale") :][:3] == ("w_scale", "w_global_scale", "w_global_count")
    mlp = signature_of(MLP[0])
    for name in ("w1_global_scale", "w1_global_count", "w2_global_scale", "w2_global_count"):
        assert name in mlp.names and not mlp[name].optional
    assert OPERANDS[OPERANDS_NAME].multiple == 32 and (NVFP4.scale_words(128), MXFP4.scale_words(128)) == (2, 1)


@_by_name(MM)
def test_every_element_with_every_scale(spec: GroupedMmSpec) -> None:
    """Rows of one 1 each: results are the weights, times what float32 makes of a global scale."""
    columns, global_scale = 160, torch.tensor([0.37, 1e-3], dtype=F32)
    w, sizes = nvfp4.of_every_scale(2, WIDTH, columns), (columns, columns)
    assert len(w.scale.unique()) == nvfp4.SCALES
    x = torch.eye(columns, dtype=BF16).repeat(2, 1)
    y = torch.full((2 * columns, WIDTH), math.nan, dtype=BF16)
    _call(spec, sizes, x=x, y=y, **_weights(w, global_scale))
    wanted = (w.values.float() * global_scale[:, None, None]).mT.flatten(0, 1)
    assert torch.equal(y, wanted.to(BF16)) and len(w.values.unique()) == 475


@_by_name(MM)
@pytest.mark.parametrize("columns", COLUMNS)
def test_groups_of_any_size(spec: GroupedMmSpec, columns: int) -> None:
    """Empty and ragged groups, experts with global scales of their own or one for all, biases and row scales."""
    w, x = nvfp4.of_exact_sums(len(SIZES), WIDTH, columns), _rows(columns, SIZES)
    total = x.shape[0]
    bias = (torch.arange(len(SIZES) * WIDTH).view(len(SIZES), WIDTH) % 13 - 6).to(BF16) * 2
    scale = 2.0 ** (torch.arange(total) % 5 - 2).float()
    each = torch.tensor([3.0, 1.25, 0.0625, 1.0, 0.75], dtype=F32)
    sums = _products(x, w.values, SIZES)
    for global_scale, factors in ((each, each), (torch.tensor(1.5), torch.full((len(SIZES),), 1.5))):
        y = torch.full((total, WIDTH), math.nan, dtype=BF16)
        _call(spec, SIZES, x=x, y=y, bias=bias, scale=scale, **_weights(w, global_scale))
        added = _of_rows(bias.double(), SIZES) * scale[: sum(SIZES), None].double()
        _assert_same(y, sums * _of_rows(factors.double(), SIZES)[:, None] + added)


@_by_name(MM)
@pytest.mark.parametrize("columns", COLUMNS)
def test_a_bad_scale_makes_nan_of_its_row(spec: GroupedMmSpec, columns: int) -> None:
    """NaN and negative ones, of any block, of weights that are 0 and of such as no infinity makes NaN of; and of no
    other row.
    """
    w, x, sizes = nvfp4.of_exact_sums(2, WIDTH, columns), _rows(columns, (19, 3)).abs() + 1, (19, 3)
    blocks = columns // nvfp4.BLOCK
    bad = {(0, 3, 0): 0x7F, (0, 70, blocks - 1): 0xFF, (1, 8, 5): 0x80, (1, 135, blocks // 2): 0x91}
    for (expert, row, block), byte in bad.items():
        w.scale[expert, row, block] = byte
        of_block = slice(block * nvfp4.BLOCK, (block + 1) * nvfp4.BLOCK)
        w.codes[expert, row, of_block] = 0 if row == 3 else 2
    y = torch.full((x.shape[0], WIDTH), math.nan, dtype=BF16)
    _call(spec, sizes, x=x, y=y, **_weights(w, torch.ones(2)))
    wanted = _products(x, w.values, sizes)
    assert wanted[:19].isnan().any(0).nonzero().flatten().tolist() == [3, 70]
    assert wanted[19:].isnan().any(0).nonzero().flatten().tolist() == [8, 135]
    _assert_same(y, wanted)


@_by_name(OVER_ROWS)
def test_every_element_with_every_scale_over_rows(spec: GroupedMmSpec) -> None:
    columns, global_scale = 160, torch.tensor([0.37, 1e-3], dtype=F32)
    w = nvfp4.of_every_scale(2, WIDTH, columns)
    y = torch.full((2 * WIDTH, columns), math.nan, dtype=BF16)
    _call(spec, (WIDTH, WIDTH), x=torch.eye(WIDTH, dtype=BF16).repeat(2, 1), y=y, **_weights(w, global_scale))
    assert torch.equal(y, (w.values.float() * global_scale[:, None, None]).flatten(0, 1).to(BF16))


@_by_name(OVER_ROWS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_groups_of_any_size_over_rows(spec: GroupedMmSpec, columns: int) -> None:
    """As of the other direction, with a bad scale as well: NaN in the columns of its block alone."""
    w, x = nvfp4.of_exact_sums(len(SIZES), WIDTH, columns), _rows(WIDTH, SIZES)
    bias = (torch.arange(len(SIZES) * columns).view(len(SIZES), columns) % 13 - 6).to(BF16) * 2
    w.scale[4, 77, 3] = 0x7F
    each = torch.tensor([3.0, 1.25, 0.0625, 1.0, 0.75], dtype=F32)
    y = torch.full((x.shape[0], columns), math.nan, dtype=BF16)
    _call(spec, SIZES, x=x, y=y, bias=bias, **_weights(w, each))
    sums = _products(x, w.values.mT, SIZES) * _of_rows(each.double(), SIZES)[:, None]
    wanted = sums + _of_rows(bias.double(), SIZES)
    assert wanted.isnan().any(0).nonzero().flatten().tolist() == list(range(48, 64))
    _assert_same(y, wanted)


def _halves(w: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Split rows of w1 [E,2I,...] into the activated and the linear half."""
    if layout == "concat":
        first, second = w.chunk(2, dim=1)
        return first, second
    return w[:, 0::2], w[:, 1::2]


@_by_name(_fc1(True, "concat") + _fc1(True, "interleaved"))
def test_each_half_has_its_own_global_scale(spec: GroupedGluSpec) -> None:
    columns, inter = 160, 96
    layout = "interleaved" if spec.glu_layout in ("interleaved", "strided") else "concat"
    w, x = nvfp4.of_exact_sums(len(SIZES), 2 * inter, columns, seed=4), _rows(columns, SIZES)
    x[: sum(SIZES)] *= torch.arange(columns) % 4 == 0  # products of two sums in 24 bits
    each = torch.tensor([[1, 1], [2, 0.5], [0.25, 4], [1, 1], [0.5, 8]], dtype=F32)
    bias = (torch.arange(len(SIZES) * 2 * inter).view(len(SIZES), -1) % 13 - 6).to(BF16)
    for global_scale in (each, each[:, 0].contiguous(), torch.tensor(2.0)):
        act = torch.full((x.shape[0], inter), math.nan, dtype=BF16)
        named = {"kind": KINDS["reglu"], "glu_layout": LAYOUTS[layout], "bias": bias}
        _call(spec, SIZES, x=x, act=act, **named, **_weights(w, global_scale))
        factors = global_scale.expand(len(SIZES)) if global_scale.dim() < 2 else global_scale
        both = factors[:, None].expand(-1, 2) if factors.dim() < 2 else factors
        sums = [
            _products(x, half, SIZES) * _of_rows(both[:, part : part + 1].double(), SIZES)
            + _of_rows(_halves(bias.double(), layout)[part], SIZES)
            for part, half in enumerate(_halves(w.values, layout))
        ]
        assert all(torch.equal(total.float().double(), total) for total in sums)
        wanted = (sums[0].relu().float() * sums[1].float()).to(BF16)
        assert torch.equal(act[: sum(SIZES)], wanted) and act[sum(SIZES) :].isnan().all()
        assert float(wanted.abs().max()) > 1e3 and (wanted != 0).float().mean() > 0.3


@_by_name([fc1 for fc1 in _fc1(True, "concat") if fc1.tile.m == 16])
def test_global_scales_pass_through_shared_memory_without_races(spec: GroupedGluSpec) -> None:
    """Tiles of several experts one after the other, with and without rows."""
    w, x = nvfp4.of_exact_sums(len(SIZES), 256, 96), _rows(96, SIZES)
    act = torch.full((x.shape[0], 128), math.nan, dtype=BF16)
    named = {"kind": KINDS["reglu"], "glu_layout": LAYOUTS["concat"], "num_sms": 1}
    _call(spec, SIZES, check_races=True, x=x, act=act, **named, **_weights(w, torch.ones(len(SIZES), 2)))
    assert act[: sum(SIZES)].isfinite().all()


@_by_name(_fc1(False, ""))
def test_without_a_gate_an_expert_has_one(spec: GroupedGluSpec) -> None:
    w, x = nvfp4.of_exact_sums(len(SIZES), 96, 160, seed=5), _rows(160, SIZES)
    global_scale = torch.tensor([1.0, 1.25, 3.0, 1.0, 0.5])
    act = torch.full((x.shape[0], 96), math.nan, dtype=BF16)
    _call(spec, SIZES, x=x, act=act, kind=KINDS["none"], **_weights(w, global_scale))
    _assert_same(act, _products(x, w.values, SIZES) * _of_rows(global_scale.double(), SIZES)[:, None])


@pytest.mark.parametrize("arch", ARCHS)
def test_a_chain_hands_each_weight_its_own(arch: str) -> None:
    """An MLP is its FC1 and its FC2."""
    mlps = [spec for spec in MLP if spec.arch == arch and spec.fc1 in _fc1(True, "concat")]
    mlp = min(mlps, key=lambda spec: spec.fc1.tile.m)
    w1, w2 = nvfp4.of_exact_sums(len(SIZES), 128, 96, seed=6), nvfp4.of_exact_sums(len(SIZES), 96, 64, seed=7)
    x, global1 = _rows(96, SIZES), torch.linspace(0.1, 1, 2 * len(SIZES)).view(-1, 2)
    global2 = torch.linspace(2, 3, len(SIZES))
    mid, y, wanted_mid, wanted = (torch.full((x.shape[0], n), math.nan, dtype=BF16) for n in (64, 96, 64, 96))
    named = {"kind": KINDS["reglu"], "glu_layout": LAYOUTS["concat"]}
    _call(mlp, SIZES, x=x, mid=mid, y=y, **named, **_weights(w1, global1, "w1"), **_weights(w2, global2, "w2"))
    _call(mlp.fc1, SIZES, x=x, act=wanted_mid, **named, **_weights(w1, global1))
    _call(mlp.fc2, SIZES, x=wanted_mid, y=wanted, **_weights(w2, global2))
    rows = sum(SIZES)
    assert torch.equal(mid[:rows], wanted_mid[:rows]) and torch.equal(y[:rows], wanted[:rows])
    assert wanted[:rows].isfinite().all() and float(wanted[:rows].float().abs().max()) > 1e3
