"""The types that a user's checker sees of the installed package."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {"glulam": REPOSITORY / "python/glulam", **{n: REPOSITORY / n for n in ("ffi_bridge", "cute_kernels")}}
RIGHT = """
import torch
from typing_extensions import assert_type

import glulam
from ffi_bridge import BundleError
from glulam.formats.mxfp8.fold import FoldedWeight, FoldedWeights
from glulam.formats.mxfp8.tensor import MXFP8Copies

t = torch.empty(0)
axis = str()
assert_type(glulam.grouped_mlp(t, t, t, offs=t), torch.Tensor)
assert_type(glulam.grouped_wgrad(t, t, offs=t), torch.Tensor)
assert_type(glulam.grouped_wgrad(t, t, offs=t, out=t), torch.Tensor)
glulam.grouped_wgrad(t, t, offs=t, out=[t, t])[0].dtype
assert_type(glulam.quantize_mxfp8(t), glulam.MXFP8Tensor)
assert_type(glulam.quantize_mxfp8(t, axis="col", block="1x128"), glulam.MXFP8Tensor)
assert_type(glulam.quantize_mxfp8(t, axis="both"), MXFP8Copies)
glulam.quantize_mxfp8(t, axis=axis).data
assert_type(glulam.prepare_mxfp8_weight(t), FoldedWeight)
assert_type(glulam.prepare_mxfp8_weight(t, axis="both"), FoldedWeights)
glulam.prepare_mxfp8_weight(t, axis=axis).data
assert_type(glulam.route(t, 2), glulam.Routing)
errors: list[RuntimeError] = [glulam.UnsupportedDevice(), BundleError()]
"""
WRONG = """
import torch

import glulam

t = torch.empty(0)
number: int = glulam.grouped_mlp(t, t, t, offs=t)
glulam.grouped_mlp(t, t, t, offs=[1, 2])
glulam.grouped_mlp(t, t, t, off=t)
glulam.nn.MoE(1, 2, 3)
"""


def test_a_users_mypy_sees_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for name, folder in PACKAGES.items():
        (site / name).symlink_to(folder)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # torch, and all else that is installed
    for name, text in (("right", RIGHT), ("wrong", WRONG)):
        (tmp_path / f"{name}.py").write_text(text.lstrip("\n"))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir=cache"]
    command += ["--python-executable", str(tmp_path / "venv/bin/python"), "right.py", "wrong.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines = [line.split(":")[:3] for line in done.stdout.splitlines() if ": error:" in line]
    assert lines == [["wrong.py", str(line), " error"] for line in (6, 7, 8, 9)], done.stdout + done.stderr
