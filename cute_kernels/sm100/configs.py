"""The specs that a bundle of Blackwell's own kernels ships. Plain Python, which imports no compiler.

GEMMs of 16-bit operands are of this folder; those that decode weights are the portable ones, on their tiles.
"""

from __future__ import annotations

from ..portable import configs as portable
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
from ..specs import Spec
from ..tiles import TileConfig

# An MMA of 128 x 256 reads 192 bytes of shared memory a cycle at the tensor core's full rate, one of 128 x 128 256.
LARGE = TileConfig(m=128, n=256, k=64, schedule="tensor_memory")
# Where an expert has few rows, its weights' bytes bound the time, and narrower tiles are on twice as many SMs.
SMALL = TileConfig(m=128, n=128, k=64, schedule="tensor_memory")
TILES = (LARGE, SMALL)
# Slots of preactivations and their gradients take the shared memory of a stage.
BACKWARD = SMALL

glu_form = portable.glu_form


def shipped_specs(arch: str, profile: str = "full") -> list[Spec]:
    """Every spec of a profile, in a fixed order: a build of the same sources is byte-identical."""
    if profile == "demo":
        return demo_specs(arch, LARGE, glu_form)
    specs = forward_specs(arch, TILES, glu_form) + backward_specs(arch, BACKWARD, (LARGE,)) + quantizing_specs(arch)
    specs += decoded_specs(arch, portable.TILES, glu_form, portable.LARGE) + mhc_specs(arch) + layer_specs(arch)
    return [spec for spec in specs if profile == "full" or spec.dtype != "float16"]


ALLOWED_DIAGNOSTICS: dict[str, tuple[str, ...]] = {}
