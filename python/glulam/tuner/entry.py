"""`glulam.tune`: check the arguments, tune the problems that they describe, and write the results to a table."""

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
"""Names of the recipes that can be tuned: those whose kernels read x only as 16-bit rows."""
COMPILE_S = 1.7  # seconds to compile one kernel, including the start of its process
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
    """Measure which kernels serve a layer best on this GPU; operators use the fastest ones from then on.

    Candidates are all valid tiles, clusters and schedules, pruned by the cost model. They are compiled in helper
    processes while the GPU measures. At each number of rows all candidates compete with the shipped kernels, under
    uniform and under skewed routing. Another kernel is chosen only if it is faster by more than noise in a run against
    the shipped one alone. This process reads the resulting table at once, and later processes read it too. Nothing is
    ever tuned except by this function.

    An interrupted run keeps what it has measured; the same call continues from there.

    Args:
        op: "grouped_mm", "grouped_glu", "grouped_mlp", "grouped_dglu" or "grouped_wgrad".
        experts: E.
        in_features: columns of x; for a grouped_dglu, columns of dy.
        intermediate: columns of the activation. 0: the operator has none.
        out_features: columns of the result; for a grouped_wgrad, of dy: it makes [experts, out_features, in_features].
            0: for a grouped_mlp in_features, for other operators none.
        rows_per_expert: the mean numbers of rows an expert to measure. Times for numbers in between are interpolated.
        dtype: bfloat16 or float16.
        activation, glu_layout, save_preact, transpose_w, out_dtype: the operator's options. save_preact is
            grouped_glu's return_preact.
        recipe: "bf16", or for a grouped_mlp also a weight-only recipe: "mxfp8_weight_only", "mxfp4_weight_only".
            Kernels that decode weights have few tiles, which all ship and compete.
        training: True: for a grouped_mlp: tune its training step (forward with preactivation, data gradients, weight
            gradients) instead of inference.
        budget_s: seconds of measuring for each problem.
        candidates: number of kernels to measure besides the shipped ones, at each number of rows.
        jobs: number of compile processes. None: the number of CPUs less two, at most 16.
        device: a CUDA device. None: the current one.
        out: the table to add to. None: one in the first place where tables are searched (`glulam.tuned`).
        progress: True: show a progress bar on standard error.

    Returns:
        A TuneReport: the kernels chosen, and their times.

    Raises:
        ValueError, TypeError: an argument does not fit, the file at `out` is not a table, or there is nothing to
            measure.
        UnsupportedDevice: there is no GPU that kernels run on.
        BundleError, CompileError, ToolchainError (RuntimeErrors): the shipped kernel, with which candidates are
            compared, cannot be loaded or compiled.
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
        "tune", op, experts=experts, in_features=in_features, intermediate=intermediate, out_features=out_features,
        dtype=dtype, activation=activation, glu_layout=glu_layout, save_preact=save_preact, transpose_w=transpose_w,
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
    caller: str,
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
    """Return the layer that `tune`'s arguments describe, as a Problem whose number of rows is still 0.

    caller: the name of the function or command, for errors.

    Raises:
        ValueError: the recipe cannot be tuned.
    """
    found = recipes.find(caller, recipe)
    if found.name not in TUNED or (op != "grouped_mlp" and found is not recipes.BF16):
        raise ValueError(
            f"{caller}: recipe is {found.name!r} and op {op!r}; of a grouped_mlp {', '.join(TUNED)} can be tuned, and "
            "of others bf16"
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
    """Check a layer, and return the Problems that `tune` measures for it, one table entry each.

    Usually this is `shape` alone. With `training` it is a grouped_mlp's training step: the forward that stores its
    preactivation, the data gradients (grouped_dglu), and the weight gradients (grouped_wgrad).

    Args:
        caller: name of the function with which error messages begin.
        shape: the layer's operator, sizes and options, as `shape_of` returns them.
        training: True: return the training step of `shape`, which must be a grouped_mlp. False: return `shape` alone.

    Raises:
        ValueError: options contradict each other, or no kernel serves the layer.
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
    """Return the default path of the results: a file named after the GPU in the first place where tables are searched.

    Raises:
        ValueError: no place is searched, as $GLULAM_TUNED is empty.
    """
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
    """Tune problems on a bench. A point (one number of rows) is written to the table when it is decided.

    Args:
        problems: the problems; their own numbers of rows do not matter.
        bench: the GPU.
        pool: compiles the candidates.
        options: sizes and costs of the run.
        path: the table.
        progress: True: show a progress bar.
        clock: returns seconds.

    Raises:
        ValueError: the file at `path` is not a table, or there is nothing to measure.
    """
    start = time.perf_counter()
    if path.exists():
        table.read(path)
    stamp = table.stamp_of(bench.gpu, bench.driver)
    sessions = [Session(problem, bench, pool, options, clock) for problem in problems]
    try:
        with torch.no_grad(), _progress(sessions, pool.jobs, progress) as advance:
            layers = tuple(_tuned(session, stamp, path, advance) for session in sessions)
    finally:
        kernels.forget_choices()
    notes = tuple(note for session in sessions for note in session.notes)
    return TuneReport(layers, stamp, path, time.perf_counter() - start, notes)


def _tuned(session: Session, stamp: Stamp, path: Path, advance: Callable[[int], None]) -> Layer:
    """Tune one problem, write the table's entry for it (a `Layer`) to the table, and return the entry.

    The entry has a point (times, chosen kernel) for each number of rows. Points that an interrupted run with the same
    options has measured are taken from the table.

    Args:
        session: the tuning of this problem.
        stamp: the GPU, versions and sources for which the times hold.
        path: the table.
        advance: called with a number of finished contests (comparisons of kernels under one routing, or finals).
    """
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
    """Return the points (times at one number of rows) that an interrupted run with the same options left in a table.

    Keys are numbers of rows an expert; {} if there is no such run.

    Args:
        session: the session that continues the run.
        asked: the session's options as JSON.
        stamp: the GPU, versions and sources that the table's section must have.
        path: the table; it may be missing.
    """
    sections = table.read(path) if path.exists() else []
    held = [section.layers for section in sections if not section.stamp.unlike(stamp)]
    layer = held[0].get(session.layer([]).key) if held else None
    if layer is None or layer.unfinished is None or layer.unfinished.asked != asked:
        return {}
    return {point.rows_per_expert: point for point in layer.points if point.rows_per_expert in layer.unfinished.rows}


def estimate_s(sessions: Sequence[Session], jobs: int) -> float:
    """Return about how many seconds sessions take, from their budgets and the number of kernels to compile."""
    specs = {spec for session in sessions for problem in session.problems for spec in session.candidates(problem)}
    missing = sum(not loadable.is_loadable(spec) for spec in specs)
    sampling = sum(session.options.budget_s + SETUP_S for session in sessions)
    return sampling + math.ceil(missing / jobs) * COMPILE_S


@contextlib.contextmanager
def _progress(sessions: Sequence[Session], jobs: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a progress bar on standard error by a number of contests (comparisons of kernels).

    A line above the bar says how many contests there are and about how long they take.

    Args:
        sessions: the tuning of each problem.
        jobs: number of compile processes.
        shown: False: nothing is shown.
    """
    if not shown:
        yield lambda contests: None
        return
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    contests = sum(len(session.problems) for session in sessions) * (len(ROUTINGS) + 1)
    about = estimate_s(sessions, jobs)
    console.print(
        f"{contests} contests; about {about:.0f} s; interrupt at will, the same command goes on", highlight=False
    )
    counts = progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
    with progress.Progress(progress.TextColumn("tuning"), progress.BarColumn(), *counts, console=console) as bar:
        task = bar.add_task("tuning", total=contests)
        yield lambda contests: bar.advance(task, contests)
