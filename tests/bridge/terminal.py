"""Run a command in a pseudo-terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from toys import REPOSITORY

_SPAWN = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def in_terminal(command: list[str], environment: dict[str, str], folder: Path = REPOSITORY) -> str:
    """Run a command with a pseudo-terminal of 100 columns as its controlling terminal; return its output as lines.
    Fails if the command does.
    """
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "COLUMNS": "100", **environment}
    started = [sys.executable, "-c", _SPAWN, *command]
    done = subprocess.run(started, stdin=subprocess.DEVNULL, capture_output=True, env=variables, cwd=folder)
    seen = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, seen
    return seen
