"""What the layer suite measures: tokens through a router and its experts, at the sizes of known models."""

from __future__ import annotations

import dataclasses
import statistics

from .cases import (
    BYTES_PER_ELEMENT,
    DEEPSEEK,
    GPT_OSS,
    MIXTRAL,
    OTHER_MODELS,
    QWEN3,
    SONIC,
    Case,
    select,
    with_routings,
)
from .routing import group_sizes

ROUTINGS = ("uniform", "zipf", "dirichlet")
DECODE_TOKENS = 64  # at most so many are one step of decoding
GRAPH_TOKENS = 4096  # above, no gap between launches shows
LEAST_SHARE, MOST_SHARE = 1e-4, 0.98  # of the tokens, that an expert gets; nobody gets a token twice
SHARES = 10**6
FORWARD, TRAIN = "forward", "train"


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """A layer from tokens to tokens: each of `tokens` goes through `top_k` SwiGLU experts, and their results are added.

    routing: a name in `perf.routing.ROUTINGS`, of the expected loads; seed: of the routing and of the random data.
    """

    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    routing: str = "uniform"
    seed: int = 0

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def label(self) -> str:
        sizes = f"N {self.tokens}, H {self.hidden}, I {self.intermediate}, E {self.experts}, K {self.top_k}"
        return f"{self.name} ({sizes})"

    @property
    def mlp(self) -> Case:
        """The experts' MLP alone."""
        return Case(self.name, self.experts, self.hidden, self.intermediate, self.rows, self.routing, self.seed)

    @property
    def decode(self) -> bool:
        return self.tokens <= DECODE_TOKENS

    def flop(self, op: str) -> int:
        """Useful operations: 6 N K H I, and of forward and backward three times as many. The router's do not count."""
        return self.mlp.flop("mlp") * (3 if op == TRAIN else 1)

    def bytes(self, active_experts: int) -> int:
        """The fewest bytes of a forward: active experts' weights, x and y once, what stands between kernels twice."""
        weights = 3 * active_experts * self.hidden * self.intermediate
        tokens, rows = self.tokens * self.hidden, self.rows * (self.hidden + self.intermediate)
        return BYTES_PER_ELEMENT * (weights + 2 * tokens + 2 * rows)


# Experts of a token on one GPU. A GPU that has a part of the experts ("EP") gets a token for one of them.
TOP_K = {
    "Mixtral-8x7B": 2,
    "Qwen3-30B-A3B": 8,
    "DeepSeek-V3 EP8": 1,
    "gpt-oss-120b": 4,
    "Mixtral-8x22B": 2,
    "Qwen3-235B-A22B": 8,
    "DeepSeek-V3 EP1": 8,
    "DeepSeek-V3 EP32": 1,
    "gpt-oss-20b": 4,
    "Kimi-K2 EP8": 1,
    SONIC.name: 8,
}


def layer_of(case: Case) -> LayerCase:
    """The layer whose experts get a known model's rows."""
    k = TOP_K[case.name]
    return LayerCase(case.name, case.rows // k, case.hidden, case.intermediate, case.experts, k)


_QWEN3 = layer_of(QWEN3)
PUBLISHED = (
    layer_of(SONIC),
    _QWEN3,
    layer_of(MIXTRAL),
    dataclasses.replace(_QWEN3, name="Qwen3 64 tokens", tokens=64),
    dataclasses.replace(_QWEN3, name="Qwen3 1 token", tokens=1),
)
"""Layers that others publish times of, and two steps of decoding."""
MODELS = tuple(layer_of(case) for case in (DEEPSEEK, GPT_OSS, *OTHER_MODELS))


def layer_cases(wanted: str | None, routings: tuple[str, ...] = (), published: bool = False) -> list[LayerCase]:
    """Every layer under every routing, a layer's routings side by side; `published`: of those layers only."""
    chosen = PUBLISHED if published else (*PUBLISHED, *MODELS)
    return select(with_routings(chosen, routings or ROUTINGS), wanted)


def shares(case: LayerCase) -> list[float]:
    """Each expert's chance of being among a token's choices, [experts]; they sum to top_k.

    They follow the routing's law, but that nobody gets more than MOST_SHARE: what is above goes to the others.
    """
    weights = group_sizes(dataclasses.replace(case.mlp, rows=SHARES))
    found, rest, left = [0.0] * case.experts, set(range(case.experts)), float(case.top_k)
    while over := [e for e in rest if left * weights[e] > MOST_SHARE * sum(weights[r] for r in rest)]:
        for expert in over:
            found[expert] = MOST_SHARE
        left -= MOST_SHARE * len(over)
        rest -= set(over)
    whole = max(sum(weights[e] for e in rest), 1)
    for expert in rest:
        found[expert] = max(left * weights[expert] / whole, LEAST_SHARE)
    return found


def logit_offsets(case: LayerCase) -> list[float]:
    """What is added to each expert's logits, which are normal with scale 1, so that its expected load is its share.

    A token's K best lie above a threshold that hardly varies with the token; with it at 0, a logit lies above it with
    the probability asked for. The loads miss the shares by 1 to 5 % in sum, by less where K is large.
    """
    normal = statistics.NormalDist()
    return [normal.inv_cdf(share) for share in shares(case)]
