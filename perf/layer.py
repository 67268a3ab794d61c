"""Data and contestants of a whole layer.

The data are tokens, a router with the skew that the case asks for, and experts; `expected` is what results are compared
with. The contestants are our layer, our MLP with torch around it, torch alone, and other packages that can be imported.

All contestants begin with the same router GEMM by torch. Its 16-bit logits decide which experts are chosen, so tokens
are redrawn until the K best logits and the others lie apart: a contestant that chooses otherwise is wrong, not unlucky.

SonicMoE: names and arguments of sonic-moe 0.1.2 on quack-kernels 0.3.11, which ask for nvidia-cutlass-dsl 4.4.2. Its
own tuner is switched off: it takes minutes for each shape, and the default configuration needs none. The first calls
compile for half a minute each. FlashInfer: names and arguments of `cute_dsl_fused_moe_bf16`, pull request 4878, which
infers only; its default tactic.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import glulam

from .cases import TRAIN, LayerCase
from .cells import OURS
from .contest import Contestant, Results, or_left_out, relative_error, rotating
from .mlp import CONCAT, INTERLEAVED, LINEAR_FIRST, TOKENS, Random, normals, swiglu, weights_of
from .routing import logit_offsets

GAP = 2.0**-5  # least distance of a token's K-th logit to the next: two steps of bfloat16 between 2 and 4
REDRAWS = 100  # most draws of tokens that are closer; each leaves some 40 % of them
FLOOR, SORTED, TORCH = "MLP alone", "sorted by torch", "torch"
SONIC, FLASHINFER = "SonicMoE", "FlashInfer"
SONIC_GEMMS = {"forward": ("gemm", "gemm_gated"), "backward": ("gemm", "gemm_dgated")}
FLASHINFER_MODULE = "flashinfer.fused_moe.cute_dsl.sm90_fused_moe"
MAX_RELATIVE_ERROR = 0.03  # results round to 16 bits four times in a row, each about 0.004; atomics add K times
WEIGHTS = slice(3, 5)  # places of the weights' gradients in a training's results


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of tokens, and the same tokens as rows sorted by expert, for contestants that compute only the MLP.

    Attributes:
        x, d_y: [N, H], the tokens, and the gradient of their results.
        rows, d_rows: [T, H], the same for each row.
        offs: int32 [E], each expert's end.
        weights: float32 [T], the router's weight of each row.
        token: int64 [T], each row's token.

    x, rows and weights are autograd leaves.
    """

    x: Tensor
    d_y: Tensor
    rows: Tensor
    d_rows: Tensor
    offs: Tensor
    weights: Tensor
    token: Tensor


@dataclasses.dataclass(frozen=True)
class LayerData:
    """A layer, whose router [E,H], w1 [E,2I,H], w2 [E,H,I] are autograd leaves, and batches: several in decoding."""

    case: LayerCase
    router: Tensor
    w1: Tensor
    w2: Tensor
    batches: list[Batch]

    @property
    def loads(self) -> list[int]:
        """Return the number of rows of each expert in the first batch."""
        offs = self.batches[0].offs
        return offs.diff(prepend=offs.new_zeros(1)).tolist()


def choose(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return (weights, ids) of the k best experts, both [N, K]: softmax over all logits, in at least float32.

    The k best probabilities are divided by their sum. With k = 1 the weight stays the probability, since a weight of
    always 1 would train no router.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weights, ids = wide.softmax(-1).topk(k)
    return (weights / weights.sum(-1, keepdim=True) if k > 1 else weights), ids


def sort_choices(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of all choices (n K + k) sorted by expert, and the end of each expert's choices (offs)."""
    sorted_ids, order = ids.reshape(-1).sort(stable=True)
    bounds = torch.arange(experts, device=ids.device)
    return order, torch.searchsorted(sorted_ids, bounds, right=True, out_int32=True)


def _draw_tokens(case: LayerCase, router: Tensor, random: Random) -> Tensor:
    """Return tokens x [N,H] whose choices of experts do not depend on rounding (see the top of this file).

    Feature 0 of each token is 1, so that the router's column 0 is an offset of the logits.
    """
    x = random(case.tokens, case.hidden)
    x[:, 0] = 1
    if case.experts == case.top_k:
        return x
    for _ in range(REDRAWS):
        best = F.linear(x, router).float().topk(case.top_k + 1).values
        close = (best[:, -2] - best[:, -1] < GAP).nonzero().squeeze(1)
        if not len(close):
            return x
        x[close, 1:] = random(len(close), case.hidden - 1)
    raise RuntimeError(f"{case.label}: after {REDRAWS} draws some tokens' best logits are closer than {GAP}")


def _batch(case: LayerCase, router: Tensor, random: Random) -> Batch:
    x, d_y = _draw_tokens(case, router, random), random(case.tokens, case.hidden)
    weights, ids = choose(F.linear(x, router), case.top_k)
    order, offs = sort_choices(ids, case.experts)
    token = order // case.top_k
    rows, row_weights = x[token].requires_grad_(), weights.reshape(-1)[order].requires_grad_()
    return Batch(x.requires_grad_(), d_y, rows, d_y[token], offs, row_weights, token)


def make_layer(case: LayerCase, device: str = "cuda") -> LayerData:
    """Return the case's tensors: normal random, scaled so that logits and results have scale 1.

    The same case and seed give the same tensors.
    """
    random = normals(torch.Generator(device).manual_seed(case.seed))
    router = random(case.experts, case.hidden, scale=case.hidden**-0.5)
    router[:, 0] = torch.tensor(logit_offsets(case))
    w1, w2 = weights_of(case, random)
    batches = [_batch(case, router, random) for _ in range(TOKENS if case.decode else 1)]
    return LayerData(case, router.requires_grad_(), w1.requires_grad_(), w2.requires_grad_(), batches)


@torch.enable_grad()
def expected(d: LayerData, op: str, glu_layout: str = CONCAT) -> Results:
    """Return the right results in float64, computed one expert after the other.

    These are y, and for TRAIN the gradients of x, router, w1 and w2. The gradients of w1 and w2 are rounded to the
    weights' dtype, to save memory.
    """
    b, k, trains = d.batches[0], d.case.top_k, op == TRAIN
    logits = F.linear(b.x, d.router).detach().double().requires_grad_()
    weights, ids = choose(logits, k)
    order, offs = sort_choices(ids, d.case.experts)
    weights_of_row = weights.reshape(-1)[order].detach()
    y, d_x = (torch.zeros_like(b.x, dtype=torch.float64) for _ in range(2))
    d_weights = torch.zeros_like(weights)
    d_w1, d_w2 = (torch.zeros_like(w) if trains else w for w in (d.w1, d.w2))
    starts = [0, *offs.tolist()]
    for e, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if start == end:
            continue
        choice = order[start:end]
        token = choice // k
        given = (b.x[token], d.w1[e], d.w2[e], weights_of_row[start:end])
        x, w1, w2, scale = leaves = [t.detach().double().requires_grad_(trains) for t in given]
        y_e = (swiglu(x @ w1.mT, glu_layout) * scale[:, None]) @ w2.mT
        y.index_add_(0, token, y_e.detach())
        if trains:
            gradients = torch.autograd.grad(y_e, leaves, b.d_y[token].double())
            d_x.index_add_(0, token, gradients[0])
            d_w1[e], d_w2[e] = gradients[1], gradients[2]
            d_weights.view(-1)[choice] = gradients[3]
    if not trains:
        return (y,)
    (d_logits,) = torch.autograd.grad(weights, logits, d_weights)
    with torch.no_grad():
        d_x += d_logits @ d.router.double()
        return y, d_x, d_logits.mT @ b.x.double(), d_w1, d_w2


Forward = Callable[[LayerData, Batch], Tensor]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A contestant: one way to compute a layer. Its gradients are computed by autograd.

    Attributes:
        name: the contestant's name.
        forward: function (layer, batch of tokens) that returns the results.
        glu_layout: the order of gate and up-projection in w1's rows.
        trains: False: it has no backward.
        on_rows: True: only the MLP of sorted rows, without router and combine.
        kept_whole: True: weight gradients of experts without rows are zeros. False: they may be unwritten.
    """

    name: str
    forward: Forward
    glu_layout: str = CONCAT
    trains: bool = True
    on_rows: bool = False
    kept_whole: bool = False

    @torch.no_grad()
    def infer(self, d: LayerData, b: Batch) -> Results:
        return (self.forward(d, b),)

    def train(self, d: LayerData, b: Batch) -> Results:
        """Return the result, and the gradients of the leaves."""
        leaves = (b.rows, b.weights, d.w1, d.w2) if self.on_rows else (b.x, d.router, d.w1, d.w2)
        with torch.enable_grad():
            y = self.forward(d, b)
        return (y.detach(), *torch.autograd.grad(y, leaves, b.d_rows if self.on_rows else b.d_y))

    def call(self, d: LayerData, op: str) -> Callable[[Batch], Results]:
        return partial(self.train if op == TRAIN else self.infer, d)

    def error(self, got: Results, d: LayerData, wanted: Callable[[str], Results]) -> float:
        """Return the largest relative error on the first batch.

        With `on_rows`, the rows' sums by token and the weights' gradients are compared.
        """
        b, right = d.batches[0], wanted(self.glu_layout)
        if self.on_rows:
            sums = torch.zeros_like(b.x, dtype=torch.float32).index_add(0, b.token, got[0].float())
            return relative_error((sums, *got[WEIGHTS]), (right[0], *right[WEIGHTS]))
        empty = [] if self.kept_whole else [e for e, load in enumerate(d.loads) if not load]
        for gradient in got[WEIGHTS] if empty else ():
            gradient[empty] = 0
        return relative_error(got, right)


def contestants(d: LayerData, op: str, layers: Sequence[Layer]) -> Iterator[Contestant]:
    """Yield the contestants that compute FORWARD or TRAIN. Their calls go through the batches one after the other."""

    @functools.lru_cache(maxsize=1)  # one at a time, for room
    def wanted(glu_layout: str) -> Results:
        return expected(d, op, glu_layout)

    for layer in layers:
        if op != TRAIN or layer.trains:
            build = partial(rotating, layer.call(d, op), d.batches)
            yield Contestant(layer.name, build, partial(layer.error, d=d, wanted=wanted), MAX_RELATIVE_ERROR)


def _ours(d: LayerData, b: Batch) -> Tensor:
    k = d.case.top_k
    return glulam.moe(b.x, glulam.route(F.linear(b.x, d.router), k, normalize=k > 1), d.w1, d.w2)


def _mlp_alone(d: LayerData, b: Batch) -> Tensor:
    return glulam.grouped_mlp(b.rows, d.w1, d.w2, offs=b.offs, row_scale=b.weights)


def _sorted(d: LayerData, b: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows sorted by expert, their weights, where each expert's rows end (offs), and each row's choice."""
    weights, ids = choose(F.linear(b.x, d.router), d.case.top_k)
    order, offs = sort_choices(ids, d.case.experts)
    rows = b.x.index_select(0, order // d.case.top_k)
    return rows, weights.reshape(-1).index_select(0, order), offs, order


def _sorted_by_torch(d: LayerData, b: Batch) -> Tensor:
    """Compute the layer with our MLP; torch sorts rows before it and adds them up after it."""
    rows, scale, offs, order = _sorted(d, b)
    y = glulam.grouped_mlp(rows, d.w1, d.w2, offs=offs, row_scale=scale)
    return torch.zeros_like(b.x).index_add(0, order // d.case.top_k, y)


def _torch(d: LayerData, b: Batch) -> Tensor:
    """Compute the layer with torch alone: weight the MLP's rows, restore their order, and add them by token."""
    rows, scale, offs, order = _sorted(d, b)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    act = swiglu(F.grouped_mm(rows, d.w1.mT, offs=offs))
    y = F.grouped_mm(act, d.w2.mT, offs=offs) * scale.to(rows.dtype)[:, None]
    return y.index_select(0, back).view(d.case.tokens, d.case.top_k, -1).sum(1)


def _sonic() -> Layer:
    """Compute the layer by SonicMoE's function for a whole layer, which includes the router's GEMM."""
    api: Any = importlib.import_module("sonicmoe.functional")
    for name, gemms in SONIC_GEMMS.items():
        module: Any = importlib.import_module(f"sonicmoe.functional.{name}")
        for gemm in gemms:
            if not isinstance(getattr(module, gemm), partial):
                setattr(module, gemm, partial(getattr(module, gemm), tuned=False))

    def forward(d: LayerData, b: Batch) -> Tensor:
        """Take a softmax over the best of several choices, which is ours divided by its sum; else the probability."""
        w1, w2 = d.w1.permute(1, 2, 0), d.w2.permute(1, 2, 0)
        stream, infers = torch.cuda.current_stream().cuda_stream, not torch.is_grad_enabled()
        y, _, _ = api.moe_TC_softmax_topk_layer(
            b.x, d.router, w1, None, w2, None, d.case.top_k, stream, activation_type="swiglu",
            is_inference_mode_enabled=infers, is_softmax_over_topk=d.case.top_k > 1,
        )  # fmt: skip
        return y

    return Layer(SONIC, forward, INTERLEAVED)


def _flashinfer() -> Layer:
    """Compute the layer with FlashInfer's experts; torch chooses them and computes their weights."""
    fused: Any = importlib.import_module(FLASHINFER_MODULE).cute_dsl_fused_moe_bf16

    def forward(d: LayerData, b: Batch) -> Tensor:
        k = d.case.top_k
        weights, ids = choose(F.linear(b.x, d.router), k)
        return fused(b.x, ids.int(), weights, d.w1, d.w2, num_experts=d.case.experts, top_k=k)

    return Layer(FLASHINFER, forward, LINEAR_FIRST, trains=False)


def layers() -> list[Layer]:
    """Return the contestants, ours first, then installed peers; warn of one that cannot be imported."""
    found = [
        Layer(OURS, _ours, kept_whole=True),
        Layer(FLOOR, _mlp_alone, on_rows=True, kept_whole=True),
        Layer(SORTED, _sorted_by_torch, kept_whole=True),
        Layer(TORCH, _torch),
    ]
    for package, make in (("sonicmoe", _sonic), ("flashinfer", _flashinfer)):
        if importlib.util.find_spec(package) is not None:
            with or_left_out(package):
                found.append(make())
    return found
