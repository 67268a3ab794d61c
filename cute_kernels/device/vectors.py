"""Loads and stores of vectors of 16 bytes, and of parameters. A parameter is a tensor whose dtype is a run-time
value."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr

from ..specs import PARAM_FORMS

VECTOR_BYTES = 16
BF16, F16, F32 = PARAM_FORMS["bfloat16"], PARAM_FORMS["float16"], PARAM_FORMS["float32"]
"""Codes of the dtypes that a parameter can have."""
CODE_BITS = 2


def elements(dtype: type[cutlass.Numeric]) -> int:
    """Return the number of elements of `dtype` in a vector of 16 bytes."""
    return VECTOR_BYTES * 8 // dtype.width


def run_at(dtype: type[cutlass.Numeric], address: Int64, first: Int64, count: int) -> cute.Tensor:
    """Return a view of `count` elements in global memory: those from element `first` after `address` on.

    `first` must be a multiple of `count`, and `address` aligned to 16 bytes.
    """
    itemsize = dtype.width // 8
    align = min(VECTOR_BYTES, count * itemsize)
    # The alignment is assumed, since `Pointer.align` rounds at run time.
    pointer = cute.make_ptr(dtype, address + Int64(first) * itemsize, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


def shared_at(dtype: type[cutlass.Numeric], pointer: cute.Pointer, count: int) -> cute.Tensor:
    """Return a view of `count` elements in shared memory at `pointer`. The pointer must be aligned to the size of all
    these elements together; if they have more than 16 bytes, alignment to 16 bytes is enough."""
    align = min(VECTOR_BYTES, count * dtype.width // 8)
    first = cute.make_ptr(dtype, pointer.toint(), cute.AddressSpace.smem, assumed_align=align)
    return cute.make_tensor(first, cute.make_layout(count))


def load_vector(dtype: type[cutlass.Numeric], address: Int64, vector: Int64) -> cute.Tensor:
    """Load vector number `vector` (16 bytes) after `address` into registers of `dtype`. Elements are not converted to
    float32 here, since the conversion would wait for the load."""
    count = elements(dtype)
    raw = cute.make_rmem_tensor(count, dtype)
    raw.store(run_at(dtype, address, vector * count, count).load())
    return raw


def floats(raw: cute.Tensor) -> cute.Tensor:
    """Return registers converted to float32; `raw` itself if it is float32."""
    if raw.element_type is Float32:
        return raw
    result = cute.make_rmem_tensor(raw.shape, Float32)
    result.store(raw.load().to(Float32))
    return result


def store_vector(dtype: type[cutlass.Numeric], address: Int64, vector: Int64, values: cute.Tensor) -> None:
    """Round float32 registers to `dtype` and store them as vector number `vector` (16 bytes) after `address`."""
    count = elements(dtype)
    run_at(dtype, address, vector * count, count).store(values.load().to(dtype))


def dtype_code(forms: Int32, parameter: int) -> Int32:
    """Return the code (dtypes.PARAM_FORMS) of the dtype of parameter number `parameter`.

    forms: the codes of several parameters in one integer, CODE_BITS bits each.
    """
    return (forms >> (CODE_BITS * parameter)) & ((1 << CODE_BITS) - 1)


@cute.jit
def load_params(address: Int64, code: Int32, first: Int64, count: cutlass.Constexpr[int]) -> cute.Tensor:
    """Load `count` elements of the parameter at `address`, from element `first` on, and return them as float32.

    Args:
        code: the code of the parameter's dtype: BF16, F16 or F32.
        first: a multiple of `count`.
    """
    values = cute.make_rmem_tensor(count, Float32)
    if code == BF16:
        values.store(run_at(BFloat16, address, first, count).load().to(Float32))
    elif code == F16:
        values.store(run_at(Float16, address, first, count).load().to(Float32))
    else:
        values.store(run_at(Float32, address, first, count).load())
    return values


@cute.jit
def store_params(address: Int64, code: Int32, first: Int64, values: cute.Tensor):
    """Round float32 registers to the dtype of the parameter at `address`, and store them from element `first` on.

    Args:
        code: the code of the parameter's dtype: BF16, F16 or F32.
        first: a multiple of the number of registers.
    """
    count = const_expr(cute.size(values))
    if code == BF16:
        run_at(BFloat16, address, first, count).store(values.load().to(BFloat16))
    elif code == F16:
        run_at(Float16, address, first, count).store(values.load().to(Float16))
    else:
        run_at(Float32, address, first, count).store(values.load())


@cute.jit
def store_param(address: Int64, code: Int32, index: Int64, value: Float32):
    """Round a float32 number to the dtype of the parameter at `address`, and store it as element `index`.

    code: the code of the parameter's dtype: BF16, F16 or F32.
    """
    values = cute.make_rmem_tensor(1, Float32)
    values[0] = value
    store_params(address, code, index, values)
