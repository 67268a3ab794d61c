"""Loading of gpt-oss checkpoints in transformers with MXFP4 weights as shipped, never dequantised.

transformers' own quantizer for the method "mxfp4" makes 16-bit weights, or tensors for another package's kernels. The
quantizer in this file works in two steps. Before loading, it gives experts modules parameters with the checkpoint's
names and shapes. After loading, it replaces these parameters, one weight after another, by buffers in the order that
kernels read. So loading takes the memory of one more weight. Nothing is written in place, since transformers may share
the tensors of a state dict that the caller holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer

from ..formats.mxfp4 import MXFP4Tensor
from ..formats.mxfp4.tensor import BLOCK_BYTES
from ..formats.scaled import BLOCK, Parts
from ..formats.words import words_of
from ..nn.quantized_linear import SCALE_DTYPES, refusal
from ..recipes import MXFP4_WEIGHT_ONLY
from .experts import NAME, SCALE, is_experts, keep, weight_names

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes for the names of a weight's elements and scales in a checkpoint."""
DTYPES = {BLOCKS: (torch.uint8,), SCALES: SCALE_DTYPES}
DTYPE_PLAN = "_get_dtype_plan"
"""Name of a method of transformers' models. It returns {name pattern: dtype to which loaded tensors are converted}."""


_replaced: Any = None
"""The quantizer that was registered before this file's: transformers' own, or another package's."""


def use(as_shipped: bool) -> None:
    """Choose the quantizer by which transformers loads MXFP4 checkpoints.

    Args:
        as_shipped: True: this file's quantizer. False: the quantizer that was registered before.
    """
    global _replaced
    found = AUTO_QUANTIZER_MAPPING[METHOD]
    if as_shipped and found is not _quantizer:
        AUTO_QUANTIZER_MAPPING[METHOD], _replaced = _quantizer, found
    elif not as_shipped and found is _quantizer:  # a quantizer registered since then stays
        AUTO_QUANTIZER_MAPPING[METHOD] = _replaced


def _quantizer(config: Any, **options: Any) -> HfQuantizer:
    """Make this file's quantizer, or the quantizer that was registered before it.

    The latter is made if 16-bit weights are requested, or if the checkpoint itself has 16-bit weights.
    """
    is_others = config.dequantize or not options.get("pre_quantized", True)
    made: HfQuantizer = (_replaced if is_others else AsShipped)(config, **options)
    return made


class AsShipped(HfQuantizer):
    """A quantizer of transformers that keeps MXFP4 blocks and scales as shipped."""

    is_trainable = False

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        model.set_experts_implementation(NAME)  # no other implementation reads these buffers
        for _name, experts in _experts_of(model):
            experts._is_hf_initialized = True  # or transformers would initialise the deleted weights
            for name in weight_names(experts):
                weight = getattr(experts, name)
                count, rows, columns = (weight.mT if experts.is_transposed else weight).shape
                if columns % BLOCK:
                    raise ValueError(f"glulam: {type(experts).__name__}.{name} has {columns} columns, no {BLOCK}s")
                delattr(experts, name)
                for part, shape in ((BLOCKS, (columns // BLOCK, BLOCK_BYTES)), (SCALES, (columns // BLOCK,))):
                    data = torch.empty(count, rows, *shape, dtype=torch.uint8, device=weight.device)
                    experts.register_parameter(name + part, Parameter(data, requires_grad=False))
        plan, kept = getattr(model, DTYPE_PLAN), dict.fromkeys((rf"{part}$" for part in DTYPES), None)
        setattr(model, DTYPE_PLAN, lambda dtype: plan(dtype) | kept)  # or scale values are cast to uint8

    def _process_model_after_weight_loading(self, model: Module, **_: Any) -> Module:
        delattr(model, DTYPE_PLAN)
        _check_parts(model)
        for _name, experts in _experts_of(model):
            for name in weight_names(experts):
                blocks, scales = (getattr(experts, name + part).detach() for part in (BLOCKS, SCALES))
                for part in (BLOCKS, SCALES):
                    delattr(experts, name + part)
                w = MXFP4Tensor.from_blocks(blocks, scales)
                keep(experts, name, Parts(words_of(w.data), w.scale), MXFP4_WEIGHT_ONLY)
        return model

    def get_state_dict_and_metadata(self, model: Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return (the model's state dict with the checkpoint's names and layout, no metadata)."""
        state = model.state_dict()
        for path, experts in _experts_of(model):
            for name in weight_names(experts):
                key = f"{path}.{name}"
                stored = MXFP4Tensor(state.pop(key), state.pop(key + SCALE)).tensors()
                state[key + BLOCKS] = stored["data"].unflatten(-1, (-1, BLOCK_BYTES))
                state[key + SCALES] = stored["scale"]
        return state, {}


def _check_parts(model: Module) -> None:
    """Raise ValueError if blocks or scales of a weight were not loaded, TypeError if they have a wrong dtype."""
    missing, wrong = [], []
    for path, experts in _experts_of(model):
        for name in weight_names(experts):
            for part, dtypes in DTYPES.items():
                key, value = f"{path}.{name}{part}", getattr(experts, name + part)
                if message := refusal(key, value, dtypes):
                    wrong.append(message)
                elif not (value.is_meta or getattr(value, "_is_hf_initialized", False)):
                    missing.append(key)
    if missing:
        raise ValueError(f"glulam: the checkpoint has no {', '.join(missing)} of the model's shape")
    if wrong:
        raise TypeError(f"glulam: {'; '.join(wrong)}")


def _experts_of(model: Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) for each experts module of a model."""
    return ((name, module) for name, module in list(model.named_modules()) if is_experts(module))
