"""The command `glulam`: build a bundle, show what is in it, say what this machine can do.

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
    except (BundleError, CompileError, ToolchainError, ValueError, OSError) as error:
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
