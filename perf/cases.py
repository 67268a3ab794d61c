"""What is measured: MoE layers at the sizes of known models, and the work each operator does on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar

OPS = ("fc1", "fc2", "mlp")
BYTES_PER_ELEMENT = 2
EVEN_AND_SKEWED = ("uniform", "dirichlet")
DECODE_ROWS = 64  # with fewer rows an expert than the smallest tile has, a step is one of decode


@dataclasses.dataclass(frozen=True)
class Case:
    """One MoE layer's expert MLP: `rows` token copies through SwiGLU experts.

    routing: a name in `perf.routing.ROUTINGS`; seed: of the routing and of the random data.
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
        sizes = f"E {self.experts}, H {self.hidden}, I {self.intermediate}, T {self.rows}"
        return f"{self.name} ({sizes})"

    def flop(self, op: str) -> int:
        """Useful floating-point operations of one call: two for a multiply-add, activations not counted."""
        fc2 = 2 * self.rows * self.hidden * self.intermediate
        return {"fc1": 2 * fc2, "fc2": fc2, "mlp": 3 * fc2}[op]

    def bytes(self, op: str, active_experts: int, weight_bits: float = 8 * BYTES_PER_ELEMENT) -> int:
        """The fewest bytes of one call: each active expert's weights and each input once, each output once.

        The activation between FC1 and FC2 of an mlp is written once and read once. `weight_bits`: of a weight, its part
        of a scale included.
        """
        matrix, x, mid = self.hidden * self.intermediate, self.rows * self.hidden, self.rows * self.intermediate
        weights, rows = {
            "fc1": (2 * active_experts * matrix, x + mid),
            "fc2": (active_experts * matrix, mid + x),
            "mlp": (3 * active_experts * matrix, 2 * mid + 2 * x),
        }[op]
        return BYTES_PER_ELEMENT * rows + round(weights * weight_bits / 8)

    @property
    def decode(self) -> bool:
        return self.rows < DECODE_ROWS * self.experts


MIXTRAL = Case("Mixtral-8x7B", 8, 4096, 14336, 8192)
QWEN3 = Case("Qwen3-30B-A3B", 128, 2048, 768, 32768)
DEEPSEEK = Case("DeepSeek-V3 EP8", 32, 7168, 2048, 16384)
GPT_OSS = Case("gpt-oss-120b", 128, 2880, 2880, 16384)
PREFILL = (MIXTRAL, QWEN3, DEEPSEEK, GPT_OSS)
DECODE = (
    dataclasses.replace(QWEN3, name="Qwen3 decode", rows=512),
    dataclasses.replace(DEEPSEEK, name="DeepSeek decode", rows=256),
    dataclasses.replace(MIXTRAL, name="Mixtral decode", rows=64),
)
GPT_OSS_DECODE = dataclasses.replace(GPT_OSS, name="gpt-oss decode", rows=512)
# One token: a row for each of the experts that it is routed to, of those that a GPU has.
TOKEN = (
    dataclasses.replace(QWEN3, name="Qwen3 token", rows=8, routing="token:8"),
    dataclasses.replace(GPT_OSS, name="gpt-oss token", rows=4, routing="token:4"),
    dataclasses.replace(DEEPSEEK, name="DeepSeek EP8 token", rows=1, routing="token:1"),
    dataclasses.replace(MIXTRAL, name="Mixtral token", rows=2, routing="token:2"),
)
# What else tuning tables cover: the models above at other sizes, and at other shares of experts a GPU.
OTHER_MODELS = (
    Case("Mixtral-8x22B", 8, 6144, 16384, 8192),
    Case("Qwen3-235B-A22B", 128, 4096, 1536, 32768),
    Case("DeepSeek-V3 EP1", 256, 7168, 2048, 65536),
    Case("DeepSeek-V3 EP32", 8, 7168, 2048, 16384),
    Case("gpt-oss-20b", 32, 2880, 2880, 16384),
    Case("Kimi-K2 EP8", 48, 7168, 2048, 16384),
)
# SonicMoE's largest layer: 32768 tokens, each through 8 of 128 experts; d 4096, n 1024.
SONIC = Case("SonicMoE 32768 x top-8", 128, 4096, 1024, 262144)
# Small enough that the GPU is done before the host has launched again: what is left is the host's time.
TINY = Case("tiny", 8, 512, 256, 64)


class Named(Protocol):
    """What a case of any suite is known by; a dataclass, with a routing that can be replaced."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...

    @property
    def routing(self) -> str: ...

    @property
    def label(self) -> str: ...


AnyCase = TypeVar("AnyCase", bound=Named)


def with_routings(cases: Sequence[AnyCase], routings: tuple[str, ...]) -> list[AnyCase]:
    """Every case under every routing, a case's routings side by side."""
    return [dataclasses.replace(case, routing=routing) for case in cases for routing in routings]


def forward_cases(wanted: str | None = None) -> list[Case]:
    """Prefill: hundreds of rows an expert, even and skewed."""
    return select(with_routings(PREFILL, EVEN_AND_SKEWED), wanted)


def decode_cases(wanted: str | None = None) -> list[Case]:
    """A step of decoding: a few rows an expert, or a single token, and weights are all that counts."""
    return select([*with_routings(DECODE, ("uniform", "zipf")), *TOKEN], wanted)


def models(wanted: str | None, default: tuple[Case, ...]) -> list[Case]:
    """Any models that are known here, by name; the default ones where none is wanted."""
    return select([*PREFILL, *DECODE, SONIC, TINY, *OTHER_MODELS], wanted) if wanted else list(default)


def rows_cases(wanted: str | None = None) -> list[Case]:
    """1 to 4096 rows an expert, in powers of two."""
    doublings = range(13)
    return [dataclasses.replace(m, rows=m.experts << d) for m in models(wanted, (QWEN3,)) for d in doublings]


def skew_cases(wanted: str | None = None) -> list[Case]:
    """Zipf's law from an even share to more than half for one expert."""
    routings = tuple(f"zipf:{exponent}" for exponent in (0.0, 0.5, 1.0, 1.5, 2.0))
    return with_routings(tuple(models(wanted, (QWEN3, DEEPSEEK))), routings)


def fp8_cases(wanted: str | None = None, prefill: tuple[str, ...] = ("uniform",)) -> list[Case]:
    """Prefill by these routings, and decode, even."""
    return select([*with_routings(PREFILL, prefill), *DECODE, GPT_OSS_DECODE], wanted)


def backward_cases() -> list[Case]:
    """The kernels of the backward: even, skewed, and with half of the experts empty."""
    return with_routings(PREFILL, ("uniform", "dirichlet", "half-empty"))


def graph_cases() -> list[Case]:
    """The default cases of the graph suite: decode, where launch gaps show."""
    return [TINY, *with_routings(DECODE, ("zipf",))]


def train_cases() -> list[Case]:
    """The default cases of the train suite: layers as they are trained, thousands of rows an expert or skewed."""
    return [*with_routings((QWEN3, DEEPSEEK), EVEN_AND_SKEWED), SONIC]


def compare_cases(wanted: str | None, routings: tuple[str, ...], rows_per_expert: tuple[int, ...]) -> list[Case]:
    """The cases that kernels are compared on: any model, PREFILL where none is wanted, at any number of rows."""
    chosen = models(wanted, PREFILL)
    if rows_per_expert:
        chosen = [dataclasses.replace(case, rows=rows * case.experts) for case in chosen for rows in rows_per_expert]
    return with_routings(tuple(chosen), routings)


def tile_cases(wanted: str | None, routings: tuple[str, ...], rows_per_expert: tuple[int, ...] = ()) -> list[Case]:
    """What a table of choices covers: every model at 1 to 4096 rows an expert, in powers of two."""
    chosen = select([*PREFILL, *OTHER_MODELS], wanted)
    rows = rows_per_expert or tuple(1 << doubling for doubling in range(13))
    sweep = (dataclasses.replace(case, rows=count * case.experts) for case in chosen for count in rows)
    return with_routings(tuple(sweep), routings)


def select(cases: list[AnyCase], wanted: str | None) -> list[AnyCase]:
    """The cases named `wanted`, else those whose label or routing contains it (upper or lower case); all for None.

    Raises ValueError, with the names there are, where none does.
    """
    if wanted is None:
        return cases
    text = wanted.lower()
    exact = [case for case in cases if case.name.lower() == text]
    chosen = exact or [case for case in cases if text in f"{case.label} {case.routing}".lower()]
    if not chosen:
        names = ", ".join(sorted({case.name for case in cases}))
        raise ValueError(f"--case {wanted!r} matches no case; there are: {names}")
    return chosen
