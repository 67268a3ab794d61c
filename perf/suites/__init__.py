"""The suites by name. Each is a function `run_NAME` from options to the records that its result file holds."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from ..options import Options
from ..results import Record

SUITES = {
    "forward": "FC1, FC2 and the MLP at hundreds of rows an expert",
    "decode": "the same at a few rows an expert",
    "rows": "the same at 1 to 4096 rows an expert",
    "skew": "the same from even to one-sided routing",
    "backward": "the backward's kernels",
    "train": "a layer's forward and backward: time, memory",
    "layer": "the whole layer from tokens to tokens: time, memory, where it goes, and its parts",
    "power": "FC1 and the backward's kernels, each contestant alone: time, clock and power",
    "quantize": "quantising to MXFP8",
    "fp8": "the MLP in MXFP8, by every recipe",
    "frozen": "gradients of rows through frozen quantised weights",
    "lora": "adapters of frozen experts, forward and backward: time, memory",
    "serving": "whole experts as serving engines call them, cold, in CUDA graphs, beside engines' own",
    "portable": "the MLP on kernels without wgmma and TMA, beside Hopper's own, in CUDA graphs",
    "mhc": "the hyper-connections' operators",
    "transformers": "a block of transformers, and a decoding step, by each implementation of experts",
    "distributed": "experts across the GPUs of this host: both ends, and layers by either transport",
    "host": "host time of a call",
    "compare": "named kernels against each other",
    "tiles": "every tile at 1 to 4096 rows an expert, for tables of choices",
}
MODULES = {
    **dict.fromkeys(("forward", "decode", "rows", "skew", "backward", "train", "power", "fp8"), "mlp"),
    "lora": "frozen",
}
"""Modules of the suites whose module is not named after the suite."""


def function_of(name: str) -> Callable[[Options], list[Record]]:
    """Return a suite's function. Importing it imports torch and glulam."""
    module = importlib.import_module(f".{MODULES.get(name, name)}", __package__)
    run: Callable[[Options], list[Record]] = getattr(module, f"run_{name}")
    return run
