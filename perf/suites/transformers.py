"""transformers' models: one MoE block, and a decoding step, by each implementation of their experts.

Before a block is timed, its error against float32 may not be twice that of the best implementation of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import glulam.integrations.transformers as integration
from glulam.tuner.timing import Sampler

from ..cells import OURS
from ..contest import Measure, or_left_out, records_of, relative_error
from ..options import Options
from ..results import Record
from ..timing import Run, capture, host_sampler, in_turns, per_call

BUILT_IN = ("eager", "grouped_mm", "batched_mm")
TOKENS = (1, 16, 256, 8192)
INPUTS = 16
"""Inputs that take turns, so that the experts of one token have left L2 before they are read again."""
MOST_ERROR = 2.0
MOST_BATCHED = 256
"""The most tokens that batched_mm is timed with: it copies the weights of every choice, which may also take at most
half of the free memory.
"""
CALLS = 16
STEP_TOKENS, STEP_LAYERS, PROMPT, CACHE = 64, 4, 16, 64
"""Sizes of a decoding step: 4 rows an expert of Qwen3-235B-A22B."""
WEIGHT_ONLY = ("mxfp8_weight_only", "mxfp4_weight_only")
STEP = "decoding step, graph"


class Model(NamedTuple):
    """A model of transformers: prefix of its classes' names, its module, its block's class, and its sizes."""

    name: str
    classes: str
    module: str
    block: str
    sizes: dict[str, int | bool]


QWEN3 = Model(
    "Qwen3-30B-A3B", "Qwen3Moe", "qwen3_moe", "Qwen3MoeSparseMoeBlock",
    {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
     "norm_topk_prob": True},
)  # fmt: skip
GPT_OSS_20B = Model(
    "gpt-oss-20b", "GptOss", "gpt_oss", "GptOssMLP",
    {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4},
)  # fmt: skip
QWEN3_235B = QWEN3._replace(
    name="Qwen3-235B-A22B", sizes={**QWEN3.sizes, "hidden_size": 4096, "moe_intermediate_size": 1536}
)
ATTENTION = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128}


def _config_of(model: Model, **more: Any) -> Any:
    import transformers

    return getattr(transformers, f"{model.classes}Config")(**model.sizes, **more)


def _new_block(model: Model, config: Any) -> nn.Module:
    """Return the model's MoE block in bfloat16, with weights scaled so that activations are of order 1."""
    module = __import__(f"transformers.models.{model.module}.modeling_{model.module}", fromlist=[model.block])
    config._experts_implementation = BUILT_IN[0]
    torch.manual_seed(0)
    with torch.device("cuda"):
        block: nn.Module = getattr(module, model.block)(config).to(torch.bfloat16).eval().requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1)
    return block


def _result(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _errors(model: Model, block: nn.Module, config: Any, names: list[str], x: Tensor) -> dict[str, float]:
    """Return the error of each implementation against float32. Raises RuntimeError if ours is too large."""
    wide = _new_block(model, config).float()
    wide.load_state_dict({name: value.float() for name, value in block.state_dict().items()})
    reference, errors = _result(wide(x.float())), {}
    for name in names:
        config._experts_implementation = name
        errors[name] = relative_error(_result(block(x)), reference)
    best = min(error for name, error in errors.items() if name != OURS)
    if not errors[OURS] <= MOST_ERROR * best:
        raise RuntimeError(f"{model.name}: error {errors[OURS]:.2g}, of transformers {best:.2g}; nothing was timed")
    return errors


def _names(model: Model, block: Any, tokens: int) -> list[str]:
    """Return the implementations that are measured; batched_mm only if its copies of weights fit."""
    experts = next(iter(block.experts.parameters())).shape[0]
    weights = sum(parameter.nbytes for parameter in block.experts.parameters())
    copies = weights * tokens * model.sizes["num_experts_per_tok"] // experts
    batched = tokens <= MOST_BATCHED and copies <= torch.cuda.mem_get_info()[0] // 2
    return [OURS, *(name for name in BUILT_IN if name != "batched_mm" or batched)]


def _measure_block(model: Model, tokens: int, budget_s: float) -> Iterator[Record]:
    """Yield two records of the wall time of a call: one for calls one by one, one for a graph."""
    config = _config_of(model)
    block = _new_block(model, config)
    names, count = _names(model, block, tokens), INPUTS if tokens == 1 else 2
    xs = [torch.randn(1, tokens, config.hidden_size, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    errors = _errors(model, block, config, names, xs[0])

    def run(name: str) -> None:
        config._experts_implementation = name
        for x in xs:
            block(x)

    samplers: dict[str, dict[str, Sampler]] = {"eager": {}, "graph": {}}
    for name in names:
        calls = max(CALLS // count, 1)
        samplers["eager"][name] = per_call(host_sampler(partial(run, name), calls, drain=True), count)
        if name != BUILT_IN[0]:  # which asks the host what is routed where, and cannot be captured
            samplers["graph"][name] = per_call(host_sampler(capture(partial(run, name)), 2, drain=True), count)
    for mode, of_mode in samplers.items():
        times = in_turns(of_mode, budget_s / 2)
        yield {"model": model.name, "tokens": tokens, "mode": mode, "errors": errors, "times": times}


def _new_model() -> Any:
    """Return a random model of STEP_LAYERS layers of Qwen3-235B-A22B, in bfloat16 from the start, to save memory."""
    import transformers

    config = _config_of(QWEN3_235B, num_hidden_layers=STEP_LAYERS, **ATTENTION)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return transformers.Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)


def _step(model: Any, implementation: str) -> Run:
    """Capture one decoding step as a graph, and return the graph's replay.

    Each replay computes the same step, although the cache counts its tokens on the device.
    """
    import transformers

    model.set_experts_implementation(implementation)
    ids = torch.randint(3, model.config.vocab_size, (STEP_TOKENS, PROMPT), device="cuda")
    cache = transformers.StaticCache(config=model.config, max_cache_len=CACHE)
    model(ids, past_key_values=cache, use_cache=True)
    last = ids[:, :1].clone()

    def step() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(PROMPT)
        model(last, past_key_values=cache, use_cache=True)

    replay = capture(step)
    return lambda kept=step: replay()  # type: ignore[misc]  # with all memory that the graph reads


def _measure_step(budget_s: float) -> Iterator[Record]:
    """Yield the record of a decoding step. If this version's cache cannot be captured, warn and yield nothing."""
    with or_left_out("the decoding step"):
        model = _new_model()
        steps = {name: _step(model, name) for name in ("grouped_mm", OURS)}
        for recipe in WEIGHT_ONLY:
            integration.register(recipe=recipe)
            steps[f"{OURS}, {recipe}"] = _step(_new_model(), OURS)
            torch.cuda.empty_cache()
        integration.register()
        times = in_turns({name: host_sampler(step, 2, drain=True) for name, step in steps.items()}, budget_s)
        name = f"{QWEN3_235B.name}, {STEP_LAYERS} layers"
        yield {"model": name, "tokens": STEP_TOKENS, "mode": STEP, "times": times}


@torch.no_grad()
def run_transformers(options: Options) -> list[Record]:
    """Measure and return one record for each block, number of tokens and mode; then one for a decoding step."""
    integration.register()
    blocks = [partial(_measure_block, model, tokens) for model in (QWEN3, GPT_OSS_20B) for tokens in TOKENS]
    every: list[tuple[str, Measure]] = [
        *((block.args[0].name, block) for block in blocks),
        (QWEN3_235B.name, _measure_step),
    ]
    wanted = [measure for name, measure in every if options.case in (None, name)]
    return records_of("transformers", wanted, options.budget_s)
