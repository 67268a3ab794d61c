"""Several ranks of the symmetric transport in one process on one GPU, each with its own window and stream.

A waiting rank occupies only one CTA, so all ranks make progress. On the fake GPU (`support.fake_gpu`) each rank has a
thread instead of a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from glulam.distributed import ExpertParallel
from glulam.distributed.owners import Owners
from glulam.distributed.symmetric import Symmetric
from glulam.distributed.window import Sizes, Window


class VirtualRank(ExpertParallel):
    """An ExpertParallel without a process group.

    `stream`: the stream of all its work; None: on the CPU.
    """

    def __init__(self, way: Symmetric, rank: int, num_experts: int) -> None:
        sizes = way.sizes
        self._way, self.rank, self.world, self.transport = way, rank, sizes.world, way.name
        self.num_experts, self.top_k, self.hidden_size = num_experts, sizes.top_k, sizes.hidden_size
        self.max_tokens, self.dtype = sizes.max_tokens, sizes.dtype
        self.owners = Owners(num_experts, sizes.world)
        self.first, self.num_local = self.owners.first(rank), self.owners.count(rank)
        self.own = slice(self.first, self.first + self.num_local)
        self.stream: Any = torch.cuda.Stream() if way.window.rows.is_cuda else None


def virtual_ranks(num_experts: int, sizes: Sizes, timeout: float = 20.0, device: str = "cuda") -> list[VirtualRank]:
    """Return ranks whose windows initially hold NaN in every dtype."""
    size = sizes.offsets()[""]
    buffers = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for _ in range(sizes.world)]
    bases = [buffer.data_ptr() for buffer in buffers]
    ranks = []
    for rank, buffer in enumerate(buffers):
        way = Symmetric(Window(buffer, bases, sizes), buffer, rank, num_experts, sizes)
        way.timeout, way.poison = timeout, True
        ranks.append(VirtualRank(way, rank, num_experts))
    if device == "cuda":
        torch.cuda.synchronize()
    return ranks


def each(ranks: list[VirtualRank], function: Callable[[VirtualRank], Any]) -> list[Any]:
    """Call a function for each rank, on the rank's stream, and return the results.

    All calls are made before the host waits for one of them.
    """
    if ranks[0].stream is None:
        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(function, ranks))
    made = []
    for rank in ranks:
        with torch.cuda.stream(rank.stream):
            made.append(function(rank))
    torch.cuda.synchronize()
    return made
