"""Arguments that stand for those of a call when a function is compiled."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .activation import no_params

# What TMA asks of addresses and strides.
ALIGNMENT_BITS = 128


class Fakes:
    """Fake tensors whose equal dimensions TVM-FFI checks at each call. Rows and columns are in elements."""

    def __init__(self, dtype: type[cutlass.Numeric]):
        self.dtype = dtype
        self.rows = cute.sym_int32()

    def dim(self, divisibility: int = 8) -> Any:
        return cute.sym_int32(divisibility=divisibility)

    def matrix(self, cols: Any, dtype: type[cutlass.Numeric] | None = None) -> cute.Tensor:
        """[T, cols], rows at any multiple of 16 bytes."""
        dtype = dtype or self.dtype
        stride = (cute.sym_int64(divisibility=ALIGNMENT_BITS // dtype.width), 1)
        return make_fake_tensor(dtype, (self.rows, cols), stride=stride, assumed_align=16)

    def packed(self, cols: Any, dtype: type[cutlass.Numeric] | None = None) -> cute.Tensor:
        """[T, cols], rows without padding."""
        return make_fake_tensor(dtype or self.dtype, (self.rows, cols), stride=(cols, 1), assumed_align=16)

    def weight(self, rows: Any, cols: Any, dtype: type[cutlass.Numeric] | None = None) -> cute.Tensor:
        """[E or 1, rows, cols]; rows without padding, which the repeated `cols` checks. Experts may lie apart."""
        dtype = dtype or self.dtype
        stride = (cute.sym_int64(divisibility=ALIGNMENT_BITS // min(dtype.width, 16)), cols, 1)
        return make_fake_tensor(dtype, (cute.sym_int32(), rows, cols), stride=stride, assumed_align=16)


def groups_fakes() -> tuple:
    """Group sizes, their form and number, and counters for tickets."""
    return Int64(0), Int32(0), Int32(0), Int64(0)


def address_fakes(count: int) -> tuple:
    return tuple(Int64(0) for _ in range(count))


def weight_fakes() -> tuple:
    """Table of experts, bias, table of biases."""
    return address_fakes(3)


def tail_fakes(with_params: bool) -> tuple:
    kind, *floats = no_params()
    params = (kind, Int32(0), *floats) if with_params else ()
    return Int64(0), *params, Int32(0), Int32(0), make_fake_stream(use_tvm_ffi_env_stream=True)
