"""Exported functions on the CPU, called with arguments by name; `machine` runs their kernels' PTX.

Grids and parameters are those with which the host functions launch the kernels. Objects, PTX and host functions come
from one compilation (`ffi_bridge.kept_ptx`) and are kept between runs. No compiled host code runs, so the DSL's
run-time library is not used.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.steps import taken
from torch import Tensor

from cute_kernels.arguments import ADDRESS, TENSOR
from cute_kernels.chains import Step, chain_of, signature_of, stages_of
from cute_kernels.plain import plain_in
from cute_kernels.specs import Spec
from ffi_bridge.compiler import KernelArtifact
from ffi_bridge.objects import Store
from ffi_bridge.worker import Worker

from . import programs, ptx
from .faults import Fault
from .host import Host, Launch
from .machine import Machine
from .memory import Memory
from .races import Races

ENV_CACHE = "GLULAM_EMULATOR_CACHE"
NUM_SMS = 2
WHOLE_CTA = 0


def cache_folder() -> Path:
    """Return the emulator's cache folder: $GLULAM_EMULATOR_CACHE, else a user folder.

    It is not the kernels' cache, which is emptied for each test.
    """
    if chosen := os.environ.get(ENV_CACHE):
        return Path(chosen)
    import platformdirs

    return platformdirs.user_cache_path("glulam") / "emulator"


class Texts:
    """Compiled objects, with the PTX and the host text of their compilation.

    There is one compile process per architecture, started on demand.
    """

    def __init__(self) -> None:
        self._store = Store(keep_ptx=True)
        self._store.folder = cache_folder() / "objects"
        self._exit = contextlib.ExitStack()
        self._work = Path(self._exit.enter_context(tempfile.TemporaryDirectory(prefix="glulam-emulator-")))
        self._worker = functools.cache(self._start)

    def _start(self, arch: str) -> Worker:
        (folder := self._work / arch).mkdir()
        return self._exit.enter_context(Worker(folder, keep_ptx=True))

    def of(self, stage: Spec) -> KernelArtifact:
        """Return the object of a stage, with its texts beside it."""
        if found := self._store.take(stage, self._work):
            return found
        with self._store.alone(stage):
            return self._store.obtain(stage, self._work, lambda: self._worker(stage.arch))

    def close(self) -> None:
        """End the compile processes, and remove objects and programs that were not used for a long time."""
        self._exit.close()
        self._store.trim()
        programs.trim(cache_folder() / "programs")


@functools.cache
def texts() -> Texts:
    """Return the Texts object of this process."""
    made = Texts()
    atexit.register(made.close)
    return made


def ptx_of(spec: Spec) -> list[str]:
    """Return the PTX of each stage of a function, with the architecture's name removed."""
    objects = [texts().of(stage).object_file for stage in stages_of(spec)]
    return [one.with_suffix(".ptx").read_text().replace(spec.arch, "") for one in objects]


class Stage:
    """A stage (a function that launches kernels) that can run.

    Attributes:
        programs: its kernels, by name.
        unit_warps: number of warps that step together. Warps with different roles step one by one, since they wait for
            each other.
    """

    def __init__(self, stage: Spec) -> None:
        artifact = texts().of(stage)
        shared = {kernel.name: kernel.dynamic_smem for kernel in artifact.kernels}
        self.host = Host(artifact.object_file.with_suffix(".mlir").read_text(), shared)
        text = artifact.object_file.with_suffix(".ptx").read_text()
        self.unit_warps = 1 if "mbarrier." in text else WHOLE_CTA
        self.programs = programs.of(text, cache_folder() / "programs")


_stages = functools.lru_cache(maxsize=8)(lambda stage, plain: Stage(stage))
_ONE_AT_A_TIME = threading.Lock()  # launches beside each other would write the same object


def stage_of(stage: Spec) -> Stage:
    """Return a stage; the most recent ones are cached."""
    with _ONE_AT_A_TIME:
        return _stages(stage, plain_in(stage.arch))


@dataclasses.dataclass
class Counts:
    """Names of the kernels that ran, number of their warp instructions, and seconds in the machine."""

    kernels: list[str] = dataclasses.field(default_factory=list)
    instructions: int = 0
    seconds: float = 0.0


def packed(kernel: ptx.Kernel, launch: Launch) -> bytes:
    """Return the bytes of a kernel's parameters."""
    wanted = list(kernel.params.values())
    sizes = [len(value) for value in launch.parameters]
    if sizes != [size for _, size in wanted]:
        raise Fault(f"{kernel.name} takes parameters of {[size for _, size in wanted]} bytes, launched with {sizes}")
    blob = bytearray(kernel.param_bytes)
    for (offset, size), value in zip(wanted, launch.parameters, strict=True):
        blob[offset : offset + size] = value
    return bytes(blob)


class Emulator:
    """An emulated GPU of an architecture.

    Args:
        seed: seed of the machine's schedule.
        num_sms: number of SMs passed to functions, unless a call passes another.
        patience_s: seconds for which a blocked launch waits for launches of other threads.
        check_races: raise Fault for a launch that may race in any order of its warps.

    Attributes:
        memory: memory that kernels may access. A call registers the tensors among its arguments; callers that pass
            addresses must register the memory there.
    """

    def __init__(
        self, arch: str, seed: int = 0, num_sms: int = NUM_SMS, patience_s: float = 0.0, check_races: bool = False
    ) -> None:
        self.arch, self.seed, self.num_sms, self.patience_s = arch, seed, num_sms, patience_s
        self.races = Races() if check_races else None
        self.memory = Memory()
        self.counts = Counts()
        self._turn = threading.Lock()  # launches of several threads take turns, a step each
        self._fault: Fault | None = None  # the first fault of such a launch, for which the others would wait

    def function(self, spec: Spec) -> Callable[..., None]:
        """Return the exported function of a spec; it takes arguments by name (`signature_of(spec).pack`).

        Tensors are torch's or numpy's, on the CPU; a tensor passed for an address is passed as its address. None is 0.
        """
        if spec.arch != self.arch:
            raise ValueError(f"{spec.name} is not for {self.arch}")
        signature, chain = signature_of(spec), chain_of(spec)

        def call(**given: Any) -> None:
            named = {name: _tensor(value) for name, value in given.items()}
            if "num_sms" in signature.names:
                named.setdefault("num_sms", self.num_sms)
            with self._allowed(value for value in named.values() if isinstance(value, Tensor)):
                for argument in signature.arguments:
                    value = named.get(argument.name)
                    if argument.kind == ADDRESS and argument.name in named:
                        named[argument.name] = value.data_ptr() if isinstance(value, Tensor) else value or 0
                self.run(spec, dict(zip(signature.names, signature.pack(**named), strict=True)))

        call.__name__ = spec.name if chain is None else f"{spec.name} (a chain)"
        return call

    def run(self, spec: Spec, named: dict[str, Any], memory: Memory | None = None) -> None:
        """Run a call with all arguments by name, numbers and CPU tensors; a chain's stages run one after the other.

        Args:
            memory: memory to use instead of the emulator's own. None: the emulator's.
        """
        chain, memory = chain_of(spec), memory or self.memory
        if chain is None:
            self._run_stage(spec, named, memory)
            return
        steps: list[Step] = [step for step in chain.steps if not step.when or named[step.when]]
        for position, step in enumerate(steps):
            signature = signature_of(step.stage)
            values = signature.pack(**taken(step, named, position))
            self._run_stage(step.stage, dict(zip(signature.names, values, strict=True)), memory)

    def _run_stage(self, stage: Spec, named: dict[str, Any], memory: Memory) -> None:
        found = stage_of(stage)
        values = []
        for argument in signature_of(stage).arguments:
            value = named[argument.name]
            if argument.kind == TENSOR:
                value = (value.data_ptr(), tuple(value.shape), tuple(value.stride()))
            values.append(value)
        for launch in found.host.launches(values):
            self._launch(found, launch, memory)

    def _launch(self, stage: Stage, launch: Launch, memory: Memory) -> None:
        kernel, translation = stage.programs[launch.kernel]
        if kernel.cluster and kernel.cluster != launch.cluster:
            raise Fault(f"{kernel.name} is for clusters of {kernel.cluster}, launched with {launch.cluster}")
        run = Machine(
            kernel, memory, launch.grid, launch.block, launch.shared, packed(kernel, launch), launch.cluster,
            program=translation, seed=self.seed, unit_warps=stage.unit_warps, observer=self.races,
        )  # fmt: skip
        self.counts.kernels.append(kernel.name)
        if self.races is not None:
            if self.patience_s:
                with self._turn:
                    self.races.launch_beside(run, launch.early, threading.get_ident())
            else:
                self.races.launch(run, launch.early)
        if self.patience_s:
            self._run_beside_others(run)
        else:
            run.run()
        self.counts.instructions += run.instructions
        self.counts.seconds += run.seconds

    def _run_beside_others(self, run: Machine) -> None:
        """Run a launch that may wait for memory that launches of other threads write."""
        until = time.monotonic() + self.patience_s
        with np.errstate(all="ignore"):
            turns = run.turns()
            while True:
                with self._turn:
                    if self._fault is not None:
                        raise Fault(f"a launch beside this one has failed: {self._fault}")
                    try:
                        if next(turns, self) is self:
                            return
                    except Fault as fault:
                        self._fault = fault
                        raise
                if not run.waits:
                    until = time.monotonic() + self.patience_s
                elif time.monotonic() < until:
                    time.sleep(1e-3)
                else:
                    raise Fault(f"deadlock: nothing can move\n{run.state()}")

    @contextlib.contextmanager
    def _allowed(self, tensors: Iterator[Tensor]) -> Iterator[None]:
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        for address, size in storages.items():
            self.memory.allow(address, size, "an argument")
        try:
            yield
        finally:
            for address in storages:
                self.memory.forget(address)


def _tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
