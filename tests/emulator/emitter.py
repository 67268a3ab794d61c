"""Helpers of all instruction families: modifiers, operands, results, and lines of a generated function.

A generated function is `block(u, m)`: u holds registers, an array of n lanes for each; m is True or a mask of lanes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import engines
from .ptx import Address, Imm, Ins, Kernel, Reg, Special, Unsupported

# A register file of each width is seen through views of several types: the view in which a type's values are computed.
VIEW = {"s8": "s16", "u8": "b16", "b8": "b16", "s16": "s16", "u16": "b16", "b16": "b16", "f16": "f16", "s32": "s32",
        "u32": "b32", "b32": "b32", "f32": "f32", "s64": "s64", "u64": "b64", "b64": "b64", "f64": "f64",
        "pred": "p"}  # fmt: skip
NUMPY = {"s16": np.int16, "b16": np.uint16, "f16": np.float16, "s32": np.int32, "b32": np.uint32, "f32": np.float32,
         "s64": np.int64, "b64": np.uint64, "f64": np.float64, "p": np.bool_}  # fmt: skip
BITS = {"s8": 8, "u8": 8, "b8": 8, "s16": 16, "u16": 16, "b16": 16, "f16": 16, "bf16": 16, "s32": 32, "u32": 32,
        "b32": 32, "f32": 32, "s64": 64, "u64": 64, "b64": 64, "f64": 64}  # fmt: skip
VIEWS_OF = {"b16": ("b16", "s16", "f16"), "b32": ("b32", "s32", "f32"), "b64": ("b64", "s64", "f64"), "p": ("p",)}
TYPES = {*BITS, "pred", "tf32", "f16x2", "bf16x2", "f32x2", "u16x2", "s16x2", "e4m3x2", "e5m2x2", "e2m1x2", "ue8m0x2"}
VIEWS = tuple(NUMPY)

INSTRUCTIONS: dict[str, Callable] = {}


def instruction(*opcodes: str):
    """Return a decorator that registers a function (emitter, ins, modifiers) as the translator of these opcodes."""

    def register(function):
        for opcode in opcodes:
            INSTRUCTIONS[opcode] = function
        return function

    return register


class Modifiers:
    """Modifiers of one instruction.

    Translators remove the modifiers that they model; a modifier that remains is an error.
    """

    def __init__(self, op: str):
        self.op = op
        self.left = op.split(".")[1:]

    def flag(self, name: str) -> bool:
        if name in self.left:
            self.left.remove(name)
            return True
        return False

    def choice(self, *names: str, default: str | None = None) -> str | None:
        """Remove and return the first modifier among `names`."""
        for each in self.left:
            if each in names:
                self.left.remove(each)
                return each
        if default is None:
            raise Unsupported(f"{self.op}: none of .{', .'.join(names)}")
        return default

    def require(self, *names: str) -> None:
        for name in names:
            if not self.flag(name):
                raise Unsupported(f"{self.op}: not .{name}")

    def drop(self, *tables: dict[str, str]) -> None:
        """Remove modifiers that change nothing in the emulator; the tables contain them with the reasons."""
        self.left = [each for each in self.left if not any(each in table for table in tables)]

    def types(self, count: int, *allowed: str) -> list[str]:
        found = [each for each in self.left if each in TYPES]
        if len(found) != count or (allowed and not set(found) <= set(allowed)):
            raise Unsupported(f"{self.op}: types .{', .'.join(found)}")
        self.left = [each for each in self.left if each not in TYPES]
        return found

    def type(self, *allowed: str) -> str:
        return self.types(1, *allowed)[0]

    def finish(self) -> None:
        if self.left:
            raise Unsupported(f"{self.op}: modifier .{self.left[0]}")


class Expression(str):
    """Python source used as an operand."""


class Emitter:
    """Python lines of one block's function, and the constants that they use by name."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.constants: dict = {}
        self.names: dict = {}
        self.lines: list[str] = []
        self.temporaries = 0
        self.with_ptx_nan: set[int] = set()  # registers that the current instruction reads with NaN replaced

    def emit(self, ins: Ins) -> None:
        translate = INSTRUCTIONS.get(ins.mods[0])
        if translate is None:
            raise Unsupported(f"instruction {ins.op}")
        mods = Modifiers(ins.op)
        if ins.pred is None:
            translate(self, ins, mods)
        else:
            self.add(f"m0 = m; m = L.both(m, {'~' if ins.negated else ''}p[{ins.pred.index}])")
            self.add("if m is not None:")
            begin = len(self.lines)
            translate(self, ins, mods)
            self.lines[begin:] = ["    " + line for line in self.lines[begin:]] or ["    pass"]
            self.add("m = m0")
        mods.finish()

    # lines and names ------------------------------------------------------------------------------------------------
    def add(self, line: str) -> None:
        self.lines.append(line)

    def temporary(self, expression: str) -> str:
        self.temporaries += 1
        name = f"t{self.temporaries}"
        self.add(f"{name} = {expression}")
        return name

    def constant(self, value) -> str:
        key = (value.dtype, value.tobytes()) if isinstance(value, (np.generic, np.ndarray)) else value
        if key not in self.names:
            self.names[key] = f"K{len(self.names)}"
            self.constants[self.names[key]] = value
        return self.names[key]

    def dtype(self, view: str) -> str:
        return self.constant(NUMPY[view])

    # operands -------------------------------------------------------------------------------------------------------
    @staticmethod
    def operands(ins: Ins, *counts: int) -> list:
        if len(ins.args) not in counts:
            raise Unsupported(f"{ins.op} with {len(ins.args)} operands")
        return ins.args

    @staticmethod
    def immediate(ins: Ins, operand) -> int:
        if not isinstance(operand, Imm) or operand.is_float:
            raise Unsupported(f"{ins.op}: an operand that is no integer constant")
        return operand.value

    def read(self, operand, view: str) -> str:
        """Return a Python expression for an operand's value, read as the type `view`.

        The value is an array of n lanes, or a numpy scalar.
        """
        if isinstance(operand, Reg):
            if view in VIEWS_OF[operand.cls]:
                value = f"{view}[{operand.index}]"
                return f"F.ptx_nan({value})" if view in ("b32", "s32") and operand.index in self.with_ptx_nan else value
            if operand.cls == "p" or view == "p":
                raise Unsupported(f"a register of {operand.cls} where one of {view} is due")
            return f"{operand.cls}[{operand.index}].astype({self.dtype(view)})"  # the low part of a wider register
        if isinstance(operand, Imm):
            return self.constant(_immediate(operand, view))
        if isinstance(operand, Special):
            return f"u.special({operand.name!r}).astype({self.dtype(view)})"
        if isinstance(operand, tuple):  # ("not", predicate)
            return f"~{self.read(operand[1], 'p')}"
        if isinstance(operand, str) and operand in self.kernel.params:
            return self.constant(NUMPY[view](engines.PARAM_BASE + self.kernel.params[operand][0]))
        if isinstance(operand, str):
            return self._shared_variable(operand, 0, view)
        raise Unsupported(f"operand {operand}")

    def _shared_variable(self, name: str, offset: int, view: str) -> str:
        return f"np.full(u.n, u.cta.shared_base + {self.kernel.shared[name][0] + offset}, {self.dtype(view)})"

    def reads(self, operands, view: str) -> str:
        """Return a Python expression for a tuple: the values of a vector operand, or of one operand."""
        return "(" + "".join(f"{self.read(each, view)}, " for each in as_list(operands)) + ")"

    def address(self, address: Address, view: str) -> str:
        """Return a Python expression for an address.

        view: b32 for shared memory, b64 for a generic or global address.
        """
        if not isinstance(address, Address):
            raise Unsupported(f"operand {address} where an address is due")
        if isinstance(address.base, str) and address.base in self.kernel.shared:
            return self._shared_variable(address.base, address.offset, view)
        base = self.read(address.base, view)
        if not address.offset:
            return base
        return f"({base} + {self.constant(_immediate(Imm(address.offset), view))})"

    # results --------------------------------------------------------------------------------------------------------
    def write(self, result, expression: str, view: str) -> None:
        """Emit a write of a register in the lanes of m; extend the value if the register is wider, as ld and cvt do."""
        if result is None:
            return
        if not isinstance(result, Reg):
            raise Unsupported(f"{result} as a result")
        if view in VIEWS_OF[result.cls]:
            self.add(f"np.copyto({view}[{result.index}], {expression}, where=m)")
        elif result.cls == "p" or view == "p" or BITS.get(view, 64) > int(result.cls[1:]):
            raise Unsupported(f"a result of {view} in a register of {result.cls}")
        else:
            whole = ("s" if view[0] == "s" else "b") + result.cls[1:]
            self.add(f"np.copyto({whole}[{result.index}], ({expression}).astype({self.dtype(whole)}), where=m)")

    def apply(self, function: str, result: Reg, view: str, *sources) -> None:
        """Emit a call of a numpy ufunc that writes directly to the register."""
        if result.cls not in VIEWS_OF or view not in VIEWS_OF[result.cls]:
            raise Unsupported(f"a result of {view} in a register of {result.cls}")
        values = ", ".join(each if isinstance(each, Expression) else self.read(each, view) for each in sources)
        self.add(f"{function}({values}, out={view}[{result.index}], where=m)")


def as_list(operand) -> list:
    return operand if isinstance(operand, list) else [operand]


def _immediate(operand: Imm, view: str):
    """Return a constant as a numpy scalar: the low bits of an integer; for a float in a bit view, its bits."""
    to = NUMPY[view]
    if view == "p":
        return np.bool_(operand.value)
    if view[0] == "f":
        return to(operand.value)
    if operand.is_float:
        return (np.float64 if operand.is_double else np.float32)(operand.value).view(to)
    size = np.dtype(to).itemsize
    return np.array(operand.value & ((1 << 8 * size) - 1), f"u{size}").view(to)[()]
