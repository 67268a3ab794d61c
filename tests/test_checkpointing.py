"""Activation checkpointing by torch.utils.checkpoint: same bits, argument checks, memory use, and a layer's routing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from support.fake_gpu import FakeGpu
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import glulam
from glulam.calls.arguments import Arguments
from glulam.nn import GroupedLinear, GroupedMLP, MoE

pytest_plugins = ["support.fixtures"]

E, H, I, ROWS = 4, 32, 16, 12  # noqa: E741
F64, BF16 = torch.float64, torch.bfloat16
Step = Callable[[Tensor], Tensor]


def selective(policy: Any, **options: Any) -> dict[str, Any]:
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, policy, **options)}


def always(policy: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    return lambda *_, **__: policy


WAYS: dict[str, dict[str, Any]] = {
    "whole": {"use_reentrant": False},
    "whole, to the end": {"use_reentrant": False, "early_stop": False},
    "reentrant": {"use_reentrant": True},
    "save GEMMs": selective([torch.ops.aten.mm.default, torch.ops.aten.addmm.default]),
    "save all": selective(always(CheckpointPolicy.MUST_SAVE), allow_cache_entry_mutation=True),
    "prefer to save": selective(always(CheckpointPolicy.PREFER_SAVE), allow_cache_entry_mutation=True),
    "prefer to recompute": selective(always(CheckpointPolicy.PREFER_RECOMPUTE)),
    "recompute all": selective(always(CheckpointPolicy.MUST_RECOMPUTE)),
}
BY_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def offs() -> Tensor:
    return torch.tensor([3, 3, 7, ROWS], dtype=torch.int32)


def grouped_mm(dtype: torch.dtype) -> tuple[nn.Module, Step]:
    module = GroupedLinear(E, H, H, bias=True, dtype=dtype)
    return module, lambda x: glulam.grouped_mm(x, module.weight, offs=offs(), bias=module.bias)


def grouped_mlp(dtype: torch.dtype) -> tuple[nn.Module, Step]:
    module = GroupedMLP(E, H, I, bias=True, dtype=dtype)
    return module, lambda x: module(x, offs=offs())


def moe(dtype: torch.dtype) -> tuple[nn.Module, Step]:
    module = MoE(H, I, E, 2, shared_intermediate_size=I, shared_gate=True, dtype=dtype)
    return module, module


MODULES = {"grouped_mm": grouped_mm, "GroupedMLP": grouped_mlp, "MoE": moe}


def made(kind: str, dtype: torch.dtype) -> tuple[nn.Module, Step]:
    torch.manual_seed(1)
    return MODULES[kind](dtype)


def batch(dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(ROWS, H, generator=torch.Generator().manual_seed(3), dtype=F64).to(dtype)


def results(module: nn.Module, step: Step, x: Tensor) -> dict[str, Tensor]:
    """Run a step; return its result and all gradients."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = step(x)
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}  # type: ignore[dict-item]


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        assert same_bits(got[name], value), name


def between_others(step: Step) -> Step:
    return lambda x: torch.tanh(step(torch.sin(x)))


PLACES: dict[str, Callable[[Step], Step]] = {"alone": lambda step: step, "between others": between_others}


@BY_WAY
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("kind", MODULES)
class TestBits:
    def check(self, kind: str, place: Callable[[Step], Step], way: dict[str, Any], dtype: torch.dtype) -> None:
        module, step = made(kind, dtype)
        step = place(step)
        wanted = results(module, step, batch(dtype))
        assert all(value.any() for value in wanted.values())
        for _ in range(2):
            assert_same(results(module, lambda x: checkpoint(step, x, **way), batch(dtype)), wanted)

    def test_on_the_cpu(self, kind: str, place: Callable[[Step], Step], way: dict[str, Any]) -> None:
        self.check(kind, place, way, F64)

    def test_on_the_host_path(
        self, kind: str, place: Callable[[Step], Step], way: dict[str, Any], fake_gpu: FakeGpu
    ) -> None:
        self.check(kind, place, way, BF16)


@BY_WAY
@pytest.mark.parametrize("delay", [False, True])
def test_main_grads_get_each_gradient_once(way: dict[str, Any], delay: bool) -> None:
    torch.manual_seed(1)
    module = GroupedMLP(E, H, I, dtype=F64, delay_wgrad=delay)
    plain = GroupedMLP(E, H, I, dtype=F64)
    plain.load_state_dict(module.state_dict())
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, requires_grad=False)
    x = batch().requires_grad_()
    (plain(x, offs=offs()) * 3).square().sum().backward()
    (checkpoint(lambda x: module(x, offs=offs()), x, **way) * 3).square().sum().backward()
    if delay:
        module.backward_dw()
        assert not module.has_delayed()
    for parameter, wanted in zip(module.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is None and same_bits(parameter.main_grad, wanted.grad)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List that gets the operator of each call whose arguments are checked again after a failed launch."""
    found: list[str] = []
    monkeypatch.setattr(Arguments, "check_after_failure", lambda call: found.append(call.op))
    return found


class Stop(Exception):
    """Stand-in for the exception by which torch ends a recomputation."""


def stop(_: Tensor) -> Tensor:
    raise Stop


@pytest.mark.parametrize("kind", MODULES)
class TestAnEarlyEndIsNoFailure:
    """A saved-tensor hook that raises within a call is not an argument's fault, so arguments are not checked again."""

    def check(self, kind: str, dtype: torch.dtype, judged: list[str]) -> None:
        module, step = made(kind, dtype)
        for _ in range(2):  # the second on a plan that is kept
            results(module, lambda x: checkpoint(step, x, use_reentrant=False), batch(dtype))
            with pytest.raises(Stop), torch.autograd.graph.saved_tensors_hooks(stop, stop):
                step(batch(dtype).requires_grad_())
        assert not judged

    def test_on_the_cpu(self, kind: str, judged: list[str]) -> None:
        self.check(kind, F64, judged)

    def test_on_the_host_path(self, kind: str, judged: list[str], fake_gpu: FakeGpu) -> None:
        self.check(kind, BF16, judged)


class Saving(torch.autograd.Function):
    """Identity function that saves a copy of x for its backward."""

    saved: list[StorageWeakRef] = []
    alive_in_backward: list[int] = []

    @classmethod
    def alive(cls) -> int:
        return sum(not one.expired() for one in cls.saved)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        copy = x.clone()
        ctx.save_for_backward(copy)
        Saving.saved.append(StorageWeakRef(copy.untyped_storage()))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        saved = ctx.saved_tensors
        Saving.alive_in_backward.append(Saving.alive())
        del saved
        return dy


@pytest.fixture
def saving() -> Iterator[type[Saving]]:
    for kept in (Saving.saved, Saving.alive_in_backward):
        kept.clear()
    yield Saving


def functional(module: MoE, x: Tensor) -> Tensor:
    routing = glulam.route(F.linear(x, module.router.weight), module.top_k)
    return glulam.moe(x, routing, module.experts.fc1.weight, module.experts.fc2.weight)


class TestMemory:
    BLOCKS = 6

    def layers(self) -> list[MoE]:
        torch.manual_seed(1)
        return [MoE(H, I, E, 2, dtype=F64) for _ in range(self.BLOCKS)]

    @pytest.mark.parametrize("with_loss", [False, True])
    @pytest.mark.parametrize("call", [functional, lambda module, x: module(x)], ids=["functions", "module"])
    def test_one_block_is_recomputed_at_a_time(
        self, call: Callable[..., Tensor], with_loss: bool, saving: type[Saving]
    ) -> None:
        """What is saved before a router is freed with its block; so it is with an auxiliary loss outside of blocks."""
        layers = self.layers()
        for _ in range(2):
            saving.alive_in_backward.clear()
            h = batch().requires_grad_()
            for layer in layers:
                h = checkpoint(lambda h, layer=layer: h + call(layer, Saving.apply(h)), h, use_reentrant=False)
            loss = h.square().sum()
            if with_loss and call is not functional:
                loss = loss + sum(glulam.load_balancing_loss(layer.routing) for layer in layers)
            assert saving.alive() == 0
            loss.backward()
            assert len(saving.alive_in_backward) == self.BLOCKS and max(saving.alive_in_backward) <= 1
            assert saving.alive() == 0

    def test_without_checkpoints_backward_frees_what_was_saved(self, saving: type[Saving]) -> None:
        h = batch().requires_grad_()
        layers = self.layers()
        for layer in layers:
            h = h + layer(Saving.apply(h))
        assert saving.alive() == self.BLOCKS
        (h.square().sum() + sum(glulam.load_balancing_loss(layer.routing) for layer in layers)).backward()
        assert saving.alive() == 0 and all(layer.routing is not None for layer in layers)


class TestRouting:
    def layer(self) -> MoE:
        torch.manual_seed(1)
        return MoE(H, I, E, 2, dtype=F64)

    def test_it_is_the_last_forwards_after_a_backward(self) -> None:
        layer = self.layer()
        y = checkpoint(layer, batch().requires_grad_(), use_reentrant=False)
        routing = layer.routing
        y.sum().backward()
        assert layer.routing is routing
        layer(batch())
        assert layer.routing is not routing

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_losses_in_a_block_are_of_its_own_batch(self, reentrant: bool) -> None:
        """Two batches are under way, and a block's loss is computed again, of the routing of the batch that it had."""
        layer = self.layer()

        def block(x: Tensor) -> tuple[Tensor, Tensor]:
            y = x + layer(torch.sin(x))
            return y, glulam.load_balancing_loss(layer.routing)

        def grads(call: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
            layer.zero_grad()
            xs = [(batch() * factor).requires_grad_() for factor in (1.0, -0.5)]
            losses = [y.square().sum() + 10 * loss for y, loss in map(call, xs)]
            found = []
            for x, loss in zip(xs, losses, strict=True):
                loss.backward()
                found += [x.grad, *[p.grad.clone() for p in layer.parameters()]]
            return found  # type: ignore[return-value]

        wanted = grads(block)
        got = grads(lambda x: checkpoint(block, x, use_reentrant=reentrant))
        assert all(same_bits(one, other) for one, other in zip(got, wanted, strict=True))

    def test_a_loss_after_a_backward_that_keeps_its_graph(self) -> None:
        layer = self.layer()

        def grad(call: Step) -> Tensor:
            layer.zero_grad()
            call(batch().requires_grad_()).square().sum().backward(retain_graph=True)
            glulam.load_balancing_loss(layer.routing).backward()
            assert layer.router.weight.grad is not None
            return layer.router.weight.grad.clone()

        wanted = grad(layer)
        assert same_bits(grad(lambda x: checkpoint(layer, x, use_reentrant=False)), wanted)

    def test_compiled_with_its_checkpoint(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch takes attributes that are set in a checkpoint where its option says that backward sets none again."""
        if not hasattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
            pytest.skip("this torch has no such option")
        monkeypatch.setattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint", True)
        layer = self.layer()
        wanted = results(layer, layer, batch())
        torch.compiler.reset()
        step = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
        got = results(layer, step, batch())
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value)
        assert layer.routing is not None and layer.routing.weights.shape == (ROWS, 2)
        torch.compiler.reset()
