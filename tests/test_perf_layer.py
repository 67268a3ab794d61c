"""`python -m perf layer`: data with the declared routing, and contestants checked against float64."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from perf import layer
from perf.cases import (
    FORWARD,
    LAYER_ROUTINGS,
    MODELS,
    OTHER_MODELS,
    PREFILL,
    PUBLISHED,
    TRAIN,
    LayerCase,
    layer_cases,
    layer_of,
)
from perf.contest import admitted, relative_error
from perf.layer import GAP, MAX_RELATIVE_ERROR, Layer, choose, contestants, expected, make_layer, sort_choices
from perf.mlp import CONCAT, INTERLEAVED, LINEAR_FIRST, TOKENS
from perf.routing import LEAST_SHARE, MOST_SHARE, logit_offsets, shares

CASE = LayerCase("small", 70, 64, 32, 5, 2, "zipf")
TOP_1 = LayerCase("top-1", 70, 64, 32, 4, 1)
STEP = LayerCase("step", 3, 64, 32, 8, 2)  # of decoding, with empty experts


def data(case=CASE):
    return make_layer(case, device="cpu")


# Cases


def test_every_known_model_has_a_layer():
    named = {case.name for case in (*PUBLISHED, *MODELS)}
    assert {case.name for case in (*PREFILL, *OTHER_MODELS)} <= named and len(named) == len(PUBLISHED) + len(MODELS)
    for case in (*PREFILL, *OTHER_MODELS):
        assert layer_of(case).mlp == case
    assert [(c.tokens, c.hidden, c.intermediate, c.experts, c.top_k) for c in PUBLISHED] == [
        (32768, 4096, 1024, 128, 8),
        (4096, 2048, 768, 128, 8),
        (4096, 4096, 14336, 8, 2),
        (64, 2048, 768, 128, 8),
        (1, 2048, 768, 128, 8),
    ]


def test_cases_are_chosen_by_name_routing_and_publication():
    assert len(layer_cases(None)) == 3 * (len(PUBLISHED) + len(MODELS))
    assert {case.routing for case in layer_cases("sonic")} == set(LAYER_ROUTINGS)
    assert layer_cases(None, ("uniform",), published=True) == list(PUBLISHED)
    each = [dataclasses.replace(case, routing=routing) for case in PUBLISHED for routing in LAYER_ROUTINGS]
    assert layer_cases(None, published=True) == each
    assert [case.name for case in layer_cases("kimi-k2 ep8", ("zipf",))] == ["Kimi-K2 EP8"]


def test_work_is_six_and_eighteen_a_weight_and_row():
    case = PUBLISHED[0]
    assert case.flop(FORWARD) == 6 * 32768 * 8 * 4096 * 1024 and case.flop(TRAIN) == 3 * case.flop(FORWARD)
    one = LayerCase("one", 4, 8, 16, 2, 1)
    assert one.bytes(1) == 2 * (3 * 8 * 16 + 2 * 4 * 8 + 2 * 4 * (8 + 16))


@pytest.mark.parametrize("case", [*PUBLISHED, *MODELS], ids=lambda case: case.name)
@pytest.mark.parametrize("routing", [*LAYER_ROUTINGS, "token:1", "half-empty"])
def test_shares_are_chances_that_sum_to_the_choices(case, routing):
    found = shares(dataclasses.replace(case, routing=routing))
    assert all(LEAST_SHARE <= share <= MOST_SHARE for share in found)
    floor = LEAST_SHARE * case.experts
    if routing != "token:1":  # where one takes all, nobody is left to take what it may not have
        assert sum(found) == pytest.approx(case.top_k, abs=1e-6 + floor)


@pytest.mark.parametrize("routing", LAYER_ROUTINGS)
@pytest.mark.parametrize(("experts", "k"), [(128, 8), (8, 2), (32, 1), (8, 1)])
def test_offsets_give_experts_the_loads_asked_for(routing, experts, k):
    case = LayerCase("x", 4096, 64, 32, experts, k, routing)
    wanted = torch.tensor(shares(case))
    logits = torch.randn(case.tokens, experts, generator=torch.Generator().manual_seed(1))
    ids = (logits + torch.tensor(logit_offsets(case))).topk(k).indices
    loads = torch.bincount(ids.reshape(-1), minlength=experts) / case.tokens
    assert float((loads - wanted).abs().sum()) / k < 0.1
    assert float(loads.max()) == pytest.approx(float(wanted.max()), rel=0.3)


# Data


def test_data_repeat_and_batches_take_turns_in_decoding():
    d, again = data(STEP), data(STEP)
    assert len(d.batches) == TOKENS and len(data().batches) == 1
    assert torch.equal(d.batches[3].x, again.batches[3].x) and torch.equal(d.router, again.router)
    assert not torch.equal(d.batches[0].x, d.batches[1].x)
    assert sum(d.loads) == STEP.rows and 0 in d.loads


@pytest.mark.parametrize("case", [CASE, TOP_1, STEP])
def test_no_rounding_changes_who_is_chosen(case):
    d = data(case)
    for b in d.batches:
        best = F.linear(b.x, d.router).detach().float().topk(case.top_k + 1).values
        assert float((best[:, -2] - best[:, -1]).min()) >= GAP
        assert bool((b.x[:, 0] == 1).all())


def test_where_everybody_is_chosen_no_token_is_drawn_again():
    assert data(LayerCase("all", 9, 64, 32, 3, 3)).loads == [9, 9, 9]


def test_tokens_that_never_lie_apart_are_refused(monkeypatch):
    monkeypatch.setattr("perf.layer.GAP", 100.0)
    with pytest.raises(RuntimeError, match="after 100 draws some tokens' best logits are closer than 100"):
        data()


def test_sorted_rows_are_those_of_the_routing():
    d = data()
    b = d.batches[0]
    weights, ids = choose(F.linear(b.x, d.router), CASE.top_k)
    rows = [(n, j) for e in range(CASE.experts) for n in range(CASE.tokens) for j in range(2) if ids[n, j] == e]
    assert b.token.tolist() == [n for n, _ in rows]
    assert b.weights.tolist() == [float(weights.detach()[n, j]) for n, j in rows]
    assert torch.equal(b.rows, b.x[b.token]) and torch.equal(b.d_rows, b.d_y[b.token])
    assert sort_choices(ids, CASE.experts)[1].tolist() == list(itertools.accumulate(d.loads))


def test_a_single_choice_keeps_its_probability():
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    one, _ = choose(logits, 1)
    two, ids = choose(logits, 2)
    assert float(one) == pytest.approx(float(logits.softmax(-1)[0, 2]))
    assert ids.tolist() == [[2, 1]] and float(two.sum()) == pytest.approx(1.0)


# The reference and who is held to it


def plain_layer(d, glu_layout):
    """Compute the layer token by token and choice by choice, in float64 with autograd."""
    b, case = d.batches[0], d.case
    x, w1, w2 = (t.detach().double().requires_grad_() for t in (b.x, d.w1, d.w2))
    router = d.router.detach().double().requires_grad_()
    logits = x @ router.mT
    rounded = F.linear(b.x, d.router).detach().double()
    logits = logits + (rounded - logits).detach()  # the values that everyone routes by
    weights, ids = choose(logits, case.top_k)
    tokens = []
    for n in range(case.tokens):
        total = torch.zeros(case.hidden, dtype=torch.float64)
        for j in range(case.top_k):
            e = int(ids[n, j])
            h = w1[e] @ x[n]
            if glu_layout == "concat":
                a, u = h.chunk(2)
            elif glu_layout == "interleaved":
                a, u = h[0::2], h[1::2]
            else:
                u, a = h.view(-1, 2, 32).unbind(1)
                a, u = a.flatten(), u.flatten()
            total = total + weights[n, j] * (w2[e] @ (F.silu(a) * u))
        tokens.append(total)
    y = torch.stack(tokens)
    return y, *torch.autograd.grad(y, (x, router, w1, w2), b.d_y.double())


@pytest.mark.parametrize("case", [CASE, TOP_1, STEP])
@pytest.mark.parametrize("glu_layout", [CONCAT, INTERLEAVED, LINEAR_FIRST])
def test_the_reference_is_the_layer(case, glu_layout):
    d = data(dataclasses.replace(case, intermediate=64))
    wanted = plain_layer(d, glu_layout)
    got = expected(d, TRAIN, glu_layout)
    assert got[0].dtype == got[1].dtype == got[2].dtype == torch.float64
    assert relative_error(got[:3], wanted[:3]) < 1e-6
    assert relative_error(got, wanted) < 0.003  # weights' gradients are rounded
    (y,) = expected(d, FORWARD, glu_layout)
    assert torch.equal(y, got[0])


def found(d, op, layers=None):
    """Return the contestants that pass the check and are timed."""
    return admitted("here", contestants(d, op, layers or layer.layers()))


@pytest.mark.parametrize("op", [FORWARD, TRAIN])
@pytest.mark.parametrize("case", [CASE, TOP_1, STEP])
def test_every_contestant_passes_the_check(case, op):
    who = found(data(case), op)
    names = [layer.OURS, layer.FLOOR, layer.SORTED, layer.TORCH]
    assert list(who.errors) == list(who.calls) == names and who.left_out == {}
    assert 0 < max(who.errors.values()) <= MAX_RELATIVE_ERROR / 3


def of_name(name):
    (one,) = [c for c in layer.layers() if c.name == name]
    return one


@pytest.mark.parametrize("part", range(5))
def test_a_wrong_one_is_reported_and_not_timed(part):
    right = of_name(layer.SORTED)

    class Wrong(Layer):
        def train(self, d, b):
            return tuple(t * 1.15 if i == part else t for i, t in enumerate(right.train(d, b)))

    with pytest.warns(UserWarning, match="here: wrong is left out: wrong, relative error 0.1[45]"):
        who = found(data(), TRAIN, [Wrong("wrong", right.forward), of_name(layer.TORCH)])
    assert list(who.calls) == [layer.TORCH] == list(who.errors) and list(who.left_out) == ["wrong"]


def test_only_who_trains_is_asked_to_train():
    def infers(d, b):
        assert not torch.is_grad_enabled()
        return of_name(layer.TORCH).forward(d, b)

    peer = Layer("infers", infers, trains=False)
    assert list(found(data(), FORWARD, [peer]).errors) == ["infers"]
    assert found(data(), TRAIN, [peer]) == ({}, {}, {})


def test_peers_may_leave_the_gradients_of_empty_experts_unwritten_and_we_may_not():
    d, right = data(STEP), of_name(layer.TORCH)

    class Unwritten(Layer):
        def train(self, d, b):
            results = right.train(d, b)
            for gradient in results[layer.WEIGHTS]:
                gradient[d.loads.index(0)] = torch.nan
            return results

    with pytest.warns(UserWarning, match="ours is left out: wrong, relative error nan"):
        who = found(d, TRAIN, [Unwritten("peer", right.forward), Unwritten("ours", right.forward, kept_whole=True)])
    assert list(who.calls) == ["peer"]


# Other packages


def fake_sonic(calls):
    """Return stand-ins in torch for the modules of sonicmoe.functional 0.1.2 that perf calls; its GEMMs are in two
    modules.
    """

    def gemm(*arguments, tuned=True):
        calls.append(tuned)

    def layer_function(
        x, router_w, w1, b1, w2, b2, K, stream_id, activation_type="swiglu", is_inference_mode_enabled=False,
        is_softmax_over_topk=True, norm_topk_probs=False, concat_layout=False,
    ):  # fmt: skip
        assert b1 is None and b2 is None and activation_type == "swiglu" and not concat_layout
        assert is_inference_mode_enabled != torch.is_grad_enabled() and not norm_topk_probs
        modules["forward"].gemm_gated()
        modules["backward"].gemm_dgated()
        logits = F.linear(x, router_w)
        if is_softmax_over_topk:
            best = logits.float().topk(K)
            weights, ids = best.values.softmax(-1), best.indices
        else:
            weights, ids = logits.float().softmax(-1).topk(K)
        h = torch.einsum("nh,dhe->ned", x.float(), w1.float())
        per_expert = torch.einsum("nei,hie->neh", F.silu(h[..., 0::2]) * h[..., 1::2], w2.float())
        chosen = per_expert.gather(1, ids[..., None].expand(-1, -1, x.shape[1]))
        return (weights[..., None] * chosen).sum(1).to(x.dtype), logits, None

    modules = {
        "forward": types.SimpleNamespace(gemm=gemm, gemm_gated=gemm),
        "backward": types.SimpleNamespace(gemm=gemm, gemm_dgated=gemm),
    }
    functional = types.SimpleNamespace(moe_TC_softmax_topk_layer=layer_function)
    return {"sonicmoe.functional": functional, **{f"sonicmoe.functional.{n}": m for n, m in modules.items()}}


def fake_flashinfer():
    """Return a stand-in for FlashInfer's `cute_dsl_fused_moe_bf16`: w1 in blocks of 32 columns, the linear ones
    first.
    """

    def fused(x, token_selected_experts, token_final_scales, w1_weight, w2_weight, num_experts, top_k):
        assert token_selected_experts.dtype == torch.int32 and token_final_scales.dtype == torch.float32
        assert token_selected_experts.shape == (len(x), top_k) and len(w1_weight) == num_experts
        h = torch.einsum("nh,edh->ned", x.float(), w1_weight.float()).unflatten(2, (-1, 2, 32))
        act = (F.silu(h[:, :, :, 1]) * h[:, :, :, 0]).flatten(2)
        per_expert = torch.einsum("nei,ehi->neh", act, w2_weight.float())
        chosen = per_expert.gather(1, token_selected_experts.long()[..., None].expand(-1, -1, x.shape[1]))
        return (token_final_scales[..., None] * chosen).sum(1).to(x.dtype)

    return {layer.FLASHINFER_MODULE: types.SimpleNamespace(cute_dsl_fused_moe_bf16=fused)}


@pytest.fixture
def peers(monkeypatch):
    """List that gets the `tuned` argument of each SonicMoE GEMM; stand-ins of both packages are installed."""
    calls = []
    for name, module in {**fake_sonic(calls), **fake_flashinfer()}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(layer.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    return calls


@pytest.mark.parametrize("case", [CASE, TOP_1])
def test_other_packages_compute_the_layer_untuned(peers, case):
    d = data(case)
    forward = found(d, FORWARD)
    assert list(forward.errors)[-2:] == [layer.SONIC, layer.FLASHINFER] and not forward.left_out
    train = found(d, TRAIN)
    assert list(train.errors)[-1] == layer.SONIC and not train.left_out
    assert peers == [False] * 4


def test_a_package_that_cannot_be_imported_is_left_out_with_a_warning(peers, monkeypatch):
    monkeypatch.setitem(sys.modules, "sonicmoe.functional", None)
    with pytest.warns(UserWarning, match="sonicmoe is left out: ModuleNotFoundError"):
        assert [one.name for one in layer.layers()][4:] == [layer.FLASHINFER]


def test_without_other_packages_there_are_four(monkeypatch):
    monkeypatch.setattr(layer.importlib.util, "find_spec", lambda name: None)
    assert len(layer.layers()) == 4
