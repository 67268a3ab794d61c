"""Documentation pages: each is in the index, is short, has valid links, and its lists are complete."""

from __future__ import annotations

import ast
import functools
import re
import runpy
from pathlib import Path

import pytest
from support.pages import DOCS, README, REPOSITORY, each, spans

import ffi_bridge
import glulam
import glulam.distributed
from ffi_bridge import toolchain
from perf import report, results

INDEX = DOCS / "README.md"
PAGES = [page for pattern in ("*.md", "docs/**/*.md", "perf/**/*.md") for page in sorted(REPOSITORY.glob(pattern))]
IN_DOCS = sorted(DOCS.rglob("*.md"))
MOST_LINES, MOST_COLUMNS = 300, 120
PICTURES = DOCS / "pictures"


def links(page: Path) -> list[str]:
    """Return the targets of a page's links, including pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", page.read_text())


@functools.cache
def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@each(PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, heading = link.partition("#")
        if "://" not in link:
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {link}"
            assert not heading or heading in anchors(target), f"{page.name}: {link}"


def test_every_page_is_in_the_index() -> None:
    """A folder's pages are reached from its own README."""
    expected = {page for page in IN_DOCS if page.parent == DOCS or page.name == "README.md"} - {INDEX}
    listed = {(DOCS / link).resolve() for link in links(INDEX)}
    missing = sorted(str(page.relative_to(DOCS)) for page in expected - listed)
    assert not missing, f"docs/README.md does not list {', '.join(missing)}"
    assert "docs/README.md" in links(README)


@each([*IN_DOCS, README, REPOSITORY / "CONTRIBUTING.md"])
def test_a_page_is_short(page: Path) -> None:
    """The README's measured part is as `perf report` writes it: its table is as wide as its cells."""
    text = page.read_text()
    lines = text.splitlines()
    assert len(lines) <= MOST_LINES
    measured = text.partition(report.BEGIN)[2].partition(report.END)[0] if page == README else ""
    others = {number: line for number, line in enumerate(lines, 1) if line not in measured}
    assert not {number: len(line) for number, line in others.items() if len(line) > MOST_COLUMNS}


# Errors


def test_every_exception_is_listed_with_its_remedies() -> None:
    listed = set(spans(DOCS / "errors.md"))
    for module in (glulam, glulam.distributed, ffi_bridge):
        prefix = "" if module is glulam else f"{module.__name__}."
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, type) and issubclass(value, Exception):
                assert f"{prefix}{name}" in listed


def test_messages_are_those_of_the_code() -> None:
    table = (DOCS / "errors.md").read_text().partition("## On a GPU")[2]
    told = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    files = [file for top in ("python", "ffi_bridge") for file in (REPOSITORY / top).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert len(told) > 5
    assert not [message for message in told if not any(message in text for text in texts)]


# Versions

VERSIONS = DOCS / "versions.md"


@functools.cache
def rows_of_versions() -> dict[str, list[str]]:
    """Return the cells of each row of the versions table, by the row's name."""
    rows = re.findall(r"^\| ([\w -]+).*?\| (.*) \|$", VERSIONS.read_text(), re.MULTILINE)
    return {name.strip(): [cell.strip() for cell in cells.split(" | ")] for name, cells in rows}


@functools.cache
def pins() -> dict[str, str]:
    texts = [file.read_text() for file in (REPOSITORY / "requirements").glob("*.txt")]
    return dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==([\w.]+)", "\n".join(texts), re.MULTILINE))


def known_versions(file: str) -> list[str]:
    """Return the tested versions that an integration's file declares."""
    for node in ast.parse((REPOSITORY / file).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("KNOWN_VERSIONS", "TESTED"):
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{file} names no versions")


def test_versions_of_torch_are_named() -> None:
    measured = {result["stamp"]["versions"]["torch"].partition("+")[0] for result in results.read_all()}
    needed, tested = rows_of_versions()["torch"]
    assert all(version in tested for version in {pins()["torch"], *measured})
    oldest = re.search(r'"torch>=([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert oldest and needed == f"{oldest[1]} or later"


def test_versions_of_python_are_named() -> None:
    needed, tested = rows_of_versions()["Python"]
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert oldest and needed == f"{oldest[1]} or later"
    pythons = runpy.run_path(str(REPOSITORY / "tests/test_requirements.py"))["PYTHONS"]
    assert f"pins resolve for {pythons[0]} to {pythons[-1]}" in tested


@pytest.mark.parametrize("package", [toolchain.DSL, toolchain.TVM_FFI])
def test_versions_of_libraries_are_those_of_the_toolchain(package: str) -> None:
    needed, tested = next(cells for name, cells in rows_of_versions().items() if name.startswith(package))
    assert needed == str(toolchain.RUNS_WITH[package])
    named = tested.split(", ")
    assert named[0] == toolchain.RUNS_WITH[package].oldest and named[-1] == pins()[package]
    assert all(version in toolchain.RUNS_WITH[package] for version in named)


def test_the_compilers_version_is_named() -> None:
    text = VERSIONS.read_text().partition("## To compile")[2]
    assert f"{toolchain.DSL} {' or '.join(toolchain.COMPILES_WITH[toolchain.DSL])} exactly" in " ".join(text.split())


@pytest.mark.parametrize(
    ("package", "file"),
    [
        ("transformers", "python/glulam/integrations/transformers.py"),
        ("megatron-core", "python/glulam/integrations/megatron.py"),
        ("torchtitan", None),
        ("vllm", "plugins/glulam-vllm/glulam_vllm/__init__.py"),
        ("sglang", "plugins/glulam-sglang/glulam_sglang/registration.py"),
    ],
)
def test_versions_of_other_packages_are_named(package: str, file: str | None) -> None:
    tested, pinned, _ = rows_of_versions()[package]
    assert pinned == pins()[package]
    expected = known_versions(file) if file else [".".join(pinned.split(".")[:2])]
    assert tested.split(", ") == expected


# Pictures


def test_pictures_are_what_their_script_draws() -> None:
    drawn = runpy.run_path(str(PICTURES / "draw.py"))["pictures"]()
    assert drawn.keys() == {path.stem for path in PICTURES.glob("*.svg")}
    for stem, content in drawn.items():
        assert (PICTURES / f"{stem}.svg").read_bytes() == content, f"{stem} differs: run docs/pictures/draw.py"


def test_every_picture_is_on_a_page() -> None:
    shown = {(page.parent / link).resolve() for page in IN_DOCS for link in links(page) if link.endswith(".svg")}
    assert not [path.name for path in PICTURES.glob("*.svg") if path.resolve() not in shown]
