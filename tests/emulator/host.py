"""Host functions on the CPU: evaluates the text that `ffi_bridge.kept_ptx` keeps, up to the launches.

The text is MLIR of what our launch code traced to. Its values are integers, floats, nested tuples (shapes, strides,
tiles), views of memory and tensor maps. A launch says its kernel, grid, block, shared memory, cluster and parameters.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .faults import Fault

ELEMENT_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f8E4M3FN": 1, "i8": 1, "ui8": 1, "i32": 4, "i64": 8}
TENSOR_MAP_BITS = 1 << 1 | 1 << 18  # of word 2: in every map that the compiler encodes
LONG_SPAN = 128 * 1024  # bytes from a tensor's first to its last, from which on bit 21 of word 2 is set
TENSOR_MAP_TYPES = {"U8": 0, "U16": 1, "U32": 2, "F16_RN": 6, "F32_RN": 7, "BF16_RN": 10}
_LEAF = re.compile(r"\?(?:\{[^}]*\})?|-?\d+(?:@\d+)*|\(|\)")


class View(NamedTuple):
    """Memory with a layout. `text`: the layout's type, whose `?` are sizes known at run time."""

    address: int
    shape: Any
    stride: Any
    element: str = ""
    text: str = ""


class Launch(NamedTuple):
    """One launch of a kernel.

    parameters: bytes of each parameter that has any, in order. early: it may begin during the launch before.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    cluster: tuple[int, int, int]
    parameters: tuple[bytes, ...]
    early: bool = False


# Texts of types: "(?,?{div=8}):(?{i64 div=8},1)" ----------------------------------------------------------------------


def _nested(text: str) -> Any:
    """Nested tuples of a shape's leaves, as texts."""
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
    """The leaves of nested tuples."""
    return [leaf for each in value for leaf in flat(each)] if isinstance(value, tuple) else [value]


def _filled(text: str, dynamic: Iterator[int]) -> Any:
    """Nested tuples of integers: those in the text, and one of `dynamic` for each `?`."""

    def of(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(of, part))
        return next(dynamic) if part.startswith("?") else int(part)

    return of(_nested(text))


def _mapped(function: Callable[[int, int], int], left: Any, right: Any) -> Any:
    if isinstance(left, tuple):
        return tuple(_mapped(function, *pair) for pair in zip(left, right, strict=True))
    return function(left, right)


def _dynamic_bytes(text: str, value: Any) -> bytes:
    """The struct of the leaves that a type leaves open: 32 bits each, or 64 where the type says i64."""
    made = bytearray()
    for leaf, number in zip(flat(_nested(text)), flat(value), strict=True):
        if leaf.startswith("?"):
            size = 8 if "i64" in leaf else 4
            made += bytes(-len(made) % size) + (number & (1 << 8 * size) - 1).to_bytes(size, "little")
    return bytes(made)


def _view_bytes(view: View) -> bytes:
    """A view as a kernel's parameter: address, open sizes, open strides."""
    shape, stride = view.text.split(":")
    made = struct.pack("<Q", view.address) + _dynamic_bytes(shape, view.shape)
    strides = _dynamic_bytes(stride, view.stride)
    if strides and "i64" in stride:
        made += bytes(-len(made) % 8)
    made += strides
    return made + bytes(-len(made) % 8)


def _quoted(text: str) -> list[str]:
    return re.findall(r'"([^"]*)"', text)


# Tensor maps ----------------------------------------------------------------------------------------------------------


def _tensor_map(view: View, basis: str, kind: str, swizzle: int, multicast: int) -> bytes:
    """128 bytes as the host code that the compiler lowers to has them.

    basis: "(64,128):(1@1,1@0)": the box, innermost first, and the mode of the view that each of its dimensions is of.
    """
    sizes, modes = basis.split(":")
    box = [int(leaf) for leaf in flat(_nested(sizes))]
    dims, strides = [], []
    for leaf in flat(_nested(modes)):
        size, stride = view.shape, view.stride
        for step in reversed(leaf.split("@")[1:]):
            if isinstance(size, tuple):
                size, stride = size[int(step)], stride[int(step)]
        dims.append(size)
        strides.append(stride * ELEMENT_BYTES[view.element])
    for i in reversed(range(len(box))):  # each CTA of a multicast loads its share
        share = min(box[i], multicast)
        box[i], multicast = box[i] // share, multicast // share
    if strides[0] != ELEMENT_BYTES[view.element] or any(stride % 16 for stride in strides[1:]):
        raise Fault(f"a tensor map with strides of {strides} bytes")
    words = [0] * 32
    words[0], words[1] = view.address & 0xFFFFFFFF, view.address >> 32
    span = dims[0] * strides[0] + sum((size - 1) * stride for size, stride in zip(dims[1:], strides[1:], strict=True))
    words[2] = len(box) - 1 << 4 | TENSOR_MAP_TYPES[kind] << 7 | swizzle << 13 | TENSOR_MAP_BITS
    words[2] |= (span & (1 << 64) - 1 >= LONG_SPAN) << 21
    for i, stride in enumerate(strides[1:]):
        words[3 + i] = stride // 16 & 0xFFFFFFFF
    for i, size in enumerate(dims):
        words[8 + i] = size - 1
    edges = [size - 1 for size in box] + [0] * (5 - len(box))
    words[13], words[14] = edges[0] << 24, edges[1] | edges[2] << 8 | edges[3] << 16 | edges[4] << 24
    return struct.pack("<32I", *words)


# Operations -----------------------------------------------------------------------------------------------------------

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


def _wrapped(value: int, text: str) -> int:
    """Wrap a value to the integer type at the end of a line."""
    bits = int(re.findall(r"\bi(\d+)$", text.strip())[0])
    value &= (1 << bits) - 1
    return value - (1 << bits) if bits > 1 and value >> bits - 1 else value


class _Line(NamedTuple):
    """One operation. body: lines of an scf.if, those before and those behind its else."""

    results: tuple[str, ...]
    name: str
    operands: tuple[str, ...]
    text: str
    body: tuple[list[_Line], list[_Line]] | None = None


_LINE = re.compile(r"(?:(%[\w-]+(?:, %[\w-]+)*) = )?([a-z_]+(?:\.[a-z_]+)*)(.*)")


def _lines(text: Iterator[str]) -> tuple[list[_Line], bool]:
    """The operations of one region, and whether an else follows it."""
    found = []
    for line in map(str.strip, text):
        if line in ("}", "} else {"):
            return found, line != "}"
        matched = _LINE.fullmatch(line)
        if matched is None:
            raise Fault(f"not an operation: {line[:200]}")
        results, name, rest = matched.groups()
        body = None
        if name == "scf.if":
            then, has_other = _lines(text)
            body = then, _lines(text)[0] if has_other else []
        operands = re.findall(r"%[\w-]+", rest.split(" : ")[0])
        found.append(_Line(tuple(results.split(", ")) if results else (), name, tuple(operands), rest, body))
    return found, False


class Host:
    """One host function.

    Args:
        text: what `kept_ptx` kept of it.
        shared: bytes of dynamic shared memory of each kernel, as its object's resources say.
    """

    def __init__(self, text: str, shared: Mapping[str, int]) -> None:
        self._shared = shared
        aliases = dict(re.findall(r"^(!\w+) = (.*)$", text, re.MULTILINE))
        self._layouts = {name: (_quoted(of)[-1], _element(of)) for name, of in aliases.items() if "memref" in of}
        head, *rest = text[text.index("  func.func @") :].splitlines()
        arguments = head[head.index("(%arg0") + 1 : head.index(") -> i32")]
        self._arguments = re.findall(r"(%arg\d+): (![\w.]+|\w+)", arguments)
        self._body, _ = _lines(iter(rest))

    def launches(self, values: Sequence[Any]) -> list[Launch]:
        """The launches of a call.

        Args:
            values: for each argument an integer, a float, or a tensor as (address, shape, strides in elements). An
                argument more, the stream of tensors, may be left out.
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


def _element(memref: str) -> str:
    return re.findall(r"memref<(\w+)", memref)[0]


class _Run:
    """One evaluation."""

    def __init__(self, shared: Mapping[str, int], layouts: Mapping[str, tuple[str, str]]) -> None:
        self.values: dict[str, Any] = {}
        self.made: list[Launch] = []
        self._shared, self._layouts = shared, layouts

    def region(self, lines: Sequence[_Line]) -> Any:
        """Runs a region; what it yields."""
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

    def _value(self, line: _Line) -> Any:
        name, text = line.name, line.text
        operands = [self.values[each] for each in line.operands if each in self.values]
        room, _, short = name.rpartition(".")
        if name == "arith.constant":
            return _constant(text.partition(" : ")[0].strip())
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
            return _atom(operands[0], text)
        if name.startswith("cuda.launch_"):
            return self._launch(short, line, operands)
        raise Fault(f"no operation {name}")

    def _tuple(self, short: str, line: _Line, operands: list[Any]) -> Any:
        """Layouts and what they are made of."""
        result = line.text.rpartition("->")[2] if "->" in line.text else line.text.rpartition(" : ")[2]
        if short in _TUPLE:
            return _mapped(_TUPLE[short], *operands)
        if short in ("make_int_tuple", "make_shape", "make_stride", "make_tile"):
            text = _quoted(result)[-1]
            if "[" in text:  # a tile of several modes serves `composition`, whose result is in its type
                return None
            leaves = [leaf for value in operands for leaf in flat(value)]
            return _filled(text.split(":")[0] if short == "make_tile" else text, iter(leaves))
        if short == "ceil_div":
            return _mapped(_INTEGER["ceildivsi"], *operands)
        if short == "get_leaves":
            return flat(operands[0])
        if short == "make_layout":
            return View(0, *operands, text=_quoted(result)[-1])
        if short == "make_identity_layout":
            return None
        if short == "select":
            modes = [int(mode) for mode in re.findall(r"\d+", line.text.partition("]")[0])]
            view = operands[0]
            shape, stride = (tuple(of[mode] for mode in modes) for of in (view.shape, view.stride))
            return View(0, shape, stride, text=_quoted(result)[-1])
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

    def _launch(self, short: str, line: _Line, operands: list[Any]) -> Any:
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
            types = _types(line.text.rpartition("!cuda.launch_cfg<max_attrs")[2])
            values = [self.values[each] for each in re.findall(r"%[\w-]+", places)]
            made = [_bytes(value, kind) for value, kind in zip(values, types, strict=True)]
            config = self.values[re.findall(r"<(%[\w-]+)>", line.text)[0]]
            self.made.append(Launch(kernel, **config, parameters=tuple(filter(None, made))))
            return 0
        raise Fault(f"no operation cuda.launch_cfg.{short}")


def _constant(text: str) -> int | float:
    if text in ("true", "false"):
        return int(text == "true")
    return float(text) if "." in text or "e" in text else int(text)


def _types(text: str) -> list[str]:
    """The operand types of a launch, from its "= 17>, (i64, !cute.coord_tensor<"(0,0)", "...">, ...) -> ..."."""
    inner, depth, found = text[text.index("(") + 1 : text.rindex(") -> ")], 0, [""]
    for part in re.findall(r'"[^"]*"|.', inner):
        depth += {"<": 1, ">": -1}.get(part, 0)
        if part == "," and not depth:
            found.append("")
        else:
            found[-1] += part
    return [each.strip() for each in found if each.strip()]


def _bytes(value: Any, kind: str) -> bytes:
    """A value as a kernel's parameter; nothing of what its type says all of."""
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


def _atom(view: View, text: str) -> tuple[bytes, bytes]:
    """A tensor map, and the coordinate tensor beside it."""
    basis = re.findall(r'tma_gbasis = <"([^"]*)">', text)[0]
    kind = re.findall(r"tma_format = (\w+)", text)[0]
    swizzle = int((re.findall(r"S<(\d)", text) or ["0"])[0])
    multicast = int((re.findall(r"num_multicast = (\d+)", text) or ["1"])[0])
    shape = _quoted(text)[-1].split(":")[0]
    return _tensor_map(view, basis, kind, swizzle, multicast), _dynamic_bytes(shape, view.shape)
