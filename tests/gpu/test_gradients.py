"""Differentiation through the kernels: gradients of every input, traces, and a training step in a CUDA graph."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from support.gradients import INPUTS, check_gradients, grads, leaves
from support.inputs import Case, gradient, make_case, poison_allocator
from support.routing import catalogue, zipf
from torch.utils.checkpoint import checkpoint

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.specs import GATED

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("with_gradients")]

BF16, F16 = torch.bfloat16, torch.float16
HIDDEN, INTER = 200, 352
EXPERTS, FEW_ROWS, MANY_ROWS, TAIL = 8, 200, 1500, 13


def case(sizes: list[int], gated: bool = True, **options: Any) -> Case:
    return make_case(sizes, HIDDEN, INTER, gated=gated, device="cuda", **{"tail": TAIL, **options})


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
@pytest.mark.parametrize("name", [name for name in catalogue(FEW_ROWS, EXPERTS) if name != "one_row"])
def test_routings(name: str, rows: int, dtype: torch.dtype, recompute: bool) -> None:
    sizes = catalogue(rows, EXPERTS)[name]
    c = case(sizes, dtype=dtype, tail=rows - sum(sizes) + TAIL)
    given, dy = leaves(c), gradient(c)
    poison_allocator("cuda")
    y = glulam.grouped_mlp(**given, offs=c.offs, recompute=recompute)
    poison_allocator("cuda")
    y.backward(dy)
    check_gradients(c, dy, grads(given))


@pytest.mark.parametrize("form", activation_forms(), ids="-".join)
def test_every_form(form: tuple[str, str]) -> None:
    c = case(zipf(MANY_ROWS, EXPERTS), form[0] in GATED)
    given, dy = leaves(c), gradient(c)
    glulam.grouped_mlp(**given, offs=c.offs, activation=form[0], glu_layout=form[1]).backward(dy)
    check_gradients(c, dy, grads(given), form)


@pytest.mark.parametrize("splits", ["list", "int64"])
def test_lists(splits: str) -> None:
    c = case(zipf(MANY_ROWS, EXPERTS))
    given, dy = leaves(c), gradient(c)
    lists: dict[str, Any] = dict(given)
    for name in ("w1", "w2", "b1", "b2"):
        lists[name] = [one.detach().clone().requires_grad_() for one in given[name]]
    for _ in range(2):
        for value in itertools.chain.from_iterable(v if isinstance(v, list) else [v] for v in lists.values()):
            value.grad = None
        glulam.grouped_mlp(**lists, splits=c.sizes if splits == "list" else c.splits(torch.int64)).backward(dy)
    got = {n: torch.stack([one.grad for one in v]) if isinstance(v, list) else v.grad for n, v in lists.items()}
    check_gradients(c, dy, got)


@pytest.mark.parametrize("name", INPUTS)
def test_each_input_alone(name: str) -> None:
    """The same bits as with all others; but w2 alone gets the forward's activation, made from h before its rounding."""
    c = case(zipf(MANY_ROWS, EXPERTS))
    every, alone, dy = leaves(c), leaves(c, (name,)), gradient(c)
    for given in (every, alone):
        glulam.grouped_mlp(**given, offs=c.offs).backward(dy)
    assert grads(alone).keys() == {name}
    if name == "w2":
        torch.testing.assert_close(
            alone["w2"].grad, every["w2"].grad, rtol=0.02, atol=0.02 * float(every["w2"].grad.abs().max())
        )
    else:
        assert same_bits(grads(alone)[name], grads(every)[name])


@pytest.mark.parametrize("transpose_w", [False, True])
def test_grouped_mm(transpose_w: bool) -> None:
    c = case(zipf(MANY_ROWS, EXPERTS))
    w = (c.w1.mT.contiguous() if transpose_w else c.w1).detach()
    tensors = [t.detach().clone().requires_grad_() for t in (c.x, w, c.b1, c.row_scale)]
    dy = gradient(c, 2 * INTER)
    x, w, bias, scale = tensors
    glulam.grouped_mm(x, w, offs=c.offs, bias=bias, bias_scale=scale, transpose_w=transpose_w).backward(dy)
    with torch.no_grad():
        dx = glulam.grouped_mm(dy, w, offs=c.offs, transpose_w=not transpose_w)
        pair = (c.x, dy) if transpose_w else (dy, c.x)
        assert same_bits(x.grad[: c.rows], dx[: c.rows]) and not bool(x.grad[c.rows :].any())
        assert same_bits(w.grad, glulam.grouped_wgrad(*pair, offs=c.offs))
        assert same_bits(bias.grad, glulam.grouped_bias_grad(dy, offs=c.offs, row_scale=c.row_scale))
        expert = torch.repeat_interleave(torch.arange(EXPERTS, device="cuda"), c.splits().long())
        want = (dy[: c.rows].double() * c.b1[expert].double()).sum(dim=1)
    torch.testing.assert_close(scale.grad[: c.rows].double(), want, rtol=0.01, atol=0.01 * float(want.abs().max()))


def test_checkpoint_and_autocast() -> None:
    c = case(zipf(MANY_ROWS, EXPERTS))
    plain, again, cast = leaves(c), leaves(c), leaves(c)
    dy, keys = gradient(c), list(plain)

    def layer(*values: torch.Tensor) -> torch.Tensor:
        return glulam.grouped_mlp(**dict(zip(keys, values, strict=True)), offs=c.offs)

    layer(*plain.values()).backward(dy)
    checkpoint(layer, *again.values(), use_reentrant=False).backward(dy)
    with torch.autocast("cuda", dtype=BF16):
        layer(*cast.values()).backward(dy)
    for name, value in grads(plain).items():
        assert same_bits(grads(again)[name], value) and same_bits(grads(cast)[name], value), name


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recompute", [False, True])
def test_torch_compile(backend: str, recompute: bool) -> None:
    c = case(zipf(MANY_ROWS, EXPERTS))
    eager, compiled, offs = leaves(c), leaves(c), c.offs
    valid = (torch.arange(c.x.shape[0], device="cuda") < c.rows)[:, None]

    def loss(given: dict[str, Any], offs: torch.Tensor) -> torch.Tensor:
        y = glulam.grouped_mlp(**given, offs=offs, recompute=recompute)
        return torch.where(valid, y.float(), 0.0).square().sum()

    loss(eager, offs).backward()
    torch.compile(loss, backend=backend, fullgraph=True)(compiled, offs).backward()
    for name, value in grads(eager).items():
        torch.testing.assert_close(grads(compiled)[name], value, rtol=0.02, atol=0.02 * float(value.abs().max()))


@pytest.mark.parametrize("listed", [False, True])
def test_a_training_step_in_a_graph(listed: bool) -> None:
    """Forward, backward and a fused optimizer, captured once and replayed with other routings, against eager steps."""
    rows = 1200
    c = case([rows // EXPERTS] * EXPERTS, tail=0)
    target, offs = torch.randn_like(c.x), c.offs

    def parameters() -> list[torch.nn.Parameter]:
        packed = (c.w1, c.w2)
        return [torch.nn.Parameter(one.clone()) for w in packed for one in (w if listed else [w])]

    def make(weights: list[torch.nn.Parameter]) -> Any:
        optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True, capturable=True)
        half = len(weights) // 2
        w1, w2 = (weights[:half], weights[half:]) if listed else weights

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            used = (torch.arange(rows, device="cuda") < offs[-1])[:, None]
            y = glulam.grouped_mlp(c.x, w1, w2, offs=offs, row_scale=c.row_scale)
            torch.where(used, (y - target).float(), 0.0).square().mean().backward()
            optimizer.step()

        return step

    replayed, eager = parameters(), parameters()
    captured_step, eager_step = make(replayed), make(eager)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            captured_step()
            eager_step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_step()
    for sizes in catalogue(rows - 11, EXPERTS).values():
        offs.copy_(torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32))
        graph.replay()
        eager_step()
        assert all(same_bits(a.detach(), b.detach()) for a, b in zip(replayed, eager, strict=True))
    start = torch.cat([w.flatten() for w in (c.w1, c.w2)])
    assert not torch.equal(torch.cat([w.detach().flatten() for w in replayed]), start)
