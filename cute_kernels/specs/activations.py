"""Activations and gate layouts. A kernel is compiled for one of them, or for a set that has a name, called a form."""

from __future__ import annotations

from ..formulas import FORMULAS

ACTIVATIONS = tuple(FORMULAS)
GATED = tuple(name for name, formula in FORMULAS.items() if formula.is_gated)
UNGATED = tuple(name for name in ACTIVATIONS if name not in GATED)
GLU_LAYOUTS = ("concat", "interleaved", "interleaved32")
KINDS = {name: number for number, name in enumerate(ACTIVATIONS)}
LAYOUTS = {name: number for number, name in enumerate(GLU_LAYOUTS)}
"""Numbers by which a call names its activation (KINDS) and its gate layout (LAYOUTS). All kernels get these numbers,
also kernels that are compiled for a single activation and layout."""
_MERGED = {
    kind: tuple(name for name in names if FORMULAS[name].is_merged)
    for kind, names in (("gated", GATED), ("ungated", UNGATED))
}
ACTIVATION_FORMS = _MERGED | {name: (name,) for name in ACTIVATIONS}
LAYOUT_FORMS = {"blocked": GLU_LAYOUTS, "strided": ("concat", "interleaved")} | {name: (name,) for name in GLU_LAYOUTS}
"""Forms: names of sets of activations and of sets of gate layouts, with the members of each. A kernel is compiled for a
form. If the form has several members, a call chooses one at run time.

    blocked   all layouts, if I is a multiple of BLOCK_ROWS
    strided   two layouts, for any I

The branch at run time can double a backward's time and costs decoding up to 7 %. `sm90.configs.glu_form` decides which
forms ship.
"""
BLOCK_ROWS = 32
"""Rows of a block of one half of a gated w1. In interleaved32, each block of one half is followed by a block of the
other half. Form "blocked" needs I to be a multiple of BLOCK_ROWS."""


def is_gated(activation: str) -> bool:
    """Return True if an activation has a gate, or if all activations of a form such as "gated" have one."""
    return ACTIVATION_FORMS[activation][0] in GATED


def form_of_several(activation: str) -> str:
    """Return the form of several activations ("gated" or "ungated") to which an activation belongs; the activation
    itself if it belongs to neither."""
    return next((form for form, names in _MERGED.items() if activation in names), activation)
