"""Training a randomly initialised mixture-of-experts model of transformers with each implementation of its experts:

    python -m examples.finetune_moe
    python -m examples.finetune_moe --lora 8    # adapters of experts alone, by PEFT, which has to be installed

The text is Python's standard library, byte by byte. Every implementation starts from the same weights and sees the same
batches, so their losses lie over each other, to within rounding that training amplifies.
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

from . import stdlib_text
from .generate_moe import make_model

FULL = {
    "vocab_size": 256,
    "hidden_size": 1024, "moe_intermediate_size": 512, "intermediate_size": 2048, "num_experts": 64,
    "num_experts_per_tok": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
SHRUNK = FULL | {
    "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 128, "num_experts": 8,
    "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
CONTEXT = 128
SHOWN = 4  # losses of a run


def batches(device: str, steps: int, batch: int) -> Tensor:
    """Return [steps, batch, CONTEXT] bytes of the text, the same at every call."""
    text = stdlib_text.read_text().train
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, len(text) - CONTEXT, (steps, batch, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT)].long().to(device)


def train(model: Any, data: Tensor) -> tuple[list[float], float]:
    """Train on the data; return the loss of every step, and the seconds of a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, start = [], time.perf_counter()
    for ids in data:
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found = torch.stack(losses).tolist()
    return found, (time.perf_counter() - start) / len(data)


def with_adapters(model: Any, rank: int) -> Any:
    """Return a PEFT model whose experts have adapters of this rank, which alone are trained; the model itself for rank
    0.
    """
    if not rank:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SystemExit("--lora takes PEFT's adapters: pip install 'peft>=0.21'") from error
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[], target_parameters=targets))


def main(
    layers: Annotated[int, typer.Option(help="Of the model.")] = 2,
    steps: Annotated[int, typer.Option(help="Of training.")] = 30,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 4,
    lora: Annotated[int, typer.Option(help="Rank of experts' adapters, trained alone; 0: train the model.")] = 0,
) -> None:
    """The losses of each implementation, and how far they are from the first one's."""
    glulam.integrations.transformers.register()
    device, _ = choose_device(None)
    data = batches(device, steps, batch)
    columns = sorted({round(i * (steps - 1) / (SHOWN - 1)) for i in range(SHOWN)})
    table = Table(title=f"Qwen3-MoE of {layers} layers on {device}: loss by step")
    for heading in ("experts", *map(str, columns), "farthest", "ms a step"):
        table.add_column(heading, justify="left" if heading == "experts" else "right")
    reference: list[float] = []
    for implementation in ("eager", "grouped_mm", glulam.integrations.transformers.NAME):
        model = make_model(FULL if device == "cuda" else SHRUNK, device, layers, implementation)
        torch.manual_seed(1)
        losses, seconds = train(with_adapters(model, lora), data)
        reference = reference or losses
        farthest = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        shown = (f"{losses[step]:.4f}" for step in columns)
        table.add_row(implementation, *shown, f"{farthest:.1e}", f"{seconds * 1e3:.0f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
