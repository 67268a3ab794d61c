"""Small PTX kernels for the race check, each correct, and with edits that remove parts of its synchronisation."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import ptx

MODULE = """.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(.param .b64 pointer) {{
.reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<40>; .reg .b64 %rd<12>;
ld.param.b64 %rd0, [pointer];
mov.u32 %r0, %tid.x;
mov.u32 %r9, %ctaid.x;
and.b32 %r3, %r0, 31;
shr.u32 %r1, %r0, 5;
mov.u32 %r2, dynamic;
setp.eq.u32 %p0, %r1, 0;
setp.eq.u32 %p1, %r1, 1;
setp.eq.u32 %p2, %r0, 0;
setp.eq.u32 %p3, %r0, 32;
setp.eq.u32 %p4, %r9, 0;
setp.eq.u32 %p5, %r9, 1;
shl.b32 %r4, %r3, 2;
add.u32 %r5, %r2, %r4;
cvt.u64.u32 %rd1, %r4;
add.u64 %rd2, %rd0, %rd1;
{code}
ret;
}}
"""
"""r0: thread, r1: warp, r2: shared memory, r3: lane, r5: the lane's word there, rd0: global memory, rd2: the lane's
word there. p0, p1: warp 0, 1; p2, p3: its first thread; p4, p5: CTA 0, 1."""
WAIT = """
@!%p1 bra GO;
WAIT: mbarrier.try_wait.parity.shared.b64 %p6, [%r2+1024], 0;
@!%p6 bra WAIT;
GO:"""
INIT = "@%p2 mbarrier.init.shared.b64 [%r2+1024], {}; bar.sync 0;"


class Racy(NamedTuple):
    """A kernel of two warps.

    Attributes:
        edits: (text, replacement); each edit makes the kernel race.
        words: text in the fault.
    """

    code: str
    edits: tuple[tuple[str, str], ...]
    words: str = "race"
    launch: dict[str, Any] = {}


def without(*parts: str) -> tuple[tuple[str, str], ...]:
    return tuple((part, "") for part in parts)


STORE, LOAD = "@%p0 st.shared.b32 [%r5], %r0;", "@%p1 ld.shared.b32 %r6, [%r5];"
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r2], 128;"
BULK_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd0], 128, [%r2+1024];"
ARRIVE = "mbarrier.arrive.expect_tx.shared.b64 _, [%r2+1024], 128;"
FLAG_LOOP = """
@!%p5 bra END;
AGAIN: {} %r7, [%rd0+1024];
setp.eq.u32 %p6, %r7, 0;
@%p6 bra AGAIN;
{}
ld.global.b32 %r6, [%rd2];
END:"""
TWO = {"grid": (2, 1, 1), "block": (32, 1, 1), "resident": 2}
CLUSTER = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "block": (32, 1, 1)}
DATA = "@%p4 st.global.b32 [%rd2], %r0;"
PUBLISH = "setp.eq.u32 %p7, %r3, 0; mov.u32 %r8, 1;"
PEER = "xor.b32 %r10, %r9, 1; mapa.shared::cluster.u32 %r11, %r5, %r10;"
WGMMA = """wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20, %r21, %r22, %r23}, %rd3, %rd4, %p8, 1, 1, 0, 0;"""
MULTIPLY = f"""
shl.b32 %r7, %r0, 4; add.u32 %r7, %r2, %r7;
mov.u32 %r12, 0; st.shared.v4.b32 [%r7], {{%r12, %r12, %r12, %r12}};
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %r8, %r2, 4; cvt.u64.u32 %rd3, %r8; or.b64 %rd3, %rd3, 68720001024; mov.b64 %rd4, %rd3;
setp.ne.u32 %p8, %r12, 0;
wgmma.fence.sync.aligned;
{WGMMA}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
bar.sync 0; //after
st.shared.v4.b32 [%r7], {{%r12, %r12, %r12, %r12}};
wgmma.wait_group.sync.aligned 0; //last
"""
CASES = {
    "bar.sync before a read": Racy(f"{STORE} bar.sync 0; {LOAD}", without("bar.sync 0;"), "bar.sync"),
    "bar.sync before a write": Racy(
        "@%p0 ld.shared.b32 %r6, [%r5]; bar.sync 0; @%p1 st.shared.b32 [%r5], %r0;", without("bar.sync 0;")
    ),
    "bar.sync of other threads": Racy(
        f"{STORE} bar.sync 1, 64; {LOAD}", (("bar.sync 1, 64;", "bar.sync %r1, 32;"),)
    ),
    "bar.arrive": Racy(
        f"{STORE} @%p0 bar.arrive 1, 64; @%p1 bar.sync 1, 64; {LOAD}",
        (("@%p1 bar.sync 1, 64;", ""), (STORE + " @%p0 bar.arrive 1, 64;", "@%p0 bar.arrive 1, 64;" + STORE)),
    ),
    "who only arrives learns nothing": Racy(
        "@%p1 st.shared.b32 [%r5], %r0; bar.sync 0; @%p0 bar.arrive 1, 64; @%p1 bar.sync 1, 64;"
        "@%p0 st.shared.b32 [%r5], %r0;",
        (("bar.sync 0;", ""),),
    ),
    "mbarrier": Racy(
        f"{INIT.format(32)} {STORE} @%p0 mbarrier.arrive.shared.b64 _, [%r2+1024]; {WAIT} {LOAD}",
        (
            (WAIT, ""),
            ("[%r2+1024], 0;\n", "[%r2+1024], 1;\n"),  # the phase before
            (f"{STORE} @%p0 mbarrier.arrive", f"@%p0 mbarrier.arrive.shared.b64 _, [%r2+1024]; {STORE} //"),
        ),
        "race|deadlock",
    ),
    "mbarrier.init": Racy(
        f"{INIT.format(64)} mbarrier.arrive.shared.b64 _, [%r2+1024];", without("bar.sync 0;"), "race|not initialised"
    ),
    "barrier.cluster": Racy(
        f"{PEER} st.shared::cluster.b32 [%r11], %r0; barrier.cluster.arrive.release.aligned; barrier.cluster.wait;"
        "ld.shared.b32 %r6, [%r5]; barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;",
        ((".release", ".relaxed"), ("barrier.cluster.arrive.release.aligned; barrier.cluster.wait;", "")),
        launch=CLUSTER,
    ),
    "fence before a relaxed barrier.cluster": Racy(
        f"{PEER} st.shared::cluster.b32 [%r11], %r0; fence.acq_rel.cluster; barrier.cluster.arrive.relaxed;"
        "barrier.cluster.wait; ld.shared.b32 %r6, [%r5]; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
        without("fence.acq_rel.cluster;"),
        launch=CLUSTER,
    ),
    "fence.mbarrier_init": Racy(
        "@%p2 mbarrier.init.shared.b64 [%r2+1024], 1; fence.mbarrier_init.release.cluster;"
        "barrier.cluster.arrive.relaxed; barrier.cluster.wait; add.u32 %r7, %r2, 1024;"
        "xor.b32 %r10, %r9, 1; mapa.shared::cluster.u32 %r11, %r7, %r10;"
        "@%p2 mbarrier.arrive.shared::cluster.b64 _, [%r11]; barrier.cluster.arrive.aligned; barrier.cluster.wait;",
        without("fence.mbarrier_init.release.cluster;"),
        launch=CLUSTER,
    ),
    "release and acquire of a word": Racy(
        f"{DATA} {PUBLISH} and.pred %p7, %p7, %p4; @%p7 st.release.gpu.global.u32 [%rd0+1024], %r8;"
        + FLAG_LOOP.format("ld.acquire.gpu.global.u32", ""),
        (("st.release", "st.relaxed"), ("ld.acquire", "ld.relaxed"), ("st.release.gpu", "st.volatile")),
        launch=TWO,
    ),
    "plain flags": Racy(
        f"{DATA} {PUBLISH} and.pred %p7, %p7, %p4; @%p7 st.release.gpu.global.u32 [%rd0+1024], %r8;"
        + FLAG_LOOP.format("ld.acquire.gpu.global.u32", ""),
        (("st.release.gpu.global", "st.global"), ("ld.acquire.gpu.global", "ld.global")),
        launch=TWO,
    ),
    "fences and a relaxed word": Racy(
        f"{DATA} fence.acq_rel.gpu; {PUBLISH} and.pred %p7, %p7, %p4; @%p7 st.relaxed.gpu.global.u32 [%rd0+1024], %r8;"
        + FLAG_LOOP.format("ld.volatile.global.u32", "membar.gl;"),
        without("fence.acq_rel.gpu;", "membar.gl;"),
        launch=TWO,
    ),
    "fences and a counter": Racy(
        f"{DATA} fence.acq_rel.gpu; {PUBLISH} @%p7 red.relaxed.gpu.global.add.u32 [%rd0+1024], %r8;"
        + FLAG_LOOP.format("ld.relaxed.gpu.global.u32", "").replace("%p6, %r7, 0", "%p6, %r7, 1")
        .replace("ld.global.b32", "fence.acq_rel.gpu; ld.global.b32"),
        (("fence.acq_rel.gpu;", ""), ("fence.acq_rel.gpu; ld", "ld")),
        launch=TWO,
    ),
    "atom.acq_rel": Racy(
        f"{DATA} {PUBLISH} @%p7 atom.acq_rel.gpu.global.add.u32 %r7, [%rd0+1024], %r8;"
        + FLAG_LOOP.format("ld.acquire.gpu.global.u32", "").replace("%p6, %r7, 0", "%p6, %r7, 1"),
        (("atom.acq_rel", "atom.acquire"),),
        launch=TWO,
    ),
    "atomics on one word": Racy(
        "@%p4 red.global.add.u32 [%rd2], 1; @%p5 red.global.add.u32 [%rd2], 1;",
        (("@%p4 red.global.add.u32", "@%p4 st.global.u32"), ("@%p5 red.global.add.u32", "@%p5 st.global.u32")),
        launch=TWO,
    ),
    "bytes of one word": Racy(
        "cvt.u16.u32 %rs0, %r0; add.u32 %r7, %r5, %r1; st.shared.u8 [%r7], %rs0;", ((", %r1;", ", 0;"),)
    ),
    "the end of shared memory": Racy(
        f"{INIT.format(1)} barrier.cluster.arrive; barrier.cluster.wait; xor.b32 %r10, %r9, 1; add.u32 %r7, %r2, 1024;"
        "mapa.shared::cluster.u32 %r11, %r7, %r10; mov.u32 %r8, 1;"
        "@%p2 mbarrier.arrive.shared::cluster.b64 _, [%r11], %r8;"
        "LOOP: mbarrier.try_wait.parity.shared.b64 %p6, [%r2+1024], 0; @!%p6 bra LOOP;",
        (("LOOP: mbarrier.try_wait.parity.shared.b64 %p6, [%r2+1024], 0; @!%p6 bra LOOP;", ""),),
        "race: shared memory of CTA .* not ordered before the CTA's end|all of whose threads have exited",
        CLUSTER,
    ),
    "lanes of a warp": Racy(
        "@%p0 st.shared.b32 [%r5], %r0; bar.warp.sync -1; @%p0 ld.shared.b32 %r6, [%r2+64];",
        (("@%p0 ld", "@%p1 ld"), ("bar.warp.sync -1;", "")),
    ),
    "lanes of a warp, in global memory": Racy(
        "@%p0 ld.global.b32 %r6, [%rd0+64]; bar.warp.sync -1; @%p0 st.global.b32 [%rd2], %r0;",
        without("bar.warp.sync -1;"),
    ),
    "a byte that one lane writes and all read": Racy(
        "@%p2 st.shared.u8 [%r2+5], %rs0; bar.warp.sync -1; @%p0 ld.shared.v4.b32 {%r6, %r7, %r8, %r10}, [%r2];",
        without("bar.warp.sync -1;"),
    ),
    "lanes whose warp waits for them": Racy(
        f"{INIT.format(1)} @%p2 st.shared.b32 [%r2], %r0; @%p2 mbarrier.arrive.shared.b64 _, [%r2+1024]; @!%p0 bra END;"
        "LOOP: mbarrier.try_wait.parity.shared.b64 %p6, [%r2+1024], 0; @!%p6 bra LOOP;"
        "ld.shared.b32 %r6, [%r2]; END:",
        without("LOOP: mbarrier.try_wait.parity.shared.b64 %p6, [%r2+1024], 0; @!%p6 bra LOOP;"),
    ),
    "cp.async of another lane": Racy(
        "@%p0 cp.async.ca.shared.global [%r5], [%rd2], 4; cp.async.commit_group; cp.async.wait_group 0;"
        "bar.warp.sync -1; @%p0 ld.shared.b32 %r6, [%r2+64];",
        without("bar.warp.sync -1;", "cp.async.wait_group 0;"),
    ),
    "lanes that store one word": Racy(
        "@%p0 st.shared.b32 [%r2], %r1; @%p0 st.global.b32 [%rd0], %r1;",
        (("[%r2], %r1", "[%r2], %r3"), ("[%rd0], %r1", "[%rd0], %r3")),
        "lanes store different values",
    ),
    "atomics of lanes": Racy(
        "@%p0 atom.shared.add.u32 %r6, [%r2], 1; bar.warp.sync -1; @%p2 ld.shared.b32 %r6, [%r2];",
        without("bar.warp.sync -1;"),
    ),
    "rows of a matrix": Racy(
        "@%p0 st.shared.b32 [%r5], %r0; bar.warp.sync -1; shl.b32 %r7, %r3, 4; add.u32 %r7, %r2, %r7;"
        "@%p0 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r7];",
        without("bar.warp.sync -1;"),
    ),
    "a lane that arrives for its warp": Racy(
        f"{INIT.format(1)} {STORE} bar.warp.sync -1; @%p2 mbarrier.arrive.shared.b64 _, [%r2+1024]; {WAIT} {LOAD}",
        without("bar.warp.sync -1;"),
    ),
    "a lane's own write before it arrives": Racy(
        f"{INIT.format(1)} @%p2 st.shared.b32 [%r5], %r0; @%p2 mbarrier.arrive.shared.b64 _, [%r2+1024]; {WAIT} {LOAD}",
        (("@%p2 mbarrier.arrive", "@%p3 mbarrier.arrive"),),
    ),
    "generic writes before a bulk store": Racy(
        f"{STORE} @%p0 fence.proxy.async.shared::cta; bar.sync 0; @!%p3 bra END; {BULK_STORE}"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:",
        (
            ("bar.sync 0;", ""),
            ("@%p0 fence.proxy.async.shared::cta;", ""),
            ("@%p0 fence.proxy.async", "@%p1 fence.proxy.async"),  # by who has not synchronised with the writer
            ("bar.sync 0;", f"bar.sync 0; {STORE} @%p1 fence.proxy.async.shared::cta;"),
        ),
        "race|no proxy fence followed",
    ),
    "a proxy fence by who waited": Racy(
        f"{STORE} bar.sync 0; fence.proxy.async; @!%p3 bra END; {BULK_STORE} cp.async.bulk.commit_group;"
        "cp.async.bulk.wait_group 0; END:",
        (("bar.sync 0; fence.proxy.async;", "fence.proxy.async.global; bar.sync 0; @%p0 fence.proxy.async;"),),
        "race|no proxy fence followed",
    ),
    "a bulk load": Racy(
        f"{INIT.format(1)} @!%p2 bra BEFORE; {ARRIVE} {BULK_LOAD} BEFORE: {WAIT} {LOAD}"
        "LOOP: mbarrier.try_wait.parity.shared.b64 %p6, [%r2+1024], 0; @!%p6 bra LOOP;",
        ((WAIT, ""), ("[%r2+1024], 0;\n", "[%r2+1024], 1;\n")),
        "race|deadlock",
    ),
    "a bulk load over what was read": Racy(
        f"{INIT.format(1)} {LOAD} bar.sync 1; @!%p2 bra END; {ARRIVE} {BULK_LOAD}"
        "LOOP: mbarrier.try_wait.parity.shared.b64 %p6, [%r2+1024], 0; @!%p6 bra LOOP; END:",
        without("bar.sync 1;"),
    ),
    "reads of a bulk store": Racy(
        f"@%p2 st.shared.b32 [%r2], %r0; fence.proxy.async; @!%p2 bra END; {BULK_STORE} cp.async.bulk.commit_group;"
        "cp.async.bulk.wait_group.read 0; st.shared.b32 [%r2], %r3; cp.async.bulk.wait_group 0; END:",
        without("cp.async.bulk.wait_group.read 0;"),
        "race|no proxy fence followed",
    ),
    "writes of a bulk store": Racy(
        f"fence.proxy.async; @!%p2 bra END; {BULK_STORE} cp.async.bulk.commit_group;"
        "cp.async.bulk.wait_group 0; ld.global.b32 %r6, [%rd0]; END:",
        (("wait_group 0", "wait_group.read 0"),),
    ),
    "cp.async": Racy(
        "@%p0 cp.async.ca.shared.global [%r5], [%rd2], 4; cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;"
        f"{LOAD} cp.async.wait_all;",
        (
            ("cp.async.wait_group 0;", ""),
            ("bar.sync 0;", ""),
            ("wait_group 0", "wait_group 1"),
            ("cp.async.commit_group;", ""),
        ),
    ),
    "cp.async to an mbarrier": Racy(
        f"{INIT.format(32)} @%p0 cp.async.ca.shared.global [%r5], [%rd2], 4;"
        f"@%p0 cp.async.mbarrier.arrive.noinc.shared.b64 [%r2+1024]; {WAIT} {LOAD} cp.async.wait_all;",
        ((WAIT, ""), ("cp.async.mbarrier.arrive.noinc.shared.b64", "mbarrier.arrive.shared.b64 _,")),
    ),
    "wgmma": Racy(
        MULTIPLY,
        (
            ("fence.proxy.async.shared::cta;", ""),
            ("bar.sync 0;\n", ""),
            ("wgmma.fence.sync.aligned;", ""),
            ("0;\nbar.sync 0; //after", "1;\nbar.sync 0;"),
            ("bar.sync 0; //after", ""),
        ),
        "race|no proxy fence followed",
        {"block": (128, 1, 1)},
    ),
    "registers of wgmma": Racy(
        MULTIPLY.replace("bar.sync 0; //after", f"""
            mov.u32 %r13, 3;
            LOOP: mov.u32 %r20, 0; //before
            wgmma.fence.sync.aligned; //again
            {WGMMA} {WGMMA}
            wgmma.commit_group.sync.aligned;
            wgmma.wait_group.sync.aligned 0;
            add.u32 %r14, %r21, %r21;
            sub.u32 %r13, %r13, 1;
            setp.ne.u32 %p6, %r13, 0;
            @%p6 bra LOOP;
            bar.sync 0;"""),
        (
            ("wgmma.fence.sync.aligned; //again", ""),  # the loop before it reads r21, and writes r20
            ("mov.u32 %r20, 0; //before\n            wgmma.fence.sync.aligned; //again", ""),
            ("wgmma.fence.sync.aligned; //again", "wgmma.fence.sync.aligned; mov.u32 %r23, 0;"),
            ("wgmma.fence.sync.aligned; //again", "@!%p6 bra GO; wgmma.fence.sync.aligned; GO:"),
        ),
        "its registers may be accessed before it with no wgmma.fence",
        {"block": (128, 1, 1)},
    ),
}  # fmt: skip


def parse(code: str) -> ptx.Kernel:
    """Parse a kernel into which MODULE puts the registers."""
    return ptx.parse(MODULE.format(code=code))[0]
