"""Modules call their child modules: hooks run and wrappers take part, with the same results as the fused path for plain
children.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from glulam.nn import GroupedMLP, MoE

F64 = torch.float64
NOBODYS = "1"
"""Suffix of the parameter names of an expert without rows."""
LEAVES = ("router", "experts", "experts.fc1", "experts.fc2", "shared", "shared.fc1", "shared_gate")


def layer(**options: Any) -> MoE:
    torch.manual_seed(0)
    given = {"shared_intermediate_size": 16, "shared_gate": True, "bias": True, "router_bias": True, "dtype": F64}
    made = MoE(32, 48, 4, 2, **{**given, **options})
    for number, parameter in enumerate(made.parameters()):  # so that a result of one part alone is far from all
        parameter.data.mul_(1.0 + number % 3)
    return made


def tokens(dtype: torch.dtype = F64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(11, 32, dtype=dtype)


def step(module: nn.Module, x: Tensor, **given: Any) -> dict[str, Tensor]:
    """Run a forward and backward; return the result and gradients, by name."""
    leaf = x.clone().requires_grad_()
    y = module(leaf, **given)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
    found = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    for parameter in module.parameters():
        parameter.grad = None
    return {"y": y.detach(), "x": leaf.grad, **found}  # type: ignore[dict-item]


def check_same(made: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert made.keys() == wanted.keys()
    assert all(wanted[name].abs().max() > 1e-3 for name in wanted if not name.endswith(NOBODYS))
    for name in wanted:
        torch.testing.assert_close(made[name], wanted[name], rtol=1e-10, atol=1e-10 * float(wanted[name].abs().max()))


@pytest.mark.parametrize("name", LEAVES)
def test_hooks_run_and_change_nothing(name: str) -> None:
    module, seen = layer(), []
    wanted = step(module, tokens())
    part = module.get_submodule(name)
    part.register_forward_pre_hook(lambda *_: seen.append("before"))
    part.register_forward_hook(lambda *_: seen.append("after"))
    part.register_full_backward_hook(lambda *_: seen.append("backward"))
    check_same(step(module, tokens()), wanted)
    assert seen == ["before", "after", "backward"]


@pytest.mark.parametrize("name", LEAVES)
def test_what_a_hook_returns_is_the_result(name: str) -> None:
    module = layer()
    plain = step(module, tokens())
    module.get_submodule(name).register_forward_hook(lambda module, given, made: made * 0.5)
    made = step(module, tokens())
    assert (made["y"] - plain["y"]).abs().max() > 1e-3
    # The same by a wrapper, which hides the attributes of what it wraps.
    other = layer()
    parent, _, leaf = name.rpartition(".")
    setattr(other.get_submodule(parent), leaf, Half(other.get_submodule(name)))
    made = {key.replace(f"{name}.", f"{name}.base."): value for key, value in made.items()}
    check_same(step(other, tokens()), made)


class Half(nn.Module):
    """A wrapper that hides the class and attributes of its wrapped module."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *given: Any, **options: Any) -> Tensor:
        made: Tensor = self.base(*given, **options)
        return made * 0.5


class Adapter(nn.Module):
    """A wrapper like PEFT's layers: exposes its base's weight, and adds low-rank products."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, rows = base, base.out_features
        self.a = nn.Parameter(torch.randn(2, base.in_features, dtype=base.weight.dtype))
        self.b = nn.Parameter(torch.randn(rows, 2, dtype=base.weight.dtype))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return made


@pytest.mark.parametrize("name", ["router", "shared_gate"])
def test_an_adapter_takes_part_and_trains(name: str) -> None:
    adapted, merged = layer(), layer()
    setattr(adapted, name, Adapter(getattr(adapted, name)))
    adapter = getattr(adapted, name)
    with torch.no_grad():
        getattr(merged, name).weight.add_(adapter.b @ adapter.a)
    made, wanted = step(adapted, tokens()), step(merged, tokens())
    assert made[f"{name}.a"].abs().max() > 1e-3 and made[f"{name}.b"].abs().max() > 1e-3
    for key in ("y", "x", "experts.fc1.weight"):
        torch.testing.assert_close(made[key], wanted[key])


def test_a_subclass_computes_as_it_says() -> None:
    class Uniform(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 0

    module = layer(router_bias=False)
    router = Uniform(32, 4, bias=False, dtype=F64)
    router.load_state_dict(module.router.state_dict())
    module.router = router
    module(tokens())
    assert module.routing is not None and module.routing.weights.eq(0.5).all()


@pytest.mark.parametrize("name", LEAVES)
def test_a_forward_that_is_set_on_a_child_runs(name: str) -> None:
    """As accelerate's offloading hooks do."""
    module = layer()
    wanted = step(module, tokens())
    part = module.get_submodule(name)
    forward, seen = part.forward, []

    def counted(*given: Any, **options: Any) -> Any:
        seen.append(name)
        return forward(*given, **options)

    part.forward = counted  # type: ignore[method-assign]
    check_same(step(module, tokens()), wanted)
    assert seen == [name]


@pytest.mark.parametrize("name", ["experts", "experts.fc1"])
def test_a_child_that_was_compiled_is_called(name: str) -> None:
    module, graphs = layer(), []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    wanted = step(module, tokens())
    torch.compiler.reset()
    module.get_submodule(name).compile(backend=backend)
    check_same(step(module, tokens()), wanted)
    assert graphs


@contextmanager
def hooked_everywhere(hook: Callable[..., Any]) -> Iterator[None]:
    handle = register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_hooks_of_all_modules_run() -> None:
    """Profilers and counters of FLOPs tell modules apart by them."""
    module, seen = layer(), []
    wanted = step(module, tokens())
    with hooked_everywhere(lambda module, *_: seen.append(module)):
        check_same(step(module, tokens()), wanted)
    assert set(seen) == set(module.modules())


@pytest.mark.parametrize("options", [{"recipe": "mxfp8"}, {"delay_wgrad": True}])
def test_hooks_of_all_modules_run_where_layers_are_one_call(options: dict[str, Any]) -> None:
    """But those of the layers, of which no call is made."""
    module, seen = MoE(128, 128, 4, 2, dtype=torch.bfloat16, **options), []
    with hooked_everywhere(lambda module, *_: seen.append(module)):
        module(torch.randn(5, 128, dtype=torch.bfloat16))
    assert seen == [module.router, module.experts, module]


def test_a_plain_module_calls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    module, called = layer(shared_intermediate_size=None, shared_gate=False), []
    call = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *given: (called.append(self), call(self, *given))[1])
    module(tokens())
    assert called == [module]


@pytest.mark.parametrize("dtype", [torch.bfloat16, F64])
@pytest.mark.parametrize("hooked", [False, True])
def test_logits_have_the_router_dtype(dtype: torch.dtype, hooked: bool) -> None:
    """Also of parameters in 16 bits, and in autocast."""
    module = layer(dtype=dtype, router_dtype=torch.float32).to(dtype)
    if hooked:
        module.router.register_forward_hook(lambda *_: None)
    x = tokens(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(x)
    wanted = nn.functional.linear(x.float(), module.router.weight.float(), module.router.bias.float())
    assert module.routing is not None
    torch.testing.assert_close(module.routing.logits, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda x: (x[:, :4], None), "router returned a tuple"),
        (lambda x: x[:, :3], r"router returned \[11, 3\]; give a module that returns \[N, 4\] = \[11, 4\]"),
    ],
)
def test_what_a_router_returns_is_checked(made: Callable[[Tensor], Any], words: str) -> None:
    module = layer()
    module.router.forward = made  # type: ignore[method-assign]
    with pytest.raises((TypeError, ValueError), match=words):
        module(tokens())


# Layers of experts ----------------------------------------------------------------------------------------------------


def experts(**options: Any) -> GroupedMLP:
    torch.manual_seed(0)
    return GroupedMLP(4, 32, 64, **{"bias": True, "dtype": F64, **options})


def rows() -> dict[str, Tensor]:
    torch.manual_seed(2)
    offs = torch.tensor([3, 3, 8, 10], dtype=torch.int32)  # one row after the last group
    return {"offs": offs, "row_scale": torch.rand(11, dtype=F64).add(0.5)}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("activation", ["swiglu", "silu", "situ"])
def test_layers_one_by_one(activation: str, recompute: bool, packed: bool) -> None:
    module = experts(activation=activation, recompute=recompute, packed=packed)
    given, x = rows(), tokens()
    x[10:] = torch.nan
    found = []
    for _ in range(2):
        scale = given["row_scale"].clone().requires_grad_()
        made = step(module, x, offs=given["offs"], row_scale=scale)
        assert made.pop("y")[:10].isfinite().all() and not made["x"][10:].any()
        found.append({**made, "row_scale": scale.grad})
        module.fc1.register_forward_hook(lambda *_: None)
    check_same(found[1], found[0])


def test_buffers_of_layers_one_by_one() -> None:
    module, given, x = experts(), rows(), tokens().requires_grad_()
    module.fc2.register_forward_hook(lambda *_: None)
    out, grad_input = torch.empty(2, 11, 32, dtype=F64)
    y = module(x, offs=given["offs"], out=out, grad_input=grad_input)
    y.sum().backward()
    assert y.data_ptr() == out.data_ptr() and x.grad is not None
    torch.testing.assert_close(x.grad, grad_input)
    torch.testing.assert_close(out[:10], experts()(x, offs=given["offs"])[:10])


def test_frozen_quantised_layers_one_by_one() -> None:
    module = experts(recipe="mxfp4_weight_only", dtype=torch.bfloat16)
    given, x = rows(), tokens(torch.bfloat16)
    arguments = {"offs": given["offs"], "row_scale": given["row_scale"].float()}
    wanted = step(module, x, **arguments)
    module.fc1.register_forward_hook(lambda *_: None)
    made = step(module, x, **arguments)
    assert made.keys() == wanted.keys()
    for name in wanted:
        scale = float(wanted[name][:10].abs().max())
        torch.testing.assert_close(made[name][:10], wanted[name][:10], rtol=0.02, atol=0.02 * scale)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "mxfp8", "dtype": torch.bfloat16}, "recipe 'mxfp8' quantises rows between them"),
        ({"recipe": "fp8_block", "dtype": torch.bfloat16}, "recipe 'fp8_block' quantises rows between them"),
        ({"delay_wgrad": True}, "delay_wgrad is True"),
    ],
)
def test_what_needs_both_layers_is_refused(options: dict[str, Any], words: str) -> None:
    module = GroupedMLP(2, 128, 128, **options)
    module.fc2.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=f"fc1 or fc2 has hooks.*{words}"):
        module(torch.ones(4, 128, dtype=options.get("dtype")), splits=[2, 2])


# Around modules -------------------------------------------------------------------------------------------------------


def test_a_hook_that_is_removed_leaves_the_fused_way() -> None:
    module, x = layer(), tokens()
    plain = module(x)
    handle = module.experts.register_forward_hook(lambda *_: None)
    module(x)
    handle.remove()
    assert module(x).equal(plain)


def test_copies_keep_their_hooks() -> None:
    module, seen = layer(), []
    module.experts.register_forward_hook(lambda module, *_: seen.append(module))
    other = copy.deepcopy(module)
    other(tokens())
    assert seen == [other.experts]


@pytest.mark.parametrize("name", ["router", "experts", "experts.fc1"])
def test_one_graph_with_hooks(name: str) -> None:
    torch.compiler.reset()
    module, x = layer(), tokens()
    module.get_submodule(name).register_forward_hook(lambda module, given, made: made * 0.5)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("options", [{}, {"packed": False}, {"recipe": "mxfp4_weight_only", "dtype": torch.bfloat16}])
def test_accelerate_offloads_every_part(options: dict[str, Any]) -> None:
    """Weights are on meta but within the forward of the module that has them."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    module = MoE(32, 64, 4, 2, **{"shared_intermediate_size": 32, "dtype": F64, **options})
    offloaded, x = copy.deepcopy(module), tokens(options.get("dtype", F64))
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    with torch.no_grad():
        made, wanted = offloaded(x), module(x)
    error = 0.02 if options.get("recipe") else 1e-10  # quantised layers one by one round between
    torch.testing.assert_close(made, wanted, rtol=error, atol=error * float(wanted.abs().max()))
    assert wanted.any()
