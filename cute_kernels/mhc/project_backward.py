"""The projection's backward, in one read of x: d_x = dp weight + f x (+ addends), d_weight = dp^T x.

T tokens have n residual streams of C columns each: x is [T, n C]. dp is the gradient of p = x weight^T, which has K =
n^2 + 2n outputs a token. f is a factor of each token that comes from the norm of x. The addends are further terms of
d_x (`Streams`). gates_backward.py makes dp and f, then a kernel reads x: project_tiles.py for 16-bit streams,
project_vectors.py for float32 streams. It divides the tokens into parts, each with sums of its own for d_weight. A last
kernel adds them in order (tile_sums.py, part_sums.py).
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..device.invariant import Invariant
from ..device.vectors import F32, dtype_code
from ..specs import MhcSpec
from ..tracing import DTYPES, Traced, traced
from .gates import Gates
from .gates_backward import GateInputs, GateRows, GatesBackward
from .part_sums import PartSums
from .project_tiles import Products as TileProducts
from .project_tiles import Streams, TileGradients
from .project_vectors import Products, VectorGradients
from .shapes import backward_workspace, outputs
from .tile_sums import TileSums
from .warp_columns import WarpColumns


class ProjectBackward(Invariant):
    """Host function of the backward of `project` (project.py: p = x weight^T, then norm and gates).

    Results: d_x and d_weight (address 0: not wanted); d_sums, float32 [K + 3], the gradients of the bias and of the
    three alphas.

    Args:
        workspace: the address of the workspace (`shapes.backward_workspace` has its size and arrays).
        ctas: number of CTAs of the gates' kernel (`shapes.gate_ctas`).
        parts: number of parts of the tokens (`shapes.spread_splits`).

    Attributes:
        addends: True: two terms are added to d_x: h_pre d_aggregate, which is the gradient through `aggregate`, and
            d_residual. This saves a layer's backward three passes over the streams.
    """

    addends = False

    def __init__(self, name: str, dtype: type[cutlass.Numeric], n: int):
        self.n = n
        self.itemsize = dtype.width // 8
        self.outputs = outputs(n)
        if self.itemsize == 2:
            # With addends, neighbouring warps have the same columns of different streams, so that d_aggregate is read
            # once.
            self.tile_sums = TileSums(f"{name}_weight", n, WarpColumns(n, side_by_side=not self.addends))
            self.rounded: Any = TileGradients(name, dtype, n, self.addends, False, self.tile_sums)
            self.exact: Any = TileGradients(f"{name}_exact", dtype, n, self.addends, True, self.tile_sums)
            self.gates = GatesBackward(f"{name}_gates", dtype, n, self.rounded.carveout)
        else:
            self.part_sums = PartSums(f"{name}_weight", n)
            self.rounded = VectorGradients(name, n, self.addends, is_exact=False)
            self.exact = VectorGradients(f"{name}_exact", n, self.addends, is_exact=True)
            self.gates = GatesBackward(f"{name}_gates", dtype, n)

    @cute.jit
    def __call__(
        self, d_pre: Int64, d_post: Int64, d_res: Int64, x: Int64, weight: Int64, alpha_pre: Int64, alpha_post: Int64,
        alpha_res: Int64, bias: Int64, stats: Int64, d_aggregate: Int64, h_pre: Int64, d_residual: Int64, d_x: Int64,
        d_weight: Int64, d_sums: Int64, workspace: Int64, forms: Int32, tokens: Int32, width: Int32, ctas: Int32,
        parts: Int32, eps: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        place = backward_workspace(self.n, self.itemsize, Int64(width), Int64(tokens), Int64(ctas), Int64(parts))
        columns = width * self.n
        at = tuple(workspace + p for p in (place.products, place.pairs, place.norms, place.sums))
        weights = Int64(0)
        if d_weight != 0:
            weights = workspace + place.weights
        if tokens > 0:
            gates, code = Gates(alpha_pre, alpha_post, alpha_res, bias, forms, eps), dtype_code(forms, 0)
            inputs, halves = GateInputs(d_pre, d_post, d_res, stats), Int32(1)
            if code == F32:
                halves = Int32(2)
            self.gates.launch(inputs, gates, at, halves, tokens, columns, ctas, stream)
            streams = Streams(x, d_x, d_aggregate, h_pre, d_residual, tokens, width)
            rows = GateRows(at[3], ctas, d_sums)
            if const_expr(self.gates.in_blocks):
                products = TileProducts(at[0], weights)
                if code == F32:
                    self.exact.launch(streams, products, rows, weight, code, parts, stream)
                else:
                    self.rounded.launch(streams, products, rows, weight, code, parts, stream)
                if d_weight != 0:
                    self.tile_sums.launch(weights, parts, width, d_weight, code, stream)
            else:
                words = Products(at[0], at[1], at[2], weights)
                if code == F32:
                    self.exact.launch(streams, words, weight, code, parts, stream)
                else:
                    self.rounded.launch(streams, words, weight, code, parts, stream)
                self.part_sums.launch(weights, parts, columns * self.outputs, d_weight, code, rows, stream)


class PreBackward(ProjectBackward):
    """The projection's backward with addends, so that d_x is the whole gradient of a layer's streams."""

    addends = True


KERNELS = {"project_backward": ProjectBackward, "pre_backward": PreBackward}


def trace(spec: MhcSpec) -> Traced:
    return traced(spec, KERNELS[spec.kernel](spec.name, DTYPES[spec.dtype], spec.n))
