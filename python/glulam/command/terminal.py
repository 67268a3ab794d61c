"""Text that a terminal shows and does not act on: paths, variables and files hold whatever somebody put there."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text


def printable(text: str, keep: str = "\n\t") -> str:
    """Escape, as Python does, each character that is not printed: controls, terminal escapes, direction marks, bytes
    that are no text. Those in `keep` stay.
    """
    return "".join(each if each.isprintable() or each in keep else ascii(each)[1:-1] for each in text)


def in_one_line(text: str) -> str:
    """`printable` without line breaks and tabs."""
    return printable(text, keep="")


class PlainConsole(Console):
    """Shows text as it is, in lines and in tables, and makes it `printable`."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text), **how)
