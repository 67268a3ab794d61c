"""Support of transformers' FP8Experts, the modules into which FP8 checkpoints load: recipes, and access to weights.

A module keeps its parameters: E4M3 elements, which kernels read in place, and scales `*_scale_inv`. If kernels need the
scales in another dtype or shape, the first forward converts the scales, and stores them as buffers that are not in
state dicts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats.form import Form
from ..formats.fp8_block.form import FP8_BLOCK
from ..formats.mxfp8.forms import BLOCKS
from ..formats.mxfp8.layout import DATA_DTYPE
from ..formats.mxfp8.square_blocks import mxfp8_of_square_blocks
from ..formats.scaled import SCALE_DTYPE, Parts, scales_of
from ..recipes import FP8_BLOCK_WEIGHT_ONLY, FP8_BLOCKS, MXFP8_WEIGHT_ONLY, Recipe, has_kernels
from .experts import SCALE, parameter, weight_names

SCALE_INV = "_scale_inv"
"""FP8Experts' suffix for the name of a weight's scales. Despite "inv", a value is an element times its scale."""
FORMS: dict[torch.dtype, Form] = {torch.float32: FP8_BLOCK, SCALE_DTYPE: BLOCKS, torch.uint8: BLOCKS}
"""{dtype of the scales that kernels read: `Form` (format and layout) of the weight}."""


def _widened(data: Tensor, scale: Tensor) -> Tensor:
    """Convert E8M0 scales to float32. `data` is not used."""
    return scales_of(scale.view(torch.uint8))


def _of_rows(data: Tensor, scale: Tensor) -> Tensor:
    """Convert scales of 32 x 32 blocks to one scale for each 32 elements of a weight row.

    The result is bytes, since Python's pickle cannot restore 8-bit floats.
    """
    return mxfp8_of_square_blocks(data, scale).scale.view(torch.uint8)


class Served(NamedTuple):
    """The recipes for one kind of FP8 weights.

    Attributes:
        recipe: the recipe on GPUs that have kernels for it, and on the CPU.
        weight_only: the recipe on other GPUs, and where gradients of rows are needed.
        make_scales: function (elements, scales) that returns the scales that kernels read; None: kernels read the
            module's scales.
    """

    recipe: Recipe
    weight_only: Recipe
    make_scales: Callable[[Tensor, Tensor], Tensor] | None = None


SERVED = {
    ((128, 128), torch.float32): Served(FP8_BLOCKS, FP8_BLOCK_WEIGHT_ONLY),
    ((128, 128), SCALE_DTYPE): Served(FP8_BLOCKS, FP8_BLOCK_WEIGHT_ONLY, _widened),
    ((32, 32), SCALE_DTYPE): Served(MXFP8_WEIGHT_ONLY, MXFP8_WEIGHT_ONLY, _of_rows),
    ((1, 32), SCALE_DTYPE): Served(MXFP8_WEIGHT_ONLY, MXFP8_WEIGHT_ONLY),
}
"""{(a module's block size, the dtype of its scales): recipes}, for all kinds of FP8 weights that are supported."""


class Fp8(NamedTuple):
    """Description of an FP8Experts module's weights when its plan (`transformers.Plan`: constants of calls) was made.

    It serves to find the recipes, and to notice later changes.

    Attributes:
        device, dtype: device and dtype of the weights.
        block, scale_dtype: block size, and dtype of scales; together the module's key in SERVED.
    """

    device: torch.device
    dtype: torch.dtype
    block: tuple[int, int]
    scale_dtype: torch.dtype

    @property
    def served(self) -> Served:
        return SERVED[self.block, self.scale_dtype]

    def is_of(self, experts: Any) -> bool:
        """Return True if the module's weights still have this device and dtype."""
        weight = parameter(experts, "down_proj")
        return (weight.device, weight.dtype) == (self.device, self.dtype)


def is_fp8(experts: Any) -> bool:
    """Return True if a module is an FP8Experts."""
    return hasattr(experts, "down_proj" + SCALE_INV)


def fp8_of(experts: Any, is_in_halves: bool) -> Fp8:
    """Check an FP8Experts module's weights, and return their description.

    Args:
        experts: the module.
        is_in_halves: True: FC1's rows are the gate's half followed by the up-projection's half.

    Raises:
        NotImplementedError: kernels do not read these weights or scales; the message names them.
    """
    kind = type(experts).__name__
    if experts.activation_scheme != "dynamic":
        _refuse(
            f"{kind} has activation_scheme {experts.activation_scheme!r}, and recipes here scale rows by their own "
            "maxima, 'dynamic'"
        )
    for name in weight_names(experts):
        if (dtype := getattr(experts, name).dtype) != DATA_DTYPE:
            what = "two FP4 elements a byte (expert_dtype 'fp4')" if dtype == torch.int8 else "no FP8"
            _refuse(f"{kind}.{name} is {dtype}, {what}; served is {DATA_DTYPE}")
    fc1, fc2 = weight_names(experts)
    block: Any = None if experts.block_size is None else tuple(experts.block_size)
    dtypes = {name: getattr(experts, name + SCALE_INV).dtype for name in (fc1, fc2)}
    if (block, dtypes[fc2]) not in SERVED or dtypes[fc1] != dtypes[fc2]:
        known = ", ".join(f"{block} with {dtype}" for block, dtype in SERVED)
        _refuse(f"{kind} has block_size {block} with scales {dtypes[fc1]} and {dtypes[fc2]}; served are {known}")
    weight, width = getattr(experts, fc1), getattr(experts, fc2).shape[2]
    if is_in_halves and width % block[0]:
        _refuse(
            f"{kind}.{fc1 + SCALE_INV}: halves of {width} rows end inside a block of {block[0]}, where transformers "
            "loads a grid of scales for each half but multiplies by one grid over both; glulam.load_experts and "
            "glulam.nn.MoE read such a checkpoint"
        )
    return Fp8(weight.device, weight.dtype, block, dtypes[fc2])


def _refuse(what: str) -> None:
    """Raise NotImplementedError with the cause `what`, and a remedy."""
    raise NotImplementedError(f"glulam: {what}; choose another experts_implementation for this model, as 'grouped_mm'")


def recipe_of(experts: Any, fp8: Fp8) -> Recipe:
    """Return the recipe for a module's weights on their device."""
    served = fp8.served
    return served.recipe if has_kernels(served.recipe, experts.down_proj) else served.weight_only


def has_scales(experts: Any) -> bool:
    """Return True if the module has scales that `keep_scales` converted. Loading a state dict drops them."""
    return weight_names(experts)[-1] + SCALE in experts._buffers


def keep_scales(experts: Any, fp8: Fp8) -> None:
    """Convert the module's scales to the scales that kernels read, and store them as buffers.

    The buffers are dropped when a state dict is loaded.
    """
    make = fp8.served.make_scales
    assert make is not None
    if not hasattr(experts, "glulam_makes_scales"):
        experts.register_load_state_dict_pre_hook(_forget_scales)
        experts.glulam_makes_scales = True
    with torch.no_grad():
        for name in weight_names(experts):
            scale = make(getattr(experts, name).detach(), getattr(experts, name + SCALE_INV).detach())
            experts.register_buffer(name + SCALE, scale, persistent=False)


def _forget_scales(experts: Any, *_: Any) -> None:
    for name in weight_names(experts):
        if name + SCALE in experts._buffers:
            delattr(experts, name + SCALE)


def weight(experts: Any, name: str) -> Any:
    """Return a weight as a quantised tensor for `glulam.moe`, without a copy. `name`: the module's attribute."""
    scale = experts._buffers.get(name + SCALE)
    if scale is None:
        scale = parameter(experts, name + SCALE_INV).detach()
    return FORMS[scale.dtype].tensor_of(Parts(parameter(experts, name).detach(), scale))
