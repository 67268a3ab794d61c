"""Weight gradients in MXFP8: the reference against float64, and the recipe in operators, layers and modules."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import mxfp8_mlp, oracle
from support.criterion import same_bits
from support.fake_gpu import FakeGpu
from support.gradients import leaves
from support.inputs import Case, gradient, make_case
from torch import Tensor

import glulam
from cute_kernels.tiles import SpecError
from glulam import recipes
from glulam.nn import GroupedMLP
from glulam.ops import mlp_training

pytest_plugins = ["support.fixtures"]

RECIPE = recipes.MXFP8_WGRAD
SIZES = [5, 0, 31, 32, 33, 1, 130]
HIDDEN, INTER = 96, 64
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def by_groups(rows: Tensor, ends: list[int]) -> Tensor:
    """Quantise rows as a weight gradient does, by the definition: columns of each group in blocks of 32 rows. Return
    their values.
    """
    parts = [rows[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return torch.cat([mxfp8_mlp.rounded(part.mT, 32).mT if len(part) else part.double() for part in parts])


def expected(dy: Tensor, x: Tensor, ends: list[int]) -> Tensor:
    return oracle.grouped_wgrad(by_groups(dy, ends), by_groups(x, ends), ends)


def case(**options: Any) -> Case:
    return make_case(SIZES, HIDDEN, INTER, tail=6, **options)


def operands(c: Case) -> tuple[Tensor, Tensor]:
    """Return dy and x whose columns differ in scale, so that blocks along rows would round differently."""
    across = torch.exp2(torch.linspace(-6, 6, HIDDEN)).to(c.x.dtype)
    return gradient(c) * across, c.x * across.flip(0)


class TestOperator:
    @pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
    def test_it_is_what_the_definition_says(self, dtype: torch.dtype) -> None:
        c = case(dtype=dtype if dtype.itemsize == 2 else BF16)
        dy, x = (rows.to(dtype) for rows in operands(c))
        wide = None if dtype.itemsize > 2 else F32
        made = glulam.grouped_wgrad(dy, x, offs=c.offs, out_dtype=wide, recipe="mxfp8_wgrad").double()
        exact = expected(dy[: c.rows], x[: c.rows], c.ends)
        assert exact.norm() > 0 and (made - exact).norm() < 1e-6 * exact.norm()
        plain = glulam.grouped_wgrad(dy, x, offs=c.offs, out_dtype=wide)
        assert not same_bits(made, plain.double()), "nothing was rounded"

    def test_other_recipes_multiply_rows_as_they_are(self) -> None:
        c = case()
        dy, x = operands(c)
        plain = glulam.grouped_wgrad(dy, x, offs=c.offs)
        for recipe in recipes.RECIPES.values():
            if recipe.trains and recipe is not RECIPE:
                assert same_bits(glulam.grouped_wgrad(dy, x, offs=c.offs, recipe=recipe), plain)

    def test_an_experts_result_depends_on_its_rows_alone(self) -> None:
        c = case()
        dy, x = operands(c)
        alone = dict(zip(("dy", "x"), (rows[c.ends[-2] : c.ends[-1]] for rows in (dy, x)), strict=True))
        one = glulam.grouped_wgrad(**alone, splits=SIZES[-1:], recipe=RECIPE)
        among = glulam.grouped_wgrad(dy, x, offs=c.offs, recipe=RECIPE)
        assert same_bits(one[0], among[-1])

    @pytest.mark.parametrize("operand", ["dy", "x"])
    def test_rows_come_by_index(self, operand: str) -> None:
        c = case()
        given = dict(zip(("dy", "x"), operands(c), strict=True))
        index = torch.randint(0, c.rows, (len(c.x),), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
        by_index = glulam.grouped_wgrad(**given, **{f"{operand}_rows": index}, offs=c.offs, recipe=RECIPE)
        given[operand] = given[operand][index.long()]
        assert same_bits(by_index, glulam.grouped_wgrad(**given, offs=c.offs, recipe=RECIPE))

    def test_it_is_added_where_a_mask_says(self) -> None:
        c = case()
        dy, x = operands(c)
        there = torch.ones(len(SIZES), HIDDEN, HIDDEN)
        mask = torch.arange(len(SIZES)) % 2 == 0
        out = torch.where(mask[:, None, None], there, torch.nan)
        glulam.grouped_wgrad(dy, x, offs=c.offs, out=out, mask=mask, recipe=RECIPE)
        dw = glulam.grouped_wgrad(dy, x, offs=c.offs, out_dtype=F32, recipe=RECIPE)
        assert same_bits(out, dw + there * mask[:, None, None])

    def test_what_cannot_be_is_refused(self, fake_gpu: FakeGpu) -> None:
        c = case()
        rows = c.x[:, :40].contiguous()
        for dy, x, recipe, kind, message in (
            (c.x, rows, RECIPE, ValueError, "K \\(x's columns\\) is 40; recipe 'mxfp8_wgrad' takes multiples of 32"),
            (rows, c.x, RECIPE, ValueError, "N \\(dy's columns\\) is 40"),
            (c.x, c.x, "mxfp8_exact", ValueError, "trains no weights; choose one of 'bf16'.*'mxfp8_wgrad'"),
            (c.x, c.x, "mxfp9", ValueError, "recipe is 'mxfp9'; choose one of"),
            (c.x, c.x, RECIPE, SpecError, "'mxfp8_blocks' are multiplied on sm_100a, sm_103a alone, not on sm_90a"),
        ):
            with pytest.raises(kind, match=message):
                glulam.grouped_wgrad(dy, x, offs=c.offs, recipe=recipe)


def step(c: Case, recipe: str, wanted: tuple[str, ...] = (), **options: Any) -> dict[str, Tensor]:
    """Run a forward and backward of grouped_mlp; return gradients by name."""
    given = leaves(c, wanted) if wanted else leaves(c)
    glulam.grouped_mlp(**given, offs=c.offs, recipe=recipe, **options).backward(gradient(c))
    return {name: value.grad for name, value in given.items() if value.grad is not None}


def weight_gradients(c: Case) -> dict[str, Tensor]:
    """Return the expected weight gradients, computed from the 16-bit rows that backward has."""
    options: dict[str, Any] = {
        "activation": "swiglu", "glu_layout": "concat", "recipe": "mxfp8_blocks", "offs": c.offs,
        "row_scale": c.row_scale, "trained": True,
    }  # fmt: skip
    _, preact = mlp_training.forward(c.x, c.w1, c.w2, b1=c.b1, b2=c.b2, **options)
    made = mlp_training.backward(
        gradient(c), c.w1, c.w2, preact, **options, input_grad=True, row_scale_grad=True
    )  # fmt: skip
    return {
        "w1": glulam.grouped_wgrad(made.dpreact, c.x, offs=c.offs, recipe=RECIPE),
        "w2": glulam.grouped_wgrad(gradient(c), made.act, offs=c.offs, recipe=RECIPE),
    }


class TestMlp:
    @pytest.mark.parametrize("recompute", [False, True])
    def test_weight_gradients_alone_differ_from_those_in_blocks(self, recompute: bool) -> None:
        c = case()
        made, blocks = (step(c, name, recompute=recompute) for name in ("mxfp8_wgrad", "mxfp8_blocks"))
        assert made.keys() == blocks.keys() == {"x", "w1", "w2", "row_scale", "b1", "b2"}
        for name, value in weight_gradients(c).items():
            assert same_bits(made.pop(name), value)
            error = float((blocks[name].double() - value.double()).norm() / blocks.pop(name).double().norm())
            assert 1e-2 < error < 6e-2, name
        assert all(same_bits(value, blocks[name]) for name, value in made.items())

    def test_gradients_of_float32_weights_are_float32(self) -> None:
        c = case()
        c.w1, c.w2 = c.w1.float(), c.w2.float()
        made = step(c, "mxfp8_wgrad", ("w1", "w2"))
        for name, value in made.items():
            assert value.dtype == F32 and not same_bits(value, value.to(BF16).float()), name

    @pytest.mark.parametrize("wanted", ["w1", "w2"])
    def test_one_weight_is_trained(self, wanted: str) -> None:
        c = case()
        assert same_bits(step(c, "mxfp8_wgrad", (wanted,))[wanted], weight_gradients(c)[wanted])

    def test_it_is_one_graph(self) -> None:
        c, compiled = case(), leaves(case())
        torch.compiler.reset()
        call = torch.compile(
            lambda given: glulam.grouped_mlp(**given, offs=c.offs, recipe="mxfp8_wgrad"), backend="aot_eager",
            fullgraph=True,
        )  # fmt: skip
        call(compiled).backward(gradient(c))
        assert all(same_bits(compiled[name].grad, value) for name, value in step(c, "mxfp8_wgrad").items())

    def test_other_gpus_refuse_it_by_name(self, fake_gpu: FakeGpu) -> None:
        with pytest.raises(SpecError, match="'mxfp8_blocks' are multiplied on sm_100a, sm_103a alone, not on sm_90a"):
            step(case(), "mxfp8_wgrad")


def module(c: Case, **options: Any) -> GroupedMLP:
    made = GroupedMLP(len(c.sizes), HIDDEN, INTER, bias=True, recipe="mxfp8_wgrad", dtype=BF16, **options)
    state = {"fc1.weight": c.w1, "fc1.bias": c.b1, "fc2.weight": c.w2, "fc2.bias": c.b2}
    made.load_state_dict({name: value.clone() for name, value in state.items()})
    return made


def backward(c: Case, made: GroupedMLP) -> None:
    made(c.x, offs=c.offs, row_scale=c.row_scale).backward(gradient(c))


def weights_of(made: GroupedMLP) -> list[Any]:
    return [*made.fc1.parameter_list("weight"), *made.fc2.parameter_list("weight")]


class TestModules:
    @pytest.fixture
    def wanted(self) -> list[Tensor]:
        """Return the weight gradients of each expert in float32, of w1 and then of w2."""
        c = case()
        c.w1, c.w2 = c.w1.float(), c.w2.float()
        made = step(c, "mxfp8_wgrad", ("w1", "w2"))
        return [*made["w1"], *made["w2"]]

    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("delayed", [False, True])
    def test_gradients_go_to_main_grad(self, wanted: list[Tensor], packed: bool, delayed: bool) -> None:
        c = case()
        made = module(c, packed=packed, delay_wgrad=delayed)
        for weight in weights_of(made):
            weight.main_grad = torch.ones_like(weight, dtype=F32, requires_grad=False)
        backward(c, made)
        if delayed:
            made.backward_dw()
        mains = [one for w in weights_of(made) for one in (w.main_grad if packed else [w.main_grad])]
        assert all(same_bits(main, 1 + one) for main, one in zip(mains, wanted, strict=True))

    def test_experts_that_are_frozen_change_nothing_for_others(self, wanted: list[Tensor]) -> None:
        c = case()
        made = module(c, packed=False, delay_wgrad=True)
        for expert, weight in enumerate(weights_of(made)):
            weight.requires_grad_(expert % 3 == 0)
        backward(c, made)
        made.backward_dw()
        for expert, (weight, one) in enumerate(zip(weights_of(made), wanted, strict=True)):
            assert weight.grad is None if expert % 3 else same_bits(weight.grad, one.to(BF16))

    @pytest.mark.parametrize("recompute", [False, True])
    def test_a_layer_reads_tokens_by_index(self, recompute: bool) -> None:
        """As a grouped_mlp of copies of the rows, whose incoming gradients are copies, too."""
        torch.manual_seed(3)
        tokens, experts, k = 90, 5, 2
        x, dy = torch.randn(tokens, HIDDEN).to(BF16), torch.randn(tokens, HIDDEN).to(BF16)
        weights = {
            "w1": torch.randn(experts, 2 * INTER, HIDDEN).to(BF16) / 8,
            "w2": torch.randn(experts, HIDDEN, INTER).to(BF16) / 8,
        }
        ids = torch.randint(0, experts, (tokens, k)).int()
        routing = glulam.Routing.from_topk(ids, torch.rand(tokens, k), experts)
        of_tokens, of_rows = ({name: w.clone().requires_grad_() for name, w in weights.items()} for _ in range(2))
        glulam.moe(x, routing, **of_tokens, recipe=RECIPE, recompute=recompute).backward(dy)
        rows, d_rows = (one[routing.token_of_row.long()] for one in (x, dy))
        scale = routing.weight_of_row
        glulam.grouped_mlp(rows, **of_rows, offs=routing.offs, row_scale=scale, recipe=RECIPE).backward(d_rows)
        assert all(same_bits(of_tokens[name].grad, of_rows[name].grad) for name in weights)


# Errors that docs/mxfp8-training.md tells ----------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs/mxfp8-training.md"
ROWS_OF_PAGE = [700, 20, 300, 4]
WIDTH, NARROW = 256, 128
Numbers = dict[str, list[float]]


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _scaled_operands(generator: torch.Generator) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the pairs (dy, x) that the docs page describes, by its words for them."""
    total = sum(ROWS_OF_PAGE)

    def both(rows: float = 0.0, columns: float = 0.0) -> tuple[Tensor, Tensor]:
        dy, x = (
            _normal(generator, total, WIDTH)
            * torch.exp(rows * _normal(generator, total, 1) + columns * _normal(generator, 1, WIDTH))
            for _ in range(2)
        )
        return dy, x

    dy, x = both()
    powers = torch.exp2(torch.randint(-10, 11, (total, 1), generator=generator).float())
    return {
        "1": both(),
        "columns lognormal, sigma 1": both(columns=1),
        "rows lognormal, sigma 1": both(rows=1),
        "rows lognormal, sigma 2": both(rows=2),
        "rows and columns lognormal, sigma 1": both(1, 1),
        "one row of dy in 32 times 1000": (dy * torch.where(torch.arange(total) % 32 == 0, 1e3, 1.0)[:, None], x),
        "eight columns of dy times 1000": (dy * torch.where(torch.arange(WIDTH) < 8, 1e3, 1.0), x),
        "rows of dy times 2^-10 to 2^10, of x times the inverse": (dy * powers, x / powers),
    }


def _relative(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def _errors_of_operands() -> Numbers:
    found = {}
    splits = torch.tensor(ROWS_OF_PAGE)
    for name, operands in _scaled_operands(torch.Generator().manual_seed(0)).items():
        dy, x = (one.to(BF16) for one in operands)
        exact = glulam.grouped_wgrad(dy.double(), x.double(), splits=splits)
        found[name] = [
            _relative(glulam.grouped_wgrad(dy, x, splits=splits, out_dtype=dtype, recipe=recipe), exact)
            for recipe, dtype in (("bf16", BF16), ("mxfp8_wgrad", BF16), ("mxfp8_wgrad", F32))
        ]
    return found


def _errors_of_an_mlp() -> Numbers:
    found, total = {}, sum(ROWS_OF_PAGE)
    for name, (rows, columns) in {
        "1": (0, 0), "rows lognormal, sigma 1": (1, 0), "columns lognormal, sigma 1": (0, 1)
    }.items():  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        x, dy = (
            _normal(generator, total, NARROW)
            * torch.exp(rows * _normal(generator, total, 1) + columns * _normal(generator, 1, NARROW))
            for _ in range(2)
        )
        w1, w2 = (_normal(generator, 4, rows, NARROW) / NARROW**0.5 for rows in (2 * NARROW, NARROW))
        given = {"x": x.to(BF16), "w1": w1.to(BF16), "w2": w2.to(BF16)}

        def gradients(recipe: str, given: dict[str, Tensor], dy: Tensor) -> tuple[Tensor, ...]:
            leaves = {key: value.detach().requires_grad_(key != "x") for key, value in given.items()}
            y = glulam.grouped_mlp(**leaves, splits=torch.tensor(ROWS_OF_PAGE), recipe=recipe)
            return torch.autograd.grad(y, (leaves["w1"], leaves["w2"]), dy)

        exact = gradients("bf16", {key: value.double() for key, value in given.items()}, dy.to(BF16).double())
        made = [gradients(recipe, given, dy.to(BF16)) for recipe in ("bf16", "mxfp8_blocks", "mxfp8_wgrad")]
        found[name] = [_relative(one[place], exact[place]) for place in range(2) for one in made]
    return found


@pytest.mark.parametrize(
    ("head", "numbers"), [("| dy and x |", _errors_of_operands), ("| x and dy |", _errors_of_an_mlp)]
)  # fmt: skip
def test_errors_are_those_that_the_page_tells(head: str, numbers: Callable[[], Numbers]) -> None:
    """To write them: GLULAM_GOLDEN=write python -m pytest tests/test_mxfp8_wgrad.py -k page."""
    text, found = PAGE.read_text(), numbers()
    begin = text.index("\n", text.index("|---", text.index(head))) + 1
    end = text.index("\n\n", begin)
    rows = [f"| {name} | " + " | ".join(f"{error:.1e}" for error in errors) + " |" for name, errors in found.items()]
    if os.environ.get("GLULAM_GOLDEN") == "write":
        PAGE.write_text(text[:begin] + "\n".join(rows) + text[end:])
        return
    told = [row.strip("| ").split(" | ") for row in text[begin:end].split("\n")]
    assert [name for name, *_ in told] == list(found)
    for (_, *errors), wanted in zip(told, found.values(), strict=True):
        assert [float(error) for error in errors] == pytest.approx(wanted, rel=0.1)
