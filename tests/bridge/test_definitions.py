"""Keys of compiled objects: hashes of the sources' code without comments, with only the activation formulas that a
kernel computes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cute_kernels
from cute_kernels import formulas, specs, stages
from cute_kernels.sm90.configs import shipped_specs
from cute_kernels.specs import ACTIVATION_FORMS, ACTIVATIONS, KINDS, DgluSpec, GroupedGluSpec, LayerSpec, Spec
from ffi_bridge import sources, toolchain
from ffi_bridge.definitions import Code
from ffi_bridge.profiles import all_stages
from ffi_bridge.sources import Sources
from toys import REPOSITORY

TEXT = '''"""Words."""
import os
LIMIT = 4.0
UNUSED = 3

def _cut(x):
    """More words."""
    return min(x, LIMIT)  # a comment

TABLE: dict = {
    "cut": lambda x: _cut(x),
    "same": lambda x: x,
}
"""About it."""
NAMES = tuple(TABLE)
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Words."""', ""),
        ('    """More words."""\n', ""),
        ("  # a comment", ""),
        ('"""About it."""', '"""Something else."""'),
        ("min(x, LIMIT)", "(min(\n        x, LIMIT,\n    ))"),
        ("LIMIT = 4.0", "\n\n# above\nLIMIT  =  4.00"),
    ],
)
def test_words_and_layout_are_no_code(old: str, new: str) -> None:
    assert old in TEXT
    assert Code(TEXT.replace(old, new)).hash_of_all() == Code(TEXT).hash_of_all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("4.0", "4"),
        ("UNUSED = 3", "UNUSED = True"),
        ("UNUSED = 3", "UNUSED = '3'"),
        ("min(x, LIMIT)", "min(LIMIT, x)"),
        ("import os", "import sys"),
        ("def _cut(x)", "def _cut(x, /)"),
        ("def _cut(x)", "def _cut(x=None)"),
        ('"same": lambda x: x', '"same": lambda x: -x'),
        ("TABLE: dict", "TABLE"),
    ],
)
def test_all_else_is_code(old: str, new: str) -> None:
    assert old in TEXT
    assert Code(TEXT.replace(old, new)).hash_of_all() != Code(TEXT).hash_of_all()


Parts = tuple[set[str], bool]


def _changed(text: str, names: list[str]) -> Parts:
    """Compare code with TEXT. Return the keys of rows whose hash differs, and True if the hash of the rest of `names`
    differs.
    """
    before, after = Code(TEXT), Code(text)
    rows = {key for key in before.row_names() if before.hash_of_row(key) != after.hash_of_row(key)}
    return rows, before.hash_of_rest(names) != after.hash_of_rest(names)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("4.0", "5.0", ({"cut"}, False)),
        ("min(x", "max(x", ({"cut"}, False)),
        ("lambda x: x", "lambda x: -x", ({"same"}, False)),
        ("UNUSED = 3", "UNUSED = 4", (set(), False)),
        ("UNUSED = 3", "UNUSED = 3\nTABLE['same'] = abs", (set(), True)),
        ("UNUSED = 3", "if LIMIT:\n    LIMIT = 3", (set(), True)),
        ("UNUSED = 3", "print((LIMIT := 3))", (set(), True)),
        ('    "same"', '    "new": abs,\n    "same"', ({"same"}, False)),
        ("    return", "    global LIMIT\n    return", ({"cut"}, False)),
    ],
)
def test_a_row_is_its_text_and_all_that_it_uses(old: str, new: str, changed: Parts) -> None:
    assert old in TEXT
    assert _changed(TEXT.replace(old, new), ["TABLE"]) == changed


def test_what_computes_with_a_table_depends_on_all_of_it() -> None:
    for text in (TEXT.replace("lambda x: x", "lambda x: -x"), TEXT.replace("4.0", "5.0")):
        assert _changed(text, ["TABLE"])[1] is False
        assert _changed(text, ["TABLE", "NAMES"])[1] is True


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from . import formulas\nx = formulas.A, formulas.B.c\n", {"A", "B"}),
        ("from . import formulas\n", set()),
        ("from . import formulas\nx = vars(formulas)\n", None),
        ("from . import formulas as other\nx = other.A\n", None),
    ],
)
def test_attributes_that_a_file_uses_of_a_module(text: str, found: set[str] | None) -> None:
    assert Code(text).attributes("formulas") == found


STAGES = sorted(all_stages(shipped_specs()), key=lambda spec: spec.name)
FORMULAS = Path(str(formulas.__file__)).read_text()


def _keys(folder: Path) -> dict[str, str]:
    """Return the hash of the kernels' sources in a folder that each spec's object key contains, by the spec's name."""
    known = Sources("cute_kernels", sorted(toolchain._sources_in(str(folder))))
    return {spec.name: sources.code_hashes(spec, tracer, known)[tracer.replace(":", ".")] for spec, tracer in TRACED}


TRACED = [(spec, stages.tracer_of(spec)) for spec in STAGES]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """An unchanged copy of the kernels' sources, and its keys by spec name. Shared by tests, which must not change
    it.
    """
    folder = tmp_path_factory.mktemp("kernels") / "cute_kernels"
    shutil.copytree(Path(cute_kernels.__path__[0]), folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder, _keys(folder)


@pytest.fixture
def edited(original: tuple[Path, dict[str, str]]) -> Callable[..., set[str]]:
    """Return a function that replaces text in one source file and returns the names of the specs whose keys change."""
    folder, before = original

    def edit(name: str, old: str, new: str) -> set[str]:
        file = folder / name
        text = file.read_text()
        assert old in text
        try:
            file.write_text(text.replace(old, new))
            after = _keys(folder)
        finally:
            file.write_text(text)
        return {spec for spec, key in after.items() if key != before[spec]}

    return edit


def _computing(*names: str) -> set[str]:
    """Return the names of specs whose kernels may compute any of these activations."""
    found = set()
    for spec in STAGES:
        if isinstance(spec, (GroupedGluSpec, DgluSpec)):
            computed = ACTIVATION_FORMS[spec.activation]
        else:
            computed = ACTIVATIONS if isinstance(spec, LayerSpec) and spec.kernel.startswith("gate") else ()
        found |= {spec.name} if not set(names).isdisjoint(computed) else set()
    return found


@pytest.mark.parametrize(
    ("old", "new", "activations"),
    [
        ("relu * u, m.select(", "relu * u + u, m.select(", ("reglu",)),
        ("    return a * m.sigmoid(a)\n", "    return m.sigmoid(a) * a\n", ("swiglu", "silu")),
        ("INV_SQRT_2_PI = 0.39", "INV_SQRT_2_PI = 0.40", ("gelu",)),
        ('"geglu": Formula(', '"geglu": Formula(*(), ', ("geglu",)),
        ("    return silu * u, u * slope, silu\n", "    return u * silu, u * slope, silu\n", ("swiglu",)),
        ("class Formula(NamedTuple):", "class Formula(NamedTuple):\n    first: int = 0", ACTIVATIONS),
    ],
)
def test_an_edit_of_a_formula_reaches_kernels_that_compute_it(
    edited: Callable[..., set[str]], old: str, new: str, activations: tuple[str, ...]
) -> None:
    """Of the formula itself, of what it uses, and of a constant."""
    changed = edited("formulas.py", old, new)
    assert changed == _computing(*activations) and 0 < len(changed) < len(STAGES)


def test_an_edit_of_words_reaches_no_kernel(edited: Callable[..., set[str]]) -> None:
    assert not edited("formulas.py", "from __future__", "# above\nfrom __future__")
    assert not edited("formulas.py", '"""Return clamped_swiglu and ', '"""Return it and ')
    assert not edited("activation.py", "LOG2_E = ", "# base 2\nLOG2_E = ")


def test_an_edit_of_other_code_reaches_all_that_imports_it(edited: Callable[..., set[str]]) -> None:
    reached = {spec.name for spec, tracer in TRACED if "activation.py" in _closure(tracer)}
    assert edited("activation.py", "LOG2_E = 1.4426950408889634", "LOG2_E = 1.4426950408889635") == reached
    assert edited("specs/activations.py", "\nKINDS = ", "\nMORE = ()\nKINDS = ") == {spec.name for spec in STAGES}
    assert edited("formulas.py", "\nINV_SQRT", "\nprint()\nINV_SQRT") == {spec.name for spec in STAGES}


def test_other_names_than_the_process_has_are_told_by_the_whole_file(edited: Callable[..., set[str]]) -> None:
    assert edited("formulas.py", '"geglu": Formula(', '"other": Formula(') == {spec.name for spec in STAGES}


def _closure(tracer: str) -> set[str]:
    return {file.name for file in sources.of("cute_kernels").closure(tracer.partition(":")[0])}


def test_kernels_know_activations_by_their_places_in_the_tables() -> None:
    """A row's hash has its place, which kernels of several activations compare with."""
    assert Code(FORMULAS).row_names() == ACTIVATIONS == tuple(KINDS)


def test_formulas_are_computed_through_one_module() -> None:
    """Others read names: `specs.activations` alone imports the tables, and hands none on."""
    known = sources.of("cute_kernels")
    reached = {file for _, tracer in TRACED for file in known.closure(tracer.partition(":")[0])}
    names = {name: file for name, (file,) in known._modules.items() if file in reached}
    importing = {name for name, file in names.items() if known._used(name, file) != set()}
    assert importing == {stages.READS_FORMULAS, "cute_kernels.specs.activations"}
    tables = [value for value in vars(formulas).values() if isinstance(value, dict) and "swiglu" in value]
    assert tables
    for name, file in names.items():
        for imported in sources._read(file)[1]:
            if imported.module.rpartition(".")[2] in ("specs", "activations") and name != stages.READS_FORMULAS:
                value = getattr(specs, imported.name, getattr(specs.activations, imported.name, None))
                assert not any(value is table for table in tables), f"{name} reads formulas"


def _computed() -> dict[str, Spec]:
    """Return one small kernel's spec for each way to use activation formulas, by a short name."""
    wanted = {
        "mm": "grouped_mm_bf16_nt_", "wgrad": "grouped_wgrad_bf16_", "swiglu": "grouped_glu_bf16_swiglu_",
        "gated": "grouped_glu_bf16_gated_", "geglu": "dglu_bf16_geglu_",
    }  # fmt: skip
    found = {use: next((spec for spec in STAGES if spec.name.startswith(begin)), None) for use, begin in wanted.items()}
    return {use: spec for use, spec in found.items() if spec is not None}


def test_kernels_compute_no_other_formulas_than_their_keys_have(tmp_path: Path) -> None:
    used = _computed()
    assert {"mm", "wgrad", "geglu"} < used.keys()
    script = (
        "import json, pathlib, sys; from ffi_bridge import compiler, host; compiler._cutlass('sm_90a')\n"
        "from cute_kernels import activation, formulas, specs, stages\n"
        "read = []\n"
        "class Table(dict):\n"
        "    def __getitem__(self, name):\n"
        "        read.append(name)\n"
        "        return super().__getitem__(name)\n"
        "for name, value in vars(formulas).items():\n"
        "    if isinstance(value, dict) and {'swiglu', 'silu'} & value.keys() and hasattr(activation, name):\n"
        "        setattr(activation, name, Table(value))\n"
        "found = {}\n"
        "for one in json.loads(sys.argv[1]):\n"
        "    read.clear(); spec = specs.from_dict(one)\n"
        "    compiler.compile_spec(spec, pathlib.Path(sys.argv[2]), stages.tracer_of(spec), host.here())\n"
        "    found[spec.name] = sorted(set(read))\n"
        "print(json.dumps(found))"
    )
    path = os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])
    given = json.dumps([specs.to_dict(spec) for spec in used.values()])
    done = subprocess.run(
        [sys.executable, "-c", script, given, str(tmp_path)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {spec.name: sorted(stages.formulas_of(spec)) for spec in used.values()}
