"""A layer in training: device time and memory of forward and backward, and what the host's time is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import glulam
from glulam.choose.problem import Problem, training_parts
from glulam.ops.grouped_mlp import GroupedMlpCall
from glulam.ops.mlp_training import GradientsCall, WeightGradientCall, forward_kind
from glulam.tuner.tensors import call_with
from glulam.tuner.timing import Summary

from ..cases import BYTES_PER_ELEMENT, LAYER, TINY, Case, cases_of
from ..cells import HOST
from ..contest import Results, admitted, as_times, contest, records_of
from ..mlp import OPERATIONS, Training, contestants, make_training, our_layer, torch_layer
from ..options import Options
from ..results import Record
from ..timing import measure_host, peak_bytes

ENQUEUE_US = 1000.0  # more than the host needs for torch's forward and backward, some thirty launches
HOST_CALLS = 20  # times torch's thirty launches: inside the queue of 1024
OURS = "glulam.grouped_mlp, forward and backward"
BARE = "bare launches of forward and backward (4 calls, 7 launches)"
AUTOGRAD = "part: autograd alone, with the same tensors saved and allocated, and no kernel"


@torch.no_grad()
def our_operators(d: Training) -> Results:
    """The layer's six launches through our operators, without autograd: what autograd adds is the rest."""
    offs, scale = d.offs, d.row_scale
    api: Any = glulam
    act, preact = api.grouped_glu(d.x, d.w1, offs=offs, row_scale=scale, return_preact=True)
    y = api.grouped_mm(act, d.w2, offs=offs)
    dpreact, act, d_scale = api.grouped_dglu(d.dy, d.w2, preact, offs=offs, row_scale=scale)
    dx = api.grouped_mm(dpreact, d.w1, offs=offs, transpose_w=True)
    return y, dx, api.grouped_wgrad(dpreact, d.x, offs=offs), api.grouped_wgrad(d.dy, act, offs=offs), d_scale


class BareLaunches:
    """The layer by its exported functions, with arguments and memory made beforehand; a call returns the results."""

    def __init__(self, d: Training) -> None:
        x, w1, w2, scale, dy = (tensor.detach() for tensor in (*d.leaves, d.dy))
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


def autograd_alone(d: Training) -> None:
    d.forget_gradients()
    y: torch.Tensor = _Nothing.apply(d.x, d.w1, d.w2, d.offs, d.row_scale)  # type: ignore[no-untyped-call]
    y.backward(d.dy)


def host_items(d: Training) -> dict[str, Callable[[], object]]:
    return {
        OURS: partial(our_layer, d),
        "glulam's six operators, without autograd": partial(our_operators, d),
        "torch, forward and backward": partial(torch_layer, d),
        BARE: BareLaunches(d),
        AUTOGRAD: partial(autograd_alone, d),
    }


def differences(times: dict[str, Summary]) -> dict[str, Summary]:
    """Differences of the medians, in microseconds; they have no percentiles."""
    layer, bare, autograd = (times[name].median_us for name in (OURS, BARE, AUTOGRAD))
    found = {
        "difference: forward + backward through autograd above its bare launches": layer - bare,
        "difference: the same, above bare launches and autograd alone": layer - bare - autograd,
    }
    return {name: Summary(us, us, us, times[OURS].samples) for name, us in found.items()}


def saved_bytes(call: Callable[[Training], Any], d: Training) -> int:
    """Return what a forward keeps for its backward besides the weights: each memory once, the input included."""
    kept: dict[int, int] = {}
    weights = {weight.untyped_storage().data_ptr() for weight in (d.w1, d.w2)}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call(d)
    d.forget_gradients()
    return sum(kept.values())


def needed_bytes(case: Case) -> int:
    """x, the preactivation and the row scale: all that a backward cannot do without, or recompute cheaply."""
    return BYTES_PER_ELEMENT * case.rows * (case.hidden + 2 * case.intermediate) + 4 * case.rows


def _measure(case: Case, budget_s: float) -> Iterator[Record]:
    """Memory before anything else ran, so that buffers which a library keeps for the next call count."""
    d, layers = make_training(case), OPERATIONS[LAYER]
    memory = {
        "peak_bytes": {name: peak_bytes(partial(call, d), d.forget_gradients) for name, call in layers.items()},
        "saved_bytes": {name: saved_bytes(call, d) for name, call in layers.items()},
        "needed_bytes": needed_bytes(case),
    }
    fields: Record = {"op": LAYER, "flop": case.flop(LAYER), **memory}
    yield contest(case, contestants(LAYER, [d]), budget_s, d.sizes, where=LAYER, enqueue_us=ENQUEUE_US, **fields)


def run_train(options: Options) -> list[Record]:
    """One record a case, then one of the items of the host's time."""
    cases = cases_of("train", options.case)
    share = options.budget_s / (len(cases) + 1)
    records = records_of("train", cases, lambda case: _measure(case, share))
    d = make_training(TINY)
    admitted("host", contestants(LAYER, [d]))
    times = measure_host(host_items(d), share, HOST_CALLS)
    return [*records, {"op": HOST, "times": as_times({**times, **differences(times)})}]
