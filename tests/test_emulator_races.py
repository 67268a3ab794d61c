"""The emulator's race check: the ordering of accesses in kernels of a few lines, and in the product's kernels, intact
and broken.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from emulator import calls, translate
from emulator.by_hand import lane, make, nothing, shared, wait
from emulator.emulated_gpu import installed
from emulator.faults import Fault
from emulator.machine import Machine
from emulator.memory import Memory
from emulator.mutant_cases import recorded_last
from emulator.ptx import Imm, Ins, Kernel
from emulator.races import Race, Races
from emulator.racy import CASES, parse

SEEDS = range(3)
TOGETHER = ("bar.sync before a read", "bar.sync before a write", "bytes of one word", "cp.async",
            "release and acquire of a word", "atomics on one word", "lanes of a warp",
            "lanes of a warp, in global memory", "a byte that one lane writes and all read", "cp.async of another lane",
            "atomics of lanes", "rows of a matrix")  # fmt: skip
"""Cases whose warps may step together, as warps of kernels without mbarriers do."""


def run(code: str, seed: int = 0, races: Races | None = None, memory=None, early: bool = False, **options) -> None:
    kernel, memory, races = parse(code), memory or words(), races or Races()
    launch = {"grid": (1, 1, 1), "block": (64, 1, 1), "unit_warps": 1, **options}
    machine = Machine(kernel, memory, dynamic=8192, params=memory.pointer.to_bytes(8, "little"), seed=seed,
                      observer=races, program=translate.translate(kernel), **launch)  # fmt: skip
    races.launch(machine, early)
    machine.run()


def words() -> Memory:
    memory = Memory()
    memory.pointer = memory.put(np.zeros(512, np.uint32))
    return memory


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_accesses_that_synchronisation_orders_are_no_race(name, seed):
    run(CASES[name].code, seed, **CASES[name].launch)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "edit"), [(name, edit) for name, case in CASES.items() for edit in case.edits])
def test_each_part_of_the_order_that_is_left_out_is_found_in_any_schedule(name, edit, seed):
    case = CASES[name]
    assert edit[0] in case.code
    with pytest.raises(Fault, match=case.words):
        run(case.code.replace(*edit, 1), seed, **case.launch)


@pytest.mark.parametrize("name", TOGETHER)
def test_warps_that_step_together_race_as_well(name):
    case = CASES[name]
    run(case.code, **{**case.launch, "unit_warps": 0})
    for edit in case.edits:
        with pytest.raises(Race):
            run(case.code.replace(*edit, 1), **{**case.launch, "unit_warps": 0})


def test_many_ctas_are_many_agents():
    run(CASES["cp.async"].code, grid=(40, 1, 1))
    run("red.global.add.u32 [%rd2], 1; ld.relaxed.gpu.global.u32 %r6, [%rd2]; fence.acq_rel.gpu;", grid=(40, 1, 1))
    with pytest.raises(Race, match=r"by kernel, CTA \(1, 0, 0\) warp"):
        run("st.global.u32 [%rd2], 1;", grid=(40, 1, 1), block=(32, 1, 1))


# launches


def chain(*kernels: tuple[str, bool]) -> None:
    """Launch (code, may begin early) kernels one after the other; early: by programmatic dependent launch."""
    races, memory = Races(), words()
    for code, early in kernels:
        run(code, 0, races, memory, early)


WRITE, READ = "@%p0 st.global.b32 [%rd2], %r0;", "@%p0 ld.global.b32 %r6, [%rd2];"
LET, AWAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"


def test_a_launch_that_begins_early_waits_before_it_touches_what_the_launch_before_does():
    chain((WRITE, False), (READ, False))
    chain((WRITE, False), (AWAIT + READ, True))
    chain((READ, False), (READ, True))
    for before, after in ((WRITE, READ), (READ, WRITE), (WRITE, WRITE)):
        with pytest.raises(Race, match=r"launch of kernel before .*griddepcontrol\.wait before the access"):
            chain((before, False), (after + AWAIT, True))
    with pytest.raises(Race):
        chain((WRITE, False), ("@%p1 griddepcontrol.wait;" + READ, True))
    chain((WRITE, False), ("@%p1 griddepcontrol.wait; bar.sync 0;" + READ, True))


def test_a_launch_that_lets_the_next_one_begin_before_it_waits_leaves_it_the_launch_before():
    chain((WRITE, False), (AWAIT + LET, True), (READ, True))
    chain((WRITE, False), (LET + AWAIT, True), (AWAIT + READ, True))
    with pytest.raises(Race, match="griddepcontrol.wait"):
        chain((WRITE, False), (LET + AWAIT, True), (READ, True))


def test_a_wait_ends_older_launches_only_if_the_launch_before_has_waited():
    for between in (AWAIT + LET, LET + AWAIT):
        chain((WRITE, False), (between, True), (AWAIT + READ, True))
    chain((WRITE, False), (LET, False), (AWAIT + READ, True))
    with pytest.raises(Race, match="launch of kernel before"):
        chain((WRITE, False), (LET, True), (AWAIT + READ, True))
    chain((WRITE, False), (LET, True), (READ, False))


def test_a_launch_that_follows_another_waits_before_it_touches_what_that_one_writes():
    def follow(code: str, written: list[tuple[int, int]]) -> None:
        races, memory, kernel = Races(), words(), parse(code)
        machine = Machine(kernel, memory, (1, 1, 1), (64, 1, 1), 8192, memory.pointer.to_bytes(8, "little"),
                          observer=races, program=translate.translate(kernel), unit_warps=1)  # fmt: skip
        races.follow(machine, [(memory.pointer + begin, size) for begin, size in written])
        machine.run()

    follow(AWAIT + READ + WRITE, [(0, 2048)])
    follow(READ + WRITE, [(128, 1920)])
    for touch in (READ, WRITE):
        with pytest.raises(Race, match="launch of .* before") as caught:
            follow(touch, [(64, 64)])
        assert caught.value.before is not None


def beside(*launches: tuple[str, str]) -> None:
    """Launch (stream, code) kernels, each ordered only after earlier ones of its stream."""
    races, memory = Races(), words()
    for stream, code in launches:
        kernel = parse(code)
        machine = Machine(kernel, memory, (1, 1, 1), (32, 1, 1), 8192, memory.pointer.to_bytes(8, "little"),
                          observer=races, program=translate.translate(kernel))  # fmt: skip
        races.launch_beside(machine, False, stream)
        machine.run()


@pytest.mark.parametrize("release", ["st.release.sys", "st.relaxed.sys"])
@pytest.mark.parametrize("acquire", ["ld.acquire.sys", "ld.relaxed.sys"])
def test_launches_of_two_ranks_are_ordered_by_words_and_those_of_one_rank_by_their_stream(release, acquire):
    give = f"st.global.b32 [%rd2], %r0; mov.u32 %r8, 1; @%p2 {release}.global.u32 [%rd0+1024], %r8;"
    take = f"LOOP: {acquire}.global.u32 %r7, [%rd0+1024]; setp.eq.u32 %p6, %r7, 0; @%p6 bra LOOP;"
    launches = ("a", give), ("b", take), ("b", "ld.global.b32 %r6, [%rd2];")
    if release == "st.release.sys" and acquire == "ld.acquire.sys":
        beside(*launches)
    else:
        with pytest.raises(Race, match="A release and an acquire of one word"):
            beside(*launches)


# tensor memory


def accumulate(*, waits: bool, sees_commit: bool = True, loads_ended: bool = True, again: bool = False):
    """Return a machine whose warp 0 multiplies and whose warp 1 loads the accumulators, then releases them.

    `loads_ended`: warp 1 waits for its loads. `again`: warp 0 multiplies once more after that.
    """

    def begin(u, m) -> None:
        if u.first_warp == 0:
            u.mbar_init(shared(4096), np.uint32(1), lane(u))
            u.tcgen05("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32", m, shared(4104), np.uint32(32))

    def multiply(u, m) -> None:
        if u.first_warp == 0:
            operand = (0x400 >> 4) | 8 << 16 | 16 << 32 | 1 << 46
            word = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 17 | 8 << 24
            for _ in range(2):
                u.tcgen05("tcgen05.mma.cta_group::1.kind::f16", lane(u), 0, operand, operand, word, (0, 0, 0, 0), True)
            if sees_commit:
                commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
                u.tcgen05(commit, lane(u), int(shared(4096)))

    def load(u, m) -> None:
        if u.first_warp == 1:
            u.tcgen05_ld("tcgen05.ld.sync.aligned.32x32b.x1.b32", m, np.array([0]), np.uint32(32 << 16))
            if loads_ended:
                u.tcgen05("tcgen05.wait::ld.sync.aligned", m)

    def end(u, m) -> None:
        if u.first_warp == 0:
            u.tcgen05("tcgen05.dealloc.cta_group::1.sync.aligned.b32", m, 0, 32)

    barrier = ("bar_sync", None, [0])
    waiting = wait(2, 4096) if waits else nothing
    more = (multiply, wait(5, 4096, 1)) if again else (wait(4, 4096),)
    return make((begin, barrier), multiply, waiting, (load, barrier), *more, end, threads=64, shared=8192,
                observer=Races())  # fmt: skip


def test_accumulators_in_tensor_memory_are_loaded_after_a_commit_that_was_waited_for():
    accumulate(waits=True).run()
    with pytest.raises(Race, match="tensor memory of CTA .* lane 32, column 0 .*write by tcgen05.mma"):
        accumulate(waits=False).run()


def test_loads_of_tensor_memory_are_waited_for_before_others_write_there():
    accumulate(waits=True, again=True).run()
    with pytest.raises(Race, match="tensor memory of CTA .* the read by tcgen05.ld.*tcgen05.wait::ld by its warp"):
        accumulate(waits=True, again=True, loads_ended=False).run()


# reports


def test_a_report_names_memory_both_agents_and_instructions_and_what_would_order_them():
    with pytest.raises(Race) as caught:
        run("@%p0 st.shared.b32 [%r5+64], %r0; add.u32 %r7, %r2, 64; @%p1 ld.shared.b32 %r6, [%r7];", 2)
    text = str(caught.value)
    assert "shared memory of CTA (0, 0, 0) at offset 0x40" in text
    for warp, instruction in ((0, "@%p0 st.shared.b32 [%r5+64], %r0"), (1, "@%p1 ld.shared.b32 %r6, [%r7]")):
        assert f"kernel, CTA (0, 0, 0) warp {warp} (" in text and instruction in text
    assert "bar.sync, or an mbarrier's arrival and a wait for its phase, would order them" in text


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("barrier.cluster", 0, "barrier.cluster, or an mbarrier's"),
        ("release and acquire of a word", 0, "A release and an acquire of one word"),
        ("generic writes before a bulk store", 2, "but for a fence.proxy.async"),
        ("writes of a bulk store", 0, "cp.async.bulk.wait_group by its thread"),
        ("cp.async", 0, "cp.async.wait_group by the copying warp"),
        ("a bulk load", 0, "wait for the mbarrier's phase"),
        ("a lane that arrives for its warp", 0, "bar.warp.sync, before one lane arrives"),
    ],
)
def test_a_report_says_what_the_kind_of_access_needs(name, edit, words):
    case = CASES[name]
    reports = []
    for seed in range(6):
        with pytest.raises(Fault) as caught:
            run(case.code.replace(*case.edits[edit], 1), seed, **case.launch)
        reports.append(str(caught.value))
    assert any(words in report for report in reports)


# the product's functions

SOUND = {
    "sm_90": ("grouped_mm", "grouped_glu", "grouped_wgrad", "quantize_mxfp8", "permute_and_combine", "route",
              "mhc_project"),
    "sm_90a": ("grouped_mm", "grouped_mm_by_index", "grouped_mm_of_few_rows", "grouped_mm_mxfp4", "grouped_mlp",
               "grouped_mlp_mxfp8", "grouped_wgrad", "grouped_dglu_reglu", "moe"),
}  # fmt: skip


@pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch, names in SOUND.items() for name in names])
def test_calls_of_the_product_have_no_race(arch, name):
    with installed(arch, check_races=True) as gpu:
        calls.results(name, "cpu")
        assert gpu.called


PORTABLE, PINGPONG = "grouped_mm_bf16_nt_t16x128x64_c1x1_warps_sm_90", "grouped_mm_bf16_nt_t128x128x64_c2x1a_pp_sm_90a"
SWAPPED = "grouped_mm_mxfp4w_bf16_nt_t16x128x128_c1x1_swap1_sm_90a"
WGRAD = "grouped_wgrad_bf16_bf16_t128x128x64_c1x2_pp_sm_90a"
BROKEN = (
    (PORTABLE, "cp.async.wait_group", "left out", "race"),
    (PORTABLE, "bar.sync", "left out", "race"),
    (PINGPONG, "mbarrier.try_wait.parity.shared.b64 P1, [%r5], 0", "left out", "race"),
    (PINGPONG, "mbarrier.try_wait.parity.shared.b64 P1, [%r5], 0", "the phase before", "race"),
    (PINGPONG, "mbarrier.arrive.shared.b64", "left out", "deadlock"),
    (PINGPONG, "wgmma.wait_group", "left out", "race"),
    (PINGPONG, "fence.mbarrier_init", "left out", "race"),
    (WGRAD, "cp.async.bulk.wait_group.read 1", "left out", "race"),
    (SWAPPED, "fence.proxy.async", "left out", "race|no proxy fence followed"),
)


def changed(ins: Ins, how: str) -> Ins:
    if how == "the phase before":
        return dataclasses.replace(ins, args=[*ins.args[:2], Imm(1 - ins.args[2].value), *ins.args[3:]])
    if "try_wait" in ins.op:  # it succeeds at once
        return Ins("setp.eq.b32", [ins.args[0], Imm(0), Imm(0)])
    return Ins("pragma", [])


def broken(kernel: Kernel, at: int, ins: Ins) -> Kernel:
    return dataclasses.replace(kernel, code=[*kernel.code[:at], ins, *kernel.code[at + 1 :]])


@pytest.mark.parametrize(("name", "text", "how", "words"), BROKEN)
def test_a_function_of_the_product_without_a_part_of_its_order_is_found(name, text, how, words):
    launch = recorded_last(name)
    at = next(at for at, ins in enumerate(launch.kernel.code) if ins.text.startswith(text))
    kernel = broken(launch.kernel, at, changed(launch.kernel.code[at], how))
    with pytest.raises(Fault, match=words):
        launch.run(kernel, translate.translate(kernel), 0, observer=Races(), most_steps=1_000_000)
