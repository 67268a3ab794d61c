"""transformers' FP8Experts with `experts_implementation="glulam"`, against their dequantised weights, on the CPU."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.criterion import assert_close
from support.fake_gpu import FakeGpu
from support.transformers_models import class_of, config_of
from torch import Tensor, nn

import glulam
from glulam.host import device as gpus

transformers = pytest.importorskip("transformers")
integration = importlib.import_module("glulam.integrations.transformers")
fp8_experts = importlib.import_module("glulam.integrations.fp8_experts")
finegrained = importlib.import_module("transformers.integrations.finegrained_fp8")

pytest_plugins = ["support.fixtures"]

BF16, E4M3, E8M0 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu
EXPERTS, HIDDEN, TOKENS, TOP_K = 5, 160, 23, 2
KINDS = {
    "float32": ((128, 128), torch.float32, 128), "ue8m0": ((128, 128), E8M0, 256), "squares": ((32, 32), E8M0, 96),
    "rows": ((1, 32), E8M0, 96),
}  # fmt: skip
"""Block size, dtype of scales, and an I that is served."""
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


def experts_of(kind: str = "float32", width: int | None = None, hidden: int = HIDDEN, **options: Any) -> Any:
    """Return FP8 experts with random finite elements, and scales that differ by expert and block."""
    block, dtype, default = KINDS[kind]
    width = default if width is None else width
    config = SimpleNamespace(
        hidden_size=hidden, moe_intermediate_size=width, num_experts=EXPERTS, hidden_act="silu",
        _experts_implementation="glulam", **options.pop("config", {}),
    )  # fmt: skip
    if "expert_dtype" not in inspect.signature(finegrained.FP8Experts.__init__).parameters:  # before 5.23
        config.expert_dtype = options.pop("expert_dtype", "fp8")
    has_gate = options.get("has_gate", True)
    made = finegrained.use_experts_implementation(
        type("FP8Experts", (finegrained.FP8Experts,), {}),
        experts_interface=finegrained.ALL_FP8_EXPERTS_FUNCTIONS, has_gate=has_gate,
    )  # fmt: skip
    scale_fmt = "ue8m0" if dtype == E8M0 else "float"
    experts = made(config, **{"block_size": list(block), "scale_fmt": scale_fmt, **options})
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            codes = torch.randint(256, parameter.shape, dtype=torch.uint8, generator=generator)
            if parameter.dtype == E4M3:
                parameter.copy_(codes.masked_fill(codes % 128 == 127, 3).view(E4M3))
            elif parameter.dtype == E8M0:
                parameter.copy_((codes % 5 + 115).view(E8M0))
            elif name.endswith("scale_inv"):
                parameter.copy_((1 + codes / 256) * torch.exp2(-12 + codes.float() % 5))
    return experts.eval()


def values_of(experts: Any, name: str) -> Tensor:
    """Dequantise a weight to float64, by the format's definition."""
    data, scale = (getattr(experts, key).detach() for key in (name, f"{name}_scale_inv"))
    rows, columns = data.shape[1:]
    block = experts.block_size
    wide = scale.float().double()[:, torch.arange(rows) // block[0]][:, :, torch.arange(columns) // block[1]]
    return data.double() * wide


def routed(ids: Tensor | None = None) -> dict[str, Tensor]:
    """Return tokens and choices: expert 1 gets no token, and a third of the choices belong to another rank."""
    generator = torch.Generator().manual_seed(3)
    if ids is None:
        ids = torch.tensor([0, 2, 3, 4])[torch.rand(TOKENS, 4, generator=generator).topk(TOP_K).indices]
        ids[::3, 1] = EXPERTS
    weights = torch.rand(TOKENS, TOP_K, generator=generator) + 0.1
    return {
        "hidden_states": torch.randn(TOKENS, HIDDEN, generator=generator).to(BF16),
        "top_k_index": ids, "top_k_weights": weights.to(BF16),
    }  # fmt: skip


def expected(
    experts: Any, given: dict[str, Tensor], dtype: torch.dtype, limit: float = 0.0,
    caps: tuple[float, ...] = (),
) -> Tensor:  # fmt: skip
    """Compute SwiGLU experts by torch's operators in a dtype, with weights rounded to bfloat16; rows are weighted and
    summed in float64.
    """
    x, ids, weights = given.values()
    out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    w1, w2 = (values_of(experts, name).float().to(BF16).to(dtype) for name in ("gate_up_proj", "down_proj"))
    for expert in range(EXPERTS):
        token, choice = torch.where(ids == expert)
        gate, up = (x[token].to(dtype) @ w1[expert].T).chunk(2, dim=1)
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        act = nn.functional.silu(gate) * up
        if caps:
            act = math.prod(cap * torch.tanh(x / cap) for x, cap in zip((gate, up), caps, strict=True))
            act = act * torch.sigmoid(gate)
        rows = act @ w2[expert].T
        rows = rows * weights[token, choice, None].to(dtype)
        out.index_add_(0, token, rows.double())
    return out.to(dtype)


@pytest.fixture
def weight_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the recipe for GPUs without an FP8 MMA."""
    monkeypatch.setattr(fp8_experts, "recipe_of", lambda experts, fp8: fp8.served.weight_only)


@each_kind
@pytest.mark.usefixtures("weight_only")
def test_results_are_those_of_the_dequantised_experts(kind: str) -> None:
    experts, given = experts_of(kind), routed()
    with torch.no_grad():
        got = experts(*given.values())
        assert torch.equal(experts(*given.values()), got)
    assert_close(got, *(expected(experts, given, dtype) for dtype in (torch.float64, BF16)), TOKENS)


@pytest.mark.parametrize("width", [128, 384])
@pytest.mark.parametrize("kind", ["float32", "ue8m0"])
def test_rows_are_quantised_where_kernels_have_an_fp8_mma(kind: str, width: int) -> None:
    """By recipe "fp8_block", whose own tests compare it with float64."""
    experts, given = experts_of(kind, width), routed()
    with torch.no_grad():
        got = experts(*given.values())
    weights = [
        glulam.FP8BlockTensor(getattr(experts, name).detach(), getattr(experts, f"{name}_scale_inv").detach().float())
        for name in ("gate_up_proj", "down_proj")
    ]
    routing = glulam.Routing.from_topk(given["top_k_index"], given["top_k_weights"], EXPERTS)
    assert torch.equal(got, glulam.moe(given["hidden_states"], routing, *weights, recipe="fp8_block"))
    exact = expected(experts, given, torch.float64)
    error = float((got.double() - exact).norm() / exact.norm())
    assert 0.01 < error < 0.08, "rows were not rounded to E4M3"


@each_kind
def test_weights_and_state_stay_as_they_are(kind: str) -> None:
    experts, given = experts_of(kind), routed()
    before = {name: (value.data_ptr(), value.dtype) for name, value in experts.state_dict().items()}
    with torch.no_grad():
        wanted = experts(*given.values())
        assert {name: (v.data_ptr(), v.dtype) for name, v in experts.state_dict().items()} == before
        for name in ("gate_up_proj", "down_proj"):
            assert fp8_experts.weight(experts, name).data.data_ptr() == getattr(experts, name).data_ptr()
        for copied in (copy.deepcopy(experts), experts_of(kind)):
            assert torch.equal(copied(*given.values()), wanted)


@each_kind
def test_a_state_that_is_loaded_later_is_used(kind: str) -> None:
    experts, given = experts_of(kind), routed()
    with torch.no_grad():
        before = experts(*given.values())
        state = {name: value.clone() for name, value in experts.state_dict().items()}
        bits = state["down_proj_scale_inv"].view(torch.uint8 if kind != "float32" else torch.int32)
        bits += 1 if kind != "float32" else 1 << 23  # twice the scale
        experts.load_state_dict(state)
        assert torch.equal(experts(*given.values()), 2 * before) and before.abs().max() > 0.01


@pytest.mark.usefixtures("weight_only")
def test_limits_of_a_gate_are_seen() -> None:
    experts, given = experts_of(config={"swiglu_limit": 1.25}), routed()
    with torch.no_grad():
        got = experts(*given.values())
    exact, same = (expected(experts, given, dtype, limit=1.25) for dtype in (torch.float64, BF16))
    assert_close(got, exact, same, TOKENS)
    assert not torch.allclose(exact, expected(experts, given, torch.float64), rtol=0.1)


@pytest.mark.usefixtures("weight_only")
@pytest.mark.skipif(
    "gate_softcap" not in inspect.getsource(finegrained.FP8Experts), reason="FP8Experts has no such gate"
)
def test_caps_of_a_gate_are_seen() -> None:
    caps = 0.75, 1.25
    experts, given = experts_of(config={"mlp_gate_softcap": caps[0], "mlp_up_softcap": caps[1]}), routed()
    with torch.no_grad():
        got = experts(*given.values())
    exact, same = (expected(experts, given, dtype, caps=caps) for dtype in (torch.float64, BF16))
    assert_close(got, exact, same, TOKENS)
    assert not torch.allclose(exact, expected(experts, given, torch.float64), rtol=0.1)


def test_threads_may_make_the_first_call_at_once() -> None:
    """One makes the scales, the others wait for it."""
    given, threads = routed(), 4
    with torch.no_grad():
        wanted = experts_of("ue8m0")(*given.values())

    def call(experts: Any, barrier: threading.Barrier) -> Tensor:
        barrier.wait()
        with torch.no_grad():
            made: Tensor = experts(*given.values())
        return made

    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            experts, barrier = experts_of("ue8m0"), threading.Barrier(threads)
            for got in [pool.submit(call, experts, barrier) for _ in range(threads)]:
                assert torch.equal(got.result(), wanted)


@pytest.mark.parametrize("width", [80, 160])
def test_experts_without_a_gate_of_any_width(width: int) -> None:
    experts, given = experts_of(width=width, has_gate=False), routed()
    with torch.no_grad():
        got = experts(*given.values())
    weights = [
        glulam.FP8BlockTensor(getattr(experts, name).detach(), getattr(experts, f"{name}_scale_inv").detach())
        for name in ("up_proj", "down_proj")
    ]
    routing = glulam.Routing.from_topk(given["top_k_index"], given["top_k_weights"], EXPERTS)
    wanted = glulam.moe(given["hidden_states"], routing, *weights, activation="silu", recipe="fp8_block")
    assert torch.equal(got, wanted) and got.abs().max() > 0.1


@each_kind
def test_a_compiled_module_has_no_graph_break(kind: str) -> None:
    """Where scales are made, of a module that was called before."""
    torch.compiler.reset()
    experts, given = experts_of(kind), routed()
    compiled = torch.compile(lambda *tensors: experts(*tensors), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        if fp8_experts.SERVED[KINDS[kind][:2]].make_scales is not None:
            with pytest.raises(Exception, match="call the model once before it is compiled"):
                compiled(*given.values())
            experts(*given.values())
            torch.compiler.reset()
        got = compiled(*given.values())
        assert torch.equal(got, experts(*given.values())) and got.abs().max() > 0.1


# What is refused ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "static scales": ({"activation_scheme": "static"}, "FP8Experts has activation_scheme 'static'"),
    "FP4": ({"expert_dtype": "fp4"}, r"FP8Experts\.gate_up_proj is torch\.int8, two FP4 elements a byte"),
    "a scale for all": ({"block_size": None}, r"has block_size None with scales torch\.float32 .*; served are \(128, "),
    "blocks of 64": ({"block_size": [64, 64]}, r"has block_size \(64, 64\) with scales torch\.float32"),
    "squares with float32": ({"block_size": [32, 32]}, r"block_size \(32, 32\) with scales torch\.float32"),
    "halves that end inside a block": (
        {"width": 160}, r"FP8Experts\.gate_up_proj_scale_inv: halves of 160 rows end inside a block.*load_experts"
    ),
    "halves of less than a block": ({"width": 64}, r"gate_up_proj_scale_inv: halves of 64 rows end inside a block"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    options, message = REFUSED[name]
    experts = experts_of(**copy.deepcopy(options))
    with torch.no_grad(), pytest.raises(NotImplementedError, match=f"glulam: .*{message}") as raised:
        experts(*routed().values())
    assert "choose another experts_implementation" in str(raised.value)


def test_weights_that_were_cast_after_the_first_call_are_refused() -> None:
    experts, given = experts_of(), routed()
    with torch.no_grad():
        experts(*given.values())
        experts.to(BF16)
        with pytest.raises(
            NotImplementedError, match=r"FP8Experts\.gate_up_proj is torch\.bfloat16, no FP8; served is"
        ):
            experts(*given.values())


@each_kind
def test_tokens_and_weights_of_choices_have_gradients(kind: str) -> None:
    """By weights alone, whatever recipe serves without gradients: those of the dequantised experts."""
    experts, given = experts_of(kind), routed()
    assert not experts(*given.values()).requires_grad, "frozen weights"
    trained, upstream = ("hidden_states", "top_k_weights"), torch.randn(TOKENS, HIDDEN)
    found = []
    for run, dtype in (
        (lambda made: experts(*made.values()), BF16),
        *((None, dtype) for dtype in (torch.float64, BF16)),
    ):
        made = {name: t.to(dtype) if name in trained else t for name, t in given.items()}
        leaves = [made[name].requires_grad_() for name in trained]
        out = run(made) if run is not None else expected(experts, made, dtype)
        found.append(torch.autograd.grad(out, leaves, upstream.to(dtype)))
    for got, exact, same in zip(*found, strict=True):
        error, yardstick = (float((one.double() - exact).norm() / exact.norm()) for one in (got, same))
        assert error <= 2 * yardstick < 0.1


# On a GPU -------------------------------------------------------------------------------------------------------------


@each_kind
def test_few_tokens_are_one_call_on_a_gpu(kind: str, fake_gpu: FakeGpu) -> None:
    experts, given = experts_of(kind), routed()
    with torch.no_grad():
        wanted = experts(*given.values())
        fake_gpu.launches.clear()
        got = experts(*given.values())
    assert len(fake_gpu.launches) == 1 and torch.equal(got, wanted)
    exact = expected(experts, given, torch.float64)
    assert float((got.double() - exact).norm() / exact.norm()) < 0.08


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_89", "sm_100", "sm_120"])
@each_kind
def test_every_gpu_gets_a_recipe_that_its_kernels_have(
    kind: str, arch: str, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = gpus.gpu(0)._replace(arch=arch)
    monkeypatch.setattr(gpus, "gpu", lambda index: gpu)
    experts, given = experts_of(kind), routed()
    plan = integration.plan_of(experts)
    recipe = dict(plan.options)["recipe"]
    wanted = ("fp8_block" if arch == "sm_90a" else "fp8_block_weight_only") if "32" in kind[-2:] else recipe
    with torch.no_grad():
        experts(*given.values())
        weights = [fp8_experts.weight(experts, name) for name in plan.weights]
    found = glulam.explain("grouped_mlp", given["hidden_states"], *weights, splits=[5, 0, 6, 6, 6], recipe=recipe)
    assert found.spec is not None and found.spec.arch == arch and recipe == wanted


# Whole models ---------------------------------------------------------------------------------------------------------


def block_scales(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight as FP8 checkpoints do: E4M3 [out, in], and float32 scales of 128 x 128 blocks."""
    made = glulam.quantize_fp8_block(weight)
    return made.data, made.scale


@pytest.fixture(params=["Qwen3Moe", "DeepseekV3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """A checkpoint folder with FP8 experts, stored expert by expert, and the bfloat16 model with the same values.

    transformers loads such a folder without a GPU only if its quantizer does not look for one, so that check is
    disabled.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 144, "moe_intermediate_size": 128, "num_experts": 4, "n_routed_experts": 4}
    known = {name: size for name, size in sizes.items() if hasattr(config_of(request.param), name)}
    model = class_of(request.param)._from_config(config_of(request.param, **known), experts_implementation="eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model = model.to(BF16).eval()
    model.save_pretrained(tmp_path / "wide")
    state = load_file(tmp_path / "wide" / "model.safetensors")
    wide = dict(state)
    for name in [name for name in state if ".experts." in name and name.endswith("proj.weight")]:
        data, scale = block_scales(state[name])
        state |= {name: data, f"{name}_scale_inv": scale}
        wide[name] = glulam.FP8BlockTensor(data, scale).dequantize(BF16)
    assert len(state) > len(wide)
    save_file(wide, tmp_path / "wide" / "model.safetensors", {"format": "pt"})
    folder = tmp_path / "fp8"
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": [r".*self_attn.*", r".*shared_experts.*", r".*mlp\.(gate|up|down)_proj", "lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    quantizer = importlib.import_module("transformers.quantizers.quantizer_finegrained_fp8").FineGrainedFP8HfQuantizer
    monkeypatch.setattr(quantizer, "validate_environment", lambda *_, **__: None)
    return folder, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=BF16)


def test_a_checkpoint_in_fp8_is_used_as_it_is_shipped(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    """Loaded, run, compiled, generating, and saved again as it was."""
    folder, twin = checkpoint
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=BF16, experts_implementation="glulam")
    experts = model.model.layers[-1].mlp.experts
    assert type(experts).__name__ == "FP8Experts" and experts.gate_up_proj.dtype == E4M3
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    twin.set_experts_implementation("eager")
    with torch.no_grad():
        wanted, got = twin(ids).logits, model(ids).logits
        error = float((got - wanted).float().norm() / wanted.float().norm())
        assert 0 < error < 0.1 and wanted.abs().max() > 0.1
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(ids).logits, got)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
        assert model.generate(ids, **options).shape == (2, 13)
    model.save_pretrained(tmp_path / "again")
    first, second = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "again"))
    assert first.keys() == second.keys()
    experts_of_both = [(value, second[name]) for name, value in first.items() if ".experts." in name]
    assert len(experts_of_both) >= 24 and {one.dtype for one, _ in experts_of_both} == {E4M3, torch.float32}
    for one, other in experts_of_both:
        assert one.dtype == other.dtype and torch.equal(
            one.flatten().view(torch.uint8), other.flatten().view(torch.uint8)
        )
