"""Hyper-connections on the CPU: the reference against independent formulas, gradients, errors, traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from support.criterion import same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import glulam
from glulam import mhc
from glulam.errors import GradientNotSupported

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
LEADS = [(2, 3), (), (5,), (1, 2, 3)]
WIDTH = 8


def randn(*shape: int, dtype: torch.dtype = F64, seed: int = 0, grad: bool = False) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)
    return made.requires_grad_(grad)


def inputs(name: str, lead: tuple[int, ...] = (2, 3), n: int = 4, c: int = WIDTH, **how: Any) -> list[Tensor]:
    shapes: dict[str, list[tuple[int, ...]]] = {
        "sinkhorn": [(*lead, n, n)],
        "aggregate": [(*lead, n, c), (*lead, n)],
        "post_mix": [(*lead, n, c), (*lead, n, n), (*lead, n), (*lead, c), (c,)],
        "project": [(*lead, n, c), (n * n + 2 * n, n * c), (), (1,), (), (n * n + 2 * n,)],
    }
    return [randn(*shape, seed=seed, **how) for seed, shape in enumerate(shapes[name])]


CALLS: dict[str, Callable[..., Any]] = {
    "sinkhorn": mhc.sinkhorn,
    "aggregate": mhc.aggregate,
    "post_mix": mhc.post_mix,
    "project": mhc.project,
}


def listed(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


class TestMath:
    @pytest.mark.parametrize("n", [2, 3, 4, 8])
    def test_sinkhorn_follows_its_definition(self, n: int) -> None:
        (logits,) = inputs("sinkhorn", n=n)
        m = torch.exp(logits - logits.max(dim=-1, keepdim=True).values)
        for _ in range(20):
            m = m / (m.sum(dim=-1, keepdim=True) + 1e-6)
            m = m / (m.sum(dim=-2, keepdim=True) + 1e-6)
        got = mhc.sinkhorn(logits)
        torch.testing.assert_close(got, m)
        for axis in (-1, -2):
            torch.testing.assert_close(got.sum(axis), torch.ones_like(got.sum(axis)), atol=1e-3, rtol=0)

    @pytest.mark.parametrize("dtype", [F32, BF16])
    @pytest.mark.parametrize("scale", [30, 100, 200])
    def test_sinkhorn_of_logits_far_apart(self, scale: int, dtype: torch.dtype) -> None:
        """Exponentials below float32's range are the least of their matrix, not zeros."""
        logits = (scale * randn(256, 2, 2, seed=scale)).to(dtype).requires_grad_()
        exact = logits.detach().double().requires_grad_()
        for given in (logits, exact):
            (mhc.sinkhorn(given) * torch.tensor([[1.0, 2.0], [3.0, 5.0]])).sum().backward()
        tolerance = 1e-2 if dtype == BF16 else 1e-6
        torch.testing.assert_close(mhc.sinkhorn(logits).double(), mhc.sinkhorn(exact), rtol=0, atol=tolerance)
        assert logits.grad is not None and exact.grad is not None and exact.grad.abs().max() > 0.1
        torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=0, atol=tolerance)

    @pytest.mark.parametrize("lead", LEADS)
    def test_aggregate_is_a_weighted_sum(self, lead: tuple[int, ...]) -> None:
        x, h_pre = inputs("aggregate", lead)
        torch.testing.assert_close(mhc.aggregate(x, h_pre), torch.einsum("...jc,...j->...c", x, h_pre))

    @pytest.mark.parametrize("lead", LEADS)
    @pytest.mark.parametrize("transpose", [False, True])
    def test_post_mix_mixes_and_adds(self, lead: tuple[int, ...], transpose: bool) -> None:
        residual, h_res, h_post, x, bias = inputs("post_mix", lead)
        subscripts = "...ji,...jc->...ic" if transpose else "...ij,...jc->...ic"
        mixed = torch.einsum(subscripts, h_res, residual)
        for b in (None, bias):
            wanted = mixed + h_post.unsqueeze(-1) * (x if b is None else x + b).unsqueeze(-2)
            torch.testing.assert_close(mhc.post_mix(residual, h_res, h_post, x, b, transpose_res=transpose), wanted)

    @pytest.mark.parametrize("lead", LEADS)
    def test_project_norms_scales_and_gates(self, lead: tuple[int, ...]) -> None:
        n = 4
        x, weight, *alphas, bias = inputs("project", lead, n)
        flat = x.flatten(-2)
        r = 1 / (flat.norm(dim=-1, keepdim=True) / flat.shape[-1] ** 0.5 + 1e-6)
        z = torch.einsum("...d,kd->...k", flat, weight) * r
        parts = (z[..., :n], z[..., n : 2 * n], z[..., 2 * n :])
        biases = (bias[:n], bias[n : 2 * n], bias[2 * n :])
        pre, post, res = (part * a + b for part, a, b in zip(parts, alphas, biases, strict=True))
        got = mhc.project(x, weight, *alphas, bias)
        torch.testing.assert_close(got.h_pre, pre.sigmoid())
        torch.testing.assert_close(got.h_post, 2 * post.sigmoid())
        torch.testing.assert_close(got.h_res, res.unflatten(-1, (n, n)))

    @pytest.mark.parametrize("name", CALLS)
    def test_16_bit_is_computed_in_float32_and_rounded_once(self, name: str) -> None:
        given = inputs(name, dtype=BF16)
        for got, wide in zip(
            listed(CALLS[name](*given)), listed(CALLS[name](*(t.float() for t in given))), strict=True
        ):
            assert same_bits(got, wide.to(got.dtype))


class TestPrecision:
    def test_a_float32_weight_meets_16_bit_streams_unrounded(self) -> None:
        """Root mean square errors relative to float64; a weight rounded to the streams' dtype would be far off."""
        x, weight, *alphas, bias = inputs("project", (40,), 4, 504)
        weight = weight.float() / 45
        for dtype, rounding in ((BF16, 1e-3), (torch.float16, 1e-4)):
            streams = x.to(dtype)
            exact = mhc.project(streams.double(), weight.double(), *alphas, bias).h_res

            def error(weight: Tensor, streams: Tensor = streams, exact: Tensor = exact) -> float:
                got = mhc.project(streams, weight, *(a.float() for a in alphas), bias.float()).h_res
                return float((got - exact).norm() / exact.norm())

            assert error(weight) <= 1e-5
            assert error(weight.to(dtype)) > rounding


def with_norm_weight(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `project` or `pre` with the norm's weight as its last positional argument."""
    return lambda *t: tuple(call(*t[:-1], norm_weight=t[-1]))


class TestNormWeight:
    def given(self, n: int = 4, **how: Any) -> list[Tensor]:
        return [*inputs("project", n=n, **how), randn(n * WIDTH, seed=11, **how)]

    @pytest.mark.parametrize("call", [mhc.project, mhc.pre])
    def test_is_that_of_an_rmsnorm_before_the_projection(self, call: Callable[..., Any]) -> None:
        x, weight, *rest, norm = self.given()
        r = 1 / (x.flatten(-2).norm(dim=-1) / (4 * WIDTH) ** 0.5 + 1e-6)
        normed = x.flatten(-2) * r.unsqueeze(-1) * norm
        alphas, bias = rest[:3], rest[3]
        z = (normed @ weight.t())[..., 4:8] * alphas[1] + bias[4:8]
        torch.testing.assert_close(call(x, weight, *rest, norm_weight=norm).h_post, 2 * z.sigmoid())

    @pytest.mark.parametrize("call", [mhc.project, mhc.pre])
    def test_gradcheck(self, call: Callable[..., Any]) -> None:
        assert torch.autograd.gradcheck(with_norm_weight(call), self.given(n=2, grad=True))

    @pytest.mark.parametrize("params", [BF16, torch.float16, F32])
    def test_the_product_is_of_float32_and_gradients_of_the_parameters_dtypes(self, params: torch.dtype) -> None:
        given = [t.detach() for t in self.given(dtype=BF16)]
        given[1], given[-1] = given[1].to(params), given[-1].to(BF16)
        leaves, wide = ([t.to(d, copy=True).requires_grad_() for t, d in zip(given, dtypes, strict=True)]
                        for dtypes in ([t.dtype for t in given], [F64] * len(given)))  # fmt: skip
        for results in (
            mhc.project(*leaves[:-1], norm_weight=leaves[-1]),
            mhc.project(*wide[:-1], norm_weight=wide[-1]),
        ):
            results.h_res.sum().backward()
        for got, exact in ((leaves[1], wide[1]), (leaves[-1], wide[-1])):
            assert got.grad is not None and exact.grad is not None and got.grad.dtype is got.dtype
            torch.testing.assert_close(
                got.grad, exact.grad.to(got.dtype), rtol=1e-2 if got.dtype is BF16 else 2e-3, atol=1e-4
            )

    @pytest.mark.parametrize("call", [mhc.project, mhc.pre])
    def test_compiled_checkpointed_and_fake(self, call: Callable[..., Any]) -> None:
        torch.compiler.reset()
        plain = with_norm_weight(call)
        compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)

        def kept(*tensors: Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(plain, *tensors, use_reentrant=False)

        gradients = []
        for run in (plain, compiled, kept):
            leaves = [t.detach().requires_grad_() for t in self.given(dtype=F32)]
            sum(r.square().sum() for r in run(*leaves)).backward()
            gradients.append([t.grad for t in leaves])
        for others in zip(*gradients, strict=True):
            assert all(t is not None and same_bits(t, others[0]) for t in others)
        with FakeTensorMode() as mode:
            fake = plain(*(mode.from_tensor(t) for t in self.given(dtype=BF16)))
        real = plain(*self.given(dtype=BF16))
        assert [(f.shape, f.dtype) for f in fake] == [(r.shape, r.dtype) for r in real]

    def test_errors(self) -> None:
        x, *rest, norm = self.given()
        for bad, error, message in (
            (norm[:-1], ValueError, r"norm_weight has shape \[31\].*\[32\]"),
            (1.0, TypeError, "norm_weight is a float"),
            (norm.int(), TypeError, "norm_weight is torch.int32"),
            (randn(64)[::2], ValueError, "norm_weight is not contiguous"),
        ):
            for call in (mhc.project, mhc.pre):
                with pytest.raises(error, match=message):
                    call(x, *rest, norm_weight=bad)  # type: ignore[operator]
        with pytest.raises(ValueError, match=r"weight has shape \[24, 1\]"):
            mhc.project(x, rest[0][:, :1].contiguous(), *rest[1:], norm_weight=norm)
        with pytest.raises(GradientNotSupported, match="out is given"):
            out = (torch.empty(2, 3, 4), torch.empty(2, 3, 4), torch.empty(2, 3, 4, 4))
            mhc.project(x, *rest, norm_weight=norm.requires_grad_(), out=out)


class TestGradients:
    @pytest.mark.parametrize("n", [2, 4])
    @pytest.mark.parametrize("name", CALLS)
    def test_gradcheck(self, name: str, n: int) -> None:
        assert torch.autograd.gradcheck(CALLS[name], inputs(name, n=n, grad=True))

    @pytest.mark.parametrize("name", CALLS)
    def test_gradcheck_of_a_token_without_a_dimension(self, name: str) -> None:
        assert torch.autograd.gradcheck(CALLS[name], inputs(name, (), n=2, grad=True))

    @pytest.mark.parametrize(("iters", "eps"), [(0, 1e-6), (1, 1e-6), (3, 0.1)])
    def test_gradcheck_of_sinkhorn_with_few_steps_and_a_large_eps(self, iters: int, eps: float) -> None:
        (logits,) = inputs("sinkhorn", grad=True)
        assert torch.autograd.gradcheck(lambda t: mhc.sinkhorn(t, iters, eps), [logits])

    @pytest.mark.parametrize("bias", [False, True])
    def test_gradcheck_of_the_transposed_post_mix(self, bias: bool) -> None:
        given = inputs("post_mix", grad=True)[: 5 if bias else 4]
        assert torch.autograd.gradcheck(lambda *t: mhc.post_mix(*t, transpose_res=True), given)

    @pytest.mark.parametrize("name", CALLS)
    def test_only_what_is_asked_for(self, name: str) -> None:
        full = inputs(name, grad=True)
        weights = [randn(*r.shape, seed=9) for r in listed(CALLS[name](*full))]

        def gradients(given: list[Tensor], wanted: list[Tensor]) -> Any:
            pairs = zip(listed(CALLS[name](*given)), weights, strict=True)
            return torch.autograd.grad(sum((r * w).sum() for r, w in pairs), wanted)

        for i, d in enumerate(gradients(full, full)):
            given = [t.detach().requires_grad_(i == j) for j, t in enumerate(full)]
            assert same_bits(gradients(given, [given[i]])[0], d)

    @pytest.mark.parametrize("name", CALLS)
    def test_once(self, name: str) -> None:
        given = inputs(name, grad=True)
        result = listed(CALLS[name](*given))[0]
        (d,) = torch.autograd.grad(result.square().sum(), given[0], create_graph=True)
        with pytest.raises(GradientNotSupported, match="differentiable once"):
            d.sum().backward()


class TestBuffers:
    @pytest.mark.parametrize("name", CALLS)
    def test_out_is_written_and_returned(self, name: str) -> None:
        given = inputs(name, dtype=F32)
        wanted = listed(CALLS[name](*given))
        out = [torch.full_like(w, torch.nan) for w in wanted]
        got = listed(CALLS[name](*given, out=out[0] if len(out) == 1 else tuple(out)))
        for a, b, w in zip(got, out, wanted, strict=True):
            assert a is b and same_bits(a, w)

    def test_what_does_not_fit(self) -> None:
        x, h_pre = inputs("aggregate", dtype=F32)
        for out, message in (
            (torch.empty(2, 3, 9), "out is torch.float32"),
            (torch.empty(2, 3, WIDTH, dtype=BF16), "out is torch.bfloat16"),
            (x.view(-1)[: 6 * WIDTH].view(2, 3, WIDTH), "out overlaps x"),
        ):
            with pytest.raises(ValueError, match=message):
                mhc.aggregate(x, h_pre, out=out)
        with pytest.raises(GradientNotSupported, match="out is given"):
            mhc.aggregate(x.requires_grad_(), h_pre, out=torch.empty(2, 3, WIDTH))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mhc.sinkhorn(randn(3, 4)), ValueError, "logits has shape .*square"),
        (lambda: mhc.sinkhorn([1.0]), TypeError, "logits is a list"),
        (lambda: mhc.sinkhorn(randn(2, 2), iters=-1), ValueError, "iters is -1"),
        (lambda: mhc.sinkhorn(randn(2, 2), iters=2.0), TypeError, "iters is 2.0"),
        (lambda: mhc.sinkhorn(randn(2, 2), eps=-1.0), ValueError, "eps is -1.0"),
        (lambda: mhc.sinkhorn(randn(2, 2).int()), TypeError, "logits is torch.int32"),
        (lambda: mhc.aggregate(randn(3), randn(3)), ValueError, r"x has shape \[3\]"),
        (lambda: mhc.aggregate(randn(5, 4, 8), randn(5, 3)), ValueError, r"h_pre has shape \[5, 3\].*\[5, 4\]"),
        (lambda: mhc.aggregate(randn(4, 5, 8).transpose(0, 1), randn(5, 4)), ValueError, "x is not contiguous"),
        (lambda: mhc.aggregate(randn(5, 4, 0), randn(5, 4)), ValueError, "C = 0"),
        (
            lambda: mhc.post_mix(randn(4, 8), randn(4, 4), randn(4), randn(8, dtype=F32)),
            TypeError,
            "x is torch.float32; it must be torch.float64",
        ),
        (
            lambda: mhc.post_mix(randn(4, 8), randn(4, 4), randn(4), randn(8), randn(4)),
            ValueError,
            r"bias has shape \[4\].*\[8\]",
        ),
        (
            lambda: mhc.project(randn(2, 8), randn(8, 15), *[randn()] * 3, randn(8)),
            ValueError,
            r"weight has shape \[8, 15\].*\[8, 16\]",
        ),
        (
            lambda: mhc.project(randn(2, 8), randn(8, 16), randn(), 1.0, randn(), randn(8)),
            TypeError,
            "alpha_post is a float",
        ),
        (
            lambda: mhc.project(randn(2, 8), randn(8, 16), randn(), randn(), randn(dtype=F32), randn(8)),
            TypeError,
            "alpha_res is torch.float32 and alpha_pre torch.float64",
        ),
        (
            lambda: mhc.project(randn(2, 8), randn(8, 16), randn(), randn(), randn(3), randn(8)),
            ValueError,
            r"alpha_res has shape \[3\]",
        ),
        (
            lambda: mhc.post_mix(randn(4, 8), randn(4, 4), randn(4), randn(8), transpose_res=1),
            TypeError,
            "transpose_res is 1",
        ),
    ],
)
def test_errors_name_the_argument(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_token_of_zeros_has_finite_gradients() -> None:
    x, *rest = inputs("project", grad=True)
    x = (x * torch.tensor([0.0, 1.0], dtype=F64).view(2, 1, 1, 1)).detach().requires_grad_()
    sum(r.sum() for r in mhc.project(x, *rest)).backward()
    assert all(t.grad is not None and bool(t.grad.isfinite().all()) for t in (x, *rest))


def test_no_tokens() -> None:
    for name in CALLS:
        given = inputs(name, (0, 3), grad=True)
        results = listed(CALLS[name](*given))
        sum(r.sum() for r in results).backward()
        assert all(t.grad is not None and not t.grad.any() for t in given)


class TestTraces:
    @pytest.fixture(autouse=True)
    def fresh_compiler(self) -> None:
        torch.compiler.reset()

    @pytest.mark.parametrize("name", CALLS)
    def test_compiled_equals_eager(self, name: str) -> None:
        compiled = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True)
        eager, traced = ([t.detach().requires_grad_() for t in inputs(name, dtype=F32)] for _ in range(2))
        for call, given in ((CALLS[name], eager), (compiled, traced)):
            sum(r.square().sum() for r in listed(call(*given))).backward()
        for a, b in zip(eager, traced, strict=True):
            assert a.grad is not None and b.grad is not None and same_bits(a.grad, b.grad)
        with torch.no_grad():
            for a, b in zip(listed(CALLS[name](*eager)), listed(compiled(*eager)), strict=True):
                assert same_bits(a, b)

    @pytest.mark.parametrize("name", CALLS)
    def test_fake_tensors_know_the_results(self, name: str) -> None:
        with FakeTensorMode() as mode:
            given = [mode.from_tensor(t) for t in inputs(name, dtype=BF16)]
            fake = listed(CALLS[name](*given))
        real = listed(CALLS[name](*inputs(name, dtype=BF16)))
        assert [(f.shape, f.dtype) for f in fake] == [(r.shape, r.dtype) for r in real]


def test_is_public() -> None:
    assert glulam.mhc is mhc


def parameters(n: int, c: int, dtype: torch.dtype = F64) -> list[Tensor]:
    return inputs("project", (), n, c, dtype=dtype)[1:]


class TestPre:
    def test_is_its_operators_and_so_are_its_gradients(self) -> None:
        """Every output used; the residual's gradient is added inside."""
        x, *rest = inputs("project", grad=True)

        def composed(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            h_pre, h_post, logits = mhc.project(x, *rest)
            return mhc.aggregate(x, h_pre), x * 1, h_post, mhc.sinkhorn(logits)

        results = [tuple(call(x, *rest)) for call in (mhc.pre, composed)]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
        weights = [randn(*r.shape, seed=i + 20) for i, r in enumerate(results[0])]
        for used in ([0, 1, 2, 3], [0], [1], [2], [3], [1, 3]):
            pairs = [torch.autograd.grad([r[i] for i in used], [x, *rest], [weights[i] for i in used],
                                         retain_graph=True, allow_unused=True) for r in results]  # fmt: skip
            for a, b in zip(*pairs, strict=True):
                torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)

    def test_gradcheck(self) -> None:
        given = inputs("project", grad=True)
        assert torch.autograd.gradcheck(lambda *t: tuple(mhc.pre(*t, 1e-3, 3, 0.1)), given)


class TestHyperConnection:
    def layer(self, **how: Any) -> glulam.nn.HyperConnection:
        torch.manual_seed(0)
        return glulam.nn.HyperConnection(4, WIDTH, torch.nn.Linear(WIDTH, WIDTH, dtype=F64), dtype=F64, **how)

    @pytest.mark.parametrize("transpose", [False, True])
    def test_composes_the_operators(self, transpose: bool) -> None:
        layer, x = self.layer(transpose_res=transpose), randn(2, 3, 4, WIDTH)
        h_pre, h_post, logits = mhc.project(
            x, layer.weight, layer.alpha_pre, layer.alpha_post, layer.alpha_res, layer.bias
        )
        y = layer.sublayer(mhc.aggregate(x, h_pre))
        wanted = mhc.post_mix(x, mhc.sinkhorn(logits), h_post, y, transpose_res=transpose)
        torch.testing.assert_close(layer(x), wanted)

    def test_trains(self) -> None:
        layer, x = self.layer(), randn(2, 3, 4, WIDTH, grad=True)
        layer(x).square().sum().backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in (x, *layer.parameters()))

    def test_a_bias_returned_by_the_sublayer_is_added_by_post_mix(self) -> None:
        layer, x, b = self.layer(), randn(2, 4, WIDTH), randn(WIDTH, seed=3)
        wanted = layer(x)
        inner = layer.sublayer
        layer.sublayer = torch.nn.Identity()
        layer.sublayer.forward = lambda y: (inner(y) - b, b)
        torch.testing.assert_close(layer(x), wanted)

    def test_begins_as_residual_streams(self) -> None:
        layer, x = self.layer(), randn(5, 4, WIDTH)
        made = layer.pre(x)
        torch.testing.assert_close(made.out, x.mean(-2), atol=0.1, rtol=0.1)
        torch.testing.assert_close(made.h_res, torch.eye(4, dtype=F64).expand(5, 4, 4), atol=0.02, rtol=0)
        torch.testing.assert_close(made.h_post, torch.ones(5, 4, dtype=F64), atol=0.1, rtol=0)

    def test_compiles(self) -> None:
        torch.compiler.reset()
        layer, x = self.layer(), randn(2, 3, 4, WIDTH)
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))

    @pytest.mark.parametrize(
        ("call", "error", "message"),
        [
            (lambda: glulam.nn.HyperConnection(0, 8), ValueError, "num_streams is 0"),
            (lambda: glulam.nn.HyperConnection(4, 8.0), TypeError, "width is 8.0"),
            (lambda: glulam.nn.HyperConnection(4, 8, 3), TypeError, "sublayer is a int"),
            (lambda: glulam.nn.HyperConnection(4, 8, iters=500), ValueError, "iters is 500"),
            (lambda: glulam.nn.HyperConnection(4, 8, dtype=torch.int8), TypeError, "dtype is torch.int8"),
            (lambda: glulam.nn.HyperConnection(4, 8, norm_weight=1), TypeError, "norm_weight is"),
            (lambda: glulam.nn.HyperConnection(4, 8)(torch.zeros(4, 8)), RuntimeError, "made without a sublayer"),
        ],
    )
    def test_errors(self, call: Callable[[], Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            call()

    def test_meta_and_state_dict(self) -> None:
        meta = glulam.nn.HyperConnection(4, WIDTH, device="meta")
        assert meta.weight.is_meta and "num_streams=4, width=8" in repr(meta) and "norm" not in repr(meta)
        assert set(meta.state_dict()) == {"weight", "alpha_pre", "alpha_post", "alpha_res", "bias"}

    def test_norm_weight_is_a_parameter_of_ones(self) -> None:
        plain, layer, x = self.layer(), self.layer(norm_weight=True), randn(5, 4, WIDTH)
        assert set(layer.state_dict()) - set(plain.state_dict()) == {"norm_weight"} and "norm_weight=True" in repr(
            layer
        )
        torch.testing.assert_close(layer(x), plain(x))
        with torch.no_grad():
            scale = randn(4 * WIDTH, seed=4)
            layer.norm_weight.copy_(scale)  # type: ignore[union-attr]
            plain.weight.mul_(scale)
        torch.testing.assert_close(layer(x), plain(x))
        layer(x).sum().backward()
        assert layer.norm_weight is not None and layer.norm_weight.grad is not None and layer.norm_weight.grad.any()
