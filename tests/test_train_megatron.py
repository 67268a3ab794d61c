"""The Megatron-Core training run at small size: two gloo ranks on the CPU, which Megatron is told are GPUs."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from support.ranks import run_ranks
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("megatron.core")
from megatron.core import parallel_state
from support.megatron import on_the_cpu

from examples import train_megatron, train_moe, training_curves
from glulam.integrations.megatron import GlulamMLP, experts_spec
from perf import tables

STEPS = 12
PEERS = [peer for peer in train_megatron.PEERS if not peer.fused]  # to compile takes half a minute here


class Wrong(GlulamMLP):
    """Experts with correct results, but gradients too small by a tenth."""

    def forward(self, x: Tensor, sizes: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        y, _ = super().forward(x, sizes, probs)
        return 0.9 * y + 0.1 * y.detach(), None


WRONG = train_megatron.Experts("wrong", dataclasses.replace(experts_spec(), module=Wrong))


def trained(dispatcher: str, dtype: torch.dtype, *runs: train_megatron.Experts) -> list[dict[str, Any]]:
    setup = dataclasses.replace(train_moe.SETUPS["cpu"], steps=STEPS, dtype=dtype)
    job = train_megatron.Job(setup, dispatcher, 0, "cpu")
    with pytest.MonkeyPatch.context() as monkeypatch:
        on_the_cpu(monkeypatch)
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2, create_gloo_process_groups=False)
        return train_megatron.train_all(job, runs, Console(file=io.StringIO()))


def assert_equal_curves(runs: list[dict[str, Any]], furthest: float) -> None:
    for run in runs:
        assert run["loss"][0] > 5.5 and run["loss"][-1] < 3.5 and run["held_out"] < 3.5
        assert max(abs(a - b) for a, b in zip(run["loss"], runs[0]["loss"], strict=True)) < furthest


def verdict(records: list[dict[str, Any]]) -> bool:
    result = training_curves.make_result({"gpu": "none"}, [*map(dict, records)], len(PEERS), "megatron-alltoall")
    assert "on 2 GPUs" in tables.tables_of(result)[0].title
    return result["records"][-1]["within_noise"]


def in_float32(dispatcher: str) -> None:
    *runs, wrong, shared = trained(dispatcher, torch.float32, *PEERS, train_megatron.OURS, WRONG)
    assert_equal_curves(runs, 1e-5)
    assert verdict([*runs, shared]) and not verdict([*runs, wrong, shared])


def in_bfloat16(dispatcher: str) -> None:
    """Check bfloat16 loss curves, which training spreads apart by some hundredths of a nat."""
    *runs, _ = trained(dispatcher, torch.bfloat16, PEERS[0], PEERS[-1], train_megatron.OURS)
    assert_equal_curves(runs, 0.1)
    assert len({tuple(run["loss"]) for run in runs}) == 3


@pytest.mark.parametrize("dispatcher", train_megatron.DISPATCHERS)
def test_experts_of_both_kinds_learn_the_same_on_two_ranks(dispatcher: str) -> None:
    run_ranks(2, in_float32, dispatcher)


def test_parameters_of_16_bits_have_float32_gradients_and_masters() -> None:
    run_ranks(2, in_bfloat16, "alltoall")


def test_where_gpus_are_missing_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    app = typer.Typer()
    app.command()(train_megatron.main)
    told = CliRunner().invoke(app, [])
    assert told.exit_code == 1
    assert told.stderr == "train_megatron: torch finds 1 GPUs, and Megatron-Core needs one a rank, 2\n"
