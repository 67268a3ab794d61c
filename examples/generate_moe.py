"""Greedy generation by a randomly initialised Qwen3-30B-A3B of transformers, with each implementation of its experts:

    python -m examples.generate_moe

It has the model's widths and as many of its layers as `--layers` says; without a GPU it is shrunk. Every implementation
writes the same text, except where two tokens are equally likely to within rounding; the share of equal text is shown.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import glulam.integrations.transformers
from glulam.demo import choose_device

FULL = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_experts": 128,
    "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "norm_topk_prob": True,
}  # fmt: skip
SHRUNK = FULL | {
    "hidden_size": 128, "moe_intermediate_size": 48, "intermediate_size": 256, "num_experts": 16,
    "num_experts_per_tok": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
}  # fmt: skip
BUILT_IN = ("eager", "batched_mm", "grouped_mm")
PROMPT = 16


def make_model(sizes: dict[str, Any], device: str, layers: int, implementation: str) -> Any:
    """Return the model, in bfloat16 on a GPU and float32 on a CPU, with the same weights at every call."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**sizes, num_hidden_layers=layers)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3MoeForCausalLM(config)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32)


def generate(model: Any, ids: Tensor, count: int) -> tuple[Tensor, float]:
    """Return the text that follows a prompt, [sequences, count], and the seconds that it took."""

    def text_of(length: int) -> Tensor:
        """Generate text and copy it to the host, which waits until it is done."""
        text: Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, max_new_tokens=length,
            min_new_tokens=length,
        )  # fmt: skip
        return text[:, ids.shape[1] :].cpu()

    text_of(2)  # warms up
    start = time.perf_counter()
    return text_of(count), time.perf_counter() - start


def agreement(text: Tensor, reference: Tensor) -> float:
    """Return the share of a sequence's tokens before the first that differs, averaged over the sequences."""
    return float((text == reference).long().cumprod(dim=1).float().mean())


def main(
    layers: Annotated[int, typer.Option(help="Of the model's 48.")] = 4,
    tokens: Annotated[int, typer.Option(help="To generate.")] = 32,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
) -> None:
    """Tokens a second of each implementation, and how much of its text equals the first's."""
    glulam.integrations.transformers.register()
    device, _ = choose_device(None)
    model = make_model(FULL if device == "cuda" else SHRUNK, device, layers, BUILT_IN[0]).eval()
    ids = torch.randint(3, model.config.vocab_size, (batch, PROMPT), device=device)
    table = Table(title=f"Qwen3-30B-A3B{'' if device == 'cuda' else ', shrunk for a CPU'}: {layers} layers on {device}")
    for heading in ("experts", "tokens a second", "same text"):
        table.add_column(heading, justify="left" if heading == "experts" else "right")
    reference = None
    for implementation in (*BUILT_IN, glulam.integrations.transformers.NAME):
        model.set_experts_implementation(implementation)
        text, seconds = generate(model, ids, tokens)
        reference = text if reference is None else reference
        table.add_row(implementation, f"{text.numel() / seconds:.1f}", f"{agreement(text, reference):.0%}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
