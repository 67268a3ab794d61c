"""CuTe layouts in a host function: nested tuples, views of memory, and their bytes as kernel parameters."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .faults import Fault

_LEAF = re.compile(r"\?(?:\{[^}]*\})?|-?\d+(?:@\d+)*|\(|\)")


class View(NamedTuple):
    """Memory with a layout. `text`: the layout's type, in which `?` is a size known only at run time."""

    address: int
    shape: Any
    stride: Any
    element: str = ""
    text: str = ""


def nested(text: str) -> Any:
    """Parse a shape to nested tuples of its leaves, as text."""
    stack: list[list[Any]] = [[]]
    for token in _LEAF.findall(text):
        if token == "(":
            stack.append([])
        elif token == ")":
            done = tuple(stack.pop())
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    (whole,) = stack[0]
    return whole


def flat(value: Any) -> list[Any]:
    """Return the leaves of nested tuples."""
    return [leaf for each in value for leaf in flat(each)] if isinstance(value, tuple) else [value]


def filled(text: str, dynamic: Iterator[int]) -> Any:
    """Return nested tuples of integers: those in the text, and the next of `dynamic` for each `?`."""

    def of(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(of, part))
        return next(dynamic) if part.startswith("?") else int(part)

    return of(nested(text))


def mapped(function: Callable[[int, int], int], left: Any, right: Any) -> Any:
    """Apply a function to the leaves of two nested tuples, pair by pair."""
    if isinstance(left, tuple):
        return tuple(mapped(function, *pair) for pair in zip(left, right, strict=True))
    return function(left, right)


def dynamic_bytes(text: str, value: Any) -> bytes:
    """Return the bytes of the sizes that a type leaves open: 4 bytes each, or 8 if the type says i64."""
    made = bytearray()
    for leaf, number in zip(flat(nested(text)), flat(value), strict=True):
        if leaf.startswith("?"):
            size = 8 if "i64" in leaf else 4
            made += bytes(-len(made) % size) + (number & (1 << 8 * size) - 1).to_bytes(size, "little")
    return bytes(made)


def _view_bytes(view: View) -> bytes:
    """Return a view as a kernel parameter: its address, open sizes and open strides."""
    shape, stride = view.text.split(":")
    made = struct.pack("<Q", view.address) + dynamic_bytes(shape, view.shape)
    strides = dynamic_bytes(stride, view.stride)
    if strides and "i64" in stride:
        made += bytes(-len(made) % 8)
    made += strides
    return made + bytes(-len(made) % 8)


def parameter(value: Any, kind: str) -> bytes:
    """Return the bytes of a kernel parameter; empty if its type determines the value."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, View):
        return _view_bytes(value) if value.element else b""
    if kind == "f32":
        return struct.pack("<f", value)
    if matched := re.fullmatch(r"i(\d+)", kind):
        size = max(int(matched[1]) // 8, 1)
        return (value & (1 << 8 * size) - 1).to_bytes(size, "little")
    if value is None:
        return b""
    raise Fault(f"a kernel's parameter of type {kind}")
