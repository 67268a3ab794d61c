"""The training example: its layer equals a plain MoE layer, its check can fail, and it runs without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import sys
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from support.ranks import run_ranks
from torch.func import functional_call
from typer.testing import CliRunner

import glulam
from examples import moe_model, stdlib_text, train_moe, training_curves
from examples.moe_model import Size
from perf import results

TINY = Size(layers=1, width=16, heads=2, experts=5, top_k=2, intermediate=8, context=16)
RUNS = [train_moe.GLULAM, *train_moe.TORCH]
STEPS = 24
RESULTS = Path(__file__).parents[1] / "perf" / "results"
GRADIENTS = ("parameter", "steps", "distance", "rounding", "times")


def invoke(command, *arguments):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# The text


def test_the_library_is_enough_text_and_the_same_again():
    text = stdlib_text.read_text()
    assert len(text.train) > 10 * len(text.held_out) > 10 * 50_000
    assert b"def " in bytes(text.held_out[:100_000].tolist())
    assert all(map(torch.equal, text, stdlib_text.read_text()))


FILES = 200


def make_library(root):
    (root / "site-packages").mkdir()
    (root / "site-packages" / "foreign.py").write_text("foreign")
    for number in range(FILES):
        (root / f"m{number}.py").write_text(f"<{number}>")


def test_held_out_files_are_other_files_and_keep_their_side(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib_text, "FEWEST_BYTES", 10)
    make_library(tmp_path)
    train, held_out = (bytes(part.tolist()).decode() for part in stdlib_text.read_text(tmp_path))
    assert "foreign" not in train + held_out
    assert len(train) + len(held_out) == sum(len(f"<{number}>") for number in range(FILES))
    (tmp_path / "added.py").write_text("<added>")
    later = bytes(stdlib_text.read_text(tmp_path).held_out.tolist()).decode()
    assert held_out and later.replace("<added>", "") == held_out


def test_a_python_without_sources_is_told_so(tmp_path):
    make_library(tmp_path)
    with pytest.raises(RuntimeError, match="holds [1-9][0-9]* bytes .* sources of its library"):
        stdlib_text.read_text(tmp_path)


# The model


def made():
    torch.manual_seed(0)
    return moe_model.mixture(TINY, "bf16", torch.float32), torch.randn(32, TINY.width, requires_grad=True)


def token_by_token(layer, x):
    """Return the layer's result token by token in float64, and its auxiliary loss."""
    router, w1, w2 = (weight.double() for weight in layer.parameters())
    probabilities = (x.double() @ router.T).softmax(dim=-1)
    loads, results = torch.zeros(len(router), dtype=torch.float64), []
    for token, chances in zip(x.double(), probabilities, strict=True):
        weights, chosen = chances.topk(2)
        loads[chosen] += 1
        parts = [(w1[expert] @ token).chunk(2) for expert in chosen]
        acts = [torch.nn.functional.silu(gate) * up for gate, up in parts]
        rows = torch.stack([w2[expert] @ act for expert, act in zip(chosen, acts, strict=True)])
        results.append((weights / weights.sum()) @ rows)
    return torch.stack(results), len(router) * (loads / loads.sum() * probabilities.mean(dim=0)).sum()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_run_computes_the_layer_token_by_token_and_its_gradients(run):
    layer, x = made()
    (y, balance), (wanted, wanted_balance) = run.layer(layer, x), token_by_token(layer, x)
    assert wanted.abs().max() > 0.05 and wanted_balance.item() > 1
    torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-6)
    assert balance.item() == pytest.approx(wanted_balance.item(), rel=1e-5)
    leaves = [x, *layer.parameters()]
    gradients = torch.autograd.grad((y * y.detach()).sum() + balance, leaves)
    expected = torch.autograd.grad((wanted * wanted.detach()).sum() + wanted_balance, leaves)
    for gradient, right in zip(gradients, expected, strict=True):
        assert right.abs().max() > 1e-3
        torch.testing.assert_close(gradient, right, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_balance_is_one_where_shares_are_equal_and_more_where_one_expert_takes_all(run):
    layer = glulam.nn.MoE(4, 8, 4, 1)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4) * 9)
    even, taken = torch.eye(4).repeat(8, 1), torch.eye(4)[:1].repeat(32, 1)
    assert run.layer(layer, even)[1].item() == pytest.approx(1.0)
    assert run.layer(layer, taken)[1].item() > 3.9


def test_experts_compute_in_16_bits_and_parameters_stay_float32():
    torch.manual_seed(0)
    layer = moe_model.mixture(TINY, "bf16", torch.bfloat16)
    for run in RUNS:
        y, balance = run.layer(layer, torch.randn(32, TINY.width, dtype=torch.bfloat16))
        (y.float().sum() + balance).backward()
        assert y.dtype == torch.bfloat16 and balance.dtype == torch.float32
    assert {(p.dtype, p.grad.dtype) for p in layer.parameters()} == {(torch.float32, torch.float32)}


def test_no_byte_is_predicted_from_itself_or_from_later_ones():
    torch.manual_seed(0)
    make = functools.partial(moe_model.mixture, TINY, "bf16", torch.float32)
    model = moe_model.LanguageModel(TINY, moe_model.glulam_layer, torch.float32, make)
    tokens = torch.randint(256, (1, 9))
    model.bytes.requires_grad_()
    x = tokens.clone()
    model(x)[0].backward()
    read = model.bytes.grad.abs().sum(dim=1) > 0
    assert set(read.nonzero().flatten().tolist()) == set(tokens[0, :-1].tolist())


# Training


def small(steps=STEPS):
    return dataclasses.replace(train_moe.SETUPS["cpu"], steps=steps)


def train(*runs, steps=STEPS):
    return train_moe.train_all(small(steps), list(runs), 0, "cpu", Console(file=io.StringIO()))


def test_the_learning_rate_rises_and_falls():
    rates = [train_moe.learning_rate(small(), step) for step in range(STEPS)]
    assert 0 < rates[0] < rates[1] == max(rates) == small().learning_rate
    assert sorted(rates[1:], reverse=True) == rates[1:] and rates[-1] < 0.15 * max(rates)
    assert train_moe.learning_rate(small(), 0) > 0


def test_the_same_run_is_the_same_to_the_bit():
    first, again, _ = train(train_moe.GLULAM, train_moe.GLULAM)
    assert first["loss"] == again["loss"] and first["held_out"] == again["held_out"]


def test_it_runs_and_learns_and_its_gradients_are_torchs(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "curves.csv"
    told = invoke(train_moe.main, "--steps", STEPS, "--device", "cpu", "--out", out, "--commit", "abc")
    assert told.exit_code == 0, told.output
    assert "shrunk model" in told.stdout and "torch, scaled last" in told.stdout
    assert "gradients ok" in told.stdout and "held out  ok" in told.stdout
    result = results.read(out)
    *runs, shared = result["records"]
    assert [run["run"] for run in runs] == [run.name for run in (*train_moe.TORCH, train_moe.GLULAM)]
    for run in runs:
        assert len(run["loss"]) == STEPS and run["loss"][0] > 5.5 and run["loss"][-1] < 4
        assert run["held_out"] < 4 and run["step_ms"] > 0
    assert runs[-1]["gradients"]["distance"] < 1e-5 and shared["gradients"]["run"] == "glulam"
    assert shared["gradients"]["steps"] == STEPS and "gradients" not in runs[0]
    assert result["stamp"]["commit"] == "abc" and result["stamp"]["gpu"] == "CPU"
    assert result["stamp"]["command"] == f"python examples/train_moe.py --steps {STEPS} --device cpu"
    assert out.with_suffix(".svg").read_text().count("<path") > 10


def test_checks_of_gradients_leave_the_run_as_it_is(monkeypatch):
    checked, _ = train(train_moe.GLULAM, steps=5)
    monkeypatch.setattr(train_moe, "check_of", lambda *_: None)
    alone, _ = train(train_moe.GLULAM, steps=5)
    assert "gradients" in checked and "gradients" not in alone
    assert checked["loss"] == alone["loss"] and checked["held_out"] == alone["held_out"]


def test_long_runs_are_checked_at_some_steps():
    every = [train_moe.check_of(train_moe.GLULAM, small(steps), 0, "cpu").every for steps in (1, 79, 200, 300)]
    assert every == [1, 1, 5, 7]


# Faults


def agrees(run):
    return run["gradients"]["times"] <= training_curves.GRADIENTS_ALLOWED


def more(x):
    """Return x unchanged, but with a gradient that is 1 % too large."""
    return 1.01 * x - 0.01 * x.detach()


def gradients_of_experts_too_large(layer, x):
    weights = {f"experts.{name}": more(weight) for name, weight in layer.experts.named_parameters()}
    return functional_call(layer, weights, x), glulam.load_balancing_loss(layer.routing)


def gradients_of_tokens_too_large(layer, x):
    return moe_model.glulam_layer(layer, more(x))


def rows_scaled_too_much(layer, x):
    y, balance = moe_model.glulam_layer(layer, x)
    return 1.01 * y, balance


def no_gradient_of_row_scales(layer, x):
    y = functional_call(layer, {"router.weight": layer.router.weight.detach()}, x)
    return y, moe_model.glulam_layer(layer, x)[1]


def not_a_number(layer, x):
    y, balance = moe_model.glulam_layer(layer, x)
    return y * math.nan, balance


FAULTS = [
    gradients_of_experts_too_large, gradients_of_tokens_too_large, rows_scaled_too_much, no_gradient_of_row_scales,
    not_a_number,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_percent_is_found(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(train_moe, "GLULAM", train_moe.Run("glulam", fault))
    told = invoke(train_moe.main, "--steps", 3, "--device", "cpu", "--out", tmp_path / "curves.csv")
    assert told.exit_code == 1 and "gradients FAILED" in told.stdout


@pytest.mark.parametrize(("odd", "good"), [((), True), ((1,), True), ((0, 1, 2), False)])
def test_a_token_that_changes_experts_at_a_step_is_no_fault(odd, good):
    """Stands for it: a result that is off by 0.1 % at odd steps, of 5. At most steps nothing changes."""
    calls = iter(range(1000))

    def layer(mixture, x):
        step = next(calls) // small().size.layers
        y, balance = moe_model.glulam_layer(mixture, x)
        return (1.001 if step in odd else 1.0) * y, balance

    run, _ = train(train_moe.Run("glulam", layer), steps=5)
    assert agrees(run) is good


def spread_over_ranks():
    faulty = train_moe.PARALLEL._replace(layer=lambda layer, x: moe_model.parallel_layer(layer, more(x)))
    right, wrong, _ = train(train_moe.PARALLEL, faulty, steps=5)
    assert agrees(right) and not agrees(wrong)
    assert right["gradients"]["steps"] == 5 and right["loss"][-1] < right["loss"][0] - 1


def test_experts_across_ranks_learn_the_same():
    run_ranks(2, spread_over_ranks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "torch finds no GPU"),
        (["--device", "tpu"], "--device tpu: give one of cuda, cpu"),
        (["--recipe", "mxfp8_exact"], "--recipe mxfp8_exact: give one of mxfp8"),
        (["--device", "cpu", "--expert-parallel", "2"], "torchrun started no ranks; run `torchrun --nproc-per-node 2 "),
        (["--device", "cpu", "--graph"], "--graph: the device is a CPU (as asked for)"),
    ],
)
def test_what_cannot_run_is_one_line(monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = invoke(train_moe.main, *arguments)
    assert told.exit_code == 1 and told.stderr.count("\n") == 1
    assert told.stderr.startswith("train_moe: ") and message in told.stderr


def test_a_recipe_learns_as_well(tmp_path):
    out = tmp_path / "curves.csv"
    told = invoke(train_moe.main, "--steps", STEPS, "--device", "cpu", "--recipe", "mxfp8", "--out", out)
    assert told.exit_code == 0, told.output
    assert "gradients ok" in told.stdout and "held out  ok" in told.stdout and "glulam mxfp8" in told.stdout
    result = results.read(out)
    ours = result["records"][-2]
    assert ours["recipe"] == "mxfp8" and "--recipe mxfp8" in result["stamp"]["command"]
    assert 1e-4 < ours["distance"]["mean"] < 0.1, "not another rounding"


# Curves


def shown(**ours):
    """Show a run whose curve is far from its two peers'; return the verdict and the text."""
    told = io.StringIO()
    result = made_result(**{"loss": [9.0, 9.0, 9.0], **ours})
    return training_curves.show(result, Console(file=told, width=200)), told.getvalue()


def verdict(name, good):
    return f"{name:<9} {'ok' if good else 'FAILED'}:"


@pytest.mark.parametrize("also", [{"recipe": "mxfp8"}, {"gradients": dict.fromkeys(GRADIENTS, 1.0)}])
@pytest.mark.parametrize(("held_out", "good"), [(1.02, True), (0.5, True), (1.05, False), (math.nan, False)])
def test_a_run_is_judged_by_its_held_out_loss(also, held_out, good):
    found, told = shown(held_out=held_out, **also)
    assert found is good and verdict("held out", good) in told and "curves" not in told


@pytest.mark.parametrize(("times", "good"), [(0.0, True), (3.9, True), (4.1, False), (math.nan, False)])
def test_a_run_is_judged_by_its_gradients_and_not_by_its_curve(times, good):
    found, told = shown(gradients={**dict.fromkeys(GRADIENTS, 1.0), "times": times})
    assert found is good and verdict("gradients", good) in told and verdict("held out", True) in told
    assert "curves" not in told


def test_a_run_with_neither_is_judged_by_its_curve():
    found, told = shown()
    assert found is False and verdict("curves", False) in told and "gradients" not in told
    assert shown(loss=[3.0, 2.05, 1.0])[0] is True


def test_results_on_record_are_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    files = sorted(RESULTS.glob("training-curves-*.csv"))
    assert files
    for file in files:
        assert invoke(training_curves.main, file, "--out", tmp_path / "curves.svg").exit_code == 0


def test_smoothing_averages_over_what_lies_behind():
    assert training_curves.smoothed([4.0, 2.0, 0.0, 6.0], window=2) == [4.0, 3.0, 1.0, 3.0]


def test_distances_are_those_of_smoothed_curves():
    zeros, spike = [0.0] * 40, [0.0] * 39 + [-2.0]
    assert training_curves.distance(spike, zeros) == pytest.approx((0.1 / 40, 0.1))


def test_noise_is_the_largest_of_any_two_runs():
    curves = [[0.0] * 9, [1.0] * 9, [-2.0] * 9]
    assert training_curves.noise(curves) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("mean", "largest", "within"),
    [(0.019, 0.039, True), (0.021, 0.03, False), (0.01, 0.041, False), (math.nan, math.nan, False)],
)
def test_the_rule_of_noise(mean, largest, within):
    noise = training_curves.Distance(0.01, 0.02)
    assert training_curves.within_noise(training_curves.Distance(mean, largest), noise) is within


def test_a_curve_that_ends_in_nan_is_not_within_noise():
    curve = training_curves.distance([1.0, 1.0, math.nan], [1.0, 1.0, 1.0])
    assert not training_curves.within_noise(curve, training_curves.Distance(1.0, 1.0))


def made_result(**ours):
    """Return a stored result of two peers and a run."""
    curves = {"torch": [3.0, 2.0, 1.0], "torch, other": [3.0, 2.1, 1.0], "glulam": [3.0, 2.0, 1.1]}
    records = [{"run": name, "loss": loss, "held_out": 1.0, "step_ms": 2.0} for name, loss in curves.items()]
    shared = {"setup": train_moe.SETUPS["cuda"].as_json(), "seed": 0}
    records[-1] |= ours
    return training_curves.make_result({"gpu": "NVIDIA H200", "commit": "abc"}, [*records, shared], peers=2)


def test_without_matplotlib_the_result_is_written_and_plotted_elsewhere(tmp_path, monkeypatch):
    path = tmp_path / "curves.csv"
    told = io.StringIO()
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "matplotlib.figure", None)
        training_curves.save(made_result(), path, Console(file=told, width=200))
        failed = invoke(training_curves.main, path)
    assert "no matplotlib, so no plot" in told.getvalue() and not path.with_suffix(".svg").exists()
    assert failed.exit_code == 1 and "pip install 'glulam[plots]'" in failed.stderr
    pytest.importorskip("matplotlib")
    assert invoke(training_curves.main, path).exit_code == 0
    first = path.with_suffix(".svg").read_bytes()
    assert invoke(training_curves.main, path).exit_code == 0
    assert path.with_suffix(".svg").read_bytes() == first and b"H200" in first
    assert invoke(training_curves.main, path, "--out", tmp_path / "curves.png").exit_code == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_another_result_is_not_plotted(tmp_path):
    path = tmp_path / "forward.json"
    results.write(results.make_result("forward", {"gpu": "NVIDIA H200"}, {}, []), path)
    told = invoke(training_curves.main, path)
    assert told.exit_code == 1 and "forward" in told.stderr + told.stdout
