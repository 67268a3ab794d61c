"""Choose the `Path` (forward and gradients) of a grouped_mlp or moe by the call's recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..calls.checks import any_requires_grad, check_flag, check_recipe
from ..host.experts import GateUp
from ..ops.quantized_mlp import QuantizedMlpCall
from .data_path import DataPath, QuantisedPath
from .frozen import FrozenPath


def path_of(call: Any) -> DataPath:
    """Make the path (forward and gradients, see `path.Path`) of a GroupedMlpCall or QuantizedMlpCall.

    It is a `FrozenPath` for quantised weights, a `QuantisedPath` for training in MXFP8, and otherwise a `DataPath`.
    """
    check_flag(call.op, "recompute", call.recompute)
    options, common = call.function.keywords, {"recompute": call.recompute, "tokens": call.tokens}
    if not isinstance(call, QuantizedMlpCall):
        check_recipe(call.op, call.recipe)
        in_halves = isinstance(call.w1, GateUp)
        return DataPath(activation_options=options, transpose_w=call.transpose_w, in_halves=in_halves, **common)
    if call.is_frozen:
        # Inference computes FC1 and the activation in one call, which does not round h; three calls round h. If the
        # switch for batch invariance is on, recompute, so that forward has the bits of inference.
        return FrozenPath(
            activation_options=options, recipe=call.recipe, **{**common, "recompute": call.recompute or call.invariant}
        )
    weights = {"w1": call.w1, "w2": call.w2}
    is_16_bit = call.x.dtype.itemsize == 2
    wide = frozenset(name for name, w in weights.items() if is_16_bit and _dtype(w) == torch.float32)
    of_recipe = {"recipe": call.recipe, "trained": any_requires_grad(*weights.values())}
    return QuantisedPath(activation_options={**options, **of_recipe}, wide=wide, wgrad_recipe=call.recipe, **common)


def _dtype(w: Any) -> torch.dtype:
    """Return the dtype of a weight that is a tensor or a list of tensors."""
    dtype: torch.dtype = (w if isinstance(w, Tensor) else w[0]).dtype
    return dtype
