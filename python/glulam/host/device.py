"""Queries about GPUs, streams, captures and traces, and the choice of the architecture whose kernels serve a GPU.

`raw_stream`, `current` and `is_capturing` run at each call. There, torch's public functions
(`torch.cuda.current_stream()`: 1 us) would cost more than the rest of the call, so torch's private functions are used.
If a private function is missing in a version of torch, the public function is used.
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
from ffi_bridge import BundleError, ToolchainError, loader, manifest, verification

from ..errors import UnsupportedDevice

KERNEL_DEVICE = "cuda"  # tensors of this device type go to the kernels, those on the CPU to the reference
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)  # classes whose objects certainly are memory that a kernel can read
ENV_ARCH = "GLULAM_ARCH"
"""Environment variable with the name of an architecture, whose kernels then serve every GPU that can run them, tested
or not."""
ENV_UNVALIDATED = "GLULAM_ALLOW_UNVALIDATED"
TESTED, VALIDATED, NEVER_RUN = "tested", "validated here", "built, never run"
"""States of an architecture's kernels on a GPU.

TESTED: Glulam's developers ran the tests on such a GPU, and they passed. VALIDATED: `glulam validate` passed on this
machine. NEVER_RUN: neither, so nobody has seen the kernels' results.
"""


def _raw_stream(index: int) -> int:
    """Return the handle of torch's current stream on a device, by torch's public functions."""
    handle: int = torch.cuda.current_stream(index).cuda_stream
    return handle


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
"""raw_stream(index) returns the handle of torch's current stream on a device; 0 is the legacy default stream."""

current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Returns the index of the current device."""

is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Returns True if the current stream of the current device is being captured into a graph."""


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """Return the CUDA driver's library; None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def capture_id() -> Any:
    """Return an identifier of the graph capture to which the current stream belongs. It is constant in a capture.

    It is the driver's number, which torch does not expose. If the driver gives none, it is a new object, which equals
    no other.
    """
    status, number, driver = ctypes.c_int(), ctypes.c_uint64(), _driver()
    if driver is not None and hasattr(driver, "cuStreamGetCaptureInfo_v2"):
        stream = ctypes.c_void_p(raw_stream(current()))
        got = (ctypes.byref(status), ctypes.byref(number), None, None, None)
        if driver.cuStreamGetCaptureInfo_v2(stream, *got) == 0 and status.value:
            return number.value
    return object()


Result = TypeVar("Result")


def on_own_thread(make: Callable[[], Result], device: torch.device) -> Result:
    """Call make() on a new thread, where `device` and its current stream are current, and return its result.

    Use this to allocate memory that outlives the call. While a memory pool of torch is in use, it takes everything that
    its thread allocates; a new thread is outside of the pool. Pools are in use under `torch.cuda.use_mem_pool`, and in
    compiled functions that warm up for CUDA graphs, which raise an error if memory in their pool outlives a call.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return make()
    stream = torch.cuda.current_stream(device)

    def made() -> Result:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()


def on(index: int) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is the current device, as a launch needs it."""
    return nullcontext() if has_single_gpu() or current() == index else torch.cuda.device(index)


def other_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a new, idle stream is current. On other devices than GPUs it does nothing."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


class Gpu(NamedTuple):
    """Properties of a GPU that launching needs.

    Attributes:
        name: the GPU's name.
        arch: the architecture whose kernels serve it.
        sm_count: the number of SMs.
        passed_over: a better architecture that does not serve because its kernels were never run (the function
            `passed_over`). Empty: there is none.
    """

    name: str
    arch: str
    sm_count: int
    passed_over: str = ""


@functools.cache
def gpu(index: int) -> Gpu:
    """Return the properties of the GPU with this index.

    Raises:
        UnsupportedDevice: no kernel runs on the GPU; or the kernels were never run on such a GPU, and
            $GLULAM_ALLOW_UNVALIDATED does not allow that.
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
    """Return True if $GLULAM_ALLOW_UNVALIDATED is 1: kernels in state NEVER_RUN may serve."""
    return os.environ.get(ENV_UNVALIDATED) == "1"


def state_of(arch: str, gpu: str) -> str:
    """Return TESTED (by Glulam's developers, on such a GPU), VALIDATED (by `glulam validate`, on this machine) or
    NEVER_RUN for an architecture's kernels. `gpu`: the GPU's name."""
    if ARCHS[arch].tested_on:
        return TESTED
    from ffi_bridge import stamps

    with contextlib.suppress(BundleError, ToolchainError):
        library = verification.check(loader.bundle_root() / arch, arch).sha256
        return VALIDATED if stamps.is_there(arch, gpu, library) else NEVER_RUN
    return NEVER_RUN


def is_untried(arch: str, gpu: str) -> bool:
    """Return True if an architecture is for one compute capability alone (its name ends in "a"), and NEVER_RUN.

    NEVER_RUN means that neither the developers' tests nor `glulam validate` on this machine passed with its kernels on
    a GPU of this name.
    """
    return arch.endswith("a") and state_of(arch, gpu) == NEVER_RUN


def prefer_tried(archs: Sequence[str], gpu: str) -> str | None:
    """Return the first of `archs` that `is_untried` does not exclude; else the first; None if `archs` is empty."""
    return next((arch for arch in archs if not is_untried(arch, gpu)), next(iter(archs), None))


def has_bundle(arch: str) -> bool:
    """Return True if there is a bundle (library of compiled kernels) for an architecture."""
    return (loader.bundle_root() / arch / manifest.FILE).is_file()


def supported() -> str:
    """Return text that lists the architectures, with the GPUs of each."""
    return ", ".join(f"{'.'.join(map(str, capability(arch)))} ({arch}), as {ARCHS[arch].gpus}" for arch in ARCHS)


def arch_of(device: tuple[int, int], gpu: str) -> str | None:
    """Choose the architecture whose kernels serve a GPU; None if there is none.

    The first of these that applies:
      1. GLULAM_ARCH, if it is set.
      2. The only usable architecture that has a bundle.
      3. The best architecture with a bundle whose kernels were tested, or validated on this machine.
      4. The choice of `prefer_tried` among architectures with a bundle, or among all if there is no bundle.

    Args:
        device: the compute capability, (major, minor).
        gpu: the GPU's name.

    Raises:
        UnsupportedDevice: GLULAM_ARCH names an architecture whose kernels do not run there.
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
    """Return the best architecture for a GPU, if `arch` serves instead because the best one's kernels were never run.

    "": `arch` is the best architecture, or GLULAM_ARCH chose it.
    """
    best = serving(device)[0]
    if best == arch or os.environ.get(ENV_ARCH):
        return ""
    return best if has_bundle(best) or is_untried(best, gpu) else ""


def why_passed_over(best: str, arch: str) -> tuple[str, str]:
    """Return two texts: why kernels of `arch` serve instead of kernels of `best`, and commands that try `best`."""
    validate = f"`{ENV_ARCH}={best} glulam validate`"
    if has_bundle(best):
        return f"the {best} kernels were {NEVER_RUN} here; the {arch} kernels serve", f"{validate} tries them"
    why = f"{best} kernels, for this GPU alone, are not in a bundle and were never run on any GPU"
    return f"{why}; the {arch} kernels serve", f"`glulam build --arch {best}`, then {validate} tries them"


def parsed(caller: str, device: Any) -> torch.device:
    """Convert a caller's argument `device` to a torch.device; an integer is the index of a GPU.

    Raises:
        TypeError, ValueError: the argument is not a device.
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
    """Convert a caller's argument `device` to the index of a GPU. None: the current GPU.

    Raises:
        TypeError, ValueError: the argument is not a GPU that torch sees.
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
    """Return True for a meta tensor or a tensor subclass (fake, wrapper): torch's dispatcher must handle it."""
    return isinstance(value, torch.Tensor) and (type(value) not in PLAIN_TENSORS or value.is_meta)


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns the number of active dispatch modes."""
_jit_trace: Callable[[], Any] = torch._C._get_tracing_state


def is_watched() -> bool:
    """Return True if every operator must go through torch's dispatcher, so that a dispatch mode or trace sees it.

    This is so under a dispatch mode (make_fx, selective checkpoints, FLOP counters) or torch.jit.trace. Otherwise they
    could record the result of a call on plain tensors as a constant. torch.compile does not count here.
    """
    return not is_dynamo_compiling() and (dispatch_modes() > 0 or _jit_trace() is not None)


def has_single_gpu() -> bool:
    """Return True if the process sees one GPU, so that the current device never has to be queried or changed."""
    return torch.cuda.device_count() == 1
