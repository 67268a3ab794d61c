"""Routing of few tokens: one call computes logits, choices and rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_exporting

from cute_kernels.specs import LayerSpec, Spec

from ..calls.addressed import Like, check_dtype, check_vectors, forms
from ..calls.checks import KERNEL_DTYPES, any_requires_grad, mismatch, runs_kernels
from ..calls.front import operator
from ..choose.problem import dtype_name
from . import reference
from .checks import LOGITS_DTYPES, check_matrix
from .routing import RouteCall, Routing, capacity_of

MOST_ROUTED = 16
"""Most tokens for which `route_few` computes the logits, too. For more tokens, torch's GEMM with `route` is faster.

Times on an H200 by `route_few`, and by torch's GEMM with `route`: gpt-oss-120b (128 experts, H 2880, float32 logits of
16-bit parameters), 1 token: 5.6 and 13.8 us; 16 tokens: 7.0 and 20.3 us. DeepSeek-V3 (256 experts, H 7168, 16 bits), 1
token: 9.1 and 11.3 us; 16 tokens: 12.2 and 12.7 us; 24 tokens: 16.3 and 13.7 us.
"""


def routes_few(
    x: Tensor, weight: Tensor, weight_bias: Tensor | None, dtype: torch.dtype, most: int = MOST_ROUTED
) -> bool:
    """Return True if `route_few` can route these tokens by a router with these parameters, and no gradient is recorded.

    Exported programs take any number of tokens, so they never use `route_few`.

    Args:
        x: tokens [N, H].
        weight, weight_bias: the router's parameters.
        dtype: dtype of the logits.
        most: the largest N.
    """
    return (
        runs_kernels(x)
        and not is_exporting()
        and 0 < x.shape[0] <= most
        and x.dtype in KERNEL_DTYPES
        and dtype in (x.dtype, torch.float32)
        and weight.dtype in (x.dtype, dtype)
        and weight.is_contiguous()
        and not (torch.is_grad_enabled() and any_requires_grad(x, weight, weight_bias))
    )


def route_few(
    x: Tensor, weight: Tensor, weight_bias: Tensor | None, k: int, dtype: torch.dtype, *, score: str = "softmax",
    bias: Tensor | None = None, num_groups: int = 1, top_groups: int = 1, normalize: bool = True, scale: float = 1.0,
    num_tokens: Tensor | None = None,
) -> Routing:  # fmt: skip
    """Route few tokens by the logits x weight^T + weight_bias, in one call. Not differentiable.

    Logits are summed in float32 and rounded to `dtype`.

    Args:
        x: 16-bit [N, H].
        weight: [E, H], in x's dtype, or float32 if logits are float32.
        weight_bias: [E]; None: no bias.
        dtype: dtype of logits: x's or float32.
        k, score, bias, num_groups, top_groups, normalize, scale, num_tokens: see `route`.

    Returns:
        A Routing that includes the logits.

    Raises:
        The errors of `route`.
    """
    logits, ids, weights, offs, token_of_row, row_of, weight_of_row = router_tokens(
        x, weight, weight_bias, bias, num_tokens, k, score, normalize, num_groups, top_groups, scale,
        dtype is torch.float32,
    )  # fmt: skip
    return Routing(offs, token_of_row, row_of, weight_of_row, ids, weights, weight.shape[0], logits=logits, score=score)


def _constants(call: Any) -> dict[str, Any]:
    forms_of = {"weight_form": forms(call.weight), "bias_form": forms(call.weight_bias)}
    return {**forms_of, "width": call.x.shape[1]}


class RouterCall(RouteCall):
    """A call of `route_few`: a RouteCall whose kernel first computes the logits from tokens and a router's parameters.

    The logits are its first result.
    """

    kernel, leads, explains = "router", "x", False
    returns: ClassVar[tuple[str, ...]] = ("logits", *RouteCall.returns)
    shared = frozenset(("weight", "weight_bias", "bias", "num_tokens"))
    unaligned = frozenset(("weight_bias", "bias", "num_tokens"))
    differentiable = False
    on_cpu: ClassVar[Callable[..., Any]] = staticmethod(reference.router)
    definition = RouteCall.definition.extended(constants=(_constants,))

    @property
    def sizes(self) -> tuple[int, int]:
        return self.x.shape[0], self.weight.shape[0]

    @property
    def logits_dtype(self) -> torch.dtype:
        of_x: torch.dtype = self.x.dtype
        return torch.promote_types(of_x, torch.float32) if self.in_float32 else of_x

    def check_inputs(self) -> None:
        _, width = check_matrix(self.op, "x", self.x, "N, H")
        check_dtype(self.op, "x", self.x)
        check_vectors(self.op, "x", "H", self.x)
        dtypes = (self.x.dtype, self.logits_dtype)
        experts, columns = check_matrix(self.op, "weight", self.weight, "E, H", self.x, dtypes)
        if columns != width:
            mismatch(self.op, "weight", self.weight.shape, (experts, width), "x has H columns")
        self._check_vector("weight_bias", (experts,), (*LOGITS_DTYPES, self.logits_dtype), "weight has E rows")
        self._check_choice()

    def likes(self) -> Sequence[Like | None]:
        return [(self.sizes, self.logits_dtype), *super().likes()]

    def spec(self, arch: str) -> Spec:
        return LayerSpec(self.kernel, dtype_name(self.x.dtype), capacity_of(self.sizes[1]), arch)


@operator(RouterCall)
def router_tokens(
    x: Tensor, weight: Tensor, weight_bias: Tensor | None, bias: Tensor | None, num_tokens: Tensor | None, k: int,
    score: str, normalize: bool, num_groups: int, top_groups: int, scale: float, in_float32: bool,
) -> Any:  # fmt: skip
    """Route as `route_few` does; return (logits, ids, weights, offs, token_of_row, row_of, weight_of_row).

    These are attributes of a `Routing`; the logits are [N, E]. in_float32: logits are float32; False: they have x's
    dtype. For the other arguments see `route_few`.
    """
