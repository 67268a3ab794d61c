"""Progress messages: their text, and messages in logs while one slow thing is being made."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ffi_bridge import progress
from ffi_bridge.progress import Progress, shown
from terminal import in_terminal

NOT_SOON = 3600.0


class Clock:
    """A clock that returns the time it was set to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Log(io.StringIO):
    """A stream that is no terminal; tests can wait until text is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = threading.Semaphore(0)

    def flush(self) -> None:
        self.lines.release()


def test_a_line_says_done_total_elapsed_left_and_what_is_made() -> None:
    clock = Clock()
    made = Progress("kernels", 4, clock)
    assert made.line == "kernels: 0 of 4, 0:00 elapsed"
    clock.now += 5
    made.started("first")
    made.started("second")
    clock.now += 30
    assert made.line == "kernels: 0 of 4, 0:35 elapsed, compiling first and 1 more"
    made.finished("first")
    assert made.line == "kernels: 1 of 4, 0:35 elapsed, about 1:30 left, compiling second"
    clock.now += 3600
    assert made.line == "kernels: 1 of 4, 1:00:35 elapsed, about 3:01:30 left, compiling second"
    for name in ("second", "third", "fourth"):
        made.finished(name)
    assert made.line == "kernels: 4 of 4, 1:00:35 elapsed"


def test_what_was_there_before_does_not_speed_the_estimate_up() -> None:
    clock = Clock()
    made = Progress("kernels", 103, clock)
    for number in range(100):
        made.finished(f"found {number}")
    made.started("new")
    assert "left" not in made.line
    clock.now += 20
    made.finished("new")
    assert made.line == "kernels: 101 of 103, 0:20 elapsed, about 0:40 left"


def test_threads_may_report_at_once() -> None:
    made = Progress("kernels", 4000)

    def make(part: int) -> None:
        for number in range(1000):
            made.started(f"{part} {number}")
            assert made.line
            made.finished(f"{part} {number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, range(4)))
    assert (made.counted, made.running) == ("4000 of 4000", "")


def test_a_log_is_told_while_one_thing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", log := Log())
    with shown("kernels", 1, period_s=0.01) as made:
        made.started("slow")
        said = len(log.getvalue().splitlines())  # these, and one in the making, may still name nothing
        for _ in range(said + 4):
            log.lines.acquire()
        made.finished("slow")
    lines = log.getvalue().splitlines()
    assert re.match(r"kernels: 0 of 1, \d+:\d\d elapsed", lines[0]) and "\x1b" not in log.getvalue()
    assert all(line.endswith("elapsed, compiling slow") for line in lines[said + 1 : said + 4])
    assert lines[-1].startswith("kernels: 1 of 1, ")


def test_a_log_hears_at_least_every_15_seconds() -> None:
    assert progress.PERIOD_S <= 15


def test_a_short_build_logs_its_beginning_and_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with shown("kernels", 1, period_s=NOT_SOON) as made:
        made.finished("found")
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("kernels: ") and last.startswith("kernels: 1 of 1, ")


def test_a_failed_build_logs_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), shown("kernels", 1, period_s=NOT_SOON):
        raise KeyboardInterrupt
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "glulam-progress"]


def test_a_log_that_nobody_reads_any_more_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        with shown("kernels", 1, period_s=NOT_SOON) as made:
            made.finished("found")
        with pytest.raises(BrokenPipeError):
            gone.flush()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), gone.fileno())


def test_what_is_not_wanted_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with shown("kernels", 1, wanted=False, period_s=0.01) as made:
        made.finished("found")
    assert capsys.readouterr() == ("", "")
    assert made.counted == "1 of 1"


SCRIPT = """
from ffi_bridge.progress import shown
with shown("kernels", 2, period_s=3600) as made:
    for name in ("a" * 300, "b" * 300):
        made.started(name)
        made.finished(name)
    made.started("c" * 300)
"""


def test_a_terminal_gets_a_bar_of_one_line() -> None:
    *_, bar = (line for line in in_terminal([sys.executable, "-c", SCRIPT], {}).splitlines() if "kernels" in line)
    assert "\x1b[" in bar and "━" in bar and "2 of 2" in bar and "elapsed" in bar
    assert "compiling ccc" in bar and "…" in bar and "c" * 100 not in bar


def test_a_terminal_without_cursor_control_gets_lines() -> None:
    first, last = in_terminal([sys.executable, "-c", SCRIPT], {"TERM": "dumb"}).splitlines()
    assert "\x1b" not in first + last and last.startswith("kernels: 2 of 2, ")
