"""Group sizes: names in their errors, and the warning about rows after the last group."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.fake_gpu import FakeGpu
from torch import Tensor

import glulam
from glulam.choose import kernels
from glulam.host import groups
from glulam.nn import GroupedLinear, GroupedMLP

pytest_plugins = ["support.fixtures"]

T, K, N, E = 16, 32, 64, 4
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def not_yet_warned() -> None:
    groups.forget_warnings()


def offs_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows(width: int = K, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(T, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def weight(n: int = N, k: int = K, **options: Any) -> Tensor:
    return torch.randn(E, n, k, generator=torch.Generator().manual_seed(1)).to(BF16).requires_grad_(**options)


CALLS: dict[str, Callable[..., Any]] = {
    "grouped_mm": lambda **by: glulam.grouped_mm(rows(), weight(requires_grad=False), **by),
    "grouped_glu": lambda **by: glulam.grouped_glu(rows(), weight(requires_grad=False), **by),
    "grouped_mlp": lambda **by: glulam.grouped_mlp(
        rows(), weight(requires_grad=False), weight(K, N // 2, requires_grad=False), **by
    ),
    "grouped_dglu": lambda **by: glulam.grouped_dglu(rows(), weight(K, N, requires_grad=False), rows(2 * N), **by),
    "grouped_wgrad": lambda **by: glulam.grouped_wgrad(rows(), rows(), **by),
    "grouped_bias_grad": lambda **by: glulam.grouped_bias_grad(rows(), **by),
}
TRAINED: dict[str, tuple[str, Callable[[], Any]]] = {
    "a GroupedMLP": ("grouped_mlp", lambda: GroupedMLP(E, K, N, bias=True, dtype=BF16)),
    "a listed GroupedMLP": ("grouped_mlp", lambda: GroupedMLP(E, K, N, packed=False, recompute=True, dtype=BF16)),
    "an MXFP8 GroupedMLP": ("grouped_mlp", lambda: GroupedMLP(E, K, N, recipe="mxfp8", dtype=BF16)),
    "a GroupedLinear": ("grouped_mm", lambda: GroupedLinear(E, K, N, bias=True, dtype=BF16)),
}
FUNCTIONS = {
    "grouped_mlp, trained": ("grouped_mlp", lambda x, **by: glulam.grouped_mlp(x, weight(), weight(K, N // 2), **by)),
    "grouped_mm, trained": ("grouped_mm", lambda x, **by: glulam.grouped_mm(x, weight(), **by)),
}
FALLING, BEYOND = offs_of(3, 1, 5, T), offs_of(3, 4, 5, T + 1)


def tails(seen: Any) -> list[str]:
    return [str(warning.message) for warning in seen if "the groups end at row" in str(warning.message)]


@pytest.fixture
def all_tails() -> Iterator[Callable[[], list[str]]]:
    """Return a function that lists the warnings raised so far in the test about rows after the last group."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield lambda: tails(seen)


class TestNames:
    """Errors name the called operator and its arguments."""

    @pytest.mark.parametrize("op", CALLS)
    def test_operators(self, op: str) -> None:
        lead = "x" if op in ("grouped_mm", "grouped_glu", "grouped_mlp", "grouped_wgrad") else "dy"
        with pytest.raises(ValueError, match=rf"^{op}: offs\[1\] is 1, after 3.*offs=torch.cumsum\(splits, 0"):
            CALLS[op](offs=FALLING)
        with pytest.raises(ValueError, match=f"^{op}: offs end at 17, but {lead} has 16 rows"):
            CALLS[op](offs=BEYOND)

    @pytest.mark.parametrize("kind", [*TRAINED, *FUNCTIONS])
    def test_forward_with_a_gradient(self, kind: str) -> None:
        op, call = (TRAINED[kind][0], TRAINED[kind][1]()) if kind in TRAINED else FUNCTIONS[kind]
        with pytest.raises(ValueError, match=rf"^{op}: offs\[1\] is 1, after 3"):
            call(rows(), offs=FALLING)
        with pytest.raises(ValueError, match=f"^{op}: offs end at 17, but x has 16 rows"):
            call(rows(), offs=BEYOND)
        with pytest.raises(ValueError, match=f"^{op}: splits sum to 17, but x has 16 rows"):
            call(rows(), splits=[T, 1, 0, 0])

    @pytest.mark.parametrize("kind", [*TRAINED, *FUNCTIONS])
    def test_backward(self, kind: str) -> None:
        """Group sizes that were written in between, where autograd does not see it."""
        op, call = (TRAINED[kind][0], TRAINED[kind][1]()) if kind in TRAINED else FUNCTIONS[kind]
        offs = offs_of(3, 4, 5, T)
        y = call(rows().requires_grad_(), offs=offs)
        offs.numpy()[:] = BEYOND
        with pytest.raises(ValueError, match=f"^{op}: offs end at 17, but x has 16 rows"):
            y.sum().backward()

    @pytest.mark.parametrize("module", [GroupedMLP, GroupedLinear])
    def test_delayed_gradients(self, module: Any) -> None:
        delayed, offs = module(E, K, N, delay_wgrad=True, dtype=BF16), offs_of(3, 4, 5, T)
        delayed(rows(), offs=offs).sum().backward()
        offs.numpy()[:] = BEYOND
        with pytest.raises(ValueError, match=f"^{delayed.op}: offs end at 17, but x has 16 rows"):
            delayed.backward_dw()

    @pytest.mark.parametrize("kind", TRAINED)
    def test_what_hooks_give_back(self, kind: str) -> None:
        op, make = TRAINED[kind]
        module = make()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t, lambda t: t.double() if t.is_floating_point() else t
        ):
            y = module(rows(), offs=offs_of(3, 4, 5, T))
            with pytest.raises(TypeError, match=f"^{op}'s backward: .*torch.float64"):
                y.sum().backward()

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"out": torch.zeros(E, K, K, dtype=BF16)}, r"out has shape \[4, 32, 32\]; it must be \[5, 32, 32\]"),
            ({"out": [torch.zeros(K, K, dtype=BF16) for _ in range(E)]}, r"out has shape \[4, .* \[5, 32, 32\]"),
            (
                {"out": torch.zeros(5, K, K, dtype=BF16), "mask": torch.ones(E, dtype=torch.bool)},
                r"mask has shape \[4\]; it must be \[5\]",
            ),
        ],
    )
    def test_a_number_of_groups_that_something_else_tells(self, given: dict[str, Any], words: str) -> None:
        for by in ({"offs": offs_of(3, 4, 5, T, T)}, {"splits": [3, 1, 1, 11, 0]}):
            with pytest.raises(ValueError, match=f"^grouped_wgrad: {words}"):
                glulam.grouped_wgrad(rows(), rows(), **by, **given)

    def test_a_number_of_groups_that_they_alone_tell(self) -> None:
        offs = offs_of(3, 4, 5, T, T)
        assert glulam.grouped_wgrad(rows(), rows(), offs=offs).shape == (5, K, K)
        assert glulam.grouped_bias_grad(rows(), offs=offs).shape == (5, K)

    def test_checking_mode(self, monkeypatch: pytest.MonkeyPatch, fake_gpu: FakeGpu) -> None:
        monkeypatch.setenv("GLULAM_CHECK", "1")
        for op, call in FUNCTIONS.values():
            with pytest.raises(ValueError, match=f"^{op}: offs end at 17, but x has 16 rows"):
                call(rows().requires_grad_(), offs=BEYOND)
        kernels.forget_plans()


CAUSES = [
    ({"offs": offs_of(4, 4, 4, 4)}, 4, r"offs sum to 16, as splits would: .*offs=torch.cumsum\(splits, 0, dtype="),
    ({"offs": offs_of(0, 3, 7, 12)}, 12, r"offs\[0\] is 0, as the first of starts would be"),
    ({"offs": offs_of(2, 3, 7, 12)}, 12, "Check that offs are ends: not splits, .* and not starts"),
    ({"splits": offs_of(2, 3, 7, 1)}, 13, "Check that splits count every row"),
    ({"splits": [2, 3, 7, 1]}, 13, "Check that splits count every row"),
]


class TestRowsBehind:
    @pytest.mark.parametrize("op", CALLS)
    @pytest.mark.parametrize(("by", "end", "words"), CAUSES)
    def test_once_for_each_cause(self, op: str, by: dict[str, Any], end: int, words: str) -> None:
        fate = "reach no result" if op in ("grouped_wgrad", "grouped_bias_grad") else "are uninitialised"
        with pytest.warns(RuntimeWarning, match=f"^{op}: the groups end at row {end} of 16; .*{fate}.*{words}") as seen:
            for _ in range(3):
                CALLS[op](**by)
        assert len(tails(seen)) == 1 and all(warning.filename == __file__ for warning in seen), "where it was called"

    def test_another_cause_is_another_warning(self, all_tails: Callable[[], list[str]]) -> None:
        for by, *_ in CAUSES * 2:
            CALLS["grouped_mm"](**by)
        CALLS["grouped_glu"](**CAUSES[0][0])
        assert len(all_tails()) == 5, "splits in two forms are one cause"

    def test_the_message_says_how_to_silence_it(self) -> None:
        with pytest.warns(RuntimeWarning, match="the groups end") as seen:
            CALLS["grouped_mm"](offs=offs_of(4, 4, 4, 4))
        advice = str(seen[0].message).partition("silence this by ")[2]
        groups.forget_warnings()
        with warnings.catch_warnings(record=True) as others:
            warnings.simplefilter("always")
            exec(advice)  # what the message says
            CALLS["grouped_mm"](offs=offs_of(4, 4, 4, 4))
        assert advice.startswith("warnings.filterwarnings(") and not others

    @pytest.mark.parametrize("kind", TRAINED)
    @pytest.mark.parametrize("delay", [False, True])
    def test_a_step_warns_once_in_the_operator_s_name(
        self, kind: str, delay: bool, all_tails: Callable[[], list[str]]
    ) -> None:
        """The operators that forward and backward are made of say nothing."""
        op, make = TRAINED[kind]
        module = make()
        module.delay_wgrad = delay
        x, scale = rows().requires_grad_(), {"bias_scale" if op == "grouped_mm" else "row_scale": torch.ones(T)}
        for _ in range(2):
            module(x, offs=offs_of(2, 3, 7, 12), **scale).sum().backward()
            if delay:
                module.backward_dw()
        (message,) = all_tails()
        assert message.startswith(f"{op}: the groups end at row 12 of 16")

    def test_none_where_groups_fill_the_rows(self, all_tails: Callable[[], list[str]]) -> None:
        for call in CALLS.values():
            for by in ({"offs": offs_of(0, 3, 7, T)}, {"splits": [0, 0, 0, T]}):
                call(**by)
        for _, make in TRAINED.values():
            make()(rows().requires_grad_(), offs=offs_of(3, 4, 5, T)).sum().backward()
        assert not all_tails()

    def test_none_of_what_is_padded_by_design(self, all_tails: Callable[[], list[str]]) -> None:
        padded = torch.zeros(512, K, dtype=BF16)
        for axis in ("row", "col", "both"):
            glulam.quantize_mxfp8(padded, axis=axis, offs=offs_of(100, 200))
        assert not all_tails()

    @pytest.mark.parametrize("ends", [(4, 4, 4, 4), (0, 3, 7, 12), (2, 3, 7, 12), (0, 0, 0, 0)])
    def test_none_of_a_routing(self, ends: tuple[int, ...], all_tails: Callable[[], list[str]]) -> None:
        """Choices of experts elsewhere have no row, so that its rows may end anywhere."""
        counts = offs_of(*ends).diff(prepend=offs_of(0))
        ids = torch.cat([torch.arange(E).repeat_interleave(counts), torch.full((T - ends[-1],), -1)])
        routing = glulam.Routing.from_topk(ids.view(-1, 2), torch.ones(T // 2, 2), E)
        assert tuple(routing.offs.tolist()) == ends
        for call in CALLS.values():
            for by in ({"offs": routing.offs}, {"splits": routing.counts}):
                call(**by)
        for _, make in TRAINED.values():
            make()(rows().requires_grad_(), offs=routing.offs).sum().backward()
        assert not all_tails()
        CALLS["grouped_mm"](offs=offs_of(*ends))
        assert len(all_tails()) == 1, "the same ends of no routing"

    def test_none_from_compiled_code(self, all_tails: Callable[[], list[str]]) -> None:
        torch.compiler.reset()
        module = GroupedMLP(E, K, N, bias=True, dtype=BF16)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        compiled(rows(), offs=offs_of(2, 3, 7, 12)).sum().backward()
        assert not all_tails()

    @pytest.mark.parametrize("checks", [False, True])
    def test_on_a_gpu_in_checking_mode(
        self, checks: bool, monkeypatch: pytest.MonkeyPatch, fake_gpu: FakeGpu, all_tails: Callable[[], list[str]]
    ) -> None:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        if checks:
            monkeypatch.setenv("GLULAM_CHECK", "1")
        ids = torch.arange(T).view(-1, 2) - T // 2  # half of them are of no expert
        offs = glulam.Routing.from_topk(ids, torch.ones(T // 2, 2), E).offs
        for op, call in FUNCTIONS.values():
            CALLS[op](offs=offs)
            call(rows().requires_grad_(), offs=offs).sum().backward()
        assert not all_tails(), "those of a routing"
        for op in ("grouped_mm", "grouped_mlp", "grouped_wgrad"):
            for by in ({"offs": offs_of(2, 3, 7, 12)}, {"splits": [2, 3, 7, 1]}) * 2:
                CALLS[op](**by)
        for _, call in FUNCTIONS.values():
            call(rows().requires_grad_(), offs=offs_of(2, 3, 7, 12)).sum().backward()
        assert len(all_tails()) == (6 if checks else 0)
        kernels.forget_plans()
