"""Import graph of the modules: no cycles, including imports within functions, and no architecture named outside its own
folder.
"""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import cute_kernels
import ffi_bridge
import glulam
from cute_kernels.arch import ArchPolicy, policy_of, serving
from cute_kernels.architectures import ARCHS, capability
from ffi_bridge import sources
from ffi_bridge.profiles import all_stages, shipped_specs


def modules(package: str, root: Path) -> dict[str, Path]:
    """Return the files of a package's modules, by module name."""
    files = {path.relative_to(root).with_suffix(""): path for path in root.rglob("*.py")}
    named = {".".join((package, *path.parts)).removesuffix(".__init__"): file for path, file in files.items()}
    return named


def imported(name: str, file: Path, known: dict[str, Path]) -> set[str]:
    """Return the known modules that a module imports."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
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


def test_no_folder_of_the_front_is_part_of_a_circle() -> None:
    root = Path(glulam.__file__).parent  # type: ignore[arg-type]
    known = modules("glulam", root)
    graph: dict[str, set[str]] = {}
    for name, file in known.items():
        if name != "glulam":  # which gathers the public names
            others = {other.split(".")[1] for other in imported(name, file, known) if other != "glulam"}
            graph.setdefault(name.split(".")[1], set()).update(others - {name.split(".")[1]})
    assert len(graph) > 10
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the folders


def test_the_front_knows_no_architecture_by_name() -> None:
    root = Path(glulam.__file__).parent  # type: ignore[arg-type]
    assert not [path for path in root.rglob("*.py") if "cute_kernels.sm90" in path.read_text()]


@pytest.mark.parametrize("name", ARCHS)
def test_every_architecture_answers_for_itself(name: str) -> None:
    answers = policy_of(name)
    assert all(hasattr(answers, each) for each in ArchPolicy.__annotations__)
    assert name in serving(capability(name)) and ARCHS[name].gpus


@pytest.mark.parametrize(
    ("device", "best"),
    [
        ((8, 0), ["sm_80"]),
        ((8, 6), ["sm_86", "sm_80"]),
        ((8, 9), ["sm_89", "sm_86", "sm_80"]),
        ((9, 0), ["sm_90a", "sm_90"]),
        ((10, 0), ["sm_100a", "sm_100"]),
        ((10, 3), ["sm_103a", "sm_100"]),
        ((12, 1), ["sm_120"]),
        ((7, 5), []),
    ],
)
def test_a_gpu_is_served_by_the_best_architecture(device: tuple[int, int], best: list[str]) -> None:
    assert list(serving(device)) == best


BUILDS_ON = {"cute_kernels.sm100": ("cute_kernels.sm90", "cute_kernels.portable")}
"""Folders of architectures whose GEMMs are made of other folders' parts: Blackwell's load and store as Hopper's do, and
those that decode weights are portable ones."""


def test_the_folder_of_an_architecture_is_imported_by_itself_and_what_builds_on_it() -> None:
    """Who wants one asks by name, as `policy_of` does."""
    known = modules("cute_kernels", Path(cute_kernels.__file__).parent)
    folders = {f"cute_kernels.{folder}" for folder in {one.folder for one in ARCHS.values()}}
    folder_of = {name: ".".join(name.split(".")[:2]) for name in known}
    pairs = {(name, other) for name, file in known.items() for other in imported(name, file, known)}
    inside = {(name, other) for name, other in pairs if folder_of[other] in folders}
    assert folders <= set(folder_of.values()) and {folder_of[name] for name, _ in inside} >= folders
    assert not [
        f"{name} imports {other}"
        for name, other in inside
        if folder_of[other] not in (folder_of[name], *BUILDS_ON.get(folder_of[name], ()))
    ]


def test_no_kernel_is_made_of_a_policy() -> None:
    """Editing one compiles nothing."""
    known = sources.of("cute_kernels")
    tracers = {sources.tracer_of(spec) for arch in ARCHS for spec in all_stages(shipped_specs(arch))}
    files = {file.name for tracer in tracers for file in known.closure(tracer.partition(":")[0])}
    assert len(files) > 20
    for folder in {one.folder for one in ARCHS.values()}:
        assert files.isdisjoint({"arch.py", f"{folder}/policy.py", f"{folder}/cost.py", f"{folder}/configs.py"})
