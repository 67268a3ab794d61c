"""Signatures: packing by name, and calls by name that are compiled to positional ones."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from cute_kernels.chains import chain_of, signature_of, stages_of
from cute_kernels.signatures import FLOAT32
from cute_kernels.sm90.configs import shipped_specs
from cute_kernels.specs import GroupedMlpSpec, GroupedMmSpec
from glulam.by_name import by_name

MM = signature_of(GroupedMmSpec())
NEEDED = {name: number for number, name in enumerate(MM.names) if name not in MM.optional}


class Plan:
    scale = 7

    def function(self, *arguments: Any) -> tuple[Any, ...]:
        return arguments

    @by_name(function=MM)
    def run(self, x: Any, w: Any, y: Any) -> Any:
        return self.function(y=y, x=x, w=w, num_sms=132, num_groups=3, group_form=1, groups=5, scale=self.scale)


class TestByName:
    def test_keywords_are_put_in_the_signatures_order(self) -> None:
        wanted = MM.pack(x="x", w="w", y="y", groups=5, group_form=1, num_groups=3, num_sms=132, scale=7)
        assert Plan().run("x", "w", "y") == wanted

    def test_nothing_is_done_by_keyword_at_a_call(self) -> None:
        """A keyword costs a call 35 ns."""
        import dis

        named = [i.opname for i in dis.get_instructions(Plan.run) if "KW" in i.opname]
        assert named == []

    def test_a_call_that_lacks_an_argument_is_refused_when_it_is_defined(self) -> None:
        with pytest.raises(TypeError, match="argument 'w' is missing"):

            @by_name(function=MM)
            def run(self: Any) -> None:
                self.function(x=1, y=1, groups=1, group_form=1, num_groups=1, num_sms=1)

    def test_a_call_with_an_unknown_argument_is_refused(self) -> None:
        with pytest.raises(TypeError, match="no argument 'bais'; there are: x, w, y"):

            @by_name(function=MM)
            def run(self: Any) -> None:
                self.function(x=1, w=1, y=1, groups=1, group_form=1, num_groups=1, num_sms=1, bais=1)

    def test_a_call_by_position_is_refused(self) -> None:
        with pytest.raises(TypeError, match="function is called by position"):

            @by_name(function=MM)
            def run(self: Any) -> None:
                self.function(1, w=1)

    def test_a_signature_without_a_call_is_refused(self) -> None:
        with pytest.raises(TypeError, match="never calls function"):

            @by_name(function=MM)
            def run(self: Any) -> None:
                pass

    def test_a_closure_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"run has a closure, which compiling anew would lose \(super\(\) is one\)"):

            class Other(Plan):
                @by_name(function=MM)
                def run(self, x: Any, w: Any, y: Any) -> Any:
                    super().run(x, w, y)
                    return self.function(x=x, w=w, y=y, groups=1, group_form=1, num_groups=1, num_sms=1)

    def test_errors_are_where_the_source_is(self) -> None:
        class Failing(Plan):
            def function(self, *arguments: Any) -> tuple[Any, ...]:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as caught:
            Failing().run(1, 2, 3)
        frame = caught.traceback[-2]
        assert frame.path.name == "test_by_name.py" and "self.function(y=y" in str(frame.statement)


class TestSignatures:
    def test_optional_arguments_are_0_where_they_are_left_out(self) -> None:
        packed = dict(zip(MM.names, MM.pack(**NEEDED), strict=True))
        assert {name for name, value in packed.items() if name in MM.optional and value == 0} == MM.optional
        glu = signature_of(GroupedMlpSpec())
        absent = dict(zip(glu.names, glu.pack(**dict.fromkeys(set(glu.names) - glu.optional, 1)), strict=True))
        assert all(type(absent[a.name]) is (float if a.kind == FLOAT32 else int) for a in glu.arguments)

    @pytest.mark.parametrize(("change", "error"), [({"w": None}, "'w' is missing"), ({"v": 1}, "no argument 'v'")])
    def test_what_does_not_fit_is_refused(self, change: dict[str, Any], error: str) -> None:
        given = {name: value for name, value in {**NEEDED, **change}.items() if value is not None}
        with pytest.raises(TypeError, match=error):
            MM.pack(**given)

    def test_chains_give_every_stage_what_it_takes(self) -> None:
        """And every argument of a chain reaches a stage."""
        for spec in shipped_specs():
            if chain := chain_of(spec):
                used = set()
                for step in chain.steps:
                    signature_of(step.stage).pack(**dict(step.sources))
                    used |= {getattr(source, "tensor", source) for _, source in step.sources} | {step.when}
                assert set(signature_of(spec).names) <= used, spec.name

    def test_a_kernel_is_one_stage_however_many_functions_launch_it(self) -> None:
        specs = shipped_specs()
        stages = {stage for spec in specs for stage in stages_of(spec)}
        assert len({stage.name for stage in stages}) == len(stages)
        assert not any(chain_of(stage) for stage in stages)


def test_host_functions_take_what_their_signatures_say() -> None:
    """Of every stage that ships: tracing one, which compares both, is the first that compiling it does."""
    program = """
import importlib, sys
sys.modules["torch"] = None
from ffi_bridge import profiles, toolchain
sys.path.insert(0, str(toolchain.dsl_packages()))
from cute_kernels.stages import tracer_of
stages = profiles.all_stages(profiles.shipped_specs("sm_90a"))
for stage in stages:
    module, _, name = tracer_of(stage).partition(":")
    getattr(importlib.import_module(module), name)(stage)
print(len(stages))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len({stage for spec in shipped_specs() for stage in stages_of(spec)})


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "CUTE_DSL_ARCH": "sm_90a", "PYTHONPATH": os.pathsep.join(sys.path)}
