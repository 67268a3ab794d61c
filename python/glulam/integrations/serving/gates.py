"""Translation of a serving engine's activation (its name and parameters) to Glulam's activation."""

from __future__ import annotations

from typing import NamedTuple

from ...activations import Activation

PLAIN_ALPHA, PLAIN_OFFSET = 1.0, 0.0
"""Parameters alpha and offset with which clamped_swiglu is silu(a) u of the clamped gate a and up-projection u."""


class NotServed(ValueError):
    """Raised for a layer that Glulam cannot compute as the engine does. A plugin then leaves the layer to the engine.

    The message says why in one line.
    """


class Named(NamedTuple):
    """Glulam's activation for a gated activation of an engine.

    Attributes:
        activation: Glulam's name of the activation.
        takes: arguments of `gate_of` (alpha, beta, limit, linear) that this activation accepts.
    """

    activation: str
    takes: tuple[str, ...] = ()


SWIGLU = Named("swiglu", ("alpha", "beta", "limit"))
SWIGLU_OAI = Named("clamped_swiglu", ("alpha", "beta", "limit"))
GATED = {
    "silu": SWIGLU, "swiglu": SWIGLU, "swigluoai": SWIGLU_OAI, "swigluoai_uninterleave": SWIGLU_OAI,
    "gelu_tanh": Named("geglu"), "gelu_pytorch_tanh": Named("geglu"), "relu": Named("reglu"),
    "situ": Named("situ", ("beta", "linear")),
}  # fmt: skip
UNGATED = {"silu": "silu", "gelu": "gelu", "relu2": "srelu"}


def gate_of(
    name: str, *, gated: bool = True, interleaved: bool = False, alpha: float | None = None, beta: float | None = None,
    limit: float | None = None, linear: float | None = None,
) -> Activation:  # fmt: skip
    """Return Glulam's activation for an engine's activation. Its `keywords` are arguments for `glulam.moe`.

    Args:
        name: the engine's name. With a gate: "silu" (also "swiglu"), "swigluoai" (also "swigluoai_uninterleave"),
            "gelu_tanh" (also "gelu_pytorch_tanh"), "relu", "situ". Without a gate: "silu", "gelu", "relu2".
        gated: True: FC1 computes a gate and an up-projection.
        interleaved: True: FC1's rows are g0, u0, g1, u1, ... False: all gates come before all up-projections.
        alpha, beta, limit: parameters of a SwiGLU with clamped halves, a sigmoid(alpha a) (u + beta), where a is the
            gate, a <= limit, and u the up-projection, -limit <= u <= limit. "silu" with only a limit has alpha 1 and
            beta 0 (DeepSeek-V4); "silu" with alpha or beta has defaults alpha 1 and beta 1. "swigluoai" has defaults
            alpha 1.702, beta 1 and limit 7.
        beta, linear: for "situ", the caps of the gate and of the up-projection; linear None: not capped.

    Raises:
        NotServed: no activation of Glulam computes this.
    """
    numbers = {"alpha": alpha, "beta": beta, "limit": limit, "linear": linear}
    given = {key: value for key, value in numbers.items() if value is not None}
    if not gated:
        if name not in UNGATED or given:
            raise NotServed(f"activation {name!r} without a gate{_with(given)}; served are {_listed(UNGATED)}")
        return Activation.named(UNGATED[name])
    if name == "gelu":
        raise NotServed("gated activation 'gelu' is exact by erf; Glulam's geglu approximates by tanh ('gelu_tanh')")
    if name not in GATED:
        raise NotServed(f"gated activation {name!r}; served are {_listed(GATED)}")
    found = GATED[name]
    if unknown := {key: value for key, value in given.items() if key not in found.takes}:
        raise NotServed(f"gated activation {name!r}{_with(unknown)}; it takes {_listed(found.takes) or 'no numbers'}")
    layout = "interleaved" if interleaved else "concat"
    if found.activation == "situ":
        if beta is None:
            raise NotServed("activation 'situ' without beta, the cap of its gate")
        return Activation.named("situ", layout, gate_cap=beta, up_cap=linear)
    if found is SWIGLU_OAI:
        return Activation.named("clamped_swiglu", layout, **_clamps(given))
    if not given or found is not SWIGLU:
        return Activation.named(found.activation, layout)
    if limit is None:
        raise NotServed(f"gated activation {name!r}{_with(given)} but without a limit")
    if alpha is None and beta is None:
        return Activation.named("clamped_swiglu", layout, limit=limit, alpha=PLAIN_ALPHA, offset=PLAIN_OFFSET)
    return Activation.named("clamped_swiglu", layout, **_clamps({"alpha": PLAIN_ALPHA, **given}))


def _clamps(given: dict[str, float]) -> dict[str, float]:
    """Convert an engine's parameters to keywords of clamped_swiglu.

    Missing parameters keep Glulam's defaults: limit 7, alpha 1.702, offset 1.
    """
    names = {"alpha": "alpha", "beta": "offset", "limit": "limit"}
    return {names[key]: value for key, value in given.items()}


def _with(numbers: dict[str, float]) -> str:
    return f" with {', '.join(f'{key} {value}' for key, value in numbers.items())}" if numbers else ""


def _listed(names: object) -> str:
    return ", ".join(names)  # type: ignore[arg-type]
