"""One layer's experts: tensors of a case, and what our operators, torch and cuBLAS compute on them, by operation.

All compute the same (SwiGLU, no bias; a row scale in the backward only), and nothing that a peer does not support.
torch's are written as usual without a fused kernel. "dense" is cuBLAS on one matrix of the same FLOP, without groups or
activation; it shows what grouping and fusing cost. T rows, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import glulam

from .cases import KERNELS, LAYER, OPS, Case
from .cells import DENSE, OURS
from .contest import Contestant, Results, listed, relative_error, rotating
from .routing import group_sizes
from .targets import TORCH
from .timing import forget_gradients

ROTATION_BYTES = 2**30  # 17 times the L2 of an H200
MAX_COPIES = 8
TOKENS = 16  # take turns if a case is one token: an expert leaves L2 before it is read again
CONCAT, INTERLEAVED, LINEAR_FIRST = "concat", "interleaved", "interleaved32, linear first"
FORWARD_ERROR = 0.02  # two BF16 roundings differ by about 0.004; a wrong group or layout by about 1
BACKWARD_ERROR = 0.03  # a backward rounds to 16 bits three times in a row

Random = Callable[..., Tensor]
"""Function `random(*shape, scale=1.0)` that draws a normal random tensor of that scale."""


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The tensors of a case.

    Inputs: x [T,H], w1 [E,2I,H], w2 [E,H,I], mid [T,I] (input of FC2), offs int32 [E], starts int32 [E+1] (offs with a
    leading 0). Buffers for results: act [T,I], y [T,H].
    """

    x: Tensor
    w1: Tensor
    w2: Tensor
    mid: Tensor
    offs: Tensor
    starts: Tensor
    act: Tensor
    y: Tensor

    @property
    def sizes(self) -> list[int]:
        return self.starts.diff().tolist()


@dataclasses.dataclass(frozen=True)
class Training(Buffers):
    """The tensors of a layer in training.

    x, w1, w2 and row_scale float32 [T] are autograd leaves. dy [T,H], and preact and dpreact [T,2I], which pass between
    kernels, are constants.
    """

    row_scale: Tensor
    dy: Tensor
    preact: Tensor
    dpreact: Tensor

    def factors(self, op: str) -> tuple[Tensor, Tensor]:
        """Return the factors dy and x of the weight gradient dy^T x that `op`, "dw1" or "dw2", computes."""
        return (self.dpreact, self.x) if op == "dw1" else (self.dy, self.mid)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.x, self.w1, self.w2, self.row_scale)


def offsets(sizes: list[int], device: str) -> tuple[Tensor, Tensor]:
    """Return the groups' ends (offs), int32 [E], and the same with a leading 0, int32 [E+1]."""
    starts = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device)
    return starts[1:].clone(), starts


def normals(generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Random:
    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=generator.device).normal_(0.0, scale, generator=generator)

    return random


def weights_of(case: Any, random: Random) -> tuple[Tensor, Tensor]:
    """Return w1 [E,2I,H] and w2 [E,H,I] that keep results of scale 1."""
    experts, hidden, inner = case.experts, case.hidden, case.intermediate
    w1 = random(experts, 2 * inner, hidden, scale=hidden**-0.5)
    return w1, random(experts, hidden, inner, scale=inner**-0.5)


def _buffers(case: Case, random: Random, device: str) -> Buffers:
    x, mid = random(case.rows, case.hidden), random(case.rows, case.intermediate)
    results = torch.empty_like(mid), torch.empty_like(x)
    return Buffers(x, *weights_of(case, random), mid, *offsets(group_sizes(case), device), *results)


def copies_needed(size_bytes: int) -> int:
    """Return how many sets of tensors calls must alternate between, so that L2 holds none when it is used again.

    Between two uses of a set, the calls on the other sets read ROTATION_BYTES in all. At most MAX_COPIES.
    """
    return min(max(math.ceil(ROTATION_BYTES / size_bytes), 1), MAX_COPIES)


def make_buffers(case: Case, device: str = "cuda") -> list[Buffers]:
    """Return sets of the case's tensors, so many that no call finds its tensors in L2 (`copies_needed`).

    They are normal random, the same for the same case and seed. A case of one token has TOKENS sets that share the
    layer's weights; each set has other experts.
    """
    random = normals(torch.Generator(device).manual_seed(case.seed))
    if not case.routing.startswith("token"):
        return [_buffers(case, random, device) for _ in range(copies_needed(case.bytes("fc2", case.experts)))]
    layer, sets = _buffers(case, random, device), []
    for token in range(TOKENS):
        offs, starts = offsets(group_sizes(dataclasses.replace(case, seed=case.seed + token)), device)
        sets.append(dataclasses.replace(layer, offs=offs, starts=starts))
    return sets


def make_training(case: Case, device: str = "cuda") -> Training:
    """Return the case's tensors in training. One set is enough: a call moves far more than L2 holds."""
    generator = torch.Generator(device).manual_seed(case.seed)
    random, wide = normals(generator), (case.rows, 2 * case.intermediate)
    b, row_scale = _buffers(case, random, device), torch.empty(case.rows, device=device)
    row_scale.uniform_(0.1, 1.0, generator=generator)
    made = Training(**vars(b), row_scale=row_scale, dy=random(*b.x.shape), preact=random(*wide), dpreact=random(*wide))
    for leaf in made.leaves:
        leaf.requires_grad_()
    return made


def swiglu(h: Tensor, glu_layout: str = CONCAT) -> Tensor:
    """Return silu of a preactivation's activated half, times its linear half."""
    if glu_layout == INTERLEAVED:
        activated, linear = h[:, 0::2], h[:, 1::2]
    elif glu_layout == LINEAR_FIRST:
        linear, activated = (half.flatten(1) for half in h.view(len(h), -1, 2, 32).unbind(2))
    else:
        activated, linear = h.chunk(2, dim=1)
    return F.silu(activated) * linear


def _mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return F.grouped_mm(x, w.mT, offs=offs)


def torch_fc1(b: Any, glu_layout: str = CONCAT) -> Tensor:
    return swiglu(_mm(b.x, b.w1, b.offs), glu_layout)


def torch_mlp(b: Any, glu_layout: str = CONCAT) -> Tensor:
    return _mm(torch_fc1(b, glu_layout), b.w2, b.offs)


def our_mlp(b: Any) -> Tensor:
    return glulam.grouped_mlp(b.x, b.w1, b.w2, offs=b.offs, out=b.y)


def _scaled_swiglu(preact: Tensor, row_scale: Tensor, glu_layout: str = CONCAT) -> Tensor:
    """Return SwiGLU times the row scale, all in 16 bits, which is the fastest way in torch.

    With a float32 scale, torch's activation would be float32.
    """
    return swiglu(preact, glu_layout) * row_scale.to(preact.dtype)[:, None]


def _torch_dglu(d: Training, glu_layout: str = CONCAT) -> Results:
    """Return dpreact, act and the gradient of row_scale: the product dy w2_e by torch, and autograd from there on."""
    preact, scale = d.preact.detach().requires_grad_(), d.row_scale.detach().requires_grad_()
    with torch.enable_grad():
        act = _scaled_swiglu(preact, scale, glu_layout)
    d_act = F.grouped_mm(d.dy, d.w2, offs=d.offs)
    dpreact, d_scale = torch.autograd.grad(act, (preact, scale), d_act)
    return dpreact, act.detach(), d_scale


def _wgrad_of_each_expert(d: Training, op: str) -> Tensor:
    """Return a weight gradient [E, ., .], by one torch.mm for each expert; zeros for an expert without rows."""
    dy, x = (factor.split(d.sizes) for factor in d.factors(op))
    return torch.stack([torch.mm(a.mT, b) for a, b in zip(dy, x, strict=True)])


def _wgrad(op: str) -> dict[str, Compute]:
    """Return the functions that compute the weight gradient "dw1" or "dw2"."""

    def by_torch(d: Training) -> Tensor:
        dy, x = d.factors(op)
        return F.grouped_mm(dy.mT, x, offs=d.offs)

    def dense(d: Training) -> Tensor:
        dy, x = d.factors(op)
        return torch.mm(dy.mT, x)

    return {OURS: lambda d: glulam.grouped_wgrad(*d.factors(op), offs=d.offs), DENSE: dense, TORCH: by_torch}


def trained(forward: Callable[[], Tensor], leaves: Sequence[Tensor], dy: Tensor) -> Results:
    """Run a forward and its backward; return y, then the gradient of each leaf that got one."""
    forget_gradients(leaves)
    with torch.enable_grad():
        y = forward()
        y.backward(dy)
    return (y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None))


def our_layer(d: Training) -> Results:
    forward = partial(glulam.grouped_mlp, d.x, d.w1, d.w2, offs=d.offs, row_scale=d.row_scale)
    return trained(forward, d.leaves, d.dy)


def torch_layer(d: Training) -> Results:
    def forward() -> Tensor:
        return _mm(_scaled_swiglu(_mm(d.x, d.w1, d.offs), d.row_scale), d.w2, d.offs)

    return trained(forward, d.leaves, d.dy)


Compute = Callable[[Any], Any]
OPERATIONS: dict[str, dict[str, Compute]] = {
    "fc1": {
        OURS: lambda b: glulam.grouped_glu(b.x, b.w1, offs=b.offs, out=b.act),
        DENSE: lambda b: torch.mm(b.x, b.w1[0].mT),
        TORCH: torch_fc1,
    },
    "fc2": {
        OURS: lambda b: glulam.grouped_mm(b.mid, b.w2, offs=b.offs, out=b.y),
        DENSE: lambda b: torch.mm(b.mid, b.w2[0].mT),
        TORCH: lambda b: _mm(b.mid, b.w2, b.offs),
    },
    "mlp": {
        OURS: our_mlp,
        DENSE: lambda b: (torch.mm(b.x, b.w1[0].mT), torch.mm(b.mid, b.w2[0].mT)),
        TORCH: torch_mlp,
    },
    "dglu": {
        OURS: lambda d: glulam.grouped_dglu(d.dy, d.w2, d.preact, offs=d.offs, row_scale=d.row_scale),
        DENSE: lambda d: torch.mm(d.dy, d.w2[0]),
        TORCH: _torch_dglu,
    },
    "dgrad": {
        OURS: lambda d: glulam.grouped_mm(d.dpreact, d.w1, offs=d.offs, transpose_w=True),
        DENSE: lambda d: torch.mm(d.dpreact, d.w1[0]),
        TORCH: lambda d: F.grouped_mm(d.dpreact, d.w1, offs=d.offs),
    },
    "dw1": _wgrad("dw1"),
    "dw2": _wgrad("dw2"),
    LAYER: {OURS: our_layer, TORCH: torch_layer},
}
"""Functions of `Buffers`, or of `Training`, by operation and contestant."""


def expected(b: Any, op: str, glu_layout: str = CONCAT) -> Results:
    """Return torch's results, which the others are compared with."""
    if op in ("dw1", "dw2"):
        return (_wgrad_of_each_expert(b, op),)
    by_layout = {"fc1": torch_fc1, "mlp": torch_mlp, "dglu": _torch_dglu}
    made = by_layout[op](b, glu_layout) if op in by_layout else OPERATIONS[op][TORCH](b)
    return _with_zeros(b, op, listed(made))


def _with_zeros(b: Any, op: str, results: Results) -> Results:
    """Zero, in place, the weight gradients of experts without rows, which peers may leave unwritten."""
    gradients = results[{LAYER: slice(2, 4), "dw1": slice(1), "dw2": slice(1)}.get(op, slice(0))]
    empty = [expert for expert, size in enumerate(b.sizes) if not size] if gradients else []
    for gradient in gradients if empty else ():
        gradient[empty] = 0
    return results


def contestants(op: str, sets: Sequence[Any], quack: Any = None, has_dense: bool = True) -> Iterator[Contestant]:
    """Yield the contestants that compute an operation on sets of tensors, ours first.

    Args:
        quack: a `quack.Quack`, or None.
        has_dense: True: include "dense". False in decoding, where time goes into reading weights, of which "dense"
            reads only one expert's.
    """
    wanted = functools.cache(lambda glu_layout: expected(sets[0], op, glu_layout))

    def error(results: Any, glu_layout: str, is_ours: bool) -> float:
        got = listed(results)
        return relative_error(got if is_ours else _with_zeros(sets[0], op, got), wanted(glu_layout))

    bound = FORWARD_ERROR if op in OPS else BACKWARD_ERROR
    for name, compute in OPERATIONS[op].items():
        build, is_ours = partial(rotating, compute, sets), name == OURS
        if name != DENSE:
            yield Contestant(name, build, partial(error, glu_layout=CONCAT, is_ours=is_ours), bound, is_ours)
        elif has_dense:
            yield Contestant(name, build)
    if quack and op in (*OPS, *KERNELS):
        check = partial(error, glu_layout=INTERLEAVED, is_ours=False)
        yield Contestant(quack.name, lambda: rotating(quack.prepared(op, sets), sets), check, bound)
