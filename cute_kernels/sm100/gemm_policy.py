"""Compile-time choices of Blackwell's GEMMs: order of tiles and L2 policy. Each CTA's tiles are fixed (no tickets).

Plain Python, since the host needs the choices, too.
"""

from __future__ import annotations

from ..gemms import GemmPolicy
from ..sm90.gemm_policy import WGRAD_LIGHT_ROWS
from ..specs import DgluSpec, GemmSpec, GroupedWgradSpec, WgradSpec


def gemm_policy(spec: GemmSpec) -> GemmPolicy:
    """Return a GEMM's choices at compile time.

    Weight gradients mix tiles of light groups (at most WGRAD_LIGHT_ROWS rows) with tiles of heavy groups. Other GEMMs
    except grouped_dglu load weights that are read once with the L2 policy evict-first. Portable GEMMs do neither.
    """
    if spec.tile.by_warps:
        return GemmPolicy()
    if isinstance(spec, (GroupedWgradSpec, WgradSpec)):
        return GemmPolicy(light_rows=WGRAD_LIGHT_ROWS)
    return GemmPolicy(evicts_weights=not isinstance(spec, DgluSpec))
