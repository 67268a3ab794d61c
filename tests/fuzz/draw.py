"""Hypothesis strategies that draw problems; the first value of each is the simplest, towards which shrinking goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from cute_kernels.architectures import ARCHS
from cute_kernels.formulas import FORMULAS, NUMBERS
from cute_kernels.shipped import ships_adapted
from glulam.host import device as gpus
from glulam.ops.quantized_weights import FORMS
from glulam.recipes import RECIPES
from glulam.validate.inputs import UNREACHED

from . import declared
from .problem import Problem

MOST_EXPERTS, MOST_ROWS, MOST_TAIL = 6, 9, 4
ON_GPU = 8
"""Widths are multiples of this on a GPU."""


def sizes(draw: Any) -> tuple[int, ...]:
    """Draw rows of each expert: any, some empty, all empty, or all except one empty."""
    count = draw(st.integers(1, MOST_EXPERTS))
    kind = draw(st.sampled_from(("any", "some empty", "one", "none")))
    if kind == "any":
        return tuple(draw(st.lists(st.integers(1, MOST_ROWS), min_size=count, max_size=count)))
    if kind == "none":
        return (0,) * count
    if kind == "one":
        at = draw(st.integers(0, count - 1))
        return tuple(draw(st.integers(1, 40)) if expert == at else 0 for expert in range(count))
    return tuple(draw(st.lists(st.integers(0, MOST_ROWS), min_size=count, max_size=count)))


def _unit(call: str, recipe: str, form: str, options: dict[str, Any], device: str) -> int:
    """Return the number of which widths must be multiples."""
    units = [1 if device == "cpu" else ON_GPU]
    if recipe != "bf16":
        units.append(FORMS[recipe].multiple)
    if form not in ("packed", "list", "GateUp"):
        units.append(32)
    is_in_blocks = options.get("glu_layout") == "interleaved32" or options.get("x_block")
    if call.startswith(("quantize", "prepare", "mxfp8")) or is_in_blocks:
        units.append(32)
    if call in ("permute", "combine", "aggregate", "post_mix", "pre", "project", "boundary"):
        units.append(ON_GPU)
    return max(units)


def _consistent(call: str, options: dict[str, Any], form: str, given: list[str]) -> None:
    """Remove options that contradict each other; tests/test_wrong_calls.py checks that such calls are refused."""
    recipe = options.get("recipe", "bf16")
    if "activation" in options:
        own = FORMULAS[options["activation"]].numbers
        for name in [name for name in options if name in NUMBERS and name not in own]:
            options.pop(name)
        if not _is_gated(options):
            options["glu_layout"] = "concat"
    is_plain = recipe == "bf16" and form in ("packed", "list", "GateUp")
    if not is_plain or form == "GateUp":
        options.pop("transpose_w", None)
    if form == "GateUp":
        options["activation"] = options["activation"] if _is_gated(options) else "swiglu"
        options["glu_layout"] = "concat"
    if options.get("lora"):
        options.pop("recompute", None)
        if recipe != "bf16" and not RECIPES[recipe].freezes_weights:
            options["lora"] = None
    if options.get("recompute") and not (RECIPES[recipe].trains or RECIPES[recipe].freezes_weights):
        options.pop("recompute")
    if call == "grouped_wgrad":
        if not RECIPES[recipe].trains:
            options["recipe"] = "bf16"
        if "out" not in given:
            options.pop("accumulate", None)
            given[:] = [name for name in given if name != "mask"]
        if "mask" in given:
            options.pop("accumulate", None)
        if {"x_rows", "dy_rows"} <= set(given):
            given.remove("dy_rows")
        if "out" in given and options.get("out_dtype"):
            options.pop("out_dtype")
    if call == "Routing.from_topk" and "expert_map" in given:
        options.pop("first", None)
    if "bias_scale" in given and "bias" not in given:
        given.remove("bias_scale")


def _is_gated(options: dict[str, Any]) -> bool:
    return declared.is_gated(Problem("", options=options))


def _dtype(draw: Any, call: str, recipe: str, form: str, device: str) -> str:
    if recipe != "bf16":
        found = list(RECIPES[recipe].dtypes)
    elif form in ("packed", "list", "GateUp"):
        found = ["bfloat16", "float16"]
    else:
        found = ["bfloat16"]
    if call in declared.INNER and device != "cpu":
        found = [dtype for dtype in found if ships_adapted(dtype, _arch())]
    if call.startswith(("quantize", "prepare")) or (device == "cpu" and recipe == "bf16"):
        found.append("float32")
    return str(draw(st.sampled_from(found)))


def _arch() -> str:
    """Return the architecture whose kernels serve the current GPU."""
    return gpus.gpu(torch.cuda.current_device()).arch


def _lacks(recipe: str, device: str) -> bool:
    """Return True if the kernels of a device lack a recipe's operands; such calls are refused."""
    told = RECIPES[recipe]
    return device != "cpu" and not {told.operands, told.fc2_operands}.isdisjoint(ARCHS[_arch()].lacks)


def _can_train(call: str, recipe: str, form: str) -> bool:
    """Return True if a call has gradients that can be compared."""
    told = RECIPES[recipe]
    if form not in ("packed", "list", "GateUp"):
        told = told if told.weights is not None else RECIPES[declared.recipe_of_form(form)]
        return call in TRAINED and told.freezes_weights
    return call in TRAINED and told.trains


def _fit_choices(options: dict[str, Any], experts: int) -> None:
    """Adjust options so that tokens can choose among the given number of experts, in groups of two or more."""
    if options.get("num_groups", 1) > 1 and (experts % 2 or experts < 4):
        options.pop("num_groups")
    if "k" in options:
        options["k"] = min(options["k"], experts // options.get("num_groups", 1))


TRAINED = ("grouped_mm", "grouped_glu", "grouped_mlp", "moe", "permute", "combine", "load_balancing_loss",
           "router_z_loss", "aggregate", "post_mix", "project", "pre", "sinkhorn", "boundary", "route",
           "Routing.from_topk")  # fmt: skip
"""Functions whose gradients are compared."""


SETTLED = ("recipe", "activation")
"""Options with many values, which take turns. In the end all their pairs are drawn for each function."""


@dataclasses.dataclass(frozen=True)
class Stratum:
    """A function, with option values that all problems of a round share."""

    call: str
    fixed: tuple[tuple[str, Any], ...] = ()


def strata(calls: Sequence[str] = ()) -> Iterator[Stratum]:
    """Yield strata without end, cycling through `calls` (default: all functions) and their recipes and activations."""
    chosen = list(calls or declared.FUNCTIONS)
    turns = dict.fromkeys(chosen, 0)
    while True:
        for call in chosen:
            values = {name: one for name, one in declared.options_of(call).items() if name in SETTLED}
            for _ in range(max(map(len, values.values()), default=1)):
                yield Stratum(call, tuple((name, one[turns[call] % len(one)]) for name, one in values.items()))
                turns[call] += 1


def in_a_turn(calls: Sequence[str] = ()) -> int:
    """Return the number of strata after which each function was drawn with each of its recipes and activations."""
    options = [declared.options_of(call) for call in calls or declared.FUNCTIONS]
    return sum(max([len(one[name]) for name in SETTLED if name in one], default=1) for one in options)


@st.composite
def problems(draw: Any, stratum: Stratum, device: str = "cpu") -> Problem:
    """Draw problems of a stratum that the device supports."""
    call, fixed = stratum.call, dict(stratum.fixed)
    if _lacks(fixed.get("recipe", "bf16"), device):
        fixed["recipe"] = "bf16"
    drawn = {name: values for name, values in declared.options_of(call).items() if name not in fixed}
    options = {name: draw(st.sampled_from(values)) for name, values in drawn.items()} | fixed
    form = draw(st.sampled_from(declared.forms_of(call, options.get("recipe", "bf16"))))
    given = [name for name in declared.optional_of(call) if draw(st.booleans())]
    train = _can_train(call, options.get("recipe", "bf16"), form) and draw(st.booleans())
    if train:
        options.pop("x_block", None)
    if train or call.startswith("quantize"):
        given = [name for name in given if name not in ("out", "rows")]
    if "offs" in declared.parameters(call) and "splits" not in declared.parameters(call):
        given += ["offs"] * (call != "quantize_mxfp8")
    _consistent(call, options, form, given)
    recipe = options.get("recipe", "bf16")
    unit = _unit(call, recipe, form, options, device)
    widths = [unit * draw(st.integers(1, max(96 // unit, 3))) for _ in range(2)]
    found: dict[str, Any] = {
        "sizes": sizes(draw),
        "tail": draw(st.integers(0, MOST_TAIL)),
        "hidden": widths[0],
        "inter": widths[1],
        "dtype": _dtype(draw, call, recipe, form, device),
        "groups": draw(st.sampled_from(declared.groups_of(call))),
        "form": form,
        "given": tuple(given),
        "options": {name: value for name, value in options.items() if _says_something(call, name, value)},
        "train": train,
        "padded": draw(st.booleans()) if call.startswith("grouped") else False,
        "seed": draw(st.integers(0, 3)),
    }
    if train and "limit" in found["options"]:
        found["options"]["limit"] = UNREACHED
    _fit_choices(found["options"], len(found["sizes"]))
    return Problem(call, **found)


def _says_something(call: str, name: str, value: Any) -> bool:
    """Return True if a value differs from the parameter's default."""
    default = declared.parameters(call)[name].default
    return bool(value != default)
