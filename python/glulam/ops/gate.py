"""The activation of rows and its gradient as separate kernels, for calls in which no GEMM's epilogue computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels.specs import LayerSpec, Spec, is_gated

from ..activations import Activation, Numbers, activate, activate_backward, packer
from ..calls.addressed import AddressedCall, Gradients, Like, check_dtype, check_vectors
from ..calls.front import operator
from ..choose.problem import dtype_name
from ..host.groups import is_after_groups

_packed = packer("gate")


def width_of(columns: int, activation: str) -> int:
    """Return the activation's width I for a preactivation of `columns` columns: half of them if gated, else all."""
    return columns // 2 if is_gated(activation) else columns


def _constants(call: Any) -> dict[str, Any]:
    return {"width": width_of(call.preact.shape[1], call.activation), **call.function.kernel_params}


class _OfRows(AddressedCall):
    """Base of the calls of gate and its gradient, whose kernels have one CTA for each row of the preactivation."""

    family = "layer"
    leads = "preact"
    trailing = 1
    unaligned = frozenset(("row_scale",))
    definition = AddressedCall.definition.extended(constants=(_constants,))

    def check_inputs(self) -> None:
        check_dtype(self.op, "preact", self.preact)
        check_vectors(self.op, "preact", "2I", self.preact)

    def spec(self, arch: str) -> Spec:
        return LayerSpec(self.kernel, dtype_name(self.preact.dtype), arch=arch)


def _on_cpu(preact: Tensor, row_scale: Tensor | None, *function: Any) -> Tensor:
    h = preact.to(torch.promote_types(preact.dtype, torch.float32))
    act = activate(h, *Activation.of(*function))
    return (act if row_scale is None else act * row_scale.to(h.dtype)[:, None]).to(preact.dtype)


class GateCall(_OfRows):
    op = kernel = "gate"
    on_cpu = staticmethod(_on_cpu)
    differentiable = True
    saves = "preact", "row_scale"

    @staticmethod
    def backward(saved: Any, options: Any, needed: Any, *gradients: Any) -> Gradients:
        """Return (d_preact, d_row_scale). After the last group, d_row_scale is uninitialised."""
        (preact, row_scale), (activation, glu_layout, numbers), (_, of_row_scale) = saved, options, needed
        made: Gradients = gate_rows_backward(
            gradients[0], preact, row_scale, activation, glu_layout, numbers, of_row_scale
        )
        return made

    def likes(self) -> Sequence[Like | None]:
        rows, columns = self.preact.shape
        return [((rows, width_of(columns, self.activation)), self.preact.dtype)]


def _backward_on_cpu(d_act: Tensor, preact: Tensor, row_scale: Tensor | None, *function: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(preact.dtype, torch.float32)
    dm, h = d_act.to(wide), preact.to(wide)
    scaled = dm if row_scale is None else dm * row_scale.to(wide)[:, None]
    dh, act = activate_backward(scaled, h, *Activation.of(*function))
    return dh.to(preact.dtype), (dm * act).sum(dim=1)


class GateBackwardCall(_OfRows):
    op = "gate"
    kernel = "gate_backward"
    returns = "d_preact", "d_row_scale"
    on_cpu = staticmethod(_backward_on_cpu)

    def likes(self) -> Sequence[Like | None]:
        sums = torch.promote_types(self.preact.dtype, torch.float32)
        return [(self.preact.shape, self.preact.dtype), (self.preact.shape[:1], sums)]


@operator(GateCall)
def gate_rows(
    preact: Tensor, row_scale: Tensor | None, activation: str, glu_layout: str, numbers: Numbers
) -> Any:  # fmt: skip
    """Compute the activation of h = preact [T, 2I or I], times row_scale [T] unless that is None. Returns [T, I].

    activation, glu_layout, numbers: the activation, see `grouped_glu`; numbers are packed in a tuple.
    """


@operator(GateBackwardCall)
def gate_rows_backward(
    d_act: Tensor, preact: Tensor, row_scale: Tensor | None, activation: str, glu_layout: str, numbers: Numbers,
    of_row_scale: bool,
) -> Any:  # fmt: skip
    """Compute (d_preact, d_row_scale) from d_act [T, I], the gradient of the scaled activation.

    Args:
        preact: h, [T, 2I or I].
        row_scale: [T]. None: no scale.
        of_row_scale: True: also compute d_row_scale. False: None is returned for it.
    """


def gate(preact: Tensor, row_scale: Tensor | None, activation: str, glu_layout: str, **numbers: float) -> Tensor:
    """Compute the activation of h = preact [T, 2I or I], times row_scale [T] unless None.

    Args:
        activation, glu_layout, numbers: the activation, see `grouped_glu`.

    Returns:
        [T, I] in h's dtype, computed in float32.
    """
    made: Tensor = gate_rows(preact, row_scale, activation, glu_layout, _packed(**numbers))
    return made


def gate_gradients(
    d_act: Tensor, preact: Tensor, row_scale: Tensor | None, of_row_scale: bool, groups: dict[str, Any],
    activation: str, glu_layout: str, **numbers: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute the gradients of h and of the row scale.

    Args:
        d_act: [T, I], the gradient of the scaled activation.
        preact: h, [T, 2I or I].
        row_scale: [T]. None: no scale.
        of_row_scale: True: also compute the gradient of the row scale.
        groups: the group sizes, as {"offs": ...} or {"splits": ...}.
        activation, glu_layout, numbers: the activation, see `grouped_glu`.

    Returns:
        (gradient of h, in h's dtype; gradient of the row scale [T], zero after the last group). The latter is None
        without of_row_scale or without a scale.
    """
    of_row_scale = of_row_scale and row_scale is not None
    function = activation, glu_layout, _packed(**numbers)
    d_preact, d_scale = gate_rows_backward(d_act, preact, row_scale, *function, of_row_scale)
    return d_preact, d_scale.masked_fill(is_after_groups(d_scale, **groups), 0) if of_row_scale else None


def without_tail(row_scale: Tensor | None, groups: Callable[[], dict[str, Any]]) -> Tensor | None:
    """Return a row scale for `gate` whose gradient is zero after the last group, where `gate` leaves it uninitialised.

    Args:
        row_scale: [T]. None: no scale.
        groups: returns the group sizes, as {"offs": ...} or {"splits": ...}; called only if a gradient is recorded.
    """
    if row_scale is None or not (torch.is_grad_enabled() and row_scale.requires_grad):
        return row_scale
    return row_scale.masked_fill(is_after_groups(row_scale, **groups()), 0)
