"""Compiling while the GPU measures: threads that each drive a compile process, and one future a spec."""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from cute_kernels.specs import Spec
from ffi_bridge import CompileError, jit
from ffi_bridge.worker import Worker

from ..choose import kernels, loadable
from ..choose.loadable import Function

SPARE_CPUS = 2  # one feeds the GPU, one serves the operating system
MAX_JOBS = 16


def default_jobs() -> int:
    """Compile processes beside a measurement on this machine."""
    return min(max(len(os.sched_getaffinity(0)) - SPARE_CPUS, 1), MAX_JOBS)


class CompilePool:
    """Makes kernels in at most `jobs` compile processes, which are started when they are needed.

    A future's result is the kernel's function. Its exception is a CompileError where the kernel does not compile, or
    compiles to code that no bundle would take.
    """

    def __init__(self, jobs: int) -> None:
        self._threads = ThreadPoolExecutor(jobs, "glulam-compile")
        self._mine = threading.local()
        self._workers: list[Worker] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="glulam-tune-", ignore_cleanup_errors=True)
        self._futures: dict[Spec, Future[Function]] = {}

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        """Waits for nothing: what nobody asked for any more is not compiled, what is under way is ended."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.close(kill=True)
        self._scratch.cleanup()

    def start(self, spec: Spec) -> Future[Function]:
        """The future of a spec; one that the bundle or the cache has is there already."""
        if spec not in self._futures:
            if loadable.is_loadable(spec):
                self._futures[spec] = Future()
                self._futures[spec].set_result(kernels.find(spec).function)
            else:
                self._futures[spec] = self._threads.submit(self._make, spec)
        return self._futures[spec]

    def _make(self, spec: Spec) -> Function:
        if not hasattr(self._mine, "worker"):
            folder = Path(self._scratch.name) / str(threading.get_ident())
            folder.mkdir()
            self._mine.worker = Worker(folder)
            self._workers.append(self._mine.worker)
        return jit.get(spec, worker=self._mine.worker, strict=True)

    def wait(self, spec: Spec) -> Function | CompileError:
        """The function of a spec that was started, or why there is none."""
        try:
            return self._futures[spec].result()
        except CompileError as error:
            return error
