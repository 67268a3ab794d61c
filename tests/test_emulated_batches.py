"""Batch invariance without a GPU: a row has the same bits on all tiles that ship for a problem if `accumulation`
declares the same order, and different bits if not. The same holds for forms of a GEMM: weights that are transposed or
in two tensors, a preactivation that is stored, an adapter, another dtype of the result.

Tiles, orders, problems and forms are those that the product declares.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from emulator.emulated_gpu import installed
from support import batches
from support.criterion import same_bits
from support.fake_gpu import reference
from torch import Tensor

import glulam
from cute_kernels.accumulation import Accumulation
from cute_kernels.arch import policy_of
from cute_kernels.formats import OPERANDS
from cute_kernels.specs import Spec
from cute_kernels.stages import accumulations_of, gemms_of
from cute_kernels.tiles import TileConfig
from ffi_bridge import profiles
from glulam.choose import invariance, known
from glulam.choose.problem import Problem, changed
from glulam.choose.shipped import WIDTHS, spec_on
from glulam.host.plans import forget_plans
from glulam.recipes import BF16
from glulam.validate import child

SIZES = (7, 0, 13)
"""Rows of each expert: of one tile of the smallest, and of every other tile a part."""
SIZES_OF_WGRAD = (70, 0, 130)
"""Rows of each expert where they are contracted: two and three k-tiles."""
SIZES_OF_DECODING = (133, 5)
"""Rows of each expert where weights are decoded: of the largest tile more than half, and of every tile a few."""
DEPTH, DEPTH_IN_HALVES, DEPTH_IN_BLOCKS = 320, 384, 512
"""Widths of contractions: an odd number of k-tiles for 16-bit weights, in each half for weights in two tensors; else
whole blocks of 128 in either half."""
WIDTH = 128
SHOWN, DENIED = 0.01, 0.1
"""Shares of the results that rounding must decide, and that another order must change. FP8 rows times four bits are
nearly always exact: 1.4 % of their results are not."""
ARCHS = ("sm_90a", "sm_90", "sm_100a")


def _sized(problem: Problem) -> Problem:
    """Return the problem with the smallest sizes that its formats allow."""
    depth = DEPTH_IN_HALVES if problem.in_halves else DEPTH
    if OPERANDS[problem.operands].w.bits < 16:
        depth = DEPTH_IN_BLOCKS
    sizes = {name: WIDTH for name in ("intermediate", "out_features") if getattr(problem, name)}
    if problem.op == "grouped_mlp":
        sizes["intermediate"] = depth
    rows = sizes_of(problem)
    return dataclasses.replace(problem, rows=sum(rows), experts=len(rows), in_features=depth, **sizes)


def sizes_of(problem: Problem) -> tuple[int, ...]:
    """Return the rows of each expert in a problem's call."""
    return SIZES_OF_WGRAD if problem.op == "grouped_wgrad" else SIZES


def _id(problem: Problem) -> str:
    flags = {
        "preact": problem.save_preact, "transposed": problem.transpose_w, "halves": problem.in_halves,
        "adapted": problem.adapted, problem.out_dtype: problem.out_dtype,
    }  # fmt: skip
    return "-".join([problem.op, problem.operands, *(name for name, is_set in flags.items() if is_set)])


def forms_of(arch: str) -> list[Problem]:
    """Return a problem for each form of a bfloat16 GEMM that an architecture ships, with SwiGLU."""
    names = [field.name for field in dataclasses.fields(Problem)]
    found: dict[Problem, None] = {}
    for spec in profiles.shipped_specs(arch, "bf16"):
        if len(gemms_of(spec)) != 1 or spec.op not in WIDTHS or spec.operands != BF16.operands:
            continue
        sizes: dict[str, Any] = {"rows": 1, "experts": 1, **dict.fromkeys(WIDTHS[spec.op], 1)}
        fields = {name: getattr(spec, name) for name in names if hasattr(spec, name)}
        if "activation" in fields:
            fields |= {"activation": "swiglu", "glu_layout": "concat"}
        found[_sized(Problem(**sizes, **fields))] = None
    return list(found)


def plain(form: Problem) -> Problem:
    """Return the problem of the same products in the plain form: forward's weights [E, N, K] in one tensor, no adapter,
    no stored preactivation, a result in the dtype of the rows."""
    out_dtype = form.dtype if form.out_dtype else ""
    return changed(form, transpose_w=False, in_halves=False, adapted=False, save_preact=False, out_dtype=out_dtype)


FORMS = {arch: [one for one in forms_of(arch) if one != plain(one)] for arch in ARCHS}
CASES = {
    arch: [
        one
        for one in (*map(_sized, batches.problems_of(arch)), *FORMS[arch])
        if len(invariance.orders_by_tile(one, arch)) > 1 and (one.adapted or one not in FORMS[arch])
    ]
    for arch in ARCHS
}
"""Problems whose tiles are compared with each other. A form's tiles are compared with the plain form's, except that an
adapter, whose place in a sum is not declared, is compared from tile to tile."""


def results(
    arch: str, specs: Sequence[Spec], problem: Problem, is_adapter_zero: bool = False, sizes: tuple[int, ...] = ()
) -> list[Tensor]:  # fmt: skip
    """Return the results of one call by each function. sizes: rows of each expert; (): as `sizes_of` says."""
    found, sizes = [], sizes or sizes_of(problem)
    with installed(arch) as gpu, torch.no_grad():
        with reference():
            given = batches.laid_out(problem, batches.tensors_of(problem, sizes))
        if is_adapter_zero and problem.adapted:
            given["low"].zero_()
        for spec in specs:
            known.forget()
            forget_plans()
            child.prefer(spec)
            del gpu.fake.specs[:]
            found.append(batches.call(problem, given, batches.offs_of(sizes)))
            assert spec in gpu.fake.specs, f"{spec.name} did not serve the call"
    return found


def _assert_rounded(wanted: Tensor) -> None:
    shown = float((wanted != 0).double().mean())
    assert wanted.isfinite().all() and shown > SHOWN, f"all but {shown:.3f} of the sums were exact: nothing would show"


def check(arch: str, problem: Problem, tiles: Sequence[TileConfig]) -> None:
    """Compare each tile's bits with the bits of the tile whose order is the problem's."""
    order = invariance.order_of(problem, arch)
    specs = [spec_on(problem, arch, tile) for tile in tiles]
    made = results(arch, specs, problem)
    wanted = next(one for one, spec in zip(made, specs, strict=True) if accumulations_of(spec) == order)
    _assert_rounded(wanted)
    for spec, one in zip(specs, made, strict=True):
        if accumulations_of(spec) == order:
            assert same_bits(one, wanted), f"{spec.name} has other bits than its declared order gives"
        else:
            other = float((one != wanted).double().mean())
            assert other > DENIED, f"{spec.name} has the bits of the order that it denies, except {other:.3f} of them"


@functools.cache
def _plain_result(arch: str, spec: Spec, problem: Problem) -> Tensor:
    (made,) = results(arch, [spec], problem)
    _assert_rounded(made)
    return made


def check_form(arch: str, form: Problem) -> None:
    """Compare each tile's bits with the plain form's on the widest tile that declares the same order. An adapter
    is zero: where its products are added is not declared."""
    tiles = sorted(policy_of(arch).tiles(plain(form)), key=lambda tile: tile.m)
    siblings = {accumulations_of(spec): spec for spec in (spec_on(plain(form), arch, tile) for tile in tiles)}
    specs = [spec_on(form, arch, tile) for tile in policy_of(arch).tiles(form)]
    for spec, made in zip(specs, results(arch, specs, form, is_adapter_zero=True), strict=True):
        sibling = siblings.get(accumulations_of(spec))
        assert sibling, f"no tile of the plain form declares the order of {spec.name}: compare it with another form"
        wanted = _plain_result(arch, sibling, plain(form))
        assert same_bits(made.to(wanted.dtype), wanted), f"{spec.name} has other bits than {sibling.name}"


def _params(cases: dict[str, list[Problem]]) -> list[Any]:
    return [pytest.param(arch, one, id=f"{arch}-{_id(one)}") for arch, found in cases.items() for one in found]


@pytest.mark.emulator
@pytest.mark.parametrize(("arch", "problem"), _params(CASES))
def test_every_tile_adds_in_the_order_that_it_declares(arch: str, problem: Problem) -> None:
    check(arch, problem, list(invariance.orders_by_tile(problem, arch)))


@pytest.mark.emulator
@pytest.mark.parametrize(("arch", "form"), _params(FORMS))
def test_forms_of_one_order_have_the_same_bits(arch: str, form: Problem) -> None:
    check_form(arch, form)


def _problem(arch: str, op: str, operands: str) -> Problem:
    return next(one for one in CASES[arch] if (one.op, one.operands, one.transpose_w) == (op, operands, False))


DECODING = [one for one in CASES["sm_90a"] if one.op == "grouped_mm" and OPERANDS[one.operands].decodes]


@pytest.mark.emulator
@pytest.mark.parametrize("problem", DECODING, ids=_id)
def test_tiles_with_few_rows_add_in_the_same_order(problem: Problem) -> None:
    """A tile of decoded weights with at most half of its rows runs a loop of its own."""
    arch, sizes = "sm_90a", SIZES_OF_DECODING
    problem = dataclasses.replace(problem, rows=sum(sizes), experts=len(sizes))
    specs = [spec_on(problem, arch, tile) for tile in sorted(policy_of(arch).tiles(problem), key=lambda tile: -tile.m)]
    specs = [spec for spec in specs if accumulations_of(spec) == accumulations_of(specs[0])]
    widest, *others = results(arch, specs, problem, sizes=sizes)
    _assert_rounded(widest)
    for spec, one in zip(specs[1:], others, strict=True):
        assert same_bits(one, widest), f"{spec.name} has other bits than {specs[0].name}"


OF_MANY_ROWS, SPLIT, PERMUTED = (
    ("sm_90a", "grouped_mm", "16bit"), ("sm_90", "grouped_mm", "16bit"), ("sm_90a", "grouped_mm", "mxfp4_weight_only")
)  # fmt: skip
"""Problems whose tiles add in one order; of which one splits the contraction; of which one permutes it."""


@pytest.mark.parametrize(("arch", "op", "operands"), [OF_MANY_ROWS, SPLIT, PERMUTED])
def test_some_tiles_add_in_the_order_that_they_declare(arch: str, op: str, operands: str) -> None:
    """The fewest and the most rows of a problem; all tiles of all problems are in the test above."""
    problem = _problem(arch, op, operands)
    tiles = sorted(invariance.orders_by_tile(problem, arch), key=lambda tile: tile.m)
    check(arch, problem, [tiles[0], tiles[-1]])


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Callable[[Any], Accumulation]], None]]:
    """Return a function that overrides an architecture's accumulation order."""

    def declare(arch: str, order: Callable[[Any], Accumulation]) -> None:
        monkeypatch.setattr(policy_of(arch), "accumulation", order)
        accumulations_of.cache_clear()

    yield declare
    monkeypatch.undo()
    accumulations_of.cache_clear()


@pytest.mark.parametrize(("arch", "op", "operands"), [SPLIT, PERMUTED], ids=["split", "permuted"])
def test_a_tile_that_changes_the_order_is_found(arch: str, op: str, operands: str, declare: Any) -> None:
    """One that splits the contraction among warps, and one that takes its elements in another order, as if either had
    been added to the table without a word."""
    problem = _problem(arch, op, operands)
    tiles = sorted(invariance.orders_by_tile(problem, arch), key=lambda tile: tile.m)
    declare(arch, lambda spec: Accumulation("mma", 16))
    with pytest.raises(AssertionError, match=f"{tiles[0].name}.* has other bits than its declared order gives"):
        check(arch, problem, [tiles[-1], tiles[0]])


def test_a_form_that_changes_the_order_is_found(declare: Any) -> None:
    """Weights in halves on a tile that splits the contraction among warps, as if it declared that it does not."""
    form = next(one for one in FORMS["sm_90"] if one.in_halves)
    check_form("sm_90", form)
    declare("sm_90", lambda spec: Accumulation("mma.sync", 16))
    with pytest.raises(AssertionError, match="nn_halves_t16x.* has other bits than grouped_mm_bf16_nt_t128x"):
        check_form("sm_90", form)


def test_an_order_that_is_denied_is_found(declare: Any) -> None:
    """A tile that is left out for nothing."""
    problem = _problem(*OF_MANY_ROWS)
    few, many = sorted(invariance.orders_by_tile(problem, "sm_90a"), key=lambda tile: tile.m)
    declare("sm_90a", lambda spec: Accumulation("mma", 16, parts=spec.tile.m))
    with pytest.raises(AssertionError, match=f"{few.name}.* has the bits of the order that it denies"):
        check("sm_90a", problem, [many, few])


@pytest.mark.parametrize("num_sms", [4, 7])
def test_places_other_rows_and_sms_change_nothing(num_sms: int) -> None:
    """Rows among others, in another order, in tiles that begin elsewhere, dealt to another number of CTAs."""
    arch, *_ = OF_MANY_ROWS
    problem = _problem(*OF_MANY_ROWS)
    spec = spec_on(problem, arch, max(invariance.orders_by_tile(problem, arch), key=lambda tile: tile.m))
    (wanted,) = results(arch, [spec], problem)
    given = batches.tensors_of(problem, SIZES)
    end, others = sum(SIZES), 30
    order = torch.cat((torch.arange(end, end + others), torch.arange(end).flip(0)))
    rows = torch.cat((given["x"], batches.rows_of(others, DEPTH, seed=9)))[order]
    sizes = (others, 0, 0, SIZES[2], SIZES[1], SIZES[0])  # experts behind others, in another order
    w = torch.cat((given["w"], given["w"].flip(0)))
    with installed(arch, num_sms=num_sms, seed=num_sms) as gpu, torch.no_grad():
        child.prefer(spec)
        made = batches.call(dataclasses.replace(problem, experts=6), {"x": rows, "w": w}, batches.offs_of(sizes))
        assert spec in gpu.fake.specs
    assert same_bits(made[others:].flip(0), wanted)


def test_tokens_and_sms_change_no_bits_of_hyper_connections() -> None:
    """With the switch; without it a float32 weight's columns are cut otherwise, and bits differ."""
    n, width = 4, 256
    x, weight = batches.values(40, n, width, seed=1), batches.values(24, n * width, seed=2).float() / 8
    alphas = [torch.ones(1) for _ in range(3)]
    made: dict[bool, list[Tensor]] = {True: [], False: []}
    for mode, (tokens, num_sms) in itertools.product((True, False), [(3, 2), (40, 4)]):
        with installed("sm_90a", num_sms=num_sms), glulam.batch_invariant(mode), torch.no_grad():
            *_, logits = glulam.mhc.project(x[:tokens].contiguous(), weight, *alphas, torch.zeros(24))
            made[mode].append(logits[:3])
    assert same_bits(*made[True]) and made[True][0].isfinite().all()
    assert not same_bits(*made[False]), "both are cut alike, so that nothing shows"
    torch.testing.assert_close(made[True][0], made[False][0])


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCHS)
def test_recording_a_gradient_changes_no_bits(arch: str) -> None:
    """A forward that stores its preactivation, on the same tile."""
    problem = _problem(arch, "grouped_mlp", "16bit")
    tile = max(invariance.orders_by_tile(problem, arch), key=lambda tile: tile.m)
    recorded = dataclasses.replace(problem, save_preact=True)
    found = [results(arch, [spec_on(one, arch, tile)], one)[0] for one in (problem, recorded)]
    assert same_bits(*found) and (found[0] != 0).any()
