"""What the commands `compile`, `tune`, `tables` and `cache` do; their options are in `cli`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from cute_kernels.specs import Spec
from ffi_bridge import cache, manifest

from . import device as gpus
from . import kernels, loadable, preferences, tuned
from .tuner import report
from .tuner import tune as run_tuner

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
    where = "in the bundle" if loadable.in_bundle(made) else f"in {cache.cache_root()}"
    typer.echo(f"{made.name}: {where}, {seconds:.2f} s{_resources(made)}")


def compile_one(fields: dict[str, Any], prefer: bool) -> None:
    _compile(None, fields, prefer)


def compile_tuned() -> None:
    """Every kernel that tables for this GPU choose, so that the dispatcher can take it."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--tuned needs the GPU whose tables are meant; torch sees none")
    for spec in tuned.specs(gpus.gpu(torch.cuda.current_device()).name):
        _compile(spec, {}, prefer=False)


def tune(op: str, arguments: dict[str, Any]) -> None:
    from .cli import console

    try:
        found = run_tuner(op, **arguments, progress=True)
    except KeyboardInterrupt:
        typer.echo("glulam: interrupted; what was measured is kept, and the same command goes on from there", err=True)
        raise typer.Exit(INTERRUPTED) from None
    out = console()
    for layer in found.layers:
        out.print(_layer_table(layer))
    for note in found.notes:
        out.print(note, markup=False, highlight=False, soft_wrap=True)
    out.print(f"mean gain {found.gain:.3f}, {found.seconds:.0f} s; wrote {found.path}", highlight=False, soft_wrap=True)


def _layer_table(layer: tuned.Layer) -> Table:
    table = Table(title=report.describe(layer))
    for heading in report.HEADER[:-1]:
        table.add_column(heading, justify="right")
    table.add_column(report.HEADER[-1], overflow="fold")
    for row in report.rows_of(layer):
        table.add_row(*row)
    return table


def show_tables() -> None:
    from .cli import console

    out = console()
    if not tuned.files():
        places = ", ".join(map(str, tuned.locations())) or f"no place: ${tuned.ENV_TUNED} is empty"
        out.print(f"no tables in {places}; `glulam tune` makes one", highlight=False, soft_wrap=True)
    for path in tuned.files():
        for section in tuned.read(path):
            out.print(f"{path}: {section.stamp.gpu}, {section.stamp.date}", highlight=False, soft_wrap=True)
            if why := section.stamp.unlike(tuned.stamp_of(section.stamp.gpu)):
                out.print(f"  ignored: {why}", highlight=False, soft_wrap=True)
            for layer in section.layers.values():
                out.print(_layer_table(layer))


def merge(paths: Sequence[Path], out: Path | None) -> None:
    if out is None:
        raise ValueError("--merge needs --out, the file to add to")
    sections = [section for path in paths for section in tuned.read(path)]
    tuned.write(out, sections)
    typer.echo(f"{out}: {len(tuned.read(out))} sections")


def cache_list() -> None:
    from .cli import console

    preferred = {spec for _, _, spec in preferences.stored()}
    table = Table(title=str(cache.cache_root()))
    for heading in ("kernel", "state", ""):
        table.add_column(heading, overflow="fold")
    table.add_column("KB", justify="right")
    for entry in cache.entries():
        name = entry.spec.name if entry.spec else entry.name
        mark = "preferred" if entry.spec in preferred and entry.state == "sound" else ""
        table.add_row(name, entry.state, mark, f"{entry.size / 1024:.0f}")
    out = console()
    out.print(table)
    for spec in preferred:
        if loadable.in_bundle(spec):
            out.print(f"preferred from the bundle: {spec.name}", highlight=False, soft_wrap=True)


def cache_verify() -> bool:
    """Whether nothing is damaged."""
    found = list(cache.entries())
    for entry in found:
        if entry.problem:
            typer.echo(f"{entry.state}: {entry.name}: {entry.problem}")
    counts = ", ".join(f"{sum(entry.state == state for entry in found)} {state}" for state in cache.STATES)
    typer.echo(f"{len(found)} kernels in {cache.cache_root()}: {counts}")
    return all(entry.state != "damaged" for entry in found)


def cache_clear(outdated: bool, preferred: bool) -> None:
    removed: list[cache.Entry] = []
    if not preferred:
        removed = cache.clear(states=("outdated", "damaged", "aside") if outdated else cache.STATES)
    forgotten = 0 if outdated and not preferred else preferences.clear()
    size = sum(entry.size for entry in removed) / 1024
    typer.echo(f"{cache.cache_root()}: removed {len(removed)} kernels ({size:.0f} KB), {forgotten} preferences")
