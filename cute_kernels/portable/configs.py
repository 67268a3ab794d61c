"""The kernels (specs) that ship for architectures with portable kernels. Plain Python, which imports no compiler."""

from __future__ import annotations

from ..formats import DECODED
from ..shipped import PROFILES as PROFILES
from ..shipped import (
    backward_specs,
    decoded_specs,
    demo_specs,
    forward_specs,
    layer_specs,
    mhc_specs,
    quantizing_specs,
)
from ..specs import BLOCK_ROWS, DTYPES, MhcSpec, Spec, form_of_several, is_gated
from ..tiles import TileConfig

LARGE = TileConfig(m=128, n=128, k=64, schedule="warps")
# For few rows an expert: each of four warps multiplies a quarter of a stage's depth.
SMALL = TileConfig(m=16, n=128, k=64, schedule="warps")
TILES = (SMALL, LARGE)


def glu_form(
    activation: str, glu_layout: str, width: int, operands: str, tile: TileConfig, save_preact: bool,
    transpose_w: bool = False,
) -> tuple[str, str]:  # fmt: skip
    """Return which FC1 kernel computes an activation and a gate layout, as (activation form, layout form): keys of
    specs.ACTIVATION_FORMS and specs.LAYOUT_FORMS.

    A form is a set of activations or layouts for which there is one kernel. If the set has several members, the kernel
    chooses among them at run time. Merged activations share a kernel (`formulas.Formula.is_merged`).

        activations    one form for all merged activations that have a gate, another for all merged activations that
                       have none; each other activation is a form of its own
        layouts        "blocked": every gate layout, if I is a multiple of 32. "strided": "concat" and "interleaved",
                       for any other I. With transposed weights, each gate layout is a form of its own.

    Args:
        activation, glu_layout: the activation's name, and the order of the gate's weight rows.
        width: I.
        operands, tile, save_preact: not used; other architectures have kernels that depend on them.
        transpose_w: True: weights are [E, K, N].
    """
    form = form_of_several(activation)
    if not is_gated(activation) or transpose_w:
        return form, glu_layout
    return form, "strided" if width % BLOCK_ROWS else "blocked"


def second_tile(first: TileConfig) -> TileConfig:
    """Return `first`: both GEMMs of a layer (FC1 and FC2, or grouped_dglu and the data gradient) use the same tile."""
    return first


def shipped_specs(arch: str, profile: str = "full") -> list[Spec]:
    """Return the specs of a profile (one of PROFILES), in a fixed order, so that a build of the same sources is
    byte-identical."""
    if profile == "demo":
        return demo_specs(arch, LARGE, glu_form)
    specs = forward_specs(arch, TILES, glu_form) + backward_specs(arch, LARGE, (LARGE,)) + quantizing_specs(arch)
    specs += decoded_specs(arch, dict.fromkeys(DECODED, TILES), glu_form, LARGE) + mhc_specs(arch) + layer_specs(arch)
    return [spec for spec in specs if profile == "full" or spec.dtype != "float16"]


ALLOWED_DIAGNOSTICS = {MhcSpec("project", dtype, 8, arch="sm_90").name: ("spills",) for dtype in DTYPES}
"""Compiler diagnostics that a build accepts, by spec name.

On sm_90, the mHC kernel "project" for 8 streams spills 4 bytes in its kernel for float32 weights
(mhc/project_exact.py). Only our tests run the kernels of sm_90. The two known remedies spill on other architectures:
copying in shorter runs spills 8 bytes on sm_120; computing the weight's addresses anew in each step spills 4 bytes on
sm_80.
"""
