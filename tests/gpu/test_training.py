"""Planned forward and backward of a layer: two launches, zeros after the last group, memory use, and output buffers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from support.gradients import check_gradients, grads, leaves
from support.inputs import Case, gradient, make_case, poison_allocator
from support.routing import zipf

import glulam
from glulam.choose import kernels
from glulam.host.plans import forget_plans
from glulam.nn import GroupedMLP

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("with_gradients")]

BF16 = torch.bfloat16
HIDDEN, INTER, EXPERTS, ROWS, TAIL = 200, 352, 8, 1500, 13


def case(sizes: list[int] | None = None, **options: Any) -> Case:
    return make_case(sizes or zipf(ROWS, EXPERTS), HIDDEN, INTER, device="cuda", **{"tail": TAIL, **options})


@pytest.mark.parametrize("rows", [100, ROWS])
def test_the_bits_of_the_operators(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call with two launches gives what two calls do; dx is on the tile for many rows, whichever FC2 is on."""
    c = case(zipf(rows, EXPERTS))
    planned, general, dy = leaves(c), leaves(c), gradient(c)
    for _ in range(3):
        for value in planned.values():
            value.grad = None
        y = glulam.grouped_mlp(**planned, offs=c.offs)
        y.backward(dy)
    monkeypatch.setattr("glulam.backward.planned.run", lambda *_: NotImplemented)
    forget_plans()
    want = glulam.grouped_mlp(**general, offs=c.offs)
    want.backward(dy)
    assert same_bits(y[: c.rows].detach(), want[: c.rows].detach())
    for name, value in grads(general).items():
        if name == "x" and rows < ROWS:
            torch.testing.assert_close(planned["x"].grad, value, rtol=0.02, atol=0.02 * float(value.abs().max()))
        else:
            assert same_bits(grads(planned)[name], value), name


@pytest.mark.parametrize("form", ["offs", "int32", "int64"])
@pytest.mark.parametrize("experts", [1, 31, 33, 200])
@pytest.mark.parametrize("tail", [0, 1, 700])
def test_zeros_behind_the_last_group(form: str, experts: int, tail: int) -> None:
    c = case(zipf(600, experts), tail=tail)
    given, dy = leaves(c, ("x", "row_scale")), gradient(c)
    groups = {"offs": c.offs} if form == "offs" else {"splits": c.splits(getattr(torch, form))}
    poison_allocator("cuda")
    glulam.grouped_mlp(given["x"], c.w1, c.w2, row_scale=given["row_scale"], **groups).backward(dy)
    for value in grads(given).values():
        assert bool(value[: c.rows].isfinite().all()) and bool((value[: c.rows] != 0).any())
        assert not bool(value[c.rows :].any()) and bool(value[c.rows :].isfinite().all())
    with torch.no_grad():
        h = glulam.grouped_glu(c.x, c.w1, return_preact=True, **groups)[1]
        alone = glulam.grouped_dglu(dy, c.w2, h, row_scale=c.row_scale, **groups)
        assert alone.d_row_scale is not None and not bool(alone.d_row_scale[c.rows :].any())


def test_no_rows_in_any_group() -> None:
    c = case([0] * EXPERTS, tail=40)
    given = leaves(c)
    poison_allocator("cuda")
    glulam.grouped_mlp(**given, offs=c.offs).backward(gradient(c))
    assert all(not bool(value.any()) for value in grads(given).values())


@pytest.mark.parametrize(
    "wanted", [("x",), ("w1",), ("w1", "w2"), ("x", "row_scale"), ("row_scale", "w2")], ids="-".join
)
def test_frozen_inputs(wanted: tuple[str, ...]) -> None:
    c = case()
    every, given, dy = leaves(c), leaves(c, wanted), gradient(c)
    for one in (every, given):
        glulam.grouped_mlp(**one, offs=c.offs).backward(dy)
    assert grads(given).keys() == set(wanted)
    assert all(same_bits(value, grads(every)[name]) for name, value in grads(given).items())


def test_peak_memory() -> None:
    """At most the results, the gradient of h, the activation and one weight gradient more than what stays."""
    hidden, inner, experts, rows = 1024, 512, 16, 16384
    c = make_case([rows // experts] * experts, hidden, inner, device="cuda")
    given = {name: value for name, value in leaves(c).items() if name in ("x", "w1", "w2", "row_scale")}
    dy, offs = gradient(c), c.offs

    def step() -> None:
        glulam.grouped_mlp(**given, offs=offs).backward(dy)

    step()  # workspaces, tables and plans
    for value in given.values():
        value.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = glulam.grouped_mlp(**given, offs=offs)
    y.backward(dy)
    torch.cuda.synchronize()
    element = 2
    h = rows * 2 * inner
    results = 2 * rows * hidden + 3 * experts * inner * hidden  # y, dx; dw1, dw2
    at_data_path = 2 * rows * hidden + 2 * h + rows * inner
    at_dw1 = 2 * rows * hidden + h + rows * inner + 2 * experts * inner * hidden
    at_dw2 = results + rows * inner
    bound = element * max(at_data_path, at_dw1, at_dw2) + (4 << 20)
    assert torch.cuda.max_memory_allocated() - before <= bound


def test_buffers_in_a_graph() -> None:
    """A module's step into the caller's memory, captured and replayed with another routing, against an eager one."""
    torch.manual_seed(5)
    c = case([ROWS // EXPERTS] * EXPERTS, tail=0)
    rows = c.x.shape[0]
    module = GroupedMLP(EXPERTS, HIDDEN, INTER, device="cuda", dtype=BF16)
    plain = GroupedMLP(EXPERTS, HIDDEN, INTER, device="cuda", dtype=BF16)
    plain.load_state_dict(module.state_dict())
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        parameter.overwrite_main_grad = True
    x = c.x.detach().clone().requires_grad_()
    out, grad_input, offs = torch.empty_like(c.x), torch.empty_like(c.x), c.offs
    dy = torch.randn_like(c.x)

    def step() -> None:
        x.grad = None
        module(x, offs=offs, row_scale=c.row_scale, out=out, grad_input=grad_input).backward(dy)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    sizes = zipf(rows - 100, EXPERTS)
    offs.copy_(torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32))
    grad_input.fill_(torch.nan)
    graph.replay()
    want = c.x.detach().clone().requires_grad_()
    y = plain(want, offs=offs, row_scale=c.row_scale)
    y.backward(dy)
    used = sum(sizes)
    assert same_bits(out[:used], y[:used].detach()) and same_bits(grad_input, want.grad)
    for name, parameter in plain.named_parameters():
        main = dict(module.named_parameters())[name].main_grad
        torch.testing.assert_close(main.to(BF16), parameter.grad, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("frozen", [(0, 1, 5), (2, 3, 7), (1, 2, 3, 4, 5, 6, 7)], ids=str)
def test_frozen_experts_in_a_graph(frozen: tuple[int, ...]) -> None:
    """Trained experts' main_grads equal a module's without frozen experts, which have none; so in a replay."""
    torch.manual_seed(5)
    c = case([ROWS // EXPERTS] * EXPERTS, tail=0)
    module, plain = (GroupedMLP(EXPERTS, HIDDEN, INTER, packed=False, device="cuda", dtype=BF16) for _ in range(2))
    plain.load_state_dict(module.state_dict())
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(int(name[-1]) not in frozen)
        if parameter.requires_grad:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
    offs, dy = c.offs, torch.randn_like(c.x)

    def step() -> None:
        module(c.x, offs=offs, row_scale=c.row_scale).backward(dy)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for sizes in (zipf(c.rows - 100, EXPERTS), zipf(c.rows, EXPERTS)[::-1]):
        offs.copy_(torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32))
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.main_grad.fill_(1.0)
        graph.replay()
        plain.zero_grad()
        plain(c.x, offs=offs, row_scale=c.row_scale).backward(dy)
        wanted = dict(plain.named_parameters())
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                added = parameter.main_grad - 1.0
                torch.testing.assert_close(added, wanted[name].grad.float(), rtol=0.01, atol=0.01)
            else:
                assert parameter.grad is None and not hasattr(parameter, "main_grad")


def test_threads_and_streams() -> None:
    """Steps of several threads, each on its own stream: none sees another's intermediate."""
    cases = [case(zipf(400 + 90 * n, EXPERTS), seed=n) for n in range(6)]
    dys = [gradient(c) for c in cases]
    offs = [c.offs for c in cases]

    def step(n: int) -> dict[str, torch.Tensor]:
        given = leaves(cases[n])
        with torch.enable_grad():
            glulam.grouped_mlp(**given, offs=offs[n]).backward(dys[n])
        return grads(given)

    want = [step(n) for n in range(len(cases))]
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(n: int) -> None:
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                for _ in range(10):
                    got = step(n)
                    stream.synchronize()
                    if not all(same_bits(got[name], value) for name, value in want[n].items()):
                        failures.append(f"thread {n}: another gradient than alone")
        except Exception as error:
            failures.append(f"thread {n}: {error!r}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_against_float64_where_tiles_end_anywhere() -> None:
    for hidden, inter in ((8, 8), (136, 24), (1032, 520)):
        c = make_case(zipf(700, EXPERTS), hidden, inter, tail=TAIL, device="cuda")
        given, dy = leaves(c), gradient(c)
        glulam.grouped_mlp(**given, offs=c.offs).backward(dy)
        check_gradients(c, dy, grads(given))


def test_every_kernel_loads() -> None:
    """Each function takes the arguments that preloading gives it."""
    assert kernels.preload() > 0
