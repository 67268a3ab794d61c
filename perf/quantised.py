"""Weights in a recipe's format, as suites of quantised weights measure them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from glulam.formats.prepared import prepare
from glulam.formats.scaled import Parts
from glulam.ops.quantized_weights import FORMS


def quantised(name: str, w: Tensor, is_gate: bool = False) -> tuple[Any, Any]:
    """Return a weight as kernels read it, and as its format's `dequantize` does.

    is_gate: w is the w1 of a gated activation, its halves one after the other.
    """
    form = FORMS[name].of_gate(w.shape[1]) if is_gate else FORMS[name]
    made = form.quantized_tensor(w)
    parts = Parts(*made.parts)
    return form.tensor_of(parts if form.is_ready(parts) else prepare(form, parts, report=True)), made
