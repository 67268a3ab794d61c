"""Source files in a kernel's cache key: those that its module imports, directly or not, and no others."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cute_kernels import stages
from cute_kernels.sm90.configs import shipped_specs
from ffi_bridge import ToolchainError, sources
from ffi_bridge.profiles import all_stages
from ffi_bridge.sources import EVERYTHING, Import
from toys import REPOSITORY

FILES = {
    "__init__.py": "",
    "alone.py": "import os, sys\n",
    "shared.py": "def late():\n    from .deep import inner\n",
    "direct.py": "from made import shared\n",
    "deep/__init__.py": "from ..always import x\n",
    "deep/inner.py": "from . import cyclic\n",
    "deep/cyclic.py": "import made.deep.inner as itself\nfrom .. import no_module\n",
    "deep/up.py": "if TYPE_CHECKING:\n    from ..alone import x\n",
    "always.py": "",
    "star.py": "from .deep import *\n",
    "named.py": 'import importlib\nimportlib.import_module("made." + "alone")\n',
}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a package with the files FILES."""
    for name, content in FILES.items():
        (tmp_path / "made" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made" / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "made"


def _closure(module: str) -> set[str]:
    return {file.name for file in sources.of("made").closure(module)}


INNER = {"__init__.py", "deep/__init__.py", "always.py", "deep/inner.py", "deep/cyclic.py"}


@pytest.mark.parametrize(
    ("module", "files"),
    [
        ("made.alone", {"__init__.py", "alone.py"}),
        ("made.deep.inner", INNER),
        ("made.shared", {"shared.py"} | INNER),
        ("made.direct", {"direct.py", "shared.py"} | INNER),
        ("made.deep.up", {"__init__.py", "deep/__init__.py", "always.py", "deep/up.py", "alone.py"}),
        ("made.star", {"star.py", "deep/up.py", "alone.py"} | INNER),
        ("made.named", set(FILES)),
    ],
)
def test_a_closure_is_what_importing_and_running_may_import(made: Path, module: str, files: set[str]) -> None:
    assert _closure(module) == files


def test_an_absent_module_is_named(made: Path) -> None:
    with pytest.raises(ToolchainError, match=r"no module 'made\.absent'"):
        _closure("made.absent")
    with pytest.raises(ToolchainError, match="no package 'not_there'"):
        sources.of("not_there")


def test_an_edit_changes_the_hashes_of_what_reaches_it(made: Path) -> None:
    modules = ("made.alone", "made.shared", "made.direct", "made.deep.up")

    def changed_by(edit: Callable[[], object]) -> set[str]:
        before = {module: sources.of("made").hash_of(module) for module in modules}
        edit()
        return {module for module in modules if sources.of("made").hash_of(module) != before[module]}

    assert changed_by(lambda: None) == set()
    assert changed_by(lambda: (made / "deep" / "cyclic.py").write_text("x = 1\n")) == {"made.shared", "made.direct"}
    assert changed_by(lambda: (made / "alone.py").write_text("x = 1\n")) == {"made.alone", "made.deep.up"}
    assert changed_by(lambda: (made / "star.py").write_text("x = 1\n")) == set()
    assert changed_by(lambda: (made / "new.py").write_text("x = 1\n")) == set()
    assert changed_by(lambda: (made / "direct.py").write_text("from . import new\n")) == {"made.direct"}
    assert changed_by(lambda: (made / "__init__.py").write_text("x = 1\n")) == set(modules)
    assert changed_by(lambda: (made / "new.py").rename(made / "other.py")) == {"made.direct"}
    assert changed_by(lambda: os.utime(made / "alone.py")) == set(), "the same content"


def test_where_the_files_lie_does_not_matter(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sources.of("made").hash_of("made.direct")
    shutil.copytree(made, tmp_path / "elsewhere" / "made")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    assert sources.of("made").files[0].path.startswith(str(tmp_path / "elsewhere"))
    assert sources.of("made").hash_of("made.direct") == before


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import a.b as c, d  # (e\n", {Import(0, "a.b", ""), Import(0, "d", "")}),
        ("from ..a import (b,  # (why)\n    c)\n", {Import(2, "a", "b"), Import(2, "a", "c")}),
        ("from . import a, \\\n    b\n", {Import(1, "", "a"), Import(1, "", "b")}),
        ("if x: import a\n", {Import(0, "a", "")}),
        ("x = 1; from a import b\n", {Import(0, "a", "b")}),
        ('"""Words\nfrom the first line (on.\n"""\nimport a\n', {Import(0, "a", "")}),
        ("import a  # (\nimport b\nprint(1)\n", {Import(0, "a", ""), Import(0, "b", "")}),
        ("class A:\n    def f(self):\n\timport a\n", {Import(0, "a", "")}),
        ("import a\nthis is no Python\nx =\n", {Import(0, "a", "")}),
        ("x = __import__(name)\n", {EVERYTHING}),
        ("from importlib import import_module\n", {EVERYTHING}),
    ],
)
def test_imports_in_any_form(text: str, found: set[Import]) -> None:
    assert sources.imports(text) == found


def test_the_short_way_finds_what_parsing_whole_files_does() -> None:
    for file in [*REPOSITORY.glob("cute_kernels/**/*.py"), *REPOSITORY.glob("python/**/*.py")]:
        text = file.read_text()
        if sources.imports(text) != {EVERYTHING}:
            assert sources.imports(text) >= frozenset(sources._imports_in(ast.walk(ast.parse(text)))), file


def test_what_a_tracer_imports_is_in_its_closure() -> None:
    """Of the kernels that ship: nothing that they are made of goes unseen."""
    modules = sorted({stages.tracer_of(spec).partition(":")[0] for spec in all_stages(shipped_specs())})
    script = (
        "import importlib, json, sys; sys.modules['torch'] = None\n"
        "from ffi_bridge import compiler; compiler._cutlass('sm_90a'); found = {}\n"
        f"for module in {modules}:\n"
        "    for name in [name for name in sys.modules if name.partition('.')[0] == 'cute_kernels']:\n"
        "        del sys.modules[name]\n"
        "    importlib.import_module(module)\n"
        "    found[module] = [name for name in sys.modules if name.partition('.')[0] == 'cute_kernels']\n"
        "print(json.dumps(found))"
    )
    path = os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout)
    assert sorted(imported) == modules
    for module, names in imported.items():
        closure = {file.name.removesuffix(".py") for file in sources.of("cute_kernels").closure(module)}
        for name in names:
            inner = "/".join(name.split(".")[1:])
            assert {inner, f"{inner}/__init__".lstrip("/")} & closure, f"{module} imports {name}"
