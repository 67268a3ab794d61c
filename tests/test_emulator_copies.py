"""The emulator's copies: cp.async, tensor maps and TMA, bulk copies and st.async, against plain formulas."""

import numpy as np
import pytest
from emulator.by_hand import MEET, PARAM_BASE, exact, initialise, keep, lane, launch, shared, tensor_map, wait
from emulator.engines.tensor_maps import TensorMap, swizzled
from emulator.faults import Fault
from emulator.formats import bf16, to_bf16
from emulator.memory import Memory

SEEDS = range(6)
LOAD = "cp.async.bulk.tensor.2d.shared::{}.global.tile.mbarrier::complete_tx::bytes"
LOAD_HERE = LOAD.format("cta")
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
REDUCE = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
rng = np.random.default_rng(0)


# cp.async


@pytest.mark.parametrize("seed", SEEDS)
def test_cp_async_fills_with_zeros_and_arrives_by_the_time_it_is_waited_for(seed):
    memory, data = Memory(), rng.integers(1, 1 << 16, (32, 8), np.uint16)
    source = memory.put(data)
    lanes = np.arange(32)
    to, of = shared(0) + lanes.astype(np.uint32) * 16, np.uint64(source) + lanes.astype(np.uint64) * np.uint64(16)

    def copy(u, m):
        u.cp_async(to, of, 16, np.where(lanes < 8, 6, 16), m)  # 6 bytes are 3 elements
        u.cp_commit(m)
        u.cp_wait(0, m)
        keep(u, "words", u.cta.words[2][:256].reshape(32, 8).copy())

    got = launch(copy, memory=memory, seed=seed).results["words", 0, 0]
    data[:8, 3:] = 0
    assert (got == data).all()


def test_cp_async_that_nobody_waits_for_is_a_fault():
    memory = Memory()
    source = memory.alloc(64)

    def copy(u, m):
        u.cp_async(np.full(32, shared(0), np.uint32), np.full(32, source, np.uint64), 16, 16, lane(u))
        u.cp_commit(m)
        u.cp_wait(1, m)

    with pytest.raises(Fault, match="cp.async was not waited for"):
        launch(copy, memory=memory, seed=2)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_mbarrier_hears_of_cp_async_after_its_bytes(seed):
    memory = Memory()
    source = memory.put(np.arange(32, dtype=np.uint32))
    to = shared(64) + np.arange(32, dtype=np.uint32) * 4

    def copy(u, m):
        u.cp_async(to, np.uint64(source) + np.arange(32, dtype=np.uint64) * np.uint64(4), 4, 4, m)
        u.cp_mbarrier_arrive(np.full(32, shared(0), np.uint32), m)

    read = lambda u, m: keep(u, "words", u.load_shared(to, 4, 1, m)[0])  # noqa: E731
    machine = launch(initialise((0, 32)), copy, wait(2, 0), read, memory=memory, seed=seed)
    assert (machine.results["words", 0, 0] == np.arange(32)).all()


# tensor maps and TMA


def test_a_tensor_map_says_what_it_was_made_of():
    box = TensorMap(tensor_map(0x7F1234567890, "bf16", (192, 1 << 30, 7), (384, 1 << 34), (64, 128, 1), 3))
    assert (box.base, box.element, box.rank, box.swizzle) == (0x7F1234567890, "bf16", 3, 3)
    assert (box.dims, box.strides, box.box, box.bytes) == ([192, 1 << 30, 7], [2, 384, 1 << 34], [64, 128, 1], 16384)
    for wrong in ({"box": (72, 8), "swizzle": 3}, {"box": (4, 8)}, {"address": 0x1008}):
        fields = {"address": 0x1000, "box": (64, 8), "swizzle": 0} | wrong
        with pytest.raises(Fault, match="tensor map"):
            TensorMap(tensor_map(fields["address"], "bf16", (64, 8), (128,), fields["box"], fields["swizzle"]))


@pytest.mark.parametrize(("mode", "span"), [(0, 0), (1, 32), (2, 64), (3, 128)])
def test_a_swizzle_exchanges_chunks_of_16_bytes_by_rows(mode, span):
    at = np.arange(4096)
    got = swizzled(at, mode)
    if not mode:
        assert (got == at).all()
        return
    for address in range(0, 4096, 16):  # chunk c of a row of `span` bytes goes to c xor (number of the 128 bytes)
        row, chunk = address // span, address % span // 16
        assert got[address] == row * span + (chunk ^ (address // 128 % (span // 16))) * 16
    assert sorted(got) == at.tolist()


def load_box(memory, coords, *, op=LOAD_HERE, params=b"", descriptor=PARAM_BASE, expect=1024, seed=0, mask=None):
    """Let rank 0 load a box of 1024 bytes to offset 1024, of all CTAs of `mask`; return the bytes by rank."""

    def load(u, m):
        u.mbar_arrive(shared(0, u.cta.rank), np.uint32(expect), True, lane(u))
        if not u.cta.rank:
            extra = () if mask is None else (np.uint16(mask),)
            u.bulk(op, lane(u), (shared(1024), []), (descriptor, list(coords)), (shared(0), []), *extra)

    def end(u, m):
        keep(u, "bytes", u.cta.smem[1024:2048].copy())

    results = launch(initialise((0, 1)), *MEET, load, wait(4, 0), end, *MEET, memory=memory, params=params, seed=seed,
                     cluster=(1 if mask is None else 2, 1, 1)).results  # fmt: skip
    return {rank: value for (_, rank, _), value in results.items()}


@pytest.mark.parametrize("coords", [(0, 0), (16, 3), (-8, -2), (40, 17), (100, 0), (0, -20)])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_tma_loads_boxes_with_zeros_for_what_is_outside(coords, mode):
    memory = Memory()
    x = to_bf16(exact(rng, 20, 48).astype(np.float32))
    wide = {0: 16, 1: 16, 2: 32, 3: 64}[mode]  # elements of a box's row
    params = tensor_map(memory.put(x), "bf16", (48, 20), (96,), (wide, 512 // wide), mode)
    got = load_box(memory, coords, params=params)[0].view(np.uint16)
    for j in range(512 // wide):
        for i in range(wide):
            row, col = coords[1] + j, coords[0] + i
            want = x[row, col] if 0 <= row < 20 and 0 <= col < 48 else 0
            assert got[int(swizzled(2 * (j * wide + i), mode)) // 2] == want


@pytest.mark.parametrize("seed", SEEDS)
def test_tma_loads_for_several_ctas_by_a_map_in_memory(seed):
    memory = Memory()
    x = np.arange(256, dtype=np.uint32).reshape(16, 16)
    descriptor = memory.put(np.frombuffer(tensor_map(memory.put(x), "u32", (16, 16), (64,), (16, 16)), np.uint8))
    op = LOAD.format("cluster") + ".multicast::cluster"
    got = load_box(memory, (0, 0), op=op, descriptor=descriptor, mask=3, seed=seed)
    assert all((got[rank].view(np.uint32).reshape(16, 16) == x).all() for rank in range(2))


def test_tma_may_not_write_beyond_shared_memory_or_read_beyond_a_tensor_that_is_not_there():
    memory = Memory()
    params = tensor_map(1 << 40, "u32", (16, 16), (64,), (16, 16))
    with pytest.raises(Fault, match=r"(?s)not allocated.*issued by kernel, CTA \(0, 0, 0\), warp 0, block 3"):
        load_box(memory, (0, 0), params=params)
    params = tensor_map(memory.put(np.zeros((16, 16), np.uint32)), "u32", (16, 16), (64,), (16, 16))
    with pytest.raises(Fault, match="deadlock"):  # more bytes are expected than come
        load_box(memory, (0, 0), params=params, expect=1040)

    def beyond(u, m):
        u.bulk(
            LOAD.format("cta"),
            lane(u),
            (np.uint64(shared(8192 - 512)), []),
            (PARAM_BASE, [0, 0]),
            (np.uint64(shared(0)), []),
        )

    with pytest.raises(Fault, match="writes beyond shared memory"):
        launch(initialise((0, 1)), beyond, memory=memory, params=params)


def store_box(memory, params, coords, *, fence=True, commit=True, wait_for=True, op=STORE, seed=0):
    def store(u, m):
        at = shared(1024) + np.arange(32, dtype=np.uint32) * 4
        for i in range(8):
            u.store_shared(at + np.uint32(128 * i), 4, (np.arange(32, dtype=np.uint32) + 32 * i,), m)
        if fence:
            u.fence("fence.proxy.async.shared::cta", m)
        u.bulk(op, lane(u), (PARAM_BASE, list(coords)), (np.uint64(shared(1024)), []))
        if commit:
            u.bulk_commit(lane(u))
        if wait_for:
            u.bulk_wait(0, True, lane(u))

    return launch(store, memory=memory, params=params, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("coords", [(0, 0), (8, -3), (-4, 10)])
def test_tma_stores_drop_what_is_outside(coords, seed):
    memory = Memory()
    y = memory.put(np.full((16, 16), 7, np.uint32))
    store_box(memory, tensor_map(y, "u32", (16, 12), (64,), (16, 16)), coords, seed=seed)
    want = np.full((16, 16), 7, np.uint32)
    for j in range(16):
        for i in range(16):
            if 0 <= coords[1] + j < 12 and 0 <= coords[0] + i < 16:
                want[coords[1] + j, coords[0] + i] = 16 * j + i
    assert (memory.array(y, np.uint32, (16, 16)) == want).all()


def test_tma_reductions_add_in_the_maps_type():
    memory = Memory()
    stored = np.arange(256, dtype=np.uint32)
    y = memory.put(to_bf16(np.full((16, 32), 3.0, np.float32)))
    store_box(memory, tensor_map(y, "bf16", (32, 16), (64,), (32, 16)), (0, 0), op=REDUCE)
    want = to_bf16(bf16(stored.view(np.uint16)) + np.float32(3))
    assert (memory.array(y, np.uint16, 512) == want).all()
    for kind, dtype, first in (("f32", np.float32, 2.5), ("u32", np.uint32, 7)):
        y = memory.put(np.full((16, 16), first, dtype))
        store_box(memory, tensor_map(y, kind, (16, 16), (64,), (16, 16)), (0, 0), op=REDUCE)
        assert (memory.array(y, dtype, 256) == stored.view(dtype) + dtype(first)).all()


@pytest.mark.parametrize(
    ("left_out", "seed", "message"),
    [("fence", 0, "no proxy fence followed"), ("fence", 1, "no proxy fence followed"), ("fence", 2, "no proxy fence"),
     ("wait_for", 2, "was not waited for"), ("commit", 2, "was not waited for")],
)  # fmt: skip
def test_a_store_without_a_fence_or_a_wait_is_a_fault(left_out, seed, message):
    """A missing wait shows where copies are late, as they are with seed 2."""
    memory = Memory()
    params = tensor_map(memory.put(np.zeros((16, 16), np.uint32)), "u32", (16, 16), (64,), (16, 16))
    with pytest.raises(Fault, match=message):
        store_box(memory, params, (0, 0), seed=seed, **{left_out: False})


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_copies_of_bytes_go_in_reduce_and_between_ctas(seed):
    memory = Memory()
    x, y = memory.put(np.arange(64, dtype=np.uint32)), memory.put(np.full(64, 1, np.uint32))

    def load(u, m):
        u.mbar_arrive(shared(0, u.cta.rank), np.uint32(256), True, lane(u))
        if not u.cta.rank:
            op = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
            u.bulk(op, lane(u), (np.uint64(shared(256)), []), (np.uint64(x), []), 256, (np.uint64(shared(0)), []))

    def send(u, m):
        if not u.cta.rank:
            op = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
            to, barrier = np.uint64(shared(512, 1)), np.uint64(shared(0, 1))
            u.bulk(op, lane(u), (to, []), (np.uint64(shared(256)), []), 256, (barrier, []))

    def add(u, m):
        if u.cta.rank:
            op = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32"
            u.bulk(op, lane(u), (np.uint64(y), []), (np.uint64(shared(512, 1)), []), 256)
            u.bulk_commit(lane(u))
            u.bulk_wait(0, False, lane(u))
            assert (memory.array(y, np.uint32, 64) == np.arange(64) + 1).all()

    by_rank = lambda u, m: np.copyto(u.p[1], u.cta.rank == 1)  # noqa: E731
    blocks = [
        initialise((0, 1)),
        *MEET,
        load,
        (by_rank, ("bra", (1, False), 6)),
        wait(5, 0),
        send,
        wait(7, 0),
        add,
        *MEET,
    ]
    launch(*blocks, memory=memory, cluster=(2, 1, 1), seed=seed)
    assert (memory.array(y, np.uint32, 64) == np.arange(64) + 1).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_st_async_brings_its_bytes_before_the_mbarrier_says_so(seed):
    def store(u, m):
        if u.cta.rank == 0:
            to = shared(64, 1) + np.arange(32, dtype=np.uint32) * 4
            u.st_async(to, np.arange(32, dtype=np.uint32), np.full(32, shared(0, 1), np.uint32), 4, m)
        u.mbar_arrive(shared(0, u.cta.rank), np.uint32(128 * u.cta.rank), True, lane(u))

    end = lambda u, m: keep(u, "words", u.cta.words[4][16:48].copy())  # noqa: E731
    machine = launch(initialise((0, 1)), *MEET, store, wait(4, 0), end, *MEET, cluster=(2, 1, 1), seed=seed)
    assert (machine.results["words", 1, 0] == np.arange(32)).all()
