"""The interface (`ArchPolicy`) through which each architecture makes its own choices.

An architecture is a row of `architectures.ARCHS` and a folder. The folder's module `configs` lists the specs that are
built. Its module `policy` has the functions and constants of the protocol `ArchPolicy`: it chooses tiles, checks specs
and models times. Policies are plain Python that no kernel imports, so that editing a policy recompiles no kernel.
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
    """Sizes of a grouped GEMM, for the time model. The GEMM multiplies x [rows, depth] by the transpose of each
    expert's weight [columns, depth].

    Attributes:
        rows: rows of x, over all experts.
        experts: number of experts.
        columns, depth: rows and columns of an expert's weight.
        stored: columns that are written for each row, over all results. It is less than `columns` if an activation with
            a gate is fused, and more if there are further results.
    """

    rows: int
    experts: int
    columns: int
    depth: int
    stored: int

    @property
    def average(self) -> float:
        """Average number of rows of x for each expert. If x has no rows, it is computed as if x had one."""
        return max(self.rows, 1) / self.experts


class PolicyProblem(Protocol):
    """Properties of a call that a policy reads to choose a tile.

    Attributes:
        op: the operator's name, for example "grouped_mm".
        operands: a key of `formats.OPERANDS`.
        save_preact: True: FC1 also stores the preactivation.
        transpose_w: True: the GEMM contracts over rows of the stored weights.
        rows, experts: number of rows of x, and number of experts.
        gathers: True: x's rows are read by index (`rows=`).
        weights: the shape (N, K) of each weight of an expert: N columns of the result, K columns of x.
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
    """Format a number with three significant digits, without an exponent. All digits before the point are kept."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def rows_in_words(problem: PolicyProblem) -> str:
    """Return a clause for messages that says how many rows an expert has on average."""
    average = three_digits(problem.rows / problem.experts)
    return f"{problem.rows} rows over {problem.experts} experts are {average} an expert"


class Reasons(NamedTuple):
    """Reasons for the tile that a rule chose, as text for `glulam.explain`.

    Attributes:
        why: why the rule chose this tile.
        why_not: one sentence for each tile that the rule did not choose.
    """

    why: str
    why_not: tuple[str, ...]


def of_one_kernel(problem: PolicyProblem) -> Reasons:
    """Return the reasons for a tile that is the only one of its rule, for any number of rows."""
    return Reasons(f"every {problem.op} of this form has one kernel, whatever the number of rows", ())


def of_two_tiles(
    problem: PolicyProblem, tile: TileConfig, most_rows: int, few: TileConfig, many: TileConfig
) -> Reasons:
    """Return the reasons for one of two tiles. The rule compares the average number of rows for each expert with a
    limit.

    Args:
        problem: the call.
        tile: the chosen tile, `few` or `many`.
        most_rows: the limit of the rule.
        few: the tile for at most `most_rows` rows an expert.
        many: the tile for more rows.
    """
    limits = {few: f"at most {most_rows}", many: f"more than {most_rows}"}
    other = many if tile is few else few
    why = f"{rows_in_words(problem)}, {limits[tile]}: {tile.name}"
    return Reasons(why, (f"{other.name}: for {limits[other]} rows an expert",))


def tile_among(
    tiles: Sequence[TileConfig], shape: tuple[int, int, int], cluster: tuple[int, int] | str
) -> TileConfig:  # fmt: skip
    """Return the tile of `tiles` that has the shape (m, n, k). Raises SpecError if no tile has this shape, or if
    `cluster` is not (1, 1)."""
    known = {(tile.m, tile.n, tile.k): tile for tile in tiles}
    if shape not in known or cluster != (1, 1):
        raise SpecError(f"a tile of {shape} in a cluster of {cluster!r}: choose one of {sorted(known)}, cluster (1, 1)")
    return known[shape]


class ArchPolicy(Protocol):
    """The constant and the functions that the module `policy` of an architecture's folder must have.

    Attributes:
        gemm_policy: returns a GEMM's order of tiles, skipped work and cache policy (`gemms.GemmPolicy`).
        accumulation: returns the order in which a GEMM adds its products.
        MEASURED: a JSON file with times of the shipped tiles (`python -m perf table`); it need not exist.
        tiles: returns the tiles of the kernels that ship for a call (`PolicyProblem`).
        rows_decide: returns True if the choice among these tiles depends on the number of rows of x.
        fixed_tile: returns the tile that a fixed rule chooses; None if the tiles' times are compared instead.
        reasons: returns the reasons for a tile that a rule chose.
        suggestions: returns sentences about other calls that would be faster than this call with any tile.
        second_tile: takes FC1's tile and returns FC2's. In a backward, takes grouped_dglu's tile and returns the data
            gradient's tile.
        glu_form: returns two keys, of ACTIVATION_FORMS and of LAYOUT_FORMS: the sets of activations and of gate layouts
            (forms) for which the FC1 kernel is compiled that serves a given activation and gate layout.
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
    """Return the policy module of an architecture (a key of ARCHS). Raises KeyError if the architecture is unknown."""
    return cast(ArchPolicy, importlib.import_module(f".{ARCHS[arch].folder}.policy", __package__))


@functools.cache
def serving(device: tuple[int, int]) -> tuple[str, ...]:
    """Return the architectures whose kernels run on a GPU, the best first.

    First comes the architecture with the features of exactly the GPU's capability (sm_90a). Then come the architectures
    of the same major version and the same or an earlier minor version, the latest first.

    device: the GPU's compute capability, for example (9, 0) for sm_90.
    """
    exact = [arch for arch in ARCHS if arch.endswith("a") and capability(arch) == device]
    others = [arch for arch in ARCHS if not arch.endswith("a") and capability(arch)[0] == device[0]]
    usable = [arch for arch in others if capability(arch) <= device]
    return *exact, *sorted(usable, key=capability, reverse=True)
