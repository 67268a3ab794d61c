"""A problem's tensors for the most rows that are measured, and the arguments of exported functions for fewer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import groups
from ..activations import ActivationParams, kernel_params
from ..ops.grouped_dglu import partials_shape
from ..problem import Problem
from ..tickets import new_counters

PARAMS = ActivationParams()._asdict()

Arguments = dict[str, Any]


class Tensors:
    """One set. `launches`: arguments of each call by name, num_sms left out; `results`: what the calls write."""

    def __init__(self, problem: Problem, device: torch.device, seed: int = 0) -> None:
        self.problem = problem
        self.dtype: torch.dtype = getattr(torch, problem.dtype)
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.counters = new_counters(device)
        {
            "grouped_mm": self._make_mm,
            "grouped_glu": self._make_glu,
            "grouped_mlp": self._make_mlp,
            "grouped_dglu": self._make_dglu,
            "grouped_wgrad": self._make_wgrad,
        }[problem.op]()

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        return made.normal_(0.0, scale, generator=self.generator)

    def _rows(self, width: int) -> Tensor:
        return self._random(self.problem.rows, width)

    def _weights(self, rows: int, columns: int, contracted: int) -> Tensor:
        return self._random(self.problem.experts, rows, columns, scale=contracted**-0.5)

    def _forward_weights(self, n: int, k: int) -> Tensor:
        """Of x [T,K] -> [T,N]."""
        return self._weights(*((k, n) if self.problem.transpose_w else (n, k)), k)

    def _out(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def _make_mm(self) -> None:
        p = self.problem
        self.x, self.w = self._rows(p.in_features), self._forward_weights(p.out_features, p.in_features)
        self.y = self._out(p.rows, p.out_features)
        self.results: tuple[Tensor, ...] = (self.y,)

    def _make_fc1(self) -> None:
        p = self.problem
        self.x, self.w1 = self._rows(p.in_features), self._forward_weights(p.w1_rows, p.in_features)
        self.act = self._out(p.rows, p.intermediate)

    def _make_glu(self) -> None:
        self._make_fc1()
        self.results = (self.act, *self._make_preact())

    def _make_preact(self) -> tuple[Tensor, ...]:
        if not self.problem.save_preact:
            return ()
        self.preact = self._out(self.problem.rows, self.problem.w1_rows)
        return (self.preact,)

    def _make_mlp(self) -> None:
        p = self.problem
        self._make_fc1()
        preact = self._make_preact()
        self.w2 = self._forward_weights(p.out_features, p.intermediate)
        self.y = self._out(p.rows, p.out_features)
        self.results = (*preact, self.y)

    def _make_dglu(self) -> None:
        p = self.problem
        self.dy, self.preact = self._rows(p.in_features), self._rows(p.w1_rows)
        sides = (p.intermediate, p.in_features) if p.transpose_w else (p.in_features, p.intermediate)
        self.w2 = self._weights(*sides, p.in_features)
        self.dpreact, self.act = self._out(p.rows, p.w1_rows), self._out(p.rows, p.intermediate)
        self.scale = torch.rand(p.rows, device=self.device, generator=self.generator)
        self.d_scale = self._out(p.rows, dtype=torch.float32)
        self.partials = self._out(*partials_shape(p.rows, p.intermediate), dtype=torch.float32)
        self.results = (self.dpreact, self.act, self.d_scale)
        if p.out_features:
            self.w1, self.dx = self._weights(p.w1_rows, p.out_features, p.w1_rows), self._out(p.rows, p.out_features)
            self.results += (self.dx,)

    def _make_wgrad(self) -> None:
        p = self.problem
        self.pairs = [
            (self._rows(n), self._rows(k), self._out(p.experts, n, k, dtype=getattr(torch, p.out_dtype)))
            for n, k in p.weights
        ]
        self.results = tuple(dw for _, _, dw in self.pairs)

    def results_of(self, rows: int) -> list[Tensor]:
        """What calls on the first `rows` rows write."""
        return [result[:rows] if result.shape[0] == self.problem.rows else result for result in self.results]

    def launches(self, rows: int, offs: Tensor) -> list[Arguments]:
        """Arguments of the calls that make one step, num_sms left out, on the first `rows` rows."""
        sizes = groups.arguments(offs, self.counters)
        return [{**named, **sizes} for named in self._launches(rows)]

    def _activation(self) -> dict[str, float]:
        return kernel_params(self.problem.activation, self.problem.glu_layout, ActivationParams())._asdict()

    def _launches(self, t: int) -> Iterator[Arguments]:
        p = self.problem
        if p.op == "grouped_mm":
            yield {"x": self.x[:t], "w": self.w, "y": self.y[:t]}
        elif p.op == "grouped_mlp":
            preact = {"preact": self.preact[:t]} if p.save_preact else {}
            rows = {"x": self.x[:t], "mid": self.act[:t], "y": self.y[:t], **preact}
            yield {**rows, "w1": self.w1, "w2": self.w2, **self._activation()}
        elif p.op == "grouped_glu":
            preact = {"preact": self.preact[:t]} if p.save_preact else {}
            yield {"x": self.x[:t], "w": self.w1, "act": self.act[:t], **preact, **self._activation()}
        elif p.op == "grouped_dglu":
            rows = {name: getattr(self, name)[:t] for name in ("dy", "preact", "dpreact", "act")}
            addresses = {name: getattr(self, name).data_ptr() for name in ("scale", "d_scale", "partials")}
            dgrad = {"w1": self.w1, "dx": self.dx[:t]} if p.out_features else {}
            yield {**rows, "w2": self.w2, **dgrad, **addresses, **PARAMS}
        else:
            for dy, x, dw in self.pairs:
                yield {"dy": dy[:t], "x": x[:t], "dw": dw}


def num_bytes(problem: Problem) -> int:
    """About what one set takes."""
    with torch.device("meta"):
        made = _Counting(problem)
    return made.bytes


class _Counting(Tensors):
    """Makes no tensor and adds up their sizes."""

    def __init__(self, problem: Problem) -> None:
        self.bytes = 0
        super().__init__(problem, torch.device("cpu"))

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self._counted(shape, self.dtype)

    def _out(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self._counted(shape, dtype or self.dtype)

    def _counted(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device="meta")
        self.bytes += made.numel() * dtype.itemsize
        return made
