"""MMAs of one warp (mma.sync), with operands as 32-bit words. A word is two 16-bit elements, or one TF32 number.

Let g = lane / 4 and t = lane % 4. A place is the part of the contraction that one word holds: two 16-bit elements, or
one of TF32. An MMA has depth 16 (TF32: 8), so 8 places. It takes from a lane

    a   4 words: rows g and g + 8 at place t of the contraction, then rows g and g + 8 at place t + 4
    b   2 words: column g at place t, then at place t + 4

and adds to the lane's four sums: row g at columns 2t and 2t + 1, then row g + 8 at the same columns. Callers choose
which elements are at a place, if a and b agree.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, TFloat32, const_expr
from cutlass.cute.nvgpu import warp

from .invariant import Invariant
from .vectors import shared_at


class WarpMma(Invariant):
    """The MMA of a warp on elements of `dtype`.

    half: True: 16-bit elements are multiplied with depth 8 instead of 16. Then only a's first two words and b's first
    word are used.
    """

    def __init__(self, dtype: type[cutlass.Numeric], half: bool = False):
        self.dtype = dtype
        if dtype is Float32:
            self.words, self.operand, op = (4, 2), TFloat32, warp.MmaTF32Op((16, 8, 8))
        else:
            self.words, self.operand = ((2, 1) if half else (4, 2)), dtype
            op = warp.MmaF16BF16Op(dtype, Float32, (16, 8, 8 if half else 16))
        self.atom = cute.make_mma_atom(op)

    def add(self, sums: cute.Tensor, a: list, b: list) -> None:
        """Add the product of a and b to `sums`, 4 float32 registers. a, b: lists of words as in the table at the top of
        this file."""
        left, right = (_operand(words, self.operand) for words in (a, b))
        cute.mma_atom_call(self.atom, sums, left, right, sums)


def _operand(words: list, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Return words as a register tensor of `dtype`."""
    registers = cute.make_rmem_tensor(len(words), Int32)
    for i, word in enumerate(words):
        registers[i] = word
    return cute.recast_tensor(registers, dtype)


def as_operands(words: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Return words as the tensor cores take them: float32 is rounded to TF32; 16-bit elements are unchanged."""
    if const_expr(dtype is Float32):
        rounded = cute.make_rmem_tensor(words.shape, Int32)
        values = cute.recast_tensor(words, Float32)
        for i in range(cute.size(words)):
            rounded[i] = Int32(cute.arch.cvt_f32_tf32(values[i]))
        return rounded
    return words


def read_matrices(row: cute.Pointer, dtype: type[cutlass.Numeric], count: int, transpose: bool) -> cute.Tensor:
    """Read `count` matrices of 8 x 8 16-bit elements, or their transposes, by ldmatrix. Return one word of each matrix:
    elements 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4.

    row: the address in shared memory that this lane passes to ldmatrix: the begin of row lane % 8 of matrix lane / 8.
    """
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, count), dtype)
    source = cute.make_tensor(shared_at(dtype, row, 8).iterator, cute.make_layout(2 * count))
    target = cute.make_rmem_tensor(2 * count, dtype)
    cute.copy(atom, source, target)
    return cute.recast_tensor(target, Int32)
