"""Modules: construction, forward and gradients, main_grad, delayed weight gradients, state dicts in both layouts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from support.fake_gpu import FakeGpu
from torch import nn

import glulam
from glulam.nn import GroupedLinear, GroupedMLP, convert_optimizer_state, convert_state_dict

pytest_plugins = ["support.fixtures"]

E, H, I, OUT = 4, 16, 32, 24  # noqa: E741
SIZES = [5, 0, 7, 3]
ROWS = sum(SIZES)
F64, BF16 = torch.float64, torch.bfloat16
LAYOUTS = pytest.mark.parametrize("packed", [True, False])


def mlp(packed: bool = True, **options: Any) -> GroupedMLP:
    torch.manual_seed(1)
    return GroupedMLP(E, H, I, **{"bias": True, "packed": packed, "dtype": F64, **options})


def linear(packed: bool = True, **options: Any) -> GroupedLinear:
    torch.manual_seed(1)
    return GroupedLinear(E, H, OUT, **{"bias": True, "packed": packed, "dtype": F64, **options})


def batch(dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(ROWS, H, generator=torch.Generator().manual_seed(3), dtype=F64).to(dtype)


def scale() -> torch.Tensor:
    return torch.rand(ROWS, generator=torch.Generator().manual_seed(4)) + 0.5


def packed_grads(module: nn.Module, name: str = "grad") -> dict[str, torch.Tensor]:
    """Return gradients by packed parameter name, for either layout."""
    values = {key: getattr(p, name) for key, p in module.named_parameters() if getattr(p, name, None) is not None}
    twin = copy.deepcopy(module)
    for child in twin.modules():
        if isinstance(child, GroupedLinear):
            child.packed = True
    return convert_state_dict(values, twin)


def attach_main_grads(module: nn.Module, dtype: torch.dtype, value: float, **flags: bool) -> None:
    for name, parameter in module.named_parameters():
        if "weight" in name:
            parameter.main_grad = torch.full_like(parameter, value, dtype=dtype, requires_grad=False)
            for flag, setting in flags.items():
                setattr(parameter, flag, setting)


class TestConstruction:
    @LAYOUTS
    def test_parameters(self, packed: bool) -> None:
        shapes = {name: tuple(p.shape) for name, p in linear(packed).named_parameters()}
        if packed:
            assert shapes == {"weight": (E, OUT, H), "bias": (E, OUT)}
        else:
            assert shapes == {f"{n}{e}": s for n, s in (("weight", (OUT, H)), ("bias", (OUT,))) for e in range(E)}
        module = mlp(packed, activation="silu", out_features=OUT)
        assert sum(p.numel() for p in module.fc1.parameters()) == E * (I * H + I)
        assert sum(p.numel() for p in module.fc2.parameters()) == E * (OUT * I + OUT)
        assert not list(mlp(packed, bias=False).fc1.named_parameters())[-1][0].startswith("bias")

    @LAYOUTS
    def test_reset_parameters(self, packed: bool) -> None:
        module = mlp(packed)
        for child, width in ((module.fc1, H), (module.fc2, I)):
            for parameter in child.parameters():
                assert 0.5 * width**-0.5 < float(parameter.detach().abs().max()) <= width**-0.5
        before = [p.detach().clone() for p in module.parameters()]
        module.reset_parameters()
        assert not any(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))

    @LAYOUTS
    def test_meta_device(self, packed: bool) -> None:
        module = mlp(packed, device="meta", dtype=BF16)
        assert all(p.is_meta and p.dtype == BF16 for p in module.parameters())
        module.to_empty(device="cpu").reset_parameters()
        assert module(batch(BF16), splits=SIZES).shape == (ROWS, H)
        other = mlp(packed, device="meta")
        other.load_state_dict(mlp(not packed).state_dict(), assign=True)
        assert same_bits(other(batch(), splits=SIZES), mlp(not packed)(batch(), splits=SIZES))

    def test_repr(self) -> None:
        text = repr(mlp(False, activation="geglu", recompute=True, delay_wgrad=True))
        assert "(fc1): GroupedLinear(num_experts=4, in_features=16, out_features=64, bias=True, packed=False)" in text
        assert "activation='geglu'" in text and "recompute=True" in text and "delay_wgrad=True" in text
        assert "limit" not in text and "glu_layout='interleaved'" in repr(mlp(glu_layout="interleaved"))
        assert "delay_wgrad=True" in repr(linear(delay_wgrad=True))

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"num_experts": 0}, ValueError, "num_experts is 0"),
            ({"hidden_size": 1.5}, TypeError, "hidden_size is 1.5"),
            ({"intermediate_size": True}, TypeError, "intermediate_size is True"),
            ({"activation": "swish"}, ValueError, "activation is 'swish'"),
            ({"activation": "silu", "glu_layout": "interleaved"}, ValueError, "no gate to lay out"),
            ({"intermediate_size": 48, "glu_layout": "interleaved32"}, ValueError, "multiple of 32"),
            ({"limit": -1.0}, ValueError, "limit is -1.0"),
            ({"recipe": "fp8"}, ValueError, "recipe is 'fp8'"),
            ({"out_features": 0}, ValueError, "out_features is 0"),
            ({"bias": None}, TypeError, "bias is None"),
            ({"packed": 1}, TypeError, "packed is 1"),
            ({"recompute": "yes"}, TypeError, "recompute is 'yes'"),
            ({"delay_wgrad": None}, TypeError, "delay_wgrad is None"),
            ({"dtype": torch.int8}, TypeError, "dtype is torch.int8"),
        ],
    )
    def test_refusals(self, options: dict[str, Any], error: Any, words: str) -> None:
        sizes = {"num_experts": E, "hidden_size": H, "intermediate_size": I}
        with pytest.raises(error, match=f"^GroupedMLP: .*{words}"):
            GroupedMLP(**{**sizes, **options})

    @pytest.mark.parametrize("default", [torch.float32, F64, BF16])
    def test_the_default_dtype_is_torch_s(self, default: torch.dtype) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            modules = GroupedLinear(E, H, OUT, bias=True), GroupedMLP(E, H, I, bias=True)
        finally:
            torch.set_default_dtype(before)
        assert {p.dtype for module in modules for p in module.parameters()} == {default}

    REMEDY = r": dtype is torch.float32; on .* give dtype=torch.bfloat16 or .* at construction, or call .to\(torch.bfl"

    def test_refusals_on_a_gpu(self, fake_gpu: FakeGpu) -> None:
        for module, make in (
            ("GroupedLinear", lambda: GroupedLinear(E, H, OUT)),
            ("GroupedMLP", lambda: GroupedMLP(E, H, I)),
        ):
            with pytest.raises(TypeError, match=module + ".*" + self.REMEDY):
                make()
        with pytest.raises(ValueError, match="dimension of 12 elements.*multiple of 8"):
            GroupedLinear(E, 12, OUT, dtype=BF16)


@LAYOUTS
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("x_dtype", [BF16, torch.float32])
def test_float32_parameters_that_came_to_a_gpu(
    request: pytest.FixtureRequest, packed: bool, trained: bool, x_dtype: torch.dtype
) -> None:
    modules = linear(packed, dtype=None), mlp(packed, dtype=None)
    request.getfixturevalue("fake_gpu")
    offs = torch.tensor(SIZES).cumsum(0, dtype=torch.int32)
    for module in modules:
        module.requires_grad_(trained)
        with pytest.raises(TypeError, match=type(module).__name__ + TestConstruction.REMEDY):
            module(batch(x_dtype), offs=offs)
        module.to(BF16)(batch(BF16), offs=offs)


@LAYOUTS
def test_autocast_casts_nothing(packed: bool) -> None:
    """A module runs in its parameters' dtype, and refuses an x of another."""
    for module in (linear(packed, dtype=torch.float32), mlp(packed, dtype=torch.float32)):
        want = module(batch(torch.float32), splits=SIZES)
        with torch.autocast("cpu", dtype=BF16):
            assert same_bits(module(batch(torch.float32), splits=SIZES), want)
            x = nn.functional.linear(batch(torch.float32), torch.eye(H))
            with pytest.raises(TypeError, match="is torch.float32 but x is torch.bfloat16"):
                module(x, splits=SIZES)
            y = module.to(BF16)(x, splits=SIZES)
        assert y.dtype == BF16
        y.sum().backward()


@LAYOUTS
class TestForwardAndGradients:
    def test_linear(self, packed: bool) -> None:
        module, x, s = linear(packed), batch().requires_grad_(), scale()
        y = module(x, splits=SIZES, bias_scale=s)
        w, b = (packed_grads(module, "data")[name] for name in ("weight", "bias"))
        assert same_bits(y, glulam.grouped_mm(x, w, splits=SIZES, bias=b, bias_scale=s))
        y.sum().backward()
        assert set(packed_grads(module)) == {"weight", "bias"} and x.grad is not None

    def test_mlp(self, packed: bool) -> None:
        offs = torch.tensor(SIZES).cumsum(0, dtype=torch.int32)
        for options in ({}, {"recompute": True, "activation": "geglu", "glu_layout": "interleaved"}):
            module, s = mlp(packed, **options), scale()
            p = packed_grads(module, "data")
            names = {"w1": "fc1.weight", "w2": "fc2.weight", "b1": "fc1.bias", "b2": "fc2.bias"}
            named = {n: p[k].clone().requires_grad_() for n, k in names.items()}
            want = glulam.grouped_mlp(batch(), offs=offs, row_scale=s, **named, **options)
            got = module(batch(), offs=offs, row_scale=s)
            assert same_bits(got, want)
            for y in (got, want):
                y.square().sum().backward()
            for n, k in names.items():
                torch.testing.assert_close(packed_grads(module)[k], named[n].grad)

    def test_out(self, packed: bool) -> None:
        module, out = mlp(packed), torch.zeros(ROWS, H, dtype=F64)
        with torch.no_grad():
            assert module(batch(), splits=SIZES, out=out) is out
        assert bool(out.any())

    def test_compiled(self, packed: bool) -> None:
        torch.compiler.reset()
        eager, compiled = mlp(packed), mlp(packed)
        offs = torch.tensor(SIZES).cumsum(0, dtype=torch.int32)
        call = torch.compile(compiled, backend="aot_eager", fullgraph=True)
        for run in (eager, call):
            run(batch(), offs=offs, row_scale=scale()).square().sum().backward()
        for name, value in packed_grads(eager).items():
            torch.testing.assert_close(packed_grads(compiled)[name], value)

    def test_an_optimizer_learns(self, packed: bool) -> None:
        module, target = mlp(packed), torch.randn(ROWS, H, dtype=F64)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = (module(batch(), splits=SIZES) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.5 * losses[0]


MODULES: dict[str, Callable[..., Any]] = {"linear": linear, "mlp": mlp}


@LAYOUTS
@pytest.mark.parametrize("kind", MODULES)
class TestBuffers:
    """Tests of `out` and `grad_input` when autograd records."""

    def test_the_same_results_in_the_caller_s_memory(self, kind: str, packed: bool) -> None:
        plain, module = MODULES[kind](packed), MODULES[kind](packed)
        leaf, want = batch().requires_grad_(), batch().requires_grad_()
        width = plain(want, splits=SIZES).shape[1]
        out, grad_input = (
            torch.full((ROWS, width + 8), 7.0, dtype=F64)[:, :width],
            torch.full((ROWS, H), 7.0, dtype=F64),
        )
        for factor in (1.0, 2.0):  # buffers serve one step after another
            leaf.grad = want.grad = None
            y = module(leaf * factor, splits=SIZES, out=out, grad_input=grad_input)
            expected = plain(want * factor, splits=SIZES)
            assert y.data_ptr() == out.data_ptr() and y.requires_grad and not out.requires_grad
            assert same_bits(y.detach(), expected.detach())
            for result in (y, expected):
                result.square().sum().backward()
            assert same_bits(leaf.grad, want.grad) and same_bits(grad_input * factor, want.grad)
        for name, value in packed_grads(plain).items():
            assert same_bits(packed_grads(module)[name], value)

    def test_a_result_that_is_overwritten_is_noticed(self, kind: str, packed: bool) -> None:
        module, x = MODULES[kind](packed), batch().requires_grad_()
        out = torch.empty_like(module(x, splits=SIZES).detach())
        loss = module(x, splits=SIZES, out=out).square().sum()
        module(x, splits=SIZES, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_together_with_main_grad_and_delay(self, kind: str, packed: bool) -> None:
        plain, module = MODULES[kind](packed), MODULES[kind](packed, delay_wgrad=True)
        attach_main_grads(module, F64, 0.0)
        x, want, grad_input = batch().requires_grad_(), batch().requires_grad_(), torch.empty(ROWS, H, dtype=F64)
        module(x, splits=SIZES, grad_input=grad_input).square().sum().backward()
        plain(want, splits=SIZES).square().sum().backward()
        module.backward_dw()
        assert same_bits(grad_input, want.grad) and same_bits(x.grad, want.grad)
        for name, value in packed_grads(module, "main_grad").items():
            torch.testing.assert_close(value, packed_grads(plain)[name])

    def test_refusals(self, kind: str, packed: bool) -> None:
        module, x = MODULES[kind](packed), batch().requires_grad_()
        good = torch.zeros(ROWS, H, dtype=F64)
        width = module(x, splits=SIZES).shape[1]
        out = torch.zeros(ROWS, width, dtype=F64)
        both = torch.zeros(ROWS, max(H, width), dtype=F64)
        for options, error, words in (
            ({"grad_input": good[1:]}, ValueError, r"grad_input has shape \[14, 16\]"),
            ({"grad_input": good.float()}, TypeError, "grad_input is torch.float32"),
            ({"grad_input": x.detach()}, ValueError, "grad_input overlaps x"),
            ({"grad_input": good.clone().requires_grad_()}, ValueError, "grad_input requires a gradient"),
            ({"grad_input": [good]}, TypeError, "grad_input is a list"),
            ({"out": out[1:]}, ValueError, r"out has shape \[14"),
            ({"out": out.clone().requires_grad_()}, ValueError, "out requires a gradient"),
            ({"out": both[:, :width], "grad_input": both[:, :H]}, ValueError, "grad_input overlaps out"),
        ):
            with pytest.raises(error, match=words):
                module(x, splits=SIZES, **options)
        with pytest.raises(ValueError, match="x's gradient will not be computed"):
            module(batch(), splits=SIZES, grad_input=good)
        with torch.no_grad(), pytest.raises(ValueError, match="x's gradient will not be computed"):
            module(x, splits=SIZES, grad_input=good)
        y = module(x, splits=SIZES, grad_input=good)
        if width == H:
            with pytest.raises(ValueError, match="grad_input overlaps the incoming gradient"):
                y.backward(good)

    @pytest.mark.parametrize("name", ["out", "grad_input"])
    def test_a_buffer_over_a_weight(self, kind: str, packed: bool, name: str) -> None:
        """After good calls of the same layouts, too."""
        module, x = MODULES[kind](packed), batch().requires_grad_()
        good = torch.empty(ROWS, H if name == "grad_input" else module(x, splits=SIZES).shape[1], dtype=F64)
        module(x, splits=SIZES, **{name: good})
        weight = next(module.parameters())
        memory = torch.zeros(weight.numel() + good.numel(), dtype=F64)
        weight.data = memory[: weight.numel()].view(weight.shape)
        over = memory[weight.numel() - 2 :][: good.numel()].view(good.shape)
        with pytest.raises(ValueError, match=rf"{name} overlaps w"):
            module(x, splits=SIZES, **{name: over})


@LAYOUTS
@pytest.mark.parametrize("kind", MODULES)
class TestMainGrad:
    def reference(self, kind: str, packed: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        module = MODULES[kind](packed, dtype=dtype)
        module(batch(dtype), splits=SIZES).sum().backward()
        return packed_grads(module)

    @pytest.mark.parametrize(("dtype", "wide"), [(F64, F64), (BF16, torch.float32), (BF16, BF16)])
    @pytest.mark.parametrize("overwrite", [False, True])
    def test_accumulates_or_overwrites(
        self, kind: str, packed: bool, dtype: torch.dtype, wide: torch.dtype, overwrite: bool
    ) -> None:
        module = MODULES[kind](packed, dtype=dtype)
        attach_main_grads(module, wide, 1.0, overwrite_main_grad=overwrite, grad_added_to_main_grad=False)
        for _ in range(2):
            module(batch(dtype), splits=SIZES).sum().backward()
        main, want = packed_grads(module, "main_grad"), self.reference(kind, packed, dtype)
        for name, value in main.items():
            expected = want[name].to(wide) * (1 if overwrite else 2) + (0 if overwrite else 1)
            torch.testing.assert_close(value, expected, rtol=0.05 if dtype == BF16 else 1e-9, atol=1e-2)
        assert {name for name in want if "weight" in name} == main.keys()
        for name, parameter in module.named_parameters():
            if "weight" in name:
                assert parameter.grad_added_to_main_grad and parameter.grad.shape == parameter.shape, "the dummy"
            else:
                assert parameter.grad is not None, "biases go to autograd"

    @pytest.mark.parametrize("delayed", [False, True])
    def test_a_backward_for_other_gradients_writes_nothing(self, kind: str, packed: bool, delayed: bool) -> None:
        plain, module = MODULES[kind](packed), MODULES[kind](packed, delay_wgrad=delayed)
        attach_main_grads(module, F64, 0.0)
        x = batch().requires_grad_()
        bias = next(p for n, p in module.named_parameters() if "bias" in n)
        for asked in (x, bias):
            torch.autograd.grad(module(x, splits=SIZES).square().sum(), asked)
            module(x, splits=SIZES).square().sum().backward(inputs=[asked])
        assert not module.has_delayed()
        assert not any(bool(value.any()) for value in packed_grads(module, "main_grad").values())
        weights = [p for n, p in module.named_parameters() if "weight" in n]
        module(x, splits=SIZES).square().sum().backward(inputs=weights)
        plain(x, splits=SIZES).square().sum().backward()
        if delayed:
            module.backward_dw()
        for name, value in packed_grads(module, "main_grad").items():
            torch.testing.assert_close(value, packed_grads(plain)[name])

    def test_without_the_flag_there_is_no_dummy(self, kind: str, packed: bool) -> None:
        module = MODULES[kind](packed)
        attach_main_grads(module, F64, 0.0)
        module(batch(), splits=SIZES).sum().backward()
        assert all(p.grad is None for n, p in module.named_parameters() if "weight" in n)

    def test_zero_dummies(self, kind: str, packed: bool) -> None:
        module = MODULES[kind](packed)
        attach_main_grads(module, F64, 0.0, grad_added_to_main_grad=False, zero_out_wgrad=True)
        module(batch(), splits=SIZES).sum().backward()
        assert not any(bool(p.grad.any()) for n, p in module.named_parameters() if "weight" in n)

    def test_compiled_code_breaks_its_graph_there(self, kind: str, packed: bool) -> None:
        """A main_grad is written outside of any graph, the same as without a compiler."""
        torch.compiler.reset()
        eager, compiled = MODULES[kind](packed), MODULES[kind](packed)
        call = torch.compile(compiled, backend="aot_eager")
        for module, run in ((eager, eager), (compiled, call)):
            attach_main_grads(module, F64, 1.0)
            (run(batch() * 2, splits=SIZES) * 3).sum().backward()
        for name, value in packed_grads(eager, "main_grad").items():
            torch.testing.assert_close(packed_grads(compiled, "main_grad")[name], value)
        torch.compiler.reset()
        with pytest.raises(Exception, match="outside_traces"):
            torch.compile(compiled, backend="aot_eager", fullgraph=True)(batch(), splits=SIZES)

    def test_data_gradients_are_the_same(self, kind: str, packed: bool) -> None:
        plain, fused = MODULES[kind](packed), MODULES[kind](packed)
        attach_main_grads(fused, F64, 0.0)
        xs = [batch().requires_grad_() for _ in range(2)]
        for module, x in zip((plain, fused), xs, strict=True):
            module(x, splits=SIZES).square().sum().backward()
        assert same_bits(xs[0].grad, xs[1].grad)

    def test_refusals(self, kind: str, packed: bool) -> None:
        for change, error, words in (
            (lambda p: torch.zeros(3), ValueError, r"main_grad has shape \[3\]"),
            (lambda p: torch.zeros(p.mT.shape, dtype=p.dtype).mT, ValueError, "contiguous"),
            (lambda p: torch.zeros_like(p, dtype=BF16), TypeError, "main_grad is torch.bfloat16; .*torch.float64"),
            (lambda p: torch.zeros_like(p, device="meta"), ValueError, "main_grad is on meta but x is on cpu"),
            (lambda p: 3, TypeError, "main_grad is a int"),
        ):
            module = MODULES[kind](packed)
            for name, parameter in module.named_parameters():
                if "weight" in name:
                    parameter.main_grad = change(parameter.detach())
            with pytest.raises(error, match=words):
                module(batch(), splits=SIZES)
            with torch.no_grad():
                module(batch(), splits=SIZES)

    def test_what_changes_before_backward_is_told_in_its_words(self, kind: str, packed: bool) -> None:
        op = "grouped_mm" if kind == "linear" else "grouped_mlp"
        for change, words in (
            (lambda p: delattr(p, "main_grad"), "main_grad was there in forward and is gone"),
            (lambda p: setattr(p, "main_grad", torch.zeros(3, dtype=F64)), r"main_grad has shape \[3\]"),
        ):
            module = MODULES[kind](packed)
            attach_main_grads(module, F64, 0.0)
            y = module(batch(), splits=SIZES)
            for name, parameter in module.named_parameters():
                if "weight" in name:
                    change(parameter)
            with pytest.raises(ValueError, match=f"^{op}'s backward: (fc1.|fc2.)?weight.{words}"):
                y.sum().backward()


def test_main_grads_that_overlap() -> None:
    module, shared = linear(False), torch.zeros(OUT, H, dtype=F64)
    for expert in range(E):
        getattr(module, f"weight{expert}").main_grad = shared
    with pytest.raises(ValueError, match="^grouped_mm's backward: weight.main_grad does not serve.*overlaps"):
        module(batch(), splits=SIZES).sum().backward()


def test_main_grads_of_some_experts_only() -> None:
    module = linear(False)
    module.weight1.main_grad = torch.zeros_like(module.weight1.data)
    with pytest.raises(ValueError, match="weight0 has no main_grad but others have"):
        module(batch(), splits=SIZES)


def test_experts_that_overwrite_beside_experts_that_add() -> None:
    module, plain = linear(False), linear(False)
    attach_main_grads(module, F64, 5.0)
    module.weight2.overwrite_main_grad = True
    for one in (module, plain):
        one(batch(), splits=SIZES).sum().backward()
    for e in range(E):
        added = 0 if e == 2 else 5
        torch.testing.assert_close(getattr(module, f"weight{e}").main_grad, getattr(plain, f"weight{e}").grad + added)


@LAYOUTS
@pytest.mark.parametrize("kind", MODULES)
class TestDelay:
    @pytest.mark.parametrize("main_grads", [False, True])
    def test_backward_dw(self, kind: str, packed: bool, main_grads: bool) -> None:
        """Three passes, two of them pending at once; the sums equal an ordinary module's."""
        plain, delayed = MODULES[kind](packed), MODULES[kind](packed, delay_wgrad=True)
        name = "main_grad" if main_grads else "grad"
        if main_grads:
            attach_main_grads(delayed, F64, 0.0)
        inputs = [batch() * factor for factor in (1.0, 2.0, -0.5)]
        for x in inputs:
            plain(x, splits=SIZES).square().sum().backward()
        for x in inputs[:2]:
            delayed(x, splits=SIZES).square().sum().backward()
        weights = [p for n, p in delayed.named_parameters() if "weight" in n]
        assert all(p.grad is None for p in weights)
        delayed.backward_dw()
        delayed.backward_dw()
        delayed(inputs[2], splits=SIZES).square().sum().backward()
        delayed.backward_dw()
        got, want = packed_grads(delayed, name), packed_grads(plain)
        for key in want:
            torch.testing.assert_close(got[key] if "weight" in key else packed_grads(delayed)[key], want[key])
        with pytest.raises(RuntimeError, match="no weight gradient is pending"):
            delayed.backward_dw()

    def test_each_backward_of_a_graph_is_pending(self, kind: str, packed: bool) -> None:
        plain, delayed = MODULES[kind](packed), MODULES[kind](packed, delay_wgrad=True)
        for module in (plain, delayed):
            loss = module(batch(), splits=SIZES).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        for _ in range(2):
            delayed.backward_dw()
        assert not delayed.has_delayed()
        for name, value in packed_grads(delayed).items():
            torch.testing.assert_close(value, packed_grads(plain)[name])

    @pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
    def test_gradients_have_their_own_dtype(self, kind: str, packed: bool) -> None:
        delayed = MODULES[kind](packed, delay_wgrad=True, dtype=BF16)
        weights = [p for n, p in delayed.named_parameters() if "weight" in n]
        for weight in weights:
            weight.grad_dtype = torch.float32
        delayed(batch(BF16), splits=SIZES).sum().backward()
        delayed.backward_dw()
        assert all(weight.grad.dtype == torch.float32 for weight in weights)

    def test_copies_have_nothing_pending(self, kind: str, packed: bool) -> None:
        """Else they would write the gradients of the module that they are copies of."""
        module = MODULES[kind](packed, delay_wgrad=True)
        module(batch(), splits=SIZES).sum().backward()
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            with pytest.raises(RuntimeError, match="no weight gradient is pending"):
                other.backward_dw()
            other(batch(), splits=SIZES).sum().backward()
            other.backward_dw()
            assert all(p.grad is not None for p in other.parameters())
        assert all(p.grad is None for n, p in module.named_parameters() if "weight" in n)
        module.backward_dw()

    def test_refused_without_the_option(self, kind: str, packed: bool) -> None:
        with pytest.raises(RuntimeError, match="delay_wgrad=True"):
            MODULES[kind](packed).backward_dw()

    def test_frozen_weights_leave_nothing(self, kind: str, packed: bool) -> None:
        module = MODULES[kind](packed, delay_wgrad=True).requires_grad_(False)
        module(batch().requires_grad_(), splits=SIZES).sum().backward()
        with pytest.raises(RuntimeError, match="no weight gradient is pending"):
            module.backward_dw()


FROZEN = {"between": [0, 2], "first": [0, 1], "last": [2, 3], "but one": [0, 1, 2], "around": [0, 3]}


def freeze(module: nn.Module, experts: list[int]) -> dict[str, nn.Parameter]:
    """Freeze the weights of these experts; return them by name."""
    frozen = {n: p for n, p in module.named_parameters() if "weight" in n and int(n[-1]) in experts}
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    return frozen


@pytest.mark.parametrize("experts", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("kind", MODULES)
class TestFrozenExperts:
    """Freezing some experts' weights does not change the gradients of the others."""

    def wanted(self, kind: str) -> dict[str, torch.Tensor]:
        module = MODULES[kind](False)
        module(batch(), splits=SIZES).square().sum().backward()
        return {name: parameter.grad for name, parameter in module.named_parameters()}

    @pytest.mark.parametrize(("sizes", "delay"), [("list", False), ("splits", True), ("offs", False)])
    def test_need_no_main_grad(self, kind: str, experts: list[int], sizes: str, delay: bool) -> None:
        module = MODULES[kind](False, delay_wgrad=delay)
        frozen = freeze(module, experts)
        attach_main_grads(module, F64, 2.0, grad_added_to_main_grad=False)
        for parameter in frozen.values():
            del parameter.main_grad
        groups = {
            "list": {"splits": SIZES},
            "splits": {"splits": torch.tensor(SIZES)},
            "offs": {"offs": torch.tensor(SIZES).cumsum(0, dtype=torch.int32)},
        }[sizes]
        module(batch(), **groups).square().sum().backward()
        if delay:
            module.backward_dw()
        wanted = self.wanted(kind)
        for name, parameter in module.named_parameters():
            if name in frozen:
                assert parameter.grad is None and not parameter.grad_added_to_main_grad
                assert not hasattr(parameter, "main_grad")
            elif "weight" in name:
                torch.testing.assert_close(parameter.main_grad, wanted[name] + 2.0)
                assert parameter.grad_added_to_main_grad and parameter.grad is not None
            else:
                torch.testing.assert_close(parameter.grad, wanted[name])

    def test_a_main_grad_of_theirs_is_left_alone(self, kind: str, experts: list[int]) -> None:
        """Among experts that add and one that overwrites; whether theirs would fit is not asked."""
        module = MODULES[kind](False)
        attach_main_grads(module, F64, 2.0)
        for name, parameter in (frozen := freeze(module, experts)).items():
            if name.startswith(("weight", "fc1")):
                parameter.main_grad = torch.full((3,), 2.0)
        overwrites = [n for n, p in module.named_parameters() if "weight" in n and p.requires_grad][0]
        dict(module.named_parameters())[overwrites].overwrite_main_grad = True
        module(batch(), splits=SIZES).square().sum().backward()
        wanted = self.wanted(kind)
        for name, parameter in module.named_parameters():
            if name in frozen:
                assert (parameter.main_grad == 2.0).all()
            elif "weight" in name:
                torch.testing.assert_close(parameter.main_grad, wanted[name] + (0 if name == overwrites else 2.0))

    @pytest.mark.parametrize("has_grads", [False, True])
    def test_later(self, kind: str, experts: list[int], has_grads: bool) -> None:
        module = MODULES[kind](False, delay_wgrad=True)
        frozen = freeze(module, experts)
        for name, parameter in module.named_parameters():
            if "weight" in name and has_grads:
                parameter.grad = torch.full_like(parameter, 2.0)
        module(batch(), splits=SIZES).square().sum().backward()
        module.backward_dw()
        wanted, before = self.wanted(kind), 2.0 if has_grads else 0.0
        for name, parameter in module.named_parameters():
            if name in frozen:
                assert (parameter.grad == 2.0).all() if has_grads else parameter.grad is None
            elif "weight" in name:
                torch.testing.assert_close(parameter.grad, wanted[name] + before)

    def test_on_the_host_path(self, kind: str, experts: list[int], fake_gpu: FakeGpu) -> None:
        """The kernels' groups: buffers of float32 by address, whose frozen neighbours are not written."""
        module, plain = (MODULES[kind](False, dtype=BF16) for _ in range(2))
        frozen = freeze(module, experts)
        attach_main_grads(module, torch.float32, 2.0)
        offs = torch.tensor(SIZES).cumsum(0, dtype=torch.int32)
        for one in (module, plain):
            one(batch(BF16), offs=offs).square().sum().backward()
        wanted = dict(plain.named_parameters())
        for name, parameter in module.named_parameters():
            if name in frozen:
                assert (parameter.main_grad == 2.0).all()
            elif "weight" in name:
                torch.testing.assert_close(parameter.main_grad, wanted[name].grad.float() + 2.0, rtol=0.02, atol=0.05)


def test_a_trained_expert_without_main_grad_is_named_beside_frozen_ones() -> None:
    module = linear(False)
    freeze(module, [0, 2])
    module.weight3.main_grad = torch.zeros_like(module.weight3.data)
    with pytest.raises(ValueError, match="weight1 has no main_grad but others have; .*requires a gradient"):
        module(batch(), splits=SIZES)


def test_the_memory_of_frozen_experts_grows_with_the_trained_ones() -> None:
    """Gradients that nobody asks for are made for no more experts than there are trained ones."""
    module = GroupedLinear(64, H, OUT, packed=False, dtype=F64, delay_wgrad=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name == "weight40")
    module(batch(), splits=[0] * 30 + [ROWS - 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1] + [0] * 22).sum().backward()
    module.backward_dw()
    assert module.weight40.grad.untyped_storage().nbytes() <= 2 * module.weight40.nbytes


@LAYOUTS
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("main_grads", [False, True])
@pytest.mark.parametrize("trained", ["fc1", "fc2"])
def test_a_layer_that_is_frozen_as_a_whole(packed: bool, delay: bool, main_grads: bool, trained: str) -> None:
    module, plain = mlp(packed, delay_wgrad=delay), mlp(packed)
    attach_main_grads(module, F64, 2.0)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
        if "weight" in name and not (main_grads and parameter.requires_grad):
            del parameter.main_grad
    module(batch(), splits=SIZES).square().sum().backward()
    plain(batch(), splits=SIZES).square().sum().backward()
    if delay:
        module.backward_dw()
    wanted = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
        elif "weight" in name and main_grads:
            torch.testing.assert_close(parameter.main_grad, wanted[name].grad + 2.0)
        else:
            torch.testing.assert_close(parameter.grad, wanted[name].grad)


class TestStateDicts:
    @pytest.mark.parametrize("kind", MODULES)
    @pytest.mark.parametrize("source", [True, False])
    @pytest.mark.parametrize("target", [True, False])
    def test_either_layout_loads_into_either(self, kind: str, source: bool, target: bool) -> None:
        of, into = MODULES[kind](source), MODULES[kind](target)
        for parameter in of.parameters():
            parameter.data.normal_()
        state = of.state_dict()
        keys = list(state)
        holder_of, holder_into = nn.Sequential(of), nn.Sequential(into)
        holder_into.load_state_dict(holder_of.state_dict())
        assert same_bits(into(batch(), splits=SIZES), of(batch(), splits=SIZES))
        assert list(of.state_dict()) == keys
        converted = convert_state_dict(state, into)
        assert converted.keys() == into.state_dict().keys() and list(state) == keys
        MODULES[kind](target).load_state_dict(converted)

    def test_incomplete_or_ambiguous_sets_are_left_alone(self) -> None:
        listed, packed = linear(False).state_dict(), linear(True).state_dict()
        lacking = {key: value for key, value in listed.items() if key != "weight2"}
        both = {**listed, **packed}
        more = {**listed, "weight4": listed["weight0"]}
        odd = {**listed, "weight1": torch.zeros(1)}
        for state, words in (
            (lacking, 'Missing key.*"weight".*Unexpected key.*"weight0"'),
            (both, 'Unexpected key.*"weight0"'),
            (more, 'Missing key.*"weight".*Unexpected key'),
            (odd, 'Missing key.*"weight"'),
        ):
            with pytest.raises(RuntimeError, match=f"(?s){words}"):
                linear(True).load_state_dict(state)
        for state, words in (
            ({**packed, "weight": packed["weight"][:3]}, 'Missing key.*"weight0".*Unexpected key.*"weight"'),
            (both, 'Unexpected key.*"weight"'),
            ({**packed, "weight1": listed["weight1"]}, 'Missing key.*"weight0"'),
        ):
            with pytest.raises(RuntimeError, match=f"(?s){words}"):
                linear(False).load_state_dict(state)

    @LAYOUTS
    def test_a_module_without_bias_leaves_biases_alone(self, packed: bool) -> None:
        state = linear(not packed).state_dict()
        biases = {key: value for key, value in state.items() if key.startswith("bias")}
        module = linear(packed, bias=False)
        converted = convert_state_dict(state, module)
        assert converted.keys() == module.state_dict().keys() | biases.keys()
        assert all(converted[key] is value for key, value in biases.items())
        with pytest.raises(RuntimeError, match=f'Unexpected key.*"{next(iter(biases))}"'):
            module.load_state_dict(state)
        assert convert_optimizer_state({key: {"step": 1.0} for key in biases}, module).keys() == biases.keys()

    def test_what_is_not_a_set_of_the_module_is_left_alone(self) -> None:
        listed, packed = linear(False).state_dict(), linear(True).state_dict()
        for state, module in (
            ({**listed, "weight7": listed["weight0"]}, linear(True, bias=False)),  # beyond E, with a gap
            ({**listed, "weight2": listed["weight2"].float()}, linear(True, bias=False)),
            ({"weight": packed["bias"]}, linear(False)),  # a dense layer's, of E rows
            ({f"weight{e}": listed[f"bias{e}"] for e in range(E)}, linear(True)),
            ({f"other.weight{e}": listed[f"weight{e}"] for e in range(E)}, linear(True)),
            ({"weight": "text", "bias": None}, linear(False)),
        ):
            converted = convert_state_dict(state, module)
            assert list(converted) == list(state) and all(converted[key] is state[key] for key in state)

    @pytest.mark.parametrize("source", [True, False])
    def test_a_module_under_two_names(self, source: bool) -> None:
        of, into = linear(source), linear(not source)
        twice_of, twice_into = nn.ModuleDict({"a": of, "b": of}), nn.ModuleDict({"a": into, "b": into})
        converted = convert_state_dict(twice_of.state_dict(), twice_into)
        assert converted.keys() == twice_into.state_dict().keys()

    @pytest.mark.parametrize("source", [True, False])
    def test_what_else_a_state_dict_holds_is_kept(self, source: bool) -> None:
        """Other modules' entries, their versions, and the order."""
        of, into = (nn.Sequential(nn.BatchNorm1d(H), MODULES["mlp"](p), nn.Linear(H, H)) for p in (source, not source))
        state = of.state_dict()
        converted = convert_state_dict(state, into)
        assert list(converted) == list(into.state_dict()) and converted["2.bias"] is state["2.bias"]
        assert converted._metadata == state._metadata  # type: ignore[attr-defined]

    @pytest.mark.parametrize("source", [True, False])
    def test_assigned_weights_train(self, source: bool) -> None:
        of, into = mlp(source), mlp(not source, device="meta")
        into.load_state_dict(convert_state_dict(of.state_dict(), into), assign=True)
        assert same_bits(into(batch(), splits=SIZES), of(batch(), splits=SIZES))
        before = [p.detach().clone() for p in into.parameters()]
        into(batch(), splits=[5, 1, 6, 3]).sum().backward()
        torch.optim.SGD(into.parameters(), lr=0.1).step()
        assert not any(torch.equal(old, new) for old, new in zip(before, into.parameters(), strict=True))

    @pytest.mark.parametrize("source", [True, False])
    def test_optimizer_state(self, source: bool) -> None:
        """A step after conversion is the step without it."""
        of, into = mlp(source), mlp(not source)
        into.load_state_dict(of.state_dict())
        first, second = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (of, into))
        of(batch(), splits=SIZES).square().sum().backward()
        first.step()
        by_name = {name: first.state[p] for name, p in of.named_parameters()}
        converted = convert_optimizer_state(by_name, into)
        assert converted.keys() == dict(into.named_parameters()).keys()
        whole = convert_optimizer_state(
            {"state": by_name, "param_groups": [{"lr": 0.1, "params": list(by_name)}]}, into
        )
        assert set(whole["param_groups"][0]["params"]) == whole["state"].keys() == converted.keys()
        into.load_state_dict(of.state_dict())
        for name, parameter in into.named_parameters():
            second.state[parameter] = converted[name]
        for module, optimizer in ((of, first), (into, second)):
            optimizer.zero_grad()
            module(batch(), splits=SIZES).square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(into(batch(), splits=SIZES), of(batch(), splits=SIZES))

    def test_step_counts_that_differ_are_not_packed(self) -> None:
        state = {f"weight{e}": {"step": torch.tensor(float(e)), "exp_avg": torch.zeros(OUT, H)} for e in range(E)}
        assert convert_optimizer_state(state, linear(True)) == state

    @pytest.mark.parametrize(
        "odd", [torch.zeros(1), torch.zeros(OUT, H, dtype=BF16), torch.zeros(()), None, "nothing of the name"]
    )
    def test_moments_that_do_not_fit_each_other_are_not_packed(self, odd: Any) -> None:
        state = {f"weight{e}": {"exp_avg": torch.zeros(OUT, H)} for e in range(E)}
        state["weight2"] = {"other": odd} if isinstance(odd, str) else {"exp_avg": odd}
        converted = convert_optimizer_state(state, linear(True))
        assert list(converted) == list(state) and all(converted[key] is state[key] for key in state)

    @LAYOUTS
    def test_state_that_is_no_optimizer_s_is_left_alone(self, packed: bool) -> None:
        state = linear(not packed).state_dict()
        assert convert_optimizer_state(state, linear(packed)).keys() == state.keys()

    @pytest.mark.parametrize("source", [True, False])
    def test_groups_name_what_the_state_has(self, source: bool) -> None:
        """Parameters without state are renamed too; what cannot be converted keeps its names in both."""
        of, into = ([n for n, _ in mlp(layout).named_parameters()] for layout in (source, not source))
        groups = [{"lr": 1.0, "params": ["first", *of, "last"]}, {"lr": 2.0, "params": ["other"]}]
        converted = convert_optimizer_state({"state": {}, "param_groups": groups}, mlp(not source))
        assert converted["param_groups"][0]["params"] == ["first", *into, "last"], "in order"
        assert converted["param_groups"][1] == groups[1] and converted["state"] == {}
        names = [f"weight{e}" for e in range(E)]
        moments = {name: {"exp_avg": torch.zeros(OUT, H)} for name in names}
        some = {name: moments[name] for name in names[:2]}
        apart = {**moments, "weight3": {"exp_avg": torch.zeros(1)}}
        for state, lists in ((some, [names]), (apart, [names]), (moments, [names[:2], names[2:]])):
            given = {"state": state, "param_groups": [{"params": params} for params in lists]}
            assert convert_optimizer_state(given, linear(True, bias=False)) == given


@LAYOUTS
def test_on_the_host_path(fake_gpu: FakeGpu, packed: bool) -> None:
    """Into main_grad by the kernel itself, the result and x's gradient into buffers: one launch a weight."""
    module, out, grad_input = mlp(packed, dtype=BF16), *torch.zeros(2, ROWS, H, dtype=BF16)
    attach_main_grads(module, torch.float32, 1.0)
    offs, x = torch.tensor(SIZES).cumsum(0, dtype=torch.int32), batch(BF16).requires_grad_()
    for _ in range(2):
        fake_gpu.launches.clear()
        fake_gpu.work.clear()
        y = module(x, offs=offs, row_scale=scale(), out=out, grad_input=grad_input)
        y.backward(torch.ones_like(y))
        assert y.data_ptr() == out.data_ptr() and grad_input.any()
    if packed:
        assert fake_gpu.work[:2] == ["glu, mm", "dglu, mm"] and len(fake_gpu.work) == 6, (
            "two for weights, two for biases"
        )
    wgrads = [launch for launch in fake_gpu.launches if "dw" in launch and launch["dw"].dtype == torch.float32]
    into_main = [launch for launch in wgrads if launch["accumulate"] == 1]
    assert len(into_main) == 2 and all(bool(launch["dw_table"]) == (not packed) for launch in into_main)
    assert all(p.main_grad.abs().sum() > 0 for n, p in module.named_parameters() if "weight" in n)
