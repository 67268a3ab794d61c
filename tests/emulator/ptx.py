"""Parser of PTX text to instructions with resolved operands (PTX ISA, chapters Syntax, Directives and State Spaces).

Instructions are not interpreted here. Unknown syntax raises an error that names it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from .instructions import Address, Imm, Ins, Kernel, Reg, Special, Unsupported

__all__ = ["Address", "Imm", "Ins", "Kernel", "Reg", "Special", "Unsupported", "parse"]

REGISTER_CLASS = {"pred": "p", "b8": "b16", "b16": "b16", "u16": "b16", "s16": "b16", "f16": "b16", "b32": "b32",
                  "u32": "b32", "s32": "b32", "f32": "b32", "b64": "b64", "u64": "b64", "s64": "b64",
                  "f64": "b64"}  # fmt: skip
BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
         "b64": 8, "u64": 8, "s64": 8, "f64": 8}  # fmt: skip
_VECTORS = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
SPECIAL_REGISTERS = {f"{vector}.{axis}" for vector in _VECTORS for axis in "xyz"} | {
    "laneid", "warpid", "nwarpid", "smid", "cluster_ctarank", "cluster_nctarank", "is_explicit_cluster",
    "dynamic_smem_size", "total_smem_size", "clock", "clock_hi", "clock64", "globaltimer", "lanemask_lt", "lanemask_le",
    "lanemask_eq", "lanemask_ge", "lanemask_gt"}  # fmt: skip
# Nothing in the emulator depends on them: how many registers and CTAs an SM shall have, and names for debuggers.
_IGNORED = (".pragma", ".loc", ".file")
_HEADER = (".version", ".target", ".address_size")
_LIMITS = ("maxnreg", "explicitcluster", "blocksareclusters")


def split_operands(text: str) -> list[str]:
    """Split at commas outside of brackets and braces."""
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += c in "[{(" or -(c in "]})")
        if c == "," and not depth:
            parts.append(text[begin:i].strip())
            begin = i + 1
    last = text[begin:].strip()
    return [*parts, last] if last else parts


def _statements(body: str, line: int) -> Iterator[tuple[str, str, int]]:
    """Yield ("{" or "}" or "label" or "statement", text, line); braces inside an instruction belong to its text."""
    at, label = 0, re.compile(r"([$%\w]+)\s*:(?!:)")
    while at < len(body):
        if body[at].isspace():
            line += body[at] == "\n"
            at += 1
        elif body[at] in "{}":
            yield body[at], body[at], line
            at += 1
        elif found := label.match(body, at):
            yield "label", found[1], line
            at = found.end()
        else:
            end = body.find(";", at)
            if end < 0:
                raise Unsupported(f"statement without an end: {body[at:].strip()!r}")
            yield "statement", " ".join(body[at:end].split()), line
            line += body.count("\n", at, end)
            at = end + 1


class _Scope:
    """Registers and labels of one pair of braces; inline assembly declares the same names again in each."""

    def __init__(self, outer: _Scope | None):
        self.outer = outer
        self.registers: dict[str, Reg] = {}
        self.labels: dict[str, int] = {}

    def register(self, name: str) -> Reg | None:
        found = self.registers.get(name)
        return found or (self.outer.register(name) if self.outer else None)

    def label(self, name: str) -> int:
        if name in self.labels:
            return self.labels[name]
        if self.outer is None:
            raise Unsupported(f"branch to {name}, which is no label in sight")
        return self.outer.label(name)


class _Body:
    """Parser of one kernel's body, statement by statement."""

    def __init__(self, symbols: set[str], shared: dict):
        self.scope = _Scope(None)
        self.counts = {"p": 0, "b16": 0, "b32": 0, "b64": 0}
        self.symbols = symbols  # parameters and variables in shared memory
        self.shared = shared  # name -> (alignment, size)
        self.code: list[Ins] = []
        self.branches: list[tuple[Ins, str, _Scope]] = []

    def read(self, text: str, first_line: int) -> None:
        for kind, statement, line in _statements(text, first_line):
            if kind == "{":
                self.scope = _Scope(self.scope)
            elif kind == "}":
                self.scope = self.scope.outer
            elif kind == "label":
                self.scope.labels[statement] = len(self.code)
            elif statement.startswith("."):
                self._directive(statement)
            else:
                self._instruction(statement, line)
        for ins, name, scope in self.branches:
            ins.args = [scope.label(name)]

    def _directive(self, statement: str) -> None:
        if found := re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement):
            if found[1] not in REGISTER_CLASS:
                raise Unsupported(f"registers of type .{found[1]}")
            for name in split_operands(found[2]):
                self._declare(REGISTER_CLASS[found[1]], name)
        elif found := _SHARED.match(statement):
            self.shared[found[3]] = _shared_variable(found)
            self.symbols.add(found[3])
        elif statement.split()[0] not in _IGNORED:
            raise Unsupported(f"directive {statement}")

    def _declare(self, cls: str, name: str) -> None:
        found = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
        for each in [f"{found[1]}{i}" for i in range(int(found[2]))] if found else [name]:
            self.scope.registers[each] = Reg(cls, self.counts[cls])
            self.counts[cls] += 1

    def _instruction(self, statement: str, line: int) -> None:
        guard, negated, whole = None, False, statement
        if statement.startswith("@"):
            name, statement = statement[1:].split(None, 1)
            negated = name.startswith("!")
            guard = self.scope.register(name.lstrip("!"))
            if guard is None or guard.cls != "p":
                raise Unsupported(f"guard @{name} is no predicate register")
        op, _, rest = statement.partition(" ")
        ins = Ins(op, [], guard, negated, line, whole)
        if op.split(".")[0] == "bra":
            self.branches.append((ins, rest.strip(), self.scope))
        else:
            ins.args = [self.operand(each) for each in split_operands(rest)]
        self.code.append(ins)

    def operand(self, text: str):
        """Return a register, number or address; a list for {a, b} and a|b; None for _; ("not", p) for !p."""
        text = text.strip()
        if text.startswith("{"):
            return [self.operand(each) for each in split_operands(text[1:-1])]
        if text.startswith("["):
            return self._address(text[1:-1])
        if "|" in text:
            return [self.operand(each) for each in text.split("|")]
        if text == "_":
            return None
        if text.startswith("!"):
            return ("not", self.operand(text[1:]))
        if found := self.scope.register(text):
            return found
        if text.startswith("%") and text[1:] in SPECIAL_REGISTERS:
            return Special(text[1:])
        if text in self.symbols:
            return text
        return _number(text)

    def _address(self, text: str) -> Address:
        parts = split_operands(text)
        base, offset = parts[0], 0
        if found := re.fullmatch(r"(.+?)\s*\+\s*(-?\w+)", base):
            base, offset = found[1].strip(), int(found[2], 0)
        if len(parts) > 2:
            raise Unsupported(f"address [{text}]")
        coords = self.operand(parts[1]) if len(parts) == 2 else []
        return Address(self.operand(base), offset, coords if isinstance(coords, list) else [coords])


def _number(text: str) -> Imm:
    """Return a constant (PTX ISA, section Constants): 0f and 0d give the bits of a float."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Imm(struct.unpack(">f", bytes.fromhex(text[2:]))[0], True)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return Imm(struct.unpack(">d", bytes.fromhex(text[2:]))[0], True, True)
    if re.fullmatch(r"-?0[0-7]+U?", text):
        return Imm(int(text.rstrip("U"), 8))
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
        return Imm(int(text.rstrip("U"), 0))
    raise Unsupported(f"operand {text}")


_SHARED = re.compile(r"(?:\.(?:extern|visible)\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?$")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")


def _shared_variable(found: re.Match) -> tuple[int, int]:
    """Return (alignment, size) of a shared variable; dynamic shared memory has size 0."""
    size = BYTES[found[2]]
    return int(found[1] or size), size * int(found[4] or (0 if found[4] == "" else 1))


def _parameters(text: str) -> tuple[dict, int]:
    """Return each parameter's (offset, size), and the end of the parameters.

    They are packed as in the ABI (PTX ISA, section Kernel Function Parameters).
    """
    params, end = {}, 0
    pattern = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+.*\s)?([\w$]+)(?:\[(\d+)\])?$")
    for each in split_operands(text):
        found = pattern.match(" ".join(each.split()))
        if not found or found[2] not in BYTES:
            raise Unsupported(f"parameter {each}")
        size = BYTES[found[2]] * int(found[4] or 1)
        align = int(found[1] or BYTES[found[2]])
        at = (end + align - 1) // align * align
        params[found[3]] = (at, size)
        end = at + size
    return params, end


def _launch_bounds(text: str) -> dict[str, tuple]:
    """Return the directives before a body (PTX ISA, section Performance-Tuning Directives)."""
    bounds = {}
    for name, numbers in re.findall(r"\.(\w+)\s*([\d,\s]*)", text):
        if name in ("reqntid", "maxntid", "reqnctapercluster", "minnctapersm"):
            given = [int(n) for n in numbers.replace(",", " ").split()]
            bounds[name] = tuple(given + [1] * (3 - len(given)))
        elif name not in _LIMITS:
            raise Unsupported(f"directive .{name}")
    return bounds


def _module_variables(text: str) -> dict:
    """Return shared variables declared outside of kernels. Other declarations are errors."""
    shared = {}
    for statement in re.sub(r"\{[^{}]*\}", "", _without_bodies(text)).split(";"):
        for line in filter(None, (line.strip() for line in statement.splitlines())):
            if line.split()[0] in (*_HEADER, *_IGNORED):
                continue
            found = _SHARED.match(line)
            if not found:
                raise Unsupported(f"directive {line}")
            shared[found[3]] = _shared_variable(found)
    return shared


def _without_bodies(text: str) -> str:
    kept, begin = [], 0
    for entry in _ENTRY.finditer(text):
        kept.append(re.sub(r"\.(visible|weak)\s*$", "", text[begin : entry.start()]))
        begin = _end_of_body(text, entry.end())
    return "".join([*kept, text[begin:]])


def _end_of_body(text: str, at: int) -> int:
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, at):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.end()
    raise Unsupported("an entry without an end")


def parse(text: str) -> list[Kernel]:
    """Return the kernels of a module."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.S)
    target = re.search(r"\.target\s+(\w+)", text)
    if not target:
        raise Unsupported("a module without .target")
    module_shared = _module_variables(text)
    kernels = []
    for entry in _ENTRY.finditer(text):
        params, param_bytes = _parameters(entry[2])
        bounds = _launch_bounds(entry[3])
        variables = dict(module_shared)
        body = _Body({*params, *variables}, variables)
        begin = entry.end()
        body.read(text[begin : _end_of_body(text, begin) - 1], 1 + text.count("\n", 0, begin))
        shared, end = {}, 0
        for name, (align, size) in sorted(variables.items(), key=lambda each: each[1][1] == 0):  # the dynamic part last
            at = (end + align - 1) // align * align
            shared[name] = (at, size)
            end = at + size
        labels = {ins.args[0] for ins, _, _ in body.branches}
        threads = bounds.get("reqntid") or bounds.get("maxntid")
        kernels.append(
            Kernel(
                entry[1],
                target[1],
                params,
                param_bytes,
                body.code,
                labels,
                body.counts,
                shared,
                end,
                threads,
                bounds.get("reqnctapercluster"),
                bounds.get("minnctapersm", (1,))[0],
            )  # fmt: skip
        )
    return kernels
