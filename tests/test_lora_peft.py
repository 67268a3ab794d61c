"""PEFT's adapters on transformers' experts under `experts_implementation="glulam"`, on the CPU."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest
import torch
from support.transformers_models import class_of, config_of
from torch import Tensor, nn

import glulam
from glulam.integrations import peft as integration

transformers = pytest.importorskip("transformers")
register = importlib.import_module("glulam.integrations.transformers").register

MODELS = ["Qwen3Moe", "Mixtral", "GptOss"]
NAMES = "gate_up_proj", "down_proj"


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """List that gets the adapters passed to each call of moe."""
    register()
    found: list[Any] = []
    layers = sys.modules["glulam.layer.moe"]
    inner = layers.lora_arguments  # type: ignore[attr-defined]
    monkeypatch.setattr(layers, "lora_arguments", lambda *given: (found.append(given[0]), inner(*given))[1])
    return found


def model_of(name: str, implementation: str) -> Any:
    torch.manual_seed(0)
    model = class_of(name)._from_config(config_of(name), experts_implementation=implementation)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    out = model(ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_close(got: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert got[1].keys() == wanted[1].keys() and len(wanted[1]) > 4
    for one, other in ((got[0], wanted[0]), *[(got[1][name], wanted[1][name]) for name in wanted[1]]):
        scale = float(other.abs().max())
        assert scale > 0 and float((one - other).abs().max()) <= 2e-5 * scale


class Factors(nn.Module):
    """Stand-in for PEFT's `_LoraFactorsProxy`."""

    def __init__(self, lhs: Tensor, rhs: Tensor, scaling: float) -> None:
        super().__init__()
        self.lhs, self.rhs, self.scaling = nn.Parameter(lhs), nn.Parameter(rhs), scaling

    def forward(self, w: Tensor) -> Tensor:
        return torch.baddbmm(w, self.lhs, self.rhs, alpha=self.scaling)


class Other(Factors):
    """A parametrization that is not PEFT's."""


def with_factors(model: Any, kind: type[Factors], names: tuple[str, ...]) -> Any:
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for place, name in enumerate(names):
            count, rows, columns = getattr(experts, name).shape
            rank = 3 - place
            lhs, rhs = torch.randn(count, rows, rank) * 0.1, torch.randn(count, rank, columns) * 0.1
            nn.utils.parametrize.register_parametrization(experts, name, kind(lhs, rhs, 1.5 + place))
    return model


@pytest.mark.parametrize("names", [NAMES, NAMES[:1], NAMES[1:]], ids="-".join)
@pytest.mark.parametrize("name", MODELS)
def test_factors_are_applied_apart(
    name: str, names: tuple[str, ...], applied: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "FACTORS", (Factors.__module__, Factors.__name__))
    made = [step(with_factors(model_of(name, each), Factors, names)) for each in ("eager", "glulam")]
    check_close(made[1], made[0])
    assert len(applied) == 2 and {len(one.given()) for one in applied} == {2 * len(names)}


def test_other_parametrizations_are_called(applied: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "FACTORS", (Factors.__module__, Factors.__name__))
    made = [step(with_factors(model_of("Qwen3Moe", each), Other, NAMES)) for each in ("eager", "glulam")]
    check_close(made[1], made[0])
    assert not applied


def test_weights_with_adapters_are_not_quantised() -> None:
    register(recipe="mxfp8_weight_only")
    try:
        model = with_factors(model_of("Qwen3Moe", "glulam"), Factors, NAMES).eval()
        with pytest.raises(RuntimeError, match="quantises weights in place.*merge them"), torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.int64))
    finally:
        register()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_pefts(name: str, applied: list[Any]) -> None:
    peft: types.ModuleType = pytest.importorskip("peft", minversion="0.21")
    made = []
    for implementation in ("eager", "glulam"):
        targets = [f"mlp.experts.{one}" for one in NAMES]
        config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=[], target_parameters=targets)
        model = peft.get_peft_model(model_of(name, implementation), config)
        torch.manual_seed(1)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                nn.init.normal_(parameter, std=0.1)
        made.append(step(model))
    check_close(made[1], made[0])
    assert len(applied) == 2 and all(isinstance(one, glulam.ExpertLora) for one in applied)
    wrappers = [one for one in model.modules() if type(one).__name__ == "ParamWrapper"]
    wrappers.sort(key=lambda one: one.parameter_name != NAMES[0])
    pairs = [(one.lora_A["default"].weight, one.lora_B["default"].weight) for one in wrappers]
    (a1, b1), (a2, b2) = pairs[0], pairs[len(pairs) // 2]
    experts, is_transposed = wrappers[0].num_experts, wrappers[0].get_base_layer().is_transposed
    adapter = glulam.ExpertLora.from_peft(a1, b1, a2, b2, experts, 5 / 3)
    delta = wrappers[0].get_delta_weight("default")
    assert adapter.a1 is not None and adapter.b1 is not None
    own = adapter.scale * adapter.b1 @ adapter.a1
    torch.testing.assert_close(own.mT if is_transposed else own, delta)
