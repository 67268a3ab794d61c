"""Hooks on SGLang's functions.

SGLang calls a hook in place of the hooked function. The hook gets the original function, then the call's arguments. If
the engine was started with another backend, a hook only calls the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunner
from sglang.srt.layers.moe.utils import get_moe_runner_backend

from glulam.formats.scaled import BLOCK as MXFP4_BLOCK
from glulam.integrations.serving import NotServed

from .layers import Taken, left_to, taken
from .methods import FP8, METHODS, MXFP4, NVFP4, QUANTIZATION, Method
from .runner import GlulamQuantInfo, is_chosen, running_as

Hook = Callable[..., Any]
MIN_CAPABILITY = 80
"""The lowest compute capability (times ten) for which Glulam has kernels, and for which SGLang has FP8 kernels."""
HAS_MXFP8_LINEAR = 100
"""The lowest compute capability (times ten) for which SGLang has kernels for linear layers in MXFP8.

On older GPUs SGLang converts these layers.
"""


def create_moe_runner(method: Method) -> Hook:
    """Return a hook on `create_moe_runner` that decides which backend runs the layer: Glulam or one of SGLang's own."""

    def hook(original: Hook, self: Any, layer: Any, moe_runner_config: Any) -> None:
        if not is_chosen():
            return original(self, layer, moe_runner_config)
        try:
            self.glulam_taken = taken(method, self, layer, moe_runner_config)
        except NotServed as why:
            self.glulam_left_to = left_to(method, self, layer, why)
            with running_as(self.glulam_left_to):
                return original(self, layer, moe_runner_config)
        self.moe_runner_config = moe_runner_config
        self._moe_runner_backend = get_moe_runner_backend()
        self.runner = MoeRunner(self._moe_runner_backend, moe_runner_config)

    return hook


def process_weights_after_loading(original: Hook, self: Any, layer: Any) -> None:
    """Prepare a layer's experts from its loaded tensors, or call the original if the engine runs the layer."""
    if (mine := _taken(self)) is not None:
        mine.prepare(layer)
    else:
        _as_left(original, self, layer)


def apply(original: Hook, self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Run a layer by Glulam, or call the original if the engine runs the layer."""
    if (mine := _taken(self)) is None:
        return _as_left(original, self, layer, dispatch_output)
    return self.runner.run(dispatch_output, GlulamQuantInfo(mine.experts(layer)))


def _taken(method: Any) -> Taken | None:
    found: Taken | None = getattr(method, "glulam_taken", None)
    return found


def _as_left(original: Hook, self: Any, *arguments: Any) -> Any:
    """Call the original function of a layer that Glulam does not run.

    During the call, --moe-runner-backend reads as the backend that runs this layer instead.
    """
    backend = getattr(self, "glulam_left_to", None)
    if backend is None:
        return original(self, *arguments)
    with running_as(backend):
        return original(self, *arguments)


def make_nvfp4_method(original: Hook, self: Any, *arguments: Any, **named: Any) -> None:
    """Construct the NVFP4 method under the backend name "marlin".

    Before Blackwell, SGLang refuses NVFP4 under other names.
    """
    if not is_chosen():
        return original(self, *arguments, **named)
    with running_as("marlin"):
        return original(self, *arguments, **named)


def create_fp8_weights(original: Hook, self: Any, *arguments: Any, **named: Any) -> None:
    """Create weights so that DeepSeek-V4's MXFP4 scales are kept in E8M0.

    SGLang's own choice, float32, takes four times the memory.
    """
    if is_chosen() and self.is_fp4_expert:
        named.setdefault("fp4_scale_dtype", torch.float8_e8m0fnu)
    return original(self, *arguments, **named)


def create_mxfp4_weights(original: Hook, self: Any, *arguments: Any, **named: Any) -> None:
    """Create MXFP4 weights whose I on each rank is rounded up to a multiple of 32 (one block), padded with zeros.

    SGLang splits gpt-oss' weights over ranks in whole blocks, but pads I only for its own kernels.
    """
    if is_chosen() and (width := named.get("intermediate_size_per_partition", 0)) % MXFP4_BLOCK:
        named["intermediate_size_per_partition"] = width + -width % MXFP4_BLOCK
    return original(self, *arguments, **named)


def make_fp8_config(original: Hook, self: Any, *arguments: Any, **named: Any) -> None:
    """Make SGLang convert MXFP8 linear layers to FP8 blocks on GPUs for which it has no MXFP8 kernels."""
    original(self, *arguments, **named)
    if is_chosen() and self.use_mxfp8 and self.convert_mxfp8_to_block_fp8 is None and not _has_mxfp8_linear():
        self.convert_mxfp8_to_block_fp8 = True


def get_min_capability(original: Hook, self: Any) -> int:
    """Return the lowest compute capability on which SGLang accepts an FP8 checkpoint.

    For MXFP8 it is at most MIN_CAPABILITY, since Glulam has kernels from there on.
    """
    least: int = original(self)
    return min(least, MIN_CAPABILITY) if is_chosen() and self.use_mxfp8 else least


def _has_mxfp8_linear() -> bool:
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor >= HAS_MXFP8_LINEAR


HOOKS: dict[str, tuple[Hook, tuple[str, ...]]] = {
    f"{FP8.path}.create_weights": (create_fp8_weights, ()),
    f"{MXFP4.path}.create_weights": (create_mxfp4_weights, ("layer", "intermediate_size_per_partition")),
    f"{NVFP4.path}.__init__": (make_nvfp4_method, ()),
    f"{QUANTIZATION}.fp8.Fp8Config.__init__": (make_fp8_config, ()),
    f"{QUANTIZATION}.fp8.Fp8Config.get_min_capability": (get_min_capability, ()),
}
"""The hooks, by the import path of the hooked SGLang function.

Each value is (the hook, the names of the parameters, except self, that the SGLang function must have).
"""
for _method in METHODS:
    HOOKS |= {
        f"{_method.path}.create_moe_runner": (create_moe_runner(_method), ("layer", "moe_runner_config")),
        f"{_method.path}.process_weights_after_loading": (process_weights_after_loading, ("layer",)),
        f"{_method.path}.apply": (apply, ("layer", "dispatch_output")),
    }
