"""ExpertLora: the low-rank adapters of all experts, and conversion from and to PEFT's layouts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .calls.checks import (
    any_requires_grad,
    check_alignment,
    check_is_tensor,
    check_like_x,
    check_no_overlap,
    check_number,
    check_plain,
    mismatch,
    runs_kernels,
    shape_text,
)
from .calls.sharding import is_dtensor

NAME = "ExpertLora"
SHAPES = {"a1": "[E, r, H]", "b1": "[E, 2I or I, r]", "a2": "[E, r, I]", "b2": "[E, H', r]"}
PAIRS = ("a1", "b1"), ("a2", "b2")


@dataclass(frozen=True, eq=False, repr=False)
class ExpertLora:
    """Low-rank adapters of experts, passed as `lora=` to `glulam.grouped_mlp` and `glulam.moe`.

    Expert e multiplies by w1_e + scale b1_e a1_e instead of w1_e, and by w2_e + scale b2_e a2_e instead of w2_e.
    Differentiable in all four matrices. Their shapes are the same with and without `transpose_w`.

    Args:
        a1, b1: [E, r, H] and [E, 2I or I, r]; b1's rows have the order of w1's rows (`glu_layout`). None: w1 has no
            adapter.
        a2, b2: [E, r, I] and [E, H', r], H' the number of w2's rows. None: w2 has no adapter. At least one pair is
            required. The ranks r of the two pairs may differ; a rank that is not a multiple of 8 is padded with zeros
            at each call.
        scale: factor of both products, usually alpha / r.

    All matrices have one dtype: x's, or float32 with a 16-bit x. Float32 matrices are rounded at each call, and their
    gradients are float32.

    Raises:
        ValueError, TypeError: the matrices do not fit together.
    """

    a1: Tensor | None
    b1: Tensor | None
    a2: Tensor | None
    b2: Tensor | None
    scale: float = 1.0

    def __post_init__(self) -> None:
        given = self.given()
        if not given:
            raise ValueError(f"{NAME}: a1, b1, a2 and b2 are None; give a1 and b1, or a2 and b2, or all four")
        for a, b in PAIRS:
            if (a in given) != (b in given):
                one, other = (a, b) if a in given else (b, a)
                raise ValueError(f"{NAME}: {one} is given without {other}; give both {SHAPES[a]} and {SHAPES[b]}")
        check_number(NAME, "scale", self.scale)
        if not math.isfinite(self.scale):
            raise ValueError(f"{NAME}: scale is {self.scale}; give a finite number, as alpha / r")
        name, first = next(iter(given.items()))
        for other, tensor in given.items():
            _check_alike(other, tensor, name, first)
        for a, b in PAIRS:
            if a in given and given[a].shape[1] != given[b].shape[2]:
                shape, rank = given[b].shape, given[a].shape[1]
                mismatch(NAME, b, shape, (*shape[:2], rank), f"{a} has r = {rank}")

    def given(self) -> dict[str, Tensor]:
        """Return the matrices that are not None, by name."""
        named = {"a1": self.a1, "b1": self.b1, "a2": self.a2, "b2": self.b2}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def requires_grad(self) -> bool:
        return any_requires_grad(self.a1, self.b1, self.a2, self.b2)

    def refuse_dtensors(self, op: str) -> None:
        """Raise TypeError if a matrix is a DTensor."""
        for name, tensor in self.given().items():
            if is_dtensor(tensor):
                raise TypeError(f"{op}: lora.{name} is a DTensor, which adapters cannot be; give its to_local()")

    def check_fits(self, op: str, x: Tensor, experts: int, **widths: int) -> None:
        """Check the matrices against a call of operator `op` on rows x with `experts` experts.

        Args:
            widths: by matrix name ("a1", ...), the required size of the dimension that is neither E nor the rank.

        Raises:
            ValueError, TypeError: a matrix does not fit.
        """
        for name, tensor in self.given().items():
            rank_at, why = (1, "columns") if name in ("a1", "a2") else (2, "rows")
            wanted = [experts, widths[name], widths[name]]
            wanted[rank_at] = tensor.shape[rank_at]
            if tuple(tensor.shape) != tuple(wanted):
                mismatch(op, f"lora.{name}", tensor.shape, wanted, f"E = {experts} and w{name[1]} has so many {why}")
            check_like_x(op, f"lora.{name}", tensor, x, wide=True)

    def check_memory(self, op: str, out: Tensor | None) -> None:
        """Check that the matrices are plain tensors, aligned if kernels read them, and do not overlap `out`.

        Raises:
            ValueError, TypeError: a matrix is not plain, misaligned or overlaps.
            GradientNotSupported: a matrix belongs to a transform of torch.func.
        """
        for name, tensor in self.given().items():
            check_plain(op, f"lora.{name}", tensor)
            if runs_kernels(tensor):
                check_alignment(op, f"lora.{name}", tensor)
            if out is not None:
                check_no_overlap(op, "out", out, f"lora.{name}", tensor)

    @classmethod
    def from_peft(
        cls, a1: Tensor | None, b1: Tensor | None, a2: Tensor | None, b2: Tensor | None, num_experts: int,
        scale: float = 1.0, *, grouped_by_expert: bool = False,
    ) -> ExpertLora:  # fmt: skip
        """Return the adapters of a PEFT checkpoint as views; gradients reach the tensors passed in.

        Args:
            a1, a2: `lora_A.weight` [E r, in] of FC1's and FC2's weight: the r rows of an expert are adjacent. None: no
                adapter.
            b1, b2: `lora_B.weight` [out, r E]: column j belongs to expert j % E. None: no adapter.
            num_experts: E.
            scale: PEFT's `scaling`, lora_alpha / r, or with rslora lora_alpha / sqrt(r).
            grouped_by_expert: True: the r columns of an expert in b1 and b2 are adjacent, as in old adapters of
                unsloth.

        Raises:
            ValueError, TypeError: a tensor does not fit.
        """

        def cut(name: str, matrix: Any) -> Tensor | None:
            return None if matrix is None else _experts_first(name, matrix, num_experts, grouped_by_expert)

        return cls(cut("a1", a1), cut("b1", b1), cut("a2", a2), cut("b2", b2), scale)

    def to_peft(
        self, *, grouped_by_expert: bool = False
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Return (a1, b1, a2, b2) in PEFT's shapes, those that `from_peft` takes; None: no adapter."""

        def of_a(a: Tensor | None) -> Tensor | None:
            return None if a is None else a.flatten(0, 1)

        order = (1, 0, 2) if grouped_by_expert else (1, 2, 0)

        def of_b(b: Tensor | None) -> Tensor | None:
            return None if b is None else b.permute(order).flatten(1)

        return of_a(self.a1), of_b(self.b1), of_a(self.a2), of_b(self.b2)

    def __repr__(self) -> str:
        """Return shapes, dtypes and devices, but no values.

        `distributed` uses this text as a key: adapters with an equal text were checked before.
        """
        shown = [f"{name}={shape_text(t.shape)} {t.dtype} {t.device}" for name, t in self.given().items()]
        return f"{NAME}({', '.join(shown)}, scale={self.scale})"


def _check_alike(name: str, tensor: Any, first_name: str, first: Any) -> None:
    """Check one matrix, and that it has the same number of experts, dtype and device as `first`."""
    check_is_tensor(NAME, name, tensor, SHAPES[name])
    if tensor.dim() != 3 or not tensor.numel():
        raise ValueError(f"{NAME}: {name} has shape {shape_text(tensor.shape)}; give {SHAPES[name]}, none of them 0")
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise TypeError(f"{NAME}: {name} is {tensor.dtype}; give bfloat16, float16 or float32")
    if tensor.shape[0] != first.shape[0]:
        wanted = (first.shape[0], *tensor.shape[1:])
        mismatch(NAME, name, tensor.shape, wanted, f"{first_name} has E = {first.shape[0]}")
    if tensor.dtype != first.dtype:
        raise TypeError(f"{NAME}: {name} is {tensor.dtype} but {first_name} is {first.dtype}; cast one to the other's")
    if tensor.device != first.device:
        raise ValueError(f"{NAME}: {name} is on {tensor.device} but {first_name} is on {first.device}; move one there")


def _experts_first(name: str, matrix: Any, experts: int, grouped_by_expert: bool) -> Tensor:
    """Return a PEFT matrix as a view whose first dimension is the expert.

    lora_A [E r, in] becomes [E, r, in], lora_B [out, r E] becomes [E, out, r].

    Args:
        name: "a1", "b1", "a2" or "b2".
        experts: E.
        grouped_by_expert: True: the r columns of an expert in lora_B are adjacent. False: column j is of expert j % E.
    """
    is_a = name in ("a1", "a2")
    form, dim = ("[E r, in]", 0) if is_a else ("[out, r E]", 1)
    check_is_tensor("from_peft", name, matrix, form)
    if matrix.dim() != 2 or matrix.shape[dim] % experts:
        raise ValueError(
            f"from_peft: {name} has shape {shape_text(matrix.shape)}; give {form} with E = {experts}, as "
            f"lora_{'A' if is_a else 'B'}.weight is"
        )
    if is_a:
        return matrix.unflatten(0, (experts, -1))
    if grouped_by_expert:
        return matrix.unflatten(1, (experts, -1)).permute(1, 0, 2)
    return matrix.unflatten(1, (-1, experts)).permute(2, 0, 1)
