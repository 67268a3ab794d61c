"""The host time of a grouped_mlp call, and of its bare launches.

The problem is so small that the GPU is idle when the next call comes, so the time until a call returns is host time
alone. "Bare" items call the exported function with arguments prepared beforehand: a bare grouped_mlp is the least time
of any call that makes two launches.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import glulam
from cute_kernels.specs import GroupedMlpSpec
from glulam.choose import choose
from glulam.choose.kernels import Fixed
from glulam.choose.problem import Problem, changed
from glulam.host.plans import MAX_PLANS
from glulam.ops.grouped_mlp import GroupedMlpCall
from glulam.ops.grouped_mm import GroupedMmCall
from glulam.tuner.tensors import call_with
from glulam.tuner.timing import Call

from ..cases import TINY
from ..cells import HOST
from ..contest import admitted
from ..mlp import Buffers, contestants, make_buffers
from ..options import Options
from ..quack import find_quack
from ..results import Record
from ..targets import HOST_OURS, TORCH
from ..timing import Run, launch_nothing, measure_host

ARCH = "sm_90a"
BARE_NOTHING = "bare grouped_mlp, launching nothing"
BARE_MM = "bare grouped_mm (1 launch)"
BARE_MLP = "bare grouped_mlp (2 launches)"


def bare_items(b: Buffers) -> dict[str, Run]:
    """Return, by name, bare launches of the kernels that the dispatcher chooses for this layer."""
    sizes = (TINY.rows, TINY.experts, TINY.hidden, TINY.intermediate, TINY.hidden)
    problem = Problem("grouped_mlp", "bfloat16", *sizes, activation="swiglu")
    spec = choose(problem, ARCH).spec
    assert isinstance(spec, GroupedMlpSpec)
    mlp_kernel, mm_kernel = Fixed(spec), Fixed(spec.fc2)
    mlp = call_with(GroupedMlpCall, x=b.x, w1=b.w1, w2=b.w2, offs=b.offs, out=b.y)
    nothing = changed(mlp, x=b.x[:0], out=b.y[:0])
    mm = call_with(GroupedMmCall, x=b.mid, w=b.w2, offs=b.offs, out=b.y)
    of_mm = changed(problem, op="grouped_mm", in_features=TINY.intermediate, intermediate=0, activation="none")

    def bare(call: Any, problem: Problem, kernel: Fixed) -> Run:
        made, function = call.bare(problem, kernel), kernel.at(1).function
        values = made.values

        def item(kept: object = made.memory) -> object:
            return function(*values)

        return item

    return {
        BARE_NOTHING: bare(nothing, changed(problem, rows=0), mlp_kernel),
        BARE_MM: bare(mm, of_mm, mm_kernel),
        BARE_MLP: bare(mlp, problem, mlp_kernel),
    }


def _items(b: Buffers, peers: dict[str, Call]) -> dict[str, Run]:
    """Return the items to time, by name: our calls, torch's operators and peers.

    Calls on `some rows` have only groups without rows, so the GPU has nothing to do.
    """
    x, offs = b.x.new_empty(2 * MAX_PLANS, b.x.shape[1]), torch.zeros_like(b.offs)
    counts = itertools.cycle(range(2, len(x)))
    return {
        HOST_OURS: lambda: glulam.grouped_mlp(b.x, b.w1, b.w2, offs=b.offs, out=b.y),
        "glulam.grouped_mlp, out allocated": lambda: glulam.grouped_mlp(b.x, b.w1, b.w2, offs=b.offs),
        "glulam.grouped_mlp, out allocated, some rows of x": lambda: glulam.grouped_mlp(x[:2], b.w1, b.w2, offs=offs),
        "the same, as many rows as no plan is kept for": lambda: glulam.grouped_mlp(
            x[: next(counts)], b.w1, b.w2, offs=offs
        ),
        "torch.mm, out given": lambda: torch.mm(b.x, b.w2[0], out=b.act),
        "torch F.grouped_mm": lambda: F.grouped_mm(b.mid, b.w2.mT, offs=b.offs),
        **{f"{name} mlp (out {'allocated' if name == TORCH else 'given'})": partial(peers[name], 0) for name in peers},
    }


def run_host(options: Options) -> list[Record]:
    """Measure and return one record that holds all items."""
    b = make_buffers(TINY)[0]
    ours, *peers = admitted("host", contestants("mlp", [b], find_quack(options.quack), has_dense=False)).calls.items()
    items = {"one launch (torch's empty kernel)": launch_nothing, **bare_items(b), **_items(b, dict(peers))}
    return [{"op": HOST, "times": measure_host(items, options.budget_s / 4)}]
