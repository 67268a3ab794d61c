"""The lint of tcgen05 instructions reports each broken rule in a kernel's PTX with one line changed.

The first run compiles the kernel and stores it in the user's cache ($GLULAM_EMULATOR_CACHE).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
from emulator import ptx
from emulator.launch import texts
from support import ptx_lint
from support.ptx_lint import ALLOC, COMMIT, DEALLOC, LD, MMA, RELINQUISH, WAIT_LD, lint

from cute_kernels.sm100.configs import SMALL
from cute_kernels.specs import GroupedMmSpec

Lines = list[str]
Place = Callable[[Lines], int]
Edit = Callable[[Lines], Lines]


def first(part: str) -> Place:
    """Find the first line with a text."""
    return lambda lines: next(at for at, line in enumerate(lines) if part in line)


def last(part: str) -> Place:
    """Find the last line with a text."""
    return lambda lines: next(at for at in reversed(range(len(lines))) if part in lines[at])


def above(place: Place, part: str) -> Place:
    """Find the nearest line with a text above a place."""
    return lambda lines: last(part)(lines[: place(lines)])


def below(place: Place, part: str) -> Place:
    """Find the nearest line with a text below a place."""
    return lambda lines: place(lines) + 1 + first(part)(lines[place(lines) + 1 :])


def without(place: Place) -> Edit:
    """Leave a line out."""
    return edited(place, ".*", "")


def twice(place: Place) -> Edit:
    """Repeat a line."""
    return edited(place, ".*", r"\g<0>\n\g<0>")


def edited(place: Place, pattern: str, new: str) -> Edit:
    """Replace the first match of a pattern in a line."""

    def edit(lines: Lines) -> Lines:
        at = place(lines)
        line, count = re.subn(pattern, new, lines[at], count=1)
        assert count
        return [*lines[:at], line, *lines[at + 1 :]]

    return edit


def moved(place: Place, after: Place) -> Edit:
    """Move a line to below another one."""

    def edit(lines: Lines) -> Lines:
        at, to = place(lines), after(lines)
        kept = [line if i != at else "" for i, line in enumerate(lines)]
        return [*kept[: to + 1], lines[at], *kept[to + 1 :]]

    return edit


def columns(pattern: str, new: str) -> tuple[Edit, Edit]:
    """Change how many columns are allocated, and how many are freed."""
    return edited(above(first(ALLOC), ", 256"), pattern, new), edited(above(first(DEALLOC), ", 256"), pattern, new)


OTHERS_LEAVE = "bra"  # above an mma or a commit: the branch of threads that are not elected
CHANGES: dict[str, tuple[str, tuple[Edit, ...]]] = {
    "a wait is left out": (ptx_lint.WAITED, (without(first(WAIT_LD)),)),
    "the last wait is left out": (ptx_lint.WAITED, (without(last(WAIT_LD)),)),
    "an arrival before the wait": (ptx_lint.WAITED, (moved(last(WAIT_LD), below(last(WAIT_LD), "mbarrier.arrive")),)),
    "a wait after a branch": (ptx_lint.WAITED, (moved(first(WAIT_LD), below(first(WAIT_LD), "bra")),)),
    "a wait before the read": (ptx_lint.WAITED, (moved(first(LD), first(WAIT_LD)),)),
    "a dealloc is left out": (ptx_lint.FREED, (without(first(DEALLOC)),)),
    "a second dealloc": (ptx_lint.FREED, (twice(first(DEALLOC)),)),
    "fewer columns are freed": (ptx_lint.FREED, (edited(above(first(DEALLOC), "256"), "256", "128"),)),
    "a relinquish is left out": (ptx_lint.RELINQUISHED, (without(first(RELINQUISH)),)),
    "an alloc after the relinquish": (ptx_lint.RELINQUISHED, (moved(first(ALLOC), first(RELINQUISH)),)),
    "96 columns": (ptx_lint.COLUMNS, columns("256", "96")),
    "1024 columns": (ptx_lint.COLUMNS, columns("256", "1024")),
    "columns from memory": (ptx_lint.COLUMNS, columns(r"mov(.*) 256;", r"ld.shared\1 [%r1];")),
    "two allocs of 512 columns": (
        ptx_lint.COLUMNS,
        (*columns("256", "512"), twice(first(ALLOC)), twice(first(DEALLOC))),
    ),
    "another instruction": (
        ptx_lint.KNOWN,
        (edited(first(RELINQUISH), "$", " tcgen05.shift.cta_group::1.down [%r1];"),),
    ),
    "another kind of mma": (ptx_lint.KNOWN, (edited(last(MMA), "f16", "tf32"),)),
    "another shape of a read": (ptx_lint.KNOWN, (edited(last(LD), "256b", "128b"),)),
    "an mma of two CTAs": (ptx_lint.ONE_CTA, (edited(first(MMA), "group::1", "group::2"),)),
    "a commit of two CTAs": (ptx_lint.ONE_CTA, (edited(last(COMMIT), "group::1", "group::2"),)),
    "an mma of all threads": (ptx_lint.ELECTED, (without(above(first(MMA), OTHERS_LEAVE)),)),
    "an mma of the other threads": (ptx_lint.ELECTED, (edited(above(last(MMA), OTHERS_LEAVE), "@", "@!"),)),
    "a copy of scales by all threads": (
        ptx_lint.ELECTED,
        (edited(first(RELINQUISH), "$", " tcgen05.cp.cta_group::1.32x128b.warpx4 [%r1], %rd1;"),),
    ),
    "an mma of threads by their number": (
        ptx_lint.ELECTED,
        (edited(above(first(MMA), "elect"), r"elect.*\|(.*), -1", r"setp.ne.b32 \1, %r1, 0"),),
    ),
    "a branch to an mma": (ptx_lint.ELECTED, (edited(first(MMA), "(.*)", r"TO: \1 @%p1 bra TO;"),)),
    "a commit of all threads": (ptx_lint.ELECTED, (without(above(last(COMMIT), OTHERS_LEAVE)),)),
    "a read under a predicate": (ptx_lint.ALIGNED, (edited(first(LD), "tcgen05", "@%p1 tcgen05"),)),
    "a wait under a predicate": (ptx_lint.ALIGNED, (edited(last(WAIT_LD), "tcgen05", "@%p1 tcgen05"),)),
    "a read of one thread": (
        ptx_lint.ALIGNED,
        (edited(first(LD), "^", "elect.sync %r1|%p1, -1; @!%p1 bra OUT;"), edited(last("ret;"), "^", "OUT: ")),
    ),
    "the commit of stages is left out": (ptx_lint.COMMITS, (without(first(COMMIT)),)),
    "the commit of accumulators is left out": (ptx_lint.COMMITS, (without(last(COMMIT)),)),
    "a third commit": (ptx_lint.COMMITS, (twice(first(COMMIT)),)),
    "both commits to one mbarrier": (
        ptx_lint.COMMITS,
        (edited(first(COMMIT), r"\[.*\]", "[%r1]"), edited(last(COMMIT), r"\[.*\]", "[%r1]")),
    ),
    "accumulators are committed with each stage": (ptx_lint.COMMITS, (moved(last(COMMIT), first(COMMIT)),)),
}


@functools.cache
def _text() -> str:
    spec = GroupedMmSpec("bfloat16", tile=SMALL, arch="sm_100a")
    return texts().of(spec).object_file.with_suffix(".ptx").read_text()


def _broken(text: str) -> set[str]:
    (kernel,) = ptx.parse(text)
    return {finding.rule for finding in lint(kernel)}


def test_a_kernel_breaks_no_rule() -> None:
    assert _broken(_text()) == set()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_breaks_one_rule(change: str) -> None:
    rule, edits = CHANGES[change]
    lines = _text().splitlines()
    for edit in edits:
        lines = edit(lines)
    assert _broken("\n".join(lines)) == {rule}


def test_every_rule_is_broken() -> None:
    assert {rule for rule, _ in CHANGES.values()} == set(ptx_lint.RULES)


def test_a_kernel_that_never_commits_is_reported() -> None:
    assert _broken(re.sub(r"tcgen05\..*", "", _text())) == {ptx_lint.COMMITS}


def test_a_finding_names_the_line() -> None:
    lines = _text().splitlines()
    at = first(MMA)(lines)
    (kernel,) = ptx.parse(_text().replace("cta_group::1.kind", "cta_group::2.kind"))
    found = [finding for finding in lint(kernel) if finding.rule == ptx_lint.ONE_CTA]
    assert found[0].line == at + 1 and "mma" in found[0].op
    assert len(found) == sum(MMA in line for line in lines)
