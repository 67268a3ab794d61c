"""How Hopper's GEMMs go through their tiles. Plain Python: the host asks, too."""

from __future__ import annotations

from ..epilogue.sizes import ROWS
from ..formats import OPERANDS
from ..gemms import GemmPolicy as GemmPolicy
from ..specs import DgluSpec, GemmSpec, GroupedGluSpec, GroupedMmSpec, GroupedWgradSpec, WgradSpec

# At most, of a group whose weights take longer to come from memory than to be multiplied. With 128, gpt-oss-120b is as
# fast under skew, and DeepSeek-V3 and Qwen3-235B are 1 to 3 % slower.
LIGHT_ROWS = 64
# Of a weight gradient: an SM's share of memory's bandwidth stores a 16-bit tile in the time of as many rows' MMAs. With
# twice as many, results of 32 bits are up to 3 % slower.
WGRAD_LIGHT_ROWS = 160
# Shallower contractions end before the next ticket is there: with 512 columns, tiles in a fixed order are 3 % faster.
MIN_TICKET_DEPTH = 768


def _evicts_weights(spec: GroupedMmSpec | GroupedGluSpec | DgluSpec) -> bool:
    """Beside an epilogue's own loads it costs more than it brings (grouped_dglu: 1 % but where groups are small). In
    MXFP8 the branch costs tiles of many rows 1 %, and those of few gain 2 to 3."""
    if not OPERANDS[spec.operands].w.scale:
        return not isinstance(spec, DgluSpec)
    return spec.tile.m <= ROWS


def _skips_half_tiles(spec: GroupedMmSpec | GroupedGluSpec | DgluSpec) -> bool:
    """Not where weights are contracted over their rows: contractions are longer there, and CTAs that leave step share
    less of their operands in L2 (0.92 of the speed on gpt-oss-120b, Dirichlet 0.5)."""
    over_rows = spec.transpose_w != isinstance(spec, DgluSpec)
    return spec.tile.takes_turns and spec.tile.slabs == 2 and not over_rows


def gemm_policy(spec: GemmSpec) -> GemmPolicy:
    """That of a stage."""
    if isinstance(spec, (GroupedWgradSpec, WgradSpec)):
        return GemmPolicy(light_rows=WGRAD_LIGHT_ROWS)
    # An epilogue with loads of its own has no registers for two walks, and gains nothing (grouped_dglu).
    tickets = spec.tile.adaptive and not isinstance(spec, DgluSpec)
    light_rows = LIGHT_ROWS if tickets else 0
    return GemmPolicy(tickets, light_rows, _evicts_weights(spec), _skips_half_tiles(spec))
