"""What the commands `compile`, `tune`, `explain`, `tables` and `cache` do; their options are in `cli`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from cute_kernels.arch import FOLDERS
from cute_kernels.specs import Spec
from ffi_bridge import cache, manifest, objects

from .. import explanation
from ..choose import kernels, known, loadable, records, table
from ..host import device as gpus
from ..tuner import entry, report
from ..tuner import tune as run_tuner
from ..tuner.session import Options
from .output import console, megabytes

INTERRUPTED = 130  # as shells report it


def _resources(spec: Spec) -> str:
    """Registers and shared memory of a cached kernel; empty where it is not in the cache."""
    folder = cache.cache_root() / cache.cache_key(spec) / spec.arch
    if not folder.is_dir():
        return ""
    (function,) = manifest.read(folder).functions.values()
    registers = " + ".join(str(kernel.registers) for kernel in function.kernels)
    kilobytes = " + ".join(f"{(kernel.static_smem + kernel.dynamic_smem) / 1024:.0f}" for kernel in function.kernels)
    return f"; {registers} registers, {kilobytes} KB of shared memory"


def _compile(spec: Spec | None, fields: dict[str, Any], prefer: bool) -> None:
    start = time.perf_counter()
    made = kernels.compile(spec, **fields, prefer=prefer)
    seconds = time.perf_counter() - start
    if not loadable.is_loadable(made):
        raise OSError(f"{made.name} was compiled, but not kept in {records.shown(cache.cache_root())}: nothing changed")
    where = "in the bundle" if loadable.in_bundle(made) else f"in {records.shown(cache.cache_root())}"
    typer.echo(f"{made.name}: {where}, {seconds:.2f} s{_resources(made)}")


def compile_one(fields: dict[str, Any], prefer: bool) -> None:
    _compile(None, fields, prefer)


def compile_tuned() -> None:
    """Every kernel that tables for this GPU choose, so that the dispatcher can take it."""
    if not torch.cuda.is_available():
        raise ValueError("--tuned needs the GPU whose tables are meant; torch sees none")
    for spec in known.tuned_specs(gpus.gpu(torch.cuda.current_device()).name):
        _compile(spec, {}, prefer=False)


def tune(op: str, arguments: dict[str, Any]) -> None:
    try:
        found = run_tuner(op, **arguments, progress=True)
    except KeyboardInterrupt:
        typer.echo("glulam: interrupted; what was measured is kept, and the same command goes on from there", err=True)
        raise typer.Exit(INTERRUPTED) from None
    out = console()
    for layer in found.layers:
        out.print(_layer_table(layer))
    path = records.shown(found.path)
    _print(out, *found.notes, f"mean gain {found.gain:.3f}, {found.seconds:.0f} s; wrote {path}")


def explain(
    op: str, layer: dict[str, Any], training: bool, rows: Sequence[int], arch: str | None, gpu: str | None
) -> None:
    """`rows`: of all experts; none: those of as many rows an expert as are tuned by default."""
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    if index is not None and (arch is None or gpu is None):
        here = gpus.gpu(index)
        arch, gpu = arch or here.arch, here.name if gpu is None else gpu
    arch, gpu = arch or next(iter(FOLDERS)), gpu or ""
    out = console()
    for problem in entry.problems_of("explain", entry.shape_of(op, **layer), training):
        for total in rows or [count * problem.experts for count in Options.rows_per_expert]:
            told = explanation.of_problem(dataclasses.replace(problem, rows=total), gpu or arch, arch, gpu)
            _print(out, f"{total} rows: {told}")


def _print(out: Console, *lines: str) -> None:
    for line in lines:
        out.print(line, soft_wrap=True)


def _layer_table(layer: table.Layer) -> Table:
    grid = Table(title=report.describe(layer))
    for heading in report.HEADER[:-1]:
        grid.add_column(heading, justify="right")
    grid.add_column(report.HEADER[-1], overflow="fold")
    for row in report.rows_of(layer):
        grid.add_row(*row)
    return grid


def show_tables() -> None:
    out = console()
    if not known.tables():
        places = ", ".join(map(records.shown, known.locations())) or f"no place: ${known.ENV_TUNED} is empty"
        _print(out, f"no tables in {places}; `glulam tune` makes one")
    for path in known.tables():
        try:
            sections, wrong = table.content(path)
        except ValueError as error:
            _print(out, f"ignored: {error}; remove it")
            continue
        name = records.shown(path)
        for section in sections:
            _print(out, f"{name}: {section.stamp.gpu}, {section.stamp.date}")
            if why := section.stamp.unlike(table.stamp_of(section.stamp.gpu)):
                _print(out, f"  ignored: {why}")
            for layer in section.layers.values():
                out.print(_layer_table(layer))
        _print(out, *(f"ignored: {name}, {line}; tune anew into another file" for line in wrong))


def merge(paths: Sequence[Path], out: Path | None) -> None:
    if out is None:
        raise ValueError("--merge needs --out, the file to add to")
    sections = [section for path in paths for section in table.read(path)]
    table.write(out, sections)
    typer.echo(f"{records.shown(out)}: {len(table.read(out))} sections")


def cache_list() -> None:
    stored = known.read_preferences()
    preferred = {spec for layer, _ in stored.layers.values() for spec in layer.kernels.values()}
    grid = Table(title=records.shown(cache.cache_root()))
    for heading in ("kernel", "state", ""):
        grid.add_column(heading, overflow="fold")
    grid.add_column("KB", justify="right")
    for kept in cache.entries():
        name = kept.spec.name if kept.spec else records.shown(kept.name)
        mark = "preferred" if kept.spec in preferred and kept.state == "sound" else ""
        grid.add_row(name, kept.state, mark, f"{kept.size / 1024:.0f}")
    out = console()
    out.print(grid)
    _print(out, _summary(list(objects.entries())))
    _print(out, *(f"preferred from the bundle: {spec.name}" for spec in preferred if loadable.in_bundle(spec)))
    _print(out, *stored.ignored)


def _states(found: Sequence[cache.Entry]) -> str:
    return ", ".join(f"{sum(kept.state == state for kept in found)} {state}" for state in cache.STATES)


def _size(found: Sequence[cache.Entry]) -> str:
    return megabytes(sum(kept.size for kept in found))


def _summary(stored: Sequence[cache.Entry]) -> str:
    """One line for all objects: a build has hundreds."""
    place = records.shown(objects.folder())
    return f"{len(stored)} objects for builds in {place} ({_size(stored)}): {_states(stored)}"


def cache_verify() -> bool:
    """Whether no kernel and no object is damaged."""
    found, stored = list(cache.entries()), list(objects.entries())
    for kept in [*found, *(kept for kept in stored if kept.state == "damaged")]:
        if kept.problem:
            typer.echo(f"{kept.state}: {records.shown(kept.name)}: {kept.problem}")
    for line in known.read_preferences().ignored:
        typer.echo(line)
    typer.echo(f"{len(found)} kernels in {records.shown(cache.cache_root())}: {_states(found)}")
    typer.echo(_summary(stored))
    return all(kept.state != "damaged" for kept in (*found, *stored))


def cache_clear(outdated: bool, preferred: bool) -> None:
    removed: list[cache.Entry] = []
    dropped: list[cache.Entry] = []
    if not preferred:
        states = ("outdated", "damaged", "aside") if outdated else cache.STATES
        removed, dropped = cache.clear(states=states), objects.clear(states)
    forgotten = 0 if outdated and not preferred else known.clear_preferences()
    size = sum(kept.size for kept in removed) / 1024
    root = records.shown(cache.cache_root())
    typer.echo(
        f"{root}: removed {len(removed)} kernels ({size:.0f} KB), {forgotten} preferences, "
        f"{len(dropped)} objects ({_size(dropped)})"
    )
    for line in known.read_preferences().ignored:
        typer.echo(line)
