"""Calls whose results depend on the order in which their sums are added, for tests of batch invariance.

There is a call for each problem of `glulam.contract` and each form that ships. The two halves of every contraction
cancel, so a result is only what rounding left of its sums; another order of addition leaves other bits in nearly all
results. Values span several binades, so that sums are inexact in FP8, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import glulam
from cute_kernels.formats import OPERANDS
from glulam import contract
from glulam.choose.problem import Problem, changed
from glulam.host.experts import GateUp
from glulam.ops.adapted import adapted_dglu, adapted_glu, adapted_mm
from glulam.ops.quantized_weights import FORMS
from glulam.recipes import BF16, RECIPES

BINADES, OF_BLOCKS = 3, {128: 12, 32: 4}
"""Bounds of the random exponents of two: for single values, and for blocks.

OF_BLOCKS is by the number of elements that share a scale (128 in rows, 32 in weights). If the blocks of weights
differed more, the weights could not be folded for recipe "mxfp8".
"""
RANK = 32
"""Rank of adapters.

It is the contracted depth of two MMA instructions, so that the products of one cancel the other's.
"""


def values(*shape: int, seed: int) -> Tensor:
    """Return random bfloat16 numbers that span several binades."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-BINADES, BINADES + 1, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * torch.exp2(exponents.float())).bfloat16()


def _halves(*shape: int, seed: int, block: int) -> Tensor:
    """Return half of a contraction, along the last dimension.

    Scales differ from block to block, and values within a block.
    """
    *outer, depth = shape
    generator, most = torch.Generator().manual_seed(seed), OF_BLOCKS[block]
    exponents = torch.randint(-most, most + 1, (*outer, -(-depth // 2 // block)), generator=generator)
    by_block = torch.exp2(exponents.float()).repeat_interleave(block, -1)[..., : depth // 2]
    return values(*outer, depth // 2, seed=seed) * by_block.bfloat16()


def rows_of(total: int, depth: int, seed: int = 0) -> Tensor:
    """Return rows [total, depth] whose two halves of columns are equal."""
    half = _halves(total, depth, seed=seed, block=128)
    return torch.cat((half, half), dim=1)


def grouped_rows(sizes: Sequence[int], width: int, seed: int, sign: int) -> Tensor:
    """Return rows [sum(sizes), width]. The second half of each group is the first times `sign`; an odd row is zero."""
    halves = [values(size // 2, width, seed=seed + place) for place, size in enumerate(sizes)]
    odd = [half.new_zeros(size % 2, width) for half, size in zip(halves, sizes, strict=True)]
    return torch.cat([part for half, one in zip(halves, odd, strict=True) for part in (half, sign * half, one)])


def weights_of(experts: int, rows: int, depth: int, seed: int) -> Tensor:
    """Return weights [experts, rows, depth] whose second half of columns is the negative of the first."""
    half = _halves(experts, rows, depth, seed=seed, block=32)
    return torch.cat((half, -half), dim=2)


def gated_weights_of(experts: int, width: int, depth: int, seed: int) -> Tensor:
    """Return w1 [experts, 2 width, depth] in layout "concat".

    The activation then has two equal halves of columns.
    """
    gate, up = (weights_of(experts, width // 2, depth, seed=seed + place) for place in range(2))
    return torch.cat((gate, gate, up, up), dim=1)


def offs_of(sizes: Sequence[int]) -> Tensor:
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32)


def tensors_of(problem: Problem, sizes: Sequence[int]) -> dict[str, Tensor]:
    """Return the tensor arguments of a problem's call, with 16-bit weights [E, N, K].

    sizes: the number of rows of each group.
    """
    given = _tensors_of(problem, sizes)
    if problem.adapted:
        width = problem.w1_rows if problem.op == "grouped_glu" else problem.out_features or problem.intermediate
        given["low"] = rows_of(sum(sizes), RANK, seed=5)
        given["low_w"] = weights_of(len(sizes), width, RANK, seed=6)
    return given


def _tensors_of(problem: Problem, sizes: Sequence[int]) -> dict[str, Tensor]:
    experts, hidden, inter, out = problem.experts, problem.in_features, problem.intermediate, problem.out_features
    x = rows_of(sum(sizes), hidden)
    if problem.op == "grouped_mm":
        return {"x": x, "w": weights_of(experts, out, hidden, seed=1)}
    if problem.op == "grouped_glu":
        return {"x": x, "w1": gated_weights_of(experts, inter, hidden, seed=1)}
    if problem.op == "grouped_mlp":
        w2 = weights_of(experts, out, inter, seed=3)
        return {"x": x, "w1": gated_weights_of(experts, inter, hidden, seed=1), "w2": w2}
    if problem.op == "grouped_dglu":
        return {
            "dy": x, "w2": weights_of(experts, inter, hidden, seed=1),
            "preact": torch.randn(sum(sizes), 2 * inter, generator=torch.Generator().manual_seed(4)).bfloat16(),
        }  # fmt: skip
    return {"dy": grouped_rows(sizes, out, seed=1, sign=-1), "x": grouped_rows(sizes, hidden, seed=9, sign=1)}


def laid_out(problem: Problem, given: dict[str, Tensor]) -> dict[str, Any]:
    """Return the arguments with weights as the problem takes them: quantised, transposed or in halves."""
    found: dict[str, Any] = dict(given)
    if problem.op == "grouped_dglu":  # the weight is forward's, [E, K, N]
        problem = changed(problem, transpose_w=not problem.transpose_w)
    for name in ("w", "w1", "w2", "low_w"):
        if name not in given:
            continue
        if problem.operands != BF16.operands:
            form = FORMS[problem.operands]
            is_gate = name == "w1" and OPERANDS[problem.operands].w.rows > 1
            found[name] = (form.of_gate(given[name].shape[1]) if is_gate else form).quantized_tensor(given[name])
        elif problem.transpose_w:
            found[name] = given[name].mT.contiguous()
            if problem.in_halves:
                found[name] = GateUp(*(half.contiguous() for half in found[name].chunk(2, dim=1)))
    return found


_FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "grouped_mm": (glulam.grouped_mm, adapted_mm),
    "grouped_glu": (glulam.grouped_glu, adapted_glu),
    "grouped_dglu": (glulam.grouped_dglu, adapted_dglu),
}
"""For each operator that also exists with adapters: (the operator, the operator with adapters)."""


def call(problem: Problem, given: dict[str, Any], offs: Tensor) -> Tensor:
    """Call a problem's operator and return its result; of several results, the first one that its GEMM makes."""
    if problem.op == "grouped_wgrad":
        return glulam.grouped_wgrad(**given, offs=offs, out_dtype=getattr(torch, problem.out_dtype))
    if problem.op != "grouped_mlp":
        plain, adapted = _FUNCTIONS[problem.op]
        function = adapted if problem.adapted else plain
        options: dict[str, Any] = {"offs": offs, "transpose_w": problem.transpose_w}
        if problem.op == "grouped_glu" and not problem.adapted:
            options["return_preact"] = problem.save_preact
        made = function(**given, **options)
        return made if isinstance(made, Tensor) else made[0]
    options = {"recipe": recipe_of(problem), "offs": offs}
    if not problem.save_preact:
        return glulam.grouped_mlp(**given, **options)
    with torch.enable_grad():
        return glulam.grouped_mlp(**{**given, "x": given["x"].detach().requires_grad_()}, **options).detach()


def recipe_of(problem: Problem) -> str:
    """Return the name of the recipe that multiplies a problem's operands."""
    return next(name for name, recipe in RECIPES.items() if recipe.operands == problem.operands)


def problems_of(arch: str, **widths: int) -> list[Problem]:
    """Return every problem of the contract for which an architecture has several tiles.

    Problems with and without a saved preactivation count separately.
    """
    found: dict[Problem, None] = {}
    for op, recipe in itertools.product(contract.VARIANTS, RECIPES.values()):
        for problem in contract.problems(op, recipe, arch, **widths):
            found[problem] = None
    return list(found)
