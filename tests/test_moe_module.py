"""nn.MoE: forward and gradients of each model family's block against plain torch, state dicts by name, and options."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from support import moe_blocks
from support.criterion import same_bits
from support.fake_gpu import FakeGpu
from support.moe_blocks import EXPERTS, FAMILIES, HIDDEN, INTER, SHARED, block, some_state
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import glulam
from glulam.nn import MoE, convert_optimizer_state, convert_state_dict

pytest_plugins = ["support.fixtures"]

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
LAYOUTS = pytest.mark.parametrize("packed", [True, False])
EACH = pytest.mark.parametrize("name", FAMILIES)
TOKENS = 36
FULL: dict[str, Any] = {
    "score": "sigmoid", "choice_bias": True, "router_bias": True, "shared_intermediate_size": SHARED,
    "shared_gate": True, "bias": True,
}  # fmt: skip


def made(**options: Any) -> MoE:
    torch.manual_seed(1)
    return MoE(HIDDEN, INTER, EXPERTS, **{"top_k": 2, "dtype": F64, **options})


def loaded(name: str, **options: Any) -> MoE:
    module = made(**{**FAMILIES[name].options, **options})
    module.load_state_dict(some_state(name))
    return module


def batch(dtype: torch.dtype = F64, tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=F64).to(dtype)


def packed_grads(module: MoE, name: str = "grad") -> dict[str, Tensor]:
    """Return gradients by the parameter names of the packed layout."""
    values = {key: getattr(p, name) for key, p in module.named_parameters() if getattr(p, name, None) is not None}
    twin = copy.deepcopy(module)
    for child in twin.modules():
        if hasattr(child, "packed"):
            child.packed = True
    return convert_state_dict(values, twin)


@EACH
class TestFamilies:
    """Each family's block loads strictly by its own parameter names."""

    @LAYOUTS
    def test_forward_and_gradients(self, name: str, packed: bool) -> None:
        """Gradients by the family's names are converted as its weights are."""
        module, state = loaded(name, packed=packed), some_state(name)
        leaves = {key: value.requires_grad_("e_score" not in key) for key, value in state.items()}
        xs = [batch().requires_grad_() for _ in range(2)]
        got, want = module(xs[0]), block(name, leaves, xs[1])
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        assert want.abs().max() > 0.3
        mix = torch.randn(TOKENS, HIDDEN, dtype=F64)
        for y in (got, want):
            (y * mix).sum().backward()
        torch.testing.assert_close(xs[0].grad, xs[1].grad, rtol=1e-9, atol=1e-10)
        wanted = convert_state_dict({key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}, module)
        grads = {key: p.grad for key, p in module.named_parameters()}
        assert grads.keys() == wanted.keys()
        for key, value in grads.items():
            torch.testing.assert_close(value, wanted[key], rtol=1e-9, atol=1e-10)
            assert value.abs().max() > 1e-3, key

    @pytest.mark.parametrize("glu_layout", ["concat", "interleaved", "interleaved32"])
    @LAYOUTS
    def test_any_glu_layout(self, name: str, glu_layout: str, packed: bool) -> None:
        """How gate and up lie here is the module's choice."""
        module = loaded(name, glu_layout=glu_layout, packed=packed)
        torch.testing.assert_close(module(batch()), block(name, some_state(name), batch()), rtol=1e-10, atol=1e-10)

    @LAYOUTS
    def test_in_a_model(self, name: str, packed: bool) -> None:
        """Under other modules' names, beside their entries; converted alike, and not changed."""
        model = nn.ModuleDict({"norm": nn.LayerNorm(HIDDEN), "mlp": loaded(name, packed=packed)})
        state = {f"mlp.{key}": value for key, value in some_state(name).items()}
        state.update(model["norm"].state_dict(prefix="norm."))
        keys = list(state)
        other = nn.ModuleDict({"norm": nn.LayerNorm(HIDDEN), "mlp": made(packed=packed, **FAMILIES[name].options)})
        other.load_state_dict(state)
        assert list(state) == keys
        converted = convert_state_dict(state, other)
        assert converted.keys() == other.state_dict().keys()
        for key, value in model["mlp"].state_dict(prefix="mlp.").items():
            assert other.state_dict()[key].equal(value) and converted[key].to(value.dtype).equal(value)

    @LAYOUTS
    def test_into_a_module_without_memory(self, name: str, packed: bool) -> None:
        module = made(packed=packed, device="meta", **FAMILIES[name].options)
        module.load_state_dict(some_state(name), assign=True)
        assert not any(value.is_meta for value in module.state_dict().values())
        torch.testing.assert_close(module(batch()), block(name, some_state(name), batch()), rtol=1e-10, atol=1e-10)

    def test_an_incomplete_set(self, name: str) -> None:
        """Torch's own error, whichever key is missing, and nothing taken for what it is not."""
        for key in some_state(name):
            state = some_state(name)
            del state[key]
            with pytest.raises(RuntimeError, match="Missing key"):
                made(**FAMILIES[name].options).load_state_dict(state)

    def test_on_the_host_path(self, name: str, fake_gpu: FakeGpu) -> None:
        """By kernels' launches, which a stand-in runs."""
        options = {**FAMILIES[name].options, "router_dtype": F32, "dtype": BF16}
        for packed in (True, False):
            module = made(packed=packed, **options)
            module.load_state_dict(some_state(name))
            x = batch(BF16).requires_grad_()
            y = module(x)
            state = {key: value.double() for key, value in some_state(name, BF16).items()}
            want = block(name, state, x.detach().double(), module.routing.ids.long())
            torch.testing.assert_close(y.double(), want, rtol=0.03, atol=0.03)
            y.float().square().sum().backward()
            assert x.grad.any() and all(p.grad is not None for p in module.parameters())


class TestStateDicts:
    @pytest.mark.parametrize("source", [True, False])
    @pytest.mark.parametrize("target", [True, False])
    def test_its_own_names_in_either_layout(self, source: bool, target: bool) -> None:
        of, into = made(packed=source, **FULL), made(packed=target, **FULL)
        for value in of.state_dict().values():
            value.normal_()
        state = of.state_dict()
        into.load_state_dict(state)
        assert same_bits(into(batch()), of(batch()))
        assert convert_state_dict(state, into).keys() == into.state_dict().keys()

    def test_its_own_names(self) -> None:
        experts = [f"{part}.{fc}.{kind}" for part in ("experts", "shared") for fc in ("fc1", "fc2")
                   for kind in ("weight", "bias")]  # fmt: skip
        names = {"router.weight", "router.bias", "choice_bias", "shared_gate.weight", *experts}
        assert made(**FULL).state_dict().keys() == names

    @pytest.mark.parametrize("packed", [True, False])
    def test_optimizer_state(self, packed: bool) -> None:
        of, into = made(packed=not packed, **FULL), made(packed=packed, **FULL)
        state = {name: {"exp_avg": torch.randn_like(p)} for name, p in of.named_parameters()}
        assert convert_optimizer_state(state, into).keys() == dict(into.named_parameters()).keys()

    def refused(self, name: str, change: dict[str, Any], words: str, **options: Any) -> None:
        """Check that a family's state with `change` does not load, and that the error has `words`."""
        module = made(**{**FAMILIES[name].options, **options})
        state = {**some_state(name), **change}
        state = {key: value for key, value in state.items() if value is not None}
        with pytest.raises(RuntimeError, match=f"(?s){words}"):
            module.load_state_dict(state)

    def test_ambiguous_sets(self) -> None:
        weight, gate = torch.zeros(INTER, HIDDEN, dtype=F64), torch.zeros(EXPERTS, HIDDEN, dtype=F64)
        both = 'Unexpected.*"experts.0.gate_proj.weight"'
        self.refused("qwen3", {f"experts.{EXPERTS}.gate_proj.weight": weight}, f'Missing.*"experts.fc1.weight".*{both}')
        self.refused("qwen3", {"experts.0.w1.weight": weight}, both)
        self.refused("qwen3", {"experts.fc1.weight": made().experts.fc1.weight.data}, both)
        self.refused("qwen3", {"gate.bias": gate[:, 0]}, 'Unexpected.*"gate.bias"')
        self.refused("qwen3", {"router.weight": gate}, 'Unexpected.*"gate.weight"')
        self.refused("qwen3", some_state("mixtral"), both)
        twice = {key.replace("shared_experts", "shared_expert"): v for key, v in some_state("deepseek").items()}
        self.refused("deepseek", twice, 'Missing.*"shared.fc1.weight".*Unexpected.*"shared_experts.up_proj.weight"')
        stacked = "qwen3 of transformers 5"
        biases = {
            f"experts.{n}_bias": some_state("gpt-oss")[f"experts.{n}_bias"] for n in ("gate_up_proj", "down_proj")
        }
        self.refused(stacked, biases, 'Unexpected.*"experts.gate_up_proj"')

    def test_what_the_module_has_no_place_for(self) -> None:
        self.refused("gpt-oss", {}, 'Unexpected.*"experts.gate_up_proj"', bias=False)
        self.refused("gpt-oss", {}, 'Unexpected.*"router.bias"', router_bias=False)
        self.refused("deepseek", {}, 'Unexpected.*"gate.e_score_correction_bias"', choice_bias=False)
        self.refused(
            "qwen2", {}, 'Unexpected.*"shared_expert.up_proj', shared_intermediate_size=None, shared_gate=False
        )
        self.refused("qwen2", {}, 'Unexpected.*"shared_expert_gate.weight"', shared_gate=False)
        self.refused("qwen3", {}, 'Unexpected.*"experts.0.gate_proj.weight"', activation="silu", glu_layout="concat")
        self.refused("qwen3", {}, 'Missing.*"experts.fc1.bias"', bias=True)

    def test_tensors_that_do_not_fit(self) -> None:
        odd = torch.zeros(33, HIDDEN, dtype=F64)
        for value in (odd, torch.zeros(INTER, HIDDEN), torch.zeros(INTER, dtype=F64), "text"):
            self.refused("qwen3", {"experts.3.up_proj.weight": value}, 'Unexpected.*"experts.3.up_proj.weight"')
        state = {f"experts.{e}.{name}.weight": odd for name in ("gate_proj", "up_proj") for e in range(EXPERTS)}
        self.refused("qwen3", state, 'Unexpected.*"experts.3.up_proj.weight"', glu_layout="interleaved32")
        self.refused("qwen3", state, "size mismatch for experts.fc1.weight")
        other = some_state("gpt-oss")["experts.gate_up_proj"]
        self.refused("qwen3 of transformers 5", {"experts.gate_up_proj": other}, "size mismatch for experts.fc1.weight")

    def test_a_choice_bias_of_16_bits(self) -> None:
        """Loads as float32, assigned or not, where small updates are not rounded away."""
        state = {key: value.to(BF16) for key, value in some_state("deepseek").items()}
        state["gate.e_score_correction_bias"].add_(1)
        own = convert_state_dict(state, made(**FAMILIES["deepseek"].options))
        for given, assign, device in itertools.product((state, own), (False, True), ("cpu", "meta")):
            if device == "meta" and not assign:
                continue
            module = made(**{**FAMILIES["deepseek"].options, "dtype": BF16, "device": device})
            module.load_state_dict(given, assign=assign)
            assert module.choice_bias.dtype == F32
            before = module.choice_bias.clone()
            module(batch(BF16))
            module.update_choice_bias(1e-3, torch.arange(EXPERTS))
            wanted = before + 1e-3 * (torch.arange(EXPERTS) < (EXPERTS - 1) / 2).float().mul(2).sub(1)
            torch.testing.assert_close(module.choice_bias, wanted, rtol=0, atol=1e-6)
        assert state["gate.e_score_correction_bias"].dtype == BF16

    @pytest.mark.parametrize("assign", [False, True])
    @pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
    def test_a_state_in_mxfp4_loads_twice(self, scale_dtype: torch.dtype, assign: bool) -> None:
        """What is loaded is not written, be it assigned; scales may be bytes or 8-bit floats."""
        of, *into = (MoE(64, 32, EXPERTS, 2, recipe="mxfp4_weight_only", dtype=BF16) for _ in range(3))
        x = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(3)).to(BF16)
        for layer in (of.experts.fc1, of.experts.fc2):
            layer.weight_scale.random_(118, 124)
        scales = {key: value.view(scale_dtype) for key, value in of.state_dict().items() if key.endswith("_scale")}
        state = {**of.state_dict(), **scales}
        before = copy.deepcopy(state)
        with torch.no_grad():
            for module in into:
                module.load_state_dict(state, assign=assign)
                assert same_bits(module(x), of(x)) and of(x).abs().max() > 0.01
        for name, value in before.items():
            assert torch.equal(state[name].view(torch.uint8), value.view(torch.uint8))


class TestForward:
    def test_leading_dimensions(self) -> None:
        module, x = made(**FULL), batch()
        want = module(x)
        assert same_bits(module(x.view(4, 9, HIDDEN)), want.view(4, 9, HIDDEN))
        assert same_bits(module(x[0]), module(x[:1])[0])
        swapped = x.view(4, 9, HIDDEN).transpose(0, 1)
        torch.testing.assert_close(module(swapped), want.view(4, 9, HIDDEN).transpose(0, 1))
        assert module(x[:0]).shape == (0, HIDDEN) and module(x.new_empty(2, 0, HIDDEN)).shape == (2, 0, HIDDEN)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"activation": "geglu", "glu_layout": "interleaved", "recompute": True, "bias": True},
            {"activation": "clamped_swiglu", "limit": 0.5, "alpha": 1.0, "offset": 0.0},
            {"activation": "srelu", "packed": False},
            {"recipe": "mxfp8"},
        ],
    )
    def test_it_is_moe_of_its_parts(self, options: dict[str, Any]) -> None:
        dtype = BF16 if "recipe" in options else F64
        module = MoE(128, 128, EXPERTS, 2, dtype=dtype, **options)
        x = torch.randn(TOKENS, 128).to(dtype)
        parts = {f"{kind[0]}{i}": fc.experts(kind) for i, fc in ((1, module.experts.fc1), (2, module.experts.fc2))
                 for kind in ("weight", "bias")}  # fmt: skip
        routing = glulam.route(module.router(x), 2)
        others = {name: value for name, value in options.items() if name not in ("packed", "bias")}
        want = glulam.moe(x, routing, parts["w1"], parts["w2"], b1=parts["b1"], b2=parts["b2"], **others)
        assert same_bits(module(x), want) and want.abs().max() > 1e-2

    def test_padding(self) -> None:
        """Tokens from num_tokens on go to the shared expert alone, and count in no gradient of the others."""
        limit = torch.tensor([9], dtype=torch.int32)
        module, short, x = made(**FULL), made(**FULL), batch()
        y, want = module(x, num_tokens=limit), short(x[:9])
        torch.testing.assert_close(y[:9], want)
        only = module.shared(x, offs=torch.tensor([TOKENS], dtype=torch.int32),
                             row_scale=module.shared_gate(x).sigmoid().squeeze(1))  # fmt: skip
        torch.testing.assert_close(y[9:], only[9:])
        for out in (y[:9], want):
            out.square().sum().backward()
        for one, other in zip(module.parameters(), short.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        assert not made()(x, num_tokens=limit)[9:].any()

    def test_a_float32_router(self) -> None:
        """Beside 16-bit experts: logits are not rounded, and stay float32 when all is cast, and under autocast."""
        module = made(router_dtype=F32, dtype=BF16)
        assert module.router.weight.dtype == F32 and module.experts.fc1.weight.dtype == BF16
        x = batch(BF16)
        module(x)
        assert module.routing.logits.equal(x.float() @ module.router.weight.T)
        assert not module.routing.logits.equal(module.routing.logits.to(BF16).float())
        with torch.autocast("cpu", dtype=BF16):
            logits = module.routing.logits
            module(x)
        assert module.routing.logits.equal(logits)
        module.to(BF16)(x)
        assert module.routing.logits.dtype == F32

    def test_autocast_casts_nothing(self) -> None:
        module = made(dtype=F32, **FULL)
        want = module(batch(F32))
        with torch.autocast("cpu", dtype=BF16):
            assert same_bits(module(batch(F32)), want)

    def test_without_memory(self) -> None:
        assert made(device="meta", **FULL)(torch.empty(5, HIDDEN, dtype=F64, device="meta")).shape == (5, HIDDEN)

    def test_bad_input(self) -> None:
        for x in (torch.zeros(4, HIDDEN * 2), torch.zeros(()), [1.0]):
            with pytest.raises(ValueError, match=rf"MoE: x is .*; give a tensor \[..., {HIDDEN}\]"):
                made()(x)
        with pytest.raises(TypeError, match="is torch.float64 but x is torch.float32"):
            made()(batch(F32))


class TestConstruction:
    @LAYOUTS
    def test_parameters(self, packed: bool) -> None:
        sizes = {"router": EXPERTS * (HIDDEN + 1), "shared_gate": HIDDEN}
        for part, experts, inter in (("experts", EXPERTS, INTER), ("shared", 1, SHARED)):
            sizes[part] = experts * (3 * HIDDEN * inter + 2 * inter + HIDDEN)
        module = made(packed=packed, **FULL)
        assert {name: sum(p.numel() for p in child.parameters()) for name, child in module.named_children()} == sizes
        assert [name for name, _ in module.named_buffers()] == ["choice_bias"]
        assert not list(made().named_buffers()) and made().shared is None and made().shared_gate is None

    @LAYOUTS
    def test_meta_device(self, packed: bool) -> None:
        module = made(packed=packed, device="meta", **FULL)
        assert all(value.is_meta for value in module.state_dict().values())
        module.to_empty(device="cpu")
        for value in module.state_dict().values():
            value.fill_(torch.nan)
        module.reset_parameters()
        assert not module.choice_bias.any()
        for parameter in module.parameters():
            assert 0 < float(parameter.detach().abs().max()) <= HIDDEN**-0.5
        assert module(batch()).isfinite().all()

    def test_repr(self) -> None:
        text = repr(made(router_dtype=F32, normalize=False, scale=2.5, num_groups=4, top_groups=2, **FULL))
        for words in (
            "hidden_size=24, num_experts=8, top_k=2, score='sigmoid', normalize=False, scale=2.5, num_groups=4",
            "top_groups=2, choice_bias=True, router_dtype=torch.float32",
            "(router): Linear(in_features=24, out_features=8, bias=True)", "(shared): GroupedMLP",
            "(shared_gate): Linear(in_features=24, out_features=1, bias=False)",
        ):  # fmt: skip
            assert words in text
        assert "hidden_size=24, num_experts=8, top_k=2\n" in repr(made())

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"num_experts": 0}, ValueError, "num_experts is 0"),
            ({"num_experts": 2000}, ValueError, "E = 2000 experts; 1 to 1024"),
            ({"hidden_size": 1.5}, TypeError, "hidden_size is 1.5"),
            ({"top_k": 9}, ValueError, "top_k is 9; it must be 1 to 8"),
            ({"top_k": None}, TypeError, "top_k is None"),
            ({"top_k": 5, "num_groups": 4, "top_groups": 2}, ValueError, "top_k is 5; it must be 1 to 4"),
            ({"num_groups": 3}, ValueError, "num_groups is 3; it must cut 8 experts"),
            ({"top_groups": 2}, ValueError, "top_groups is 2; it must be 1 to 1"),
            ({"score": "tanh"}, ValueError, "score='tanh'"),
            ({"normalize": 1}, TypeError, "normalize is 1"),
            ({"scale": None}, TypeError, "scale is None"),
            ({"router_bias": None}, TypeError, "router_bias is None"),
            ({"choice_bias": torch.zeros(8)}, TypeError, "choice_bias is tensor"),
            ({"router_dtype": torch.int8}, TypeError, "router_dtype is torch.int8"),
            ({"shared_gate": True}, ValueError, "shared_gate is True but there is no shared expert; give shared_inter"),
            ({"shared_intermediate_size": 0}, ValueError, "shared_intermediate_size is 0"),
            ({"activation": "swish"}, ValueError, "activation is 'swish'"),
            ({"shared_intermediate_size": 48, "glu_layout": "interleaved32"}, ValueError, "multiple of 32"),
            ({"recipe": "mxfp8_exact", "delay_wgrad": True}, ValueError, "has no gradient"),
            ({"dtype": torch.int8}, TypeError, "dtype is torch.int8"),
        ],
    )
    def test_refusals(self, options: dict[str, Any], error: Any, words: str) -> None:
        sizes = {"hidden_size": HIDDEN, "intermediate_size": INTER, "num_experts": EXPERTS, "top_k": 2}
        with pytest.raises(error, match=f"^(MoE|GroupedMLP): .*{words}"):
            MoE(**{**sizes, **options})

    def test_refusals_on_a_gpu(self, fake_gpu: FakeGpu) -> None:
        with pytest.raises(TypeError, match="dtype is torch.float32; on .* give dtype=torch.bfloat16"):
            MoE(HIDDEN, INTER, EXPERTS, 2)
        with pytest.raises(TypeError, match="router_dtype is torch.float64"):
            MoE(HIDDEN, INTER, EXPERTS, 2, dtype=BF16, router_dtype=F64)

    def test_casts_keep_the_choice_bias(self) -> None:
        module = made(**FULL)
        module.choice_bias.normal_()
        before = module.choice_bias.clone()
        for cast in (lambda m: m.to(BF16), lambda m: m.half(), lambda m: m.double(), lambda m: m.float()):
            assert cast(module).choice_bias.equal(before) and module.choice_bias.dtype == F32
        assert module.to("meta").choice_bias.is_meta

    @LAYOUTS
    def test_copies(self, packed: bool) -> None:
        """After a forward, too; they share nothing."""
        module = made(packed=packed, **FULL)
        y = module(batch())
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert other.routing is None and module.routing is not None
            assert same_bits(other(batch()), y)
            other(batch()).sum().backward()
        assert all(p.grad is None for p in module.parameters())


class TestTraining:
    @LAYOUTS
    @pytest.mark.parametrize("main_grads", [False, True])
    def test_delayed_weight_gradients(self, packed: bool, main_grads: bool) -> None:
        """Of two passes that are pending at once; the sums equal an ordinary module's."""
        plain, delayed = made(packed=packed, **FULL), made(packed=packed, delay_wgrad=True, **FULL)
        weights = {n: p for n, p in delayed.named_parameters() if ".fc" in n and "weight" in n}
        if main_grads:
            for parameter in weights.values():
                parameter.main_grad = torch.zeros_like(parameter, requires_grad=False)
        for module in (plain, delayed):
            for factor in (1.0, 2.0):
                module(batch() * factor).square().sum().backward()
        assert all(p.grad is None for p in weights.values())
        delayed.backward_dw()
        delayed.backward_dw()
        with pytest.raises(RuntimeError, match="no weight gradient is pending"):
            delayed.backward_dw()
        for (key, parameter), other in zip(delayed.named_parameters(), plain.parameters(), strict=True):
            got = parameter.main_grad if main_grads and key in weights else parameter.grad
            torch.testing.assert_close(got, other.grad)

    @LAYOUTS
    @pytest.mark.parametrize("overwrite", [False, True])
    def test_main_grad(self, packed: bool, overwrite: bool) -> None:
        plain, module = made(packed=packed, **FULL), made(packed=packed, **FULL)
        for name, parameter in module.named_parameters():
            if ".fc" in name and "weight" in name:
                parameter.main_grad = torch.ones_like(parameter, requires_grad=False)
                parameter.overwrite_main_grad, parameter.grad_added_to_main_grad = overwrite, False
        xs = [batch().requires_grad_() for _ in range(2)]
        for one, x in ((plain, xs[0]), (module, xs[1])):
            one(x).square().sum().backward()
        torch.testing.assert_close(xs[0].grad, xs[1].grad)
        for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
            into_main = hasattr(parameter, "main_grad")
            got = parameter.main_grad if into_main else parameter.grad
            torch.testing.assert_close(got, other.grad + (into_main and not overwrite))
            assert not into_main or parameter.grad_added_to_main_grad

    def test_backward_dw_refuses(self) -> None:
        with pytest.raises(RuntimeError, match="made without delay_wgrad=True"):
            made().backward_dw()
        module = made(delay_wgrad=True, **FULL)
        module.experts.requires_grad_(False)
        module(batch()).sum().backward()
        module.backward_dw()
        assert module.shared.fc1.weight.grad is not None

    def test_losses_train_the_router(self) -> None:
        """By the last forward's routing."""
        module, x = made(**FULL), batch()
        module(x)
        logits = x @ module.router.weight.detach().T + module.router.bias.detach()
        torch.testing.assert_close(module.routing.logits.detach(), logits)
        loss = glulam.load_balancing_loss(module.routing) + glulam.router_z_loss(module.routing.logits)
        loss.backward()
        assert module.router.weight.grad.any() and module.experts.fc1.weight.grad is None

    def test_the_choice_bias_evens_out_loads(self) -> None:
        module, x = made(score="sigmoid", choice_bias=True), batch(tokens=400) + 0.5

        def spread() -> float:
            with torch.no_grad():
                module(x)
            counts = module.routing.counts.double()
            return float(counts.std() / counts.mean())

        before = spread()
        for _ in range(200):
            module.update_choice_bias(0.005)
            after = spread()
        assert before > 0.3 and after < before / 4
        bias = module.choice_bias.clone()
        counts = torch.tensor([0, 10, 5, 5, 5, 5, 5, 5])
        module.update_choice_bias(0.25, counts)
        wanted = torch.tensor([0.25, -0.25, 0, 0, 0, 0, 0, 0])
        torch.testing.assert_close(module.choice_bias - bias, wanted)
        for other, words in ((made(), "made without choice_bias"), (made(choice_bias=True), "no forward")):
            with pytest.raises(RuntimeError, match=words):
                other.update_choice_bias(0.1)

    def test_an_optimizer_learns(self) -> None:
        module, target = made(**FULL), torch.randn(TOKENS, HIDDEN, dtype=F64)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            loss = (module(batch()) - target).square().mean() + 0.01 * glulam.load_balancing_loss(module.routing)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.5 * losses[0]


class TestTransforms:
    def grads(self, module: MoE, y: Tensor) -> dict[str, Tensor]:
        (y.square().sum() + glulam.load_balancing_loss(module.routing)).backward()
        return packed_grads(module)

    @LAYOUTS
    @pytest.mark.parametrize("shape", [(TOKENS, HIDDEN), (2, TOKENS // 2, HIDDEN)], ids=["tokens", "sequences"])
    def test_compiled(self, shape: tuple[int, ...], packed: bool) -> None:
        """One graph, and the routing comes out of it."""
        torch.compiler.reset()
        eager, compiled = made(packed=packed, **FULL), made(packed=packed, **FULL)
        want = self.grads(eager, eager(batch().view(shape)))
        call = torch.compile(compiled, backend="aot_eager", fullgraph=True)
        got = self.grads(compiled, call(batch().view(shape)))
        for name, value in want.items():
            torch.testing.assert_close(got[name], value)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpoint(self, use_reentrant: bool) -> None:
        plain, module = made(**FULL), made(**FULL)
        want = batch().requires_grad_()
        plain(want).square().sum().backward()
        x = batch().requires_grad_()
        checkpoint(module, x, use_reentrant=use_reentrant).square().sum().backward()
        torch.testing.assert_close(x.grad, want.grad)
        for name, value in packed_grads(plain).items():
            torch.testing.assert_close(packed_grads(module)[name], value)

    def test_losses_under_checkpoint(self) -> None:
        plain, module = made(**FULL), made(**FULL)
        want = self.grads(plain, plain(batch()))
        got = self.grads(module, checkpoint(module, batch(), use_reentrant=False))
        for name, value in want.items():
            torch.testing.assert_close(got[name], value)

    def test_exported(self) -> None:
        module = made(**FULL)
        program = torch.export.export(module, (batch(),))
        assert same_bits(program.module()(batch()), module(batch()))


def test_blocks_see_every_tensor() -> None:
    """A reference that left something out would hide that the module does."""
    for name in FAMILIES:
        x, state = batch(), some_state(name)
        want = block(name, state, x)
        for key in state:
            changed = {**state, key: moe_blocks.some_state(name)[key].flip(0) * 1.5}
            assert not block(name, changed, x).allclose(want), (name, key)


@pytest.mark.parametrize(
    "router, error, words",
    [
        (nn.Sequential(nn.Linear(64, 4)), ValueError, r"router returned \[3, 4\]; give a module that returns \[N, 8\]"),
        (nn.Linear(64, 4), ValueError, r"router.weight has shape \[4, 64\]; it must be \[8, 64\]"),
        (nn.LSTM(64, 8), TypeError, r"router returned a tuple; give a module that returns a tensor \[N, 8\]"),
    ],
)
def test_a_router_that_does_not_fit_is_named(router: nn.Module, error: type[Exception], words: str) -> None:
    layer = MoE(64, 32, 8, 2)
    layer.router = router  # type: ignore[assignment]
    with pytest.raises(error, match=words):
        layer(torch.zeros(3, 64))
