"""The demo's MoE layer and its tokens, which are words of real text; the same by torch, and in float64."""

from __future__ import annotations

import importlib.util
import re
import zlib
from importlib.machinery import SourceFileLoader
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .nn import MoE

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


def embed(words: list[str], hidden: int, device: str) -> Tensor:
    """[tokens, hidden]: the sum of each word's trigram embeddings, normalised as before an MoE layer."""
    rows = [trigram_rows(word) for word in words]
    starts = torch.tensor([0, *(len(r) for r in rows[:-1])], device=device).cumsum(0)
    indices = torch.tensor([row for r in rows for row in r], device=device)
    table = torch.randn(EMBEDDING_ROWS, hidden, device=device)
    return F.rms_norm(F.embedding_bag(indices, table, starts, mode="sum"), (hidden,)).to(DTYPE)


def make_layer(size: Size, device: str) -> MoE:
    """Random weights, so that activations and logits stay of order 1. float32 logits: 16-bit ones are often equal."""
    layer = MoE(
        size.hidden, size.intermediate, size.experts, size.top_k,
        router_dtype=torch.float32, device=device, dtype=DTYPE,
    ).requires_grad_(False)  # fmt: skip
    for weight in layer.parameters():
        weight.normal_(std=weight.shape[-1] ** -0.5)
    return layer


def weights_of(layer: MoE) -> tuple[Tensor, Tensor]:
    """Of its experts: w1 [E,2I,H] and w2 [E,H,I]."""
    return layer.experts.fc1.experts("weight"), layer.experts.fc2.experts("weight")


def choose(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weights in float32 and experts of tokens x [N,H], [N,K] each, by torch."""
    weights, experts = F.linear(x.float(), layer.router.weight).softmax(-1).topk(layer.top_k)
    return weights / weights.sum(-1, keepdim=True), experts


def torch_moe(layer: MoE, x: Tensor) -> Tensor:
    """The layer in torch's own operators: rows sorted by expert, two grouped GEMMs, rows put back, scaled and added."""
    weights, experts = choose(layer, x)
    ids, order = experts.flatten().sort(stable=True)
    offs = torch.searchsorted(ids, torch.arange(layer.num_experts, device=x.device), right=True, out_int32=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    w1, w2 = weights_of(layer)
    gate, up = F.grouped_mm(x.index_select(0, order // layer.top_k), w1.mT, offs=offs).chunk(2, dim=1)
    rows = F.grouped_mm(F.silu(gate) * up, w2.mT, offs=offs).index_select(0, back)
    return (rows.view(*experts.shape, -1) * weights.to(x.dtype)[..., None]).sum(1)


def exact_moe(layer: MoE, x: Tensor) -> Tensor:
    """The layer in float64, one expert after the other."""
    weights, experts = choose(layer, x)
    out = torch.zeros_like(x, dtype=torch.float64)
    for expert, (w1, w2) in enumerate(zip(*weights_of(layer), strict=True)):
        token, choice = (experts == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ w1.double().T).chunk(2, dim=1)
        out.index_add_(0, token, weights[token, choice, None] * ((F.silu(gate) * up) @ w2.double().T))
    return out
