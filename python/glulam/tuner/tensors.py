"""A problem's tensors for the most rows that are measured, and the arguments of exported functions for fewer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..activations import ActivationParams
from ..dispatch import Problem
from ..ops.grouped_dglu import partials_shape
from ..tickets import new_counters
from .candidates import goes_on

INT32_OFFSETS = 0  # group_form of the exported functions
ABSENT = (0, 0, 0)  # table of experts, bias, table of biases
PARAMS = ActivationParams()
ALONE, WITH_NEXT = 1, 2  # do_launch

Arguments = tuple[Any, ...]


class Tensors:
    """One set. `launches`: arguments of each call, but for `num_sms`; `results`: what the calls write."""

    def __init__(self, problem: Problem, device: torch.device, seed: int = 0) -> None:
        self.problem = problem
        self.dtype: torch.dtype = getattr(torch, problem.dtype)
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.do_launch = WITH_NEXT if goes_on(problem) else ALONE
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

    def _out(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def _make_mm(self) -> None:
        p = self.problem
        shape = (p.in_features, p.out_features) if p.transpose_w else (p.out_features, p.in_features)
        self.x, self.w = self._rows(p.in_features), self._weights(*shape, p.in_features)
        self.y = self._out(p.rows, p.out_features)
        self.results: tuple[Tensor, ...] = (self.y,)

    def _make_fc1(self) -> None:
        p = self.problem
        self.x, self.w1 = self._rows(p.in_features), self._weights(p.w1_rows, p.in_features, p.in_features)
        self.act = self._out(p.rows, p.intermediate)

    def _make_glu(self) -> None:
        p = self.problem
        self._make_fc1()
        self.results = (self.act,)
        if p.save_preact:
            self.preact = self._out(p.rows, p.w1_rows)
            self.w2 = self.w1.new_empty(1, p.in_features, p.intermediate)  # where FC2 is not asked for, of any size
            self.y = self.x
            self.results = (self.act, self.preact)
        if goes_on(p):
            self.w2 = self._weights(p.out_features, p.intermediate, p.intermediate)
            self.y = self._out(p.rows, p.out_features)
            self.results = (self.act, self.preact, self.y)

    def _make_mlp(self) -> None:
        p = self.problem
        self._make_fc1()
        self.w2 = self._weights(p.out_features, p.intermediate, p.intermediate)
        self.y = self._out(p.rows, p.out_features)
        self.results = (self.y,)

    def _make_dglu(self) -> None:
        p = self.problem
        width = p.out_features if goes_on(p) else p.in_features
        self.dy, self.preact = self._rows(p.in_features), self._rows(p.w1_rows)
        self.w2 = self._weights(p.in_features, p.intermediate, p.in_features)
        self.w1 = self._weights(p.w1_rows, width, p.w1_rows) if goes_on(p) else self.w2.new_empty(1, p.w1_rows, width)
        self.dpreact, self.act = self._out(p.rows, p.w1_rows), self._out(p.rows, p.intermediate)
        self.dx = self._out(p.rows, width)
        self.scale = torch.rand(p.rows, device=self.device, generator=self.generator)
        self.d_scale = self._out(p.rows, dtype=torch.float32)
        self.partials = self._out(*partials_shape(p.rows, p.intermediate), dtype=torch.float32)
        self.results = (self.dpreact, self.act, self.d_scale, *([self.dx] if goes_on(p) else []))

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
        """Arguments of the calls that make one step, up to `num_sms` and `do_launch`, on the first `rows` rows."""
        return list(self._launches(rows, (offs.data_ptr(), INT32_OFFSETS, offs.numel(), self.counters.data_ptr())))

    def _launches(self, t: int, groups: tuple[int, int, int, int]) -> Iterator[Arguments]:
        p = self.problem
        if p.op == "grouped_mm":
            yield (self.x[:t], self.w, self.y[:t], *groups, *ABSENT, 0)
        elif p.op == "grouped_mlp":
            yield (self.x[:t], self.w1, self.w2, self.act[:t], self.y[:t], *groups, *ABSENT, *ABSENT, 0, *PARAMS)
        elif p.op == "grouped_glu" and p.save_preact:
            outputs = (self.act[:t], self.preact[:t], self.w2, self.y[:t])
            yield (self.x[:t], self.w1, *outputs, *groups, *ABSENT, *ABSENT, 0, *PARAMS)
        elif p.op == "grouped_glu":
            yield (self.x[:t], self.w1, self.act[:t], *groups, *ABSENT, 0, *PARAMS)
        elif p.op == "grouped_dglu":
            tensors = (self.dy[:t], self.w2, self.preact[:t], self.dpreact[:t], self.act[:t], self.w1, self.dx[:t])
            addresses = (each.data_ptr() for each in (self.scale, self.d_scale, self.partials))
            yield (*tensors, *groups, 0, 0, *addresses, *PARAMS)
        else:
            for dy, x, dw in self.pairs:
                yield (dy[:t], x[:t], dw, *groups, 0, 0, 0)


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
