"""The CPU that compiled host code is for: a stated baseline, whichever machine compiles. Imports no compiler."""

from __future__ import annotations

import contextlib
import functools
import platform
import re
from typing import Any

BASELINE = "x86-64-v2"
"""Every x86-64 CPU since 2009 has it. A launch is scalar code: wider registers would only clear its buffers faster."""

# In what `objdump --disassemble --wide` prints, GNU's or LLVM's. Above the baseline is whatever has a VEX, EVEX or REX2
# prefix (AVX, AVX-512, FMA, BMI, APX, ...), and of older encodings what a compiler chooses by itself. Not tzcnt: a CPU
# without it runs bsf instead, which compilers count on.
ABOVE_BASELINE = (
    re.compile(rb":\s+(?:(?:26|2e|36|3e|64|65|67) )*(?:62|c4|c5|d5) [^\n]*"),
    re.compile(rb"\t(?:lzcnt|movbe|adcx|adox|movnts[sd]|aes|pclmul|sha1|sha256|gf2p8|prefetchw)[^\n]*"),
)

_FLAGS = ("cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3")  # the baseline's, as Linux names them
_CPUINFO = "/proc/cpuinfo"


def aim(module: Any) -> None:
    """Has every function of a traced MLIR module compiled for BASELINE rather than for the CPU of this machine.

    The DSL's exporter has no option for it; a function's own attributes go before those of LLVM's target machine.
    """
    from cutlass._mlir import ir

    with module.context:
        # The features are named, too: without them LLVM takes the machine's own.
        attributes = {
            "target_cpu": ir.StringAttr.get(BASELINE),
            "target_features": ir.Attribute.parse('#llvm.target_features<["+sse4.2"]>'),
        }
        for function in module.body.operations:
            if function.operation.name == "llvm.func":
                for name, value in attributes.items():
                    function.operation.attributes[name] = value


@functools.cache
def unfit() -> str:
    """Why this machine cannot run BASELINE's code, in words that follow "but"; empty where it can, or does not say."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"this machine is {platform.machine()}"
    lacking = [flag for flag in _FLAGS if (flags := _cpu_flags()) and flag not in flags]
    return f"this machine's lacks {', '.join(lacking)}" if lacking else ""


def _cpu_flags() -> list[str]:
    """The first processor's flags as Linux lists them; empty where there is no such list."""
    with contextlib.suppress(OSError), open(_CPUINFO, encoding="ascii", errors="replace") as lines:
        for line in lines:  # no further: every processor more takes the kernel 10 us
            if line.startswith("flags"):
                return line.partition(":")[2].split()
    return []
