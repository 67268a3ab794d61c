"""Read and write JSON files that other users, processes and versions may write too.

The types of all contents are checked when a file is read. Writing replaces the whole file at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

MOST_BYTES = 16 << 20
"""Largest file that is read: a table of 2000 layers. Parsing takes about twenty times this memory."""
LARGEST = 1e15
"""Largest number that a file may have, so that products and ratios of two numbers are finite."""


def shown(path: Path | str) -> str:
    """Return a path as one line of printable text; quote and escape it if it is not printable."""
    return str(path) if str(path).isprintable() else ascii(str(path))


def read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ValueError: the file cannot be read or is no JSON object; the message does not name the file.
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


@functools.cache
def types_of(kind: Any) -> Mapping[str, Any]:
    """Return the types of the fields of a dataclass `kind`, by name."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def fields(what: str, data: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Convert the fields of a JSON object to the types of a dataclass's fields. The object may lack fields.

    Args:
        what: the object's name in messages.
        data: the object.
        kind: the dataclass.

    Raises:
        ValueError: the object has a field that the dataclass lacks, or a value of another type.
    """
    types = types_of(kind)
    if others := data.keys() - types.keys():
        raise ValueError(f"{what} has no field {brief(min(others))}; it has: {', '.join(sorted(types))}")
    return {name: typed(name, value, types[name]) for name, value in data.items()}


def typed(what: str, data: Any, kind: Any) -> Any:
    """Check parsed JSON, and convert it to a value of the type `kind`.

    Args:
        what: the value's name in messages.
        data: the parsed JSON.
        kind: the type:
            a dataclass: a JSON object of its fields; fields with defaults may be missing;
            str: a line of text;
            float: a number above 0;
            `kind | None`, tuple[kind, ...], dict[str, kind], or another type such as int;
            Any: text, whole numbers, true, false, null and objects of these, which are kept unchanged.

    Raises:
        ValueError: the JSON is not such a value.
    """
    if kind is Any:
        return _plain(what, data)
    if dataclasses.is_dataclass(kind) and isinstance(data, dict):
        return _instance(what, data, kind)
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is dict and isinstance(data, dict):
        return {typed("a name", name, str): typed(f"{what} of {name}", each, kinds[1]) for name, each in data.items()}
    if origin is tuple and isinstance(data, list):
        return tuple(typed(f"one of {what}", each, kinds[0]) for each in data)
    if kinds and origin not in (dict, tuple):
        return None if data is None else typed(what, data, kinds[0])
    if kind is float:
        if type(data) not in (int, float) or not 0 < data <= LARGEST:  # refuses NaN, too
            raise ValueError(f"{what} is {brief(data)}, not a number above 0 to {LARGEST:g}")
        return float(data)
    if kind is str and isinstance(data, str) and not data.isprintable():
        raise ValueError(f"{what} is {brief(data)}, not a line of text")
    if type(data) is not kind:
        raise _mistyped(what, data, _in_words(kind))
    return data


def _mistyped(what: str, data: Any, wanted: str) -> ValueError:
    value = "" if data and isinstance(data, (list, dict)) else f"={brief(data)}"
    return ValueError(f"{what}{value} is a {type(data).__name__}; give {wanted}")


def _in_words(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return f"an object of {', '.join(types_of(kind))}"  # type: ignore[arg-type]
    return {dict: "an object", tuple: "a list"}.get(get_origin(kind), f"a {getattr(kind, '__name__', kind)}")


def _instance(what: str, data: Any, kind: Any) -> Any:
    given = fields(what, data, kind)
    for field in dataclasses.fields(kind):
        if field.name not in given and field.default is dataclasses.MISSING:
            raise ValueError(f"{what} lacks {field.name!r}")
    return kind(**given)


def _plain(what: str, data: Any) -> Any:
    if isinstance(data, dict):
        return typed(what, data, dict[str, Any])
    if isinstance(data, str):
        return typed(what, data, str)
    if data is not None and type(data) not in (int, bool):
        raise _mistyped(what, data, "text or a whole number")
    return data


def brief(value: Any) -> str:
    """Return a value from a file as text of at most 60 printable characters, for an error message."""
    is_short = isinstance(value, (str, int, float, type(None))) or not value
    text = ascii(value) if is_short else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def write(path: Path, text: str) -> None:
    """Replace a whole file by one with this text, atomically; make its folder if there is none.

    Raises:
        OSError: the file cannot be written, and stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(handle, 0o644)
        os.replace(made, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise
