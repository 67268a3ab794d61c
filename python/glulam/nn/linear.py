"""GroupedLinear: a linear layer for each expert."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.compiler import is_exporting
from torch.nn import Parameter

from .. import device as gpus
from ..backward import Targets, differentiate
from ..errors import CaptureError
from ..groups import Splits
from ..ops.grouped_mm import GroupedMmCall, grouped_mm
from ..signature import KERNEL_DTYPES, REFERENCE_DTYPES, any_requires_grad, check_flag, check_width
from .state import Converts, Move, layout_move
from .weight_gradients import DelaysWeightGradients, Put, grad_writer


class GroupedLinear(DelaysWeightGradients, Converts):
    """y = x w_e^T (+ b_e * bias_scale[row]) for rows sorted by expert; see `glulam.grouped_mm`.

    Args:
        num_experts, in_features, out_features: E, K and N. K and N are multiples of 8 on a GPU.
        bias: whether there is one, [E, N].
        packed: one parameter `weight` [E, N, K] (and `bias` [E, N]), or else E parameters `weight0` .. [N, K] (and
            `bias0` .. [N]). State dicts of either layout load into both.
        delay_wgrad: leave the gradient of the weights out of backward; `backward_dw` computes it. Until then x, dy and
            the group sizes are kept, and must not be written.
        device, dtype: of the parameters; device "meta" allocates nothing. On a GPU bfloat16 or float16.

    A weight that has a `main_grad` gets its gradient there; see `glulam.nn.weight_gradients`.

    Raises:
        ValueError, TypeError: at construction, for options that cannot work, alone or together.
    """

    op = "grouped_mm"

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        packed: bool = True,
        delay_wgrad: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(delay_wgrad)
        check_sizes("GroupedLinear", num_experts=num_experts, in_features=in_features, out_features=out_features)
        check_flags("GroupedLinear", bias=bias, packed=packed, delay_wgrad=delay_wgrad)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        check_placement("GroupedLinear", torch.empty(0, **where), in_features, out_features)
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.packed, self.has_bias = packed, bias
        shapes = {"weight": (out_features, in_features), "bias": (out_features,)}
        for name in self.parameter_names:
            for label in self._labels(name):
                shape = (num_experts, *shapes[name]) if packed else shapes[name]
                self.register_parameter(label, Parameter(torch.empty(shape, **where)))
        if packed and not bias:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Of parameters where they are packed."""
        return ("weight", "bias") if self.has_bias else ("weight",)

    def _labels(self, name: str) -> list[str]:
        return [name] if self.packed else [f"{name}{expert}" for expert in range(self.num_experts)]

    def reset_parameters(self) -> None:
        """As torch.nn.Linear: every weight and bias uniform within 1 / sqrt(in_features)."""
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-bound, bound)

    def parameter_list(self, name: str) -> list[Parameter]:
        """The parameters of "weight" or "bias": one that is packed, or one for each expert; empty without a bias."""
        return [self._parameters[label] for label in self._labels(name)] if name in self.parameter_names else []  # type: ignore[misc]

    def experts(self, name: str) -> Any:
        """What operators take as "weight" or "bias": a tensor, a list, or None."""
        if self.packed:
            return self._parameters[name]
        return self.parameter_list(name) or None

    def forward(
        self,
        x: Tensor,
        *,
        offs: Tensor | None = None,
        splits: Splits | None = None,
        bias_scale: Tensor | None = None,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
    ) -> Tensor:
        """[T, K] -> [T, N]; the arguments of `glulam.grouped_mm`, and buffers.

        Args:
            out: [T, N], where the result is written, also where a gradient is recorded; then another tensor is returned
                that lies there. Writing it before a backward that reads the result is torch's error.
            grad_input: [T, K], where each backward writes x's gradient, zeros behind the last group.

        Raises:
            ValueError, TypeError: as of `glulam.grouped_mm`; a buffer that does not fit, overlaps an input or requires
                a gradient; a grad_input although x requires no gradient or grad mode is off.
        """
        w, bias = self.experts("weight"), self.experts("bias")
        given: dict[str, Any] = {"offs": offs, "splits": splits, "bias": bias, "bias_scale": bias_scale}
        writer = self.grad_writer("weight", x, self.new_pass())
        writers = {} if writer is None else {"w": writer}
        try:
            if is_ordinary(writers, out, grad_input, x, w, bias, bias_scale):
                return grouped_mm(x, w, out=out, **given)
            call = GroupedMmCall(x=x, w=w, rows=None, transpose_w=False, out=None, **given)
            return elsewhere("GroupedLinear", call, Targets(out, grad_input, writers))  # type: ignore[no-any-return]
        except TypeError:
            check_placement("GroupedLinear", self.parameter_list("weight")[0])
            raise

    def grad_writer(self, label: str, x: Tensor, put: Put | None) -> Callable[..., Any] | None:
        """Another way than autograd's for the gradient of the weights; None where there is none to take."""
        if put is None and self.packed and getattr(self._parameters["weight"], "main_grad", None) is None:
            return None  # as in most calls
        weights = self.parameter_list("weight")
        if not torch.is_grad_enabled() or not any_requires_grad(weights):
            return None
        return grad_writer(label, weights, self.packed, x, put)

    def moves(self, keys: Collection[str], prefix: str, moments: bool = False) -> Iterator[list[Move]]:
        for name in self.parameter_names:
            move = layout_move(keys, prefix + name, name, self.packed, self.num_experts, moments)
            if move is not None:
                yield [move]

    def extra_repr(self) -> str:
        text = f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"
        text += f", bias={self.has_bias}, packed={self.packed}"
        return text + (", delay_wgrad=True" if self.delay_wgrad else "")


def is_ordinary(writers: dict[str, Any], out: Any, grad_input: Any, *arguments: Any) -> bool:
    """Whether a call is what the operator itself does: no gradient or result that goes to a place of the module's."""
    if writers or grad_input is not None:
        return False
    return out is None or not (torch.is_grad_enabled() and any_requires_grad(*arguments))


def elsewhere(module: str, call: Any, targets: Targets) -> Any:
    """A differentiable call whose result or gradients go elsewhere.

    Raises:
        CaptureError: torch.export is tracing; an exported program cannot do that.
    """
    if is_exporting():
        raise CaptureError(
            f"{module}: torch.export traces no main_grad, delay_wgrad or grad_input, nor out where a gradient is "
            "recorded, since they write outside of a graph; export under torch.no_grad(), or leave them out"
        )
    return outside_traces(call, targets)


@_disable_dynamo  # torch.compiler.disable, but for importing the compiler: that would take a second at import
def outside_traces(call: Any, targets: Targets) -> Any:
    """To write elsewhere is a side effect that no trace has."""
    return differentiate(call, targets=targets)


def check_flags(module: str, **flags: Any) -> None:
    for name, flag in flags.items():
        check_flag(module, name, flag)


def changed_options(module: nn.Module, **options: Any) -> str:
    """Those that are not the defaults of a module's class, for its repr."""
    parameters = inspect.signature(type(module)).parameters
    shown = {name: value for name, value in options.items() if value != parameters[name].default}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def check_sizes(module: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{module}: {name} is {size!r}; give an integer")
        if size < 1:
            raise ValueError(f"{module}: {name} is {size}; give 1 or more")


def check_placement(module: str, parameter: Tensor, *widths: int) -> None:
    """What kernels ask for, where parameters lie on a GPU; their dtype anywhere."""
    on_gpu = parameter.device.type == gpus.KERNEL_DEVICE
    valid = KERNEL_DTYPES if on_gpu else REFERENCE_DTYPES
    if parameter.dtype not in valid:
        choices = " or ".join(f"dtype={dtype}" for dtype in valid)
        raise TypeError(
            f"{module}: dtype is {parameter.dtype}; on {parameter.device} give {choices} at construction, or call "
            f".to({valid[0]})"
        )
    for width in widths:
        check_width(module, "a weight", width, on_gpu)
