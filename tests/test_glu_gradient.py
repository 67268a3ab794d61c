"""The gradient of grouped_glu alone, against torch's gradient of its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fake_gpu import FakeGpu
from torch import Tensor

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.specs import GATED
from glulam.activations import Activation, activate

pytest_plugins = ["support.fixtures"]

F64, BF16 = torch.float64, torch.bfloat16
SIZES, HIDDEN, INTER, TAIL = [3, 0, 5, 1], 8, 32, 2
FORMS = activation_forms()
each_form = pytest.mark.parametrize("form", FORMS, ids="-".join)


def made(form: tuple[str, str], dtype: torch.dtype = F64, tail: int = 0) -> dict[str, Tensor]:
    """Return random arguments, with `tail` rows after the last group."""
    torch.manual_seed(3)
    width = 2 * INTER if form[0] in GATED else INTER
    rows, experts = sum(SIZES) + tail, len(SIZES)
    given = {
        "x": torch.randn(rows, HIDDEN, dtype=F64), "w1": torch.randn(experts, width, HIDDEN, dtype=F64) / 3,
        "bias": torch.randn(experts, width, dtype=F64), "row_scale": torch.rand(rows, dtype=F64) + 0.5,
    }  # fmt: skip
    return {name: t.to(torch.float32 if name == "row_scale" and dtype == BF16 else dtype) for name, t in given.items()}


def offs() -> Tensor:
    return torch.tensor(SIZES).cumsum(0).int()


def definition(form: tuple[str, str], x: Tensor, w1: Tensor, bias: Tensor, row_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return act and h of the groups' rows, computed from the definition."""
    h = torch.cat([one @ w.mT + b for one, w, b in zip(x.split(SIZES), w1, bias, strict=True)])
    return activate(h, *Activation.named(*form)) * row_scale[:, None], h


def trained(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in given.items()}


def gradients(given: dict[str, Any], *pairs: tuple[Tensor, Tensor]) -> list[Tensor]:
    torch.autograd.backward([result for result, _ in pairs], [dy for _, dy in pairs])
    return [tensor.grad for tensor in given.values()]


@each_form
@pytest.mark.parametrize("return_preact", [False, True])
def test_every_form_in_float64(form: tuple[str, str], return_preact: bool) -> None:
    got, want = trained(made(form)), trained(made(form))
    named = {"activation": form[0], "glu_layout": form[1], "return_preact": return_preact}
    result = glulam.grouped_glu(**got, offs=offs(), **named)
    results, wanted = (result, definition(form, **want)) if return_preact else ((result,), definition(form, **want)[:1])
    dy = [torch.randn_like(one) for one in wanted]
    ours, theirs = (gradients(g, *zip(r, dy, strict=True)) for g, r in ((got, results), (want, wanted)))
    for one, other in zip(ours, theirs, strict=True):
        assert other.abs().max() > 0.1
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("how", ["packed", "lists", "transposed", "splits"])
def test_weights_in_every_way(how: str, device: str, request: pytest.FixtureRequest) -> None:
    """16 bits, on the CPU and on the host path, with NaN after the last group."""
    if device == "gpu":
        request.getfixturevalue("fake_gpu")
    form = ("clamped_swiglu", "interleaved")
    given = made(form, BF16, TAIL)
    given["x"][-TAIL:] = torch.nan
    got = trained(given)
    exact = trained({name: (t if t.shape[0] == 4 else t[:-TAIL]).double() for name, t in given.items()})
    weights: dict[str, Any] = {"w1": got["w1"], "bias": got["bias"], "offs": offs()}
    if how == "lists":
        weights.update(w1=list(got["w1"].unbind()), bias=list(got["bias"].unbind()))
    elif how == "transposed":
        weights.update(w1=got["w1"].mT.contiguous(), transpose_w=True)
    elif how == "splits":
        weights.update(offs=None, splits=torch.tensor(SIZES))
    act = glulam.grouped_glu(
        got["x"], row_scale=got["row_scale"], activation=form[0], glu_layout=form[1], **weights
    )  # fmt: skip
    dy = torch.randn(act.shape).to(BF16)
    dy[-TAIL:] = torch.nan
    ours = gradients(got, (act, dy))
    theirs = gradients(exact, (definition(form, **exact)[0], dy[:-TAIL].double()))
    for name, one, other in zip(given, ours, theirs, strict=True):
        has_tail = one.shape[0] != other.shape[0]
        if has_tail:
            assert not one[-TAIL:].any(), name
        one = one[:-TAIL] if has_tail else one
        assert other.abs().max() > 0.1 and (one - other).abs().max() < 0.02 * other.abs().max(), name


def test_halves(fake_gpu: FakeGpu) -> None:
    form = ("swiglu", "concat")
    got, want = trained(made(form, BF16)), trained(made(form, BF16))
    gate, up = (half.contiguous().detach().requires_grad_() for half in got["w1"].chunk(2, dim=1))
    act = glulam.grouped_glu(got["x"], glulam.GateUp(gate, up), offs=offs())
    other = glulam.grouped_glu(want["x"], want["w1"], offs=offs())
    dy = torch.randn_like(act)
    d_x, *halves = torch.autograd.grad(act, (got["x"], gate, up), dy)
    want_x, whole = torch.autograd.grad(other, (want["x"], want["w1"]), dy)
    assert torch.equal(torch.cat(halves, dim=1), whole) and torch.allclose(d_x, want_x, rtol=0.02, atol=0.02)


def test_what_is_not_asked_for_is_not_made(fake_gpu: FakeGpu) -> None:
    given = made(("swiglu", "concat"), BF16)
    w1 = given["w1"].requires_grad_()
    act = glulam.grouped_glu(given["x"], w1, offs=offs())
    fake_gpu.work.clear()
    act.backward(torch.ones_like(act))
    assert fake_gpu.work == ["layer", "wgrad"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    given, same = trained(made(("swiglu", "concat"))), trained(made(("swiglu", "concat")))
    compiled = torch.compile(
        lambda g: glulam.grouped_glu(**g, offs=offs()).sin(), backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    ours = gradients(given, (compiled(given).sum(), torch.tensor(1.0, dtype=F64)))
    theirs = gradients(same, (glulam.grouped_glu(**same, offs=offs()).sin().sum(), torch.tensor(1.0, dtype=F64)))
    assert all(torch.allclose(one, other) for one, other in zip(ours, theirs, strict=True))


def test_refusals() -> None:
    given = trained(made(("swiglu", "concat")))
    with pytest.raises(glulam.GradientNotSupported, match="grouped_glu: out is given"):
        glulam.grouped_glu(**given, offs=offs(), out=torch.zeros(9, INTER, dtype=F64))
    with pytest.raises(glulam.GradientNotSupported, match="rows= has none"):
        glulam.grouped_glu(given["x"], given["w1"], offs=offs(), rows=torch.arange(9, dtype=torch.int32))
    x = given["x"]
    (d_x,) = torch.autograd.grad(glulam.grouped_glu(x, given["w1"], offs=offs()).sum(), x, create_graph=True)
    with pytest.raises(glulam.GradientNotSupported, match="differentiable once"):
        d_x.sum().backward()
    with pytest.raises(ValueError, match=r"grouped_glu: w1 has shape"):
        glulam.grouped_glu(x, given["w1"][:, :, :-1].contiguous(), offs=offs())
