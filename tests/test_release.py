"""The parts of a release agree: versions, metadata, and files that a hosting site reads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

import glulam
from cute_kernels.architectures import ARCHS
from ffi_bridge import toolchain
from ffi_bridge.host import HOSTS

REPOSITORY = Path(__file__).parents[1]
GITHUB = REPOSITORY / ".github"
ADDRESS = "https://example.org/owner/glulam"
VERSION = glulam.__version__


def _metadata(folder: Path, **environment: str) -> Message:
    """Return the metadata of a wheel of this checkout."""
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GLULAM_")}
    subprocess.run(command, cwd=REPOSITORY, env={**kept, **environment}, check=True, capture_output=True)
    return Parser().parsestr((folder / "glulam.egg-info" / "PKG-INFO").read_text())


def _yaml(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content


def test_the_version_is_one_that_an_index_takes() -> None:
    assert Version(VERSION).public == VERSION == ".".join(map(str, Version(VERSION).release))


def test_what_repeats_the_version_is_of_this_one() -> None:
    assert _yaml(REPOSITORY / "CITATION.cff")["version"] == VERSION
    assert f"\n## {VERSION}, " in (REPOSITORY / "CHANGELOG.md").read_text()
    plugins = list(REPOSITORY.glob("plugins/*/pyproject.toml"))
    assert len(plugins) == 2 and all(f'\nversion = "{VERSION}"\n' in plugin.read_text() for plugin in plugins)


def test_the_citation_is_of_this_package() -> None:
    citation, project = _yaml(REPOSITORY / "CITATION.cff"), (REPOSITORY / "pyproject.toml").read_text()
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert f'license = "{citation["license"]}"' in project
    assert f'authors = [{{ name = "{citation["authors"][0]["name"]}" }}]' in project


def test_metadata_has_the_repositorys_address_where_it_is_given(tmp_path: Path) -> None:
    metadata = _metadata(tmp_path, GLULAM_REPOSITORY=f"{ADDRESS}/")
    links = dict(link.split(", ") for link in metadata.get_all("Project-URL", []))
    assert links.keys() == {"Repository", "Issues", "Documentation", "Changelog"}
    assert links["Repository"] == ADDRESS and links["Changelog"] == f"{ADDRESS}/blob/v{VERSION}/CHANGELOG.md"
    page = metadata.get_payload()
    assert isinstance(page, str) and metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"(!?)\[[^\[\]]*\]\(([^()\s]+)\)", page)
    assert len(targets) > 10 and {"", "!"} == {mark for mark, _ in targets}
    for mark, target in targets:
        if file := target.removeprefix(f"{ADDRESS}/{'raw' if mark else 'blob'}/v{VERSION}/"):
            assert target.startswith(("#", "https://")) and (
                file == target or (REPOSITORY / file.split("#")[0]).exists()
            )


def test_metadata_without_an_address_has_no_links_and_the_page_as_it_is(tmp_path: Path) -> None:
    metadata = _metadata(tmp_path)
    assert metadata["Version"] == VERSION and metadata["Author"] == "The Glulam authors"
    assert "Project-URL" not in metadata
    page = metadata.get_payload()
    assert isinstance(page, str) and page.strip() == (REPOSITORY / "README.md").read_text().strip()


def test_metadata_names_each_python_that_is_tested(tmp_path: Path) -> None:
    pythons = re.search(r"^PYTHONS = \((.*)\)$", (REPOSITORY / "tests/test_requirements.py").read_text(), re.MULTILINE)
    assert pythons
    tested = [f"Programming Language :: Python :: {version}" for version in re.findall(r'"([\d.]+)"', pythons[1])]
    listed = [each for each in _metadata(tmp_path).get_all("Classifier", []) if re.search(r"Python :: 3\.", each)]
    assert listed == tested


@pytest.mark.parametrize("path", sorted(GITHUB.rglob("*.yml")), ids=lambda path: path.name)
def test_files_for_the_host_are_yaml(path: Path) -> None:
    content = _yaml(path)
    if path.parent.name == "ISSUE_TEMPLATE" and path.name != "config.yml":
        assert {"name", "description", "body"} <= content.keys()
        kinds = {field["type"] for field in content["body"]}
        assert kinds <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        named = [field["id"] for field in content["body"] if field["type"] != "markdown"]
        assert len(set(named)) == len(named) > 1


def test_continuous_integration_runs_what_contributors_run() -> None:
    workflow = _yaml(GITHUB / "workflows/ci.yml")
    assert [step["run"] for step in workflow["jobs"]["run"]["steps"] if "run" in step] == [".ci/run"]
    assert os.access(REPOSITORY / ".ci/run", os.X_OK)


def test_the_release_makes_wheels_of_architectures_and_machines_that_there_are() -> None:
    job = _yaml(GITHUB / "workflows/release.yml")["jobs"]["wheels"]
    wheels = job["strategy"]["matrix"]["include"]
    assert {arch for wheel in wheels for arch in wheel["archs"].split()} <= set(ARCHS)
    assert {wheel["machine"] for wheel in wheels} == set(HOSTS)
    assert len({(wheel["archs"], wheel["machine"]) for wheel in wheels}) == len(wheels)
    names = set(re.findall(r"GLULAM_\w+", (REPOSITORY / "setup.py").read_text()))
    assert set(job["env"]) == {name for name in names if name.startswith("GLULAM_")}


def test_what_templates_name_is_there() -> None:
    texts = [path.read_text() for path in [*GITHUB.rglob("*.yml"), *GITHUB.rglob("*.md")]]
    named = {name for text in texts for name in re.findall(r"\b[\w/]+\.(?:md|yml)\b|(?<=`)docs/", text)}
    assert {"SECURITY.md", "CHANGELOG.md", "docs/"} <= named
    assert all((REPOSITORY / name).exists() for name in named)
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = {name for text in texts for name in re.findall(r"\bmake ([\w-]+)", text)}
    assert targets and all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in targets)


def test_what_a_wheel_needs_is_what_the_loader_takes(tmp_path: Path) -> None:
    needs = _metadata(tmp_path).get_all("Requires-Dist", [])
    for package, versions in toolchain.RUNS_WITH.items():
        (line,) = [need for need in needs if need.startswith(package)]
        assert set(re.findall(r"[<>=]+[\d.]+", line)) == set(str(versions).split(","))


WITHOUT_NUMPY = """
import json, sys, warnings

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

sys.meta_path.insert(0, Blocked())
told = {}
for name in ("torch", "glulam"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        __import__(name)
    told[name] = [str(one.message) for one in caught]
import glulam, torch
x, w = torch.randn(4, 8), torch.randn(2, 8, 8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    told["call"] = [glulam.grouped_mm(x, w, splits=[1, 3]).shape[0]]
    told["glulam"] += [str(one.message) for one in caught]
print(json.dumps(told))
"""


def test_without_numpy_torch_alone_may_warn_and_an_installation_has_numpy(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMPY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["call"] == [4] and told["glulam"] == [] and all("NumPy" in text for text in told["torch"])
    assert any(re.match(r"numpy\b", need) for need in _metadata(tmp_path).get_all("Requires-Dist", []))
