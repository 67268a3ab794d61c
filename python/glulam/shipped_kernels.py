"""Which of the shipped kernels serves a problem: a pure function of what the host knows, with no read of device data.

Group sizes are not among it, so that a captured graph replays the kernel that eager mode would choose.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from cute_kernels.sm90 import configs as sm90
from cute_kernels.specs import (
    ACTIVATION_FORMS,
    ACTIVATIONS,
    GLU_LAYOUTS,
    LAYOUT_FORMS,
    FoldMxfp8Spec,
    GroupedDgluSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    LayerSpec,
    MhcSpec,
    QuantizeMxfp8Spec,
    Spec,
    TailSpec,
)
from cute_kernels.tiles import TileConfig, require

from . import choice, cost
from .changed import changed
from .problem import Problem

CONFIGS: dict[str, ModuleType] = {sm90.ARCH: sm90}
"""The shipped tiles of each architecture."""


@dataclass(frozen=True)
class Choice:
    """A spec, why it was chosen, and why nothing faster was. `is_tuned`: a tuned table chose it."""

    spec: Spec
    why: str
    why_not: tuple[str, ...]
    is_tuned: bool = False


def _mm(problem: Problem, tile: TileConfig, arch: str) -> GroupedMmSpec:
    tile = CONFIGS[arch].fc2_tile(tile)
    return GroupedMmSpec(problem.dtype, problem.transpose_w, tile, arch, problem.operands, problem.in_halves)


def _glu(problem: Problem, tile: TileConfig, arch: str) -> GroupedGluSpec:
    require("activation", problem.activation, ACTIVATIONS)
    require("glu_layout", problem.glu_layout, GLU_LAYOUTS)
    activation, layout = CONFIGS[arch].glu_form(
        problem.activation, problem.glu_layout, problem.intermediate, problem.operands, tile, problem.save_preact,
        problem.transpose_w,
    )  # fmt: skip
    return GroupedGluSpec(
        problem.dtype, activation, layout, problem.save_preact, tile, arch, problem.operands, problem.transpose_w
    )


def _mlp(problem: Problem, tile: TileConfig, arch: str) -> GroupedMlpSpec:
    fc2 = replace(problem, operands=problem.fc2_operands)
    return GroupedMlpSpec(_glu(problem, tile, arch), _mm(fc2, tile, arch), problem.quantized)


def _dglu(problem: Problem, tile: TileConfig, arch: str) -> GroupedDgluSpec:
    # One tile for all numbers of rows, in the data gradient that follows and, but for MXFP8, here.
    dgrad = tile if problem.out_features else None
    form = problem.dtype, problem.activation, problem.glu_layout
    return GroupedDgluSpec(*form, tile, dgrad, arch, problem.operands, problem.transpose_w)


def _wgrad(problem: Problem, tile: TileConfig, arch: str) -> GroupedWgradSpec:
    return GroupedWgradSpec(problem.dtype, problem.out_dtype, tile, arch)


def _quantize(problem: Problem, tile: TileConfig, arch: str) -> QuantizeMxfp8Spec:
    return QuantizeMxfp8Spec(problem.dtype, problem.axis, arch, problem.rounded)


SPEC_OF: dict[str, Callable[[Problem, TileConfig, str], Spec]] = {
    "grouped_mm": _mm,
    "grouped_glu": _glu,
    "grouped_mlp": _mlp,
    "grouped_dglu": _dglu,
    "grouped_wgrad": _wgrad,
    "quantize_mxfp8": _quantize,
}


ONE_TILE = {"grouped_dglu": "LARGE", "quantize_mxfp8": "LARGE"}
"""Operators with one tile for all problems, by its name among the shipped tiles: grouped_dglu serves training, where
experts have many rows; a quantiser's spec has no tile."""
WIDE_PADDING = 0.9
"""WGRAD_WIDE serves weights where its tiles have at most this share of the elements that WGRAD's have.

It then takes 0.61 to 1.04 times as long. With 0.94 to 0.98 it may be 1.15 times as fast under sustained load and 0.81
times as fast on a cool GPU (gpt-oss-120b); where neither pads anything, up to 1.2 times as slow under skew.
"""
WIDE_PADDING_BY_INDEX = 1.15
"""The same where rows come by index: it then takes 0.80 to 0.94 times as long, since it has more MMAs for each copy."""


def form(spec: Spec) -> Spec:
    """The spec with its tiles erased: what it computes, not how it is cut."""
    if isinstance(spec, (FoldMxfp8Spec, LayerSpec, MhcSpec, QuantizeMxfp8Spec, TailSpec)):
        return spec
    if isinstance(spec, GroupedMlpSpec):
        return replace(spec, fc1=form(spec.fc1), fc2=form(spec.fc2))  # type: ignore[arg-type]
    schedule = "swapped" if spec.tile.swapped else "cooperative"
    any_tile = TileConfig(k=spec.tile.k, schedule=schedule)  # depth and schedule are those of the operands
    if isinstance(spec, GroupedDgluSpec):
        return replace(spec, tile=any_tile, dgrad=any_tile if spec.dgrad else None)
    return replace(spec, tile=any_tile)


def forms_of(problem: Problem, arch: str) -> list[Spec]:
    """The forms of the kernels that serve a problem, whatever its number of rows: those compiled for its activation and
    gate layout alone, then those for several. Raises SpecError where there are none.
    """
    return forms_like(shipped_choice(replace(problem, rows=problem.experts), arch).spec, problem)


def forms_like(spec: Spec, problem: Problem) -> list[Spec]:
    if isinstance(spec, GroupedMlpSpec):
        return [form(replace(spec, fc1=fc1)) for fc1 in forms_like(spec.fc1, problem)]  # type: ignore[arg-type]
    if not isinstance(spec, GroupedGluSpec):
        return [form(spec)]
    layouts = [problem.glu_layout]
    if spec.gated and not spec.transpose_w:  # else a kernel has one
        layouts = _serving(LAYOUT_FORMS, problem.glu_layout)
    return [
        form(replace(spec, activation=activation, glu_layout=layout))
        for activation in _serving(ACTIVATION_FORMS, problem.activation)
        for layout in layouts
        if layout != "blocked" or problem.intermediate % CONFIGS[spec.arch].BLOCK_ROWS == 0
    ]


def _serving(forms: Mapping[str, tuple[str, ...]], name: str) -> list[str]:
    """Those that serve one of this name, the narrowest first."""
    return sorted((form for form, served in forms.items() if name in served), key=lambda form: len(forms[form]))


def microseconds(us: float) -> str:
    """Three significant digits."""
    return f"{us:.0f} us" if us >= 100 else f"{us:.3g} us"


FP8_TILES: dict[str, dict[str, float]] = {
    "mxfp8": {"SMALL8": 64, "LARGE8": math.inf},
    "mxfp8_exact": {"TINY_W8": 12, "SMALL_W8": 60, "MEDIUM_W8": 128, "LARGE_W8": math.inf},
}
FP8_TILES["mxfp8_weight_only"] = FP8_TILES["mxfp8_exact"]
"""By operands: names of shipped tiles, each with the most rows an expert that it is for. Weights are decoded again for
every row tile of an expert. A row tile of the next size takes 1.14, 1.30 and 1.55 times as long, as do the smaller ones
where random routing gives 10, 30 and 50 % of the groups more rows than one of them has.
"""
NARROW_SLOWER = 1.35
"""How much longer an SM decodes as many weights on NARROW_W8 as on TINY_W8."""
FASTER = "recipe='mxfp8' would halve the weights' bytes and double the MMA rate, at MXFP8's precision"


def _rows(problem: Problem) -> str:
    average = problem.rows / problem.experts
    return f"{problem.rows} rows over {problem.experts} experts are {average:.3g} an expert"


def _span(under: float, most: float) -> str:
    """The numbers over one limit, if it is not 0, and up to another, if it is finite."""
    limits = (f"more than {under:.0f}" if under else "", f"at most {most:.0f}" if most < math.inf else "")
    return " and ".join(limit for limit in limits if limit)


def _most_decoded(problem: Problem, tile: TileConfig) -> int:
    """Weights that the busiest SM decodes, where each expert with rows has one row tile of them."""
    active = min(problem.rows, problem.experts)
    tiles = ((active * math.ceil(gemm.columns / tile.n), gemm.depth) for _, gemm in problem.parts)
    return sum(math.ceil(count / cost.H200.sms) * tile.n * depth for count, depth in tiles)


def _is_narrow_faster(problem: Problem, configs: ModuleType) -> bool:
    """Whether many SMs have no weights on the tile of few rows: 176 us, 153 else, for two of Mixtral-8x7B's experts."""
    return NARROW_SLOWER * _most_decoded(problem, configs.NARROW_W8) < _most_decoded(problem, configs.TINY_W8)


def has_one_tile(problem: Problem) -> bool:
    """Whether one shipped tile serves all numbers of rows."""
    trains_fp8 = problem.save_preact and problem.operands in FP8_TILES
    return trains_fp8 or problem.op in ONE_TILE or problem.op == "grouped_wgrad"


SIZES_AN_OCTAVE = 16


def _estimated_rows(problem: Problem) -> int:
    """The rows that times are compared at: near the problem's, 16 sizes an octave, powers of two an expert among them.

    Estimates are not good to the 2 % between, and calls with new rows need no estimates of their own.
    """
    step = round(SIZES_AN_OCTAVE * math.log2(max(problem.rows, 1) / problem.experts))
    return round(problem.experts * math.pow(2.0, step / SIZES_AN_OCTAVE))


def _estimates(problem: Problem, arch: str) -> list[choice.Estimate]:
    parts = changed(problem, rows=_estimated_rows(problem)).parts
    return choice.estimates(parts, CONFIGS[arch].TILES, arch)


@functools.cache
def _fp8_tiles(operands: str, arch: str) -> tuple[tuple[TileConfig, float], ...]:
    """Tiles, each with the most rows an expert that it is for."""
    return tuple((getattr(CONFIGS[arch], name), most) for name, most in FP8_TILES[operands].items())


def _fp8_place(problem: Problem, tiles: Sequence[tuple[TileConfig, float]]) -> int:
    """Which of `_fp8_tiles` is for the problem's rows."""
    return next(i for i, (_, most) in enumerate(tiles) if problem.rows <= most * problem.experts)


def _fp8_tile(problem: Problem, arch: str) -> TileConfig:
    configs, tiles = CONFIGS[arch], _fp8_tiles(problem.operands, arch)
    tile = tiles[_fp8_place(problem, tiles)][0]
    return configs.NARROW_W8 if tile == configs.TINY_W8 and _is_narrow_faster(problem, configs) else tile


def size_of(problem: Problem, arch: str) -> Any:
    """Of the problem's rows, what the shipped tile depends on."""
    if has_one_tile(problem):
        return None
    return _fp8_tile(problem, arch) if problem.operands in FP8_TILES else _estimated_rows(problem)


def _choose_fp8(problem: Problem, arch: str) -> Choice:
    """By rows an expert, until times of these tiles are known; where they are few and decoded, by experts as well."""
    tiles = _fp8_tiles(problem.operands, arch)
    if has_one_tile(problem):  # both directions of training
        spec = SPEC_OF[problem.op](problem, tiles[-1][0], arch)
        if isinstance(spec, GroupedDgluSpec):
            spec = replace(spec, tile=CONFIGS[arch].DGLU8)
        return Choice(spec, f"every {problem.op} of this form has one kernel, whatever the number of rows", ())
    place, tile = _fp8_place(problem, tiles), _fp8_tile(problem, arch)
    spans = [_span(tiles[i - 1][1] if i else 0, most) for i, (_, most) in enumerate(tiles)]
    usual, reason = tiles[place][0], spans[place]
    why_not = [f"{tiles[i][0].name}: for {span} rows an expert" for i, span in enumerate(spans) if i != place]
    if tile != usual:
        why_not.insert(0, f"{usual.name}: leaves SMs idle, since so few experts have rows")
        reason = f"{reason}, and few experts have rows"
    why = f"{_rows(problem)}, {reason}: {tile.name}"
    return Choice(SPEC_OF[problem.op](problem, tile, arch), why, tuple(why_not))


def faster(choice: Choice) -> tuple[str, ...]:
    """What would be faster than any tile."""
    return tuple(reason for reason in choice.why_not if reason == FASTER)


def shipped_choice(problem: Problem, arch: str) -> Choice:
    """What serves a problem where nobody compiled or tuned anything."""
    return _choose_fp8(problem, arch) if problem.operands in FP8_TILES else _choose_16bit(problem, arch)


def _choose_wgrad(problem: Problem, arch: str) -> Choice:
    """By the shapes of weights, which are what its tiles cut, and by whether rows come by index."""
    usual, wide = CONFIGS[arch].WGRAD_TILES
    cover = {tile: sum(tile.padded(n, k) for n, k in problem.weights) for tile in (usual, wide)}
    most = WIDE_PADDING_BY_INDEX if problem.gathers else WIDE_PADDING
    tile, other = (wide, usual) if cover[wide] <= most * cover[usual] else (usual, wide)
    shapes = " and ".join(f"{n} x {k}" for n, k in problem.weights)
    rows = " by rows that come by index" if problem.gathers else ""
    why = f"{tile.name} serves weights of {shapes}{rows}, whatever the number of rows"
    why_not = f"{other.name}: its tiles of them have {cover[other] / cover[tile]:.2f} times as many elements"
    return Choice(SPEC_OF[problem.op](problem, tile, arch), why, (why_not,))


def _choose_16bit(problem: Problem, arch: str) -> Choice:
    configs = CONFIGS[arch]
    advice = (FASTER,) if problem.op == "grouped_mlp" else ()
    if problem.op in ONE_TILE:
        spec = SPEC_OF[problem.op](problem, getattr(configs, ONE_TILE[problem.op]), arch)
        return Choice(spec, f"every {problem.op} of this form has one kernel, whatever the number of rows", advice)
    if problem.op == "grouped_wgrad":
        return _choose_wgrad(problem, arch)
    best, *others = _estimates(problem, arch)
    why = f"{_rows(problem)}: {best.tile.name} takes about {microseconds(best.us)}, {best.source}"
    why_not = (f"{one.tile.name}: about {microseconds(one.us)}, {one.us / best.us:.2f} times as long" for one in others)
    return Choice(SPEC_OF[problem.op](problem, best.tile, arch), why, (*why_not, *advice))
