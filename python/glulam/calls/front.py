"""Front doors: an operator's public function, written from its parameters.

A decorated function gives the parameters, their defaults and the docstring; what its arguments mean is told by their
names (`arguments`) and by the `Call` class. The body is generated and compiled when the module is imported: it finds
the plan of the call and runs it, or leaves the call to `Call.answer`. `text_of` shows it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from ..errors import ARGUMENT_ERRORS
from ..host import experts
from ..host.plans import unplanned
from .arguments import GROUPS
from .call import Call
from .checks import any_requires_grad
from .launch import indented, wrapped

Function = TypeVar("Function", bound=Callable[..., Any])


def _parameters(function: Callable[..., Any]) -> list[str]:
    """As they are declared, without annotations."""
    texts, is_keyword = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not is_keyword:
            texts.append("*")
            is_keyword = True
        is_needed = parameter.default is inspect.Parameter.empty
        texts.append(parameter.name if is_needed else f"{parameter.name}={parameter.default!r}")
    return texts


def _kinds_of_lists(kind: type[Call]) -> dict[str, str]:
    """Arguments that may be lists of experts, of which a table is kept, with the kind of table."""
    weights = kind.weights if kind.tabled is None else kind.tabled
    of_kinds = {"weight": weights, "bias": kind.biases, "gradient": kind.gradients}
    return {name: what for what, names in of_kinds.items() for name in names}


def text_of(kind: type[Call], function: Callable[..., Any], unless: str = "") -> str:
    """The body of an operator's function, as Python."""
    lists = _kinds_of_lists(kind)
    prepared = {name: f"{name}_scale" for name in kind.weights if f"{name}_scale" in kind.given}
    renamed = {name: f"{name}_" for name in [*lists, *prepared, *prepared.values()]}
    given = [renamed.get(name, name) for name in kind.given]
    options = [
        "is_grad_enabled()", *[f"{renamed.get(name, name)} is None" for name in kind.optional], *kind.options,
    ]  # fmt: skip
    everything = [f"{name}={name}" for name in kind.names]
    lines: list[str] = []
    if unless:
        lines += [f"if {unless}:", *indented(wrapped("return otherwise(", everything, ")"))]
    lines += ["key = plan = None", *[f"{other} = {name}" for name, other in renamed.items()], "try:"]
    inner = ["groups = offs if splits is None else splits"] if "splits" in kind.names else []
    find = []
    for name, what in lists.items():
        if name not in prepared:
            find += [f"if {name}.__class__ is list:", f"    {name}_ = known({what!r}, {name})"]
    for name, scale in prepared.items():
        find.append(f"{name}_, {scale}_ = ready(recipe, {name}, {scale})")
    if prepared:  # what is trained is prepared by its plan
        trained = ", ".join(name for name in kind.reads if name not in ("groups", *GROUPS))
        find = [f"if not (is_grad_enabled() and any_requires_grad({trained})):", *indented(find)]
    inner += find
    inner += wrapped("given = [t for t in (", given, ") if t is not None]")
    inner += wrapped("options = (", options, ")")
    inner.append("key, plan = look_up(given, options)")
    lines += indented(["if not unplanned():", *indented(inner)])
    lines += [
        "except ARGUMENT_ERRORS:",
        "    key = plan = None  # an argument without a tensor's metadata, which checks name",
    ]
    run = ["try:", *indented(wrapped("return plan.run(", given, ")"))]
    run += ["except ARGUMENT_ERRORS:", *indented(wrapped("kind(", everything, ").judge()")), "    raise"]
    lines += ["if plan is not None:", *indented(run)]
    lines += wrapped("call = kind(", everything, ")")
    lines.append(f"return call.answer(key, {{{', '.join(f'{name!r}: {other}' for name, other in renamed.items())}}})")
    return "\n".join([*wrapped(f"def {function.__name__}(", _parameters(function), "):"), *indented(lines)])


def operator(
    kind: type[Call], *, unless: str = "", otherwise: Callable[..., Any] | None = None
) -> Callable[[Function], Function]:
    """Decorator of an operator's function, whose calls are of a `kind`.

    Args:
        unless: a condition under which `otherwise` is called with all arguments instead.
    """

    def made(function: Function) -> Function:
        kind.declare(inspect.signature(function).parameters)
        names = {
            "kind": kind,
            "unplanned": unplanned,
            "is_grad_enabled": torch.is_grad_enabled,
            "any_requires_grad": any_requires_grad,
            "known": experts.known,
            "ready": getattr(kind, "ready", None),
            "look_up": kind.plans.look_up,
            "otherwise": otherwise,
            "ARGUMENT_ERRORS": ARGUMENT_ERRORS,
        }
        # What the text calls is in a closure: torch.compile takes globals for a module's.
        body = [f"def made({', '.join(names)}):", *indented(text_of(kind, function, unless).split("\n"))]
        scope: dict[str, Any] = {"__name__": function.__module__}
        exec(compile("\n".join([*body, f"    return {function.__name__}"]), f"<{function.__name__}>", "exec"), scope)
        front = functools.update_wrapper(scope["made"](**names), function)
        kind.operator = staticmethod(front)
        return cast(Function, front)

    return made
