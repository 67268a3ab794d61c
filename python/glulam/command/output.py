"""How the commands write."""

from __future__ import annotations

from rich.console import Console

_PIPE_WIDTH = 120  # columns where the output is not a terminal


def console() -> Console:
    """Standard output; wide enough for a table where it goes to a file or a pipe. Text is shown as it is."""
    out = Console(markup=False, emoji=False, highlight=False)
    if not out.is_terminal:
        out.width = max(out.width, _PIPE_WIDTH)
    return out


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
