"""What the host time of a layer's forward and backward is made of: its launches alone, and autograd alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.sm90.configs import LARGE, SMALL, WGRAD
from cute_kernels.specs import GroupedDgluSpec, GroupedGluSpec, GroupedWgradSpec, Spec
from ffi_bridge import loader
from glulam.ops.grouped_dglu import partials_shape
from glulam.tickets import new_counters

from .operations import INT32_OFFSETS
from .timing import Summary
from .training import Results, TrainingData

LAYER = "glulam.grouped_mlp, forward and backward"
BARE = "bare launches of forward and backward (4 calls, 7 launches)"
AUTOGRAD = "part: autograd alone, with the same tensors saved and allocated, and no kernel"

ARCH = "sm_90a"
FORWARD = GroupedGluSpec(save_preact=True, tile=SMALL)
BACKWARD = GroupedDgluSpec(tile=LARGE, dgrad=LARGE)
WEIGHTS = GroupedWgradSpec(tile=WGRAD)
BOTH = 2  # do_launch: with the second GEMM
NO_PARAMS = (0.0, 0.0, 0.0)  # swiglu reads none


def bundled(spec: Spec) -> Callable[..., Any]:
    return loader.load(ARCH).function(spec.name)


class BareLaunches:
    """The layer by its exported functions, with arguments and memory made beforehand; a call returns the results."""

    def __init__(self, d: TrainingData, function: Callable[[Spec], Callable[..., Any]], sm_count: int) -> None:
        x, w1, w2, scale, dy = (tensor.detach() for tensor in (d.x, d.w1, d.w2, d.row_scale, d.dy))
        act, preact, dpreact = (torch.empty_like(tensor) for tensor in (d.act, d.preact, d.dpreact))
        y, dx, dw1, dw2, d_scale = (torch.empty_like(tensor) for tensor in (x, x, w1, w2, scale))
        rows, experts, inner = x.shape[0], w1.shape[0], act.shape[1]
        partials = torch.empty(partials_shape(rows, inner), device=x.device)
        counters = new_counters(x.device)
        groups = (d.offs.data_ptr(), INT32_OFFSETS, experts, counters.data_ptr())
        packed, sums = (0,) * 6, (d_scale.data_ptr(), partials.data_ptr())
        end = (scale.data_ptr(), *NO_PARAMS, sm_count, BOTH)
        forward, backward, weights = function(FORWARD), function(BACKWARD), function(WEIGHTS)
        wgrad_end = (*groups, 0, 0, 0, sm_count, 1)
        self.results: Results = (y, dx, dw1, dw2, d_scale)
        self._kept = (partials, scale, counters)
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (forward, (x, w1, act, preact, w2, y, *groups, *packed, *end)),
            (backward, (dy, w2, preact, dpreact, act, w1, dx, *groups, 0, 0, end[0], *sums, *end[1:])),
            (weights, (dpreact, x, dw1, *wgrad_end)),
            (weights, (dy, act, dw2, *wgrad_end)),
        ]

    def __call__(self) -> Results:
        for function, arguments in self._calls:
            function(*arguments)
        return self.results


class _Nothing(torch.autograd.Function):
    """The tensors of a layer's forward and backward, saved and allocated, and nothing computed."""

    @staticmethod
    def forward(ctx: Any, x: Any, w1: Any, w2: Any, offs: Any, scale: Any) -> torch.Tensor:
        rows, hidden = x.shape
        y, preact = x.new_empty(rows, hidden), x.new_empty(rows, w1.shape[1])
        ctx.save_for_backward(x, w1, w2, preact, offs, scale)
        return y  # type: ignore[no-any-return]

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
    sm_count = torch.cuda.get_device_properties(d.x.device).multi_processor_count
    return {BARE: BareLaunches(d, bundled, sm_count), AUTOGRAD: lambda: autograd_alone(d)}


def differences(times: dict[str, Summary]) -> dict[str, float]:
    """Of the medians, in microseconds."""
    layer, bare, autograd = (times[name].median_us for name in (LAYER, BARE, AUTOGRAD))
    return {
        "difference: forward + backward through autograd above its bare launches": layer - bare,
        "difference: the same, above bare launches and autograd alone": layer - bare - autograd,
    }
