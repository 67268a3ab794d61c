"""GroupedMLP: two linear layers and an activation for each expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import checkpoint

from cute_kernels.specs import GATED

from .. import recipes
from ..activations import Activation, NamedNumbers, is_in_halves, packed, packer, with_numbers
from ..backward.parts import tensor_groups
from ..calls.checks import check_activation, check_numbers, runs_kernels
from ..calls.sharding import is_dtensor
from ..calls.weight_checks import intermediate_width
from ..choose.problem import dtype_name
from ..host.groups import Splits
from ..names import ActivationName, GluLayout, RecipeName
from ..ops.gate import gate, without_tail
from ..ops.grouped_mlp import GroupedMlpCall, grouped_mlp
from ..ops.quantized_mlp import QuantizedMlpCall
from ..recipes import BF16, Recipe
from .children import has_global_hooks, is_itself, is_plain
from .linear import GroupedLinear
from .lora import TakesLora
from .options import check_options, check_placement, shown_options
from .quantized_linear import LAYERS
from .weight_gradients import DelaysWeightGradients, run

if TYPE_CHECKING:
    from typing_extensions import Unpack

NAME = "GroupedMLP"
_packed = packer(NAME)


class ExpertOptions(NamedNumbers, total=False):
    """Keyword options of a GroupedMLP, for type checkers: all except sizes, device and dtype."""

    bias: bool
    activation: ActivationName
    glu_layout: GluLayout
    packed: bool
    recompute: bool
    delay_wgrad: bool
    recipe: RecipeName | Recipe


class GroupedMLP(DelaysWeightGradients, TakesLora):
    """y = m w2_e^T + s b2_e, m = activation(x w1_e^T + b1_e) s, for rows sorted by expert; see `glulam.grouped_mlp`.

    s is `row_scale`, a factor for each row. `fc1` and `fc2` are `GroupedLinear` modules that hold the parameters;
    `lora` holds the adapters of `add_lora`, or is None. Forward runs one fused operator. If `fc1` or `fc2` is hooked,
    wrapped, compiled or of another class, forward instead calls both layers one after the other, with a separate
    activation between them.

    Args:
        num_experts, hidden_size, intermediate_size: E, H and I. All widths are multiples of 8 on a GPU.
        out_features: width of the result; None: H.
        bias: True: both layers have a bias.
        activation, glu_layout, **numbers: see `glulam.grouped_glu`.
        packed: True: one parameter for each layer. False: one for each expert of each layer. See `GroupedLinear`.
        recompute: True: save only x and row_scale in forward, and recompute the preactivation in backward. Recipe
            "mxfp8" recomputes the whole forward for that, FC2 included.
        delay_wgrad: True: backward does not compute the gradients of the weights; `backward_dw` does.
        recipe: see `glulam.grouped_mlp`. "mxfp8_exact" and "mxfp8_weight_only" are not differentiable, and run only if
            no gradient is requested. With "mxfp4", "mxfp4_weight_only", "nvfp4_weight_only", "fp8_block" and
            "fp8_block_weight_only" weights are buffers in the recipe's format (`QuantizedLinear`).
        device, dtype: device and dtype of the parameters.

    Raises:
        ValueError, TypeError: at construction: an option is invalid, or options cannot work together.
    """

    op = "grouped_mlp"

    @with_numbers
    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        out_features: int | None = None,
        bias: bool = False,
        activation: ActivationName = "swiglu",
        glu_layout: GluLayout = "concat",
        packed: bool = True,
        recompute: bool = False,
        delay_wgrad: bool = False,
        recipe: RecipeName | Recipe = "bf16",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **numbers: Unpack[NamedNumbers],
    ) -> None:
        super().__init__(delay_wgrad)
        check_options(GroupedMLP, locals())
        width = hidden_size if out_features is None else out_features
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "out_features": width}
        check_activation(NAME, activation, glu_layout)
        check_numbers(NAME, _packed(**numbers))
        self.recipe = chosen = recipes.find(NAME, recipe)
        for name, flag in (("recompute", recompute), ("delay_wgrad", delay_wgrad)):
            if flag and not chosen.trains:
                raise ValueError(f"{NAME}: {name} is True, but recipe {chosen.name!r} has no gradient; leave it out")
        probe = torch.empty(0, device=device, dtype=dtype)
        check_placement(GroupedMLP, probe, *sizes.values())
        recipes.check_fits(NAME, chosen, dtype_name(probe.dtype), runs_kernels(probe), **sizes)
        rows = intermediate_size * (2 if activation in GATED else 1)
        intermediate_width(NAME, "fc1.weight", rows, activation, glu_layout)
        self.call_options: dict[str, Any] = {
            **Activation.named(activation, glu_layout, **numbers).keywords, "recipe": chosen.name,
            "recompute": recompute,
        }  # fmt: skip
        self.has_bias, self._why_together = bias, ""  # why not each layer by itself
        if chosen is not BF16 and not chosen.freezes_weights:
            self._why_together = f"recipe {chosen.name!r} quantises rows between them"
        elif delay_wgrad:
            self._why_together = "delay_wgrad is True"
        form, layer = chosen.weights, LAYERS.get(type(chosen.weights))
        if layer is not None and not packed:
            raise ValueError(f"{NAME}: packed is False, but recipe {chosen.name!r} has packed weights; leave it out")
        linear: Any = GroupedLinear if form is None or layer is None else partial(layer, form=form)
        how: dict[str, Any] = {"bias": bias, "packed": packed, "device": device, "dtype": dtype}
        is_cut = layer is not None and is_in_halves(activation, glu_layout)
        self.fc1 = linear(num_experts, hidden_size, rows, **how, **({"halves": 2} if is_cut else {}))
        self.fc2 = linear(num_experts, intermediate_size, width, **how)
        self.lora = None

    def reset_parameters(self) -> None:
        """Initialise both layers like torch.nn.Linear, and adapters like PEFT."""
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        x: Tensor,
        *,
        offs: Tensor | None = None,
        splits: Splits | None = None,
        row_scale: Tensor | None = None,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
    ) -> Tensor:
        """Apply each row's expert; return the result [T, out_features].

        Args:
            x: rows [T, H], sorted by expert.
            offs, splits, row_scale: see `glulam.grouped_mlp`.
            out, grad_input: buffers for the result and for x's gradient; see `GroupedLinear.forward`.

        Raises:
            ValueError, TypeError: raised by `glulam.grouped_mlp`; or for a buffer, as in `GroupedLinear.forward`; or
                fc1 or fc2 must be called as a module, but the recipe, an option, adapters or a DTensor x need the fused
                operator.
        """
        given: dict[str, Any] = {"x": x, "offs": offs, "splits": splits, "row_scale": row_scale}
        if not self.has_plain_layers():
            return self._by_layers(**given, out=out, grad_input=grad_input)
        given.update(self.arguments())
        try:
            return run(grouped_mlp, self._call, given, self.grad_writers(x), out, grad_input)
        except TypeError:
            if self.recipe.name == BF16.name:  # others read float32 too
                check_placement(GroupedMLP, self.fc1.parameter_list("weight")[0])
            raise

    def _call(self, **given: Any) -> Any:
        given.update(rows=None, out=None)
        if self.recipe.name == BF16.name:
            return GroupedMlpCall(transpose_w=False, **packed(given))
        return QuantizedMlpCall(**QuantizedMlpCall.unwrapped(self.recipe, given))

    def has_plain_layers(self) -> bool:
        """Return True if forward may run the fused operator instead of fc1 and fc2; False: it calls both as modules."""
        layers: Any = self._modules
        if not (is_itself(layers["fc1"], GroupedLinear) and is_itself(layers["fc2"], GroupedLinear)):
            return False
        return is_dynamo_compiling() or not has_global_hooks() or bool(self._why_in_one_call())

    def _why_in_one_call(self) -> str:
        """Return the reason why fc1 and fc2 must run in one fused call; "": they may be called separately."""
        return self._why_together or ("it has adapters" if _applied(self._modules.get("lora")) else "")

    def _by_layers(self, x: Tensor, row_scale: Tensor | None, out: Any, grad_input: Any, **groups: Any) -> Tensor:
        """Run forward without the fused operator: call fc1, the activation, and fc2.

        Unlike in the fused operator, FC1's result is rounded to its dtype before the activation.

        Args:
            out, grad_input: buffers for the result and for x's gradient. None: new tensors.
            groups: `forward`'s arguments offs and splits.

        Raises:
            ValueError: the recipe or an option needs both layers in one call.
            TypeError: x is a DTensor.
        """
        if is_dtensor(x):
            raise TypeError(
                f"{NAME}: x is a DTensor, and fc1 or fc2 has hooks, is wrapped or a unit of its own; do so with the "
                "whole module instead"
            )
        if why := self._why_in_one_call():
            raise ValueError(
                f"{NAME}: fc1 or fc2 has hooks, is wrapped or a unit of its own, so that both are called, but "
                f"{why}; do so with the whole module instead"
            )
        options = {name: value for name, value in self.call_options.items() if name not in ("recipe", "recompute")}
        first = groups if grad_input is None else {**groups, "grad_input": grad_input}
        second = groups if out is None else {**groups, "out": out}
        if self.has_bias and row_scale is not None:
            second = {**second, "bias_scale": row_scale}

        def layers(x: Tensor) -> Tensor:
            scale = without_tail(row_scale, lambda: tensor_groups(NAME, **groups, x=x))
            h = self.fc1(x, **first)
            made: Tensor = self.fc2(gate(h, scale, **options), **second)
            return made

        return checkpoint(layers, x, use_reentrant=False) if self.call_options["recompute"] else layers(x)

    def arguments(self) -> dict[str, Any]:
        """Return the weights, biases, options and unmerged adapters as keyword arguments of the fused operators."""
        layers: Any = self._modules
        fc1, fc2, lora = layers["fc1"], layers["fc2"], _applied(layers.get("lora"))
        adapters = {} if lora is None else {"lora": lora.adapter()}
        return {
            "w1": fc1.experts("weight"), "w2": fc2.experts("weight"), "b1": fc1.experts("bias"),
            "b2": fc2.experts("bias"), **self.call_options, **adapters,
        }  # fmt: skip

    def grad_writers(self, x: Tensor) -> dict[str, Callable[..., Any]]:
        """Return, for a forward with x, the functions that write weight gradients instead of autograd.

        Keys are the operators' argument names, "w1" and "w2". A weight whose gradient autograd gets has no entry. See
        `GroupedLinear.grad_writer`.
        """
        found: dict[str, Callable[..., Any]] = {}
        if not torch.is_grad_enabled():
            return found
        layers: Any = self._modules
        put = self.new_pass() if self.delay_wgrad else None
        if (writer := layers["fc1"].grad_writer("fc1.weight", x, put)) is not None:
            found["w1"] = writer
        if (writer := layers["fc2"].grad_writer("fc2.weight", x, put)) is not None:
            found["w2"] = writer
        return found

    def extra_repr(self) -> str:
        return shown_options(GroupedMLP, **self.call_options, delay_wgrad=self.delay_wgrad)


def arguments_of(experts: Any) -> dict[str, Any] | None:
    """Return the weights and options of the child `experts` as arguments, so that its parent runs the operator itself.

    They are keyword arguments of the fused operators. None: the child must be called as a module.
    """
    if is_plain(experts, GroupedMLP) and experts.has_plain_layers():
        found: dict[str, Any] = experts.arguments()
        return found
    return None


def _applied(lora: Any) -> Any:
    """Return the adapters (a Lora) if calls must apply them; None: there are none, or they are merged into weights."""
    return None if lora is None or lora.is_merged else lora
