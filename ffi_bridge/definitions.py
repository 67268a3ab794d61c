"""Hashes of a Python file's code.

Comments, docstrings and line layout do not count, since objects do not depend on them.

A module of tables (dictionary literals with string keys) can be hashed in parts. One hash covers one row (a key and its
value) with the definitions that the row uses; another covers the rest of the file.
"""

from __future__ import annotations

import ast
import hashlib
import threading
from collections.abc import Collection, Iterable, Iterator

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Statements = Iterable[ast.stmt]


def _is_text(node: object) -> bool:
    """Return True if a statement is only a string: a docstring, or the description of the statement before."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def plain(node: object) -> str:
    """Return a syntax tree as text, without positions and docstrings. All versions of Python give the same text."""
    out: list[str] = []
    _write(node, out)
    return "".join(out)


def _write(node: object, out: list[str]) -> None:
    if isinstance(node, list):
        out.append("[")
        for one in node:
            if not _is_text(one):
                _write(one, out)
                out.append(",")
        out.append("]")
    elif isinstance(node, ast.AST):
        out.append(f"{type(node).__name__}(")
        for name in node._fields:
            value = getattr(node, name, None)
            if value is not None and value != []:  # a field that a later Python has is empty in older code
                out.append(f"{name}=")
                _write(value, out)
                out.append(",")
        out.append(")")
    else:
        out.append(repr(node))


def sha256(texts: Iterable[str]) -> str:
    """Return one sha256 (hexadecimal) over several texts, in their order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}\0{text}".encode())
    return digest.hexdigest()


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a module's statement defines; empty if the statement may do more than define names."""
    if any(isinstance(node, ast.NamedExpr) for node in ast.walk(statement)):
        return set()
    if isinstance(statement, _DEFINITIONS):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and all(isinstance(one, ast.Name) for one in targets):
        return _names(one for one in targets if one is not None)
    return set()


def _rows(statement: ast.stmt) -> dict[str, ast.expr]:
    """Return the keys and value expressions of the dict literal that a statement assigns to a name; {} if it assigns
    none, or one with other keys than texts."""
    value = getattr(statement, "value", None) if _bound(statement) else None
    if not isinstance(value, ast.Dict):
        return {}
    keys = [key.value if isinstance(key, ast.Constant) else None for key in value.keys]
    return dict(zip(keys, value.values, strict=True)) if all(isinstance(key, str) for key in keys) else {}  # type: ignore[arg-type]


_parsing = threading.Lock()


def parse(text: str) -> ast.Module:
    """Return the syntax tree of a file's text. Raises SyntaxError if the text is not Python.

    Only one thread parses at a time: CPython 3.11 counts the depth of the trees of all threads in one place, and fails
    if two threads parse at once.
    """
    with _parsing:
        return ast.parse(text)


class Code:
    """The code of one Python file, to be hashed as a whole or in parts. Raises SyntaxError if it is not Python."""

    def __init__(self, text: str) -> None:
        self._statements = [one for one in parse(text).body if not _is_text(one)]
        self._by_name: dict[str, list[ast.stmt]] = {}
        for statement in self._statements:
            for name in _bound(statement):
                self._by_name.setdefault(name, []).append(statement)

    def hash_of_all(self) -> str:
        """Return the hash of the whole file's code."""
        return sha256(map(plain, self._statements))

    def attributes(self, module: str) -> set[str] | None:
        """Return the names of the attributes of an imported module that the file uses.

        None: unknown, since the file renames the module or uses it in another way than as `module.attribute`.

        Args:
            module: the name under which the file imports the module.
        """
        nodes = [node for statement in self._statements for node in ast.walk(statement)]
        found, times = set[str](), 0
        for node in nodes:
            if isinstance(node, ast.alias) and node.name == module and node.asname not in (None, module):
                return None
            if isinstance(node, ast.Name) and node.id == module:
                times += 1
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module:
                found.add(node.attr)
                times -= 1
        return None if times else found

    def row_names(self) -> tuple[str, ...]:
        """Return the keys of all tables in their order."""
        return tuple(key for statement in self._statements for key in _rows(statement))

    def hash_of_row(self, key: str) -> str:
        """Return the hash of one row of the file's tables (dictionary literals).

        A kernel that uses only this row keeps its cache key when other rows are edited. The hash covers the row's
        value, all definitions that the value uses, directly or through others, and the row's position among all rows.

        Args:
            key: the row's key in its dictionary.
        """
        values = [rows[key] for statement in self._statements if key in (rows := _rows(statement))]
        return sha256([f"{self.row_names().index(key)}", *map(plain, values), *self._texts(self._reached(values))])

    def hash_of_rest(self, names: Collection[str]) -> str:
        """Return one hash over the definitions of `names` and all definitions that they use, directly or indirectly.

        Statements that define no name, and the definitions that these use, are hashed, too. A table is left out, even
        if `names` has it, unless one of the hashed statements uses the table.
        """
        asked = [statement for name in names for statement in self._by_name.get(name, ())]
        loose = [statement for statement in self._statements if not _bound(statement)]
        others = [*loose, *(statement for statement in asked if not _rows(statement))]
        return sha256([*sorted(names), *self._texts({*others, *self._reached(others)})])

    def _reached(self, nodes: Iterable[ast.AST]) -> set[ast.stmt]:
        """Return the statements that define the names used by `nodes`, directly or through other definitions."""
        reached, waiting = set[ast.stmt](), _names(nodes)
        while waiting:
            new = {one for name in waiting for one in self._by_name.get(name, ())} - reached
            reached |= new
            waiting = _names(new)
        return reached

    def _texts(self, chosen: Collection[ast.stmt]) -> Iterator[str]:
        return (plain(statement) for statement in self._statements if statement in chosen)
