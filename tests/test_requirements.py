"""The pins of requirements/*.txt can be installed together, on every Python that Glulam supports.

uv resolves them from the index's metadata, without downloading packages. pip cannot: it evaluates markers for the
Python that runs it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PLATFORM = "x86_64-manylinux_2_28"  # of the wheel
UNREACHABLE = ("Failed to fetch", "network was disabled", "Check that the index URL")
WITHOUT_DEPENDENCIES = "serving-*.txt"
"""Files of engines, whose own pins of torch are others."""
UV = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))

pytestmark = pytest.mark.skipif(UV is None, reason="there is no uv to resolve requirements with")


def resolvable(folder: Path) -> list[Path]:
    return sorted(set(folder.glob("*.txt")) - set(folder.glob(WITHOUT_DEPENDENCIES)))


def resolve(files: list[Path], python: str) -> subprocess.CompletedProcess[str]:
    """Resolve all files in one step, using wheels only, since source builds may need more than the C compiler that make
    requires.

    Skips the test if the index cannot be reached.
    """
    command = [str(UV), "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--only-binary", ":all:"]
    command += ["--python", sys.executable, "--python-version", python, "--python-platform", PLATFORM, *map(str, files)]
    environment = {"UV_HTTP_RETRIES": "1", **os.environ}  # an unreachable index takes a second, not ten
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip("the package index cannot be reached")
    return done


@pytest.mark.parametrize("python", PYTHONS)
def test_all_requirements_resolve_together(python: str) -> None:
    done = resolve(resolvable(REQUIREMENTS), python)
    assert done.returncode == 0, done.stderr
    assert {"torch", "pytest", "mypy"} <= set(re.findall(r"^([\w-]+)==", done.stdout, re.MULTILINE))


def test_a_pin_that_torch_excludes_is_found(tmp_path: Path) -> None:
    shutil.copytree(REQUIREMENTS, tmp_path, dirs_exist_ok=True)
    pins = tmp_path / "test.txt"
    pins.write_text(re.sub(r"^triton==.*$", "triton==3.9.0", pins.read_text(), flags=re.MULTILINE))
    done = resolve(resolvable(tmp_path), "3.12")
    assert done.returncode == 1 and "triton==3.9.0" in done.stderr
