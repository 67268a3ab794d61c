"""FC1's weights as two tensors (gate and up), forward and backward, through the public API.

Forward must equal the result with one tensor bit for bit; the data gradient is compared with float64.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from support.checks import Form, check_glu, check_mlp, check_mm
from support.criterion import same_bits
from support.gradients import check_gradients, leaves
from support.inputs import Case, apart, gradient, make_case, poison_allocator
from support.routing import ODD_SIZES, catalogue, one_takes_all, spread, zipf

import glulam
from cute_kernels.specs import GATED
from glulam import GateUp

pytestmark = pytest.mark.gpu

BF16, F16 = torch.bfloat16, torch.float16
HIDDEN, INTER = 200, 352
EXPERTS, FEW_ROWS, MANY_ROWS, TAIL = 8, 200, 1500, 13
BATCHES = {"few rows": zipf(FEW_ROWS, EXPERTS), "many rows": zipf(MANY_ROWS, EXPERTS)}
ORDERS = pytest.mark.parametrize("upside_down", [False, True], ids=["gate first", "up first"])
FAR = 3 << 29
"""Elements of 2 bytes: 3 GiB, so that a half's distance has both coordinates."""


def case(sizes: list[int], hidden: int = HIDDEN, inter: int = INTER, **options: Any) -> Case:
    return make_case(sizes, hidden, inter, device="cuda", **{"tail": TAIL, "dtype": BF16, **options})


def preacts(c: Case, seed: int = 3) -> torch.Tensor:
    """Return a random gradient of the preactivation h [T, 2I], NaN after the last group."""
    return gradient(c, 2 * c.w2.shape[2], seed)


@ORDERS
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("activation", GATED)
def test_every_activation(activation: str, batch: str, dtype: torch.dtype, upside_down: bool) -> None:
    c, form = case(BATCHES[batch], dtype=dtype), (activation, "concat")
    w1 = GateUp(*apart(c.w1, upside_down))
    for extras in (False, True):
        options = {"b1": c.b1, "b2": c.b2, "row_scale": c.row_scale} if extras else {}
        y, want = (glulam.grouped_mlp(c.x, w, c.w2, offs=c.offs, activation=activation, **options) for w in (w1, c.w1))
        check_mlp(c, y, form, **options)
        assert same_bits(y[: c.rows], want[: c.rows])
        options = {"bias": c.b1, "row_scale": c.row_scale} if extras else {}
        for saves in (False, True):
            named = {"activation": activation, "return_preact": saves, **options}
            made, wanted = (glulam.grouped_glu(c.x, w, offs=c.offs, **named) for w in (w1, c.w1))
            pairs = zip(*(m if saves else (m,) for m in (made, wanted)), strict=True)
            assert all(same_bits(one[: c.rows], other[: c.rows]) for one, other in pairs)
            act, preact = made if saves else (made, None)
            check_glu(c, act, preact, form, **options)


SIZES = {
    "H = 1504, I = 736": (spread(300, 4), 1504, 736),
    "H = 736, I = 1504": (zipf(900, 4), 736, 1504),
    "one load of columns": ([40, 30], 72, 64),
    **ODD_SIZES,
}


@ORDERS
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str, upside_down: bool) -> None:
    """Of the forward and of the data gradient."""
    sizes, hidden, inter = SIZES[name]
    c = case(sizes, hidden, inter, tail=TAIL if any(sizes) else 0)
    w1, h = GateUp(*apart(c.w1, upside_down)), preacts(c)
    options = {"b1": c.b1, "b2": c.b2, "row_scale": c.row_scale}
    y, want = (glulam.grouped_mlp(c.x, w, c.w2, splits=c.splits(), **options) for w in (w1, c.w1))
    assert same_bits(y[: c.rows], want[: c.rows])
    check_mlp(c, y, **options)
    check_product(c, h, glulam.grouped_mm(h, w1, splits=c.splits(), transpose_w=True))


@pytest.mark.parametrize("width", [8, 24, 40, 56, 64, 72, 128, 136, 1000])
@pytest.mark.parametrize("batch", BATCHES)
def test_halves_that_no_tile_divides(batch: str, width: int) -> None:
    c = case(BATCHES[batch], inter=width)
    w1, h = GateUp(*apart(c.w1)), preacts(c)
    both, wanted = (glulam.grouped_glu(c.x, w, offs=c.offs, bias=c.b1, return_preact=True) for w in (w1, c.w1))
    assert all(same_bits(one[: c.rows], other[: c.rows]) for one, other in zip(both, wanted, strict=True))
    check_glu(c, *both, bias=c.b1)
    y = glulam.grouped_mm(h, w1, offs=c.offs, transpose_w=True)
    check_product(c, h, y)
    if width % 64 == 0:  # the same products in the same order
        assert same_bits(y[: c.rows], glulam.grouped_mm(h, c.w1, offs=c.offs, transpose_w=True)[: c.rows])


def check_product(c: Case, h: torch.Tensor, y: torch.Tensor) -> None:
    check_mm(Case(**{**vars(c), "x": h}), c.w1, y, transpose_w=True)


@ORDERS
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
@pytest.mark.parametrize("name", catalogue(FEW_ROWS, EXPERTS))
def test_routings_of_the_data_gradient(name: str, rows: int, dtype: torch.dtype, upside_down: bool) -> None:
    """Into a poisoned padded output whose tail must stay, from padded rows whose padding is NaN."""
    sizes = catalogue(rows, EXPERTS)[name]
    c = case(sizes, dtype=dtype, tail=rows - sum(sizes) + TAIL)
    wide = torch.full((len(c.x), 2 * INTER + 24), math.nan, dtype=dtype, device="cuda")
    h = wide[:, : 2 * INTER]
    h.copy_(preacts(c))
    buffer = torch.full((len(c.x), HIDDEN + 8), math.nan, dtype=dtype, device="cuda")
    out = buffer[:, :HIDDEN]
    assert glulam.grouped_mm(h, GateUp(*apart(c.w1, upside_down)), offs=c.offs, transpose_w=True, out=out) is out
    assert bool(buffer[c.rows :].isnan().all()) and bool(buffer[:, HIDDEN:].isnan().all())
    check_product(c, h, out)


@pytest.mark.parametrize("inter", [160, 168])
@pytest.mark.parametrize("few", [False, True])
def test_rows_of_other_groups_reach_no_result(few: bool, inter: int) -> None:
    """Every other group holds NaN."""
    sizes = [64, 1, 128, 15, 257, 16, 300, 17, 64, 48, 130, 49, 200, 63, 128, 65, 1, 127, 190, 129, 31, 193]
    sizes = [size // 8 + 1 for size in sizes] if few else sizes
    c = case(sizes, inter=inter)
    w1, h = GateUp(*apart(c.w1)), preacts(c)
    clean = glulam.grouped_mm(h, w1, offs=c.offs, transpose_w=True)
    check_product(c, h, clean)
    for group in h[: c.rows].split(c.sizes)[::2]:
        group.fill_(math.nan)
    got, want = (y[: c.rows].split(c.sizes) for y in (glulam.grouped_mm(h, w1, offs=c.offs, transpose_w=True), clean))
    assert all(bool(y.isnan().all()) for y in got[::2])
    assert all(same_bits(*map(torch.Tensor.contiguous, pair)) for pair in zip(got[1::2], want[1::2], strict=True))


@ORDERS
def test_halves_far_apart(upside_down: bool) -> None:
    c = case(BATCHES["many rows"])
    w1, h = GateUp(*apart(c.w1, upside_down, FAR)), preacts(c)
    assert abs(w1.up.data_ptr() - w1.gate.data_ptr()) > 2 * FAR
    y, want = (glulam.grouped_mlp(c.x, w, c.w2, offs=c.offs) for w in (w1, c.w1))
    assert same_bits(y[: c.rows], want[: c.rows])
    check_product(c, h, glulam.grouped_mm(h, w1, offs=c.offs, transpose_w=True))


@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
def test_rows_by_index(rows: int) -> None:
    c = case(zipf(rows, EXPERTS))
    w1 = GateUp(*apart(c.w1))
    x = torch.randn(rows // 4, HIDDEN, device="cuda").to(BF16)
    indices = torch.randint(-3, rows // 4 + 3, (c.x.shape[0],), device="cuda", dtype=torch.int32)
    made, wanted = (glulam.grouped_mlp(x, w, c.w2, rows=indices, offs=c.offs) for w in (w1, c.w1))
    assert same_bits(made[: c.rows], wanted[: c.rows]) and made[: c.rows].abs().max() > 0.2


def test_a_large_layer() -> None:
    """As many tiles as fill the GPU, in both directions: tiles are drawn by ticket, clusters share weights and rows."""
    c = case(zipf(8192, 16), 2048, 1408)
    w1, h = GateUp(*apart(c.w1)), preacts(c)
    y, want = (glulam.grouped_mlp(c.x, w, c.w2, offs=c.offs) for w in (w1, c.w1))
    assert same_bits(y[: c.rows], want[: c.rows])
    dx, want = (glulam.grouped_mm(h, w, offs=c.offs, transpose_w=True) for w in (w1, c.w1))
    assert same_bits(dx[: c.rows], want[: c.rows]) and dx[: c.rows].abs().max() > 0.1


@pytest.mark.usefixtures("with_gradients")
class TestGradients:
    def given(self, c: Case) -> dict[str, Any]:
        given: dict[str, Any] = leaves(c)
        given["w1"] = GateUp(*(half.requires_grad_() for half in apart(c.w1)))
        return given

    def check(self, c: Case, form: Form = ("swiglu", "concat"), **options: Any) -> None:
        given, dy = self.given(c), gradient(c)
        poison_allocator("cuda")
        y = glulam.grouped_mlp(**given, offs=c.offs, activation=form[0], **options)
        poison_allocator("cuda")
        y.backward(dy)
        got = {name: value.grad for name, value in given.items() if name != "w1"}
        check_gradients(c, dy, {**got, "w1": torch.cat([half.grad for half in given["w1"]], dim=1)}, form)

    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("activation", GATED)
    def test_every_activation(self, activation: str, batch: str, dtype: torch.dtype, recompute: bool) -> None:
        self.check(case(BATCHES[batch], dtype=dtype), (activation, "concat"), recompute=recompute)

    @pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
    @pytest.mark.parametrize("name", [name for name in catalogue(FEW_ROWS, EXPERTS) if name != "one_row"])
    def test_routings(self, name: str, rows: int) -> None:
        sizes = catalogue(rows, EXPERTS)[name]
        self.check(case(sizes, tail=rows - sum(sizes) + TAIL))

    @pytest.mark.parametrize("sizes", [(736, 1504), (1504, 736), (72, 64), (200, 40)], ids=str)
    def test_sizes(self, sizes: tuple[int, int]) -> None:
        self.check(case(zipf(900, 4), *sizes))

    @pytest.mark.parametrize("width", [2**30, 0], ids=["rows by index", "rows copied"])
    def test_moe(self, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Against the layer with one tensor, whose own tests compare it with float64."""
        monkeypatch.setattr(sys.modules["glulam.layer.of_tokens"], "COPIED_WIDTH", width)
        c, tokens = case([1] * EXPERTS), 700
        x, dy = (torch.randn(tokens, HIDDEN, device="cuda").to(BF16) for _ in range(2))
        logits = torch.randn(tokens, EXPERTS, device="cuda")

        def gradients(w1: Any) -> list[torch.Tensor]:
            given = [t.detach().clone().requires_grad_() for t in (x, logits, c.b1, c.b2, c.w2)]
            out = glulam.moe(given[0], glulam.route(given[1], 3), w1, given[4], b1=given[2], b2=given[3])
            parts = list(w1) if isinstance(w1, GateUp) else [w1]
            found = torch.autograd.grad(out, [*given, *parts], dy)
            return [*found[:5], torch.cat(found[5:], dim=1)]

        made = gradients(GateUp(*(half.requires_grad_() for half in apart(c.w1))))
        for one, other in zip(made, gradients(c.w1.clone().requires_grad_()), strict=True):
            error = (one.double() - other.double()).norm() / other.double().norm()
            assert error < 0.01 and other.abs().max() > 1e-3

    def test_a_graph_of_a_step(self) -> None:
        c = case(BATCHES["many rows"])
        given, dy, offs = self.given(c), gradient(c), c.offs.clone()
        tensors = [*given["w1"], *(value for name, value in given.items() if name != "w1")]

        def step() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(glulam.grouped_mlp(**given, offs=offs), tensors, dy)

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for sizes in (c.sizes, one_takes_all(c.rows, EXPERTS, 3)):
            offs.copy_(torch.tensor(sizes).cumsum(0))
            graph.replay()
            for one, other in zip(captured, step(), strict=True):
                assert same_bits(one, other) and bool(other.any())
