"""Compile-time choices of Hopper's GEMMs: the order of their tiles, MMAs that they skip, and their L2 policy.

Plain Python: host code uses it, too.
"""

from __future__ import annotations

from ..epilogue.sizes import ROWS
from ..formats import OPERANDS
from ..gemms import GemmPolicy as GemmPolicy
from ..specs import DgluSpec, GemmSpec, GroupedGluSpec, GroupedMmSpec, GroupedWgradSpec, WgradSpec

# A group is light if it has at most this many rows: loading its weights from memory then takes longer than the MMAs.
# With 128 instead of 64, gpt-oss-120b is as fast under skew, and DeepSeek-V3 and Qwen3-235B are 1 to 3 % slower.
LIGHT_ROWS = 64
# The same limit for weight gradients: the MMAs of this many rows take as long as storing a 16-bit tile at an SM's share
# of the memory bandwidth. With twice as many, 32-bit results are up to 3 % slower.
WGRAD_LIGHT_ROWS = 160
# Shallower contractions end before the next ticket arrives: with K = 512, tiles in a fixed order are 3 % faster.
MIN_TICKET_DEPTH = 768


def _evicts_weights(spec: GroupedMmSpec | GroupedGluSpec | DgluSpec) -> bool:
    """Return True if the kernel loads weights that it reads once with the L2 policy evict-first.

    16-bit kernels do, except grouped_dglu: its epilogue loads further tensors, and the policy costs 1 % there, except
    if groups are small. Kernels of weights that have scales do so only with tiles of at most 64 rows: in MXFP8, tiles
    with few rows gain 2 to 3 %, but the run-time branch costs tiles with more rows 1 %.
    """
    if not OPERANDS[spec.operands].w.scale:
        return not isinstance(spec, DgluSpec)
    return spec.tile.m <= ROWS


def _skips_half_tiles(spec: GroupedMmSpec | GroupedGluSpec | DgluSpec) -> bool:
    """Return True if the kernel skips the MMAs of a tile's second 64 rows when the group has no rows there.

    Kernels that contract over weight rows do not skip them. Their contractions are longer, so that CTAs fall out of
    step and share less of their operands in L2: with skipping, gpt-oss-120b with Dirichlet(0.5) routing reached only
    0.92 of the speed.
    """
    over_rows = spec.transpose_w != isinstance(spec, DgluSpec)
    return spec.tile.takes_turns and spec.tile.slabs == 2 and not over_rows


def gemm_policy(spec: GemmSpec) -> GemmPolicy:
    """Return a GEMM kernel's choices at compile time (`gemms.GemmPolicy`): order of tiles, L2 policy, skipped MMAs."""
    if isinstance(spec, (GroupedWgradSpec, WgradSpec)):
        return GemmPolicy(light_rows=WGRAD_LIGHT_ROWS)
    # grouped_dglu loads tensors in its epilogue: it has no registers for a scheduler that walks light and heavy groups,
    # and would gain nothing.
    tickets = spec.tile.adaptive and not isinstance(spec, DgluSpec)
    light_rows = LIGHT_ROWS if tickets else 0
    return GemmPolicy(tickets, light_rows, _evicts_weights(spec), _skips_half_tiles(spec))
