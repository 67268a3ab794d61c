"""The emulator finds kernels that are wrong: instructions of our own kernels are left out or changed, one at a time.

Mutants that it cannot find are equivalent to their kernel, each for a reason in `emulator/equivalent_mutants.json`,
except for a few outside of these samples, which docs/emulator.md counts.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
from emulator import mutants
from emulator.mutant_cases import CASES, FP8, kernel_of
from emulator.mutants import Trier
from emulator.mutations import LEFT_OUT, ONE_MORE, OTHER_BOUND, Mutant, mutants_of, normal, sample

PORTABLE_MM = "grouped_mm_bf16_nt_t16x128x64_c1x1_warps_sm_90"
HOPPER_MM = "grouped_mm_bf16_nt_t128x128x64_c2x1a_pp_sm_90a"
QUANTIZE = "quantize_mxfp8_bf16_row_sm_90"
DECODED = "grouped_mm_mxfp4w_bf16_nt_t16x128x64_c1x1_warps_sm_90"
KNOWN = {
    "a dropped arrive": (HOPPER_MM, LEFT_OUT, r"mbarrier\.arrive\.(?!expect).*"),
    "a missing fence": (HOPPER_MM, LEFT_OUT, r"fence\.proxy\.async.*"),
    "a phase that does not change": (HOPPER_MM, LEFT_OUT, r"xor\.b32 %r, %r, %r"),
    "the next block's scale": (DECODED, ONE_MORE, r"ld\.global.*\.(b|u)8 .*"),
    "a dropped wait_group": (PORTABLE_MM, LEFT_OUT, r"cp\.async\.wait_group [1-9]"),
    "a wrong shuffle distance": (QUANTIZE, ONE_MORE, r"shfl\.sync\.bfly\.b32 .*"),
    "another bound of a predicate": (PORTABLE_MM, OTHER_BOUND, r"setp\.ge\.s32 %p, %r, %r"),
    "a dropped bar.sync": (PORTABLE_MM, LEFT_OUT, r"bar\.sync 0"),
}
LAST = {"a missing fence", "a dropped arrive", "a phase that does not change"}
"""Mistakes in the last instruction that fits, not in the first one: before the store of a tile, not in the mainloop."""
SAMPLED = {PORTABLE_MM: 22, DECODED: 22, QUANTIZE: 22, "layer_route_e128_sm_90": 22, HOPPER_MM: 8, FP8: 8}
"""How many mutants of each kernel."""
trier = functools.lru_cache(maxsize=2)(Trier)


def _known() -> list[object]:
    """Hopper's kernel takes too long for `make test`; there, test_emulator_races breaks it in one call."""
    names = sorted(KNOWN, key=lambda what: KNOWN[what][0])
    return [pytest.param(each, marks=[pytest.mark.emulator] * (KNOWN[each][0] == HOPPER_MM)) for each in names]


@pytest.mark.parametrize("what", _known())
def test_a_known_mistake_is_found(what: str) -> None:
    name, kind, text = KNOWN[what]
    fitting = [m for m in trier(name).mutants if m.kind == kind and re.fullmatch(text, m.text)]
    broken = fitting[-1 if what in LAST else 0]
    found = trier(name).try_out(broken)
    assert found is not None
    assert found.how, f"{broken.at}: {broken.text}"


@pytest.mark.emulator
def test_a_plain_store_to_a_word_of_other_clusters_atomics_is_a_race() -> None:
    """The last cluster that draws a ticket resets the counter: by a relaxed store, which does not race."""
    of = trier(HOPPER_MM)
    (at,) = (at for at in of.reached if of.kernel.code[at].op == "st.relaxed.gpu.global.b32")
    reset = of.kernel.code[at]
    op, text = (words.replace(".relaxed.gpu", "") for words in (reset.op, reset.text))
    found = of.try_out(Mutant(at, "plain", normal(text), dataclasses.replace(reset, op=op, text=text)))
    assert found is not None
    assert found.how == mutants.RACE, found


@pytest.mark.emulator
@pytest.mark.parametrize("name", SAMPLED)
def test_mutants_are_found_or_equivalent(name: str) -> None:
    of = trier(name)
    tried = [(mutant, of.try_out(mutant)) for mutant in sample(name, of.mutants, SAMPLED[name])]
    survivors = [mutant for mutant, found in tried if found is not None and not found.how]
    unexplained = [m for m in survivors if not mutants.reason_for(name, of.kernel, m)]
    assert not [f"{m.at} {m.kind}: {m.text}" for m in unexplained]
    assert 2 * sum(found is not None for _, found in tried) >= SAMPLED[name]


@pytest.mark.emulator
def test_each_reason_fits_a_mutant_of_its_case() -> None:
    unused = set(mutants.reasons())
    for name, case in CASES.items():
        kernel = kernel_of(case)
        every = mutants_of(kernel, set(range(len(kernel.code))))
        fitting = (reason for reason in list(unused) if any(reason.fits(name, kernel, m) for m in every))
        unused.difference_update(fitting)
    assert not unused
