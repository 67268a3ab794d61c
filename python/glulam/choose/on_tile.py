"""Make the spec of a problem's kernel on a given tile."""

from __future__ import annotations

from cute_kernels.arch import policy_of
from cute_kernels.specs import (
    ACTIVATIONS,
    GLU_LAYOUTS,
    GroupedDgluSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    QuantizeMxfp8Spec,
    Spec,
)
from cute_kernels.tiles import TileConfig, require

from .problem import Problem


def spec_on(problem: Problem, arch: str, tile: TileConfig, second: TileConfig | None = None) -> Spec:
    """Return the spec of the kernel that computes a problem on a tile.

    Args:
        problem: the problem.
        arch: the architecture.
        tile: the tile; for a grouped_mlp the tile of FC1.
        second: the tile of a grouped_mlp's FC2, of the data gradient that follows a grouped_dglu, or of a grouped_mm.
            None: the tile that ships beside `tile` (`ArchPolicy.second_tile`).

    Raises:
        SpecError: there is no such kernel.
    """
    p, second = problem, second or policy_of(arch).second_tile(tile)
    if p.op == "grouped_mm":
        return GroupedMmSpec(p.dtype, p.transpose_w, second, arch, p.operands, p.in_halves, p.adapted)
    if p.op == "grouped_glu":
        return _glu(p, tile, arch)
    if p.op == "grouped_mlp":
        fc2 = GroupedMmSpec(p.dtype, p.transpose_w, second, arch, p.fc2_operands)
        return GroupedMlpSpec(_glu(p, tile, arch), fc2, p.quantized)
    if p.op == "grouped_dglu":
        dgrad = second if p.out_features else None
        form = p.activation, p.glu_layout
        return GroupedDgluSpec(p.dtype, *form, tile, dgrad, arch, p.operands, p.transpose_w, p.adapted)
    if p.op == "grouped_wgrad":
        return GroupedWgradSpec(p.dtype, p.out_dtype, tile, arch, p.operands)
    return QuantizeMxfp8Spec(p.dtype, p.axis, arch, p.rounded)


def _glu(p: Problem, tile: TileConfig, arch: str) -> GroupedGluSpec:
    require("activation", p.activation, ACTIVATIONS)
    require("glu_layout", p.glu_layout, GLU_LAYOUTS)
    activation, layout = policy_of(arch).glu_form(
        p.activation, p.glu_layout, p.intermediate, p.operands, tile, p.save_preact, p.transpose_w
    )
    form = activation, layout, p.save_preact
    return GroupedGluSpec(p.dtype, *form, tile, arch, p.operands, p.transpose_w, p.adapted)
