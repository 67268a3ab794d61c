"""Chains as linked: each stage gets the arguments that the chain's data name. Stages are C functions that record their
arguments.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.steps import taken

from cute_kernels.arguments import FLOAT32, STREAM, TENSOR
from cute_kernels.chains import chain_of, signature_of
from cute_kernels.sm90.configs import shipped_specs
from cute_kernels.specs import GroupedMmSpec, MhcSpec, Spec
from ffi_bridge import CompileError, chains, host, toolchain

_RECORDER = r"""
#include <string.h>
#include <tvm/ffi/c_api.h>
__attribute__((visibility("default"))) int64_t record[4096], length, failing = -1;
static int write_down(int stage, const TVMFFIAny* arguments, int32_t count) {
  record[length++] = stage;
  record[length++] = count;
  for (int i = 0; i < count; i++) {
    const DLTensor* tensor = arguments[i].type_index == kTVMFFIDLTensorPtr ? arguments[i].v_ptr
        : arguments[i].type_index == kTVMFFITensor ? (DLTensor*)((char*)arguments[i].v_obj + sizeof(TVMFFIObject)) : 0;
    record[length++] = tensor ? (int64_t)tensor->data + (int64_t)tensor->byte_offset : arguments[i].v_int64;
  }
  if (stage == failing) TVMFFIErrorSetRaisedFromCStr("ValueError", "the stage refuses");
  return stage == failing ? -1 : 0;
}
"""
_STAGE = r"""
int __tvm_ffi_{name}(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {{
  return write_down({number}, arguments, count);
}}
"""


def form(spec: Spec) -> Any:
    """Return a chain's structure without tiles and dtypes: each step's stage type, argument sources and condition; None
    if the spec is no chain.
    """
    chain = chain_of(spec)
    return chain and tuple((type(s.stage), tuple((n, str(v)) for n, v in s.sources), s.when) for s in chain.steps)


FORMS = {form(spec): spec for spec in shipped_specs() if chain_of(spec)}
CHAINS = list(FORMS.values())
STAGES = sorted({step.stage.name: None for spec in CHAINS for step in chain_of(spec).steps})  # type: ignore[union-attr]


class Recorded:
    """A library of CHAINS whose stages only record their arguments."""

    def __init__(self, folder: Path) -> None:
        stages = "".join(_STAGE.format(name=name, number=number) for number, name in enumerate(STAGES))
        (folder / "stages.c").write_text(_RECORDER + stages)
        objects = [str(path) for path in chains.compile_chains(CHAINS, folder, host.here())]
        library = folder / "recorded.so"
        command = [*toolchain.c_compiler(), "-shared", "-fPIC", "-o", str(library), str(folder / "stages.c"), *objects]
        include, ffi = f"-I{toolchain.tvm_ffi_headers()}", str(toolchain.tvm_ffi_library())
        subprocess.run([*command, include, ffi], check=True)
        import tvm_ffi

        self.module = tvm_ffi.load_module(str(library))
        self.memory = ctypes.CDLL(str(library))

    def set(self, name: str, value: int) -> None:
        ctypes.c_int64.in_dll(self.memory, name).value = value

    def call(self, spec: Spec, *values: Any) -> list[tuple[str, list[int]]]:
        """Call a chain; return the name of each stage that it called, and the bits of that stage's arguments."""
        self.set("length", 0)
        self.module.get_function(spec.name)(*values)
        flat = list((ctypes.c_int64 * 4096).in_dll(self.memory, "record"))
        flat = flat[: ctypes.c_int64.in_dll(self.memory, "length").value]
        calls = []
        while flat:
            stage, count, *rest = flat
            calls.append((STAGES[stage], rest[:count]))
            flat = rest[count:]
        return calls


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("chains"))


def bits(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return int(struct.unpack("q", struct.pack("d", value))[0]) if isinstance(value, float) else int(value)


def given(spec: Spec) -> dict[str, Any]:
    """Return distinct values for all arguments of a spec, matrices with padded rows."""
    made: dict[str, Any] = {}
    for number, argument in enumerate(signature_of(spec).arguments):
        if argument.kind == TENSOR:
            made[argument.name] = torch.zeros(3 + number, 64 + 8 * number)[:, : 8 * (number + 1)]
        else:
            made[argument.name] = 0.5 + number if argument.kind == FLOAT32 else 1000 + number
    return made


def expected(spec: Spec, named: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """Return the stages that a chain must call with these arguments, and the bits of each stage's arguments."""
    steps = [step for step in chain_of(spec).steps if not step.when or named[step.when]]  # type: ignore[union-attr]
    return [
        (step.stage.name, [bits(value) for value in signature_of(step.stage).pack(**taken(step, named, position))])
        for position, step in enumerate(steps)
    ]


@pytest.mark.parametrize("spec", CHAINS, ids=lambda spec: spec.name)
def test_stages_get_what_the_chain_says(recorded: Recorded, spec: Spec) -> None:
    named = given(spec)
    assert recorded.call(spec, *named.values()) == expected(spec, named)


def test_a_step_is_left_out_where_its_address_is_0(recorded: Recorded) -> None:
    """And is none of those that the steps behind it have before them."""
    left_out = [(spec, step.when) for spec in CHAINS for step in chain_of(spec).steps if step.when]  # type: ignore[union-attr]
    for spec, when in left_out:
        named = {**given(spec), when: 0}
        assert recorded.call(spec, *named.values()) == expected(spec, named)
    assert any(spec.steps[0].when for spec in map(chain_of, CHAINS))  # type: ignore[union-attr]


def test_what_a_stage_raises_ends_the_chain(recorded: Recorded) -> None:
    spec = next(spec for spec in CHAINS if len(chain_of(spec).steps) == 2)  # type: ignore[union-attr]
    first, second = (stage for stage, _ in recorded.call(spec, *given(spec).values()))
    recorded.set("failing", STAGES.index(first))
    with pytest.raises(ValueError, match="the stage refuses"):
        recorded.call(spec, *given(spec).values())
    recorded.set("failing", -1)
    assert [stage for stage, _ in recorded.call(spec, *given(spec).values())] == [first, second]


def test_wrong_arguments_are_refused(recorded: Recorded) -> None:
    spec = next(spec for spec in CHAINS if "x8" in signature_of(spec).names)
    values = list(given(spec).values())
    with pytest.raises(TypeError, match=f"{spec.name}: other number of arguments than {len(values)}"):
        recorded.call(spec, *values[:-1])
    place = signature_of(spec).names.index("x8")
    with pytest.raises(TypeError, match=f"a tensor is wanted as argument {place}"):
        recorded.call(spec, *values[:place], 5, *values[place + 1 :])


def test_chains_are_the_same_text_whatever_the_order() -> None:
    assert chains.text_of(CHAINS) == chains.text_of(reversed(CHAINS))
    assert chains.text_of([GroupedMmSpec()]) == ""


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "_FLAGS", ("-no-such-flag",))
    with pytest.raises(CompileError, match="compiling chains.c failed:\n.*no-such-flag"):
        chains.compile_chains(CHAINS, tmp_path, host.here())


def test_streams_are_numbers() -> None:
    assert signature_of(MhcSpec("pre")).arguments[-1].kind == STREAM
