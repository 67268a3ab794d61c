"""Targets on an H200: the ratio to each peer, per operation, model and routing. Above 1 we are faster."""

from __future__ import annotations

from typing import Any

DENSE, TORCH, QUACK = "dense", "torch", "quack"
SKEWED = ("dirichlet", "zipf")
EVEN_ZIPF = "zipf:0.0"  # where a sweep of the exponent begins

Targets = dict[str, float]  # by peer
FC1: dict[str, Targets] = {
    "Mixtral-8x7B": {DENSE: 1.00, QUACK: 1.02, TORCH: 1.15},
    "DeepSeek-V3 EP8": {DENSE: 1.00, QUACK: 1.02, TORCH: 1.15},
    "Qwen3-30B-A3B": {DENSE: 0.92, QUACK: 1.10, TORCH: 1.5},
    "gpt-oss-120b": {DENSE: 0.75, QUACK: 1.10, TORCH: 1.5},
}
FC1_SKEWED = {
    model: {DENSE: dense, QUACK: 1.25, TORCH: 1.4}
    for model, dense in zip(FC1, (0.90, 0.90, 0.78, 0.65), strict=True)
}  # fmt: skip
FC2_PEERS = {QUACK: 1.05, TORCH: 1.1}  # dense as FC1
DECODE = {QUACK: 1.05, TORCH: 1.35}
WGRAD_DENSE = {"Mixtral-8x7B": 0.9, "DeepSeek-V3 EP8": 0.9}  # uniform
LAYER = {TORCH: 1.25}
DECODE_COPY = 0.92  # share of a device copy's bytes a second

HOST_OURS = "glulam.grouped_mlp, out given"  # the item of the host suite that peers are compared with
BF16, TORCH_FP8 = "bf16", "torch fp8"
WEIGHT_BITS = {BF16: 16.0, "mxfp8": 8.0, "mxfp8_exact": 8.25, "mxfp8_weight_only": 8.25,
               "mxfp4": 4.25, "mxfp4_weight_only": 4.25, "nvfp4_weight_only": 4.5,
               "fp8_block": 8.0, "fp8_block_weight_only": 8.0}  # fmt: skip
"""Bits of a stored weight's element, with its part of a block scale."""
FP8_RECIPES = tuple(name for name in WEIGHT_BITS if name != BF16)
FP4_PREFILL = {("mxfp4_weight_only", BF16): 0.88}
FP4_COPY = {"mxfp4_weight_only": 0.82, "nvfp4_weight_only": 0.75}
"""Targets in decoding, as shares of a device copy's bytes a second."""
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
"""Targets of the whole MLP by a recipe against a peer, by model."""
PORTABLE, NATIVE, MMA_ALONE = "portable", "native", "mma.sync alone"
PORTABLE_MXFP8 = "portable mxfp8_weight_only"
_PORTABLE_MMA = {"Mixtral-8x7B": 0.65, "DeepSeek-V3 EP8": 0.65, "Qwen3-30B-A3B": 0.55}
_PORTABLE_DECODE = {"device copy": 0.88, PORTABLE_MXFP8: 1.6}


def targets_of(record: dict[str, Any]) -> Targets:
    """Return the targets of a record, by peer; peers without a target are absent."""
    model, op, routing = record["case"]["name"], record["op"], record["case"]["routing"]
    skewed = routing.partition(":")[0] in SKEWED and routing != EVEN_ZIPF
    if op == "layer":
        return LAYER if model.startswith("SonicMoE") else {}
    if op in ("dglu", "dgrad", "dw1", "dw2"):
        has_dense = op in ("dw1", "dw2") and routing == "uniform" and model in WGRAD_DENSE
        return {QUACK: 1.2 if skewed else 1.05, **({DENSE: WGRAD_DENSE[model]} if has_dense else {})}
    if op not in ("fc1", "fc2"):
        return {}
    if model.endswith("decode"):
        return DECODE
    of_fc1 = (FC1_SKEWED if skewed else FC1).get(model, {})
    return {**of_fc1, **FC2_PEERS} if op == "fc2" and of_fc1 else of_fc1


def copy_target(record: dict[str, Any]) -> float | None:
    """Return the rate that FC1 or FC2 must reach in a benchmark's record with few rows an expert (decoding), as a share
    of the rate of a device-to-device copy; None for other records."""
    return DECODE_COPY if record["case"]["name"].endswith("decode") and record["op"] in ("fc1", "fc2") else None


def target(record: dict[str, Any], contestant: str) -> float | None:
    """Return the target against a contestant such as "quack tuned"; None if there is none."""
    return targets_of(record).get(contestant.partition(" ")[0])


def fp8_targets(model: str) -> dict[tuple[str, str], float]:
    """Return the targets of a model, by recipe and peer."""
    return FP8_DECODE if model.endswith("decode") else FP8.get(model, {})


def portable_targets(model: str) -> Targets:
    """Return the targets of portable kernels in a case, by the measures of `tables_recipes.reached`."""
    if model.endswith("decode"):
        return _PORTABLE_DECODE
    return {MMA_ALONE: _PORTABLE_MMA[model]} if model in _PORTABLE_MMA else {}
