"""transformers' mixture-of-experts models on Glulam: `experts_implementation="glulam"`.

    import glulam.integrations.transformers
    glulam.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, experts_implementation="glulam")

An experts module of transformers keeps its parameters, and gets a forward that is one call of `glulam.moe`: nothing is
copied or permuted. What its gate computes is looked at, not its name (`gates.py`).
"""

from __future__ import annotations

import importlib.metadata
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..layer import Routing, combine, moe, permute
from ..ops.grouped_mlp import grouped_mlp
from .gates import Form, activation_of, gate_of

NAME = "glulam"
KNOWN_VERSIONS = ("5.17", "5.23")
"""Minor versions that this was tested with."""

_forms: WeakKeyDictionary[torch.nn.Module, Form] = WeakKeyDictionary()


def register() -> None:
    """Let transformers' models have `experts_implementation="glulam"`: in `from_pretrained`, in `from_config` and in
    `set_experts_implementation`. Experts are of 16 bits on a GPU, of 16 bits or float32 on a CPU.

    Raises:
        ImportError: transformers is not installed, or has no interface for experts, as before version 5.
    """
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise ImportError(f"glulam.integrations.transformers needs transformers 5: {error}") from error
    version = importlib.metadata.version("transformers")
    if ".".join(version.split(".")[:2]) not in KNOWN_VERSIONS:
        known = ", ".join(KNOWN_VERSIONS)
        warnings.warn(f"transformers {version} was not tested with Glulam; {known} were", RuntimeWarning, stacklevel=2)
    ExpertsInterface.register(NAME, experts_forward)


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module of transformers.

    Args:
        experts: with `gate_up_proj` [E, 2I, H] or `up_proj` [E, I, H] and `down_proj` [E, H, I], transposed or not, and
            their biases `*_bias` where it has them.
        hidden_states: [N, H]. top_k_index: [N, K]; ids from E on, of other ranks' experts, have no part. top_k_weights:
            [N, K].

    Returns:
        [N, H], in hidden_states' dtype.

    Raises:
        NotImplementedError: the module's gate or activation is none that Glulam has; the message names its class.
        ValueError, TypeError: as of `glulam.moe`.
    """
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    names = {"w1": first, "w2": "down_proj"}
    if experts.has_bias:
        names |= {"b1": f"{first}_bias", "b2": "down_proj_bias"}
    given: dict[str, Any] = {name: getattr(experts, attribute) for name, attribute in names.items()}
    form = form_of(experts)
    params = form.params
    options: dict[str, Any] = {
        "activation": form.activation, "glu_layout": form.glu_layout, "limit": params.limit, "alpha": params.alpha,
        "offset": params.offset, "transpose_w": experts.is_transposed,
    }  # fmt: skip
    routing = Routing.from_topk(top_k_index.contiguous(), top_k_weights.contiguous(), len(given["w1"]))
    x = hidden_states.to(given["w1"].dtype).contiguous()
    if getattr(experts, "has_post_expert_norm", False):
        rows = grouped_mlp(permute(x, routing), offs=routing.offs, **given, **options)
        rows = experts.post_expert_norm(rows) * routing.weight_of_row[:, None].to(rows.dtype)
        return combine(rows, routing).to(hidden_states.dtype)
    return moe(x, routing, **given, **options).to(hidden_states.dtype)


@torch.compiler.assume_constant_result
def form_of(experts: Any) -> Form:
    """The activation that a module's experts have, found once for each module. Raises as `experts_forward`."""
    form = _forms.get(experts)
    if form is None:
        device = experts.down_proj.device
        with torch.no_grad():
            form = gate_of(experts._apply_gate, device) if experts.has_gate else activation_of(experts.act_fn, device)
        if form is None:
            what = "_apply_gate" if experts.has_gate else "act_fn"
            raise NotImplementedError(
                f"glulam: {type(experts).__name__}.{what} is no activation that Glulam has; choose another "
                "experts_implementation for this model, as 'grouped_mm'"
            )
        _forms[experts] = form
    return form
