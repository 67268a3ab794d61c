"""Modifiers and instructions without an effect in the emulator, each with the reason."""

from __future__ import annotations

from ..emitter import instruction

_ONE_ORDER = "the machine executes one step at a time: all accesses are in one order that every thread sees"
_NO_CACHES = "the machine has no caches"
_CONVERGED = "tells the assembler that whole warps arrive together; masks of lanes are checked where they matter"

ORDER = dict.fromkeys(("weak", "relaxed", "acquire", "release", "acq_rel", "sc", "volatile"), _ONE_ORDER)
SCOPE = dict.fromkeys(("cta", "cluster", "gpu", "sys"), _ONE_ORDER)
CACHE = dict.fromkeys(
    ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L1::no_allocate", "L1::evict_normal", "L1::evict_unchanged",
     "L1::evict_first", "L1::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::64B",
     "L2::128B", "L2::256B"), _NO_CACHES)  # fmt: skip
ALIGNED = {"aligned": _CONVERGED}
UNIFORM = {"uni": "tells the assembler that all lanes branch alike"}


@instruction("prefetch", "prefetchu", "discard", "applypriority")
def cache_operation(e, ins, mods):
    """Translate prefetch (PTX ISA): no effect, since there are no caches; a prefetched tensor map is checked."""
    if mods.flag("tensormap"):
        mods.drop({"param": "a generic address says its space"})
        e.add(f"u.prefetch({ins.op!r}, {e.address(*e.operands(ins, 1), 'b64')}, m)")
    mods.drop(SCOPE, CACHE, dict.fromkeys(("global", "L1", "L2"), _NO_CACHES))


@instruction("griddepcontrol")
def dependent_launch(e, ins, mods):
    """Translate griddepcontrol (PTX ISA): kernels run one after the other, so a wait returns at once."""
    e.operands(ins, 0)
    e.add(f"u.griddepcontrol({mods.choice('wait', 'launch_dependents')!r}, m)")


@instruction("setmaxnreg")
def register_count(e, ins, mods):
    """Translate setmaxnreg (PTX ISA): registers are not limited, but the machine checks the counts."""
    action = mods.choice("inc", "dec")
    mods.require("sync", "aligned", "u32")
    e.add(f"u.setmaxnreg({action!r}, {e.immediate(ins, *e.operands(ins, 1))})")


@instruction("membar")
def memory_barrier(e, ins, mods):
    """Translate membar (PTX ISA, membar/fence): no effect, since memory is sequentially consistent. See `fence` for
    proxy fences.
    """
    mods.choice("cta", "gl", "sys")
    e.add(f"u.fence({ins.op!r}, m)")


@instruction("pragma")
def nothing(e, ins, mods):
    """Do nothing: translation of the placeholder with which tests replace instructions to break kernels."""
