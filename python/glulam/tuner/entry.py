"""`glulam.tune`: which questions its arguments ask, and where the answers go."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ffi_bridge.cache import cache_root

from .. import kernels, loadable, tuned
from ..activations import GATED
from ..dispatch import Problem
from ..errors import UnsupportedDevice
from ..tuned import Layer, Point, Section, Stamp
from .bench import Bench, GpuBench
from .candidates import OPS
from .pool import CompilePool, default_jobs
from .report import TuneReport
from .session import Makes, Options, Session

COMPILE_S = 1.7  # one kernel, with its process
SETUP_S = 3.0
UNFINISHED = "tuning"
WIDTHS = {
    "grouped_mm": ("in_features", "out_features"),
    "grouped_glu": ("in_features", "intermediate"),
    "grouped_mlp": ("in_features", "intermediate", "out_features"),
    "grouped_dglu": ("in_features", "intermediate"),
    "grouped_wgrad": ("in_features", "out_features"),
}
ALIGNMENT = 8


def tune(
    op: str,
    *,
    experts: int,
    in_features: int,
    intermediate: int = 0,
    out_features: int = 0,
    rows_per_expert: Sequence[int] = Options.rows_per_expert,
    dtype: Any = "bfloat16",
    activation: str = "swiglu",
    glu_layout: str = "concat",
    save_preact: bool = False,
    transpose_w: bool = False,
    out_dtype: Any = None,
    training: bool = False,
    budget_s: float = Options.budget_s,
    candidates: int = Options.count,
    jobs: int | None = None,
    device: torch.device | str | int | None = None,
    out: str | Path | None = None,
    progress: bool = False,
) -> TuneReport:
    """Measure which kernels serve a layer best on the present GPU, and let the dispatcher use them from then on.

    Candidates are all valid tiles, clusters and schedules, pruned by the cost model; they are compiled in helper
    processes while the GPU measures. At each number of rows all compete with the shipped kernels under uniform and
    under skewed routing; another kernel is chosen only where it is faster by more than noise in a run against the
    shipped one alone. The table that results is read by this process at once, and by later ones. Nothing else tunes.

    An interrupted run keeps what it has measured; the same call goes on from there.

    Args:
        op: "grouped_mm", "grouped_glu", "grouped_mlp", "grouped_dglu" or "grouped_wgrad".
        experts, in_features, intermediate, out_features: of the layer: x has in_features columns, the activation
            `intermediate`, the result out_features (of a grouped_mlp in_features by default). Of a grouped_dglu,
            in_features are dy's columns; a grouped_wgrad makes [experts, out_features, in_features].
        rows_per_expert: at which to measure; in between the dispatcher interpolates.
        dtype: bfloat16 or float16. activation, glu_layout, save_preact, transpose_w, out_dtype: as the operator's.
        training: of a grouped_mlp: its training step (forward with preactivation, data gradients, weight gradients)
            instead of its inference.
        budget_s: seconds of sampling for each problem. candidates: beside the shipped ones, at each number of rows.
        jobs: compile processes; by default one a CPU but two.
        device: a CUDA device; by default the current one.
        out: the table to add to; by default one in the first place where the dispatcher looks (`glulam.tuned`).
        progress: show a progress bar on standard error.

    Raises:
        ValueError: an argument that does not fit, or nothing to measure.
        UnsupportedDevice: there is no GPU that kernels run on.
        BundleError, CompileError, ToolchainError (RuntimeErrors): there is nothing to compare with.
    """
    shape = Problem(
        op=op,
        dtype=_dtype_name(dtype),
        rows=0,
        experts=experts,
        in_features=in_features,
        intermediate=intermediate,
        out_features=out_features or (in_features if op == "grouped_mlp" else 0),
        activation=activation if op not in ("grouped_mm", "grouped_wgrad") else "none",
        glu_layout=glu_layout if activation in GATED and op not in ("grouped_mm", "grouped_wgrad") else "concat",
        save_preact=save_preact,
        transpose_w=transpose_w,
        out_dtype=_dtype_name(out_dtype or dtype) if op == "grouped_wgrad" else "",
    )
    options = Options(tuple(rows_per_expert), budget_s=budget_s, count=candidates)
    problems = _problems(shape, training)
    for problem in problems:
        _check(problem)
    index = _gpu_index(device)
    bench = GpuBench(index)
    with torch.cuda.device(index), CompilePool(jobs or default_jobs()) as pool:
        return run(problems, bench, pool, options, Path(out) if out else default_table(bench.gpu), progress)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _problems(shape: Problem, training: bool) -> list[Problem]:
    """What is tuned: the shape itself, or the three functions of an MLP's training step as its plan asks for them."""
    if not training:
        return [shape]
    if shape.op != "grouped_mlp":
        raise ValueError(
            f"tune: training is of a grouped_mlp, not of {shape.op}; tune the operators of a step one by one"
        )
    return [
        dataclasses.replace(shape, op="grouped_glu", save_preact=True),
        dataclasses.replace(shape, op="grouped_dglu", in_features=shape.out_features),
        dataclasses.replace(shape, op="grouped_wgrad", out_dtype=shape.dtype),
    ]


def _check(problem: Problem) -> None:
    """Raises ValueError where the widths are not those of the operator, or no kernel takes them."""
    if problem.op not in OPS:
        raise ValueError(f"tune: op is {problem.op!r}; choose one of {', '.join(OPS)}")
    for name in (*WIDTHS[problem.op], "experts"):
        if getattr(problem, name) < 1:
            raise ValueError(f"tune: {problem.op} needs {name}, got {getattr(problem, name)}")
    for name in ("in_features", "intermediate", "out_features"):
        if getattr(problem, name) % ALIGNMENT:
            raise ValueError(f"tune: {name} is {getattr(problem, name)}; kernels need a multiple of {ALIGNMENT}")


def _gpu_index(device: torch.device | str | int | None) -> int:
    if not torch.cuda.is_available():
        raise UnsupportedDevice("tune: torch sees no CUDA GPU, and there is nothing to measure on a CPU")
    where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    if where.type != "cuda":
        raise ValueError(f"tune: device is {where}; give a CUDA device")
    return torch.cuda.current_device() if where.index is None else where.index


def default_table(gpu: str) -> Path:
    """Where results go: a file named by the GPU in the first place where the dispatcher looks. Raises ValueError."""
    places = tuned.locations()
    if not places:
        raise ValueError(f"tune: ${tuned.ENV_TUNED} is empty, so no table is read; unset it, or give out")
    first = places[0]
    if first.suffix == ".json":
        return first
    return first / f"{'-'.join(gpu.lower().split())}.json"


def run(
    problems: Sequence[Problem], bench: Bench, makes: Makes, options: Options, path: Path, progress: bool = False
) -> TuneReport:
    """Tunes problems on a bench and adds the results to the table at `path`, the finished ones also if interrupted."""
    start = time.perf_counter()
    stamp = tuned.stamp_of(bench.gpu, bench.driver)
    sessions = [Session(problem, bench, makes, options) for problem in problems]
    layers: list[Layer] = []
    notes: list[str] = []
    with torch.no_grad(), _progress(sessions, progress) as advance:
        for session in sessions:
            layer = _tuned(session, Unfinished(session, options, stamp), stamp, path, advance)
            layers.append(layer)
            notes += session.notes
    kernels.forget_choices()
    return TuneReport(tuple(layers), stamp, path, time.perf_counter() - start, tuple(notes))


def _tuned(session: Session, unfinished: Unfinished, stamp: Stamp, path: Path, advance: Callable[[], None]) -> Layer:
    """One session's result, in the table as well."""
    points = unfinished.points()
    for _ in range(len(points) * (len(session.routings) + 1)):
        advance()
    try:
        for point in session.run(points, advance):
            points[point.rows_per_expert] = point
            unfinished.keep(session.layer(list(points.values())))
    finally:
        layer = session.layer([points[rows] for rows in sorted(points)])
        if points:
            tuned.write(path, [Section(stamp, {tuned.key_of(layer.problem): layer})])
    unfinished.drop()
    return layer


class Unfinished:
    """The points of a run that has not ended, in a file of the kernels' cache that the same question finds again."""

    def __init__(self, session: Session, options: Options, stamp: Stamp) -> None:
        self._stamp = stamp
        asked = [tuned.question(session.problems[0]), dataclasses.asdict(options), stamp.holds_for]
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        self._path = cache_root() / UNFINISHED / f"{digest[:16]}.json"

    def points(self) -> dict[float, Point]:
        """What an interrupted run measured, by rows an expert."""
        with contextlib.suppress(ValueError):
            if self._path.exists():
                (section,) = tuned.read(self._path)
                (layer,) = section.layers.values()
                return {point.rows_per_expert: point for point in layer.points}
        return {}

    def keep(self, layer: Layer) -> None:
        section = Section(self._stamp, {tuned.key_of(layer.problem): layer})
        try:
            tuned.write(self._path, [section])
        except (OSError, NotImplementedError) as error:
            warnings.warn(f"an interrupted run could not go on: {error}", RuntimeWarning, stacklevel=4)

    def drop(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def estimate_s(sessions: Sequence[Session], jobs: int) -> float:
    """About how long sessions take, from their budgets and what is to be compiled."""
    specs = {spec for session in sessions for problem in session.problems for spec in session.candidates(problem)}
    missing = sum(not loadable.is_loadable(spec) for spec in specs)
    sampling = sum(session.budget_s + SETUP_S for session in sessions)
    return sampling + math.ceil(missing / jobs) * COMPILE_S


@contextlib.contextmanager
def _progress(sessions: Sequence[Session], shown: bool) -> Iterator[Callable[[], None]]:
    """A callable that advances one progress bar on standard error, under a line that says what is coming."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    contests = sum(session.contests for session in sessions)
    about = estimate_s(sessions, default_jobs())
    console.print(
        f"{contests} contests; about {about:.0f} s; interrupt at will, the same command goes on", highlight=False
    )
    columns = (TextColumn("tuning"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("tuning", total=contests)
        yield lambda: bar.advance(task)
