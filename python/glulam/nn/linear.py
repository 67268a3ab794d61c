"""GroupedLinear: a linear layer for each expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..calls.checks import any_requires_grad
from ..host.groups import Splits
from ..ops.grouped_mm import GroupedMmCall, grouped_mm
from .options import check_options, check_placement, held, shown_options
from .state import Converts, Move, layout_move
from .weight_gradients import DelaysWeightGradients, Put, grad_writer, run

CALL = partial(GroupedMmCall, rows=None, transpose_w=False, out=None)


class GroupedLinear(DelaysWeightGradients, Converts):
    """y = x w_e^T (+ b_e * bias_scale[row]) for rows sorted by expert; see `glulam.grouped_mm`.

    Args:
        num_experts, in_features, out_features: E, K and N. K and N are multiples of 8 on a GPU.
        bias: True: the layer has a bias [E, N].
        packed: True: one parameter `weight` [E, N, K] (and `bias` [E, N]). False: E parameters `weight0`, `weight1`,
            ... [N, K] (and `bias0`, ... [N]). State dicts of either layout load into both.
        delay_wgrad: True: backward does not compute the gradient of the weights; `backward_dw` does. Until then x, dy
            and the group sizes are kept, and must not be overwritten.
        device, dtype: device and dtype of the parameters; device "meta" allocates nothing. On a GPU the dtype must be
            bfloat16 or float16.

    If a weight has a `main_grad`, its gradient is written there; see `glulam.nn.weight_gradients`.

    Raises:
        ValueError, TypeError: at construction: an option is invalid, or options cannot work together.
    """

    op = "grouped_mm"
    weight_names: tuple[str, ...] = ("weight",)
    """Names of the tensors that hold a packed weight: more than one in subclasses with quantised weights."""
    trained_names: tuple[str, ...] = ("weight", "bias")
    """Names of the tensors that are parameters. Tensors with other names are buffers."""

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
        check_options(GroupedLinear, locals())
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        check_placement(GroupedLinear, torch.empty(0, **where), in_features, out_features)
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.packed, self.has_bias = packed, bias
        self.names = (*self.weight_names, *(("bias",) if bias else ()))
        shapes = {"weight": (out_features, in_features), "bias": (out_features,)}
        self._labels: dict[str, list[str]] = {"weight": [], "bias": []}
        for name in [name for name in self.names if name in self.trained_names]:
            shape = (num_experts, *shapes[name]) if packed else shapes[name]
            self._labels[name] = [name] if packed else [f"{name}{expert}" for expert in range(num_experts)]
            for label in self._labels[name]:
                self.register_parameter(label, Parameter(torch.empty(shape, **where)))
        if packed and not bias:
            self.register_parameter("bias", None)
        self.make_weights(device)
        self.reset_parameters()

    def make_weights(self, device: Any) -> None:
        """Register the buffers that hold weights. This class has none; QuantizedLinear does."""

    def reset_parameters(self) -> None:
        """Initialise like torch.nn.Linear: every weight and bias uniform within +-1 / sqrt(in_features)."""
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-bound, bound)

    def parameter_list(self, name: str) -> list[Parameter]:
        """Return the parameters called `name`, "weight" or "bias": one if packed, else one per expert.

        []: the layer has no such parameter.
        """
        return [held(self, self._parameters, label) for label in self.labels(name)]

    def labels(self, name: str) -> list[str]:
        """Return the names of the parameters called `name`, "weight" or "bias": one if packed, else one per expert."""
        return self._labels[name]

    def experts(self, name: str) -> Any:
        """Return the weight or bias (`name`) as operators take it: the packed tensor, or a list of one per expert.

        None: there is no bias.
        """
        if self.packed:
            parameters = self._parameters  # like `held`, without its Python frame
            return parameters[name] if name in parameters else getattr(self, name)
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
        """Multiply each row by its expert's weight; return the result [T, N].

        Args:
            x: rows [T, K], sorted by expert.
            offs, splits, bias_scale: see `glulam.grouped_mm`.
            out: [T, N], buffer for the result; None: a new one. A buffer is allowed even if a gradient is recorded: the
                returned tensor then shares the buffer's memory, but is another object. If the buffer is overwritten
                before a backward that reads it, torch raises its usual error.
            grad_input: [T, K], buffer to which each backward writes x's gradient, with zeros after the last group;
                None: a new one.

        Raises:
            ValueError, TypeError: raised by `glulam.grouped_mm`; or a buffer does not fit, overlaps an input or
                requires a gradient; or grad_input is given, but x requires no gradient or grad mode is off.
        """
        given = {
            "x": x, "w": self.experts("weight"), "offs": offs, "splits": splits, "bias": self.experts("bias"),
            "bias_scale": bias_scale,
        }  # fmt: skip
        writer = self.grad_writer("weight", x, self.new_pass() if self.delay_wgrad else None)
        try:
            return run(grouped_mm, CALL, given, {} if writer is None else {"w": writer}, out, grad_input)
        except TypeError:
            check_placement(GroupedLinear, self.parameter_list("weight")[0])
            raise

    def grad_writer(self, label: str, x: Tensor, put: Put | None) -> Callable[..., Any] | None:
        """Return a function for backward that computes and writes the weights' gradient to main_grad, or delays it.

        None: autograd gets the gradient as usual.

        Args:
            label: the weights' name in errors.
            x: the layer's input.
            put: stores the computation for `backward_dw`; None: backward computes at once.
        """
        if put is None and self.packed and getattr(self._parameters.get("weight"), "main_grad", None) is None:
            return None  # the case of most calls
        weights = self.parameter_list("weight")
        if not torch.is_grad_enabled() or not any_requires_grad(weights):
            return None
        return grad_writer(label, weights, self.packed, x, put)

    def moves(self, keys: Collection[str], prefix: str, moments: bool = False) -> Iterator[list[Move]]:
        for name in self.names:
            move = layout_move(keys, prefix + name, name, self.packed, self.num_experts, moments)
            if move is not None:
                yield [move]

    def extra_repr(self) -> str:
        return shown_options(
            GroupedLinear, num_experts=self.num_experts, in_features=self.in_features, out_features=self.out_features,
            bias=self.has_bias, packed=self.packed, delay_wgrad=self.delay_wgrad,
        )  # fmt: skip
