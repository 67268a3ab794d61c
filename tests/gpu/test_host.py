"""Host code that only a GPU tests: streams, threads, devices, preloading, bad arguments after good ones,
torch.compile.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.checks import check_mlp
from support.criterion import same_bits
from support.inputs import Case, make_case
from support.routing import zipf

import glulam
from glulam.host import workspace

pytestmark = pytest.mark.gpu

HIDDEN, INTER, EXPERTS = 136, 96, 8
BF16 = torch.bfloat16


def case(rows: int, seed: int = 0, **options: Any) -> Case:
    return make_case(zipf(rows, EXPERTS, seed), HIDDEN, INTER, device="cuda", seed=seed, **options)


def mlp(c: Case, **options: Any) -> torch.Tensor:
    return glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, **options)


@pytest.mark.parametrize("rows", [500, 5000])
def test_runs_on_the_current_stream(rows: int) -> None:
    """x is written on a side stream long after the call was made; only work on that stream sees it."""
    c = case(rows)
    want = mlp(c)
    x, offs = torch.zeros_like(c.x), c.offs
    glulam.grouped_mlp(x, c.w1, c.w2, offs=offs)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.copy_(c.x)
        y = glulam.grouped_mlp(x, c.w1, c.w2, offs=offs)
    assert not stream.query(), "the stream was idle before the call returned: nothing was tested"
    stream.synchronize()
    assert same_bits(y, want)


def test_many_streams_at_once() -> None:
    """Calls of many sizes on more streams than workspaces are kept, never waiting for one another."""
    cases = [case(100 + 150 * n, seed=n) for n in range(workspace.MAX_STREAMS + 3)]
    offs = [c.offs for c in cases]
    want = [mlp(c) for c in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[] for _ in cases]
    for _ in range(6):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[n].append(glulam.grouped_mlp(cases[n].x, cases[n].w1, cases[n].w2, offs=offs[n]))
    torch.cuda.synchronize()
    for results, expected in zip(got, want, strict=True):
        assert len(results) == 6 and all(same_bits(result, expected) for result in results)


@pytest.mark.parametrize("own_stream", [False, True], ids=["one stream", "a stream each"])
@pytest.mark.parametrize("listed", [False, True])
def test_many_threads_at_once(own_stream: bool, listed: bool) -> None:
    """On one stream, launches of several threads' calls interleave: none may see another's intermediate."""
    cases = [case(400 + 10 * n, seed=n) for n in range(8)]
    want = [mlp(c) for c in cases]
    torch.cuda.synchronize()
    start = threading.Barrier(len(cases))
    failures: list[str] = []

    def work(n: int) -> None:
        c, offs = cases[n], cases[n].offs
        weights = (list(c.w1), list(c.w2)) if listed else (c.w1, c.w2)
        stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
        stream.wait_stream(torch.cuda.default_stream())
        try:
            with torch.cuda.stream(stream), torch.no_grad():
                start.wait()
                results = [glulam.grouped_mlp(c.x, *weights, offs=offs) for _ in range(50)]
                stream.synchronize()
                if not all(same_bits(result, want[n]) for result in results):
                    failures.append(f"thread {n}: another result than alone")
        except Exception as error:
            failures.append(f"thread {n}: {error!r}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_workspace_reuse_across_sizes() -> None:
    """One workspace serves calls of changing size back to back, with no wait between them."""
    cases = [case(rows, seed=rows) for rows in (64, 2000, 300, 5000, 8)]
    want = [mlp(c) for c in cases]
    torch.cuda.synchronize()
    order = [n % len(cases) for n in range(40)]
    results = [mlp(cases[n]) for n in order]
    assert all(same_bits(result, want[n]) for result, n in zip(results, order, strict=True))
    check_mlp(cases[1], want[1])


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    c = case(300)
    want = mlp(c)
    other = Case(*(t.to("cuda:1") for t in (c.x, c.w1, c.w2, c.b1, c.b2, c.row_scale)), sizes=c.sizes)
    y = mlp(other)
    assert y.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert same_bits(y.to("cuda:0"), want)
    listed = glulam.grouped_mlp(other.x, list(other.w1), list(other.w2), offs=other.offs)
    assert same_bits(listed.to("cuda:0"), want)
    with pytest.raises(ValueError, match="w1 is on cuda:1 but x is on cuda:0"):
        glulam.grouped_mlp(c.x, other.w1, c.w2, offs=c.offs)


def bad_arguments(c: Case) -> dict[str, tuple[type[Exception], str, dict[str, Any]]]:
    """Return the error type, words of its message and the changed arguments of each bad call, by name."""
    flat = torch.zeros(c.x.numel() + 1, dtype=BF16, device="cuda")
    shared = torch.zeros(c.x.shape[0] + 8, HIDDEN, dtype=BF16, device="cuda")
    return {
        "x of another dtype": (TypeError, "w1 is torch.bfloat16 but x is torch.float16", {"x": c.x.half()}),
        "w1 of another dtype": (TypeError, "w1 is torch.float16", {"w1": c.w1.half()}),
        "w2 of float32": (TypeError, "w2 is torch.float32", {"w2": c.w2.float()}),
        "out of another dtype": (TypeError, "out is torch.float32", {"out": c.x.float()}),
        "w2 on the CPU": (ValueError, "w2 is on cpu", {"w2": c.w2.cpu()}),
        "offs on the CPU": (ValueError, "offs is on cpu but x is on cuda:0", {"offs": c.offs.cpu()}),
        "row_scale on the CPU": (ValueError, "row_scale is on cpu", {"row_scale": c.row_scale.cpu()}),
        "x misaligned": (ValueError, "x starts 2 bytes after", {"x": flat[1:].view(c.x.shape)}),
        "w1 not contiguous": (ValueError, "w1 is a transposed view", {"w1": c.w1.mT.contiguous().mT}),
        "x at odd strides": (ValueError, "x has rows", {"x": c.x.new_zeros(c.x.shape[0], HIDDEN + 4)[:, :HIDDEN]}),
        "out of another width": (ValueError, "out has shape", {"out": c.x.new_zeros(c.x.shape[0], HIDDEN + 8)}),
        "out of fewer rows": (ValueError, "out has shape", {"out": torch.zeros_like(c.x[:-1])}),
        "out over x": (ValueError, "out overlaps x", {"x": shared[:-8], "out": shared[8:]}),
        "w1 of fewer experts": (ValueError, "w2 has shape", {"w1": c.w1[:-1]}),
        "offs int64": (TypeError, "offs is torch.int64", {"offs": c.offs.long()}),
        "K not a multiple of 8": (ValueError, "x has a dimension of 132", {"x": c.x[:, :132].contiguous()}),
        "splits beyond x": (ValueError, "splits sum to", {"offs": None, "splits": [c.x.shape[0]] * EXPERTS}),
    }  # fmt: skip


def test_bad_arguments_after_good_ones() -> None:
    """Each refused with a message of our own, by whichever check comes first; and nothing is written."""
    c = case(300, tail=4)
    good = {"x": c.x, "w1": c.w1, "w2": c.w2, "offs": c.offs, "row_scale": c.row_scale}
    for _ in range(2):
        glulam.grouped_mlp(**good)
        glulam.grouped_mlp(**good, out=torch.zeros_like(c.x))
    for name, (error, words, changes) in bad_arguments(c).items():
        arguments = {**good, **changes}
        before = arguments["out"].clone() if "out" in arguments else None
        with pytest.raises(error, match=words):
            glulam.grouped_mlp(**arguments)
        torch.cuda.synchronize()
        assert before is None or same_bits(before, arguments["out"]), name


def test_checking_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(300)
    glulam.choose.kernels.forget_plans()
    monkeypatch.setenv("GLULAM_CHECK", "1")
    check_mlp(c, mlp(c))
    with pytest.raises(ValueError, match="offs end at 301, but x has 300 rows"):
        glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs + 1)


def test_preload() -> None:
    loaded = glulam.preload()
    assert loaded >= 200
    assert loaded == glulam.preload(0) == glulam.preload("cuda:0")
    check_mlp(c := case(300), mlp(c))


def test_explain() -> None:
    c = case(300)
    told = glulam.explain("grouped_mlp", c.x, c.w1, c.w2, offs=c.offs)
    assert (told.device, told.source) == ("cuda:0", "shipped") and told.spec is not None
    assert told.spec.name in repr(told)


def test_gradients_are_refused() -> None:
    c = case(100)
    with torch.enable_grad(), pytest.raises(glulam.GradientNotSupported, match="grouped_wgrad has no gradient"):
        glulam.grouped_wgrad(c.x.requires_grad_(), c.x, offs=c.offs)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile(backend: str) -> None:
    """One layer with work around it, in one graph; given and allocated outputs, packed weights and lists."""
    c = case(300, tail=5)
    lists = list(c.w1), list(c.w2)

    def layer(x: torch.Tensor, offs: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = glulam.grouped_mlp(x * 2, c.w1, c.w2, offs=offs, b1=c.b1, row_scale=c.row_scale)
        glulam.grouped_mlp(y, *lists, offs=offs, out=out)
        act, preact = glulam.grouped_glu(x, c.w1, offs=offs, return_preact=True)
        return torch.relu(y), act.sum(dim=1) + preact.sum(dim=1)

    def buffer() -> torch.Tensor:
        return torch.full_like(c.x, 7.0)

    eager_out, compiled_out = buffer(), buffer()
    eager = layer(c.x, c.offs, eager_out)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)(c.x, c.offs, compiled_out)
    assert same_bits(eager_out, compiled_out) and bool((compiled_out[c.rows :] == 7).all())
    assert same_bits(eager[0][: c.rows], compiled[0][: c.rows])
    torch.testing.assert_close(eager[1][: c.rows], compiled[1][: c.rows], rtol=0.05, atol=0.05)
    assert bool((eager[0][: c.rows] > 0).any())
