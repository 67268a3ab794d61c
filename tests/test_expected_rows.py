"""Tiles are chosen for the rows expected on this rank, computed from all ranks' choices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fake_gpu import FakeGpu
from support.hopper import SERVED
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import glulam
from cute_kernels.sm90 import policy
from cute_kernels.sm90.configs import LARGE, SMALL
from cute_kernels.specs import GroupedDgluSpec, GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, Spec
from glulam import Routing
from glulam.choose import Chooser, choose, kernels, table
from glulam.choose.kernels import Kernel
from glulam.choose.problem import Problem, changed
from glulam.distributed.owners import Owners
from glulam.host.plans import forget_plans
from glulam.layer.choices import moe_of_choices
from glulam.layer.expert_rows import rows_of_experts
from glulam.ops.grouped_mlp import GroupedMlpCall
from glulam.ops.quantized_mlp import QuantizedMlpCall
from glulam.recipes import RECIPES

pytest_plugins = ["support.fixtures"]

BF16, F64 = torch.bfloat16, torch.float64
EXPERTS, WORLD, K, HIDDEN, INTER = 4, 32, 3, 64, 32
TOKENS = 150
ROWS, EXPECTED = TOKENS * K, 57
"""Room for 113 rows an expert; of 32 experts' choices 14 are expected, for which every recipe has another tile."""
MANY_TOKENS = TOKENS * WORLD // EXPERTS
"""ROWS choices of these tokens are expected."""
V3 = {"w1": (32, 2 * 2048, 7168), "w2": (32, 7168, 2048)}
"""DeepSeek-V3's experts on one of 8 ranks."""


def weights(**options: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"w1": (EXPERTS, 2 * INTER, HIDDEN), "w2": (EXPERTS, HIDDEN, INTER)}
    made = {name: (torch.randn(shape, generator=generator) / 4).to(BF16) for name, shape in shapes.items()}
    return {**made, **options}


def choices(tokens: int = TOKENS, are_all_here: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return {
        "ids": torch.randint(EXPERTS if are_all_here else WORLD, (tokens, K), generator=generator),
        "weights": torch.rand(tokens, K, generator=generator) + 0.5,
    }


def tokens(count: int = TOKENS) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(BF16)


def routing(world: int | None = WORLD, count: int = TOKENS, are_all_here: bool = False) -> Routing:
    return Routing.from_topk(**choices(count, are_all_here), num_experts=EXPERTS, world_experts=world)


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch, fake_gpu: FakeGpu) -> FakeGpu:
    """A fake GPU whose 16-bit tiles depend on the rows per expert, as the tiles of other formats do."""
    fixed_tile = policy.fixed_tile

    def rule(problem: Any) -> Any:
        if problem.operands == "16bit" and policy.rows_decide(problem):
            return SMALL if problem.rows <= 40 * problem.experts else LARGE
        return fixed_tile(problem)

    monkeypatch.setattr(policy, "fixed_tile", rule)
    monkeypatch.setitem(policy.MOST_ROWS, "16bit", {SMALL: 40, LARGE: math.inf})  # in words
    return fake_gpu


def tiles(specs: list[Spec]) -> list[Any]:
    """Return the tile of each GEMM that has a choice of tiles."""
    found: list[Any] = []
    for spec in specs:
        parts = (spec.fc1, spec.fc2) if isinstance(spec, GroupedMlpSpec) else (spec,)
        kinds = GroupedGluSpec, GroupedMmSpec, GroupedDgluSpec
        found += [part.tile for part in parts if isinstance(part, kinds)]
    return found


@pytest.mark.parametrize(
    ("rows", "experts", "world", "expected"),
    [(2048, 32, 256, 256), (8, 32, 256, 1), (1, 32, 256, 1), (0, 32, 256, 0), (100, 4, 4, 100), (100, 4, 0, 100),
     (7, 3, 8, 3), (2**31 - 1, 1024, 1025, 2145388542), (100, 4, 3, 100)],
)  # fmt: skip
def test_expected_rows(rows: int, experts: int, world: int, expected: int) -> None:
    problem = Problem("grouped_mlp", "bfloat16", rows, experts, 64, world_experts=world)
    chosen_for = problem.expected
    assert problem.expected_rows == chosen_for.rows == expected and problem.rows == rows
    assert chosen_for.world_experts == 0 and chosen_for.expected is chosen_for


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize("count", [1, 16, 64, 256, 2048, 8192])
def test_a_layer_gets_the_kernel_of_its_expected_rows(count: int, recipe: str, fake_gpu: FakeGpu) -> None:
    """N tokens of 8 choices each, of which the 32 experts of 256 get N."""
    options = {**V3, "recipe": recipe}
    made = glulam.explain("moe", (count, 7168), (count, 8, 256), **options)
    wanted = glulam.explain("grouped_mlp", (count, 7168), **options)
    assert made.spec == wanted.spec and made.why.endswith(wanted.why)
    assert f"32 of 256 experts are here, for which {count} of {8 * count} choices are expected; " in made.why
    everything = glulam.explain("moe", (count, 7168), (count, 8), **options)
    assert everything.spec == glulam.explain("grouped_mlp", (8 * count, 7168), **options).spec
    assert "expected" not in everything.why
    assert everything.why == glulam.explain("moe", (count, 7168), (count, 8, 32), **options).why


def test_tiles_differ_where_rows_decide() -> None:
    """Else what is above would hold of one tile for everything."""
    for recipe in ("mxfp8", "mxfp4_weight_only"):
        specs = [
            glulam.explain("moe", (512, 7168), (512, 8, world), **V3, recipe=recipe).spec for world in (32, 256)
        ]  # fmt: skip
        assert specs[0] != specs[1]


def test_a_routing_says_what_is_expected(fake_gpu: FakeGpu) -> None:
    assert routing().world_experts == WORLD and routing(None).world_experts == EXPERTS
    assert glulam.route(torch.randn(9, 8), 2).world_experts == 8
    options, rows = weights(recipe="mxfp4_weight_only"), torch.zeros(EXPECTED, HIDDEN, dtype=BF16)
    made = glulam.explain("moe", tokens(), routing(), **options)
    wanted = glulam.explain("grouped_mlp", rows, **options, offs=torch.zeros(EXPERTS, dtype=torch.int32))
    assert made.spec == wanted.spec and f"{EXPECTED} of {ROWS} choices are expected" in made.why


def test_a_tuned_layer_is_found_whatever_is_expected() -> None:
    problem = Problem("grouped_mlp", "bfloat16", 100, 4, 64, 64, 64, "swiglu")
    assert table.layer_key(changed(problem, world_experts=32)) == table.layer_key(problem)


def test_a_chooser_chooses_as_choose() -> None:
    for operands in ("16bit", "mxfp8", "mxfp4_weight_only"):
        p = Problem("grouped_mlp", "bfloat16", 1, 32, 7168, 2048, 7168, "swiglu", operands=operands, world_experts=256)
        p = changed(p, fc2_operands=operands)
        chooser = Chooser(p, "sm_90a")
        for rows in (8, 500, 2000, 5000, 20000, 10**6):
            assert chooser.spec(rows) == choose(changed(p, rows=rows), "sm_90a").spec


Layer = Callable[..., Tensor]


def in_one_call(x: Tensor, given: dict[str, Tensor], world: int | None, **options: Any) -> Tensor:
    return moe_of_choices(x, **given, num_experts=EXPERTS, world_experts=world, **options)


def of_a_routing(x: Tensor, given: dict[str, Tensor], world: int | None, **options: Any) -> Tensor:
    made = Routing.from_topk(**given, num_experts=EXPERTS, world_experts=world)
    return glulam.moe(x, made, **options)


def of_a_trained_residual(x: Tensor, given: dict[str, Tensor], world: int | None, **options: Any) -> Tensor:
    with torch.enable_grad():
        return of_a_routing(x, given, world, residual=torch.zeros_like(x).requires_grad_(), **options).detach()


def in_rows(x: Tensor, given: dict[str, Tensor], world: int | None, **options: Any) -> Tensor:
    made = Routing.from_topk(**given, num_experts=EXPERTS, world_experts=world)
    plain = {"activation": "swiglu", "glu_layout": "concat"}
    return glulam.combine(rows_of_experts(x, made, dtype=BF16, **plain, **options), made)


OF_EACH_KIND = ("bf16", "mxfp8", "mxfp8_exact", "mxfp4_weight_only")
LAYERS = (in_one_call, of_a_routing, of_a_trained_residual, in_rows)


@pytest.mark.parametrize("recipe", OF_EACH_KIND)
@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_launched(layer: Layer, recipe: str, by_rows: FakeGpu) -> None:
    """The kernels of so many rows in a grouped_mlp; at another number of tokens, too, and if all choices are here."""
    options = weights(recipe=recipe)
    found = {}
    for rows in (ROWS, EXPECTED):
        forget_plans()
        by_rows.specs.clear()
        offs = torch.full((EXPERTS,), rows, dtype=torch.int32)
        glulam.grouped_mlp(torch.zeros(rows, HIDDEN, dtype=BF16), **options, offs=offs)
        found[rows] = tiles(by_rows.specs)
    assert found[ROWS] != found[EXPECTED]
    wanted = {None: found[ROWS], WORLD: found[EXPECTED]}
    for are_all_here in (False, True):
        results = []
        for world, tiles_of in wanted.items():
            forget_plans()
            by_rows.specs.clear()
            results.append(layer(tokens(), choices(are_all_here=are_all_here), world, **options))
            assert tiles(by_rows.specs) == tiles_of
            by_rows.specs.clear()
            layer(tokens(TOKENS - 1), choices(TOKENS - 1), world, **options)
            assert not tiles(by_rows.specs)
            layer(tokens(MANY_TOKENS), choices(MANY_TOKENS), world, **options)
            assert (tiles(by_rows.specs) == found[ROWS]) == (world == WORLD)
        assert results[0].equal(results[1]) and results[0].abs().max() > 0.1


@pytest.mark.parametrize("recipe", OF_EACH_KIND)
def test_no_choice_depends_on_the_order_of_calls(
    recipe: str, by_rows: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shares of one layer have plans of their own."""
    launched: list[Spec] = []

    def find(spec: Spec) -> Kernel:
        kernel = by_rows.find(spec)
        return kernel._replace(function=lambda *given: (launched.append(spec), kernel.function(*given)))

    monkeypatch.setattr(kernels, "find", find)
    options = weights(recipe=recipe)
    seen: dict[Any, list[Any]] = {}
    for world in (None, WORLD, None, WORLD):
        for layer in LAYERS:
            launched.clear()
            layer(tokens(), choices(), world, **options)
            seen.setdefault((layer, world), []).append(tiles(launched))
    for layer in LAYERS:
        (all_rows, again), (expected, once_more) = seen[layer, None], seen[layer, WORLD]
        assert all_rows == again != expected == once_more


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp4_weight_only", "mxfp8_weight_only"])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"transpose_w": True}, {"activation": "gelu"}], ids=str)
def test_parts_of_a_training_step(recipe: str, options: dict[str, Any], by_rows: FakeGpu) -> None:
    """Each launch of both directions that has a choice of tiles, and the same gradients."""
    if "transpose_w" in options and recipe != "bf16":
        pytest.skip("scales lie along rows")
    is_frozen, made = RECIPES[recipe].freezes_weights, {}
    for world in (None, WORLD):
        forget_plans()
        by_rows.specs.clear()
        given = weights()
        if "activation" in options:
            given["w1"] = given["w1"][:, :INTER].contiguous()
        if "transpose_w" in options:
            given = {name: w.mT.contiguous() for name, w in given.items()}
        leaves = [tokens().requires_grad_(), choices()["weights"].requires_grad_()]
        if not is_frozen:
            leaves += [w.requires_grad_() for w in given.values()]
        now = Routing.from_topk(choices()["ids"], leaves[1], EXPERTS, world_experts=world)
        y = glulam.moe(leaves[0], now, **given, recipe=recipe, **options)
        made[world] = torch.autograd.grad(y.float().square().sum(), leaves), tiles(by_rows.specs)
    (gradients, chosen), (others, chosen_of_fewer) = made[None], made[WORLD]
    assert all(one.equal(other) and one.abs().max() > 1e-3 for one, other in zip(gradients, others, strict=True))
    if recipe != "mxfp8":  # whose training has one tile
        assert chosen != chosen_of_fewer and len(chosen) == len(chosen_of_fewer)
    if recipe == "bf16":
        of_dglu = [spec.tile for spec in by_rows.specs if isinstance(spec, GroupedDgluSpec)]
        assert set(chosen_of_fewer) - set(of_dglu) == {SMALL}


@pytest.mark.parametrize("kind", [GroupedMlpCall, QuantizedMlpCall])
def test_another_number_of_tokens_is_checked_no_more(
    kind: Any, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    check = kind.check
    monkeypatch.setattr(kind, "check", lambda call: checked.append(call.num_rows) or check(call))
    options = weights(recipe="bf16" if kind is GroupedMlpCall else "mxfp8")
    for layer in LAYERS:
        for count in (TOKENS, TOKENS + 1):
            layer(tokens(count), choices(count), WORLD, **options)
        checked.clear()
        for count in (TOKENS + 2, 7, TOKENS):
            layer(tokens(count), choices(count), WORLD, **options)
        assert not checked


def test_gradients_do_not_depend_on_it() -> None:
    """Of float64 on the CPU, with all choices here, some, and none."""
    w1, w2 = torch.randn(EXPERTS, 8, 8, dtype=F64), torch.randn(EXPERTS, 8, 4, dtype=F64)
    ids = torch.randint(EXPERTS, (9, K))
    for chosen in (ids, ids * 5, ids + EXPERTS):
        made = []
        for world in (None, EXPERTS, WORLD, 10**9):
            leaves = [torch.ones(9, 8, dtype=F64).cumsum(0) / 9, torch.ones(9, K, dtype=F64), w1.clone(), w2.clone()]
            leaves = [one.requires_grad_() for one in leaves]
            now = Routing.from_topk(chosen, leaves[1], EXPERTS, world_experts=world)
            y = glulam.moe(leaves[0], now, *leaves[2:])
            made.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
        for others in made[1:]:
            assert all(one.equal(other) for one, other in zip(made[0], others, strict=True))
        assert bool(made[0][0].any()) == (chosen.min() < EXPERTS)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4_weight_only"])
def test_one_graph_serves_any_number_of_tokens(recipe: str) -> None:
    torch.compiler.reset()
    options = weights(recipe=recipe)

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        now = Routing.from_topk(ids, weights, EXPERTS, world_experts=WORLD)
        few = moe_of_choices(x, ids, weights, EXPERTS, world_experts=WORLD, **options)
        return glulam.moe(x, now, residual=few, **options)

    graphs, made_first = CompileCounterWithBackend("aot_eager"), 0
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    for count in (10, 11, 7, 31):
        given = tokens(count), *choices(count).values()
        assert compiled(*given).equal(layer(*given))
        made_first = made_first or graphs.frame_count
    assert graphs.frame_count == made_first


def test_an_exported_layer_keeps_it() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, w in weights().items():
                self.register_buffer(name, w)

        def forward(self, x: Tensor, ids: Tensor, given: Tensor) -> Tensor:
            now = Routing.from_topk(ids, given, EXPERTS, world_experts=WORLD)
            return glulam.moe(x, now, self.w1, self.w2)

    count = torch.export.Dim("tokens", min=2, max=4096)
    example = tokens(10), *choices(10).values()
    program = torch.export.export(Layer(), example, dynamic_shapes=({0: count},) * 3)
    (node,) = [node for node in program.graph.nodes if node.target == torch.ops.glulam.moe.default]
    assert WORLD in (*node.args, *node.kwargs.values())
    for other in (3, 100):
        given = tokens(other), *choices(other).values()
        assert program.module()(*given).equal(Layer()(*given))


@pytest.mark.parametrize(
    ("world", "error", "message"),
    [
        (EXPERTS - 1, ValueError, "is 3; it must be 4 to .* since 4 experts are here"),
        (-1, ValueError, "is -1; it must be 4"),
        (2.0, TypeError, "is 2.0; give an integer"),
        (True, TypeError, "is True; give an integer"),
        (2**31, ValueError, "is 2147483648; it must be 4 to 2147483647"),
    ],
)
def test_bad_input(world: Any, error: type[Exception], message: str, fake_gpu: FakeGpu) -> None:
    given, right = {**choices(), "num_experts": EXPERTS}, routing()
    fake_gpu.launches.clear()
    with pytest.raises(error, match=f"from_topk: world_experts {message}"):
        Routing.from_topk(**given, world_experts=world)
    with pytest.raises(error, match=f"moe: world_experts {message}"):
        moe_of_choices(tokens(), **given, **weights(), world_experts=world)
    right.world_experts = world
    for recipe in ("bf16", "mxfp8"):
        with pytest.raises(error, match=f"moe: routing.world_experts {message}"):
            glulam.moe(tokens(), right, **weights(), recipe=recipe)
        with pytest.raises(error, match=f"moe: routing.world_experts {message}"):
            in_rows_of(right, recipe)
    assert not fake_gpu.launches


def in_rows_of(made: Routing, recipe: str) -> Tensor:
    options = {"activation": "swiglu", "glu_layout": "concat", "dtype": BF16}
    return rows_of_experts(tokens(), made, **weights(recipe=recipe), **options)


class TestOwners:
    """Tests of Owners: the expert count over which a rank's received choices, or its buffer's rows, appear to be
    spread.
    """

    @pytest.mark.parametrize(
        ("experts", "world", "top_k"), [(256, 8, 8), (256, 32, 8), (8, 8, 2), (128, 4, 1), (8, 1, 2)]
    )
    def test_tokens_that_came(self, experts: int, world: int, top_k: int) -> None:
        """Against random choices: rows here over choices of the tokens that have one here."""
        owners, generator = Owners(experts, world), torch.Generator().manual_seed(0)
        ids = torch.rand(20000, experts, generator=generator).topk(top_k).indices
        for rank in (0, world - 1):
            here = (owners.ranks_of(ids) == rank).sum(1)
            share = float(here.sum() / ((here > 0).sum() * top_k))
            spread = owners.spread_of_arrived(rank, top_k)
            assert abs(owners.count(rank) / spread - share) < 0.05 * share + 0.5 * share / spread

    def test_room_of_all_ranks(self) -> None:
        owners, most = Owners(256, 8), 1000
        for tokens, used in ((1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (513, 1000), (1000, 1000), (0, 1000)):
            spread = owners.spread_in_room(tokens, most)
            assert spread == 256 * most // used
            rows = math.ceil(8 * most * 8 * 32 / spread)  # of room for 8 ranks' tokens, 8 choices each
            assert used * 8 <= rows <= used * 8 + 1
        assert len({owners.spread_in_room(tokens, most) for tokens in range(most + 1)}) == 11
