"""Every cache of a process serves two threads that find it empty at the same time; `COVERED` names each cache's
test.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuzz.check import call, results
from fuzz.problem import Problem
from fuzz.tensors import tensors_of
from support.caches import caches
from support.fake_gpu import FakeGpu
from support.faults import forget_everything, inline

import glulam
import glulam.contract as contract
from cute_kernels.specs import GroupedMmSpec
from ffi_bridge import cache, compiler, host, jit, loader, sources, toolchain
from glulam.backward import frozen, function
from glulam.calls import launch
from glulam.choose import estimates, kernels, known, loadable, records
from glulam.choose.problem import Problem as Chosen
from glulam.formats import words
from glulam.host import device, tickets, workspace
from glulam.nn import options, weight_gradients
from glulam.tuner import candidates
from glulam.validate import inputs

pytest_plugins = ["support.fixtures"]

SPEC = GroupedMmSpec()
MM = Chosen("grouped_mm", "bfloat16", 256, 16, 1024, 0, 2048)


def together(work: Callable[[], Any], count: int = 2) -> list[Any]:
    """Run `work` in `count` threads that start at the same time; return their results."""
    start = threading.Barrier(count, timeout=60)

    def begin(_: int) -> Any:
        start.wait()
        return work()

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(begin, range(count)))


CACHED: dict[str, tuple[Any, Callable[[], Any]]] = {
    "ffi_bridge.host.unfit": (host.unfit, host.unfit),
    "ffi_bridge.sources._makers": (sources._makers, sources._makers),
    "ffi_bridge.sources._code_of_makers": (sources._code_of_makers, sources._code_of_makers),
    "ffi_bridge.toolchain.versions": (toolchain.versions, toolchain.versions),
    "glulam.backward.frozen.part_names": (frozen.part_names, lambda: frozen.part_names("w1")),
    "glulam.backward.function.picker": (function.picker, lambda: function.picker(1, 0)((3, 4))),
    "glulam.choose.estimates.measured": (estimates.measured, lambda: estimates.measured("sm_90a")),
    "glulam.choose.records.types_of": (records.types_of, lambda: dict(records.types_of(Chosen))),
    "glulam.contract.cuts": (contract.cuts, contract.cuts),
    "glulam.contract.tiled": (contract.tiled, lambda: contract.tiled("grouped_mm", "bf16", "portable")),
    "glulam.formats.words._tables": (words._tables, words._tables),
    "glulam.host.device._driver": (device._driver, device._driver),
    "glulam.nn.options._parameters": (options._parameters, lambda: list(options._parameters(glulam.nn.GroupedMLP))),
    "glulam.nn.weight_gradients._made": (
        weight_gradients._made, lambda: weight_gradients._made((1, 2), torch.int32, torch.device("cpu")).tolist()
    ),
    "glulam.tuner.candidates.candidates": (candidates.candidates, lambda: candidates.candidates(MM, "sm_90a", 2)),
    "glulam.validate.inputs.routings": (inputs.routings, lambda: inputs.routings(inputs.Size(rows=40, experts=4))),
}  # fmt: skip
"""Functions whose results are kept, and a call of each."""


@pytest.mark.parametrize("name", CACHED)
def test_functions_whose_results_are_kept(name: str) -> None:
    kept, work = CACHED[name]
    kept.cache_clear()
    first, second = together(work)
    assert kept.cache_info().currsize >= 1 and work() == first
    assert first == second or type(first).__name__ == "CDLL"


def _problems() -> list[Problem]:
    sizes = {"sizes": (3, 0, 5, 2), "tail": 2, "hidden": 64, "inter": 64}
    return [
        Problem("grouped_mlp", form="list", given=("b1", "row_scale"), **sizes),  # type: ignore[arg-type]
        Problem("grouped_mlp", train=True, given=("row_scale",), **sizes),  # type: ignore[arg-type]
        Problem("grouped_mlp", options={"recipe": "mxfp8"}, **sizes),  # type: ignore[arg-type]
        Problem("grouped_mlp", options={"recipe": "mxfp8"}, train=True, **sizes),  # type: ignore[arg-type]
        Problem("grouped_mlp", options={"recipe": "mxfp8_exact"}, **sizes),  # type: ignore[arg-type]
        Problem("grouped_mlp", options={"recipe": "mxfp4_weight_only"}, **sizes),  # type: ignore[arg-type]
        Problem("moe", train=True, **sizes),  # type: ignore[arg-type]
    ]


OF_CALLS: dict[str, Callable[[], int]] = {
    "glulam.backward.function.layout_of": lambda: function.layout_of.cache_info().currsize,
    "glulam.backward.planned.PLANS": lambda: len(attribute("glulam.backward.planned.PLANS")),
    "glulam.backward.parts._checked": lambda: 1,
    "glulam.backward.parts.ORDINARY": lambda: 1,
    "glulam.calls.generated._numbers": lambda: 1,
    "glulam.calls.launch.code_of": lambda: launch.code_of.cache_info().currsize,
    "glulam.calls.launch.text_of": lambda: launch.text_of.cache_info().currsize,
    "glulam.choose.kernels._serving": lambda: len(kernels._serving),
    "glulam.choose.known._held": lambda: len(known._held),
    "glulam.formats.mxfp8.fold._ships": lambda: attribute("glulam.formats.mxfp8.fold._ships").cache_info().currsize,
    "glulam.formats.prepared.PREPARED": lambda: len(attribute("glulam.formats.prepared.PREPARED")),
    "glulam.host.experts._tables": lambda: len(attribute("glulam.host.experts._tables")),
    "glulam.host.groups._caller": lambda: 1,
    "glulam.host.groups._operators": lambda: len(attribute("glulam.host.groups._operators")),
    "glulam.host.plans._all_kept": lambda: len(attribute("glulam.host.plans._all_kept")),
    "glulam.host.tickets._of_graphs": lambda: len(tickets._of_graphs),
    "glulam.host.tickets._kept": lambda: 1,
    "glulam.host.workspace._kept": lambda: 1,
    "glulam.ops.mlp_training.forward_kind": lambda: attribute("glulam.ops.mlp_training.forward_kind").cache_info()
    .currsize,
    "glulam.ops.quantized_mlp._line_that_rounds": lambda: attribute("glulam.ops.quantized_mlp._line_that_rounds")
    .cache_info().currsize,
}  # fmt: skip
"""Caches that calls fill, and the number of entries in each; 1 for those that every call passes."""


def attribute(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def _forget_all() -> None:
    forget_everything()
    kernels.forget_choices()
    for name in OF_CALLS:
        if hasattr(attribute(name), "cache_clear") and not name.endswith("forward_kind"):
            attribute(name).cache_clear()


def _step_of_a_module(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Run a forward and backward of a module whose weights have a main_grad buffer; return one weight's gradient."""
    module = glulam.nn.GroupedMLP(len(offs), x.shape[1], x.shape[1], dtype=x.dtype)
    for weight in module.parameters():
        weight.data.fill_(0.01)
        weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    module(x, offs=offs).float().sum().backward()
    gradient: torch.Tensor = module.fc1.weight.main_grad
    return gradient


def test_calls_and_steps_of_threads_that_find_nothing(fake_gpu: FakeGpu) -> None:
    given = [(problem, tensors_of(problem)) for problem in _problems()]

    def work() -> list[list[Any]]:
        made = [results(problem, tensors, lambda one, p=problem: call(p, one)) for problem, tensors in given]  # type: ignore[misc]
        first = given[0][1]
        gradient = _step_of_a_module(first["x"][: given[0][0].rows].clone(), first["offs"])
        return [gradient.tolist(), *[[one[: problem.rows].tolist() if one.dim() else one.item() for one in of]
                for (problem, _), of in zip(given, made, strict=True)]]  # fmt: skip

    with inline():
        wanted = str(work())
        for _ in range(3):
            _forget_all()
            assert [str(one) for one in together(work, 3)] == [wanted] * 3
    assert not {name: full() for name, full in OF_CALLS.items() if not full()}
    assert not workspace.stats().num_views or threading.current_thread() is threading.main_thread()


def test_kernels_that_are_found_and_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By two threads at once: in the cache on disk, by the JIT, and as what a process compiled."""
    function_of = functools.cache(lambda spec: lambda: spec)
    monkeypatch.setattr(cache, "find", lambda spec, tracer=None: function_of(spec))
    for kept, work in (
        (loadable._from_cache, lambda: loadable.cached(SPEC)),
        (jit._functions, lambda: jit.get(SPEC)),
    ):
        before = dict(kept)
        kept.clear()
        try:
            assert together(work) == [function_of(SPEC)] * 2 and len(kept) == 1
        finally:
            kept.clear()
            kept.update(before)


def test_what_is_preferred_by_one_thread_while_another_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path))
    monkeypatch.setattr(loadable, "is_loadable", lambda spec: True)
    kernels.forget_choices()
    monkeypatch.setitem(kernels._compiled, SPEC, lambda: None)
    try:
        made = together(lambda: (known.prefer(SPEC), attribute("glulam.choose.choose")(MM, "sm_90a", "a GPU").spec)[1])
        assert made == [SPEC, SPEC] and known._preferred and known._loadable
        assert together(lambda: kernels.find(SPEC).source) == ["jit", "jit"]
        assert known.clear_preferences() == 1
    finally:
        known.forget()
        kernels.forget_choices()


def test_a_bundle_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that load it together get one; what is opened is a stand-in."""
    opened: list[int] = []

    def checked(*_: Any) -> Any:
        opened.append(1)
        return SimpleNamespace()

    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(loader, "checked", checked)
    first, second = together(lambda: loader.load("sm_90a"))
    assert first is second and opened == [1]


def test_hashes_of_sources() -> None:
    for kept, work in (
        (toolchain._hashes, lambda: toolchain.sources_hash("ffi_bridge")),
        (sources._known, lambda: sources.of("cute_kernels").files),
    ):
        kept.clear()
        first, second = together(work)
        assert first == second == work() and len(kept) == 1
    for kept in (sources._read, sources._of_code):
        kept.cache_clear()
    known_sources = sources.of("cute_kernels")
    first, second = together(lambda: sources.file_hashes(sources.tracer_of(SPEC), known_sources))
    assert first == second and sources._read.cache_info().currsize


def test_a_gpu_is_asked_once_or_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv(device.ENV_ARCH, "sm_90a")
    device.gpu.cache_clear()
    first, second = together(lambda: device.gpu(0))
    assert first == second == device.Gpu("NVIDIA H200", "sm_90a", 132)
    device.gpu.cache_clear()


def test_a_warning_of_groups_comes_once_or_twice(recwarn: pytest.WarningsRecorder) -> None:
    kept = attribute("glulam.host.groups._warned")
    kept.clear()
    x, w = torch.zeros(4, 8), torch.zeros(2, 8, 8)
    made = together(lambda: glulam.grouped_mm(x, w, offs=torch.tensor([1, 2], dtype=torch.int32)))
    assert len(made) == 2 and len(kept) == 1
    kept.clear()


ELSEWHERE = {
    "ffi_bridge.compiler._cutlass": "of a compile process, which has one thread",
    "ffi_bridge.hub_package._described": "of a package that this one writes; either thread's result serves",
    "ffi_bridge.hub_package._module": "of a package that this one writes; either thread's result serves",
    "ffi_bridge.loader._load_runtime": "within the loader's lock",
    "glulam.distributed.side_stream._stream": "of a GPU: tests/gpu/test_concurrent_calls.py",
    "glulam.distributed.all_to_all._host_groups": "made once by every rank, in the same order",
    "glulam.host.experts._kept_for_graphs": "of captures, which are one thread's each",
    "glulam.nn.weight_gradients._kept_for_graphs": "of captures, which are one thread's each",
    "glulam.integrations.transformers._locks": "a lock itself: tests/test_transformers.py",
}
"""Caches that no test here covers, and why."""
COVERED: dict[str, Any] = {
    **dict.fromkeys(CACHED, test_functions_whose_results_are_kept),
    **dict.fromkeys(OF_CALLS, test_calls_and_steps_of_threads_that_find_nothing),
    **dict.fromkeys(("glulam.choose.loadable._from_cache", "ffi_bridge.jit._functions"),
                    test_kernels_that_are_found_and_made),
    **dict.fromkeys(("glulam.choose.known._preferred", "glulam.choose.known._loadable",
                     "glulam.choose.kernels._compiled"), test_what_is_preferred_by_one_thread_while_another_chooses),
    "ffi_bridge.loader._loaded": test_a_bundle_is_opened_once,
    **dict.fromkeys(("ffi_bridge.toolchain._hashes", "ffi_bridge.sources._known", "ffi_bridge.sources._read",
                     "ffi_bridge.sources._of_code"), test_hashes_of_sources),
    "glulam.host.device.gpu": test_a_gpu_is_asked_once_or_twice,
    "glulam.host.groups._warned": test_a_warning_of_groups_comes_once_or_twice,
}  # fmt: skip
"""Caches, and the test with several threads of each."""


def test_every_cache_of_the_library_has_a_test_or_a_reason() -> None:
    assert caches() == COVERED.keys() | ELSEWHERE.keys() and not COVERED.keys() & ELSEWHERE.keys()
    assert compiler._cutlass.cache_info().maxsize is None
