"""Choose among the shipped kernels by sizes, dtypes and options that the host knows, never by values on the device.

Group sizes are on the device, so they cannot influence the choice; a captured graph replays the kernel that eager mode
would choose. Each architecture defines the tiles that ship, and the rule that chooses among them
(`cute_kernels.arch.ArchPolicy`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from cute_kernels.arch import policy_of, rows_in_words, three_digits
from cute_kernels.specs import (
    ACTIVATION_FORMS,
    BLOCK_ROWS,
    LAYOUT_FORMS,
    OPERANDS,
    GroupedDgluSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    Spec,
    check_served,
)
from cute_kernels.tiles import TileConfig

from . import estimates as times
from . import invariance
from .on_tile import spec_on as spec_on
from .problem import Problem, changed

WIDTHS = {
    "grouped_mm": ("in_features", "out_features"),
    "grouped_glu": ("in_features", "intermediate"),
    "grouped_mlp": ("in_features", "intermediate", "out_features"),
    "grouped_dglu": ("in_features", "intermediate"),
    "grouped_wgrad": ("in_features", "out_features"),
}
"""{operator whose kernels have a choice of tiles: the widths that its problems must have}."""
TILED = tuple(WIDTHS)
SIZES_AN_OCTAVE = 16


@dataclass(frozen=True)
class Choice:
    """A chosen kernel with the reasons, as text.

    Attributes:
        spec: the kernel's spec.
        why: why it was chosen.
        why_not: why no other kernel was chosen, and what could make the call faster; a line for each reason.
        is_tuned: True if a tuned table chose the kernel.
    """

    spec: Spec
    why: str
    why_not: tuple[str, ...]
    is_tuned: bool = False


def family_of(spec: Spec) -> Spec:
    """Return a spec's family: the same spec with placeholders for its tiles, so that it describes the computation only.

    All kernels of one family compute the same problems.
    """
    if isinstance(spec, GroupedMlpSpec):
        return replace(spec, fc1=family_of(spec.fc1), fc2=family_of(spec.fc2))  # type: ignore[arg-type]
    if not isinstance(spec, (GroupedMmSpec, GroupedGluSpec, GroupedDgluSpec, GroupedWgradSpec)):
        return spec
    if isinstance(spec, GroupedMmSpec) and spec.transpose_w and OPERANDS[spec.operands].decodes:
        return spec  # these kernels have a single tile
    # The operands and the architecture determine depth and schedule.
    if spec.tile.by_warps or spec.tile.in_tensor_memory:
        any_tile = TileConfig(n=128, k=spec.tile.k, schedule=spec.tile.schedule)
    else:
        schedule = "swapped" if OPERANDS[spec.operands].decodes else "cooperative"
        any_tile = TileConfig(k=spec.tile.k, schedule=schedule)
    if isinstance(spec, GroupedDgluSpec):
        return replace(spec, tile=any_tile, dgrad=any_tile if spec.dgrad else None)
    return replace(spec, tile=any_tile)


def families_of(problem: Problem, arch: str) -> list[Spec]:
    """Return the families (`family_of`) of all kernels that can serve a problem with any number of rows.

    Kernels compiled for exactly the problem's activation and gate layout come first, then kernels that serve several.

    Raises:
        SpecError: no kernel serves the problem.
    """
    return families_like(spec_on(problem, arch, policy_of(arch).tiles(problem)[0]), problem)


def families_like(spec: Spec, problem: Problem) -> list[Spec]:
    """Return the families (specs without tiles, `family_of`) of all kernels that can serve a problem.

    `families_of` returns the same, but this function starts from a spec that is known already. The families differ
    only in the set of activations and the set of gate layouts that a kernel serves.

    Args:
        spec: a kernel that serves the problem, with any tile. The families have all its fields except the two sets.
        problem: its activation and gate layout must be in the two sets.
    """
    if isinstance(spec, GroupedMlpSpec):
        return [family_of(replace(spec, fc1=fc1)) for fc1 in families_like(spec.fc1, problem)]  # type: ignore[arg-type]
    if not isinstance(spec, GroupedGluSpec):
        return [family_of(spec)]
    layouts = [problem.glu_layout]
    if spec.gated and not spec.transpose_w:  # other kernels serve a single layout
        layouts = _serving(LAYOUT_FORMS, problem.glu_layout)
    return [
        family_of(replace(spec, activation=activation, glu_layout=layout))
        for activation in _serving(ACTIVATION_FORMS, problem.activation)
        for layout in layouts
        if layout != "blocked" or problem.intermediate % BLOCK_ROWS == 0
    ]


def _serving(forms: Mapping[str, tuple[str, ...]], name: str) -> list[str]:
    """Return the names of the sets in `forms` that contain `name`, the smallest set first; [] if none does.

    Args:
        forms: {name of a set: the activations, or gate layouts, that one compiled kernel serves}.
        name: an activation or gate layout.
    """
    return sorted((form for form, served in forms.items() if name in served), key=lambda form: len(forms[form]))


def microseconds(us: float) -> str:
    return f"{three_digits(us)} us"


def estimated_rows(problem: Problem) -> int:
    """Return the problem's number of rows rounded to few values, at which the times of tiles are compared.

    The mean number of rows an expert is rounded to a power of two, or to one of 15 sizes between two powers. That
    changes the rows by about 2 %, less than the error of estimates. So most new numbers of rows use estimates that were
    made before.
    """
    step = round(SIZES_AN_OCTAVE * math.log2(max(problem.rows, 1) / problem.experts))
    return round(problem.experts * math.pow(2.0, step / SIZES_AN_OCTAVE))


def size_of(problem: Problem, arch: str) -> Hashable:
    """Return a key for the size class of the problem's rows.

    Problems that differ only in rows, and have equal keys, get the same shipped tile.
    """
    check_served(problem.operands, arch)
    return policy_of(arch).fixed_tile(problem) or estimated_rows(problem)


def shipped_choice(problem: Problem, arch: str) -> Choice:
    """Choose among the shipped kernels: by the architecture's rule if it has one, else by the tiles' times."""
    check_served(problem.operands, arch)
    here = policy_of(arch)
    if tile := here.fixed_tile(problem):
        usable = invariance.tile_in_order(problem, arch, tile) if problem.invariant else tile
        why, why_not = here.reasons(problem, tile) if usable == tile else (in_order_in_words(tile, usable), ())
        return Choice(spec_on(problem, arch, usable), why, (*why_not, *here.suggestions(problem)))
    parts = changed(problem, rows=estimated_rows(problem)).parts
    tiles = invariance.tiles_in_order(problem, arch) if problem.invariant else here.tiles(problem)
    best, *others = times.estimates(parts, tiles, arch)
    why = f"{rows_in_words(problem)}: {best.tile.name} takes about {microseconds(best.us)}, {best.source}"
    why_not = tuple(
        f"{one.tile.name}: about {microseconds(one.us)}, {one.us / best.us:.2f} times as long" for one in others
    )
    return Choice(spec_on(problem, arch, best.tile), why, (*why_not, *here.suggestions(problem)))


def in_order_in_words(tile: TileConfig, usable: TileConfig) -> str:
    """Return text that says why the tile `usable` serves in place of `tile` in a batch-invariant call."""
    return f"{invariance.BY_SWITCH}, as {tile.name} does: {usable.name}"


def shipped_specs(problem: Problem, arch: str) -> list[Spec]:
    """Return all shipped specs that can serve a problem. The first is the one that is chosen."""
    others = (spec_on(problem, arch, tile) for tile in policy_of(arch).tiles(problem))
    return list(dict.fromkeys([shipped_choice(problem, arch).spec, *others]))
