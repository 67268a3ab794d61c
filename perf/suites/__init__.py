"""The suites by name. Each is one function from options to the records that its result file holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..options import Options
from .backward import run_backward
from .compare import run_compare
from .distributed import run_distributed
from .forward import run_decode, run_forward, run_rows, run_skew
from .fp8 import run_fp8
from .frozen import run_frozen
from .graph import run_graph
from .host import run_host
from .layer import run_layer
from .lora import run_lora
from .mhc import run_mhc
from .portable import run_portable
from .power import run_power
from .quantize import run_quantize
from .serving import run_serving
from .tiles import run_tiles
from .train import run_train
from .transformers import run_transformers

SUITES: dict[str, Callable[[Options], list[dict[str, Any]]]] = {
    "forward": run_forward,
    "decode": run_decode,
    "rows": run_rows,
    "skew": run_skew,
    "backward": run_backward,
    "train": run_train,
    "layer": run_layer,
    "power": run_power,
    "host": run_host,
    "graph": run_graph,
    "quantize": run_quantize,
    "fp8": run_fp8,
    "frozen": run_frozen,
    "lora": run_lora,
    "serving": run_serving,
    "portable": run_portable,
    "mhc": run_mhc,
    "transformers": run_transformers,
    "distributed": run_distributed,
    "compare": run_compare,
    "tiles": run_tiles,
}
