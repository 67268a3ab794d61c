"""A result of perf's layer suite, of round numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from perf import results
from perf.cases import FORWARD, PUBLISHED, TRAIN, LayerCase
from perf.timing import Summary

SONIC, QWEN3 = PUBLISHED[:2]
STEPS = {
    FORWARD: {"router GEMM": 100.0, "route": 50.0, "FC1": 500.0, "FC2": 250.0, "combine": 50.0},
    TRAIN: {"router GEMM": 100.0, "route": 50.0, "FC1": 550.0, "backward of FC2: dglu": 1200.0},
}


def _times(**medians: float) -> dict[str, Any]:
    return {name: dataclasses.asdict(Summary(us, us * 0.9, us * 1.1, 9)) for name, us in medians.items()}


def timed(case: LayerCase, op: str, mode: str, left_out: dict[str, str] | None = None, **medians: float) -> Any:
    return {
        "case": dataclasses.asdict(case),
        "skew": {"max_over_mean": 1.25, "empty_experts": 0},
        "op": op,
        "flop": case.flop(op),
        "mode": mode,
        "errors": {},
        "left_out": left_out or {},
        "times": _times(**medians),
    }


def _stages(case: LayerCase, op: str) -> Any:
    return {**timed(case, op, "eager", **STEPS[op]), "op": "stages", "of": op}


def _part(name: str, case: LayerCase, **more: Any) -> Any:
    return {"case": dataclasses.asdict(case), "op": "parts", "part": name, "flop": 0, "bytes": 0, **more}


def records() -> list[Any]:
    peers = {"MLP alone": 900.0, "torch": 2000.0}
    eager = timed(QWEN3, FORWARD, "eager", {"SonicMoE": "wrong, relative error 0.4"}, glulam=1250.0, **peers)
    small = dataclasses.replace(QWEN3, tokens=64)
    return [
        {**eager, "memory": {"glulam": {"peak": 500_000_000}, "torch": {"peak": 900_000_000}}},
        timed(QWEN3, FORWARD, "graph", {"torch": "RuntimeError: no capture"}, glulam=1000.0, **{"MLP alone": 900.0}),
        {
            **timed(QWEN3, TRAIN, "eager", glulam=3000.0, torch=6000.0),
            "memory": {"glulam": {"peak": 2_000_000_000, "kept": 125_000_000}},
        },
        timed(SONIC, FORWARD, "eager", {"glulam": "wrong, relative error nan"}, torch=9000.0),
        _stages(QWEN3, FORWARD),
        _stages(QWEN3, TRAIN),
        _stages(SONIC, FORWARD),
        _part("FC1", QWEN3, flop=QWEN3.mlp.flop("fc1"), times=_times(**{"by index": 400.0, "sorted rows": 380.0})),
        _part("permute", QWEN3, bytes=4_000_000, times=_times(glulam=2.0, copy=1.0)),
        _part("route", small, times=_times(replayed=4.5)),
        _part("Routing.from_topk", small, times=_times(replayed=3.0)),
    ]


def result(stamp: dict[str, Any], limits: dict[str, float]) -> results.Result:
    return results.make_result("layer", stamp, limits, records())
