"""moe with adapters, see `lora.mlp`: tokens to rows, the experts' MLPs, and rows back to tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..calls.quantized import Quantized
from ..choose.problem import changed
from ..expert_lora import ExpertLora
from ..lora.mlp import checked, rows_with_lora
from ..lora.products import Rows
from .routing import Routing
from .rows import combine, permute


def moe_with_lora(call: Any, routing: Routing, lora: ExpertLora) -> Tensor:
    """`moe`. `call`: of it without adapters."""

    def made(is_trained: bool) -> Tensor:
        of_rows, kept = changed(call, out=None), None
        if is_trained or isinstance(call, Quantized):  # the others read tokens by index
            of_rows = changed(of_rows, x=permute(call.x, routing), rows=None)
            kept = Rows(call.x, call.rows)
        y = rows_with_lora(of_rows, lora, kept)
        return combine(y, routing, call.residual, out=call.out)

    return checked(call, lora, made)
