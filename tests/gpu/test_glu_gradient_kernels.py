"""The gradient of grouped_glu through the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.criterion import assert_close
from support.inputs import make_case, poison_allocator
from support.routing import zipf
from torch import Tensor

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.specs import GATED
from glulam.activations import Activation, activate

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("with_gradients")]

HIDDEN, INTER, EXPERTS, TAIL = 200, 352, 8, 13
NAMES = ("x", "w1", "bias", "row_scale")


def by_definition(form: tuple[str, str], sizes: list[int], given: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Compute grouped_glu from its definition, with preactivations rounded to `dtype` as kernels store them. Without
    the rounding some would lie on the other side of a kink of the activation.
    """
    parts = zip(given["x"].split(sizes), given["w1"], given["bias"], strict=True)
    h = torch.cat([torch.addmm(b, x, w.mT) for x, w, b in parts])
    h = h + (h.to(dtype).to(h.dtype) - h).detach()
    return activate(h, *Activation.named(*form)) * given["row_scale"][:, None].to(h.dtype)


@pytest.mark.parametrize("rows", [200, 1500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", activation_forms(), ids="-".join)
def test_every_form(form: tuple[str, str], dtype: torch.dtype, rows: int) -> None:
    sizes = zipf(rows, EXPERTS)
    c = make_case(sizes, HIDDEN, INTER, gated=form[0] in GATED, device="cuda", dtype=dtype, tail=TAIL)
    values = (c.x, c.w1, c.b1, c.row_scale)
    given: dict[str, Any] = {n: v.detach().clone().requires_grad_() for n, v in zip(NAMES, values, strict=True)}
    dy = torch.randn(rows + TAIL, INTER, device="cuda", dtype=dtype)
    dy[rows:] = torch.nan
    poison_allocator("cuda")
    act = glulam.grouped_glu(**given, offs=c.offs, activation=form[0], glu_layout=form[1])
    poison_allocator("cuda")
    got = torch.autograd.grad(act, list(given.values()), dy)
    wanted = []
    for wide in (torch.float64, dtype):
        same = {n: v.detach()[: rows if n in ("x", "row_scale") else None].to(wide) for n, v in given.items()}
        if wide == dtype:
            same["row_scale"] = given["row_scale"].detach()[:rows].clone()
        inputs = [v.requires_grad_() for v in same.values()]
        wanted.append(torch.autograd.grad(by_definition(form, sizes, same, dtype), inputs, dy[:rows].to(wide)))
    for name, one, exact, yardstick in zip(NAMES, got, *wanted, strict=True):
        if name in ("x", "row_scale"):
            assert not one[rows:].any(), name
        flat = [t.reshape(t.shape[0], -1) if name != "row_scale" else t[None] for t in (one, exact, yardstick)]
        if name == "row_scale":
            flat[0] = flat[0][:, :rows]
        used = slice(None) if name in ("x", "row_scale") else [i for i, size in enumerate(sizes) if size]
        first = flat[0][:rows] if name == "x" else flat[0]
        assert_close(first[used], flat[1][used], flat[2][used], len(flat[1][used]))
