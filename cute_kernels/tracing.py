"""Stand-ins (fake tensors, numbers and streams) for the arguments of a stage's host function. The function is compiled
with them. They are made from the function's signature; a stage is one kernel with its host launch.

Stand-ins have run-time shapes. At each call, TVM-FFI checks the tensors' dtype, rank, strides, alignment, equal
dimensions and device. Optional arguments and arguments of varying type are addresses, 0 if absent.
"""

from __future__ import annotations

import inspect
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .arguments import (
    ADDRESS,
    DIVISOR,
    FLOAT32,
    INT32,
    INT64,
    STREAM,
    TENSOR,
    Argument,
    Signature,
)
from .formats import BYTE, E4M3, WORD
from .signatures import stage_signature
from .specs import Spec
from .tiles import SpecError

DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": Float32,
    E4M3: cutlass.Float8E4M3FN,
    BYTE: cutlass.Uint8,
    WORD: Int32,
}
NUMBERS = {ADDRESS: Int64, INT64: Int64, INT32: Int32, FLOAT32: Float32}
ALIGNMENT_BITS = 128  # TMA requires this of addresses and strides


class _StandIns:
    """Maker of the stand-ins of one function's arguments. Dimensions of the same name become the same symbol, so that
    every call checks that their sizes are equal."""

    def __init__(self, signature: Signature):
        self.divisors = dict(signature.divisors)
        self.sizes: dict[str, Any] = {}

    def make(self, argument: Argument) -> Any:
        if argument.kind == TENSOR:
            return self._tensor(argument)
        return make_fake_stream() if argument.kind == STREAM else NUMBERS[argument.kind](0)

    def _size(self, name: str) -> Any:
        if name not in self.sizes:
            free = name in ("T", "R", "E")  # rows of any number, and one expert or all
            divisor = self.divisors.get(name, 1 if free else DIVISOR)
            self.sizes[name] = cute.sym_int32() if divisor == 1 else cute.sym_int32(divisibility=divisor)
        return self.sizes[name]

    def _tensor(self, argument: Argument) -> cute.Tensor:
        dtype = DTYPES[argument.dtype]
        shape = tuple(map(self._size, argument.shape))
        if len(shape) == 3:
            # Experts may lie apart; the repeated size of a row checks that rows have no padding.
            apart = cute.sym_int64(divisibility=ALIGNMENT_BITS // min(dtype.width, 16))
            stride: tuple[Any, ...] = (apart, shape[2], 1)
        elif argument.packed:
            stride = (shape[1], 1)
        else:
            stride = (cute.sym_int64(divisibility=ALIGNMENT_BITS // dtype.width), 1)
        return make_fake_tensor(dtype, shape, stride=stride, assumed_align=16)


Traced = tuple[Any, tuple]
"""A host function, and the arguments with which to compile it.

Each module that makes a kernel has a function `trace`, which returns this for a spec: the host function that launches
the spec's kernel, and stand-ins for its arguments.
"""


def traced(spec: Spec, host: Any) -> Traced:
    """Return a stage's host function and the stand-ins for its arguments.

    host: an object whose __call__ is the host function.

    Raises SpecError if the names of the host function's parameters differ from the signature's.
    """
    signature = stage_signature(spec)
    takes_stream = signature.arguments[-1].kind == STREAM
    names = signature.names if takes_stream else (*signature.names, "stream")
    taken = tuple(inspect.signature(host.__call__).parameters)
    if taken != names:
        raise SpecError(f"{spec.name}: the host function takes {taken}, its signature says {names}")
    make = _StandIns(signature).make
    stream = () if takes_stream else (make_fake_stream(use_tvm_ffi_env_stream=True),)
    return host, (*map(make, signature.arguments), *stream)
