"""The emulator's integer, bit, comparison and move instructions against Python's integers."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest
from emulator.ptx import Unsupported
from emulator.snippets import execute

NAME = {16: "rs", 32: "r", 64: "rd"}


def bits_of(width: int, seed: int, count: int = 96) -> np.ndarray:
    top = 1 << (width - 1)
    edges = [0, 1, 2, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2]
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << 32, (count, 2)).tolist()
    numbers = [edges[i] if i < 8 else (high << 32 | low) >> (64 - width) for i, (high, low) in enumerate(values)]
    return rng.permutation(np.array(numbers, f"u{width // 8}"))


def number(bits, t: str) -> int:
    width = int(t[1:])
    return int(bits) - (1 << width) if t[0] == "s" and int(bits) >> (width - 1) else int(bits)


def run(op: str, t: str, *sources, to: str | None = None) -> list[int]:
    """Return results as numbers of type `to`; None: type t."""
    to = to or t
    n, d = NAME[int(t[1:])], NAME[int(to[1:])]
    names = ", ".join(f"%{n}{i + 1}" for i in range(len(sources)))
    done = execute(f"{op} %{d}0, {names};", **{f"{n}{i + 1}": x for i, x in enumerate(sources)})
    return [number(x, to) for x in getattr(done, f"{d}0")[: sources[0].size]]


def wrapped(x: int, t: str) -> int:
    return number(x & ((1 << int(t[1:])) - 1), t)


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


ARITHMETIC = {
    "add": operator.add,
    "sub": operator.sub,
    "min": min,
    "max": max,
    "mul.lo": operator.mul,
    "div": quotient,
    "rem": lambda a, b: a - b * quotient(a, b),
}


@pytest.mark.parametrize(("op", "t"), list(itertools.product(ARITHMETIC, ["u16", "s16", "u32", "s32", "u64", "s64"])))
def test_arithmetic_wraps_around(op, t):
    a, b = bits_of(int(t[1:]), 1), bits_of(int(t[1:]), 2)
    if op in ("div", "rem"):
        b[b == 0] = 3
    wanted = [wrapped(ARITHMETIC[op](number(x, t), number(y, t)), t) for x, y in zip(a, b, strict=True)]
    assert run(f"{op}.{t}", t, a, b) == wanted


@pytest.mark.parametrize("t", ["u32", "s32", "u64", "s64"])
def test_the_upper_half_of_a_product(t):
    a, b = bits_of(int(t[1:]), 3), bits_of(int(t[1:]), 4)
    wanted = [number(x, t) * number(y, t) >> int(t[1:]) for x, y in zip(a, b, strict=True)]
    assert run(f"mul.hi.{t}", t, a, b) == wanted
    c = bits_of(int(t[1:]), 5)
    assert run(f"mad.hi.{t}", t, a, b, c) == [wrapped(x + number(y, t), t) for x, y in zip(wanted, c, strict=True)]


@pytest.mark.parametrize(("t", "to"), [("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")])
def test_wide_products_keep_all_bits(t, to):
    a, b, c = bits_of(int(t[1:]), 6), bits_of(int(t[1:]), 7), bits_of(int(to[1:]), 8)
    products = [number(x, t) * number(y, t) for x, y in zip(a, b, strict=True)]
    assert run(f"mul.wide.{t}", t, a, b, to=to) == products
    n, d = NAME[int(t[1:])], NAME[int(to[1:])]
    done = execute(f"mad.wide.{t} %{d}0, %{n}1, %{n}2, %{d}3;", **{f"{n}1": a, f"{n}2": b, f"{d}3": c})
    got = [number(x, to) for x in getattr(done, f"{d}0")[: a.size]]
    assert got == [wrapped(x + number(y, to), to) for x, y in zip(products, c, strict=True)]


def test_mad_lo_neg_abs_and_relu():
    a, b, c = bits_of(32, 9), bits_of(32, 10), bits_of(32, 11)
    rows = [[number(x, "s32") for x in v] for v in (a, b, c)]
    assert run("mad.lo.s32", "s32", a, b, c) == [wrapped(x * y + z, "s32") for x, y, z in zip(*rows, strict=True)]
    assert run("neg.s32", "s32", a) == [wrapped(-x, "s32") for x in rows[0]]
    assert run("abs.s32", "s32", a) == [wrapped(abs(x), "s32") for x in rows[0]]
    assert run("min.relu.s32", "s32", a, b) == [max(min(x, y), 0) for x, y in zip(*rows[:2], strict=True)]


@pytest.mark.parametrize("op", ["max", "min", "add"])
@pytest.mark.parametrize("t", ["u16", "s16"])
def test_pairs_of_16_bit_integers(op, t):
    a, b = bits_of(32, 12), bits_of(32, 13)
    done = execute(f"{op}.{t}x2 %r0, %r1, %r2;", r1=a, r2=b)
    halves = [x.view(np.uint16)[: 2 * a.size] for x in (a, b)]
    wanted = [wrapped(ARITHMETIC[op](number(x, t), number(y, t)), t) for x, y in zip(*halves, strict=True)]
    assert [number(x, t) for x in done.r0.view(np.uint16)[: 2 * a.size]] == wanted


@pytest.mark.parametrize("t", ["b16", "b32", "b64"])
def test_logic(t):
    a, b = bits_of(int(t[1:]), 14), bits_of(int(t[1:]), 15)
    for op, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        assert run(f"{op}.{t}", t, a, b) == [function(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    assert run(f"not.{t}", t, a) == [int(x) ^ ((1 << int(t[1:])) - 1) for x in a]


def test_logic_of_predicates():
    p, q = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    done = execute(
        "and.pred %p3, %p1, %p2; xor.pred %p4, %p1, !%p2; not.pred %p5, %p1; or.pred %p6, %p1, %p2;", p1=p, p2=q
    )
    rows = [getattr(done, f"p{i}")[:4].tolist() for i in (3, 4, 5, 6)]
    assert rows == [(p & q).tolist(), (p ^ ~q).tolist(), (~p).tolist(), (p | q).tolist()]


@pytest.mark.parametrize(
    "op", ["shl.b16", "shl.b32", "shl.b64", "shr.u16", "shr.s16", "shr.u32", "shr.s32", "shr.b32", "shr.u64", "shr.s64"]
)
def test_shifts_by_any_amount(op):
    t = op.split(".")[1]
    width, n = int(t[1:]), NAME[int(t[1:])]
    a = bits_of(width, 16)
    amounts = np.array([0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 1 << 31, 0xFFFFFFFF] * 7, np.uint32)[: a.size]

    def shifted(x, k):
        return (int(x) << k if "shl" in op else number(x, t) >> k) & ((1 << width) - 1)

    done = execute(f"{op} %{n}0, %{n}1, %r8;", **{f"{n}1": a, "r8": amounts})
    assert getattr(done, f"{n}0")[: a.size].tolist() == [
        shifted(x, min(int(k), 64)) for x, k in zip(a, amounts, strict=True)
    ]
    for k in (0, 3, width - 1, width, width + 7):
        done = execute(f"{op} %{n}0, %{n}1, {k};", **{f"{n}1": a})
        assert getattr(done, f"{n}0")[: a.size].tolist() == [shifted(x, k) for x in a]


@pytest.mark.parametrize("op", ["shf.l.wrap", "shf.l.clamp", "shf.r.wrap", "shf.r.clamp"])
def test_funnel_shifts(op):
    low, high = bits_of(32, 17), bits_of(32, 18)
    amounts = np.array([0, 1, 8, 31, 32, 33, 63, 200] * 12, np.uint32)
    wanted = []
    for x, y, n in zip(low, high, amounts, strict=True):
        n = int(n) & 31 if "wrap" in op else min(int(n), 32)
        whole = int(y) << 32 | int(x)
        wanted.append((whole << n >> 32 if ".l." in op else whole >> n) & 0xFFFFFFFF)
    assert run(f"{op}.b32", "b32", low, high, amounts) == wanted


def permuted(a, b, selectors) -> int:
    octets = (int(b) << 32 | int(a)).to_bytes(8, "little")
    chosen = [(0xFF if octets[s & 7] & 0x80 else 0) if s & 8 else octets[s & 7] for s in selectors]
    return int.from_bytes(bytes(chosen), "little")


def test_prmt_by_index():
    a, b, s = bits_of(32, 19), bits_of(32, 20), bits_of(32, 21)
    wanted = [permuted(x, y, [int(z) >> 4 * i & 15 for i in range(4)]) for x, y, z in zip(a, b, s, strict=True)]
    assert run("prmt.b32", "b32", a, b, s) == wanted
    for fixed in (0x5410, 0x3340, 0x7632, 0x3210, 0x0123, 0x4444, 0xBA98, 0x5140):
        done = execute(f"prmt.b32 %r0, %r1, %r2, {fixed:#x};", r1=a, r2=b)
        assert done.r0[: a.size].tolist() == [
            permuted(x, y, [fixed >> 4 * i & 15 for i in range(4)]) for x, y in zip(a, b, strict=True)
        ]


@pytest.mark.parametrize(
    ("mode", "select"),
    [
        ("f4e", lambda n: [n, n + 1, n + 2, n + 3]),
        ("b4e", lambda n: [n, (n - 1) % 8, (n - 2) % 8, (n - 3) % 8]),
        ("rc8", lambda n: [n] * 4),
        ("ecl", lambda n: [max(n, i) for i in range(4)]),
        ("ecr", lambda n: [min(n, i) for i in range(4)]),
        ("rc16", lambda n: [n % 2 * 2, n % 2 * 2 + 1] * 2),
    ],
)
def test_prmt_modes(mode, select):
    a, b, s = bits_of(32, 22), bits_of(32, 23), bits_of(32, 24)
    wanted = [permuted(x, y, select(int(z) & 3)) for x, y, z in zip(a, b, s, strict=True)]
    assert run(f"prmt.b32.{mode}", "b32", a, b, s) == wanted


@pytest.mark.parametrize("table", [0x96, 0xE8, 0x80, 0x1E, 0xCA, 0, 0xFF])
def test_lop3_looks_each_bit_up(table):
    a, b, c = bits_of(32, 25), bits_of(32, 26), bits_of(32, 27)
    done = execute(f"lop3.b32 %r0, %r1, %r2, %r3, {table};", r1=a, r2=b, r3=c)
    wanted = [
        sum((table >> ((int(x) >> i & 1) << 2 | (int(y) >> i & 1) << 1 | int(z) >> i & 1) & 1) << i for i in range(32))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    assert done.r0[: a.size].tolist() == wanted


@pytest.mark.parametrize("t", ["u32", "s32", "u64", "s64"])
def test_bit_fields(t):
    width, n = int(t[1:]), NAME[int(t[1:])]
    a, b = bits_of(width, 28), bits_of(width, 29)
    places = np.array(
        list(itertools.product([0, 1, 7, 31, 32, 63, 64, 255], [0, 1, 8, 31, 32, 33, 64, 255]))[:64] * 2, np.uint32
    )[: a.size]
    position, length = places[:, 0].copy(), places[:, 1].copy()
    extract, insert = [], []
    for x, y, at, many in zip(a, b, position.tolist(), length.tolist(), strict=True):
        sign = int(x) >> min(at + many - 1, width - 1) & 1 if t[0] == "s" and many else 0
        bits = [int(x) >> (at + i) & 1 if i < many and at + i < width else sign for i in range(width)]
        extract.append(sum(bit << i for i, bit in enumerate(bits)))
        inside = [i for i in range(width) if i < many and at + i < width]
        field = sum(1 << at + i for i in inside)
        insert.append((int(y) & ~field) | sum((int(x) >> i & 1) << at + i for i in inside))
    done = execute(
        f"bfe.{t} %{n}0, %{n}1, %r7, %r8; bfi.b{width} %{n}3, %{n}1, %{n}2, %r7, %r8;",
        **{f"{n}1": a, f"{n}2": b, "r7": position, "r8": length},
    )
    assert getattr(done, f"{n}0")[: a.size].tolist() == extract
    assert getattr(done, f"{n}3")[: a.size].tolist() == insert


@pytest.mark.parametrize("t", ["u32", "s32", "u64", "s64"])
def test_counting_and_finding_bits(t):
    width, n = int(t[1:]), NAME[int(t[1:])]
    a = bits_of(width, 30)
    done = execute(
        f"""bfind.{t} %r1, %{n}8; bfind.shiftamt.{t} %r2, %{n}8; popc.b{width} %r3, %{n}8; clz.b{width} %r4, %{n}8;
        brev.b{width} %{n}7, %{n}8;""",
        **{f"{n}8": a},
    )
    signless = [int(x) ^ ((1 << width) - 1) if number(x, t) < 0 else int(x) for x in a]
    found = [x.bit_length() - 1 if x else 0xFFFFFFFF for x in signless]
    assert done.r1[: a.size].tolist() == found
    assert done.r2[: a.size].tolist() == [width - 1 - x if x != 0xFFFFFFFF else x for x in found]
    assert done.r3[: a.size].tolist() == [bin(int(x)).count("1") for x in a]
    assert done.r4[: a.size].tolist() == [width - int(x).bit_length() for x in a]
    assert getattr(done, f"{n}7")[: a.size].tolist() == [int(f"{int(x):0{width}b}"[::-1], 2) for x in a]


COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


@pytest.mark.parametrize("t", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_comparisons_of_integers(t):
    n = NAME[int(t[1:])]
    a, b = bits_of(int(t[1:]), 31), bits_of(int(t[1:]), 32)
    b[::3] = a[::3]
    unsigned = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"} if t[0] == "u" else {}
    for name, function in {**COMPARISONS, **{k: COMPARISONS[v] for k, v in unsigned.items()}}.items():
        done = execute(f"setp.{name}.{t} %p0, %{n}1, %{n}2;", **{f"{n}1": a, f"{n}2": b})
        assert done.p0[: a.size].tolist() == [function(number(x, t), number(y, t)) for x, y in zip(a, b, strict=True)]


def test_comparisons_of_floats_with_nan():
    a = np.float32([1, 1, 2, np.nan, 1, np.nan, 0.0, -0.0])
    b = np.float32([1, 2, 1, 1, np.nan, np.nan, -0.0, 0.0])
    nan = np.isnan(a) | np.isnan(b)
    for name, function in COMPARISONS.items():
        done = execute(f"setp.{name}.f32 %p0, %r1, %r2; setp.{name}u.f32 %p1, %r1, %r2;", r1=a, r2=b)
        assert done.p0[:8].tolist() == (function(a, b) & ~nan).tolist()
        assert done.p1[:8].tolist() == (function(a, b) | nan).tolist()
    done = execute(
        "setp.num.f32 %p0, %r1, %r2; setp.nan.f32 %p1, %r1, %r2; setp.lt.ftz.f32 %p2, 0f00000000, 0f00000001;",
        r1=a,
        r2=b,
    )
    assert (done.p0[:8].tolist(), done.p1[:8].tolist(), done.p2.any()) == ((~nan).tolist(), nan.tolist(), False)


def test_a_second_result_is_the_opposite_combined_alike():
    a, c = np.array([1, 1, 5, 5], np.uint32), np.array([0, 1, 0, 1], bool)
    done = execute("setp.lt.and.s32 %p1|%p2, %r1, 3, %p1;", r1=a, p1=c)
    assert done.p1[:4].tolist() == ((a < 3) & c).tolist()
    assert done.p2[:4].tolist() == (~(a < 3) & c).tolist()
    done = execute("setp.lt.or.s32 %p1|_, %r1, 3, !%p2;", r1=a, p2=c)
    assert done.p1[:4].tolist() == ((a < 3) | ~c).tolist()


def test_selection():
    c = np.float32([1, -1, -0.0, np.nan])
    done = execute(
        "slct.u32.f32 %r0, 7, 8, %r1; selp.b32 %r2, %r1, 9, %p1; slct.s32.s32 %r3, 7, 8, %r1;",
        r1=c,
        p1=np.array([1, 0, 0, 1], bool),
    )
    assert done.r0[:4].tolist() == [7, 8, 7, 8]
    assert done.r2[:4].tolist() == [int(c.view(np.uint32)[0]), 9, 9, int(c.view(np.uint32)[3])]
    assert done.r3[:4].tolist() == [7, 8, 8, 7]


def test_moves_pack_and_unpack():
    done = execute(
        """mov.b64 {%r1, %r2}, %rd1; mov.b64 {_, %r3}, %rd1; mov.b32 {%rs1, %rs2}, %r1; mov.b64 %rd2, {%r2, %r1};
        mov.b32 %r4, {%rs2, 5}; mov.b64 {%rs3, %rs4, %rs5, _}, %rd1; mov.b32 %r5, 0f3F800000; mov.f32 %r6, 0f40000000;
        mov.u32 %r7, %laneid; mov.b32 {%rs6, _, _, %rs7}, %r1;""",
        rd1=np.array([0x1122334455667788], np.uint64),
    )
    registers = ["r1", "r2", "r3", "rs1", "rs2", "rd2", "r4", "rs3", "rs4", "rs5", "r5", "r6", "rs6", "rs7"]
    assert [hex(int(getattr(done, name)[0])) for name in registers] == [
        "0x55667788",
        "0x11223344",
        "0x11223344",
        "0x7788",
        "0x5566",
        "0x5566778811223344",
        "0x55566",
        "0x7788",
        "0x5566",
        "0x3344",
        "0x3f800000",
        "0x40000000",
        "0x88",
        "0x55",
    ]
    assert done.r7.tolist() == list(range(32))


@pytest.mark.parametrize("guard", ["@%p1", "@!%p1"])
def test_a_guard_leaves_other_lanes_alone(guard):
    p = np.arange(32) % 3 == 0
    done = execute(f"mov.b32 %r0, 1; {guard} mov.b32 %r0, 2; {guard} add.s32 %r0, %r0, 5;", p1=p)
    assert (done.r0 == np.where(p == (guard == "@%p1"), 7, 1)).all()


def test_lanes_that_do_not_act_keep_their_registers():
    m = np.arange(32) < 10
    done = execute(
        "add.s32 %r0, %r1, 1; setp.eq.s32 %p1, %r1, %r1; mov.b64 {%r2, _}, -1;",
        lanes=m,
        r0=np.full(32, 9),
        r1=np.arange(32),
    )
    assert (done.r0 == np.where(m, np.arange(32) + 1, 9)).all()
    assert (done.p1 == m).all() and (done.r2 == np.where(m, 0xFFFFFFFF, 0)).all()


@pytest.mark.parametrize(
    "code",
    [
        "add.cc.u32 %r0, %r1, %r2;",
        "addc.u32 %r0, %r1, %r2;",
        "add.sat.s32 %r0, %r1, %r2;",
        "mul.u32 %r0, %r1, %r2;",
        "mul24.lo.u32 %r0, %r1, %r2;",
        "mad.lo.cc.u32 %r0, %r1, %r2, %r3;",
        "dp4a.u32.u32 %r0, %r1, %r2, %r3;",
        "popc.u32 %r0, %r1;",
        "shf.l.b32 %r0, %r1, %r2, 3;",
        "set.eq.u32.u32 %r0, %r1, %r2;",
        "setp.ltu.s32 %p1, %r1, %r2;",
        "setp.lo.s32 %p1, %r1, %r2;",
        "setp.hi.f32 %p1, %r1, %r2;",
        "setp.nan.s32 %p1, %r1, %r2;",
        "neg.u32 %r0, %r1;",
        "add.f32.f32 %r0, %r1, %r2;",
        "min.xorsign.abs.f32 %r0, %r1, %r2;",
        "fma.f32 %r0, %r1, %r2, %r3;",
        "fma.rn.relu.f16x2 %r0, %r1, %r2, %r3;",
        "tanh.approx.f16x2 %r0, %r1;",
        "ex2.approx.ftz.bf16x2 %r0, %r1;",
        "sin.approx.f32 %r0, %r1;",
        "rsqrt.rn.f32 %r0, %r1;",
        "add.rn.f64.f32 %rd0, %rd1, %rd2;",
        "fma.rn.f64 %rd0, %rd1, %rd2, %rd3;",
        "bfe.b32 %r0, %r1, %r2, %r3;",
        "mov.b128 %rd0, {%rd1, %rd2};",
        "add.s32 %r0, %r1;",
        "selp.b32 %r0, %r1, %r2, %r3;",
    ],
)
def test_what_is_not_modelled_is_named(code):
    with pytest.raises(Unsupported, match=code.split()[0].replace(".", "\\.")):
        execute(code)
