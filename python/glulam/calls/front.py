"""Decorator `operator`: generates the body of an operator's public function from its parameters.

The decorated function declares the parameters, their defaults and the docstring. The arguments' roles follow from their
names (`roles`) and from the `Call` class. The body is generated and compiled when the module is imported. It looks up
the plan of the call (a kept launch) and runs it; without a plan, it passes the call to `Call.handle_miss`. `text_of`
returns the body's source.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from ..activations import TEXT, with_numbers
from ..errors import ARGUMENT_ERRORS
from ..host import experts
from ..host.device import dispatch_modes
from ..host.plans import UNPLANNED
from .call import Call
from .checks import PLAIN_RECIPE, any_requires_grad
from .generated import compiled
from .launch import indented, wrapped
from .quantized import Quantized
from .roles import GROUPS

OPERATORS: list[type[Call]] = []
"""The `Call` subclasses of all operators. An operator's class for quantised arguments comes after its plain class."""
Function = TypeVar("Function", bound=Callable[..., Any])


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return a function's parameters as Python source with defaults, without annotations: ["x", "*", "offs=None"]."""
    texts, is_keyword = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not is_keyword:
            texts.append("*")
            is_keyword = True
        is_needed = parameter.default is inspect.Parameter.empty
        texts.append(parameter.name if is_needed else f"{parameter.name}={parameter.default!r}")
    return texts


def _of_calls(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return a function's parameters by name, in the order of its `Call` class: `**numbers` follows `glu_layout`."""
    names: list[str] = []
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            names.insert(1 + names.index("glu_layout"), name)
        else:
            names.append(name)
    return {name: parameters[name] for name in names}


def _kinds_of_lists(kind: type[Call]) -> dict[str, str]:
    """Return {argument that may be a list of experts' tensors: the kind of its address table}.

    Kinds are "weight", "bias" and "gradient" (`host.experts`).
    """
    weights = kind.weights if kind.tabled is None else kind.tabled
    of_kinds = {"weight": weights, "bias": kind.biases, "gradient": kind.gradients}
    return {name: what for what, names in of_kinds.items() for name in names}


def text_of(kind: type[Call]) -> list[str]:
    """Return the body of an operator's function: find the call's plan and run it, or pass the call to `handle_miss`.

    The lines of Python use the arguments by the names in `kind.names`.
    """
    lists = _kinds_of_lists(kind)
    prepared = {name: kind.parts_of(name) for name in kind.weights if f"{name}_scale" in kind.given}
    renamed = {name: f"{name}_" for name in [*lists, *[part for parts in prepared.values() for part in parts]]}
    given = [renamed.get(name, name) for name in kind.given]
    options = [
        "is_grad_enabled()", *[f"{renamed.get(name, name)} is None" for name in kind.optional], *kind.options,
    ]  # fmt: skip
    everything = [f"{name}={name}" for name in kind.names]
    lines = ["key = plan = None", *[f"{other} = {name}" for name, other in renamed.items()], "try:"]
    inner = ["groups = offs if splits is None else splits"] if "splits" in kind.names else []
    find = []
    for name, what in lists.items():
        if name not in prepared:
            find += [f"if {name}.__class__ is list:", f"    {name}_ = with_kept_table({what!r}, {name})"]
    if prepared:
        find.append("ready_dtype, ready_rank = ready_as[recipe]")
    for name, parts in prepared.items():
        takes = [*parts, *(("activation", "glu_layout") if name == "w1" else ())]
        found = f"{', '.join(f'{part}_' for part in parts)} = ready(recipe, {', '.join(takes)})"
        scale = f"{name}_scale"
        is_made = f"{scale} is None or {name}.dtype is not ready_dtype or {scale}.dim() != ready_rank"
        find += [f"if {is_made}:", f"    {found}"]
    if prepared and kind.differentiable:  # the plan prepares trained weights
        trained = ", ".join(name for name in kind.reads if name not in ("groups", *GROUPS))
        find = [f"if not (is_grad_enabled() and any_requires_grad({trained})):", *indented(find)]
    inner += find
    inner += wrapped("given = [t for t in (", given, ") if t is not None]")
    inner += wrapped("options = (", options, ")")
    inner.append("key, plan = look_up(given, options)")
    lines += indented([f"if not ({UNPLANNED}):", *indented(inner)])
    check = indented(wrapped("if not kind(", everything, ").may_be_unfound():"))
    lines += ["except ARGUMENT_ERRORS:", *check, "        raise", "    key = plan = None"]
    run = ["try:", *indented(wrapped("return plan.run(", given, ")"))]
    run += ["except ARGUMENT_ERRORS:", *indented(wrapped("kind(", everything, ").check_after_failure()")), "    raise"]
    lines += ["if plan is not None:", *indented(run)]
    lines += wrapped("call = kind(", everything, ")")
    lines.append(
        f"return call.handle_miss(key, {{{', '.join(f'{name!r}: {other}' for name, other in renamed.items())}}})"
    )
    return lines


def quantized_text_of(quantized: type[Quantized], parameters: list[str], when: str, recipe: str) -> list[str]:
    """Return the first lines of an operator's body, which pass calls with quantised arguments to a second function.

    This second generated function takes elements, scales and global scales as separate arguments; the lines split each
    quantised argument into them (`Quantized.unwrap`).

    Args:
        quantized: the class of calls with quantised arguments.
        parameters: names of the public parameters.
        when: a Python expression that is true for a call with quantised arguments.
        recipe: a Python expression for the call's recipe.
    """
    takes = [name if name in parameters else "None" for name in quantized.unwrap_takes]
    others = [name for name in quantized.names if name not in (*parameters, *quantized.unwraps, "recipe")]
    leave = [*[f"{name} = None" for name in others], "recipe = found.name"]
    leave += wrapped(f"{', '.join(quantized.unwraps)} = unwrap(", ["found", *takes], ")")
    leave += wrapped("return quantized(", list(quantized.names), ")")
    found = f"recipe_of({recipe})"
    if "recipe" in parameters:  # looking a name up takes less time than the call
        found = f"known_recipes[recipe] if recipe.__class__ is str and recipe in known_recipes else {found}"
    lines = [f"if {when}:", f"    found = {found}"]
    if "recipe" not in parameters:
        return [*lines, *indented(leave)]
    here = ["found = on_device(found, x)"]
    return [*lines, "    if found is not plain:", *indented(indented([*here, *leave])), "    recipe = plain.name"]


def _front(
    name: str, parameters: list[str], lines: list[str], module: str, names: dict[str, Any]
) -> Callable[..., Any]:
    """Compile a function from the lines of its body; the result has its source in the attribute `text`.

    Objects that the lines use become closure variables, since torch.compile would look up globals in the module.

    Args:
        name: the function's name.
        parameters: the function's parameters as Python source, with defaults.
        lines: the body.
        module: becomes the function's `__module__`.
        names: the objects that the lines use, by name.
    """
    text = [*wrapped(f"def {name}(", parameters, "):"), *indented(lines)]
    body = [f"def made({', '.join(names)}):", *indented(text), f"    return {name}"]
    code = compiled("\n".join(body), f"<glulam front of {name}>")
    front: Any = FunctionType(code, {"__name__": module, "__builtins__": builtins})(**names)
    front.text = "\n".join(text)
    return cast(Callable[..., Any], front)


def _names(kind: type[Call]) -> dict[str, Any]:
    """Return the objects that the lines of `text_of` use, by name."""
    return {
        "kind": kind,
        "is_dynamo_compiling": is_dynamo_compiling,
        "forward_ad": forward_ad,
        "dispatch_modes": dispatch_modes,
        "is_grad_enabled": torch.is_grad_enabled,
        "any_requires_grad": any_requires_grad,
        "with_kept_table": experts.with_kept_table,
        "ready": getattr(kind, "ready", None),
        "ready_as": getattr(kind, "ready_as", None),
        "look_up": kind.plans.look_up,
        "ARGUMENT_ERRORS": ARGUMENT_ERRORS,
        "inf": math.inf,
    }


def operator(
    kind: type[Call], *, quantized: type[Quantized] | None = None, when: str = f"recipe != {PLAIN_RECIPE!r}",
    recipe: str = "recipe", beside: tuple[str, ...] = (),
) -> Callable[[Function], Function]:  # fmt: skip
    """Decorate an operator's function: replace its body by generated code, whose source is in the attribute `text`.

    Args:
        kind: the class of the operator's calls.
        quantized: the class of calls whose arguments are quantised, or are quantised by the call. These calls have a
            separate generated function that takes elements and scales as separate arguments. None: the operator has no
            such calls.
        when: a Python expression that is true for a call with quantised arguments.
        recipe: a Python expression for the recipe of such a call.
        beside: parameters of the public function that `kind` does not have. If such an argument is not None, the
            public function returns `kind.with_<parameter>(...)`, called with all arguments by keyword.
    """

    def made(function: Function) -> Function:
        name, module, parameters = function.__name__, function.__module__, _of_calls(function)
        parameters = {each: one for each, one in parameters.items() if each not in beside}
        kind.takes_keywords = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        function = with_numbers(function) if kind.takes_keywords else function
        kind.declare(parameters)
        names, lines = _names(kind), text_of(kind)
        if quantized is not None:
            quantized.declare_public(parameters)
            inner = _front(f"{name}_quantized", list(quantized.names), text_of(quantized), module, _names(quantized))
            quantized.operator, kind.quantized = staticmethod(inner), quantized
            lines = [*quantized_text_of(quantized, list(parameters), when, recipe), *lines]
            names.update(
                quantized=inner, unwrap=quantized.unwrap, on_device=quantized.on_device, classes=quantized.classes,
                known_recipes=quantized.recipes, recipe_of=functools.partial(quantized.recipe_of, kind.op),
                plain=quantized.recipe_of(kind.op, PLAIN_RECIPE),
            )  # fmt: skip
        for one in beside:
            given = [f"{each}={each}" for each in (*parameters, one)]
            lines = [f"if {one} is not None:", *indented(wrapped(f"return kind.with_{one}(", given, ")")), *lines]
        if kind.takes_keywords:
            lines = [f"numbers = {TEXT}", *lines]
        front = functools.update_wrapper(_front(name, _parameters(function), lines, module, names), function)
        kind.operator = staticmethod(front)
        OPERATORS.extend(one for one in (kind, quantized) if one is not None)
        return cast(Function, front)

    return made


def passed_to(function: Callable[..., Any]) -> Callable[[Function], Function]:
    """Decorate a public function with `**numbers`: generate a body that calls `function` with one tuple `numbers`.

    `numbers` are the activation's numbers (limit, alpha, ...); all other arguments are passed on. The generated
    function has a keyword for each number, since Python takes 0.6 us for `**numbers`.
    """

    def made(public: Function) -> Function:
        arguments, module = list(_of_calls(public)), public.__module__
        shown = with_numbers(public)
        lines = [f"numbers = {TEXT}", *wrapped("return function(", arguments, ")")]
        front = _front(public.__name__, _parameters(shown), lines, module, {"function": function, "inf": math.inf})
        return cast(Function, functools.update_wrapper(front, shown))

    return made
