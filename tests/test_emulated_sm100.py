"""Kernels of sm_100a (Blackwell), emulated on the CPU, because no such GPU is available.

Sums of small integers and powers of two are exact in any order, so results are compared with float64, rounded once, bit
for bit. Functions of each family also pass the trials of `glulam validate`. Everything is repeated for kernels compiled
without a construct (`cute_kernels/plain.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch

import pytest
import torch
from emulator import validated
from emulator.emulated_gpu import installed
from emulator.launch import Emulator, ptx_of
from support.routing import ends
from torch import Tensor

import glulam
from cute_kernels import plain
from cute_kernels.architectures import CONSTRUCTS
from cute_kernels.schedule.groups import OFFS_INT32, SPLITS_INT32, SPLITS_INT64
from cute_kernels.sm100.configs import LARGE8
from cute_kernels.specs import BY_GROUP, GroupedMmSpec, QuantizeMxfp8Spec, Spec, WgradSpec
from ffi_bridge import profiles
from glulam.formats.mxfp8.reference import quantize_rows
from glulam.validate.formats import values_of_all_magnitudes

ARCH, B300 = "sm_100a", "sm_103a"
BF16 = torch.bfloat16
TINY = validated.SMALL._replace(rows=20, experts=3, kinds=("Zipf", "uniform"), inter=64, in_blocks=128)
FEW = (
    "grouped_mm_bf16_nn_halves_t128x128*", "grouped_glu_bf16_gated_strided_preact_t128x256*",
    "grouped_dglu_bf16_clamped_swiglu_interleaved_nt_*", "grouped_mlp_mxfp8blocks_bf16_gated_blocked_t*_sm_100a",
    "grouped_wgrad_mxfp8blocks_bf16_bf16_*",
)  # fmt: skip
"""Families that `make test` runs."""
FAMILIES = (
    "grouped_mm_bf16_nt_t128x256*", "grouped_mm_bf16_nn_t128x256*", "grouped_mm_f16_nt_t128x128*",
    "grouped_glu_bf16_gated_blocked_t128x256*", "grouped_glu_bf16_ungated_preact_t128x128*",
    "grouped_glu_bf16_gated_concat_nn_t128x256*", "grouped_glu_bf16_gated_interleaved_preact_nn_t128x128*",
    "grouped_glu_bf16_gated_interleaved32_nn_t128x128*", "grouped_mlp_bf16_ungated_t128x128*_sm_100a",
    "grouped_mlp_bf16_situ_blocked_preact_t128x256*_sm_100a", "grouped_dglu_bf16_swiglu_concat_t128x128x64_c1x1_tm_sm*",
    "grouped_dglu_bf16_geglu_interleaved32_t*__nn_*", "grouped_dglu_f16_gelu_t128x128x64_c1x1_tm_sm*",
    "grouped_wgrad_bf16_bf16_*", "grouped_wgrad_bf16_f32_*", "grouped_mlp_mxfp8blocks_f16_ungated_*_quantized_*",
    "grouped_mlp_mxfp8blocks_bf16_gated_blocked_preact_*", "grouped_dglu_mxfp8blocks_bf16_swiglu_interleaved_*__nn_*",
    "grouped_wgrad_mxfp8blocks_f16_f32_*",
    *FEW,
)  # fmt: skip
TRIALS = 2
AS_SHIPPED = ""
IN_ANY_ORDER = [(AS_SHIPPED, seed) for seed in range(3)]


@pytest.fixture
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Construct that kernels are compiled without in a test."""
    monkeypatch.setenv(plain.ENV, request.param)
    return str(request.param)


def _first(pattern: str, arch: str = ARCH) -> Spec:
    names = pattern.replace(ARCH, arch)
    return next(spec for spec in profiles.shipped_specs(arch, "full") if fnmatch(spec.name, names))


@pytest.mark.parametrize("pattern", FEW)
def test_a_function_is_right(pattern: str) -> None:
    with installed(ARCH, check_races=True) as gpu:
        assert validated.try_function(gpu, _first(pattern), TINY, most=1).trials == 1


@pytest.mark.emulator
@pytest.mark.parametrize("without, seed", [*IN_ANY_ORDER, ("tmem_loads", 1), ("rows", 2)], indirect=["without"])
@pytest.mark.parametrize("pattern", FAMILIES)
def test_a_function_of_each_family_is_right_in_every_order(pattern: str, without: str, seed: int) -> None:
    with installed(ARCH, seed=seed, check_races=True) as gpu:
        assert validated.try_function(gpu, _first(pattern), TINY, most=TRIALS).trials


@pytest.mark.emulator
@pytest.mark.parametrize("pattern", FAMILIES)
def test_a_build_for_a_b300_has_the_same_ptx(pattern: str) -> None:
    assert ptx_of(_first(pattern)) == ptx_of(_first(pattern, B300))


@pytest.mark.emulator
@pytest.mark.parametrize("pattern", FEW)
def test_a_build_for_a_b300_is_right(pattern: str) -> None:
    with installed(B300, check_races=True) as gpu:
        assert validated.try_function(gpu, _first(pattern, B300), TINY, most=1).trials == 1


TRACES = {"tmem_loads": "tcgen05.ld.sync.aligned.16x256b", "rows": str(2**30)}
"""Text found in PTX compiled with a construct; for "rows", the bound that row numbers are clamped to."""


@pytest.mark.parametrize("pattern", ["grouped_mm_bf16_nt_t128x128*", "grouped_wgrad_bf16_f32_*"])
def test_a_plain_build_is_without_its_construct_and_no_other(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in (AS_SHIPPED, *CONSTRUCTS):
        monkeypatch.setenv(plain.ENV, asked)
        (text,) = ptx_of(_first(pattern))
        assert {name for name, trace in TRACES.items() if trace not in text} == {asked} - {AS_SHIPPED}


# Exact sums ----------------------------------------------------------------------------------------------------------

ROUTINGS = {
    "ragged": (5, 0, 130, 40),
    "one expert": (200,),
    "empty ends": (0, 0, 129, 0),
    "one row": (1, 1, 0, 1),
    "no rows": (0, 0, 0),
    "many": (3, 7, 0, 1, 11, 2, 9, 0, 4),
    "tiles": (300, 20, 260),
    "blocks": (0, 1, 31, 32, 33, 100),
}
Exact = Callable[[torch.Generator, tuple[int, ...], int], tuple[Tensor, Tensor]]
"""Makes a result and what it must be, float64, of groups with so many rows and a schedule's seed."""


def _numbers(generator: torch.Generator, *shape: int) -> Tensor:
    """Return random multiples of 1/4, at most 2, whose sums of products are exact in float32."""
    return (torch.randint(-8, 9, shape, generator=generator) / 4).double()


def _offs(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(ends(list(sizes)), dtype=torch.int32)


def _groups(sizes: tuple[int, ...]) -> list[slice]:
    return [slice(end - size, end) for end, size in zip(ends(list(sizes)), sizes, strict=True)]


def _rows(generator: torch.Generator, sizes: tuple[int, ...], columns: int) -> Tensor:
    """Return random rows, with rows of NaN after the last group."""
    rows = _numbers(generator, sum(sizes) + 3, columns)
    rows[sum(sizes) :] = torch.nan
    return rows


def _mm(
    generator: torch.Generator, sizes: tuple[int, ...], seed: int, transposed: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    experts, n, k = len(sizes), 264, 200
    x, bias = _rows(generator, sizes, k), _numbers(generator, experts, n)
    w = _numbers(generator, experts, *((k, n) if transposed else (n, k)))
    scale = torch.exp2(torch.randint(-1, 2, (len(x),), generator=generator).double())
    with installed(ARCH, seed=seed, check_races=True):
        made = glulam.grouped_mm(
            x.to(BF16), w.to(BF16), offs=_offs(sizes), bias=bias.to(BF16), bias_scale=scale.float(),
            transpose_w=transposed,
        )  # fmt: skip
    parts = [
        x[rows] @ (w[e] if transposed else w[e].mT) + bias[e] * scale[rows, None]
        for e, rows in enumerate(_groups(sizes))
    ]
    return made[: sum(sizes)], torch.cat(parts)


def _mm_nn(generator: torch.Generator, sizes: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    return _mm(generator, sizes, seed, transposed=True)


def _wgrad(generator: torch.Generator, sizes: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Launch grouped_wgrad, which adds to the existing gradient of every other expert; return result and exact
    values.
    """
    dy, x = _rows(generator, sizes, 136), _rows(generator, sizes, 264)
    there = _numbers(generator, len(sizes), 136, 264)
    mask = torch.arange(len(sizes)) % 2 == 0
    out = torch.where(mask[:, None, None], there, torch.nan).float()
    with installed(ARCH, seed=seed, check_races=True):
        glulam.grouped_wgrad(dy.to(BF16), x.to(BF16), offs=_offs(sizes), out=out, mask=mask)
    sums = torch.stack([dy[rows].mT @ x[rows] for rows in _groups(sizes)])
    return out, sums + there * mask[:, None, None]


def _mxfp8(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return random elements, scales that differ from block to block, and their values."""
    data = _numbers(generator, *shape)
    exponents = torch.randint(-2, 3, (*shape[:-1], shape[-1] // 32), generator=generator)
    values = data * torch.exp2(exponents.double()).repeat_interleave(32, -1)
    return data.to(torch.float8_e4m3fn), (exponents + 127).to(torch.uint8), values


def _mm_mxfp8(generator: torch.Generator, sizes: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Launch grouped_mm in MXFP8; return result and exact values. The width decides if scales are loaded as bytes,
    words or vectors.
    """
    n, k = 136, (160, 384, 512)[seed]
    (x, x_scale, rows_of_x), (w, w_scale, weights) = (
        _mxfp8(shape, generator) for shape in ((sum(sizes) + 3, k), (len(sizes), n, k))
    )
    x.view(torch.uint8)[sum(sizes) :], x_scale[sum(sizes) :] = 0x7F, 0xFF  # NaN
    y = torch.full((len(x), n), torch.nan, dtype=BF16)
    spec = GroupedMmSpec(tile=LARGE8, arch=ARCH, operands="mxfp8_blocks")
    Emulator(ARCH, seed=seed, check_races=True).function(spec)(
        x=x,
        w=w,
        y=y,
        x_scale=x_scale,
        w_scale=w_scale,
        groups=_offs(sizes),
        group_form=0,
        num_groups=len(sizes),
    )
    assert y[sum(sizes) :].isnan().all(), "rows after the last group are nobody's"
    return y[: sum(sizes)], torch.cat([rows_of_x[rows] @ weights[e].mT for e, rows in enumerate(_groups(sizes))])


def _atoms(width: int) -> int:
    return -(-width // 128)


def _bands(sizes: tuple[int, ...], rows: int, scales: list[Tensor]) -> Tensor:
    """Arrange each group's scales, [blocks, columns], in bands of 128 rows and 128 columns
    (`cute_kernels.memory.scale_bands`).

    Scales are 0 after a group's last block and after the last column, and NaN where no group has a band.
    """
    (width,) = {each.shape[1] for each in scales}
    bands = torch.full((_atoms(width), rows // 128 + len(sizes), 32, 4, 4), 0xFF, dtype=torch.uint8)
    for group, (of_group, own) in enumerate(zip(_groups(sizes), scales, strict=True)):
        count = -(-len(own) // 4)
        whole = torch.zeros(count * 4, _atoms(width) * 128, dtype=torch.uint8)
        whole[: len(own), :width] = own
        first = of_group.start // 128 + group
        parts = whole.view(count, 4, _atoms(width), 4, 32)  # band, block, atom, quarter, lane
        bands[:, first : first + count] = parts.permute(2, 0, 4, 3, 1)
    return bands


def _mxfp8_by_group(
    generator: torch.Generator, sizes: tuple[int, ...], columns: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return random elements, scales and values, blocked along each group's rows; elements after the last group are
    NaN.
    """
    data = _rows(generator, sizes, columns)
    scales = [torch.randint(-2, 3, (-(-size // 32), columns), generator=generator) for size in sizes]
    values = data.clone()
    for rows, own in zip(_groups(sizes), scales, strict=True):
        values[rows] *= torch.exp2(own.double()).repeat_interleave(32, 0)[: rows.stop - rows.start]
    exponents = [(own + 127).to(torch.uint8) for own in scales]
    return data.to(torch.float8_e4m3fn), _bands(sizes, len(data), exponents), values


def _wgrad_mxfp8(generator: torch.Generator, sizes: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Launch grouped_wgrad in MXFP8, which adds to the existing gradient of every other expert; return result and exact
    values.
    """
    n, k = 96, 160
    (dy, dy_scale, rows_of_dy), (x, x_scale, rows_of_x) = (
        _mxfp8_by_group(generator, sizes, columns) for columns in (n, k)
    )
    there = _numbers(generator, len(sizes), n, k)
    mask = torch.arange(len(sizes)) % 2 == 0
    out = torch.where(mask[:, None, None], there, torch.nan).float()
    spec = WgradSpec("float32", LARGE8, ARCH)
    Emulator(ARCH, seed=seed, check_races=True).function(spec)(
        dy=dy, x=x, dw=out, dy_scale=dy_scale, x_scale=x_scale, groups=_offs(sizes), group_form=OFFS_INT32,
        num_groups=len(sizes), mask=mask,
    )  # fmt: skip
    sums = torch.stack([rows_of_dy[rows].mT @ rows_of_x[rows] for rows in _groups(sizes)])
    return out, sums + there * mask[:, None, None]


EXACT = {
    "mm": _mm,
    "mm of transposed weights": _mm_nn,
    "wgrad": _wgrad,
    "mm in MXFP8": _mm_mxfp8,
    "wgrad in MXFP8": _wgrad_mxfp8,
}


def _check_exact(make: Exact, sizes: tuple[int, ...], seed: int) -> None:
    made, wanted = make(torch.Generator().manual_seed(seed), sizes, seed)
    assert wanted.numel() == 0 or wanted.abs().max() > 1
    assert made.equal(wanted.to(made.dtype))


@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_sums_are_exact(make: Exact) -> None:
    _check_exact(make, ROUTINGS["ragged"], seed=0)


@pytest.mark.parametrize("make, without", [(_mm, "tmem_loads"), (_wgrad, "rows")], indirect=["without"])
def test_sums_are_exact_without_a_construct(make: Exact, without: str) -> None:
    _check_exact(make, ROUTINGS["one expert"], seed=0)


@pytest.mark.emulator
@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("without, seed", [*IN_ANY_ORDER, (",".join(CONSTRUCTS), 0)], indirect=["without"])
@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_sums_are_exact_for_every_routing_in_every_order(
    make: Exact, without: str, sizes: tuple[int, ...], seed: int
) -> None:  # fmt: skip
    _check_exact(make, sizes, seed)


# Rows by groups ------------------------------------------------------------------------------------------------------

FORMS = {
    "offs": (OFFS_INT32, _offs),
    "int32 splits": (SPLITS_INT32, lambda sizes: torch.tensor(sizes, dtype=torch.int32)),
    "int64 splits": (SPLITS_INT64, lambda sizes: torch.tensor(sizes, dtype=torch.int64)),
}


def _check_quantised(sizes: tuple[int, ...], seed: int, form: str, by_index: bool, dtype: torch.dtype) -> None:
    """Check that the quantiser writes the reference's bytes for each group's elements and scales, and no other rows and
    bands.
    """
    generator = torch.Generator().manual_seed(seed)
    total, columns = sum(sizes) + 3, 160
    x = values_of_all_magnitudes((total, columns), dtype)
    index = torch.randint(-5, total + 5, (total,), generator=generator, dtype=torch.int32) if by_index else None
    rows = x if index is None else x[index.clamp(0, total - 1)]
    data = torch.full((total, columns), 0x55, dtype=torch.uint8)
    scale = torch.full_like(_bands(sizes, total, [torch.zeros(0, columns)] * len(sizes)), 0xFF)
    encoding, encoded = FORMS[form]
    spec = QuantizeMxfp8Spec(str(dtype).removeprefix("torch."), BY_GROUP, ARCH)
    Emulator(ARCH, seed=seed, check_races=True).function(spec)(
        x=x, data=data.view(torch.float8_e4m3fn), scale=scale, rows=index, groups=encoded(sizes), group_form=encoding,
        num_groups=len(sizes),
    )  # fmt: skip
    made = [quantize_rows(rows[group].mT, 32) for group in _groups(sizes)]
    wanted = torch.full_like(data, 0x55)
    for group, (elements, _) in zip(_groups(sizes), made, strict=True):
        wanted[group] = elements.mT.view(torch.uint8)
    assert data.equal(wanted)
    assert scale.equal(_bands(sizes, total, [scales.mT for _, scales in made]))


def test_rows_are_quantised_by_groups() -> None:
    _check_quantised(ROUTINGS["ragged"], 0, "offs", by_index=True, dtype=BF16)


@pytest.mark.emulator
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize(("seed", "sizes"), list(enumerate(ROUTINGS.values())), ids=ROUTINGS)
def test_rows_are_quantised_by_groups_for_every_routing(
    sizes: tuple[int, ...], seed: int, by_index: bool, form: str
) -> None:  # fmt: skip
    _check_quantised(sizes, seed, form, by_index, torch.float16 if by_index else BF16)


def test_rows_of_more_groups_than_a_warp_has_lanes_are_found() -> None:
    _check_quantised(tuple(range(40)), 1, "int64 splits", by_index=False, dtype=BF16)


# Training ------------------------------------------------------------------------------------------------------------


@pytest.mark.emulator
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_layer_is_trained_with_weight_gradients_in_mxfp8(seed: int) -> None:
    """Rows of tokens come by index. A gradient that is not quantised, or otherwise, errs by 2.6e-2 and more."""
    generator = torch.Generator().manual_seed(seed)
    tokens, experts, hidden, inter = 40, 3, 64, 64
    x, dy = (torch.randn(tokens, hidden, generator=generator).to(BF16) for _ in range(2))
    weights = {
        "w1": (torch.randn(experts, 2 * inter, hidden, generator=generator) / 8).to(BF16),
        "w2": (torch.randn(experts, hidden, inter, generator=generator) / 8).to(BF16),
    }
    ids = torch.randint(0, experts, (tokens, 2), generator=generator)
    routing = glulam.Routing.from_topk(ids, torch.rand(tokens, 2, generator=generator), experts)

    def gradients() -> dict[str, Tensor]:
        leaves = {name: value.clone().requires_grad_() for name, value in {"x": x, **weights}.items()}
        glulam.moe(routing=routing, **leaves, recipe="mxfp8_wgrad").backward(dy)
        return {name: value.grad for name, value in leaves.items() if value.grad is not None}

    wanted = gradients()
    with installed(ARCH, seed=seed) as gpu:
        made = gradients()
    assert sum(name.startswith("wgrad_mxfp8blocks_bf16_") for name in gpu.emulator.counts.kernels) == 2
    for name, value in wanted.items():
        error = float((made[name].double() - value.double()).norm() / value.double().norm())
        assert value.norm() > 0 and error < 6e-3, (name, error)
