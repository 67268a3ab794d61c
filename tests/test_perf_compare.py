"""`python -m perf compare`: kernels found by name, run with the right arguments, checked and tabulated."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from support import fake_gpu

from cute_kernels.chains import signature_of
from cute_kernels.sm90.configs import LARGE, SMALL, WGRAD, shipped_specs
from cute_kernels.specs import GroupedMmSpec, GroupedWgradSpec, operands_of, to_dict
from glulam.tuner.timing import Summary
from perf import contest, tables
from perf.cases import DEEPSEEK, PREFILL, Case, models, sweep
from perf.options import Options
from perf.suites import compare
from perf.suites.compare import OPERATIONS, Contest

CASE = Case("small", 5, 64, 128, 70, "dirichlet")
LIMITS = {"cublas_8192_tflops": 780.0, "copy_tbps": 4.27, "launch_us": 4.7}


class FakeBundle:
    """The shipped functions of 16-bit operands, computed on the CPU."""

    def __init__(self, specs=None, wrong=()):
        specs = specs or [spec for spec in shipped_specs() if operands_of(spec) == "16bit"]
        self.specs = {spec.name: spec for spec in specs}
        self.wrong = wrong
        functions = {name: types.SimpleNamespace(spec=to_dict(spec)) for name, spec in self.specs.items()}
        self.manifest = types.SimpleNamespace(functions=functions)

    def names(self):
        return sorted(self.specs)

    def function(self, name):
        spec = self.specs[name]
        right = fake_gpu.exported(spec)

        def launch(*arguments):
            right(*arguments)
            if name in self.wrong:
                fake_gpu.bound(signature_of(spec), arguments)["y"].mul_(1.1)

        return launch


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    fake_gpu.install(monkeypatch)


@pytest.fixture
def untimed(monkeypatch):
    """Run contestants on small CPU sets: each is called a few times, with made-up times of 100 us, 101 us, ..."""

    def measure(calls, *rest):
        for number in range(3):
            for call in calls.values():
                call(number)
        return {name: vars(Summary(100.0 + i, 99.0, 101.0, 3)) for i, name in enumerate(calls)}

    make_sets = compare.make_sets
    monkeypatch.setattr(compare, "make_sets", lambda *given: make_sets(*given, device="cpu", most=2))
    monkeypatch.setattr(contest, "measure_device", measure)


def found(*patterns, bundles=None):
    return compare.candidates(bundles or {"one": FakeBundle()}, patterns)


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_runs_every_kernel_that_serves_it(op, untimed):
    for of in compare.contests(found("*"), (op,)):
        (record,) = compare._measure(CASE, of, 1.0)
        assert len(record["errors"]) == len(of.competing)
        table, _ = tables.tables_of({"suite": "compare", "limits": LIMITS, "records": [record]})
        assert [row[0] for row in table.rows] == list(record["times"]) and compare.form_name(of.spec) in table.title
        assert max(record["errors"].values()) <= compare.MAX_RELATIVE_ERROR


def test_all_operations_of_a_layer_are_there():
    served = {op for op, *_ in compare.contests(found("*"), ())}
    assert served == set(OPERATIONS) == {"fc1", "fc2", "mlp", "dglu", "dgrad", "dw1", "dw2"}


@pytest.mark.parametrize(("op", "pattern"), [
    ("fc1", "grouped_glu_bf16_gated_blocked_t*"), ("fc2", "*mm_bf16_nt*"), ("mlp", "*mlp_bf16*"),
    ("dglu", "grouped_dglu_bf16_swiglu_concat*"), ("dgrad", "*mm_bf16_nn_*"),
    ("dw1", "grouped_wgrad_bf16_bf16_*"), ("dw2", "grouped_wgrad_bf16_bf16_*"),
])  # fmt: skip
def test_work_is_counted_as_the_other_suites_count_it(op, pattern):
    """Except dglu's row scale and its gradient, which are counted here alone."""
    case = dataclasses.replace(CASE, routing="uniform")
    (_, spec, _), *_ = compare.contests(found(pattern), (op,))
    (made,) = compare.make_sets(case, op, spec, 1, "cpu")
    scales = 2 * 4 * case.rows if op == "dglu" else 0
    assert made.work(case.experts) == {"flop": case.flop(op), "bytes": case.bytes(op, case.experts) + scales}


def test_a_wrong_kernel_is_left_out_and_the_others_are_timed(untimed):
    right, wrong = GroupedMmSpec(tile=LARGE), GroupedMmSpec(tile=SMALL)
    group = found("*", bundles={"one": FakeBundle([right, wrong], wrong=[wrong.name])})
    with pytest.warns(UserWarning, match=f"{SMALL.name} is left out: wrong, relative error 0.1"):
        (record,) = compare._measure(CASE, Contest("fc2", right, group), 1.0)
    assert list(record["times"]) == [LARGE.name, "dense"][: 2 - CASE.decode]


def test_a_kernel_that_raises_is_left_out(untimed):
    def fails(*arguments):
        raise RuntimeError("too much shared memory")

    group = [compare.Candidate("t", GroupedMmSpec(), fails)]
    with pytest.warns(UserWarning, match="is left out: .*too much shared memory"):
        assert compare._measure(CASE, Contest("fc2", GroupedMmSpec(), group), 1.0) == []


def test_names_and_patterns_choose_functions():
    spec = GroupedMmSpec(tile=SMALL)
    (exact,) = found(spec.name)
    assert (exact.name, exact.spec) == (SMALL.name, spec)
    assert len(found("grouped_mm_bf16_nt_*", "grouped_mm_bf16_n?_t*")) == 6
    with pytest.raises(ValueError, match="--specs 'grouped_conv' adds no function"):
        found("grouped_conv")


def test_the_same_name_from_two_bundles_is_two_candidates():
    name = GroupedMmSpec().name
    bundles = {"before": FakeBundle([GroupedMmSpec()]), "after": FakeBundle([GroupedMmSpec()])}
    assert [c.name.split(" in ")[1] for c in found(name, bundles=bundles)] == ["before", "after"]


def test_only_kernels_of_one_form_compete():
    forms = {of.spec for of in compare.contests(found("grouped_wgrad_*"), ("dw1",))}
    assert {(spec.dtype, spec.out_dtype) for spec in forms} == {
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "float16"),
        ("float16", "float32"),
    }
    assert compare.form_name(GroupedWgradSpec(tile=WGRAD)) == "grouped_wgrad_bf16_bf16_sm_90a"
    with pytest.raises(ValueError, match="none of the chosen functions computes any of: fc1"):
        compare.contests(found("grouped_wgrad_*"), ("fc1",))
    with pytest.raises(ValueError, match="--op 'fc9' is not known here; choose among: fc1"):
        compare.contests(found("grouped_wgrad_*"), ("fc9",))


def test_cases_of_a_comparison():
    assert len(sweep(models(None, PREFILL), (), ("uniform", "zipf"))) == 2 * len(PREFILL)
    (case,) = sweep(models("DeepSeek-V3 EP8", PREFILL), (), ("zipf",))
    assert case == dataclasses.replace(DEEPSEEK, routing="zipf")
    assert [case.rows for case in sweep(models("deepseek-v3 ep8", PREFILL), (1, 64))] == [32, 2048]


def test_nothing_is_compared_without_names():
    with pytest.raises(ValueError, match="compare needs --specs"):
        compare.run_compare(Options())


def test_a_missing_bundle_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="no bundle: .*manifest.json does not exist"):
        compare.open_bundles((str(tmp_path),))


def test_tensors_start_as_nan_so_that_unwritten_results_show():
    (_, spec, _), *_ = compare.contests(found("grouped_dglu_bf16_swiglu_concat*"), ())
    made, other = compare.make_sets(CASE, "dglu", spec, 2, "cpu")
    assert all(bool(result.isnan().all()) for result in made.results)
    assert not torch.equal(made.call.dy, other.call.dy)
