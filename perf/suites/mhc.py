"""The hyper-connection operators, forward and backward: device time against the bytes that they must move, against
torch.compile of the reference in the same run, and the host time of a call above its bare launch.

Minimal bytes: every input that a direction needs is read once and every result written once. Of streams (n a token)
and single vectors of C, forward reads and writes: aggregate n and 1; post_mix n + 1 and n; project n and none; sinkhorn
the matrices. Backward: aggregate n + 1 and n; post_mix 2n + 1 and n + 1; project n and n; sinkhorn two matrices and
one. `pre`, all before a sub-layer: forward 2n and 1, since all columns of a token make the weights of its first;
backward 3n + 2 and n, for the same reason, with the residual's gradient among what is read. `boundary`: forward n + 1
and n + 1; backward 2n + 2 and n + 1, since the updated streams are those before and y. With x in MXFP8 it writes n
streams and 1 + 1/32 bytes an element of x, and has no backward.

The projection's weight is float32, and once 16-bit, whose kernels are others, and once float32 with a norm's weight.
Sinkhorn is measured on many more matrices, too: what bounds it then is instructions, 4 a cycle and SM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

import glulam
from glulam import mhc
from glulam.calls.call import Call as OperatorCall
from glulam.calls.launch import Plan
from glulam.mhc import reference
from glulam.mhc.boundary_mxfp8 import in_mxfp8, quantised
from glulam.mhc.mixing import AggregateCall, PostMixCall
from glulam.mhc.sinkhorn import SinkhornCall

from ..cells import HOST
from ..contest import as_times, records_of
from ..options import Options
from ..timing import Call, host_sampler, interleave, measure_device, no_garbage_collection

OURS, COMPILED = "glulam", "torch.compile"
ENQUEUE_US = 400.0
HOST_TOKENS, HOST_WIDTH = 16, 64
GRADIENT_SEED = 7
WARP = 32


class Size(NamedTuple):
    """s, b, n and C of the streams."""

    s: int
    b: int
    n: int
    c: int

    @property
    def tokens(self) -> int:
        return self.s * self.b


TARGET = Size(8192, 4, 4, 7168)
MANY = Size(64 * 8192, 4, 4, 7168)
"""Tokens for Sinkhorn alone: 2 MB of matrices are done within a launch's time, which shows nothing of the kernel."""
ITERS = 20


class Case(NamedTuple):
    """An operator: our call, torch's, its inputs, and the bytes of forward and backward.

    instructions: the least a thread's matrix takes, forward and backward, where these and not the bytes are the limit.
    backward_bytes: None: there is no backward.
    """

    op: str
    ours: Callable[..., Any]
    torchs: Callable[..., Any]
    inputs: Callable[[Size], list[Tensor]]
    forward_bytes: Callable[[Size], int]
    backward_bytes: Callable[[Size], int] | None
    sizes: tuple[Size, ...] = (TARGET,)
    instructions: Callable[[int], tuple[int, int]] | None = None


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _streams(z: Size) -> Tensor:
    return _randn(z.s, z.b, z.n, z.c, dtype=torch.bfloat16)


def _parameters(z: Size) -> list[Tensor]:
    rows = z.n * z.n + 2 * z.n
    weight = _randn(rows, z.n * z.c) / (z.n * z.c) ** 0.5
    return [weight, *(torch.ones(1, device="cuda") for _ in range(3)), _randn(rows)]


def _mixing(z: Size) -> list[Tensor]:
    lead = (z.s, z.b)
    one = _randn(*lead, z.c, dtype=torch.bfloat16)
    return [_streams(z), _randn(*lead, z.n, z.n), _randn(*lead, z.n), one, _randn(z.c)]


def _stream_bytes(z: Size, count: int) -> int:
    """Of `count` tensors [s, b, C] in bfloat16."""
    return 2 * count * z.tokens * z.c


def _coefficient_bytes(z: Size, count: int) -> int:
    """Of `count` float32 numbers a token."""
    return 4 * count * z.tokens


def _weight_bytes(z: Size) -> int:
    return 4 * (z.n * z.n + 2 * z.n) * z.n * z.c


def _sinkhorn_instructions(n: int) -> tuple[int, int]:
    """Per iteration 2n lines, each a sum of n products, a reciprocal and two products; backward the same again with 2n
    factors stored, then 2n lines of 2n + 1 products with the factors loaded. Around them, per element: difference,
    maximum, exponential, two products and its share of memory; backward twice the products.
    """
    balance, back = 2 * n * (n + 3), 2 * n * (2 * n + 1)
    return ITERS * balance + 6 * n * n, ITERS * (balance + back + 4 * n) + 8 * n * n


def _project_reference(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, c: Tensor, bias: Tensor) -> Any:
    return reference.project(x, weight, (a, b, c), bias, 1e-6)[:3]


def _with_16_bit_weight(z: Size) -> list[Tensor]:
    weight, *rest = _parameters(z)
    return [_streams(z), weight.bfloat16(), *rest]


def _with_norm_weight(z: Size) -> list[Tensor]:
    return [_streams(z), *_parameters(z), torch.rand(z.n * z.c, device="cuda") + 0.5]


def _scaled_reference(x: Tensor, weight: Tensor, *rest: Tensor) -> Any:
    return _project_reference(x, weight * rest[-1], *rest[:-1])


def _pre_reference(x: Tensor, *rest: Tensor) -> Any:
    h_pre, h_post, logits = _project_reference(x, *rest)
    return reference.aggregate(x, h_pre), x.view_as(x), h_post, reference.sinkhorn(logits, ITERS, 1e-6)


def _between_sublayers(z: Size) -> list[Tensor]:
    lead, rows = (z.s, z.b), z.n * z.n + 2 * z.n
    y = _randn(*lead, z.c, dtype=torch.bfloat16)
    coefficients = [_randn(*lead, z.n).sigmoid(), _randn(*lead, z.n).sigmoid(), _randn(*lead, z.n, z.n).softmax(-1)]
    weight = _randn(rows, z.n * z.c) / (z.n * z.c) ** 0.5
    return [y, _streams(z), *coefficients, weight, _randn(3), _randn(rows), torch.ones(z.c, device="cuda")]


def _boundary_in_torch(
    y: Tensor, streams: Tensor, pre: Tensor, post: Tensor, comb: Tensor, weight: Tensor, scale: Tensor, base: Tensor,
    norm_weight: Tensor, eps: float = 1e-6,
) -> Any:  # fmt: skip
    """The boundary as a model would write it: Sinkhorn in float32, where the CPU reference computes it in float64."""
    n = streams.shape[-2]
    updated = (comb.mT @ streams.float() + post[..., None] * y.float()[..., None, :]).to(streams.dtype)
    u = (pre[..., None] * updated.float()).sum(-2).to(streams.dtype).float()
    x = (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps) * norm_weight).to(streams.dtype)
    flat = updated.float().flatten(-2)
    z = (flat @ weight.t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    widths = (n, n, n * n)
    parts = zip(z.split(widths, -1), scale, base.split(widths), strict=True)
    of_pre, of_post, of_comb = (part * factor + term for part, factor, term in parts)
    m = of_comb.unflatten(-1, (n, n)).softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(ITERS - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return updated, x, of_pre.sigmoid() + eps, 2 * of_post.sigmoid(), m


def _boundary_bytes(z: Size, x_bytes: int) -> int:
    """Bytes of a boundary's forward. x_bytes: those of x."""
    streams = _stream_bytes(z, 2 * z.n + 1) + x_bytes
    return streams + _weight_bytes(z) + 2 * _coefficient_bytes(z, z.n * z.n + 2 * z.n)


def _mxfp8_bytes(z: Size) -> int:
    """Bytes of a tensor [s, b, C] in MXFP8: elements, and a scale for 32 of them."""
    return z.tokens * z.c * 33 // 32


def _boundary_in_torch_and_mxfp8(*given: Any) -> list[Any]:
    updated, x, *coefficients = _boundary_in_torch(*given)
    return [updated, *coefficients, in_mxfp8(*quantised(x, 128), "1x128")]


def _project_case(op: str, ours: Callable[..., Any], torchs: Callable[..., Any], inputs: Callable[..., Any]) -> Case:
    """Streams count, and of the weight and its gradient float32's bytes, whatever they are."""
    return Case(
        op,
        ours,
        torchs,
        inputs,
        lambda z: _stream_bytes(z, z.n) + _weight_bytes(z) + _coefficient_bytes(z, z.n * z.n + 2 * z.n),
        lambda z: _stream_bytes(z, 2 * z.n) + 2 * _weight_bytes(z) + 2 * _coefficient_bytes(z, z.n * z.n + 2 * z.n),
    )


CASES = (
    Case(
        "sinkhorn",
        mhc.sinkhorn,
        lambda logits: reference.sinkhorn(logits, ITERS, 1e-6),
        lambda z: [_randn(z.s, z.b, z.n, z.n)],
        lambda z: _coefficient_bytes(z, 2 * z.n * z.n),
        lambda z: _coefficient_bytes(z, 3 * z.n * z.n),
        (TARGET, MANY),
        _sinkhorn_instructions,
    ),
    Case(
        "aggregate",
        mhc.aggregate,
        reference.aggregate,
        lambda z: [_streams(z), _randn(z.s, z.b, z.n)],
        lambda z: _stream_bytes(z, z.n + 1) + _coefficient_bytes(z, z.n),
        lambda z: _stream_bytes(z, 2 * z.n + 1) + _coefficient_bytes(z, 2 * z.n),
    ),
    Case(
        "post_mix",
        mhc.post_mix,
        lambda r, m, p, x, b: reference.post_mix(r, m, p, x, b, False),
        _mixing,
        lambda z: _stream_bytes(z, 2 * z.n + 1) + _coefficient_bytes(z, z.n * z.n + z.n),
        lambda z: _stream_bytes(z, 3 * z.n + 2) + 2 * _coefficient_bytes(z, z.n * z.n + z.n),
    ),
    _project_case("project", mhc.project, _project_reference, lambda z: [_streams(z), *_parameters(z)]),
    _project_case("project, 16-bit weight", mhc.project, _project_reference, _with_16_bit_weight),
    _project_case(
        "project, norm_weight",
        lambda *t: mhc.project(*t[:-1], norm_weight=t[-1]),
        _scaled_reference,
        _with_norm_weight,
    ),
    Case(
        "pre",
        mhc.pre,
        _pre_reference,
        lambda z: [_streams(z), *_parameters(z)],
        lambda z: _stream_bytes(z, 2 * z.n + 1) + _weight_bytes(z),
        lambda z: _stream_bytes(z, 4 * z.n + 2) + 2 * _weight_bytes(z),
    ),
    Case(
        "boundary",
        mhc.boundary,
        _boundary_in_torch,
        _between_sublayers,
        lambda z: _boundary_bytes(z, _stream_bytes(z, 1)),
        lambda z: _stream_bytes(z, 3 * z.n + 3) + 2 * _weight_bytes(z) + 3 * _coefficient_bytes(z, z.n * z.n + 2 * z.n),
    ),
    Case(
        "boundary, x in MXFP8",
        lambda *t: mhc.boundary(*t, x_block="1x128"),
        _boundary_in_torch_and_mxfp8,
        _between_sublayers,
        lambda z: _boundary_bytes(z, _mxfp8_bytes(z)),
        None,
    ),
)


def _listed(value: Any) -> list[Tensor]:
    """The tensors of a result, MXFP8 as the numbers that it stands for."""
    parts = [one for one in value if one is not None] if isinstance(value, (tuple, list)) else [value]
    return [one.dequantize() if isinstance(one, glulam.MXFP8Tensor) else one for one in parts]


def _cotangents(results: Sequence[Tensor]) -> list[Tensor]:
    torch.manual_seed(GRADIENT_SEED)
    return [torch.randn_like(r) for r in results]


def _error(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference from the reference in torch, relative to the largest value of each tensor."""
    pairs = zip(got, wanted, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def _backward_call(call: Callable[..., Any], given: list[Tensor]) -> Call:
    """Autograd's backward of one recorded forward, again and again."""
    leaves = [t.detach().requires_grad_() for t in given]
    results = _listed(call(*leaves))
    gradients = _cotangents(results)
    return lambda number: torch.autograd.grad(results, leaves, gradients, retain_graph=True)


def _contestants(case: Case) -> dict[str, Callable[..., Any]]:
    torch._dynamo.reset()
    return {OURS: case.ours, COMPILED: torch.compile(case.torchs, fullgraph=True, dynamic=False)}


def _measure(case: Case, size: Size, direction: str, budget_s: float) -> dict[str, Any]:
    torch.manual_seed(0)
    given = case.inputs(size)
    calls: dict[str, Call] = {}
    for name, call in _contestants(case).items():
        if direction == "forward":
            calls[name] = lambda number, call=call: call(*given)  # type: ignore[misc]
        else:
            calls[name] = _backward_call(call, given)
    first = {name: [t.detach() for t in _listed(call(0))] for name, call in calls.items()}
    error = _error(first[OURS], first[COMPILED])
    del first
    times = measure_device(calls, budget_s, ENQUEUE_US)
    count: Any = case.forward_bytes if direction == "forward" else case.backward_bytes
    least = case.instructions(size.n) if case.instructions else (0, 0)
    return {
        "op": case.op,
        "direction": direction,
        "size": size._asdict(),
        "bytes": count(size),
        "warp_instructions": least[direction == "backward"] * size.tokens // WARP,
        "difference": error,
        "times": as_times(times),
    }


def _host_pair(name: str, kind: type[OperatorCall], call: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """A call with given outputs, and the launch that it made, made again."""
    launches: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    call()
    plans: dict[Any, Plan] = dict(kind.plans._plans)
    plan = next(iter(plans.values()))

    def note(*arguments: Any) -> None:
        launches.append((plan.constants["function"], arguments))

    constants = {**plan.constants, "function": note}
    noted = Plan(plan.op, plan.shape, constants, plan.serving, plan.extents, plan.out_extents, plan.look)
    kind.plans.forget()
    kind.plans._plans.update(dict.fromkeys(plans, noted))
    call()
    kind.plans.forget()
    kind.plans._plans.update(plans)
    function, arguments = launches[0]
    return {f"bare {name}": lambda: function(*arguments), f"glulam.mhc.{name}, out given": call}


def _measure_host(budget_s: float) -> list[dict[str, Any]]:
    n, dtype = TARGET.n, torch.bfloat16
    small = Size(HOST_TOKENS, 1, n, HOST_WIDTH)
    x, h_pre = _streams(small), _randn(HOST_TOKENS, 1, n)
    residual, h_res, h_post, one, bias = _mixing(small)
    out, mixed, logits = torch.empty_like(one), torch.empty_like(residual), _randn(HOST_TOKENS, n, n)
    normal = torch.empty_like(logits)
    for kind in (AggregateCall, PostMixCall, SinkhornCall):
        kind.plans.forget()
    items = {
        **_host_pair("sinkhorn", SinkhornCall, lambda: mhc.sinkhorn(logits, out=normal)),
        **_host_pair("aggregate", AggregateCall, lambda: mhc.aggregate(x, h_pre, out=out)),
        **_host_pair("post_mix", PostMixCall, lambda: mhc.post_mix(residual, h_res, h_post, one, bias, out=mixed)),
    }
    layer = glulam.nn.HyperConnection(n, HOST_WIDTH, torch.nn.Identity(), device="cuda")
    streams = _streams(small).to(dtype)
    items["glulam.nn.HyperConnection around nothing, forward"] = lambda: layer(streams)
    with no_garbage_collection(), torch.no_grad():
        times = interleave({name: host_sampler(item) for name, item in items.items()}, budget_s)
    return [{"op": HOST, "times": as_times(times)}]


def run_mhc(options: Options) -> list[dict[str, Any]]:
    """One record for each (operator, direction), then one for each item of the host's time."""
    functorch_config.donated_buffer = False  # or backward could run only once
    cases = [case for case in CASES if not options.case or options.case in case.op]
    ways = {case.op: ("forward", "backward") if case.backward_bytes else ("forward",) for case in cases}
    runs = [(case, size, way) for case in cases for size in case.sizes for way in ways[case.op]]
    share = options.budget_s / (len(runs) + 1)
    return [*records_of("mhc", runs, lambda run: [_measure(*run, share)]), *_measure_host(share)]
