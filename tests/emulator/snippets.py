"""Run a few lines of PTX on lanes, without a machine, for tests of the parser and the translator.

    done = execute("add.s32 %r0, %r1, %r2;", r1=[1, 2], r2=[3, 4])
    done.r0  # array of 32 lanes: 4, 6, then 0

Registers are %p0-%p8, %rs0-%rs8 (16 bits), %r0-%r8 (32) and %rd0-%rd8 (64). A call of one of the unit's methods is kept
in `done.calls`; it returns `answers[name]`.
"""

from __future__ import annotations

import numpy as np

from . import ptx, translate

_MODULE = """.version 8.8
.target sm_100
.address_size 64
.extern .shared .align 128 .b8 dynamic[];
.visible .entry snippet(.param .b32 number, .param .align 8 .b8 block[24]) {{
.reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
{code}
}}
"""
_FILES = {"p": ("p", np.bool_), "rs": ("b16", np.uint16), "r": ("b32", np.uint32), "rd": ("b64", np.uint64)}


class _Cta:
    shared_base = 0x400

    def __init__(self, kernel, parameters):
        self.kernel, self.parameters = kernel, parameters

    def params(self, offset, dtype):
        return np.frombuffer(self.parameters, dtype, 1, offset)[0]


class Lanes:
    """Registers of n lanes, in place of a machine's unit. Calls of other methods are recorded."""

    def __init__(self, kernel, n, parameters=bytes(32), answers=None):
        self.n, self.warps, self.calls, self.answers = n, n // 32, [], answers or {}
        self.cta = _Cta(kernel, parameters)
        self.p = np.zeros((kernel.counts["p"], n), bool)
        for bits in (16, 32, 64):
            registers = np.zeros((kernel.counts[f"b{bits}"], n), f"u{bits // 8}")
            for kind, letter in (("b", "u"), ("s", "i"), ("f", "f")):
                setattr(self, f"{kind}{bits}", registers.view(f"{letter}{bits // 8}"))

    def special(self, name):
        return np.arange(self.n, dtype=np.uint32) % 32 if name == "laneid" else np.arange(self.n, dtype=np.uint32)

    def __getattr__(self, name):
        file = name.rstrip("0123456789")
        if file in _FILES and file != name:  # r3: the register
            return getattr(self, _FILES[file][0])[int(name[len(file) :])]
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments, **options):
            self.calls.append((name, *arguments, *options.values()))
            answer = self.answers.get(name)
            return answer(*arguments) if callable(answer) else answer

        return call


def parse(code: str) -> ptx.Kernel:
    return ptx.parse(_MODULE.format(code=code))[0]


def execute(code: str, lanes=True, parameters=bytes(32), answers=None, **registers) -> Lanes:
    """Run the first block of a kernel.

    Arrays of any type are put into registers bit for bit; lanes beyond an array's end are 0.
    """
    kernel = parse(code)
    given = {name: np.atleast_1d(values) for name, values in registers.items()}
    most = max([32, *(values.size for values in given.values())])
    unit = Lanes(kernel, (most + 31) // 32 * 32, parameters, answers)
    for name, values in given.items():
        dtype = _FILES[name.rstrip("0123456789")][1]
        bits = values.astype(dtype) if values.dtype.kind == "i" else values.view(dtype)
        getattr(unit, name)[: values.size] = bits
    with np.errstate(all="ignore"):
        translate.translate(kernel).blocks[0][0](unit, lanes)
    return unit
