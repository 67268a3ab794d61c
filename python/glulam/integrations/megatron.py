"""Experts module for Megatron-Core. Put it into a layer's spec:

    from glulam.integrations.megatron import experts_spec
    MoESubmodules(experts=experts_spec())

The module takes permuted tokens, tokens_per_expert and probabilities from any of Megatron's dispatchers. It saves and
loads the checkpoints of Megatron's own SequentialMLP, sharded or not. Importing this file imports Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor

from ..activations import Activation
from ..nn import GroupedMLP
from .gates import activation_of, gate_of
from .versions import warn_if_untested

KNOWN_VERSIONS = ("0.16", "0.17", "0.18", "0.19")
"""Minor versions of Megatron-Core that this file was tested with."""
LAYERS = {"fc1": "linear_fc1", "fc2": "linear_fc2"}
"""Names of the two layers in nn.GroupedMLP, and in Megatron's MLP."""
SHARDED = {"fc1": {"weight": 0, "bias": 0}, "fc2": {"weight": 1}}
"""{layer: {tensor: the dimension that tensor parallelism splits}}, for tensors of one expert."""
UNSUPPORTED = (
    "fp8", "fp4", "moe_latent_size", "moe_single_grouped_weight", "moe_single_grouped_bias", "moe_paged_stash",
)  # fmt: skip
"""Options of Megatron's config that Glulam does not support: they must be None, False or absent."""
INTERLEAVE_SIZE = "moe_mlp_glu_interleave_size"
INTERLEAVED = {None: "concat", 1: "interleaved", 32: "interleaved32"}
"""{the config's `moe_mlp_glu_interleave_size`: Glulam's glu_layout of a gated FC1}."""


def experts_spec(packed: bool = False) -> ModuleSpec:
    """Return the `experts` entry for a layer's spec.

    Args:
        packed: True: one parameter for each layer. False: one for each expert of each layer.
    """
    return ModuleSpec(module=GlulamMLP, params={"packed": packed})


class GlulamMLP(MegatronModule):
    """Replacement of Megatron's SequentialMLP, GroupedMLP and TEGroupedMLP: FC1, the activation and FC2 in one call.

    `main_grad`, `delay_wgrad_compute` with `backward_dw`, and recomputation of "moe_act" work as in `nn.GroupedMLP`.
    With expert tensor parallelism results are partial sums, which the dispatcher adds, as with Megatron's own experts.

    Args:
        num_local_experts, config, pg_collection, name: passed by Megatron's MoELayer; the name since version 0.18.
        submodules: ignored.
        packed: True: one parameter for each layer. False: one for each expert of each layer.

    Raises:
        NotImplementedError: Glulam lacks an activation or an option of the config; the message names it.
        ValueError, TypeError: raised by `glulam.nn.GroupedMLP`.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, submodules: Any = None, pg_collection: Any = None,
        *, packed: bool = False, name: str | None = None,
    ):  # fmt: skip
        super().__init__(config=config)
        _check(config)
        self.num_local_experts, self.packed, self.name = num_local_experts, packed, name
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        self.sizes = {"fc1": config.moe_ffn_hidden_size * (1 + config.gated_linear_unit), "fc2": config.hidden_size}
        function = _activation_of(config)
        recompute = config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        self.mlp = GroupedMLP(
            num_local_experts, config.hidden_size, divide(config.moe_ffn_hidden_size, self.tp_group.size()),
            bias=config.add_bias_linear, **function.keywords, packed=packed, recompute=recompute,
            delay_wgrad=config.delay_wgrad_compute, device="meta", dtype=config.params_dtype,
        ).to_empty(device="cpu" if config.use_cpu_initialization else torch.cuda.current_device())  # fmt: skip
        self._initialise()
        self.register_state_dict_post_hook(_to_megatron)
        self.register_load_state_dict_pre_hook(_from_megatron)

    def _initialise(self) -> None:
        """Initialise weights expert by expert, as Megatron's linear layers do, and biases with 0.

        On a CPU a whole weight is initialised, of which each rank takes its shard.
        """
        config, inner = self.config, self.config.moe_ffn_hidden_size
        methods = {"fc1": config.init_method, "fc2": config.output_layer_init_method}
        for layer, method in methods.items():
            axis = SHARDED[layer]["weight"]
            out, columns = self.sizes[layer], config.hidden_size if layer == "fc1" else inner
            for weight in self._of_experts(layer, "weight") if config.perform_initialization else ():
                if config.use_cpu_initialization:
                    share = weight.shape[axis]
                    _initialize_affine_weight_cpu(
                        weight, out, columns, share, axis, method, params_dtype=config.params_dtype,
                        rank=self.tp_group.rank(), world_size=self.tp_group.size(),
                        skip_set_tensor_parallel_attributes=True,
                    )  # fmt: skip
                else:
                    _initialize_affine_weight_gpu(weight, method, partition_dim=axis, is_expert=True)
        for name, parameter in self.mlp.named_parameters():
            layer, kind = name.split(".")
            # Megatron reduces gradients of parameters with allreduce False over other ranks (expert data parallelism).
            parameter.allreduce = config.expert_model_parallel_size <= 1  # type: ignore[attr-defined]
            if kind.startswith("bias"):
                torch.nn.init.zeros_(parameter)
            axis = SHARDED[layer].get(kind.rstrip("0123456789"), 0) + self.packed
            if not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, kind.startswith("weight") or layer == "fc1", axis, 1)

    def _of_experts(self, layer: str, name: str) -> list[Tensor]:
        """Return one tensor for each expert: parameters, or views of the packed parameter. []: there is no bias."""
        parameters = getattr(self.mlp, layer).parameter_list(name)
        return list(parameters[0].detach().unbind()) if self.packed and parameters else parameters

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return (the experts' result [T, H], None).

        Megatron expects a bias as the second value; it is None because biases are added already.

        Args:
            permuted_local_hidden_states: [T, H], rows sorted by expert.
            tokens_per_expert: [E], on the rows' device or on the CPU; the sum must be T.
            permuted_probs: [T], factors for the rows of the activation; with `moe_apply_probs_on_input`, for the rows
                of the input.

        Raises:
            ValueError: `moe_apply_probs_on_input` is set, and `moe_router_topk` is not 1.
        """
        rows, scale = permuted_local_hidden_states, permuted_probs.float()
        if self.config.moe_apply_probs_on_input:
            if self.config.moe_router_topk != 1:
                raise ValueError("glulam: moe_apply_probs_on_input works with moe_router_topk=1 alone")
            rows, scale = (permuted_probs[:, None] * rows).to(rows.dtype), torch.ones_like(scale)
        return self.mlp(rows, splits=tokens_per_expert, row_scale=scale), None

    def backward_dw(self) -> None:
        """Compute the weight gradients that backward left out because of `delay_wgrad_compute`.

        If all weights are frozen, do nothing.
        """
        weights = [weight for layer in LAYERS for weight in getattr(self.mlp, layer).parameter_list("weight")]
        if any(weight.requires_grad for weight in weights):
            self.mlp.backward_dw()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return a sharded state dict like that of Megatron's SequentialMLP, with experts numbered over all ranks."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        singleton = metadata.get("singleton_local_shards", False)
        total, first = self.ep_group.size() * self.num_local_experts, self.ep_group.rank() * self.num_local_experts
        result = {}
        for expert in range(self.num_local_experts):
            number, offsets, stored = first + expert, sharded_offsets, f"{prefix}experts."
            if singleton:
                stored = f"{stored}{number}."
            else:
                offsets = (*offsets, (len(offsets), number, total))
            for layer, theirs in LAYERS.items():
                named = {name: self._of_experts(layer, name) for name in ("weight", "bias")}
                tensors = {name: experts[expert] for name, experts in named.items() if experts}
                made = make_sharded_tensors_for_checkpoint(
                    tensors, f"{stored}{theirs}.", SHARDED[layer], offsets, tp_group=self.tp_group,
                    dp_cp_group=metadata["dp_cp_group"],
                )  # fmt: skip
                for key, sharded in made.items():
                    if layer == "fc1" and self.config.gated_linear_unit:
                        sharded = apply_swiglu_sharded_factory(sharded, offsets, singleton)
                    sharded.replica_id = (*sharded.replica_id[:2], self.dp_group.rank())
                    name = key.rpartition(".")[2]
                    result[f"{prefix}local_experts.{expert}.{theirs}.{name}"] = sharded
        return result


def _check(config: Any) -> None:
    warn_if_untested("megatron-core", KNOWN_VERSIONS)
    for name in UNSUPPORTED:
        if (value := getattr(config, name, None)) not in (None, False):
            raise NotImplementedError(f"glulam: {name} is {value!r}; leave it out, Glulam has none")
    if (size := getattr(config, INTERLEAVE_SIZE, None)) not in INTERLEAVED:
        raise NotImplementedError(f"glulam: {INTERLEAVE_SIZE} is {size}; Glulam has 1 and 32, and halves without it")


def _activation_of(config: Any) -> Activation:
    """Return the activation that a Megatron config describes.

    Raises:
        NotImplementedError: Glulam has no such activation.
    """
    limit, act = config.activation_func_clamp_value, config.activation_func

    def glu(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        found: Tensor = act(gate) * (up + config.glu_linear_offset)
        return found

    cpu = torch.device("cpu")
    function = gate_of(glu, cpu) if config.gated_linear_unit else activation_of(act, cpu)
    if function is None:
        raise NotImplementedError(f"glulam: activation_func {getattr(act, '__name__', act)} is none that Glulam has")
    layout = INTERLEAVED[getattr(config, INTERLEAVE_SIZE, None)]
    return function._replace(glu_layout=layout) if config.gated_linear_unit else function


def _names(module: GlulamMLP, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (key in an nn.GroupedMLP that is not packed, key in Megatron) for each parameter of each expert."""
    for layer, theirs in LAYERS.items():
        for kind in ("weight", "bias"):
            for expert in range(module.num_local_experts):
                yield f"{prefix}mlp.{layer}.{kind}{expert}", f"{prefix}local_experts.{expert}.{theirs}.{kind}"


def _to_megatron(module: GlulamMLP, state: dict[str, Any], prefix: str, _: Any) -> None:
    if module.packed:
        for layer in LAYERS:
            for kind in ("weight", "bias"):
                packed = state.pop(f"{prefix}mlp.{layer}.{kind}", None)
                for expert in range(0 if packed is None else module.num_local_experts):
                    state[f"{prefix}mlp.{layer}.{kind}{expert}"] = packed[expert]
    for ours, theirs in _names(module, prefix):
        if ours in state:
            state[theirs] = state.pop(ours)


def _from_megatron(module: GlulamMLP, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook before load_state_dict: rename Megatron's entries as an nn.GroupedMLP that is not packed has them.

    If the module is packed, nn.GroupedMLP itself packs the entries when it loads them.
    """
    for ours, theirs in _names(module, prefix):
        if theirs in state:
            state[ours] = state.pop(theirs)
    for layer in LAYERS.values():
        for expert in range(module.num_local_experts):
            state.pop(f"{prefix}local_experts.{expert}.{layer}._extra_state", None)
