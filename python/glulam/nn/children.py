"""Child modules of nn.MoE and GroupedMLP: tests whether a layer may bypass a child, and calls of other children.

A layer bypasses a "plain" child: the layer reads the child's parameters, and runs its own operators on them. Any other
child (hooked, wrapped, compiled, of another class) is called as a module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.func import functional_call

from ..calls.checks import shape_text
from .options import held

has_global_hooks: Callable[[], bool] = nn.modules.module._has_any_global_hook


def is_plain(child: Any, kind: type[nn.Module]) -> bool:
    """Return True if calling `child` would run only the forward of class `kind`: no hook, not even a global one.

    False: the child is wrapped, hooked (also by FSDP2), compiled, or its class has another forward. Parametrizations,
    pruning and FSDP1 only change where a module's tensors come from; such a child is plain. While torch.compile traces,
    global hooks are ignored.
    """
    return is_itself(child, kind) and (is_dynamo_compiling() or not has_global_hooks())


def is_itself(child: Any, kind: type[nn.Module]) -> bool:
    """Return True if `child` has no hook and no wrapper, is not compiled, and has the forward of class `kind`.

    Unlike `is_plain`, this function ignores global hooks.
    """
    own = child.__dict__
    return not (
        child.__class__.forward is not kind.forward
        or own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own  # set by accelerate
        or child._compiled_call_impl is not None
    )


def parameters_of(child: Any) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of a plain Linear."""
    return held(child, child._parameters, "weight"), held(child, child._parameters, "bias")


def product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x weight^T + bias for x [N, H], with x and the parameters cast to `dtype`.

    Autocast is off here, since it would compute a float32 router in 16 bits.
    """
    with _without_autocast(x):
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def called(name: str, child: Any, x: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """Call the module `child` on x [N, H] without autocast; return the child's result [N, width], cast to `dtype`.

    Args:
        name: the child's name in errors.
        child: a module. A torch Linear computes in `dtype`, any other in the dtype of its `weight` (`dtype` if none).
        width: the required number of columns of the result.

    Raises:
        TypeError, ValueError: the child returns no tensor, or a tensor that is not [N, width].
    """
    with _without_autocast(x):
        made = _called(child, x, dtype)
    if not isinstance(made, Tensor):
        raise TypeError(f"{name} returned a {type(made).__name__}; give a module that returns a tensor [N, {width}]")
    if made.shape != (x.shape[0], width):
        got, wanted = shape_text(made.shape), shape_text((x.shape[0], width))
        raise ValueError(f"{name} returned {got}; give a module that returns [N, {width}] = {wanted}")
    return made.to(dtype)


def _called(child: Any, x: Tensor, dtype: torch.dtype) -> Any:
    """Call a child on x, and return its result.

    A torch Linear computes in `dtype`, as it would if the layer bypassed it. Other modules compute in the dtype of
    their `weight`, or in `dtype` if they have none.
    """
    weight = getattr(child, "weight", None)
    own = weight.dtype if isinstance(weight, Tensor) else dtype
    if child.__class__ is nn.Linear and own != dtype:
        cast = {name: parameter.to(dtype) for name, parameter in child.named_parameters()}
        return functional_call(child, cast, (x.to(dtype),))
    return child(x.to(own))


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
