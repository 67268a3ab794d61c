"""QuACK as a contestant, played by modules with its names and argument lists: how it is called, and how tuned."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from perf import contestants, quack, training
from perf.cases import OPS, TINY
from perf.options import Options
from perf.problem import make_problem
from perf.suites import backward, forward
from perf.timing import Summary

CASE = dataclasses.replace(TINY, routing="dirichlet")


@dataclasses.dataclass(frozen=True)
class Config:
    """As quack.gemm_config.GemmConfig, as far as we look at it."""

    name: str
    device_capacity: int = 9
    swap_ab: bool = False


class CompilePending(BaseException):
    """As quack.cache.CompilePending: a BaseException."""


def groups(starts):
    return [slice(*pair) for pair in itertools.pairwise(starts.tolist())]


class FakeInterface(types.ModuleType):
    """quack.gemm_interface of 0.6.5, in float32 on the CPU. `used`: (function, configuration) of every call."""

    def __init__(self):
        super().__init__("quack.gemm_interface")
        self.used = []
        self.gemm_tuned = types.SimpleNamespace(fn=self._gemm)

    def gemm_gated(
        self, A, B, C=None, bias=None, activation=None, preact_out=None, postact_out=None, store_preact=True,
        cu_seqlens_m=None, dynamic_scheduler=False, tuned=True, config=None,
    ):  # fmt: skip
        assert activation == "swiglu" and not store_preact and not tuned and C is bias is preact_out is None
        assert A.stride(-1) == 1 and cu_seqlens_m.dtype == torch.int32 and B.shape[0] == cu_seqlens_m.numel() - 1
        self.used.append(("gated", config))
        for e, rows in enumerate(groups(cu_seqlens_m)):
            h = A[rows].float() @ B[e].float()
            postact_out[rows] = (F.silu(h[:, 0::2]) * h[:, 1::2]).to(postact_out.dtype)
        return None, postact_out

    def gemm_dgated(
        self, A, B, PreAct, activation=None, dx_out=None, postact_out=None, colvec_scale=None, colvec_reduce=False,
        cu_seqlens_m=None, dynamic_scheduler=True, tuned=True, config=None,
    ):  # fmt: skip
        assert activation == "swiglu" and colvec_reduce and not tuned and colvec_scale.dtype == torch.float32
        self.used.append(("dgated", config))
        preact, scale = PreAct.float().requires_grad_(), colvec_scale.detach().clone().requires_grad_()
        with torch.enable_grad():
            act = F.silu(preact[:, 0::2]) * preact[:, 1::2] * scale[:, None]
        d_act = torch.cat([A[rows].float() @ B[e].float() for e, rows in enumerate(groups(cu_seqlens_m))])
        dx, d_scale = torch.autograd.grad(act, (preact, scale), d_act)
        dx_out.copy_(dx)
        postact_out.copy_(act.detach())
        return dx_out, postact_out, d_scale

    def _gemm(self, A, B, out, C=None, cu_seqlens_m=None, cu_seqlens_k=None, config=None):
        assert (cu_seqlens_m is None) != (cu_seqlens_k is None)
        if cu_seqlens_m is not None:
            assert A.stride(-1) == 1 and out.stride(-1) == 1
            self.used.append(("rows", config))
            for e, rows in enumerate(groups(cu_seqlens_m)):
                out[rows] = (A[rows].float() @ B[e].float()).to(out.dtype)
        else:
            assert A.stride(-2) == 1 and B.mT.stride(-2) == 1 and out.is_contiguous()
            self.used.append(("wgrad", config))
            for e, rows in enumerate(groups(cu_seqlens_k)):
                if rows.stop > rows.start:  # of an empty group, nothing is written
                    out[e] = (A[:, rows].float() @ B[rows].float()).to(out.dtype)


@pytest.fixture
def api(monkeypatch):
    """QuACK is installed, and a GPU of capability 9.0 is there; configurations take as long as their names are."""
    interface = FakeInterface()
    configs = types.ModuleType("quack.gemm_config")
    configs.get_all_configs = lambda epilogue=None: [
        Config(f"{epilogue} slow"),
        Config(f"{epilogue} b"),
        Config(f"{epilogue} blackwell", device_capacity=10),
        Config(f"{epilogue} swapped", swap_ab=True),
    ]
    configs.config_supports = lambda config, *, gather_A=False, varlen_m=False: not (varlen_m and config.swap_ab)
    cache = types.ModuleType("quack.cache")
    cache.pool_scope, cache.CompilePending = contextlib.nullcontext, CompilePending
    package = types.ModuleType("quack")
    modules = {"": package, ".gemm_interface": interface, ".gemm_config": configs, ".cache": cache}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"quack{name}", module)

    def measure(calls, budget_s, *rest):
        for call in calls.values():
            call(0)
        return {name: Summary(float(len(used(call).name)), 0.0, 0.0, 3) for name, call in calls.items()}

    def used(call):
        call(1)
        return interface.used[-1][1]

    monkeypatch.setattr(quack, "measure_device", measure)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for module in (contestants, quack):
        monkeypatch.setattr(module, "quack_version", lambda: "0.6.5")
    make = make_problem
    monkeypatch.setattr(contestants, "make_problem", lambda case: make(case, device="cpu"))
    return interface


@pytest.mark.parametrize("op", OPS)
def test_quack_computes_the_forward(api, op):
    b = make_problem(CASE, device="cpu").sets[0]
    assert contestants.check(quack.Quack("default"), op, b) <= contestants.MAX_RELATIVE_ERROR
    assert {config for _, config in api.used} == {None}


@pytest.mark.parametrize("op", training.KERNELS)
@pytest.mark.parametrize("routing", ["dirichlet", "half-empty"])
def test_quack_computes_the_backward(api, op, routing):
    d = training.make_data(dataclasses.replace(CASE, routing=routing), device="cpu")
    peer = quack.Quack("tuned")
    peer.prepare_backward(d, op)
    chosen = training.competing(d, op, peer)
    assert list(chosen)[-1] == "quack tuned" and len(chosen) == 4
    assert chosen["quack tuned"][1] <= training.MAX_RELATIVE_ERROR


def test_the_fastest_configuration_is_used_from_then_on(api):
    sets = make_problem(CASE, device="cpu").sets[:2]
    peer = quack.Quack("tuned")
    tunings = peer.prepare_forward(sets, ("mlp",))
    assert set(tunings) == {"fc1", "fc2"} and tunings["fc1"]["timed"] == 3 and tunings["fc2"]["timed"] == 2
    assert "gated b" in tunings["fc1"]["config"]
    api.used.clear()
    peer.mlp(sets[0])
    assert [(name, config.name) for name, config in api.used] == [("gated", "gated b"), ("rows", "None b")]
    assert set(peer.prepare_forward(sets, ("fc2",))) == {"fc2"}


def test_tuned_keeps_its_choice_for_a_shape_and_retuned_does_not(api, monkeypatch):
    chosen = iter(["first", "second", "third", "fourth"])
    monkeypatch.setattr(quack, "fastest", lambda *_: (next(chosen), quack.Tuning("c", 1, 0, 0.0)))
    problems = [make_problem(dataclasses.replace(CASE, routing=r), device="cpu") for r in ("uniform", "dirichlet")]
    for mode, wanted in (("tuned", ["first", "first"]), ("retuned", ["second", "third"])):
        peer, seen = quack.Quack(mode), []
        for problem in problems:
            peer.prepare_forward(problem.sets, ("fc1",))
            seen.append(peer.configs["fc1"])
        assert seen == wanted
    wider = make_problem(dataclasses.replace(CASE, rows=2 * CASE.rows), device="cpu")
    peer.prepare_forward(wider.sets, ("fc1",))
    assert peer.configs["fc1"] == "fourth"


def test_only_weight_gradients_may_swap_operands(api):
    spaces = quack.Quack("tuned").spaces
    assert set(spaces) == {"fc1", "fc2", *training.KERNELS}
    swapping = {op for op, space in spaces.items() if any(config.swap_ab for config in space)}
    assert swapping - {"fc1", "dglu"} == {"dw1", "dw2"}
    assert all(config.device_capacity == 9 for space in spaces.values() for config in space)


class Compiling:
    """A configuration is ready at its third attempt; of some, the attempt fails."""

    def __init__(self, fails=()):
        self.attempts, self.fails = {}, fails

    def __call__(self, config, number):
        if config.name in self.fails:
            raise ValueError("tile does not fit")
        self.attempts[config.name] = self.attempts.get(config.name, 0) + 1
        if self.attempts[config.name] < 3:
            raise CompilePending


def fastest(run, names, monkeypatch, clock=None):
    seconds = itertools.count()
    monkeypatch.setattr(quack, "POLL_S", 0.0)
    monkeypatch.setattr(
        quack, "measure_device", lambda calls, *rest: {name: Summary(1.0, 1.0, 1.0, 3) for name in calls}
    )
    return quack.fastest(run, [Config(n) for n in names], sys.modules["quack.cache"], clock or (lambda: next(seconds)))


def test_configurations_are_awaited_and_what_fails_is_left_out(api, monkeypatch):
    run = Compiling(fails=["a"])
    config, tuning = fastest(run, "abc", monkeypatch)
    assert config.name == "b" and run.attempts == {"b": 3, "c": 3}
    assert (tuning.timed, tuning.left_out) == (2, 1)


def test_compiling_has_an_end(api, monkeypatch):
    def never(config, number):
        raise CompilePending

    with pytest.raises(RuntimeError, match="none of QuACK's 2 configurations runs here: nothing compiled within 60 s"):
        fastest(never, "ab", monkeypatch)
    with pytest.raises(RuntimeError, match="runs here: tile does not fit"):
        fastest(Compiling(fails="ab"), "ab", monkeypatch)


@pytest.fixture
def untimed(monkeypatch):
    """The suites on small cases on the CPU, without a clock; the seconds of sampling that they asked for."""
    budgets = []

    def measure(calls, budget_s, *rest):
        budgets.append(budget_s)
        for call in calls.values():
            call(0)
        return {name: Summary(100.0, 99.0, 101.0, 3) for name in calls}

    for suite in (forward, backward):
        monkeypatch.setattr(suite, "measure_device", measure)
    monkeypatch.setattr(forward, "make_problem", lambda case: make_problem(case, device="cpu"))
    monkeypatch.setattr(backward, "make_data", lambda case: training.make_data(case, device="cpu"))
    monkeypatch.setattr(backward, "backward_cases", lambda: [CASE, dataclasses.replace(CASE, routing="half-empty")])
    return budgets


def test_the_forward_suite_measures_what_was_chosen(api, untimed):
    case = dataclasses.replace(CASE, rows=512)
    run = forward.forward_suite("forward", lambda _: [dataclasses.replace(case, routing="zipf")])
    records = run(Options(quack="tuned", ops=("fc1", "mlp")))
    assert [(r["op"], r["case"]["routing"]) for r in records] == [("fc1", "zipf"), ("mlp", "zipf")]
    assert all(list(r["times"]) == ["glulam", "dense", "torch", "quack tuned"] for r in records)
    assert set(records[0]["tuning"]["quack tuned"]) == {"fc1", "fc2"}
    with pytest.raises(ValueError, match="--op 'dw1' is not known here; choose among: fc1, fc2, mlp"):
        run(Options(quack="off", ops=("dw1",)))


def test_the_backward_suite_measures_every_kernel(api, untimed):
    records = backward.run_backward(Options(quack="tuned"))
    assert [r["op"] for r in records] == 2 * list(training.KERNELS)
    assert all(list(r["times"]) == ["glulam", "dense", "torch", "quack tuned"] for r in records)
    assert all(set(r["tuning"]["quack tuned"]) == {r["op"]} for r in records)


@pytest.mark.parametrize("options", [Options(8.0, quack="off"), Options(8.0, quack="off", case="half")])
def test_the_budget_is_what_all_samples_take(api, untimed, options):
    backward.run_backward(options)
    assert sum(untimed) == pytest.approx(8.0)
    untimed.clear()
    forward.forward_suite("forward", lambda _: [CASE, dataclasses.replace(CASE, seed=1)])(options)
    assert sum(untimed) == pytest.approx(8.0) and len(untimed) == 6


def test_a_quack_that_fails_in_a_case_leaves_it_with_a_warning(api, untimed, monkeypatch):
    def breaks(*arguments, **options):
        raise OSError("no such kernel")

    peer = quack.Quack("tuned")
    monkeypatch.setattr(backward, "find_quack", lambda mode: peer)
    monkeypatch.setattr(api, "gemm_dgated", breaks)
    with pytest.warns(
        UserWarning, match="dglu: quack tuned is left out: RuntimeError: none of QuACK's 3 .*: no such kernel"
    ):
        (record, _) = backward.run_backward(Options(quack="tuned", ops=("dglu",)))
    assert list(record["times"]) == ["glulam", "dense", "torch"] and record["tuning"] == {}


def test_a_wrong_peer_leaves_the_forward_and_the_others_stay(api, untimed, monkeypatch):
    case = dataclasses.replace(CASE, rows=512)
    right = api.gemm_gated

    def wrong(*arguments, **options):
        right(*arguments, **options)
        options["postact_out"].mul_(1.1)

    run = forward.forward_suite("forward", lambda _: [case])
    contestants_found = contestants.libraries("tuned")
    monkeypatch.setattr(forward, "libraries", lambda mode: contestants_found)
    monkeypatch.setattr(api, "gemm_gated", wrong)
    with pytest.warns(UserWarning, match="fc1: quack tuned is left out: .* relative error 0.1"):
        (record,) = run(Options(quack="tuned", ops=("fc1",)))
    assert list(record["times"]) == ["glulam", "dense", "torch"]


def test_quack_off_asks_for_nothing(api):
    assert contestants.find_quack("off") is None
    assert contestants.find_quack("default").name == "quack default"
    assert not contestants.find_quack("default").spaces
