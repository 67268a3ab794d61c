"""Calls of operators whose results were computed by an H100; the emulator must reproduce them.

Inputs come from numpy's PCG64, which gives the same numbers on every machine. In calls of EXACT all sums are exact in
float32 and a result is rounded once, so results must be equal bit for bit. Other calls use exp, rsqrt or division,
which the emulator computes more exactly than the GPU's approximations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import glulam

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (130, 0, 61, 9)
"""Rows of each expert: a full tile of 128 and 2 rows of another, none, and less than a tile."""
ROWS, EXPERTS, HIDDEN, INTER = 208, len(SIZES), 192, 128
"""ROWS includes 8 rows after the last group."""
TOKENS, TOP_K = 70, 3

Call = Callable[["Inputs"], Any]
EXACT: dict[str, Call] = {}
NEAR: dict[str, Call] = {}


class Inputs:
    """Input tensors on a device, from a random generator seeded by the call's name."""

    def __init__(self, device: str, name: str) -> None:
        self.device = device
        self._random = np.random.default_rng([ord(letter) for letter in name])

    def quarters(self, *shape: int, dtype: torch.dtype = BF16, most: int = 3) -> Tensor:
        """Return random multiples of 1/4 up to `most` / 4."""
        return self.given(self._random.integers(-most, most + 1, shape) / 4, dtype)

    def normal(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
        return self.given(self._random.standard_normal(shape) * scale, dtype)

    def scales(self, *shape: int) -> Tensor:
        """Return random powers of two, float32."""
        return self.given(np.ldexp(1.0, self._random.integers(-2, 3, shape)), F32)

    def given(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(dtype).to(self.device)

    def order(self, count: int, of: int) -> Tensor:
        """Return random row indices, int32 [count], below `of`."""
        return self.given(self._random.integers(0, of, count), torch.int32)

    @property
    def offs(self) -> Tensor:
        return self.given(np.cumsum(SIZES), torch.int32)

    def routing(self) -> Any:
        """Return a routing of TOKENS tokens to 8 experts; some choices have no expert."""
        ids = np.argsort(self._random.random((TOKENS, 8)), 1)[:, :TOP_K]
        ids[::7, 1] = -1
        return glulam.Routing.from_topk(self.given(ids, torch.int32), self.scales(TOKENS, TOP_K), 8)

    def tail(self, x: Tensor) -> Tensor:
        """Set x's rows after the last group to NaN, and return x."""
        x[sum(SIZES) :] = torch.nan
        return x


def _exact(function: Call) -> Call:
    EXACT[function.__name__] = function
    return function


def _near(function: Call) -> Call:
    NEAR[function.__name__] = function
    return function


@_exact
def grouped_mm(given: Inputs) -> Any:
    x, w = given.tail(given.quarters(ROWS, HIDDEN)), given.quarters(EXPERTS, INTER, HIDDEN)
    options = {"bias": given.quarters(EXPERTS, INTER), "bias_scale": given.scales(ROWS)}
    return glulam.grouped_mm(x, w, offs=given.offs, **options)[: sum(SIZES)]


@_exact
def grouped_mm_float16(given: Inputs) -> Any:
    x, w = given.quarters(ROWS, HIDDEN, dtype=F16), given.quarters(EXPERTS, INTER, HIDDEN, dtype=F16)
    return glulam.grouped_mm(x, w, offs=given.offs)[: sum(SIZES)]


@_exact
def grouped_mm_transposed(given: Inputs) -> Any:
    x, w = given.quarters(ROWS, INTER), given.quarters(EXPERTS, INTER, HIDDEN)
    return glulam.grouped_mm(x, w, offs=given.offs, transpose_w=True)[: sum(SIZES)]


@_exact
def grouped_mm_by_index(given: Inputs) -> Any:
    x, w = given.quarters(TOKENS, HIDDEN), given.quarters(EXPERTS, INTER, HIDDEN)
    return glulam.grouped_mm(x, w, offs=given.offs, rows=given.order(ROWS, TOKENS))[: sum(SIZES)]


@_exact
def grouped_mm_of_listed_experts(given: Inputs) -> Any:
    x, w = given.quarters(ROWS, HIDDEN), [given.quarters(INTER, HIDDEN) for _ in SIZES]
    return glulam.grouped_mm(x, w, offs=given.offs)[: sum(SIZES)]


@_exact
def grouped_mm_of_few_rows(given: Inputs) -> Any:
    x, w = given.quarters(3, HIDDEN), given.quarters(EXPERTS, INTER, HIDDEN)
    return glulam.grouped_mm(x, w, offs=given.given([1, 1, 3, 3], torch.int32))


@_exact
def grouped_mm_mxfp4(given: Inputs) -> Any:
    x, w = given.quarters(ROWS, HIDDEN), given.quarters(EXPERTS, INTER, HIDDEN)
    return glulam.grouped_mm(x, glulam.quantize_mxfp4(w), offs=given.offs)[: sum(SIZES)]


@_exact
def grouped_glu_reglu(given: Inputs) -> Any:
    """Call grouped_glu with reglu, whose results max(a, 0) u have at most 22 bits and so are exact."""
    x, w = given.quarters(ROWS, HIDDEN), given.quarters(EXPERTS, 2 * INTER, HIDDEN)
    made = glulam.grouped_glu(x, w, offs=given.offs, activation="reglu", return_preact=True)
    return [part[: sum(SIZES)] for part in made]


@_exact
def grouped_wgrad(given: Inputs) -> Any:
    return glulam.grouped_wgrad(given.quarters(ROWS, INTER), given.quarters(ROWS, HIDDEN), offs=given.offs)


@_exact
def grouped_wgrad_by_index_in_float32(given: Inputs) -> Any:
    dy, x = given.quarters(ROWS, INTER), given.quarters(TOKENS, HIDDEN)
    return glulam.grouped_wgrad(dy, x, offs=given.offs, x_rows=given.order(ROWS, TOKENS), out_dtype=F32)


@_exact
def grouped_bias_grad(given: Inputs) -> Any:
    return glulam.grouped_bias_grad(given.quarters(ROWS, INTER), offs=given.offs, row_scale=given.scales(ROWS))


@_exact
def grouped_dglu_reglu(given: Inputs) -> Any:
    dy, w2 = given.quarters(ROWS, HIDDEN), given.quarters(EXPERTS, HIDDEN, INTER)
    preact = given.quarters(ROWS, 2 * INTER)
    made = glulam.grouped_dglu(dy, w2, preact, offs=given.offs, activation="reglu", row_scale=given.scales(ROWS))
    return [part[: sum(SIZES)] for part in made]


@_exact
def quantize_mxfp8(given: Inputs) -> Any:
    x = given.normal(96, HIDDEN) * given.scales(96, 1).to(BF16)
    made = []
    for axis in ("row", "col", "both"):
        both = glulam.quantize_mxfp8(x, axis=axis)
        made += [part for one in (both if isinstance(both, tuple) else (both,)) for part in (one.data, one.scale)]
    return made


@_exact
def quantize_mxfp8_swizzled(given: Inputs) -> Any:
    q = glulam.quantize_mxfp8(given.normal(130, 256), block="1x128", scale_layout="swizzled")
    return [q.data, q.scale]


@_exact
def quantize_mxfp4(given: Inputs) -> Any:
    q = glulam.quantize_mxfp4(given.normal(2, 64, HIDDEN))
    return [q.data, q.scale]


@_exact
def prepare_mxfp8_weight(given: Inputs) -> Any:
    w = glulam.prepare_mxfp8_weight(given.normal(2, 64, 256))
    return [w.data, w.scale]


@_exact
def permute_and_combine(given: Inputs) -> Any:
    routing, x = given.routing(), given.quarters(TOKENS, HIDDEN)
    rows = glulam.permute(x, routing)
    used = int(routing.offs[-1])
    return [rows[:used], glulam.combine(rows, routing, residual=x), routing.offs, routing.row_of]


@_exact
def permute_and_combine_backward(given: Inputs) -> Any:
    routing = given.routing()
    x, y = (given.quarters(*shape).requires_grad_() for shape in ((TOKENS, HIDDEN), (TOKENS * TOP_K, HIDDEN)))
    glulam.combine(y, routing).backward(given.quarters(TOKENS, HIDDEN))
    used = int(routing.offs[-1])
    mix = given.quarters(TOKENS * TOP_K, HIDDEN)
    glulam.permute(x, routing).backward(mix)
    return [x.grad, y.grad[:used]]


@_near
def grouped_glu(given: Inputs) -> Any:
    x, w = given.quarters(ROWS, HIDDEN), given.normal(EXPERTS, 2 * INTER, HIDDEN, scale=HIDDEN**-0.5)
    made = glulam.grouped_glu(x, w, offs=given.offs, bias=given.normal(EXPERTS, 2 * INTER), return_preact=True)
    return [part[: sum(SIZES)] for part in made]


@_near
def grouped_glu_gate_up(given: Inputs) -> Any:
    x = given.quarters(ROWS, HIDDEN)
    gate, up = (given.normal(EXPERTS, INTER, HIDDEN, scale=HIDDEN**-0.5) for _ in range(2))
    return glulam.grouped_glu(x, glulam.GateUp(gate, up), offs=given.offs, activation="geglu")[: sum(SIZES)]


def _mlp(given: Inputs, recipe: str, **options: Any) -> Any:
    x = given.normal(ROWS, HIDDEN if recipe != "mxfp8" else 256)
    w1 = given.normal(EXPERTS, 2 * INTER, x.shape[1], scale=0.1)
    w2 = given.normal(EXPERTS, x.shape[1], INTER, scale=0.1)
    return glulam.grouped_mlp(
        x, w1, w2, offs=given.offs, row_scale=given.scales(ROWS), recipe=recipe, **options
    )[: sum(SIZES)]  # fmt: skip


@_near
def grouped_mlp(given: Inputs) -> Any:
    return _mlp(given, "bf16")


@_near
def grouped_mlp_clamped(given: Inputs) -> Any:
    return _mlp(given, "bf16", activation="clamped_swiglu", glu_layout="interleaved", limit=1.5)


for _recipe in ("mxfp8", "mxfp8_exact", "mxfp8_weight_only", "mxfp4_weight_only"):
    NEAR[f"grouped_mlp_{_recipe}"] = partial(_mlp, recipe=_recipe)


@_near
def grouped_mlp_backward(given: Inputs) -> Any:
    x = given.normal(ROWS, HIDDEN).requires_grad_()
    w1 = given.normal(EXPERTS, 2 * INTER, HIDDEN, scale=0.1).requires_grad_()
    w2 = given.normal(EXPERTS, HIDDEN, INTER, scale=0.1).requires_grad_()
    scale = given.scales(ROWS).requires_grad_()
    y = glulam.grouped_mlp(x, w1, w2, offs=given.offs, row_scale=scale)
    y.backward(given.normal(ROWS, HIDDEN))
    used = sum(SIZES)
    return [y[:used], x.grad[:used], w1.grad, w2.grad, scale.grad[:used]]


@_near
def route(given: Inputs) -> Any:
    logits = given.normal(TOKENS, 16, dtype=F32).requires_grad_()
    routing = glulam.route(logits, TOP_K)
    routing.weights.backward(given.normal(TOKENS, TOP_K, dtype=F32))
    return [routing.weights, routing.ids, routing.offs, routing.row_of, logits.grad]


@_near
def route_by_sigmoids_and_groups(given: Inputs) -> Any:
    logits, bias = given.normal(9, 16, dtype=F32), given.normal(16, dtype=F32)
    routing = glulam.route(logits, TOP_K, score="sigmoid", bias=bias, num_groups=4, top_groups=2, scale=2.5)
    return [routing.weights, routing.ids, routing.offs, routing.row_of]


@_near
def moe(given: Inputs) -> Any:
    routing, x = given.routing(), given.normal(TOKENS, HIDDEN)
    w1, w2 = given.normal(8, 2 * INTER, HIDDEN, scale=0.1), given.normal(8, HIDDEN, INTER, scale=0.1)
    return glulam.moe(x, routing, w1, w2, residual=x)


def _streams(given: Inputs, dtype: torch.dtype = BF16) -> tuple[Any, ...]:
    n, width, tokens = 4, 64, 21
    return given.normal(tokens, n, width, dtype=dtype), n, width, tokens


@_near
def mhc_sinkhorn(given: Inputs) -> Any:
    logits = given.normal(21, 4, 4, dtype=F32).requires_grad_()
    made = glulam.mhc.sinkhorn(logits)
    made.backward(given.normal(21, 4, 4, dtype=F32))
    return [made, logits.grad]


@_near
def mhc_aggregate_and_post_mix(given: Inputs) -> Any:
    x, n, width, tokens = _streams(given)
    leaves = [x, given.normal(tokens, n, dtype=F32), given.normal(tokens, n, n, dtype=F32)]
    leaves += [given.normal(tokens, n, dtype=F32), given.normal(tokens, width)]
    x, h_pre, h_res, h_post, y = (leaf.requires_grad_() for leaf in leaves)
    made = [glulam.mhc.aggregate(x, h_pre), glulam.mhc.post_mix(x, h_res, h_post, y)]
    torch.autograd.backward(made, [given.normal(*one.shape) for one in made])
    return [*made, *(leaf.grad for leaf in leaves)]


@_near
def mhc_project(given: Inputs) -> Any:
    x, n, width, _ = _streams(given)
    leaves = [x, given.normal(n * n + 2 * n, n * width, dtype=F32, scale=0.1)]
    leaves += [given.given(0.5 + place, F32) for place in range(3)] + [given.normal(n * n + 2 * n, dtype=F32)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    made = list(glulam.mhc.project(*leaves))
    torch.autograd.backward(made, [given.normal(*one.shape, dtype=F32) for one in made])
    return [*made, *(leaf.grad for leaf in leaves)]


CALLS = {**EXACT, **NEAR}
OF_HOPPER = {"prepare_mxfp8_weight", "grouped_mlp_mxfp8"}
"""Calls that need an FP8 MMA, which portable kernels do not have."""
ROUNDED_TO_E4M3 = {"grouped_mlp_mxfp8"}
"""Calls that compute an activation from FP8 products and round it to E4M3.

The GPU may round an activation between two numbers to the other neighbour.
"""


def calls_of(arch: str) -> list[str]:
    return [name for name in CALLS if arch == "sm_90a" or name not in OF_HOPPER]


def results(name: str, device: str) -> list[Tensor]:
    """Return a call's results, on the CPU."""
    made = CALLS[name](Inputs(device, name))
    return [part.detach().cpu() for part in (made if isinstance(made, (list, tuple)) else [made]) if part is not None]
