"""The router's auxiliary losses against plain formulas in float64."""

from __future__ import annotations

import pytest
import torch
from support.fake_gpu import FakeGpu
from support.routes import RULES, options_of, some_logits
from torch import Tensor

import glulam
from glulam import Routing, load_balancing_loss, router_z_loss

pytest_plugins = ["support.fixtures"]

F64 = torch.float64


def routed(logits: Tensor, rule: str, **more: Tensor) -> Routing:
    options = options_of(rule, logits.shape[1])
    return glulam.route(logits, options.pop("k"), **options, **more)


def formula(logits: Tensor, ids: list[list[int]], score: str) -> Tensor:
    """Compute the loss token by token and choice by choice."""
    experts = logits.shape[1]
    choices = [e for mine in ids for e in mine]
    total = torch.zeros((), dtype=logits.dtype)
    for e in range(experts):
        mean = torch.zeros((), dtype=logits.dtype)
        for row in logits:
            scores = row.sigmoid() if score == "sigmoid" else row.exp()
            mean = mean + scores[e] / scores.sum() / len(logits)
        total = total + choices.count(e) / len(choices) * mean
    return experts * total


@pytest.mark.parametrize("rule", RULES)
class TestLoadBalancing:
    def test_against_the_formula(self, rule: str) -> None:
        logits = (some_logits(9, 64, F64) / 2 + torch.linspace(-2, 2, 64)).requires_grad_()
        made = routed(logits, rule)
        loss = load_balancing_loss(made)
        wanted = formula(logits, made.ids.tolist(), options_of(rule, 64).get("score", "softmax"))
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
        assert abs(float(wanted.detach()) - 1) > 0.1, "an even load would hide what is missing"
        got, want = (torch.autograd.grad(value, logits)[0] for value in (loss, wanted))
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
        assert want.abs().max() > 1e-3

    def test_padding_does_not_count(self, rule: str) -> None:
        logits = some_logits(9, 64, F64)
        short = logits[:5].clone().requires_grad_()
        logits[5:] = torch.nan
        logits.requires_grad_()
        loss = load_balancing_loss(routed(logits, rule, num_tokens=torch.tensor([5], dtype=torch.int32)))
        wanted = load_balancing_loss(routed(short, rule))
        torch.testing.assert_close(loss, wanted)
        loss.backward()
        wanted.backward()
        torch.testing.assert_close(logits.grad[:5], short.grad)
        assert not logits.grad[5:].any()

    def test_no_token(self, rule: str) -> None:
        logits = torch.randn(3, 64, requires_grad=True)
        loss = load_balancing_loss(routed(logits, rule, num_tokens=torch.zeros(1, dtype=torch.int32)))
        loss.backward()
        assert loss == 0 and not logits.grad.any()
        assert load_balancing_loss(routed(torch.empty(0, 64), rule)) == 0


class TestBothLosses:
    def test_an_even_load_gives_one(self) -> None:
        logits = (torch.eye(8) + torch.eye(8).roll(1, 0) / 2).repeat(3, 1)
        for k in (1, 2):
            for score in ("softmax", "sigmoid", "topk_softmax"):
                loss = load_balancing_loss(glulam.route(logits, k, score=score))
                torch.testing.assert_close(loss, torch.ones(()))
        one = load_balancing_loss(glulam.route(torch.tensor([[9.0, 0, 0, 0]]).repeat(5, 1), 1))
        assert 3.9 < float(one) < 4, "all to one expert costs E"

    @pytest.mark.parametrize("shift", [-46.0, -60.0, -120.0, -1e4])
    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    def test_small_sigmoids_are_divided_by_their_sum(self, dtype: torch.dtype, shift: float) -> None:
        """Far below 0 sigmoid is exp, so the loss and its gradient equal a softmax's."""
        logits = (some_logits(9, 16, F64).round() + shift).to(dtype).requires_grad_()
        made = glulam.route(logits, 2, score="sigmoid")
        of_softmax = (logits.detach().double() - shift).requires_grad_()
        wanted = formula(of_softmax, made.ids.tolist(), "softmax")
        loss = load_balancing_loss(made)
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)
        got, want = (torch.autograd.grad(v, of)[0] for v, of in ((loss, logits), (wanted, of_softmax)))
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
        assert want.abs().max() > 1e-3

    def test_sigmoids_that_are_all_zero_are_even(self) -> None:
        logits = torch.full((6, 4), -torch.inf, requires_grad=True)
        loss = load_balancing_loss(glulam.route(logits, 2, score="sigmoid"))
        loss.backward()
        assert loss == 1 and not logits.grad.any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_16_bit_logits_are_widened(self, dtype: torch.dtype, fake_gpu: FakeGpu) -> None:
        logits = some_logits(20, 32, dtype)
        made = glulam.route(logits, 4)
        loss, wanted = load_balancing_loss(made), formula(logits.double(), made.ids.tolist(), "softmax")
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)
        z = router_z_loss(logits)
        assert z.dtype == torch.float32
        wanted = logits.double().exp().sum(-1).log().square().mean()
        torch.testing.assert_close(z.double(), wanted, rtol=1e-5, atol=0)

    def test_z_loss(self) -> None:
        logits = some_logits(12, 16, F64).view(3, 4, 16).requires_grad_()
        loss, wanted = router_z_loss(logits), logits.exp().sum(-1).log().square().mean()
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
        got, want = (torch.autograd.grad(value, logits)[0] for value in (loss, wanted))
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            logits[1, 2:] = torch.nan
            logits[2] = torch.nan
        limit = torch.tensor([6], dtype=torch.int32)
        loss = router_z_loss(logits, limit)
        assert loss.shape == ()
        torch.testing.assert_close(loss, router_z_loss(logits.detach().view(12, 16)[:6]))
        loss.backward()
        assert logits.grad.view(12, 16)[:6].any() and not logits.grad.view(12, 16)[6:].any()
        for tokens in (0, 6):
            assert router_z_loss(logits[:0], limit * tokens) == router_z_loss(logits[:0]) == 0

    def test_one_graph(self) -> None:
        def losses(logits: Tensor) -> Tensor:
            made = glulam.route(logits, 2)
            return load_balancing_loss(made) + router_z_loss(made.logits) + made.weights[0, 0]

        logits = some_logits(9, 16, F64).requires_grad_()
        compiled = torch.compile(losses, fullgraph=True, backend="aot_eager")
        got, want = (torch.autograd.grad(call(logits), logits)[0] for call in (compiled, losses))
        torch.testing.assert_close(got, want)

    def test_bad_input(self) -> None:
        with pytest.raises(TypeError, match="load_balancing_loss: routing is a Tensor"):
            load_balancing_loss(torch.zeros(3, 4))
        made = Routing.from_topk(torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2), 4)
        with pytest.raises(ValueError, match="load_balancing_loss: routing has no logits, which from_topk"):
            load_balancing_loss(made)
        with pytest.raises(TypeError, match="router_z_loss: logits is a list"):
            router_z_loss([1.0])
        with pytest.raises(ValueError, match=r"router_z_loss: num_tokens has shape \[2\]"):
            router_z_loss(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int32))

    def test_counts(self) -> None:
        made = glulam.route(some_logits(9, 16), 3)
        wanted = torch.bincount(made.ids.view(-1).long(), minlength=16)
        assert made.counts.dtype == torch.int32 and made.counts.equal(wanted.int())
