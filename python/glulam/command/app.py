"""Declaration of commands (a function, and a `Row` for each option), their error messages and their output."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from cute_kernels.tiles import SpecError
from ffi_bridge import BundleError, CompileError, ToolchainError
from ffi_bridge.manifest import Function

from ..choose import records, specs
from ..errors import UnsupportedDevice
from .terminal import PlainConsole, printable

_PIPE_WIDTH = 120  # columns if the output is not a terminal


class _OneLineErrors(TyperGroup):
    """The group of commands; it reports a mistake on the command line in one line, like other errors."""

    def main(self, *args: Any, **extra: Any) -> Any:
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                say_error(error.format_message())
            status = error.exit_code
        except typer.Abort:
            status = 1
        sys.exit(status or 0)


_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    cls=_OneLineErrors,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # for every command
    help="Fused grouped-GEMM kernels for mixture-of-experts layers.",
)
cache_app = typer.Typer(
    no_args_is_help=True, help="Kernels that were compiled at run time, and objects for builds, on disk."
)
app.add_typer(cache_app, name="cache")


def say(text: str) -> None:
    """Print a line to standard output."""
    typer.echo(printable(text))


def say_error(text: str) -> None:
    """Print a line to standard error."""
    typer.echo(printable(f"glulam: {text}"), err=True)


def option(name: str) -> str:
    """Return the command-line spelling of a parameter's name: "--transpose-w" for transpose_w."""
    return "--budget" if name == "budget_s" else f"--{name.replace('_', '-')}"


_NAMED = re.compile(
    r"\b(?:(in_features|out_features|rows_per_expert|glu_layout|save_preact|transpose_w|out_dtype|budget_s)=?"
    r"|(intermediate|experts|dtype|activation|training|candidates|jobs|schedule)(?:=|(?= is |, got)))"
)


def _as_typed(error: Exception) -> str:
    """Return an error's message with options named as typed on the command line."""
    if isinstance(error, specs.TileError):
        tile = error.nearest
        cluster = specs.ADAPTIVE if tile.adaptive else f"{tile.cluster_m}x{tile.cluster_n}"
        nearest = f"--tile {tile.m}x{tile.n}x{tile.k} --cluster {cluster} --schedule {tile.schedule}"
        return f"{error.limit.partition('; choose')[0]}; the nearest valid choice is {nearest}"
    if isinstance(error, UnicodeEncodeError):
        return f"{records.shown(error.object)} is no text in UTF-8, and TVM-FFI opens no such path; rename it"
    if not isinstance(error, SpecError) and not str(error).startswith(("tune: ", "explain: ")):
        return str(error)  # not about an option; names in it may be parts of a path
    return _NAMED.sub(lambda name: option(name[1] or name[2]) + " " * name[0].endswith("="), str(error))


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Turn errors that a user can mend into one message and exit status 1, and warnings into messages."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say_error(str(message))
        try:
            yield
        except (BundleError, CompileError, ToolchainError, UnsupportedDevice, ValueError, OSError) as error:
            say_error(_as_typed(error))
            raise typer.Exit(1) from error


class Row(NamedTuple):
    """An option of a command.

    Attributes:
        kind: the option's type.
        default: the default value; REQUIRED: there is none.
        how: further arguments of `typer.Option`.
        positional: True: a positional argument. False: an option with a name.
    """

    kind: Any
    default: Any
    how: dict[str, Any]
    positional: bool = False

    def parameter(self, name: str) -> inspect.Parameter:
        """Return the parameter of a typer command for this option. `name`: the option's name in Python."""
        typed = f"{option(name)}/--no-{name}" if self.default is True else option(name)
        info = typer.Argument(**self.how) if self.positional else typer.Option(typed, **self.how)
        kind: Any = self.kind
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=Annotated[kind, info]
        )


REQUIRED = inspect.Parameter.empty


def row(help: str, kind: Any = str | None, default: Any = None, **how: Any) -> Row:
    """Declare an option.

    Args:
        help: the help text.
        kind: the option's type.
        default: the value if the option is not given.
        how: further arguments of `typer.Option`.
    """
    return Row(kind, default, {"help": help, **how})


def flag(help: str) -> Row:
    """Declare an option without a value, False by default."""
    return row(help, bool, False)


def count(help: str, default: Any = None, least: int = 1) -> Row:
    """Declare an option that takes an integer of at least `least`."""
    return row(help, int | None, default, min=least)


def parsed(help: str, valid: str, metavar: str, parse: Callable[[str], Any], default: Any = None) -> Row:
    """Declare an option whose text `parse` converts; `parse` raises ValueError for invalid text.

    Args:
        help: the help text.
        valid: describes valid text, for the error "... is not ...".
        metavar: stands for the value in the help, such as "MxNxK".
        parse: converts the text.
        default: the value if the option is not given.
    """

    def parser(text: str) -> Any:
        try:
            return parse(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {valid}") from None

    return row(help, Any, default, parser=parser, metavar=metavar)


def word(help: str, words: Iterable[str], default: Any = None, metavar: str = "", listed: str = "") -> Row:
    """Declare an option that takes one of `words`.

    Args:
        help: the help text.
        words: the valid values.
        default: the value if the option is not given.
        metavar: stands for the value in the help. Empty: all words.
        listed: how the error lists the words. Empty: all words.
    """
    choices = list(words)
    return parsed(
        help, f"one of {listed or ', '.join(choices)}", metavar or f"[{'|'.join(choices)}]",
        lambda text: choices[choices.index(text)], default,
    )  # fmt: skip


def command(path: str, /, **rows: Row) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function to make it a command; the function's docstring is the help text.

    Args:
        path: the command as typed after `glulam`, such as "tune" or "cache list".
        rows: {parameter of the function: the option that sets it}.
    """
    group = cache_app if path.startswith("cache ") else app
    parameters = [row.parameter(option) for option, row in rows.items()]

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            with _reported():
                function(**given)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del run.__wrapped__  # typer would read its parameters
        group.command(path.split()[-1])(run)
        return function

    return register


def console() -> Console:
    """Return a console for standard output, at least 120 columns wide if it is not a terminal."""
    out = PlainConsole()
    if not out.is_terminal:
        out.width = max(out.width, _PIPE_WIDTH)
    return out


def show(*parts: str | Table) -> None:
    """Print tables, and lines of text, which are not broken at the terminal's width."""
    out = console()
    for part in parts:
        out.print(part, soft_wrap=isinstance(part, str))


def megabytes(size: int) -> str:
    """Return a number of bytes as text in MB."""
    return f"{size / 1e6:.1f} MB"


def resources(functions: Mapping[str, Function], name: str) -> tuple[str, str]:
    """Return two texts for a function's device kernels: registers a thread, and KB of shared memory.

    Each text has one number for each kernel, joined by " + ". A function of several stages has no kernels in its own
    record; they are in the records of its stages.

    Args:
        functions: a manifest's functions.
        name: the function.
    """
    stages = functions[name].stages or (name,)
    kernels = [kernel for stage in stages if stage in functions for kernel in functions[stage].kernels]
    registers = " + ".join(str(kernel.registers) for kernel in kernels)
    return registers, " + ".join(f"{(kernel.static_smem + kernel.dynamic_smem) / 1024:.1f}" for kernel in kernels)
