"""Kernels of cp.async and mma.sync, compiled for every GPU from Ampere on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.architectures import ARCHS

TESTS = Path(__file__).parents[1]


@pytest.mark.bundle
@pytest.mark.parametrize("arch", [arch for arch, one in ARCHS.items() if one.folder == "portable"])
def test_every_architecture_has_room(arch: str) -> None:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), *sys.path])
    command = [sys.executable, "-m", "support.compiled", arch]
    made = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    assert made.returncode == 0, made.stderr
    kernels = json.loads(made.stdout)
    assert len(kernels) > 20
    for name, spilled, smem in kernels:
        assert spilled == 0 and smem <= ARCHS[arch].smem_bytes, name
