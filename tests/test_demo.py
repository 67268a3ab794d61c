"""The demo's layer is a real MoE layer, its verdict can fail, and it runs where there is no GPU."""

from __future__ import annotations

import math

import pytest
import torch

from glulam import _demo_layer as demo_layer
from glulam import demo
from glulam._demo_layer import SHRUNK, Dispatched, Size
from glulam.demo import Error, within_rule

TINY = Size(hidden=64, intermediate=32, experts=16, top_k=4, tokens=96)


def tiny():
    torch.manual_seed(1)
    layer = demo_layer.make_layer(TINY, "cpu")
    x = demo_layer.embed(demo_layer.read_words(TINY.tokens), TINY.hidden, "cpu")
    return layer, x, demo_layer.dispatch(x, layer.router, TINY.top_k)


def moe_token_by_token(layer, x):
    """The layer without sorting: each token through its own experts, in float64."""
    probabilities, experts = (x.float() @ layer.router.T).softmax(dim=-1).topk(TINY.top_k, dim=-1)
    probabilities = (probabilities / probabilities.sum(dim=-1, keepdim=True)).double()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, chosen in enumerate(experts.tolist()):
        for weight, expert in zip(probabilities[token], chosen, strict=True):
            gate, up = (layer.w1[expert].double() @ x[token].double()).chunk(2)
            out[token] += layer.w2[expert].double() @ (torch.nn.functional.silu(gate) * up * weight)
    return out


def test_sorting_and_combining_is_the_layer_itself():
    layer, x, d = tiny()
    expected = moe_token_by_token(layer, x)
    exact = demo_layer.combine(demo_layer.loop_mlp(layer, d, torch.float64), d.order, TINY.top_k)
    torch.testing.assert_close(exact, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("path", [demo_layer.glulam_mlp, demo_layer.torch_mlp, demo_layer.loop_mlp])
def test_every_path_computes_the_same_layer(path):
    layer, _, d = tiny()
    expected = demo_layer.loop_mlp(layer, d, torch.float64)
    assert demo.error_of(path(layer, d), expected).norm < 0.02


def test_dispatch_sorts_all_copies_by_expert():
    layer, x, d = tiny()
    assert sum(d.group_sizes()) == TINY.tokens * TINY.top_k == len(d.order.unique())
    assert d.offs.dtype == torch.int32 and d.scale.dtype == torch.float32
    per_token = torch.empty_like(d.scale)
    per_token[d.order] = d.scale
    torch.testing.assert_close(per_token.view(-1, TINY.top_k).sum(1), torch.ones(TINY.tokens))
    assert torch.equal(d.x[0], x[d.order[0] // TINY.top_k])


def test_group_sizes_of_empty_experts():
    offs = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    assert Dispatched(torch.empty(0), offs, torch.empty(0), torch.empty(0)).group_sizes() == [0, 3, 0, 2]


def test_words_are_real_text_and_repeat_like_it():
    words = demo_layer.read_words(4096)
    assert len(words) == 4096 and "the" in words
    assert max(words.count(word) for word in set(words)) > 50
    assert words == demo_layer.read_words(4096)


def test_words_do_not_run_out_where_python_has_no_sources(monkeypatch):
    monkeypatch.setattr(demo_layer, "read_text", lambda module: "")
    assert len(demo_layer.read_words(100)) == 100


def test_equal_words_are_equal_tokens_and_other_words_are_not():
    torch.manual_seed(0)
    a, b, c = demo_layer.embed(["router", "router", "expert"], 64, "cpu")
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_real_text_routes_unevenly():
    torch.manual_seed(demo.SEED)
    layer = demo_layer.make_layer(SHRUNK, "cpu")
    x = demo_layer.embed(demo_layer.read_words(SHRUNK.tokens), SHRUNK.hidden, "cpu")
    sizes = demo_layer.dispatch(x, layer.router, SHRUNK.top_k).group_sizes()
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


def test_demo_runs_on_a_cpu_and_says_what_it_is(capsys):
    assert demo.main(["--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "CPU reference" in shown and "no claim about speed" in shown
    assert "times the mean" in shown and "experts are empty" in shown
    assert "error    ok" in shown


@pytest.mark.parametrize("wrong", [lambda y: torch.zeros_like(y), lambda y: y.roll(1, 0), lambda y: y * math.nan])
def test_demo_fails_where_the_result_is_wrong(monkeypatch, capsys, wrong):
    right = demo_layer.glulam_mlp
    monkeypatch.setattr(demo, "glulam_mlp", lambda *arguments: wrong(right(*arguments)))
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


@pytest.mark.gpu
def test_demo_on_the_gpu(capsys):
    assert demo.main([]) == 0
    assert "torch's time over ours" in capsys.readouterr().out
