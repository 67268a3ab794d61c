"""What the host time of a layer's forward and backward is made of: its launches alone, and autograd alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from glulam.choose.problem import Problem, training_parts
from glulam.ops.grouped_mlp import GroupedMlpCall
from glulam.ops.mlp_training import GradientsCall, WeightGradientCall, forward_kind
from glulam.tuner.tensors import call_with

from .timing import Summary
from .training import Results, TrainingData

LAYER = "glulam.grouped_mlp, forward and backward"
BARE = "bare launches of forward and backward (4 calls, 7 launches)"
AUTOGRAD = "part: autograd alone, with the same tensors saved and allocated, and no kernel"


class BareLaunches:
    """The layer by its exported functions, with arguments and memory made beforehand; a call returns the results."""

    def __init__(self, d: TrainingData) -> None:
        x, w1, w2, scale, dy = (tensor.detach() for tensor in (d.x, d.w1, d.w2, d.row_scale, d.dy))
        (experts, hidden, inner), offs = w2.shape, d.offs
        mlp = Problem("grouped_mlp", "bfloat16", len(x), experts, hidden, inner, hidden, "swiglu")
        problems = training_parts(mlp)
        shared = {"offs": offs, "row_scale": scale}
        forward = call_with(forward_kind(GroupedMlpCall), x=x, w1=w1, w2=w2, **shared).bare(problems.forward)
        y, preact = forward.results
        of_h = call_with(GradientsCall, dy=dy, w1=w1, w2=w2, preact=preact, input_grad=True, **shared)
        gradients = of_h.bare(problems.data_gradients)
        dpreact, act, dx, d_scale = gradients.results
        weights = [
            call_with(WeightGradientCall, dy=left, x=right, offs=offs).bare(problems.weight_gradients)
            for left, right in ((dpreact, x), (dy, act))
        ]
        self._launches = [forward, gradients, *weights]
        self._calls = [(bare.function, bare.values) for bare in self._launches]
        (dw1,), (dw2,) = (bare.results for bare in weights)
        self.results: Results = (y, dx, dw1, dw2, d_scale)

    def __call__(self) -> Results:
        for function, values in self._calls:
            function(*values)
        return self.results


class _Nothing(torch.autograd.Function):
    """The tensors of a layer's forward and backward, saved and allocated, and nothing computed."""

    @staticmethod
    def forward(ctx: Any, x: Any, w1: Any, w2: Any, offs: Any, scale: Any) -> torch.Tensor:
        rows, hidden = x.shape
        y, preact = x.new_empty(rows, hidden), x.new_empty(rows, w1.shape[1])
        ctx.save_for_backward(x, w1, w2, preact, offs, scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, w1, w2, preact, _, scale = ctx.saved_tensors
        dy.new_empty(preact.shape), dy.new_empty(x.shape[0], w2.shape[2])
        return dy.new_empty(x.shape), dy.new_empty(w1.shape), dy.new_empty(w2.shape), None, scale.new_empty(scale.shape)


def autograd_alone(d: TrainingData) -> None:
    d.forget_gradients()
    y: torch.Tensor = _Nothing.apply(d.x, d.w1, d.w2, d.offs, d.row_scale)  # type: ignore[no-untyped-call]
    y.backward(d.dy)


def items(d: TrainingData) -> dict[str, Callable[[], object]]:
    """Calls to be timed beside those of the whole layer."""
    return {BARE: BareLaunches(d), AUTOGRAD: lambda: autograd_alone(d)}


def differences(times: dict[str, Summary]) -> dict[str, float]:
    """Of the medians, in microseconds."""
    layer, bare, autograd = (times[name].median_us for name in (LAYER, BARE, AUTOGRAD))
    return {
        "difference: forward + backward through autograd above its bare launches": layer - bare,
        "difference: the same, above bare launches and autograd alone": layer - bare - autograd,
    }
