"""The activation situ, gate_cap tanh(a / gate_cap) sigmoid(a) up_cap tanh(u / up_cap), from its formula to its kernels.

Properties of all activations (layouts, recipes, operators, gradients) are tested elsewhere, for each activation by
name.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from emulator.emulated_gpu import installed
from support import oracle
from support.criterion import assert_close, same_bits
from support.fake_gpu import FakeGpu
from support.inputs import make_case
from torch import Tensor

import glulam
from cute_kernels.formulas import FORMULAS, MOST_NUMBERS
from cute_kernels.signatures import PARAMS
from glulam.activations import DEFAULTS, Activation, NamedNumbers, activate, activate_backward, packer
from glulam.ops.gate import gate, gate_rows_backward

pytest_plugins = ["support.fixtures"]

F64, SITU = torch.float64, ("situ", "concat")
CAPS: list[dict[str, Any]] = [{}, {"gate_cap": 0.5, "up_cap": 2.0}, {"gate_cap": 2.0, "up_cap": None}]
each_cap = pytest.mark.parametrize("caps", CAPS, ids=["defaults", "low caps", "up as it is"])


def preact(rows: int = 24, columns: int = 128, dtype: torch.dtype = F64) -> Tensor:
    """Return rows with scales from 2^-12, where a tanh with cancellation near 0 errs, to 2^6, where the caps apply."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-12, 6, rows, base=2.0, dtype=F64)[:, None]
    return (torch.randn(rows, columns, generator=generator, dtype=F64) * scales).to(dtype)


def test_every_number_has_a_place() -> None:
    """In an exported function, and in the keywords of type checkers."""
    assert len(PARAMS) == MOST_NUMBERS >= max(len(formula.numbers) for formula in FORMULAS.values())
    assert list(NamedNumbers.__annotations__) == [name for one in FORMULAS.values() for name in one.numbers]


@each_cap
def test_the_reference_is_the_formula(caps: dict[str, Any]) -> None:
    h = preact()
    assert torch.allclose(activate(h, *Activation.named(*SITU, **caps)), oracle.activation(h, *SITU, caps), atol=1e-12)


@each_cap
def test_slopes_are_the_derivatives(caps: dict[str, Any]) -> None:
    h, dm = preact().requires_grad_(), preact(columns=64)
    function = Activation.named(*SITU, **caps)
    (wanted,) = torch.autograd.grad(activate(h, *function), h, dm)
    got, _ = activate_backward(dm, h.detach(), *function)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_no_cap_is_the_half_itself() -> None:
    """Where a product of 0 and infinity would be NaN, too."""
    h = preact()
    a, u = h.chunk(2, dim=1)
    swiglu, swiglu_gradient = (f(h, "swiglu", "concat", ()) for f in (activate, lambda *of: activate_backward(a, *of)))
    none = "situ", "concat", (math.inf, math.inf)
    torch.testing.assert_close(activate(h, *none), swiglu)
    torch.testing.assert_close(activate_backward(a, h, *none), swiglu_gradient)
    assert torch.equal(activate(torch.zeros(1, 2), *none), torch.zeros(1, 1))


def test_none_and_infinity_are_one_number() -> None:
    assert packer("f")() == DEFAULTS
    assert packer("f")(up_cap=None) == packer("f")(up_cap=math.inf) != DEFAULTS
    with pytest.raises(TypeError, match=r"f\(\) got an unexpected keyword argument 'cap'"):
        packer("f")(cap=1.0)


def test_a_nan_stays_one() -> None:
    h = torch.tensor([[math.nan, 1.0, 1.0, math.nan]], dtype=F64)
    assert activate(h, *Activation.named(*SITU)).isnan().all()


@each_cap
def test_numbers_reach_the_kernel(caps: dict[str, Any], fake_gpu: FakeGpu) -> None:
    c = make_case([5, 0, 17, 10], 64, 128, tail=6)
    act = glulam.grouped_glu(c.x, c.w1, offs=c.offs, activation="situ", **caps)
    exact, same = (oracle.grouped_glu(c.x, c.w1, c.ends, form=SITU, params=caps, dtype=d)[0] for d in (F64, c.x.dtype))
    assert_close(act, exact, same, c.rows)
    (launched,) = fake_gpu.launches
    told = oracle.params_of("situ", [launched[argument.name] for argument in PARAMS])
    assert told == {"gate_cap": caps.get("gate_cap", 4.0), "up_cap": caps.get("up_cap", 25.0) or math.inf}


def test_the_module_shows_its_caps() -> None:
    module = glulam.nn.GroupedMLP(2, 8, 16, activation="situ", gate_cap=2.0, up_cap=None, dtype=F64)
    assert "activation='situ', gate_cap=2.0, up_cap=inf" in repr(module)
    x, splits = torch.randn(5, 8, dtype=F64), [2, 3]
    w1, w2 = module.fc1.weight, module.fc2.weight
    wanted = glulam.grouped_mlp(x, w1, w2, splits=splits, activation="situ", gate_cap=2.0, up_cap=None)
    assert torch.equal(module(x, splits=splits), wanted)
    with pytest.raises(TypeError, match=r"GroupedMLP\(\) got an unexpected keyword argument 'cap'"):
        glulam.nn.GroupedMLP(2, 8, 16, cap=1.0)


@pytest.mark.parametrize("layout", ["concat", "interleaved", "interleaved32"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_emulated_kernels_are_as_exact_as_torch(arch: str, layout: str) -> None:
    """Forward and backward in float32, which shows errors of tanh that 16 bits would hide; in rows of all scales."""
    caps, rows = CAPS[len(layout) % 3], 24
    h, scale = preact(rows, dtype=torch.float32), torch.linspace(0.5, 2.0, rows)
    d_act = preact(rows, 64, torch.float32).flip(0)
    with installed(arch):
        act = gate(h, scale, "situ", layout, **caps)
        made = gate_rows_backward(d_act, h, scale, "situ", layout, packer("caps")(**caps), True)
    for place, got in enumerate((act, made[0], made[1][:, None])):
        exact, same = (_expected(h, scale, d_act, layout, caps, dtype)[place] for dtype in (F64, torch.float32))
        assert got.isfinite().all() and not same_bits(got, torch.zeros_like(got))
        assert_close(got, exact, same, rows)


def _expected(
    h: Tensor, scale: Tensor, d_act: Tensor, layout: str, caps: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the activation and the gradients of h and of the row scale."""
    formula = oracle.activation if dtype == F64 else oracle.torch_activation
    leaf, s = h.to(dtype).requires_grad_(), scale.to(dtype).requires_grad_()
    act = formula(leaf, "situ", layout, caps) * s[:, None]
    d_h, d_scale = torch.autograd.grad(act, (leaf, s), d_act.to(dtype))
    return act.detach(), d_h, d_scale[:, None]
