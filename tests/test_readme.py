"""The README: it is short, its code runs, and it links to the documentation."""

from __future__ import annotations

import re

import pytest
import torch
from support.pages import DOCS, README, blocks

import glulam
from ffi_bridge import __version__, profiles

MOST_LINES = 130
TEXT = README.read_text()
LAYER, BACKWARD, *_ = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= MOST_LINES


def test_installing_a_wheel_of_this_version_comes_before_building() -> None:
    assert TEXT.index(f"pip install glulam-{__version__}-py3-none-manylinux") < TEXT.index("make demo")


@pytest.fixture(scope="module")
def names() -> dict[str, object]:
    """Return the README's names after its layer and its backward."""
    names: dict[str, object] = {}
    exec(LAYER + BACKWARD, names)
    return names


def test_the_layer_has_the_checkpoints_weights_and_learns(names: dict[str, object]) -> None:
    layer, x, y, block = names["layer"], names["x"], names["y"], names["block"]
    assert isinstance(layer, torch.nn.Module) and isinstance(x, torch.Tensor) and isinstance(block, dict)
    assert isinstance(y, torch.Tensor) and y.shape == x.shape and 0 < float(y.float().norm()) < float("inf")
    assert torch.equal(layer.get_parameter("router.weight").cpu(), block["gate.weight"].bfloat16())
    gradients = [parameter.grad for parameter in layer.parameters()]
    assert len(gradients) == 3 and all(gradient is not None and gradient.norm() > 0 for gradient in gradients)


def test_after_make_demo_a_hopper_has_the_kernels_of_the_layer(names: dict[str, object]) -> None:
    """The demo's bundle serves many rows alone."""
    layer, x = names["layer"], names["x"]
    assert isinstance(layer, glulam.nn.MoE) and isinstance(x, torch.Tensor)
    weights = [layer.get_parameter(f"experts.fc{n}.weight").shape for n in (1, 2)]
    tokens = x.shape[:-1].numel()
    served = glulam.explain("moe", (tokens, x.shape[-1]), (tokens, layer.top_k), *weights, dtype=x.dtype)
    assert served.spec and served.spec.name in {spec.name for spec in profiles.shipped_specs("sm_90a", "demo")}


def test_commands_of_an_installation_name_where_it_is() -> None:
    """A clone's programs are in .venv, and nothing puts them on the path; a wheel's are where pip installs them."""
    built = TEXT[TEXT.index("## From source") :]
    for line in re.findall(r"^ {4}(.*)$", built, re.MULTILINE):
        assert not re.match(r"(glulam|python|torchrun|pip) ", line), line
    assert ".venv/bin/glulam doctor" in built and "source .venv/bin/activate" in built


@pytest.mark.gpu
def test_a_graph_of_the_quickstart_serves_every_routing() -> None:
    names: dict[str, object] = {}
    for block in blocks(DOCS / "quickstart.md"):
        if block.is_python:
            exec(block.text, names)
    layer, example, result = names["layer"], names["example"], names["result"]
    assert isinstance(layer, torch.nn.Module) and isinstance(result, torch.Tensor)
    with torch.no_grad():
        assert torch.equal(result, layer(example))
