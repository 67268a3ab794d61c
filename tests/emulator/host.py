"""Evaluate host functions on the CPU from the text that `ffi_bridge.kept_ptx` keeps, and return their launches.

The text is the MLIR of our traced launch code (`host_text`). Values are integers, floats, nested tuples (shapes,
strides, tiles), views of memory (`layouts`) and tensor maps (`encoded_maps`). A launch consists of a kernel, grid,
block, shared memory, cluster and parameters.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .encoded_maps import tma_atom
from .faults import Fault
from .host_text import Line, constant, element_of, operations, parameter_types, quoted
from .layouts import View, filled, flat, mapped, parameter

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "sgt": lambda a, b: a > b, "sge": lambda a, b: a >= b,
    "slt": lambda a, b: a < b, "sle": lambda a, b: a <= b,
}  # fmt: skip
_INTEGER: dict[str, Callable[[int, int], int]] = {
    "addi": lambda a, b: a + b, "subi": lambda a, b: a - b, "muli": lambda a, b: a * b, "andi": lambda a, b: a & b,
    "ori": lambda a, b: a | b, "xori": lambda a, b: a ^ b, "minsi": min, "maxsi": max, "shli": lambda a, b: a << b,
    "shrsi": lambda a, b: a >> b, "floordivsi": lambda a, b: a // b, "ceildivsi": lambda a, b: -(-a // b),
    "divsi": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "remsi": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}  # fmt: skip
_TUPLE: dict[str, Callable[[int, int], int]] = {
    "tuple_add": _INTEGER["addi"], "tuple_sub": _INTEGER["subi"], "tuple_mul": _INTEGER["muli"],
    "tuple_div": _INTEGER["floordivsi"],
}  # fmt: skip
_SAME = {
    "arith.extsi", "cute.to_int_tuple", "cute.get_scalars", "cute.assume", "cute.ptrtoint", "cute.inttoptr",
    "cuda.cast",
}  # fmt: skip
_TYPES_ONLY = {"cute.static", "cute.make_composed_layout", "cute.tile_to_shape", "cute.composition"}
_IGNORED = {"cuda.return_if_error", "return"}


class Launch(NamedTuple):
    """One launch of a kernel.

    Attributes:
        parameters: bytes of each nonempty parameter, in order.
        early: the launch may begin during the previous one (programmatic dependent launch).
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    cluster: tuple[int, int, int]
    parameters: tuple[bytes, ...]
    early: bool = False


class Host:
    """A host function that can be evaluated.

    Args:
        text: its text from `kept_ptx`.
        shared: bytes of dynamic shared memory by kernel, from the object's resources.
    """

    def __init__(self, text: str, shared: Mapping[str, int]) -> None:
        self._shared = shared
        aliases = dict(re.findall(r"^(!\w+) = (.*)$", text, re.MULTILINE))
        self._layouts = {name: (quoted(of)[-1], element_of(of)) for name, of in aliases.items() if "memref" in of}
        head, *rest = text[text.index("  func.func @") :].splitlines()
        arguments = head[head.index("(%arg0") + 1 : head.index(") -> i32")]
        self._arguments = re.findall(r"(%arg\d+): (![\w.]+|\w+)", arguments)
        self._body, _ = operations(iter(rest))

    def launches(self, values: Sequence[Any]) -> list[Launch]:
        """Return the launches of a call.

        Args:
            values: for each argument an integer, a float, or a tensor as (address, shape, strides in elements). The
                last argument, the stream of tensors, may be left out.
        """
        given = itertools.chain(values, [0] * (len(self._arguments) - len(values)))
        if not 0 <= len(self._arguments) - len(values) <= 1:
            raise Fault(f"{len(values)} arguments of {len(self._arguments)}")
        run = _Run(self._shared, self._layouts)
        for (name, kind), value in zip(self._arguments, given, strict=True):
            if kind in self._layouts:
                text, element = self._layouts[kind]
                value = View(*value, element, text)
            run.values[name] = value
        run.region(self._body)
        return run.made


class _Run:
    """One evaluation of a host function."""

    def __init__(self, shared: Mapping[str, int], layouts: Mapping[str, tuple[str, str]]) -> None:
        self.values: dict[str, Any] = {}
        self.made: list[Launch] = []
        self._shared, self._layouts = shared, layouts

    def region(self, lines: Sequence[Line]) -> Any:
        """Run a region, and return the value that it yields."""
        for line in lines:
            if line.name == "scf.yield":
                return self.values[line.operands[0]]
            if line.body is not None:
                made = self.region(line.body[0] if self.values[line.operands[0]] else line.body[1])
            elif line.name in _IGNORED:
                continue
            else:
                made = self._value(line)
            if line.name in ("cute.get_leaves",) or line.name.startswith("cute_nvgpu.atom.make_"):
                self.values |= zip(line.results, made, strict=True)
            elif line.results:
                self.values[line.results[0]] = made
        return None

    def _value(self, line: Line) -> Any:
        name, text = line.name, line.text
        operands = [self.values[each] for each in line.operands if each in self.values]
        room, _, short = name.rpartition(".")
        if name == "arith.constant":
            return constant(text.partition(" : ")[0].strip())
        if name == "arith.cmpi":
            return int(_COMPARE[text.split()[0].rstrip(",")](*operands))
        if name == "arith.select":
            return operands[1] if operands[0] else operands[2]
        if name == "arith.trunci":
            return _wrapped(operands[0], text)
        if name == "arith.extui":
            bits = int(re.findall(r": i(\d+) to", text)[0])
            return operands[0] & (1 << bits) - 1
        if room == "arith" and short in _INTEGER:
            return _wrapped(_INTEGER[short](*operands), text)
        if name in _SAME:
            return operands[0]
        if name in _TYPES_ONLY:
            return None
        if room == "cute":
            return self._tuple(short, line, operands)
        if name.startswith("cute_nvgpu.atom.make_non_exec_tiled_tma_"):
            return tma_atom(operands[0], text)
        if name.startswith("cuda.launch_"):
            return self._launch(short, line, operands)
        raise Fault(f"no operation {name}")

    def _tuple(self, short: str, line: Line, operands: list[Any]) -> Any:
        """Evaluate an operation on layouts, shapes, strides or tiles."""
        result = line.text.rpartition("->")[2] if "->" in line.text else line.text.rpartition(" : ")[2]
        if short in _TUPLE:
            return mapped(_TUPLE[short], *operands)
        if short in ("make_int_tuple", "make_shape", "make_stride", "make_tile"):
            text = quoted(result)[-1]
            if "[" in text:  # a tile of several modes serves `composition`, whose result is in its type
                return None
            leaves = [leaf for value in operands for leaf in flat(value)]
            return filled(text.split(":")[0] if short == "make_tile" else text, iter(leaves))
        if short == "ceil_div":
            return mapped(_INTEGER["ceildivsi"], *operands)
        if short == "get_leaves":
            return flat(operands[0])
        if short == "make_layout":
            return View(0, *operands, text=quoted(result)[-1])
        if short == "make_identity_layout":
            return None
        if short == "select":
            modes = [int(mode) for mode in re.findall(r"\d+", line.text.partition("]")[0])]
            view = operands[0]
            shape, stride = (tuple(of[mode] for mode in modes) for of in (view.shape, view.stride))
            return View(0, shape, stride, text=quoted(result)[-1])
        if short == "make_view":
            text, element = self._layouts[result.strip()]
            return operands[1]._replace(address=operands[0], element=element, text=text)
        if short == "kernel_smem_size":
            return self._shared[re.findall(r"::@(\w+)", line.text)[0]]
        if short == "print":
            raise Fault(f"the host function complains: {line.text[:200]}")
        field = {"get_iter": "address", "get_shape": "shape", "get_stride": "stride"}.get(short)
        if field:
            return getattr(operands[0], field)
        if short == "get_layout":
            return operands[0]
        raise Fault(f"no operation cute.{short}")

    def _launch(self, short: str, line: Line, operands: list[Any]) -> Any:
        if short == "create":
            values = dict(re.findall(r"(\w+) = (\([^)]*\)|%[\w-]+)", line.text))
            triples = {
                of: tuple(self.values[each] for each in re.findall(r"%[\w-]+", values[of]))
                for of in ("gridDim", "blockDim")
            }
            shared = self.values[values["dynamicSmemBytes"]]
            return {"grid": triples["gridDim"], "block": triples["blockDim"], "shared": shared, "cluster": (1, 1, 1)}
        if short == "cluster_dim":
            operands[0]["cluster"] = tuple(operands[1:])
            return None
        if short == "programmatic_stream_serialization_allowed":
            operands[0]["early"] = bool(operands[1])
            return None
        if short == "cooperative":
            if operands[1]:
                raise Fault("a cooperative launch")
            return None
        if short == "launch_ex":
            kernel, places = re.findall(r"::@(\w+)<%[\w-]+> \(([^)]*)\)", line.text)[0]
            types = parameter_types(line.text.rpartition("!cuda.launch_cfg<max_attrs")[2])
            values = [self.values[each] for each in re.findall(r"%[\w-]+", places)]
            made = [parameter(value, kind) for value, kind in zip(values, types, strict=True)]
            config = self.values[re.findall(r"<(%[\w-]+)>", line.text)[0]]
            self.made.append(Launch(kernel, **config, parameters=tuple(filter(None, made))))
            return 0
        raise Fault(f"no operation cuda.launch_cfg.{short}")


def _wrapped(value: int, text: str) -> int:
    """Wrap a value to the integer type named at the end of a line."""
    bits = int(re.findall(r"\bi(\d+)$", text.strip())[0])
    value &= (1 << bits) - 1
    return value - (1 << bits) if bits > 1 and value >> bits - 1 else value
