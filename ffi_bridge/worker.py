"""The parent's end of a compile process: start the process, send specs, receive artifacts, and tell failures apart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from cute_kernels import plain, specs

from . import host, kept_ptx, sources
from .compiler import KernelArtifact
from .errors import CompileError

# `-m` would import from the working directory, and `-P`, which forbids that, is not in Python 3.10.
_START = "import sys; sys.path[:] = filter(None, sys.path); from ffi_bridge.compiler import main; main()"
_LAST_WORDS = 2000  # characters of the process's standard error that an error message quotes


def _environment(directory: Path, dump: kept_ptx.Dump | None) -> dict[str, str]:
    """Return the environment of a compile process: this process's, without variables that would change the code.

    The process can import all that this process can. Its temporary files lie in `directory`, where the objects are, so
    that only one disk can become full and they are removed with the objects.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    dumping = dump.environment if dump else {}
    return {**kept, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "TMPDIR": str(directory), **dumping}


class Worker:
    """One compile process, for specs of one architecture. Not thread-safe: each thread needs its own worker.

    Args:
        directory: the folder for objects and the process's log. It is the process's working directory, from which it
            imports nothing.
        tracer: "module:function" that turns a spec into a traced function. None: the kernels' own tracer for each spec.
        keep_ptx: True: write PTX and the host function (`kept_ptx`) beside each object.
        machine: the CPUs for which host code is made. None: this machine's.

    Attributes:
        sources: the sources of the tracer's package when the process began; the process imports these or later ones.
    """

    def __init__(
        self, directory: Path, tracer: str | None = None, keep_ptx: bool = False, machine: host.Host | None = None
    ) -> None:
        self.machine = machine or host.here()
        self.sources = sources.of(sources.package_of(tracer))
        self._directory = Path(directory).absolute()
        self._tracer = tracer
        self._dump = kept_ptx.Dump(self._directory) if keep_ptx else None
        self._log = tempfile.TemporaryFile("w+", dir=self._directory)  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=self._directory,
            env=_environment(self._directory, self._dump),
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.close(kill=kind is not None)

    def compile(self, spec: specs.Spec, directory: Path | None = None) -> KernelArtifact:
        """Compile one spec into `directory`/<spec.name>.o and return the artifact.

        `directory` None: the worker's own folder.

        Raises:
            CompileError: the spec does not compile, or the process died; the message names the spec.
        """
        into = str(Path(directory or self._directory).absolute())
        tracer = sources.tracer_of(spec, self._tracer)
        if self._dump:
            self._dump.clear()
        request = {"spec": specs.to_dict(spec), "tracer": tracer, "directory": into, "plain": list(plain.avoided())}
        request["machine"] = self.machine.machine
        reply = self._reply_to(request)
        if reply is None:
            raise CompileError(f"{spec.name}: {self._post_mortem()}")
        if "error" in reply:
            raise CompileError(f"{spec.name}: {reply['error']}")
        artifact = KernelArtifact.from_dict(reply["artifact"])
        if self._dump:
            self._dump.take(artifact)
        return artifact

    def kill(self) -> None:
        """End the process at once. A thread waiting for a reply gets a CompileError. `close` must still be called."""
        self._process.kill()

    def close(self, kill: bool = False) -> None:
        """End the process, wait until it has ended, and remove its log.

        `kill`: True: end it at once. False: close its standard input, at whose end the process exits by itself.
        """
        if kill:
            self._process.kill()
        self._process.communicate()
        self._log.close()
        if self._dump:
            self._dump.remove()

    def _reply_to(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Send a request and return the reply; None if the process ended instead."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None  # both are pipes
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            return None
        reply: dict[str, Any] | None = json.loads(line) if line else None
        return reply

    def _post_mortem(self) -> str:
        """Return how the process ended, and the end of its standard error."""
        code = self._process.wait()
        self._log.seek(0)
        words = self._log.read().strip()[-_LAST_WORDS:]
        end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"the compile process {end}" + (f"; it said:\n{words}" if words else "")
