"""Faults: failed allocations, failed launches, a lost device. The error names the cause, and the same call works once
the cause is gone: no plan, table, ticket, workspace or prepared weight is left broken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fuzz import declared, draw
from fuzz.check import call, leaves_of, results
from fuzz.problem import Problem
from fuzz.tensors import tensors_of
from support import faults
from support.fake_gpu import FakeGpu
from support.faults import Launches, Memory, forget_everything, inline

import glulam
from glulam.formats.prepared import PREPARED
from glulam.host import device, tickets, workspace

pytest_plugins = ["support.fixtures"]

FAILED = RuntimeError("CUDA error: unspecified launch failure")
LOST = RuntimeError("CUDA error: an illegal memory access was encountered")


def _problems() -> list[Problem]:
    """Return one problem per function with all optional arguments; grouped_mlp and moe with several recipes, forward
    and backward.
    """
    found = []
    for name in declared.FUNCTIONS:
        given = [one for one in declared.optional_of(name) if one not in ("out", "mask", "dy_rows", "lora")]
        if "offs" in declared.parameters(name) and "splits" not in declared.parameters(name):
            given.append("offs")
        recipes = [one for one in ("bf16", "mxfp8", "mxfp8_exact", "mxfp4_weight_only")
                   if one in declared.options_of(name).get("recipe", ("bf16",))]  # fmt: skip
        recipes = recipes if name in ("grouped_mlp", "moe") else recipes[:1]
        for recipe, train in itertools.product(recipes, (False, True)):
            if train and (name not in draw.TRAINED or recipe not in ("bf16", "mxfp8") or name.startswith("router_z")):
                continue
            options = {one: values[0] for one, values in declared.options_of(name).items()
                       if declared.parameters(name)[one].default is inspect.Parameter.empty}  # fmt: skip
            options.update({"recipe": recipe} if recipe != "bf16" else {})
            kept = [one for one in given if not (train and one == "rows")]
            form = "list" if declared.weights_of(name) and recipe == "bf16" and not train else "packed"
            found.append(Problem(name, (3, 0, 5, 2), 2, 64, 64, form=form, given=tuple(kept), options=options,
                                 train=train))  # fmt: skip
    return found


PROBLEMS = _problems()


def named(problem: Problem) -> str:
    return f"{problem.call}-{problem.recipe}{'-step' if problem.train else ''}"


def prepared(problem: Problem) -> Callable[[], list[torch.Tensor]]:
    """Return a call whose tensors are already allocated, except for copies of trained ones."""
    given = tensors_of(problem)
    if "out" in given:
        given.pop("out")
    return lambda: results(problem, given, lambda one: call(problem, one))


def bits(tensors: list[torch.Tensor], rows: int) -> list[bytes]:
    """Return the bytes of each tensor's rows in groups; other rows are uninitialised."""
    parts = [one[:rows] if one.dim() and one.shape[0] > rows else one for one in tensors]
    return [torch.empty(one.shape, dtype=one.dtype).copy_(one).view(-1).view(torch.uint8).numpy().tobytes()
            for one in parts]  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS, ids=named)
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_memory_that_cannot_be_had_at_any_place(is_warm: bool, problem: Problem, fake_gpu: FakeGpu) -> None:
    run = prepared(problem)
    places, launched = faults.places(run, is_warm)
    assert (places or is_warm) and (launched or problem.call in BY_TORCH), "nothing would fail"
    with Launches().installed(), inline():
        forget_everything()
        wanted = bits(run(), problem.rows)
        failed = 0
        for place in places:
            forget_everything()
            if is_warm:
                run()
            with Memory(place) as memory:
                try:
                    run()
                except torch.OutOfMemoryError as error:
                    assert "Tried to allocate" in str(error)
                    failed += 1
                else:
                    assert not memory.has_failed, f"the fault at {place} was swallowed"
                    assert memory.calls <= place, "a later run may take less memory, but passes no place by"
            assert bits(run(), problem.rows) == wanted, f"after a fault at {place}"
            assert counters_are_zero()
        assert failed or not places


BY_TORCH = ("load_balancing_loss", "router_z_loss", "mxfp8_of_square_blocks", "quantize_fp8_block", "quantize_nvfp4",
            "prepare_mxfp4_weight", "prepare_mxfp8_weight")  # fmt: skip
"""Functions that launch nothing of ours."""


def counters_are_zero() -> bool:
    return not any(bool(memory.any()) for _, memory in tickets._kept.eager.values())


@pytest.mark.parametrize("error", [FAILED, LOST], ids=["launch", "lost"])
@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.call not in BY_TORCH], ids=named)
def test_a_launch_that_fails(problem: Problem, error: Exception, fake_gpu: FakeGpu) -> None:
    run = prepared(problem)
    forget_everything()
    _, count = faults.places(run)
    with Launches().installed():
        wanted = bits(run(), problem.rows)
    for number in range(count):
        forget_everything()
        with Launches(number, error).installed() as launches:
            with pytest.raises(RuntimeError, match=r"CUDA error: (unspecified launch|an illegal memory)") as raised:
                run()
            assert raised.value is error
            assert bits(run(), problem.rows) == wanted and launches.count > number
            fake_gpu.launches.clear()
            again = [one.keys() for one in launched_by(run, fake_gpu)]
        with Launches().installed():
            assert [one.keys() for one in launched_by(run, fake_gpu)] == again


def launched_by(run: Callable[[], Any], fake_gpu: FakeGpu) -> list[dict[str, Any]]:
    fake_gpu.launches.clear()
    run()
    return list(fake_gpu.launches)


@pytest.mark.parametrize("name", ["raw_stream", "is_capturing"])
def test_a_device_that_another_library_lost(name: str, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question to the device raises; once it answers again the call works."""
    problem = next(p for p in PROBLEMS if p.call == "grouped_mlp" and p.train and p.recipe == "bf16")
    run, right = prepared(problem), getattr(device, name)
    monkeypatch.setattr(device, "raw_stream", lambda index: 7)  # a stream that may be captured
    wanted = bits(run(), problem.rows)
    asked: list[int] = []

    def answer(*arguments: Any) -> Any:
        asked.append(1)
        if len(asked) == fail_at:
            raise LOST
        return 7 if name == "raw_stream" else right(*arguments)

    for fail_at in itertools.count(1):
        forget_everything()
        asked.clear()
        monkeypatch.setattr(device, name, answer)
        if fail_at == 1:
            with pytest.raises(RuntimeError, match="an illegal memory access"):
                run()
        else:
            try:
                run()
            except RuntimeError as error:
                assert error is LOST
        is_done = len(asked) < fail_at
        fail_at = 0
        assert bits(run(), problem.rows) == wanted
        if is_done:
            break
    assert len(asked) > 1


def test_a_buffer_that_does_not_grow_leaves_none_behind(fake_gpu: FakeGpu) -> None:
    """The workspace of a larger call cannot be had; the smaller one's was given back for it, and comes again."""
    small = Problem("grouped_mlp", (3, 2), 0, 64, 64)
    large = dataclasses.replace(small, sizes=(8000, 9000), inter=128)
    with inline():
        forget_everything()
        run, run_large = prepared(small), prepared(large)
        wanted = bits(run(), small.rows)
        (size,) = [one.numel() for one in workspace.stats().buffers.values()]
        with pytest.MonkeyPatch.context() as patch:
            right = torch.empty

            def fail(*shape: Any, **options: Any) -> torch.Tensor:
                if isinstance(shape[0], int) and shape[0] > size:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return right(*shape, **options)

            patch.setattr(torch, "empty", fail)
            with pytest.raises(torch.OutOfMemoryError):
                run_large()
        assert not workspace.stats().buffers and not workspace.stats().num_views
        assert bits(run(), small.rows) == wanted
        assert len(run_large()[0]) == large.rows


def test_memory_on_the_thread_that_keeps_it(fake_gpu: FakeGpu) -> None:
    """`device.on_own_thread` passes errors on, and serves the next call."""

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        device.on_own_thread(fail, torch.device("cpu"))
    assert device.on_own_thread(lambda: 3, torch.device("cpu")) == 3


def test_memory_is_made_on_the_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the current device, on which nothing waits for it."""
    entered: list[Any] = []

    @contextlib.contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        entered.append(chosen)
        yield

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of=None: ("stream of", of))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    other = torch.device("cuda", 1)
    assert device.on_own_thread(lambda: 3, other) == 3 and entered == [("stream of", other)]


@pytest.mark.parametrize(("single", "current", "changes"), [(True, 0, False), (False, 1, False), (False, 0, True)])
def test_a_launch_has_its_device(single: bool, current: int, changes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_single_gpu", lambda: single)
    monkeypatch.setattr(device, "current", lambda: current)
    found = device.on(1)
    assert isinstance(found, torch.cuda.device) == changes
    assert not changes or found.idx == 1


def test_a_weight_that_could_not_be_prepared_is_still_one_that_trains(fake_gpu: FakeGpu) -> None:
    """Found by faults: the steps of optimizers were no longer seen where the preparation of a new version failed."""
    problem = Problem("grouped_mlp", (3, 2), 0, 64, 64, options={"recipe": "mxfp8"})
    given = tensors_of(problem)
    weights = [torch.nn.Parameter(given[name]) for name in ("w1", "w2")]
    optimizer = torch.optim.SGD(weights, lr=0.0)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return glulam.grouped_mlp(given["x"], *weights, offs=given["offs"], recipe="mxfp8")

    run()
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for weight in weights:
        weight.requires_grad_(False)
    with inline():
        memory: list[int] = []
        forget = PREPARED._weights
        with Memory() as counted:
            run()
        memory = list(counted.at.values())
        optimizer.step()
        with Memory(memory[0]), pytest.raises(torch.OutOfMemoryError):
            run()
    run()
    assert all(entry.trains for weight in forget.values() for entry in weight.entries.values())


def test_every_function_that_trains_has_a_step_here() -> None:
    steps = {problem.call for problem in PROBLEMS if problem.train and leaves_of(problem, tensors_of(problem))}
    assert steps == set(draw.TRAINED) - {"router_z_loss"}
