"""The training example on a GPU, with small sizes: bfloat16, torch's kernels beside ours, a step in a CUDA graph."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
from rich.console import Console

from examples import train_moe, training_curves
from examples.moe_model import Size, mixture

pytestmark = pytest.mark.gpu

SETUP = dataclasses.replace(
    train_moe.SETUPS["cuda"],
    size=Size(layers=2, width=128, heads=2, experts=8, top_k=2, intermediate=128, context=128),
    batch=16,
    steps=40,
    learning_rate=3e-3,
)
FURTHEST = 0.1  # nats; while the loss falls by 2 nats in 40 steps, rounding moves it by about 0.01


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, Any]]:
    ours = [train_moe.GLULAM, train_moe.GRAPH]
    chosen = [train_moe.TORCH[0], *ours, *(train_moe.by_recipe(run, "mxfp8") for run in ours)]
    with torch.enable_grad():
        records = train_moe.train_all(SETUP, chosen, 0, "cuda", Console(file=io.StringIO()))
    return {record["run"]: record for record in records[:-1]}


def test_a_step_is_torchs_but_for_rounding() -> None:
    """The result of a layer, its auxiliary loss, and the gradients of tokens and of float32 parameters."""
    torch.manual_seed(0)
    with torch.device("cuda"), torch.enable_grad():
        layer = mixture(SETUP.size, "bf16", SETUP.dtype)
        x = torch.randn(512, SETUP.size.width, dtype=SETUP.dtype, requires_grad=True)
        found = []
        for run in (train_moe.GLULAM, train_moe.TORCH[0]):
            y, balance = run.layer(layer, x)
            gradients = torch.autograd.grad(y.float().square().sum() + balance, [x, *layer.parameters()])
            found.append((y, balance, *gradients))
    for ours, torchs in zip(*found, strict=True):
        assert ours.dtype == torchs.dtype and torchs.abs().max() > 0.01
        assert (ours - torchs).float().norm() < 0.02 * torchs.float().norm()


def test_every_run_learns(runs: dict[str, dict[str, Any]]) -> None:
    for run in runs.values():
        assert run["loss"][0] > 5.5 and run["loss"][-1] < 3.7 and run["held_out"] < 3.7


def test_gradients_are_torchs_but_for_rounding(runs: dict[str, dict[str, Any]]) -> None:
    """Eager and replayed, at the weights that the run passes through."""
    checked = [run["gradients"] for run in runs.values() if "gradients" in run]
    assert len(checked) == 2
    for found in checked:
        assert found["steps"] == SETUP.steps and found["times"] <= training_curves.GRADIENTS_ALLOWED, found


def test_the_curves_lie_over_each_other(runs: dict[str, dict[str, Any]]) -> None:
    torchs, ours, replayed, *_ = (run["loss"] for run in runs.values())
    assert training_curves.distance(ours, torchs).largest < FURTHEST
    assert training_curves.distance(replayed, ours).largest < FURTHEST
    assert replayed[: train_moe.EAGER_STEPS] == pytest.approx(ours[: train_moe.EAGER_STEPS], abs=1e-2)


def test_mxfp8_learns_as_well(runs: dict[str, dict[str, Any]]) -> None:
    torchs, _, _, ours, replayed = runs.values()
    for run in (ours, replayed):
        assert run["recipe"] == "mxfp8" and run["held_out"] < torchs["held_out"] + FURTHEST
    assert replayed["loss"][: train_moe.EAGER_STEPS] == pytest.approx(ours["loss"][: train_moe.EAGER_STEPS], abs=1e-2)
    assert training_curves.distance(replayed["loss"], ours["loss"]).largest < FURTHEST
