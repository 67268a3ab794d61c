"""Agreement of all ranks when an ExpertParallel is made: they compare sizes, and choose the transport of rows."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UnsupportedDevice
from ..host import device as devices
from .exchange import PeerError

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def _host() -> str:
    """Return the machine's name and boot id, so that ranks can tell whether they are on one host."""
    return f"{socket.gethostname()} {_BOOT.read_text().strip() if _BOOT.exists() else ''}"


def _gpu() -> str:
    """Return the UUID of this process's current GPU; "": no GPU."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _why_not(group: Any, places: list[tuple[str, str]]) -> str:
    """Return text that says why ranks on these (host, GPU) pairs cannot access each other's memory; "": they can."""
    gpus = [gpu for _, gpu in places]
    if "nccl" not in dist.get_backend(group):
        return f"the group's back end is {dist.get_backend(group)}; it must be nccl"
    if not all(gpus) or len(set(gpus)) < len(gpus):
        return "each rank needs a GPU of its own, which torch.cuda.set_device chooses"
    if len({host for host, _ in places}) > 1:
        return "the ranks are on several hosts"
    mine, count = torch.cuda.current_device(), torch.cuda.device_count()
    seen = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(count)}
    if why := _untested(mine):
        return why
    for rank, gpu in enumerate(gpus):
        if seen.get(gpu, mine) != mine and not torch.cuda.can_device_access_peer(mine, seen[gpu]):
            return f"the GPU of rank {rank} is out of reach of cuda:{mine}"
    return ""


def _untested(index: int) -> str:
    """Return text that says why kernels between GPUs must not run on this GPU; "": they may.

    Only the developers' tests count. A stamp of `glulam validate` does not, since it covers no kernels between GPUs.
    """
    try:
        gpu = devices.gpu(index)
    except UnsupportedDevice as error:
        return str(error)
    if devices.allows_unvalidated() or devices.state_of(gpu.arch, gpu.name) == devices.TESTED:
        return ""
    return f"kernels between GPUs were never run on a {gpu.name}, and `glulam validate` cannot try them on one"


def agree(
    group: Any, transport: str, sizes: tuple[Any, ...], unfit: str, error: Exception | None = None
) -> tuple[str, int]:
    """Compare options between ranks, and choose one transport for all. Every rank must call this.

    Args:
        group: the process group.
        transport: the requested transport, or "auto" for the best.
        sizes: values that must be equal on every rank.
        unfit: text that says why the sizes do not fit the symmetric transport; "": they fit.
        error: an error in this rank's options, raised after the other ranks have been told; None: no error.

    Returns:
        (transport, a number that identifies this ExpertParallel on all ranks).

    Raises:
        ValueError: on every rank: a rank has other sizes or requests another transport, or "symmetric" is requested
            and cannot work.
        PeerError: another rank's options are invalid, or another rank does not call this within the group's time-out.
    """
    mine = (transport, *map(str, sizes))
    everyone = _gathered(group, (mine, (_host(), _gpu()), secrets.randbits(62), str(error or "")))
    if error is not None:
        raise error
    for rank, (_, _, _, wrong) in enumerate(everyone):
        if wrong:
            raise PeerError(f"ExpertParallel: the options of rank {rank} were refused: {wrong}")
    for rank, (theirs, *_) in enumerate(everyone):
        if theirs != everyone[0][0]:
            raise ValueError(
                f"ExpertParallel: rank {rank} gives {', '.join(theirs)}, and rank 0 {', '.join(everyone[0][0])}; all "
                "ranks must give the same"
            )
    identity = everyone[0][2]
    if transport == "all_to_all":
        return transport, identity
    verdicts = _gathered(group, unfit or _why_not(group, [place for _, place, *_ in everyone]))
    why = next((verdict for verdict in verdicts if verdict), "")
    if why and transport == "symmetric":
        raise ValueError(f'ExpertParallel: transport="symmetric" cannot work: {why}; choose "all_to_all" or "auto"')
    return "all_to_all" if why else "symmetric", identity


def _gathered(group: Any, mine: Any) -> list[Any]:
    """Gather an object from every rank; return the objects in the order of ranks.

    Raises:
        PeerError: a rank does not call this within the group's time-out.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(everyone, mine, group=group)
    except RuntimeError as error:
        raise PeerError(
            f"ExpertParallel: a rank has ended, or made no ExpertParallel within the group's time-out: {error}"
        ) from error
    return everyone
