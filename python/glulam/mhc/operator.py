"""What the hyper-connection operators have in common; see `glulam.addressed`."""

from __future__ import annotations

from cute_kernels.specs import MhcSpec

from ..addressed import Layout, Operator


class MhcOperator(Operator):
    """One kernel. A token's tensors begin with the dimensions of the streams but for [n, C]; parameters are shared."""

    family = "mhc"
    trailing = 2
    shared = frozenset(("weight", "alpha_pre", "alpha_post", "alpha_res", "bias"))

    def spec(self, layout: Layout, arch: str) -> MhcSpec:
        dtype = "float32" if "sinkhorn" in layout.kernel else str(layout.lead.dtype).removeprefix("torch.")
        return MhcSpec(layout.kernel, dtype, layout.n, arch)
