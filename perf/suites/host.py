"""The host time of a grouped_mlp call, and where it goes.

The problem is so small that the GPU is idle when the next call comes: what is timed is the time until a
call returns. "Bare" items call the exported function with arguments made beforehand, so that a bare
grouped_mlp is the floor of a call that makes two launches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

import glulam
from cute_kernels.specs import GroupedMlpSpec
from glulam.calls.launch import Bare
from glulam.choose import choose
from glulam.choose.kernels import Fixed
from glulam.choose.problem import Problem, changed
from glulam.host.plans import MAX_PLANS
from glulam.ops.grouped_mlp import GroupedMlpCall
from glulam.ops.grouped_mm import GroupedMmCall
from glulam.tuner.tensors import call_with
from glulam.tuner.timing import Call, Summary

from ..cases import TINY
from ..cells import HOST
from ..contest import admitted, as_times
from ..mlp import Buffers, contestants, make_buffers
from ..options import Options
from ..quack import find_quack
from ..results import Record
from ..targets import HOST_OURS, TORCH
from ..timing import launch_nothing, measure_host

Item = Callable[[], object]

ARCH = "sm_90a"
LAUNCH = "one launch (torch's empty kernel)"
BARE_NOTHING = "bare grouped_mlp, launching nothing"
BARE_MM = "bare grouped_mm (1 launch)"
BARE_MLP = "bare grouped_mlp (2 launches)"
WITHOUT_OUT = "glulam.grouped_mlp, out allocated"
KNOWN_ROWS = "glulam.grouped_mlp, out allocated, some rows of x"
NEW_ROWS = "the same, as many rows as no plan is kept for"


def bare_items(b: Buffers) -> dict[str, Item]:
    """The kernels that the dispatcher gives this layer, as bare launches."""
    sizes = (TINY.rows, TINY.experts, TINY.hidden, TINY.intermediate, TINY.hidden)
    problem = Problem("grouped_mlp", "bfloat16", *sizes, activation="swiglu")
    spec = choose(problem, ARCH).spec
    assert isinstance(spec, GroupedMlpSpec)
    mlp_kernel, mm_kernel = Fixed(spec), Fixed(spec.fc2)
    mlp = call_with(GroupedMlpCall, x=b.x, w1=b.w1, w2=b.w2, offs=b.offs, out=b.y)
    nothing = changed(mlp, x=b.x[:0], out=b.y[:0])
    mm = call_with(GroupedMmCall, x=b.mid, w=b.w2, offs=b.offs, out=b.y)
    of_mm = changed(problem, op="grouped_mm", in_features=TINY.intermediate, intermediate=0, activation="none")
    return {
        BARE_NOTHING: _bare(nothing.bare(changed(problem, rows=0), mlp_kernel), mlp_kernel),
        BARE_MM: _bare(mm.bare(of_mm, mm_kernel), mm_kernel),
        BARE_MLP: _bare(mlp.bare(problem, mlp_kernel), mlp_kernel),
    }


def _bare(bare: Bare, kernel: Fixed) -> Item:
    function, values = kernel.at(1).function, bare.values

    def item(kept: object = bare.memory) -> object:
        return function(*values)

    return item


def _our_items(b: Buffers) -> dict[str, Item]:
    """The last two are calls whose groups have no rows, so that the GPU has nothing to do however long x is."""
    x, offs = b.x.new_empty(2 * MAX_PLANS, b.x.shape[1]), torch.zeros_like(b.offs)
    counts = itertools.cycle(range(2, len(x)))
    return {
        HOST_OURS: lambda: glulam.grouped_mlp(b.x, b.w1, b.w2, offs=b.offs, out=b.y),
        WITHOUT_OUT: lambda: glulam.grouped_mlp(b.x, b.w1, b.w2, offs=b.offs),
        KNOWN_ROWS: lambda: glulam.grouped_mlp(x[:2], b.w1, b.w2, offs=offs),
        NEW_ROWS: lambda: glulam.grouped_mlp(x[: next(counts)], b.w1, b.w2, offs=offs),
    }


def _other_items(b: Buffers, peers: dict[str, Call]) -> dict[str, Item]:
    """Parts of a wrapper in Python, each alone; then torch's operators, and peers."""
    tensors = (b.x, b.w1, b.w2, b.offs, b.y)
    items: dict[str, Item] = {
        "part: torch.empty of the output": lambda: torch.empty(b.y.shape, dtype=b.y.dtype, device=b.y.device),
        "part: data_ptr of 5 tensors": lambda: [t.data_ptr() for t in tensors],
        "part: shape of 5 tensors": lambda: [t.shape for t in tensors],
        "part: torch.cuda.current_stream": torch.cuda.current_stream,
        "torch.mm, out given": lambda: torch.mm(b.x, b.w2[0], out=b.act),
        "torch F.grouped_mm": lambda: F.grouped_mm(b.mid, b.w2.mT, offs=b.offs),
    }
    for name, call in peers.items():
        items[f"{name} mlp (out {'allocated' if name == TORCH else 'given'})"] = partial(call, 0)
    return items


def derived(times: dict[str, Summary]) -> dict[str, float]:
    """Differences of the medians, in microseconds: what the front adds to the floor, and what allocating adds.

    Two bare launches are two bare calls of grouped_mm, as a thin wrapper without fusion would make.
    """
    median = {name: summary.median_us for name, summary in times.items()}
    return {
        "a launch within the exported function": median[BARE_MLP] - median[BARE_MM],
        "the call into the exported function": median[BARE_NOTHING],
        "glulam.grouped_mlp above two bare launches": median[HOST_OURS] - 2 * median[BARE_MM],
        "glulam.grouped_mlp above one bare call that makes both": median[HOST_OURS] - median[BARE_MLP],
        "the output's allocation": median[WITHOUT_OUT] - median[HOST_OURS],
        "a number of rows that is new": median[NEW_ROWS] - median[KNOWN_ROWS],
    }


def run_host(options: Options) -> list[Record]:
    """A record of all items, then one of the differences."""
    b = make_buffers(TINY)[0]
    ours, *peers = admitted("host", contestants("mlp", [b], find_quack(options.quack), has_dense=False)).calls.items()
    items = {LAUNCH: launch_nothing, **bare_items(b), **_our_items(b), **_other_items(b, dict(peers))}
    times = measure_host(items, options.budget_s / 4)
    differences = {name: {"median_us": value} for name, value in derived(times).items()}
    return [{"op": HOST, "times": as_times(times)}, {"op": "differences", "times": differences}]
