"""The last step of the projection's backward for float32 streams: makes d_weight and the gates' gradients."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.target import early, wait_for_earlier
from ..device.vectors import run_at, store_params
from ..device.warps import WARP
from .gates_backward import GateRows, GateSums


class PartSums(Invariant):
    """Kernel that makes d_weight by adding in order the sums of all parts (ranges) of the tokens: out[i] = sum over
    parts of partials[part, i].

    Each thread has four elements of out. One more CTA, the last, adds the gates' sums (`GateSums`) at the same time.
    """

    RUN = 4
    WARPS = 16

    def __init__(self, name: str, n: int):
        self.name = name
        self.gate_sums = GateSums(n, self.WARPS)

    @cute.jit
    def launch(
        self, partials: Int64, parts: Int32, size: Int32, out: Int64, code: Int32, rows: GateRows,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the kernel.

        Args:
            partials: the address of float32 [parts, size].
            out: the address of the result; 0: not wanted; then only the gates' sums are added.
            size: elements of out.
            code: the dtype of out.
            rows: the gates' partial sums over tokens, and where the gradients of bias and alphas go.
        """
        ctas, threads = Int32(0), self.WARPS * WARP
        if out != 0:
            ctas = cute.ceil_div(size, threads * self.RUN)
        name_kernel(self.kernel, self.name)
        self.kernel(partials, parts, size, out, code, rows).launch(
            grid=(ctas + 1, 1, 1),
            block=(threads, 1, 1),
            smem=self.gate_sums.smem_bytes,
            stream=stream,
            use_pdl=early(True),
        )

    @cute.kernel
    def kernel(self, partials: Int64, parts: Int32, size: Int32, out: Int64, code: Int32, rows: GateRows):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        first = (block * (self.WARPS * WARP) + thread) * self.RUN
        wait_for_earlier()
        if block == blocks - 1:
            self.gate_sums.add(rows)
        elif first < size:
            total = cute.make_rmem_tensor(self.RUN, Float32)
            total.fill(0.0)
            for part in cutlass.range(parts, unroll=4):
                total.store(total.load() + run_at(Float32, partials, Int64(part) * size + first, self.RUN).load())
            store_params(out, code, Int64(first), total)
