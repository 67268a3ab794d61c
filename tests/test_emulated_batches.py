"""Batch invariance without a GPU: the same rows through every tile that ships for a problem have the same bits where
`accumulation` says so, and others where it does not. Tiles, orders and problems are those that the product declares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from emulator.emulated_gpu import installed
from support import batches
from support.criterion import same_bits
from support.fake_gpu import reference
from torch import Tensor

from cute_kernels.formats import OPERANDS
from cute_kernels.specs import Spec
from cute_kernels.stages import accumulations_of
from cute_kernels.tiles import TileConfig
from glulam.choose import invariance, known
from glulam.choose.problem import Problem
from glulam.choose.shipped import spec_on
from glulam.host.plans import forget_plans
from glulam.validate import child

SIZES = (7, 0, 13)
"""Rows of each expert: of one tile of the smallest, and of every other tile a part."""
DEPTH, DEPTH_IN_BLOCKS = 320, 512
"""Of a contraction: of 16-bit weights an odd number of k-tiles; else whole blocks of 128 in either half."""
WIDTH = 128
LEAST = 0.1
"""Of results, the share that rounding must decide."""
ARCHS = ("sm_90a", "sm_90", "sm_100a")


def _sized(problem: Problem) -> Problem:
    """A problem of these rows, as small as its formats allow."""
    depth = DEPTH if OPERANDS[problem.operands].w.bits == 16 else DEPTH_IN_BLOCKS
    sizes = {name: WIDTH for name in ("intermediate", "out_features") if getattr(problem, name)}
    if problem.op == "grouped_mlp":
        sizes["intermediate"] = depth
    return dataclasses.replace(
        problem, rows=sum(SIZES), experts=len(SIZES), in_features=depth, **sizes
    )  # fmt: skip


def _id(problem: Problem) -> str:
    form = ("-preact" if problem.save_preact else "") + ("-transposed" if problem.transpose_w else "")
    return f"{problem.op}-{problem.operands}{form}"


CASES = {
    arch: [_sized(one) for one in batches.problems_of(arch) if len(invariance.orders_by_tile(one, arch)) > 1]
    for arch in ARCHS
}


def results(arch: str, specs: Sequence[Spec], problem: Problem) -> list[Tensor]:
    """The same call by each function."""
    found = []
    with installed(arch) as gpu, torch.no_grad():
        with reference():
            given = batches.quantised(problem, batches.tensors_of(problem, problem.rows))
        for spec in specs:
            known.forget()
            forget_plans()
            child.prefer(spec)
            del gpu.fake.specs[:]
            found.append(batches.call(problem, given, batches.offs_of(SIZES)))
            assert spec in gpu.fake.specs, f"{spec.name} did not serve the call"
    return found


def check(arch: str, problem: Problem, tiles: Sequence[TileConfig]) -> None:
    """Compare each tile's bits with those of the tile whose order is the problem's."""
    order = invariance.order_of(problem, arch)
    specs = [spec_on(problem, arch, tile) for tile in tiles]
    made = results(arch, specs, problem)
    wanted = next(one for one, spec in zip(made, specs, strict=True) if accumulations_of(spec) == order)
    shown = float((wanted != 0).double().mean())
    assert wanted.isfinite().all() and shown > LEAST, f"all but {shown:.3f} of the sums were exact: nothing would show"
    for spec, one in zip(specs, made, strict=True):
        if accumulations_of(spec) == order:
            assert same_bits(one, wanted), f"{spec.name} has other bits than its declared order gives"
        else:
            other = float((one != wanted).double().mean())
            assert other > LEAST, f"{spec.name} has the bits of the order that it denies, except {other:.3f} of them"


def _params(cases: dict[str, list[Problem]]) -> list[Any]:
    return [pytest.param(arch, one, id=f"{arch}-{_id(one)}") for arch, found in cases.items() for one in found]


@pytest.mark.emulator
@pytest.mark.parametrize(("arch", "problem"), _params(CASES))
def test_every_tile_adds_in_the_order_that_it_declares(arch: str, problem: Problem) -> None:
    check(arch, problem, list(invariance.orders_by_tile(problem, arch)))
