"""Run many cases in one group of ranks, since starting the ranks takes longer than a case."""

from __future__ import annotations

import faulthandler
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import pytest
import torch.distributed as dist

from .ranks import run_ranks

Case = TypeVar("Case", bound=Callable[[], None])
SECONDS = 150
"""Seconds after which a rank prints where it waits, and ends.

Without this limit, a case that failed on one rank would leave the others waiting in it.
"""


class RankCases:
    """Functions of a module that all ranks of a group call, in the order in which they are defined.

    Args:
        module: the module's name.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self.functions: dict[str, Callable[[], None]] = {}

    def __call__(self, case: Case) -> Case:
        """Add a case; used as a decorator."""
        self.functions[case.__name__] = case
        return case

    def run(self, world: int, folder: Path) -> dict[str, str]:
        """Run all cases on `world` ranks.

        Returns:
            For each case, the traceback from the first rank that raised; "" if none did.
        """
        try:
            run_ranks(world, _run, self.module, str(folder))
        except Exception:
            ended = traceback.format_exc()
        else:
            ended = ""
        return {name: self._outcome(name, world, folder, ended) for name in self.functions}

    def _outcome(self, name: str, world: int, folder: Path, ended: str) -> str:
        files = [folder / f"{name}.{rank}" for rank in range(world)]
        texts = [file.read_text() if file.is_file() else f"{name} did not end\n{ended}" for file in files]
        return next((text for text in texts if text), "")


def _run(module: str, folder: str) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    cases: RankCases = import_module(module).CASES
    for name, case in cases.functions.items():
        text = ""
        try:
            case()
        except (Exception, pytest.fail.Exception):
            text = traceback.format_exc()
        Path(folder, f"{name}.{dist.get_rank()}").write_text(text)
        dist.barrier()
    faulthandler.cancel_dump_traceback_later()
