"""MXFP8 functions stage by stage on a GPU: each stage against float64 of the previous stage's actual output.

End to end, an activation that rounds to the neighbouring E4M3 number would hide any smaller error.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support import oracle
from support.criterion import assert_close
from support.inputs import Case, make_case, matrix
from support.launches import groups_of, launch
from support.mxfp8_mlp import values, weight_values
from torch import Tensor

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.sm90.configs import DGLU8, LARGE8, SMALL8, glu_form, second_tile
from cute_kernels.specs import GATED, GroupedDgluSpec, GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec
from cute_kernels.tiles import TileConfig
from glulam.activations import Activation
from glulam.formats.mxfp8 import FoldedWeight
from glulam.host import tickets

pytestmark = pytest.mark.gpu

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HIDDEN, INTER = 352, 224  # multiples of 32, not of 64 or 128
SIZES = [130, 0, 257, 64, 1, 300]
TAIL = 70
DIFFERING = 0.03
"""Share of activations that may round to a neighbour: wgmma's sums err by 1.3e-4, half an E4M3 step is 3e-2 to 6e-2."""
HALF_STEP = 2.0**-4
SUM_ERROR = 2e-3
"""Error of an activation, relative to the largest of its row: 15 times the average error of wgmma's sums."""
ROW_SUM_ERROR = 1e-3
"""Error of d_row_scale, relative to its terms, from wgmma and float32 sums."""


@dataclasses.dataclass
class Quantised:
    """Buffers for rows in MXFP8, filled with values that show in a result: elements of NaN and scales of 2^127."""

    data: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int) -> Quantised:
        data = torch.full((rows, columns), 0x7F, dtype=torch.uint8, device="cuda").view(E4M3)
        return cls(data, torch.full((rows, columns // 32), 0xFE, dtype=torch.uint8, device="cuda"))

    def values(self, rows: int) -> Tensor:
        """Return the first rows dequantised, in float64 on the CPU."""
        return values(self.data[:rows], self.scale[:rows])


def nan(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def layer(form: tuple[str, str]) -> Case:
    return make_case(SIZES, HIDDEN, INTER, gated=form[0] in GATED, tail=TAIL, device="cuda")


def on_cpu(biases: Tensor) -> list[Tensor]:
    return [bias.cpu() for bias in biases]


def assert_like_torch(got: Tensor, exact: Any, rows: int) -> None:
    """Compare `got` with `exact(float64)`, allowing for the error of torch's `exact(got.dtype)`."""
    assert_close(got.cpu(), exact(torch.float64), exact(got.dtype), rows)


def assert_quantised(got: Quantised, wanted: Tensor) -> None:
    """Check that rows are the quantisation of approximately `wanted` float32 [rows, C]: few bytes differ, and none by
    much.
    """
    rows = wanted.shape[0]
    reference = glulam.quantize_mxfp8(wanted.contiguous(), block="1x128")
    for name in ("data", "scale"):
        same = getattr(reference, name).view(torch.uint8) == getattr(got, name)[:rows].cpu().view(torch.uint8)
        assert float((~same).float().mean()) < DIFFERING, name
    largest = wanted.abs().amax(dim=1, keepdim=True)
    error = (got.values(rows) - wanted).abs() - HALF_STEP * wanted.abs()
    assert float((error / largest).max()) < SUM_ERROR


def counters() -> int:
    """Return the address of this thread's ticket counters."""
    return tickets.counters(torch.device("cuda"), torch.cuda.current_device())


def forward(
    spec: Any, form: tuple[str, str], c: Case, w1: FoldedWeight, w2: FoldedWeight, preact: Tensor | None
) -> dict[str, Any]:
    rows = c.x.shape[0]
    x8, mid8, y = Quantised.empty(rows, HIDDEN), Quantised.empty(rows, INTER), nan(rows, HIDDEN)
    saved = {} if preact is None else {"preact": preact}
    launch(
        spec, x=c.x, w1=w1.data, w2=w2.data, x8=x8.data, mid=mid8.data, **saved, y=y, **groups_of(c.offs),
        tickets=counters(), x8_scale=x8.scale, mid_scale=mid8.scale, w1_scale=w1.scale, b1=c.b1,
        w2_scale=w2.scale, b2=c.b2, scale=c.row_scale, **Activation.named(*form).kernel_params,
    )  # fmt: skip
    return {"x8": x8, "mid8": mid8, "y": y}


def spec_of(form: tuple[str, str], tile: TileConfig, saves: bool) -> Any:
    fc1 = GroupedGluSpec("bfloat16", *glu_form(*form, INTER, "mxfp8", tile, saves), saves, tile, operands="mxfp8")
    return GroupedMlpSpec(fc1, GroupedMmSpec(tile=second_tile(tile), operands="mxfp8"))


@pytest.mark.parametrize(
    ("tile", "saves"), [(LARGE8, False), (SMALL8, False), (LARGE8, True)], ids=["large", "small", "training"]
)
@pytest.mark.parametrize("form", activation_forms(), ids="-".join)
def test_forward(form: tuple[str, str], tile: TileConfig, saves: bool) -> None:
    c, rows = layer(form), sum(SIZES)
    w1, w2 = (glulam.prepare_mxfp8_weight(w) for w in (c.w1, c.w2))
    preact = nan(c.x.shape[0], c.w1.shape[1]) if saves else None
    made = forward(spec_of(form, tile, saves), form, c, w1, w2, preact)

    x = glulam.quantize_mxfp8(c.x[:rows].cpu(), block="1x128")
    assert torch.equal(made["x8"].data[:rows].cpu().view(torch.uint8), x.data.view(torch.uint8))
    assert torch.equal(made["x8"].scale[:rows].cpu(), x.scale.view(torch.uint8))
    x64, scale = made["x8"].values(rows), c.row_scale[:rows].cpu()
    act, h = oracle.grouped_glu(x64, weight_values(w1), c.ends, bias=on_cpu(c.b1), row_scale=scale, form=form)
    if preact is not None:
        assert_close(preact[:rows].cpu(), h, h.to(BF16), rows)
        assert bool(preact[rows:].isnan().all())
    assert_quantised(made["mid8"], act.float())
    assert bool((made["mid8"].scale[rows:] == 0xFE).all()), "scales after the last group were written"

    mid64, w2_64 = made["mid8"].values(rows), weight_values(w2)
    mm = lambda dtype: oracle.grouped_mm(mid64, w2_64, c.ends, bias=on_cpu(c.b2), bias_scale=scale, dtype=dtype)  # noqa: E731
    assert_like_torch(made["y"][:rows], mm, rows)
    assert bool(made["y"][rows:].isnan().all()), "the tail was written"


@pytest.mark.parametrize("form", activation_forms(), ids="-".join)
def test_backward(form: tuple[str, str]) -> None:
    c, rows = layer(form), sum(SIZES)
    total = c.x.shape[0]
    w1, w2 = (glulam.prepare_mxfp8_weight(w, axis="col") for w in (c.w1, c.w2))
    h = matrix(total, c.w1.shape[1], BF16, "cuda", seed=7)
    dy = matrix(total, HIDDEN, BF16, "cuda", seed=8)
    h[rows:], dy[rows:] = torch.nan, torch.nan
    dy8, dh8 = Quantised.empty(total, HIDDEN), Quantised.empty(total, h.shape[1])
    dh, act, dx, d_scale = nan(*h.shape), nan(total, INTER), nan(total, HIDDEN), nan(total, dtype=torch.float32)
    partials = nan(-(-INTER // 64) * total, dtype=torch.float32)
    spec = GroupedDgluSpec("bfloat16", *form, DGLU8, LARGE8, operands="mxfp8")
    first = None
    for _ in range(2):
        launch(
            spec, dy=dy, w2=w2.data, preact=h, dpreact=dh, act=act, w1=w1.data, dx=dx, dy8=dy8.data, dpreact8=dh8.data,
            **groups_of(c.offs), tickets=counters(), dy8_scale=dy8.scale, dpreact8_scale=dh8.scale,
            w2_scale=w2.scale, w1_scale=w1.scale, scale=c.row_scale, d_scale=d_scale, partials=partials,
            **Activation.named(*form).params,
        )  # fmt: skip
        assert first is None or torch.equal(first, d_scale), "another order of the sum"
        first = d_scale.clone()

    scale, h64, dy64 = c.row_scale[:rows].cpu(), h[:rows].cpu().double(), dy8.values(rows)
    transposed = weight_values(w2).transpose(1, 2)
    dglu = lambda dtype: oracle.grouped_dglu(  # noqa: E731
        dy64, transposed, h64, c.ends, row_scale=scale, form=form, dtype=dtype
    )
    exact, same = dglu(torch.float64), dglu(BF16)
    assert_close(dh[:rows].cpu(), exact[0], same[0], rows)
    assert_close(act[:rows].cpu(), exact[1], same[1], rows)
    terms = oracle.grouped_mm(dy64.abs(), transposed.abs(), c.ends, transpose_w=True).amax(dim=1)
    error = (d_scale[:rows].cpu().double() - exact[2]).abs() / terms
    assert float(error.max()) < ROW_SUM_ERROR * float((exact[2].abs() / terms).max())

    dh64, w1_64 = dh8.values(rows), weight_values(w1)
    mm = lambda dtype: oracle.grouped_mm(dh64, w1_64, c.ends, dtype=dtype)  # noqa: E731
    assert_like_torch(dx[:rows], mm, rows)
    assert not bool(dx[rows:].any()) and not bool(d_scale[rows:].any()), "gradients of the tail are zeros"
    assert bool(dh[rows:].isnan().all()) and bool(act[rows:].isnan().all())
