"""What a sub-layer needs before it runs: coefficients from the streams, Sinkhorn, and the streams' weighted sum."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...invariant import Invariant
from .aggregate import Aggregate
from .gates import Gates
from .project import Project
from .sinkhorn import Sinkhorn


class Pre(Invariant):
    """out = aggregate(x, h_pre) with h_pre, h_post and logits = project(x), and h_res = sinkhorn(logits): one call.

    The streams are read twice: all of a token's columns must be seen before the first is weighed, and the tokens in
    flight do not fit the L2 cache. The kernels are those of the operators, one after the other.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.n = n
        self.project = Project(f"{name}_project", dtype, n)
        self.sinkhorn = Sinkhorn(f"{name}_sinkhorn", dtype, n)
        self.aggregate = Aggregate(f"{name}_aggregate", dtype, n)

    @cute.jit
    def __call__(
        self, x: Int64, weight: Int64, alpha_pre: Int64, alpha_post: Int64, alpha_res: Int64, bias: Int64, out: Int64,
        h_post: Int64, h_res: Int64, h_pre: Int64, logits: Int64, stats: Int64, workspace: Int64, forms: Int32,
        tokens: Int32, width: Int32, slices: Int32, slice_columns: Int32, groups: Int32, iters: Int32, num_sms: Int32,
        eps: Float32, sinkhorn_eps: Float32, do_launch: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        gates = Gates(alpha_pre, alpha_post, alpha_res, bias, forms, eps)
        if do_launch > 0:
            self.project.launch(
                x, weight, gates, (h_pre, h_post, logits, stats), workspace, tokens, width,
                (slices, slice_columns, groups), num_sms, stream,
            )  # fmt: skip
            self.sinkhorn.launch(logits, h_res, Int32(0), tokens, iters, sinkhorn_eps, stream)
            self.aggregate.launch(x, h_pre, out, Int32(0), tokens, width, stream)
