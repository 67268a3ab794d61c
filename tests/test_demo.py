"""The demo: its layer equals a plain MoE layer, its check can fail, and it runs without a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from support.fake_gpu import FakeGpu

import glulam
from cute_kernels.sm90.configs import shipped_specs
from glulam import demo
from glulam.demo import GPT_OSS, MODELS, QWEN3, QWEN3_30B_A3B, SHRUNK, Error, Size, within_rule

pytest_plugins = ["support.fixtures"]

TINY = Size(hidden=64, intermediate=32, experts=16, top_k=4, tokens=96)
FULL = Size(hidden=256, intermediate=256, experts=4, top_k=2, tokens=4096)  # work enough for the large tile


def made(size=TINY, name=QWEN3):
    torch.manual_seed(1)
    return demo.make_layer(MODELS[name], size, "cpu"), demo.make_input(size, "cpu")


def moe_token_by_token(layer, x):
    """Compute the layer without sorting, each token through its experts, in float64."""
    w1, w2 = demo.weights_of(layer)
    logits = torch.nn.functional.linear(x.float(), layer.router.weight)  # in float64 others might be chosen
    probabilities, experts = logits.double().softmax(dim=-1).topk(TINY.top_k, dim=-1)
    probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, chosen in enumerate(experts.tolist()):
        for weight, expert in zip(probabilities[token], chosen, strict=True):
            gate, up = (w1[expert].double() @ x[token].double()).chunk(2)
            out[token] += w2[expert].double() @ (torch.nn.functional.silu(gate) * up * weight)
    return out


def test_the_reference_is_the_layer_itself():
    layer, x = made()
    exact = demo.exact_moe(layer, x)
    assert float(exact.abs().max()) > 0.1
    torch.testing.assert_close(exact, moe_token_by_token(layer, x), rtol=1e-5, atol=1e-7)


def test_both_ways_compute_the_layer():
    layer, x = made()
    for call in demo.contestants([layer], x).values():
        assert demo.error_of(call(), demo.exact_moe(layer, x)).norm < 0.02


def test_every_recipe_computes_the_layer():
    layer, x = made(name=GPT_OSS)
    layers = [demo.with_recipe(layer, MODELS[GPT_OSS], TINY, recipe) for recipe in MODELS[GPT_OSS].recipes]
    exact, paths = demo.exact_moe(layer, x), demo.contestants(layers, x)
    assert len(paths) == 4 and float(exact.abs().max()) > 0.1
    for name, call in paths.items():
        assert demo.error_of(call(), exact).norm < 0.02, name


@pytest.mark.parametrize("name", [QWEN3, GPT_OSS])
def test_both_choose_the_same_experts(name):
    layer, x = made(name=name)
    routing, (weights, experts) = layer.route(x), demo.choose(layer, x)
    assert torch.equal(routing.ids, experts) and sum(routing.counts.tolist()) == TINY.tokens * TINY.top_k
    torch.testing.assert_close(routing.weights, weights)


def test_the_profile_holds_what_the_demo_calls_and_no_more(fake_gpu: FakeGpu):
    layer, x = made(FULL)
    assert demo.error_of(layer(x), demo.exact_moe(layer, x)).norm < 0.02
    assert set(fake_gpu.specs) == set(shipped_specs(profile="demo"))
    hidden, inner, experts, k, tokens = QWEN3_30B_A3B
    shapes = (tokens * k, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner)
    route, mlp = shipped_specs(profile="demo")[::-1]
    assert glulam.explain("grouped_mlp", *shapes).spec == mlp and route.experts == experts


def test_tokens_repeat_as_words_do():
    torch.manual_seed(0)
    x = demo.make_input(QWEN3_30B_A3B._replace(hidden=64), "cpu")
    _, counts = x.unique(dim=0, return_counts=True)
    assert counts.max() > 50 and len(counts) > 1000, "the most frequent of many"
    torch.testing.assert_close(x.float().square().mean(1), torch.ones(len(x)), rtol=0.02, atol=0)


def test_experts_get_uneven_loads():
    layer, x = made(SHRUNK)
    sizes = layer.route(x).counts.tolist()
    assert max(sizes) > 2 * sum(sizes) / len(sizes)


TORCHS = Error(largest=4e-3, norm=3e-3)


@pytest.mark.parametrize(
    ("ours", "within"),
    [
        (TORCHS, True),
        (Error(7.9e-3, 5.9e-3), True),
        (Error(9e-3, 3e-3), False),
        (Error(4e-3, 7e-3), False),
        (Error(1.0, 1.0), False),
        (Error(math.nan, math.nan), False),
    ],
)
def test_the_rule_of_error(ours, within):
    assert within_rule(ours, TORCHS) is within


def test_a_rule_that_everything_passes_fails():
    assert not within_rule(Error(0.0, 0.0), Error(0.5, 0.5))


@pytest.mark.parametrize("name", MODELS)
def test_demo_runs_on_a_cpu_and_says_what_it_is(capsys, name):
    assert demo.main(["--device", "cpu", "--model", name]) == 0
    shown = capsys.readouterr().out
    assert "CPU reference" in shown and "no claim about speed" in shown
    assert "times the mean" in shown and "experts are empty" in shown
    assert "error    ok" in shown


@pytest.mark.parametrize("wrong", [lambda y: torch.zeros_like(y), lambda y: y.roll(1, 0), lambda y: y * math.nan])
def test_demo_fails_where_the_result_is_wrong(monkeypatch, capsys, wrong):
    right = glulam.nn.MoE.forward
    monkeypatch.setattr(glulam.nn.MoE, "forward", lambda *arguments: wrong(right(*arguments)))
    assert demo.main(["--device", "cpu"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_asking_for_a_gpu_where_there_is_none_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert demo.main(["--device", "cuda"]) == 1
    assert (
        capsys.readouterr().err == "demo: --device cuda: torch finds no GPU; leave the option out to run on the CPU\n"
    )


def test_a_gpu_without_kernels_leaves_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert demo.choose_device(None) == ("cpu", "no kernels for Old GPU, compute capability 7.5")
    assert demo.choose_device("cuda")[0] == "cuda"


def test_a_gpu_that_nobody_has_seen_is_left_alone_unless_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("GLULAM_BUNDLE", str(tmp_path))
    monkeypatch.delenv("GLULAM_ARCH", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    device, reason = demo.choose_device(None)
    assert device == "cpu" and "sm_80 kernels were built, never run on A100: `glulam validate`" in reason
    assert demo.choose_device("cuda") == ("cuda", "A100")
    monkeypatch.setenv("GLULAM_ALLOW_UNVALIDATED", "1")
    assert demo.choose_device(None) == ("cuda", "A100")


@pytest.mark.parametrize(("bundles", "chosen"), [(["sm_100a"], "cpu"), (["sm_100a", "sm_100"], "cuda")])
def test_the_demo_runs_on_validated_kernels_beside_native_ones(monkeypatch, tmp_path, bundles, chosen):
    monkeypatch.setenv("GLULAM_BUNDLE", str(tmp_path))
    monkeypatch.delenv("GLULAM_ARCH", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "B200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    states = {"sm_100": demo.devices.VALIDATED, "sm_100a": demo.devices.NEVER_RUN}
    monkeypatch.setattr(demo.devices, "state_of", lambda arch, name: states[arch])
    for arch in bundles:
        (tmp_path / arch).mkdir()
        (tmp_path / arch / "manifest.json").touch()
    device, reason = demo.choose_device(None)
    assert device == chosen and (reason == "B200" or "the sm_100a kernels were built, never run on B200" in reason)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_demo_on_the_gpu(capsys, name):
    assert demo.main(["--model", name]) == 0
    assert "torch's time over ours" in capsys.readouterr().out
