"""Access to the plugins of serving engines (by the engine's package name) and, if installed, to the engines."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from . import torchvision_ops

TITLES = {"sglang": "SGLang", "vllm": "vLLM"}


def folder_of(engine: str) -> Path:
    """Return the folder of an engine's plugin."""
    return Path(__file__).parents[2] / f"plugins/glulam-{engine}"


@contextmanager
def installed(engine: str) -> Iterator[pytest.MonkeyPatch]:
    """Context in which an engine and its plugin can be imported; skips the test if the engine is not installed.

    Changes made with the yielded patch are undone at the end.
    """
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{TITLES[engine]} is not installed; `make test-serving` installs it")
    torchvision_ops.define()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder_of(engine)))
        yield patch


def check_needs_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that importing a plugin without its engine raises an error that says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    spec = importlib.util.spec_from_file_location("alone", folder_of(engine) / f"glulam_{engine}/__init__.py")
    assert spec is not None and spec.loader is not None
    message = f"a plugin of {TITLES[engine]}, which is not installed; install {engine}"
    with pytest.raises(ImportError, match=message):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def check_entry_point(engine: str, group: str) -> None:
    """Check that a plugin's package declares the entry point through which the engine finds it.

    group: the entry point's group.
    """
    tomllib = pytest.importorskip("tomllib")  # plugins are for Python 3.11 and later
    project = tomllib.loads((folder_of(engine) / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {group: {"glulam": f"glulam_{engine}:register"}}
