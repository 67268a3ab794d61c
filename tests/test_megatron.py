"""Megatron-Core's MoE layer with Glulam's experts, against its own sequential experts, on the CPU."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("megatron.core")
integration = importlib.import_module("glulam.integrations.megatron")
from megatron.core import parallel_state  # noqa: E402
from megatron.core.activations import quick_gelu, squared_relu  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from support.megatron import on_the_cpu  # noqa: E402

from examples.train_megatron import SEQUENTIAL  # noqa: E402

HIDDEN, INTER, EXPERTS, TOP_K = 32, 48, 6, 2
SIZES = (5, 0, 17, 1, 0, 9)
FORMS: dict[str, dict[str, Any]] = {
    "swiglu": {"activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": False},
    "reglu, bias": {"activation_func": F.relu, "gated_linear_unit": True, "add_bias_linear": True},
    "srelu": {"activation_func": squared_relu, "gated_linear_unit": False, "add_bias_linear": False},
    "gpt-oss": {
        "activation_func": quick_gelu, "gated_linear_unit": True, "add_bias_linear": True, "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    rendezvous = tmp_path_factory.mktemp("gloo") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)


def config(form: str = "swiglu", **more: Any) -> Any:
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "ffn_hidden_size": 2 * INTER}
    moe = {
        "moe_ffn_hidden_size": INTER,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOP_K,
        "moe_aux_loss_coeff": 0.0,
    }
    usual = {"use_cpu_initialization": True, "moe_router_load_balancing_type": "none", "bias_activation_fusion": False}
    # Without TransformerEngine a router computes in float64, and only of several ranks can biases be added in place.
    usual |= {"moe_router_dtype": "fp64", "expert_model_parallel_size": 2}
    return TransformerConfig(**{**sizes, **moe, **usual, **FORMS[form], **more})


def experts_of(spec: Any, config: Any) -> Any:
    return build_module(spec, EXPERTS, config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())


def pair(form: str = "swiglu", packed: bool = False, **more: Any) -> tuple[Any, Any]:
    """Return Megatron's experts and ours with equal weights, loaded from Megatron's state dict."""
    torch.manual_seed(0)
    theirs = experts_of(SEQUENTIAL, config(form, **more))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5)
    ours = experts_of(integration.experts_spec(packed), config(form, **more))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(experts: Any, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Run forward and backward; return the result and the gradients of x and probs."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), HIDDEN, generator=generator).requires_grad_()
    probs = torch.rand(sum(sizes), generator=generator).requires_grad_()
    y, bias = experts(x, torch.tensor(sizes), probs)
    assert bias is None
    y.sin().sum().backward()
    return {"y": y.detach(), "x": x.grad, "probs": probs.grad}


def grads_of(experts: Any) -> dict[str, Tensor]:
    """Return the parameters' gradients, by the names of state dicts."""
    values = [parameter.data.clone() for parameter in experts.parameters()]
    for parameter in experts.parameters():
        parameter.data.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    grads = {k: v.clone() for k, v in experts.state_dict().items() if isinstance(v, Tensor)}
    for parameter, value in zip(experts.parameters(), values, strict=True):
        parameter.data.copy_(value)
    return grads


def close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = float(value.abs().max()) if value.numel() else 0.0
        assert got[name].shape == value.shape
        assert not value.numel() or float((got[name] - value).abs().max()) <= 2e-5 * scale, name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_results_and_gradients_are_those_of_sequential_experts(form: str, packed: bool) -> None:
    theirs, ours = pair(form, packed)
    wanted, got = run(theirs, SIZES), run(ours, SIZES)
    assert float(wanted["y"].abs().max()) > 0.1 and float(wanted["probs"].abs().max()) > 0.01
    close(got, wanted)
    close(grads_of(ours), grads_of(theirs))


@pytest.mark.parametrize("size", [1, 32])
def test_interleaved_rows_of_a_gate(size: int) -> None:
    """An option since Megatron-Core 0.18: blocks of the gate's and the up-projection's rows in turns."""
    sizes = {"moe_ffn_hidden_size": 64}
    theirs, halves = pair(**sizes)
    ours = experts_of(integration.experts_spec(), changed(config(**sizes), moe_mlp_glu_interleave_size=size))
    state = theirs.state_dict()
    for name, value in state.items():
        if "linear_fc1" in name and isinstance(value, Tensor):
            state[name] = value.unflatten(0, (2, -1, size)).transpose(0, 1).flatten(0, 2).clone()
    ours.load_state_dict(state)
    close(run(ours, SIZES), run(halves, SIZES))


def test_a_name_as_newer_layers_give_it() -> None:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    made = build_module(integration.experts_spec(), EXPERTS, config(), pg_collection=groups, name="layers.0.experts")
    assert made.name == "layers.0.experts"


@pytest.mark.parametrize("packed", [False, True])
def test_without_tokens_weights_have_gradients(packed: bool) -> None:
    """Zeros: data parallelism waits for them."""
    _, ours = pair(packed=packed)
    run(ours, (0,) * EXPERTS)
    assert all(p.grad is not None and not p.grad.any() for p in ours.parameters())


@pytest.mark.parametrize("packed", [False, True])
def test_state_dicts_go_both_ways(packed: bool) -> None:
    theirs, ours = pair("gpt-oss", packed)
    own = ours.state_dict()
    state = {k: v for k, v in theirs.state_dict().items() if isinstance(v, Tensor)}
    assert own.keys() == state.keys() and all(torch.equal(own[k], v) for k, v in state.items())
    fresh = experts_of(SEQUENTIAL, config("gpt-oss"))
    fresh.load_state_dict(own)
    close(run(fresh, SIZES), run(theirs, SIZES))


def shards(entry: Any) -> Iterator[Any]:
    """Yield every ShardedTensor that a distributed checkpoint stores for an entry."""
    if isinstance(entry, ShardedTensorFactory):
        entry = entry.build()
    if isinstance(entry, ShardedTensor):
        yield entry
    for value in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from shards(value)


@pytest.mark.parametrize("singleton", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["gpt-oss", "srelu"])
def test_sharded_state_dicts_are_those_of_sequential_experts(form: str, packed: bool, singleton: bool) -> None:
    """So that either loads the other's checkpoints: keys, places of shards among all, replicas, data. As of the second
    of two ranks that share the experts.
    """
    both = pair(form, packed)
    for experts in both:
        experts.ep_group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    theirs, ours = (
        {name: list(shards(entry)) for name, entry in experts.sharded_state_dict("mlp.experts.", (), metadata).items()}
        for experts, metadata in zip(both, [{"singleton_local_shards": singleton}] * 2, strict=True)
    )
    assert singleton or all(shard.global_offset[0] >= EXPERTS for found in ours.values() for shard in found)
    theirs = {name: found for name, found in theirs.items() if found}  # without what linear layers have beside tensors
    assert ours.keys() == theirs.keys() and len(ours) == EXPERTS * (4 if form == "gpt-oss" else 2)
    fields = "key", "dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id"
    for name, found in theirs.items():
        for got, wanted in zip(ours[name], found, strict=True):
            assert [getattr(got, field) for field in fields] == [getattr(wanted, field) for field in fields], name
            assert torch.equal(got.data, wanted.data)


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_a_layer_with_its_own_router_and_dispatcher(dispatcher: str) -> None:
    layers = []
    for spec in (SEQUENTIAL, integration.experts_spec()):
        layer = MoELayer(
            config(moe_token_dispatcher_type=dispatcher, expert_model_parallel_size=1), MoESubmodules(experts=spec)
        )
        layers.append(layer)
    theirs, ours = layers
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(7, 3, HIDDEN, generator=torch.Generator().manual_seed(2))
    results = []
    for layer in layers:
        rows = x.clone().requires_grad_()
        y, _ = layer(rows)
        y.sin().sum().backward()
        results.append({"y": y.detach(), "x": rows.grad, "router": layer.router.weight.grad})
    assert float(results[0]["y"].abs().max()) > 0.1
    close(results[1], results[0])


def test_gradients_of_weights_later_and_in_main_grad() -> None:
    theirs, _ = pair()
    wanted = run(theirs, SIZES)
    late = experts_of(integration.experts_spec(), changed(config(), delay_wgrad_compute=True))
    late.load_state_dict(theirs.state_dict())
    for parameter in late.parameters():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.ones_like(parameter), False
    close(run(late, SIZES), wanted)
    assert all(bool((parameter.main_grad == 1).all()) for parameter in late.parameters())
    late.backward_dw()
    for parameter in late.parameters():
        assert parameter.grad_added_to_main_grad
        parameter.grad = parameter.main_grad - 1
    close(grads_of(late), grads_of(theirs))


@pytest.mark.parametrize("later", [False, True])
def test_frozen_experts_have_no_main_grad(later: bool) -> None:
    """Megatron's data parallelism gives one to what requires a gradient."""
    theirs, _ = pair()
    wanted = run(theirs, SIZES)
    ours = experts_of(integration.experts_spec(), changed(config(), delay_wgrad_compute=later))
    ours.load_state_dict(theirs.state_dict())
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(name[-1] not in "024")
        if parameter.requires_grad:
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.ones_like(parameter), False
    close(run(ours, SIZES), wanted)
    if later:
        ours.backward_dw()
    of_experts = grads_of(theirs)
    for name, parameter in ours.named_parameters():
        layer, expert = integration.LAYERS[name.split(".")[1]], name[-1]
        if parameter.requires_grad:
            of_expert = of_experts[f"local_experts.{expert}.{layer}.weight"]
            close({name: parameter.main_grad - 1}, {name: of_expert})
        else:
            assert parameter.grad is None and not hasattr(parameter, "main_grad")


@pytest.mark.parametrize("packed", [False, True])
def test_frozen_weights_leave_nothing_for_later(packed: bool) -> None:
    """Megatron asks every layer for it."""
    ours = experts_of(integration.experts_spec(packed), changed(config(), delay_wgrad_compute=True))
    ours.requires_grad_(False)
    assert run(ours, SIZES)["x"].any()
    ours.backward_dw()
    assert all(parameter.grad is None for parameter in ours.parameters())


def test_what_glulam_has_not_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="activation_func"):
        experts_of(integration.experts_spec(), changed(config(), activation_func=torch.tanh))
    with pytest.raises(NotImplementedError, match="fp8 is 'e4m3'"):
        experts_of(integration.experts_spec(), changed(config(), fp8="e4m3"))
    with pytest.raises(NotImplementedError, match="moe_paged_stash is True"):
        experts_of(integration.experts_spec(), changed(config(), moe_paged_stash=True))
    with pytest.raises(NotImplementedError, match="moe_mlp_glu_interleave_size is 16; Glulam has 1 and 32"):
        experts_of(integration.experts_spec(), changed(config(), moe_mlp_glu_interleave_size=16))


def changed(config: Any, **changes: Any) -> Any:
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def test_a_version_that_was_not_tested_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.99.1")
    with pytest.warns(RuntimeWarning, match="megatron-core 0.99.1 was not tested with Glulam; 0.16, .* were"):
        experts_of(integration.experts_spec(), config())
