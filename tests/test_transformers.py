"""Models of transformers with `experts_implementation="glulam"`, against their own experts, on the CPU."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import json
import math
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fake_gpu import FakeGpu
from support.transformers_models import EXPERTS, HIDDEN, INTER, MODELS, TOP_K, class_of, config_of
from torch import Tensor, nn

import glulam
from cute_kernels.specs import GATED, GLU_LAYOUTS, UNGATED
from examples import finetune_moe, generate_moe
from glulam import MXFP4Tensor
from glulam.activations import Activation, activate
from glulam.integrations.gates import CAPPED, CLAMPED, activation_of, gate_of
from glulam.layer import choices

transformers = pytest.importorskip("transformers")
integration = importlib.import_module("glulam.integrations.transformers")

pytest_plugins = ["support.fixtures"]

CPU = torch.device("cpu")
TOKENS = 17


@pytest.fixture(autouse=True)
def registered() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.register()


def model_of(name: str, **sizes: int) -> Any:
    """Return a small eager model in float32, with random weights and biases of order 1."""
    torch.manual_seed(0)
    model = class_of(name)._from_config(config_of(name, **sizes), experts_implementation="eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(3, 64, (rows, 9), generator=torch.Generator().manual_seed(1))


def close(got: Tensor, wanted: Tensor) -> None:
    """Check that results agree within float32 rounding of the largest value; a wrong gate, order or weight differs by
    about 1.
    """
    scale = float(wanted.detach().abs().max())
    assert scale > 0.0
    assert float((got - wanted).detach().abs().max()) <= 2e-5 * scale


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_eager(name: str) -> None:
    results = []
    for implementation in ("eager", "glulam"):
        model = model_of(name)
        model.set_experts_implementation(implementation)
        out = model(tokens(), labels=tokens())
        out.loss.backward()
        results.append((out.logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (wanted, wanted_grads), (got, grads) = results
    close(got, wanted)
    assert grads.keys() == wanted_grads.keys() and any("experts" in key for key in grads)
    for key, grad in grads.items():
        close(grad, wanted_grads[key])


@pytest.mark.parametrize("name", MODELS)
def test_generation_is_the_same_text(name: str) -> None:
    model, ids = model_of(name), tokens()
    texts = []
    for implementation in ("eager", "glulam"):
        model.set_experts_implementation(implementation)
        texts.append(model.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids)))
    assert torch.equal(*texts) and texts[0].shape[1] > ids.shape[1]


def test_a_compiled_model_has_no_graph_break() -> None:
    torch.compiler.reset()
    model = model_of("GptOss")
    model.set_experts_implementation("glulam")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(compiled(tokens()).logits, model(tokens()).logits)


def test_a_model_that_was_called_needs_no_call_while_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before torch 2.13, where a call would break the graph."""
    torch.compiler.reset()
    model = model_of("GptOss")
    model.set_experts_implementation("glulam")
    monkeypatch.setattr(integration, "_traced_plan", torch.compiler.disable(integration._kept_plan))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(tokens())
    torch.compiler.reset()
    wanted = model(tokens()).logits
    close(compiled(tokens()).logits, wanted)


def test_it_can_be_asked_for_by_name_and_weights_stay_where_they_are() -> None:
    config = model_of("Qwen3Moe").config
    model = transformers.Qwen3MoeForCausalLM._from_config(config, experts_implementation="glulam")
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    model(tokens())
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    other = transformers.Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager")
    other.load_state_dict(model.state_dict())
    close(model(tokens()).logits, other(tokens()).logits)
    close(copy.deepcopy(model)(tokens()).logits, other(tokens()).logits)


EXPERTS_CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV4Experts": ("deepseek_v4", {"swiglu_limit": 1.5}),
    "MiniMaxM3VLExperts": ("minimax_m3_vl", {"swiglu_limit": 1.25, "swiglu_alpha": 1.3}),
    "OpenAIPrivacyFilterExperts": ("openai_privacy_filter", {"swiglu_limit": 2.0, "swiglu_alpha": 1.702}),
    "MuseSparkExperts": ("muse_spark", {"moe_hidden_size": HIDDEN, "post_norm_eps": 1e-5}),
    "Inkling2Experts": ("inkling2", {"mlp_gate_softcap": 1.5, "mlp_up_softcap": 2.5}),
    "AriaExperts": ("aria", {"moe_num_experts": EXPERTS, "intermediate_size": INTER}),
    "NemotronHExperts": ("nemotron_h", {"moe_latent_size": None, "mlp_hidden_act": "relu2"}),
    "Qwen3MoeExperts": ("qwen3_moe", {"hidden_act": "gelu_pytorch_tanh"}),
}


def experts_of(name: str, **options: Any) -> Any:
    """Return an eager module of experts alone. Skips the test if this version of transformers lacks the model."""
    module, more = EXPERTS_CLASSES[name]
    more = more | options
    torch.manual_seed(2)
    config = SimpleNamespace(**{
        "hidden_size": HIDDEN, "moe_intermediate_size": INTER, "intermediate_size": INTER, "hidden_act": "silu",
        "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, **more,
    })  # fmt: skip
    config._experts_implementation = "eager"
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    experts = getattr(modeling, name)(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    return experts


def routed(ids: Tensor | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if ids is None:
        ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    return {
        "hidden_states": torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_(),
        "top_k_index": ids,
        "top_k_weights": torch.rand(TOKENS, TOP_K, generator=generator).requires_grad_(),
    }


def run(experts: Any, implementation: str, given: dict[str, Tensor]) -> list[Tensor]:
    """Run forward and backward; return the result and the gradients of tokens, choice weights and parameters."""
    experts.config._experts_implementation = implementation
    out = experts(*given.values())
    inputs = [given["hidden_states"], given["top_k_weights"], *experts.parameters()]
    return [out, *torch.autograd.grad(out.sin().sum(), inputs)]


def run_once(experts: Any, implementation: str, given: dict[str, Tensor]) -> Tensor:
    experts.config._experts_implementation = implementation
    out: Tensor = experts(*given.values())
    return out


@pytest.mark.parametrize("name", EXPERTS_CLASSES)
def test_every_form_of_experts(name: str) -> None:
    experts, given = experts_of(name), routed()
    for got, wanted in zip(run(experts, "glulam", given), run(experts, "eager", given), strict=True):
        close(got, wanted)


def test_what_is_done_to_rows_by_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """As versions after 5.23 have it: most modules get a method that does nothing."""
    experts, given = experts_of("MuseSparkExperts"), routed()
    wanted = run(experts, "eager", given)
    experts.has_post_expert_norm = False
    plain = run_once(experts, "glulam", given)
    del experts.glulam_plan
    monkeypatch.setattr(type(experts), "_apply_post_expert", lambda self, rows: rows, raising=False)
    assert torch.equal(run_once(experts, "glulam", given), plain)
    del experts.glulam_plan
    monkeypatch.setattr(type(experts), "_apply_post_expert", lambda self, rows: self.post_expert_norm(rows))
    for got, one in zip(run(experts, "glulam", given), wanted, strict=True):
        close(got, one)
    assert not torch.allclose(plain, wanted[0], rtol=0.1)


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_choices_of_other_ranks_have_no_part(new_memory_is_nan: None) -> None:
    given = routed()
    given["top_k_index"][::2, 1] = EXPERTS
    for name in ("Qwen3MoeExperts", "MuseSparkExperts"):
        experts = experts_of(name)
        for got, wanted in zip(run(experts, "glulam", given), run(experts, "eager", given), strict=True):
            close(got, wanted)


@pytest.mark.parametrize("count", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_a_rank_with_a_part_of_the_experts_expects_a_part_of_the_rows(
    count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless tokens come one by one for their experts, as an all-to-all brings them."""
    told: list[Any] = []
    sort = glulam.Routing.from_topk.__func__
    monkeypatch.setattr(
        glulam.Routing, "from_topk", classmethod(lambda *given, **named: told.append(named) or sort(*given, **named))
    )
    for world, k, wanted in ((EXPERTS, TOP_K, None), (8 * EXPERTS, TOP_K, 8 * EXPERTS), (8 * EXPERTS, 1, None)):
        for name in ("Qwen3MoeExperts", "MuseSparkExperts"):
            experts, given = experts_of(name), routed()
            for other in ("num_experts", "num_local_experts", "n_routed_experts"):
                delattr(experts.config, other)
            setattr(experts.config, count, world)
            given = {**given, **{of: given[of][:, :k] for of in ("top_k_index", "top_k_weights")}}
            told.clear()
            for got, right in zip(run(experts, "glulam", given), run(experts, "eager", given), strict=True):
                close(got, right)
            assert told and all(one["world_experts"] == wanted for one in told)


@pytest.mark.usefixtures("recipe_after")
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8_weight_only"])
def test_an_activation_that_is_replaced_after_the_first_call_is_seen(recipe: str) -> None:
    integration.register(recipe=recipe)
    made = {"hidden_act": "silu", "moe_intermediate_size": HIDDEN}
    experts, given = experts_of("Qwen3MoeExperts", **made).eval(), routed()
    with torch.no_grad():
        before = run_once(experts, "glulam", given)
        experts.act_fn = transformers.activations.ACT2FN["gelu_pytorch_tanh"]
        after = run_once(experts, "glulam", given)
        fresh = experts_of("Qwen3MoeExperts", **made).eval()
        fresh.act_fn = experts.act_fn
        assert torch.equal(after, run_once(fresh, "glulam", given))
    assert not torch.allclose(after, before, rtol=0.1)
    experts.act_fn = nn.Softplus()
    with pytest.raises(NotImplementedError, match=r"Qwen3MoeExperts\._apply_gate is no activation"):
        run_once(experts, "glulam", given)


def test_a_limit_that_is_replaced_after_the_first_call_is_seen() -> None:
    experts, given = experts_of("MiniMaxM3VLExperts"), routed()
    for limit, alpha in ((1.25, 1.3), (2.0, 1.3), (2.0, 1)):
        experts.swiglu_limit, experts.swiglu_alpha = limit, alpha
        close(run_once(experts, "glulam", given), run_once(experts, "eager", given))


@pytest.mark.parametrize("was_called", [False, True])
def test_an_activation_that_is_replaced_in_a_compiled_model_is_seen(was_called: bool) -> None:
    torch.compiler.reset()
    model = model_of("Qwen3Moe")
    model.set_experts_implementation("glulam")
    if was_called:
        model(tokens())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(tokens())
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = transformers.activations.ACT2FN["gelu_pytorch_tanh"]
    got = compiled(tokens()).logits
    model.set_experts_implementation("eager")
    close(got, model(tokens()).logits)


def test_a_copy_of_a_module_that_was_called_is_called_as_it_is() -> None:
    experts, given = experts_of("Qwen3MoeExperts"), routed()
    wanted = run_once(experts, "glulam", given)
    for copied in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert torch.equal(run_once(copied, "glulam", given), wanted)
        assert copied.state_dict().keys() == experts.state_dict().keys()
        assert [name for name, _ in copied.named_modules()] == ["", "act_fn"]


def test_a_gate_that_glulam_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that clamps what silu makes."""
    experts = experts_of("Qwen3MoeExperts")

    def gate(self: Any, h: Tensor) -> Tensor:
        a, u = h.chunk(2, dim=-1)
        return self.act_fn(a).clamp(max=1.5) * u.clamp(-1.5, 1.5)

    monkeypatch.setattr(type(experts), "_apply_gate", gate)
    with pytest.raises(NotImplementedError, match=r"Qwen3MoeExperts\._apply_gate is no activation"):
        run(experts, "glulam", routed())


@pytest.fixture
def recipe_after() -> Iterator[None]:
    yield
    integration.register()


@pytest.mark.usefixtures("recipe_after")
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_weight_only", "mxfp4_weight_only"])
@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "AriaExperts", "NemotronHExperts", "OpenAIPrivacyFilterExperts"])
def test_weights_are_quantised_in_place(name: str, recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    experts = experts_of(name, intermediate_size=64, moe_intermediate_size=64).to(torch.bfloat16).eval()
    given = {key: value.detach() for key, value in routed().items()}
    given["hidden_states"] = given["hidden_states"].bfloat16()
    plain = run_once(experts, "eager", given)
    before = sum(p.nbytes for n, p in experts.named_parameters() if "bias" not in n)
    integration.register(recipe=recipe)
    with caplog.at_level("INFO"), torch.no_grad():
        got, again = (run_once(experts, "glulam", given) for _ in range(2))
    assert torch.equal(got, again) and f"{type(experts).__name__} in {recipe}" in caplog.text
    error = float((got - plain).float().norm() / plain.float().norm())
    assert 1e-3 < error < (0.35 if recipe.startswith("mxfp4") else 0.1)
    left = {n: b for n, b in experts.named_buffers() if "proj" in n}
    assert not [n for n, _ in experts.named_parameters() if n.endswith("proj")] and len(left) == 4
    assert sum(b.nbytes for b in left.values()) <= before * (4.25 if recipe.startswith("mxfp4") else 8.25) / 16
    copied = copy.deepcopy(experts)
    with torch.no_grad():
        assert torch.equal(run_once(copied, "glulam", given), got)


@pytest.mark.usefixtures("recipe_after")
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_weight_only", "mxfp4_weight_only"])
def test_threads_may_make_the_first_call_at_once(recipe: str) -> None:
    """One quantises the weights, the others wait for it and have the same logits."""
    first = model_of("GptOss", intermediate_size=HIDDEN).to(torch.bfloat16).eval()
    first.set_experts_implementation("glulam")
    models = [copy.deepcopy(first) for _ in range(8)]
    integration.register(recipe=recipe)
    with torch.no_grad():
        wanted = first(tokens()).logits
    assert bool(wanted.isfinite().all()) and float(wanted.float().abs().max()) > 0.1
    threads = 4

    def call(model: Any, barrier: threading.Barrier) -> Tensor:
        barrier.wait()
        with torch.no_grad():
            logits: Tensor = model(tokens()).logits
        return logits

    with ThreadPoolExecutor(threads) as pool:
        for model in models:
            barrier = threading.Barrier(threads)
            for made in [pool.submit(call, model, barrier) for _ in range(threads)]:
                assert torch.equal(made.result(), wanted)


@pytest.mark.usefixtures("recipe_after")
def test_quantised_experts_can_be_pickled() -> None:
    experts = experts_of("Qwen3MoeExperts", moe_intermediate_size=64).to(torch.bfloat16).eval()
    given = {key: value.detach() for key, value in routed().items()}
    given["hidden_states"] = given["hidden_states"].bfloat16()
    integration.register(recipe="mxfp8_weight_only")
    with torch.no_grad():
        wanted = run_once(experts, "glulam", given)
        assert torch.equal(run_once(pickle.loads(pickle.dumps(experts)), "glulam", given), wanted)


@pytest.mark.usefixtures("recipe_after")
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_weight_only", "mxfp4_weight_only"])
def test_state_of_quantised_experts_is_never_converted(recipe: str) -> None:
    """8-bit floats load as the bytes that they are; weights in 16 bits, which may have the same shape, are refused."""
    first, second = (
        experts_of("Qwen3MoeExperts", moe_intermediate_size=64).to(torch.bfloat16).eval() for _ in range(2)
    )
    wide, given = first.state_dict(), {key: value.detach() for key, value in routed().items()}
    given["hidden_states"] = given["hidden_states"].bfloat16()
    with torch.no_grad():
        second.down_proj.mul_(-3)
        integration.register(recipe=recipe)
        wanted, before = run_once(first, "glulam", given), run_once(second, "glulam", given)
        with pytest.raises(RuntimeError, match=r"down_proj is torch\.bfloat16"):
            second.load_state_dict(wide, strict=False)
        assert torch.equal(run_once(second, "glulam", given), before) and not torch.equal(before, wanted)
        state = first.state_dict()
        for name, value in state.items():
            if value.dtype == torch.uint8:
                state[name] = value.view(torch.float8_e8m0fnu if name.endswith("scale") else torch.float8_e4m3fn)
        copy.deepcopy(second).load_state_dict(first.state_dict())
        second.load_state_dict(state)
        assert torch.equal(run_once(second, "glulam", given), wanted)


@pytest.mark.usefixtures("recipe_after")
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8_weight_only", "mxfp4_weight_only"])
@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "OpenAIPrivacyFilterExperts"])
def test_few_tokens_are_one_call(name: str, recipe: str, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's are, without gradients; in the same bits as where sorting is a call of its own."""
    experts = experts_of(name, intermediate_size=64, moe_intermediate_size=64).to(torch.bfloat16).eval()
    integration.register(recipe=recipe)
    made = []
    for most in (choices.MOST_SORTED, 0):
        monkeypatch.setattr(choices, "MOST_SORTED", most)
        for of_weights in (torch.float32, torch.bfloat16):
            given = {key: value.detach() for key, value in routed().items()}
            given["top_k_index"][::3, 1] = EXPERTS
            given["hidden_states"] = given["hidden_states"].bfloat16()
            given["top_k_weights"] = given["top_k_weights"].to(of_weights)
            with torch.no_grad():
                run_once(experts, "glulam", given)  # which prepares weights
                fake_gpu.launches.clear()
                made.append(run_once(experts, "glulam", given))
            assert len(fake_gpu.launches) == (1 if most else 2)
    assert torch.equal(made[0], made[2]) and torch.equal(made[1], made[3]) and made[0].abs().max() > 0.1


def test_a_parameter_may_be_made_of_others() -> None:
    experts, given = experts_of("Qwen3MoeExperts"), routed()
    wanted = run_once(experts, "glulam", given)
    nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    assert torch.equal(run_once(experts, "glulam", given), wanted)


@pytest.fixture
def gpt_oss_checkpoint(tmp_path: Path) -> tuple[Path, Any]:
    """A checkpoint folder in gpt-oss's shipped format, and a bfloat16 model with the same values."""
    model = model_of("GptOss", hidden_size=64, intermediate_size=96).to(torch.bfloat16).eval()
    state, generator = dict(model.state_dict()), torch.Generator().manual_seed(2)
    for name in [name for name in state if name.endswith("_proj") and "experts" in name]:
        count, columns, rows = state.pop(name).shape  # transposed
        blocks = torch.randint(256, (count, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, (count, rows, columns // 32), dtype=torch.uint8, generator=generator)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wide = MXFP4Tensor.from_blocks(blocks, scales).dequantize(torch.bfloat16)
        model.get_parameter(name).data.copy_(wide.mT)
    model.save_pretrained(tmp_path / "wide")
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    return tmp_path, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.bfloat16)


@pytest.mark.usefixtures("recipe_after")
def test_a_checkpoint_of_gpt_oss_stays_in_mxfp4(gpt_oss_checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    """Loaded, run, compiled, generating, and saved again as it was."""
    folder, twin = gpt_oss_checkpoint
    integration.register(recipe="mxfp4_weight_only")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    experts = model.model.layers[0].mlp.experts
    w1, w2 = (dict(experts.named_buffers())[name] for name in ("gate_up_proj", "down_proj"))
    assert w1.shape == (EXPERTS, 192, 8) and w2.shape == (EXPERTS, 64, 12) and w1.dtype == torch.int32
    assert {name for name, _ in experts.named_parameters()} == {"gate_up_proj_bias", "down_proj_bias"}
    twin.set_experts_implementation("glulam")
    integration.register()  # what was loaded goes on
    with torch.no_grad():
        wanted, got = twin(tokens()).logits, model(tokens()).logits
        assert torch.equal(got, wanted) and float(wanted.float().abs().max()) > 0.1
        options = {"attention_mask": torch.ones_like(tokens()), "max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(tokens(), **options), twin.generate(tokens(), **options))
    model.save_pretrained(tmp_path / "again")
    first, second = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.usefixtures("recipe_after")
def test_a_checkpoint_of_gpt_oss_in_memory_is_not_written(gpt_oss_checkpoint: tuple[Path, Any]) -> None:
    """Two models of one dictionary have the logits of the dequantised weights."""
    folder, twin = gpt_oss_checkpoint
    state = load_file(folder / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in state.items()}
    integration.register(recipe="mxfp4_weight_only")
    config = transformers.AutoConfig.from_pretrained(folder)
    models = [
        transformers.GptOssForCausalLM.from_pretrained(
            None, config=copy.deepcopy(config), state_dict=dict(state), dtype=torch.bfloat16
        )
        for _ in range(2)
    ]
    assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in state)
    twin.set_experts_implementation("glulam")
    for model in models:
        with torch.no_grad():
            assert torch.equal(model.eval()(tokens()).logits, twin(tokens()).logits)
    first, second = (model.model.layers[0].mlp.experts.down_proj for model in models)
    assert first.dtype == torch.int32 and first.data_ptr() != second.data_ptr()


def changed(folder: Path, change: dict[str, Any]) -> None:
    """Rewrite a checkpoint: replace each tensor whose name ends with a key of `change`; None: remove it."""
    state = load_file(folder / "model.safetensors")
    for end, make in change.items():
        for name in [name for name in state if name.endswith(end)]:
            tensor = state.pop(name)
            if make is not None:
                state[name] = make(tensor)
    save_file(state, folder / "model.safetensors")


@pytest.mark.usefixtures("recipe_after")
@pytest.mark.parametrize("in_memory", [False, True])
def test_scales_of_a_checkpoint_in_8_bit_floats_are_bytes(
    gpt_oss_checkpoint: tuple[Path, Any], in_memory: bool
) -> None:
    folder, twin = gpt_oss_checkpoint
    changed(folder, {"_scales": lambda scales: scales.view(torch.float8_e8m0fnu)})
    integration.register(recipe="mxfp4_weight_only")
    given: dict[str, Any] = {"pretrained_model_name_or_path": folder}
    if in_memory:
        state, config = load_file(folder / "model.safetensors"), transformers.AutoConfig.from_pretrained(folder)
        given = {"pretrained_model_name_or_path": None, "state_dict": state, "config": config}
    model = transformers.GptOssForCausalLM.from_pretrained(**given, dtype=torch.bfloat16).eval()
    twin.set_experts_implementation("glulam")
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(tokens()).logits, twin(tokens()).logits)


@pytest.mark.usefixtures("recipe_after")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int8])
@pytest.mark.parametrize("part", ["layers.1.mlp.experts.down_proj_scales", "layers.0.mlp.experts.gate_up_proj_blocks"])
def test_parts_of_a_checkpoint_in_another_dtype_are_refused(
    gpt_oss_checkpoint: tuple[Path, Any], part: str, dtype: torch.dtype
) -> None:
    folder, _twin = gpt_oss_checkpoint
    changed(folder, {part: lambda tensor: tensor.to(dtype)})
    integration.register(recipe="mxfp4_weight_only")
    with pytest.raises(TypeError, match=rf"{part} is {dtype}"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@pytest.mark.usefixtures("recipe_after")
@pytest.mark.parametrize(
    "parts", [["1.mlp.experts.down_proj_scales"], ["0.mlp.experts.gate_up_proj_blocks"], ["_blocks", "_scales"]]
)
@pytest.mark.parametrize("options", [{}, {"device_map": "cpu"}])
def test_parts_that_a_checkpoint_has_not_are_named(
    gpt_oss_checkpoint: tuple[Path, Any], parts: list[str], options: dict[str, Any]
) -> None:
    folder, _twin = gpt_oss_checkpoint
    changed(folder, dict.fromkeys(parts))
    integration.register(recipe="mxfp4_weight_only")
    with pytest.raises(ValueError, match=f"the checkpoint has no .*{parts[0]}"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


@pytest.mark.usefixtures("recipe_after")
def test_a_checkpoint_of_gpt_oss_is_dequantised_where_that_is_asked_for(gpt_oss_checkpoint: tuple[Path, Any]) -> None:
    folder, twin = gpt_oss_checkpoint
    asked = transformers.Mxfp4Config(dequantize=True)
    for recipe in ("bf16", "mxfp4_weight_only"):
        integration.register(recipe=recipe)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, experts_implementation="glulam", quantization_config=asked
        )
        integration.register()
        assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.bfloat16
        twin.set_experts_implementation("glulam")
        with torch.no_grad():
            assert torch.equal(model.eval()(tokens()).logits, twin(tokens()).logits)


def test_a_quantizer_of_someone_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = importlib.import_module("transformers.quantizers.auto").AUTO_QUANTIZER_MAPPING
    other = object()
    monkeypatch.setitem(mapping, "mxfp4", other)
    integration.register()
    assert mapping["mxfp4"] is other


@pytest.mark.usefixtures("recipe_after")
def test_a_quantizer_of_someone_else_comes_back(
    gpt_oss_checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping = importlib.import_module("transformers.quantizers.auto").AUTO_QUANTIZER_MAPPING
    own, made = mapping["mxfp4"], []

    def other(config: Any, **options: Any) -> Any:
        made.append(config)
        return own(config, **options)

    monkeypatch.setitem(mapping, "mxfp4", other)
    for _ in range(2):
        integration.register(recipe="mxfp4_weight_only")
        assert mapping["mxfp4"] is not other
    asked = transformers.Mxfp4Config(dequantize=True)
    folder = gpt_oss_checkpoint[0]
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=asked)
    assert made, "16-bit weights are the business of the quantizer that was there"
    integration.register()
    assert mapping["mxfp4"] is other


@pytest.mark.usefixtures("recipe_after")
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8_weight_only", "mxfp4_weight_only"])
def test_layers_may_lie_elsewhere(recipe: str, tmp_path: Path) -> None:
    """By a device_map with a layer on disk: its weights are there while its forward runs, or once quantised."""
    model = model_of("GptOss", intermediate_size=HIDDEN).eval()
    model.save_pretrained(tmp_path / "saved")
    integration.register(recipe=recipe)
    parts = "model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"
    on_disk = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk"}
    places: list[dict[str, Any]] = [{}, {"device_map": on_disk, "offload_folder": tmp_path / "offloaded"}]
    logits = []
    for more in places:
        options = {"experts_implementation": "glulam", "dtype": torch.bfloat16, **more}
        loaded = type(model).from_pretrained(tmp_path / "saved", **options).eval()
        with torch.no_grad():
            logits += [loaded(tokens()).logits, loaded(tokens()).logits]
    assert loaded.model.layers[1].self_attn.q_proj.weight.is_meta
    assert all(torch.equal(one, logits[0]) for one in logits[1:])
    assert logits[0].abs().max() > 0.1


@pytest.mark.usefixtures("recipe_after")
def test_quantised_experts_neither_train_nor_are_traced_first() -> None:
    torch.compiler.reset()
    integration.register(recipe="mxfp4_weight_only")
    with pytest.raises(RuntimeError, match=r"have no gradient; call model\.eval\(\)"):
        run_once(experts_of("Qwen3MoeExperts"), "glulam", routed())
    experts = experts_of("Qwen3MoeExperts", moe_intermediate_size=64).to(torch.bfloat16).eval()
    given = {key: value.detach() for key, value in routed().items()}
    given["hidden_states"] = given["hidden_states"].bfloat16()
    compiled = torch.compile(lambda *tensors: experts(*tensors), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        with pytest.raises(Exception, match="call the model once before it is compiled"):
            experts.config._experts_implementation = "glulam"
            compiled(*given.values())
        wanted = run_once(experts, "glulam", given)
        torch.compiler.reset()
        assert torch.equal(compiled(*given.values()), wanted)
    with pytest.raises(ValueError, match="choose one of bf16, mxfp8, mxfp8_weight_only, mxfp4_weight_only"):
        integration.register(recipe="mxfp8_exact")


NUMBERS_OF: dict[str, list[tuple[float, ...]]] = {
    **dict.fromkeys(GATED, [()]),
    CLAMPED: [(7.0, 1.702, 1.0), (1.5, 1.0, 0.0), (10.0, 0.7, 0.25), (100.0, 1.0, 0.0)],
    CAPPED: [(4.0, 25.0), (1.0, math.inf), (30.0, 0.5), (math.inf, 50.0), (1000.0, 1e5)],
}


@pytest.mark.parametrize("layout", GLU_LAYOUTS)
@pytest.mark.parametrize("name", GATED)
def test_gates_are_told_by_what_they_compute(name: str, layout: str) -> None:
    for numbers in NUMBERS_OF[name]:
        gate = Activation(name, layout, numbers)
        assert gate_of(lambda h, gate=gate: activate(h, *gate), CPU) == gate


@pytest.mark.parametrize("layout", GLU_LAYOUTS)
@pytest.mark.parametrize("limit", [50.0, 60.0, 100.0, 1000.0, 7000.0, 1e6])
def test_a_large_limit_is_found(limit: float, layout: str) -> None:
    """SwiGLU that is clamped far out is plain SwiGLU nearly everywhere."""
    for numbers in ((limit, 1.0, 0.0), (limit, 1.702, 1.0)):
        found = gate_of(lambda h, n=numbers: activate(h, CLAMPED, layout, n), CPU)
        assert found is not None and found[:2] == (CLAMPED, layout)
        torch.testing.assert_close(found.numbers, numbers, rtol=1e-8, atol=1e-8)


def test_gates_that_compute_in_float32_are_found() -> None:
    for name, several in NUMBERS_OF.items():
        for numbers in several:
            found = gate_of(lambda h, n=name, p=numbers: activate(h.float(), n, "concat", p), CPU)
            assert found is not None and found.name == name
            torch.testing.assert_close(found.numbers, numbers, rtol=1e-5, atol=1e-5)
    for name in UNGATED:
        assert activation_of(lambda h, n=name: activate(h.float(), n, "concat", ()), CPU) == Activation.named(name)


@pytest.mark.parametrize("name", UNGATED)
def test_activations_are_told_by_what_they_compute(name: str) -> None:
    assert activation_of(lambda h: activate(h, name, "concat", ()), CPU) == Activation.named(name)


@pytest.mark.parametrize(
    "gate",
    [
        lambda a, u: torch.sigmoid(a) * u,
        lambda a, u: torch.nn.functional.silu(a) * (u + 0.5).clamp(-2, 2),
        lambda a, u: torch.nn.functional.silu(a).clamp(max=1.5) * u.clamp(-1.5, 1.5),
        lambda a, u: torch.nn.functional.silu(a) * u * 1.001,
        lambda a, u: torch.nn.functional.silu(a) * u.clamp(-100, 100),
        lambda a, u: torch.nn.functional.silu(a) * u.clamp(min=-1000),
        lambda a, u: torch.nn.functional.silu(a.clamp(max=100)) * u,
        lambda a, u: torch.nn.functional.silu(a.clamp(max=1e6)) * u.clamp(-60, 60),
        lambda a, u: torch.nn.functional.gelu(a) * u.clamp(-100, 100),
        lambda a, u: torch.nn.functional.silu(a) * torch.where(a > 60, 0, u),
        lambda a, u: torch.tanh(a) * torch.sigmoid(a) * 2 * torch.tanh(u),
        lambda a, u: torch.tanh(a) * torch.sigmoid(1.01 * a) * torch.tanh(u),
        lambda a, u: 4 * torch.tanh(a / 4) * torch.sigmoid(a) * u.clamp(-25, 25),
        lambda a, u: torch.nn.functional.silu(a) * (u if len(u) > 1 else 2 * u),
        lambda a, u: torch.nn.functional.silu(a) * (u if len(u) < 200 else 2 * u),
        lambda a, u: torch.nn.functional.silu(a) * (u if u.shape[1] < 100 else 2 * u),
    ],
)
def test_what_is_nearly_one_is_none(gate: Any) -> None:
    assert gate_of(lambda h: gate(*h.chunk(2, dim=1)), CPU) is None


@pytest.mark.parametrize("limit", [60.0, 100.0, 1000.0, 1e6])
@pytest.mark.parametrize("name", UNGATED)
def test_a_clamped_activation_without_a_gate_is_none(name: str, limit: float) -> None:
    clamped = lambda h: activate(h.clamp(max=limit), name, "concat", ())  # noqa: E731
    assert activation_of(clamped, CPU) is None


@pytest.mark.parametrize(("version", "named"), [("6.1.0", "6.1.0"), (None, "of unknown version")])
def test_a_version_that_was_not_tested_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, version: str | None, named: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.warns(RuntimeWarning, match=f"transformers {named} was not tested with Glulam; 5.17, .* were"):
        integration.register()


def test_importing_glulam_imports_none_of_these_packages() -> None:
    """Nor does the integration of transformers, before `register`."""
    packages = "'transformers', 'torchtitan', 'megatron'"
    code = f"import sys, glulam, glulam.integrations.transformers; assert not {{{packages}}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_example_writes_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    generate_moe.main(layers=1, tokens=6, batch=2)
    shown = capsys.readouterr().out
    assert shown.count("100%") == len(generate_moe.BUILT_IN) + 1 and "glulam" in shown
    assert generate_moe.agreement(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 5, 4]])) == 0.5


def test_losses_lie_over_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    data = finetune_moe.batches("cpu", 4, 2)
    models = [generate_moe.make_model(finetune_moe.SHRUNK, "cpu", 1, name) for name in ("eager", "glulam")]
    runs = [finetune_moe.train(model, data)[0] for model in models]
    assert runs[0][-1] < runs[0][0] - 0.05, "nothing was learned"
    assert max(abs(a - b) for a, b in zip(*runs, strict=True)) < 1e-4
    finetune_moe.main(layers=1, steps=2, batch=1)
    assert "glulam" in capsys.readouterr().out
