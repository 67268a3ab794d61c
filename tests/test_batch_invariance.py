"""The batch-invariance switch: the kernels chosen with it, calls refused by name, threads, plans and traces."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_gpu import FakeGpu, reference
from torch import Tensor, nn

import glulam
from cute_kernels.accumulation import Accumulation
from cute_kernels.arch import policy_of
from cute_kernels.sm90.configs import DGLU8, LARGE8, ORDERED_W8, SMALL8, SPLIT_W8, TINY_W8
from cute_kernels.specs import GroupedMlpSpec, GroupedMmSpec, Spec
from cute_kernels.stages import accumulations_of, gemms_of
from cute_kernels.tiles import TileConfig
from glulam import contract
from glulam.choose import choose, invariance, known
from glulam.choose.problem import Problem, changed
from glulam.host import device
from glulam.host import invariance as switch
from glulam.host.plans import forget_plans
from glulam.mhc.call import USUAL_SMS
from glulam.mhc.project import project_cut
from glulam.recipes import RECIPES

pytest_plugins = ["support.fixtures"]

BF16, F32 = torch.bfloat16, torch.float32
EXPERTS, HIDDEN, INTER = 3, 64, 32
SIZES = [4, 0, 5]
SPLITS = torch.tensor(SIZES, dtype=torch.int32)
FEW, SOME = 16, 128
"""Rows of tiles: of few rows, and of many."""


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    """Check that the switch is off before and after every test."""
    assert not switch.is_on()
    yield
    assert not switch._blocks
    switch._statements.clear()
    switch._settle()
    switch.is_used = False
    forget_plans()


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch, fake_gpu: FakeGpu) -> FakeGpu:
    """A fake GPU with portable kernels, whose tile for few rows accumulates in another order than the one for many."""
    monkeypatch.setattr(device, "gpu", lambda index: device.Gpu("fake", "sm_90", 132))
    forget_plans()
    return fake_gpu


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


X, W = randn(sum(SIZES), HIDDEN), randn(EXPERTS, INTER, HIDDEN, seed=1)
W1, W2 = randn(EXPERTS, 2 * INTER, HIDDEN, seed=2), randn(EXPERTS, HIDDEN, INTER, seed=3)


def mm(x: Tensor = X, **options: Any) -> Tensor:
    made: Tensor = glulam.grouped_mm(x, W, splits=SPLITS, **options)
    return made


def mlp(x: Tensor = X, **options: Any) -> Tensor:
    return glulam.grouped_mlp(x, W1, W2, splits=SPLITS, **options)


def heights(gpu: FakeGpu) -> set[int]:
    """Return the tile heights of all GEMMs requested since the last call."""
    found = {stage.tile.m for spec in gpu.specs for stage in gemms_of(spec)}
    del gpu.specs[:]
    return found


class TestSetting:
    def test_a_statement_holds_until_the_next_one(self) -> None:
        glulam.batch_invariant(True)
        assert switch.is_on()
        glulam.batch_invariant(False)
        assert not switch.is_on()
        for _ in range(100):
            glulam.batch_invariant()
        assert switch.is_on() and len(switch._statements) <= 3

    def test_a_block_ends_with_what_was_before(self) -> None:
        with glulam.batch_invariant(True) as block:
            assert switch.is_on() and block.mode
            with glulam.batch_invariant(False):
                assert not switch.is_on()
            assert switch.is_on()
        assert not switch.is_on()
        glulam.batch_invariant(True)
        with glulam.batch_invariant(False):
            assert not switch.is_on()
        assert switch.is_on()

    def test_a_block_that_raises_ends(self) -> None:
        with pytest.raises(KeyError), glulam.batch_invariant():
            raise KeyError
        assert not switch.is_on()

    def test_one_object_may_be_entered_again(self) -> None:
        block = glulam.batch_invariant()
        with block, block:
            assert switch.is_on()
        assert not switch.is_on()

    def test_blocks_end_in_any_order(self) -> None:
        """Blocks of several threads may end in any order: each takes back its own setting alone."""
        first, second = glulam.batch_invariant(True), glulam.batch_invariant(True)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert switch.is_on()
        second.__exit__(None, None, None)
        assert not switch.is_on()

    def test_it_is_a_setting_of_all_threads(self) -> None:
        seen: list[bool] = []

        def look() -> None:
            seen.append(switch.is_on())

        with glulam.batch_invariant():
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        look()
        assert seen == [True, False]

    def test_a_backward_holds_its_forward_in_its_own_thread_alone(self) -> None:
        glulam.batch_invariant(True)
        seen: list[bool] = []
        with switch.held(False):
            assert not switch.is_on()
            thread = threading.Thread(target=lambda: seen.append(switch.is_on()))
            thread.start()
            thread.join()
        assert seen == [True] and switch.is_on()

    @pytest.mark.parametrize("mode", [1, None, "yes"])
    def test_it_takes_a_boolean(self, mode: Any) -> None:
        with pytest.raises(TypeError, match="batch_invariant: mode is .*; give True or False"):
            glulam.batch_invariant(mode)
        assert not switch.is_on()


class TestKernels:
    def test_tiles_of_another_order_are_left_out(self, portable: FakeGpu) -> None:
        mm()
        assert heights(portable) == {FEW}
        with glulam.batch_invariant():
            mm()
            assert heights(portable) == {SOME}
            mlp()
            assert heights(portable) == {SOME}

    def test_a_plan_serves_calls_with_its_own_setting_alone(self, portable: FakeGpu) -> None:
        """Found by its key, by guards, and as one that differs in its rows alone."""
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for rows in (9, 9, 9, 12, 7, 9):
            x, splits = randn(rows, HIDDEN), torch.tensor([rows - 2, 0, 2], dtype=torch.int32)
            for mode in (False, True, False, True):
                with glulam.batch_invariant(mode):
                    del portable.launches[:]
                    plans = len(glulam.grouped_mm.__closure__ or ())
                    glulam.grouped_mm(x, W, splits=splits)
                    assert plans and len(portable.launches) == 1
                    names[mode] |= {spec.name for spec in portable.specs}
                    del portable.specs[:]
        assert {name for name in names[True] if "t128x" in name} == names[True] != set()
        assert {name for name in names[False] if "t16x" in name} == names[False] != set()

    def test_the_function_that_is_launched_is_the_setting_s(
        self, portable: FakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Told at each launch, and not where kernels are looked for."""
        launched = _launched(portable, monkeypatch)
        for mode in (False, True, True, False, False, True) * 2:
            with glulam.batch_invariant(mode):
                mm()
            assert launched.pop().tile.m == (SOME if mode else FEW) and not launched

    def test_a_setting_that_changes_during_a_call_does_not_mix_plans(self, portable: FakeGpu) -> None:
        """The key says what a plan is for, whatever another thread sets between."""
        call = glulam.ops.grouped_mm.GroupedMmCall(
            x=X, w=W, offs=None, splits=SPLITS, bias=None, bias_scale=None, rows=None, transpose_w=False, out=None
        )
        key = switch.marked(call._options(), True), "any"
        assert not call.invariant and switch.is_marked(key) and not switch.is_marked((call._options(), "any"))
        call.handle_miss(key, {})
        assert heights(portable) == {SOME}

    @pytest.mark.parametrize("is_planned", [True, False])
    def test_backward_keeps_the_setting_of_its_forward(self, portable: FakeGpu, is_planned: bool) -> None:
        """It runs on another thread, after the block; a step that is planned, and one by public operators."""
        w = W.clone().requires_grad_()
        rows = sum(SIZES) if is_planned else 1  # one row has no plan
        splits = SPLITS if is_planned else torch.tensor([1, 0, 0], dtype=torch.int32)
        for mode in (True, False, True):
            x = X[:rows].clone().requires_grad_()
            with glulam.batch_invariant(mode):
                y = glulam.grouped_mm(x, w, splits=splits)
            assert heights(portable) <= {SOME if mode else FEW}
            y.sum().backward()
            found = heights(portable)
            assert found <= {SOME} if mode else FEW in found
        x = X[:rows].clone().requires_grad_()
        heights(portable)
        forget_plans()
        y = glulam.grouped_mm(x, w, splits=splits)
        with glulam.batch_invariant():
            y.backward(torch.ones_like(y))
        assert FEW in heights(portable)

    def test_training_has_the_order_of_inference(self, portable: FakeGpu) -> None:
        with glulam.batch_invariant():
            mlp()
            inference = {accumulations_of(spec)[:2] for spec in portable.specs}
            del portable.specs[:]
            y = mlp(X.clone().requires_grad_())
            training = {accumulations_of(spec)[:2] for spec in portable.specs}
            assert len(inference) == 1 and inference == training
            y.sum().backward()
            assert heights(portable) == {SOME}

    def test_weights_alone_are_trained_by_the_forward_of_inference(self, fake_gpu: FakeGpu) -> None:
        """In one call, since three would round the preactivation."""
        weights = [glulam.quantize_mxfp4(w) for w in (W1, W2)]
        options: dict[str, Any] = {"recipe": "mxfp4_weight_only", "splits": SPLITS}
        works = {}
        for mode in (False, True):
            del fake_gpu.work[:]
            with glulam.batch_invariant(mode):
                glulam.grouped_mlp(X.clone().requires_grad_(), *weights, **options)
            works[mode] = list(fake_gpu.work)
        assert len(works[False]) == 3 and works[True] == ["mlp"]

    @pytest.mark.parametrize("recipe", ["mxfp4_weight_only", "nvfp4_weight_only"])
    def test_four_bits_of_few_rows_take_the_tile_in_order(self, fake_gpu: FakeGpu, recipe: str) -> None:
        quantize = glulam.quantize_mxfp4 if recipe.startswith("mx") else glulam.quantize_nvfp4
        w = quantize(W)
        glulam.grouped_mm(X, w, splits=SPLITS)
        assert heights(fake_gpu) == {TINY_W8.m}
        with glulam.batch_invariant():
            glulam.grouped_mm(X, w, splits=SPLITS)
        assert fake_gpu.specs[-1].tile == ORDERED_W8

    def test_eight_bits_of_few_experts_take_the_tile_whose_warpgroups_share_no_depth(self) -> None:
        for rows in (1, 9, 20, 100, 1000):
            for problem in contract.problems("grouped_mlp", RECIPES["mxfp8_weight_only"], "sm_90a", rows):
                free, kept = (choose(changed(problem, invariant=mode), "sm_90a").spec for mode in (False, True))
                assert isinstance(free, GroupedMlpSpec) and isinstance(kept, GroupedMlpSpec)
                assert kept == free if free.fc1.tile not in SPLIT_W8 else kept.fc1.tile == kept.fc2.tile == TINY_W8
                assert (free.fc1.tile in SPLIT_W8) == (rows <= 11 and not problem.save_preact)

    def test_kernels_of_one_order_stay(self) -> None:
        """The switch costs nothing where a problem has one order: the same kernel for every number of rows."""
        for op, recipe in (("grouped_mm", "bf16"), ("grouped_mlp", "mxfp8"), ("grouped_mlp", "mxfp8_exact")):
            for rows in (1, 9, 20, 100, 1000):
                for problem in contract.problems(op, RECIPES[recipe], "sm_90a", rows):
                    assert choose(problem, "sm_90a").spec == choose(changed(problem, invariant=True), "sm_90a").spec

    def test_a_preferred_kernel_of_another_order_is_left_out(self) -> None:
        problem = next(contract.problems("grouped_mm", RECIPES["mxfp4_weight_only"], "sm_90a", rows=4))
        spec = choose(problem, "sm_90a").spec
        assert spec.tile in SPLIT_W8
        known.forget()
        try:
            known._preferred[known.family_of(spec)], known._loadable[spec] = spec, True
            many = dataclasses.replace(problem, rows=4000)
            assert choose(many, "sm_90a").spec == spec
            told = choose(changed(many, invariant=True), "sm_90a")
            assert told.spec != spec and spec.name in told.why_not[0] and "batch_invariant" in told.why_not[0]
        finally:
            known.forget()

    def test_where_no_kernel_adds_in_order_the_call_is_refused_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        problem = next(one for one in contract.problems("grouped_glu", RECIPES["bf16"], "sm_90a") if one.save_preact)
        inference = policy_of("sm_90a").accumulation

        def other(spec: Any) -> Accumulation:
            own = inference(spec)
            return own._replace(depth=8) if getattr(spec, "save_preact", False) else own

        monkeypatch.setattr(policy_of("sm_90a"), "accumulation", other)
        accumulations_of.cache_clear()
        try:
            choose(problem, "sm_90a")
            with pytest.raises(
                NotImplementedError, match=r"grouped_glu: no kernel of operands '16bit' .*; call it wit"
            ):
                choose(changed(problem, invariant=True), "sm_90a")
        finally:
            monkeypatch.undo()
            accumulations_of.cache_clear()

    def test_every_problem_has_a_kernel_in_order(self) -> None:
        """On every architecture, by every recipe, from one row an expert to many, and all in the same order."""
        count = 0
        for arch in ("sm_90a", "sm_90", "sm_100a"):
            for op in contract.VARIANTS:
                for recipe in RECIPES.values():
                    orders = set()
                    for rows in (1, 12, 13, 27, 28, 60, 61, 129, 5000):
                        for problem in contract.problems(op, recipe, arch, rows):
                            spec = choose(changed(problem, invariant=True), arch).spec
                            orders.add((problem.transpose_w, accumulations_of(spec)))
                            count += 1
                    assert len({one for transposed, one in orders if not transposed}) <= 1
                    assert len({one for transposed, one in orders if transposed}) <= 1
        assert count > 300


def _launched(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets the spec of every launch."""
    launched: list[Spec] = []
    find = gpu.find

    def found(spec: Spec) -> Any:
        kernel = find(spec)

        def launch(*arguments: Any) -> None:
            launched.append(spec)
            kernel.function(*arguments)

        return kernel._replace(function=launch)

    monkeypatch.setattr("glulam.choose.kernels.find", found)
    forget_plans()
    return launched


class TestRefusals:
    @pytest.mark.parametrize("call", [mm, mlp, lambda: glulam.grouped_wgrad(X, X, splits=SPLITS)])
    def test_products_on_the_cpu(self, call: Callable[[], Tensor]) -> None:
        call()
        with glulam.batch_invariant(), pytest.raises(NotImplementedError, match="tensors are on cpu.* move them to a"):
            call()

    def test_what_multiplies_nothing_runs_on_the_cpu(self) -> None:
        with glulam.batch_invariant():
            assert glulam.quantize_mxfp4(W).data.shape == (EXPERTS, INTER, HIDDEN // 2)
            glulam.permute(X, glulam.route(randn(sum(SIZES), EXPERTS), 2))

    def test_it_is_not_set_within_a_compiled_function(self) -> None:
        def function(x: Tensor) -> Tensor:
            with glulam.batch_invariant():
                return x + 1

        with pytest.raises(Exception, match="batch_invariant: called within a function that torch.compile traces"):
            torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
        torch.compiler.reset()
        assert not switch.is_on()


class TestCompiled:
    def test_a_compiled_function_reads_the_setting_when_it_runs(self, portable: FakeGpu) -> None:
        torch.compiler.reset()
        compiled = torch.compile(lambda x: mm(x) * 2, backend="aot_eager", fullgraph=True)
        for mode in (False, True, False, True):
            with glulam.batch_invariant(mode):
                heights(portable)
                forget_plans()
                made = compiled(X)
                assert heights(portable) == {SOME if mode else FEW} and made.isfinite().all()
        torch.compiler.reset()


class TestLayer:
    def layer(self, **options: Any) -> Any:
        torch.manual_seed(0)
        return glulam.nn.MoE(HIDDEN, INTER, 4, top_k=2, dtype=BF16, **options)

    def test_a_router_in_16_bits_is_a_grouped_product(self, portable: FakeGpu) -> None:
        """Few tokens and many, with gradients and without."""
        module = self.layer(router_bias=True, shared_intermediate_size=INTER, shared_gate=True)
        x = randn(20, HIDDEN, seed=7)
        ours = {}
        for mode in (False, True):
            with glulam.batch_invariant(mode), torch.no_grad():
                ours[mode] = module(x), module.routing
        torch.testing.assert_close(ours[True][0], ours[False][0], rtol=3e-2, atol=3e-2)
        assert ours[True][1].ids.equal(ours[False][1].ids)
        heights(portable)
        for tokens in (x, x[:3]):
            forget_plans()
            with glulam.batch_invariant():
                y = module(tokens.clone().requires_grad_())
                assert any(isinstance(spec, GroupedMmSpec) for spec in portable.specs)
                assert not any("router" in spec.name for spec in portable.specs)
            y.float().sum().backward()
            assert heights(portable) == {SOME}
        assert all(p.grad is not None for p in module.parameters())

    def test_float32_logits_are_those_of_one_kernel(self, fake_gpu: FakeGpu) -> None:
        module = self.layer(router_dtype=F32)
        with glulam.batch_invariant(), torch.no_grad():
            assert module(randn(0, HIDDEN)).shape == (0, HIDDEN)
            for tokens in (3, 40):
                del fake_gpu.specs[:]
                forget_plans()
                module(randn(tokens, HIDDEN))
                assert any("layer_router" in spec.name for spec in fake_gpu.specs)
        with (
            glulam.batch_invariant(),
            pytest.raises(NotImplementedError, match="MoE: router: no kernel makes .*float32"),
        ):
            module(randn(3, HIDDEN))

    def test_a_linear_that_is_hooked_is_refused(self, fake_gpu: FakeGpu) -> None:
        module = self.layer()
        module.router.register_forward_hook(lambda *_: None)
        module(randn(3, HIDDEN))
        with glulam.batch_invariant(), pytest.raises(NotImplementedError, match="MoE: router: it is hooked"):
            module(randn(3, HIDDEN))

    def test_a_router_of_another_class_is_its_own(self, fake_gpu: FakeGpu) -> None:
        class Router(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x[:, :4].float()

        module = self.layer()
        module.router = Router()
        with glulam.batch_invariant(), torch.no_grad():
            assert module(randn(3, HIDDEN)).isfinite().all()


class TestHyperConnections:
    @pytest.mark.parametrize("dtype", [BF16, F32])
    def test_slices_depend_on_the_columns_alone(self, dtype: torch.dtype) -> None:
        x, weight = torch.empty(1, 4, 2048, dtype=BF16), torch.empty(24, 8192, dtype=dtype)
        gpus = [device.Gpu("fake", "sm_90a", sms) for sms in (78, 114, 132, 148)]
        places = [(tokens, gpu) for tokens in (1, 16, 100, 4096, 100000) for gpu in gpus]
        cuts = {mode: {project_cut(x, weight, *place, mode)[:2] for place in places} for mode in (False, True)}
        assert len(cuts[True]) == 1 < len(cuts[False])
        assert all(project_cut(x, weight, *place, True).groups >= 1 for place in places)

    def test_parts_of_parameters_gradients_do_not_depend_on_the_gpu(
        self, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Results with the switch are those without it, to rounding."""
        tokens, n, width = 70, 4, 64
        residual, x = randn(tokens, n, width), randn(tokens, width, seed=1)
        given = [residual, randn(tokens, n, n, seed=2), randn(tokens, n, seed=3), x, randn(width, seed=4)]
        made = {}
        for mode in (False, True):
            leaves = [one.clone().requires_grad_() for one in given]
            with glulam.batch_invariant(mode):
                glulam.mhc.post_mix(*leaves).float().sum().backward()
            made[mode] = [one.grad for one in leaves]
        for one, other in zip(made[True], made[False], strict=True):
            torch.testing.assert_close(one, other)
        assert fake_gpu.launches[-1]["num_sms"] == USUAL_SMS


class TestExplain:
    def test_a_call_of_one_order(self) -> None:
        told = glulam.explain("grouped_mm", (64, 64), (2, 64, 64))
        assert told.invariant and told.invariant_spec == told.spec and "  batch    invariant: " in str(told)

    def test_a_call_of_two_orders_names_the_kernel_of_the_switch(self) -> None:
        arguments: Any = ("grouped_mlp", (8, 64), (4, 128, 64), (4, 64, 64))
        told = glulam.explain(*arguments, recipe="mxfp4_weight_only")
        other = told.invariant_spec
        assert not told.invariant and other is not None and other != told.spec
        assert told.batch.startswith("not invariant") and other.name in told.batch
        with glulam.batch_invariant():
            told = glulam.explain(*arguments, recipe="mxfp4_weight_only")
        assert told.invariant and told.spec == told.invariant_spec == other and "batch_invariant" in told.batch

    def test_frozen_weights_round_where_a_gradient_is_recorded(self, fake_gpu: FakeGpu) -> None:
        weights = [glulam.quantize_nvfp4(w) for w in (W1, W2)]
        trained = X.clone().requires_grad_()
        for x, recompute, rounds in ((X, False, False), (trained, False, True), (trained, True, False)):
            told = glulam.explain(
                "grouped_mlp", x, *weights, splits=SPLITS, recipe="nvfp4_weight_only", recompute=recompute
            )
            assert ("rounds the preactivation" in told.batch) is rounds and not told.invariant

    def test_the_cpu_promises_nothing(self) -> None:
        told = glulam.explain("grouped_mm", X, W, splits=SPLITS)
        assert told.source == "reference" and not told.invariant and "not promised" in str(told)

    def test_routing_is_of_each_token_alone(self) -> None:
        assert glulam.explain("route", (64, 16), 2).invariant


class TestContract:
    def test_verdicts_are_those_that_were_measured(self) -> None:
        """On an H100 all combinations of these gave the same bits, except MXFP4's weights alone."""
        measured = ("bf16", "mxfp8", "mxfp8_exact", "mxfp8_weight_only", "fp8_block")
        assert {contract.tiled("grouped_mlp", recipe, "sm_90a").verdict for recipe in measured[:3]} == {contract.YES}
        told = contract.tiled("grouped_mm", "mxfp4_weight_only", "sm_90a")
        assert told.verdict == contract.SWITCH and "Up to 27 rows an expert" in told.why
        told = contract.tiled("grouped_mm", "mxfp8_weight_only", "sm_90a")
        assert told.verdict == contract.SWITCH and "2 sums" in told.why and "4 sums" in told.why
        assert contract.tiled("grouped_mm", "bf16", "portable").verdict == contract.SWITCH

    def test_the_page_has_the_table(self) -> None:
        page = (Path(__file__).parents[1] / "docs/batch-invariance.md").read_text()
        assert contract.BEGIN in page and "| `grouped_mlp`, `moe` | bf16 | yes |" in page
        assert page == contract.with_table(page), "run: python -m glulam.contract docs/batch-invariance.md"

    def test_a_split_tile_changes_the_verdict(self, monkeypatch: pytest.MonkeyPatch) -> None:
        inference = policy_of("sm_90a").accumulation

        def split(spec: Any) -> Accumulation:
            return inference(spec)._replace(parts=2) if spec.tile.m == 64 else inference(spec)

        assert contract.tiled("grouped_mm", "bf16", "sm_90a").verdict == contract.YES
        monkeypatch.setattr(policy_of("sm_90a"), "accumulation", split)
        accumulations_of.cache_clear()
        contract.tiled.cache_clear()
        try:
            told = contract.tiled("grouped_mm", "bf16", "sm_90a")
            assert told.verdict == contract.SWITCH and "tile 64 x 128" in told.why
        finally:
            monkeypatch.undo()
            accumulations_of.cache_clear()
            contract.tiled.cache_clear()

    def test_tiles_that_only_users_compile_have_an_order(self) -> None:
        """A tile that ships for no problem."""
        wide = GroupedMmSpec(tile=TileConfig(m=32, n=256, k=128, schedule="swapped"), operands="mxfp4_weight_only")
        problem = next(contract.problems("grouped_mm", RECIPES["mxfp4_weight_only"], "sm_90a"))
        assert not invariance.keeps_order(wide, changed(problem, invariant=True), "sm_90a")
        assert {one.k for one in (LARGE8, SMALL8, DGLU8)} == {128}

    def test_problems_are_those_that_a_call_has(self, fake_gpu: FakeGpu) -> None:
        with reference():
            call = glulam.ops.grouped_mm.GroupedMmCall(
                x=X, w=W, offs=None, splits=SPLITS, bias=None, bias_scale=None, rows=None, transpose_w=False, out=None
            )
            problem = call.check()
        made = next(contract.problems("grouped_mm", RECIPES["bf16"], "sm_90a", rows=len(X), experts=EXPERTS))
        widths = {name: getattr(problem, name) for name in contract.WIDTHS}
        assert changed(made, **widths) == problem
        assert isinstance(problem, Problem)
