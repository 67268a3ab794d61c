"""The backward operator of `boundary`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cute_kernels.architectures import ARCHS
from cute_kernels.mhc import boundary_backward_shapes as backward_shapes
from cute_kernels.mhc import boundary_shapes, shapes

from ..calls.addressed import Like, like
from ..calls.front import operator
from . import boundary_reference as reference
from .call import MhcCall, sms_to_cut_by
from .project import accumulator

SCALES = 3


def _cut(call: Any) -> dict[str, Any]:
    (n, width), tokens = call.streams.shape[-2:], call.num_rows
    cta = backward_shapes.slice_cta(n, ARCHS[call.gpu.arch].smem_bytes - boundary_shapes.RESERVED_BYTES)
    cut = backward_shapes.backward_cut(cta, width, tokens, sms_to_cut_by(call))
    return {**cut._asdict(), "workspace": backward_shapes.backward_workspace(n, cta, width, tokens, *cut).end // 4}


class BoundaryBackwardCall(MhcCall):
    """A call of boundary_backward."""

    op, kernel = "boundary", "boundary_backward"
    leads = "streams"
    shared = frozenset(("weight", "scale", "base", "norm_weight"))
    unaligned = frozenset(("scale",))
    formed = ("weight", "scale", "base", "norm_weight")
    returns = ("d_y", "d_streams", "d_pre", "d_post", "d_comb", "d_weight", "d_norm_weight", "d_sums")
    on_cpu = staticmethod(reference.boundary_backward)
    definition = MhcCall.definition.extended(
        of_rows=(_cut,), cuts="tokens, for parameters' gradients, into parts, by the number of SMs"
    )

    def likes(self) -> Sequence[Like | None]:
        sums = ((shapes.outputs(self.streams.shape[-2]) + SCALES,), accumulator(self.streams))
        given = (self.y, self.streams, self.pre, self.post, self.comb, self.weight, self.norm_weight)
        return [*map(like, given), sums]


@operator(BoundaryBackwardCall)
def boundary_backward(
    d_new_streams: Tensor | None, d_x: Tensor | None, d_new_pre: Tensor | None, d_new_post: Tensor | None,
    d_new_comb: Tensor | None, y: Tensor | None, streams: Tensor, pre: Tensor, post: Tensor | None,
    comb: Tensor | None, weight: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor, x: Tensor, stats: Tensor,
    eps: float, iters: int, of_y: bool, of_streams: bool, of_pre: bool, of_post: bool, of_comb: bool, of_weight: bool,
    of_norm_weight: bool,
) -> Any:  # fmt: skip
    """Return (d_y, d_streams, d_pre, d_post, d_comb, d_weight, d_norm_weight, d_sums).

    d_sums holds the gradients of base, then of scale, in the dtype in which `boundary` adds (`accumulator`). Each of
    the others is None if its flag `of_...` is False.

    Args:
        d_new_streams, d_x, d_new_pre, d_new_post, d_new_comb: gradients of boundary's results. None: there is none.
        x, stats: results of `boundary_streams`: the next sublayer's input [..., D]; norms and projections of each token
            [..., n * n + 2 n + 2], for n streams.
        Others: see `boundary`. If y is None, of_y, of_post and of_comb must be False. If d_x is None, of_pre and
            of_norm_weight must be False.
    """
