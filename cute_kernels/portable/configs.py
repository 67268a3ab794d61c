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
    """Return the activation form and the layout form of an FC1 kernel: keys of specs.ACTIVATION_FORMS and
    specs.LAYOUT_FORMS.

    One kernel serves all merged activations, gated or not, and all layouts. With transposed weights, each layout has a
    kernel of its own. width: I.
    """
    form = form_of_several(activation)
    if not is_gated(activation) or transpose_w:
        return form, glu_layout
    return form, "strided" if width % BLOCK_ROWS else "blocked"


def second_tile(first: TileConfig) -> TileConfig:
    """Return `first`: both GEMMs of a layer (FC1 and FC2, or grouped_dglu and the data gradient) have the same tile."""
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
"""Compiler diagnostics that a build accepts, by spec name. Here: 4 spilled bytes in the kernel `exact` on sm_90, which
only our tests run. The two known remedies spill elsewhere: copies in shorter runs spill 8 bytes on sm_120, finding the
weight's places in each step 4 bytes on sm_80."""
