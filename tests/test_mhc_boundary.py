"""mhc.boundary, the step between sublayers, on the CPU: against independent formulas, gradients, errors, traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from support.boundary import given, oracle, update_removed
from support.criterion import same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from glulam import mhc
from glulam.errors import GradientNotSupported
from glulam.mhc import boundary_reference

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
LEADS = [(2, 3), (), (5,), (1, 2, 3)]
FORMS = {"with an update": list, "without": update_removed}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def tensors(arguments: list[Tensor | None]) -> list[Tensor]:
    return [one.requires_grad_() for one in arguments if one is not None]


@each_form
@pytest.mark.parametrize("lead", LEADS)
def test_follows_its_formulas_and_so_do_its_gradients(lead: tuple[int, ...], form: Callable[..., Any]) -> None:
    arguments = form(given(lead))
    leaves = tensors(arguments)
    made, wanted = mhc.boundary(*arguments), oracle(*arguments)
    upstream = [torch.randn_like(one) for one in wanted]
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other)
    gradients = [torch.autograd.grad(results, leaves, upstream) for results in (made, wanted)]
    for one, other in zip(*gradients, strict=True):
        assert other.any()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("iters", "eps"), [(1, 1e-6), (2, 0.1), (100, 1e-3)])
def test_few_and_many_rounds_and_large_epsilons(iters: int, eps: float) -> None:
    arguments = given((2, 3))
    for one, other in zip(
        mhc.boundary(*arguments, 0.3, eps, 0.2, iters), oracle(*arguments, 0.3, eps, 0.2, iters), strict=True
    ):
        torch.testing.assert_close(one, other)


@each_form
@pytest.mark.parametrize("n", [1, 2, 4])
def test_gradcheck(n: int, form: Callable[..., Any]) -> None:
    arguments = form(given((3,), n=n))
    tensors(arguments)
    first = 1 if arguments[0] is None else 0  # or its first result is an argument
    assert torch.autograd.gradcheck(lambda *t: tuple(mhc.boundary(*t, iters=4))[first:], arguments)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (3,), (4,), (0, 4), (1, 2)])
def test_gradients_of_some_results(used: tuple[int, ...]) -> None:
    arguments = given((3,))
    leaves = tensors(arguments)
    gradients = [
        torch.autograd.grad([results[i].square().sum() for i in used], leaves, allow_unused=True)
        for results in (mhc.boundary(*arguments), oracle(*arguments))
    ]
    for one, other in zip(*gradients, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other)
        else:
            assert all(value is None or not value.any() for value in (one, other))


def test_only_gradients_that_are_asked_for() -> None:
    full = tensors(given((3,)))
    wanted = torch.autograd.grad(sum(one.sum() for one in mhc.boundary(*full)), full)
    for place, other in enumerate(wanted):
        some = [one.detach().requires_grad_(place == at) for at, one in enumerate(full)]
        (one,) = torch.autograd.grad(sum(one.sum() for one in mhc.boundary(*some)), some[place])
        assert same_bits(one, other)


@pytest.mark.parametrize("distance", [30, 60, 120, 1000])
def test_balance_of_logits_far_apart(distance: float) -> None:
    """Softmax adds eps before any division, so no exponential that vanishes is missed; the float64 is torch's own."""
    logits = torch.randn(64, 4, 4, dtype=F32, generator=torch.Generator().manual_seed(1)) * distance
    exact = logits.double().requires_grad_()
    m = exact.softmax(-1) + 1e-6
    m = m / (m.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        m = m / (m.sum(-1, keepdim=True) + 1e-6)
        m = m / (m.sum(-2, keepdim=True) + 1e-6)
    d = torch.randn(64, 4, 4, dtype=F64, generator=torch.Generator().manual_seed(2))
    (wanted,) = torch.autograd.grad(m, exact, d)
    made = boundary_reference.balanced(logits, 20, 1e-6)[1][-1]
    torch.testing.assert_close(made, m.detach(), rtol=0, atol=1e-7)
    torch.testing.assert_close(
        boundary_reference.balanced_backward(d.float(), logits, 20, 1e-6), wanted.float(), rtol=1e-4, atol=1e-5
    )


def test_16_bit_streams_are_rounded_after_the_update_and_the_mix() -> None:
    arguments = given((7,), dtype=F32, streams=BF16)
    made = mhc.boundary(*arguments)
    assert [one.dtype for one in made] == [BF16, BF16, F32, F32, F32]
    updated = mhc.post_mix(arguments[1], arguments[4], arguments[3], arguments[0], transpose_res=True)
    assert same_bits(made.streams, updated)
    u = mhc.aggregate(updated, arguments[2])
    norm = torch.nn.functional.rms_norm(u.float(), (u.shape[-1],), arguments[8], 1e-6)
    torch.testing.assert_close(made.x.float(), norm, rtol=2**-8, atol=0)
    _, _, *coefficients = mhc.boundary(None, updated, arguments[2], None, None, *arguments[5:])
    assert all(map(same_bits, made[2:], coefficients))


def test_no_tokens() -> None:
    leaves = tensors(given((0, 3)))
    results = mhc.boundary(*leaves)
    assert [one.shape for one in results] == [(0, 3, 4, 8), (0, 3, 8), (0, 3, 4), (0, 3, 4), (0, 3, 4, 4)]
    sum(one.sum() for one in results).backward()
    assert all(one.grad is not None and not one.grad.any() for one in leaves)


def test_a_token_of_zeros_has_finite_gradients() -> None:
    arguments = given((2,))
    for one in arguments[:2]:
        one[0] = 0
    leaves = tensors(arguments)
    sum(one.sum() for one in mhc.boundary(*leaves)).backward()
    assert all(one.grad is not None and bool(one.grad.isfinite().all()) for one in leaves)


def test_once() -> None:
    leaves = tensors(given((3,)))
    (d,) = torch.autograd.grad(mhc.boundary(*leaves).x.square().sum(), leaves[1], create_graph=True)
    with pytest.raises(GradientNotSupported, match="differentiable once"):
        d.sum().backward()


@each_form
def test_compiled_checkpointed_and_fake(form: Callable[..., Any]) -> None:
    torch.compiler.reset()
    compiled = torch.compile(mhc.boundary, backend="aot_eager", fullgraph=True)

    def kept(*arguments: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(mhc.boundary, *arguments, use_reentrant=False)

    gradients = []
    for run in (mhc.boundary, compiled, kept):
        arguments = form(given((3,), dtype=F32))
        leaves = tensors(arguments)
        sum(one.square().sum() for one in run(*arguments)).backward()
        gradients.append([one.grad for one in leaves])
    for others in zip(*gradients, strict=True):
        assert all(one is not None and same_bits(one, others[0]) for one in others)
    with FakeTensorMode() as mode:
        real = form(given((3,), dtype=F32, streams=BF16))
        fake = mhc.boundary(*[None if one is None else mode.from_tensor(one) for one in real])
    assert [(one.shape, one.dtype) for one in fake] == [(one.shape, one.dtype) for one in mhc.boundary(*real)]


def test_torch_takes_the_operator_for_sound() -> None:
    arguments = given((3,), dtype=F32)
    tensors(arguments)
    operator = torch.ops.glulam.mhc_boundary.default
    torch.library.opcheck(operator, (*arguments, 1e-6, 1e-6, 1e-6, 3, False, True, 0))


def changed(place: int, value: Any) -> list[Any]:
    arguments: list[Any] = given((5,))
    arguments[place] = value(arguments[place]) if callable(value) else value
    return arguments


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mhc.boundary(*changed(0, None)), ValueError, "post is given without y"),
        (lambda: mhc.boundary(*changed(3, None)), TypeError, "post is a NoneType"),
        (lambda: mhc.boundary(*changed(0, lambda y: y.float())), TypeError, "y is torch.float32.*float64"),
        (lambda: mhc.boundary(*changed(0, lambda y: y[:, :4])), ValueError, r"y has shape \[5, 4\].*\[5, 8\]"),
        (lambda: mhc.boundary(*changed(1, lambda s: s[0, 0])), ValueError, r"streams has shape \[8\]"),
        (lambda: mhc.boundary(*changed(2, lambda p: p.float())), TypeError, "pre is torch.float32.*float64, so cast"),
        (lambda: mhc.boundary(*changed(4, lambda c: c.mT)), ValueError, "comb is not contiguous"),
        (lambda: mhc.boundary(*changed(5, lambda w: w[1:])), ValueError, r"weight has shape \[23, 32\].*\[24, 32\]"),
        (lambda: mhc.boundary(*changed(6, lambda s: s[:2])), ValueError, r"scale has shape \[2\].*\[3\]"),
        (lambda: mhc.boundary(*changed(7, 1.0)), TypeError, "base is a float"),
        (lambda: mhc.boundary(*changed(8, lambda w: w.int())), TypeError, "norm_weight is torch.int32"),
        (lambda: mhc.boundary(*given((5,)), iters=0), ValueError, "iters is 0; it must be 1 or more"),
        (lambda: mhc.boundary(*given((5,)), iters=101), ValueError, "iters is 101.*at most 100"),
        (lambda: mhc.boundary(*given((5,)), norm_eps=-1.0), ValueError, "norm_eps is -1.0"),
    ],
)
def test_errors_name_the_argument(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
