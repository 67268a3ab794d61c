"""What the host path asks of torch.cuda, each question bound once.

A call asks three of these on every launch, where the public wrappers (`torch.cuda.current_stream()`: 1 us) would cost
more than the rest of the call; they are the fallback should a name move.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from cute_kernels.arch import serving
from cute_kernels.architectures import ARCHS, capability
from ffi_bridge import BundleError, ToolchainError, loader, manifest

from ..errors import UnsupportedDevice

KERNEL_DEVICE = "cuda"  # tensors of this device type go to the kernels, those on the CPU to the reference
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)  # classes whose objects certainly are memory that a kernel can read
ENV_ARCH = "GLULAM_ARCH"
"""Names the architecture whose kernels serve every GPU that can run them, tried or not."""
ENV_UNVALIDATED = "GLULAM_ALLOW_UNVALIDATED"
TESTED, VALIDATED, NEVER_RUN = "tested", "validated here", "built, never run"
"""What is known of an architecture's kernels on a GPU: our tests passed, `glulam validate` did on this machine, or
nobody has seen their results."""


def _raw_stream(index: int) -> int:
    handle: int = torch.cuda.current_stream(index).cuda_stream
    return handle


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
"""The handle of torch's current stream on a device; 0 is the legacy default stream."""

current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The index of the current device."""

is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Whether the current stream of the current device is being captured into a graph."""


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def capture_id() -> Any:
    """What stands for the graph capture that the current stream is part of, the same throughout: the driver's number,
    which torch does not pass on. Where the driver cannot tell, an object that equals no other.
    """
    status, number, driver = ctypes.c_int(), ctypes.c_uint64(), _driver()
    if driver is not None and hasattr(driver, "cuStreamGetCaptureInfo_v2"):
        stream = ctypes.c_void_p(raw_stream(current()))
        got = (ctypes.byref(status), ctypes.byref(number), None, None, None)
        if driver.cuStreamGetCaptureInfo_v2(stream, *got) == 0 and status.value:
            return number.value
    return object()


Made = TypeVar("Made")


def apart(make: Callable[[], Made]) -> Made:
    """The result of `make`, called on a thread of its own, on the current device and stream: for memory that is kept.

    Pools of torch's take what a thread allocates while they are in use: `torch.cuda.use_mem_pool`, and compiled
    functions that warm up for CUDA graphs, which raise an error where something in their pool outlives a call.
    """
    if not torch.cuda.is_initialized():
        return make()
    stream = torch.cuda.current_stream()

    def made() -> Made:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()


def other_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A stream on which nothing runs, for as long as this is entered; nothing of the kind where there is no GPU."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


class Gpu(NamedTuple):
    """What launching needs to know of a GPU. passed_over: the result of that function."""

    name: str
    arch: str
    sm_count: int
    passed_over: str = ""


@functools.cache
def gpu(index: int) -> Gpu:
    """The GPU of an index.

    Raises:
        UnsupportedDevice: no kernel runs on it.
    """
    properties = torch.cuda.get_device_properties(index)
    found, name = (properties.major, properties.minor), properties.name
    arch = arch_of(found, name) if torch.version.cuda else None
    if arch is None:
        raise UnsupportedDevice(
            f"cuda:{index} is a {name} of compute capability {found[0]}.{found[1]}; Glulam has "
            f"kernels for {supported()}; move the tensors there, or to the CPU for the reference"
        )
    if not allows_unvalidated() and state_of(arch, name) == NEVER_RUN:
        raise UnsupportedDevice(
            f"cuda:{index} is a {name}, and the {arch} kernels that serve it were {NEVER_RUN} there; run "
            f"`glulam validate`, which compares all of them with torch in float64, or set {ENV_UNVALIDATED}=1"
        )
    return Gpu(name, arch, properties.multi_processor_count, passed_over(found, arch, name))


def allows_unvalidated() -> bool:
    """Whether kernels serve of which nobody has seen the results."""
    return os.environ.get(ENV_UNVALIDATED) == "1"


def state_of(arch: str, gpu: str) -> str:
    """TESTED, VALIDATED or NEVER_RUN: of an architecture's kernels, as this machine has them, on a GPU of a name."""
    if ARCHS[arch].tested_on:
        return TESTED
    from ffi_bridge import stamps

    with contextlib.suppress(BundleError, ToolchainError):
        library = manifest.check(loader.bundle_root() / arch, arch).sha256
        return VALIDATED if stamps.is_there(arch, gpu, library) else NEVER_RUN
    return NEVER_RUN


def is_untried(arch: str, gpu: str) -> bool:
    """Return True if an architecture's kernels are native, made of one capability's features ("a"), and nobody has seen
    their results: neither our tests nor `glulam validate` on this machine's GPU of that name.
    """
    return arch.endswith("a") and state_of(arch, gpu) == NEVER_RUN


def prefer_tried(archs: Sequence[str], gpu: str) -> str | None:
    """Return the first of `archs` that is not untried; if all are, the first; None if there are none."""
    return next((arch for arch in archs if not is_untried(arch, gpu)), next(iter(archs), None))


def has_bundle(arch: str) -> bool:
    return (loader.bundle_root() / arch / manifest.FILE).is_file()


def supported() -> str:
    """The architectures, and GPUs of theirs, in words."""
    return ", ".join(f"{'.'.join(map(str, capability(arch)))} ({arch}), as {ARCHS[arch].gpus}" for arch in ARCHS)


def arch_of(device: tuple[int, int], gpu: str) -> str | None:
    """Return the architecture whose kernels serve GPUs of a compute capability and a name; None if there is none.

    GLULAM_ARCH names it. Else it is the best one with a bundle whose kernels were tested, or validated here; else what
    `prefer_tried` takes of those with a bundle, or of all if none has one.

    Raises:
        UnsupportedDevice: GLULAM_ARCH names one whose kernels do not run there.
    """
    usable = serving(device)
    if (wanted := os.environ.get(ENV_ARCH)) and usable:
        if wanted not in usable:
            raise UnsupportedDevice(
                f"{ENV_ARCH} is {wanted!r}, whose kernels do not run on a GPU of compute capability {device[0]}."
                f"{device[1]}; choose one of: {', '.join(usable)}"
            )
        return wanted
    built = [arch for arch in usable if has_bundle(arch)]
    if len(built) == 1:  # most machines: no manifest is read
        return built[0]
    proven = (arch for arch in built if state_of(arch, gpu) != NEVER_RUN)
    return next(proven, None) or prefer_tried(built or usable, gpu)


def passed_over(device: tuple[int, int], arch: str, gpu: str) -> str:
    """Return the best architecture for a GPU if `arch` serves it only because nobody has seen the results of the best
    one's kernels; else "", also where GLULAM_ARCH chose `arch`.
    """
    best = serving(device)[0]
    if best == arch or os.environ.get(ENV_ARCH):
        return ""
    return best if has_bundle(best) or is_untried(best, gpu) else ""


def why_passed_over(best: str, arch: str) -> tuple[str, str]:
    """Say why the kernels of `arch` serve instead of those of `best`, and which commands would try the latter."""
    validate = f"`{ENV_ARCH}={best} glulam validate`"
    if has_bundle(best):
        return f"the {best} kernels were {NEVER_RUN} here; the {arch} kernels serve", f"{validate} tries them"
    why = f"{best} kernels, for this GPU alone, are not in a bundle and were never run on any GPU"
    return f"{why}; the {arch} kernels serve", f"`glulam build --arch {best}`, then {validate} tries them"


def parsed(caller: str, device: Any) -> torch.device:
    """What a caller's `device` names; an integer is the index of a GPU.

    Raises:
        TypeError, ValueError: it names none.
    """
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise TypeError(f"{caller}: device is {device!r}; give a torch.device, its name as 'cuda:0', or an index")
    try:
        where = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
        if not isinstance(device, int) or where.index == device:  # torch keeps eight bits of an index
            return where
    except RuntimeError:
        pass
    raise ValueError(f"{caller}: device is {device!r}; give one as 'cuda:0', or an index")


def cuda_index(caller: str, device: Any) -> int:
    """The index of the GPU that a caller's `device` names; None: of the current one.

    Raises:
        TypeError, ValueError: it names no GPU that torch sees.
        UnsupportedDevice: there is no GPU at all.
    """
    where = parsed(caller, "cuda" if device is None else device)
    if where.type != "cuda":
        raise ValueError(f"{caller}: device is {where}; give a CUDA device, since kernels run on no other")
    if not torch.cuda.is_available():
        raise UnsupportedDevice(f"{caller}: torch sees no CUDA GPU; kernels need one, the CPU reference does not")
    index = torch.cuda.current_device() if where.index is None else where.index
    if where.index is not None and not 0 <= index < torch.cuda.device_count():
        raise ValueError(f"{caller}: device is {where}; torch sees {torch.cuda.device_count()} GPUs")
    return index


def is_traced(value: Any) -> bool:
    """Whether a tensor (a fake or meta one, a wrapper) is the business of torch's dispatcher: it has no memory."""
    return isinstance(value, torch.Tensor) and (type(value) not in PLAIN_TENSORS or value.is_meta)


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns how many are active."""
_jit_trace: Callable[[], Any] = torch._C._get_tracing_state


def is_watched() -> bool:
    """Return True if every operator must go through torch's dispatcher: a dispatch mode is active (make_fx, selective
    checkpoints, counters of FLOPs), or torch.jit.trace. Either may take a call of plain tensors for a constant.
    torch.compile is not asked about.
    """
    return not is_dynamo_compiling() and (dispatch_modes() > 0 or _jit_trace() is not None)


def is_only_one() -> bool:
    """Whether there is one GPU, so that the current device need not be asked."""
    return torch.cuda.device_count() == 1
