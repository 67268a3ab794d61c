"""Commands in a terminal of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from toys import REPOSITORY

_SPAWN = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def in_terminal(command: list[str], environment: dict[str, str], folder: Path = REPOSITORY) -> str:
    """What a command writes to a terminal of 100 columns that controls it, as lines; it must succeed."""
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "COLUMNS": "100", **environment}
    started = [sys.executable, "-c", _SPAWN, *command]
    done = subprocess.run(started, stdin=subprocess.DEVNULL, capture_output=True, env=variables, cwd=folder)
    seen = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, seen
    return seen
