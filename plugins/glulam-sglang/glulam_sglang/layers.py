"""Layers that run on Glulam instead of SGLang's own backends.

Whether Glulam runs a layer is decided before its weights load (`taken`); its experts are prepared after that
(`Taken.prepare`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from torch import Tensor

from glulam.activations import Activation
from glulam.formats.prepared import sample_of
from glulam.integrations.serving import NotServed, ServedExperts, served_recipe

from .methods import Method
from .reasons import check_layer, gate_of_config

VIEWS = ("bf16", "fp8_block")
"""Formats whose ServedExperts are views of the layer's tensors, so that they can be recreated at any time."""
SWIZZLED = ("w13_blockscale_swizzled", "w2_blockscale_swizzled")
"""Copies of NVFP4 scales that SGLang makes for its own kernels."""
_log = logging.getLogger(__name__)
_told: set[str] = set()


class Taken:
    """A layer that runs on Glulam: how its weights are stored, and its experts once they are prepared.

    SGLang's object of the layer's MoE method keeps this object as its attribute `glulam_taken`.

    Attributes:
        method: this plugin's `Method` (an entry of METHODS) for SGLang's class of MoE methods that the layer has.
        kind: the format of the layer's weights, which is the name of a constructor of ServedExperts.
        gate: the activation between FC1 and FC2.
        dtype: dtype of the layer's input (SGLang's `params_dtype`).
    """

    def __init__(self, method: Method, kind: str, gate: Activation, dtype: torch.dtype) -> None:
        self.method, self.kind, self.gate, self.dtype = method, kind, gate, dtype
        self._experts: ServedExperts | None = None
        self._elements: tuple[Tensor, ...] = ()
        self._sample: Tensor | None = None

    def prepare(self, layer: Any) -> None:
        """Create the layer's ServedExperts from its tensors. Called after each load of weights.

        Weights that were already prepared in place, and were not loaded again since, stay unchanged.
        """
        if getattr(layer, "inference_moe_w13_interleaved", False):
            raise NotServed("NVFP4 weights whose gates and up-projections are interleaved")
        if self._is_prepared(layer):
            return
        biases = (layer.w13_weight_bias, layer.w2_weight_bias) if layer.with_bias else (None, None)
        build: Any = getattr(ServedExperts, self.kind)
        dtype = {} if self.kind == "bf16" else {"dtype": self.dtype}
        self._experts = build(*self.method.tensors(layer), *biases, gate=self.gate, **dtype)
        self._elements = _elements_of(layer)
        self._sample = sample_of(self.method.tensors(layer))
        for name in SWIZZLED:
            if getattr(layer, name, None) is not None:
                setattr(layer, name, None)

    def _is_prepared(self, layer: Any) -> bool:
        if self._sample is None or self.kind in VIEWS or not self._are_in_place(layer):
            return False
        return torch.equal(self._sample, sample_of(self.method.tensors(layer)))

    def _are_in_place(self, layer: Any) -> bool:
        """Return True if the layer's weight elements are at the same addresses as when they were prepared."""
        return [one.data_ptr() for one in self._elements] == [one.data_ptr() for one in _elements_of(layer)]

    def experts(self, layer: Any) -> ServedExperts:
        """Return the layer's experts.

        Raises:
            RuntimeError: the engine replaced the layer's tensors after `prepare`, which changed elements in place.
        """
        if self._experts is None or not self._are_in_place(layer):
            if self._experts is not None and self.kind not in VIEWS:
                raise RuntimeError(
                    "glulam: a layer's weights were replaced after they were prepared, and not prepared anew; call its "
                    "method's process_weights_after_loading"
                )
            self.prepare(layer)
        assert self._experts is not None
        return self._experts


def _elements_of(layer: Any) -> tuple[Tensor, ...]:
    return layer.w13_weight.data, layer.w2_weight.data


def taken(method: Method, own: Any, layer: Any, config: Any) -> Taken:
    """Return the Taken object of a layer that Glulam can run.

    Args:
        method: the entry of METHODS for the layer's MoE method.
        own: the layer's MoE method. The layer's weights are allocated, but not loaded yet.
        layer: the layer.
        config: its MoeRunnerConfig.

    Raises:
        NotServed: Glulam does not run the layer; the message says why, in one line.
    """
    if type(own).__name__ != method.class_name:
        raise NotServed(f"{type(own).__name__} has its own way to hold weights")
    check_layer(own, layer, config)
    kind, gate = method.format_of(own), gate_of_config(config)
    hidden, width = layer.w2_weight.shape[1:]
    if kind.startswith(("mxfp4", "nvfp4")):
        width *= 2  # elements, two a byte
    if hidden != config.hidden_size:
        raise NotServed(f"weights are padded to {hidden} columns of {config.hidden_size}")
    served_recipe(kind, hidden, width, config.params_dtype, layer.w2_weight)
    return Taken(method, kind, gate, config.params_dtype)


def left_to(method: Method, own: Any, layer: Any, why: NotServed) -> str:
    """Log once why Glulam does not run a layer, and return the name of the SGLang backend that runs it.

    Raises:
        ValueError: no SGLang backend runs a layer with such weights.
    """
    told = f"glulam: layers of {type(own).__name__} are not served: {why}"
    # With an all-to-all, SGLang chooses the runner when it parses its arguments, so it cannot be chosen here.
    is_known = type(own).__name__ == method.class_name and get_moe_a2a_backend().is_none()
    fallback = method.fallback(own) if is_known else ""
    if not fallback:
        raise ValueError(f"{told}; choose another --moe-runner-backend, as auto ({layer.layer_name})") from why
    if told not in _told:
        _told.add(told)
        _log.warning("%s; SGLang's backend %s runs them", told, fallback)
    return fallback
