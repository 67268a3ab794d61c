"""adapted_mlp: grouped_mlp in 16 bits with LoRA adapters, as one operator that is not public."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..activations import DEFAULTS, Numbers
from ..calls.checks import mismatch
from ..calls.front import operator
from ..calls.sharding import refuse_dtensors
from ..calls.weight_checks import check_experts
from ..choose.problem import Problem
from ..ops.grouped_mlp import GroupedMlpCall

MATRICES = ("lora_a1", "lora_b1", "lora_a2", "lora_b2")


class AdaptedMlpCall(GroupedMlpCall):
    """A call of adapted_mlp. It takes several launches, whether or not a gradient is recorded."""

    torch_op = "adapted_mlp"
    explains = False
    tabled = ("w1", "w2")
    recipe, recompute = "bf16", False
    by_parts: ClassVar[Callable[..., Any]]  # set by `lora.path`, which imports this module
    labels: ClassVar[dict[str, str]] = {
        **GroupedMlpCall.labels,
        **{name: name.replace("_", ".") for name in MATRICES},
    }

    def check(self) -> Problem:
        problem = super().check()
        widths = problem.in_features, problem.w1_rows, problem.intermediate, problem.out_features
        for name, width in zip(MATRICES, widths, strict=True):
            if getattr(self, name) is not None:
                self._check_matrix(name, width, problem)
        return problem

    def _check_matrix(self, name: str, width: int, problem: Problem) -> None:
        label, is_a = self.labels[name], name in ("lora_a1", "lora_a2")
        shape = check_experts(self.op, label, getattr(self, name), self.lead, "E r K" if is_a else "E N r")
        rank = shape[1] if is_a else shape[2]
        wanted = (problem.experts, rank, width) if is_a else (problem.experts, width, rank)
        if tuple(shape) != wanted:
            why = f"E = {problem.experts} and w{name[-1]} has so many {'columns' if is_a else 'rows'}"
            mismatch(self.op, label, shape, wanted, why)

    def handle_miss(self, key: Hashable, replacements: dict[str, Any]) -> Any:
        refuse_dtensors(self, "lora is given")
        return super().handle_miss(key, replacements)

    def run_without_gradient(self, key: Hashable, replacements: dict[str, Any]) -> Any:
        """Compute a call that needs no gradient, and return its result.

        All launches are run as one planned step, as in training. A planned step takes neither `out=` nor, outside of a
        layer, `rows=`. With these there is one operator call for each GEMM instead.
        """
        if is_dynamo_compiling() or self.is_traced():
            return self.dispatch()
        if self.out is None and (self.of_tokens or self.rows is None):
            return self.with_backward(self, key)
        self.check_plain()
        self.check()
        self.check_addresses()
        return self.by_parts(self)


@operator(AdaptedMlpCall)
def adapted_mlp(
    x: Tensor, w1: Any, w2: Any, *, offs: Tensor | None = None, splits: Any = None, rows: Tensor | None = None,
    row_scale: Tensor | None = None, b1: Any = None, b2: Any = None, lora_a1: Tensor | None = None,
    lora_b1: Tensor | None = None, lora_a2: Tensor | None = None, lora_b2: Tensor | None = None,
    activation: str = "swiglu", glu_layout: str = "concat", numbers: Numbers = DEFAULTS, lora_scale: float = 1.0,
    transpose_w: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute grouped_mlp with adapters: w1_e is replaced by w1_e + lora_scale b1_e a1_e, and likewise w2_e.

    lora_a1 and lora_b1 are w1's adapter, lora_a2 and lora_b2 w2's; None: this weight has no adapter. Their shapes are
    those of a1, b1, a2, b2 of `expert_lora.ExpertLora`; ranks are multiples of 8 on a GPU.
    """
    raise NotImplementedError  # `front` writes the body
