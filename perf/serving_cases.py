"""Cases of the serving suite: whole experts, called with a router's choices, from one token to a prefill."""

from __future__ import annotations

import dataclasses

from .cases import DEEPSEEK, GPT_OSS, MIXTRAL, QWEN3
from .layer_cases import LayerCase, layer_of
from .targets import WEIGHT_BITS

TOKENS = (1, 16, 64, 256, 2048, 8192)
RECIPES = ("bf16", "mxfp8", "fp8_block", "mxfp8_weight_only", "mxfp4", "mxfp4_weight_only")
"""Our recipes; a record has one of them and the peers that read such weights."""


@dataclasses.dataclass(frozen=True)
class ServingCase(LayerCase):
    """Experts of one GPU. world_experts: experts that a router chooses among; 0: all are on this GPU."""

    world_experts: int = 0

    @property
    def world(self) -> int:
        return self.world_experts or self.experts

    @property
    def is_part(self) -> bool:
        return self.world > self.experts

    @property
    def label(self) -> str:
        of_world = f" of {self.world}" if self.is_part else ""
        sizes = f"H {self.hidden}, I {self.intermediate}, E {self.experts}{of_world}, K {self.top_k}"
        return f"{self.name} (N {self.tokens}, {sizes})"

    def expected_rows(self, tokens: int) -> int:
        """Rows of so many tokens whose experts are here, if a router chooses evenly."""
        return -(-tokens * self.top_k * self.experts // self.world)

    def work(self, recipe: str, rows: int, active_experts: int) -> dict[str, int]:
        """Useful FLOP of the rows that have an expert here, and the fewest bytes."""
        mlp = dataclasses.replace(self.mlp, rows=rows)
        return {"flop": mlp.flop("mlp"), "bytes": mlp.bytes("mlp", active_experts, WEIGHT_BITS[recipe])}


def _model(layer: LayerCase, **changes: int) -> ServingCase:
    return ServingCase(**{**dataclasses.asdict(layer), **changes})


MODELS = (
    _model(layer_of(QWEN3)),
    _model(layer_of(GPT_OSS)),
    _model(layer_of(DEEPSEEK), top_k=8, world_experts=256),
    _model(layer_of(MIXTRAL)),
)
CASES = [dataclasses.replace(model, tokens=tokens) for model in MODELS for tokens in TOKENS]
