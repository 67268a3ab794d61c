"""The hyper-connection operators, forward and backward: device time against the bytes that they must move, against
torch.compile of the reference in the same run, and the host time of a call.

Minimal bytes: every input that a direction needs is read once and every result written once. Counted in vectors of C
elements a token (the streams are n of them), forward reads and writes: aggregate n and 1; post_mix n + 1 and n; project
n and none; sinkhorn its matrices alone. Backward: aggregate n + 1 and n; post_mix 2n + 1 and n + 1; project n and n;
sinkhorn reads two matrices and writes one. `pre`, everything before a sub-layer: forward 2n and 1, since all columns of
a token are needed for the weights of its first column; backward 3n + 2 and n, for the same reason, with the residual's
gradient among what is read. `boundary`: forward n + 1 and n + 1; backward 2n + 2 and n + 1, since the updated streams
are computed from the streams before and y. With x in MXFP8 it writes n streams and 1 + 1/32 bytes an element of x, and
has no backward.

The projection's weight is float32, and once 16-bit, whose kernels are others, and once float32 with a norm's weight.
Sinkhorn is also measured on many more matrices, where instructions bound it: 4 a cycle and SM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

import glulam
from glulam import mhc
from glulam.mhc import reference
from glulam.mhc.boundary_mxfp8 import in_mxfp8, quantised
from glulam.tuner.timing import Call

from ..cells import HOST, OURS
from ..contest import Measure, listed, numbered, records_of
from ..options import Options
from ..results import Record
from ..timing import measure_device, measure_host

COMPILED = "torch.compile"
ENQUEUE_US = 400.0
HOST_TOKENS, HOST_WIDTH = 16, 64
GRADIENT_SEED = 7
WARP = 32
ITERS, EPS = 20, 1e-6


class Size(NamedTuple):
    """The sizes of the streams [s, b, n, C]: sequence length, batch, streams a token, width."""

    s: int
    b: int
    n: int
    c: int

    @property
    def tokens(self) -> int:
        return self.s * self.b

    @property
    def rows(self) -> int:
        """Rows of the projection's weight [rows, n C]: columns of h_pre, h_post and the matrix."""
        return self.n * self.n + 2 * self.n


TARGET = Size(8192, 4, 4, 7168)
MANY = Size(64 * 8192, 4, 4, 7168)
"""Tokens for Sinkhorn alone: 2 MB of matrices are done within a launch's time, which shows nothing of the kernel."""


class Moved(NamedTuple):
    """The fewest bytes of a direction.

    Attributes:
        streams: vectors of C bfloat16 elements a token.
        coefficients: float32 numbers a token.
        weights: how often the projection's weight is read or written, counted as float32 whatever its dtype is.
        in_mxfp8: vectors of C MXFP8 elements a token: a byte for each element, and one for each 32 of them.
    """

    streams: int
    coefficients: int
    weights: int = 0
    in_mxfp8: int = 0

    def bytes(self, z: Size) -> int:
        of_token = 2 * self.streams * z.c + self.in_mxfp8 * z.c * 33 // 32 + 4 * self.coefficients
        return of_token * z.tokens + 4 * self.weights * z.rows * z.n * z.c


class Case(NamedTuple):
    """An operator to measure.

    Attributes:
        op: the name.
        ours, torchs: Glulam's operator, and the same in torch.
        inputs: function that makes the inputs for a size.
        moved: function that returns the fewest bytes (`Moved`) of forward and backward; None: it has no backward.
        sizes: the sizes to measure.
    """

    op: str
    ours: Callable[..., Any]
    torchs: Callable[..., Any]
    inputs: Callable[[Size], list[Tensor]]
    moved: Callable[[Size], tuple[Moved, Moved | None]]
    sizes: tuple[Size, ...] = (TARGET,)


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _streams(z: Size) -> Tensor:
    return _randn(z.s, z.b, z.n, z.c, dtype=torch.bfloat16)


def _weight(z: Size) -> Tensor:
    return _randn(z.rows, z.n * z.c) / (z.n * z.c) ** 0.5


def _projected(z: Size, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [_streams(z), _weight(z).to(dtype), *(torch.ones(1, device="cuda") for _ in range(3)), _randn(z.rows)]


def _mixed(z: Size) -> list[Tensor]:
    lead = (z.s, z.b)
    one = _randn(*lead, z.c, dtype=torch.bfloat16)
    return [_streams(z), _randn(*lead, z.n, z.n), _randn(*lead, z.n), one, _randn(z.c)]


def _between_sublayers(z: Size) -> list[Tensor]:
    lead = (z.s, z.b)
    y = _randn(*lead, z.c, dtype=torch.bfloat16)
    coefficients = [_randn(*lead, z.n).sigmoid(), _randn(*lead, z.n).sigmoid(), _randn(*lead, z.n, z.n).softmax(-1)]
    return [y, _streams(z), *coefficients, _weight(z), _randn(3), _randn(z.rows), torch.ones(z.c, device="cuda")]


def _instructions(n: int) -> tuple[int, int]:
    """Return the fewest instructions that Sinkhorn takes for one n x n matrix (one thread): (forward, backward).

    Forward, for each iteration: 2n lines (rows and columns), each a sum of n products, a reciprocal and two products.
    Backward does the same again, with 2n factors stored, then 2n lines of 2n + 1 products, with the factors loaded.
    Before and after the iterations, for each element: difference, maximum, exponential, two products, and loads and
    stores; in backward twice as many products.
    """
    balance, back = 2 * n * (n + 3), 2 * n * (2 * n + 1)
    return ITERS * balance + 6 * n * n, ITERS * (balance + back + 4 * n) + 8 * n * n


def _project(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, c: Tensor, bias: Tensor) -> Any:
    return reference.project(x, weight, (a, b, c), bias, EPS)[:3]


def _pre(x: Tensor, *rest: Tensor) -> Any:
    h_pre, h_post, logits = _project(x, *rest)
    return reference.aggregate(x, h_pre), x.view_as(x), h_post, reference.sinkhorn(logits, ITERS, EPS)


def _boundary(
    y: Tensor, streams: Tensor, pre: Tensor, post: Tensor, comb: Tensor, weight: Tensor, scale: Tensor, base: Tensor,
    norm_weight: Tensor,
) -> Any:  # fmt: skip
    """Compute the boundary as a model would write it: Sinkhorn in float32, not in the CPU reference's float64."""
    n = streams.shape[-2]
    updated = (comb.mT @ streams.float() + post[..., None] * y.float()[..., None, :]).to(streams.dtype)
    u = (pre[..., None] * updated.float()).sum(-2).to(streams.dtype).float()
    x = (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + EPS) * norm_weight).to(streams.dtype)
    flat = updated.float().flatten(-2)
    z = (flat @ weight.t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    widths = (n, n, n * n)
    parts = zip(z.split(widths, -1), scale, base.split(widths), strict=True)
    of_pre, of_post, of_comb = (part * factor + term for part, factor, term in parts)
    m = of_comb.unflatten(-1, (n, n)).softmax(-1) + EPS
    m = m / (m.sum(-2, keepdim=True) + EPS)
    for _ in range(ITERS - 1):
        m = m / (m.sum(-1, keepdim=True) + EPS)
        m = m / (m.sum(-2, keepdim=True) + EPS)
    return updated, x, of_pre.sigmoid() + EPS, 2 * of_post.sigmoid(), m


def _boundary_in_mxfp8(*given: Any) -> list[Any]:
    updated, x, *coefficients = _boundary(*given)
    return [updated, *coefficients, in_mxfp8(*quantised(x, 128), "1x128")]


def _of_project(z: Size) -> tuple[Moved, Moved]:
    return Moved(z.n, z.rows, 1), Moved(2 * z.n, 2 * z.rows, 2)


CASES = (
    Case("sinkhorn", mhc.sinkhorn, lambda logits: reference.sinkhorn(logits, ITERS, EPS),
         lambda z: [_randn(z.s, z.b, z.n, z.n)],
         lambda z: (Moved(0, 2 * z.n * z.n), Moved(0, 3 * z.n * z.n)), (TARGET, MANY)),
    Case("aggregate", mhc.aggregate, reference.aggregate, lambda z: [_streams(z), _randn(z.s, z.b, z.n)],
         lambda z: (Moved(z.n + 1, z.n), Moved(2 * z.n + 1, 2 * z.n))),
    Case("post_mix", mhc.post_mix, lambda r, m, p, x, b: reference.post_mix(r, m, p, x, b, False), _mixed,
         lambda z: (Moved(2 * z.n + 1, z.n * z.n + z.n), Moved(3 * z.n + 2, 2 * (z.n * z.n + z.n)))),
    Case("project", mhc.project, _project, _projected, _of_project),
    Case("project, 16-bit weight", mhc.project, _project, partial(_projected, dtype=torch.bfloat16), _of_project),
    Case("project, norm_weight", lambda *t: mhc.project(*t[:-1], norm_weight=t[-1]),
         lambda x, weight, *rest: _project(x, weight * rest[-1], *rest[:-1]),
         lambda z: [*_projected(z), torch.rand(z.n * z.c, device="cuda") + 0.5], _of_project),
    Case("pre", mhc.pre, _pre, _projected, lambda z: (Moved(2 * z.n + 1, 0, 1), Moved(4 * z.n + 2, 0, 2))),
    Case("boundary", mhc.boundary, _boundary, _between_sublayers,
         lambda z: (Moved(2 * z.n + 2, 2 * z.rows, 1), Moved(3 * z.n + 3, 3 * z.rows, 2))),
    Case("boundary, x in MXFP8", lambda *t: mhc.boundary(*t, x_block="1x128"), _boundary_in_mxfp8, _between_sublayers,
         lambda z: (Moved(2 * z.n + 1, 2 * z.rows, 1, 1), None)),
)  # fmt: skip


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a result; an MXFP8 tensor is dequantised."""
    parts: list[Any] = [one for one in listed(value) if one is not None]
    return [one.dequantize() if isinstance(one, glulam.MXFP8Tensor) else one.detach() for one in parts]


def _error(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the largest difference from torch's reference, relative to the largest absolute value of each tensor."""
    pairs = zip(got, wanted, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def _backward_call(call: Callable[..., Any], given: list[Tensor]) -> Call:
    """Run forward once; return a function of a call's number that runs autograd's backward, as often as called."""
    leaves = [t.detach().requires_grad_() for t in given]
    results = listed(call(*leaves))
    torch.manual_seed(GRADIENT_SEED)
    gradients = [torch.randn_like(result) for result in results]
    return lambda number: torch.autograd.grad(results, leaves, gradients, retain_graph=True)


def _measure(case: Case, size: Size, direction: str, budget_s: float) -> Iterator[Record]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    given, is_backward = case.inputs(size), direction == "backward"
    calls: dict[str, Call] = {}
    for name, call in {OURS: case.ours, COMPILED: torch.compile(case.torchs, fullgraph=True, dynamic=False)}.items():
        calls[name] = _backward_call(call, given) if is_backward else numbered(partial(call, *given))
    error = _error(*(_tensors(call(0)) for call in calls.values()))
    instructions = _instructions(size.n)[is_backward] if case.op == "sinkhorn" else 0
    moved: Any = case.moved(size)[is_backward]
    yield {
        "op": case.op,
        "direction": direction,
        "size": size._asdict(),
        "bytes": moved.bytes(size),
        "warp_instructions": instructions * size.tokens // WARP,
        "difference": error,
        "times": measure_device(calls, budget_s, ENQUEUE_US),
    }


@torch.no_grad()
def _measure_host(budget_s: float) -> list[Record]:
    small = Size(HOST_TOKENS, 1, TARGET.n, HOST_WIDTH)
    residual, h_res, h_post, one, bias = _mixed(small)
    out, mixed, normal = torch.empty_like(one), torch.empty_like(residual), torch.empty_like(h_res)
    layer = glulam.nn.HyperConnection(small.n, HOST_WIDTH, torch.nn.Identity(), device="cuda")
    items = {
        "glulam.mhc.sinkhorn, out given": lambda: mhc.sinkhorn(h_res, out=normal),
        "glulam.mhc.aggregate, out given": lambda: mhc.aggregate(residual, h_post, out=out),
        "glulam.mhc.post_mix, out given": lambda: mhc.post_mix(residual, h_res, h_post, one, bias, out=mixed),
        "glulam.nn.HyperConnection around nothing, forward": lambda: layer(residual),
    }
    return [{"op": HOST, "times": measure_host(items, budget_s)}]


def run_mhc(options: Options) -> list[Record]:
    """Measure and return one record for each (operator, direction), then one of host times."""
    functorch_config.donated_buffer = False  # or backward could run only once
    measures: list[Measure] = [
        partial(_measure, case, size, direction)
        for case in CASES
        if not options.case or options.case in case.op
        for size in case.sizes
        for direction, moved in zip(("forward", "backward"), case.moved(size), strict=True)
        if moved
    ]
    return records_of("mhc", [*measures, _measure_host], options.budget_s)
