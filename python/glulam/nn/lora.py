"""Adapters (LoRA) of a GroupedMLP: the submodule with their parameters, and merging adapters into experts' weights."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from ..calls.checks import check_flag, check_number, mismatch
from ..expert_lora import ExpertLora
from ..lora.mlp import recipe_with_lora
from .options import check_options, held
from .quantized_linear import QuantizedLinear

NAME = "add_lora"
LAYERS = {"fc1": ("a1", "b1"), "fc2": ("a2", "b2")}
"""For each layer that adapters can adapt: the names of the adapter's matrices a [E, r, columns] and b [E, rows, r]."""


class Lora(nn.Module):
    """The matrices of a `glulam.ExpertLora` as parameters: `a1`, `b1` adapt fc1, and `a2`, `b2` adapt fc2.

    Shapes are a [E, r, columns] and b [E, rows, r]. If a layer has no adapter, both its matrices are None.

    Args:
        num_experts, r: E, and the rank of both layers' adapters.
        scale: factor of the products b a that are added to the weights; see `glulam.ExpertLora`.
        sizes: for each adapted layer, "fc1" or "fc2": (columns, rows) of an expert's weight.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
        self, num_experts: int, r: int, scale: float, sizes: dict[str, tuple[int, int]],
        device: torch.device | str | int | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_options(Lora, locals())
        self.r, self.scale = r, scale
        self._before: dict[str, Any] | None = None
        self.is_merged = False
        for layer, (a, b) in LAYERS.items():
            shapes = {}
            if layer in sizes:
                columns, rows = sizes[layer]
                shapes = {a: (num_experts, r, columns), b: (num_experts, rows, r)}
            for name in (a, b):
                made = torch.empty(shapes[name], device=device, dtype=dtype) if shapes else None
                self.register_parameter(name, None if made is None else Parameter(made))
        self.register_state_dict_pre_hook(_refuse_to_save)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_refuse_to_load)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise like PEFT: a1 and a2 uniform within +-1 / sqrt(columns), b1 and b2 0, so results do not change."""
        for a, b in LAYERS.values():
            if (matrix := self._matrix(a)) is not None:
                nn.init.kaiming_uniform_(matrix.view(-1, matrix.shape[2]), a=math.sqrt(5))
                nn.init.zeros_(self._matrix(b))

    def adapter(self) -> ExpertLora:
        """Return the parameters as an ExpertLora, for operators' argument `lora`, or for `ExpertLora.to_peft`."""
        a1, b1, a2, b2 = map(self._matrix, ("a1", "b1", "a2", "b2"))
        return ExpertLora(a1, b1, a2, b2, self.scale)

    def _matrix(self, name: str) -> Any:
        """Return a matrix; None: its layer has no adapter."""
        return held(self, self._parameters, name)

    @torch.no_grad()
    def copy_(self, adapter: ExpertLora) -> Lora:
        """Copy the matrices and the scale of `adapter` (for example of `ExpertLora.from_peft`) into this module.

        Returns:
            This module.

        Raises:
            ValueError: the adapter has other matrices than this module, or matrices of other shapes.
            RuntimeError: a matrix of this module is no parameter, but computed by a parametrization.
        """
        refuse_computed("Lora.copy_", "lora", self, [name for pair in LAYERS.values() for name in pair])
        own, given = self.adapter().given(), adapter.given()
        if own.keys() != given.keys():
            raise ValueError(f"Lora.copy_: adapter has {', '.join(given)}; give {', '.join(own)}")
        for name, parameter in own.items():
            if given[name].shape != parameter.shape:
                mismatch("Lora.copy_", f"adapter.{name}", given[name].shape, parameter.shape, "the parameter has it")
        for name, parameter in own.items():
            parameter.copy_(given[name])
        self.scale = adapter.scale
        return self

    @torch.no_grad()
    def merge_into(self, layers: dict[str, Any], keep: bool) -> None:
        """Set each adapted weight to weight + scale b a, computed in float32 or more and rounded once.

        Args:
            layers: the layers, by the names "fc1" and "fc2".
            keep: True: store copies of the previous weights, for `take_out_of`.
        """
        adapted = {name: pair for name, pair in LAYERS.items() if self._matrix(pair[0]) is not None}
        for name in adapted:
            refuse_computed("merge_lora", name, layers[name], layers[name].labels("weight"))
        weights = {name: layers[name].parameter_list("weight") for name in adapted}
        copies = (
            {name: [weight.detach().clone() for weight in each] for name, each in weights.items()} if keep else None
        )
        for name, (a, b) in adapted.items():
            matrices = self._matrix(a), self._matrix(b)
            for weight, narrow, wide in zip(layers[name].experts("weight"), *matrices, strict=True):
                exact = torch.promote_types(weight.dtype, torch.float32)
                weight.copy_(torch.addmm(weight.to(exact), wide.to(exact), narrow.to(exact), alpha=self.scale))
        self._before, self.is_merged = copies or None, True

    @torch.no_grad()
    def take_out_of(self, layers: dict[str, Any]) -> None:
        """Restore the layers' weights from before `merge_into`. Raises RuntimeError if no copies were stored."""
        if self._before is None:
            raise RuntimeError("unmerge_lora: merge_lora was called with keep=False, so the weights before are lost")
        for name in self._before:
            refuse_computed("unmerge_lora", name, layers[name], layers[name].labels("weight"))
        for name, before in self._before.items():
            for weight, kept in zip(layers[name].parameter_list("weight"), before, strict=True):
                weight.copy_(kept)
        self._before, self.is_merged = None, False

    def extra_repr(self) -> str:
        layers = [layer for layer, (a, _) in LAYERS.items() if self._matrix(a) is not None]
        merged = ", merged" if self.is_merged else ""
        return f"r={self.r}, scale={self.scale}, layers={layers}{merged}"


def refuse_computed(op: str, where: str, module: nn.Module, names: Collection[str]) -> None:
    """Raise RuntimeError if a tensor is computed from others, so that what is written to it would be lost.

    Args:
        op, where: the caller, and the module's name, for the error.
        module: the module that has the tensors.
        names: the tensors' names.
    """
    for name in names:
        if name not in module._parameters:
            raise RuntimeError(
                f"{op}: {where}.{name} is no parameter but computed from others, so {op} cannot change it; first call "
                "torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.prune.remove, or for FSDP1 enter "
                "FullyShardedDataParallel.summon_full_params"
            )


class TakesLora(nn.Module):
    """Base of GroupedMLP: methods that add, merge and remove adapters.

    Attributes:
        lora: the submodule with the adapters' parameters; None: there are no adapters.
    """

    lora: Lora | None

    def add_lora(
        self, r: int, *, alpha: float | None = None, rslora: bool = False, layers: Collection[str] = ("fc1", "fc2"),
        freeze: bool = True, dtype: torch.dtype | None = None,
    ) -> Lora:  # fmt: skip
        """Add LoRA adapters (weight + scale b a). b starts at 0, so results change only by training or `Lora.copy_`.

        Args:
            r: the rank.
            alpha: the scale of b a is alpha / r; None: alpha = r.
            rslora: True: the scale is alpha / sqrt(r) instead.
            layers: the layers that get adapters: "fc1", "fc2" or both.
            freeze: True: call `requires_grad_(False)` on the experts' own weights and biases. False: leave them as they
                are.
            dtype: dtype of the adapters; None: the dtype of the module's parameters, or bfloat16 if it has none.
                Float32 adapters with 16-bit rows are rounded at each call, and their gradients are float32.

        Returns:
            The submodule `lora`.

        Raises:
            ValueError, TypeError: an option is invalid, or does not work with the module's options.
            RuntimeError: the module has adapters already.
        """
        if self.lora is not None:
            raise RuntimeError(f"{NAME}: this module has adapters of rank {self.lora.r}; call remove_lora() first")
        options: dict[str, Any] = self.call_options  # type: ignore[assignment]
        recipe_with_lora(NAME, options["recipe"])
        if options["recompute"]:
            raise ValueError(f"{NAME}: the module was made with recompute=True, which adapters do not go with")
        check_flag(NAME, "rslora", rslora)
        check_flag(NAME, "freeze", freeze)
        names = set(layers) if isinstance(layers, Collection) and not isinstance(layers, str) else set()
        if not names or not names <= LAYERS.keys():
            raise ValueError(f"{NAME}: layers is {layers!r}; give some of {tuple(LAYERS)}")
        if alpha is not None:
            check_number(NAME, "alpha", alpha)
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        ):
            raise TypeError(f"{NAME}: dtype is {dtype!r}; give bfloat16, float16 or float32")
        linear: dict[str, Any] = self._modules
        first = linear["fc1"]
        placed = next(self.parameters(), None)
        where = first.experts("weight").data if placed is None else placed
        sizes = {name: (linear[name].in_features, linear[name].out_features) for name in LAYERS if name in names}
        dtype = dtype or (torch.bfloat16 if placed is None else placed.dtype)
        made = Lora(first.num_experts, r, 1.0, sizes, where.device, dtype)
        made.scale = (r if alpha is None else alpha) / (math.sqrt(r) if rslora else r)
        if freeze:
            self.requires_grad_(False)
        self.lora = made
        return made

    def remove_lora(self) -> None:
        """Remove the adapters. Merged weights stay merged, and frozen parameters stay frozen.

        Raises:
            RuntimeError: there are no adapters.
        """
        self._adapters("remove_lora")
        del self.lora
        self.lora = None

    def merge_lora(self, keep: bool = True) -> None:
        """Add the adapters to the experts' weights, each sum rounded once. Later calls do not apply the adapters again.

        A merged module refuses `state_dict` and `load_state_dict`: a module that loads merged weights and adapters
        would apply the adapters twice. Call `unmerge_lora` or `remove_lora` first.

        Args:
            keep: True: store copies of the weights, so that `unmerge_lora` restores the exact bits. Subtracting the
                adapters would not restore the bits.

        Raises:
            RuntimeError: there are no adapters, or they are merged already; or a weight is no parameter, but computed
                from others (a parametrization, pruning, FSDP1).
            ValueError: weights are quantised.
        """
        lora, linear = self._adapters("merge_lora"), self._modules
        if lora.is_merged:
            raise RuntimeError("merge_lora: the adapters are merged; call unmerge_lora() first")
        if isinstance(linear["fc1"], QuantizedLinear):
            kind = linear["fc1"].form.kind.format
            raise ValueError(
                f"merge_lora: weights are in {kind}, where a sum would be rounded to few bits; "
                "merge into the 16-bit weights that they were made of, and quantise these"
            )
        lora.merge_into(linear, keep)

    def unmerge_lora(self) -> None:
        """Restore the exact weights from before `merge_lora`; calls apply the adapters again.

        Raises:
            RuntimeError: nothing is merged, or no copies were stored, or a weight is no parameter, but computed from
                others.
        """
        lora = self._adapters("unmerge_lora")
        if not lora.is_merged:
            raise RuntimeError("unmerge_lora: the adapters are not merged; call merge_lora() first")
        lora.take_out_of(self._modules)

    def _adapters(self, name: str) -> Lora:
        if self.lora is None:
            raise RuntimeError(f"{name}: this module has no adapters; call add_lora(r) first")
        return self.lora


def _merged(lora: Lora) -> str:
    """Return the error text for saving or loading a module whose adapters are merged; "": they are not merged."""
    if not lora.is_merged:
        return ""
    return "state dict: adapters are merged, and would be applied twice; call unmerge_lora() or remove_lora() first"


def _refuse_to_save(lora: Lora, _prefix: str, _keep_vars: bool) -> None:
    if message := _merged(lora):
        raise RuntimeError(message)


def _refuse_to_load(
    lora: Lora, _state: Any, _prefix: str, _metadata: Any, _strict: bool, _missing: Any, _unexpected: Any,
    errors: list[str],
) -> None:  # fmt: skip
    if message := _merged(lora):
        errors.append(message)
