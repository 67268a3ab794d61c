"""The interface through which each architecture makes its own choices.

An architecture is a row of `architectures.ARCHS` and a folder. The folder's `configs` list what is built. Its `policy`
is a `Room`: it chooses tiles, checks specs and models times. Plain Python that no kernel imports, so editing a policy
compiles nothing.
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
    """A GEMM's sizes: [rows, depth] times the transpose of the expert's [columns, depth]. stored: columns that are
    written."""

    rows: int
    experts: int
    columns: int
    depth: int
    stored: int

    @property
    def average(self) -> float:
        """Average rows an expert; without rows, as for one row."""
        return max(self.rows, 1) / self.experts


class Problem(Protocol):
    """Properties of a call that a policy reads. weights: (N, K) of each weight of an expert. gathers: rows come by
    index."""

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


def rows_in_words(problem: Problem) -> str:
    """Say how many rows an expert has on average."""
    average = three_digits(problem.rows / problem.experts)
    return f"{problem.rows} rows over {problem.experts} experts are {average} an expert"


class Reasons(NamedTuple):
    """Reasons why a rule chooses a tile, and why it does not choose the others."""

    why: str
    why_not: tuple[str, ...]


def of_one_kernel(problem: Problem) -> Reasons:
    """Return the reasons if the number of rows does not matter."""
    return Reasons(f"every {problem.op} of this form has one kernel, whatever the number of rows", ())


def of_two_tiles(problem: Problem, tile: TileConfig, most_rows: int, few: TileConfig, many: TileConfig) -> Reasons:
    """Return the reasons for `tile`: `few` serves up to `most_rows` an expert on average, `many` serves more."""
    limits = {few: f"at most {most_rows}", many: f"more than {most_rows}"}
    other = many if tile is few else few
    why = f"{rows_in_words(problem)}, {limits[tile]}: {tile.name}"
    return Reasons(why, (f"{other.name}: for {limits[other]} rows an expert",))


def tile_among(
    tiles: Sequence[TileConfig], shape: tuple[int, int, int], cluster: tuple[int, int] | str
) -> TileConfig:  # fmt: skip
    """Return the tile of a shape, without a cluster. Raises SpecError if `tiles` has none."""
    known = {(tile.m, tile.n, tile.k): tile for tile in tiles}
    if shape not in known or cluster != (1, 1):
        raise SpecError(f"a tile of {shape} in a cluster of {cluster!r}: choose one of {sorted(known)}, cluster (1, 1)")
    return known[shape]


class Room(Protocol):
    """The module `policy` of an architecture's folder.

    Attributes:
        gemm_policy: returns a GEMM's order of tiles (`gemms.GemmPolicy`).
        accumulation: returns the order in which a GEMM adds.
        MEASURED: a JSON file with times of the shipped tiles (`python -m perf table`); it need not exist.
        tiles: returns the tiles that ship for a problem.
        rows_decide: returns True if a problem's number of rows chooses among its tiles.
        ruled: returns the tile that a rule chooses; None if times are compared instead.
        reasons: returns the reasons for a tile that a rule chose.
        advice: returns sentences about alternatives that would be faster than any tile.
        second_tile: returns the tile of FC2, or of the data gradient, for a first tile.
        glu_form: returns the activations and gate layouts for which an FC1's kernel is compiled.
        time_us: returns the modelled microseconds of a GEMM, the mean over even and skewed routing. even_us: those of
            even routing.
        all_tiles: returns every possible tile for elements of a number of bits.
        tile_of: returns the tile that (m, n, k), a cluster and a schedule describe. Raises SpecError, which names the
            limit.
        check: raises SpecError, which names the limit, if a spec's kernels cannot run.
    """

    MEASURED: Path
    gemm_policy: Callable[[GemmSpec], Any]
    accumulation: Callable[[GemmSpec], Accumulation]
    tiles: Callable[[Problem], tuple[TileConfig, ...]]
    rows_decide: Callable[[Problem], bool]
    ruled: Callable[[Problem], TileConfig | None]
    reasons: Callable[[Problem, TileConfig], Reasons]
    advice: Callable[[Problem], tuple[str, ...]]
    second_tile: Callable[[TileConfig], TileConfig]
    glu_form: Callable[..., tuple[str, str]]
    time_us: Callable[[Gemm, TileConfig], float]
    even_us: Callable[[Gemm, TileConfig], float]
    all_tiles: Callable[[int], tuple[TileConfig, ...]]
    tile_of: Callable[[tuple[int, int, int], tuple[int, int] | str, str], TileConfig]
    check: Callable[[Spec], None]


@functools.cache
def room(arch: str) -> Room:
    """Return an architecture's policy. Raises KeyError for an unknown architecture."""
    return cast(Room, importlib.import_module(f".{ARCHS[arch].folder}.policy", __package__))


@functools.cache
def serving(device: tuple[int, int]) -> tuple[str, ...]:
    """Return the architectures whose kernels run on GPUs of a compute capability, the best first: the one with features
    of exactly this capability ("a"), then those with the same or an earlier minor version, the latest first.
    """
    exact = [arch for arch in ARCHS if arch.endswith("a") and capability(arch) == device]
    others = [arch for arch in ARCHS if not arch.endswith("a") and capability(arch)[0] == device[0]]
    usable = [arch for arch in others if capability(arch) <= device]
    return *exact, *sorted(usable, key=capability, reverse=True)
