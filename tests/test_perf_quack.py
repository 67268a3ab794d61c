"""QuACK as a contestant, replaced by stand-in modules with its names and signatures: calls and tuning."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from glulam.tuner.timing import Summary
from perf import mlp, quack, stamp
from perf.cases import KERNELS, OPS, TINY
from perf.contest import admitted
from perf.suites import mlp as suite

CASE = dataclasses.replace(TINY, routing="dirichlet")


@dataclasses.dataclass(frozen=True)
class Config:
    """Stand-in for quack.gemm_config.GemmConfig, with the fields that perf reads."""

    name: str
    device_capacity: int = 9
    swap_ab: bool = False


class CompilePending(BaseException):
    """Stand-in for quack.cache.CompilePending, a BaseException."""


def groups(starts):
    return [slice(*pair) for pair in itertools.pairwise(starts.tolist())]


class FakeInterface(types.ModuleType):
    """Stand-in for quack.gemm_interface of 0.6.5, in float32 on the CPU. used: (function, configuration) of every
    call.
    """

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
    """Stand-ins for QuACK and a GPU of capability 9.0; a configuration's made-up time is the length of its name."""
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
        return {name: vars(Summary(float(len(used(call).name)), 0.0, 0.0, 3)) for name, call in calls.items()}

    def used(call):
        call(1)
        return interface.used[-1][1]

    monkeypatch.setattr(quack, "measure_device", measure)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for module in (stamp, quack):
        monkeypatch.setattr(module, "quack_version", lambda: "0.6.5")
    monkeypatch.setattr(quack, "make_buffers", lambda case: mlp.make_buffers(case, device="cpu"))
    return interface


def buffers(**changes):
    return mlp.make_buffers(dataclasses.replace(CASE, **changes), device="cpu")[:2]


@pytest.mark.parametrize("op", [*OPS, *KERNELS])
@pytest.mark.parametrize("routing", ["dirichlet", "half-empty"])
@torch.no_grad()
def test_quack_computes_every_operation(api, op, routing):
    case = dataclasses.replace(CASE, routing=routing)
    sets = buffers(routing=routing) if op in OPS else [mlp.make_training(case, device="cpu")]
    found = admitted("tiny", mlp.contestants(op, sets, quack.Quack("tuned")))
    assert list(found.calls) == ["glulam", "dense", "torch", "quack tuned"] and not found.left_out


def test_the_default_configuration_needs_no_tuning(api):
    peer, sets = quack.Quack("default"), buffers()
    peer.prepared("mlp", sets)(sets[0])
    assert api.used == [("gated", None), ("rows", None)] and peer.tunings("mlp", sets) == {} and not peer.spaces
    assert quack.find_quack("off") is None and quack.find_quack("default").name == "quack default"


def test_the_fastest_configuration_is_used_from_then_on(api):
    sets, peer = buffers(), quack.Quack("tuned")
    call = peer.prepared("mlp", sets)
    tunings = peer.tunings("mlp", sets)
    assert set(tunings) == {"fc1", "fc2"} and tunings["fc1"]["timed"] == 3 and tunings["fc2"]["timed"] == 2
    assert "gated b" in tunings["fc1"]["config"] and set(peer.tunings("fc2", sets)) == {"fc2"}
    api.used.clear()
    call(sets[0])
    assert [(name, config.name) for name, config in api.used] == [("gated", "gated b"), ("rows", "None b")]


def test_tuned_keeps_its_choice_for_a_shape_and_retuned_does_not(api, monkeypatch):
    chosen = itertools.count()
    monkeypatch.setattr(quack, "fastest", lambda *_: (None, {"config": str(next(chosen))}))
    problems = [buffers(routing=routing) for routing in ("uniform", "dirichlet", "uniform")]
    problems.append(buffers(rows=2 * CASE.rows))
    for mode, wanted in (("tuned", ["0", "0", "0", "1"]), ("retuned", ["2", "3", "2", "4"])):
        peer = quack.Quack(mode)
        assert [peer.tunings("fc1", sets)["fc1"]["config"] for sets in problems] == wanted


def test_only_weight_gradients_may_swap_operands(api):
    spaces = quack.Quack("tuned").spaces
    assert set(spaces) == {"fc1", "fc2", *KERNELS}
    swapping = {op for op, space in spaces.items() if any(config.swap_ab for config in space)}
    assert swapping - {"fc1", "dglu"} == {"dw1", "dw2"}
    assert all(config.device_capacity == 9 for space in spaces.values() for config in space)


class Compiling:
    """Stand-in for compilation: a configuration is ready at the third attempt; attempts of those in `fails` raise."""

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
        quack, "measure_device", lambda calls, *rest: {name: vars(Summary(1.0, 1.0, 1.0, 3)) for name in calls}
    )
    return quack.fastest(run, [Config(n) for n in names], sys.modules["quack.cache"], clock or (lambda: next(seconds)))


def test_configurations_are_awaited_and_what_fails_is_left_out(api, monkeypatch):
    run = Compiling(fails=["a"])
    config, tuning = fastest(run, "abc", monkeypatch)
    assert config.name == "b" and run.attempts == {"b": 3, "c": 3}
    assert tuning["timed"] == 2


def test_compiling_has_an_end(api, monkeypatch):
    def never(config, number):
        raise CompilePending

    with pytest.raises(RuntimeError, match="none of QuACK's 2 configurations runs here: nothing compiled within 60 s"):
        fastest(never, "ab", monkeypatch)
    with pytest.raises(RuntimeError, match="runs here: tile does not fit"):
        fastest(Compiling(fails="ab"), "ab", monkeypatch)


def measured(peer, ops):
    """Return records of the suite's operations on one small case, with made-up times."""

    def timed(calls, seconds):
        return {name: {"median_us": 1.0} for name in calls}

    return list(suite.measure_case(ops, peer, timed, dataclasses.replace(CASE, rows=512), 1.0))


@pytest.fixture
def on_the_cpu(monkeypatch):
    make, training = mlp.make_buffers, mlp.make_training
    monkeypatch.setattr(suite, "make_buffers", lambda case: make(case, device="cpu")[:2])
    monkeypatch.setattr(suite, "make_training", lambda case: training(case, device="cpu"))


def test_records_say_what_was_chosen(api, on_the_cpu):
    records = measured(quack.Quack("tuned"), ("mlp", *KERNELS))
    assert all(list(record["times"]) == ["glulam", "dense", "torch", "quack tuned"] for record in records)
    tuned = [set(record["tuning"]) for record in records]
    assert tuned == [{"fc1", "fc2"}, *({op} for op in KERNELS)]


def test_a_quack_that_fails_or_is_wrong_leaves_the_operation_with_a_warning(api, on_the_cpu, monkeypatch):
    def breaks(*arguments, **options):
        raise OSError("no such kernel")

    right = api.gemm_gated

    def wrong(*arguments, **options):
        right(*arguments, **options)
        options["postact_out"].mul_(1.1)

    monkeypatch.setattr(api, "gemm_dgated", breaks)
    monkeypatch.setattr(api, "gemm_gated", wrong)
    with pytest.warns(UserWarning) as seen:
        records = measured(quack.Quack("tuned"), ("fc1", "dglu"))
    first, second = (str(warning.message) for warning in seen)
    assert "fc1: quack tuned is left out: wrong, relative error 0.1" in first
    assert "dglu: quack tuned is left out: RuntimeError: none of QuACK's 3" in second and "no such kernel" in second
    for record in records:
        assert list(record["times"]) == ["glulam", "dense", "torch"] and "tuning" not in record
