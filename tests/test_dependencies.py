"""pyproject.toml requires everything the package needs: with nothing else installed, importing it prints no warning."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
OWN = {"glulam", "ffi_bridge", "cute_kernels"}
IMPORTS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

absent = set(sys.argv[1].split())
sys.meta_path.insert(0, Absent())
import glulam, glulam.command.cli, glulam.demo, glulam.tuner, glulam.distributed
"""


def required() -> list[Requirement]:
    project = (REPOSITORY / "pyproject.toml").read_text()
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    return [Requirement(text) for text in re.findall(r'^ *"(.*)",$', block, re.MULTILINE)]


def installed_for(requirements: list[Requirement]) -> set[str]:
    """Return the installed distributions that pip would install for requirements, including indirect ones."""
    found: set[tuple[str, str]] = set()
    pending = [(one, extra) for one in requirements for extra in ("", *one.extras)]
    while pending:
        requirement, extra = pending.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for text in importlib.metadata.distribution(name).requires or []:
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                pending += [(one, its) for its in ("", *one.extras)]
    return {name for name, _ in found}


def test_the_package_needs_no_other_and_is_imported_silently() -> None:
    names = installed_for(required())
    assert {"torch", "typer"} <= names and "pytest" not in names
    absent = [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if module not in OWN and not any(canonicalize_name(owner) in names for owner in owners)
    ]
    assert "pytest" in absent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "python")])}
    command = [sys.executable, "-c", IMPORTS, " ".join(absent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
