"""The hyper-connection kernels against the float64 reference, through the public API."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from torch import Tensor

import glulam
from glulam import mhc
from glulam.mhc import reference
from glulam.mhc.project import ALPHAS, project_backward, project_streams

pytestmark = pytest.mark.gpu

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [BF16, F16, F32]
COUNTS = [2, 4, 8]
# (leading shape, C): one token; odd counts; one vector; no multiple of any tile; more vectors than a CTA has threads.
SIZES = [((1, 1), 8), ((3, 5), 8), ((7,), 1504), ((2, 61), 736), ((4, 33), 2056), ((300,), 256), ((37, 1), 7168)]
FORWARD_ERROR = {BF16: 2e-2, F16: 5e-3, F32: 1e-5}
GRADIENT_ERROR = {BF16: 5e-2, F16: 1e-2, F32: 1e-4}


def randn(*shape: int, dtype: torch.dtype, seed: int, spread: bool = False) -> Tensor:
    """Return random numbers on the GPU. spread: tokens differ in scale, so that a wrong index shows."""
    made = torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    if spread and made.dim() > 1:
        scale = torch.linspace(-1, 1, shape[0], device="cuda").exp2()
        made = made * scale.view(-1, *[1] * (made.dim() - 1))
    return made.to(dtype)


def inputs(
    name: str, lead: tuple[int, ...], n: int, c: int, dtype: torch.dtype, params: torch.dtype | None = None
) -> list[Tensor]:
    params = params or F32
    shapes: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
        "sinkhorn": [((*lead, n, n), params)],
        "aggregate": [((*lead, n, c), dtype), ((*lead, n), params)],
        "post_mix": [
            ((*lead, n, c), dtype), ((*lead, n, n), params), ((*lead, n), params), ((*lead, c), dtype), ((c,), params),
        ],
    }  # fmt: skip
    rows = n * n + 2 * n
    shapes["project"] = shapes["pre"] = [
        ((*lead, n, c), dtype),
        ((rows, n * c), params),
        *[((1,), params)] * 3,
        ((rows,), params),
    ]
    made = [randn(*shape, dtype=d, seed=s, spread=True) for s, (shape, d) in enumerate(shapes[name])]
    if name in ("project", "pre"):
        made[1] = (made[1].float() / (n * c) ** 0.5).to(params)  # or every gate would be shut
    return made


CALLS: dict[str, Callable[..., Any]] = {
    "sinkhorn": mhc.sinkhorn,
    "aggregate": mhc.aggregate,
    "post_mix": mhc.post_mix,
    "project": mhc.project,
    "pre": mhc.pre,
}


def forward_error(name: str, dtype: torch.dtype) -> float:
    """Return the allowed error of a result. dtype: of the streams; products of 16-bit weights with float32 streams run
    in TF32.
    """
    return 5e-3 if name in ("project", "pre") and dtype is F32 else FORWARD_ERROR[dtype]


def listed(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def on_cpu(name: str, given: list[Tensor], **how: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return results and gradients in float64 on the CPU, from the same inputs."""
    leaves = [t.detach().double().cpu().requires_grad_() for t in given]
    with torch.enable_grad():
        results = listed(CALLS[name](*leaves, **how))
        upstream = [d.double().cpu() for d in cotangents(results)]
        gradients = torch.autograd.grad(results, leaves, upstream)
    return [r.detach() for r in results], list(gradients)


def on_gpu(name: str, given: list[Tensor], **how: Any) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [t.detach().requires_grad_() for t in given]
    with torch.enable_grad():
        results = listed(CALLS[name](*leaves, **how))
        gradients = torch.autograd.grad(results, leaves, cotangents(results))
    return [r.detach() for r in results], list(gradients)


def cotangents(results: list[Tensor]) -> list[Tensor]:
    """Draw gradients of the results on the CPU, the same for GPU and CPU, as bfloat16 values that every dtype holds."""
    made = []
    for seed, result in enumerate(results):
        drawn = torch.randn(result.shape, generator=torch.Generator().manual_seed(100 + seed)).to(BF16)
        made.append(drawn.to(device=result.device, dtype=result.dtype))
    return made


def assert_near(
    got: Tensor, exact: Tensor, tolerance: float, cosine: float, what: str, least_scale: float = 0.0
) -> None:
    exact = exact.to("cuda")
    assert got.shape == exact.shape
    scale = max(float(exact.abs().max()), least_scale)
    assert scale > 0, f"{what}: zeros would pass"
    error = float((got.double() - exact).abs().max()) / scale
    assert error <= tolerance, f"{what}: error {error:.3g} above {tolerance:.3g}"
    if got.numel() > 1:
        similar = float(torch.nn.functional.cosine_similarity(got.double().flatten(), exact.flatten(), dim=0))
        assert similar >= cosine, f"{what}: cosine {similar}"


def check(name: str, given: list[Tensor], **how: Any) -> None:
    results, gradients = on_gpu(name, given, **how)
    exact, exact_gradients = on_cpu(name, given, **how)
    for i, (got, want) in enumerate(zip(results, exact, strict=True)):
        assert_near(got, want, forward_error(name, given[0].dtype), 0.9999, f"result {i}")
    for i, (got, want) in enumerate(zip(gradients, exact_gradients, strict=True)):
        tolerance = 1e-2 if name in ("project", "pre") and given[0].dtype is F32 else GRADIENT_ERROR[given[0].dtype]
        # One number, a sum over tokens of both signs, may be near zero; its error is not.
        least_scale = 0.3 * (given[0].numel() / given[0].shape[-1]) ** 0.5 if want.numel() == 1 else 0.0
        assert_near(got, want, tolerance, 0.999, f"gradient {i}", least_scale)


class TestNumerics:
    @pytest.mark.parametrize("n", COUNTS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("name", CALLS)
    def test_dtypes_and_streams(self, name: str, dtype: torch.dtype, n: int) -> None:
        for params in (F32, dtype):
            check(name, inputs(name, (5, 13), n, 264, dtype, params))

    @pytest.mark.parametrize(("lead", "c"), SIZES)
    @pytest.mark.parametrize("name", CALLS)
    def test_sizes(self, name: str, lead: tuple[int, ...], c: int) -> None:
        check(name, inputs(name, lead, 4, c, BF16))

    @pytest.mark.parametrize("n", COUNTS)
    def test_transposed_post_mix(self, n: int) -> None:
        given = inputs("post_mix", (9, 3), n, 520, BF16)
        check("post_mix", given, transpose_res=True)
        check("post_mix", given[:4], transpose_res=True)
        check("post_mix", given[:4])

    @pytest.mark.parametrize("n", COUNTS)
    @pytest.mark.parametrize("iters", [0, 1, 2, 20, 100])
    def test_sinkhorn_steps(self, n: int, iters: int) -> None:
        given = [4 * t for t in inputs("sinkhorn", (2111,), n, 0, F32)]
        check("sinkhorn", given, iters=iters)
        check("sinkhorn", given, iters=iters, eps=0.1)
        if iters >= 20:
            got = mhc.sinkhorn(0.1 * given[0], iters)  # wider logits converge more slowly, in float64 as well
            for axis in (-1, -2):
                assert float((got.sum(axis) - 1).abs().max()) < 1e-3

    @pytest.mark.parametrize("n", COUNTS)
    @pytest.mark.parametrize("scale", [10, 30, 60, 100])
    @pytest.mark.parametrize("iters, eps", [(3, 1e-6), (20, 1e-6), (20, 1e-3), (20, 0.5), (100, 1e-6)])
    def test_sinkhorn_of_logits_far_apart(self, n: int, scale: int, iters: int, eps: float) -> None:
        """Columns far below their rows' maxima, whose exponentials are below float32's range, and which eps lifts."""
        if iters * scale > 2000:
            pytest.skip("factors of so many iterations leave float32's range (docs/mhc.md)")
        logits = scale * randn(2111, n, n, dtype=F32, seed=scale)
        check("sinkhorn", [logits], iters=iters, eps=eps)

    @pytest.mark.parametrize("n", COUNTS)
    def test_sinkhorn_of_logits_that_are_not_finite(self, n: int) -> None:
        logits = randn(64, n, n, dtype=F32, seed=0)
        logits[0, 0, 0], logits[1, :, 1], logits[2, 0, 0] = torch.nan, -torch.inf, -torch.inf
        got = mhc.sinkhorn(logits).cpu()
        assert got[0].isnan().any() and got[1:].isfinite().all() and not got[1, :, 1].any()
        wanted = reference.sinkhorn(logits[1:].cpu().double(), 20, 1e-6)
        torch.testing.assert_close(got[1:].double(), wanted, rtol=0, atol=1e-5)

    def test_ties_share_the_maximum(self) -> None:
        logits = torch.zeros(64, 4, 4, device="cuda")
        logits[1::2, :, 1:3] = 3.0
        check("sinkhorn", [logits], iters=1, eps=0.5)

    @pytest.mark.parametrize("name", CALLS)
    def test_large_token_counts(self, name: str) -> None:
        """More tokens than CTAs of any grid."""
        given = inputs(name, (4099,), 4, 64, BF16)
        check(name, given)


class TestProjectBackward:
    """Tests of project's backward. A warp of its gates' kernel handles 8 tokens at a time, a CTA 128 and the grid
    33792. TF32 and bfloat16 hold the inputs exactly, so that a float32 sum over tokens with one token too few or too
    many shows.
    """

    def check(self, tokens: int, n: int, c: int, dtype: torch.dtype, present: tuple[bool, ...] = (True,) * 3) -> None:
        """Compare gradients with float64. present: True for each of h_pre, h_post and h_res that gets a gradient."""
        given = [t.to(BF16).to(t.dtype) for t in inputs("project", (tokens,), n, c, dtype)]
        runs = []
        for values in (given, [t.double().cpu() for t in given]):
            leaves = [t.detach().requires_grad_() for t in values]
            with torch.enable_grad():
                results = listed(mhc.project(*leaves))
                chosen = [(r, d) for r, d, p in zip(results, cotangents(results), present, strict=True) if p]
                runs.append(torch.autograd.grad([r for r, _ in chosen], leaves, [d for _, d in chosen]))
        (d_x, d_weight, *sums), (exact_x, exact_weight, *exact_sums) = runs
        assert_near(d_weight, exact_weight, GRADIENT_ERROR[BF16], 0.999, "d_weight")
        exact_x = exact_x.to(d_x.device)
        error = (d_x.double() - exact_x).flatten(1).abs().amax(1) / exact_x.flatten(1).abs().amax(1)
        assert float(error.max()) <= 3e-2, f"d_x of token {int(error.argmax())}"
        for i, (got, exact) in enumerate(zip(sums, exact_sums, strict=True)):
            if exact.any():
                assert_near(got, exact, 1e-3, 0.9999, f"sum {i}", 0.3 * tokens**0.5)
            else:
                assert not got.any(), f"sum {i} has no gradient"

    @pytest.mark.parametrize("n", COUNTS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_token_counts(self, dtype: torch.dtype, n: int) -> None:
        for tokens in (1, 2, 7, 8, 9, 15, 17, 121, 128, 129, 391):
            self.check(tokens, n, 136, dtype)

    @pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
    def test_more_tokens_than_a_grid_has(self, dtype: torch.dtype) -> None:
        self.check(40003, 4, 16, dtype)

    @pytest.mark.parametrize("present", [p for p in itertools.product([False, True], repeat=3) if any(p)], ids=str)
    @pytest.mark.parametrize("n", COUNTS)
    def test_absent_gradients(self, n: int, present: tuple[bool, ...]) -> None:
        for dtype in (BF16, F32):
            self.check(133, n, 72, dtype, present)

    @pytest.mark.parametrize("of_weight", [False, True])
    def test_calls_that_follow_each_other(self, of_weight: bool) -> None:
        """A call's first kernel may start before the last call's has ended, whose workspace is the same."""
        given = inputs("project", (4099,), 4, 1024, BF16)
        *made, stats = project_streams(*given, 1e-6, True)
        calls = []
        for seed in range(2):
            gradients = [randn(*r.shape, dtype=F32, seed=10 * seed + i) for i, r in enumerate(made) if r is not None]
            calls.append((*gradients, *given, stats, None, None, None))
        wanted = []
        for call in calls:
            wanted.append(project_backward(*call, 1e-6, True, of_weight))
            torch.cuda.synchronize()
        runs = [project_backward(*call, 1e-6, True, of_weight) for call in 10 * calls]
        for i, run in enumerate(runs):
            for got, want in zip(run, wanted[i % 2], strict=True):
                assert got is want is None or (got is not None and want is not None and same_bits(got, want))


def row_errors(got: Tensor, exact: Tensor) -> float:
    """Return the largest relative error of any row: root mean square of the error over that of the exact values."""
    exact = exact.to(got.device)
    return float(((got.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def roundings(exact: Tensor, dtype: torch.dtype) -> float:
    """Return `row_errors` of the exact result rounded to a dtype: the least possible error."""
    return row_errors(exact.to(dtype), exact)


class TestExactWeights:
    """Float32 values stay precise with streams of any dtype: weights, products with the norm's weight, and gradients of
    both.

    Errors are root mean squares by row of the weight, whose rows differ in scale by 2^14. Rounding a weight or a
    gradient of p to bfloat16 would add an error of 1.6e-3, to float16 or TF32 of 2e-4.
    """

    MOST = 1e-5

    def run(self, call: Callable[..., Any], given: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        with torch.enable_grad():
            results = listed(call(**leaves))
            gradients = torch.autograd.grad(results, list(leaves.values()), cotangents(results))
        return [r.detach() for r in results], dict(zip(leaves, gradients, strict=True))

    def given(
        self, tokens: int, n: int, c: int, dtype: torch.dtype, params: torch.dtype, norm: torch.dtype | None
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return inputs without a bias, so that small weight rows give small logits, and with alphas of one."""
        x, weight, *_, bias = inputs("project", (tokens,), n, c, dtype, F32)
        rows = torch.linspace(-12, 2, len(bias), device="cuda").exp2()
        one = torch.ones(1, device="cuda")
        made = {
            "x": x,
            "weight": (weight * rows.unsqueeze(1)).to(params),
            **dict.fromkeys(ALPHAS, one),
            "bias": 0 * bias,
        }
        return made if norm is None else {**made, "norm_weight": (randn(n * c, dtype=F32, seed=9) + 2).to(norm)}

    @pytest.mark.parametrize(
        ("params", "norm"), [(F32, None), (F32, F32), (F32, BF16), (BF16, F32), (F16, F16)], ids=str
    )
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("tokens", "n", "c"), [(133, 4, 1504), (61, 2, 736), (77, 8, 520)])
    def test_project(
        self, tokens: int, n: int, c: int, dtype: torch.dtype, params: torch.dtype, norm: torch.dtype | None
    ) -> None:  # fmt: skip
        given = self.given(tokens, n, c, dtype, params, norm)
        results, gradients = self.run(mhc.project, given)
        exact, exact_gradients = self.run(mhc.project, {name: t.double().cpu() for name, t in given.items()})
        # By output, of all tokens: each has a row of the weight of its own.
        logits, exact_logits = (r[2].flatten(1).t() for r in (results, exact))
        assert row_errors(logits, exact_logits) <= self.MOST
        assert row_errors(results[0], exact[0]) <= self.MOST
        assert row_errors(results[1], exact[1]) <= self.MOST
        for name in ("weight", "norm_weight") if norm else ("weight",):
            got, wanted = gradients[name], exact_gradients[name]
            assert got.dtype is given[name].dtype
            assert row_errors(got, wanted) <= self.MOST + 1.01 * roundings(wanted, got.dtype), name
        got, wanted = gradients["x"].flatten(1), exact_gradients["x"].flatten(1)
        assert row_errors(got, wanted) <= self.MOST + 1.05 * roundings(wanted, dtype)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_pre(self, dtype: torch.dtype) -> None:
        """Its gradients, with what `aggregate` and the residual add to that of the streams. Sinkhorn's steps make small
        numbers from differences of large ones, so errors may grow by 10.
        """
        given = self.given(133, 4, 1504, dtype, F32, F32)
        results, gradients = self.run(mhc.pre, given)
        exact, exact_gradients = self.run(mhc.pre, {name: t.double().cpu() for name, t in given.items()})
        for got, wanted in zip(results, exact, strict=True):
            assert row_errors(got, wanted) <= 10 * self.MOST + 1.05 * roundings(wanted, got.dtype)
        for name in ("x", "weight", "norm_weight"):
            got, wanted = gradients[name], exact_gradients[name]
            assert row_errors(got, wanted) <= 10 * self.MOST + 1.05 * roundings(wanted, got.dtype), name

    def test_small_numbers_of_float16(self) -> None:
        """Weights and gradients so small that float16 has few bits of them, or none."""
        given = self.given(133, 4, 1504, F16, F32, None)
        given["weight"] = given["weight"] * 2.0**-4
        results, gradients = [], []
        for values in (given, {name: t.double().cpu() for name, t in given.items()}):
            leaves = {name: t.detach().requires_grad_() for name, t in values.items()}
            with torch.enable_grad():
                made = mhc.project(**leaves).h_res
                upstream = cotangents([made])[0] * 2.0**-18
                gradients.append(torch.autograd.grad(made, leaves["weight"], upstream)[0])
            results.append(made.detach().flatten(1).t())
        assert row_errors(*results) <= 1e-4
        assert row_errors(gradients[0][8:], gradients[1][8:]) <= 1e-4


class TestContract:
    @pytest.mark.parametrize("name", CALLS)
    def test_given_outputs_and_the_same_bits_every_time(self, name: str) -> None:
        given = inputs(name, (300, 7), 4, 264, BF16)
        results, gradients = on_gpu(name, given)
        for _ in range(10):
            more, more_gradients = on_gpu(name, given)
            assert all(map(same_bits, (*more, *more_gradients), (*results, *gradients)))
        if name == "pre":
            return  # takes no buffers
        out = [torch.full_like(r, torch.nan) for r in results]
        got = listed(CALLS[name](*given, out=out[0] if len(out) == 1 else tuple(out)))
        assert all(a is b and same_bits(a, r) for a, b, r in zip(got, out, results, strict=True))

    @pytest.mark.parametrize("name", CALLS)
    def test_only_what_is_asked_for(self, name: str) -> None:
        given = inputs(name, (3, 21), 4, 136, BF16)
        _, full = on_gpu(name, given)
        for i in range(len(given)):
            leaves = [t.detach().requires_grad_(i == j) for j, t in enumerate(given)]
            with torch.enable_grad():
                results = listed(CALLS[name](*leaves))
                (got,) = torch.autograd.grad(results, leaves[i], cotangents(results))
            assert same_bits(got, full[i])

    @pytest.mark.parametrize("name", CALLS)
    def test_no_tokens(self, name: str) -> None:
        _, gradients = on_gpu(name, inputs(name, (0, 3), 4, 64, BF16))
        assert not any(bool(g.any()) for g in gradients)

    @pytest.mark.parametrize("name", CALLS)
    def test_graph_capture(self, name: str) -> None:
        """Captured once, forward and backward, and replayed with other inputs."""
        first, second = (inputs(name, (40, 3), 4, 264, BF16) for _ in range(2))
        second = [t.roll(1, 0) * 0.5 for t in second]
        for given in (first, second):
            on_gpu(name, given)
        static = [t.clone() for t in first]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            leaves = [t.detach().requires_grad_() for t in static]
            with torch.enable_grad():
                results = listed(CALLS[name](*leaves))
                captured = (*results, *torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results]))
        for given in (second, first):
            for place, value in zip(static, given, strict=True):
                place.copy_(value)
            graph.replay()
            leaves = [t.detach().requires_grad_() for t in given]
            with torch.enable_grad():
                results = listed(CALLS[name](*leaves))
                eager = (*results, *torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results]))
            assert all(map(same_bits, [t.detach() for t in captured], [t.detach() for t in eager]))

    def test_other_streams_and_expanded_gradients(self) -> None:
        given = inputs("post_mix", (33,), 4, 264, BF16)
        leaves = [t.detach().requires_grad_() for t in given]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.enable_grad():
            mhc.post_mix(*leaves).sum().backward()  # an expanded gradient of ones
        stream.synchronize()
        exact = reference.post_mix_backward(torch.ones_like(given[0]), *given, False)
        for got, want in zip(leaves, exact, strict=True):
            assert got.grad is not None and want is not None
            assert_near(got.grad, want.double(), 5e-2, 0.999, "gradient")

    def test_errors(self) -> None:
        x, h_pre = inputs("aggregate", (3,), 4, 64, BF16)
        for bad, message in (
            ((x[..., :60].contiguous(), h_pre), "C = 60.*multiple of 8"),
            ((x[:, :3].contiguous(), h_pre[:, :3].contiguous()), "3 streams"),
            ((x.view(-1)[1 : 1 + 2 * 4 * 64].view(2, 4, 64), h_pre[:2]), "x starts 2 bytes"),
            ((x, h_pre.cpu()), "h_pre is on cpu"),
        ):
            for _ in range(2):
                with pytest.raises(ValueError, match=message):
                    mhc.aggregate(*bad)
        with pytest.raises(ValueError, match="iters is 500"):
            mhc.sinkhorn(torch.zeros(4, 4, device="cuda"), 500)


class TestHyperConnection:
    @pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
    def test_against_float64(self, dtype: torch.dtype) -> None:
        """A whole layer, every gradient, and the same bits when it is done again."""
        torch.manual_seed(0)
        layer = glulam.nn.HyperConnection(4, 264, torch.nn.Linear(264, 264), device="cuda")
        layer.sublayer.to(device="cuda", dtype=dtype)  # type: ignore[union-attr]
        with torch.no_grad():
            layer.weight.normal_(0, 0.03)
            layer.bias.normal_()
        exact = copy.deepcopy(layer).double().cpu()
        x = randn(5, 13, 4, 264, dtype=dtype, seed=0)
        runs = []
        with torch.enable_grad():
            for model, streams in ((layer, x), (layer, x), (exact, x.double().cpu())):
                leaf = streams.detach().requires_grad_()
                model.zero_grad()
                result = model(leaf)
                result.backward(cotangents([result])[0])
                runs.append([result.detach(), leaf.grad, *(p.grad for p in model.parameters())])
        assert all(map(same_bits, runs[0], runs[1]))
        for i, (got, want) in enumerate(zip(runs[0], runs[2], strict=True)):
            least_scale = (x.numel() / x.shape[-1]) ** 0.5 * 0.3 if want.numel() == 1 else 0.0
            assert_near(got, want, 5e-2, 0.999, f"tensor {i}", least_scale)
