"""mhc.boundary kernels in the emulator, against float64, with torch's error in the same dtypes as the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from emulator.emulated_gpu import NUM_SMS, installed
from support.boundary import SLACK, given, oracle, update_removed
from torch import Tensor

from glulam import mhc

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ARCH = "sm_90a"


@pytest.fixture(autouse=True)
def new_memory_holds_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


SIZES = [(1, 8), (3, 72), (17, 264), (37, 136)]


def error(made: Tensor, exact: Tensor) -> float:
    """Return the root mean square error relative to float64; infinite if only the exact values are all 0."""
    difference, size = (made.detach().double() - exact).norm(), exact.norm()
    return float(difference / size) if size else float("inf") if difference else 0.0


def check(made: Sequence[Tensor], torchs: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    assert len(made) == len(torchs) == len(exact)
    for place, (one, other, wanted) in enumerate(zip(made, torchs, exact, strict=True)):
        ours, theirs = error(one, wanted.detach()), error(other, wanted.detach())
        assert ours <= 2 * theirs + SLACK, f"result {place}: {ours:.1e}, torch {theirs:.1e}"


def results_and_gradients(
    call: Callable[..., Any], arguments: list[Any], upstream: Sequence[Tensor], used: Sequence[int]
) -> list[Tensor]:  # fmt: skip
    """Return the results, then the gradients of all arguments, differentiated through the results with index in
    `used`.
    """
    leaves = [one.requires_grad_() for one in arguments if one is not None]
    made = list(call(*arguments))
    through = [made[place] for place in used]
    gradients = [upstream[place].to(made[place].dtype) for place in used]
    found = torch.autograd.grad(through, leaves, gradients, allow_unused=True)
    return [*made, *[torch.zeros_like(of) if one is None else one for one, of in zip(found, leaves, strict=True)]]


def check_boundary(
    arguments: list[Any], arch: str = ARCH, check_races: bool = False, num_sms: int = NUM_SMS,
    in_torch: Callable[..., Any] = oracle, used: Sequence[int] = range(5),
) -> list[dict[str, Any]]:  # fmt: skip
    """Compare with float64, and return the launches' arguments."""
    exact = [None if one is None else one.double() for one in arguments]
    wanted = oracle(*exact)
    generator = torch.Generator().manual_seed(9)
    upstream = [torch.randn(one.shape, generator=generator).to(BF16).double() for one in wanted]
    of_float64 = results_and_gradients(oracle, exact, upstream, used)
    of_torch = results_and_gradients(in_torch, arguments, upstream, used)
    with installed(arch, num_sms, check_races=check_races) as gpu:
        made = results_and_gradients(mhc.boundary, arguments, upstream, used)
        assert {spec.kernel for spec in gpu.fake.specs} >= {"boundary", "boundary_backward"}
    check(made, of_torch, of_float64)
    return gpu.fake.launches


@pytest.mark.parametrize("has_update", [True, False])
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_results_and_gradients(tokens: int, width: int, has_update: bool) -> None:
    arguments = given((tokens,), width, dtype=F32, streams=BF16)
    check_boundary(arguments if has_update else update_removed(arguments), check_races=True)


def test_16_bit_parameters() -> None:
    arguments = given((5,), 72, dtype=F32, streams=BF16)
    arguments[5:] = [one.to(BF16) for one in arguments[5:]]

    def in_torch(*given: Any) -> Any:
        return oracle(*given[:5], *(one.to(given[2].dtype) for one in given[5:]))

    check_boundary(arguments, in_torch=in_torch)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (3,), (4,), (0, 4), (1, 2)])
@pytest.mark.parametrize("has_update", [True, False])
def test_gradients_of_some_results(used: tuple[int, ...], has_update: bool) -> None:
    """Of some results; without an update the streams are no result."""
    if used == (0,) and not has_update:
        used = (0, 1)
    arguments = given((17,), 136, dtype=F32, streams=BF16)
    check_boundary(arguments if has_update else update_removed(arguments), used=used)


@pytest.mark.parametrize("place", range(9))
def test_a_gradient_that_alone_is_wanted_has_the_same_bits(place: int) -> None:
    arguments = given((5,), 72, dtype=F32, streams=BF16)
    found = []
    with installed(ARCH) as gpu:
        for wanted in ([place], range(9)):
            leaves = [one.detach().requires_grad_(at in wanted) for at, one in enumerate(arguments)]
            sum(one.float().sum() for one in mhc.boundary(*leaves)).backward()
            found.append(leaves[place].grad)
            written = [name for name, value in gpu.fake.launches[-1].items() if name.startswith("d_") and value]
            assert found[-1] is not None and len(written) >= len(wanted)
    assert torch.equal(*found)


def test_a_tokens_gradients_have_the_same_bits_in_every_batch() -> None:
    arguments, found = given((70,), 136, dtype=F32, streams=BF16), []
    with installed(ARCH):
        for tokens in (70, 1, 33):
            leaves = [one[:tokens].clone() if place < 5 else one.clone() for place, one in enumerate(arguments)]
            for one in leaves:
                one.requires_grad_()
            sum(one.float().square().sum() for one in mhc.boundary(*leaves)).backward()
            found.append([one.grad for one in leaves[:5]])
    for others in found[1:]:
        assert all(torch.equal(one[: len(other)], other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize(("num_sms", "parts"), [(1, 1), (4, 2), (1000, 6)])
def test_sums_of_parts_and_slices(num_sms: int, parts: int) -> None:
    """A CTA with more tiles than its ring has stages, CTAs with half of them, and with a tile each."""
    arguments = given((82,), 136, dtype=F32, streams=BF16)
    launches = check_boundary(arguments, num_sms=num_sms, check_races=parts == 2)
    assert launches[-1]["parts"] == parts


@pytest.mark.emulator
@pytest.mark.parametrize("width", [5120, 7168])
def test_widths_of_models(width: int) -> None:
    check_boundary(given((3,), width, dtype=F32, streams=BF16))


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_float16(arch: str) -> None:
    check_boundary(given((19,), 136, dtype=F32, streams=F16), arch, check_races=True)


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    """With the tokens in one part, and in several."""
    arguments = given((70,), 712, dtype=F32, streams=BF16)
    cuts = []
    with installed(ARCH, num_sms=16) as gpu, torch.no_grad():
        wanted = mhc.boundary(*arguments)
        for tokens in (70, 1, 33):
            some = [one[:tokens].clone() if place < 5 else one for place, one in enumerate(arguments)]
            made = mhc.boundary(*some)
            cuts.append(gpu.fake.launches[-1]["parts"])
            assert all(torch.equal(one[:tokens], other) for one, other in zip(wanted, made, strict=True))
    assert cuts == [5, 1, 3]


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
