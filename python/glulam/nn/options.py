"""Checks of the options of nn modules at construction, and the display of options by repr."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..calls.checks import KERNEL_DTYPES, REFERENCE_DTYPES, check_flag, check_width, runs_kernels


@functools.cache
def _parameters(kind: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind.__init__).parameters  # type: ignore[misc]  # a subclass with other options has its own


def check_options(kind: type, given: Mapping[str, Any]) -> None:
    """Check the values of a constructor's options against the annotations of its parameters.

    A parameter annotated `bool` must be True or False. A parameter annotated `int` without a default, or `int | None`
    with a value other than None, must be an integer of 1 or more. Other parameters are not checked.

    Args:
        kind: the class.
        given: the options by name, as `locals()` of the constructor.

    Raises:
        TypeError, ValueError: an option fails its check.
    """
    for name, parameter in _parameters(kind).items():
        value, is_size = given.get(name), parameter.annotation == "int" and parameter.default is parameter.empty
        if parameter.annotation == "bool":
            check_flag(kind.__name__, name, value)
        elif is_size or (parameter.annotation == "int | None" and value is not None):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{kind.__name__}: {name} is {value!r}; give an integer")
            if value < 1:
                raise ValueError(f"{kind.__name__}: {name} is {value}; give 1 or more")


def shown_options(kind: type, **options: Any) -> str:
    """Return text for repr: the options that differ from the defaults of the class `kind`."""
    defaults = _parameters(kind)
    shown = {name: value for name, value in options.items() if value != defaults[name].default}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def check_placement(kind: type, parameter: Tensor, *widths: int) -> None:
    """Check that operators support the dtype of a module's parameters and, on a GPU, the widths of its weights.

    Args:
        kind: the module's class, for errors.
        parameter: a tensor with the parameters' dtype and device.
        widths: widths of weights, which kernels need to be multiples of 8.

    Raises:
        TypeError, ValueError: the dtype or a width is not supported.
    """
    on_gpu = runs_kernels(parameter)
    valid = KERNEL_DTYPES if on_gpu else REFERENCE_DTYPES
    if parameter.dtype not in valid:
        choices = " or ".join(f"dtype={dtype}" for dtype in valid)
        raise TypeError(
            f"{kind.__name__}: dtype is {parameter.dtype}; on {parameter.device} give {choices} at construction, or "
            f"call .to({valid[0]})"
        )
    for width in widths:
        check_width(kind.__name__, "a weight", width, on_gpu)


def held(module: nn.Module, members: Mapping[str, Any], name: str) -> Any:
    """Return a parameter or a buffer of a module. Faster than `Module.__getattr__`, which takes 0.4 us.

    Args:
        members: `module._parameters` or `module._buffers`.
        name: the tensor's name. If a parametrization or pruning has replaced the tensor by an attribute, the attribute
            is returned.
    """
    return members[name] if name in members else getattr(module, name)
