"""`glulam.tune`: which questions its arguments ask, and where the answers go."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from cute_kernels.architectures import ARCHS
from cute_kernels.specs import GATED

from .. import recipes
from ..calls.checks import check_flag
from ..choose import kernels, known, loadable, table
from ..choose.problem import Problem, dtype_name, training_parts
from ..choose.shipped import families_of
from ..choose.table import Layer, Point, Stamp, Unfinished
from ..host import device as gpus
from ..names import ActivationName, Dtype, GluLayout, TunedOp, TunedRecipe
from .bench import GpuBench
from .pool import CompilePool, default_jobs
from .report import TuneReport
from .routing import ROUTINGS
from .session import Options, Session

TUNED = tuple(name for name, recipe in recipes.RECIPES.items() if recipe.x is None)
"""Recipes whose kernels read nothing of x but its 16-bit rows."""
COMPILE_S = 1.7  # one kernel, with its process
SETUP_S = 3.0


def tune(
    op: TunedOp,
    *,
    experts: int,
    in_features: int,
    intermediate: int = 0,
    out_features: int = 0,
    rows_per_expert: Sequence[int] = Options.rows_per_expert,
    dtype: Dtype | torch.dtype = "bfloat16",
    activation: ActivationName = "swiglu",
    glu_layout: GluLayout = "concat",
    save_preact: bool = False,
    transpose_w: bool = False,
    out_dtype: Dtype | Literal["float32"] | torch.dtype | None = None,
    recipe: TunedRecipe = "bf16",
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
        recipe: of a grouped_mlp: "bf16", or of weights alone: "mxfp8_weight_only", "mxfp4_weight_only". Weights that
            are decoded have few tiles, which all ship and compete.
        training: of a grouped_mlp: its training step (forward with preactivation, data gradients, weight gradients)
            instead of its inference.
        budget_s: seconds of sampling for each problem. candidates: beside the shipped ones, at each number of rows.
        jobs: compile processes; by default one a CPU but two.
        device: a CUDA device; by default the current one.
        out: the table to add to; by default one in the first place where the dispatcher looks (`glulam.tuned`).
        progress: show a progress bar on standard error.

    Raises:
        ValueError, TypeError: an argument that does not fit, a file at `out` that is no table, or nothing to measure.
        UnsupportedDevice: there is no GPU that kernels run on.
        BundleError, CompileError, ToolchainError (RuntimeErrors): there is nothing to compare with.
    """
    flags = {"save_preact": save_preact, "transpose_w": transpose_w, "training": training, "progress": progress}
    for name, value in flags.items():
        check_flag("tune", name, value)
    if not isinstance(rows_per_expert, (tuple, list, range)) or not rows_per_expert:
        raise TypeError(f"tune: rows_per_expert is {rows_per_expert!r}; give whole numbers, as a tuple")
    for average in rows_per_expert:
        _check_count("rows_per_expert", average, 1)
    _check_count("candidates", candidates, 0)
    _check_count("jobs", 1 if jobs is None else jobs, 1)
    if isinstance(budget_s, bool) or not isinstance(budget_s, (int, float)) or not 0 < budget_s < math.inf:
        raise ValueError(f"tune: budget_s is {budget_s!r}; give a positive number of seconds")
    if out is not None and not isinstance(out, (str, os.PathLike)):
        raise TypeError(f"tune: out is {out!r}; give the path of a file")
    shape = shape_of(
        op, experts=experts, in_features=in_features, intermediate=intermediate, out_features=out_features, dtype=dtype,
        activation=activation, glu_layout=glu_layout, save_preact=save_preact, transpose_w=transpose_w,
        out_dtype=out_dtype, recipe=recipe,
    )  # fmt: skip
    problems = problems_of("tune", shape, training)
    options = Options(tuple(rows_per_expert), budget_s=budget_s, count=candidates)
    index = gpus.cuda_index("tune", device)
    bench = GpuBench(index)
    with torch.cuda.device(index), CompilePool(jobs or default_jobs()) as pool:
        return run(problems, bench, pool, options, Path(out) if out else default_table(bench.gpu), progress)


def _check_count(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"tune: {name} is {value!r}; give a whole number of at least {least}")


def shape_of(
    op: str,
    *,
    dtype: Dtype | torch.dtype = "bfloat16",
    activation: ActivationName = "swiglu",
    glu_layout: GluLayout = "concat",
    out_features: int = 0,
    out_dtype: Dtype | Literal["float32"] | torch.dtype | None = None,
    recipe: TunedRecipe = "bf16",
    **rest: Any,
) -> Problem:
    """The problem of `tune`'s arguments, of no rows. Raises ValueError for a recipe that is not tuned."""
    found = recipes.find("tune", recipe)
    if found.name not in TUNED or (op != "grouped_mlp" and found is not recipes.BF16):
        raise ValueError(
            f"tune: recipe is {found.name!r} and op {op!r}; of a grouped_mlp {', '.join(TUNED)} can be tuned, and of "
            "others bf16"
        )
    is_activated = op not in ("grouped_mm", "grouped_wgrad")
    return Problem(
        op=op,
        dtype=dtype_name(dtype),
        rows=0,
        out_features=out_features or (rest["in_features"] if op == "grouped_mlp" else 0),
        activation=activation if is_activated else "none",
        glu_layout=glu_layout if is_activated and activation in GATED else "concat",
        out_dtype=dtype_name(out_dtype or dtype) if op == "grouped_wgrad" else "",
        operands=found.operands,
        fc2_operands=found.fc2_operands,
        **rest,
    )


def problems_of(caller: str, shape: Problem, training: bool) -> list[Problem]:
    """What is tuned: the shape itself, or the three functions of an MLP's training step as its plan asks for them.

    Raises:
        ValueError: they are none that kernels serve.
    """
    for name, given, ops in (
        ("training", training, ("grouped_mlp",)),
        ("save_preact", shape.save_preact, ("grouped_glu",)),
        ("transpose_w", shape.transpose_w, ("grouped_mm", "grouped_glu", "grouped_mlp", "grouped_dglu")),
    ):
        if given and shape.op not in ops:
            raise ValueError(f"{caller}: {name} is of a {' or '.join(ops)}, not of {shape.op}; leave it out")
    for name, given in (("training", training), ("transpose_w", shape.transpose_w)):
        if given and shape.operands != recipes.BF16.operands:
            raise ValueError(f"{caller}: {name} is of recipe 'bf16'; leave it out")
    if training and shape.transpose_w:
        raise ValueError(f"{caller}: training has no transpose_w; leave it out")
    try:
        table.check(shape)
        problems = list(training_parts(shape)) if training else [shape]
        for problem in problems:
            families_of(problem, next(iter(ARCHS)))
    except ValueError as error:
        raise ValueError(f"{caller}: {error}") from None
    return problems


def default_table(gpu: str) -> Path:
    """Where results go: a file named by the GPU in the first place where the dispatcher looks. Raises ValueError."""
    places = known.locations()
    if not places:
        raise ValueError(f"tune: ${known.ENV_TUNED} is empty, so no table is read; unset it, or give out")
    return places[0] if places[0].suffix == ".json" else places[0] / f"{'-'.join(gpu.lower().split())}.json"


def run(
    problems: Sequence[Problem],
    bench: GpuBench,
    pool: CompilePool,
    options: Options,
    path: Path,
    progress: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> TuneReport:
    """Tunes problems on a bench. Each point goes into the table at `path` when it is decided.

    Raises:
        ValueError: there is something else than a table at `path`; there is nothing to measure.
    """
    start = time.perf_counter()
    if path.exists():
        table.read(path)
    stamp = table.stamp_of(bench.gpu, bench.driver)
    sessions = [Session(problem, bench, pool, options, clock) for problem in problems]
    try:
        with torch.no_grad(), _progress(sessions, progress) as advance:
            layers = tuple(_tuned(session, stamp, path, advance) for session in sessions)
    finally:
        kernels.forget_choices()
    notes = tuple(note for session in sessions for note in session.notes)
    return TuneReport(layers, stamp, path, time.perf_counter() - start, notes)


def _tuned(session: Session, stamp: Stamp, path: Path, advance: Callable[[int], None]) -> Layer:
    """One session's result, which is in the table as well; what an interrupted run has measured is taken from there."""
    asked = json.dumps(dataclasses.asdict(session.options))
    points = _measured_already(session, asked, stamp, path)
    advance(len(points) * (len(ROUTINGS) + 1))

    def keep(unfinished: Unfinished | None) -> Layer:
        layer = session.layer(points.values(), unfinished)
        table.write(path, [table.section(stamp, layer)])
        return layer

    for point in session.run(points.keys(), lambda: advance(1)):
        points[point.rows_per_expert] = point
        keep(Unfinished(asked, tuple(points)))
    return keep(None)


def _measured_already(session: Session, asked: str, stamp: Stamp, path: Path) -> dict[float, Point]:
    """By rows an expert, the points of a run that was asked for the same and did not end."""
    sections = table.read(path) if path.exists() else []
    held = [section.layers for section in sections if not section.stamp.unlike(stamp)]
    layer = held[0].get(session.layer([]).key) if held else None
    if layer is None or layer.unfinished is None or layer.unfinished.asked != asked:
        return {}
    return {point.rows_per_expert: point for point in layer.points if point.rows_per_expert in layer.unfinished.rows}


def estimate_s(sessions: Sequence[Session], jobs: int) -> float:
    """About how long sessions take, from their budgets and what is to be compiled."""
    specs = {spec for session in sessions for problem in session.problems for spec in session.candidates(problem)}
    missing = sum(not loadable.is_loadable(spec) for spec in specs)
    sampling = sum(session.options.budget_s + SETUP_S for session in sessions)
    return sampling + math.ceil(missing / jobs) * COMPILE_S


@contextlib.contextmanager
def _progress(sessions: Sequence[Session], shown: bool) -> Iterator[Callable[[int], None]]:
    """A callable that advances one progress bar on standard error, under a line that says what is coming."""
    if not shown:
        yield lambda contests: None
        return
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    contests = sum(len(session.problems) for session in sessions) * (len(ROUTINGS) + 1)
    about = estimate_s(sessions, default_jobs())
    console.print(
        f"{contests} contests; about {about:.0f} s; interrupt at will, the same command goes on", highlight=False
    )
    counts = progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
    with progress.Progress(progress.TextColumn("tuning"), progress.BarColumn(), *counts, console=console) as bar:
        task = bar.add_task("tuning", total=contests)
        yield lambda contests: bar.advance(task, contests)
