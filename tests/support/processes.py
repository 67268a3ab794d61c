"""Targets for the child processes of `glulam validate` in tests: processes that end in various ways."""

from __future__ import annotations

import os
import time
from typing import Any


def passes(connection: Any) -> None:
    connection.send(("at", "the first call"))
    connection.send(("passed", 2, frozenset(("a", "b"))))


def fails(connection: Any) -> None:
    connection.send(("at", "the first call"))
    connection.send(("at", "the second call"))
    connection.send(("failed", "it is wrong"))


def hangs(connection: Any) -> None:
    connection.send(("at", "the first call"))
    time.sleep(600)


def dies(connection: Any) -> None:
    connection.send(("at", "the first call"))
    os.abort()
