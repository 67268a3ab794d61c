"""Reads PEFT's adapters of experts, `LoraConfig(target_parameters=["mlp.experts.gate_up_proj", ...])`, for `lora=`.

During a forward, PEFT's ParamWrapper registers a parametrization of the experts' parameter, which computes the sum
W + scale lhs rhs for all experts. This file reads W, lhs and rhs instead, so that no sum is computed and kept for
backward. (One sum remains: torch calls a parametrization once when it is registered, to look at its result.)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..expert_lora import ExpertLora

FACTORS = "peft.tuners.lora.layer", "_LoraFactorsProxy"
"""Module and name of the class of PEFT's parametrization. An instance has one adapter: `lhs`, `rhs` and `scaling`."""
Factors = tuple[Tensor, Tensor, float]


def is_parametrized(experts: Any) -> bool:
    """Return True if a parameter of the module has a parametrization, which torch computes at each access."""
    return "parametrizations" in experts._modules


def weights_and_lora(experts: Any, names: tuple[str, str]) -> tuple[Any, Any, ExpertLora | None]:
    """Return (FC1's weight, FC2's weight, their adapters or None).

    If a weight has another parametrization than PEFT's, the weight that this parametrization computes is returned.

    Args:
        experts: the experts module.
        names: the module's attributes for the two weights.
    """
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
    """Return the LoRA matrices (a [E, r, in], b [E, out, r]) of one weight; (None, None): it has no adapter.

    An ExpertLora has one scale for both weights. So b is multiplied by (this weight's own LoRA scale) / `scale`.

    Args:
        experts: the module of the experts.
        factors: PEFT's lhs, rhs and scale of the weight. None: no adapter.
        scale: the scale of the ExpertLora.
    """
    if factors is None:
        return None, None
    lhs, rhs, own_scale = factors
    a, b = (lhs.mT, rhs.mT) if experts.is_transposed else (rhs, lhs)
    return a, b if own_scale == scale else b * (own_scale / scale)
