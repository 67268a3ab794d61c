"""The emulator's float instructions against rational arithmetic: one rounding, every mode, subnormals, NaN, zeros."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from emulator import formats, lanes
from emulator.snippets import execute
from support import exact_floats as exact
from support.exact_floats import floats, same_float32


def halfway_operands() -> tuple[np.ndarray, ...]:
    """Return a, b, c such that a b + c lies beside the middle of two float32, nearer than float64 can tell."""
    rows = []
    for exponent in (0, 5, -100, 60):
        for k in (22, 23, 20):
            for sign in (1, -1):
                for c in (1 + 2.0**-23, 1 + 3 * 2.0**-23, 1.0):
                    scale = 2.0**exponent
                    rows.append((2.0**-24 * (1 + 2.0**-k), sign * scale * (1 - 2.0**-k), c * scale))
    for odd in (1, 3, 5, 2**23 - 1):  # between two subnormal numbers
        for sign in (1, -1):
            rows.append((2.0**-75 * (1 + 2.0**-23), sign * 2.0**-75 * (1 - 2.0**-23), odd * 2.0**-149))
    return tuple(np.array(column, np.float32) for column in zip(*rows, strict=True))


def exact_fma(a, b, c, mode="rn", form=exact.F32):
    results = [
        exact.rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), form, mode)
        for x, y, z in zip(a, b, c, strict=True)
    ]
    return np.array(results, np.float64).astype(np.float32)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fma_rounds_once(mode):
    a, b, c = floats(1), floats(2), floats(3)
    a[256:], b[256:] = a[256:] * np.float32(2.0**-20), np.float32(1.0) + b[256:] * np.float32(2.0**-126)
    c[256:] = -(a[256:] * b[256:])  # cancels all but the product's low bits
    for operands in ((a, b, c), halfway_operands()):
        a, b, c = (np.where(np.isfinite(x), x, np.float32(1)) for x in operands)
        done = execute(f"fma.{mode}.f32 %r0, %r1, %r2, %r3;", r1=a, r2=b, r3=c)
        assert same_float32(done.r0.view(np.float32)[: a.size], exact_fma(a, b, c, mode))


def test_the_halfway_operands_tell_one_rounding_from_two():
    a, b, c = halfway_operands()
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (twice != exact_fma(a, b, c)).sum() >= 20


def test_fma_with_constants_only():
    done = execute("fma.rn.f32 %r0, 0f40000000, 0f40400000, 0f3F800000;")
    assert (done.r0.view(np.float32) == 7).all()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
def test_sums_and_products_round_once(operation, mode):
    a, b = floats(4), floats(5)
    b[100:300] = a[100:300] * np.float32(2.0**-20)
    done = execute(f"{operation}.{mode}.f32 %r0, %r1, %r2;", r1=a, r2=b)
    of = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y}[operation]
    wanted = [
        exact.rounded(of(Fraction(float(x)), Fraction(float(y))), exact.F32, mode) for x, y in zip(a, b, strict=True)
    ]
    assert same_float32(done.r0.view(np.float32), np.array(wanted, np.float32))


HALVES = {"f16": (exact.F16, np.float16), "bf16": (exact.BF16, None)}


def as_codes(values, kind):
    return formats.to_f16(values) if kind == "f16" else formats.to_bf16(values)


def as_values(codes, kind):
    return formats.f16(codes) if kind == "f16" else formats.bf16(codes)


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
def test_arithmetic_of_halves_rounds_once(operation, kind):
    form = HALVES[kind][0]
    rng = np.random.default_rng(7)
    finite = {"f16": 0x7C00, "bf16": 0x7F80}[kind]
    codes = [
        rng.integers(0, finite, 256).astype(np.uint16) | (rng.integers(0, 2, 256) << 15).astype(np.uint16)
        for _ in range(3)
    ]
    near = rng.integers(0, 8, 128)
    codes[2][:128] = codes[0][:128] ^ near.astype(np.uint16)  # of like size
    pairs = [x[:128].astype(np.uint32) | x[128:].astype(np.uint32) << np.uint32(16) for x in codes]
    count = 3 if operation == "fma" else 2
    names = ", ".join(f"%r{i + 1}" for i in range(count))
    rounding = ".rn" if operation == "fma" else ""
    done = execute(f"{operation}{rounding}.{kind}x2 %r0, {names};", **{f"r{i + 1}": pairs[i] for i in range(count)})
    got = as_values(np.concatenate([(done.r0 & np.uint32(0xFFFF)), done.r0 >> np.uint32(16)]).astype(np.uint16), kind)
    x, y, z = ([Fraction(float(v)) for v in as_values(c, kind)] for c in codes)
    results = {
        "add": lambda i: x[i] + y[i],
        "sub": lambda i: x[i] - y[i],
        "mul": lambda i: x[i] * y[i],
        "fma": lambda i: x[i] * y[i] + z[i],
    }[operation]
    assert same_float32(got, np.array([exact.rounded(results(i), form) for i in range(256)], np.float32))
    one = execute(
        f"{operation}{rounding}.{kind} %rs0, {names.replace('%r', '%rs')};",
        **{f"rs{i + 1}": codes[i][:128] for i in range(count)},
    )
    assert (one.rs0 == (done.r0 & np.uint32(0xFFFF))).all()


def test_float32_pairs_are_two_float32():
    a, b, c = floats(8, 256), floats(9, 256), floats(10, 256)
    done = execute(
        "fma.rn.f32x2 %rd0, %rd1, %rd2, %rd3; add.rn.f32x2 %rd4, %rd1, %rd2; mul.rn.f32x2 %rd5, %rd1, %rd2;",
        rd1=a.view(np.uint64),
        rd2=b.view(np.uint64),
        rd3=c.view(np.uint64),
    )
    assert same_float32(done.rd0.view(np.float32), exact_fma(a, b, c))
    with np.errstate(over="ignore"):
        assert same_float32(done.rd4.view(np.float32), a + b)
        assert same_float32(done.rd5.view(np.float32), a * b)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mixed_precision_widens_the_halves(kind):
    with np.errstate(over="ignore"):
        codes, c = as_codes(floats(11), kind), floats(12)
    wide = as_values(codes, kind)
    codes, c, wide = (x[np.isfinite(wide)] for x in (codes, c, wide))
    done = execute(f"add.rn.f32.{kind} %r0, %rs1, %r1; fma.rn.f32.{kind} %r2, %rs1, %rs1, %r1;", rs1=codes, r1=c)
    with np.errstate(over="ignore"):
        assert same_float32(done.r0.view(np.float32)[: c.size], wide + c)
    assert same_float32(done.r2.view(np.float32)[: c.size], exact_fma(wide, wide, c))


def test_ftz_flushes_operands_and_results():
    tiny, small = np.float32(2.0**-127), np.float32(2.0**-100)
    done = execute(
        """mul.ftz.f32 %r0, %r1, %r2; add.ftz.f32 %r3, %r4, %r4;
        rcp.approx.ftz.f32 %r5, %r4; ex2.approx.ftz.f32 %r6, %r7;""",
        r1=np.array([-small]),
        r2=np.array([small]),
        r4=np.array([-tiny]),
        r7=np.array([-127.0], np.float32),
    )
    values = [getattr(done, name).view(np.float32)[0] for name in ("r0", "r3", "r5", "r6")]
    assert values == [0.0, 0.0, -np.inf, 0.0]
    assert [bool(np.signbit(v)) for v in values] == [True, True, True, False]


def test_sat_maps_nan_and_negative_numbers_to_plus_zero():
    done = execute("add.sat.f32 %r0, %r1, 0f80000000;", r1=np.array([np.nan, -1.0, -0.0, 0.25, 3.0], np.float32))
    assert done.r0[:5].tolist() == np.array([0, 0, 0, 0.25, 1], np.float32).view(np.uint32).tolist()


ZERO, NAN, INF = 0.0, float("nan"), float("inf")
EXTREMES = [  # a, b, min, max, min.NaN, max.NaN
    (1.0, 2.0, 1.0, 2.0, 1.0, 2.0),
    (NAN, 2.0, 2.0, 2.0, NAN, NAN),
    (2.0, NAN, 2.0, 2.0, NAN, NAN),
    (NAN, NAN, NAN, NAN, NAN, NAN),
    (ZERO, -ZERO, -ZERO, ZERO, -ZERO, ZERO),
    (-ZERO, ZERO, -ZERO, ZERO, -ZERO, ZERO),
    (-INF, INF, -INF, INF, -INF, INF),
]


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "f16x2", "bf16x2"])
def test_min_and_max_of_nan_and_zeros(kind):
    columns = [np.array(column, np.float32) for column in zip(*EXTREMES, strict=True)]
    a, b, *wanted = (
        columns if kind == "f32" else [as_codes(x, kind[:-2] if kind.endswith("x2") else kind) for x in columns]
    )
    if kind.endswith("x2"):
        a, b, *wanted = ((x.astype(np.uint32) << np.uint32(16)) | np.uint32(0x3C00) for x in (a, b, *wanted))
    name = "rs" if kind in ("f16", "bf16") else "r"
    for operation, result in zip(("min", "max", "min.NaN", "max.NaN"), wanted, strict=True):
        done = execute(f"{operation}.{kind} %{name}0, %{name}1, %{name}2;", **{f"{name}1": a, f"{name}2": b})
        got = getattr(done, f"{name}0")[: a.size]
        if kind == "f32":
            assert same_float32(got.view(np.float32), result)
            assert (np.signbit(got.view(np.float32)) == np.signbit(result))[~np.isnan(result)].all()
        else:
            assert got.tolist() == result.tolist()


def test_three_operand_max():
    done = execute("max.f32 %r0, %r1, %r2, %r3;", r1=np.float32([1]), r2=np.float32([3]), r3=np.float32([2]))
    assert done.r0.view(np.float32)[0] == 3


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "f16x2", "bf16x2"])
def test_neg_and_abs_change_nothing_but_signs(kind):
    name, sign = {"f32": ("r", 1 << 31), "f16x2": ("r", 0x80008000), "bf16x2": ("r", 0x80008000)}.get(
        kind, ("rs", 0x8000)
    )
    bits = np.random.default_rng(13).integers(0, 1 << 32, 64, dtype=np.uint32)
    bits[0] = 0x7FC0_7FC1
    bits = bits if name == "r" else bits.astype(np.uint16)
    done = execute(f"neg.{kind} %{name}0, %{name}1; abs.{kind} %{name}2, %{name}1;", **{f"{name}1": bits})
    assert [int(x) ^ sign for x in bits] == getattr(done, f"{name}0").tolist()
    assert [int(x) & ~sign for x in bits] == getattr(done, f"{name}2").tolist()


def test_integer_instructions_see_the_nan_that_ptx_names():
    done = execute(
        """sub.f32 %r1, %r8, %r8; shr.u32 %r2, %r1, 23; mov.b32 %r3, %r1; setp.lt.s32 %p1, %r3, 0; and.b32 %r4, %r7, -1;
        add.f32 %r5, %r7, %r7; xor.b32 %r6, %r5, 0;""",
        r8=np.full(32, np.inf, np.float32),
        r7=np.full(32, 0xFFC00001, np.uint32),
    )
    assert (done.r2[0], done.p1[0], done.r6[0]) == (0xFF, False, 0x7FFFFFFF)
    assert done.r4[0] == 0xFFC00001  # loaded, not computed


def test_approximations_are_close():
    x = np.random.default_rng(14).uniform(0.01, 50, 128).astype(np.float32)
    functions = {
        "rcp.approx.ftz": lambda v: 1 / v,
        "sqrt.approx": np.sqrt,
        "rsqrt.approx": lambda v: 1 / np.sqrt(v),
        "ex2.approx.ftz": np.exp2,
        "lg2.approx.ftz": np.log2,
        "tanh.approx": np.tanh,
    }
    for name, function in functions.items():
        got = execute(f"{name}.f32 %r0, %r1;", r1=x).r0.view(np.float32)
        np.testing.assert_allclose(got, function(x.astype(np.float64)), rtol=3e-7, atol=3e-7)


def test_division_rounds_to_nearest():
    a, b = floats(15), floats(16)
    b[b == 0] = 3
    done = execute("div.rn.f32 %r0, %r1, %r2;", r1=a, r2=b)
    wanted = [exact.rounded(Fraction(float(x)) / Fraction(float(y)), exact.F32) for x, y in zip(a, b, strict=True)]
    assert same_float32(done.r0.view(np.float32), np.array(wanted, np.float32))


def test_copysign_takes_the_sign_of_its_first_operand():
    done = execute("copysign.f32 %r0, %r1, %r2;", r1=np.float32([-1, 1]), r2=np.float32([3, -4]))
    assert done.r0.view(np.float32)[:2].tolist() == [-3, 4]


def test_exact_sum_keeps_what_rounding_to_odd_must():
    a, b = np.array([1.0, 1.0, -1.0, np.inf, 3.0]), np.array([2.0**-60, -(2.0**-60), -(2.0**-60), 1.0, 4.0])
    with np.errstate(invalid="ignore"):
        total = lanes.exact_sum(a, b)
    bits = total.view(np.int64) - np.array([1.0, 1.0, -1.0, np.inf, 7.0]).view(np.int64)
    assert bits.tolist() == [1, -1, 1, 0, 0]


def test_torch_agrees_on_halves():
    x = floats(17, 4096)
    x = np.concatenate([x, np.float32([np.inf, -np.inf])])
    for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        wanted = torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16)
        with np.errstate(over="ignore"):
            assert (as_codes(x, kind) == wanted).all()
