"""The emulator's translator: memory, copies, barriers and warps as calls of a unit; blocks; refusals by name."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.engines import PARAM_BASE, EngineFault
from emulator.ptx import Unsupported
from emulator.snippets import execute, parse
from emulator.translate import translate

LANES = np.arange(32)


def calls(code: str, **options) -> list[tuple]:
    """Return names and arguments of a snippet's calls of its unit, arrays as their first element."""

    def plain(x):
        if isinstance(x, (list, tuple)):
            return type(x)(plain(each) for each in x)
        if isinstance(x, np.ndarray):
            return x.tolist() if x.dtype.kind == "i" and x.ndim == 1 and x.size < 32 else x.reshape(-1)[0].item()
        return x.item() if isinstance(x, np.generic) else x

    return [plain(call) for call in execute(code, **options).calls]


def test_loads_extend_to_wider_registers():
    octets = np.full(32, 0x85, np.uint8)
    answers = {"load_shared": lambda a, size, n, m: [octets if size == 1 else np.full(32, 0x8765, np.uint16)] * n}
    done = execute(
        """ld.shared.s8 %r0, [%r8]; ld.shared.u8 %r1, [%r8]; ld.shared.b8 %rs2, [%r8+3]; ld.shared.s8 %rs3, [%r8];
        ld.shared.s16 %r4, [%r8]; ld.shared.b16 %r5, [%r8]; ld.shared.v2.b16 {%rs4, %rs5}, [%r8];""",
        answers=answers,
    )
    assert [int(getattr(done, name)[0]) for name in ("r0", "r1", "rs2", "rs3", "r4", "r5", "rs4", "rs5")] == [
        0xFFFFFF85,
        0x85,
        0x85,
        0xFF85,
        0xFFFF8765,
        0x8765,
        0x8765,
        0x8765,
    ]
    assert done.calls[2][1][0] == 3


def test_accesses_name_space_size_and_count():
    load = {"load_global": lambda a, size, n, m: [np.full(32, j, f"u{size}") for j in range(n)]}
    code = """ld.global.L1::no_allocate.v4.b32 {%r0, %r1, _, %r3}, [%rd1+16]; ld.relaxed.gpu.global.b64 %rd0, [%rd1];
    ld.volatile.global.nc.L2::128B.f32 %r4, [%rd1+-4]; ld.acquire.sys.b32 %r5, [%rd1];"""
    assert calls(code, answers=load, rd1=[64]) == [
        ("load_global", 80, 4, 4, True),
        ("load_global", 64, 8, 1, True),
        ("load_global", 60, 4, 1, True),
        ("load_global", 64, 4, 1, True),
    ]
    code = """st.global.v2.b32 [%rd1], {%r1, -1}; st.shared.v2.b8 [%r2+4], {%rs1, %rs1};
    st.release.gpu.global.b64 [%rd1], %rd1;
    st.shared::cta.b16 [dynamic+8], 0x0000; st.shared.f32 [%r2], 0f3F800000;
    st.global.L2::cache_hint.b32 [%rd1], %r1, %rd2;"""
    assert calls(code, rd1=[64], r1=[7], r2=[8], rs1=[0x1FF]) == [
        ("store_global", 64, 4, (7, 0xFFFFFFFF), True),
        ("store_shared", 12, 1, (255, 255), True),
        ("store_global", 64, 8, (64,), True),
        ("store_shared", 0x408, 2, (0,), True),
        ("store_shared", 8, 4, (0x3F800000,), True),
        ("store_global", 64, 4, (7,), True),
    ]


def test_parameters_are_read_by_name_and_by_computed_address():
    blob = np.arange(8, dtype=np.uint32).tobytes()
    done = execute(
        """ld.param.b32 %r0, [number]; ld.param.v2.b32 {%r1, %r2}, [block+8]; ld.param.b8 %rs1, [block];
        mov.b64 %rd1, block;
        cvta.param.u64 %rd1, %rd1; mad.wide.u32 %rd2, %r8, 8, %rd1; ld.param.b64 %rd3, [%rd2+8];""",
        parameters=blob,
        r8=LANES % 2,
    )
    assert [int(x[0]) for x in (done.r0, done.r1, done.r2, done.rs1)] == [0, 4, 5, 2]
    assert done.rd1[0] == PARAM_BASE + 8
    assert done.rd3[:3].tolist() == [5 << 32 | 4, 7 << 32 | 6, 5 << 32 | 4]
    with pytest.raises(EngineFault, match="ld.param"):
        execute("mov.b64 %rd1, block; ld.param.b64 %rd2, [%rd1+24];", parameters=blob)
    with pytest.raises(Unsupported, match="beyond block"):
        execute("ld.param.b64 %rd2, [block+20];")


def test_atomics():
    answers = {"atomic": np.full(32, 9, np.uint32)}
    code = """atom.global.add.u32 %r0, [%rd1], 5; atom.shared.cta.add.u32 %r2, [%r1], %r1;
    atom.acq_rel.gpu.global.cas.b32 %r3, [%rd1], 1, 2;
    red.relaxed.gpu.global.max.s32 [%rd1], -3;"""
    done = execute(code, answers=answers, rd1=[16], r1=[4])
    assert [(call[1], call[2], call[4]) for call in done.calls] == [
        ("global", "add", np.uint32),
        ("shared", "add", np.uint32),
        ("global", "cas", np.uint32),
        ("global", "max", np.int32),
    ]
    assert [[int(np.atleast_1d(x)[0]) for x in call[6:]] for call in done.calls] == [[5], [4], [1, 2], [-3]]
    assert int(done.r0[0]) == int(done.r3[0]) == 9


def test_matrices():
    answers = {"ldmatrix": [np.full(32, j, np.uint32) for j in range(4)]}
    done = execute("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r0, %r1, %r2, %r3}, [%r8+16];", answers=answers)
    assert (done.calls[0][1][0], *done.calls[0][2:]) == (16, 4, True, True)
    assert [int(getattr(done, f"r{j}")[5]) for j in range(4)] == [0, 1, 2, 3]
    assert calls("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r8], {%r1, %r2};", r1=[1], r2=[2]) == [
        ("stmatrix", 0, (1, 2), False, True)
    ]


def test_copies():
    code = """cp.async.cg.shared.global.L2::128B [%r1], [%rd1+32], 16, %r2; cp.async.ca.shared.global [%r1], [%rd1], 4;
    cp.async.commit_group; cp.async.wait_group 1; cp.async.wait_all; cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 2;"""
    assert calls(code, r1=[8], rd1=[64], r2=[12]) == [
        ("cp_async", 8, 96, 16, 12, True),
        ("cp_async", 8, 64, 4, 4, True),
        ("cp_commit", True),
        ("cp_wait", 1, True),
        ("cp_wait", 0, True, True),
        ("cp_mbarrier_arrive", 8, True, True),
        ("bulk_commit", True),
        ("bulk_wait", 0, True, True),
        ("bulk_wait", 2, False, True),
    ]


def test_bulk_copies_pass_addresses_with_coordinates():
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
    load += ".L2::cache_hint"
    store = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group"
    reduce = "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group.L2::cache_hint"
    plain = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
    send = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32"
    code = f"""{load} [%r1], [%rd1, {{%r2, 7}}], [%r3], %rs1, %rd2; {store} [%rd1, {{%r2, 0, 1}}], [%r1+128];
    {reduce} [%rd1, {{%r2}}], [%r1], %rd2; {plain} [%r1], [%rd1], 512, [%r3]; {send} [%r1], %r3, [%r3];"""
    assert calls(code, r1=[16], rd1=[4096], r2=np.array([-1], np.int32), r3=[8], rs1=[3], rd2=[1]) == [
        ("bulk", load, True, (16, []), (4096, [-1, 7]), (8, []), 3, 1),
        ("bulk", store, True, (4096, [-1, 0, 1]), (144, [])),
        ("bulk", reduce, True, (4096, [-1]), (16, []), 1),
        ("bulk", plain, True, (16, []), (4096, []), 512, (8, [])),
        ("st_async", 16, 8, 8, 4, True),
    ]


def test_mbarriers_and_fences():
    code = """mbarrier.init.shared.b64 [%r1+8], 128; mbarrier.arrive.shared.b64 %rd0, [%r1];
    mbarrier.arrive.shared::cluster.b64 _, [%r1], 2;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], %r2; mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 64;
    mbarrier.inval.shared.b64 [%r1];
    fence.proxy.async.shared::cta; fence.acq_rel.gpu; fence.mbarrier_init.release.cluster; membar.gl;
    griddepcontrol.wait; setmaxnreg.inc.sync.aligned.u32 240;"""
    assert calls(code, r1=[16], r2=[32], answers={"mbar_arrive": np.uint64(5)}) == [
        ("mbar_init", 24, 128, True),
        ("mbar_arrive", 16, 1, False, True, False),
        ("mbar_arrive", 16, 2, False, True, True),
        ("mbar_arrive", 16, 32, True, True, False),
        ("mbar_expect", 16, 64, True),
        ("mbar_inval", 16, True),
        ("fence", "fence.proxy.async.shared::cta", True),
        ("fence", "fence.acq_rel.gpu", True),
        ("fence", "fence.mbarrier_init.release.cluster", True),
        ("fence", "membar.gl", True),
        ("griddepcontrol", "wait", True),
        ("setmaxnreg", "inc", 240),
    ]


def test_waits_are_by_parity_or_by_state():
    answers = {"mbar_try": LANES < 3, "mbar_test": LANES < 5}
    done = execute("mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2, 10000000;", answers=answers, r2=[1])
    assert done.p1.tolist() == (LANES < 3).tolist() and len(done.calls[0]) == 4
    assert (
        execute("mbarrier.test_wait.shared.b64 %p1, [%r1], %rd1;", answers=answers).p1.tolist() == (LANES < 5).tolist()
    )


def test_tensor_core_forms():
    answers = {"mma": [np.full(32, j, np.float32) for j in range(4)]}
    registers = "{%r0, %r1, %r2, %r3}, {%r4, %r5, %r6, %r7}, {%r4, %r5}, {%r0, %r1, %r2, %r3}"
    done = execute(f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {registers};", answers=answers)
    assert done.calls[0][1:3] == ("m16n8k16", "bf16") and [len(x) for x in done.calls[0][3:6]] == [4, 2, 4]
    assert [float(getattr(done, f"r{j}").view(np.float32)[0]) for j in range(4)] == [0, 1, 2, 3]
    wide, bytes_ = (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3",
    )
    code = f"""{wide} {{%r0, %r1, %r2, %r3}}, %rd1, %rd2, %p1, 1, 1, 0, 1;
    {wide} {{%r0, %r1, %r2, %r3}}, {{%r4, %r5, %r6, %r7}}, %rd2, 1, 1, 1, 0;
    {bytes_} {{%r0, %r1, %r2, %r3}}, %rd1, %rd2, %p1, 1, 1; wgmma.fence.sync.aligned; wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 1;"""
    assert calls(code, rd1=[3], rd2=[4]) == [
        ("wgmma", wide, [0, 1, 2, 3], 3, 4, False, 1, 1, 0, 1, True),
        ("wgmma", wide, [0, 1, 2, 3], [4, 5, 6, 7], 4, 1, 1, 1, 0, True),
        ("wgmma", bytes_, [0, 1, 2, 3], 3, 4, False, 1, 1, True),
        ("wgmma_fence", True),
        ("wgmma_commit", True),
        ("wgmma_wait", 1, True),
    ]
    load, multiply = "tcgen05.ld.sync.aligned.32x32b.x2.b32", "tcgen05.mma.cta_group::1.kind::f16.collector::a::discard"
    code = f"{load} {{%r0, %r1}}, [%r2]; {multiply} [%r2], %rd1, %rd2, %r3, {{%r4, %r4, %r4, %r4}}, %p1;"
    assert calls(code, r2=[64], rd1=[3], rd2=[4], r3=[5]) == [
        ("tcgen05_ld", load, True, [0, 1], 64),
        ("tcgen05", multiply, True, 64, 3, 4, 5, (0, 0, 0, 0), False),
    ]


def test_shuffles_write_the_predicate_that_is_asked_for():
    answers = {"shfl": (LANES.astype(np.uint32) ^ 1, LANES < 31)}
    done = execute(
        "shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1; shfl.sync.idx.b32 %r3, %r2, 0, 31, 0xffffffff;", answers=answers
    )
    assert done.r1.tolist() == done.r3.tolist() == (LANES ^ 1).tolist()
    assert done.p1.tolist() == (LANES < 31).tolist()
    assert [call[1] for call in done.calls] == ["bfly", "idx"]


def test_membermasks_choose_who_takes_part():
    mask, value = np.where(LANES < 10, 0x3FF, 0xFFFFFC00).astype(np.uint32), (LANES * 7 % 11 - 5).astype(np.int32)
    low, high = value[:10], value[10:]

    def groups(of):
        return [int(of(low))] * 10 + [int(of(high))] * 22

    for operation, of in (("add", np.sum), ("min", np.min), ("max", np.max)):
        done = execute(f"redux.sync.{operation}.s32 %r0, %r1, %r2;", r1=value, r2=mask)
        assert done.r0.view(np.int32).tolist() == groups(of)
    done = execute("redux.sync.xor.b32 %r0, %r1, -1;", r1=value.view(np.uint32))
    assert (done.r0 == np.bitwise_xor.reduce(value.view(np.uint32))).all()
    p = value > 2
    done = execute(
        """vote.sync.ballot.b32 %r0, %p1, %r2; vote.sync.any.pred %p2, %p1, %r2;
        vote.sync.all.pred %p3, !%p1, %r2; match.any.sync.b32 %r3, %r1, %r2;""",
        r1=value.view(np.uint32),
        r2=mask,
        p1=p,
    )
    bits = sum(1 << int(i) for i in np.flatnonzero(p))
    assert done.r0.tolist() == [bits & int(m) for m in mask]
    assert done.p2.tolist() == [bool(x) for x in groups(lambda v: (v > 2).any())]
    assert done.p3.tolist() == [bool(x) for x in groups(lambda v: not (v > 2).any())]
    assert done.r3.tolist() == [
        sum(1 << j for j in range(32) if int(mask[i]) >> j & 1 and value[i] == value[j]) for i in range(32)
    ]


@pytest.mark.parametrize(
    "code",
    [
        "shfl.sync.idx.b32 %r0, %r1, 0, 31, -1;",
        "vote.sync.any.pred %p0, %p1, %r2;",
        "redux.sync.add.s32 %r0, %r1, %r2;",
        "elect.sync _|%p1, -1;",
        "match.any.sync.b32 %r0, %r1, -1;",
    ],
)
def test_lanes_that_a_mask_names_must_be_here(code):
    everyone = np.full(32, 0xFFFFFFFF, np.uint32)
    with pytest.raises(EngineFault, match=code.split()[0].replace(".", "\\.")):
        execute(code, lanes=LANES < 16, r2=everyone)


def test_a_lane_must_be_in_its_own_mask():
    with pytest.raises(EngineFault, match="its own"):
        execute("redux.sync.add.s32 %r0, %r1, %r2;", r2=np.full(32, 0xFFFF, np.uint32))


def test_blocks_end_where_lanes_may_part_or_wait():
    program = translate(
        parse(
            """mov.b32 %r1, 0;
        AGAIN: add.s32 %r1, %r1, 1;
        mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
        @!%p1 bra AGAIN;
        bar.sync 1, 128; barrier.cta.arrive.aligned %r2, 64; bar.warp.sync -1;
        barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire;
        @%p2 trap; bra.uni END; END: ret;"""
        )
    )
    assert program.ends == [
        (1, None),
        (2, None),
        (1, ("bra", (1, True), 1)),
        (1, ("bar_sync", None, [1, 128])),
        (1, ("bar_arrive", None, ["b32[2]", 64])),
        (1, ("warp_sync", None, [-1])),
        (1, ("cluster_arrive", None, None)),
        (1, ("cluster_wait", None, None)),
        (1, ("trap", (2, False), None)),
        (1, ("bra", None, 10)),
        (1, ("ret", None, None)),
    ]
    assert any("mbarrier.try_wait" in place for place in program.places.values())


def test_places_name_the_ptx_of_each_generated_line():
    program = translate(parse("mov.b32 %r1, 7;\nadd.s32 %r2, %r1, %r1;"))
    lines = program.source.splitlines()
    at = next(number for number, line in enumerate(lines, 1) if "np.add" in line)
    assert program.places[at].endswith("add.s32 %r2, %r1, %r1")


@pytest.mark.parametrize(
    "code",
    [
        "frobnicate.b32 %r0;",
        "ld.local.b32 %r0, [%r1];",
        "ld.const.b32 %r0, [%r1];",
        "ld.shared.v3.b32 {%r0, %r1, %r2}, [%r3];",
        "ld.shared.v2.b32 {%r0, %r1, %r2, %r3}, [%r4];",
        "ld.global.unknown.b32 %r0, [%rd1];",
        "atom.global.add.f32 %r0, [%rd1], %r2;",
        "atom.global.add.noftz.f16x2 %r0, [%rd1], %r2;",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r0, %r1}, [%r2];",
        "cp.async.cg.shared.global [%r1], [%rd1], 8;",
        "cp.async.ca.shared.global [%r1], [%rd1], 16, %p1;",
        "cp.async.bulk.tensor.1d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r4];",
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%rd1, {%r2, %r3}], [%r4];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], 16;",
        "mbarrier.arrive.noComplete.shared.b64 %rd1, [%r1], 2;",
        "mbarrier.pending_count.b64 %r1, %rd1;",
        "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;",
        "bar.red.popc.u32 %r0, 1, %p1;",
        "barrier.sync.unknown 1;",
        "elect.sync _|%p1, %r1;",
        "vote.sync.uni.pred %p1, %p2, -1;",
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%r0, %r1}, {%r4, %r5, %r6, %r7}, {%r4, %r5}, {%r0, %r1};",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r0, %r1}, {%r4, %r5, %r6, %r7}, {%r4, %r5}, {%r0, %r1};",
        "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%r0, %r1}, %rd1, %rd2, %p1, 1, 1, 0, 0;",
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r2};",
        "tcgen05.mma.cta_group::1.kind::i8 [%r2], %rd1, %rd2, %r3, %p1;",
        "nanosleep.b32 %r1;",
        "call helper;",
        "brx.idx %r1, table;",
        "isspacep.shared %p1, %rd1;",
    ],
)
def test_what_is_not_modelled_is_named(code):
    if code.split()[0] in ("call", "brx.idx"):
        code = code.replace(" helper", " %r1").replace(", table", "")
    with pytest.raises(Unsupported, match=code.split()[0].rstrip(";").replace(".", "\\.")):
        translate(parse(code))
