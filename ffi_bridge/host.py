"""The CPU that compiled host code is for: a stated baseline, whichever machine compiles."""

from __future__ import annotations

import contextlib
import functools
import platform
import re

BASELINE = "x86-64-v2"
"""Intel's CPUs have it since 2008, AMD's since 2011. What is newer saves a launch, of 4 us, no more than 15 ns."""

# In what `objdump --disassemble --wide` prints, GNU's or LLVM's. Above the baseline is whatever has a VEX, EVEX or REX2
# prefix (AVX, AVX-512, FMA, BMI, APX, ...), and of older encodings what a compiler chooses by itself. Not tzcnt: a CPU
# without it runs bsf instead, which compilers count on.
ABOVE_BASELINE = (
    re.compile(rb":\s+(?:(?:26|2e|36|3e|64|65|67) )*(?:62|c4|c5|d5) [^\n]*"),
    re.compile(rb"\t(?:lzcnt|movbe|adcx|adox|movnts[sd]|aes|pclmul|sha1|sha256|gf2p8|prefetchw)[^\n]*"),
)

_FLAGS = ("cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3")  # the baseline's, as Linux names them
_CPUINFO = "/proc/cpuinfo"


@functools.cache
def unfit() -> str:
    """Why this machine cannot run BASELINE's code, in words that follow "but"; empty where it can, or does not say."""
    if platform.machine() != "x86_64":
        return f"this machine is {platform.machine()}"
    flags = _cpu_flags()
    lacking = [flag for flag in _FLAGS if flags and flag not in flags]
    return f"this machine's lacks {', '.join(lacking)}" if lacking else ""


def _cpu_flags() -> list[str]:
    """The first processor's flags as Linux lists them; empty where there is no such list."""
    with contextlib.suppress(OSError), open(_CPUINFO, encoding="ascii", errors="replace") as lines:
        for line in lines:  # not to the end: the kernel gathers each processor's part when it is read
            if line.startswith("flags"):
                return line.partition(":")[2].split()
    return []
