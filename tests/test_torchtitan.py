"""torchtitan's mixture of experts with Glulam's experts, against its own, on the CPU."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytest.importorskip("torchtitan")
integration = importlib.import_module("glulam.integrations.torchtitan")
from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter  # noqa: E402
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher  # noqa: E402

DIM, HIDDEN, EXPERTS, TOP_K = 32, 48, 6, 2


def moe_config() -> Any:
    experts = GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS)
    dispatcher = LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
    gate = Linear.Config(in_features=DIM, out_features=EXPERTS, bias=False)
    return MoE.Config(
        num_experts=EXPERTS,
        routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher),
        router=TokenChoiceTopKRouter.Config(num_experts=EXPERTS, gate=gate, top_k=TOP_K),
    )


def layers() -> list[Any]:
    """Return the stock layer and the same layer with Glulam's override, with equal weights."""
    torch.manual_seed(0)
    stock = moe_config().build()
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=DIM**-0.5)
    config = copy.deepcopy(moe_config())
    apply_overrides(OverrideConfig(imports=["glulam.integrations.torchtitan.grouped_experts"]), config)
    ours = config.build()
    assert type(ours.routed_experts.inner_experts) is integration.GlulamExperts
    ours.load_state_dict(stock.state_dict())
    return [stock, ours]


def results(layer: Any, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    (y.sin().sum()).backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def exact(stock: Any, x: Tensor) -> dict[str, Tensor]:
    """Compute the layer in float64 from its bfloat16 weights, with the stock layer's choices."""
    experts = stock.routed_experts.inner_experts
    leaves = [w.detach().bfloat16().double().requires_grad_() for w in (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD)]
    scores, ids, _ = stock.router(x, stock.expert_bias_E)
    tokens = x.bfloat16().double().flatten(0, 1)
    y = torch.zeros_like(tokens)
    for expert, (gate, down, up) in enumerate(zip(*leaves, strict=True)):
        token, choice = (ids.flatten(0, 1) == expert).nonzero(as_tuple=True)
        made = (nn.functional.silu(tokens[token] @ gate.mT) * (tokens[token] @ up.mT)) @ down.mT
        y = y.index_add(0, token, made * scores.flatten(0, 1)[token, choice, None].double())
    y.view(x.shape).sin().sum().backward()
    names = ("w1_EFD", "w2_EDF", "w3_EFD")
    grads = {f"routed_experts.inner_experts.{n}": leaf.grad for n, leaf in zip(names, leaves, strict=True)}
    return {"y": y.detach().view(x.shape), **grads}


def test_the_layer_and_its_gradients_err_no_more_than_the_stock_one() -> None:
    stock, ours = layers()
    x = torch.randn(2, 23, DIM, generator=torch.Generator().manual_seed(1))
    wanted = exact(stock, x)
    theirs, got = results(stock, x), results(ours, x)
    assert got.keys() == theirs.keys()
    for name, value in wanted.items():
        scale = float(value.norm())
        errors = [float((found[name].double() - value).norm()) / scale for found in (got, theirs)]
        assert scale > 0.1 and errors[1] < 0.02
        assert errors[0] <= 2 * errors[1] + 1e-5, name
    torch.testing.assert_close(got["x"], theirs["x"], rtol=0.05, atol=0.05 * float(theirs["x"].abs().max()))


def test_state_dicts_are_the_stock_ones() -> None:
    stock, ours = layers()
    assert ours.state_dict().keys() == stock.state_dict().keys()
    for name, value in stock.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


def test_an_expert_without_tokens_gets_no_gradient() -> None:
    experts = layers()[1].routed_experts.inner_experts
    x = torch.randn(5, DIM)
    experts(x, torch.tensor([2, 0, 3, 0, 0, 0])).sum().backward()
    for parameter in experts.parameters():
        assert bool(parameter.grad[[0, 2]].any()) and not bool(parameter.grad[[1, 3, 4, 5]].any())


def test_experts_of_other_kinds_are_left_alone() -> None:
    class Others(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    config = moe_config()
    config.routed_experts.inner_experts = Others.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS)
    apply_overrides(OverrideConfig(imports=["glulam.integrations.torchtitan.grouped_experts"]), config)
    assert type(config.routed_experts.inner_experts) is Others.Config


@pytest.fixture
def group() -> Iterator[DeviceMesh]:
    """Device mesh of one rank, this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_parameters_may_be_sharded(group: DeviceMesh) -> None:
    """By FSDP2, which frees what it has gathered after forward, and gathers it again where backward begins."""
    alone, ours = layers()[1], layers()[1]
    experts = ours.routed_experts.inner_experts
    for module in (experts, ours):
        fully_shard(module, mesh=group, reshard_after_forward=True)
    sgds = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (ours, alone)]
    for step in range(2):
        x = torch.randn(2, 23, DIM, generator=torch.Generator().manual_seed(step))
        y, wanted = ours(x), alone(x)
        assert isinstance(experts.w1_EFD, DTensor) and torch.equal(y, wanted)
        y.sin().sum().backward()
        wanted.sin().sum().backward()
        for name, parameter in ours.named_parameters():
            grad = alone.get_parameter(name).grad
            assert torch.equal(parameter.grad.full_tensor(), grad) and grad.any(), name
        for sgd in sgds:
            sgd.step()
            sgd.zero_grad()
