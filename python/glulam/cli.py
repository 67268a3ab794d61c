"""The command `glulam`: build a bundle, show what is in it, compile and tune kernels, say what this machine can do.

Needs no torch to build or to show: only `doctor` imports it.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from cute_kernels.specs import ACTIVATIONS, DTYPES, GLU_LAYOUTS
from cute_kernels.tiles import CLUSTERS, TILE_K, SpecError
from ffi_bridge import BundleError, CompileError, ToolchainError, __version__, profiles, toolchain
from ffi_bridge import build as builder
from ffi_bridge.loader import ENV_BUNDLE, bundle_root, packaged_root
from ffi_bridge.manifest import Function, Manifest, verify

from ._cli_output import console, megabytes
from .choose import records, specs
from .choose.shipped import TILED
from .errors import UnsupportedDevice


class _OneLineErrors(TyperGroup):
    """Tells of a mistake on the command line as of any other: in one line."""

    def main(self, *args: Any, **extra: Any) -> Any:
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                _say_error(error.format_message())
            status = error.exit_code
        except typer.Abort:
            status = 1
        sys.exit(status or 0)


_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    cls=_OneLineErrors,
    add_completion=False,
    no_args_is_help=True,
    help="Fused grouped-GEMM kernels for mixture-of-experts layers.",
)


def _say_error(text: str) -> None:
    typer.echo(f"glulam: {text}", err=True)


def option(name: str) -> str:
    """A parameter as it is typed."""
    return "--budget" if name == "budget_s" else f"--{name.replace('_', '-')}"


_NAMED = re.compile(
    r"\b(?:(in_features|out_features|rows_per_expert|glu_layout|save_preact|transpose_w|out_dtype|budget_s)=?"
    r"|(intermediate|experts|dtype|activation|training|candidates|jobs|schedule)(?:=|(?= is |, got)))"
)


def _as_typed(error: Exception) -> str:
    """An error's message, in which options are named as they are typed."""
    if isinstance(error, specs.TileError):
        tile = error.nearest
        cluster = specs.ADAPTIVE if tile.adaptive else f"{tile.cluster_m}x{tile.cluster_n}"
        nearest = f"--tile {tile.m}x{tile.n}x{tile.k} --cluster {cluster} --schedule {tile.schedule}"
        return f"{error.limit.partition('; choose')[0]}; the nearest valid choice is {nearest}"
    if isinstance(error, UnicodeEncodeError):
        return f"{records.shown(error.object)} is no text in UTF-8, and TVM-FFI opens no such path; rename it"
    if not isinstance(error, SpecError) and not str(error).startswith(("tune: ", "explain: ")):
        return str(error)  # of no argument: it may hold a path
    return _NAMED.sub(lambda name: option(name[1] or name[2]) + " " * name[0].endswith("="), str(error))


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """What a user can mend is one message and exit status 1, not a traceback; so is a warning a message."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _say_error(str(message))
        try:
            yield
        except (BundleError, CompileError, ToolchainError, UnsupportedDevice, ValueError, OSError) as error:
            _say_error(_as_typed(error))
            raise typer.Exit(1) from error


def _one_of(*choices: str) -> Any:
    """What parses one of these words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


def _numbers(text: str, separator: str) -> tuple[int, ...]:
    """Whole numbers above 0. Raises ValueError."""
    numbers = tuple(int(part) for part in text.lower().split(separator))
    if min(numbers) < 1:
        raise ValueError
    return numbers


def _row_counts(text: str) -> tuple[int, ...]:
    try:
        return _numbers(text, ",")
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not of the form 1,16,256") from None


def _tile_shape(text: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        m, n, k = _numbers(text, "x")
        if k == TILE_K[16]:
            return m, n, k
    raise typer.BadParameter(f"{text!r} is not of the form 128x256x64, where the last is always 64")


def _choices(words: Any) -> str:
    return f"[{'|'.join(words)}]"


Archs = Annotated[
    list[str] | None,
    typer.Option(
        help="Architecture, repeatable; default: every one.",
        parser=_one_of(*profiles.CONFIGS),
        metavar=_choices(profiles.CONFIGS),
    ),
]


@app.command()
def build(
    arch: Archs = None,
    profile: Annotated[
        str, typer.Option(help="demo: what the demo calls; bf16: all but float16; full: what a wheel has.")
    ] = "bf16",
    only: Annotated[
        list[str] | None, typer.Option(help="Functions by name, as 'grouped_mm_bf16_*'; repeatable; default: all.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compile processes; default: one a CPU.")] = None,
    out: Annotated[Path | None, typer.Option(help="Bundle folder; default: inside the installed package.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave a bundle as it is that has these functions.")] = False,
) -> None:
    """Compile the shipped kernels and link them into one library per architecture."""
    with _reported():
        for one in arch or list(profiles.CONFIGS):
            root = out or packaged_root()
            specs = profiles.shipped_specs(one, profile, only or ())
            manifest = (builder.find(specs, root) if keep else None) or builder.build(specs, root, jobs)
            contents = f"{len(manifest.functions)} functions, {megabytes(manifest.size)}"
            typer.echo(f"{root / one / manifest.library}: {contents}")


def _stages(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The specs that a function runs one after another: a composed one's parts, else itself."""
    parts = [value for value in spec.values() if isinstance(value, dict) and "tile" in value]
    return parts or [spec]


def _tile(stage: dict[str, Any]) -> str:
    tile = stage.get("tile")
    if tile is None:
        return "-"
    adaptive = " adaptive" if tile["adaptive"] else ""
    cluster = f"c{tile['cluster_m']}x{tile['cluster_n']}{adaptive}"
    return f"{tile['m']}x{tile['n']}x{tile['k']} {cluster} {tile['schedule'][:4]}"


def _distinct(values: list[str]) -> str:
    return " + ".join(dict.fromkeys(values))


def _row(function: Function) -> list[str]:
    stages = _stages(function.spec)
    first = stages[0]
    flags = [name for stage in stages for name, value in stage.items() if value is True]
    if "kernel" in first:
        flags += [first["kernel"], *(f"{name}={first[name]}" for name in ("n", "experts") if first.get(name))]
    return [
        function.spec["op"],
        first["dtype"],
        first.get("activation", "-"),
        first.get("glu_layout", "-"),
        _distinct([_tile(stage) for stage in stages]),
        ", ".join(flags) or "-",
        " + ".join(str(kernel.registers) for kernel in function.kernels),
        " + ".join(f"{(kernel.static_smem + kernel.dynamic_smem) / 1024:.1f}" for kernel in function.kernels),
    ]


def _table(manifest: Manifest, op: str | None) -> Table:
    table = Table(title=f"{manifest.arch}: {len(manifest.functions)} functions")
    for heading in ("op", "dtype", "activation", "layout", "tile", "options"):
        table.add_column(heading)
    table.add_column("registers", justify="right")
    table.add_column("smem KB", justify="right")
    for function in manifest.functions.values():
        if op in (None, function.spec["op"]):
            table.add_row(*_row(function))
    return table


@app.command()
def info(
    arch: Archs = None,
    op: Annotated[str | None, typer.Option(help="Show one operator's functions only, as grouped_mlp.")] = None,
    bundle: Annotated[Path | None, typer.Option(help=f"Folder; default: ${ENV_BUNDLE}, else the package's.")] = None,
) -> None:
    """Show what the bundle contains; nothing of it is loaded."""
    out = console()
    with _reported():
        for one in arch or list(profiles.CONFIGS):
            folder = bundle_root(bundle) / one
            manifest = verify(folder, one)
            out.print(_table(manifest, op))
            versions = ", ".join(f"{name} {version or '?'}" for name, version in manifest.versions.items())
            out.print(f"library   {folder / manifest.library} ({megabytes(manifest.size)})", soft_wrap=True)
            out.print(f"sha256    {manifest.sha256}", soft_wrap=True)
            out.print(f"built by  {versions}", soft_wrap=True)
            ranges = ", ".join(f"{name} {wanted}" for name, wanted in toolchain.RUNS_WITH.items())
            out.print(f"runs with {ranges}, on any {manifest.host} CPU", soft_wrap=True)


@app.command()
def doctor() -> None:
    """Say in plain words what this machine can do, what is missing, and what mends it."""
    from ._doctor import examine

    out = console()
    diagnosis = examine()
    for check in diagnosis.checks:
        mark, style = {"ok": ("ok", "green"), "note": ("note", "yellow"), "bad": ("BAD", "red")}[check.state]
        out.print(f"{mark:<4}", style=style, end=" ")
        out.print(f"{check.name:<12} {check.finding}", soft_wrap=True)
        if check.remedy:
            out.print(f"{'':<17} -> {check.remedy}", soft_wrap=True)
    out.print()
    out.print(diagnosis.verdict, soft_wrap=True)
    raise typer.Exit(0 if diagnosis.usable else 1)


_OPS = ", ".join(TILED)
Experts = Annotated[int, typer.Option(min=1)]
InFeatures = Annotated[int, typer.Option(min=1, help="Columns of x (of a grouped_dglu: of dy).")]
Intermediate = Annotated[int, typer.Option(min=0, help="Columns of the activation.")]
OutFeatures = Annotated[int, typer.Option(min=0, help="Columns of the result; of a grouped_mlp those of x.")]
RowsPerExpert = Annotated[
    Any, typer.Option(help="As 1,16,256; default: eight, 1 to 4096.", parser=_row_counts, metavar="N,N,...")
]
Activation = Annotated[
    Any, typer.Option(help="As swiglu (default), geglu, silu.", parser=_one_of(*ACTIVATIONS), metavar="NAME")
]
GluLayout = Annotated[
    Any, typer.Option(help="Default: concat.", parser=_one_of(*GLU_LAYOUTS), metavar=_choices(GLU_LAYOUTS))
]
Dtype = Annotated[Any, typer.Option(help="Default: bfloat16.", parser=_one_of(*DTYPES), metavar=_choices(DTYPES))]
OutDtype = Annotated[
    Any,
    typer.Option(help="Of a grouped_wgrad: that of x, or float32.", parser=_one_of(*DTYPES, "float32"), metavar="NAME"),
]
SavePreact = Annotated[bool, typer.Option("--save-preact", help="Of a grouped_glu: store the preactivation.")]
TransposeW = Annotated[bool, typer.Option("--transpose-w", help="Forward contracts over weights' rows.")]
Operator = Annotated[Any, typer.Argument(help=f"One of {_OPS}.", parser=_one_of(*TILED), metavar="OP")]
Training = Annotated[bool, typer.Option("--training", help="Of a grouped_mlp: its training step.")]


_CLUSTERS: dict[str, Any] = {**{f"{m}x{n}": (m, n) for m, n in CLUSTERS}, specs.ADAPTIVE: specs.ADAPTIVE}
_SCHEDULES = ("cooperative", "pingpong")


def _form(
    op: str, dtype: Any, activation: Any, glu_layout: Any, save_preact: bool, transpose_w: bool, out_dtype: Any
) -> dict[str, Any]:
    """The options that were given. Raises ValueError where the operator has no such option."""
    options = {
        "dtype": dtype, "activation": activation, "glu_layout": glu_layout, "save_preact": save_preact,
        "transpose_w": transpose_w, "out_dtype": out_dtype,
    }  # fmt: skip
    known = specs.fields_of(op)
    given = {name: value for name, value in options.items() if value}
    for name in given:
        if name not in known:
            others = ", ".join(option(other) for other in options if other in known)
            raise ValueError(f"{op} has no option {option(name)}; it has {others}")
    return given


@app.command("compile")
def compile_kernel(
    op: Operator = None,
    tile: Annotated[
        Any, typer.Option(help="Rows x weight rows x depth of a CTA's tile.", parser=_tile_shape, metavar="MxNxK")
    ] = "128x128x64",
    cluster: Annotated[
        Any, typer.Option(help="CTAs along both.", parser=_one_of(*_CLUSTERS), metavar=_choices(_CLUSTERS))
    ] = "1x1",
    schedule: Annotated[Any, typer.Option(parser=_one_of(*_SCHEDULES), metavar=_choices(_SCHEDULES))] = "cooperative",
    dtype: Dtype = None,
    activation: Activation = None,
    glu_layout: GluLayout = None,
    save_preact: SavePreact = False,
    transpose_w: TransposeW = False,
    out_dtype: OutDtype = None,
    prefer: Annotated[bool, typer.Option(help="Let it serve every call of its form from now on.")] = True,
    tuned: Annotated[
        bool, typer.Option("--tuned", help="Instead: all kernels that tables for this GPU choose.")
    ] = False,
) -> None:
    """Make a kernel that the bundle lacks, and keep it in the cache."""
    from . import _cli_tuning

    with _reported():
        if tuned == (op is not None):
            raise ValueError(f"give an operator ({_OPS}) or --tuned, one of the two")
        if tuned:
            _cli_tuning.compile_tuned()
            return
        form = _form(op, dtype, activation, glu_layout, save_preact, transpose_w, out_dtype)
        shape = {"tile": tile, "cluster": _CLUSTERS[cluster], "schedule": schedule}
        _cli_tuning.compile_one({"op": op, **shape, **form}, prefer)


@app.command()
def tune(
    op: Operator,
    experts: Experts,
    in_features: InFeatures,
    intermediate: Intermediate = 0,
    out_features: OutFeatures = 0,
    rows_per_expert: RowsPerExpert = None,
    dtype: Dtype = None,
    activation: Activation = None,
    glu_layout: GluLayout = None,
    save_preact: SavePreact = False,
    transpose_w: TransposeW = False,
    out_dtype: OutDtype = None,
    training: Training = False,
    budget_s: Annotated[float | None, typer.Option("--budget", help="Seconds of sampling for each problem.")] = None,
    candidates: Annotated[int | None, typer.Option(min=1, help="Kernels beside the shipped, at each size.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compile processes; default: one a CPU but two.")] = None,
    out: Annotated[Path | None, typer.Option(help="Table to add to; default: where the dispatcher looks.")] = None,
) -> None:
    """Measure which kernels serve a layer best on this GPU, and let them serve it from now on."""
    from . import _cli_tuning

    with _reported():
        form = _form(op, dtype, activation, glu_layout, save_preact, transpose_w, out_dtype)
        layer = {"experts": experts, "in_features": in_features, "intermediate": intermediate}
        cost = {"rows_per_expert": rows_per_expert, "budget_s": budget_s, "candidates": candidates, "jobs": jobs}
        chosen = {name: value for name, value in {**cost, "out": out}.items() if value is not None}
        _cli_tuning.tune(op, {**layer, "out_features": out_features, "training": training, **form, **chosen})


@app.command()
def explain(
    op: Operator,
    experts: Experts,
    in_features: InFeatures,
    intermediate: Intermediate = 0,
    out_features: OutFeatures = 0,
    rows: Annotated[
        Any, typer.Option(help="Of all experts together, as 8,4096.", parser=_row_counts, metavar="N,N,...")
    ] = None,
    rows_per_expert: RowsPerExpert = None,
    dtype: Dtype = None,
    activation: Activation = None,
    glu_layout: GluLayout = None,
    save_preact: SavePreact = False,
    transpose_w: TransposeW = False,
    out_dtype: OutDtype = None,
    training: Training = False,
    arch: Annotated[
        Any,
        typer.Option(
            help="Architecture; default: this GPU's, or where there is none the first.",
            parser=_one_of(*profiles.CONFIGS),
            metavar=_choices(profiles.CONFIGS),
        ),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Name of the GPU whose tables hold; default: this GPU's.")] = None,
) -> None:
    """Show which kernels would serve a layer, and why. Needs no GPU, and launches nothing."""
    from . import _cli_tuning

    with _reported():
        if rows and rows_per_expert:
            raise ValueError("give --rows or --rows-per-expert, not both")
        form = _form(op, dtype, activation, glu_layout, save_preact, transpose_w, out_dtype)
        layer = {"experts": experts, "in_features": in_features, "intermediate": intermediate}
        totals = tuple(count * experts for count in rows_per_expert or ()) or rows
        _cli_tuning.explain(op, {**layer, "out_features": out_features, **form}, training, totals, arch, gpu)


@app.command()
def tables(
    merge: Annotated[list[Path] | None, typer.Option(help="Add this file's sections, repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to add to; with --merge.")] = None,
) -> None:
    """Show the tables of tuned kernels that the dispatcher reads, or merge tables into one."""
    from . import _cli_tuning

    with _reported():
        if merge:
            _cli_tuning.merge(merge, out)
        else:
            _cli_tuning.show_tables()


cache_app = typer.Typer(
    no_args_is_help=True, help="Kernels that were compiled at run time, and objects for builds, on disk."
)
app.add_typer(cache_app, name="cache")


@cache_app.command("list")
def cache_list() -> None:
    """Show every kernel in the cache, its state, which are preferred, and how many objects of builds there are."""
    from . import _cli_tuning

    with _reported():
        _cli_tuning.cache_list()


@cache_app.command("verify")
def cache_verify() -> None:
    """Check every kernel and object; exit status 1 where one is damaged (it is made anew when next asked for)."""
    from . import _cli_tuning

    with _reported():
        sound = _cli_tuning.cache_verify()
    raise typer.Exit(0 if sound else 1)


@cache_app.command("clear")
def cache_clear(
    outdated: Annotated[bool, typer.Option("--outdated", help="Only what no installed version can use.")] = False,
    preferred: Annotated[bool, typer.Option("--preferred", help="Only the preferences; kernels stay.")] = False,
) -> None:
    """Remove compiled kernels, objects and preferences; what runs keeps what it has loaded."""
    from . import _cli_tuning

    with _reported():
        _cli_tuning.cache_clear(outdated, preferred)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"glulam {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")]


@app.callback()
def _common(version: Version = False) -> None:
    """Options of the command itself."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may hold bytes that are no text


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="glulam")


if __name__ == "__main__":
    main()
