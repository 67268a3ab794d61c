"""Order of tiles in Blackwell's GEMMs: each CTA's tiles are fixed, without tickets. Plain Python, since the host needs
the order, too.
"""

from __future__ import annotations

from ..gemms import GemmPolicy
from ..sm90.gemm_policy import WGRAD_LIGHT_ROWS
from ..specs import DgluSpec, GemmSpec, GroupedWgradSpec, WgradSpec


def gemm_policy(spec: GemmSpec) -> GemmPolicy:
    """Return a GEMM's choices at compile time. Weight gradients mix tiles of light groups (at most WGRAD_LIGHT_ROWS
    rows) and heavy groups. All other GEMMs except grouped_dglu make weights that are read once the first to leave L2.
    Portable GEMMs do neither."""
    if spec.tile.by_warps:
        return GemmPolicy()
    if isinstance(spec, (GroupedWgradSpec, WgradSpec)):
        return GemmPolicy(light_rows=WGRAD_LIGHT_ROWS)
    return GemmPolicy(evicts_weights=not isinstance(spec, DgluSpec))
