"""Operators are visible to everything that observes torch's dispatcher: dispatch modes, make_fx, torch.jit.trace,
opcheck.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import pytest
import torch
from support.fake_gpu import FakeGpu
from support.wrong_calls import OPERATIONS, trained
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import glulam
from glulam.layer.expert_rows import rows_of_experts
from glulam.library import TORCH_OPS

pytest_plugins = ["support.fixtures"]
CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.float8_e4m3fn, torch.float8_e8m0fnu)
"""Dtypes that torch's check of schemas cannot compare."""
ELSEWHERE = {
    "moe_of_choices": "tests/test_moe_of_choices.py",
    "moe_of_choices_mxfp8": "tests/test_moe_of_choices.py",
    "moe_of_choices_mxfp8_out": "tests/test_moe_of_choices.py",
    "moe_of_choices_out": "tests/test_moe_of_choices.py",
    "layer_router": "of GPUs alone",
}
"""Forms that no public function calls here, and where they are checked."""


class Sample(NamedTuple):
    """A recorded call of one of our torch operators."""

    op: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Watch(TorchDispatchMode):
    """Dispatch mode that records the calls of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Sample] = []

    def __torch_dispatch__(self, op: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None) -> Any:
        if op.namespace == "glulam":
            self.samples.append(Sample(op, arguments, options or {}))
        return op(*arguments, **(options or {}))


@functools.cache
def samples() -> dict[str, list[Sample]]:
    """Return recorded calls of each torch operator, made by every public function with and without buffers and
    gradients.
    """
    with Watch() as watch:
        for operation in OPERATIONS:
            arguments = operation.good("cpu")
            with torch.no_grad():
                operation.call(**arguments)
                operation.call(**{name: one for name, one in arguments.items() if name not in operation.outputs})
            with contextlib.suppress(glulam.GradientNotSupported):
                results = [one for one in trained(operation, "cpu")[1] if one.requires_grad]
                torch.autograd.backward(results, [torch.ones_like(one) for one in results])
        _into_buffers()
        _with_trained_row_scales()
        _rows_of_layers()
    found: dict[str, list[Sample]] = {name: [] for name in TORCH_OPS}
    for sample in watch.samples:
        found[sample.op._schema.name.removeprefix("glulam::")].append(sample)
    return found


def _into_buffers() -> None:
    """Call torch operators that take buffers and that only our own modules call."""
    x, offs = torch.randn(20, 128, dtype=torch.bfloat16, requires_grad=True), torch.tensor([4, 20], dtype=torch.int32)
    layer = glulam.nn.GroupedMLP(2, 128, 128, recipe="mxfp8", dtype=torch.bfloat16)
    layer(x, offs=offs, out=torch.empty_like(x), grad_input=torch.empty_like(x)).sum().backward()
    with torch.no_grad():
        glulam.grouped_glu(x, layer.fc1.weight, offs=offs, return_preact=True, out=torch.empty_like(x))


def _with_trained_row_scales() -> None:
    """Run a backward through adapters, which computes a gradient of row scales."""
    x, offs = torch.randn(20, 16, dtype=torch.bfloat16), torch.tensor([4, 20], dtype=torch.int32)
    w1, w2, a1, b1, a2, b2 = (
        torch.randn(2, *shape, dtype=torch.bfloat16) for shape in ((16, 16), (16, 8), (8, 16), (16, 8), (8, 8), (16, 8))
    )
    scale = torch.ones(20, requires_grad=True)
    glulam.grouped_mlp(x, w1, w2, offs=offs, row_scale=scale, lora=glulam.ExpertLora(a1, b1, a2, b2)).sum().backward()


def _rows_of_layers() -> None:
    """Call torch operators that only layers over several ranks call."""
    weights = torch.randn(4, 64, 32, dtype=torch.bfloat16), torch.randn(4, 32, 32, dtype=torch.bfloat16)
    ids = torch.randint(4, (20, 2))  # all are here, since no result is written after the last group
    routing = glulam.Routing.from_topk(ids, torch.rand(20, 2), 4, world_experts=16)
    options = {"activation": "swiglu", "glu_layout": "concat", "dtype": torch.bfloat16}
    with torch.no_grad():
        for recipe in ("bf16", "mxfp8", "mxfp8_exact"):
            rows_of_experts(torch.randn(20, 32, dtype=torch.bfloat16), routing, *weights, recipe=recipe, **options)


def _leaves(sample: Sample, are_trained: bool) -> Sample:
    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(are_trained and tensor.dtype in FLOATS)

    return Sample(sample.op, *pytree.tree_map_only(Tensor, leaf, (sample.arguments, sample.options)))


def _is_differentiable(sample: Sample) -> bool:
    """Return True if the call, and its first result, is differentiable: opcheck sums results in order, and cannot start
    with integers.
    """
    op, arguments, options = _leaves(sample, are_trained=True)
    try:
        results = pytree.tree_leaves(op(*arguments, **options))
    except glulam.GradientNotSupported:
        return False
    return bool(results) and results[0].requires_grad


def _sampled(name: str) -> list[Sample]:
    """Return samples of a torch operator that differ in argument types, on leaves that require gradients if the call
    supports them.
    """
    unlike: dict[str, Sample] = {}
    for sample in samples()[name]:
        signature = pytree.tree_map_only(Tensor, lambda t: (t.dtype, t.dim()), (sample.arguments, sample.options))
        unlike.setdefault(repr(signature), sample)
    return [_leaves(sample, _is_differentiable(sample)) for sample in unlike.values()]


@pytest.mark.parametrize("name", sorted(TORCH_OPS.keys() - ELSEWHERE.keys()))
def test_opcheck(name: str) -> None:
    found = _sampled(name)
    assert found
    for op, arguments, options in found:
        flat = pytree.tree_leaves((arguments, options))
        is_narrow = any(isinstance(one, Tensor) and one.dtype in NARROW for one in flat)
        tests = [name for name in CHECKS if not (is_narrow and name == "test_schema")]
        torch.library.opcheck(op, arguments, options, test_utils=tests)


def test_nothing_is_sampled_elsewhere_in_vain() -> None:
    assert not [name for name in ELSEWHERE if samples()[name]]


@pytest.mark.parametrize("trace", [make_fx, lambda f: lambda *given: torch.jit.trace(f, given)], ids=["fx", "jit"])
def test_traces_hold_no_example(trace: Any) -> None:
    """A program of one routing computes another one."""
    x, w1, w2 = torch.randn(10, 32), torch.randn(4, 96, 32), torch.randn(4, 32, 48)
    first, second = (torch.tensor(ends, dtype=torch.int32) for ends in ([1, 2, 3, 10], [4, 5, 5, 10]))

    def layer(x: Tensor, offs: Tensor) -> Tensor:
        return glulam.grouped_mlp(x, w1, w2, offs=offs)

    program = trace(layer)(x, first)
    assert program(x, second).equal(layer(x, second))
    assert not program(x, first).equal(program(x, second))


def _permuted(x: Tensor, routing: glulam.Routing, w1: Tensor, w2: Tensor) -> Tensor:
    return glulam.permute(x, routing)


def _combined(x: Tensor, routing: glulam.Routing, w1: Tensor, w2: Tensor) -> Tensor:
    return glulam.combine(glulam.permute(x, routing), routing, residual=x)


ANY_TOKENS = {
    "permute": _permuted, "combine": _combined, "moe": glulam.moe,
    **{recipe: functools.partial(glulam.moe, recipe=recipe) for recipe in ("mxfp8", "mxfp8_exact")},
}  # fmt: skip
COUNTS = (10, 11, 7, 9, 20, 31, 33)


@pytest.mark.parametrize("name", ANY_TOKENS)
def test_one_graph_serves_any_number_of_tokens(name: str) -> None:
    torch.compiler.reset()
    w1, w2 = torch.randn(4, 64, 32, dtype=torch.bfloat16), torch.randn(4, 32, 32, dtype=torch.bfloat16)

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        made: Tensor = ANY_TOKENS[name](x, glulam.route(logits, 2), w1, w2)
        return made

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    is_trained, made_first = name != "mxfp8_exact", 0
    for count in COUNTS:
        x, logits = torch.randn(count, 32, dtype=torch.bfloat16), torch.randn(count, 4)
        given, same = ([t.clone().requires_grad_(is_trained) for t in (x, logits)] for _ in range(2))
        made, wanted = compiled(*given), layer(*same)
        assert made.equal(wanted)
        if is_trained:
            for result in (made, wanted):
                result.sum().backward()
            assert given[0].grad.equal(same[0].grad)
        made_first = made_first or graphs.frame_count
    assert graphs.frame_count == made_first


@pytest.mark.parametrize("dynamic", [True, None])
def test_one_graph_of_a_module_serves_any_number_of_tokens(dynamic: bool | None) -> None:
    torch.compiler.reset()
    layer = glulam.nn.MoE(32, 48, 4, 2, shared_intermediate_size=16, shared_gate=True, choice_bias=True)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=graphs)
    frames = []
    for count in COUNTS:
        x = torch.randn(count, 32)
        assert compiled(x).equal(layer(x))
        frames.append(graphs.frame_count)
    assert frames[-1] == frames[2]  # the first number, then any number


def test_one_graph_of_streams_serves_any_number_of_tokens() -> None:
    torch.compiler.reset()
    streams, graphs = glulam.nn.HyperConnection(4, 32), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: streams.pre(x).out, fullgraph=True, dynamic=True, backend=graphs)
    made_first = 0
    for count in COUNTS:
        x = torch.randn(count, 4, 32)
        torch.testing.assert_close(compiled(x), streams.pre(x).out)
        made_first = made_first or graphs.frame_count
    assert graphs.frame_count == made_first


@pytest.mark.parametrize("is_strict", [False, True])
def test_an_exported_layer_takes_any_number_of_tokens(is_strict: bool) -> None:
    layer, tokens = glulam.nn.MoE(32, 48, 4, 2).eval(), torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(layer, (torch.randn(10, 32),), dynamic_shapes=({0: tokens},), strict=is_strict)
    for count in (3, 17, 100):
        x = torch.randn(count, 32)
        assert program.module()(x).equal(layer(x))


def test_make_fx_of_a_layer() -> None:
    torch.manual_seed(0)
    layer = glulam.nn.MoE(32, 48, 4, 2, shared_intermediate_size=16)
    x, other = torch.randn(2, 10, 32)
    with torch.no_grad():
        program = make_fx(lambda tokens: layer(tokens))(x)
        assert program(other).equal(layer(other))


def test_a_known_call_is_seen() -> None:
    """Also one whose plan is kept, and its backward."""
    x, w = torch.randn(10, 32, requires_grad=True), torch.randn(4, 16, 32, requires_grad=True)
    offs = torch.tensor([1, 2, 3, 10], dtype=torch.int32)
    for _ in range(2):
        made = glulam.grouped_mm(x, w, offs=offs)
    with Watch() as watch:
        made.sum().backward()
        glulam.grouped_mm(x, w, offs=offs)
    names = [sample.op._schema.name for sample in watch.samples]
    assert names == ["glulam::grouped_mm_out", "glulam::grouped_wgrad", "glulam::grouped_mm"]


def test_selective_checkpoints_choose_operators() -> None:
    """A policy names operators; what it saves is not computed again."""

    def policy(context: Any, op: Any, *given: Any, **options: Any) -> CheckpointPolicy:
        is_saved = op is torch.ops.glulam.grouped_glu_preact.default
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    torch.manual_seed(0)
    layer, x = glulam.nn.MoE(32, 48, 4, 2), torch.randn(10, 32)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    made = {}
    for name, options in {"plain": None, "selective": {"use_reentrant": False, "context_fn": contexts}}.items():
        given = x.clone().requires_grad_()
        y = layer(given) if options is None else checkpoint(layer, given, **options)
        with Watch() as watch:
            y.sum().backward()
        made[name] = given.grad
    assert made["plain"].equal(made["selective"])
    assert "glulam::grouped_glu_preact" not in [sample.op._schema.name for sample in watch.samples]


@pytest.mark.parametrize("trace", [make_fx, lambda f: lambda *given: torch.jit.trace(f, given)], ids=["fx", "jit"])
def test_traces_see_known_calls(fake_gpu: FakeGpu, trace: Any) -> None:
    """By kernels, of a call whose plan guards find."""
    x, w = torch.randn(10, 32, dtype=torch.bfloat16), torch.randn(4, 16, 32, dtype=torch.bfloat16)
    first, second = (torch.tensor(ends, dtype=torch.int32) for ends in ([1, 2, 3, 10], [4, 5, 5, 10]))
    for _ in range(4):
        known = glulam.grouped_mm(x, w, offs=first)
    program = trace(lambda x, offs: glulam.grouped_mm(x, w, offs=offs))(x, first)
    assert program(x, first).equal(known)
    assert program(x, second).equal(glulam.grouped_mm(x, w, offs=second)) and not program(x, second).equal(known)
