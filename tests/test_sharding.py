"""Modules and operators under PyTorch's sharding (FSDP2, DDP, DTensor) on two ranks of a gloo group, against one
process.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.rank_cases import RankCases
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import glulam
from glulam.distributed import ExpertParallel, expert_parameters, shard_state_dict
from glulam.host.experts import GateUp
from glulam.nn import GroupedLinear, GroupedMLP, MoE

CASES = RankCases("test_sharding")
WORLD = 2
H, INNER, E, K, N = 16, 12, 6, 2, 11
"""Hidden and inner width, experts, choices of a token, tokens."""
F64 = torch.float64


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return CASES.run(WORLD, tmp_path_factory.mktemp("ranks"))


def some(*shape: int, seed: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape or (WORLD,), mesh_dim_names=("dp", "tp")[: len(shape or (WORLD,))])


class Block(nn.Module):
    """A norm, an MoE layer and a residual connection."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        given: dict[str, Any] = {"shared_intermediate_size": 8, "shared_gate": True, "dtype": F64, **options}
        self.norm = nn.LayerNorm(H, dtype=given["dtype"])
        self.moe = MoE(H, INNER, E, K, **given)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(self.norm(x))
        return y


class Model(nn.Module):
    """Two blocks and a last layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.last = nn.Linear(H, 3, dtype=options.get("dtype", F64))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.last(x)
        return y


def seeded(module: nn.Module) -> nn.Module:
    """Set equal weights on every rank, with routers whose logits differ by expert; return the module."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            scale = 0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(some(*parameter.shape, seed=seed, dtype=parameter.dtype) * scale)
    return module


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def loss_of(y: Tensor) -> Tensor:
    return (y.double().sin() * torch.arange(1, y.shape[-1] + 1)).sum()


def tokens_of(rank: int, dtype: torch.dtype = F64) -> Tensor:
    return some(N + rank, H, seed=100 + rank, dtype=dtype)


def mean_gradients(model: nn.Module, call: Callable[[nn.Module, int], Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the results for each rank's tokens, and the gradients averaged over ranks."""
    results = [call(model, rank) for rank in range(WORLD)]
    for y in results:
        loss_of(y).backward()
    grads = {n: None if p.grad is None else p.grad / WORLD for n, p in model.named_parameters()}
    return [y.detach() for y in results], grads


def on_tokens(model: nn.Module, rank: int, dtype: torch.dtype = F64) -> Tensor:
    y: Tensor = model(tokens_of(rank, dtype))
    return y


def assert_like_unsharded(
    alone: nn.Module, sharded: nn.Module, call: Callable[[nn.Module, int], Tensor] = on_tokens, tolerance: float = 1e-10
) -> None:
    """Compare forward and gradients with an unsharded module, then forward again after an optimizer step."""
    rank = dist.get_rank()
    for _ in range(2):
        wanted, grads = mean_gradients(alone, call)
        y = call(sharded, rank)
        torch.testing.assert_close(y, wanted[rank], rtol=tolerance, atol=tolerance)
        loss_of(y).backward()
        found = {clean(n): p for n, p in sharded.named_parameters()}
        assert found.keys() == grads.keys()
        for name, parameter in found.items():
            if grads[name] is None:
                assert parameter.grad is None, name
            else:
                got = full(parameter.grad)
                torch.testing.assert_close(
                    got, grads[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
                )
        assert any(g is not None and bool(g.any()) for g in grads.values())
        with torch.no_grad():
            for name, parameter in found.items():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
                    alone.get_parameter(name).sub_(grads[name], alpha=0.01)
                parameter.grad = alone.get_parameter(name).grad = None


def clean(name: str) -> str:
    """Return a parameter's name without its wrappers' prefixes."""
    for part in ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module."):
        name = name.replace(part, "")
    return name


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    return seeded(make()), seeded(make())


# FSDP2


@CASES
def fsdp2_of_a_model_as_a_whole() -> None:
    """Check FSDP2 over all ranks, and over one mesh dimension with replicas along the other (HSDP)."""
    for on in (mesh(), mesh(2, 1)):
        alone, model = pair(Model)
        assert_like_unsharded(alone, fully_shard(model, mesh=on))


@CASES
def fsdp2_gathers_for_backward_if_a_layers_result_is_written() -> None:
    """Check that FSDP2's backward hook on a layer's result survives an in-place write, which it would not if the result
    were a view.
    """

    def written(module: nn.Module, rank: int) -> Tensor:
        y: Tensor = module(some(2, N, H, seed=rank))
        return y.mul_(2).add_(1)

    alone, module = pair(functools.partial(MoE, H, INNER, E, K, dtype=F64))
    assert_like_unsharded(alone, fully_shard(module, mesh=mesh(), reshard_after_forward=True), written)


@CASES
def fsdp2_leaves_experts_of_each_rank_alone() -> None:
    """Check that experts split over ranks have the full gradients of all tokens, while FSDP2 shards the rest."""
    parallel = ExpertParallel(None, E, K, H, N + 1, dtype=F64)
    alone = seeded(MoE(H, INNER, E, K, dtype=F64))
    module = MoE(H, INNER, E, K, parallel=parallel, dtype=F64)
    module.load_state_dict(shard_state_dict(alone.state_dict(), parallel))
    own = expert_parameters(module)
    fully_shard(module, mesh=mesh(), ignored_params=set(own.values()))
    wanted, grads = mean_gradients(alone, on_tokens)
    y = on_tokens(module, dist.get_rank())
    torch.testing.assert_close(y, wanted[dist.get_rank()], rtol=1e-10, atol=1e-10)
    loss_of(y).backward()
    for name, parameter in module.named_parameters():
        exact = (
            grads[name][parallel.first : parallel.first + parallel.num_local] * WORLD if name in own else grads[name]
        )
        torch.testing.assert_close(full(parameter.grad), exact, rtol=1e-10, atol=1e-10)


@CASES
def fsdp2_of_each_block() -> None:
    for reshard in (True, False):
        alone, model = pair(functools.partial(Model, choice_bias=True, bias=True))
        for block in model.blocks:
            fully_shard(block, mesh=mesh(), reshard_after_forward=reshard)
        assert_like_unsharded(alone, fully_shard(model, mesh=mesh()))


@CASES
def fsdp2_of_experts_that_are_parameters_apart() -> None:
    alone, model = pair(functools.partial(Model, packed=False))
    for block in model.blocks:
        fully_shard(block, mesh=mesh())
    assert_like_unsharded(alone, fully_shard(model, mesh=mesh()))


def fsdp2_of_parts(*paths: str, **options: Any) -> None:
    alone, model = pair(functools.partial(Model, **options))
    for block in model.blocks:
        for path in paths:
            fully_shard(block.get_submodule(path), mesh=mesh())
        fully_shard(block, mesh=mesh())
    assert_like_unsharded(alone, fully_shard(model, mesh=mesh()))


@CASES
def fsdp2_of_experts_apart() -> None:
    fsdp2_of_parts("moe.experts")
    fsdp2_of_parts("moe.experts", packed=False, bias=True)


@CASES
def fsdp2_of_the_router_apart() -> None:
    fsdp2_of_parts("moe.router")


@CASES
def fsdp2_of_the_shared_expert_and_its_gate_apart() -> None:
    fsdp2_of_parts("moe.shared", "moe.shared_gate")


@CASES
def fsdp2_of_an_mlps_layers_apart() -> None:
    fsdp2_of_parts("moe.experts.fc1", "moe.experts.fc2")


def on_rows(module: nn.Module, rank: int) -> Tensor:
    offs = torch.tensor([2, 2, 5, 8, 9, N + rank], dtype=torch.int32)
    y: Tensor = module(tokens_of(rank), offs=offs)
    return y


@CASES
def fsdp2_of_grouped_layers_alone() -> None:
    for packed in (True, False):
        makes: list[Callable[[], nn.Module]] = [
            lambda p=packed: GroupedLinear(E, H, INNER, bias=True, packed=p, dtype=F64),
            lambda p=packed: GroupedMLP(E, H, INNER, bias=True, packed=p, dtype=F64),
            lambda p=packed: GroupedMLP(E, H, INNER, packed=p, recompute=True, dtype=F64),
        ]
        for make in makes:
            alone, module = pair(make)
            assert_like_unsharded(alone, fully_shard(module, mesh=mesh()), on_rows)


@CASES
def fsdp2_of_an_mlps_layers_within_it() -> None:
    alone, module = pair(lambda: GroupedMLP(E, H, INNER, bias=True, dtype=F64))
    for layer in (module.fc1, module.fc2):
        fully_shard(layer, mesh=mesh())
    assert_like_unsharded(alone, fully_shard(module, mesh=mesh()), on_rows)


@CASES
def fsdp2_with_mixed_precision() -> None:
    """Check FSDP2 with parameters gathered in bfloat16, router logits in float32, and gradients reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    alone, model = pair(functools.partial(Model, dtype=torch.float32, router_dtype=torch.float32, choice_bias=True))
    alone = alone.bfloat16()
    for block in model.blocks:
        fully_shard(block, mesh=mesh(), mp_policy=policy)
    fully_shard(model, mesh=mesh(), mp_policy=policy)
    wanted, grads = mean_gradients(alone, functools.partial(on_tokens, dtype=torch.bfloat16))
    y = model(tokens_of(dist.get_rank(), torch.float32))
    assert y.dtype == torch.bfloat16 and torch.equal(y, wanted[dist.get_rank()])
    loss_of(y).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        got, exact = full(parameter.grad), grads[name].float()
        assert float((got - exact).norm()) <= 0.02 * float(exact.norm()) + 1e-6, name


@CASES
def fsdp2_with_activation_checkpointing() -> None:
    alone, model = pair(Model)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = fully_shard(checkpoint_wrapper(block), mesh=mesh())
    assert_like_unsharded(alone, fully_shard(model, mesh=mesh()))


@CASES
def fsdp2_with_frozen_parts() -> None:
    def freeze(model: nn.Module, *parts: str) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in parts))
        return model

    for parts in (("experts.fc1",), ("experts",), ("router", "shared"), ("fc2", "norm", "last")):
        alone, model = (freeze(one, *parts) for one in pair(Model))
        for block in model.blocks:
            fully_shard(block, mesh=mesh())
        assert_like_unsharded(alone, fully_shard(model, mesh=mesh()))


@CASES
def fsdp2_of_adapters() -> None:
    """Check FSDP2 with adapters on frozen experts, sharded with their blocks or as units of their own."""

    def adapted(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            adapters = block.moe.add_lora(4, alpha=8)
            seeded(adapters)
        return model

    for units in (["moe"], ["moe", "moe.experts"]):
        alone, model = (adapted(one) for one in pair(Model))
        for block in model.blocks:
            for unit in reversed(units):
                fully_shard(block.get_submodule(unit), mesh=mesh())
        assert_like_unsharded(alone, fully_shard(model, mesh=mesh()))


@CASES
def fsdp2_with_quantised_experts() -> None:
    """Check that FSDP2 does not shard quantised experts' buffers, and shards the trained parameters around them."""
    make = functools.partial(moe_in_mxfp4, trained=True)
    alone, model = make(), make()
    rank = dist.get_rank()
    wanted, grads = mean_gradients(alone, functools.partial(on_wide_tokens))
    fully_shard(model, mesh=mesh())
    y = on_wide_tokens(model, rank)
    assert torch.equal(y, wanted[rank])
    loss_of(y).backward()
    for name, parameter in model.named_parameters():
        got, exact = full(parameter.grad).float(), grads[name].float()
        assert float((got - exact).norm()) <= 0.02 * float(exact.norm()), name


def moe_in_mxfp4(trained: bool = False, **options: Any) -> nn.Module:
    module = MoE(32, 32, E, K, recipe="mxfp4_weight_only", bias=True, dtype=torch.bfloat16, **options)
    torch.manual_seed(3)
    module.reset_parameters()
    seeded(module).requires_grad_(trained)
    return module


def on_wide_tokens(model: nn.Module, rank: int) -> Tensor:
    y: Tensor = model(some(N + rank, 32, seed=rank, dtype=torch.bfloat16))
    return y


@CASES
def fsdp2_refuses_delayed_weight_gradients() -> None:
    """Check that delay_wgrad is refused, since FSDP2 has already reduced the gathered weight's gradient."""
    module: Any = fully_shard(seeded(GroupedMLP(E, H, INNER, delay_wgrad=True, dtype=F64)), mesh=mesh())
    loss_of(on_rows(module, dist.get_rank())).backward()
    with pytest.raises(RuntimeError, match="delay_wgrad: fc1.weight was gathered by FSDP"):
        module.backward_dw()


@CASES
def fsdp1_refuses_delayed_weight_gradients() -> None:
    for use_orig_params in (False, True):
        module = seeded(GroupedMLP(E, H, INNER, delay_wgrad=True, dtype=F64))
        wrapped = FullyShardedDataParallel(module, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        with pytest.raises(RuntimeError, match=r"delay_wgrad: fc1.weight was computed.*FSDP1"):
            on_rows(wrapped, dist.get_rank())


# FSDP1


@CASES
def fsdp1_of_flat_parameters() -> None:
    for use_orig_params in (False, True):
        for options in ({}, {"packed": False, "bias": True}):
            alone, model = pair(functools.partial(Model, **options))
            wrapped = FullyShardedDataParallel(
                model, use_orig_params=use_orig_params, device_id=torch.device("cpu"),
                auto_wrap_policy=ModuleWrapPolicy({Block}), sharding_strategy=ShardingStrategy.FULL_SHARD,
            )  # fmt: skip
            wanted, grads = mean_gradients(alone, on_tokens)
            y = wrapped(tokens_of(dist.get_rank()))
            torch.testing.assert_close(y, wanted[dist.get_rank()], rtol=1e-10, atol=1e-10)
            loss_of(y).backward()
            torch.optim.SGD(wrapped.parameters(), lr=0.01).step()
            with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
                for name, parameter in wrapped.named_parameters():
                    stepped = alone.get_parameter(clean(name)) - 0.01 * grads[clean(name)]
                    torch.testing.assert_close(parameter, stepped, rtol=1e-10, atol=1e-10)


# DDP


@CASES
def ddp_uses_every_parameter_each_time() -> None:
    """Check that experts without rows get gradients of zero, so that DDP need not search for unused parameters."""
    for options in ({}, {"packed": False}):
        alone, model = pair(functools.partial(Model, **options))
        with torch.no_grad():
            for one in (alone, model):
                for block in one.blocks:
                    block.moe.router.weight[2:] = block.moe.router.weight[0] * 0.01  # few experts have rows
        wrapped = DistributedDataParallel(model, find_unused_parameters=False)
        assert_like_unsharded(alone, wrapped)


@CASES
def ddp_leaves_out_experts_of_each_rank() -> None:
    """Check DDP that ignores the experts' parameters, as when each rank has its own experts."""
    alone, model = pair(Model)
    ignored = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped = DistributedDataParallel(model)
    rank = dist.get_rank()
    loss_of(wrapped(tokens_of(rank))).backward()
    own = copy.deepcopy(alone)
    loss_of(own(tokens_of(rank))).backward()
    _, grads = mean_gradients(alone, on_tokens)
    for name, parameter in model.named_parameters():
        wanted = own.get_parameter(name).grad if name in ignored else grads[name]
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-10, atol=1e-10)


# DTensors as arguments of operators and modules


def placed(tensor: Tensor, on: DeviceMesh, *placements: Any) -> Tensor:
    """Distribute a tensor that is equal on every rank, and return it as a leaf; it requires a gradient if it is
    floating-point.
    """
    made = distribute_tensor(tensor, on, list(placements)).detach()
    return made.requires_grad_(tensor.is_floating_point())


def operands(**changes: Any) -> dict[str, Any]:
    """Return arguments of grouped_mlp, in glu_layout "interleaved"."""
    given = {
        "x": some(N, H, seed=1), "w1": some(E, 2 * INNER, H, seed=2), "w2": some(E, H, INNER, seed=3),
        "row_scale": some(N, seed=4).abs(), "b1": some(E, 2 * INNER, seed=5),
        "offs": torch.tensor([2, 2, 5, 8, 9, N], dtype=torch.int32),
    }  # fmt: skip
    return {**given, **changes}


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [one for part in value or () for one in flat(part)]


def assert_like_plain(
    operator: Callable[..., Any], given: dict[str, Any], placements: dict[str, Any], on: DeviceMesh, want: Any,
    **options: Any,
) -> None:  # fmt: skip
    """Compare an operator on DTensors with the operator on plain tensors.

    Args:
        placements: placements by argument name; other arguments are replicated.
        want: placements of the results.
    """

    def leaf(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(leaf, value)) if isinstance(value, list) else type(value)(*map(leaf, value))
        return value.clone().requires_grad_(value.is_floating_point())

    def shard(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            parts = [shard(name, one) for one in value]
            return parts if isinstance(value, list) else type(value)(*parts)
        return placed(value, on, *placements.get(name, [Replicate()] * on.ndim))

    plain = {name: leaf(value) for name, value in given.items()}
    sharded = {name: shard(name, value) for name, value in given.items()}
    exact, results = (flat(operator(**values, **options)) for values in (plain, sharded))
    for one, wanted in zip(results, exact, strict=True):
        assert isinstance(one, DTensor) and list(one.placements) == want, one.placements
        torch.testing.assert_close(full(one), wanted, rtol=1e-10, atol=1e-10)
    sum(map(loss_of, exact)).backward()
    sum(loss_of(full(one)) for one in results).backward()
    for name, value in plain.items():
        for one, leaf_of in zip(flat(sharded[name]), flat(value), strict=True):
            if leaf_of.requires_grad:
                assert isinstance(one.grad, DTensor), name
                torch.testing.assert_close(full(one.grad), leaf_of.grad, rtol=1e-10, atol=1e-10)
        assert not flat(value)[0].requires_grad or any(bool(one.grad.any()) for one in flat(value)), name


TP_MLP = {"w1": [Shard(1)], "w2": [Shard(2)], "b1": [Shard(1)]}


@CASES
def replicated_dtensors_run_on_each_rank() -> None:
    b2 = {"b2": some(E, H, seed=6)}
    for on in (mesh(), mesh(2, 1)):
        same = [Replicate()] * on.ndim
        assert_like_plain(glulam.grouped_mlp, operands(**b2), {}, on, same)
        assert_like_plain(glulam.grouped_mlp, operands(), {}, on, same, recompute=True)
    given = operands()
    of_glu = {name: given[name] for name in ("x", "w1", "row_scale", "offs")}
    assert_like_plain(glulam.grouped_glu, of_glu, {}, mesh(), [Replicate()], return_preact=True)
    lists = {name: list(given[name]) for name in ("w1", "w2", "b1")}
    assert_like_plain(glulam.grouped_mlp, operands(**lists), {}, mesh(), [Replicate()])


@CASES
def an_mlp_is_split_by_its_inner_width() -> None:
    for layout, w1 in (("interleaved", 2 * INNER), ("interleaved32", 128)):
        width = w1 // 2
        given = operands(w1=some(E, w1, H, seed=2), w2=some(E, H, width, seed=3), b1=some(E, w1, seed=5))
        assert_like_plain(glulam.grouped_mlp, given, TP_MLP, mesh(), [Partial()], glu_layout=layout)
    given = operands(w1=some(E, INNER, H, seed=2), b1=some(E, INNER, seed=5))
    assert_like_plain(glulam.grouped_mlp, given, TP_MLP, mesh(), [Partial()], activation="srelu")


@CASES
def an_mlp_of_lists_halves_or_transposed_weights_is_split_by_its_inner_width() -> None:
    options: dict[str, Any] = {"glu_layout": "interleaved"}
    given = operands()
    lists = {name: list(given[name]) for name in TP_MLP}
    of_lists = {"w1": [Shard(0)], "w2": [Shard(1)], "b1": [Shard(0)]}
    assert_like_plain(glulam.grouped_mlp, operands(**lists), of_lists, mesh(), [Partial()], **options)
    transposed = {name: given[name].mT.contiguous() for name in ("w1", "w2")}
    of_transposed = {**TP_MLP, "w1": [Shard(2)], "w2": [Shard(1)]}
    options["transpose_w"] = True
    assert_like_plain(glulam.grouped_mlp, operands(**transposed), of_transposed, mesh(), [Partial()], **options)
    halves = operands(w1=GateUp(*given["w1"].chunk(2, 1)))
    del halves["b1"]
    assert_like_plain(glulam.grouped_mlp, halves, TP_MLP, mesh(), [Partial()])


@CASES
def addends_of_the_result_may_be_replicated_or_partial() -> None:
    for b2 in (some(E, H, seed=6), list(some(E, H, seed=6))):
        assert_like_plain(glulam.grouped_mlp, operands(b2=b2), TP_MLP, mesh(), [Partial()], glu_layout="interleaved")
    given, on = operands(), mesh()
    tensors = {name: placed(value, on, *TP_MLP.get(name, [Replicate()])) for name, value in given.items()}
    b2 = some(E, H, seed=6 + dist.get_rank()).requires_grad_()
    tensors["b2"] = DTensor.from_local(b2, on, [Partial()])
    y = glulam.grouped_mlp(**tensors, glu_layout="interleaved").full_tensor()
    both = (some(E, H, seed=6) + some(E, H, seed=7)).requires_grad_()
    wanted = glulam.grouped_mlp(**given, b2=both, glu_layout="interleaved")
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
    loss_of(y).backward()
    loss_of(wanted).backward()
    torch.testing.assert_close(b2.grad, both.grad, rtol=1e-10, atol=1e-10)


@CASES
def addends_of_rows_are_combined_to_addends_of_tokens() -> None:
    """Check a layer called step by step on DTensors: partial sums of rows combine to partial sums of tokens."""
    on, logits, residual = mesh(), some(N, E, seed=7), some(N, H, seed=8)
    given = operands(x=some(N, H, seed=1))
    results = []
    for shard in (False, True):
        leaves = {
            name: placed(value, on, *TP_MLP.get(name, [Replicate()])) if shard else value.clone().requires_grad_()
            for name, value in {**given, "logits": logits, "residual": residual}.items()
            if name in ("x", "w1", "w2", "logits", "residual")
        }
        routing = glulam.route(leaves["logits"], K)
        rows = glulam.permute(leaves["x"], routing)
        y = glulam.grouped_mlp(
            rows, leaves["w1"], leaves["w2"], offs=routing.offs, row_scale=routing.weight_of_row,
            glu_layout="interleaved",
        )  # fmt: skip
        y = glulam.combine(y, routing, leaves["residual"])
        assert not shard or list(y.placements) == [Partial()]
        loss_of(full(y)).backward()
        results.append([full(y), *[full(leaf.grad) for leaf in leaves.values()]])
    for got, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@CASES
def two_dimensions_of_a_mesh_each_split_for_themselves() -> None:
    placements = {name: [Replicate(), *one] for name, one in TP_MLP.items()}
    for on in (mesh(1, 2), mesh(2, 1)):
        want = [Replicate(), Partial()]
        assert_like_plain(glulam.grouped_mlp, operands(), placements, on, want, glu_layout="interleaved")


@CASES
def grouped_glu_and_grouped_mm_are_split_by_columns_and_by_rows() -> None:
    given = operands()
    of_glu = {"x": given["x"], "w1": given["w1"], "bias": given["b1"], "offs": given["offs"]}
    split = {"w1": [Shard(1)], "bias": [Shard(1)]}
    for preact in (False, True):
        options = {"glu_layout": "interleaved", "return_preact": preact}
        assert_like_plain(glulam.grouped_glu, of_glu, split, mesh(), [Shard(1)], **options)
    of_mm = {"x": given["x"], "w": given["w1"], "offs": given["offs"]}
    bias = {"bias": given["b1"], "bias_scale": given["row_scale"]}
    split = {"w": [Shard(1)], "bias": [Shard(1)]}
    assert_like_plain(glulam.grouped_mm, {**of_mm, **bias}, split, mesh(), [Shard(1)])
    assert_like_plain(glulam.grouped_mm, of_mm, {"x": [Shard(1)], "w": [Shard(2)]}, mesh(), [Partial()])
    of_mm["w"] = of_mm["w"].mT.contiguous()
    split = {"w": [Shard(2)], "bias": [Shard(1)]}
    assert_like_plain(glulam.grouped_mm, {**of_mm, **bias}, split, mesh(), [Shard(1)], transpose_w=True)


def split_experts(name: str, module: nn.Module, on: DeviceMesh) -> None:
    """Split experts by their intermediate size; a partition function for `distribute_module`, which replicates other
    parameters.
    """
    for label, dim in {"fc1": {"weight": 1, "bias": 1}, "fc2": {"weight": 2}}.get(name.rpartition(".")[2], {}).items():
        if (parameter := module.get_parameter(label) if module.has_bias or label == "weight" else None) is not None:
            module.register_parameter(label, nn.Parameter(distribute_tensor(parameter, on, [Shard(dim)])))


def losses(module: MoE) -> Tensor:
    routing = module.routing
    assert routing is not None and routing.logits is not None
    return glulam.load_balancing_loss(routing) + glulam.router_z_loss(routing.logits)


def assert_gradients_like(alone: nn.Module, module: nn.Module, wanted: Tensor, y: Any) -> None:
    """Run backward of a plain and of a DTensor module, and compare their gradients."""
    loss_of(wanted).backward()
    loss_of(y.full_tensor()).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(full(parameter.grad), alone.get_parameter(name).grad, rtol=1e-10, atol=1e-10)


@CASES
def a_layer_is_split_by_its_experts_inner_width() -> None:
    """Check an MoE layer split by its experts' intermediate size: tokens are replicated DTensors, and the result is a
    partial sum.
    """
    make = functools.partial(MoE, H, INNER, E, K, glu_layout="interleaved", choice_bias=True, dtype=F64)
    shared = {"shared_intermediate_size": 8, "shared_gate": True}
    both_biases = {**shared, "bias": True, "router_bias": True}
    cases: list[tuple[dict[str, Any], str]] = [({}, ""), (shared, ""), (both_biases, "")]
    cases += [(both_biases, hooked) for hooked in ("experts", "router")]
    for options, hooked in cases:  # a part that has hooks is called, and not fused with others
        alone, module = pair(functools.partial(make, **options))
        module = distribute_module(module, mesh(), split_experts)
        if hooked:
            module.get_submodule(hooked).register_forward_hook(lambda *_: None)
        x = some(2, N, H, seed=1)
        given, tokens = x.clone().requires_grad_(), placed(x, mesh(), Replicate())
        wanted, y = alone(given), module(tokens)
        assert list(y.placements) == [Partial()]
        torch.testing.assert_close(y.full_tensor(), wanted, rtol=1e-10, atol=1e-10)
        loss_of(wanted).backward()
        loss_of(y.full_tensor()).backward()
        torch.testing.assert_close(tokens.grad.full_tensor(), given.grad, rtol=1e-10, atol=1e-10)
        for name, parameter in module.named_parameters():
            wanted = alone.get_parameter(name).grad
            torch.testing.assert_close(full(parameter.grad), wanted, rtol=1e-10, atol=1e-10, msg=name)
        with torch.no_grad():
            torch.testing.assert_close(module(tokens).full_tensor(), alone(x), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(full(losses(module)), losses(alone), rtol=1e-10, atol=1e-10)
        module.update_choice_bias(0.1)
        alone.update_choice_bias(0.1)
        torch.testing.assert_close(full(module.choice_bias), alone.choice_bias)


@CASES
def a_layer_of_replicated_dtensors_runs_on_each_rank() -> None:
    alone, module = pair(functools.partial(MoE, H, INNER, E, K, shared_intermediate_size=8, bias=True, dtype=F64))
    module = distribute_module(module, mesh())
    x = some(N, H, seed=1)
    wanted, y = alone(x), module(placed(x, mesh(), Replicate()))
    assert list(y.placements) == [Replicate()]
    torch.testing.assert_close(y.to_local(), wanted, rtol=1e-10, atol=1e-10)
    assert_gradients_like(alone, module, wanted, y)


@CASES
def fsdp2_over_split_experts() -> None:
    """Check FSDP2 over one mesh dimension, which gathers DTensors that the other dimension splits."""
    both = mesh(1, 2)
    alone, module = pair(functools.partial(MoE, H, INNER, E, K, glu_layout="interleaved", dtype=F64))
    module = distribute_module(module, both["tp"], split_experts)
    fully_shard(module, mesh=both["dp"])
    x = some(N, H, seed=1)
    wanted, y = alone(x), module(placed(x, both["tp"], Replicate()))
    torch.testing.assert_close(y.full_tensor(), wanted, rtol=1e-10, atol=1e-10)
    assert_gradients_like(alone, module, wanted, y)


@CASES
def quantised_weights_may_be_replicated() -> None:
    weights = [glulam.quantize_mxfp4(some(E, 64, 32, seed=1).float()), some(E, 32, 32, seed=2).float()]
    x, offs = some(N, 32, seed=3, dtype=torch.bfloat16), operands()["offs"]
    on = mesh()

    def replicated(w: Any) -> Any:
        parts = [DTensor.from_local(part, on, [Replicate()]) for part in (w.data, w.scale)]
        return glulam.MXFP4Tensor(*parts)

    weights[1] = glulam.quantize_mxfp4(weights[1])
    wanted = glulam.grouped_mlp(x, *weights, offs=offs, recipe="mxfp4_weight_only")
    tokens = DTensor.from_local(x, on, [Replicate()])
    y = glulam.grouped_mlp(tokens, *map(replicated, weights), offs=offs, recipe="mxfp4_weight_only")
    assert torch.equal(y.full_tensor(), wanted)


@CASES
def compiled_calls_are_split_alike() -> None:
    def mlp(**given: Any) -> Tensor:
        y: Tensor = glulam.grouped_mlp(**given, glu_layout="interleaved")
        return y

    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    results = []
    for function in (mlp, compiled):
        given = {name: placed(value, mesh(), *TP_MLP.get(name, [Replicate()])) for name, value in operands().items()}
        y = function(**given)
        assert list(y.placements) == [Partial()]
        loss_of(y.full_tensor()).backward()
        results.append([full(y), *[full(one.grad) for one in given.values() if one.requires_grad]])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@CASES
def local_tensors_of_a_split_layer_are_plain() -> None:
    """Check plain calls on a rank's local weights, whose results the caller sums, as trainers that unwrap DTensors
    do.
    """
    given, rank = operands(), dist.get_rank()
    gate, up, down = (part.chunk(WORLD, dim)[rank] for part, dim in zip(
        (*given["w1"].chunk(2, 1), given["w2"]), (1, 1, 2), strict=True
    ))  # fmt: skip
    y = glulam.grouped_mlp(
        given["x"], GateUp(gate.contiguous(), up.contiguous()), down.contiguous(), offs=given["offs"]
    )
    dist.all_reduce(y)
    wanted = glulam.grouped_mlp(given["x"], given["w1"], given["w2"], offs=given["offs"])
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)


def refused(message: str, kind: type[Exception] = ValueError, /, **given: Any) -> None:
    with pytest.raises(kind, match=message):
        glulam.grouped_mlp(**{**operands(), "glu_layout": "interleaved", **given})


@CASES
def other_layouts_are_refused_by_name() -> None:
    on, given = mesh(), operands()
    same = {name: placed(value, on, Replicate()) for name, value in given.items() if name != "offs"}
    split = {**same, **{name: placed(given[name], on, *one) for name, one in TP_MLP.items()}}
    by_experts = {name: placed(given[name], on, Shard(0)) for name in TP_MLP}
    refused(
        r"grouped_mlp: w1 is a DTensor with placements \(Shard\(dim=0\),\).*ExpertParallel", **{**same, **by_experts}
    )
    refused(
        r"grouped_mlp: x is a DTensor .*Shard\(dim=0\).*redistribute", **{**same, "x": placed(given["x"], on, Shard(0))}
    )
    refused(r"grouped_mlp: w2 is a DTensor with placements \(Replicate", **{**split, "w2": same["w2"]})
    refused(
        r"grouped_mlp: b2 is a DTensor .*b2 Partial.*or Replicate", **split, b2=placed(some(E, H, seed=6), on, Shard(1))
    )
    refused("grouped_mlp: w1 is a DTensor .*'concat'.*interleaved.*GateUp", **{**split, "glu_layout": "concat"})
    refused(
        "grouped_mlp: x is a Tensor, but w1 is a DTensor.*from_local.*FSDP", TypeError, **{**split, "x": given["x"]}
    )
    refused("grouped_mlp: w1 is a Tensor, but x is a DTensor", TypeError, x=same["x"])
    refused("grouped_mlp: out is given", TypeError, **same, out=torch.empty(N, H, dtype=F64))
    refused(
        "grouped_mlp: w1 is on .*one mesh", **{**same, "w1": placed(given["w1"], mesh(1, 2), Replicate(), Replicate())}
    )
    routing = glulam.route(some(N, E, seed=7), K)
    with pytest.raises(TypeError, match=r"moe: routing.token_of_row is a Tensor, but x is a DTensor"):
        glulam.moe(same["x"], routing, same["w1"], same["w2"])
    with pytest.raises(
        ValueError, match=r"route: logits is a DTensor .*Shard\(dim=0\).*served are: all Replicate\(\)\. "
    ):
        glulam.route(placed(some(N + 1, E, seed=7), on, Shard(0)), K)
    odd = operands(w1=some(E, 18, H, seed=2), w2=some(E, H, 9, seed=3), b1=some(E, 18, seed=5))
    uneven = {**same, **{name: placed(odd[name], on, *one) for name, one in TP_MLP.items()}}
    refused("grouped_mlp: w1 has 18 in dimension 1, which ranks split; give a multiple of 4", **uneven)
    with glulam.batch_invariant():
        refused("grouped_mlp: each rank has an addend .*shard rows or experts", NotImplementedError, **split)


@CASES
def modules_refuse_dtensors_for_delayed_gradients_and_for_layers_apart() -> None:
    module = distribute_module(seeded(GroupedMLP(E, H, INNER, delay_wgrad=True, dtype=F64)), mesh())
    with pytest.raises(TypeError, match=r"grouped_mlp: x is a DTensor, and .* is delayed \(delay_wgrad\)"):
        module(placed(some(N, H, seed=1), mesh(), Replicate()), offs=operands()["offs"])
    module = distribute_module(seeded(GroupedMLP(E, H, INNER, dtype=F64)), mesh())
    module.fc1.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match=r"GroupedMLP: x is a DTensor, and fc1 or fc2 has hooks"):
        module(placed(some(N, H, seed=1), mesh(), Replicate()), offs=operands()["offs"])


@CASES
def the_example_of_the_page_runs() -> None:
    page = Path(__file__).parents[1] / "docs" / "sharding.md"
    code = page.read_text().partition("```python\n")[2].partition("```")[0]
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), names)
    layer, alone = names["layer"], MoE(64, 32, num_experts=8, top_k=2, glu_layout="interleaved")
    alone.load_state_dict({name: full(value) for name, value in layer.state_dict().items()})
    torch.testing.assert_close(names["y"].full_tensor(), alone(names["tokens"]), rtol=1e-4, atol=1e-5)
    assert all(bool(full(parameter.grad).any()) for parameter in layer.parameters())


# State dicts


def shared_folder(name: str) -> str:
    """Return a temporary folder that both ranks use."""
    folders = [tempfile.mkdtemp(prefix=name) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    return str(folders[0])


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    states = [{name: full(value) for name, value in module.state_dict().items()} for module in (one, other)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def of_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def of_the_whole(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=mesh())


def unsharded(model: nn.Module) -> nn.Module:
    return model


@CASES
def distributed_checkpoints_load_into_other_shardings() -> None:
    for options in ({"bias": True, "choice_bias": True}, {"packed": False}):
        make = functools.partial(Model, **options)
        saved = of_blocks(seeded(make()))
        for buffer in saved.buffers():
            buffer.fill_(0.25)
        folder = shared_folder("checkpoint")
        dcp.save({"model": get_model_state_dict(saved)}, checkpoint_id=folder)
        for shard in (of_the_whole, of_blocks, unsharded):
            other = shard(make())
            state = {"model": get_model_state_dict(other)}
            dcp.load(state, checkpoint_id=folder)
            result = set_model_state_dict(other, state["model"])
            assert not result.missing_keys and not result.unexpected_keys
            assert_same_state(saved, other)


@CASES
def full_state_dicts_go_both_ways() -> None:
    alone, model = seeded(Model(choice_bias=True)), of_blocks(Model(choice_bias=True))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = alone.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, given, options=options)
    assert_same_state(alone, model)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    other = Model(choice_bias=True)
    other.load_state_dict(found)
    assert_same_state(alone, other)


@CASES
def state_dicts_of_the_other_layout_load_into_sharded_modules() -> None:
    """Check loading packed experts' state into sharded modules with separate experts, and vice versa."""
    for packed in (True, False):
        source, target = (functools.partial(Model, bias=True, packed=one) for one in (not packed, packed))
        wanted = target()
        wanted.load_state_dict(seeded(source()).state_dict())
        sharded = of_blocks(target())
        state = glulam.nn.convert_state_dict(seeded(source()).state_dict(), sharded)
        set_model_state_dict(sharded, state, options=StateDictOptions(full_state_dict=True))
        assert_same_state(wanted, sharded)
        sharded = of_blocks(target())
        sharded.load_state_dict(of_the_whole(seeded(source())).state_dict())
        assert_same_state(wanted, sharded)


@CASES
def states_of_optimizers_resume_a_run() -> None:
    def step(model: nn.Module, adam: torch.optim.Optimizer, index: int) -> Tensor:
        y: Tensor = model(tokens_of(dist.get_rank()) + index)
        loss_of(y).backward()
        adam.step()
        adam.zero_grad()
        return y.detach()

    first = of_blocks(seeded(Model()))
    adam = torch.optim.Adam(first.parameters(), lr=0.01)
    step(first, adam, 0)
    folder = shared_folder("resumed")
    state, moments = get_state_dict(first, adam)
    dcp.save({"model": state, "moments": moments}, checkpoint_id=folder)
    second = of_the_whole(Model())
    other = torch.optim.Adam(second.parameters(), lr=0.01)
    state, moments = get_state_dict(second, other)
    loaded = {"model": state, "moments": moments}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(second, other, model_state_dict=loaded["model"], optim_state_dict=loaded["moments"])
    for index in (1, 2):
        wanted, got = step(first, adam, index), step(second, other, index)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@CASES
def quantised_experts_are_saved_and_loaded() -> None:
    saved = fully_shard(moe_in_mxfp4(trained=True), mesh=mesh())
    folder = shared_folder("quantised")
    dcp.save({"model": get_model_state_dict(saved)}, checkpoint_id=folder)
    for shard in (of_the_whole, unsharded):
        other = shard(MoE(32, 32, E, K, recipe="mxfp4_weight_only", bias=True, dtype=torch.bfloat16))
        on_wide_tokens(other, 0)  # a forward keeps the tensors that its buffers make
        state = {"model": get_model_state_dict(other)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state["model"])
        assert_same_state(saved, other)
        assert torch.equal(on_wide_tokens(other, 0), on_wide_tokens(saved, 0))


@CASES
def quantised_modules_may_be_replicated() -> None:
    alone, module = moe_in_mxfp4(), distribute_module(moe_in_mxfp4(), mesh())
    x = some(N, 32, seed=1, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(module(placed(x, mesh(), Replicate())).full_tensor(), alone(x))
    assert_same_state(alone, module)
    alone.reset_parameters()
    module.load_state_dict(distribute_module(copy.deepcopy(alone), mesh()).state_dict())
    assert_same_state(alone, module)


@CASES
def recipes_that_quantise_weights_take_replicated_ones_alone() -> None:
    w1, w2, x = (some(*shape, seed=1).bfloat16() for shape in ((E, 256, 128), (E, 128, 128), (N, 128)))
    on, offs = mesh(), operands()["offs"]
    options: dict[str, Any] = {"offs": offs, "recipe": "mxfp8", "glu_layout": "interleaved"}
    same = [placed(value, on, Replicate()) for value in (x, w1, w2)]
    wanted = glulam.grouped_mlp(x, w1, w2, **options)
    assert torch.equal(full(glulam.grouped_mlp(*same, **options)), wanted)
    split = [same[0], placed(w1, on, Shard(1)), placed(w2, on, Shard(2))]
    with pytest.raises(ValueError, match=r"grouped_mlp: w1 is a DTensor .*served are: all Replicate\(\)\. "):
        glulam.grouped_mlp(*split, **options)


@pytest.mark.parametrize("case", CASES.functions)
def test_on_two_ranks(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
