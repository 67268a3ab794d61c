"""moe_of_choices, moe on another router's choices: the calls that run as one kernel, and those that run as two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.checks import torch_arguments
from support.fake_gpu import FakeGpu
from support.hopper import SERVED
from torch import Tensor

import glulam
from cute_kernels.chains import SORTED_EXPERTS
from glulam import Routing
from glulam.host import workspace
from glulam.host.experts import GateUp
from glulam.host.groups import OFFS_OF_CALL
from glulam.layer.choices import MoeOfChoicesCall, QuantizedMoeOfChoicesCall, moe_of_choices
from glulam.layer.routing import MOST_SORTED

pytest_plugins = ["support.fixtures"]

BF16 = torch.bfloat16
EXPERTS, K, HIDDEN, INTER = 6, 3, 64, 32


def weights(experts: int = EXPERTS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"w1": (experts, 2 * INTER, HIDDEN), "w2": (experts, HIDDEN, INTER)}
    return {name: (torch.randn(shape, generator=generator) / 4).to(BF16) for name, shape in shapes.items()}


def tokens(
    count: int, ids: torch.dtype = torch.int64, of_weights: torch.dtype = torch.float32, experts: int = EXPERTS
) -> dict[str, Any]:
    """Return tokens whose choices include invalid ids (-1, and from `experts` on); the third token has no expert
    here.
    """
    generator = torch.Generator().manual_seed(count)
    chosen = torch.randint(-1, experts + 1, (count, K), generator=generator, dtype=ids)
    chosen[2:3] = experts
    return {
        "x": torch.randn(count, HIDDEN, generator=generator).to(BF16),
        "ids": chosen,
        "weights": (torch.rand(count, K, generator=generator) + 0.5).to(of_weights),
        "num_experts": experts,
    }


def by_two_calls(given: dict[str, Any], **options: Any) -> Tensor:
    made = Routing.from_topk(given["ids"], given["weights"], given["num_experts"])
    return glulam.moe(given["x"], made, **options)


def poison() -> None:
    """Fill the workspace with bytes that are -1 as offs and rows, and NaN in any format."""
    for buffer in workspace.stats().buffers.values():
        buffer.fill_(0xFF)


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize("of_weights", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
def test_same_bits_as_of_two_calls(ids: torch.dtype, of_weights: torch.dtype, recipe: str, anywhere: Any) -> None:
    """One of kernels, and one more by a recipe that rounds tokens; found again, and by another number of tokens."""
    options = {**weights(), "recipe": recipe}
    for count in (17, 23, 23, 1, 0):
        given = tokens(count, ids, of_weights)
        wanted = by_two_calls(given, **options)
        if anywhere is not None:
            anywhere.launches.clear()
        poison()
        made = moe_of_choices(**given, **options)
        assert made.equal(wanted) and made.dtype == BF16 and made.shape == (count, HIDDEN)
        assert not count or made.abs().max() > 0.1
        assert count < 3 or not made[2].any()
        if anywhere is not None:
            assert len(anywhere.launches) == (count > 0) * (1 + (recipe == "mxfp8_exact"))
        out = torch.full_like(wanted, torch.nan)
        assert moe_of_choices(**given, **options, out=out) is out and out.equal(wanted)


@pytest.mark.parametrize("expert", [-1, 0, EXPERTS - 1, EXPERTS, 2**32])
def test_all_to_one_or_none(expert: int, fake_gpu: FakeGpu) -> None:
    given, options = tokens(20), weights()
    given["ids"].fill_(expert)
    poison()
    assert moe_of_choices(**given, **options).equal(by_two_calls(given, **options))


def test_every_form_of_weights(fake_gpu: FakeGpu) -> None:
    given, plain = tokens(20), weights()
    w1, w2 = plain["w1"], plain["w2"]
    halves = GateUp(*(half.contiguous() for half in w1.chunk(2, dim=1)))
    forms: list[dict[str, Any]] = [
        {"w1": list(w1.clone()), "w2": list(w2.clone())},
        {"w1": halves, "w2": w2},
        {"w1": w1.mT.contiguous(), "w2": w2.mT.contiguous(), "transpose_w": True},
        {**plain, "b1": w1[:, :, 0].contiguous(), "b2": list(w2[:, :, 0].clone())},
        {**plain, "activation": "clamped_swiglu", "glu_layout": "interleaved", "limit": 1.5, "offset": 0.5},
    ]
    for options in forms:
        wanted = by_two_calls(given, **options)
        for _ in range(2):
            fake_gpu.launches.clear()
            assert moe_of_choices(**given, **options).equal(wanted)
            assert len(fake_gpu.launches) == 1


def test_a_token_with_an_odd_stride(fake_gpu: FakeGpu) -> None:
    """By a plan for more tokens, too."""
    options = weights()
    for count in (5, 1):
        given = tokens(count)
        wanted = moe_of_choices(**given, **options)
    given["x"] = given["x"].as_strided((1, HIDDEN), (1, 1))
    assert moe_of_choices(**given, **options).equal(wanted)


def test_offs_are_those_of_the_call(fake_gpu: FakeGpu) -> None:
    """So that no GEMM reads them before they are written."""
    given, options = tokens(4), weights()
    moe_of_choices(**given, **options)
    assert fake_gpu.launches[-1]["group_form"] == OFFS_OF_CALL and fake_gpu.launches[-1]["ids"]
    by_two_calls(given, **options)
    assert fake_gpu.launches[-1]["group_form"] != OFFS_OF_CALL and not fake_gpu.launches[-1]["ids"]


def test_memory_of_a_graph_is_its_own(fake_gpu: FakeGpu) -> None:
    given, options = tokens(4), weights()
    wanted = moe_of_choices(**given, **options)
    workspace.forget()
    fake_gpu.capturing, fake_gpu.stream = True, 5
    assert moe_of_choices(**given, **options).equal(wanted)
    assert not workspace.stats().buffers


def test_others_are_two_calls(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more choices or experts, and where a gradient is recorded: it equals moe's."""
    many = tokens(MOST_SORTED // K + 1)
    of_many = tokens(4, experts=SORTED_EXPERTS + 1)
    for given, options in ((many, weights()), (of_many, weights(SORTED_EXPERTS + 1))):
        fake_gpu.launches.clear()
        made = moe_of_choices(**given, **options)
        assert len(fake_gpu.launches) == 2 and made.equal(by_two_calls(given, **options))
    options = weights()
    for name in ("x", "weights", "w1", "w2"):
        given = tokens(20)
        trained = (given if name in given else options)[name].requires_grad_()
        gradients = [
            torch.autograd.grad(layer.float().square().sum(), trained)[0]
            for layer in (moe_of_choices(**given, **options), by_two_calls(given, **options))
        ]
        assert gradients[0].equal(gradients[1]) and gradients[0].abs().max() > 1e-3
        with torch.no_grad():
            fake_gpu.launches.clear()
            moe_of_choices(**given, **options)
            assert len(fake_gpu.launches) == 1
        options = weights()


@pytest.mark.parametrize("recipe", SERVED)
def test_a_new_number_of_tokens_is_checked_no_more(
    recipe: str, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    kind = MoeOfChoicesCall if recipe == "bf16" else QuantizedMoeOfChoicesCall
    check = kind.check
    monkeypatch.setattr(kind, "check", lambda call: checked.append(call.num_rows) or check(call))
    options = {**weights(), "recipe": recipe}
    for count in (4, 5):
        moe_of_choices(**tokens(count), **options)
    assert checked == [12] or (checked == [12, 15] and recipe != "bf16")  # the first prepares weights
    checked.clear()
    for count in (7, 8, 1, 7):
        given = tokens(count)
        assert moe_of_choices(**given, **options).equal(by_two_calls(given, **options))
    assert not checked
    with pytest.raises(ValueError, match=r"moe: ids has shape \[9, 3\]; it must be \[8, 3\]"):
        moe_of_choices(**{**tokens(9), "x": tokens(8)["x"]}, **options)


@pytest.mark.parametrize("recipe", SERVED)
def test_one_graph(recipe: str, anywhere: Any) -> None:
    torch.compiler.reset()
    options = weights()

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe_of_choices(x, ids, weights, EXPERTS, **options, recipe=recipe)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for count in (20, 7):
        given = tuple(tokens(count)[name] for name in ("x", "ids", "weights"))
        assert compiled(*given).equal(layer(*given))


@pytest.mark.parametrize(
    "name", ["moe_of_choices", "moe_of_choices_out", "moe_of_choices_mxfp8", "moe_of_choices_mxfp8_out"]
)
def test_opcheck(name: str) -> None:
    given = {**tokens(20), **weights()}
    if name.endswith("_out"):
        given["out"] = torch.empty_like(given["x"])
    listed = {"w1": [given["w1"]], "w2": [given["w2"]], "id_weights": given.pop("weights")}
    recipe = {"recipe": "mxfp8"} if "mxfp8" in name else {}
    arguments = torch_arguments(name, **{**given, **listed, **recipe})
    torch.library.opcheck(getattr(torch.ops.glulam, name).default, arguments)


@pytest.mark.parametrize("name", ["moe_of_choices", "moe_of_choices_mxfp8"])
def test_its_operator_has_no_gradient(name: str, anywhere: Any) -> None:
    given = {**tokens(20), **weights()}
    given["x"].requires_grad_()
    listed = {"w1": [given["w1"]], "w2": [given["w2"]], "id_weights": given.pop("weights")}
    recipe = {"recipe": "mxfp8"} if name.endswith("mxfp8") else {}
    with pytest.raises(glulam.GradientNotSupported, match="call glulam.moe of a Routing.from_topk"):
        getattr(torch.ops.glulam, name)(*torch_arguments(name, **{**given, **listed, **recipe}))


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": torch.zeros(4, 3)}, TypeError, "ids is torch.float32"),
        ({"ids": torch.zeros(5, 3, dtype=torch.int64)}, ValueError, r"weights has shape \[4, 3\]; it must be \[5, 3\]"),
        ({"x": torch.zeros(5, HIDDEN, dtype=BF16)}, ValueError, r"ids has shape \[4, 3\]; it must be \[5, 3\]"),
        ({"weights": torch.zeros(4, 2)}, ValueError, r"weights has shape \[4, 2\]; it must be \[4, 3\]"),
        ({"weights": torch.zeros(4, 3, dtype=torch.float64)}, TypeError, "weights is torch.float64"),
        ({"num_experts": 7}, ValueError, "num_experts is 7, but w1 has 6 experts"),
        ({"w2": torch.zeros(6, 64, 64, dtype=BF16)}, ValueError, r"w2 has shape \[6, 64, 64\]"),
        ({"recipe": "mxfp6"}, ValueError, "recipe is 'mxfp6'; choose one of bf16, mxfp8"),
        ({"transpose_w": 1}, (TypeError, ValueError), "transpose_w"),
        ({"out": torch.zeros(5, HIDDEN, dtype=BF16)}, ValueError, "out has shape"),
    ],
)
def test_bad_input(
    recipe: str, change: dict[str, Any], error: type[Exception], message: str, fake_gpu: FakeGpu
) -> None:
    right = {**tokens(4), **weights(), "recipe": recipe}
    moe_of_choices(**right)  # what is known of a right one serves no wrong one
    fake_gpu.launches.clear()
    with pytest.raises(error, match=f"moe: {message}"):
        moe_of_choices(**{**right, **change})
    assert not fake_gpu.launches
