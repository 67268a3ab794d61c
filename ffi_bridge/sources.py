"""The source files of a kernel: the module that traces it and that module's imports, found without running any code.

The key of a cached function contains a hash over these files, so that an edit recompiles exactly the kernels that it
can reach. An import whose meaning is unclear counts as an import of every module: one file too many only costs a
compile, but one file too few would serve a kernel of old sources.

Stored objects have a finer key, the hash of the files' code (`definitions`). It ignores comments, docstrings and line
layout, which leave no trace in an object, and it covers only activations that the kernel computes. This
hash takes longer, 0.7 s for all files, and is computed only before a compile.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cute_kernels import stages
from cute_kernels.specs import ACTIVATIONS, Spec

from . import compiler, resources, toolchain
from .definitions import Code, parse, sha256
from .errors import ToolchainError
from .toolchain import Source

_MAKERS = (compiler, resources)  # modules of the compile process that decide what is in an object and its record

# Parsing whole files takes 0.35 s for the kernels' package, parsing the import statements alone 10 ms.
_STATEMENT = re.compile(r"^[ \t]*((?:from|import)\b(?:[^(\n\\]|\\\n)*(?:\([^)]*\))?)", re.MULTILINE)
_INSIDE_A_LINE = re.compile(r"[;:][ \t]*(?:from|import)\b")
_AT_RUN_TIME = re.compile(r"\b(?:importlib|__import__|runpy|pkgutil|exec|eval)\b")


class Import(NamedTuple):
    """One import: `from <level dots><module> import <name>`, where name "*" means every name.

    `import <module>` has level 0 and name "".
    """

    level: int
    module: str
    name: str


EVERYTHING = Import(0, "", "*")
"""The one import listed for a file that may import at run time (importlib, exec, ...): it means every module."""


def _imports_in(nodes: Iterator[ast.AST]) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(0, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(node.level, node.module or "", alias.name) for alias in node.names)


def _parsed(text: str) -> Iterator[Import]:
    return _imports_in(ast.walk(parse(text)))


def imports(text: str) -> frozenset[Import]:
    """Return every import of a Python file, including imports in functions and under TYPE_CHECKING."""
    if _AT_RUN_TIME.search(text):
        return frozenset([EVERYTHING])
    with contextlib.suppress(
        SyntaxError
    ):  # prose in a docstring, or a statement that a comment's parenthesis cut short
        if not _INSIDE_A_LINE.search(text):
            return frozenset(_parsed("\n".join(_STATEMENT.findall(text))))
    with contextlib.suppress(SyntaxError):  # such a file cannot run; once corrected, it is another file
        return frozenset(_parsed(text))
    return frozenset()


@functools.cache
def _read(source: Source) -> tuple[bytes, frozenset[Import]]:
    """Return sha256 and imports of a file as it was when `source` was listed."""
    content = Path(source.path).read_bytes()
    return hashlib.sha256(content).digest(), imports(content.decode(errors="replace"))


@functools.cache
def _of_code(source: Source, question: Callable[..., Any], *about: Any) -> Any:
    """Call a method of Code on a file as it was when `source` was listed; return None if the file is not Python.

    Results are cached, but syntax trees are not: the trees of a kernel's files would take 20 MB.

    Args:
        source: the file.
        question: the method of Code.
        about: the method's arguments.
    """
    with contextlib.suppress(SyntaxError, UnicodeDecodeError):
        return question(Code(Path(source.path).read_text(encoding="utf-8")), *about)
    return None


class Sources:
    """The Python files of a top-level package or module, listed when the object is made and read on demand.

    Attributes:
        files: the files, sorted.
    """

    def __init__(self, package: str, files: list[Source]) -> None:
        self.files = files
        self._modules: dict[str, list[Source]] = {}
        is_folder = bool(toolchain.package_folders(package))
        for file in files:
            parts = [package, *file.name.removesuffix(".py").split("/")] if is_folder else [package]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self._modules.setdefault(name, []).append(file)
        self._closures: dict[str, list[Source]] = {}
        self._hashes: dict[str, str] = {}
        self._code_hashes: dict[tuple[str, tuple[str, ...] | None], str] = {}

    def closure(self, module: str) -> list[Source]:
        """Return the files of `module` and of all modules of the package that it may import, directly or not, sorted.

        Raises:
            ToolchainError: there is no such module.
        """
        if module not in self._closures:
            if module not in self._modules:
                raise ToolchainError(f"the kernels' sources are missing: no module {module!r}")
            reached, waiting = set[str](), [*self._on_the_way(module)]
            while waiting:
                if (name := waiting.pop()) not in reached:
                    reached.add(name)
                    waiting += self._imported_by(name)
            self._closures[module] = sorted(file for name in reached for file in self._modules[name])
        return self._closures[module]

    def hash_of(self, module: str) -> str:
        """Return sha256 over names and contents of the files of `closure`; their folder does not matter."""
        if module not in self._hashes:
            digest = hashlib.sha256()
            for file in self.closure(module):
                digest.update(f"{file.name}\0".encode() + _read(file)[0])
            self._hashes[module] = digest.hexdigest()
        return self._hashes[module]

    def hash_of_code(self, module: str, formulas: tuple[str, ...] | None = None) -> str:
        """Return sha256 over names and code of the files of `closure`.

        Args:
            module: the module whose closure is hashed.
            formulas: the activations that the kernel computes. Module `stages.FORMULAS` has the formulas of all
                activations; only the parts for these are hashed. None: the whole module is hashed.
        """
        key = module, formulas
        if key not in self._code_hashes:
            parts = [] if formulas is None else self._formulas(module, formulas)
            left_out = self._modules.get(stages.FORMULAS, []) if parts else []
            for file in self.closure(module):
                if file not in left_out:
                    parts += [file.name, _of_code(file, Code.hash_of_all) or _read(file)[0].hex()]
            self._code_hashes[key] = sha256(parts)
        return self._code_hashes[key]

    def _formulas(self, module: str, formulas: tuple[str, ...]) -> list[str]:
        """Return hashes of the parts of module `stages.FORMULAS` (tables of activations' formulas) that a closure uses.

        A closure is a module with all that it imports, directly or indirectly.

        The parts are the names that the closure uses and, if a module of the closure evaluates formulas, the rows
        `formulas`.

        Args:
            module: the module whose closure is hashed.
            formulas: the activations that the kernel computes.

        Returns:
            The hashes; empty if the file's parts cannot be separated.
        """
        files = self.closure(module)
        of_formulas, readers = (self._modules.get(name, []) for name in (stages.FORMULAS, stages.READS_FORMULAS))
        if len(of_formulas) != 1 or of_formulas[0] not in files:
            return []
        source = of_formulas[0]
        if (
            _of_code(source, Code.row_names) != ACTIVATIONS
        ):  # `formulas` are rows of the file as imported by this process
            return []
        names = set[str]()
        for name, listed in self._modules.items():
            for file in listed:
                used = set[str]() if file in of_formulas or file not in files else self._used(name, file)
                if used is None:
                    return []
                names |= used
        rows = formulas if any(file in files for file in readers) else ()
        questions = [(Code.hash_of_rest, tuple(sorted(names))), *((Code.hash_of_row, name) for name in rows)]
        return [_of_code(source, *question) for question in questions]

    def _used(self, module: str, file: Source) -> set[str] | None:
        """Return the names of `stages.FORMULAS` that a module's file uses; None if the file may use any."""
        names, last = set[str](), stages.FORMULAS.rpartition(".")[2]
        for imported in _read(file)[1]:
            if stages.FORMULAS not in self._meant(imported, _importing(module, file)):
                continue
            if imported.module.rpartition(".")[2] == last and imported.name not in ("", "*"):
                names.add(imported.name)
                continue
            attributes = _of_code(file, Code.attributes, last) if imported.name == last else None
            if attributes is None:
                return None
            names |= attributes
        return names

    def _on_the_way(self, name: str) -> Iterator[str]:
        """Yield the modules that `import <name>` runs: the parent packages and the module itself.

        `name` need not be the name of a module.
        """
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            if (module := ".".join(parts[:length])) in self._modules:
                yield module

    def _imported_by(self, module: str) -> Iterator[str]:
        for file in self._modules[module]:
            for imported in _read(file)[1]:
                yield from self._meant(imported, _importing(module, file))

    def _meant(self, imported: Import, package: str) -> Iterator[str]:
        """Yield the modules that an import in a module of `package` runs."""
        if imported == EVERYTHING:
            yield from self._modules
            return
        for _ in range(imported.level - 1):
            package = _parent(package)
        base = ".".join(filter(None, [package if imported.level else "", imported.module]))
        yield from self._on_the_way(base)
        if imported.name == "*":
            yield from (name for name in self._modules if _parent(name) == base)
        elif imported.name:
            yield from self._on_the_way(f"{base}.{imported.name}")


def _importing(module: str, file: Source) -> str:
    """Return the package from which relative imports of a module's file start."""
    return module if file.name.endswith("__init__.py") else _parent(module)


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


_known: dict[str, Sources] = {}


def of(package: str) -> Sources:
    """Return the current sources of a package; the same object until a file is added, removed or written.

    Raises:
        ToolchainError: there is no such package.
    """
    files = toolchain.sources_of(package)
    known = _known.get(package)
    if known is None or known.files != files:
        known = _known[package] = Sources(package, files)
    return known


def tracer_of(spec: Spec, tracer: str | None = None) -> str:
    """Return the "module:function" that traces a spec: `tracer` or, if it is None, the kernels' own tracer."""
    return tracer or stages.tracer_of(spec)


def package_of(tracer: str | None) -> str:
    """Return the top-level package of a tracer. None: the package of the kernels."""
    return (tracer or stages.__name__).partition(":")[0].partition(".")[0]


@functools.cache
def _makers() -> str:
    """Return sha256 over the modules that turn a traced function into an object, read once per process."""
    digest = hashlib.sha256()
    for module in _MAKERS:
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()


@functools.cache
def _code_of_makers() -> str:
    return sha256(Code(Path(str(module.__file__)).read_text(encoding="utf-8")).hash_of_all() for module in _MAKERS)


def file_hashes(tracer: str, known: Sources) -> dict[str, str]:
    """Return hashes, by name, of all sources that the kernels of a tracer (the function that traces them) depend on.

    There are two hashes: one of the tracer's module and all that it imports (`Sources.closure`), and one of the modules
    of the compile process.

    Args:
        tracer: "module:function".
        known: the sources of the tracer's package.
    """
    return {tracer.replace(":", "."): known.hash_of(tracer.partition(":")[0]), compiler.__name__: _makers()}


def code_hashes(spec: Spec, tracer: str, known: Sources) -> dict[str, str]:
    """Return hashes, by name, of the code that the object of a stage (one kernel of a call) depends on.

    These are the hashes of `file_hashes`, but without comments, docstrings and layout (`definitions`).

    Args:
        spec: the stage's spec.
        tracer: "module:function".
        known: the sources of the tracer's package.
    """
    module = tracer.partition(":")[0]
    formulas = stages.formulas_of(spec) if module.startswith(f"{package_of(None)}.") else None
    return {tracer.replace(":", "."): known.hash_of_code(module, formulas), compiler.__name__: _code_of_makers()}
