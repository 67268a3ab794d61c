"""Gradients of grouped_mlp in MXFP8 on a GPU: against their definition, by plan and without, in CUDA graphs, and of
modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import mxfp8_gradients as oracle
from support.criterion import same_bits
from support.gradients import grads, leaves
from support.inputs import Case, gradient, make_case, poison_allocator
from support.routing import catalogue, ends, zipf
from torch import Tensor

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.specs import GATED
from glulam.formats import prepared as prepared_weights
from glulam.host.plans import forget_plans
from glulam.nn import GroupedMLP

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("with_gradients")]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EXPERTS, HIDDEN, INTER = 6, 352, 224  # multiples of 32, not of 64 or 128
FEW, MANY = [5, 0, 64, 1, 0, 40], [130, 0, 257, 64, 1, 300]
Cache = prepared_weights.PreparedWeights


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    fresh = Cache()
    monkeypatch.setattr(prepared_weights, "PREPARED", fresh)
    return fresh


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List that gets the axis of each weight preparation, in order."""
    calls: list[str] = []
    prepare = prepared_weights.prepare

    def count(form: Any, parts: Any, report: bool) -> Any:
        calls.append(form.axis)
        return prepare(form, parts, report)

    monkeypatch.setattr(prepared_weights, "prepare", count)
    return calls


def case(sizes: list[int], form: tuple[str, str] = ("swiglu", "concat"), **options: Any) -> Case:
    return make_case(sizes, HIDDEN, INTER, gated=form[0] in GATED, **{"tail": 70, "device": "cuda", **options})


def step(c: Case, given: dict[str, Any], dy: Tensor | None = None, **options: Any) -> Tensor:
    groups = {} if "offs" in options else {"offs": c.offs}
    y: Tensor = glulam.grouped_mlp(**given, **groups, **options, recipe="mxfp8")
    y.backward(gradient(c) if dy is None else dy)
    return y.detach()


@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("form", activation_forms(), ids="-".join)
def test_every_activation(form: tuple[str, str], dtype: torch.dtype, sizes: list[int]) -> None:
    c = case(sizes, form, dtype=dtype)
    given = leaves(c)
    for _ in range(2):  # memory is kept between calls
        for value in given.values():
            value.grad = None
        poison_allocator("cuda")
        step(c, given, activation=form[0], glu_layout=form[1])
    oracle.check(c, gradient(c), grads(given), form)


@pytest.mark.parametrize("routing", catalogue(900, EXPERTS))
def test_every_routing(routing: str) -> None:
    c = case(catalogue(900, EXPERTS)[routing])
    for groups in ({"offs": c.offs}, {"splits": c.splits()}, {"splits": c.splits(torch.int64)}, {"splits": c.sizes}):
        given = leaves(c)
        step(c, given, **{"offs": None, **groups})
        oracle.check(c, gradient(c), grads(given))


@pytest.mark.parametrize(("hidden", "inter"), [(32, 32), (736, 1504), (1504, 736), (2048, 96), (64, 2880)])
def test_sizes_that_no_tile_divides(hidden: int, inter: int) -> None:
    c = make_case([200, 1, 333, 0, 70], hidden, inter, tail=5, device="cuda")
    given = leaves(c)
    step(c, given)
    oracle.check(c, gradient(c), grads(given))


@pytest.mark.parametrize("rows", [0, 1])
def test_hardly_any_rows(rows: int) -> None:
    c = case([0, rows, 0, 0, 0, 0], tail=0)
    given = leaves(c)
    step(c, given)
    if rows:
        oracle.check(c, gradient(c), grads(given))
    assert all(
        value.shape == given[name].shape and bool(value.isfinite().all()) for name, value in grads(given).items()
    )
    c = case([0] * EXPERTS, tail=40)
    given = leaves(c)
    step(c, given)
    assert all(not bool(value.any()) for value in grads(given).values())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_the_bits_of_the_general_path(listed: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(MANY)
    planned, general = leaves(c), leaves(c)
    want = step(c, planned)
    arguments: dict[str, Any] = dict(general)
    if listed:
        for name in ("w1", "w2", "b1", "b2"):
            arguments[name] = [one.detach().requires_grad_() for one in general[name]]
    monkeypatch.setattr("glulam.backward.planned.run", lambda *_: NotImplemented)
    forget_plans()
    y = step(c, arguments, recompute=recompute)
    assert same_bits(y[: c.rows], want[: c.rows])
    for name, value in grads(planned).items():
        got = arguments[name]
        got = torch.stack([one.grad for one in got]) if isinstance(got, list) else got.grad
        if name in ("b1", "b2") and listed:
            torch.testing.assert_close(got, value, rtol=0.01, atol=1e-2 * float(value.abs().max()))
        else:
            assert same_bits(got, value), name


@pytest.mark.parametrize(
    "wanted",
    [("x",), ("w1",), ("w2",), ("b1",), ("b2",), ("row_scale",), ("w1", "w2"), ("x", "row_scale")],
    ids="-".join,
)
def test_frozen_inputs(wanted: tuple[str, ...]) -> None:
    c = case(MANY)
    every, given = leaves(c), leaves(c, wanted)
    for one in (every, given):
        step(c, one)
    assert grads(given).keys() == set(wanted)
    assert all(same_bits(value, grads(every)[name]) for name, value in grads(given).items())


@pytest.mark.parametrize("weights", [F32, F16])
def test_weights_of_another_dtype(weights: torch.dtype) -> None:
    c = case(MANY)
    given = {**leaves(c), **{n: getattr(c, n).to(weights).requires_grad_() for n in ("w1", "w2")}}
    c.w1, c.w2 = given["w1"].detach(), given["w2"].detach()
    step(c, given)
    assert given["w1"].grad.dtype == given["w2"].grad.dtype == weights
    oracle.check(c, gradient(c), grads(given))


def test_the_same_again_to_the_bit() -> None:
    c = case(MANY)
    first, again = leaves(c), leaves(c)
    for given in (first, again):
        step(c, given)
    assert all(same_bits(value, again[name].grad) for name, value in grads(first).items())


def test_no_step_waits_for_the_device() -> None:
    c = case(MANY)
    given, dy, offs = leaves(c), gradient(c), c.offs
    optimizer = torch.optim.SGD([given["w1"], given["w2"]], 1e-3, fused=True)
    try:
        for mode in ("default", "error", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            step(c, given, dy, offs=offs)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_on_streams_of_their_own(made: list[str]) -> None:
    """What one stream folded, another waits for."""
    c = case(MANY)
    want, given, dy, offs = leaves(c), leaves(c), gradient(c), c.offs
    step(c, want)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(20_000_000)
        with torch.no_grad():
            given["w1"].mul_(1.0)  # folded late, on this stream
            given["w2"].mul_(1.0)
        made.clear()
        step(c, leaves_of(given), dy, offs=offs)
    with torch.cuda.stream(second):
        step(c, given, dy, offs=offs)
        assert made == ["row", "row", "col", "col"]
    torch.cuda.synchronize()
    assert all(same_bits(value, want[name].grad) for name, value in grads(given).items())


def leaves_of(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return detached aliases of the tensors as leaves that require gradients."""
    return {name: value.detach().requires_grad_() for name, value in given.items()}


@contextlib.contextmanager
def on_a_stream() -> Iterator[torch.cuda.Stream]:
    """Context with a side stream as the current one, which can be captured; afterwards the default stream waits for
    it.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.current_stream().wait_stream(stream)


class TestGraphs:
    def layer(self) -> GroupedMLP:
        torch.manual_seed(3)
        return GroupedMLP(EXPERTS, HIDDEN, INTER, recipe="mxfp8", device="cuda", dtype=BF16)

    @pytest.mark.parametrize("fused", [False, True])
    def test_whole_steps(self, fused: bool, made: list[str]) -> None:
        """Two micro-batches and the optimizer in one graph, against the same steps one by one, to the bit."""
        c = case(MANY, tail=0)
        batches, dys = [c.x, c.x.flip(0).contiguous()], [gradient(c), gradient(c, seed=8)]
        offs, scale = c.offs, c.row_scale
        weights = {}
        for captured in (False, True):
            module = self.layer()
            optimizer = torch.optim.AdamW(module.parameters(), 1e-2, fused=fused, capturable=True)

            def one_step(module: GroupedMLP = module, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad(set_to_none=True)
                for x, dy in zip(batches, dys, strict=True):
                    module(x, offs=offs, row_scale=scale).backward(dy)
                optimizer.step()

            with on_a_stream() as stream:
                one_step()
                one_step()
                made.clear()
                advance: Any = one_step
                if captured:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=stream):
                        one_step()
                    assert sorted(made) == ["col", "row", "row"], "micro-batches of a graph share what it folds"
                    advance = graph.replay
                for _ in range(3):
                    poison_allocator("cuda")
                    advance()
            weights[captured] = [p.detach().clone() for p in module.parameters()]
        assert all(same_bits(one, other) for one, other in zip(*weights.values(), strict=True))
        assert not same_bits(weights[True][0], self.layer().fc1.weight.detach()), "nothing was learned"

    def test_weights_that_change_between_replays(self) -> None:
        """Forward and backward in a graph, the optimizer outside; with another routing each time."""
        c = case(MANY, tail=0)
        module, dy, offs = self.layer(), gradient(c), c.offs
        x = c.x.clone().requires_grad_()
        step = lambda: module(x, offs=offs, row_scale=c.row_scale).backward(dy)  # noqa: E731
        with on_a_stream() as stream:
            step()
            x.grad = None
            module.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                step()
        for seed in range(3):
            with torch.no_grad():
                for weight in module.parameters():
                    weight.data.mul_(1.5)  # which no version counts
            sizes = zipf(c.rows - 30, EXPERTS)
            offs.copy_(torch.tensor(ends(sizes[seed:] + sizes[:seed]), dtype=torch.int32))
            for value in (x, *module.parameters()):
                value.grad.zero_()
            graph.replay()
            got = [value.grad.clone() for value in (x, *module.parameters())]
            for value in (x, *module.parameters()):
                value.grad.zero_()
            step()
            for one, value in zip(got, (x, *module.parameters()), strict=True):
                assert same_bits(one, value.grad)

    def test_eager_calls_after_replays(self, made: list[str]) -> None:
        c = case(MANY, tail=0)
        module, offs = self.layer(), c.offs
        optimizer = torch.optim.SGD(module.parameters(), 1e-4)
        dy = gradient(c)

        def one_step() -> None:
            optimizer.zero_grad(set_to_none=True)
            module(c.x, offs=offs).backward(dy)
            optimizer.step()

        with on_a_stream() as stream:
            one_step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                one_step()
        for _ in range(3):
            graph.replay()
            with torch.no_grad():
                got = module(c.x, offs=offs)
                folded = [glulam.prepare_mxfp8_weight(fc.weight) for fc in (module.fc1, module.fc2)]
                want = glulam.grouped_mlp(c.x, *folded, offs=offs, recipe="mxfp8")
            assert same_bits(got[: c.rows], want[: c.rows]), "of weights that a replay has changed"

    def test_the_first_step_is_captured(self) -> None:
        c = case(MANY)
        given, dy, offs = leaves(c), gradient(c), c.offs
        step(c, leaves(c), dy, offs=offs)  # loads kernels; other weights
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(c, given, dy, offs=offs)
        graph.replay()
        oracle.check(c, dy, grads(given))

    def test_frozen_weights_first_seen_under_capture(self) -> None:
        c = case(FEW)
        given, dy, offs = leaves(c, ("x",)), gradient(c), c.offs
        step(c, leaves(c, ("x",)), dy, offs=offs)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(glulam.CaptureError, match="once with it before capturing"), torch.cuda.graph(graph):
            step(c, given, dy, offs=offs)
        torch.cuda.synchronize()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("option", ["", "recompute", "delay_wgrad", "main_grad"])
def test_module(packed: bool, option: str) -> None:
    c = case(MANY)
    options = {option: True} if option in ("recompute", "delay_wgrad") else {}
    module = GroupedMLP(
        EXPERTS, HIDDEN, INTER, bias=True, packed=packed, recipe="mxfp8", device="cuda", dtype=BF16, **options
    )
    state = {"fc1.weight": c.w1, "fc1.bias": c.b1, "fc2.weight": c.w2, "fc2.bias": c.b2}
    module.load_state_dict({name: value.clone() for name, value in state.items()})
    name = "main_grad" if option == "main_grad" else "grad"
    if option == "main_grad":
        for fc in (module.fc1, module.fc2):
            for weight in fc.parameter_list("weight"):
                weight.main_grad = torch.zeros_like(weight, dtype=F32, requires_grad=False)  # type: ignore[attr-defined]
    x, scale = c.x.clone().requires_grad_(), c.row_scale.clone().requires_grad_()
    module(x, offs=c.offs, row_scale=scale).backward(gradient(c))
    if option == "delay_wgrad":
        module.backward_dw()
    got = {}
    for label, fc in (("w1", module.fc1), ("w2", module.fc2)):
        values = [getattr(weight, name) for weight in fc.parameter_list("weight")]
        got[label] = values[0] if packed else torch.stack(values)
    oracle.check(c, gradient(c), {**got, "x": x.grad, "row_scale": scale.grad})


def test_compiled() -> None:
    torch.compiler.reset()
    c = case(FEW)
    given, same = leaves(c), leaves(c)
    step(c, given)
    call = torch.compile(
        lambda arguments: glulam.grouped_mlp(**arguments, offs=c.offs, recipe="mxfp8"),
        backend="aot_eager",
        fullgraph=True,
    )
    call(same).backward(gradient(c))
    for name, value in grads(given).items():
        torch.testing.assert_close(same[name].grad, value, rtol=0.02, atol=0.02 * float(value.abs().max()))


def test_near_bf16_at_a_models_size() -> None:
    """Qwen3-30B-A3B's experts, a few of them: gradients err as MXFP8 rounds, about 4e-2 a GEMM, and no more."""
    experts, hidden, inter, rows = 16, 2048, 768, 4096
    c = make_case([rows // experts] * experts, hidden, inter, device="cuda")
    dy, found = torch.randn_like(c.x), {}
    for recipe in ("bf16", "mxfp8"):
        given = {name: value for name, value in leaves(c).items() if name not in ("b1", "b2")}
        glulam.grouped_mlp(**given, offs=c.offs, recipe=recipe).backward(dy)
        found[recipe] = grads(given)
    for name, value in found["bf16"].items():
        error = float((found["mxfp8"][name].float() - value.float()).norm() / value.float().norm())
        assert 0.01 < error < 0.1, (name, error)
