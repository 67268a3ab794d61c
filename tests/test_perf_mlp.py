"""The MLP's benchmarks: tensors of a case, contestants checked before they are timed, forward and training."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import oracle

from perf import contest, mlp, quack
from perf.cases import DECODE, LAYER, OPS, PREFILL, SONIC, TINY, TOKEN
from perf.contest import Contestant, admitted
from perf.routing import group_sizes
from perf.suites import mlp as suite

# Data and contestants


def buffers(**changes):
    return mlp.make_buffers(dataclasses.replace(TINY, **{"routing": "zipf", **changes}), device="cpu")


def training_data(**changes):
    return mlp.make_training(dataclasses.replace(TINY, routing="dirichlet", **changes), device="cpu")


@pytest.mark.parametrize("case", [*PREFILL, *DECODE, TINY], ids=lambda case: case.name)
def test_copies_keep_repeated_calls_out_of_the_cache(case):
    moved = case.bytes("fc2", case.experts)
    assert mlp.copies_needed(moved) == mlp.MAX_COPIES or mlp.copies_needed(moved) * moved >= mlp.ROTATION_BYTES


def test_tokens_of_a_case_share_a_layer_and_have_experts_of_their_own():
    sets = buffers(rows=2, routing="token:2")
    assert len(sets) == mlp.TOKENS and len({b.w1.data_ptr() for b in sets}) == 1
    chosen = [tuple(b.sizes) for b in sets]
    assert len(set(chosen)) > mlp.TOKENS // 2 and all(sorted(sizes) == [0] * 6 + [1, 1] for sizes in chosen)
    for case in TOKEN:
        assert sorted(group_sizes(case)) == [0] * (case.experts - case.rows) + [1] * case.rows


def test_buffers_have_the_shapes_that_the_operators_take():
    first, second, *_ = buffers()
    assert first.w1.shape == (8, 512, 512) and first.w2.shape == (8, 512, 256) and first.x.dtype == torch.bfloat16
    assert first.offs.dtype == torch.int32 and first.starts.tolist() == [0, *first.offs.tolist()]
    assert first.sizes == group_sizes(dataclasses.replace(TINY, routing="zipf"))
    assert torch.equal(first.x, buffers()[0].x) and not torch.equal(first.x, second.x)


def test_torch_path_agrees_with_the_oracle():
    b = buffers()[0]
    ends = b.offs.tolist()
    (act, _), y = oracle.grouped_glu(b.x, b.w1, ends), oracle.grouped_mlp(b.x, b.w1, b.w2, ends)
    wanted = {"fc1": act, "fc2": oracle.grouped_mm(b.mid, b.w2, ends), "mlp": y}
    for op in OPS:
        assert contest.relative_error(mlp.expected(b, op), wanted[op]) < mlp.FORWARD_ERROR


@pytest.mark.parametrize("wrong", [lambda y: y * 1.1, lambda y: y.roll(1, 0), lambda y: y * float("nan")])
@pytest.mark.parametrize("name", [mlp.TORCH, mlp.OURS])
def test_a_wrong_contestant_is_not_timed(monkeypatch, wrong, name):
    right = mlp.OPERATIONS["mlp"][name]
    monkeypatch.setitem(mlp.OPERATIONS["mlp"], name, lambda b: wrong(right(b)))
    if name == mlp.OURS:
        with pytest.raises(RuntimeError, match="tiny: glulam: wrong, relative error .* nothing was timed"):
            admitted("tiny", mlp.contestants("mlp", buffers()))
    else:
        with pytest.warns(UserWarning, match="tiny: torch is left out: wrong, relative error"):
            assert list(admitted("tiny", mlp.contestants("mlp", buffers())).calls) == ["glulam", "dense"]


def test_a_failing_peer_is_left_out_but_we_are_not():
    def fails():
        raise OSError("no such\nkernel")

    right = Contestant("right", lambda: lambda number: number)
    with pytest.warns(UserWarning, match="here: peer is left out: OSError: no such kernel"):
        found = admitted("here", [Contestant("peer", fails), right])
    assert list(found.calls) == ["right"] and found.left_out == {"peer": "OSError: no such kernel"}
    assert found.errors == {}
    with pytest.raises(OSError, match="no such"):
        admitted("here", [Contestant("ours", fails, required=True)])
    with pytest.warns(UserWarning, match="left out"):
        admitted("here", [Contestant("ours", fails, required=True, unless=(OSError,))])


def test_layouts_of_w1_are_told_apart():
    b = buffers()[0]
    layouts = (mlp.CONCAT, mlp.INTERLEAVED, mlp.LINEAR_FIRST)
    results = [mlp.expected(b, "fc1", layout) for layout in layouts]
    assert all((contest.relative_error(a, b) > 0.5) == (a is not b) for a in results for b in results)


def test_calls_rotate_through_the_buffers():
    call = contest.rotating(lambda text: text * 2, ["a", "b"])
    assert [call(number) for number in range(3)] == ["aa", "bb", "aa"]


def test_quack_is_left_out_where_it_is_absent_unwanted_or_broken(monkeypatch):
    def broken(mode):
        raise ImportError("needs another DSL")

    monkeypatch.setattr(quack, "quack_version", lambda: None)
    assert quack.find_quack("off") is quack.find_quack("tuned") is None
    monkeypatch.setattr(quack, "quack_version", lambda: "0.6.5")
    monkeypatch.setattr(quack, "Quack", broken)
    monkeypatch.setattr(quack, "make_buffers", lambda case: mlp.make_buffers(case, device="cpu"))
    with pytest.warns(UserWarning, match="QuACK is left out: ImportError: needs another DSL"):
        assert quack.find_quack("default") is None


# Training


def test_training_counts_three_forwards():
    assert SONIC.flop(LAYER) == 3 * 6 * SONIC.rows * SONIC.hidden * SONIC.intermediate
    assert 3 * (SONIC.flop("dw1") + SONIC.flop("dw2")) == SONIC.flop(LAYER)


def test_what_a_forward_saves_is_x_the_preactivation_and_the_scale():
    d = training_data()
    needed = suite.needed_bytes(dataclasses.replace(TINY, routing="dirichlet"))
    assert suite.saved_bytes(mlp.our_layer, d) == needed < suite.saved_bytes(mlp.torch_layer, d)


def test_gradients_of_a_layer_do_not_add_up_over_calls():
    d = training_data()
    first = [tensor.clone() for tensor in mlp.our_layer(d)]
    assert all(map(torch.equal, first, mlp.our_layer(d)))


@pytest.mark.parametrize("part", range(5))
def test_one_wrong_gradient_is_not_timed(monkeypatch, part):
    def wrong(d):
        return tuple(t * 1.1 if i == part else t for i, t in enumerate(mlp.torch_layer(d)))

    monkeypatch.setitem(mlp.OPERATIONS, LAYER, {mlp.OURS: wrong, mlp.TORCH: mlp.torch_layer})
    with pytest.raises(RuntimeError, match="wrong, relative error .* nothing was timed"):
        admitted("layer", mlp.contestants(LAYER, [training_data()]))


@pytest.mark.parametrize(("op", "parts"), [(LAYER, (2, 3)), ("dw1", (0,)), ("dw2", (0,))])
def test_only_torch_may_leave_the_gradients_of_empty_experts_unwritten(monkeypatch, op, parts):
    d = training_data(rows=6)
    torchs = mlp.OPERATIONS[op][mlp.TORCH]

    def unwritten(d):
        results = tuple(tensor.detach().clone() for tensor in contest.listed(torchs(d)))
        for part in parts:
            results[part][d.sizes.index(0)] = float("nan")
        return results

    monkeypatch.setitem(mlp.OPERATIONS, op, {mlp.TORCH: unwritten})
    monkeypatch.setattr(mlp, "expected", lambda d, op, layout: mlp._with_zeros(d, op, contest.listed(torchs(d))))
    assert list(admitted("here", mlp.contestants(op, [d])).errors) == [mlp.TORCH]
    monkeypatch.setitem(mlp.OPERATIONS, op, {mlp.OURS: unwritten})
    with pytest.raises(RuntimeError, match="relative error nan"):
        admitted("here", mlp.contestants(op, [d]))


def test_errors_are_the_largest_of_all_tensors_and_added_up_in_parts(monkeypatch):
    wanted = torch.randn(7, 6)
    got = wanted.clone()
    got[5] *= 1.5
    whole = contest.relative_error((wanted, got), (wanted, wanted))
    monkeypatch.setattr(contest, "PART_ELEMENTS", 13)
    assert contest.relative_error(got, wanted) == pytest.approx(whole) and whole > 0.01
    got[6, 0] = torch.nan
    error = contest.relative_error((wanted * 9, got, wanted), (wanted, wanted, wanted))
    assert error != error
