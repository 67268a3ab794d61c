"""Mutation test of the emulator: it detects our own kernels with one instruction removed or changed.

Undetected mutants are equivalent to their kernel, each for a reason in `emulator/equivalent_mutants.json`, except for a
few outside these samples, which docs/emulator.md counts.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
from emulator import mutants
from emulator.mutant_cases import (
    BLOCK_SCALED,
    BY_GROUPS,
    CASES,
    FP8,
    PLAIN_MM,
    PLAIN_WGRAD,
    WGRAD_MXFP8,
    kernel_of,
)
from emulator.mutants import Trier
from emulator.mutations import (
    EXCHANGED,
    LEFT_OUT,
    ONE_MORE,
    OTHER_BOUND,
    Mutant,
    around,
    mutants_of,
    normal,
    sample,
)

PORTABLE_MM = "grouped_mm_bf16_nt_t16x128x64_c1x1_warps_sm_90"
HOPPER_MM = "grouped_mm_bf16_nt_t128x128x64_c2x1a_pp_sm_90a"
BLACKWELL_MM = "grouped_mm_bf16_nt_t128x128x64_c1x1_tm_sm_100a"
BLACKWELL_WGRAD = "grouped_wgrad_bf16_bf16_t128x256x64_c1x1_tm_sm_100a"
BLACKWELL_DGLU = "grouped_dglu_bf16_swiglu_concat_t128x128x64_c1x1_tm_sm_100a"
QUANTIZE = "quantize_mxfp8_bf16_row_sm_90"
DECODED = "grouped_mm_mxfp4w_bf16_nt_t16x128x64_c1x1_warps_sm_90"
KNOWN: dict[str, tuple[str, ...]] = {
    "a dropped arrive": (HOPPER_MM, LEFT_OUT, r"mbarrier\.arrive\.(?!expect).*"),
    "a missing fence": (HOPPER_MM, LEFT_OUT, r"fence\.proxy\.async.*"),
    "a phase that does not change": (HOPPER_MM, LEFT_OUT, r"xor\.b32 %r, %r, %r"),
    "the next block's scale": (DECODED, ONE_MORE, r"ld\.global.*\.(b|u)8 .*"),
    "a dropped wait_group": (PORTABLE_MM, LEFT_OUT, r"cp\.async\.wait_group [1-9]"),
    "a wrong shuffle distance": (QUANTIZE, ONE_MORE, r"shfl\.sync\.bfly\.b32 .*"),
    "another bound of a predicate": (PORTABLE_MM, OTHER_BOUND, r"setp\.ge\.s32 %p, %r, %r"),
    "a dropped bar.sync": (PORTABLE_MM, LEFT_OUT, r"bar\.sync 0"),
    "a dropped commit": (BLACKWELL_MM, LEFT_OUT, r"tcgen05\.commit.*"),
    "a dropped wait for a free accumulator": (
        BLACKWELL_MM, LEFT_OUT, r"mbarrier\.try_wait.*", r"xor\.b32 %r, %r, 1\n> mbarrier",
    ),
    "one more column of tensor memory": (BLACKWELL_MM, ONE_MORE, r"tcgen05\.ld.*"),
    "a dropped wait for loads": (BLACKWELL_MM, LEFT_OUT, r"tcgen05\.wait::ld.*"),
    "exchanged scales": (BLOCK_SCALED, EXCHANGED, r"tcgen05\.mma.*"),
}  # fmt: skip
"""A kernel, the kind of mutant, its text and, for some, its neighbourhood."""
LAST = {"a missing fence", "a dropped arrive", "a phase that does not change", "a dropped wait for loads",
        "exchanged scales"}  # fmt: skip
"""Mistakes in the last instruction that fits, not in the first one: before the store of a tile, not in the mainloop."""
SAMPLED = {PORTABLE_MM: 22, DECODED: 22, QUANTIZE: 22, "layer_route_e128_sm_90": 22, HOPPER_MM: 8, FP8: 8,
           BLACKWELL_MM: 8, BLACKWELL_WGRAD: 8, BLACKWELL_DGLU: 8, BLOCK_SCALED: 8, WGRAD_MXFP8: 8, BY_GROUPS: 22,
           PLAIN_MM: 8, PLAIN_WGRAD: 8}  # fmt: skip
"""Number of mutants tried, by kernel."""
SLOW = {HOPPER_MM, BLACKWELL_MM, BLOCK_SCALED}
"""Kernels whose launches take too long for `make test`; there, test_emulator_races breaks Hopper's in one call."""
trier = functools.lru_cache(maxsize=2)(Trier)


def _known() -> list[object]:
    names = sorted(KNOWN, key=lambda what: KNOWN[what][0])
    return [pytest.param(each, marks=[pytest.mark.emulator] * (KNOWN[each][0] in SLOW)) for each in names]


@pytest.mark.parametrize("what", _known())
def test_a_known_mistake_is_found(what: str) -> None:
    name, kind, text, *beside = KNOWN[what]
    of = trier(name)
    fitting = [m for m in of.mutants if m.kind == kind and re.fullmatch(text, m.text)]
    fitting = [m for m in fitting if all(re.search(each, around(of.kernel, m.at)) for each in beside)]
    broken = fitting[-1 if what in LAST else 0]
    found = of.try_out(broken)
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
