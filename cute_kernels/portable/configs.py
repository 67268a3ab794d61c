"""The specs that bundles of all architectures but Hopper's own ship. Plain Python, which imports no compiler."""

from __future__ import annotations

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
# Few rows an expert: four warps multiply a quarter of the depth each, and stages are deep.
SMALL = TileConfig(m=16, n=128, k=64, schedule="warps")
TILES = (SMALL, LARGE)


def glu_form(
    activation: str, glu_layout: str, width: int, operands: str, tile: TileConfig, save_preact: bool,
    transpose_w: bool = False,
) -> tuple[str, str]:  # fmt: skip
    """Return the activations and layouts that an FC1's kernel serves, as `specs.ACTIVATION_FORMS` and `LAYOUT_FORMS`
    name them: all merged activations, gated or not, and all layouts; each layout of transposed weights has a kernel.
    """
    form = form_of_several(activation)
    if not is_gated(activation) or transpose_w:
        return form, glu_layout
    return form, "strided" if width % BLOCK_ROWS else "blocked"


def second_tile(first: TileConfig) -> TileConfig:
    """Return the tile of FC2 beside one of FC1, or of the data gradient beside one of a grouped_dglu."""
    return first


def shipped_specs(arch: str, profile: str = "full") -> list[Spec]:
    """Every spec of a profile, in a fixed order: a build of the same sources is byte-identical."""
    if profile == "demo":
        return demo_specs(arch, LARGE, glu_form)
    specs = forward_specs(arch, TILES, glu_form) + backward_specs(arch, LARGE, (LARGE,)) + quantizing_specs(arch)
    specs += decoded_specs(arch, TILES, glu_form, LARGE) + mhc_specs(arch) + layer_specs(arch)
    return [spec for spec in specs if profile == "full" or spec.dtype != "float16"]


ALLOWED_DIAGNOSTICS = {MhcSpec("project", dtype, 8, arch="sm_90").name: ("spills",) for dtype in DTYPES}
"""4 bytes in its kernel `exact` on sm_90, which serves our tests alone. Of two cures one spills 8 bytes on sm_120
(copies in shorter runs), the other 4 on sm_80 (finding the weight's places in each step)."""
