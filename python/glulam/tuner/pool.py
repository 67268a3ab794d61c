"""Compile kernels while the GPU measures: each thread drives a compile process, and each spec has a future."""

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
    """Return the number of compile processes that may run beside a measurement on this machine."""
    return min(max(len(os.sched_getaffinity(0)) - SPARE_CPUS, 1), MAX_JOBS)


class CompilePool:
    """Compiles kernels in at most `jobs` processes, which are started on demand.

    A future's result is the kernel's function. A future's exception is a CompileError if the kernel does not compile,
    or compiles to code that no bundle would accept.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._threads = ThreadPoolExecutor(jobs, "glulam-compile")
        self._mine = threading.local()
        self._workers: list[Worker] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="glulam-tune-", ignore_cleanup_errors=True)
        self._futures: dict[Spec, Future[Function]] = {}

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        """Stop without waiting: pending compiles are cancelled, running compiles are killed."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.close(kill=True)
        self._scratch.cleanup()

    def start(self, spec: Spec) -> Future[Function]:
        """Return the future of a spec, and start compiling unless the bundle or the cache has the kernel."""
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
        """Wait for a started spec and return its function, or the CompileError."""
        try:
            return self._futures[spec].result()
        except CompileError as error:
            return error
