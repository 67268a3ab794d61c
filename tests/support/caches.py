"""List of all objects that the library keeps from call to call in a process, found in the source code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"python/glulam": "python", "ffi_bridge": "."}
"""Folders of sources, and the folder that each module's name starts from."""
KEPT = ("dict", "set", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "Kept", "Plans",
        "PreparedWeights", "_Kept", "_Caller", "defaultdict", "count", "Targets")  # fmt: skip
"""Constructors of objects that are changed after they were made, and so may hold state."""


def _called(node: ast.expr | None) -> str:
    """Return the last name of the function that an expression calls; "" if it is not a call."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Call):
        node = node.func  # lru_cache(n)(f)
    target = node.func if isinstance(node, ast.Call) else None
    return target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""


def _keeps(value: ast.expr | None) -> bool:
    is_empty = isinstance(value, (ast.Dict, ast.List, ast.Set)) and not any(ast.iter_child_nodes(value))
    return is_empty or _called(value) in (*KEPT, "lru_cache", "cache")


def _is_cached(node: ast.stmt) -> bool:
    names = [one.func if isinstance(one, ast.Call) else one for one in getattr(node, "decorator_list", ())]
    return any(getattr(one, "attr", "") in ("cache", "lru_cache") for one in names)


def _of_module(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and _keeps(node.value):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                yield target.id
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _is_cached(node):
            yield node.name


def caches() -> set[str]:
    """Return the names of all objects that the library keeps from call to call.

    For example "glulam.host.plans._all_kept".
    """
    found = set()
    for folder, root in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT / root).with_suffix("").parts).removesuffix(".__init__")
            body = ast.parse(file.read_text()).body
            found |= {f"{module}.{name}" for name in _of_module(body)}
    return found
