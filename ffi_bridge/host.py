"""The kinds of CPU for which host code (which launches the kernels) is compiled.

Each kind of machine (x86_64, aarch64) has one baseline, the oldest CPU that runs the code. The baseline does not depend
on the machine that compiles.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import re
from typing import NamedTuple

from .errors import ToolchainError


class Host(NamedTuple):
    """A kind of CPU that runs the host code of bundles.

    Attributes:
        machine: the kind of machine, as `platform.machine()` names it.
        baseline: the oldest CPU that runs the code, as C compilers and LLVM name it; manifests record it.
        flags: the CPU flags that the baseline needs, as Linux names them in /proc/cpuinfo.
        listed_as: the beginning of the line in /proc/cpuinfo that lists a CPU's flags.
        above: patterns of instructions that the baseline lacks, for the output of `objdump --disassemble --wide`, GNU's
            or LLVM's.
    """

    machine: str
    baseline: str
    flags: tuple[str, ...]
    listed_as: str
    above: tuple[re.Pattern[bytes], ...]

    @property
    def triple(self) -> str:
        """The target triple for a compiler."""
        return f"{self.machine}-unknown-linux-gnu"

    @property
    def compiler(self) -> str:
        """The C cross compiler with which other kinds of machines compile for this one, unless $CC is set."""
        return f"{self.machine}-linux-gnu-gcc"


# Intel's CPUs have x86-64-v2 since 2008, AMD's since 2011. Newer instructions save at most 15 ns of a launch's 4 us.
# Above the baseline are all instructions with a VEX, EVEX or REX2 prefix (AVX, AVX-512, FMA, BMI, APX, ...), and those
# with older encodings that a compiler chooses by itself. Not tzcnt: older CPUs run it as bsf, which compilers rely on.
_X86_64 = Host(
    "x86_64",
    "x86-64-v2",
    ("cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"),
    "flags",
    (
        re.compile(rb":\s+(?:(?:26|2e|36|3e|64|65|67) )*(?:62|c4|c5|d5) [^\n]*"),
        re.compile(rb"\t(?:lzcnt|movbe|adcx|adox|movnts[sd]|aes|pclmul|sha1|sha256|gf2p8|prefetchw)[^\n]*"),
    ),
)
# Any 64-bit Arm CPU that runs Linux, including Grace. Above the baseline are atomics in one instruction (LSE), signed
# pointers, SVE's registers, and instructions that are optional in armv8-a.
_AARCH64 = Host(
    "aarch64",
    "armv8-a",
    ("fp", "asimd"),
    "Features",
    (
        re.compile(rb"\t(?:casp?|swp|ld(?:add|clr|eor|set|[su]max|[su]min)|st(?:add|clr|eor|set))[abhl]*\t[^\n]*"),
        re.compile(
            rb"\t(?:ldapr|crc32|aes|sha\d|sm[34]|[su]s?dot|bf(?:dot|mmla|cvt)|reta|bl?ra[ab]|aut[id])\w*\b[^\n]*"
        ),
        re.compile(rb"\t[a-z0-9]+\t[^\n]*\b[zp]\d+(?:\.[bhsdq]|/[mz])[^\n]*"),
    ),
)
HOSTS = {host.machine: host for host in (_X86_64, _AARCH64)}
"""All `Host`s by their `machine`, the name that `platform.machine()` returns there."""
_CPUINFO = "/proc/cpuinfo"


def here() -> Host:
    """Return the `Host` for this kind of machine; x86-64's if there is none.

    This CPU may be older than the baseline; `unfit` checks that.
    """
    return HOSTS.get(platform.machine(), _X86_64)


def named(machine: str) -> Host:
    """Return the `Host` for a kind of machine, a key of HOSTS such as "aarch64".

    Raises:
        ToolchainError: no host code is compiled for machines of this kind.
    """
    if machine not in HOSTS:
        raise ToolchainError(f"{machine!r} is no machine that host code is compiled for; give {' or '.join(HOSTS)}")
    return HOSTS[machine]


def of_baseline(baseline: str) -> Host | None:
    """Return the `Host` with a baseline, for example "x86-64-v2"; None if this version of Glulam has no such `Host`."""
    return next((host for host in HOSTS.values() if host.baseline == baseline), None)


@functools.cache
def unfit() -> str:
    """Return the reason why this machine cannot run code for its baseline; empty if it can.

    The reason completes the sentence "... needs an x86-64-v2 CPU, but", for example "this machine's lacks sse4_2". Also
    empty: Linux does not list this CPU's flags.
    """
    if platform.machine() not in HOSTS:
        return f"this machine is {platform.machine()}"
    flags = _cpu_flags()
    lacking = [flag for flag in here().flags if flags and flag not in flags]
    return f"this machine's lacks {', '.join(lacking)}" if lacking else ""


def _cpu_flags() -> list[str]:
    """Return the first processor's flags as Linux lists them; empty if there is no such list."""
    with contextlib.suppress(OSError), open(_CPUINFO, encoding="ascii", errors="replace") as lines:
        for line in lines:  # not to the end: the kernel gathers each processor's part when it is read
            if line.startswith(here().listed_as):
                return line.partition(":")[2].split()
    return []
