"""What is aimed at on an H200: the ratio to each peer, per operation, model and routing. Above 1 we are faster."""

from __future__ import annotations

from typing import Any

DENSE, TORCH, QUACK = "dense", "torch", "quack"
SKEWED = ("dirichlet", "zipf")
EVEN_ZIPF = "zipf:0.0"  # where a sweep of the exponent begins

Targets = dict[str, dict[str, float]]  # by model, then by peer

FC1: Targets = {
    "Mixtral-8x7B": {DENSE: 1.00, QUACK: 1.02, TORCH: 1.15},
    "DeepSeek-V3 EP8": {DENSE: 1.00, QUACK: 1.02, TORCH: 1.15},
    "Qwen3-30B-A3B": {DENSE: 0.92, QUACK: 1.10, TORCH: 1.5},
    "gpt-oss-120b": {DENSE: 0.75, QUACK: 1.10, TORCH: 1.5},
}
FC1_SKEWED: Targets = {
    "Mixtral-8x7B": {DENSE: 0.90, QUACK: 1.25, TORCH: 1.4},
    "DeepSeek-V3 EP8": {DENSE: 0.90, QUACK: 1.25, TORCH: 1.4},
    "Qwen3-30B-A3B": {DENSE: 0.78, QUACK: 1.25, TORCH: 1.4},
    "gpt-oss-120b": {DENSE: 0.65, QUACK: 1.25, TORCH: 1.4},
}
FC2_PEERS = {QUACK: 1.05, TORCH: 1.1}  # dense as FC1
DECODE = {QUACK: 1.05, TORCH: 1.35}
BACKWARD, BACKWARD_SKEWED = {QUACK: 1.05}, {QUACK: 1.2}
WGRAD_DENSE = {"Mixtral-8x7B": 0.9, "DeepSeek-V3 EP8": 0.9}  # uniform
LAYER = {TORCH: 1.25}
DECODE_COPY = 0.92  # of a device copy's bytes a second

HOST_OURS = "glulam.grouped_mlp, out given"  # of the host suite's items, what peers are compared with
BF16, TORCH_FP8 = "bf16", "torch fp8"
FP8_RECIPES = (
    "mxfp8",
    "mxfp8_exact",
    "mxfp8_weight_only",
    "mxfp4",
    "mxfp4_weight_only",
    "nvfp4_weight_only",
    "fp8_block",
    "fp8_block_weight_only",
)
WEIGHT_BITS = {BF16: 16.0, "mxfp8": 8.0, "mxfp8_exact": 8.25, "mxfp8_weight_only": 8.25,
               "mxfp4": 4.25, "mxfp4_weight_only": 4.25, "nvfp4_weight_only": 4.5,
               "fp8_block": 8.0, "fp8_block_weight_only": 8.0}  # fmt: skip
"""Bytes an element of a weight as it is stored, with its part of a scale."""
FP4_PREFILL = {("mxfp4_weight_only", BF16): 0.88}
FP4_COPY = {"mxfp4_weight_only": 0.82, "nvfp4_weight_only": 0.75}
"""Of a device copy's bytes a second, in decoding."""
FP8_COMPUTE_BOUND = {("mxfp8", BF16): 1.45, ("mxfp8", TORCH_FP8): 1.05, ("mxfp8_exact", BF16): 0.80, **FP4_PREFILL}
FP8_DECODE = {
    ("mxfp8", BF16): 1.75, ("mxfp8", TORCH_FP8): 1.25, ("mxfp8_weight_only", BF16): 1.7,
    ("mxfp4_weight_only", "mxfp8_weight_only"): 1.6, ("mxfp4_weight_only", BF16): 2.9,
    ("nvfp4_weight_only", BF16): 2.6,
}  # fmt: skip
FP8: dict[str, dict[tuple[str, str], float]] = {
    "Mixtral-8x7B": FP8_COMPUTE_BOUND,
    "DeepSeek-V3 EP8": FP8_COMPUTE_BOUND,
    "Qwen3-30B-A3B": {("mxfp8", BF16): 1.3, ("mxfp8", TORCH_FP8): 1.25, **FP4_PREFILL},
    "gpt-oss-120b": {("mxfp8", TORCH_FP8): 1.25, **FP4_PREFILL},
}
"""The whole MLP by a recipe, against a peer."""


def _of_forward(model: str, op: str, skewed: bool) -> dict[str, float]:
    targets = (FC1_SKEWED if skewed else FC1).get(model, {})
    if op == "fc2" and targets:
        return {**targets, **FC2_PEERS}
    return targets if op == "fc1" else {}


def _of_backward(model: str, op: str, routing: str, skewed: bool) -> dict[str, float]:
    dense = WGRAD_DENSE.get(model)
    wgrad = {DENSE: dense} if dense and op in ("dw1", "dw2") and routing == "uniform" else {}
    return {**(BACKWARD_SKEWED if skewed else BACKWARD), **wgrad}


def targets_of(record: dict[str, Any]) -> dict[str, float]:
    """The targets of a record, by peer; of none that are not set."""
    model, op = record["case"]["name"], record["op"]
    routing = record["case"]["routing"]
    skewed = routing.partition(":")[0] in SKEWED and routing != EVEN_ZIPF
    if op == "layer":
        return LAYER if model.startswith("SonicMoE") else {}
    if op in ("dglu", "dgrad", "dw1", "dw2"):
        return _of_backward(model, op, routing, skewed)
    if model.endswith("decode"):
        return DECODE if op in ("fc1", "fc2") else {}
    return _of_forward(model, op, skewed)


def copy_target(record: dict[str, Any]) -> float | None:
    """The target of a step of decoding in shares of a device copy's rate; None elsewhere."""
    return DECODE_COPY if record["case"]["name"].endswith("decode") and record["op"] in ("fc1", "fc2") else None


def target(record: dict[str, Any], contestant: str) -> float | None:
    """The target against a contestant, as "quack tuned"; None where there is none."""
    return targets_of(record).get(contestant.partition(" ")[0])


def fp8_targets(model: str) -> list[tuple[str, str, float]]:
    """(recipe, peer, target) of a case by its name."""
    wanted = FP8_DECODE if model.endswith("decode") else FP8.get(model, {})
    return [(recipe, peer, ratio) for (recipe, peer), ratio in wanted.items()]


PORTABLE, NATIVE, MMA_ALONE = "portable", "native", "mma.sync alone"
PORTABLE_MXFP8 = "portable mxfp8_weight_only"
_PORTABLE_MMA = {"Mixtral-8x7B": 0.65, "DeepSeek-V3 EP8": 0.65, "Qwen3-30B-A3B": 0.55}
_PORTABLE_DECODE = {"device copy": 0.88, PORTABLE_MXFP8: 1.6}


def portable_targets(model: str) -> dict[str, float]:
    """Targets of portable kernels in a case, by the measure of the case (`recipe_tables.reached`)."""
    if model.endswith("decode"):
        return _PORTABLE_DECODE
    return {MMA_ALONE: _PORTABLE_MMA[model]} if model in _PORTABLE_MMA else {}
