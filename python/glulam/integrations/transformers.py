"""Experts implementation for transformers' mixture-of-experts models: `experts_implementation="glulam"`.

    import glulam.integrations.transformers
    glulam.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, experts_implementation="glulam")

The forward of an experts module of transformers becomes one call of `glulam.moe`. For few tokens without gradients,
this call also sorts the choices of experts (`layer/choices.py`).

Weights: a module keeps its parameters. 16-bit weights are neither copied nor permuted. If the registered recipe
quantises, 16-bit weights are replaced at the first forward by buffers in the recipe's format. Checkpoints in FP8 keep
their weights (`fp8_experts.py`).

The activation is recognised by the values that it computes, not by its name (`gates.py`).
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.torch_version import TorchVersion

from .. import recipes
from ..activations import Activation, is_in_halves
from ..calls.checks import any_requires_grad
from ..formats.mxfp4.form import MXFP4
from ..formats.prepared import prepare
from ..formats.scaled import Parts
from ..host.groups import is_after_groups
from ..layer import Routing, combine, moe, permute
from ..layer.choices import moe_of_choices
from ..ops.grouped_mlp import grouped_mlp
from ..ops.quantized_weights import FORMS
from ..recipes import BF16, Recipe
from . import fp8_experts
from .experts import NAME as NAME
from .experts import keep, parameter, quantised, weight_names, world_of
from .fp8_experts import Fp8
from .gates import activation_of, gate_of
from .peft import is_parametrized, weights_and_lora
from .versions import warn_if_untested

KNOWN_VERSIONS = ("5.17", "5.19", "5.20", "5.23", "5.24")
"""Minor versions of transformers that this file was tested with."""

CALLS_WHILE_TRACING = TorchVersion(torch.__version__) >= "2.13"
"""True if torch.compile can call a function on a module while it traces. If not, a module that was never called before
breaks the graph once.
"""
RECIPES = (recipes.BF16, recipes.MXFP8, recipes.MXFP8_WEIGHT_ONLY, recipes.MXFP4_WEIGHT_ONLY)
_log = logging.getLogger(__name__)
_recipe: Recipe = BF16
_locks: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()
"""A lock for each experts module. Locks are kept outside of modules, since they can be neither copied nor pickled."""
_lock_of_locks = threading.Lock()


class Plan(NamedTuple):
    """Constants of an experts module's calls: names of its weights, activation, recipe and so on.

    A plan is stored on the module as `glulam_plan`, since finding these values takes longer than a launch.
    torch.compile can treat them as constants.

    Attributes:
        in_16_bits: True: the module's weights are in 16 bits (or float32), not quantised.
        weights: names of FC1's and FC2's weight.
        biases: pairs (argument of `glulam.moe`, name in the module).
        num_experts: number of experts in the module.
        post: name of the module's method that is applied to the experts' results before they are multiplied by the
            router's weights; "": none.
        options: keyword arguments of `glulam.moe`.
        numbers: the module's int and float attributes as they were when the plan was made. The activation's limits and
            slopes are among them, so a change of one makes a new plan.
        fp8: description of the weights if the module is an FP8Experts, else None.
        world_experts: number of experts on all ranks if the module holds only a part of them, else None.
    """

    in_16_bits: bool
    weights: tuple[str, str]
    biases: tuple[tuple[str, str], ...]
    num_experts: int
    post: str
    options: tuple[tuple[str, Any], ...]
    numbers: tuple[tuple[str, float], ...]
    fp8: Fp8 | None
    world_experts: int | None


def register(recipe: str | Recipe = "bf16") -> None:
    """Register Glulam in transformers as the experts implementation "glulam".

    `from_pretrained`, `from_config` and `set_experts_implementation` then accept `experts_implementation="glulam"`.
    Experts are in 16 bits on a GPU, and in 16 bits or float32 on a CPU.

    Args:
        recipe: recipe of `glulam.moe` for all models with this implementation from now on: "bf16", or for inference
            "mxfp8", "mxfp8_weight_only" or "mxfp4_weight_only". With the latter three, a module's weights are quantised
            at its first forward, and buffers `gate_up_proj`, `gate_up_proj_scale` and so on replace its parameters; a
            log line (INFO) says how much memory that saved. With "mxfp4_weight_only" a gpt-oss checkpoint is loaded as
            shipped, and never dequantised (`mxfp4_checkpoints.py`). Experts of FP8 checkpoints do not use this recipe,
            but recipes for their own format (`fp8_experts.py`).

    Raises:
        ImportError: transformers is not installed, or older than version 5, without an interface for experts.
        ValueError: the recipe is not one of these.
    """
    global _recipe
    found = next((one for one in RECIPES if recipe in (one, one.name)), None)
    if found is None:
        raise ValueError(f"register: recipe is {recipe!r}; choose one of {', '.join(map(str, RECIPES))}")
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise ImportError(f"glulam.integrations.transformers needs transformers 5: {error}") from error
    from . import mxfp4_checkpoints

    warn_if_untested("transformers", KNOWN_VERSIONS)
    ExpertsInterface.register(NAME, experts_forward)
    with suppress(ImportError):  # this version of transformers has no FP8Experts
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface

        FP8ExpertsInterface.register(NAME, experts_forward)
    mxfp4_checkpoints.use(as_shipped=found.weights is MXFP4)
    _recipe = found


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the forward of an experts module of transformers: the function that transformers calls.

    Args:
        experts: a module with weights `gate_up_proj` [E, 2I, H] (or `up_proj` [E, I, H]) and `down_proj` [E, H, I],
            transposed or not, perhaps biases `*_bias`, and `*_scale_inv` if it is an FP8Experts.
        hidden_states: tokens [N, H].
        top_k_index: chosen experts [N, K]; ids >= E, experts of other ranks, are ignored.
        top_k_weights: the router's weights [N, K].

    Returns:
        [N, H], in hidden_states' dtype.

    Raises:
        NotImplementedError: Glulam has no such gate or activation, or does not read FP8 weights of this kind; the
            message names the module's class.
        RuntimeError: weights must be quantised, but the module is in training, or has adapters or another
            parametrization; or weights or scales must be converted, but torch.compile traces the module's first call.
        ValueError, TypeError: raised by `glulam.moe`.
    """
    plan = plan_of(experts)
    if plan.in_16_bits and _recipe is not BF16:
        plan = _quantise(experts, _recipe)
    if plan.fp8 is not None and plan.fp8.served.make_scales is not None:
        _have_scales(experts, plan.fp8)
    given = dict(plan.options)
    read = parameter if plan.in_16_bits else quantised if plan.fp8 is None else fp8_experts.weight
    (fc1, fc2), given_dtype = plan.weights, hidden_states.dtype
    lora = None
    if plan.in_16_bits and is_parametrized(experts):
        w1, w2, lora = weights_and_lora(experts, plan.weights)
    else:
        w1, w2 = read(experts, fc1), read(experts, fc2)
    for operand, name in plan.biases:
        given[operand] = parameter(experts, name)
    choices = top_k_index.contiguous(), top_k_weights.contiguous(), plan.num_experts
    # One choice a token: an all-to-all has brought the token to its expert's rank.
    world_experts = plan.world_experts if top_k_index.shape[1] > 1 else None
    if plan.fp8 is not None and torch.is_grad_enabled() and any_requires_grad(hidden_states, top_k_weights):
        given["recipe"] = plan.fp8.served.weight_only.name  # the weight-only recipe is differentiable in rows
    x = _cast(hidden_states, w2.dtype if plan.in_16_bits else torch.bfloat16).contiguous()
    if plan.post:
        routing = Routing.from_topk(*choices, world_experts=world_experts)
        rows = grouped_mlp(permute(x, routing), w1, w2, offs=routing.offs, lora=lora, **given)
        # Rows after the last group were never written, and a norm's gradient sums over all rows.
        is_tail = is_after_groups(rows, routing.offs)
        rows = getattr(experts, plan.post)(rows.masked_fill(is_tail[:, None], 0))
        rows = rows * routing.weight_of_row.masked_fill(is_tail, 0)[:, None].to(rows.dtype)
        return _cast(combine(rows, routing), given_dtype)
    if lora is not None:
        routing = Routing.from_topk(*choices, world_experts=world_experts)
        return _cast(moe(x, routing, w1, w2, lora=lora, **given), given_dtype)
    return _cast(moe_of_choices(x, *choices, w1, w2, world_experts=world_experts, **given), given_dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in `dtype`. `to` is skipped if nothing changes, since even then it takes the host 0.8 us."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _quantise(experts: Any, recipe: Recipe) -> Plan:
    """Quantise a module's weights: replace the parameters by buffers in a recipe's format; return the new plan.

    Other threads that call the module meanwhile wait. Raises the errors of `experts_forward`.
    """
    if is_dynamo_compiling():
        raise RuntimeError("glulam: call the model once before it is compiled: its experts' weights are not quantised")
    if experts.training and torch.is_grad_enabled() and not _may_freeze(experts, recipe):
        raise RuntimeError(
            f"glulam: recipe {recipe.name!r} keeps quantised weights alone, which have no gradient; call model.eval(), "
            "train with register(recipe='bf16'), or freeze the experts by requires_grad_(False) and choose a recipe of "
            "weights alone, as 'mxfp4_weight_only'"
        )
    if is_parametrized(experts):
        raise RuntimeError(
            f"glulam: recipe {recipe.name!r} quantises weights in place, and {type(experts).__name__} has adapters of "
            "PEFT's or another parametrization; merge them (merge_and_unload), or call the model once before they are "
            "added"
        )
    with _lock_of(experts):
        if not (plan := plan_of(experts)).in_16_bits:
            return plan
        names, made, before = weight_names(experts), [], 0
        with torch.no_grad():
            for name in names:
                weight = getattr(experts, name).detach()
                matrices = weight.mT if experts.is_transposed else weight
                made.append(prepare(FORMS[recipe.name], Parts(matrices), report=False))
                before += weight.nbytes
        for name, parts in zip(names, made, strict=True):
            delattr(experts, name)
            keep(experts, name, parts, recipe)
        # Set last: threads read buffers without the lock once the plan says that they are there.
        plan = _keep_plan(experts)
    after = sum(part.nbytes for parts in made for part in parts if part is not None)
    _log.info("%s in %s: %.1f MB instead of %.1f", type(experts).__name__, recipe, after / 1e6, before / 1e6)
    return plan


def _may_freeze(experts: Any, recipe: Recipe) -> bool:
    """Return True if the weights require no gradient, and the recipe can compute gradients through frozen weights."""
    weights = [getattr(experts, name) for name in weight_names(experts)]
    return recipe.freezes_weights and not any_requires_grad(*weights)


def _have_scales(experts: Any, fp8: Fp8) -> None:
    """Make sure that an FP8Experts has the scales that kernels read: convert the module's scales if not done yet."""
    if fp8_experts.has_scales(experts):
        return
    if is_dynamo_compiling():
        raise RuntimeError("glulam: call the model once before it is compiled: its experts' scales are not made")
    with _lock_of(experts):
        if not fp8_experts.has_scales(experts):
            fp8_experts.keep_scales(experts, fp8)


def _lock_of(experts: Any) -> threading.RLock:
    """Return the lock under which a module's weights are replaced and its plan is made."""
    with _lock_of_locks:
        return _locks.setdefault(experts, threading.RLock())


def plan_of(experts: Any) -> Plan:
    """Return a module's plan, the constants of its calls (see `Plan`).

    The plan is kept, since reading the module's attributes takes the host longer than a launch. It is made again if the
    module's act_fn, one of its numbers or its FP8 weights changed. Raises the errors of `experts_forward`.
    """
    plan: Plan | None = getattr(experts, "glulam_plan", None)
    if plan is not None and _is_current(plan, experts):
        return plan
    if not is_dynamo_compiling():
        return _kept_plan(experts)
    plan = _traced_plan(experts)
    _is_of(plan, experts, _act_fn(experts))  # reads the attributes, so that torch.compile guards them
    return plan


def _is_current(plan: Plan, experts: Any) -> bool:
    """Return True if the module still has the act_fn, the numbers and the FP8 weights for which its plan was made."""
    return _is_of(plan, experts, experts.glulam_act_fn[0])


def _is_of(plan: Plan, experts: Any, act_fn: Any) -> bool:
    """Return True if the module has this act_fn, and the same numbers and FP8 weights as its plan."""
    numbers = tuple([(name, getattr(experts, name, None)) for name, _ in plan.numbers])
    return _act_fn(experts) is act_fn and numbers == plan.numbers and (plan.fp8 is None or plan.fp8.is_of(experts))


def _act_fn(experts: Any) -> Any:
    """Return a module's act_fn, or None. The look-up is as fast as that of `parameter`."""
    found = experts._modules.get("act_fn")
    return getattr(experts, "act_fn", None) if found is None else found


def _numbers_of(experts: Any) -> tuple[tuple[str, float], ...]:
    named = [(name, value) for name, value in vars(experts).items() if not name.startswith("_")]
    return tuple((name, value) for name, value in named if type(value) in (int, float))


def _new_plan(experts: Any) -> Plan:
    with _lock_of(experts):
        return _found_plan(experts)


def _found_plan(experts: Any) -> Plan:
    function, weights, fp8 = _activation_of(experts), weight_names(experts), None
    recipe = getattr(experts, "glulam_recipe", BF16)
    if fp8_experts.is_fp8(experts):
        fp8 = fp8_experts.fp8_of(experts, is_in_halves(function.name, function.glu_layout))
        recipe = fp8_experts.recipe_of(experts, fp8)
    options = {
        **function.keywords, "transpose_w": experts.is_transposed and recipe is BF16, "recipe": recipe.name,
    }  # fmt: skip
    biases = ("b1", f"{weights[0]}_bias"), ("b2", f"{weights[1]}_bias")
    given = biases if experts.has_bias else ()
    return Plan(
        recipe is BF16, weights, given, len(experts.down_proj), _post_of(experts), tuple(options.items()),
        _numbers_of(experts), fp8, world_of(experts),
    )  # fmt: skip


def _kept_plan(experts: Any) -> Plan:
    with _lock_of(experts):
        plan: Plan | None = getattr(experts, "glulam_plan", None)  # another thread may have been here
        if plan is None or not _is_current(plan, experts):
            plan = _keep_plan(experts)
    return plan


def _keep_plan(experts: Any) -> Plan:
    """Make a module's plan, store it on the module, and return it.

    The plan is stored after act_fn, since other threads read both without the lock.
    """
    act_fn, plan = _act_fn(experts), _new_plan(experts)
    experts.glulam_act_fn = (act_fn,)  # in a tuple, so that it is no second child of the module
    experts.glulam_plan = plan
    return plan


if CALLS_WHILE_TRACING:
    _traced_plan = torch.compiler.assume_constant_result(_new_plan)
else:
    _traced_plan = torch.compiler.disable(_kept_plan, reason="glulam: a module is called once before it is compiled")


def _post_of(experts: Any) -> str:
    """Return the name of the module's method that is applied to the experts' results before router weights; "": none.

    transformers up to 5.23 has a flag for a norm. Later versions give every module such a method, which in most modules
    returns its argument; then "" is returned.
    """
    if getattr(experts, "has_post_expert_norm", False):
        return "post_expert_norm"
    name = "_apply_post_expert"
    if not hasattr(experts, name):
        return ""
    row = experts.down_proj.new_zeros(1, experts.down_proj.shape[-1 if experts.is_transposed else 1])
    with torch.no_grad():
        return "" if getattr(experts, name)(row) is row else name


def _activation_of(experts: Any) -> Activation:
    """Recognise the activation of a module's experts by its values. Raises the errors of `experts_forward`."""
    device = experts.down_proj.device
    with torch.no_grad():
        function = gate_of(experts._apply_gate, device) if experts.has_gate else activation_of(experts.act_fn, device)
    if function is None:
        what = "_apply_gate" if experts.has_gate else "act_fn"
        raise NotImplementedError(
            f"glulam: {type(experts).__name__}.{what} is no activation that Glulam has; choose another "
            "experts_implementation for this model, as 'grouped_mm'"
        )
    return function
