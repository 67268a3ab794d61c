"""What competes in training: a layer's forward and backward, and the kernels of its backward.

A contestant is a function from the case's tensors to the tensors it computes. torch's are written as one writes
them without a fused kernel; "dense" is cuBLAS on one matrix of the same FLOP, without groups or activation.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from .cases import BYTES_PER_ELEMENT, Case
from .contest import or_left_out
from .problem import normals, offsets
from .quack import Quack
from .routing import group_sizes

OURS, TORCH, DENSE = "glulam", "torch", "dense"
LAYER = "layer"
KERNELS = ("dglu", "dgrad", "dw1", "dw2")
OPS = (LAYER, *KERNELS)
PART_ELEMENTS = 2**28  # that are compared at once
MAX_RELATIVE_ERROR = 0.03  # a backward rounds to 16 bits three times in a row, each about 0.004


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """One layer in training. Leaves that require gradients: x [T,H], w1 [E,2I,H], w2 [E,H,I], row_scale float32 [T].
    Constants: dy [T,H], and what stands between the kernels, random: preact and dpreact [T,2I], act [T,I].
    offs int32 [E], starts int32 [E+1]: the groups' ends, without and with a leading 0.
    """

    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    row_scale: torch.Tensor
    dy: torch.Tensor
    preact: torch.Tensor
    dpreact: torch.Tensor
    act: torch.Tensor
    offs: torch.Tensor
    starts: torch.Tensor
    sizes: list[int]

    def factors(self, op: str) -> tuple[torch.Tensor, torch.Tensor]:
        """dy and x of a weight gradient dy^T x, "dw1" or "dw2"."""
        return (self.dpreact, self.x) if op == "dw1" else (self.dy, self.act)

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return (self.x, self.w1, self.w2, self.row_scale)

    def forget_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


Results = tuple[torch.Tensor, ...]
Contestant = Callable[[TrainingData], Results]


def make_data(case: Case, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> TrainingData:
    """The case's tensors, random, the same for the same case and seed. One set: a call moves far more than L2 holds."""
    experts, hidden, inner, rows = case.experts, case.hidden, case.intermediate, case.rows
    generator = torch.Generator(device).manual_seed(case.seed)

    random = normals(generator, dtype)
    row_scale = torch.empty(rows, device=device).uniform_(0.1, 1.0, generator=generator)
    sizes = group_sizes(case)
    offs = offsets(sizes, device)
    return TrainingData(
        x=random(rows, hidden).requires_grad_(),
        w1=random(experts, 2 * inner, hidden, scale=hidden**-0.5).requires_grad_(),
        w2=random(experts, hidden, inner, scale=inner**-0.5).requires_grad_(),
        row_scale=row_scale.requires_grad_(),
        dy=random(rows, hidden),
        preact=random(rows, 2 * inner),
        dpreact=random(rows, 2 * inner),
        act=random(rows, inner),
        offs=offs,
        starts=torch.cat([offs.new_zeros(1), offs]),
        sizes=sizes,
    )


def flop(case: Case, op: str) -> int:
    """Useful operations: a backward does each GEMM of the forward twice; dglu holds one GEMM of FC2's size."""
    fc1, fc2 = case.flop("fc1"), case.flop("fc2")
    return {LAYER: 3 * case.flop("mlp"), "dglu": fc2, "dgrad": fc1, "dw1": fc1, "dw2": fc2}[op]


def bytes_moved(case: Case, op: str, active_experts: int) -> int:
    """The fewest bytes of a kernel, as `Case.bytes` counts; weight gradients are written for every expert."""
    matrix, x, mid = case.hidden * case.intermediate, case.rows * case.hidden, case.rows * case.intermediate
    elements = {
        "dglu": active_experts * matrix + x + 5 * mid,
        "dgrad": 2 * active_experts * matrix + 2 * mid + x,
        "dw1": 2 * case.experts * matrix + 2 * mid + x,
        "dw2": case.experts * matrix + x + mid,
    }[op]
    return BYTES_PER_ELEMENT * elements


def _api() -> Any:
    import glulam

    return glulam


def our_layer(d: TrainingData) -> Results:
    """y and the gradients of the leaves."""
    d.forget_gradients()
    y = _api().grouped_mlp(d.x, d.w1, d.w2, offs=d.offs, row_scale=d.row_scale)
    y.backward(d.dy)
    return _layer_results(d, y)


def torch_layer(d: TrainingData) -> Results:
    d.forget_gradients()
    y = _torch_forward(d)  # a function of its own, so that no local keeps an intermediate through backward
    y.backward(d.dy)
    return _layer_results(d, y)


def _torch_forward(d: TrainingData) -> torch.Tensor:
    preact = F.grouped_mm(d.x, d.w1.mT, offs=d.offs)
    return F.grouped_mm(_scaled_swiglu(preact, d.row_scale), d.w2.mT, offs=d.offs)


def _scaled_swiglu(preact: torch.Tensor, row_scale: torch.Tensor, glu_layout: str = "concat") -> torch.Tensor:
    """In 16 bits throughout, torch's fastest: a float32 scale would make the activation float32."""
    gate, up = (preact[:, 0::2], preact[:, 1::2]) if glu_layout == "interleaved" else preact.chunk(2, dim=1)
    return F.silu(gate) * up * row_scale.to(preact.dtype)[:, None]


def _layer_results(d: TrainingData, y: torch.Tensor) -> Results:
    gradients = [leaf.grad for leaf in d.leaves]
    return (y.detach(), *(gradient for gradient in gradients if gradient is not None))


@torch.no_grad()
def our_operators(d: TrainingData) -> Results:
    """The layer's six launches through our operators, without autograd: what autograd adds is the rest."""
    api, offs, scale = _api(), d.offs, d.row_scale
    act, preact = api.grouped_glu(d.x, d.w1, offs=offs, row_scale=scale, return_preact=True)
    y = api.grouped_mm(act, d.w2, offs=offs)
    dpreact, act, d_scale = api.grouped_dglu(d.dy, d.w2, preact, offs=offs, row_scale=scale)
    dx = api.grouped_mm(dpreact, d.w1, offs=offs, transpose_w=True)
    return y, dx, api.grouped_wgrad(dpreact, d.x, offs=offs), api.grouped_wgrad(d.dy, act, offs=offs), d_scale


def _wgrad_contestants(op: str) -> dict[str, Contestant]:
    @torch.no_grad()
    def ours(d: TrainingData) -> Results:
        dy, x = d.factors(op)
        return (_api().grouped_wgrad(dy, x, offs=d.offs),)

    @torch.no_grad()
    def dense(d: TrainingData) -> Results:
        dy, x = d.factors(op)
        return (torch.mm(dy.mT, x),)

    @torch.no_grad()
    def ragged(d: TrainingData) -> Results:
        dy, x = d.factors(op)
        return (F.grouped_mm(dy.mT, x, offs=d.offs),)

    return {OURS: ours, DENSE: dense, TORCH: ragged}


@torch.no_grad()
def _wgrad_of_each_expert(d: TrainingData, op: str) -> Results:
    """One torch.mm an expert; of no rows, zeros."""
    dy, x = d.factors(op)
    ends = list(itertools.accumulate(d.sizes))
    groups = [slice(end - size, end) for end, size in zip(ends, d.sizes, strict=True)]
    return (torch.stack([torch.mm(dy[rows].mT, x[rows]) for rows in groups]),)


@torch.no_grad()
def _our_dglu(d: TrainingData) -> Results:
    return tuple(_api().grouped_dglu(d.dy, d.w2, d.preact, offs=d.offs, row_scale=d.row_scale))


@torch.no_grad()
def _dense_dglu(d: TrainingData) -> Results:
    return (torch.mm(d.dy, d.w2[0]),)


def _torch_dglu(d: TrainingData, glu_layout: str = "concat") -> Results:
    """dpreact, act and the gradient of row_scale, by autograd from dy w2_e on."""
    preact, scale = d.preact.detach().requires_grad_(), d.row_scale.detach().requires_grad_()
    act = _scaled_swiglu(preact, scale, glu_layout)
    with torch.no_grad():
        d_act = F.grouped_mm(d.dy, d.w2, offs=d.offs)
    dpreact, d_scale = torch.autograd.grad(act, (preact, scale), d_act)
    return dpreact, act.detach(), d_scale


@torch.no_grad()
def _our_dgrad(d: TrainingData) -> Results:
    return (_api().grouped_mm(d.dpreact, d.w1, offs=d.offs, transpose_w=True),)


@torch.no_grad()
def _dense_dgrad(d: TrainingData) -> Results:
    return (torch.mm(d.dpreact, d.w1[0]),)


@torch.no_grad()
def _torch_dgrad(d: TrainingData) -> Results:
    return (F.grouped_mm(d.dpreact, d.w1, offs=d.offs),)


def contestants(op: str, quack: Quack | None = None) -> dict[str, Contestant]:
    """Who computes `op`, a name in OPS; ours first. QuACK has kernels, and no layer of its own."""
    peers: dict[str, Contestant] = {quack.name: partial(quack.backward, op=op)} if quack and op in KERNELS else {}
    if op == LAYER:
        return {OURS: our_layer, TORCH: torch_layer}
    if op == "dglu":
        return {OURS: _our_dglu, DENSE: _dense_dglu, TORCH: _torch_dglu, **peers}
    if op == "dgrad":
        return {OURS: _our_dgrad, DENSE: _dense_dgrad, TORCH: _torch_dgrad, **peers}
    return {**_wgrad_contestants(op), **peers}


def expected(d: TrainingData, op: str, glu_layout: str = "concat") -> Results:
    """torch's results."""
    if op in ("dw1", "dw2"):
        return _wgrad_of_each_expert(d, op)
    if op == "dglu":
        return _torch_dglu(d, glu_layout)
    return _torch_dgrad(d) if op == "dgrad" else _zero_the_empty(d, op, torch_layer(d))


def _zero_the_empty(d: TrainingData, op: str, results: Results) -> Results:
    """Results with zero weight gradients for experts without rows, which peers may leave unwritten."""
    empty = [expert for expert, size in enumerate(d.sizes) if not size]
    places = {LAYER: slice(2, 4), "dw1": slice(0, 1), "dw2": slice(0, 1)}
    for weight_gradient in results[places.get(op, slice(0))] if empty else ():
        weight_gradient[empty] = 0
    return results


def relative_error(got: Results, wanted: Results) -> float:
    """The largest over the tensors, by Frobenius norms; NaN where one is NaN."""
    errors = [_relative_error(a, b) for a, b in zip(got, wanted, strict=True)]
    return max(errors, key=lambda error: (error != error, error))


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """A part after the other: in float32, a model's weights would not fit beside their gradients."""
    size = max(PART_ELEMENTS // max(wanted[:1].numel(), 1), 1)
    parts = list(zip(got.split(size), wanted.split(size), strict=True))
    difference = math.hypot(*(float((a.float() - b.float()).norm()) for a, b in parts))
    norm = math.hypot(*(float(b.float().norm()) for _, b in parts))
    return difference / norm if norm else math.nan


def check(d: TrainingData, op: str, name: str, call: Contestant, wanted: Results) -> float:
    """The relative error against torch; 0 for dense, which computes something else.

    Raises RuntimeError above MAX_RELATIVE_ERROR: a wrong result's time says nothing.
    """
    got = call(d) if name == OURS else _zero_the_empty(d, op, call(d))
    error = 0.0 if name == DENSE else relative_error(got, wanted)
    if not error <= MAX_RELATIVE_ERROR:
        raise RuntimeError(f"{name} {op}: relative error {error:.2g} against torch; nothing was timed")
    return error


def competing(d: TrainingData, op: str, quack: Quack | None = None) -> dict[str, tuple[Contestant, float]]:
    """Each contestant and its error. A peer that fails or is wrong here is left out with a warning; we may not."""
    chosen: dict[str, tuple[Contestant, float]] = {}
    wanted: dict[str, Results] = {}
    for name, call in contestants(op, quack).items():
        layout = Quack.glu_layout if quack and name == quack.name else "concat"
        if layout not in wanted:
            wanted[layout] = expected(d, op, layout)
        with or_left_out(f"{op}: {name}", required=name == OURS):
            chosen[name] = call, check(d, op, name, call, wanted[layout])
    return chosen
