"""The command `glulam`: the console script of that name, or `python -m glulam`."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from ffi_bridge import __version__

from . import bundle as bundle  # registers its commands, as the others do
from . import cache as cache
from . import doctor as doctor
from . import tuning as tuning
from . import validate as validate
from .app import app, say


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"glulam {__version__}")
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
