"""Rows read by index on a GPU: the same bits as with a copy of the rows, which test_numerics.py and test_backward.py
compare with float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.criterion import same_bits
from support.inputs import Case, gradient, make_case, poison_allocator, preactivation
from support.routing import catalogue, spread, zipf

import glulam
from cute_kernels.chains import signature_of
from cute_kernels.shipped import activation_forms
from cute_kernels.sm90.configs import LARGE8, SMALL8_FC2
from cute_kernels.specs import GATED, GroupedMmSpec
from cute_kernels.tiles import TileConfig
from glulam.choose import kernels
from glulam.formats.mxfp8 import prepare_mxfp8_weight
from glulam.host.groups import OFFS_INT32
from glulam.recipes import BF16 as IN_16_BITS
from glulam.recipes import RECIPES

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HIDDEN, INTER, EXPERTS, TAIL = 200, 352, 8, 13
FEW_ROWS, MANY_ROWS = 200, 1500
BATCHES = {"few rows": zipf(FEW_ROWS, EXPERTS), "many rows": zipf(MANY_ROWS, EXPERTS)}
TOKENS = 97
QUANTISED = [name for name in RECIPES if name != IN_16_BITS.name]
SIZES = pytest.mark.parametrize(
    ("sizes", "hidden", "inter"),
    [
        (spread(300, 4), 736, 752),
        (zipf(900, 4), 736, 1504),
        ([3, 0, 5], 8, 32),
        ([70, 3], 4096, 32),
        ([70, 200], 8, 2080),
        ([1], HIDDEN, INTER),
        ([5000, 0, 3], 1504, 64),
        (zipf(1000, 512), 72, 96),
    ],
)


def case(sizes: list[int], hidden: int = HIDDEN, inter: int = INTER, **options: Any) -> Case:
    return make_case(sizes, hidden, inter, device="cuda", **{"tail": TAIL, "dtype": BF16, **options})


class Scattered:
    """A token matrix `x` [tokens, columns] with padded rows, `indices` for as many rows as `rows` has, and `copy`, a
    copy of the selected rows.

    The last token is NaN; only the indices of rows after the last group, which are out of range, clamp to it. Tokens
    are selected repeatedly, and some indices are negative.
    """

    def __init__(self, rows: torch.Tensor, used: int, tokens: int = TOKENS):
        count, columns = rows.shape
        generator = torch.Generator("cuda").manual_seed(count)
        wide = torch.full((tokens, columns + 8), torch.nan, dtype=rows.dtype, device="cuda")
        wide[: tokens - 1, :columns] = rows.new_empty(tokens - 1, columns).normal_(generator=generator)
        self.x = wide[:, :columns]
        indices = torch.randint(-3, tokens - 1, (count,), generator=generator, device="cuda", dtype=torch.int32)
        indices[used:] = torch.iinfo(torch.int32).max
        self.indices = indices
        self.copy = self.x[indices.clamp(0, tokens - 1).long()].contiguous()


def check_same(made: Any, wanted: Any, used: int, zero: float = 1e-3) -> None:
    for one, other in zip(made, wanted, strict=True):
        one, other = (value[:used] if value.dim() < 3 else value for value in (one, other))
        assert same_bits(one, other) and other.abs().max() > zero


class TestForward:
    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("transpose_w", [False, True])
    def test_mm(self, transpose_w: bool, batch: str, dtype: torch.dtype) -> None:
        c = case(BATCHES[batch], dtype=dtype)
        w = c.w2 if transpose_w else c.w1
        at = Scattered(c.x, c.rows)
        options = {"offs": c.offs, "transpose_w": transpose_w, "bias_scale": c.row_scale}
        bias = torch.randn(len(w), w.shape[2 if transpose_w else 1], device="cuda").to(dtype)
        made = glulam.grouped_mm(at.x, w, rows=at.indices, bias=bias, **options)
        check_same([made], [glulam.grouped_mm(at.copy, w, bias=bias, **options)], c.rows)

    @pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
    @pytest.mark.parametrize("name", catalogue(FEW_ROWS, EXPERTS))
    def test_routings(self, name: str, rows: int) -> None:
        sizes = catalogue(rows, EXPERTS)[name]
        c = case(sizes, tail=rows - sum(sizes) + TAIL)
        at = Scattered(c.x, c.rows)
        out = torch.full((len(c.x), HIDDEN), torch.nan, dtype=BF16, device="cuda")
        glulam.grouped_mlp(at.x, c.w1, c.w2, rows=at.indices, splits=c.splits(), b1=c.b1, out=out)
        assert out[c.rows :].isnan().all()
        if c.rows:
            check_same([out], [glulam.grouped_mlp(at.copy, c.w1, c.w2, splits=c.splits(), b1=c.b1)], c.rows)

    @SIZES
    def test_sizes(self, sizes: list[int], hidden: int, inter: int) -> None:
        c = case(sizes, hidden, inter)
        at = Scattered(c.x, c.rows)
        made = glulam.grouped_glu(at.x, c.w1, rows=at.indices, offs=c.offs, return_preact=True)
        check_same(made, glulam.grouped_glu(at.copy, c.w1, offs=c.offs, return_preact=True), c.rows)


class TestDglu:
    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("form", activation_forms(), ids="-".join)
    def test_every_form(self, form: tuple[str, str], batch: str, dtype: torch.dtype) -> None:
        c = case(BATCHES[batch], dtype=dtype, gated=form[0] in GATED)
        at = Scattered(gradient(c), c.rows)
        given = {
            "offs": c.offs, "row_scale": c.row_scale, "activation": form[0], "glu_layout": form[1]
        }  # fmt: skip
        h = preactivation(c)
        made = glulam.grouped_dglu(at.x, c.w2, h, rows=at.indices, **given)
        check_same(made, glulam.grouped_dglu(at.copy, c.w2, h, **given), c.rows)

    @SIZES
    def test_sizes(self, sizes: list[int], hidden: int, inter: int) -> None:
        c = case(sizes, hidden, inter)
        at, h = Scattered(gradient(c), c.rows), preactivation(c)
        for _ in range(3):
            poison_allocator("cuda")
            made = glulam.grouped_dglu(at.x, c.w2, h, rows=at.indices, offs=c.offs, row_scale=c.row_scale)
            wanted = glulam.grouped_dglu(at.copy, c.w2, h, offs=c.offs, row_scale=c.row_scale)
            check_same(made, wanted, c.rows, 0.0)


class TestWgrad:
    """Tests of grouped_wgrad of dy [T, INTER] and x [T, HIDDEN], either of which is read by index."""

    def check(self, c: Case, by: str, **options: Any) -> None:
        dy, x = preactivation(c)[:, : c.w2.shape[2]].contiguous(), c.x
        operands = {"dy": dy, "x": x}
        at = Scattered(operands[by], c.rows)
        copied = {**operands, by: at.copy}
        copied[by][c.rows :] = torch.nan
        poison_allocator("cuda")
        made = glulam.grouped_wgrad(**{**operands, by: at.x}, offs=c.offs, **{f"{by}_rows": at.indices}, **options)
        wanted = glulam.grouped_wgrad(**copied, offs=c.offs, **options)
        # Which of two tiles adds a group's rows up decides their order, and so the last bits.
        scale = wanted.float().abs().amax()
        assert torch.isfinite(made).all() and (made.float() - wanted.float()).abs().amax() <= scale * 2**-7

    @pytest.mark.parametrize("by", ["dy", "x"])
    @pytest.mark.parametrize("out_dtype", [None, F32], ids=str)
    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    @pytest.mark.parametrize("batch", BATCHES)
    def test_batches(self, batch: str, dtype: torch.dtype, out_dtype: torch.dtype | None, by: str) -> None:
        self.check(case(BATCHES[batch], dtype=dtype), by, out_dtype=out_dtype)

    @pytest.mark.parametrize("by", ["dy", "x"])
    @pytest.mark.parametrize("name", catalogue(FEW_ROWS, EXPERTS))
    def test_routings(self, name: str, by: str) -> None:
        for rows in (FEW_ROWS, MANY_ROWS):
            sizes = catalogue(rows, EXPERTS)[name]
            self.check(case(sizes, tail=rows - sum(sizes) + TAIL), by)

    @pytest.mark.parametrize("by", ["dy", "x"])
    @SIZES
    def test_sizes(self, sizes: list[int], hidden: int, inter: int, by: str) -> None:
        self.check(case(sizes, hidden, inter), by)

    @pytest.mark.parametrize("by", ["dy", "x"])
    @pytest.mark.parametrize("hidden", [184, 200])
    def test_against_float64(self, hidden: int, by: str) -> None:
        """On either tile."""
        c = case(BATCHES["many rows"], hidden, 488)
        dy, x = preactivation(c)[:, :488].contiguous(), c.x
        at = Scattered({"dy": dy, "x": x}[by], c.rows)
        operands = {"dy": dy, "x": x, by: at.copy}
        out = torch.randn(EXPERTS, 488, hidden, device="cuda")
        before = out.double()
        given = {**{"dy": dy, "x": x}, by: at.x, f"{by}_rows": at.indices}
        glulam.grouped_wgrad(**given, offs=c.offs, out=out, accumulate=True)
        begin = 0
        for expert, end in enumerate(c.offs.tolist()):
            a, b = (operands[name][begin:end].double() for name in ("dy", "x"))
            wanted, begin = before[expert] + a.mT @ b, end
            assert (out[expert].double() - wanted).abs().amax() <= 1e-5 * wanted.abs().amax() + 1e-4


class TestMxfp8Kernels:
    """Tests of single MXFP8 GEMM kernels on rows of 608 = 4.75 k-tiles."""

    HIDDEN = 608

    def check(self, spec: GroupedMmSpec, prepared: tuple[torch.Tensor, torch.Tensor], c: Case) -> None:
        """Launch a GEMM with rows by index and with copied rows, and compare. prepared: the weight and its scales."""
        at = Scattered(c.x, c.rows)
        kernel = kernels.find(spec)
        data, scale = prepared
        offs = c.offs  # made anew each time, and its memory is another tensor's once nobody holds it
        results = []
        for x, rows in ((at.x.contiguous(), at.indices.data_ptr()), (at.copy, 0)):
            y = torch.full((len(c.x), data.shape[1]), torch.nan, dtype=BF16, device="cuda")
            addresses = {"w_scale": scale.data_ptr(), "groups": offs.data_ptr()}
            if spec.operands == "mxfp8":
                x8 = glulam.quantize_mxfp8(x, block="1x128")
                x, addresses["x_scale"] = x8.data, x8.scale.data_ptr()
            numbers = {"rows": rows, "group_form": OFFS_INT32, "num_groups": EXPERTS, "num_sms": 132}
            kernel.function(*signature_of(spec).pack(x=x, w=data, y=y, **addresses, **numbers))
            assert y[c.rows :].isnan().all()
            results.append(y)
        check_same(results[:1], results[1:], c.rows)

    @pytest.mark.parametrize("tile", [LARGE8, SMALL8_FC2], ids=lambda tile: tile.name)
    @pytest.mark.parametrize("batch", BATCHES)
    def test_bytes_and_their_scales(self, batch: str, tile: TileConfig) -> None:
        c = case(BATCHES[batch], self.HIDDEN, 352)
        w = prepare_mxfp8_weight(c.w1)
        self.check(GroupedMmSpec(tile=tile, operands="mxfp8"), (w.data, w.scale), c)


class TestRecipes:
    """Tests of grouped_mlp with rows by index by recipes that quantise each token once."""

    @pytest.mark.parametrize("recipe", QUANTISED)
    @pytest.mark.parametrize("rows", [1, 20, 200, 700, 1500, 6000])
    def test_mlp(self, rows: int, recipe: str) -> None:
        c = case(zipf(rows, EXPERTS), 608, 352)
        at = Scattered(c.x, c.rows)
        given = {"offs": c.offs, "row_scale": c.row_scale, "b1": c.b1, "recipe": recipe}
        out = torch.full((len(c.x), 608), torch.nan, dtype=BF16, device="cuda")
        glulam.grouped_mlp(at.x, c.w1, c.w2, rows=at.indices, out=out, **given)
        assert out[c.rows :].isnan().all()
        check_same([out], [glulam.grouped_mlp(at.copy, c.w1, c.w2, **given)], c.rows)

    @pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_exact"])
    @pytest.mark.parametrize("block", ["1x32", "1x128"])
    def test_tokens_in_mxfp8(self, block: str, recipe: str) -> None:
        c = case(BATCHES["many rows"], 608, 352)
        at = Scattered(c.x, c.rows)
        x, copy = (glulam.quantize_mxfp8(one.contiguous(), block=block) for one in (at.x, at.copy))
        made = glulam.grouped_mlp(x, c.w1, c.w2, rows=at.indices, offs=c.offs, recipe=recipe)
        check_same([made], [glulam.grouped_mlp(copy, c.w1, c.w2, offs=c.offs, recipe=recipe)], c.rows)

    @pytest.mark.parametrize("recipe", QUANTISED)
    def test_a_graph_reads_other_indices(self, recipe: str) -> None:
        c = case(BATCHES["many rows"], 608, 352)
        at = Scattered(c.x, c.rows)
        given = {"offs": c.offs, "recipe": recipe}
        rows, others = at.indices.clone(), torch.randint_like(at.indices, 0, TOKENS - 1)
        glulam.grouped_mlp(at.x, c.w1, c.w2, rows=rows, **given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = glulam.grouped_mlp(at.x, c.w1, c.w2, rows=rows, **given)
        rows.copy_(others)
        graph.replay()
        check_same([result], [glulam.grouped_mlp(at.x, c.w1, c.w2, rows=others, **given)], c.rows)


@pytest.mark.parametrize("op", ["mm", "glu", "dglu", "wgrad"])
def test_a_graph_reads_other_indices(op: str) -> None:
    c = case(BATCHES["many rows"])
    source = gradient(c) if op == "dglu" else c.x
    first, second = Scattered(source, c.rows), Scattered(source, c.rows, TOKENS)
    second.indices = torch.randint_like(first.indices, 0, TOKENS - 1)
    h, offs = preactivation(c), c.offs

    def run(rows: torch.Tensor) -> torch.Tensor:
        calls = {
            "mm": lambda: glulam.grouped_mm(first.x, c.w1, offs=offs, rows=rows),
            "glu": lambda: glulam.grouped_glu(first.x, c.w1, offs=offs, rows=rows),
            "dglu": lambda: glulam.grouped_dglu(first.x, c.w2, h, offs=offs, rows=rows)[0],
            "wgrad": lambda: glulam.grouped_wgrad(h, first.x, offs=offs, x_rows=rows),
        }
        return calls[op]()

    rows = first.indices.clone()
    run(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(rows)
    rows.copy_(second.indices)
    graph.replay()
    wanted = run(second.indices)
    used = len(wanted) if op == "wgrad" else c.rows
    assert same_bits(result[:used], wanted[:used])
