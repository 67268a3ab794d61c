"""The command `glulam`: build a bundle, show what is in it, compile and tune kernels, say what this machine can do.

A command is a function, and a row for each of its options. Needs no torch to build or to show.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table
from typer.core import TyperGroup

from cute_kernels.specs import ACTIVATIONS, DTYPES, GLU_LAYOUTS
from cute_kernels.tiles import CLUSTERS, TILE_K, SpecError
from ffi_bridge import BundleError, CompileError, ToolchainError, __version__, profiles, toolchain
from ffi_bridge import build as builder
from ffi_bridge.loader import ENV_BUNDLE, bundle_root, packaged_root
from ffi_bridge.manifest import Function, verify

from ..choose import records, specs
from ..choose.shipped import TILED
from ..errors import UnsupportedDevice
from .output import console, megabytes


class _OneLineErrors(TyperGroup):
    """Reports a mistake on the command line as any other: in one line."""

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
cache_app = typer.Typer(
    no_args_is_help=True, help="Kernels that were compiled at run time, and objects for builds, on disk."
)
app.add_typer(cache_app, name="cache")


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


class Row(NamedTuple):
    """An option of a command: its type, its default, and what else `typer.Option` takes."""

    kind: Any
    default: Any
    how: dict[str, Any]
    positional: bool = False

    def parameter(self, name: str) -> inspect.Parameter:
        typed = f"{option(name)}/--no-{name}" if self.default is True else option(name)
        info = typer.Argument(**self.how) if self.positional else typer.Option(typed, **self.how)
        kind: Any = self.kind
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=Annotated[kind, info]
        )


REQUIRED = inspect.Parameter.empty


def _row(help: str, kind: Any = str | None, default: Any = None, **how: Any) -> Row:
    return Row(kind, default, {"help": help, **how})


def _flag(help: str) -> Row:
    return _row(help, bool, False)


def _count(help: str, default: Any = None, least: int = 1) -> Row:
    return _row(help, int | None, default, min=least)


def _parsed(help: str, form: str, metavar: str, parse: Callable[[str], Any], default: Any = None) -> Row:
    """`form`: what a text that raises ValueError is not."""

    def parser(text: str) -> Any:
        try:
            return parse(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {form}") from None

    return _row(help, Any, default, parser=parser, metavar=metavar)


def _word(help: str, words: Iterable[str], default: Any = None, metavar: str = "") -> Row:
    """One of these words."""
    choices = list(words)
    return _parsed(
        help, f"one of {', '.join(choices)}", metavar or f"[{'|'.join(choices)}]",
        lambda text: choices[choices.index(text)], default,
    )  # fmt: skip


def _numbers(text: str, separator: str = ",") -> tuple[int, ...]:
    """Whole numbers above 0. Raises ValueError."""
    numbers = tuple(int(part) for part in text.lower().split(separator))
    if min(numbers) < 1:
        raise ValueError
    return numbers


def _tile_shape(text: str) -> tuple[int, ...]:
    m, n, k = _numbers(text, "x")
    if k != TILE_K[16]:
        raise ValueError
    return m, n, k


def _row_counts(help: str) -> Row:
    return _parsed(help, "of the form 1,16,256", "N,N,...", _numbers)


def command(path: str, /, **rows: Row) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command that a function is: an option for each row, and its docstring for help."""
    group = cache_app if path.startswith("cache ") else app
    parameters = [row.parameter(option) for option, row in rows.items()]

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            with _reported():
                function(**given)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del run.__wrapped__  # whose parameters typer would look at
        group.command(path.split()[-1])(run)
        return function

    return register


def _tuning() -> Any:
    """What imports torch."""
    from . import tuning

    return tuning


ARCHS = _word("Architecture, repeatable; default: every one.", profiles.CONFIGS)._replace(kind=list[str] | None)


@command(
    "build",
    arch=ARCHS,
    profile=_row("demo: what the demo calls; bf16: all but float16; full: what a wheel has.", str, "bf16"),
    only=_row("Functions by name, as 'grouped_mm_bf16_*'; repeatable; default: all.", list[str] | None),
    jobs=_count("Compile processes; default: one a CPU."),
    out=_row("Bundle folder; default: inside the installed package.", Path | None),
    keep=_flag("Leave a bundle as it is that has these functions."),
)
def build(
    arch: list[str] | None, profile: str, only: list[str] | None, jobs: int | None, out: Path | None, keep: bool
) -> None:
    """Compile the shipped kernels and link them into one library per architecture."""
    for one in arch or list(profiles.CONFIGS):
        root = out or packaged_root()
        specs = profiles.shipped_specs(one, profile, only or ())
        manifest = (builder.find(specs, root) if keep else None) or builder.build(specs, root, jobs)
        contents = f"{len(manifest.functions)} functions, {megabytes(manifest.size)}"
        typer.echo(f"{root / one / manifest.library}: {contents}")


def _tile(stage: dict[str, Any]) -> str:
    tile = stage.get("tile")
    if tile is None:
        return "-"
    adaptive = " adaptive" if tile["adaptive"] else ""
    cluster = f"c{tile['cluster_m']}x{tile['cluster_n']}{adaptive}"
    return f"{tile['m']}x{tile['n']}x{tile['k']} {cluster} {tile['schedule'][:4]}"


def _cells(function: Function) -> dict[str, str]:
    """What `info` shows of a function. A composed one's stages are the specs in its spec."""
    spec, kernels = function.spec, function.kernels
    stages = [value for value in spec.values() if isinstance(value, dict) and "tile" in value] or [spec]
    first = stages[0]
    flags = [name for stage in stages for name, value in stage.items() if value is True]
    if "kernel" in first:
        flags += [first["kernel"], *(f"{name}={first[name]}" for name in ("n", "experts") if first.get(name))]
    return {
        "op": spec["op"],
        "dtype": first["dtype"],
        "activation": first.get("activation", "-"),
        "layout": first.get("glu_layout", "-"),
        "tile": " + ".join(dict.fromkeys(_tile(stage) for stage in stages)),
        "options": ", ".join(flags) or "-",
        "registers": " + ".join(str(kernel.registers) for kernel in kernels),
        "smem KB": " + ".join(f"{(kernel.static_smem + kernel.dynamic_smem) / 1024:.1f}" for kernel in kernels),
    }


@command(
    "info",
    arch=ARCHS,
    op=_row("Show one operator's functions only, as grouped_mlp."),
    bundle=_row(f"Folder; default: ${ENV_BUNDLE}, else the package's.", Path | None),
)
def info(arch: list[str] | None, op: str | None, bundle: Path | None) -> None:
    """Show what the bundle contains; nothing of it is loaded."""
    out = console()
    for one in arch or list(profiles.CONFIGS):
        folder = bundle_root(bundle) / one
        manifest = verify(folder, one)
        functions = manifest.functions.values()
        table = Table(title=f"{manifest.arch}: {len(functions)} functions")
        rows = [_cells(function) for function in functions if op in (None, function.spec["op"])]
        for heading in rows[0] if rows else ():
            table.add_column(heading, justify="right" if heading in ("registers", "smem KB") else "left")
        for row in rows:
            table.add_row(*row.values())
        out.print(table)
        versions = ", ".join(f"{name} {version or '?'}" for name, version in manifest.versions.items())
        ranges = ", ".join(f"{name} {wanted}" for name, wanted in toolchain.RUNS_WITH.items())
        for line in (
            f"library   {folder / manifest.library} ({megabytes(manifest.size)})",
            f"sha256    {manifest.sha256}",
            f"built by  {versions}",
            f"runs with {ranges}, on any {manifest.host} CPU",
        ):
            out.print(line, soft_wrap=True)


MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "bad": ("BAD", "red")}


@command("doctor")
def doctor() -> None:
    """Say in plain words what this machine can do, what is missing, and what mends it."""
    from .doctor import examine, verdict

    out = console()
    checks = []
    for check in examine():
        checks.append(check)
        mark, style = MARKS[check.state]
        out.print(f"{mark:<4}", style=style, end=" ")
        out.print(f"{check.name:<12} {check.finding}", soft_wrap=True)
        if check.remedy:
            out.print(f"{'':<17} -> {check.remedy}", soft_wrap=True)
    out.print()
    out.print(verdict(checks), soft_wrap=True)
    raise typer.Exit(int(any(check.state == "bad" for check in checks)))


OPS = ", ".join(TILED)
CLUSTERS_BY_NAME: dict[str, Any] = {
    **{f"{m}x{n}": (m, n) for m, n in CLUSTERS}, specs.ADAPTIVE: specs.ADAPTIVE
}  # fmt: skip
OP = _word(f"One of {OPS}.", TILED, REQUIRED, "OP")._replace(positional=True)
FORM = {
    "dtype": _word("Default: bfloat16.", DTYPES),
    "activation": _word("As swiglu (default), geglu, silu.", ACTIVATIONS, metavar="NAME"),
    "glu_layout": _word("Default: concat.", GLU_LAYOUTS),
    "save_preact": _flag("Of a grouped_glu: store the preactivation."),
    "transpose_w": _flag("Forward contracts over weights' rows."),
    "out_dtype": _word("Of a grouped_wgrad: that of x, or float32.", (*DTYPES, "float32"), metavar="NAME"),
}
SIZES = {
    "experts": _count("", REQUIRED),
    "in_features": _count("Columns of x (of a grouped_dglu: of dy).", REQUIRED),
    "intermediate": _count("Columns of the activation.", 0, least=0),
    "out_features": _count("Columns of the result; of a grouped_mlp those of x.", 0, least=0),
}
PROBLEM = {
    "op": OP,
    **SIZES,
    "rows_per_expert": _row_counts("As 1,16,256; default: eight, 1 to 4096."),
    **FORM,
    "training": _flag("Of a grouped_mlp: its training step."),
}


def _given(op: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes, and what was given of FORM. Raises ValueError where the operator has no such option."""
    known = specs.fields_of(op)
    given = {name: value for name, value in options.items() if name in SIZES or value}
    for name in given.keys() & FORM.keys() - known:
        others = ", ".join(option(other) for other in FORM if other in known)
        raise ValueError(f"{op} has no option {option(name)}; it has {others}")
    return given


@command(
    "compile",
    op=OP._replace(default=None),
    tile=_parsed(
        "Rows x weight rows x depth of a CTA's tile.", "of the form 128x256x64, where the last is always 64", "MxNxK",
        _tile_shape, "128x128x64",
    ),
    cluster=_word("CTAs along both.", CLUSTERS_BY_NAME, "1x1"),
    schedule=_word("", ("cooperative", "pingpong"), "cooperative"),
    **FORM,
    prefer=_row("Let it serve every call of its form from now on.", bool, True),
    tuned=_flag("Instead: all kernels that tables for this GPU choose."),
)  # fmt: skip
def compile_kernel(
    op: str | None, tile: tuple[int, ...], cluster: str, schedule: str, prefer: bool, tuned: bool, **form: Any
) -> None:
    """Make a kernel that the bundle lacks, and keep it in the cache."""
    if tuned == (op is not None):
        raise ValueError(f"give an operator ({OPS}) or --tuned, one of the two")
    if op is None:
        _tuning().compile_tuned()
        return
    shape = {"tile": tile, "cluster": CLUSTERS_BY_NAME[cluster], "schedule": schedule}
    _tuning().compile_one({"op": op, **shape, **_given(op, form)}, prefer)


@command(
    "tune",
    **PROBLEM,
    budget_s=_row("Seconds of sampling for each problem.", float | None),
    candidates=_count("Kernels beside the shipped, at each size."),
    jobs=_count("Compile processes; default: one a CPU but two."),
    out=_row("Table to add to; default: where the dispatcher looks.", Path | None),
)
def tune(op: str, training: bool, **options: Any) -> None:
    """Measure which kernels serve a layer best on this GPU, and let them serve it from now on."""
    search = {name: options.pop(name) for name in ("rows_per_expert", "budget_s", "candidates", "jobs", "out")}
    chosen = {name: value for name, value in search.items() if value is not None}
    _tuning().tune(op, {"training": training, **_given(op, options), **chosen})


@command(
    "explain",
    **PROBLEM,
    rows=_row_counts("Of all experts together, as 8,4096."),
    arch=_word("Architecture; default: this GPU's, or where there is none the first.", profiles.CONFIGS),
    gpu=_row("Name of the GPU whose tables hold; default: this GPU's."),
)
def explain(
    op: str, rows: Any, rows_per_expert: Any, training: bool, arch: str | None, gpu: str | None, **layer: Any
) -> None:
    """Show which kernels would serve a layer, and why. Needs no GPU, and launches nothing."""
    if rows and rows_per_expert:
        raise ValueError("give --rows or --rows-per-expert, not both")
    totals = tuple(count * layer["experts"] for count in rows_per_expert or ()) or rows
    _tuning().explain(op, _given(op, layer), training, totals, arch, gpu)


@command(
    "tables",
    merge=_row("Add this file's sections, repeatable.", list[Path] | None),
    out=_row("File to add to; with --merge.", Path | None),
)
def tables(merge: list[Path] | None, out: Path | None) -> None:
    """Show the tables of tuned kernels that the dispatcher reads, or merge tables into one."""
    if merge:
        _tuning().merge(merge, out)
    else:
        _tuning().show_tables()


@command("cache list")
def cache_list() -> None:
    """Show every kernel in the cache, its state, which are preferred, and how many objects of builds there are."""
    _tuning().cache_list()


@command("cache verify")
def cache_verify() -> None:
    """Check every kernel and object; exit status 1 where one is damaged (it is made anew when next asked for)."""
    raise typer.Exit(0 if _tuning().cache_verify() else 1)


@command(
    "cache clear",
    outdated=_flag("Only what no installed version can use."),
    preferred=_flag("Only the preferences; kernels stay."),
)
def cache_clear(outdated: bool, preferred: bool) -> None:
    """Remove compiled kernels, objects and preferences; what runs keeps what it has loaded."""
    _tuning().cache_clear(outdated, preferred)


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
