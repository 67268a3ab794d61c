"""ServedExperts: a layer's experts, made from a serving engine's tensors and computed by `glulam.moe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...activations import Activation
from ...layer.choices import moe_of_choices
from ...recipes import Recipe
from . import weights as of
from .gates import NotServed
from .weights import Checkpoint, Weights


@dataclass(frozen=True)
class ServedExperts:
    """A layer's E experts, ready for `glulam.moe`: weights and biases, the activation, and the recipe.

    There is a constructor for each format of weights. Constructors take an engine's tensors after loading: w13 [E, 2I,
    H] ([E, I, H] without a gate), w2 [E, H, I], their scales, and biases b13 [E, 2I] and b2 [E, H], or None. `gate` is
    the activation between FC1 and FC2, a result of `gate_of`. `dtype` is the dtype of x's rows, to which biases are
    cast once. Weights stay in the engine's memory; `weights.py` says which formats are changed in place.

    Raises:
        NotServed: kernels do not read weights of this dtype or width.
        ValueError, TypeError: the tensors do not fit each other.
    """

    w1: Any
    w2: Any
    b1: Tensor | None
    b2: Tensor | None
    gate: Activation
    recipe: Recipe

    @classmethod
    def bf16(
        cls, w13: Tensor, w2: Tensor, b13: Tensor | None = None, b2: Tensor | None = None, *, gate: Activation
    ) -> ServedExperts:
        """Return experts with weights in bfloat16 or float16."""
        return cls._of(of.in_16_bits(w13, w2), b13, b2, gate, w2.dtype)

    @classmethod
    def fp8_block(
        cls, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, b13: Tensor | None = None,
        b2: Tensor | None = None, *, gate: Activation, dtype: torch.dtype = torch.bfloat16,
    ) -> ServedExperts:  # fmt: skip
        """Return experts with E4M3 weights and one scale for each block of 128 x 128.

        w13_scale is [E, 2 ceil(I / 128), ceil(H / 128)], the gate's blocks before the up-projection's. If the GPU has
        FP8 MMAs, rows of x are quantised to FP8; else kernels decode the weights to 16 bits.
        """
        return cls._of(of.fp8_blocks(Checkpoint(w13, w13_scale, w2, w2_scale), gate, dtype), b13, b2, gate, dtype)

    @classmethod
    def mxfp8(
        cls, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, b13: Tensor | None = None,
        b2: Tensor | None = None, *, gate: Activation, dtype: torch.dtype = torch.bfloat16,
    ) -> ServedExperts:  # fmt: skip
        """Return experts with E4M3 weights and an E8M0 scale (uint8 or float8_e8m0fnu) for each 32 elements of a row.

        `weights.mxfp8` says when the engine's elements are changed in place.
        """
        return cls._of(of.mxfp8(Checkpoint(w13, w13_scale, w2, w2_scale), dtype), b13, b2, gate, dtype)

    @classmethod
    def mxfp4(
        cls, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, b13: Tensor | None = None,
        b2: Tensor | None = None, *, gate: Activation, dtype: torch.dtype = torch.bfloat16,
    ) -> ServedExperts:  # fmt: skip
        """Return experts with E2M1 weights, two in a byte (uint8 or int8), and a scale for each 32 elements of a row.

        gpt-oss and DeepSeek-V4 ship such weights. Kernels decode them to 16 bits; the elements are reordered in place.
        """
        return cls._of(of.mxfp4(Checkpoint(w13, w13_scale, w2, w2_scale), dtype, "mxfp4"), b13, b2, gate, dtype)

    @classmethod
    def mxfp4_fp8(
        cls, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, b13: Tensor | None = None,
        b2: Tensor | None = None, *, gate: Activation, dtype: torch.dtype = torch.bfloat16,
    ) -> ServedExperts:  # fmt: skip
        """Return experts from the same tensors as `mxfp4`, for kernels that quantise rows of x to FP8.

        Rows stay in 16 bits if the GPU has no such kernels, or if the scales of a weight row are too far apart.
        """
        return cls._of(of.mxfp4(Checkpoint(w13, w13_scale, w2, w2_scale), dtype, "mxfp4_fp8"), b13, b2, gate, dtype)

    @classmethod
    def nvfp4(
        cls, w13: Tensor, w13_scale: Tensor, w13_scale_2: Tensor, w2: Tensor, w2_scale: Tensor, w2_scale_2: Tensor,
        b13: Tensor | None = None, b2: Tensor | None = None, *, gate: Activation,
        dtype: torch.dtype = torch.bfloat16,
    ) -> ServedExperts:  # fmt: skip
        """Return experts with NVFP4 weights as modelopt stores them.

        Elements are E2M1, two in a byte; scales are E4M3, one for each 16 elements of a row; `*_scale_2` are the global
        scales. The elements are reordered in place.
        """
        made = of.nvfp4(Checkpoint(w13, w13_scale, w2, w2_scale), w13_scale_2, w2_scale_2, gate, dtype)
        return cls._of(made, b13, b2, gate, dtype)

    @classmethod
    def _of(
        cls, made: Weights, b13: Tensor | None, b2: Tensor | None, gate: Activation, dtype: torch.dtype
    ) -> ServedExperts:
        b1, b2 = (None if bias is None else bias.detach().to(dtype).contiguous() for bias in (b13, b2))
        return cls(made.w1, made.w2, b1, b2, gate, made.recipe)

    @property
    def num_experts(self) -> int:
        count: int = self.w2.shape[0]
        return count

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, *, expert_map: Tensor | None = None, scale: float = 1.0,
        weights_on_rows: bool = False, world_experts: int | None = None, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute the layer: return the weighted sum of each token's experts, [N, H].

        The host reads nothing from the device, so CUDA graphs can capture the call.

        Args:
            x: tokens [N, H].
            ids: int32 or int64 [N, K], the chosen experts, numbered on this rank; if `expert_map` is given, numbered
                over all ranks. -1: no expert.
            weights: [N, K], the router's weights.
            expert_map: int32 [number of experts on all ranks]: for each expert its number on this rank, or -1. None:
                ids are numbers on this rank.
            scale: factor by which the weights are multiplied, in float32.
            weights_on_rows: True: multiply tokens by their weights before FC1; K must be 1. False: multiply results
                after FC2.
            world_experts: number of experts on all ranks among which tokens choose, by which kernels are chosen; see
                `Routing.from_topk`.
            out: buffer for the result [N, H]; None: a new one.

        Raises:
            NotServed: weights_on_rows with K above 1.
            ValueError, TypeError: raised by `glulam.moe`.
        """
        if weights_on_rows:
            if weights.shape[1] != 1:
                raise NotServed(f"router weights on rows with {weights.shape[1]} experts a token; served is 1")
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        if scale != 1.0:
            weights = weights.float() * scale
        return moe_of_choices(
            x.contiguous(), ids.contiguous(), weights.contiguous(), self.num_experts, self.w1, self.w2,
            expert_map=expert_map, world_experts=world_experts, b1=self.b1, b2=self.b2, recipe=self.recipe, out=out,
            **self.gate.keywords,
        )  # fmt: skip
