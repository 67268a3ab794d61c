"""The emulator's tensor cores: mma.sync, wgmma and tcgen05 on small matrices, against plain multiplication."""

import numpy as np
import pytest
from emulator.by_hand import SHARED_BASE, exact, initialise, keep, lane, launch, shared, wait
from emulator.engines.tensor_maps import swizzled
from emulator.faults import Fault
from emulator.formats import E4M3, bf16, to_bf16

PER_REGISTER = {"tf32": 1, "bf16": 2, "f16": 2, "e4m3": 4}
rng = np.random.default_rng(0)


# mma and wgmma


def a_fragments(a, kind):
    """Return registers [registers, lanes] that hold rows [16, k] of A, in the PTX ISA's layout of m16n8k16 and
    m64nNk32.
    """
    per = PER_REGISTER[kind]
    out = np.zeros((a.shape[1] // (4 * per) * 2, 32, per), a.dtype)
    for register in range(out.shape[0]):
        for t in range(32):
            for e in range(per):
                row = t // 4 + 8 * (register % 2)
                col = t % 4 * per + e + register // 2 * 4 * per
                out[register, t, e] = a[row, col]
    return np.ascontiguousarray(out).view(np.uint32)[..., 0]


def of_accumulators(registers, n):
    """Return D [16, n] from accumulator registers [n / 2, lanes]: rows g and g + 8, columns 8 j + 2 t and the next."""
    out = np.zeros((16, n))
    for register in range(n // 2):
        for t in range(32):
            row = t // 4 + 8 * (register // 2 % 2)
            out[row, register // 4 * 8 + t % 4 * 2 + register % 2] = registers[register, t]
    return out


def encoded(x, kind):
    """Encode numbers as words of a type."""
    x = x.astype(np.float32)
    if kind == "bf16":
        return to_bf16(x)
    return x.astype(np.float16).view(np.uint16) if kind == "f16" else x.view(np.uint32)


@pytest.mark.parametrize(("kind", "k"), [("bf16", 8), ("bf16", 16), ("f16", 16), ("tf32", 4), ("tf32", 8)])
def test_mma_sync_multiplies(kind, k):
    a, b, c = exact(rng, 16, k), exact(rng, k, 8), exact(rng, 16, 8)
    per = PER_REGISTER[kind]
    left, right = a_fragments(encoded(a, kind), kind), encoded(b, kind)
    registers = k // (4 * per)
    b_registers, acc = np.zeros((registers, 32, per), right.dtype), np.zeros((4, 32), np.float32)
    for t in range(32):
        for register in range(registers):
            for e in range(per):
                b_registers[register, t, e] = right[t % 4 * per + e + 4 * per * register, t // 4]
        for register in range(4):
            acc[register, t] = c[t // 4 + 8 * (register // 2), t % 4 * 2 + register % 2]

    def block(u, m):
        d = u.mma(f"m16n8k{k}", kind, list(left), list(b_registers.view(np.uint32)[..., 0]), list(acc), m)
        assert (of_accumulators(d, 8) == a @ b + c).all()

    launch(block)


def put_k_major(smem, offset, x):
    """Write rows of 128 bytes to shared memory, swizzled: 8 rows per atom, atoms 1024 bytes apart."""
    for row in range(x.shape[0]):
        for byte, value in enumerate(x[row].view(np.uint8)):
            smem[int(swizzled(SHARED_BASE + offset + row * 128 + byte, 3)) - SHARED_BASE] = value


def put_mn_major(smem, offset, x):
    """Write x [rows, k] to shared memory by columns: an atom has 128 bytes of rows and 8 columns, and atoms of the next
    rows are 8192 bytes further.
    """
    size, span = x.itemsize, 128 // x.itemsize
    for row in range(x.shape[0]):
        for col in range(x.shape[1]):
            place = row // span * 8192 + col // 8 * 1024 + col % 8 * 128 + row % span * size
            at = int(swizzled(SHARED_BASE + offset + place, 3)) - SHARED_BASE
            smem[at : at + size] = x[row, col : col + 1].view(np.uint8)


def descriptor(offset, leading=8192, stride=1024):
    """Return a wgmma matrix descriptor with the 128-byte swizzle."""
    return np.uint64((SHARED_BASE + offset) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 62)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "n", "a_from", "b_from", "signs"),
    [("bf16", 64, "memory", "memory", (1, 1)), ("bf16", 16, "registers", "memory", (1, 1)),
     ("bf16", 128, "transposed", "transposed", (1, -1)), ("bf16", 128, "registers", "transposed", (1, 1)),
     ("e4m3", 32, "memory", "memory", (1, 1)), ("e4m3", 24, "registers", "memory", (-1, 1))],
)  # fmt: skip
def test_wgmma_multiplies_operands_of_every_place(kind, n, a_from, b_from, signs, seed):
    depth, size = (16, 2) if kind == "bf16" else (32, 1)
    steps = 128 // size // depth if a_from != "transposed" else 4
    k = steps * depth
    if kind == "bf16":
        a, b = (to_bf16(exact(rng, rows, k).astype(np.float32)) for rows in (64, n))
        left, right = bf16(a).astype(float), bf16(b).astype(float)
    else:
        a, b = (rng.choice(np.array([0, 0x30, 0x38, 0xB8, 0x40], np.uint8), (rows, k)) for rows in (64, n))
        left, right = E4M3[a].astype(float), E4M3[b].astype(float)
    at_a, at_b = 7168, 7168 + 16384
    trans_a, trans_b = a_from == "transposed", b_from == "transposed"
    flags = ([] if a_from == "registers" else [int(trans_a)]) + [int(trans_b)] if kind == "bf16" else []

    def fill(u, m):
        if not u.first_warp:
            for x, at, trans in ((a, at_a, trans_a), (b, at_b, trans_b)):
                (put_mn_major if trans else put_k_major)(u.cta.smem, at, x)

    def multiply(u, m):
        acc = np.arange(n // 2)
        for step in range(steps):
            place_a, place_b = (descriptor(at + step * (2048 if trans else depth * size))
                                for at, trans in ((at_a, trans_a), (at_b, trans_b)))  # fmt: skip
            if a_from == "registers":
                rows = a[16 * u.first_warp : 16 * u.first_warp + 16, step * depth : (step + 1) * depth]
                names = np.arange(100 + 4 * step, 104 + 4 * step)
                u.b32[names] = a_fragments(rows, kind)
                place_a = names if step % 2 else tuple(u.b32[i] for i in names)  # both ways to name registers
            op = f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.f32.{kind}.{kind}"
            u.wgmma(op, acc, place_a, place_b, np.array(step > 0), *signs, *flags)
        u.wgmma_commit()
        u.wgmma_wait(0)
        keep(u, "d", u.f32[acc].copy())

    results = launch((fill, ("bar_sync", None, [0])), multiply, threads=128, shared=49152, seed=seed).results
    got = np.concatenate([of_accumulators(results["d", 0, warp], n) for warp in range(4)])
    assert (got == signs[0] * signs[1] * (left @ right.T)).all()
    assert got.any()


def test_wgmma_that_is_not_waited_for_or_reads_unfenced_memory_is_a_fault():
    op = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"

    def multiply(u, m):
        u.wgmma(op, np.arange(4), descriptor(7168), descriptor(7168), False, 1, 1, 0, 0)
        u.wgmma_commit()

    with pytest.raises(Fault, match="wgmma was not waited for"):
        launch(multiply, threads=128, shared=49152)

    def unfenced(u, m):
        u.store_shared(np.full(32, shared(7168), np.uint32), 4, (np.zeros(32, np.uint32),), m)
        multiply(u, m)
        u.wgmma_wait(0)

    with pytest.raises(Fault, match="no proxy fence followed"):
        launch(unfenced, threads=128, shared=49152)
    with pytest.raises(Fault, match="is not modelled"):
        launch(
            lambda u, m: u.wgmma(
                op.replace(".bf16.bf16", ".e5m2.e5m2"), np.arange(4), descriptor(0), descriptor(0), 0, 1, 1
            )
        )


# tcgen05


AT_A, AT_B, AT_SCALES = 7168, 7168 + 16384, 7168 + 2 * 16384


def tensor_descriptor(offset, stride=1024, swizzle=2):
    """Return a tcgen05 matrix descriptor. swizzle: 2 is the 128-byte swizzle, 0 is none."""
    return np.uint64((SHARED_BASE + offset) >> 4 | 8192 >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | swizzle << 61)


def tensor_program(put, multiply, n, *, free=True, fence=True, seed=0):
    """Run a kernel and return D [128, n], which `multiply(u)` accumulates from column 0 on. put: writes operands to
    shared memory.
    """
    columns = 32 if n == 32 else 512

    def fill(u, m):
        if u.first_warp:
            return
        put(u.cta.smem)
        u.cta.unfenced[AT_A // 16 :] = not fence
        where = np.full(32, shared(64), np.uint32)
        u.tcgen05("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32", m, where, columns)
        u.tcgen05("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned", m)
        multiply(u)
        barrier = np.full(32, shared(0), np.uint32)
        u.tcgen05("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64", lane(u), barrier)

    def load(u, m):
        found = []
        for column in range(0, n, 32):
            address = np.full(32, 32 * u.first_warp << 16 | column, np.uint32)
            u.tcgen05_ld("tcgen05.ld.sync.aligned.32x32b.x32.b32", m, np.arange(32), address)
            found.append(u.f32[:32].T.copy())
        keep(u, "d", np.concatenate(found, 1))

    def dealloc(u, m):
        if free and not u.first_warp:
            u.tcgen05("tcgen05.dealloc.cta_group::1.sync.aligned.b32", m, np.zeros(32, np.uint32), columns)

    meet = ("bar_sync", None, [0])
    blocks = [initialise((0, 1)), (fill, meet), wait(2, 0), (load, meet), dealloc]
    results = launch(*blocks, threads=128, shared=49152, seed=seed).results
    return np.concatenate([results["d", 0, warp] for warp in range(4)])


def tensor_product(majors="kk", n=32, flip=0, **how):
    """Multiply 128 x n x 64 in bf16, in four steps; return D and A B^T.

    Args:
        majors: K-major ("k") or MN-major ("m"), for A and B.
        flip: bits of the instruction descriptor to invert.
    """
    a, b = (to_bf16(exact(rng, rows, 64).astype(np.float32)) for rows in (128, n))
    word = 1 << 4 | 1 << 7 | 1 << 10 | n // 8 << 17 | 128 // 16 << 24
    word = (word | (majors[0] == "m") << 15 | (majors[1] == "m") << 16) ^ flip

    def put(smem):
        for x, at, major in ((a, AT_A, majors[0]), (b, AT_B, majors[1])):
            (put_mn_major if major == "m" else put_k_major)(smem, at, x)

    def multiply(u):
        for step in range(4):
            places = [tensor_descriptor(at + step * (2048 if major == "m" else 32))
                      for at, major in zip((AT_A, AT_B), majors, strict=True)]  # fmt: skip
            keep = np.full(32, step > 0)
            u.tcgen05("tcgen05.mma.cta_group::1.kind::f16", lane(u), 0, *places, word, (0, 0, 0, 0), keep)

    return tensor_program(put, multiply, n, **how), bf16(a).astype(float) @ bf16(b).astype(float).T


def put_scales(smem, offset, scales):
    """Write scales [rows, 4] to shared memory in blocks of 128 rows: 16 bytes for each of 32 rows, 4 for every 32nd
    row.
    """
    for row, of_row in enumerate(scales):
        at = offset + row // 128 * 512 + row % 32 * 16 + row % 128 // 32 * 4
        smem[at : at + 4] = of_row


def scaled_product(majors="kk", n=128, flip=0, **how):
    """Multiply 128 x n x 64 in e4m3 with a scale per 32 of K, in two steps; return D and the product.

    flip: bits of the instruction descriptor to invert.
    """
    codes = np.array([0, 0x30, 0x38, 0x40, 0xB8], np.uint8)
    a, b = rng.choice(codes, (128, 64)), rng.choice(codes, (n, 64))
    scales = [rng.integers(125, 130, (rows, 4)).astype(np.uint8) for rows in (128, n)]
    at_scales, columns = (AT_SCALES, AT_SCALES + 512), (256, 260)

    def put(smem):
        for x, at, major in ((a, AT_A, majors[0]), (b, AT_B, majors[1])):
            if major == "m":
                put_mn_major(smem, at, x)
            else:
                put_k_major(smem, at, np.pad(x, ((0, 0), (0, 64))))
        for at, of_operand in zip(at_scales, scales, strict=True):
            put_scales(smem, at, of_operand)

    def multiply(u):
        for at, column, rows in zip(at_scales, columns, (128, n), strict=True):
            for block in range(rows // 128):
                place = tensor_descriptor(at + 512 * block, 128, 0)
                u.tcgen05("tcgen05.cp.cta_group::1.32x128b.warpx4", lane(u), column + 4 * block, place)
        for step in range(2):
            word = (majors[0] == "m") << 15 | (majors[1] == "m") << 16 | n // 8 << 17 | 1 << 23 | 128 // 16 << 24
            word = (word | step << 29 | step << 4) ^ flip
            places = [tensor_descriptor(at + step * (4096 if major == "m" else 32))
                      for at, major in zip((AT_A, AT_B), majors, strict=True)]  # fmt: skip
            factors = [step << 30 | column for column in columns]
            op = "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32"
            u.tcgen05(op, lane(u), 0, *places, word, *factors, np.full(32, step > 0))

    left, right = (E4M3[x].astype(float) * np.repeat(np.ldexp(1.0, of_operand[:, :2].astype(int) - 127), 32, 1)
                   for x, of_operand in zip((a, b), scales, strict=True))  # fmt: skip
    return tensor_program(put, multiply, n, **how), left @ right.T


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("majors", "n"), [("kk", 32), ("mm", 128), ("km", 64)])
def test_tcgen05_multiplies_into_tensor_memory(majors, n, seed):
    got, want = tensor_product(majors, n, seed=seed)
    assert (got == want).all()
    assert got.any()


@pytest.mark.parametrize(("majors", "n"), [("kk", 128), ("mm", 128), ("km", 256), ("mk", 128)])
def test_tcgen05_multiplies_by_block_scales(majors, n):
    """128 bytes of MN-major e4m3 are 128 rows, so that N = 256 is of two atoms."""
    got, want = scaled_product(majors, n)
    assert (got == want).all()
    assert got.any()


@pytest.mark.parametrize(
    ("product", "bit"),
    [(tensor_product, bit) for bit in (2, 3, 13, 14, 23, 30)] + [(scaled_product, bit) for bit in (2, 7, 23, 31)],
)
def test_a_tcgen05_instruction_descriptor_that_asks_for_more_is_a_fault(product, bit):
    """Sparsity, saturation, negation, other formats, shifts."""
    with pytest.raises(Fault, match="not modelled"):
        product(flip=1 << bit)


def test_scale_factors_that_two_places_name_differently_are_a_fault():
    with pytest.raises(Fault, match="SF id 1 in the instruction descriptor, 0 in the address"):
        scaled_product(flip=1 << 29)


def test_tcgen05_misuse_is_a_fault():
    with pytest.raises(Fault, match="TMEM columns .* were not freed"):
        tensor_product(free=False)
    with pytest.raises(Fault, match="no proxy fence followed"):
        tensor_product(fence=False)

    def read(address, op="tcgen05.ld.sync.aligned.32x32b.x1.b32"):
        return lambda u, m: u.tcgen05_ld(op, m, np.arange(1), np.full(32, address, np.uint32))

    with pytest.raises(Fault, match="were not allocated"):
        launch(read(0))
    with pytest.raises(Fault, match="its quarter begins at 0"):
        launch(read(32 << 16))
    with pytest.raises(Fault, match="by 32 threads"):
        launch(
            lambda u, m: u.tcgen05(
                "tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64", m, np.full(32, shared(0), np.uint32)
            )
        )
    with pytest.raises(Fault, match="not a power of two"):
        launch(lambda u, m: u.tcgen05("tcgen05.alloc.cta_group::1.b32", m, np.full(32, shared(0), np.uint32), 48))
