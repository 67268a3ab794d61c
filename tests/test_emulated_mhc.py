"""The boundary's kernels in the emulator, held to float64 and to the error of torch in the same dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from emulator.emulated_gpu import installed
from support.boundary import given, oracle, update_removed
from torch import Tensor

from glulam import mhc

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ARCH = "sm_90a"
SLACK = 1e-5
"""An error of results in float32 that torch, with sums of another kind, may not have: exp and reciprocals are a GPU's
approximations, and p is a sum of products of 16-bit parts."""
SIZES = [(1, 8), (3, 72), (17, 264), (37, 136)]


def error(made: Tensor, exact: Tensor) -> float:
    """Root mean square, relative to float64."""
    return float((made.detach().double() - exact).norm() / exact.norm().clamp_min(1e-30))


def check(made: Sequence[Tensor], torchs: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    assert len(made) == len(torchs) == len(exact)
    for place, (one, other, wanted) in enumerate(zip(made, torchs, exact, strict=True)):
        ours, theirs = error(one, wanted.detach()), error(other, wanted.detach())
        assert wanted.any() and ours <= 2 * theirs + SLACK, f"result {place}: {ours:.1e}, torch {theirs:.1e}"


def results_and_gradients(call: Callable[..., Any], arguments: list[Any], upstream: Sequence[Tensor]) -> list[Tensor]:
    leaves = [one.requires_grad_() for one in arguments if one is not None]
    made = list(call(*arguments))
    gradients = torch.autograd.grad(made, leaves, [d.to(one.dtype) for d, one in zip(upstream, made, strict=True)])
    return [*made, *gradients]


def check_boundary(arguments: list[Any], arch: str = ARCH, check_races: bool = False) -> None:
    exact = [None if one is None else one.double() for one in arguments]
    wanted = oracle(*exact)
    generator = torch.Generator().manual_seed(9)
    upstream = [torch.randn(one.shape, generator=generator).to(BF16).double() for one in wanted]
    of_float64 = results_and_gradients(oracle, exact, upstream)
    of_torch = results_and_gradients(oracle, arguments, upstream)
    with installed(arch, check_races=check_races) as gpu:
        made = results_and_gradients(mhc.boundary, arguments, upstream)
        assert {spec.kernel for spec in gpu.fake.specs} >= {"boundary", "boundary_backward", "pre_backward"}
    check(made, of_torch, of_float64)


@pytest.mark.parametrize("has_update", [True, False])
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_results_and_gradients(tokens: int, width: int, has_update: bool) -> None:
    arguments = given((tokens,), width, dtype=F32, streams=BF16)
    check_boundary(arguments if has_update else update_removed(arguments), check_races=True)


@pytest.mark.parametrize("has_update", [True, False])
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (37, 136)])
def test_two_streams(tokens: int, width: int, has_update: bool) -> None:
    arguments = given((tokens,), width, n=2, dtype=F32, streams=BF16)
    check_boundary(arguments if has_update else update_removed(arguments), check_races=True)


def test_16_bit_parameters() -> None:
    arguments = given((5,), 72, dtype=F32, streams=BF16)
    arguments[5:] = [one.to(BF16) for one in arguments[5:]]
    exact = [one.double() for one in arguments]
    with installed(ARCH):
        made = mhc.boundary(*arguments)
    torchs = oracle(*arguments[:5], *(one.float() for one in arguments[5:]))
    check(made, torchs, oracle(*exact))


@pytest.mark.emulator
@pytest.mark.parametrize("width", [5120, 7168])
def test_widths_of_models(width: int) -> None:
    check_boundary(given((3,), width, dtype=F32, streams=BF16))


@pytest.mark.emulator
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_float16(arch: str, n: int) -> None:
    check_boundary(given((19,), 136, n=n, dtype=F32, streams=F16), arch)


@pytest.mark.parametrize("n", [2, 4])
def test_a_token_has_the_same_bits_in_every_batch(n: int) -> None:
    """With CTAs of as many columns as fit, and of one block where tokens are few."""
    arguments = given((70,), 712, n=n, dtype=F32, streams=BF16)
    cuts = []
    with installed(ARCH) as gpu, torch.no_grad():
        wanted = mhc.boundary(*arguments)
        for tokens in (70, 1, 33):
            some = [one[:tokens].clone() if place < 5 else one for place, one in enumerate(arguments)]
            made = mhc.boundary(*some)
            cuts.append((gpu.fake.launches[-1]["slices"], gpu.fake.launches[-1]["merge"]))
            assert all(torch.equal(one[:tokens], other) for one, other in zip(wanted, made, strict=True))
    assert cuts == [(2, 1), (12, 8), (12, 8)]


def test_no_tokens_launch_nothing() -> None:
    with installed(ARCH) as gpu:
        leaves = [one.requires_grad_() for one in given((0,), 72, dtype=F32, streams=BF16)]
        sum(one.sum() for one in mhc.boundary(*leaves)).backward()
        assert not gpu.called and all(not one.grad.any() for one in leaves)


@pytest.mark.parametrize("distance", [30.0, 120.0])
def test_logits_far_apart(distance: float) -> None:
    """A boundary, by its `base`, and sinkhorn are within 1e-4 of float64, forward and backward."""
    arguments = given((33,), 8, dtype=F32, streams=BF16)
    arguments[6] = torch.tensor([1.0, 1.0, distance])
    logits = (torch.randn(256, 4, 4, generator=torch.Generator().manual_seed(3)) * distance).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    upstream = torch.randn(256, 4, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    with installed(ARCH):
        comb = mhc.boundary(*update_removed(arguments)).comb
        made = mhc.sinkhorn(logits)
        (d_logits,) = torch.autograd.grad(made, logits, upstream.float())
    wanted = oracle(*(one if one is None else one.double() for one in update_removed(arguments)))[4]
    torch.testing.assert_close(comb.double(), wanted, rtol=0, atol=1e-4)
    m = mhc.sinkhorn(exact)
    (d_exact,) = torch.autograd.grad(m, exact, upstream)
    torch.testing.assert_close(made.double(), m, rtol=0, atol=1e-4)
    torch.testing.assert_close(d_logits.double(), d_exact, rtol=0, atol=1e-4)
