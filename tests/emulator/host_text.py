"""Parser for the text of a host function: operations, and the information in their types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from .faults import Fault

_LINE = re.compile(r"(?:(%[\w-]+(?:, %[\w-]+)*) = )?([a-z_]+(?:\.[a-z_]+)*)(.*)")


class Line(NamedTuple):
    """One operation.

    body: for scf.if, the lines of the two branches.
    """

    results: tuple[str, ...]
    name: str
    operands: tuple[str, ...]
    text: str
    body: tuple[list[Line], list[Line]] | None = None


def operations(text: Iterator[str]) -> tuple[list[Line], bool]:
    """Read the operations of one region; also return True if an else follows it."""
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
            then, has_other = operations(text)
            body = then, operations(text)[0] if has_other else []
        operands = re.findall(r"%[\w-]+", rest.split(" : ")[0])
        found.append(Line(tuple(results.split(", ")) if results else (), name, tuple(operands), rest, body))
    return found, False


def quoted(text: str) -> list[str]:
    """Return the texts in quotation marks."""
    return re.findall(r'"([^"]*)"', text)


def element_of(memref: str) -> str:
    """Return the element type of a memref, such as "bf16"."""
    return re.findall(r"memref<(\w+)", memref)[0]


def constant(text: str) -> int | float:
    """Return the value of an arith.constant."""
    if text in ("true", "false"):
        return int(text == "true")
    return float(text) if "." in text or "e" in text else int(text)


def parameter_types(text: str) -> list[str]:
    """Return the operand types of a launch, from "= 17>, (i64, !cute.coord_tensor<"(0,0)", "...">, ...) -> ..."."""
    inner, depth, found = text[text.index("(") + 1 : text.rindex(") -> ")], 0, [""]
    for part in re.findall(r'"[^"]*"|.', inner):
        depth += {"<": 1, ">": -1}.get(part, 0)
        if part == "," and not depth:
            found.append("")
        else:
            found[-1] += part
    return [each.strip() for each in found if each.strip()]
