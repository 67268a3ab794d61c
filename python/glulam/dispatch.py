"""Which kernel serves a problem: what a user prefers, what a tuned table says, or what ships."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cute_kernels.specs import Spec

from . import preferences, records, tuned
from .changed import changed
from .problem import Problem
from .shipped_kernels import Choice, faster, form, forms_like, has_one_tile, microseconds, shipped_choice, size_of


def prefer(spec: Spec, keep: bool = True) -> None:
    """From now on `spec` serves every problem of its form, whatever the number of rows; with `keep`, in later processes
    as well.
    """
    preferences.prefer(form(spec), spec, keep)


def choose(problem: Problem, arch: str, gpu: str = "") -> Choice:
    """The spec that serves a problem on an architecture: what a user prefers, else what a tuned table says for the GPU
    of this name, else what ships. Nothing is compiled or measured.
    """
    shipped = shipped_choice(problem, arch)
    if chosen := _preferred(problem, shipped.spec):
        return Choice(chosen, "glulam.compile made it the preferred kernel of this form", faster(shipped))
    if (layer := tuned.layer(problem, gpu)) and (found := tuned.fastest(layer, problem, shipped.spec)):
        return _from_table(found, shipped)
    ignored = (*preferences.ignored(), *(tuned.tables(gpu).ignored if gpu else ()))
    return replace(shipped, why_not=(*shipped.why_not, *ignored)) if ignored else shipped


def _preferred(problem: Problem, shipped: Spec) -> Spec | None:
    """What a user prefers: for this very activation and layout, else for several."""
    if not preferences.are_any():
        return None
    for one in forms_like(shipped, problem):
        if chosen := preferences.of(one):
            return chosen
    return None


class Chooser:
    """The specs that `choose` gives problems that differ in their rows alone, without its reasons.

    What rows do not decide is asked for once: preferences, the layer of a tuned table, and the spec for a size.
    """

    def __init__(self, problem: Problem, arch: str, gpu: str = "") -> None:
        self._problem, self._arch = problem, arch
        self._shipped: dict[Any, Spec] = {}
        self._specs: dict[Spec, Spec] = {}  # equal ones are the same, so that who asks may compare ids
        shipped = self._choose(problem)
        self._only = _preferred(problem, shipped)
        self._layer = None if self._only else tuned.layer(problem, gpu)
        if self._layer is None and has_one_tile(problem):
            self._only = self._only or shipped

    def spec(self, rows: int) -> Spec:
        if self._only is not None:
            return self._only
        problem = changed(self._problem, rows=rows)
        shipped = self._choose(problem)
        found = None if self._layer is None else tuned.fastest(self._layer, problem, shipped)
        return shipped if found is None else found.spec

    def _choose(self, problem: Problem) -> Spec:
        size = size_of(problem, self._arch)
        if size not in self._shipped:
            spec = shipped_choice(problem, self._arch).spec
            self._shipped[size] = self._specs.setdefault(spec, spec)
        return self._shipped[size]


def _from_table(found: tuned.Tuned, shipped: Choice) -> Choice:
    why = f"{records.shown(found.path)} has it fastest: {microseconds(found.us)}, mean over the routings"
    if found.spec == shipped.spec:
        why = f"{why}; it ships"
    elif found.shipped_us:
        why = f"{why}; the shipped {shipped.spec.name} takes {found.shipped_us / found.us:.2f} times as long"
    return Choice(found.spec, why, faster(shipped), is_tuned=True)
