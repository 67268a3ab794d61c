"""Cases that are measured: MoE layers at the sizes of known models, and the work each operator does on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from .targets import WEIGHT_BITS

OPS = ("fc1", "fc2", "mlp")
KERNELS = ("dglu", "dgrad", "dw1", "dw2")
LAYER = "layer"
FORWARD, TRAIN = "forward", "train"
BYTES_PER_ELEMENT = 2
EVEN_AND_SKEWED = ("uniform", "dirichlet")
DECODE_ROWS = 64  # with fewer rows an expert than the smallest tile has, a step is one of decode
DECODE_TOKENS = 64  # at most so many are one step of decoding


WORK = {
    "fc1": (2, 2, 1, 1), "fc2": (1, 1, 1, 1), "mlp": (3, 3, 2, 2),
    "dglu": (1, 1, 1, 5), "dgrad": (2, 2, 1, 2), "dw1": (2, 2, 1, 2), "dw2": (1, 1, 1, 1), LAYER: (9, 9, 0, 0),
}  # fmt: skip
"""The work of one call: GEMMs of FC2's size; weights [H, I] of an expert, tensors [T, H] and [T, I] read or written. A
backward does each GEMM of the forward twice. The bytes of a layer's training are not counted.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """The experts' MLP of one MoE layer: `rows` rows (copies of tokens) go through SwiGLU experts.

    routing: a name in `perf.routing.ROUTINGS`. seed: seed of the routing and of the random data.
    """

    name: str
    experts: int
    hidden: int
    intermediate: int
    rows: int
    routing: str = "uniform"
    seed: int = 0

    @property
    def label(self) -> str:
        return f"{self.name} (E {self.experts}, H {self.hidden}, I {self.intermediate}, T {self.rows})"

    @property
    def decode(self) -> bool:
        return self.rows < DECODE_ROWS * self.experts

    def flop(self, op: str) -> int:
        """Return the useful floating-point operations of one call: two for a multiply-add, activations not counted."""
        return WORK[op][0] * 2 * self.rows * self.hidden * self.intermediate

    def bytes(self, op: str, active_experts: int, weight_bits: float = 8 * BYTES_PER_ELEMENT) -> int:
        """Return the fewest bytes that one call must move: each active expert's weights, each input and each output
        once.

        The activation between FC1 and FC2 of an mlp is written once and read once. Weight gradients are written for
        every expert. `weight_bits`: bits of a weight's element, with its part of a block scale.
        """
        (_, matrices, xs, mids), experts = WORK[op], self.experts if op in ("dw1", "dw2") else active_experts
        weights = matrices * experts * self.hidden * self.intermediate
        rows = self.rows * (xs * self.hidden + mids * self.intermediate)
        return BYTES_PER_ELEMENT * rows + round(weights * weight_bits / 8)


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """A layer from tokens to tokens: each of `tokens` goes through `top_k` SwiGLU experts, and their results are added.

    routing: the distribution of loads, as in a `Case`. seed: seed of the routing and of the random data.
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
        """The case of the experts' MLP alone."""
        return Case(self.name, self.experts, self.hidden, self.intermediate, self.rows, self.routing, self.seed)

    @property
    def decode(self) -> bool:
        return self.tokens <= DECODE_TOKENS

    def flop(self, op: str) -> int:
        """Return the useful FLOP: 6 N K H I in a forward, three times as many in TRAIN, none for the router's GEMM."""
        return self.mlp.flop(LAYER if op == TRAIN else "mlp")

    def bytes(self, active_experts: int) -> int:
        """Return the fewest bytes of a forward: weights, x and y once; tensors between kernels twice."""
        weights = 3 * active_experts * self.hidden * self.intermediate
        tokens, rows = self.tokens * self.hidden, self.rows * (self.hidden + self.intermediate)
        return BYTES_PER_ELEMENT * (weights + 2 * tokens + 2 * rows)


@dataclasses.dataclass(frozen=True)
class ServingCase(LayerCase):
    """A layer of which one GPU has `experts` experts.

    world_experts: number of experts on all GPUs, among which the router chooses; 0: all are on this GPU.
    """

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
        """Return how many rows of `tokens` tokens go to experts on this GPU, if a router chooses evenly."""
        return -(-tokens * self.top_k * self.experts // self.world)

    def work(self, recipe: str, rows: int, active_experts: int) -> dict[str, int]:
        """Return a record's fields: the useful FLOP of `rows` rows with experts on this GPU, and the fewest bytes."""
        mlp = dataclasses.replace(self.mlp, rows=rows)
        return {"flop": mlp.flop("mlp"), "bytes": mlp.bytes("mlp", active_experts, WEIGHT_BITS[recipe])}


AnyCase = TypeVar("AnyCase", Case, LayerCase, ServingCase)


def with_routings(cases: Iterable[AnyCase], routings: Sequence[str]) -> list[AnyCase]:
    """Return every case under every routing, the routings of one case next to each other."""
    return [dataclasses.replace(case, routing=routing) for case in cases for routing in routings]


def select(cases: Sequence[AnyCase], wanted: str | None) -> list[AnyCase]:
    """Return the cases named `wanted`; if there are none, the cases whose label or routing contains this text.

    None: all cases. Upper and lower case do not matter. Raises ValueError, with the valid names, if no case matches.
    """
    if wanted is None:
        return list(cases)
    text = wanted.lower()
    exact = [case for case in cases if case.name.lower() == text]
    chosen = exact or [case for case in cases if text in f"{case.label} {case.routing}".lower()]
    if not chosen:
        names = ", ".join(sorted({case.name for case in cases}))
        raise ValueError(f"--case {wanted!r} matches no case; there are: {names}")
    return chosen


MIXTRAL = Case("Mixtral-8x7B", 8, 4096, 14336, 8192)
QWEN3 = Case("Qwen3-30B-A3B", 128, 2048, 768, 32768)
DEEPSEEK = Case("DeepSeek-V3 EP8", 32, 7168, 2048, 16384)
GPT_OSS = Case("gpt-oss-120b", 128, 2880, 2880, 16384)
PREFILL = (MIXTRAL, QWEN3, DEEPSEEK, GPT_OSS)
DECODE_OF_ALL = tuple(
    dataclasses.replace(model, name=f"{name} decode", rows=rows)
    for model, name, rows in (
        (QWEN3, "Qwen3", 512), (DEEPSEEK, "DeepSeek", 256), (MIXTRAL, "Mixtral", 64), (GPT_OSS, "gpt-oss", 512)
    )
)  # fmt: skip
DECODE = DECODE_OF_ALL[:3]
# One token: a row for each of the experts that it is routed to, of those that a GPU has.
TOKEN = tuple(
    dataclasses.replace(model, name=f"{name} token", rows=rows, routing=f"token:{rows}")
    for model, name, rows in (
        (QWEN3, "Qwen3", 8), (GPT_OSS, "gpt-oss", 4), (DEEPSEEK, "DeepSeek EP8", 1), (MIXTRAL, "Mixtral", 2)
    )
)  # fmt: skip
# Other models that tuning tables cover: the models above at other sizes, and at other shares of experts a GPU.
GPT_OSS_20B = Case("gpt-oss-20b", 32, 2880, 2880, 16384)
OTHER_MODELS = (
    Case("Mixtral-8x22B", 8, 6144, 16384, 8192),
    Case("Qwen3-235B-A22B", 128, 4096, 1536, 32768),
    Case("DeepSeek-V3 EP1", 256, 7168, 2048, 65536),
    Case("DeepSeek-V3 EP32", 8, 7168, 2048, 16384),
    GPT_OSS_20B,
    Case("Kimi-K2 EP8", 48, 7168, 2048, 16384),
)
# SonicMoE's largest layer: 32768 tokens, each through 8 of 128 experts; d 4096, n 1024.
SONIC = Case("SonicMoE 32768 x top-8", 128, 4096, 1024, 262144)
# Small enough that the GPU is done before the host has launched again: what is left is the host's time.
TINY = Case("tiny", 8, 512, 256, 64)
DOUBLINGS = tuple(1 << doubling for doubling in range(13))  # rows an expert
ZIPFS = tuple(f"zipf:{exponent}" for exponent in (0.0, 0.5, 1.0, 1.5, 2.0))

# Experts of a token on one GPU. A GPU that has a part of the experts ("EP") gets a token for one of them.
TOP_K = {MIXTRAL.name: 2, "Mixtral-8x22B": 2, GPT_OSS.name: 4, GPT_OSS_20B.name: 4, QWEN3.name: 8,
         "Qwen3-235B-A22B": 8, "DeepSeek-V3 EP1": 8, SONIC.name: 8}  # fmt: skip


def layer_of(case: Case, tokens: int = 0) -> LayerCase:
    """Return the layer whose experts get as many rows as the case; with `tokens`, the same layer for so many tokens."""
    k = TOP_K.get(case.name, 1)
    return LayerCase(case.name, tokens or case.rows // k, case.hidden, case.intermediate, case.experts, k)


CASES: dict[str, Sequence[Any]] = {
    "forward": with_routings(PREFILL, EVEN_AND_SKEWED),
    "decode": (*with_routings(DECODE, ("uniform", "zipf")), *TOKEN),
    "backward": with_routings(PREFILL, ("uniform", "dirichlet", "half-empty")),
    "train": (*with_routings((QWEN3, DEEPSEEK), EVEN_AND_SKEWED), SONIC),
    "power": PREFILL,
    "quantize": (*PREFILL, DECODE[0]),
    "fp8": (*with_routings(PREFILL, EVEN_AND_SKEWED), *DECODE_OF_ALL),
    "frozen": (*PREFILL, *DECODE_OF_ALL),
    "portable": (MIXTRAL, DEEPSEEK, QWEN3, *DECODE),
    "lora": [layer_of(case, 4096) for case in (GPT_OSS_20B, QWEN3)],
}
"""Cases by suite, except the sweeps of rows and skew (`cases_of`), layer (`layer_cases`) and serving."""


def models(wanted: str | None, default: Sequence[Case]) -> list[Case]:
    """Return the known models that match the name `wanted` (see `select`); the default ones if it is None or empty."""
    return select([*PREFILL, *DECODE, SONIC, TINY, *OTHER_MODELS], wanted) if wanted else list(default)


def sweep(of: Iterable[Case], rows_per_expert: Sequence[int], routings: Sequence[str] = ("uniform",)) -> list[Case]:
    """Return the models with each number of rows per expert, under each routing; (): with their own number of rows."""
    sized = ([dataclasses.replace(m, rows=m.experts * rows) for rows in rows_per_expert] or [m] for m in of)
    return with_routings((case for cases in sized for case in cases), routings)


def cases_of(suite: str, wanted: str | None) -> list[Any]:
    """Return the cases of a suite that match the name `wanted` (see `select`). None: all cases of the suite."""
    if suite == "rows":
        return sweep(models(wanted, (QWEN3,)), DOUBLINGS)
    if suite == "skew":
        return with_routings(models(wanted, (QWEN3, DEEPSEEK)), ZIPFS)
    return select(CASES[suite], wanted)


PUBLISHED = (
    layer_of(SONIC),
    layer_of(QWEN3),
    layer_of(MIXTRAL),
    dataclasses.replace(layer_of(QWEN3, 64), name="Qwen3 64 tokens"),
    dataclasses.replace(layer_of(QWEN3, 1), name="Qwen3 1 token"),
)
"""Layers whose times others have published, and two decoding steps."""
MODELS = tuple(layer_of(case) for case in (DEEPSEEK, GPT_OSS, *OTHER_MODELS))
LAYER_ROUTINGS = ("uniform", "zipf", "dirichlet")


def layer_cases(wanted: str | None, routings: Sequence[str] = (), published: bool = False) -> list[LayerCase]:
    """Return every layer, or only the published ones, under every routing, that matches `wanted`."""
    chosen = PUBLISHED if published else (*PUBLISHED, *MODELS)
    return select(with_routings(chosen, routings or LAYER_ROUTINGS), wanted)


SERVING_TOKENS = (1, 16, 64, 256, 2048, 8192)
SERVING_RECIPES = ("bf16", "mxfp8", "fp8_block", "mxfp8_weight_only", "mxfp4", "mxfp4_weight_only")
"""Our recipes of the serving suite. A record compares one of them with the peers that read weights of its format."""
PARTS: dict[str, dict[str, int]] = {DEEPSEEK.name: {"top_k": 8, "world_experts": 256}}
SERVING = [
    ServingCase(**{**dataclasses.asdict(layer_of(model)), "tokens": tokens, **PARTS.get(model.name, {})})
    for model in (QWEN3, GPT_OSS, DEEPSEEK, MIXTRAL)
    for tokens in SERVING_TOKENS
]
