"""moe with low-rank adapters; `lora.mlp` has the formulas."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..activations import Numbers
from ..calls.front import operator
from ..calls.quantized import Quantized
from ..choose.problem import changed
from ..expert_lora import ExpertLora
from ..lora.call import AdaptedMlpCall
from ..lora.mlp import checked, rows_with_lora
from ..lora.products import Rows
from .of_tokens import OfTokens, of_tokens
from .routing import Routing
from .rows import combine, permute


class AdaptedMoeCall(OfTokens, AdaptedMlpCall):
    """A call of `adapted_moe`, that is of `moe` in 16 bits with low-rank adapters on the experts."""

    torch_op = "adapted_moe"
    labels = {**OfTokens.labels, **AdaptedMlpCall.labels}
    added = ("b2", "residual")
    definition = of_tokens(AdaptedMlpCall.definition)


@operator(AdaptedMoeCall)
def adapted_moe(
    x: Tensor, w1: Any, w2: Any, *, offs: Any, splits: Any, rows: Any, row_of: Any, residual: Any, row_scale: Any,
    b1: Any, b2: Any, lora_a1: Any = None, lora_b1: Any = None, lora_a2: Any = None, lora_b2: Any = None,
    activation: str, glu_layout: str, numbers: Numbers, lora_scale: float, transpose_w: bool, world_experts: int,
    out: Any,
) -> Any:  # fmt: skip
    """Compute `moe` with low-rank adapters. The tensors of the Routing and of the ExpertLora are separate arguments."""
    raise NotImplementedError  # `front` writes the body


def moe_with_lora(call: Any, routing: Routing, lora: ExpertLora) -> Tensor:
    """Compute `moe` with adapters as separate operators (permute, the MLPs, combine), if no kernel does it in one call.

    Args:
        call: the call of `moe` without adapters.
        lora: the adapters.
    """

    def made(is_trained: bool) -> Tensor:
        of_rows, kept = changed(call, out=None), None
        if is_trained or isinstance(call, Quantized):  # other calls read tokens by index
            of_rows = changed(of_rows, x=permute(call.x, routing), rows=None)
            kept = Rows(call.x, call.rows)
        y = rows_with_lora(of_rows, lora, kept)
        return combine(y, routing, call.residual, out=call.out)

    return checked(call, lora, made)
