"""Choose the kernel for a problem: the kernel that a user prefers, else that of a tuned table, else a shipped one.

A problem (`problem`) is what the host knows of a call: operator, sizes, dtype, options. A spec (`cute_kernels.specs`)
describes one compiled kernel, including the tile on which it computes. A kernel "serves" a problem if it can compute
it. "Shipped" kernels are in the bundle, the library of compiled kernels that comes with Glulam.

Read the files in this order. `choose` below asks the three sources one after the other. `known` has preferences and
tuned tables, `table` their file format. `shipped` chooses among the shipped kernels: by a rule of the architecture,
else by measured times, else by the cost model; `estimates` has these times. `specs` makes specs from the descriptions
of users and files. `loadable` finds functions that need no compiling. `records` reads files that anybody may have
written.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from cute_kernels.arch import policy_of
from cute_kernels.specs import Spec

from . import known, records, shipped
from .invariance import BY_SWITCH, keeps_order
from .problem import Problem, changed
from .shipped import Choice, microseconds

__all__ = ["Choice", "Chooser", "choose"]


def choose(problem: Problem, arch: str, gpu: str = "") -> Choice:
    """Choose the kernel for a problem; return its spec with the reasons. Nothing is compiled or measured.

    Args:
        problem: the problem. If `world_experts` is set (expert parallelism), the kernel is chosen for
            `problem.expected`, the number of rows that are expected on this rank.
        arch: the architecture, e.g. "sm_90a".
        gpu: the GPU's name, by which tuned tables are found. "": no tuned table is read.
    """
    if problem.expected is not problem:
        choice = choose(problem.expected, arch, gpu)
        return replace(choice, why=f"{_expected_in_words(problem)}{choice.why}")
    ships = shipped.shipped_choice(problem, arch)
    suggestions = policy_of(arch).suggestions(problem)
    spec = known.preferred(problem, ships.spec)
    if spec and keeps_order(spec, problem, arch):
        return Choice(spec, "glulam.compile made it the preferred kernel of this form", suggestions)
    if spec:
        ships = replace(ships, why_not=(f"{spec.name}, which is preferred: {BY_SWITCH}", *ships.why_not))
    if (layer := known.tuned(problem, gpu)) and (found := known.fastest(layer, problem, ships.spec)):
        return Choice(found.spec, _tuned_in_words(found, ships.spec), suggestions, is_tuned=True)
    return replace(ships, why_not=(*ships.why_not, *known.ignored(gpu)))


def _expected_in_words(problem: Problem) -> str:
    """Return text that says how many of a problem's rows are expected on this rank; "" if all rows are."""
    if problem.expected_rows == problem.rows:
        return ""
    share = f"{problem.experts} of {problem.world_experts} experts are here"
    return f"{share}, for which {problem.expected_rows} of {problem.rows} choices are expected; "


def _tuned_in_words(found: known.Tuned, ships: Spec) -> str:
    why = f"{records.shown(found.path)} has it fastest: {microseconds(found.us)}, mean over the routings"
    if found.spec == ships:
        return f"{why}; it ships"
    if found.shipped_us:
        return f"{why}; the shipped {ships.name} takes {found.shipped_us / found.us:.2f} times as long"
    return why


class Chooser:
    """Chooses specs as `choose` does, without reasons, for problems that differ only in their number of rows.

    Everything that does not depend on rows is looked up once: preferences, the tuned table's entry (`table.Layer`), and
    the shipped spec for each size class of rows (`shipped.size_of`).

    Args:
        problem: any of these problems.
        arch: the architecture, e.g. "sm_90a".
        gpu: the GPU's name, by which tuned tables are found. "": no tuned table is read.
    """

    def __init__(self, problem: Problem, arch: str, gpu: str = "") -> None:
        self._problem, self._arch = problem, arch
        problem = problem.expected
        self._ships: dict[Hashable, Spec] = {}
        self._specs: dict[Spec, Spec] = {}  # equal ones are the same, so that callers may compare ids
        ships = self._shipped(problem)
        preferred = known.preferred(problem, ships)
        self._only = preferred if preferred and keeps_order(preferred, problem, arch) else None
        self._layer = None if self._only else known.tuned(problem, gpu)
        if self._layer is None and not policy_of(arch).rows_decide(problem):
            self._only = self._only or ships

    def spec(self, rows: int) -> Spec:
        if self._only is not None:
            return self._only
        problem = changed(self._problem, rows=rows).expected
        ships = self._shipped(problem)
        found = self._layer and known.fastest(self._layer, problem, ships)
        return found.spec if found else ships

    def _shipped(self, problem: Problem) -> Spec:
        size = shipped.size_of(problem, self._arch)
        if size not in self._ships:
            spec = shipped.shipped_choice(problem, self._arch).spec
            self._ships[size] = self._specs.setdefault(spec, spec)
        return self._ships[size]
