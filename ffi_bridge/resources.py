"""Registers, spills and shared memory of the kernels of a compiled host function, read from the compiler's output.

The report of ptxas comes as remark text, wrapped and coloured for a terminal; the dynamic shared memory of each launch
is a constant in the lowered host code. A kernel that either source does not mention is an error, so that a missing
report never passes for a clean one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from .errors import CompileError

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_SECTION = re.compile(r"Compiling entry function '([^']+)' for '[^']+'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC_SMEM = re.compile(r"(\d+) bytes smem")
# (C7510) is a wgmma serialised by the compiler; its neighbours report fences and waits that ptxas injected.
_DIAGNOSTIC = re.compile(r"\((C75\d\d)\)(?:(?!\(C\d{4}\)|ptxas info).)*?in (?:the )?function '([^']+)'|\((C75\d\d)\)")

_CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)")
# Field 2 of cudaLaunchConfig_t {gridDim, blockDim, dynamicSmemBytes, stream, attrs, numAttrs}.
_SMEM_FIELD = re.compile(
    r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : .*struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
)
_STORE = re.compile(r"llvm\.store (%\w+), (%\w+) : i64")
# Shared memory that the host function computes from its arguments, and the number recorded in its place.
_COMPUTED = re.compile(r"(%\w+) = llvm\.(?:sext|zext|add|mul) ")
SIZED_AT_LAUNCH = 0
_KERNEL_SYMBOL = re.compile(r"(%\w+) = llvm\.mlir\.addressof @kernels_(\w+)")
_LOAD = re.compile(r"(%\w+) = llvm\.load (%\w+) : !llvm\.ptr -> !llvm\.ptr")
_LAUNCH = re.compile(r"llvm\.call @_cudaLaunchKernelEx\(%\w+, (%\w+),")


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """Resources of one device kernel.

    Attributes:
        name: the kernel's name.
        registers: registers of a thread.
        spill_stores, spill_loads, static_smem, dynamic_smem: bytes.
        diagnostics: C75xx codes of ptxas.
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    static_smem: int
    dynamic_smem: int
    diagnostics: tuple[str, ...] = ()

    @property
    def complaints(self) -> tuple[str, ...]:
        """'spills' if registers are spilled, and each C75xx code. A build refuses those not allowed for the spec."""
        spills = ("spills",) if self.spill_stores or self.spill_loads else ()
        return spills + self.diagnostics

    def describe(self, complaint: str) -> str:
        """Return a complaint as text; spills with their size."""
        if complaint == "spills":
            return f"spills ({self.spill_stores} bytes stored, {self.spill_loads} loaded)"
        return complaint

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KernelResources:
        return cls(**{**data, "diagnostics": tuple(data.get("diagnostics", ()))})


def _one_line(remarks: str) -> str:
    return " ".join(_ANSI.sub("", remarks).replace("ptxas         .", " ").split())


def _sections(text: str) -> dict[str, str]:
    """Split `text`, the report of ptxas, into its parts on the entry functions; return them by kernel name."""
    _, *pieces = _SECTION.split(text)
    return dict(zip(pieces[0::2], pieces[1::2], strict=True))


def _diagnostics(text: str, kernels: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the C75xx codes in `text`, the report of ptxas, by kernel; a code for none of `kernels` counts for all."""
    found: dict[str, set[str]] = {name: set() for name in kernels}
    for match in _DIAGNOSTIC.finditer(text):
        code, blamed = match.group(1) or match.group(3), match.group(2)
        for name in [blamed] if blamed in found else kernels:
            found[name].add(code)
    return {name: tuple(sorted(codes)) for name, codes in found.items()}


def dynamic_smem(host_ir: str) -> dict[str, int]:
    """Return bytes of dynamic shared memory by kernel, the maximum over its launches.

    host_ir: text of the lowered host module.
    """
    result: dict[str, int] = {}
    values: dict[str, int] = {}
    computed: set[str] = set()
    kernels: dict[str, str] = {}
    fields: set[str] = set()
    latest: int | None = None
    for line in host_ir.splitlines():
        if line.lstrip().startswith("llvm.func"):  # SSA names start anew
            values, computed, kernels, fields, latest = {}, set(), {}, set(), None
        elif m := _CONSTANT.search(line):
            values[m.group(1)] = int(m.group(2))
        elif m := _COMPUTED.search(line):
            computed.add(m.group(1))
        elif m := _SMEM_FIELD.search(line):
            fields.add(m.group(1))
        elif (m := _STORE.search(line)) and m.group(2) in fields:
            latest = values.get(m.group(1), SIZED_AT_LAUNCH if m.group(1) in computed else None)
        elif m := _KERNEL_SYMBOL.search(line):
            kernels[m.group(1)] = m.group(2)
        elif (m := _LOAD.search(line)) and m.group(2) in kernels:
            kernels[m.group(1)] = kernels[m.group(2)]
        elif (m := _LAUNCH.search(line)) and m.group(1) in kernels and latest is not None:
            name = kernels[m.group(1)]
            result[name] = max(latest, result.get(name, 0))
            latest = None  # each launch fills a configuration of its own, just before it
    return result


def read_resources(kernels: Iterable[str], remarks: str, host_ir: str) -> tuple[KernelResources, ...]:
    """Return the resources of each kernel of a host function, in the order of `kernels`.

    Args:
        kernels: names of the device kernels.
        remarks: the compiler's output under `remarks{ptx}`.
        host_ir: text of the lowered host module.

    Raises:
        CompileError: a kernel's registers, spills or shared memory are missing.
    """
    names = list(kernels)
    text = _one_line(remarks)
    sections, codes, smem = _sections(text), _diagnostics(text, names), dynamic_smem(host_ir)
    result = []
    for name in names:
        section = sections.get(name, "")
        registers, spills = _REGISTERS.search(section), _SPILLS.search(section)
        if registers is None or spills is None or name not in smem:
            what = "shared memory" if registers and spills else "registers and spills"
            raise CompileError(f"the compiler's report lacks the {what} of {name}; is it the pinned version?")
        static = _STATIC_SMEM.search(section)
        result.append(
            KernelResources(
                name=name,
                registers=int(registers.group(1)),
                spill_stores=int(spills.group(1)),
                spill_loads=int(spills.group(2)),
                static_smem=int(static.group(1)) if static else 0,
                dynamic_smem=smem[name],
                diagnostics=codes[name],
            )
        )
    return tuple(result)
