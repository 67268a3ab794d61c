"""The suites by name. Each is a function `run_NAME` from options to the records that its result file holds."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

from ..options import Options
from ..results import Record

COMPARE, TILES = "compare", "tiles"


class Suite(NamedTuple):
    """Description of a suite on the command line. module: the module of its function; empty: the one of its name."""

    help: str
    has_ops: bool = False
    has_quack: bool = False
    module: str = ""


SUITES = {
    "forward": Suite("FC1, FC2 and the MLP at hundreds of rows an expert", True, True),
    "decode": Suite("the same at a few rows an expert", True, True, "forward"),
    "rows": Suite("the same at 1 to 4096 rows an expert", True, True, "forward"),
    "skew": Suite("the same from even to one-sided routing", True, True, "forward"),
    "backward": Suite("the backward's kernels", True, True),
    "train": Suite("a layer's forward and backward: time, memory, host"),
    "layer": Suite("the whole layer from tokens to tokens: time, memory, where it goes, and its parts", True),
    "power": Suite("FC1 and the backward's kernels, each contestant alone: time, clock and power", True, True),
    "quantize": Suite("quantising to MXFP8"),
    "fp8": Suite("the MLP in MXFP8, by every recipe", True),
    "frozen": Suite("gradients of rows through frozen quantised weights"),
    "lora": Suite("adapters of frozen experts, forward and backward: time, memory"),
    "serving": Suite("whole experts as serving engines call them, cold, in CUDA graphs, beside engines' own", True),
    "portable": Suite("the MLP on kernels without wgmma and TMA, beside Hopper's own, in CUDA graphs"),
    "mhc": Suite("the hyper-connections' operators"),
    "transformers": Suite("a block of transformers, and a decoding step, by each implementation of experts"),
    "distributed": Suite("experts across the GPUs of this host: both ends, and layers by either transport"),
    "host": Suite("host time of a call", has_quack=True),
    "graph": Suite("CUDA graphs"),
    COMPARE: Suite("named kernels against each other", True),
    TILES: Suite("every tile at 1 to 4096 rows an expert, for tables of choices", True),
}


def function_of(name: str) -> Callable[[Options], list[Record]]:
    """Return a suite's function. Importing it imports torch and glulam."""
    module = importlib.import_module(f".{SUITES[name].module or name}", __package__)
    run: Callable[[Options], list[Record]] = getattr(module, f"run_{name}")
    return run
