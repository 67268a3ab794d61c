"""`glulam compile`, `tune`, `explain` and `tables`: kernels that do not ship, and which kernels serve a layer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import typer
from rich.table import Table

from cute_kernels.architectures import ARCHS
from cute_kernels.specs import ACTIVATIONS, DTYPES, GATED, GLU_LAYOUTS, GroupedDgluSpec, GroupedMlpSpec, Spec
from cute_kernels.tiles import CLUSTERS, TILE_K
from ffi_bridge import cache, manifest, profiles

from .. import explanation
from ..choose import kernels, known, loadable, records, specs, table
from ..choose.problem import changed
from ..choose.shipped import TILED, family_of
from ..host import device as gpus
from ..names import TunedOp
from ..tuner import entry, report
from ..tuner import tune as run_tuner
from ..tuner.session import Options
from .app import REQUIRED, command, count, flag, option, parsed, resources, row, say, say_error, show, word

INTERRUPTED = 130  # exit status that shells report after Ctrl-C


def _numbers(text: str, separator: str = ",") -> tuple[int, ...]:
    """Parse a text of positive integers with a separator between them. Raises ValueError."""
    numbers = tuple(int(part) for part in text.lower().split(separator))
    if min(numbers) < 1:
        raise ValueError
    return numbers


def _tile_shape(text: str) -> tuple[int, ...]:
    """Parse a tile, for example "128x256x64". Raises ValueError."""
    m, n, k = _numbers(text, "x")
    if k != TILE_K[16]:
        raise ValueError
    return m, n, k


OPS = ", ".join(TILED)
OP = word(f"One of {OPS}.", TILED, REQUIRED, "OP")._replace(positional=True)
CLUSTERS_BY_NAME: dict[str, Any] = {f"{m}x{n}": (m, n) for m, n in CLUSTERS} | {specs.ADAPTIVE: specs.ADAPTIVE}
ROW_COUNTS = "of the form 1,16,256", "N,N,...", _numbers
FORM = {
    "dtype": word("Default: bfloat16.", DTYPES),
    "activation": word("As swiglu (default), geglu, silu.", ACTIVATIONS, metavar="NAME"),
    "glu_layout": word("Default: concat.", GLU_LAYOUTS),
    "save_preact": flag("Of a grouped_glu: store the preactivation."),
    "transpose_w": flag("Weights are [E, K, N]."),
    "out_dtype": word("Of a grouped_wgrad: that of x, or float32.", (*DTYPES, "float32"), metavar="NAME"),
}
FLAGS = {
    "save_preact": ("no stored preactivation", "stored preactivation"),
    "transpose_w": ("weights [E, N, K]", "weights [E, K, N]"),
}
"""For each flag of a kernel, the words that describe its calls: (if the flag is False, if it is True)."""
SIZES = {
    "experts": count("", REQUIRED),
    "in_features": count("Columns of x (of a grouped_dglu: of dy).", REQUIRED),
    "intermediate": count("Columns of the activation.", 0, least=0),
    "out_features": count("Columns of the result; of a grouped_mlp those of x.", 0, least=0),
}
PROBLEM = {
    "op": OP,
    **SIZES,
    "rows_per_expert": parsed("As 1,16,256; default: eight, 1 to 4096.", *ROW_COUNTS),
    **FORM,
    "recipe": word("Of a grouped_mlp; default: bf16.", entry.TUNED, metavar="NAME"),
    "training": flag("Of a grouped_mlp: its training step."),
}


def _given(op: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that describe a layer: all sizes, and the other options that the user gave.

    Raises:
        ValueError: the operator has no such option.
    """
    known = specs.fields_of(op)
    given = {name: value for name, value in options.items() if name in SIZES or value}
    for name in given.keys() & FORM.keys() - known:
        others = ", ".join(option(other) for other in FORM if other in known)
        raise ValueError(f"{op} has no option {option(name)}; it has {others}")
    return given


@command(
    "compile",
    op=OP._replace(default=None),
    tile=parsed(
        "Rows x weight rows x depth of a CTA's tile.", "of the form 128x256x64, where the last is always 64", "MxNxK",
        _tile_shape, "128x128x64",
    ),
    cluster=word("CTAs along both.", CLUSTERS_BY_NAME, "1x1"),
    schedule=word("", ("cooperative", "pingpong"), "cooperative"),
    **FORM,
    prefer=row("Use it for every later call of this form, whatever the shape.", bool, True),
    tuned=flag("Instead: all kernels that tables for this GPU choose."),
)  # fmt: skip
def compile_kernel(
    op: str | None, tile: tuple[int, ...], cluster: str, schedule: str, prefer: bool, tuned: bool, **form: Any
) -> None:
    """Compile a kernel that the bundle lacks, or with --tuned all that tables choose, and keep it in the cache."""
    if tuned == (op is not None):
        raise ValueError(f"give an operator ({OPS}) or --tuned, one of the two")
    if op is not None:
        shape = {"tile": tile, "cluster": CLUSTERS_BY_NAME[cluster], "schedule": schedule}
        _compile(None, prefer, op=op, **shape, **_given(op, form))
        return
    if not torch.cuda.is_available():
        raise ValueError("--tuned needs the GPU whose tables are meant; torch sees none")
    gpu = gpus.gpu(torch.cuda.current_device()).name
    wanted = known.tuned_specs(gpu)
    if not wanted:
        raise ValueError(
            f"no table chooses a kernel for {gpu}; `glulam tables` shows what is read, `glulam tune` makes one"
        )
    for spec in wanted:
        _compile(spec, prefer=False)


def _compile(spec: Spec | None, prefer: bool, **fields: Any) -> None:
    """Make a kernel and, as the last step, prefer it, so that preferences stay as they were if anything fails.

    Args:
        spec: the kernel. None: `fields` describe it, see `kernels.compile`.
        prefer: True: the kernel serves all later calls that it can compute (calls of its family, `family_of`).
        fields: arguments of `kernels.compile`.
    """
    start = time.perf_counter()
    made = kernels.compile(spec, **fields, prefer=False)
    seconds = time.perf_counter() - start
    root = records.shown(cache.cache_root())
    if not loadable.is_loadable(made):
        raise OSError(f"{made.name} was compiled, but not kept in {root}: nothing changed")
    where = "in the bundle" if loadable.in_bundle(made) else f"in {root}"
    say(f"{made.name}: {where}, {seconds:.2f} s{_resources(made)}")
    if not prefer:
        return
    say(f"serves from now on: {_calls_of(made)}, whatever the shape")
    before = known.read_preferences().preferred.get(family_of(made), made)
    if before != made:
        say(f"in place of: {before.name}")
    say(f"undo with: glulam cache forget {made.name}")
    try:
        known.write_preference(made)
    except OSError as error:
        raise OSError(f"not preferred after all, calls get what they got before: {error}") from error


def _resources(spec: Spec) -> str:
    """Return registers and shared memory of a cached kernel as text; empty if the kernel is not in the cache."""
    folder = cache.cache_root() / cache.cache_key(spec) / spec.arch
    if not folder.is_dir():
        return ""
    registers, kilobytes = resources(manifest.read(folder).functions, spec.name)
    return f"; {registers} registers, {kilobytes} KB of shared memory"


def _calls_of(spec: Spec) -> str:
    """Return a text that says which calls get this kernel once the user prefers it: all of its operator and options.

    For example "every grouped_mm on sm_90a of dtype bfloat16, ...": all options of the kernel except its tile.
    """
    part: Any = spec.fc1 if isinstance(spec, GroupedMlpSpec) else spec
    form = {name: getattr(part, name) for name in FORM if hasattr(part, name)}
    if form.get("activation") not in GATED:
        form.pop("glu_layout", None)
    words = [FLAGS[name][value] if name in FLAGS else f"{name} {value}" for name, value in form.items()]
    if isinstance(spec, GroupedDgluSpec) and spec.dgrad is None:
        words.append("no gradient of x")
    return f"every {spec.op} on {spec.arch} of {', '.join(words)}"


@command(
    "tune",
    **PROBLEM,
    budget_s=row("Seconds of sampling for each problem.", float | None),
    candidates=count("Kernels beside the shipped, at each size."),
    jobs=count("Compile processes; default: one a CPU but two."),
    out=row("Table to add to; default: where the dispatcher looks.", Path | None),
)
def tune(op: TunedOp, training: bool, **options: Any) -> None:
    """Measure which kernels serve a layer best on this GPU, and let them serve it from now on."""
    search = {name: options.pop(name) for name in ("rows_per_expert", "budget_s", "candidates", "jobs", "out")}
    chosen = {name: value for name, value in search.items() if value is not None}
    try:
        found = run_tuner(op, training=training, **_given(op, options), **chosen, progress=True)
    except KeyboardInterrupt:
        say_error("interrupted; what was measured is kept, and the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    path = records.shown(found.path)
    show(*map(_layer_table, found.layers), *found.notes)
    show(f"mean gain {found.gain:.3f}, {found.seconds:.0f} s; wrote {path}")


@command(
    "explain",
    **PROBLEM,
    rows=parsed("Of all experts together, as 8,4096.", *ROW_COUNTS),
    arch=word("Architecture; default: this GPU's, or where there is none the first.", profiles.CONFIGS),
    gpu=row("Name of the GPU whose tables hold; default: this GPU's."),
)
def explain(
    op: str, rows: Any, rows_per_expert: Any, training: bool, arch: str | None, gpu: str | None, **layer: Any
) -> None:
    """Show which kernels would serve a layer, and why. Needs no GPU, and launches nothing."""
    if rows and rows_per_expert:
        raise ValueError("give --rows or --rows-per-expert, not both")
    asked = gpus.Gpu("", arch or next(iter(ARCHS)), 0)
    if torch.cuda.is_available() and (arch is None or gpu is None):
        here = gpus.gpu(torch.cuda.current_device())
        asked = here if arch is None else asked._replace(name=here.name)
    asked = asked if gpu is None else asked._replace(name=gpu)
    for problem in entry.problems_of("explain", entry.shape_of("explain", op, **_given(op, layer)), training):
        for total in rows or [each * problem.experts for each in rows_per_expert or Options.rows_per_expert]:
            answer = explanation.of_problem(changed(problem, rows=total), asked.name or asked.arch, asked)
            show(f"{total} rows: {answer}")


@command(
    "tables",
    merge=row("Add this file's sections, repeatable.", list[Path] | None),
    out=row("File to add to; with --merge.", Path | None),
)
def tables(merge: list[Path] | None, out: Path | None) -> None:
    """Show the tables of tuned kernels that the dispatcher reads, or merge tables into one."""
    if not merge:
        if out is not None:
            raise ValueError("--out needs --merge, a file to add")
        _show_tables()
        return
    if out is None:
        raise ValueError("--merge needs --out, the file to add to")
    table.write(out, [section for path in merge for section in table.read(path)])
    say(f"{records.shown(out)}: {len(table.read(out))} sections")


def _show_tables() -> None:
    """Print all tables of tuned kernels: for each section its GPU, its date and, if it is ignored here, the reason."""
    if absent := known.absent():
        raise ValueError(f"{absent}; correct it, or unset it")
    if not known.tables():
        places = ", ".join(map(records.shown, known.locations())) or f"no place: ${known.ENV_TUNED} is empty"
        show(f"no tables in {places}; `glulam tune` makes one")
    for path in known.tables():
        try:
            sections, wrong = table.content(path)
        except ValueError as error:
            show(f"ignored: {error}; remove it")
            continue
        name = records.shown(path)
        for section in sections:
            show(f"{name}: {section.stamp.gpu}, {section.stamp.date}")
            if why := section.stamp.unlike(table.stamp_of(section.stamp.gpu)):
                show(f"  ignored: {why}")
            show(*map(_layer_table, section.layers.values()))
        show(*(f"ignored: {name}, {line}; tune anew into another file" for line in wrong))


def _layer_table(layer: table.Layer) -> Table:
    """Return a table to print for `layer`, one entry of a tuned table: its kernels and their times."""
    grid = Table(title=report.describe(layer))
    for heading in report.HEADER[:-1]:
        grid.add_column(heading, justify="right")
    grid.add_column(report.HEADER[-1], overflow="fold")
    for cells in report.rows_of(layer):
        grid.add_row(*cells)
    return grid
