"""The emulator's cvt against rational arithmetic, torch and Python's integers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from emulator import formats
from emulator.ptx import Unsupported
from emulator.snippets import execute
from support import exact_floats as exact
from support.exact_floats import floats, same_float32

FORMS = {"f16": exact.F16, "bf16": exact.BF16, "e4m3": exact.E4M3, "e5m2": exact.E5M2, "e2m1": exact.E2M1}


def wide_range(form: exact.Form, seed: int = 0) -> np.ndarray:
    """Return values around a form's numbers, half way between them, and beyond its range."""
    rng = np.random.default_rng(seed)
    exponents = rng.uniform(form.lowest - form.fraction - 3, min(math.log2(form.largest) + 2, 127), 300)
    steps = 2.0 ** np.floor(exponents) * (1 + rng.integers(0, 2 << form.fraction, 300) / 2.0 ** (form.fraction + 1))
    values = np.concatenate(
        [steps, steps * (1 + 2.0**-23), steps * (1 - 2.0**-24), [0, form.largest, form.largest * 1.03]]
    )
    signed = np.concatenate([values, -values])
    return signed[np.abs(signed) < 2.0**127].astype(np.float32)


def value_of(code, name: str):
    return formats.FORMATS[name].values()[code]


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_values_of_all_codes(name):
    if name == "e2m1":
        wanted = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        wanted = np.concatenate([wanted, -wanted])
    else:
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
        wanted = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    got = formats.FORMATS[name].values()
    assert same_float32(got, wanted)
    assert (np.signbit(got) == np.signbit(wanted))[~np.isnan(wanted)].all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_narrow_pairs_round_once_and_saturate(name):
    form, shift = FORMS[name], 4 if name == "e2m1" else 8
    a = wide_range(form)
    b = a[::-1].copy()
    done = execute(f"cvt.rn.satfinite.{name}x2.f32 %rs0, %r1, %r2;", r1=a, r2=b)
    wanted = np.float32([exact.rounded(Fraction(float(x)), form, saturate=True) for x in a])
    codes = done.rs0[: a.size]
    high, low = value_of(codes >> shift, name), value_of(codes & ((1 << shift) - 1), name)
    assert same_float32(high, wanted) and same_float32(low, wanted[::-1])
    assert (np.signbit(high) == np.signbit(a)).all()


@pytest.mark.parametrize(("name", "code"), [("e4m3", 0x7F), ("e5m2", 0x7F), ("e2m1", 0x7)])
def test_nan_and_infinity_in_narrow_pairs(name, code):
    shift = 4 if name == "e2m1" else 8
    nan = np.array([0x7FC00000, 0xFFC00001], np.uint32)
    assert (
        execute(f"cvt.rn.satfinite.{name}x2.f32 %rs0, %r1, %r1;", r1=nan).rs0[:2].tolist() == [code << shift | code] * 2
    )
    done = execute(f"cvt.rn.satfinite.{name}x2.f32 %rs0, %r1, %r2;", r1=np.float32([np.inf]), r2=np.float32([-np.inf]))
    largest = FORMS[name].largest
    assert value_of(int(done.rs0[0]) >> shift, name) == largest
    assert value_of(int(done.rs0[0]) & ((1 << shift) - 1), name) == -largest


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_narrow_pairs_of_f16_pairs(name):
    halves = np.arange(1 << 16, dtype=np.uint16)
    pairs = halves.astype(np.uint32) << np.uint32(16) | halves[::-1]
    done = execute(f"cvt.rn.satfinite.{name}x2.f16x2 %rs0, %r1; cvt.f32.f16 %r2, %rs1;", r1=pairs, rs1=halves)
    direct = execute(f"cvt.rn.satfinite.{name}x2.f32 %rs0, %r1, %r2;", r1=done.r2, r2=done.r2[::-1].copy())
    assert (done.rs0 == direct.rs0).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_narrow_pairs_widen_exactly(name):
    codes = np.arange(256 if name == "e2m1" else 1 << 16, dtype=np.uint16)
    done = execute(f"cvt.rn.f16x2.{name}x2 %r0, %rs1;", rs1=codes)
    shift = 4 if name == "e2m1" else 8
    low, high = (formats.f16(x.astype(np.uint16)) for x in (done.r0 & np.uint32(0xFFFF), done.r0 >> np.uint32(16)))
    assert same_float32(low, value_of(codes & np.uint16((1 << shift) - 1), name))
    assert same_float32(high, value_of(codes >> np.uint16(shift), name))
    assert (done.r0[np.isnan(low) & np.isnan(high)] == 0x7FFF7FFF).all()


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_halves_round_once(name, mode):
    a = wide_range(FORMS[name])
    done = execute(f"cvt.{mode}.{name}x2.f32 %r0, %r1, %r2; cvt.{mode}.{name}.f32 %rs0, %r1;", r1=a, r2=-a)
    wanted = np.float32([exact.rounded(Fraction(float(x)), FORMS[name], mode) for x in a])
    widen = formats.f16 if name == "f16" else formats.bf16
    assert same_float32(widen(done.rs0[: a.size]), wanted)
    assert (done.r0 >> np.uint32(16) == done.rs0).all()
    assert same_float32(widen((done.r0 & np.uint32(0xFFFF)).astype(np.uint16))[: a.size], -wanted)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_nan_of_halves_is_the_one_that_ptx_names(name):
    nan = np.array([0x7F800001, 0xFFC00000], np.uint32)
    done = execute(
        f"cvt.rn.{name}x2.f32 %r0, %r1, %r1; cvt.rn.{name}.f32 %rs0, %r1; cvt.rz.{name}.f32 %rs1, %r1;", r1=nan
    )
    assert done.r0[:2].tolist() == [0x7FFF7FFF] * 2
    assert done.rs0[:2].tolist() == done.rs1[:2].tolist() == [0x7FFF] * 2


def test_tf32_rounds_ties_away_from_zero():
    a = np.array([0x3F800FFF, 0x3F801000, 0xBF801000, 0x7F7FFFFF, 0x7F800000], np.uint32)
    assert execute("cvt.rna.tf32.f32 %r0, %r1;", r1=a).r0[:5].tolist() == [
        0x3F800000,
        0x3F802000,
        0xBF802000,
        0x7F800000,
        0x7F800000,
    ]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_doubles_and_integers_to_float32(mode):
    rng = np.random.default_rng(3)
    x = rng.standard_normal(256) * 2.0 ** rng.integers(-150, 120, 256)
    done = execute(f"cvt.{mode}.f32.f64 %r0, %rd1;", rd1=x)
    assert same_float32(
        done.r0.view(np.float32), np.float32([exact.rounded(Fraction(float(v)), exact.F32, mode) for v in x])
    )
    for t, dtype in (("s32", np.int32), ("u32", np.uint32)):
        n = rng.integers(0, 1 << 32, 256, dtype=np.uint32).view(dtype)
        done = execute(f"cvt.{mode}.f32.{t} %r0, %r1;", r1=n.view(np.uint32))
        assert same_float32(
            done.r0.view(np.float32), np.float32([exact.rounded(Fraction(int(v)), exact.F32, mode) for v in n])
        )


def test_64_bit_integers_to_float32_round_once():
    n = np.array([2**53 + 2**29 + 1, 2**63 - 1, -(2**40) - 1, 2**24 + 1], np.int64)
    done = execute("cvt.rn.f32.s64 %r0, %rd1;", rd1=n.view(np.uint64))
    wanted = [exact.rounded(Fraction(int(v)), exact.F32) for v in n]
    assert done.r0.view(np.float32)[:4].tolist() == wanted


@pytest.mark.parametrize(
    ("mode", "whole"), [("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)]
)
@pytest.mark.parametrize("to", ["s32", "u32", "s64", "u64", "s16", "u16", "s8", "u8"])
def test_floats_to_integers_round_and_clamp(to, mode, whole):
    x = np.concatenate(
        [
            floats(5, 256),
            np.float32([0.5, 1.5, 2.5, -0.5, -1.5, 127.5, 2**31, 2**32, 2**63, 2**64, -(2**31), -129, 40000]),
        ]
    )
    bits, signed = int(to[1:]), to[0] == "s"
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    wanted = [min(max(whole(Fraction(float(v))), low), high) for v in x] + [0, high, low]
    x = np.concatenate([x, np.float32([np.nan, np.inf, -np.inf])])
    name = {64: "rd", 32: "r"}.get(bits, "rs")
    got = getattr(execute(f"cvt.{mode}.{to}.f32 %{name}0, %r1;", r1=x), f"{name}0")[: x.size]
    assert got.view(f"{'i' if signed else 'u'}{got.itemsize}").tolist() == wanted


def test_rounding_to_integral_floats():
    x = np.float32([0.5, 1.5, -0.5, -1.5, 2.25])
    for mode, wanted in (
        ("rni", [0, 2, 0, -2, 2]),
        ("rzi", [0, 1, 0, -1, 2]),
        ("rmi", [0, 1, -1, -2, 2]),
        ("rpi", [1, 2, 0, -1, 3]),
    ):
        assert execute(f"cvt.{mode}.f32.f32 %r0, %r1;", r1=x).r0.view(np.float32)[:5].tolist() == wanted


def test_integers_are_truncated_or_extended_by_their_sign():
    n = np.array([-1, 200, -129, 0x12345678], np.int32)
    done = execute(
        """cvt.s8.s32 %rs0, %r1; cvt.u8.s32 %rs1, %r1; cvt.s64.s32 %rd0, %r1; cvt.u64.u32 %rd1, %r1;
        cvt.s32.s8 %r2, %r1; cvt.u32.u8 %r3, %r1; cvt.u16.u32 %rs2, %r1; cvt.s16.s8 %rs3, %rs1;
        cvt.u32.u64 %r4, %rd0;""",
        r1=n,
    )
    assert done.rs0.view(np.int16)[:4].tolist() == done.rs3.view(np.int16)[:4].tolist() == [-1, -56, 127, 0x78]
    assert done.rs1[:4].tolist() == done.r3[:4].tolist() == [255, 200, 127, 0x78]
    assert done.r2.view(np.int32)[:4].tolist() == [-1, -56, 127, 0x78]
    assert done.rd0.view(np.int64)[:4].tolist() == n.tolist()
    assert done.rd1[:4].tolist() == [int(v) & 0xFFFFFFFF for v in n]
    assert done.rs2[:4].tolist() == [int(v) & 0xFFFF for v in n]
    assert done.r4[:4].tolist() == [int(v) & 0xFFFFFFFF for v in n]


def test_sat_clamps_integers():
    n = np.array([-1, 300, 127, -200], np.int32)
    done = execute(
        "cvt.sat.u8.s32 %rs0, %r1; cvt.sat.s8.s32 %rs1, %r1; cvt.sat.u32.s32 %r2, %r1; cvt.sat.s32.u32 %r3, %r1;", r1=n
    )
    assert done.rs0[:4].tolist() == [0, 255, 127, 0]
    assert done.rs1.view(np.int16)[:4].tolist() == [-1, 127, 127, -128]
    assert done.r2[:4].tolist() == [0, 300, 127, 0]
    assert done.r3[:4].tolist() == [2**31 - 1, 300, 127, 2**31 - 1]


@pytest.mark.parametrize(
    "code",
    [
        "cvt.rn.relu.bf16x2.f32 %r0, %r1, %r2;",
        "cvt.rn.e4m3x2.f32 %rs0, %r1, %r2;",
        "cvt.rs.f16x2.f32 %r0, %r1, %r2;",
        "cvt.f16x2.e4m3x2 %r0, %rs1;",
        "cvt.rp.satfinite.ue8m0x2.f32 %rs0, %r1, %r2;",
        "cvt.rn.satfinite.relu.e4m3x2.f32 %rs0, %r1, %r2;",
        "cvt.rn.satfinite.tf32.f32 %r0, %r1;",
        "cvt.pack.sat.u8.s32.b32 %r0, %r1, %r2, %r3;",
        "cvt.bf16.f32 %rs0, %r1;",
        "cvt.s32.f32 %r0, %r1;",
        "cvt.f32.s32 %r0, %r1;",
    ],
)
def test_conversions_that_are_not_modelled_are_named(code):
    with pytest.raises(Unsupported, match=code.split()[0].replace(".", "\\.")):
        execute(code)
