"""Modules import one way, those imported within functions included."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import cute_kernels
import ffi_bridge
import glulam


def modules(package: str, root: Path) -> dict[str, Path]:
    """By name, those of a package."""
    files = {path.relative_to(root).with_suffix(""): path for path in root.rglob("*.py")}
    named = {".".join((package, *path.parts)).removesuffix(".__init__"): file for path, file in files.items()}
    return named


def imported(name: str, file: Path, known: dict[str, Path]) -> set[str]:
    """What a module imports of those that are known."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = resolve_name("." * node.level + (node.module or ""), package)
            found |= {f"{source}.{alias.name}" if f"{source}.{alias.name}" in known else source for alias in node.names}
    return found & known.keys() - {name}


@pytest.mark.parametrize("package", [glulam, ffi_bridge, cute_kernels], ids=lambda package: package.__name__)
def test_no_import_is_part_of_a_circle(package: object) -> None:
    name = package.__name__  # type: ignore[attr-defined]
    known = modules(name, Path(package.__file__).parent)  # type: ignore[attr-defined]
    graph = {one: imported(one, file, known) for one, file in known.items()}
    assert len(graph) > 10 and sum(map(len, graph.values())) > len(graph)
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules
    assert order.index(name) > 0
