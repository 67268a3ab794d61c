"""The host path from a hyper-connection call to its kernel's arguments, on a fake GPU that reads memory by address."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from support.fake_gpu import FakeGpu
from support.fake_gpu import reference as fake_reference
from torch import Tensor

import glulam
from cute_kernels.arguments import ADDRESS
from cute_kernels.chains import signature_of
from cute_kernels.layer.kernels import KERNELS
from cute_kernels.mhc import shapes
from cute_kernels.mhc.kernels import KERNELS as MHC_KERNELS
from cute_kernels.specs import LayerSpec, MhcSpec
from glulam import mhc
from glulam.calls.addressed import AddressedCall
from glulam.host import plans
from glulam.mhc import reference

pytest_plugins = ["support.fixtures"]

BF16, F32 = torch.bfloat16, torch.float32
LEAD, WIDTH = (5, 3), 24


def inputs(name: str, n: int, dtype: torch.dtype, params: torch.dtype) -> list[Tensor]:
    rows = n * n + 2 * n
    shapes: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
        "sinkhorn": [((*LEAD, n, n), params)],
        "aggregate": [((*LEAD, n, WIDTH), dtype), ((*LEAD, n), params)],
        "post_mix": [
            ((*LEAD, n, WIDTH), dtype), ((*LEAD, n, n), params), ((*LEAD, n), F32), ((*LEAD, WIDTH), dtype),
            ((WIDTH,), params),
        ],
        "project": [
            ((*LEAD, n, WIDTH), dtype), ((rows, n * WIDTH), params), *[((1,), F32)] * 3, ((rows,), params),
        ],
    }  # fmt: skip
    shapes["pre"] = shapes["project"]
    shapes["boundary"] = [
        ((*LEAD, WIDTH), dtype), ((*LEAD, n, WIDTH), dtype), ((*LEAD, n), F32), ((*LEAD, n), F32), ((*LEAD, n, n), F32),
        ((rows, n * WIDTH), params), ((3,), params), ((rows,), F32), ((WIDTH,), params),
    ]  # fmt: skip
    torch.manual_seed(n)
    return [torch.randn(shape).to(d).requires_grad_() for shape, d in shapes[name]]


CALLS: dict[str, Callable[..., Any]] = {
    "sinkhorn": mhc.sinkhorn,
    "aggregate": mhc.aggregate,
    "post_mix": lambda *t: mhc.post_mix(*t, transpose_res=True),
    "project": mhc.project,
    "pre": mhc.pre,
    "boundary": mhc.boundary,
}
LAUNCHES = {"sinkhorn": 1, "aggregate": 1, "post_mix": 1, "project": 1, "pre": 3, "boundary": 1}
"""Number of launches in a backward."""


def against(result: Tensor, seed: int) -> Tensor:
    """Return a random upstream gradient of a result."""
    return torch.randn(result.shape, generator=torch.Generator().manual_seed(seed)).to(result.dtype)


def both_ways(name: str, given: list[Tensor]) -> list[Tensor]:
    """Run forward and backward; return results and gradients."""
    results = CALLS[name](*given)
    results = list(results) if isinstance(results, tuple) else [results]
    weights = [against(r, i) for i, r in enumerate(results)]
    return [*results, *torch.autograd.grad(results, given, weights)]


@pytest.mark.parametrize("params", [F32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32], ids=str)
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_get_what_the_reference_gets(
    name: str, n: int, dtype: torch.dtype, params: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if name == "boundary" and (n != 4 or dtype is F32):
        pytest.skip("no kernels")
    given = inputs(name, n, dtype, params)
    wanted = both_ways(name, given)
    fake: FakeGpu = request.getfixturevalue("fake_gpu")
    for _ in range(2):  # by plans made now, then by plans found
        fake.launches.clear()
        for got, want in zip(both_ways(name, given), wanted, strict=True):
            assert same_bits(got.detach().contiguous(), want.detach().contiguous())
        assert len(fake.launches) == 1 + LAUNCHES[name]


@pytest.mark.parametrize("name", CALLS)
def test_only_what_is_asked_for(fake_gpu: FakeGpu, name: str) -> None:
    given = inputs(name, 4, BF16, F32)
    full = both_ways(name, given)[-len(given) :]
    for i, wanted in enumerate(full):
        alone = [t.detach().requires_grad_(i == j) for j, t in enumerate(given)]
        results = CALLS[name](*alone)
        results = list(results) if isinstance(results, tuple) else [results]
        results = [(k, r) for k, r in enumerate(results) if r.requires_grad]
        weights = [against(r, k) for k, r in results]
        (got,) = torch.autograd.grad([r for _, r in results], [alone[i]], weights)
        assert same_bits(got.contiguous(), wanted.contiguous())


@pytest.mark.parametrize("params", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["project", "pre"])
def test_kernels_get_a_float32_product_with_the_norms_weight(fake_gpu: FakeGpu, name: str, params: torch.dtype) -> None:
    """In as many launches as without one."""
    x, weight, *rest = inputs(name, 4, BF16, params)
    norm = torch.linspace(0.5, 1.5, 4 * WIDTH).requires_grad_()
    product = (weight.detach().float() * norm.detach()).requires_grad_()
    both_ways(name, [x, weight, *rest])
    launches = len(fake_gpu.launches)
    fake_gpu.launches.clear()
    wanted = both_ways(name, [x, product, *rest])
    results = list(CALLS[name](x, weight, *rest, norm_weight=norm))
    gradients = torch.autograd.grad(results, (x, weight, norm, *rest), [against(r, i) for i, r in enumerate(results)])
    assert len(fake_gpu.launches) == 2 * launches
    assert all(map(same_bits, results, wanted))
    d_product = wanted[len(results) + 1]
    assert same_bits(gradients[1], (d_product * norm).to(params))
    assert same_bits(gradients[2], (d_product * weight.float()).sum(0))


def test_given_outputs_are_written_in_place(fake_gpu: FakeGpu) -> None:
    x, *rest = (t.detach() for t in inputs("project", 4, BF16, F32))
    out = (torch.empty(*LEAD, 4), torch.empty(*LEAD, 4), torch.empty(*LEAD, 4, 4))
    for _ in range(2):
        got = mhc.project(x, *rest, out=out)
        assert all(a is b for a, b in zip(got, out, strict=True))
    h_pre, h_post, h_res, _ = reference.project(x, rest[0], tuple(rest[1:4]), rest[4], 1e-6)
    assert all(map(same_bits, out, (h_pre, h_post, h_res)))
    assert fake_gpu.launches[-1]["stats"] == 0, "nobody asked for what backward needs"


def test_alignment_and_overlap_are_checked_at_each_call(fake_gpu: FakeGpu) -> None:
    memory = torch.zeros(4096, dtype=BF16)
    h_pre = torch.zeros(5, 4)
    mhc.aggregate(memory[: 5 * 4 * 8].view(5, 4, 8), h_pre, out=memory[2048 : 2048 + 40].view(5, 8))
    with pytest.raises(ValueError, match="x starts 2 bytes after a multiple of 16"):
        mhc.aggregate(memory[1 : 1 + 5 * 4 * 8].view(5, 4, 8), h_pre, out=memory[2048 : 2048 + 40].view(5, 8))
    with pytest.raises(ValueError, match="out overlaps x in memory"):
        mhc.aggregate(memory[: 5 * 4 * 8].view(5, 4, 8), h_pre, out=memory[80:120].view(5, 8))


def test_a_recent_plan_serves_no_other_call(fake_gpu: FakeGpu) -> None:
    """Calls that differ in one thing each, in turns, often enough for their plans to be found without a key."""
    residual, h_res, h_post, x, bias = (t.detach() for t in inputs("post_mix", 4, BF16, F32))
    calls: list[tuple[list[Any], bool]] = [
        ([residual, h_res, h_post, x, bias], False),
        ([residual, h_res, h_post, x, bias], True),
        ([residual, h_res, h_post, x, None], False),
        ([residual, h_res.to(BF16), h_post, x, bias], False),
        ([residual[:4].clone(), h_res[:4].clone(), h_post[:4].clone(), x[:4].clone(), bias], False),
        ([residual.float(), h_res, h_post, x.float(), bias], False),
    ]
    exact = [reference.post_mix(*given, flag) for given, flag in calls]
    for _ in range(100):
        for (given, flag), wanted in zip(calls, exact, strict=True):
            assert same_bits(mhc.post_mix(*given, transpose_res=flag), wanted)
    for _ in range(3):  # and what no plan may serve, behind calls that one does
        mhc.post_mix(residual, h_res, h_post, x, bias)
        with pytest.raises(ValueError, match="h_res is not contiguous"):
            mhc.post_mix(residual, h_res.transpose(-1, -2), h_post, x, bias)
        with pytest.raises(TypeError, match="x is"):
            mhc.post_mix(residual, h_res, h_post, x.tolist(), bias)  # type: ignore[arg-type]


def test_tokens_may_have_any_number_of_dimensions(fake_gpu: FakeGpu) -> None:
    """Calls behind one whose tokens are as many, in one dimension, in two or in none of their own."""
    x, h_pre = (t.detach().flatten(0, 1) for t in inputs("aggregate", 4, BF16, F32))
    wanted = mhc.aggregate(x, h_pre)
    for lead in (LEAD, (1, 15), (15, 1), (3, 1, 5), (15,)):
        for _ in range(2):
            got = mhc.aggregate(x.view(*lead, 4, WIDTH), h_pre.view(*lead, 4))
            assert same_bits(got, wanted.view(*lead, WIDTH))
    assert same_bits(mhc.aggregate(x[0], h_pre[0]), wanted[0])


def test_plans_are_found_by_keys_where_torch_has_no_guards(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_Guards", None)
    x, h_pre = (t.detach() for t in inputs("aggregate", 4, BF16, F32))
    for _ in range(3):
        assert same_bits(mhc.aggregate(x, h_pre), reference.aggregate(x, h_pre))


def test_no_workspace_where_none_is_needed(fake_gpu: FakeGpu) -> None:
    """The bias' gradient alone takes one."""
    given = inputs("post_mix", 4, BF16, F32)
    for bias in (given[4], given[4].detach(), None):
        mhc.post_mix(*given[:4], bias).sum().backward()
        assert bool(fake_gpu.launches[-1]["workspace"]) == (bias is given[4])


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_workspace_of_backward_has_room(n: int, itemsize: int) -> None:
    """Whole token tiles, whole warps of columns, and a row of sums for each CTA of the gates."""
    k = shapes.outputs(n)
    for width, tokens, parts in product((8, 24, 264, 2056), (1, 15, 17, 129, 40003), (1, 7)):
        ctas = shapes.gate_ctas(tokens, 132)
        assert ctas == 264 or 128 * (ctas - 1) < tokens <= 128 * ctas
        at = shapes.backward_workspace(n, itemsize, width, tokens, ctas, parts)
        assert all(place % 16 == 0 for place in at)
        rows = -(-tokens // 16) * 16
        registers = shapes.spread_blocks(n, itemsize, width) * 128 * k * shapes.thread_columns(n, itemsize) // 4
        assert registers >= k * n * width
        least = (rows * k * itemsize, rows * k * itemsize, rows * 4, ctas * 2 * k * 4, parts * registers * 4)
        for (start, end), size in zip(pairwise(at), least, strict=True):
            assert end - start >= size
        assert at.sums >= rows // 16 * shapes.block_bytes(n, 2)


def test_kernel_limits(fake_gpu: FakeGpu) -> None:
    x, h_pre = torch.zeros(5, 4, 12), torch.zeros(5, 4)
    with pytest.raises(ValueError, match="C = 12.*multiple of 8"):
        mhc.aggregate(x, h_pre)
    with pytest.raises(ValueError, match="3 streams; kernels exist for n = 2, 4, 8"):
        mhc.aggregate(torch.zeros(5, 3, 16), torch.zeros(5, 3))
    with pytest.raises(TypeError, match="x is torch.float64"):
        mhc.aggregate(torch.zeros(5, 4, 16, dtype=torch.float64), h_pre)
    with pytest.raises(ValueError, match="iters is 225; it must be 0 or more and at most 224"):
        mhc.sinkhorn(torch.zeros(4, 4), 225)
    _, streams, *others = (t.detach() for t in inputs("boundary", 4, BF16, F32))
    with pytest.raises(TypeError, match="streams is torch.float32; kernels exist for torch.bfloat16 or torch.float16"):
        mhc.boundary(None, streams.float(), others[0], None, None, *others[3:])
    with pytest.raises(ValueError, match="so 3 streams; kernels exist for n = 4"):
        mhc.boundary(None, streams[..., :3, :].contiguous(), others[0], None, None, *others[3:])
    assert not fake_gpu.launches


@pytest.mark.parametrize("return_x", [False, True])
@pytest.mark.parametrize("block", ["1x32", "1x128"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_boundary_with_x_in_mxfp8_is_one_launch(
    fake_gpu: FakeGpu, dtype: torch.dtype, block: Any, return_x: bool
) -> None:
    """Without x in 16 bits its address is 0, and the workspace has room for the mix."""
    width, n = 96, 4
    shapes = [(15, width), (15, n, width), (15, n), (15, n), (15, n, n), (24, n * width), (3,), (24,), (width,)]
    given: list[Any] = [torch.randn(shape).to(dtype if place < 2 else F32) for place, shape in enumerate(shapes)]
    plain = mhc.boundary(*given)
    with fake_reference():
        wanted = glulam.quantize_mxfp8(plain.x, block=block)
    for _ in range(2):  # by plans made now, then by plans found
        fake_gpu.launches.clear()
        made = mhc.boundary(*given, x_block=block, return_x=return_x)
        assert len(fake_gpu.launches) == 1
        assert torch.equal(made.x_mxfp8.data.view(torch.uint8), wanted.data.view(torch.uint8))
        assert torch.equal(made.x_mxfp8.scale.view(torch.uint8), wanted.scale.view(torch.uint8))
        assert bool(fake_gpu.launches[0]["x"]) == return_x == (made.x is not None)
        assert same_bits(made.streams, plain.streams) and same_bits(made.comb, plain.comb)


def test_no_tokens_launch_nothing(fake_gpu: FakeGpu) -> None:
    x, *rest = inputs("project", 4, BF16, F32)
    results = mhc.project(x[:0], *rest)
    gradients = torch.autograd.grad(sum(r.sum() for r in results), rest)
    assert not any(bool(g.any()) for g in gradients) and not fake_gpu.launches


def test_a_whole_layer_is_two_calls(fake_gpu: FakeGpu) -> None:
    layer = glulam.nn.HyperConnection(4, WIDTH, torch.nn.Identity())
    with torch.no_grad():
        layer(torch.randn(*LEAD, 4, WIDTH, dtype=BF16))
    assert [spec.kernel for spec in fake_gpu.specs] == ["pre", "post_mix"]  # type: ignore[union-attr]
    assert len(fake_gpu.launches) == 2


def test_every_operator_lists_the_addresses_of_its_kernel() -> None:
    def every(kind: type[AddressedCall]) -> list[type[AddressedCall]]:
        return [kind, *(more for sub in kind.__subclasses__() for more in every(sub))]

    checked = 0
    for kind in every(AddressedCall):
        if hasattr(kind, "operator"):
            of_kernel = {source: name for name, source in kind.sources.items()}
            listed = (*[of_kernel.get(name, name) for name in kind.reads], *kind.returns)
            layer = (
                LayerSpec(kind.kernel, experts=128 if KERNELS[kind.kernel].is_sized else 0)
                if kind.family == "layer"
                else None
            )
            arguments = signature_of(layer or MhcSpec(kind.kernel, MHC_KERNELS[kind.kernel].dtypes[0])).arguments
            addresses = [a.name for a in arguments if a.kind == ADDRESS and a.name != "workspace"]
            assert sorted(listed) == sorted(addresses)
            checked += 1
    assert checked == 20
