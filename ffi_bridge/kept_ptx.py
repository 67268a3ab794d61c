"""PTX and host function of a compilation, kept beside the object that the same compilation exported.

<spec.name>.ptx has the kernels. <spec.name>.mlir has the host function that launches them, with its arguments, the
grid, shared memory and each kernel's parameters, before this function is lowered to calls of the run-time library.

The DSL writes both while it compiles. It names the files by the traced function's type, cut short, so a second function
may overwrite the first one's files. The folder is therefore emptied before each function, and the kernels in the files
must be exactly the object's kernels. The object has the same bytes whether or not these texts are kept.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from .compiler import KernelArtifact
from .errors import CompileError

SUFFIXES = (".ptx", ".mlir")
_ENTRY = re.compile(r"^\s*(?:\.visible\s+)?\.entry\s+([\w$%]+)", re.MULTILINE)
_LAUNCH = re.compile(r"\bcuda\.launch_ex @\w+::@(\w+)")
_ALIAS = re.compile(r"^!.*\n", re.MULTILINE)
_HOST = "\n  func.func @"


def entries(text: str) -> list[str]:
    """Return the names of the kernels in a PTX text, sorted."""
    return sorted(_ENTRY.findall(text))


def launched(text: str) -> list[str]:
    """Return the names of the kernels that a host function, given as MLIR text, launches, sorted."""
    return sorted(set(_LAUNCH.findall(text)))


def _host_function(module: str) -> str:
    """Return the host part of an MLIR module: its type aliases and the host function."""
    return "".join(_ALIAS.findall(module)) + module[module.rfind(_HOST) :]


class Dump:
    """A private folder into which one compile process writes its PTX and MLIR.

    Attributes:
        environment: environment variables of the compile process; the DSL reads them once, when it is imported.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="texts-", dir=directory))
        self.environment = {"CUTE_DSL_KEEP": "ir,ptx", "CUTE_DSL_DUMP_DIR": str(self._folder)}

    def clear(self) -> None:
        """Remove the files of functions compiled earlier, including functions that failed."""
        for file in self._folder.iterdir():
            file.unlink()

    def take(self, artifact: KernelArtifact) -> None:
        """Write the texts (PTX and MLIR) of an artifact beside its object.

        Raises:
            CompileError: there is not exactly one file of each kind, or a file has other kernels than the object.
        """
        ptx, module = (self._only(artifact.name, suffix) for suffix in SUFFIXES)
        host = _host_function(module)
        wanted = sorted(kernel.name for kernel in artifact.kernels)
        for what, found in (("PTX has", entries(ptx)), ("host function launches", launched(host))):
            if found != wanted:
                raise CompileError(f"{artifact.name}: its {what} the kernels {found}; expected its object's {wanted}")
        for suffix, text in zip(SUFFIXES, (ptx, host), strict=True):
            artifact.object_file.with_suffix(suffix).write_text(text)

    def _only(self, name: str, suffix: str) -> str:
        """Return the text of the folder's only file with a suffix.

        `name`: the spec's name, for the error message. Raises CompileError unless there is exactly one such file.
        """
        files = [file for file in self._folder.iterdir() if file.suffix == suffix]
        if len(files) != 1:
            raise CompileError(f"{name}: the compiler left {len(files)} dumps as *{suffix}; expected 1")
        return files[0].read_text()

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
