"""Text that is safe to print on a terminal: paths, variables and files may contain terminal escapes."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text


def printable(text: str, keep: str = "\n\t") -> str:
    """Escape, as Python does, each unprintable character of a text, except the characters in `keep`.

    These are controls, terminal escapes, direction marks and undecodable bytes.
    """
    return "".join(each if each.isprintable() or each in keep else ascii(each)[1:-1] for each in text)


def in_one_line(text: str) -> str:
    """Return `printable` text in which line breaks and tabs are escaped, too."""
    return printable(text, keep="")


class PlainConsole(Console):
    """A console without markup that makes all text `printable`, in lines and in tables."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **how: Any) -> Text:
        """Return `printable` text as rich renders it."""
        return super().render_str(printable(text), **how)
