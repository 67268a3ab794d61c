"""The suites by name. Each is one function from options to the records that its result file holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..options import Options
from .forward import run_forward
from .graph import run_graph
from .host import run_host
from .mhc import run_mhc
from .train import run_train

SUITES: dict[str, Callable[[Options], list[dict[str, Any]]]] = {
    "forward": run_forward,
    "host": run_host,
    "graph": run_graph,
    "train": run_train,
    "mhc": run_mhc,
}
