"""Runs functions in several processes, the ranks of a torch.distributed group."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def _rank(
    rank: int, world: int, backend: str, store: str, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    device = None if backend == "gloo" else torch.device("cuda", rank)
    if device:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, device_id=device)
    try:
        function(*arguments)
    finally:
        dist.destroy_process_group()


def run_ranks(world: int, function: Callable[..., None], *arguments: Any, backend: str = "gloo") -> None:
    """Call a module-level function in `world` new processes; raise the first error of any process.

    The processes are forks of a process that has one thread and has imported torch and Glulam. With NCCL each process
    has its own GPU.
    """
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "glulam", "numpy"])
    with tempfile.TemporaryDirectory() as folder:
        given = world, backend, str(Path(folder) / "store"), function, arguments
        torch.multiprocessing.start_processes(_rank, given, nprocs=world, start_method="forkserver")
