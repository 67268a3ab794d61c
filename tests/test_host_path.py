"""The host path from a call to a kernel's arguments, on a fake GPU whose functions read their addresses and tables."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks import check_glu, check_mlp, check_mm
from support.criterion import same_bits
from support.fake_gpu import FakeGpu
from support.inputs import Case, make_case, poisoned

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.sm90.configs import LARGE, SMALL
from cute_kernels.specs import ACTIVATION_FORMS, GATED, LAYOUT_FORMS, GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec
from glulam.host import experts, plans, tickets
from glulam.ops.grouped_glu import GroupedGluCall

pytest_plugins = ["support.fixtures"]

SIZES = [5, 0, 17, 1, 0, 40, 8]
HIDDEN, INTER = 40, 64
BF16 = torch.bfloat16


def case(form: tuple[str, str] = ("swiglu", "concat"), dtype: torch.dtype = BF16) -> Case:
    return make_case(SIZES, HIDDEN, INTER, gated=form[0] in GATED, tail=6, dtype=dtype)


def group_forms(c: Case) -> dict[str, dict[str, Any]]:
    return {
        "offs": {"offs": c.offs},
        "splits int32": {"splits": c.splits()},
        "splits int64": {"splits": c.splits(torch.int64)},
    }


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("form", activation_forms(), ids="-".join)
def test_grouped_mlp(fake_gpu: FakeGpu, form: tuple[str, str], dtype: torch.dtype) -> None:
    c = case(form, dtype)
    options = {"b1": c.b1, "b2": c.b2, "row_scale": c.row_scale}
    y = glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, activation=form[0], glu_layout=form[1], **options)
    check_mlp(c, y, form, **options)
    (spec,) = fake_gpu.specs
    assert isinstance(spec, GroupedMlpSpec)
    assert form[0] in ACTIVATION_FORMS[spec.fc1.activation] and form[1] in LAYOUT_FORMS[spec.fc1.glu_layout]
    assert len(fake_gpu.launches) == 1


@pytest.mark.parametrize("listed", list(itertools.product([False, True], repeat=4)))
def test_every_mix_of_lists(fake_gpu: FakeGpu, listed: tuple[bool, ...]) -> None:
    c = case()
    w1, w2, b1, b2 = (list(t) if as_list else t for t, as_list in zip((c.w1, c.w2, c.b1, c.b2), listed, strict=True))
    for _ in range(2):  # first through tables made now, then through tables found
        y = glulam.grouped_mlp(c.x, w1, w2, offs=c.offs, b1=b1, b2=b2, row_scale=c.row_scale)
        check_mlp(c, y, b1=c.b1, b2=c.b2, row_scale=c.row_scale)
    assert len(fake_gpu.specs) == 1, "the second call planned anew"


def test_experts_anywhere_in_memory(fake_gpu: FakeGpu) -> None:
    """Separate allocations, their addresses in no order."""
    c = case()
    scattered = [torch.empty_like(w) for w in c.w1]
    scattered = [scattered[(3 * e + 2) % len(scattered)] for e in range(len(scattered))]
    for target, source in zip(scattered, c.w1, strict=True):
        target.copy_(source)
    assert [w.data_ptr() for w in scattered] != sorted(w.data_ptr() for w in scattered)
    check_mlp(c, glulam.grouped_mlp(c.x, scattered, list(c.w2.clone()), offs=c.offs))


@pytest.mark.parametrize("name", ["offs", "splits int32", "splits int64"])
def test_group_forms(fake_gpu: FakeGpu, name: str) -> None:
    c = case()
    groups = group_forms(c)[name]
    check_mlp(c, glulam.grouped_mlp(c.x, c.w1, c.w2, **groups))
    check_glu(c, *glulam.grouped_glu(c.x, c.w1, return_preact=True, **groups))


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("bias", [None, "packed", "list"])
def test_grouped_mm(fake_gpu: FakeGpu, transpose_w: bool, bias: str | None) -> None:
    c = case()
    w = c.w1.mT.contiguous() if transpose_w else c.w1
    b = {None: None, "packed": c.b1, "list": list(c.b1)}[bias]
    options = {"bias": b, "bias_scale": c.row_scale if bias else None, "transpose_w": transpose_w}
    check_mm(c, w, glulam.grouped_mm(c.x, w, offs=c.offs, **options), **options)
    (spec,) = fake_gpu.specs
    assert isinstance(spec, GroupedMmSpec) and spec.transpose_w is transpose_w


def test_params_reach_the_kernel(fake_gpu: FakeGpu) -> None:
    c = case()
    for params in ((1, 2, 0), (1.5, 1.25, 0.5)):
        named = dict(zip(("limit", "alpha", "offset"), params, strict=True))
        act = glulam.grouped_glu(c.x, c.w1, offs=c.offs, activation="clamped_swiglu", **named)
        check_glu(c, act, None, ("clamped_swiglu", "concat"), params=named)


@pytest.mark.parametrize("padding", [0, 8])
def test_given_outputs(fake_gpu: FakeGpu, padding: int) -> None:
    c = case()
    out = poisoned(c.x.shape[0], HIDDEN, c.x, padding)
    assert glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, out=out) is out
    check_mlp(c, out)
    assert bool(out[c.rows :].isnan().all())


def test_padded_input(fake_gpu: FakeGpu) -> None:
    c = case()
    wide = torch.full((c.x.shape[0], HIDDEN + 24), torch.nan, dtype=BF16)
    wide[:, :HIDDEN] = c.x
    check_mlp(c, glulam.grouped_mlp(wide[:, :HIDDEN], c.w1, c.w2, offs=c.offs))


def test_a_single_row_with_an_odd_stride(fake_gpu: FakeGpu) -> None:
    """torch calls a single row contiguous at any stride; kernels must get one that they can divide."""
    c = make_case([0, 1, 0], HIDDEN, INTER)
    x, out = (t.as_strided((1, HIDDEN), (1, 1)) for t in (c.x, poisoned(1, HIDDEN, c.x)))
    assert x.is_contiguous()
    glulam.grouped_mlp(x, c.w1, c.w2, offs=c.offs, out=out)
    check_mlp(c, out)


def test_no_rows_launch_nothing(fake_gpu: FakeGpu) -> None:
    c = make_case([0, 0, 0], HIDDEN, INTER)
    assert glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs).shape == (0, HIDDEN)
    assert glulam.grouped_mm(c.x, c.w1, offs=c.offs).shape == (0, 2 * INTER)
    act, preact = glulam.grouped_glu(c.x, c.w1, offs=c.offs, return_preact=True)
    assert act.shape == (0, INTER) and preact.shape == (0, 2 * INTER)
    assert not fake_gpu.launches


def test_a_second_call_plans_nothing(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    c = case()
    lists = list(c.w1), list(c.w2)
    calls: list[Callable[[], Any]] = [
        lambda: glulam.grouped_mm(c.x, c.w1, offs=c.offs),
        lambda: glulam.grouped_glu(c.x, c.w1, splits=c.splits(), return_preact=True),
        lambda: glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, b1=c.b1, row_scale=c.row_scale),
        lambda: glulam.grouped_mlp(c.x, *lists, offs=c.offs, b2=list(c.b2)),
    ]
    lists_of_biases = list(c.b2)
    calls[-1] = lambda: glulam.grouped_mlp(c.x, *lists, offs=c.offs, b2=lists_of_biases)
    for call in calls:
        call()
    monkeypatch.setattr(glulam.calls.call.Call, "run_without_gradient", lambda *_: pytest.fail("left the fast path"))
    for call in calls:
        call()


def test_plans_differ_where_calls_differ(fake_gpu: FakeGpu) -> None:
    c = case()
    glulam.grouped_glu(c.x, c.w1, offs=c.offs)
    for change in (
        {"activation": "geglu"},
        {"glu_layout": "interleaved"},
        {"return_preact": True},
        {"row_scale": c.row_scale},
        {"bias": c.b1},
    ):
        before = len(GroupedGluCall.plans)
        glulam.grouped_glu(c.x, c.w1, offs=c.offs, **change)
        assert len(GroupedGluCall.plans) == before + 1, change


def test_average_rows_choose_the_tile(fake_gpu: FakeGpu) -> None:
    w = torch.zeros(2, 20480, 512, dtype=BF16)
    for rows, tile in ((2, SMALL), (1024, LARGE)):
        x = torch.zeros(rows, 512, dtype=BF16)
        glulam.grouped_glu(x, w, splits=torch.tensor([1, 1]))
        spec = fake_gpu.specs[-1]
        assert isinstance(spec, GroupedGluSpec) and spec.tile == tile


def test_kernels_that_draw_tickets_are_given_counters(fake_gpu: FakeGpu) -> None:
    """What decodes draws none; what is captured has counters of its own."""
    w = torch.zeros(2, 20480, 512, dtype=BF16)
    kept = tickets.counters(w.device, w.get_device())
    given = []
    for rows, capturing in ((2, False), (1024, False), (1024, True)):
        fake_gpu.capturing, fake_gpu.stream = capturing, 5 if capturing else 0
        glulam.grouped_mm(torch.zeros(rows, 512, dtype=BF16), w, splits=torch.tensor([1, 1]))
        given.append(fake_gpu.launches[-1]["tickets"])
    assert given[:2] == [0, kept] and given[2] not in (0, kept)


def test_plans_are_bounded(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_PLANS", 8)
    kept: plans.Plans[int] = plans.Plans()
    for number in range(100):
        kept.keep(number, number)
        assert len(kept) <= 8
        assert kept.find(number) == number


def test_values_out_of_range_stay_in_the_buffers(fake_gpu: FakeGpu) -> None:
    """What the host cannot see is the kernel's to clamp; here: nothing reads it on the host."""
    c = case()
    wild = torch.tensor([-5, 3, 2, 10**9, -(10**9), 9, 10**9], dtype=torch.int32)
    out = poisoned(c.x.shape[0], HIDDEN, c.x)
    glulam.grouped_mlp(c.x.nan_to_num(), c.w1, c.w2, offs=wild, out=out)
    assert len(fake_gpu.launches) == 1


class TestTables:
    def test_kept_by_address_and_bounded(self, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(experts, "MAX_TABLES", 4)
        keep = [list(torch.zeros(3, 8, 8, dtype=BF16)) for _ in range(10)]
        for tensors in keep:
            address = experts.enter("weight", tensors).address
            assert experts.with_kept_table("weight", tensors).address == address
        assert len(experts._tables) == 4

    def test_one_table_for_new_views_of_the_same_memory(self, fake_gpu: FakeGpu) -> None:
        w = torch.zeros(3, 8, 8, dtype=BF16)
        first = experts.enter("weight", list(w)).address
        views = list(w)
        assert experts.with_kept_table("weight", views) is views  # those that were checked are gone
        assert experts.enter("weight", list(w)).address == first

    def test_memory_reused_with_another_shape_is_checked_anew(self, fake_gpu: FakeGpu) -> None:
        c = case()
        storage = [torch.zeros(2 * INTER * HIDDEN, dtype=BF16) for _ in SIZES]
        right = [s.view(2 * INTER, HIDDEN) for s in storage]
        glulam.grouped_mlp(c.x, right, c.w2, offs=c.offs)
        wrong = [right[0], *(s.view(HIDDEN, 2 * INTER) for s in storage[1:])]
        del right
        gc.collect()
        with pytest.raises(ValueError, match=r"w1\[1\] has shape \[40, 128\]"):
            glulam.grouped_mlp(c.x, wrong, c.w2, offs=c.offs)

    def test_a_transposed_view_is_no_known_list(self, fake_gpu: FakeGpu) -> None:
        c = make_case([3, 4], 32, 16)
        square = [torch.randn(32, 32).to(BF16) for _ in c.sizes]
        glulam.grouped_mm(c.x, square, offs=c.offs)
        with pytest.raises(ValueError, match=r"w\[0\] is a transposed view .*transpose_w=True"):
            glulam.grouped_mm(c.x, [s.T for s in square], offs=c.offs)

    @pytest.mark.parametrize("swapped", [False, True])
    def test_experts_are_not_kept_alive(self, fake_gpu: FakeGpu, swapped: bool) -> None:
        """Neither by tables nor by plans, whether the tensors die or are given other memory."""
        c = case()
        arrays = [w.view(torch.int16).numpy().copy() for w in c.w1]
        alive = [weakref.ref(array) for array in arrays]
        tensors = [torch.from_numpy(array).view(BF16) for array in arrays]
        glulam.grouped_mlp(c.x, tensors, c.w2, offs=c.offs)
        fake_gpu.launches.clear()
        del arrays
        assert all(memory() is not None for memory in alive)
        if swapped:
            for tensor in tensors:
                tensor.data = torch.zeros_like(tensor)
        else:
            del tensors
        gc.collect()
        assert not any(memory() is not None for memory in alive)

    def test_kept_for_good_once_captured(self, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        tensors = list(torch.zeros(3, 8, 8, dtype=BF16))
        address = experts.enter("weight", tensors).address
        assert address not in experts._kept_for_graphs
        fake_gpu.capturing = True
        assert experts.with_kept_table("weight", tensors).address == address
        assert address in experts._kept_for_graphs

    def test_first_seen_under_capture(self, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its table holds garbage until the graph runs, so that no eager call may find it."""
        make = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False, **k: make(*a, **k))
        tensors = list(torch.zeros(3, 8, 8, dtype=BF16))
        fake_gpu.capturing = True
        entry = experts.enter("weight", tensors)
        assert entry.address in experts._kept_for_graphs and not experts._tables
        fake_gpu.capturing = False
        assert experts.enter("weight", tensors).address != entry.address

    def test_no_pinned_memory_under_capture(self, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(torch, "tensor", refuse)
        fake_gpu.capturing = True
        with pytest.raises(glulam.CaptureError, match="once with this list before capturing"):
            experts.enter("weight", list(torch.zeros(3, 8, 8, dtype=BF16)))


def test_a_failing_launch_is_reported_as_it_is(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing wrong in the arguments, the kernel's own error gets through, first call or later."""
    c = case()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of lunch")

    monkeypatch.setattr(glulam.choose.kernels, "find", lambda spec: glulam.choose.kernels.Kernel(fail, "shipped"))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of lunch"):
            glulam.grouped_mm(c.x, c.w1, offs=c.offs)


def test_determinism(fake_gpu: FakeGpu) -> None:
    c = case()
    first, second = (glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs) for _ in range(2))
    assert same_bits(first[: c.rows], second[: c.rows])
