"""The activation of a preactivation, and its gradient, row by row. These kernels serve GEMMs without an activation in
the epilogue.

    act = f(a, u) s        dpreact = (d s f_a, d s f_u)        d_s[row] = sum over i of d_i f_i

f is the activation, and f_a, f_u are its derivatives. s is the row's scale. d is the gradient of act, d_s the gradient
of s; i counts columns. h is the preactivation (a, u), [T, 2I] with a gate, [T, I] without.

A CTA has a row. A thread has a vector of 16 bytes of act at a time, and the columns of h that it comes from. Memory
bounds both kernels: with a gate and 16-bit numbers, an element of act takes 6 bytes forward, 10 backward.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from .. import activation as act
from ..activation import ActivationParams
from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.select import select
from ..device.vectors import elements, floats, load_vector, store_vector
from ..specs import BLOCK_ROWS, GATED, KINDS, LAYOUTS, UNGATED, LayerSpec
from ..tracing import DTYPES, Traced, traced

THREADS = 128
WARPS = THREADS // 32


class _Gate(Invariant):
    """Base of the forward and backward kernels. Both have a CTA for each row of act."""

    kernel: Any

    def __init__(self, spec: LayerSpec):
        self.name = spec.name
        self.dtype = DTYPES[spec.dtype]
        self.count = elements(self.dtype)

    def _launch(self, arguments: tuple, tokens: Int32, stream: cuda.CUstream) -> None:
        name_kernel(self.kernel, self.name)
        self.kernel(*arguments).launch(grid=(tokens, 1, 1), block=(THREADS, 1, 1), stream=stream)

    def _places(self, vector: Int32, vectors: Int32, glu_layout: Int32) -> tuple[Int32, Int32]:
        """Return where a and u of a vector of act lie: the positions of two vectors in a row of the preactivation h.

        Positions count vectors of 16 bytes. In layout "interleaved", a and u alternate in both vectors (see `_halves`).

        Args:
            vector: the number of the vector in its row of act.
            vectors: the length of a row of act, in vectors.
            glu_layout: an index of LAYOUTS.
        """
        of_block = BLOCK_ROWS // self.count
        in_blocks = vector // of_block * (2 * of_block) + vector % of_block
        is_concat, is_blocked = glu_layout == LAYOUTS["concat"], glu_layout == LAYOUTS["interleaved32"]
        first = select(is_concat, vector, select(is_blocked, in_blocks, 2 * vector))
        second = select(is_concat, vectors + vector, select(is_blocked, in_blocks + of_block, 2 * vector + 1))
        return first, second

    def _halves(self, first: cute.Tensor, second: cute.Tensor, is_mixed: Boolean) -> tuple[cute.Tensor, cute.Tensor]:
        """Return a vector of a and a vector of u (the activated and the linear half of a gate), made from two loaded
        vectors of the preactivation h.

        In layout "interleaved" (`is_mixed`), a is the even elements of both vectors and u the odd elements. In other
        layouts, a is the first vector and u the second.
        """
        a, u = (cute.make_rmem_tensor(self.count, Float32) for _ in range(2))
        both = [one[i] for one in (first, second) for i in range(self.count)]
        for i in range(self.count):
            a[i] = select(is_mixed, both[2 * i], first[i])
            u[i] = select(is_mixed, both[2 * i + 1], second[i])
        return a, u

    def _in_turns(self, a: cute.Tensor, u: cute.Tensor, is_mixed: Boolean) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the two vectors of the preactivation's gradient to store, made from the gradients of a and u. This is
        the inverse of `_halves`.

        is_mixed: True: layout "interleaved".
        """
        first, second = (cute.make_rmem_tensor(self.count, Float32) for _ in range(2))
        turns = [(a, u)[i % 2][i // 2] for i in range(2 * self.count)]
        for i in range(self.count):
            first[i] = select(is_mixed, turns[i], a[i])
            second[i] = select(is_mixed, turns[self.count + i], u[i])
        return first, second

    def _is_gated(self, params: ActivationParams) -> Boolean:
        found = params.kind == KINDS[GATED[0]]
        for name in GATED[1:]:
            found = found | (params.kind == KINDS[name])
        return found

    def _load(self, address: Int64, index: Int64) -> cute.Tensor:
        return floats(load_vector(self.dtype, address, index))


class Gate(_Gate):
    """Forward kernel: makes act from the preactivation.

    row_scale: 0: rows are not scaled. width: I.
    """

    @cute.jit
    def __call__(
        self, preact: Int64, row_scale: Int64, out: Int64, tokens: Int32, width: Int32, kind: Int32, glu_layout: Int32,
        limit: Float32, alpha: Float32, offset: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            params = ActivationParams(kind, (limit, alpha, offset))
            self._launch((preact, row_scale, out, width // self.count, params, glu_layout), tokens, stream)

    @cute.kernel
    def kernel(
        self, preact: Int64, scale: Int64, out: Int64, vectors: Int32, params: ActivationParams, glu_layout: Int32
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        factor = Float32(1.0)
        if scale != 0:
            factor = vector_at(Float32, scale)[row]
        for vector in cutlass.range(thread, vectors, THREADS, unroll=1):
            index = Int64(row) * vectors + vector
            values = cute.make_rmem_tensor(self.count, Float32)
            if self._is_gated(params):
                first, second = self._places(vector, vectors, glu_layout)
                begin = Int64(row) * (2 * vectors)
                two = self._load(preact, begin + first), self._load(preact, begin + second)
                a, u = self._halves(*two, glu_layout == LAYOUTS["interleaved"])
                values.store(act.activate_one_of(GATED, (a, u), params).load())
            else:
                values.store(act.activate_one_of(UNGATED, (self._load(preact, index),), params).load())
            for i in cutlass.range_constexpr(self.count):
                values[i] *= factor
            store_vector(self.dtype, out, index, values)


class GateBackward(_Gate):
    """Backward kernel: makes dpreact and, if the address d_row_scale is not 0, d_s, the gradient of the row scale.

    width: I.
    """

    @cute.jit
    def __call__(
        self, d_act: Int64, preact: Int64, row_scale: Int64, d_preact: Int64, d_row_scale: Int64, tokens: Int32,
        width: Int32, kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32, offset: Float32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            params = ActivationParams(kind, (limit, alpha, offset))
            vectors = width // self.count
            self._launch((d_act, preact, row_scale, d_preact, d_row_scale, vectors, params, glu_layout), tokens, stream)

    @cute.kernel
    def kernel(
        self, d_act: Int64, preact: Int64, scale: Int64, d_preact: Int64, d_scale: Int64, vectors: Int32,
        params: ActivationParams, glu_layout: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        factor, total = Float32(1.0), cute.make_rmem_tensor(1, Float32)
        total[0] = Float32(0.0)
        if scale != 0:
            factor = vector_at(Float32, scale)[row]
        for vector in cutlass.range(thread, vectors, THREADS, unroll=1):
            index = Int64(row) * vectors + vector
            dm = self._load(d_act, index)
            if self._is_gated(params):
                first, second = self._places(vector, vectors, glu_layout)
                begin = Int64(row) * (2 * vectors)
                two = self._load(preact, begin + first), self._load(preact, begin + second)
                is_mixed = glu_layout == LAYOUTS["interleaved"]
                parts = self._halves(*two, is_mixed)
                self._through(GATED, parts, dm, factor, total, params)
                two = self._in_turns(*parts, is_mixed)
                store_vector(self.dtype, d_preact, begin + first, two[0])
                store_vector(self.dtype, d_preact, begin + second, two[1])
            else:
                alone = self._load(preact, index)
                self._through(UNGATED, (alone,), dm, factor, total, params)
                store_vector(self.dtype, d_preact, index, alone)
        if d_scale != 0:
            self._store_sum(total[0], d_scale, row)

    @cute.jit
    def _through(
        self, names: cutlass.Constexpr, parts: tuple, dm: cute.Tensor, factor: Float32, total: cute.Tensor,
        params: ActivationParams,
    ):  # fmt: skip
        """Replace `parts`, [a, u] or [a], by their gradients, for the activation that `params` selects among `names`.

        Args:
            dm: the gradient of act.
            factor: the row's scale.
            total: a tensor of one element, to which the vector's contribution to d_s is added.
        """
        if const_expr(len(names) == 1):
            self._fill(names[0], parts, dm, factor, total, params)
        elif params.kind == KINDS[names[0]]:
            self._fill(names[0], parts, dm, factor, total, params)
        else:
            self._through(names[1:], parts, dm, factor, total, params)

    def _fill(
        self, name: str, parts: tuple, dm: cute.Tensor, factor: Float32, total: cute.Tensor, params: ActivationParams
    ) -> None:  # fmt: skip
        for i in range(self.count):
            value, *slopes = act.slopes(name, [part[i] for part in parts], params)
            total[0] += dm[i] * value
            for part, slope in zip(parts, slopes, strict=True):
                part[i] = dm[i] * factor * slope

    @cute.jit
    def _store_sum(self, total: Float32, d_scale: Int64, row: Int32):
        """Add `total` over the CTA's threads, in a fixed order, and store the sum as d_scale[row]."""
        thread, _, _ = cute.arch.thread_idx()
        sums = cutlass.utils.SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS))
        of_warp = cute.arch.warp_reduction(total, lambda x, y: x + y)
        if thread % 32 == 0:
            sums[thread // 32] = of_warp
        cute.arch.sync_threads()
        if thread == 0:
            whole = sums[0]
            for warp in cutlass.range_constexpr(1, WARPS):
                whole += sums[warp]
            vector_at(Float32, d_scale)[row] = whole


KERNELS = {"gate": Gate, "gate_backward": GateBackward}


def trace(spec: LayerSpec) -> Traced:
    return traced(spec, KERNELS[spec.kernel](spec))
