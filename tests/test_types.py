"""Types of the installed package, as a user's type checker sees them."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import get_args

import pytest

import glulam
from cute_kernels.specs import ACTIVATIONS, DTYPES, GLU_LAYOUTS, QUANTIZE_AXES
from glulam import names, recipes
from glulam.choose.shipped import TILED
from glulam.distributed.checks import TRANSPORTS
from glulam.formats.mxfp8 import layout
from glulam.layer.checks import SCORES
from glulam.nn.mlp import ExpertOptions
from glulam.tuner.entry import TUNED

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {"glulam": REPOSITORY / "python/glulam", **{n: REPOSITORY / n for n in ("ffi_bridge", "cute_kernels")}}
PROGRAMS = [REPOSITORY / "tests/support/types" / name for name in ("typed_program.py", "misspelt_program.py")]
"""A user's program without a mistake, and one in which each statement has one."""


def test_a_users_mypy_sees_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for name, folder in PACKAGES.items():
        (site / name).symlink_to(folder)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # torch, and all else that is installed
    for program in PROGRAMS:
        shutil.copy(program, tmp_path)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir=cache"]
    command += ["--python-executable", str(tmp_path / "venv/bin/python"), *(program.name for program in PROGRAMS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = {tuple(line.split(":")[:2]) for line in done.stdout.splitlines() if ": error:" in line}
    wrong = enumerate(PROGRAMS[1].read_text().splitlines(), 1)
    wanted = {
        (PROGRAMS[1].name, str(number)) for number, line in wrong if line.startswith("glulam.") or "int =" in line
    }
    assert len(wanted) > 20
    assert found == wanted, done.stdout + done.stderr


NAMES: dict[str, Iterable[str]] = {
    "ActivationName": ACTIVATIONS,
    "GluLayout": GLU_LAYOUTS,
    "RecipeName": recipes.RECIPES,
    "TunedRecipe": TUNED,
    "TunedOp": TILED,
    "Dtype": DTYPES,
    "Score": SCORES,
    "Axis": layout.AXES,
    "Axes": QUANTIZE_AXES,
    "Block": layout.BLOCK_SIZES,
    "ScaleLayout": layout.SCALE_LAYOUTS,
    "Transport": TRANSPORTS,
}
"""The declaration that has the names of each type of `glulam.names`."""


@pytest.mark.parametrize("kind", NAMES)
def test_types_of_names_have_the_names_that_are_declared(kind: str) -> None:
    assert get_args(getattr(names, kind)) == tuple(NAMES[kind])


def test_every_type_of_names_is_compared() -> None:
    assert {name for name, value in vars(names).items() if get_args(value)} == set(NAMES)


def test_experts_of_a_moe_take_what_a_grouped_mlp_takes() -> None:
    """Less the sizes and the place of parameters, which a MoE has of its own."""
    own = {"num_experts", "hidden_size", "intermediate_size", "out_features", "device", "dtype"}
    taken = set(inspect.signature(glulam.nn.GroupedMLP).parameters) - own
    assert set(ExpertOptions.__annotations__) == taken


def _public() -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield the functions and constructors that users call, by name."""
    for module in (glulam, glulam.mhc, glulam.nn, glulam.distributed):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value
            elif inspect.isclass(value) and inspect.isfunction(value.__init__):
                yield f"{module.__name__}.{name}", value.__init__


TAKES_ANYTHING = {
    "glulam.compile": {"fields"},
    "glulam.explain": {"op", "args", "kwargs"},
    "glulam.refresh_weights": {"weights"},
    "glulam.nn.HyperConnection": {"sublayer"},
    "glulam.nn.convert_state_dict": {"state", "return"},
    "glulam.nn.convert_optimizer_state": {"state", "return"},
}
"""Parameters whose type depends on another one, or is torch's own."""


def test_public_signatures_say_what_they_take() -> None:
    untyped = {}
    for name, function in _public():
        given = {each: str(kind) for each, kind in function.__annotations__.items() if "Any" in str(kind)}
        if each := set(given) - TAKES_ANYTHING.get(name, set()):
            untyped[name] = each
    assert not untyped
    assert len(dict(_public())) > 40
