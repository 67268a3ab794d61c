"""Every function of formats whose scales are not powers of two: trials of `glulam validate`, compared with the CPU
reference.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.served import ARCH

import ffi_bridge
from cute_kernels.formats import E8M0, OPERANDS
from cute_kernels.specs import GroupedMlpSpec, GroupedMmSpec, Spec
from ffi_bridge import profiles
from glulam.choose import known
from glulam.host.plans import forget_plans
from glulam.ops.quantized_weights import FORMS
from glulam.validate import child
from glulam.validate.catalogue import trials_of
from glulam.validate.inputs import FULL

pytestmark = pytest.mark.gpu


SIZE = FULL._replace(rows=300, experts=5, kinds=("Zipf", "first empty", "no rows"), has_every_pair=False, has_odd=False)


def _functions() -> Iterator[Spec]:
    for spec in profiles.shipped_specs(ARCH, "full"):
        if isinstance(spec, GroupedMlpSpec):
            operands, is_called = spec.fc1.operands, True
        elif isinstance(spec, GroupedMmSpec) and spec.operands in FORMS:
            operands, is_called = spec.operands, FORMS[spec.operands].kind.weight_only == spec.operands
        else:
            continue
        if is_called and OPERANDS[operands].w.scale not in ("", E8M0):
            yield spec


@pytest.fixture(autouse=True)
def _every_choice_is_free() -> Iterator[None]:
    yield
    known.forget()
    forget_plans()


@pytest.mark.parametrize("spec", _functions(), ids=lambda spec: spec.name)
def test_a_function_passes_its_trials(spec: Spec) -> None:
    known.forget()
    forget_plans()
    child.prefer(spec)
    with torch.no_grad():
        for trial in trials_of(spec, SIZE):
            child.try_out(trial, torch.device("cuda", 0))
    assert spec.name in ffi_bridge.load(spec.arch).given_out
