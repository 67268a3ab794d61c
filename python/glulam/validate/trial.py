"""A trial of a function: the arguments of a call of a public operator, and how its results are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Given = Mapping[str, Any]
"""Arguments by name: tensors, or quantised tensors (formats made of several tensors)."""


class Trial(NamedTuple):
    """One call of an operator.

    Attributes:
        what: description, for example "swiglu, interleaved, zipf".
        given: the arguments by name, on the CPU, in the dtypes of kernels.
        call: called with the arguments, on any device and in any dtype; returns results, and gradients if there are
            any.
        ends: (number of rows in all groups, T). In results with T rows only the groups' rows are compared. None:
            compare all rows.
        leaves_tail: True: rows after the last group must be left unwritten.
        tolerance: limit of the largest error relative to the largest value of a result. None: the rule of `judge`.
        is_bits: True: results are bytes that must equal the CPU's; nothing is computed in float64.
        replayed: other values for some arguments, with which a graph that captured the call is replayed. Empty: no
            replay.
    """

    what: str
    given: Given
    call: Callable[[Given], Sequence[Tensor]]
    ends: tuple[int, int] | None = None
    leaves_tail: bool = False
    tolerance: float | None = None
    is_bits: bool = False
    replayed: Given = {}

    def parts(self, result: Tensor) -> tuple[Tensor, Tensor]:
        """Split a result into the rows that are compared and the rows after the last group."""
        if self.ends is None or result.dim() == 0 or result.shape[0] != self.ends[1]:
            return result, result[:0] if result.dim() else result.new_empty(0)
        return result[: self.ends[0]], result[self.ends[0] :]


def gradients(
    function: Callable[..., Any], of: Sequence[Tensor], upstream: Callable[[int, Tensor], Tensor]
) -> list[Tensor]:
    """Compute the gradients of `function(*of)` for all its arguments.

    Args:
        function: returns one result or several.
        of: the arguments.
        upstream: (index of a result, the result) -> the gradient of that result.
    """
    leaves = [one.detach().requires_grad_() for one in of]
    with torch.enable_grad():
        made = function(*leaves)
        results = list(made) if isinstance(made, (tuple, list)) else [made]
        given = [upstream(place, one).to(one) for place, one in enumerate(results)]
        return list(torch.autograd.grad(results, leaves, given))
