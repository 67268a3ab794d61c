"""The space of problems, taken from the library's declarations: functions, options, recipes, kinds of weights.

A new operator, flag, activation, number, recipe or format is drawn without a line here. If nothing here knows the kind
of a parameter, `undrawn` names the parameter, and a test fails.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from support.wrong_calls import PUBLIC

import glulam
from cute_kernels.formulas import FORMULAS, NUMBERS
from cute_kernels.specs import GATED, GLU_LAYOUTS
from glulam.calls.roles import ROLES, WEIGHTS, Kind
from glulam.formats.form import Form
from glulam.formats.mxfp8.layout import AXES, BLOCK_SIZES, SCALE_LAYOUTS
from glulam.formats.mxfp8.quantize import QUANTIZE_AXES
from glulam.layer.checks import SCORES
from glulam.ops.adapted import adapted_dglu, adapted_glu, adapted_mm
from glulam.ops.quantized_mm import QuantizedMmCall
from glulam.ops.quantized_weights import FORMS
from glulam.recipes import RECIPES

INNER: dict[str, Callable[..., Any]] = {one.__name__: one for one in (adapted_mm, adapted_glu, adapted_dglu)}
"""Operators of LoRA's steps, which take `low` and `low_w` directly."""
FUNCTIONS: dict[str, Callable[..., Any]] = {**PUBLIC, **INNER}
GROUPS = ("offs", "splits_int32", "splits_int64", "splits_list")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

CHOICES: dict[str, tuple[Any, ...]] = {
    "activation": tuple(FORMULAS),
    "glu_layout": GLU_LAYOUTS,
    "recipe": tuple(RECIPES),
    "score": SCORES,
    "axis": QUANTIZE_AXES,
    "block": tuple(BLOCK_SIZES),
    "scale_layout": SCALE_LAYOUTS,
    "x_block": (None, *BLOCK_SIZES),
    "out_dtype": (None, "float32"),
    "lora": (None, "12", "1", "2"),
    "k": (1, 2, 3),
    "num_groups": (1, 2),
    "scale": (1.0, 2.5),
    "first": (0, 2),
    "world_experts": (None, 1000),
    "iters": (20, 0, 3),
    "eps": (1e-6, 1e-2),
    **dict.fromkeys(("sinkhorn_eps", "rms_eps", "norm_eps"), (1e-6, 1e-2)),
}
"""Values of options by name, the simplest first.

Not listed: flags, which are recognised by their defaults, and activations' constants (`NUMBERS`).
"""
OWN_CHOICES: dict[tuple[str, str], tuple[Any, ...]] = {
    ("prepare_mxfp8_weight", "axis"): AXES, ("boundary", "iters"): (20, 1, 3),
}  # fmt: skip
OF_NUMBERS = {"limit": (7.0, 1.5, 0.0), "up_cap": (25.0, None, 2.0)}
"""Values of an activation's constant, if they are not its default and half of it."""
NOT_DRAWN = {
    "parallel": "needs ranks",
    "max_error": "a threshold of refusals",
    "report": "a threshold of refusals",
    "numbers": "each number has a name of its own",
    "num_experts": "told by weights",
    "top_groups": "follows num_groups",
}
"""Options that no problem has, each with its reason."""


def parameters(call: str) -> dict[str, inspect.Parameter]:
    """Return a function's parameters."""
    return _parameters(FUNCTIONS[call])


@functools.cache
def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def values_of(call: str, name: str) -> tuple[Any, ...]:
    """Return the values of an option, the simplest first.

    Empty: the parameter is not an option, or its values are unknown.
    """
    parameter = parameters(call)[name]
    if name in NOT_DRAWN or "Tensor" in str(parameter.annotation):
        return ()
    if (call, name) in OWN_CHOICES or name in CHOICES:
        return OWN_CHOICES.get((call, name), CHOICES.get(name, ()))
    if isinstance(parameter.default, bool) or ROLES.get(name, ROLES["x"]).schema == "bool" or "bool" in str(
        parameter.annotation
    ):  # fmt: skip
        return (False, True) if parameter.default is not True else (True, False)
    if name in NUMBERS:
        return OF_NUMBERS.get(name, (NUMBERS[name].default, NUMBERS[name].default / 2))
    return ()


def is_option(call: str, name: str) -> bool:
    """Return True if a parameter is not a tensor, according to its role, its annotation, or the lists here."""
    if name in NOT_DRAWN or values_of(call, name):
        return True
    return name in ROLES and ROLES[name].kind is Kind.OPTION


def options_of(call: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of every option that problems draw."""
    return {name: values for name in parameters(call) if (values := values_of(call, name))}


def optional_of(call: str) -> list[str]:
    """Return the optional tensors of a function."""
    found = []
    for name, parameter in parameters(call).items():
        if parameter.default is None and not is_option(call, name) and name not in ("offs", "splits"):
            found.append(name)
    return found


def groups_of(call: str) -> tuple[str, ...]:
    """Return the ways in which a function takes group sizes."""
    names = parameters(call)
    return GROUPS if "splits" in names else ("offs",)


def weights_of(call: str) -> list[str]:
    return [name for name in parameters(call) if name in WEIGHTS and not _is_packed_alone(call, name)]


def _is_packed_alone(call: str, name: str) -> bool:
    """Return True if weights must be one packed tensor: low-rank weights, and arguments of quantisers."""
    return name == "low_w" or call.startswith(("quantize_", "prepare_"))


def form_of(recipe: str) -> Form:
    return FORMS[recipe]


def forms_of(call: str, recipe: str) -> tuple[str, ...]:
    """Return the kinds of weights that a call with a recipe accepts: class names, "packed", "list" or "GateUp"."""
    if call in ("quantize_mxfp4", "prepare_mxfp8_weight", "prepare_mxfp4_weight") or not weights_of(call):
        return ("packed",)
    if recipe != "bf16":
        return ("packed", "list", *[kind.__name__ for kind in FORMS[recipe].classes])
    found = ["packed", "list"]
    if "w1" in parameters(call) and call not in INNER:
        found.append("GateUp")
    if call == "grouped_mm":
        found += sorted(kind.__name__ for kind in QuantizedMmCall.classes)
    return tuple(found)


def recipe_of_form(form: str) -> str:
    """Return the recipe that decodes weights of a class for 16-bit rows."""
    recipe: str = getattr(glulam, form).weight_only
    return recipe


def is_gated(problem: Any) -> bool:
    return problem.options.get("activation", "swiglu") in GATED


def undrawn() -> list[str]:
    """Return the parameters that no problem sets and that have no listed reason."""
    from .tensors import MAKERS  # which is made of this

    lines = []
    for call in FUNCTIONS:
        for name in parameters(call):
            is_known = values_of(call, name) or name in NOT_DRAWN or name in ("offs", "splits")
            if not is_known and (call, name) not in MAKERS and ("", name) not in MAKERS:
                lines.append(f"{call}: {name}")
    return lines
