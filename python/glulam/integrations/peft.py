"""PEFT's adapters of experts, `LoraConfig(target_parameters=["mlp.experts.gate_up_proj", ...])`, as `lora=` takes them.

For the time of a forward PEFT's ParamWrapper registers a parametrization of the experts' parameter that makes the sum
W + scale lhs rhs, of all experts. Here its factors are read instead, and backward keeps no second weight. (When a
parametrization is registered torch calls it once, to look at its result.)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..expert_lora import ExpertLora

FACTORS = "peft.tuners.lora.layer", "_LoraFactorsProxy"
"""Module and name of the class of such a parametrization, which holds one adapter: `lhs`, `rhs` and `scaling`."""
Factors = tuple[Tensor, Tensor, float]


def is_parametrized(experts: Any) -> bool:
    """Return True if torch makes a parameter of the module anew at each access."""
    return "parametrizations" in experts._modules


def weights_and_lora(experts: Any, names: tuple[str, str]) -> tuple[Any, Any, ExpertLora | None]:
    """FC1's weight, FC2's, and their adapters; a weight with another parametrization is what that makes."""
    (w1, first), (w2, second) = (_weight_and_factors(experts, name) for name in names)
    if first is None and second is None:
        return w1, w2, None
    scale = (first or second)[2]  # type: ignore[index]
    return w1, w2, ExpertLora(*_matrices(experts, first, scale), *_matrices(experts, second, scale), scale)


def _weight_and_factors(experts: Any, name: str) -> tuple[Any, Factors | None]:
    registered = dict(experts.parametrizations.items()).get(name)
    if registered is not None and len(registered) == 1:
        only = registered[0]
        if (type(only).__module__, type(only).__name__) == FACTORS:
            return registered.original, (only.lhs, only.rhs, float(only.scaling))
    return getattr(experts, name), None


def _matrices(experts: Any, factors: Factors | None, scale: float) -> tuple[Tensor | None, Tensor | None]:
    """a [E, r, in] and b [E, out, r] of an adapter, b for products times this scale."""
    if factors is None:
        return None, None
    lhs, rhs, own_scale = factors
    a, b = (lhs.mT, rhs.mT) if experts.is_transposed else (rhs, lhs)
    return a, b if own_scale == scale else b * (own_scale / scale)
