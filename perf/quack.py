"""QuACK as a contestant: its kernels on our buffers, and the choice among its configurations.

Names, argument order and layouts are those of quack-kernels 0.6.5. Its own tuner times each configuration of a shape
for a second or more, compiles in between, and keeps the winner for every routing of that shape. Ours takes the same
configurations, a few calls of each in turns, which saves minutes, and keeps the winner likewise ("quack tuned"), or
tunes for every routing anew ("quack retuned"), as nobody can whose routing changes from call to call.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .timing import measure_device

if TYPE_CHECKING:
    from .problem import Buffers
    from .training import TrainingData

TUNED_MODES = ("tuned", "retuned")
COMPILE_S = 60.0  # at most this long for the configurations of one kernel; what is not ready by then does not compete
POLL_S = 0.02
TUNING_ROUNDS = 3
ENQUEUE_US = 200.0  # its backward calls allocate, reset a counter and reduce: five launches from Python

Config = Any  # quack.gemm_config.GemmConfig; None is the library's default
Run = Callable[[Config, int], object]  # a configuration, and the number of the call


def quack_version() -> str | None:
    """The installed QuACK's version; None where there is none."""
    if importlib.util.find_spec("quack") is None:
        return None
    try:
        return metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        return str(importlib.import_module("quack").__version__)


class Kernels:
    """QuACK's grouped kernels. `starts` int32 [E+1]: 0, then the groups' ends.

    Its gated layout is interleaved; weights are given as [E, contracted, free], views of whatever layout.
    """

    def __init__(self) -> None:
        self.api: Any = importlib.import_module("quack.gemm_interface")

    def gated(self, x: Tensor, w1: Tensor, starts: Tensor, act: Tensor, config: Config) -> None:
        """act [T,I] = swiglu(x w1_e^T); w1 [E,2I,H]."""
        self.api.gemm_gated(
            x,
            w1.mT,
            activation="swiglu",
            postact_out=act,
            store_preact=False,
            cu_seqlens_m=starts,
            tuned=False,
            config=config,
        )

    def dgated(
        self, dy: Tensor, w2: Tensor, preact: Tensor, scale: Tensor, starts: Tensor, config: Config
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dpreact [T,2I], act [T,I] and the gradient of scale [T]; w2 [E,H,I]."""
        dpreact, act = torch.empty_like(preact), preact.new_empty(preact.shape[0], w2.shape[2])
        _, _, d_scale = self.api.gemm_dgated(
            dy,
            w2,
            preact,
            activation="swiglu",
            dx_out=dpreact,
            postact_out=act,
            colvec_scale=scale,
            colvec_reduce=True,
            cu_seqlens_m=starts,
            tuned=False,
            config=config,
        )
        return dpreact, act, d_scale

    def rows(self, x: Tensor, w: Tensor, starts: Tensor, y: Tensor, config: Config) -> None:
        """y [T,N] = x w_e; w [E,K,N]."""
        self.api.gemm_tuned.fn(x, w, y, cu_seqlens_m=starts, config=config)

    def wgrad(self, dy: Tensor, x: Tensor, starts: Tensor, config: Config) -> Tensor:
        """dw [E,N,K]: dy_e^T x_e."""
        dw = x.new_empty(starts.numel() - 1, dy.shape[1], x.shape[1])
        self.api.gemm_tuned.fn(dy.mT, x, dw, cu_seqlens_k=starts, config=config)
        return dw


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What a choice was made from: configurations timed, those that failed or were not ready, and the winner."""

    config: str
    timed: int
    left_out: int
    seconds: float


def _ready(run: Run, configs: Sequence[Config], cache: Any, clock: Callable[[], float]) -> list[int]:
    """Which configurations run; all compile in QuACK's worker processes side by side. Raises RuntimeError where none
    does.
    """
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
    """The configuration with the least median time. Raises RuntimeError where none runs."""
    started = clock()
    ready = _ready(run, configs, cache, clock)
    calls = {str(number): partial(run, configs[number]) for number in ready}
    times = measure_device(calls, 0.0, ENQUEUE_US, TUNING_ROUNDS)
    best = configs[min(ready, key=lambda number: times[str(number)].median_us)]
    return best, Tuning(str(best), len(ready), len(configs) - len(ready), round(clock() - started, 2))


class Quack:
    """A contestant of the forward and of the backward. `mode`, of QUACK_MODES: after `prepare`, with the configuration
    that was fastest on the first tensors of that shape ("tuned") or on these tensors ("retuned"); else with QuACK's
    default.
    """

    glu_layout = "interleaved"

    def __init__(self, mode: str) -> None:
        os.environ.setdefault("QUACK_COMPILE_WORKERS", str(min(os.cpu_count() or 8, 16)))
        self.kernels = Kernels()
        self.mode = mode
        self.name = f"quack {mode}"
        self.configs: dict[str, Config] = {}
        self.kept: dict[tuple[Any, ...], tuple[Config, Tuning]] = {}
        self.spaces = self._spaces() if mode in TUNED_MODES else {}

    @staticmethod
    def _spaces() -> dict[str, list[Config]]:
        """QuACK's own candidates of each operation. Kept, since QuACK remembers a configuration by its identity."""
        known: Any = importlib.import_module("quack.gemm_config")
        major = torch.cuda.get_device_capability()[0]
        gated = [c for c in known.get_all_configs(epilogue="gated") if c.device_capacity == major]
        plain = [c for c in known.get_all_configs() if c.device_capacity == major]
        rows = [c for c in plain if known.config_supports(c, varlen_m=True)]
        return {"fc1": gated, "fc2": rows, "dglu": gated, "dgrad": rows, "dw1": plain, "dw2": plain}

    def prepare(self, op: str, shape: tuple[Any, ...], run: Run) -> Tuning | None:
        """Chooses the configuration of `op` for the tensors of a shape that `run` runs on."""
        if self.mode not in TUNED_MODES:
            return None
        if self.mode == "retuned" or (op, shape) not in self.kept:
            cache = importlib.import_module("quack.cache")
            self.kept[op, shape] = fastest(run, self.spaces[op], cache)
        self.configs[op], tuning = self.kept[op, shape]
        return tuning

    def prepare_forward(self, sets: list[Buffers], ops: Sequence[str]) -> dict[str, Any]:
        """Tunes what `ops` call; what was chosen, by operation."""
        needed = [op for op in ("fc1", "fc2") if op in ops or "mlp" in ops]
        shape = (*sets[0].x.shape, *sets[0].w1.shape)
        tunings = {op: self.prepare(op, shape, partial(self._in_rotation, sets, op)) for op in needed}
        return {op: dataclasses.asdict(tuning) for op, tuning in tunings.items() if tuning}

    def _in_rotation(self, sets: list[Buffers], op: str, config: Config, number: int) -> Tensor:
        b = sets[number % len(sets)]
        return self._fc1(b, config) if op == "fc1" else self._fc2(b, config)

    def _fc1(self, b: Buffers, config: Config) -> Tensor:
        self.kernels.gated(b.x, b.w1, b.starts, b.act, config)
        return b.act

    def _fc2(self, b: Buffers, config: Config) -> Tensor:
        self.kernels.rows(b.mid, b.w2.mT, b.starts, b.y, config)
        return b.y

    def fc1(self, b: Buffers) -> Tensor:
        return self._fc1(b, self.configs.get("fc1"))

    def fc2(self, b: Buffers) -> Tensor:
        return self._fc2(b, self.configs.get("fc2"))

    def mlp(self, b: Buffers) -> Tensor:
        self.kernels.rows(self.fc1(b), b.w2.mT, b.starts, b.y, self.configs.get("fc2"))
        return b.y

    def prepare_backward(self, d: TrainingData, op: str) -> dict[str, Any]:
        shape = (*d.x.shape, *d.w1.shape)
        tuning = self.prepare(op, shape, lambda config, number: self._backward(d, op, config))
        return {op: dataclasses.asdict(tuning)} if tuning else {}

    def _backward(self, d: TrainingData, op: str, config: Config) -> tuple[Tensor, ...]:
        if op == "dglu":
            return self.kernels.dgated(d.dy, d.w2, d.preact, d.row_scale, d.starts, config)
        if op == "dgrad":
            dx = torch.empty_like(d.x)
            self.kernels.rows(d.dpreact, d.w1, d.starts, dx, config)
            return (dx,)
        return (self.kernels.wgrad(*d.factors(op), d.starts, config),)

    @torch.no_grad()
    def backward(self, d: TrainingData, op: str) -> tuple[Tensor, ...]:
        """`op` of training, "dglu", "dgrad", "dw1" or "dw2"."""
        return self._backward(d, op, self.configs.get(op))
