"""JSON files that other people, processes and versions write: checked when read, replaced as a whole when written."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

MOST_BYTES = 16 << 20
"""A table of 2000 layers has as many. Parsing takes some twenty times the memory."""
LARGEST = 1e15
"""Of a number in a file: products and ratios of two such numbers are finite."""


def shown(path: Path | str) -> str:
    """A path in one line of text that every terminal can print: quoted and escaped where it is not that by itself."""
    return str(path) if str(path).isprintable() else ascii(str(path))


def read(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: what is wrong with the file, which the message does not name.
    """
    try:
        data = json.loads(_content(path), parse_constant=_refuse)
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it does not parse ({error})") from error
    if not isinstance(data, dict):
        raise ValueError(f"it holds a {type(data).__name__}, not an object")
    return data


def _content(path: Path) -> str:
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("not a regular file")  # reading a pipe would wait for a writer
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
    return content.decode()


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def require_fields(what: str, data: Any, fields: Collection[str]) -> None:
    """Raises ValueError where `data` is no object with exactly these fields."""
    if not isinstance(data, dict):
        raise ValueError(f"{what} is a {type(data).__name__}, not an object")
    for name in fields:
        if name not in data:
            raise ValueError(f"{what} lacks {name!r}")
    if other := data.keys() - fields:
        raise ValueError(f"{what} has an unknown field {brief(min(other))}")


def require_list(what: str, data: Any) -> list[Any]:
    """Raises ValueError where `data` is no list."""
    if not isinstance(data, list):
        raise ValueError(f"{what} is a {type(data).__name__}, not a list")
    return data


def require_text(what: str, data: Any) -> str:
    """Raises ValueError where `data` is no string that can be shown in one line."""
    if not isinstance(data, str) or not data.isprintable():
        raise ValueError(f"{what} is {brief(data)}, not a line of text")
    return data


def require_number(what: str, data: Any, least: float = 0.0, most: float = LARGEST) -> float:
    """Raises ValueError where `data` is no number above 0 between these bounds."""
    if type(data) not in (int, float) or not (data > 0 and least <= data <= most):  # NaN is not, either
        above = f"from {least:g}" if least else "above 0"
        raise ValueError(f"{what} is {brief(data)}, not a number {above} to {most:g}")
    return float(data)


def brief(value: Any) -> str:
    """What a file has instead, in a few characters that can be shown."""
    text = ascii(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def write(path: Path, text: str) -> None:
    """Replaces a file by the whole of `text`, or leaves it as it is. Makes its folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(made, 0o644)
        os.replace(made, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise
