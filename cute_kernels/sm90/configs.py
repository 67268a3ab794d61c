"""Specs of the kernels that ship for Hopper, and the tiles of these kernels. Plain Python: imports no compiler."""

from __future__ import annotations

from itertools import product

from ..formats import DECODED, DENSE, OPERANDS, Operands
from ..shipped import PROFILES as PROFILES
from ..shipped import (
    adapted,
    backward_specs,
    decoded_specs,
    demo_specs,
    folding_specs,
    forward_specs,
    fp8_specs,
    fp8_training_specs,
    glu_forms,
    layer_specs,
    mhc_specs,
    quantizing_specs,
)
from ..specs import (
    BLOCK_ROWS,
    DTYPES,
    GATED,
    GLU_LAYOUTS,
    DgluSpec,
    GroupedGluSpec,
    GroupedMmSpec,
    Spec,
    form_of_several,
    is_gated,
)
from ..tiles import TileConfig

ARCH = "sm_90a"
# Pingpong: hiding an epilogue behind the other warpgroup's MMAs is worth more than the operand traffic that a tile of
# 128 x 256 saves. Adaptive: the two CTAs of a cluster share weights where they can, which is faster if groups are small
# (0.98 instead of 0.95 of dense cuBLAS on Qwen3-30B). Otherwise they share rows, because a fixed (2, 1) cluster leaves
# one CTA idle at a group's odd row tile (0.66 instead of 0.79 on Qwen3-30B under skew).
LARGE = TileConfig(m=128, n=128, k=64, cluster_m=2, schedule="pingpong", adaptive=True)
# Not adaptive, since a weight gradient has no ragged row tiles. WGRAD_WIDE is for weights that its tiles cover with
# less padding.
WGRAD = TileConfig(m=128, n=128, k=64, cluster_n=2, schedule="pingpong")
WGRAD_WIDE = TileConfig(m=128, n=192, k=64, cluster_m=2, schedule="pingpong")
WGRAD_TILES = (WGRAD, WGRAD_WIDE)
# For few rows an expert: with half the rows, more stages fit. Weight tiles are narrow so that a token's few experts
# fill the GPU (FC1 of two of DeepSeek-V3's experts: 31.8 us instead of 40.5).
SMALL = TileConfig(m=64, n=128, k=64)
TILES = (LARGE, SMALL)
# FP8 rows and weights. Cooperative, since promoting sums every 128 elements of k costs more than an exposed epilogue:
# warpgroups that share a tile hide promotions behind each other's MMAs; of two pingpong warpgroups one is in its
# epilogue, so that they hide less (0.9 instead of 1.2 PFLOP/s).
LARGE8 = TileConfig(m=128, n=256, k=128, cluster_m=2, adaptive=True)
SMALL8 = TileConfig(m=64, n=256, k=128)
# FC1 needs 256 weight rows to make the 128 activations that share a scale. FC2 does not: with 128 weight rows it has
# twice the CTAs, which fill more SMs if experts are few (grouped_mlp of two of Mixtral-8x7B's experts: 99 us instead
# of 121).
SMALL8_FC2 = TileConfig(m=64, n=128, k=128)
# 128 columns, since preactivations and their gradients take the shared memory that 256 columns would need.
DGLU8 = TileConfig(m=128, n=128, k=128, cluster_m=2, adaptive=True)
TILES8 = (LARGE8, SMALL8)
# MXFP4 weights decoded to FP8. No cluster: each CTA decodes its own weights, so that a cluster would share little.
LARGE8_W4 = TileConfig(m=128, n=256, k=128)
# MXFP4 weights decoded to FP8, for few rows of x: rows of x are the 16 or 32 columns of the MMA instead of a slab of 64
# rows, so that decoding bounds the time, not MMAs.
TINY8_W4 = TileConfig(m=16, n=256, k=128, schedule="swapped_whole")
SLIM8_W4 = TileConfig(m=32, n=256, k=128, schedule="swapped_whole")
TINY8_W4_FC2 = TileConfig(m=16, n=128, k=128, schedule="swapped_whole")
SLIM8_W4_FC2 = TileConfig(m=32, n=128, k=128, schedule="swapped_whole")
TILES8_W4 = (LARGE8_W4, SMALL8, SLIM8_W4, TINY8_W4)
# Quantised weights with 16-bit rows (MXFP8, MXFP4 or NVFP4).
# Many rows an expert (LARGE_W8): a weight is decoded once for 256 rows.
# Few rows (SMALL_W8): four warpgroups decode, which hide each other's latencies; the fewer columns an MMA has, the less
# of x every CTA loads beside its weights. FITTED_W8 has the most rows for which four warpgroups have registers: for
# experts with somewhat more than 64 rows (gpt-oss-120b, 64 rows on average: 0.80 to 0.85 of MEDIUM_W8's time).
# Somewhat fewer rows (SLIM_W8): a weight is decoded once for 32 rows, twice as many as in TINY_W8; 4-bit weights still
# in whole words (by_words.py).
# Fewest rows (TINY_W8): the four warpgroups belong to two CTAs of an SM, so that a token's few experts fill more SMs
# (eight of Qwen3-30B's experts in MXFP8: 23.6 us instead of 29.1), and one CTA's epilogue hides behind the other's
# decoding.
# A token's few experts, whose weights TINY_W8 would spread over few SMs (HALVES_W8, QUARTERS_W8): time is then the
# latency of one k-tile after the other, so a tile is narrower, and warpgroups take turns at its k-tiles (a token
# through one of DeepSeek-V3's experts in MXFP8: 27.8 us instead of 49.3).
LARGE_W8 = TileConfig(m=256, n=128, k=128, schedule="swapped_single")
MEDIUM_W8 = TileConfig(m=128, n=256, k=128, schedule="swapped")
FITTED_W8 = TileConfig(m=96, n=256, k=128, schedule="swapped_single")
SMALL_W8 = TileConfig(m=64, n=256, k=128, schedule="swapped_single")
TINY_W8 = TileConfig(m=16, n=128, k=128, schedule="swapped_single")
SLIM_W8 = TileConfig(m=32, n=128, k=128, schedule="swapped_single")
HALVES_W8 = TileConfig(m=16, n=64, k=128, schedule="swapped_halves")
QUARTERS_W8 = TileConfig(m=16, n=64, k=128, schedule="swapped_quarters")
TILES_W8 = (LARGE_W8, MEDIUM_W8, FITTED_W8, SMALL_W8, SLIM_W8, TINY_W8)
SPLIT_W8 = (QUARTERS_W8, HALVES_W8)
# 4-bit weights of few rows where results must not depend on the number of rows: SLIM_W8 with wgmma's order of sums.
ORDERED_W8 = TileConfig(m=32, n=128, k=128, schedule="swapped_in_order")


def _decoding_tiles(operands: Operands) -> tuple[TileConfig, ...]:
    """Return the tiles of 16-bit rows of x and quantised weights.

    If x holds MXFP8 values ("mxfp8_exact"), sums must have the same order for any number of rows. SPLIT_W8 has another
    order, so it does not serve such x.
    """
    split = SPLIT_W8 if operands.x is DENSE else ()
    ordered = (ORDERED_W8,) if operands.w.bits < 8 else ()
    return *TILES_W8, *split, *ordered


DECODING_TILES = {operands: _decoding_tiles(OPERANDS[operands]) for operands in DECODED}
"""Tiles of 16-bit rows and quantised weights, by key of `formats.OPERANDS`."""
# Data gradients through quantised weights, which are decoded into shared memory: weights are the MMA's second operand,
# as 16-bit weights are. No cluster: every CTA decodes its own weights, so that a cluster would share nothing.
DGRAD_W = TileConfig(m=128, n=128, k=64, schedule="pingpong")


_ALL, _GATED, _EITHER = ("gated", "ungated", "layouts"), ("gated",), ("gated", "ungated")
MERGED: dict[tuple[str, TileConfig, bool], tuple[str, ...]] = {
    ("16bit", LARGE, False): _ALL,
    ("16bit", LARGE, True): _ALL,
    ("16bit", SMALL, True): _ALL,
    ("mxfp8", LARGE8, False): _ALL,
    ("mxfp8", LARGE8, True): _GATED,
    ("mxfp8", SMALL8, False): _GATED,
    ("mxfp4", LARGE8_W4, False): _ALL,
    ("mxfp4", SMALL8, False): _ALL,
    ("mxfp4", SLIM8_W4, False): _ALL,
    ("mxfp4", TINY8_W4, False): _ALL,
    ("fp8_block", LARGE8, False): _ALL,
    ("fp8_block", SMALL8, False): _GATED,
    **{
        (operands, tile, False): _GATED
        for operands in ("mxfp8_weight_only", "mxfp4_weight_only", "nvfp4_weight_only", "fp8_block_weight_only")
        for tile in (MEDIUM_W8, FITTED_W8, SMALL_W8, SLIM_W8, ORDERED_W8, TINY_W8, *SPLIT_W8)
    },
    **{("mxfp8_exact", tile, False): _EITHER for tile in (SLIM_W8, TINY_W8)},
}
"""Choices that an FC1 kernel makes at run time, by (key of `formats.OPERANDS`, tile, True if it stores the
preactivation).

"gated", "ungated": one kernel serves all activations of that kind. "layouts": one kernel serves all gate layouts. For
keys that are not listed, each activation and each layout has a kernel of its own.

With the run-time branch, the listed kernels take 0.997 to 1.004 times as long on average, and at most 1.02 times.
Kernels that are not listed have no branch because their MMAs would not hide it: one token on the small 16-bit tile
would take 1.015 to 1.04 times as long, MXFP8 with ungated activations 1.03 times, the remaining tiles of decoded
weights 1.01 to 1.07 times, a backward up to 2 times.
"""


ALONE_TRANSPOSED = ("clamped_swiglu", "interleaved")
"""Activation and gate layout of gpt-oss, whose weights are stored transposed.

With transposed weights, this pair has a kernel of its own on tiles that MERGED does not list, where a run-time branch
would make the generation of tokens slower.
"""


def glu_form(
    activation: str, glu_layout: str, width: int, operands: str, tile: TileConfig, save_preact: bool,
    transpose_w: bool = False,
) -> tuple[str, str]:  # fmt: skip
    """Return the activation form and the layout form of the FC1 kernel that serves an activation and a gate layout.

    A form is a key of `specs.ACTIVATION_FORMS` or `specs.LAYOUT_FORMS`: one activation (layout), or several among which
    the kernel chooses at run time. Kernels for transposed weights load each layout in a different way
    (natural_order.py), so each layout has a kernel of its own. Their activations are merged (one kernel for several) on
    all tiles, except ALONE_TRANSPOSED.

    Args:
        activation: name of the activation.
        glu_layout: name of the gate layout.
        width: I, the number of activations of a row.
        operands: a key of `formats.OPERANDS`.
        tile: the kernel's tile.
        save_preact: True: the kernel also stores the preactivation.
        transpose_w: True: each expert's weights are transposed.
    """
    merged = MERGED.get((operands, tile, save_preact), ())
    kind = form_of_several(activation)
    layout = glu_layout
    if transpose_w:
        is_alone = not merged and (activation, layout) == ALONE_TRANSPOSED
        return activation if is_alone else kind, layout
    if is_gated(activation) and "layouts" in merged:
        layout = "strided" if width % BLOCK_ROWS else "blocked"
    return kind if kind in merged else activation, layout


_SECOND = {SMALL8: SMALL8_FC2, DGLU8: LARGE8, SLIM8_W4: SLIM8_W4_FC2, TINY8_W4: TINY8_W4_FC2}


def second_tile(first: TileConfig) -> TileConfig:
    """Return the tile of the second GEMM of a pair: FC2's tile if `first` is FC1's, or the data gradient's tile if
    `first` is grouped_dglu's.
    """
    return _SECOND.get(first, first)


_SPILLING: list[Spec] = [
    *(DgluSpec(dtype, *form, LARGE) for dtype, form in product(DTYPES, product(GATED, GLU_LAYOUTS))),
    *(
        DgluSpec(dtype, *form, LARGE, transpose_w=True)
        for dtype, form in product(DTYPES, product(GATED, ("concat", "interleaved32")))
    ),
    *(
        GroupedGluSpec(dtype, form, "interleaved", True, LARGE8, operands="mxfp8")
        for dtype, form in product(DTYPES, sorted({form_of_several(activation) for activation in GATED}))
    ),
]
_SPILLING += [one for spec in _SPILLING if isinstance(spec, DgluSpec) for one in adapted(spec)]
_DECODING_TO_FP8: list[Spec] = [
    *(GroupedMmSpec(dtype, tile=LARGE8_W4, operands="mxfp4") for dtype in DTYPES),
    *(
        GroupedGluSpec(dtype, *form, False, LARGE8_W4, operands="mxfp4")
        for dtype, form in product(DTYPES, glu_forms(glu_form, "mxfp4", LARGE8_W4))
    ),
]
ALLOWED_DIAGNOSTICS = {spec.name: ("spills",) for spec in (*_SPILLING, *_DECODING_TO_FP8)}
"""Compiler diagnostics that a build accepts, by spec name: these kernels may spill registers.

_SPILLING: gathering warps leave a thread of an MMA warpgroup only 208 or 216 registers, up to 7 too few for these
epilogues. The spilled values go to memory once a tile, which costs less than could be measured (a backward runs at
0.985 to 1.03 of its speed with 240 registers). _DECODING_TO_FP8: besides gathering warps, these kernels have warpgroups
that decode weights to FP8 and take registers, so that the gathering warps have too few.
"""


def shipped_specs(arch: str = ARCH, profile: str = "full") -> list[Spec]:
    """Return every spec of a profile, in a fixed order, so that builds of the same sources are byte-identical.

    Args:
        arch: the architecture to build for; only the demo's specs depend on it.
        profile: one of PROFILES: "demo" (the demo's specs), "bf16" (all specs except float16) or "full" (all specs).
    """
    if profile == "demo":
        return demo_specs(arch, LARGE, glu_form)
    return [spec for spec in _all_specs() if profile == "full" or spec.dtype != "float16"]


def _all_specs() -> list[Spec]:
    specs = forward_specs(ARCH, TILES, glu_form) + backward_specs(ARCH, LARGE, WGRAD_TILES) + quantizing_specs(ARCH)
    specs += folding_specs(ARCH)
    specs += fp8_specs(ARCH, "mxfp8", TILES8, second_tile, glu_form, (False, True))
    specs += fp8_training_specs(ARCH, "mxfp8", LARGE8, DGLU8, glu_form)
    specs += fp8_specs(ARCH, "mxfp4", TILES8_W4, second_tile, glu_form, (False, True))
    specs += fp8_specs(ARCH, "fp8_block", TILES8, second_tile, glu_form, (False,))
    return specs + decoded_specs(ARCH, DECODING_TILES, glu_form, DGRAD_W) + mhc_specs(ARCH) + layer_specs(ARCH)
