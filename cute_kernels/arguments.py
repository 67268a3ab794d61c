"""Types that describe the arguments and signatures of exported functions. `numbers` makes the signatures of kernels
that take no tensors, only addresses and numbers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

TENSOR, ADDRESS, INT32, INT64, FLOAT32, STREAM = "tensor", "address", "int32", "int64", "float32", "stream"
KINDS = (TENSOR, ADDRESS, INT32, INT64, FLOAT32, STREAM)
_Value = TypeVar("_Value")

DIVISOR = 8
"""The number that divides the size of each dimension of a tensor, in elements, unless `Signature.divisors` names
another. The reason is that TMA needs rows of whole 16 bytes. T, R and E may have any size."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of an exported function.

    Attributes:
        name: the argument's name.
        kind: one of KINDS. "address" is an int64 device address, "stream" a CUDA stream.
        optional: True: a call may leave the argument out. Then 0 is passed, which means no tensor or a number's usual
            value.
        dtype: the dtype of a tensor.
        shape: a name for each dimension of a tensor. Dimensions of the same name must have the same size, which every
            call checks. T is the number of rows that the GEMM multiplies, R the number of rows of an operand from which
            indices may select these T. Tensors of three dimensions are experts' weights, [E or 1, rows, columns], with
            unpadded rows.
        packed: True: a matrix's rows must follow each other without padding. False: their stride is any multiple of 16
            bytes.
    """

    name: str
    kind: str
    optional: bool = False
    dtype: str = ""
    shape: tuple[str, ...] = ()
    packed: bool = False

    @property
    def absent(self) -> int | float:
        """The value that is passed if a call leaves the argument out."""
        return 0.0 if self.kind == FLOAT32 else 0


@dataclasses.dataclass(frozen=True)
class Signature:
    """The arguments of an exported function, in their order.

    Attributes:
        arguments: the arguments.
        divisors: pairs (name of a dimension, number that must divide its size); DIVISOR for dimensions that are not
            named here.
    """

    arguments: tuple[Argument, ...]
    divisors: tuple[tuple[str, int], ...] = ()

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments)

    @functools.cached_property
    def optional(self) -> frozenset[str]:
        return frozenset(argument.name for argument in self.arguments if argument.optional)

    def __getitem__(self, name: str) -> Argument:
        return self.arguments[self.names.index(name)]

    def ordered(self, values: Mapping[str, _Value], absent: Callable[[int | float], _Value]) -> tuple[_Value, ...]:
        """Return `values`, a mapping by argument name, as a tuple in the order of the arguments. An optional argument
        that is missing gets `absent(0)` (`absent(0.0)` for a float).

        Raises TypeError, which names the argument, if a required name is missing or a name is unknown.
        """
        if unknown := values.keys() - set(self.names):
            raise TypeError(f"no argument {min(unknown)!r}; there are: {', '.join(self.names)}")
        if missing := [name for name in self.names if name not in values and name not in self.optional]:
            raise TypeError(f"argument {missing[0]!r} is missing; there are: {', '.join(self.names)}")
        return tuple(values[a.name] if a.name in values else absent(a.absent) for a in self.arguments)

    def pack(self, **values: Any) -> tuple[Any, ...]:
        """Return the positional arguments of a call, from `values` by name. Optional arguments that are not given
        become 0.

        Raises TypeError if a required name is missing or a name is unknown.
        """
        return self.ordered(values, lambda zero: zero)


def each(kind: str, names: str, optional: bool = False) -> tuple[Argument, ...]:
    """Return one argument of `kind` for each of `names`, which are separated by spaces."""
    return tuple(Argument(name, kind, optional) for name in names.split())


def numbers(addresses: str, integers: str, floats: str = "", optional: bool = False) -> Signature:
    """Make the signature of a kernel without tensor arguments. Without a tensor there is no device from which to take
    the stream, so the stream is also an argument.

    Args:
        addresses, integers, floats: names of arguments, separated by spaces.
        optional: True: the integers are optional, as addresses always are.
    """
    kinds = (*each(ADDRESS, addresses, optional=True), *each(INT32, integers, optional), *each(FLOAT32, floats))
    return Signature((*kinds, *each(STREAM, "stream")))


NAMES_OF_PARAMS = "limit alpha offset"
"""Names of the arguments that pass an activation's constants, in their order. They are the names of clamped_swiglu's
constants. All activations use these names, because argument names are part of a compiled object; an activation with
fewer constants ignores the remaining arguments."""
