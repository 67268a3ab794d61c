"""The interface (`ArchPolicy`) through which each architecture makes its own choices.

An architecture is a row of `architectures.ARCHS` and a folder. The folder's module `configs` lists the specs that are
built. Its module `policy` has the functions and constants of the protocol `ArchPolicy`: it chooses tiles, checks specs
and models times. Plain Python that no kernel imports, so that editing a policy recompiles no kernel.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from .accumulation import Accumulation
from .architectures import ARCHS, capability
from .specs import GemmSpec, Spec
from .tiles import SpecError, TileConfig


@dataclass(frozen=True)
class Gemm:
    """Sizes of a grouped GEMM, for the time model: x [rows, depth] times the transpose of each expert's weight
    [columns, depth].

    Attributes:
        rows: rows of x, over all experts.
        experts: number of experts.
        columns, depth: rows and columns of an expert's weight.
        stored: columns that are written for each row, over all results: fewer than `columns` if an activation with a
            gate is fused, more if there are further results.
    """

    rows: int
    experts: int
    columns: int
    depth: int
    stored: int

    @property
    def average(self) -> float:
        """Average number of rows of x an expert; if x has no rows, computed as if it had one."""
        return max(self.rows, 1) / self.experts


class PolicyProblem(Protocol):
    """Properties of a call that a policy reads when it chooses a tile.

    Attributes:
        op: the operator's name, for example "grouped_mm".
        operands: a key of `formats.OPERANDS`.
        save_preact: FC1 also stores the preactivation.
        transpose_w: the GEMM contracts over rows of the stored weights.
        rows, experts: number of rows of x, and of experts.
        gathers: x's rows are read by index (`rows=`).
        weights: for each weight of an expert its shape (N, K): N columns of the result, K columns of x.
    """

    @property
    def op(self) -> str: ...
    @property
    def operands(self) -> str: ...
    @property
    def save_preact(self) -> bool: ...
    @property
    def transpose_w(self) -> bool: ...
    @property
    def rows(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def gathers(self) -> bool: ...
    @property
    def weights(self) -> tuple[tuple[int, int], ...]: ...


def three_digits(number: float) -> str:
    """Format a number with three significant digits, or all digits before the point, without an exponent."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def rows_in_words(problem: PolicyProblem) -> str:
    """Return a clause for messages: how many rows an expert has on average."""
    average = three_digits(problem.rows / problem.experts)
    return f"{problem.rows} rows over {problem.experts} experts are {average} an expert"


class Reasons(NamedTuple):
    """Reasons for a rule's choice of a tile, as text for `glulam.explain`.

    Attributes:
        why: why the rule chose this tile.
        why_not: one sentence for each tile that it did not choose.
    """

    why: str
    why_not: tuple[str, ...]


def of_one_kernel(problem: PolicyProblem) -> Reasons:
    """Return the text why a tile was chosen by a rule that has only this tile, for any number of rows."""
    return Reasons(f"every {problem.op} of this form has one kernel, whatever the number of rows", ())


def of_two_tiles(
    problem: PolicyProblem, tile: TileConfig, most_rows: int, few: TileConfig, many: TileConfig
) -> Reasons:
    """Return the texts why one of two tiles was chosen and the other not, by a rule that compares the average number of
    rows an expert with a limit.

    Args:
        problem: the call.
        tile: the chosen tile, `few` or `many`.
        most_rows: the limit of the rule.
        few, many: the tiles for at most `most_rows` rows an expert, and for more.
    """
    limits = {few: f"at most {most_rows}", many: f"more than {most_rows}"}
    other = many if tile is few else few
    why = f"{rows_in_words(problem)}, {limits[tile]}: {tile.name}"
    return Reasons(why, (f"{other.name}: for {limits[other]} rows an expert",))


def tile_among(
    tiles: Sequence[TileConfig], shape: tuple[int, int, int], cluster: tuple[int, int] | str
) -> TileConfig:  # fmt: skip
    """Return the tile of `tiles` that has the shape (m, n, k). Raises SpecError if there is none, or if `cluster` is
    not (1, 1)."""
    known = {(tile.m, tile.n, tile.k): tile for tile in tiles}
    if shape not in known or cluster != (1, 1):
        raise SpecError(f"a tile of {shape} in a cluster of {cluster!r}: choose one of {sorted(known)}, cluster (1, 1)")
    return known[shape]


class ArchPolicy(Protocol):
    """The module `policy` of an architecture's folder: a constant and functions.

    Attributes:
        gemm_policy: returns a GEMM's order of tiles, skipped work and cache policy (`gemms.GemmPolicy`).
        accumulation: returns the order in which a GEMM adds its products.
        MEASURED: a JSON file with times of the shipped tiles (`python -m perf table`); it need not exist.
        tiles: returns the tiles of the kernels that ship for a call (`PolicyProblem`).
        rows_decide: returns True if the choice among these tiles depends on the number of rows of x.
        fixed_tile: returns the tile that a fixed rule chooses; None if the tiles' times are compared instead.
        reasons: returns the reasons for a tile that a rule chose.
        suggestions: returns sentences about other calls that would be faster than this one with any tile.
        second_tile: takes FC1's tile and returns FC2's; in a backward, takes grouped_dglu's tile and returns the data
            gradient's.
        glu_form: returns the form (activations, gate layouts; keys of ACTIVATION_FORMS and LAYOUT_FORMS) of the kernel
            that serves an activation and a gate layout in an FC1.
        time_us: returns the modelled microseconds of a GEMM, the mean over even and skewed routing.
        even_us: returns the modelled microseconds of a GEMM with even routing.
        all_tiles: returns every possible tile for operands whose elements have a given number of bits.
        tile_of: returns the tile that (m, n, k), a cluster and a schedule describe. Raises SpecError, which names the
            limit, if there is no such tile.
        check: raises SpecError, which names the limit, if a spec's kernels cannot run.
    """

    MEASURED: Path
    gemm_policy: Callable[[GemmSpec], Any]
    accumulation: Callable[[GemmSpec], Accumulation]
    tiles: Callable[[PolicyProblem], tuple[TileConfig, ...]]
    rows_decide: Callable[[PolicyProblem], bool]
    fixed_tile: Callable[[PolicyProblem], TileConfig | None]
    reasons: Callable[[PolicyProblem, TileConfig], Reasons]
    suggestions: Callable[[PolicyProblem], tuple[str, ...]]
    second_tile: Callable[[TileConfig], TileConfig]
    glu_form: Callable[..., tuple[str, str]]
    time_us: Callable[[Gemm, TileConfig], float]
    even_us: Callable[[Gemm, TileConfig], float]
    all_tiles: Callable[[int], tuple[TileConfig, ...]]
    tile_of: Callable[[tuple[int, int, int], tuple[int, int] | str, str], TileConfig]
    check: Callable[[Spec], None]


@functools.cache
def policy_of(arch: str) -> ArchPolicy:
    """Return the policy module of an architecture (a key of ARCHS). Raises KeyError for an unknown one."""
    return cast(ArchPolicy, importlib.import_module(f".{ARCHS[arch].folder}.policy", __package__))


@functools.cache
def serving(device: tuple[int, int]) -> tuple[str, ...]:
    """Return the architectures whose kernels run on a GPU, the best first.

    device: the GPU's compute capability, (9, 0) for sm_90. First comes the architecture with the features of exactly
    this capability (sm_90a), then the architectures of the same major and the same or an earlier minor version, the
    latest first.
    """
    exact = [arch for arch in ARCHS if arch.endswith("a") and capability(arch) == device]
    others = [arch for arch in ARCHS if not arch.endswith("a") and capability(arch)[0] == device[0]]
    usable = [arch for arch in others if capability(arch) <= device]
    return *exact, *sorted(usable, key=capability, reverse=True)
