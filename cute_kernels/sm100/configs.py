"""The kernels (specs) that ship in a bundle, a compiled library, for sm_100a or sm_103a.

GEMMs of 16-bit and of MXFP8 operands are kernels of this folder. GEMMs that decode weights are portable kernels, with
the tiles of portable/configs.py. Plain Python, which imports no compiler.
"""

from __future__ import annotations

from itertools import product

from ..formats import DECODED
from ..portable import configs as portable
from ..shipped import PROFILES as PROFILES
from ..shipped import (
    backward_specs,
    decoded_specs,
    demo_specs,
    forward_specs,
    fp8_specs,
    fp8_training_specs,
    fp8_wgrad_specs,
    layer_specs,
    mhc_specs,
    quantizing_specs,
)
from ..specs import DTYPES, GroupedGluSpec, Spec
from ..tiles import TileConfig

# At the tensor core's full rate an MMA of 128 x 256 reads 96 bytes of shared memory a cycle, an MMA of 128 x 128 reads
# 128 bytes, which is the most that an SM can read.
LARGE = TileConfig(m=128, n=256, k=64, schedule="tensor_memory")
# If an expert has few rows, its weights' bytes bound the time, and narrower tiles fill twice as many SMs.
SMALL = TileConfig(m=128, n=128, k=64, schedule="tensor_memory")
TILES = (LARGE, SMALL)
# Slots of preactivations and their gradients take the shared memory of a stage.
BACKWARD = SMALL
# Two accumulators of 256 columns would fill tensor memory and leave no columns for scales.
LARGE8 = TileConfig(m=128, n=128, k=128, schedule="tensor_memory")

glu_form, second_tile = portable.glu_form, portable.second_tile


def shipped_specs(arch: str, profile: str = "full") -> list[Spec]:
    """Return the specs of a profile (one of PROFILES), in a fixed order, so that a build of the same sources is
    byte-identical."""
    if profile == "demo":
        return demo_specs(arch, LARGE, glu_form)
    specs = forward_specs(arch, TILES, glu_form) + backward_specs(arch, BACKWARD, (LARGE,)) + quantizing_specs(arch)
    specs += fp8_specs(arch, "mxfp8_blocks", (LARGE8,), second_tile, glu_form, (False, True))
    specs += fp8_training_specs(arch, "mxfp8_blocks", LARGE8, LARGE8, glu_form)
    specs += fp8_wgrad_specs(arch, "mxfp8_blocks", LARGE8)
    specs += decoded_specs(arch, dict.fromkeys(DECODED, portable.TILES), glu_form, portable.LARGE)
    specs += mhc_specs(arch) + layer_specs(arch)
    return [spec for spec in specs if profile == "full" or spec.dtype != "float16"]


_SPILLING = [
    GroupedGluSpec(dtype, "situ", layout, True, LARGE, arch, transpose_w=transposed)
    for dtype, arch, (layout, transposed) in product(
        DTYPES, ("sm_100a", "sm_103a"), (("interleaved", True), ("strided", False))
    )
]
ALLOWED_DIAGNOSTICS = {spec.name: ("spills",) for spec in _SPILLING}
"""Compiler diagnostics that a build accepts, by spec name.

In a kernel that has warps to gather rows, an epilogue's threads have only 208 registers each. This is too few for these
kernels, which spill once a tile.
"""
