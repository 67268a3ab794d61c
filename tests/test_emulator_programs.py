"""Translated kernels are cached between runs, and are the same when loaded from the cache."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import numpy as np
import pytest
from emulator import programs
from emulator.machine import Machine
from emulator.memory import Memory

SUM = """.version 8.0
.target sm_90
.visible .entry sum(.param .u64 to)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<4>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [to];
    mov.u32 %r1, 0;
    mov.u32 %r2, 0;
AGAIN:
    add.s32 %r1, %r1, %r2;
    add.s32 %r2, %r2, 1;
    setp.lt.s32 %p1, %r2, 11;
    @%p1 bra AGAIN;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""


def run(found: dict[str, programs.Program]) -> int:
    kernel, translation = found["sum"]
    memory, out = Memory(), np.zeros(32, np.uint32)
    memory.allow(out.ctypes.data, out.nbytes, "out")
    params = np.array([out.ctypes.data], np.uint64).tobytes()
    Machine(kernel, memory, (1, 1, 1), (32, 1, 1), 0, params, program=translation).run()
    return int(out[0])


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_a_program_is_translated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(programs.of(SUM, tmp_path)) == 55
    assert len(files(tmp_path)) == 1
    monkeypatch.setattr(programs.translate, "translate", lambda kernel: pytest.fail("translated again"))
    assert run(programs.of(SUM, tmp_path)) == 55


def test_what_translation_imports_is_part_of_a_programs_key() -> None:
    root = Path(programs.__file__).parent
    for file in programs.sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = file.parents[node.level - 1]
                at = folder / node.module.replace(".", "/") if node.module else folder
                names = [at] if node.module else [at / alias.name for alias in node.names]
                for name in names:
                    module = name / "__init__.py" if name.is_dir() else name.with_suffix(".py")
                    assert module in programs.sources(), f"{file.relative_to(root)} imports {name.relative_to(root)}"


def test_other_text_is_another_program(tmp_path: Path) -> None:
    programs.of(SUM, tmp_path)
    assert run(programs.of(SUM.replace("11", "5"), tmp_path)) == 10
    assert len(files(tmp_path)) == 2


def test_what_others_can_write_is_not_read(tmp_path: Path) -> None:
    programs.of(SUM, tmp_path)
    (kept,) = files(tmp_path)
    kept.write_bytes(b"no program")
    kept.parent.chmod(0o777)
    assert run(programs.of(SUM, tmp_path)) == 55


def test_programs_of_other_translators_go_when_they_are_old(tmp_path: Path) -> None:
    programs.of(SUM, tmp_path)
    for name, age in (("old", 2 * programs.UNUSED_S), ("new", 0.0)):
        (tmp_path / name).mkdir()
        now = (tmp_path / name).stat().st_mtime
        os.utime(tmp_path / name, (now - age, now - age))
    programs.trim(tmp_path)
    assert not (tmp_path / "old").exists()
    assert (tmp_path / "new").exists()
    assert len(files(tmp_path)) == 1
