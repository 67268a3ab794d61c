"""A fake GPU for perf's suites: tensors on "cuda" are on the CPU, and time does not advance.

Operators compute their references; events, streams and graphs do nothing, and replaying a graph runs its call.
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import glulam

PROPERTIES = SimpleNamespace(name="GPU", multi_processor_count=132, L2_cache_size=1 << 12)


def _on_cpu(value: Any) -> Any:
    is_device = isinstance(value, (str, torch.device))
    return torch.device("cpu") if is_device and str(value).startswith("cuda") else value


class OnCpu(TorchFunctionMode):
    """Mode in which tensors requested on "cuda" are made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


class Event:
    def __init__(self, **options):
        self.record = self.synchronize = lambda: None

    def elapsed_time(self, other):
        return 1.0  # ms


class Generator:
    def __new__(cls, device="cpu", made=torch.Generator):
        return made(_on_cpu(device))


def install(patch: pytest.MonkeyPatch) -> TorchFunctionMode:
    """Replace torch's CUDA functions until `patch` is undone; return the mode in which suites must run."""

    def nothing(*arguments):
        return None

    stream = SimpleNamespace(wait_stream=nothing, cuda_stream=0)
    fakes = {
        "Event": Event, "Stream": lambda: stream, "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda: stream, "current_device": lambda: 0, "get_device_properties": lambda _: PROPERTIES,
        "memory_allocated": lambda: 1000, "max_memory_allocated": lambda: 3000, "_compile_kernel": lambda *_: nothing,
        **dict.fromkeys(("synchronize", "reset_peak_memory_stats", "empty_cache", "_sleep"), nothing),
        "graph_pool_handle": nothing,
    }  # fmt: skip
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, fake)
    patch.setattr(torch, "Generator", Generator)
    patch.setattr(torch, "compile", lambda function, **options: function)
    patch.setattr(glulam, "preload", nothing)
    for name, module in list(sys.modules.items()):
        if name.startswith("perf.") and hasattr(module, "capture"):
            patch.setattr(module, "capture", lambda run, pool=None: run)
    return OnCpu()
