"""What the host time of a layer's forward and backward is made of: its launches alone, and autograd alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.chains import signature_of
from cute_kernels.sm90.configs import LARGE, SMALL, WGRAD
from cute_kernels.specs import GroupedDgluSpec, GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, GroupedWgradSpec, Spec
from ffi_bridge import loader
from glulam import groups
from glulam.ops.grouped_dglu import partials_shape
from glulam.tickets import new_counters

from .timing import Summary
from .training import Results, TrainingData

LAYER = "glulam.grouped_mlp, forward and backward"
BARE = "bare launches of forward and backward (4 calls, 7 launches)"
AUTOGRAD = "part: autograd alone, with the same tensors saved and allocated, and no kernel"

ARCH = "sm_90a"
FORWARD = GroupedMlpSpec(GroupedGluSpec("bfloat16", "gated", "blocked", True, SMALL), GroupedMmSpec(tile=SMALL))
BACKWARD = GroupedDgluSpec(tile=LARGE, dgrad=LARGE)
WEIGHTS = GroupedWgradSpec(tile=WGRAD)


def bundled(spec: Spec) -> Callable[..., Any]:
    return loader.load(ARCH).function(spec.name)


class BareLaunches:
    """The layer by its exported functions, with arguments and memory made beforehand; a call returns the results."""

    def __init__(self, d: TrainingData, function: Callable[[Spec], Callable[..., Any]], sm_count: int) -> None:
        x, w1, w2, scale, dy = (tensor.detach() for tensor in (d.x, d.w1, d.w2, d.row_scale, d.dy))
        act, preact, dpreact = (torch.empty_like(tensor) for tensor in (d.act, d.preact, d.dpreact))
        y, dx, dw1, dw2, d_scale = (torch.empty_like(tensor) for tensor in (x, x, w1, w2, scale))
        partials = torch.empty(partials_shape(x.shape[0], act.shape[1]), device=x.device)
        counters = new_counters(x.device)
        rest = {**groups.arguments(d.offs, counters), "num_sms": sm_count}
        sums = {"scale": scale.data_ptr(), "d_scale": d_scale.data_ptr(), "partials": partials.data_ptr()}
        self.results: Results = (y, dx, dw1, dw2, d_scale)
        self._kept = (partials, scale, counters)
        rows = {"preact": preact, "dpreact": dpreact, "act": act, "dx": dx}
        calls: list[tuple[Spec, dict[str, Any]]] = [
            (FORWARD, {"x": x, "w1": w1, "mid": act, "preact": preact, "w2": w2, "y": y, "scale": sums["scale"]}),
            (BACKWARD, {"dy": dy, "w1": w1, "w2": w2, **rows, **sums}),
            (WEIGHTS, {"dy": dpreact, "x": x, "dw": dw1}),
            (WEIGHTS, {"dy": dy, "x": act, "dw": dw2}),
        ]
        self._calls = [(function(spec), signature_of(spec).pack(**given, **rest)) for spec, given in calls]

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
    sm_count = torch.cuda.get_device_properties(d.x.device).multi_processor_count
    return {BARE: BareLaunches(d, bundled, sm_count), AUTOGRAD: lambda: autograd_alone(d)}


def differences(times: dict[str, Summary]) -> dict[str, float]:
    """Of the medians, in microseconds."""
    layer, bare, autograd = (times[name].median_us for name in (LAYER, BARE, AUTOGRAD))
    return {
        "difference: forward + backward through autograd above its bare launches": layer - bare,
        "difference: the same, above bare launches and autograd alone": layer - bare - autograd,
    }
