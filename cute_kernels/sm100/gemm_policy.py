"""Order of tiles in Blackwell's GEMMs: fixed for each CTA. Plain Python, since the host asks, too."""

from __future__ import annotations

from ..gemms import GemmPolicy
from ..sm90.gemm_policy import WGRAD_LIGHT_ROWS
from ..specs import DgluSpec, GemmSpec, GroupedWgradSpec, WgradSpec


def gemm_policy(spec: GemmSpec) -> GemmPolicy:
    if spec.tile.by_warps:
        return GemmPolicy()
    if isinstance(spec, (GroupedWgradSpec, WgradSpec)):
        return GemmPolicy(light_rows=WGRAD_LIGHT_ROWS)
    return GemmPolicy(evicts_weights=not isinstance(spec, DgluSpec))
