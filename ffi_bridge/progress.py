"""Progress of a build: a bar in a terminal; in a log a line at the start, every few seconds, and at the end."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PERIOD_S = 10.0  # between two lines of a log
_BAR_COLUMNS = 30


def _minutes(seconds: float) -> str:
    """Format seconds as 0:07, 12:30 or 1:02:30."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """Counts finished kernels out of `total`, lists the running ones and estimates the time left. Thread-safe.

    A kernel that finishes without having started was compiled earlier: it counts as done, but not in the estimate.
    """

    def __init__(self, title: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.title, self.total, self.done = title, total, 0
        self._clock, self._lock = clock, threading.Lock()
        self._begin = clock()
        self._made, self._making_since = 0, 0.0
        self._running: dict[str, None] = {}  # names in the order of their starts

    def started(self, name: str) -> None:
        """Note that a kernel is being compiled."""
        with self._lock:
            if not self._made and not self._running:
                self._making_since = self._clock()
            self._running[name] = None

    def finished(self, name: str) -> None:
        """Note that a kernel is done."""
        with self._lock:
            self.done += 1
            if name in self._running:
                del self._running[name]
                self._made += 1

    @property
    def counted(self) -> str:
        """The number of finished kernels, as text."""
        return f"{self.done} of {self.total}"

    @property
    def times(self) -> str:
        """Elapsed time and, once a kernel was compiled, the time left at the pace so far."""
        with self._lock:
            now = self._clock()
            text = f"{_minutes(now - self._begin)} elapsed"
            if self._made and self.done < self.total:
                left = (now - self._making_since) / self._made * (self.total - self.done)
                text += f", about {_minutes(left)} left"
            return text

    @property
    def running(self) -> str:
        """The kernel that has been compiling longest, and the number of others; empty if none is compiling."""
        with self._lock:
            names = list(self._running)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"compiling {names[0]}{more}" if names else ""

    @property
    def line(self) -> str:
        """Title, counts, times and running kernels in one line."""
        return f"{self.title}: {', '.join(part for part in (self.counted, self.times, self.running) if part)}"


@contextlib.contextmanager
def shown(title: str, total: int, wanted: bool = True, period_s: float = PERIOD_S) -> Iterator[Progress]:
    """Yield a Progress to report to, and show it on standard error while the block runs.

    Args:
        title: text before the counts.
        total: number of kernels.
        wanted: False: show nothing.
        period_s: seconds between two lines of a log.
    """
    progress = Progress(title, total)
    with _display(progress, period_s) if wanted else contextlib.nullcontext():
        yield progress


def _display(progress: Progress, period_s: float) -> contextlib.AbstractContextManager[object]:
    """Return a context that shows progress: as a bar in a terminal, otherwise as log lines every `period_s` seconds."""
    if sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True)
        if not console.is_dumb_terminal:
            return _bar(progress, console)
    return _log(progress, period_s)


def _row(progress: Progress) -> Table:
    """Return the bar's line; the names of compiling kernels are cut to the space that the terminal has left."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    row = Table.grid(padding=(0, 1), expand=True)
    for _ in range(4):
        row.add_column(no_wrap=True)
    row.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    bar = ProgressBar(progress.total, progress.done, width=_BAR_COLUMNS)
    row.add_row(progress.title, bar, progress.counted, progress.times, progress.running)
    return row


def _bar(progress: Progress, console: Console) -> contextlib.AbstractContextManager[object]:
    from rich.live import Live

    return Live(get_renderable=lambda: _row(progress), console=console)


@contextlib.contextmanager
def _log(progress: Progress, period_s: float) -> Iterator[None]:
    """Write log lines from a separate thread, so that a slow kernel does not delay them.

    The last line is written only after a success.
    """
    ended = threading.Event()

    def say() -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader of the log may have gone
            sys.stderr.write(f"{progress.line}\n")
            sys.stderr.flush()

    def tell() -> None:
        say()
        while not ended.wait(period_s):
            say()

    thread = threading.Thread(target=tell, name="glulam-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    say()


class _AndTerminal(io.TextIOBase):
    """Writes whole lines to a stream and, while this process is in a terminal's foreground, to the terminal."""

    def __init__(self, stream: TextIO, terminal: TextIO) -> None:
        self._stream, self._terminal, self._start = stream, terminal, "\n"

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # the terminal may have gone
            if os.tcgetpgrp(self._terminal.fileno()) == os.getpgrp():
                self._terminal.write(self._start + text)
                self._terminal.flush()
                self._start = "\r"  # overwrite pip's spinner at the beginning of the line
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextlib.contextmanager
def shown_past_pip() -> Iterator[None]:
    """Copy standard error to the terminal: pip hides a build's output unless called with -v."""
    try:
        terminal = open("/dev/tty", "w")  # noqa: SIM115 - closed below
    except OSError:  # there is none, as in a log
        yield
        return
    with terminal, contextlib.redirect_stderr(_AndTerminal(sys.stderr, terminal)):
        yield
