"""The boundary's kernels against float64, through the public API."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.boundary import SLACK, given, of_all_kinds, oracle, update_removed
from torch import Tensor

import glulam
from glulam import mhc

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OF_TOKENS = 10
"""Results and gradients of `both_ways` that have a row for each token: five each."""
SIZES = [(1, 8), (17, 264), (300, 736), (1000, 2056), (37, 5120), (4099, 7168)]


def on_gpu(arguments: list[Any]) -> list[Any]:
    return [None if one is None else one.cuda() for one in arguments]


def both_ways(call: Any, arguments: list[Any], upstream: list[Tensor]) -> list[Tensor]:
    leaves = [one.detach().requires_grad_() for one in arguments if one is not None]
    found = iter(leaves)
    with torch.enable_grad():
        made = list(call(*[None if one is None else next(found) for one in arguments]))
    return [*made, *torch.autograd.grad(made, leaves, [d.to(m.dtype) for d, m in zip(upstream, made, strict=True)])]


@pytest.mark.parametrize("has_update", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_results_and_gradients(tokens: int, width: int, dtype: torch.dtype, has_update: bool) -> None:
    """Errors of at most twice torch's in the same dtypes: root mean squares over as many draws as give 16 tokens, since
    one token of 8 columns has too few elements to compare two errors by.
    """
    draws = [errors_of_a_draw(seed, tokens, width, dtype, has_update) for seed in range(max(1, 16 // tokens))]
    ours, theirs = torch.tensor(draws).square().mean(0).sqrt()
    assert (ours <= 2 * theirs + SLACK).all(), f"ours {ours}, torch's {theirs}"


def errors_of_a_draw(seed: int, tokens: int, width: int, dtype: torch.dtype, has_update: bool) -> list[list[float]]:
    """Return the relative errors of our results and gradients, and of torch's. Check that a second call gives the same
    bits.
    """
    torch.manual_seed(seed)
    arguments = on_gpu(given((tokens,), width, dtype=F32, streams=dtype, seed=seed))
    arguments = arguments if has_update else update_removed(arguments)
    exact = [None if one is None else one.double() for one in arguments]
    upstream = [torch.randn_like(one) for one in oracle(*exact)]
    wanted = both_ways(oracle, exact, upstream)
    torchs, made = both_ways(oracle, arguments, upstream), both_ways(mhc.boundary, arguments, upstream)
    for one, again in zip(made, both_ways(mhc.boundary, arguments, upstream), strict=True):
        assert torch.equal(one, again)
    return [[relative_error(*pair) for pair in zip(results, wanted, strict=True)] for results in (made, torchs)]


def relative_error(one: Tensor, best: Tensor) -> float:
    return float((one.detach().double() - best.detach()).norm() / best.detach().norm())


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    """Results, and gradients of what a token has; parameters' gradients are sums over tokens."""
    arguments = on_gpu(given((2048,), 7168, dtype=F32, streams=BF16))
    upstream = [torch.randn_like(one) for one in oracle(*arguments)]
    wanted = both_ways(mhc.boundary, arguments, upstream)[:OF_TOKENS]
    for tokens in (1, 16, 129, 1000):
        some = [one[:tokens].clone() if place < 5 else one for place, one in enumerate(arguments)]
        made = both_ways(mhc.boundary, some, [one[:tokens] for one in upstream])[:OF_TOKENS]
        for one, other in zip(wanted, made, strict=True):
            assert torch.equal(one[:tokens], other)


def test_replays_of_a_graph() -> None:
    arguments = on_gpu(given((130,), 1504, dtype=F32, streams=BF16))
    mhc.boundary(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = mhc.boundary(*arguments)
    for place in (0, 1):
        arguments[place].normal_()
    graph.replay()
    for one, other in zip(made, mhc.boundary(*arguments), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("return_x", [False, True])
@pytest.mark.parametrize("block", ["1x32", "1x128"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(1, 32), (17, 160), (300, 736), (1000, 2080), (4099, 7168)])
def test_x_in_mxfp8_has_the_bytes_of_its_quantisation(
    tokens: int, width: int, dtype: torch.dtype, block: Any, return_x: bool
) -> None:
    """With NaN, Inf and zeros where there are tokens for them; other results are those of a call in 16 bits."""
    arguments = on_gpu(
        of_all_kinds(width, dtype, tokens) if tokens > 2 else given((tokens,), width, dtype=F32, streams=dtype)
    )
    plain = mhc.boundary(*arguments)
    wanted = glulam.quantize_mxfp8(plain.x, block=block)
    made = mhc.boundary(*arguments, x_block=block, return_x=return_x)
    parts = [(made.x_mxfp8.data, wanted.data), (made.x_mxfp8.scale, wanted.scale)]
    parts += [(getattr(made, name), getattr(plain, name)) for name in ("streams", "pre", "post", "comb")]
    parts += [(made.x, plain.x)] if return_x else []
    for one, other in parts:
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_replays_of_a_graph_with_x_in_mxfp8() -> None:
    arguments = on_gpu(given((130,), 1504, dtype=F32, streams=BF16))
    mhc.boundary(*arguments, x_block="1x128")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = mhc.boundary(*arguments, x_block="1x128")
    for place in (0, 1):
        arguments[place].normal_()
    graph.replay()
    again = mhc.boundary(*arguments, x_block="1x128")
    for one, other in ((made.x_mxfp8.data, again.x_mxfp8.data), (made.x_mxfp8.scale, again.x_mxfp8.scale)):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
