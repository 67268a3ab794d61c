"""The emulator's PTX parser: scopes, operands, parameters, and errors that name unknown syntax."""

from __future__ import annotations

import re

import pytest
from emulator import ptx
from emulator.ptx import Address, Imm, Reg, Special, Unsupported
from emulator.snippets import parse


def instructions(code: str) -> list[ptx.Ins]:
    return parse(code).code


def test_registers_of_a_class_are_numbered_in_the_order_of_their_declaration():
    kernel = parse(".reg .f32 %f<2>; .reg .pred alone; add.f32 %f1, %f0, %r8; setp.eq.s32 alone, %r0, %r1;")
    assert kernel.code[0].args == [Reg("b32", 10), Reg("b32", 9), Reg("b32", 8)]
    assert kernel.code[1].args[0] == Reg("p", 9)
    assert kernel.counts == {"p": 10, "b16": 9, "b32": 11, "b64": 9}


def test_inline_blocks_redeclare_registers_and_labels():
    once = "{ .reg .pred p; WAIT: setp.eq.s32 p, %r0, 0; @p bra DONE; bra WAIT; DONE: }"
    first, second = instructions(once + once)[:3], instructions(once + once)[3:]
    assert first[0].args[0] == Reg("p", 9) and second[0].args[0] == Reg("p", 10)
    assert (first[1].args, first[2].args) == ([3], [0])
    assert (second[1].args, second[2].args) == ([6], [3])


def test_an_inner_scope_sees_outer_names_and_hides_those_it_declares():
    code = instructions("OUT: { .reg .b32 %r1; mov.b32 %r1, %r2; { mov.b32 %r3, %r1; bra OUT; } } mov.b32 %r1, %r2;")
    assert code[0].args == [Reg("b32", 9), Reg("b32", 2)]
    assert code[1].args == [Reg("b32", 3), Reg("b32", 9)]
    assert code[2].args == [0]
    assert code[3].args[0] == Reg("b32", 1)


def test_a_label_of_a_closed_scope_is_out_of_sight():
    with pytest.raises(Unsupported, match="HIDDEN"):
        parse("{ HIDDEN: ret; } bra HIDDEN;")


def test_operands():
    code = instructions(
        """mov.b64 {%r1, _}, %rd1;
        setp.lt.or.s32 %p1|%p2, %r1, -3, !%p3;
        cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, 7}], [%r2+-16];
        mov.u32 %r1, %tid.x;
        mov.b64 %rd1, block;
        ld.shared.b32 %r1, [dynamic+8];
        @!%p4 add.f32 %r1, %r2, 0f3F800000;"""
    )
    assert code[0].args == [[Reg("b32", 1), None], Reg("b64", 1)]
    assert code[1].args == [[Reg("p", 1), Reg("p", 2)], Reg("b32", 1), Imm(-3), ("not", Reg("p", 3))]
    assert code[2].args == [Address(Reg("b64", 1), 0, [Reg("b32", 1), Imm(7)]), Address(Reg("b32", 2), -16)]
    assert code[3].args[1] == Special("tid.x")
    assert code[4].args[1] == "block"
    assert code[5].args[1] == Address("dynamic", 8)
    assert (code[6].pred, code[6].negated, code[6].args[2]) == (Reg("p", 4), True, Imm(1.0, True))


@pytest.mark.parametrize(
    ("text", "value"),
    [("0x1F", 31), ("-0x10", -16), ("017", 15), ("0b101", 5), ("0x3340U", 0x3340), ("-1", -1), ("0", 0)],
)
def test_integer_constants(text, value):
    assert instructions(f"mov.b32 %r1, {text};")[0].args[1] == Imm(value)


def test_double_constants_are_told_from_single_ones():
    assert instructions("mov.b64 %rd1, 0d3FF8000000000000;")[0].args[1] == Imm(1.5, True, True)


def test_lines_are_those_of_the_text():
    code = instructions("/* two\nlines */ ret;\n// nothing\nmov.b32\n %r1, 1;\nret;")
    first = code[0].line
    assert [ins.line - first for ins in code] == [0, 2, 4]
    assert code[1].text == "mov.b32 %r1, 1"


def test_parameters_are_packed_as_the_abi_does():
    text = """.version 8.8 .target sm_90a .address_size 64
    .visible .entry k(.param .u8 a, .param .u64 .ptr .global .align 16 b, .param .align 64 .b8 map[128], .param .f32 c)
    .reqntid 128, 2 .minnctapersm 1 .reqnctapercluster 2 { ret; }"""
    kernel = ptx.parse(text)[0]
    assert kernel.params == {"a": (0, 1), "b": (8, 8), "map": (64, 128), "c": (192, 4)}
    assert (kernel.param_bytes, kernel.threads, kernel.cluster) == (196, (128, 2, 1), (2, 1, 1))
    assert kernel.target == "sm_90a"


def test_the_dynamic_part_of_shared_memory_lies_behind_all_variables():
    kernel = parse(".shared .align 16 .b8 first[20]; .shared .b64 second; ret;")
    assert kernel.shared == {"first": (0, 20), "second": (24, 8), "dynamic": (128, 0)}
    assert kernel.shared_bytes == 128


def test_a_module_may_hold_several_kernels_with_registers_of_their_own():
    one = ".visible .entry {}() {{ .reg .b32 %r<2>; mov.b32 %r1, 0; ret; }}\n"
    kernels = ptx.parse(".version 8.8\n.target sm_80\n.address_size 64\n" + one.format("f") + one.format("g"))
    assert [(kernel.name, kernel.counts["b32"]) for kernel in kernels] == [("f", 2), ("g", 2)]


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("mov.b32 %r1, %r99;", "%r99"),
        ("mov.u32 %r1, %gridid.x;", "%gridid.x"),
        (".local .align 4 .b8 stack[16]; ret;", ".local"),
        (".reg .b128 %q<2>; ret;", ".b128"),
        ("@%r1 ret;", "@%r1"),
        ("ld.shared.b32 %r1, [%r1, 2, 3];", "2, 3"),
        ("mov.b32 %r1, 1 ret", "mov.b32 %r1, 1 ret"),
        ("bra NOWHERE;", "NOWHERE"),
        ("mov.b32 %r1, unknown;", "unknown"),
    ],
)
def test_unknown_text_in_a_body_is_named(code, named):
    with pytest.raises(Unsupported, match=re.escape(named)):
        parse(code)


@pytest.mark.parametrize("declared", [".global .b32 counter", ".const .b8 table[4]", ".func helper"])
def test_unknown_text_outside_of_entries_is_named(declared):
    text = f".version 8.8\n.target sm_80\n{declared};\n.visible .entry k() {{ ret; }}"
    with pytest.raises(Unsupported, match=declared.split()[0]):
        ptx.parse(text)
