"""The demo's MoE layer: real text to tokens, a router, a sort by expert, three ways to compute the experts' MLP."""

from __future__ import annotations

import importlib.util
import re
import zlib
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import glulam

TEXT = ("argparse", "difflib", "heapq", "logging", "random", "statistics", "textwrap", "typing")  # modules to read
EMBEDDING_ROWS = 2**14
DTYPE = torch.bfloat16


class Size(NamedTuple):
    """Sizes of a layer and its input."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: int


QWEN3_30B_A3B = Size(hidden=2048, intermediate=768, experts=128, top_k=8, tokens=4096)
SHRUNK = Size(hidden=256, intermediate=96, experts=128, top_k=8, tokens=512)  # a second or two on two cores


class Layer(NamedTuple):
    """router [E,H] float32, w1 [E,2I,H], w2 [E,H,I]."""

    router: Tensor
    w1: Tensor
    w2: Tensor


class Dispatched(NamedTuple):
    """Token copies sorted by expert: x [T,H], offs int32 [E], scale float32 [T] (the router's probabilities), and
    order int64 [T]: sorted copy i is copy order[i] of the router's [tokens, top_k].
    """

    x: Tensor
    offs: Tensor
    scale: Tensor
    order: Tensor

    def group_sizes(self) -> list[int]:
        """Rows of each expert, read back to the host."""
        ends = self.offs.tolist()
        return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


Path = Callable[[Layer, Dispatched], Tensor]


def read_text(module: str) -> str:
    """Source of a standard-library module, read without importing it; empty where Python came without sources."""
    spec = importlib.util.find_spec(module)
    loader = spec.loader if spec else None
    return (loader.get_source(module) or "") if isinstance(loader, SourceFileLoader) else ""


def read_words(count: int) -> list[str]:
    """`count` words and punctuation marks, an equal share from each module of TEXT, repeated where it is too short."""
    share = -(-count // len(TEXT))
    words = [word for module in TEXT for word in re.findall(r"\w+|[^\w\s]", read_text(module))[:share]]
    words = words or list(TEXT)
    return (words * -(-count // len(words)))[:count]


def trigram_rows(word: str) -> list[int]:
    """Embedding rows of a word's byte trigrams, its ends marked."""
    marked = f"<{word}>".encode()
    return [zlib.crc32(marked[i : i + 3]) % EMBEDDING_ROWS for i in range(len(marked) - 2)]


def _random(device: str, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=device) * scale


def embed(words: list[str], hidden: int, device: str) -> Tensor:
    """[tokens, hidden]: the sum of each word's trigram embeddings, normalised as before an MoE layer."""
    rows = [trigram_rows(word) for word in words]
    starts = torch.tensor([0, *(len(r) for r in rows[:-1])], device=device).cumsum(0)
    indices = torch.tensor([row for r in rows for row in r], device=device)
    table = _random(device, EMBEDDING_ROWS, hidden)
    return F.rms_norm(F.embedding_bag(indices, table, starts, mode="sum"), (hidden,)).to(DTYPE)


def make_layer(size: Size, device: str) -> Layer:
    """Random weights from torch's global generator, scaled so that activations stay of order 1."""
    hidden, inner, experts = size.hidden, size.intermediate, size.experts
    return Layer(
        router=_random(device, experts, hidden, scale=hidden**-0.5),
        w1=_random(device, experts, 2 * inner, hidden, scale=hidden**-0.5).to(DTYPE),
        w2=_random(device, experts, hidden, inner, scale=inner**-0.5).to(DTYPE),
    )


def dispatch(x: Tensor, router: Tensor, top_k: int) -> Dispatched:
    """Routes x [tokens, H] and sorts the copies by expert; nothing is read back to the host."""
    probabilities, experts = (x.float() @ router.T).softmax(dim=-1).topk(top_k, dim=-1)
    probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    order = experts.flatten().argsort(stable=True)
    sizes = torch.zeros(router.shape[0], dtype=torch.int64, device=x.device)
    sizes.scatter_add_(0, experts.flatten(), torch.ones_like(order))
    return Dispatched(
        x=x[order // top_k],
        offs=sizes.cumsum(0).to(torch.int32),
        scale=probabilities.flatten()[order],
        order=order,
    )


def combine(y: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Sums each token's copies: y [T,H] sorted by expert -> [tokens, H], in float32 at least."""
    unsorted = torch.empty_like(y)
    unsorted[order] = y
    total = torch.float64 if y.dtype == torch.float64 else torch.float32
    return unsorted.view(-1, top_k, y.shape[1]).sum(dim=1, dtype=total)


def glulam_mlp(layer: Layer, d: Dispatched, out: Tensor | None = None) -> Tensor:
    """[T,H]: one call; the router's probabilities scale the activation."""
    return glulam.grouped_mlp(d.x, layer.w1, layer.w2, offs=d.offs, row_scale=d.scale, out=out)


def torch_mlp(layer: Layer, d: Dispatched) -> Tensor:
    """The same in torch's own operators, all in the inputs' dtype."""
    gate, up = F.grouped_mm(d.x, layer.w1.mT, offs=d.offs).chunk(2, dim=1)
    mid = F.silu(gate) * up * d.scale.to(gate.dtype)[:, None]
    return F.grouped_mm(mid, layer.w2.mT, offs=d.offs)


def _experts_in_turn(layer: Layer, d: Dispatched, dtype: torch.dtype) -> Iterator[Tensor]:
    start = 0
    for expert, size in enumerate(d.group_sizes()):
        rows = slice(start, start + size)
        gate, up = (d.x[rows].to(dtype) @ layer.w1[expert].to(dtype).T).chunk(2, dim=1)
        mid = F.silu(gate) * up * d.scale[rows, None].to(dtype)
        yield mid @ layer.w2[expert].to(dtype).T
        start += size


def loop_mlp(layer: Layer, d: Dispatched, dtype: torch.dtype = DTYPE) -> Tensor:
    """Expert by expert, in any dtype: the float64 reference, and torch's path where it has no grouped_mm."""
    return torch.cat(list(_experts_in_turn(layer, d, dtype)))


def torch_path() -> tuple[str, Path]:
    """torch's own path and its name."""
    if hasattr(F, "grouped_mm"):
        return "torch: grouped_mm + silu + 2 mul + grouped_mm", torch_mlp
    return "torch: a loop over the experts", loop_mlp
