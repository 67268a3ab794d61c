"""The command `glulam`: build a bundle, show what is in it, compile and tune kernels, say what this machine can do.

Needs no torch to build or to show: only `doctor` imports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ffi_bridge import BundleError, CompileError, ToolchainError, __version__
from ffi_bridge import build as builder
from ffi_bridge.loader import ENV_BUNDLE, bundle_root, packaged_root
from ffi_bridge.manifest import Function, Manifest, verify

from .errors import UnsupportedDevice

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Fused grouped-GEMM kernels for mixture-of-experts layers."
)

Archs = Annotated[list[str] | None, typer.Option(help="Architecture, repeatable; default: every one.")]

_PIPE_WIDTH = 120  # columns where the output is not a terminal


def console() -> Console:
    """Standard output; wide enough for a table where it goes to a file or a pipe."""
    out = Console()
    return out if out.is_terminal else Console(width=max(out.width, _PIPE_WIDTH))


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """What a user can mend is one message and exit status 1, not a traceback."""
    try:
        yield
    except (BundleError, CompileError, ToolchainError, UnsupportedDevice, ValueError, OSError) as error:
        typer.echo(f"glulam: {error}", err=True)
        raise typer.Exit(1) from error


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


@app.command()
def build(
    arch: Archs = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compile processes; default: one a CPU.")] = None,
    out: Annotated[Path | None, typer.Option(help="Bundle folder; default: inside the installed package.")] = None,
) -> None:
    """Compile the shipped kernels and link them into one library per architecture."""
    with _reported():
        for one in arch or list(builder.CONFIGS):
            root = out or packaged_root()
            manifest = builder.build(builder.shipped_specs(one), root, jobs)
            contents = f"{len(manifest.functions)} functions, {_megabytes(manifest.size)}"
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
        flags += [first["kernel"], f"n={first['n']}"]
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
        for one in arch or list(builder.CONFIGS):
            folder = bundle_root(bundle) / one
            manifest = verify(folder, one)
            out.print(_table(manifest, op))
            versions = ", ".join(f"{name} {version or '?'}" for name, version in manifest.versions.items())
            out.print(f"library   {folder / manifest.library} ({_megabytes(manifest.size)})", soft_wrap=True)
            out.print(f"sha256    {manifest.sha256}", soft_wrap=True)
            out.print(f"built by  {versions}", soft_wrap=True)


@app.command()
def doctor() -> None:
    """Say in plain words what this machine can do, what is missing, and what mends it."""
    from ._doctor import examine

    out = console()
    diagnosis = examine()
    for check in diagnosis.checks:
        mark = {"ok": "[green]ok  [/]", "note": "[yellow]note[/]", "bad": "[red]BAD [/]"}[check.state]
        out.print(f"{mark} {check.name:<12}", end=" ")
        out.print(check.finding, markup=False, highlight=False, soft_wrap=True)
        if check.remedy:
            out.print(f"{'':<17} -> {check.remedy}", markup=False, highlight=False, soft_wrap=True)
    out.print()
    out.print(diagnosis.verdict, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if diagnosis.usable else 1)


def _triple(text: str) -> tuple[int, ...]:
    """ "128x256x64" as numbers. Raises ValueError."""
    try:
        return tuple(int(part) for part in text.lower().replace(",", "x").split("x"))
    except ValueError:
        raise ValueError(f"{text!r} is not of the form 128x256x64") from None


Activation = Annotated[str, typer.Option(help="As swiglu, geglu, silu.")]
GluLayout = Annotated[str, typer.Option(help="concat, interleaved or interleaved32.")]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float16.")]
OutDtype = Annotated[str | None, typer.Option(help="Of a grouped_wgrad: that of x, or float32.")]
SavePreact = Annotated[bool, typer.Option("--save-preact", help="Of a grouped_glu: store the preactivation.")]
TransposeW = Annotated[bool, typer.Option("--transpose-w", help="Of a grouped_mm: contract over the weight's rows.")]
WITH_ACTIVATION = ("grouped_glu", "grouped_mlp", "grouped_dglu")


@app.command("compile")
def compile_kernel(
    op: Annotated[str | None, typer.Argument(help="grouped_mm, grouped_glu, grouped_mlp, grouped_dglu, ...")] = None,
    tile: Annotated[str, typer.Option(help="Rows x weight rows x depth of a CTA's tile.")] = "128x128x64",
    cluster: Annotated[str, typer.Option(help="1x1, 2x1, 1x2, or adaptive.")] = "1x1",
    schedule: Annotated[str, typer.Option(help="cooperative or pingpong.")] = "cooperative",
    dtype: Dtype = "bfloat16",
    activation: Activation = "swiglu",
    glu_layout: GluLayout = "concat",
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
        if tuned:
            _cli_tuning.compile_tuned()
            return
        fields: dict[str, Any] = {"op": op, "tile": _triple(tile), "schedule": schedule, "dtype": dtype}
        fields["cluster"] = cluster if cluster == "adaptive" else _triple(cluster)
        if op in WITH_ACTIVATION:
            fields |= {"activation": activation, "glu_layout": glu_layout}
        flags = {"save_preact": save_preact, "transpose_w": transpose_w, "out_dtype": out_dtype}
        _cli_tuning.compile_one({**fields, **{name: value for name, value in flags.items() if value}}, prefer)


@app.command()
def tune(
    op: Annotated[str, typer.Argument(help="grouped_mm, grouped_glu, grouped_mlp, grouped_dglu or grouped_wgrad.")],
    experts: Annotated[int, typer.Option(min=1)],
    in_features: Annotated[int, typer.Option(min=1, help="Columns of x (of a grouped_dglu: of dy).")],
    intermediate: Annotated[int, typer.Option(help="Columns of the activation.")] = 0,
    out_features: Annotated[int, typer.Option(help="Columns of the result; of a grouped_mlp those of x.")] = 0,
    rows_per_expert: Annotated[str | None, typer.Option(help="As 1,16,256; default: eight, 1 to 4096.")] = None,
    dtype: Dtype = "bfloat16",
    activation: Activation = "swiglu",
    glu_layout: GluLayout = "concat",
    save_preact: SavePreact = False,
    transpose_w: TransposeW = False,
    out_dtype: OutDtype = None,
    training: Annotated[bool, typer.Option("--training", help="Of a grouped_mlp: its training step.")] = False,
    budget: Annotated[float | None, typer.Option(help="Seconds of sampling for each problem.")] = None,
    candidates: Annotated[int | None, typer.Option(min=1, help="Kernels beside the shipped, at each size.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compile processes; default: one a CPU but two.")] = None,
    out: Annotated[Path | None, typer.Option(help="Table to add to; default: where the dispatcher looks.")] = None,
) -> None:
    """Measure which kernels serve a layer best on this GPU, and let them serve it from now on."""
    from . import _cli_tuning

    chosen: dict[str, Any] = {"budget_s": budget, "candidates": candidates, "jobs": jobs, "out": out}
    with _reported():
        if rows_per_expert:
            chosen["rows_per_expert"] = _triple(rows_per_expert)
        shape: dict[str, Any] = {
            "experts": experts,
            "in_features": in_features,
            "intermediate": intermediate,
            "out_features": out_features,
            "dtype": dtype,
            "activation": activation,
            "glu_layout": glu_layout,
            "save_preact": save_preact,
            "transpose_w": transpose_w,
            "out_dtype": out_dtype,
            "training": training,
        }
        given = {name: value for name, value in chosen.items() if value is not None}
        _cli_tuning.tune(op, {**shape, **given})


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


cache_app = typer.Typer(no_args_is_help=True, help="Kernels that were compiled at run time, on disk.")
app.add_typer(cache_app, name="cache")


@cache_app.command("list")
def cache_list() -> None:
    """Show every kernel in the cache, its state, and which are preferred."""
    from . import _cli_tuning

    with _reported():
        _cli_tuning.cache_list()


@cache_app.command("verify")
def cache_verify() -> None:
    """Check every kernel in the cache; exit status 1 where one is damaged (it is made anew when next asked for)."""
    from . import _cli_tuning

    with _reported():
        sound = _cli_tuning.cache_verify()
    raise typer.Exit(0 if sound else 1)


@cache_app.command("clear")
def cache_clear(
    outdated: Annotated[bool, typer.Option("--outdated", help="Only what no installed version can use.")] = False,
    preferred: Annotated[bool, typer.Option("--preferred", help="Only the preferences; kernels stay.")] = False,
) -> None:
    """Remove compiled kernels and preferences; what runs keeps what it has loaded."""
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


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="glulam")


if __name__ == "__main__":
    main()
