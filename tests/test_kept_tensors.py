"""Tensors that layers derive from their quantised buffers are cached until the buffers change."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.nn.utils import parametrize, prune

import glulam
from glulam.nn import MoE
from glulam.nn.quantized_linear import LAYERS, QuantizedLinear
from glulam.recipes import RECIPES

RECIPES_OF_BUFFERS = [name for name, recipe in RECIPES.items() if type(recipe.weights) in LAYERS]
SIZES = (256, 256, 4, 2)
Made = Callable[[], int]


def layer(recipe: str) -> MoE:
    torch.manual_seed(0)
    return MoE(*SIZES, recipe=recipe, dtype=torch.bfloat16, shared_intermediate_size=128).requires_grad_(False)


def other(recipe: str) -> MoE:
    """Return a layer with different weights."""
    made = layer(recipe)
    torch.manual_seed(1)
    made.reset_parameters()
    return made


def tokens() -> Tensor:
    return torch.randn(8, SIZES[0], generator=torch.manual_seed(2)).bfloat16()


def fresh(module: MoE) -> Tensor:
    """Return the result of a copy of the module that has cached no tensors yet."""
    made = MoE(*SIZES, recipe=module.experts.recipe, dtype=torch.bfloat16, shared_intermediate_size=128)
    made.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
    return made.requires_grad_(False)(tokens())  # type: ignore[no-any-return]


def quantized(module: nn.Module) -> list[QuantizedLinear]:
    return [child for child in module.modules() if isinstance(child, QuantizedLinear)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Return a function that returns the number of tensors that layers derived since its last call."""
    count = 0

    def counted(of: Any) -> Any:
        def tensor_of(form: Any, parts: Any) -> Any:
            nonlocal count
            count += 1
            return of(form, parts)

        return tensor_of

    for kind in {next(base for base in kind.__mro__ if "tensor_of" in vars(base)) for kind in LAYERS}:
        monkeypatch.setattr(kind, "tensor_of", counted(kind.tensor_of))

    def taken() -> int:
        nonlocal count
        before, count = count, 0
        return before

    return taken


@pytest.mark.parametrize("recipe", RECIPES_OF_BUFFERS)
def test_a_tensor_is_made_once(recipe: str, made: Made) -> None:
    module = layer(recipe)
    first = module(tokens())
    assert made() == len(quantized(module)) == 4
    assert same_bits(module(tokens()), first) and not made()


def _assign(module: MoE, recipe: str) -> None:
    module.load_state_dict(other(recipe).state_dict(), assign=True)


def _copy_into(module: MoE, recipe: str) -> None:
    for buffer, value in zip(module.buffers(), other(recipe).buffers(), strict=True):
        buffer.copy_(value)


def _set_attributes(module: MoE, recipe: str) -> None:
    for child, donor in zip(quantized(module), quantized(other(recipe)), strict=True):
        for name in child.weight_names:
            setattr(child, name, getattr(donor, name))


def _set_data(module: MoE, recipe: str) -> None:
    for buffer, value in zip(module.buffers(), other(recipe).buffers(), strict=True):
        buffer.data = value


def _in_dictionaries(module: MoE, recipe: str) -> None:
    """Replace buffers in the modules' `_buffers`, as code that offloads weights from a GPU does."""
    for child, donor in zip(quantized(module), quantized(other(recipe)), strict=True):
        child._buffers.update(donor._buffers)


def _fold(module: MoE, recipe: str) -> None:
    module._apply(lambda tensor: tensor.clone())  # type: ignore[no-untyped-call]


CHANGES = [_assign, _copy_into, _set_attributes, _set_data, _in_dictionaries, _fold]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("recipe", RECIPES_OF_BUFFERS)
def test_other_buffers_are_read_from_the_next_forward_on(recipe: str, change: Callable[..., None]) -> None:
    module = layer(recipe)
    before = module(tokens())
    change(module, recipe)
    after = module(tokens())
    assert same_bits(after, fresh(module))
    assert same_bits(after, before) == (change is _fold)


@pytest.mark.parametrize("recipe", RECIPES_OF_BUFFERS)
def test_buffers_of_a_functional_call_serve_that_call(recipe: str) -> None:
    module, donor = layer(recipe), other(recipe)
    own, others = module(tokens()), donor(tokens())
    given = {**dict(donor.named_parameters()), **dict(donor.named_buffers())}
    for _ in range(2):
        assert same_bits(functional_call(module, given, (tokens(),)), others)
        assert same_bits(module(tokens()), own)


@pytest.mark.parametrize("change", [_assign, _set_attributes, _fold])
def test_buffers_that_were_replaced_are_freed_at_once(change: Callable[..., None]) -> None:
    module = layer("mxfp4_weight_only")
    module(tokens())
    old = [weakref.ref(getattr(child, name)) for child in quantized(module) for name in child.weight_names]
    change(module, "mxfp4_weight_only")
    assert not any(one() is not None for one in old)


def test_copies_make_tensors_of_their_own(made: Made) -> None:
    module = layer("mxfp4_weight_only")
    first = module(tokens())
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    made()
    for one in (copy.deepcopy(module), torch.load(saved, weights_only=False)):
        assert all(child._kept is None for child in quantized(one))
        assert same_bits(one(tokens()), first) and made() == 4
        for buffer in one.buffers():
            buffer.zero_()
        assert same_bits(module(tokens()), first) and not same_bits(one(tokens()), first)
        made()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_forward_without_gradients_leaves_tensors_that_train(mode: Callable[[], Any]) -> None:
    module = layer("mxfp4_weight_only")
    with mode():
        module(tokens())
    x = tokens().requires_grad_()
    module(x).sum().backward()
    wanted = tokens().requires_grad_()
    layer("mxfp4_weight_only")(wanted).sum().backward()
    assert x.grad is not None and wanted.grad is not None and same_bits(x.grad, wanted.grad)


@pytest.mark.parametrize("are_buffers_fake", [False, True])
def test_fake_tensors_are_not_kept(are_buffers_fake: bool) -> None:
    module = layer("mxfp4_weight_only")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(tokens())
        buffers = {name: mode.from_tensor(value) for name, value in module.named_buffers()} if are_buffers_fake else {}
        assert functional_call(module, buffers, (x,)).shape == x.shape
    assert all(child._kept is None for child in quantized(module))
    assert same_bits(module(tokens()), fresh(module))


def test_traces_make_tensors_of_their_own(made: Made) -> None:
    """A trace that held the tensor of an eager forward would read its buffers for ever."""
    module = layer("mxfp4_weight_only")
    first = module(tokens())
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert same_bits(compiled(tokens()), first)
    for child in quantized(module):
        child._buffers["weight_scale"] = child.weight_scale + 1
    assert not same_bits(compiled(tokens()), first) and same_bits(compiled(tokens()), fresh(module))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Shifted(nn.Module):
    """Parametrization that doubles every E8M0 scale."""

    def forward(self, scale: Tensor) -> Tensor:
        return scale + 1


def test_a_parametrized_buffer_is_read_at_every_forward() -> None:
    module, wanted = layer("mxfp4_weight_only"), layer("mxfp4_weight_only")
    module(tokens())
    parametrize.register_parametrization(module.experts.fc2, "weight_scale", Shifted(), unsafe=True)
    wanted.experts.fc2.weight_scale += 1
    for _ in range(2):
        assert same_bits(module(tokens()), wanted(tokens()))


@pytest.mark.parametrize("name", ["experts.fc1", "router"])
def test_a_parametrized_weight_serves_and_trains(name: str) -> None:
    make = lambda: MoE(64, 64, 4, 2, dtype=torch.float64)  # noqa: E731
    module, wanted = make(), make()
    wanted.load_state_dict(module.state_dict())
    parametrize.register_parametrization(module.get_submodule(name), "weight", Doubled())
    with torch.no_grad():
        wanted.get_parameter(f"{name}.weight").mul_(2)
    x = torch.randn(8, 64, dtype=torch.float64)
    assert torch.equal(module(x), wanted(x))
    for one in (module, wanted):
        one(x).square().sum().backward()
    original = module.get_parameter(f"{name}.parametrizations.weight.original")
    torch.testing.assert_close(original.grad, 2 * wanted.get_parameter(f"{name}.weight").grad)  # type: ignore[operator]


def test_a_pruned_router_chooses_by_what_is_left() -> None:
    module = MoE(64, 64, 4, 2, dtype=torch.float64)
    prune.l1_unstructured(module.router, "weight", 0.5)  # type: ignore[no-untyped-call]
    assert "weight" not in module.router._parameters
    module(x := torch.randn(8, 64, dtype=torch.float64))
    assert module.routing is not None
    wanted = glulam.route(nn.functional.linear(x, module.router.weight), 2)
    assert torch.equal(module.routing.ids, wanted.ids)


def test_a_forward_in_two_dimensions_returns_no_view_of_its_result() -> None:
    module = MoE(64, 64, 4, 2, dtype=torch.float64).requires_grad_(False)
    x = torch.randn(2, 4, 64, dtype=torch.float64)
    assert torch.equal(module(x).view(8, 64), module(x.view(8, 64)))
    assert module(x.view(8, 64))._base is None
