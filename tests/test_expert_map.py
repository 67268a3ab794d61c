"""Global expert ids, mapped to local ones by `expert_map`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fake_gpu import FakeGpu
from support.hopper import SERVED
from support.routes import check_rows
from torch import Tensor

import glulam
from glulam import Routing
from glulam.layer.choices import moe_of_choices

pytest_plugins = ["support.fixtures"]

BF16, F64 = torch.bfloat16, torch.float64
EXPERTS, K, HIDDEN, INTER = 6, 3, 64, 32
MAP = (4, -1, 0, 5, EXPERTS, 1, -9, 4, 2**31 - 1, 2, -1, -(2**31))
"""Local expert of 12 global ids: not contiguous, one expert twice, expert 3 missing, and values out of range."""


def expert_map(*places: int) -> Tensor:
    return torch.tensor(places or MAP, dtype=torch.int32)


def some_ids(tokens: int, k: int = K, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return random ids below, in and above the map's range, and ids that overflow int32."""
    ids = torch.randint(-2, len(MAP) + 3, (tokens, k), generator=torch.Generator().manual_seed(tokens), dtype=dtype)
    if dtype == torch.int64 and tokens > 2:
        ids[1] = 2**32 + 2
        ids[2, 0] = -(2**32)
    return ids


def places_of(ids: Tensor, places: tuple[int, ...] = MAP) -> Tensor:
    """Map ids to local experts by a loop; -1 for ids outside the map."""
    found = [places[one] if 0 <= one < len(places) else -1 for one in ids.view(-1).tolist()]
    return torch.tensor([one if 0 <= one < EXPERTS else -1 for one in found], dtype=torch.int64).view(ids.shape)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (7, 8), (300, 8), (41, 32)])
def test_rows(tokens: int, k: int, dtype: torch.dtype, anywhere: Any) -> None:
    ids, by = some_ids(tokens, k, dtype), expert_map()
    for of_weights in (torch.float32, BF16, torch.float16):
        weights = torch.rand(tokens, k).to(of_weights)
        made = Routing.from_topk(ids, weights, EXPERTS, expert_map=by)
        assert made.ids is ids and made.expert_map is by
        assert (made.num_experts, made.first, made.world_experts) == (EXPERTS, 0, len(MAP))
        check_rows(made, places_of(ids), weights.float(), EXPERTS)
    assert tokens < 7 or 0 < int(made.offs[-1]) < ids.numel()


@pytest.mark.parametrize("places", [(-1,) * 12, (3,) * 12, (EXPERTS,), (2,)])
def test_all_to_one_or_none(places: tuple[int, ...], anywhere: Any) -> None:
    """Also by maps that are shorter than there are experts here."""
    ids, weights = some_ids(50), torch.rand(50, K)
    made = Routing.from_topk(ids, weights, EXPERTS, expert_map=expert_map(*places))
    assert made.world_experts == max(len(places), EXPERTS)
    check_rows(made, places_of(ids, places), weights, EXPERTS)


def test_no_token(anywhere: Any) -> None:
    made = Routing.from_topk(some_ids(0), torch.rand(0, K), EXPERTS, expert_map=expert_map())
    assert made.offs.tolist() == [0] * EXPERTS and made.row_of.shape == (0, K)


def test_a_map_is_read_at_each_call(anywhere: Any) -> None:
    """By one plan: experts move between ranks."""
    ids, weights, by = some_ids(20), torch.rand(20, K), expert_map()
    for shift in range(3):
        by.copy_(expert_map().roll(shift))
        made = Routing.from_topk(ids, weights, EXPERTS, expert_map=by)
        check_rows(made, places_of(ids, tuple(by.tolist())), weights, EXPERTS)


def test_gradient_is_zero_without_a_row(anywhere: Any) -> None:
    ids, weights = some_ids(30), torch.rand(30, K).requires_grad_()
    made = Routing.from_topk(ids, weights, EXPERTS, expert_map=expert_map())
    g = torch.randn(ids.numel())
    g[int(made.offs[-1]) :] = torch.nan
    torch.autograd.backward(made.weight_of_row, g)
    wanted = [float(g[row]) if row >= 0 else 0.0 for row in made.row_of.view(-1).tolist()]
    assert weights.grad.view(-1).equal(torch.tensor(wanted)) and (weights.grad == 0).any()


def layer(recipe: str = "bf16") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"w1": (EXPERTS, 2 * INTER, HIDDEN), "w2": (EXPERTS, HIDDEN, INTER)}
    made = {name: (torch.randn(shape, generator=generator) / 4).to(BF16) for name, shape in shapes.items()}
    return {**made, "recipe": recipe}


def tokens(count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(BF16)


@pytest.mark.parametrize("recipe", SERVED)
def test_a_layer_of_few_tokens(recipe: str, anywhere: Any) -> None:
    """In one call, or in two: as with ids that are places already."""
    by, options = expert_map(), layer(recipe)
    for count in (17, 23, 1, 0):
        x, ids, weights = tokens(count), some_ids(count), torch.rand(count, K)
        wanted = moe_of_choices(x, places_of(ids), weights, EXPERTS, **options)
        made = moe_of_choices(x, ids, weights, EXPERTS, expert_map=by, **options)
        routing = Routing.from_topk(ids, weights, EXPERTS, expert_map=by)
        assert made.equal(wanted) and made.equal(glulam.moe(x, routing, **options))
        assert count < 2 or made.abs().max() > 0.1
        if anywhere is not None and count:
            anywhere.launches.clear()
            moe_of_choices(x, ids, weights, EXPERTS, expert_map=by, **options)
            (launch,) = [one for one in anywhere.launches if "expert_map" in one]
            assert launch["expert_map"] == by.data_ptr() and launch["num_mapped"] == len(MAP)


def test_gradients_against_float64() -> None:
    x, w1, w2 = (
        torch.randn(9, 8, dtype=F64),
        torch.randn(EXPERTS, 8, 8, dtype=F64),
        torch.randn(EXPERTS, 8, 4, dtype=F64),
    )
    ids, weights, by = some_ids(9), torch.rand(9, K, dtype=F64), expert_map()
    leaves = [one.requires_grad_() for one in (x, weights, w1, w2)]

    def call(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return glulam.moe(x, Routing.from_topk(ids, weights, EXPERTS, expert_map=by), w1, w2)

    assert torch.autograd.gradcheck(call, leaves)
    made = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    plain = Routing.from_topk(places_of(ids), weights, EXPERTS)
    wanted = torch.autograd.grad(glulam.moe(x, plain, w1, w2).square().sum(), leaves)
    assert all(one.equal(other) and other.abs().max() > 1e-2 for one, other in zip(made, wanted, strict=True))


@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph(dynamic: bool | None, anywhere: Any) -> None:
    torch.compiler.reset()
    options = layer()

    def call(x: Tensor, ids: Tensor, weights: Tensor, by: Tensor) -> Tensor:
        routing = Routing.from_topk(ids, weights, EXPERTS, expert_map=by)
        few = moe_of_choices(x, ids, weights, EXPERTS, expert_map=by, **options)
        return glulam.moe(x, routing, residual=few, **options)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for count in (20, 7):
        given = tokens(count), some_ids(count), torch.rand(count, K), expert_map()
        assert compiled(*given).equal(call(*given))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"expert_map": [0, 1]}, TypeError, "expert_map is a list; give a tensor"),
        ({"expert_map": torch.zeros(8)}, TypeError, "expert_map is torch.float32; it must be torch.int32"),
        ({"expert_map": torch.zeros(8, dtype=torch.int64)}, TypeError, "expert_map is torch.int64"),
        ({"expert_map": torch.zeros(2, 4, dtype=torch.int32)}, ValueError, r"expert_map has shape \[2, 4\]; give \["),
        ({"expert_map": torch.zeros(0, dtype=torch.int32)}, ValueError, r"expert_map has shape \[0\]; give \["),
        ({"expert_map": torch.zeros(16, dtype=torch.int32)[::2]}, ValueError, "expert_map is not contiguous"),
        ({"expert_map": torch.zeros(8, dtype=torch.int32, device="meta")}, ValueError, "expert_map is on meta"),
        ({"first": 2}, ValueError, "first is 2, and expert_map is given.*leave out first"),
        ({"num_experts": None}, TypeError, "num_experts is None"),
        ({"world_experts": 5}, ValueError, "world_experts is 5; it must be 6 to .* since 6 experts are here"),
        ({"world_experts": 8.0}, TypeError, "world_experts is 8.0; give an integer"),
        ({"world_experts": 8, "num_experts": "6"}, TypeError, "num_experts is '6'"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str, fake_gpu: FakeGpu) -> None:
    given = {"ids": some_ids(4), "weights": torch.zeros(4, K), "num_experts": EXPERTS, "expert_map": expert_map()}
    Routing.from_topk(**given)  # what is known of a right call serves no wrong one
    fake_gpu.launches.clear()
    with pytest.raises(error, match=f"from_topk: {message}"):
        Routing.from_topk(**{**given, **change})
    if "first" not in change:
        with pytest.raises(error, match=f"(moe|from_topk): {message}"):
            moe_of_choices(tokens(4), **{**given, **change}, **layer())
    assert not fake_gpu.launches
