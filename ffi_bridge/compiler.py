"""The compile process: it receives specs, and returns for each an object file and a report of the kernels' resources.

Run as `python -m ffi_bridge.compiler`, it serves requests until its standard input closes (`worker.py` is the other
end). It is the only process that imports cutlass, because the compiler holds the GIL, is not thread-safe and keeps
some 250 MB. It never imports torch, so that a build gives the same result with and without torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from cute_kernels import plain, specs

from . import host, toolchain
from .errors import CompileError
from .resources import KernelResources, read_resources

# `remarks{ptx}` makes ptxas report registers, spills and C75xx lines; without it they are silent.
OPTIONS = "remarks{ptx} --enable-tvm-ffi --gpu-arch "

Tracer = Callable[[specs.Spec], tuple[Any, tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class KernelArtifact:
    """One compiled function: its export symbol, its object file, and the resources of each device kernel."""

    name: str
    object_file: Path
    kernels: tuple[KernelResources, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "object_file": str(self.object_file),
            "kernels": [dataclasses.asdict(kernel) for kernel in self.kernels],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KernelArtifact:
        kernels = tuple(KernelResources.from_dict(kernel) for kernel in data["kernels"])
        return cls(data["name"], Path(data["object_file"]), kernels)


def load_tracer(name: str) -> Tracer:
    """Import and return the function that a string "module:function" names.

    The function maps a spec to the jitted host function and its arguments, which are placeholders.
    """
    module, _, function = name.partition(":")
    tracer: Tracer = getattr(importlib.import_module(module), function)
    return tracer


@functools.cache
def _cutlass(arch: str) -> Any:
    """Import `cutlass.cute` for an architecture.

    Without a GPU the DSL reads its architecture from an environment variable, once, so one process compiles for one
    architecture only.

    Raises:
        CompileError: this process compiles for another architecture.
    """
    chosen = os.environ.setdefault("CUTE_DSL_ARCH", arch)
    if chosen != arch:
        raise CompileError(f"this compile process serves {chosen}; compile for {arch} in another")
    packages = str(toolchain.dsl_packages())
    if packages not in sys.path:  # a wheel adds itself by a .pth file, a bare folder does not
        sys.path.insert(0, packages)
    cute = importlib.import_module("cutlass.cute")
    _forget_source_lines(importlib.import_module("cutlass.base_dsl.dsl"))
    return cute


def _forget_source_lines(dsl: Any) -> None:
    """Stop the DSL from looking up the source line of every operation that it traces, which it does for remarks.

    The lookup takes a quarter of a build's time (two GEMMs: 2.5 s with it, 1.9 s without), and nothing here reads the
    lines. The compiled code is the same.
    """
    if tracking := getattr(dsl, "_set_enable_frame_filtering", None):
        dsl._set_enable_frame_filtering = lambda _: tracking(False)


def _aim(module: Any, cpu: str) -> None:
    """Make the compiler compile every function of a traced module for an x86-64 `cpu` instead of this machine's CPU.

    The DSL's exporter has no option for the CPU. A function's own attributes take precedence over the
    attributes of LLVM's target machine.
    """
    ir = importlib.import_module("cutlass._mlir.ir")
    with module.context:
        attributes = {
            "target_cpu": ir.StringAttr.get(cpu),
            # Not to add SSE2, which any has: without this attribute LLVM adds the machine's own features.
            "target_features": ir.Attribute.parse('#llvm.target_features<["+sse2"]>'),
        }
        for function in module.body.operations:
            if function.operation.name == "llvm.func":
                for name, value in attributes.items():
                    function.operation.attributes[name] = value


def _export(compiled: Any, file: Path, name: str, machine: host.Host) -> None:
    """Write a compiled function to the object file `file`, which runs on every CPU of the kind `machine`.

    name: the exported function's name.
    """
    if machine == host.here():
        if machine.machine == "x86_64":  # elsewhere LLVM's target machine is the baseline already
            _aim(compiled.ir_module, machine.baseline)
        compiled.export_to_c(str(file), function_name=name, export_only_tvm_ffi_symbols=True)
        return
    # What export_to_c does, which refuses another machine, up to the code generator, which takes any.
    provider = importlib.import_module("cutlass.cutlass_dsl.tvm_ffi_provider")
    own, symbol = compiled.function_name, f"__tvm_ffi_{name}"
    module = provider.get_export_module(
        compiled.ir_module, f"__cute_internal_{name}", preserve_symbols={f"__tvm_ffi_{own}"}
    )
    provider.rename_tvm_ffi_function(module, own, name)
    provider._inplace_hide_symbols(module, lambda other: not other.startswith("__tvm_ffi"))
    target = {"host_triple": machine.triple, "host_cpu": "generic", "host_features": ""}
    compiled.export_provider.mlirExecutionEngine.dump_object_file_pic(module, str(file), symbol, **target)


def compile_spec(spec: specs.Spec, directory: Path, tracer: str, machine: host.Host) -> KernelArtifact:
    """Compile one spec, with host code for any CPU of a machine, to `directory`/<spec.name>.o.

    Call this only in a process of its own: it imports cutlass for the spec's architecture, and no other can follow.
    `tracer` names the function that traces the spec, as "module:function".

    Raises:
        CompileError: the kernel does not compile, or the compiler's report is incomplete.
        ToolchainError: the DSL is not installed.
    """
    cute = _cutlass(spec.arch)
    function, fake_arguments = load_tracer(tracer)(spec)
    remarks = io.StringIO()
    with contextlib.redirect_stderr(remarks):
        # It is exported, never called: no need of an engine that could run it.
        options = OPTIONS + spec.arch + ("" if machine == host.here() else f" --host-target linux-{machine.machine}")
        compiled = cute.compile(function, *fake_arguments, options=options, no_jit_engine=True)
    object_file = Path(directory) / f"{spec.name}.o"
    _export(compiled, object_file, spec.name, machine)
    kernels = read_resources(compiled.kernel_info, remarks.getvalue(), str(compiled.ir_module))
    return KernelArtifact(spec.name, object_file, kernels)


def _place(error: Exception) -> str:
    """Return "file:line" of the innermost frame outside the DSL, the place in our code where `error` arose."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}cutlass{os.sep}" not in frame.filename] or frames
    return f"{ours[-1].filename}:{ours[-1].lineno}"


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to one request: {"artifact": ...} or {"error": ...}. No exception leaves the process."""
    try:
        os.environ[plain.ENV] = ",".join(request["plain"])  # as it is now, not when this process began
        spec = specs.from_dict(request["spec"])
        made = compile_spec(spec, Path(request["directory"]), request["tracer"], host.named(request["machine"]))
        return {"artifact": made.to_dict()}
    except Exception as error:  # whatever the DSL raises belongs to this one spec
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error} ({_place(error)})"}


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer each JSON request (one line) with a JSON reply (one line), until the requests end."""
    for line in requests:
        replies.write(json.dumps(_answer(json.loads(line))) + "\n")
        replies.flush()


def main() -> None:
    # Replies need a channel that nothing else prints to: take standard output, give the rest standard error.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # TVM-FFI imports torch where it can: 2 s and 200 MB a process, for nothing that compiling needs.
    sys.modules["torch"] = None  # type: ignore[assignment]
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
