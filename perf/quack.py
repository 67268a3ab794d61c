"""QuACK as a contestant: its kernels on our buffers, and the choice among its configurations.

Names, argument order and layouts are those of quack-kernels 0.6.5. Its own tuner times each configuration of a shape
for a second or more, compiles in between, and keeps the winner for every routing of that shape. Ours takes the same
configurations, a few calls of each in turns, which saves minutes, and keeps the winner likewise ("quack tuned"), or
tunes for every routing anew ("quack retuned"), as nobody can whose routing changes from call to call.
"""

from __future__ import annotations

import collections
import importlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .cases import TINY
from .contest import or_left_out, relative_error, within
from .mlp import FORWARD_ERROR, INTERLEAVED, expected, make_buffers
from .stamp import quack_version
from .timing import measure_device

TUNED_MODES = ("tuned", "retuned")
COMPILE_S = 60.0  # at most this long for the configurations of one kernel; what is not ready by then does not compete
POLL_S = 0.02
TUNING_ROUNDS = 3
ENQUEUE_US = 200.0  # its backward calls allocate, reset a counter and reduce: five launches from Python

Config = Any  # quack.gemm_config.GemmConfig; None is the library's default
Tuning = dict[str, Any]
"""A choice: the winner, how many configurations were timed, and the seconds that this took with compiling."""
Run = Callable[[Config, int], object]  # a configuration, and the number of the call


def _ready(run: Run, configs: Sequence[Config], cache: Any, clock: Callable[[], float]) -> list[int]:
    """Return the indices of the configurations that run. All are compiled in parallel, in QuACK's worker processes."""
    failure: Exception | str = f"nothing compiled within {COMPILE_S:.0f} s"
    deadline = clock() + COMPILE_S
    waiting, ready = collections.deque(range(len(configs))), []
    with cache.pool_scope():
        while waiting and clock() < deadline:
            number = waiting.popleft()
            try:
                run(configs[number], 0)
                ready.append(number)
            except cache.CompilePending:  # no Exception, so it comes first
                waiting.append(number)
                time.sleep(POLL_S)
            except Exception as error:  # a configuration that does not fit the shape is no candidate
                failure = error
    if not ready:
        raise RuntimeError(f"none of QuACK's {len(configs)} configurations runs here: {failure}")
    return sorted(ready)


def fastest(
    run: Run, configs: Sequence[Config], cache: Any, clock: Callable[[], float] = time.monotonic
) -> tuple[Config, Tuning]:
    """Return the fastest configuration, and the record of the choice. Raises RuntimeError if none runs."""
    started = clock()
    ready = _ready(run, configs, cache, clock)
    calls = {str(number): partial(run, configs[number]) for number in ready}
    times = measure_device(calls, 0.0, ENQUEUE_US, TUNING_ROUNDS)
    best = configs[min(ready, key=lambda number: times[str(number)]["median_us"])]
    return best, {"config": str(best), "timed": len(ready), "seconds": round(clock() - started, 2)}


class Quack:
    """QuACK as a contestant of the forward's and the backward's kernels, on `mlp.Buffers` and `mlp.Training`.

    mode: "tuned": the configuration that was fastest on the first tensors of a shape. "retuned": the configuration that
    is fastest for each new routing. "default": QuACK's own choice.
    """

    def __init__(self, mode: str) -> None:
        os.environ.setdefault("QUACK_COMPILE_WORKERS", str(min(os.cpu_count() or 8, 16)))
        self.api: Any = importlib.import_module("quack.gemm_interface")
        self.mode = mode
        self.name = f"quack {mode}"
        self.kept: dict[tuple[Any, ...], tuple[Config, Tuning]] = {}
        self.spaces = self._spaces() if mode in TUNED_MODES else {}

    @staticmethod
    def _spaces() -> dict[str, list[Config]]:
        """Return QuACK's own configurations of each kernel. Call once: QuACK compares configurations by identity."""
        known: Any = importlib.import_module("quack.gemm_config")
        major = torch.cuda.get_device_capability()[0]
        gated = [c for c in known.get_all_configs(epilogue="gated") if c.device_capacity == major]
        plain = [c for c in known.get_all_configs() if c.device_capacity == major]
        rows = [c for c in plain if known.config_supports(c, varlen_m=True)]
        return {"fc1": gated, "fc2": rows, "dglu": gated, "dgrad": rows, "dw1": plain, "dw2": plain}

    def _choice(self, kernel: str, sets: Sequence[Any]) -> tuple[Config, Tuning | None]:
        """Return (a kernel's configuration for these tensors, record of the choice); (None, None) without tuning."""
        if self.mode not in TUNED_MODES:
            return None, None
        b = sets[0]
        key = (kernel, *b.x.shape, *b.w1.shape, *(b.sizes if self.mode == "retuned" else ()))
        if key not in self.kept:

            def run(config: Config, number: int) -> object:
                return self._run(kernel, sets[number % len(sets)], config)

            self.kept[key] = fastest(run, self.spaces[kernel], importlib.import_module("quack.cache"))
        return self.kept[key]

    def tunings(self, op: str, sets: Sequence[Any]) -> dict[str, Any]:
        """Return the records of the choices made for an operation, by kernel; empty if nothing was tuned."""
        kernels = ("fc1", "fc2") if op == "mlp" else (op,)
        chosen = {kernel: self._choice(kernel, sets)[1] for kernel in kernels}
        return {kernel: tuning for kernel, tuning in chosen.items() if tuning}

    def prepared(self, op: str, sets: Sequence[Any]) -> Callable[[Any], Any]:
        """Tune the kernels of an operation; return the operation as a function of one set of tensors."""
        if op != "mlp":
            config, _ = self._choice(op, sets)
            return lambda b: self._run(op, b, config)
        (first, _), (second, _) = self._choice("fc1", sets), self._choice("fc2", sets)
        return lambda b: self._rows(self._run("fc1", b, first), b.w2.mT, b, b.y, second)

    def _run(self, kernel: str, b: Any, config: Config) -> Any:
        """Call a kernel; return its result. QuACK's gated layout is interleaved; weights are [E, contracted, free]."""
        if kernel == "fc1":
            self.api.gemm_gated(
                b.x, b.w1.mT, activation="swiglu", postact_out=b.act, store_preact=False, cu_seqlens_m=b.starts,
                tuned=False, config=config,
            )  # fmt: skip
            return b.act
        if kernel == "fc2":
            return self._rows(b.mid, b.w2.mT, b, b.y, config)
        if kernel == "dglu":
            dpreact, act = torch.empty_like(b.preact), torch.empty_like(b.mid)
            _, _, d_scale = self.api.gemm_dgated(
                b.dy, b.w2, b.preact, activation="swiglu", dx_out=dpreact, postact_out=act, colvec_scale=b.row_scale,
                colvec_reduce=True, cu_seqlens_m=b.starts, tuned=False, config=config,
            )  # fmt: skip
            return dpreact, act, d_scale
        if kernel == "dgrad":
            return self._rows(b.dpreact, b.w1, b, torch.empty_like(b.x), config)
        dy, x = b.factors(kernel)
        dw = x.new_empty(len(b.offs), dy.shape[1], x.shape[1])
        self.api.gemm_tuned.fn(dy.mT, x, dw, cu_seqlens_k=b.starts, config=config)
        return dw

    def _rows(self, x: Tensor, w: Tensor, b: Any, y: Tensor, config: Config) -> Tensor:
        """Compute y [T,N] = x w_e for the rows of each expert e; w is [E,K,N]."""
        self.api.gemm_tuned.fn(x, w, y, cu_seqlens_m=b.starts, config=config)
        return y


def find_quack(mode: str) -> Quack | None:
    """Return QuACK in a mode of `options.QUACK_MODES`; None for "off", or if it is absent, or wrong on a tiny case."""
    if mode != "off" and quack_version() is not None:
        with or_left_out("QuACK"):
            (b, *_) = sets = make_buffers(TINY)
            y = Quack("default").prepared("mlp", sets)(b)
            within(relative_error(y, expected(b, "mlp", INTERLEAVED)), FORWARD_ERROR)
            return Quack(mode)
    return None
