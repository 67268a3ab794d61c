"""The stamp of a result: machine, versions and command, so that it can be measured again; and the GPU's clock and power
while something runs, as nvidia-smi reads them.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import platform
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ffi_bridge import toolchain

ROOT = Path(__file__).resolve().parents[1]
UNKNOWN = "unknown"
SMI_FIELDS = {
    "driver": "driver_version", "sm_clock_mhz": "clocks.sm", "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem", "power_w": "power.draw", "temperature_c": "temperature.gpu",
}  # fmt: skip
PEERS = ("sonic-moe", "flashinfer-python", "transformers", "megatron-core", "humming-kernels", "vllm")
"""Packages whose versions a stamp names where they are installed."""
FOLLOWED = ("clocks.sm", "power.draw.instant", "clocks_event_reasons.sw_power_cap")
PERIOD_MS = 20


def _output_of(command: list[str]) -> str | None:
    """Return what a command printed; None if the command is missing or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()
    return None


def git_commit() -> str:
    """Return the checkout's commit, with "+changes" if the working tree differs; "unknown" outside a checkout."""
    commit = _output_of(["git", "rev-parse", "HEAD"])
    if not commit:
        return UNKNOWN
    return commit + ("+changes" if _output_of(["git", "status", "--porcelain"]) else "")


def quack_version() -> str | None:
    """Return the installed QuACK's version; None if it is not installed."""
    if importlib.util.find_spec("quack") is None:
        return None
    try:
        return metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        return str(importlib.import_module("quack").__version__)


def versions() -> dict[str, str]:
    """Return the versions of all that a time depends on; "unknown" for what is not installed as a distribution."""
    found, peers = {name: version or UNKNOWN for name, version in toolchain.versions().items()}, {}
    for name in PEERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            peers[name] = metadata.version(name)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        **found,
        "kernel sources": toolchain.sources_hash("cute_kernels")[:16],
        "quack": quack_version() or "absent",
        **peers,
    }


def smi_query(fields: Iterable[str]) -> list[str]:
    """Return the nvidia-smi command that prints these fields of the current device as one line, separated by commas."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", f"GPU-{uuid}"]


def _gpu() -> dict[str, Any]:
    """Return the GPU's name and number of SMs, and nvidia-smi's readings.

    Matrix products run meanwhile, since an idle GPU lowers its clocks.
    """
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(1000):  # about 1.4 s on an H200, longer than nvidia-smi takes
        a @ a
    line = _output_of(smi_query(SMI_FIELDS.values()))
    torch.cuda.synchronize()
    values = line.splitlines()[0].split(", ") if line else [UNKNOWN] * len(SMI_FIELDS)
    readings = dict(zip(SMI_FIELDS, values, strict=False))
    return {"gpu": properties.name, "sms": str(properties.multi_processor_count), **readings}


def make_stamp(command: str, commit: str | None = None, device: str = "cuda") -> dict[str, Any]:
    """Return the stamp: commit (None: git's answer), command, date (UTC), GPU, driver, clocks under load and versions.

    device: "cuda", or "cpu" for a measurement without a GPU.
    """
    return {
        "commit": commit or git_commit(),
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "host": platform.processor() or platform.machine(),
        **(_gpu() if device == "cuda" else {"gpu": "CPU"}),
        "versions": versions(),
    }


class Reading(NamedTuple):
    """A reading of nvidia-smi: SM clock, power, and 1 if the power limit lowers the clock (in a mean: the fraction)."""

    mhz: float
    watts: float
    capped: float


class Readings:
    """Readings taken every PERIOD_MS, each with the time (`time.monotonic`) at which it arrived."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, Reading]] = []

    def follow(self, lines: Iterator[str]) -> None:
        """Parse nvidia-smi's lines and keep a reading of each; a line in which a field is missing is passed over."""
        for line in lines:
            with contextlib.suppress(ValueError):
                mhz, watts, reason = (field.strip() for field in line.split(","))
                reading = Reading(float(mhz), float(watts), float(reason == "Active"))
                self.taken.append((time.monotonic(), reading))

    def mean(self, begin: float, end: float) -> Reading:
        """Return the mean of the readings between two times. Raises RuntimeError if there are none."""
        found = [reading for at, reading in self.taken if begin <= at <= end]
        if not found:
            raise RuntimeError(f"nvidia-smi gave none of {', '.join(FOLLOWED)}, which the power suite needs")
        return Reading(*(sum(values) / len(found) for values in zip(*found, strict=True)))


@contextmanager
def follow_gpu() -> Iterator[Readings]:
    """Yield `Readings` of the current device, to which nvidia-smi adds until the block ends."""
    readings = Readings()
    command = [*smi_query(FOLLOWED), f"--loop-ms={PERIOD_MS}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as smi:
        assert smi.stdout is not None
        thread = threading.Thread(target=readings.follow, args=(smi.stdout,), daemon=True)
        thread.start()
        try:
            yield readings
        finally:
            smi.terminate()
            thread.join()
