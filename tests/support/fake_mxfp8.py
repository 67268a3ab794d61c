"""The kernels of recipes that quantise, played by the CPU: what they take, by address and by tensor, and what they do.

They go through the memory that they are given for x and the activation in MXFP8, so that two of these in one place, or
one too small, is a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_kernels.specs import GroupedDgluSpec, GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, QuantizeMxfp8Spec

from . import mxfp8, oracle
from .fake_gpu import (
    SM_COUNT,
    _biases,
    _check_counters,
    _check_tensors,
    _ends,
    _equal,
    _memory,
    _read,
    _row_sums,
    _scale,
    _store,
)
from .mxfp8_mlp import values

E4M3 = "float8_e4m3fn"
NAN_BYTE = 0x7F


def _check_fp8(*tensors: Tensor) -> None:
    _check_tensors(E4M3, list(tensors))
    if any(size % 32 for tensor in tensors for size in tensor.shape[-1:]):
        raise ValueError("dimension is not divisible by 32")
    if any(stride % 16 for tensor in tensors for stride in tensor.stride()[:-1]):
        raise ValueError("misaligned tensor")


class Rows:
    """A matrix in MXFP8 by rows: elements [T, C], and plain scales at an address."""

    def __init__(self, data: Tensor, scale: int) -> None:
        rows, columns = data.shape
        self.data, self.scales = data, _memory(scale, rows * columns // 32, torch.uint8).view(rows, columns // 32)

    def poison(self) -> None:
        self.data.view(torch.uint8).fill_(NAN_BYTE)
        self.scales.fill_(mxfp8.NAN_SCALE)

    def write(self, x: Tensor, rows: int) -> None:
        data, scales = mxfp8.quantized_rows(x[:rows].float(), 128)
        self.data.view(torch.uint8)[:rows], self.scales[:rows] = data, scales

    def read(self, rows: int) -> Tensor:
        """Values, zeros behind `rows`. Kernels read the first of four scales, so all four must be equal."""
        for first in range(0, self.scales.shape[1], 4):
            four = self.scales[:rows, first : first + 4]
            assert bool((four == four[:, :1]).all()), "scales of 128 elements differ"
        result = torch.zeros(self.data.shape, dtype=torch.float64)
        result[:rows] = values(self.data[:rows], self.scales[:rows])
        return result


def _folded(w: Tensor, scale: int) -> list[Tensor]:
    experts, rows, columns = w.shape
    scales = _read(scale, experts * rows, torch.uint8).view(experts, rows, 1)
    return list(values(w, scales.expand(-1, -1, columns // 32).contiguous()))


def _blocked(w: Tensor, scale: int) -> list[Tensor]:
    experts, rows, columns = w.shape
    return list(values(w, _read(scale, w.numel() // 32, torch.uint8).view(experts, rows, columns // 32)))


def mlp(spec: GroupedMlpSpec) -> Callable[..., None]:
    return _quantised(spec) if spec.fc1.operands == "mxfp8" else _weights_alone(spec)


def _check_mlp(glu: GroupedGluSpec, x: Tensor, w1: Tensor, w2: Tensor, y: Tensor, count: int, num_sms: int) -> None:
    _check_tensors(glu.dtype, [x, y])
    _check_fp8(w1, w2)
    assert w1.is_contiguous() and w2.is_contiguous() and num_sms == SM_COUNT
    _equal(x.shape[0], y.shape[0])
    _equal(w2.shape[1], y.shape[1])
    _equal(w1.shape[1], w2.shape[2] * (2 if glu.gated else 1))


def mm(spec: GroupedMmSpec) -> Callable[..., None]:
    def run(x: Tensor, w: Tensor, y: Tensor, at: int, form: int, count: int, tickets: int, x_scale: int, w_scale: int,
            bias: int, bias_table: int, scale: int, num_sms: int, do_launch: int) -> None:  # fmt: skip
        _check_tensors(spec.dtype, [y])
        _check_fp8(x, w)
        rows = _equal(x.shape[0], y.shape[0])
        _equal(x.shape[1], w.shape[2])
        _equal(y.shape[1], w.shape[1])
        assert w.is_contiguous() and num_sms == SM_COUNT
        if do_launch and rows:
            _check_counters(spec, tickets)
            ends = _ends(at, form, count, rows)
            result = oracle.grouped_mm(
                Rows(x, x_scale).read(ends[-1]), _folded(w, w_scale), ends,
                bias=_biases(bias, bias_table, count, y.shape[1], y.dtype), bias_scale=_scale(scale, rows),
            )  # fmt: skip
            _store(y, result, ends)

    return run


def decoded_mm(spec: GroupedMmSpec) -> Callable[..., None]:
    def run(x: Tensor, w: Tensor, y: Tensor, at: int, form: int, count: int, tickets: int, w_scale: int, bias: int,
            bias_table: int, scale: int, num_sms: int, do_launch: int) -> None:  # fmt: skip
        _check_tensors(spec.dtype, [x, y])
        _check_fp8(w)
        rows = _equal(x.shape[0], y.shape[0])
        _equal(x.shape[1], w.shape[2])
        _equal(y.shape[1], w.shape[1])
        if do_launch and rows:
            ends = _ends(at, form, count, rows)
            result = oracle.grouped_mm(
                x, _blocked(w, w_scale), ends, bias=_biases(bias, bias_table, count, y.shape[1], y.dtype),
                bias_scale=_scale(scale, rows),
            )  # fmt: skip
            _store(y, result, ends)

    return run


def glu_preact(spec: GroupedGluSpec) -> Callable[..., None]:
    """Quantises x, and goes on to FC2, as that of a grouped_mlp; and keeps h."""
    assert spec.save_preact
    fc = _mlp(spec)

    def run(x: Tensor, w1: Tensor, w2: Tensor, x8: Tensor, mid8: Tensor, preact: Tensor, *rest: Any) -> None:
        _check_tensors(spec.dtype, [preact])
        _equal(preact.shape[1], w1.shape[1])
        _equal(preact.shape[0], x.shape[0])
        fc(x, w1, w2, x8, mid8, *rest, preact=preact)

    return run


def dglu(spec: GroupedDgluSpec) -> Callable[..., None]:
    dgrad = mm(GroupedMmSpec(spec.dtype, False, spec.dgrad, spec.arch, spec.operands))

    def run(dy: Tensor, w2: Tensor, preact: Tensor, dpreact: Tensor, act: Tensor, w1: Tensor, dx: Tensor, dy8: Tensor,
            dpreact8: Tensor, at: int, form: int, count: int, tickets: int, dy_scale: int, dpreact_scale: int,
            w2_scale: int, w1_scale: int, scale: int, d_scale: int, partials: int, limit: float, alpha: float,
            offset: float, num_sms: int, do_launch: int) -> None:  # fmt: skip
        assert do_launch in (0, 1, 2)
        _check_tensors(spec.dtype, [dy, preact, dpreact, act, dx])
        _check_fp8(w2, w1, dy8, dpreact8)
        rows = _equal(*(t.shape[0] for t in (dy, preact, dpreact, act, dx, dy8, dpreact8)))
        width = _equal(w2.shape[1], act.shape[1])
        _equal(dy.shape[1], w2.shape[2], dy8.shape[1])
        _equal(preact.shape[1], dpreact.shape[1], dpreact8.shape[1], w1.shape[2], width * (2 if spec.gated else 1))
        assert w1.is_contiguous() and w2.is_contiguous() and num_sms == SM_COUNT
        if not do_launch or not rows:
            return
        _check_counters(spec, tickets)
        ends, params = _ends(at, form, count, rows), (limit, alpha, offset)
        used, grad = ends[-1], Rows(dy8, dy_scale)
        grad.poison()
        grad.write(dy, used)
        dh, m, ds = oracle.grouped_dglu(
            grad.read(used), [one.mT for one in _folded(w2, w2_scale)], preact, ends, row_scale=_scale(scale, rows),
            form=(spec.activation, spec.glu_layout), params=params,
        )  # fmt: skip
        _store(dpreact, dh, ends)
        _store(act, m, ends)
        _row_sums(spec, ds, used, width, d_scale, partials)
        if do_launch > 1:
            again = Rows(dpreact8, dpreact_scale)
            again.poison()
            again.write(dpreact, used)
            dgrad(dpreact8, w1, dx, at, form, count, tickets, dpreact_scale, w1_scale, 0, 0, 0, num_sms, 1)
            dx[used:] = 0

    return run


def _quantised(spec: GroupedMlpSpec) -> Callable[..., None]:
    return _mlp(spec.fc1)


def _mlp(glu: GroupedGluSpec) -> Callable[..., None]:
    def run(x: Tensor, w1: Tensor, w2: Tensor, x8: Tensor, mid8: Tensor, y: Tensor, at: int, form: int, count: int,
            tickets: int, x_scale: int, mid_scale: int, w1_scale: int, b1: int, b1_table: int, w2_scale: int, b2: int,
            b2_table: int, scale: int, limit: float, alpha: float, offset: float, num_sms: int, do_launch: int,
            preact: Tensor | None = None) -> None:  # fmt: skip
        assert do_launch in (0, 1, 2)
        _check_mlp(glu, x, w1, w2, y, count, num_sms)
        _check_fp8(x8, mid8)
        rows = _equal(x8.shape[0], mid8.shape[0], x.shape[0])
        _equal(x8.shape[1], w1.shape[2], *(x.shape[1:] if do_launch == 1 else ()))
        _equal(mid8.shape[1], w2.shape[2])
        if not do_launch or not rows:
            return
        _check_counters(glu, tickets)
        ends, params = _ends(at, form, count, rows), (limit, alpha, offset)
        xq, mid, used = Rows(x8, x_scale), Rows(mid8, mid_scale), ends[-1]
        if do_launch == 1:
            xq.poison()
            xq.write(x, used)
        mid.poison()
        act, h = oracle.grouped_glu(
            xq.read(used), _folded(w1, w1_scale), ends,
            bias=_biases(b1, b1_table, count, w1.shape[1], x.dtype), row_scale=_scale(scale, rows),
            form=(glu.activation, glu.glu_layout), params=params,
        )  # fmt: skip
        if preact is not None:
            _store(preact, h, ends)
        mid.write(act, used)
        y2 = oracle.grouped_mm(
            mid.read(used), _folded(w2, w2_scale), ends, bias=_biases(b2, b2_table, count, y.shape[1], x.dtype),
            bias_scale=_scale(scale, rows),
        )  # fmt: skip
        _store(y, y2, ends)

    return run


def _weights_alone(spec: GroupedMlpSpec) -> Callable[..., None]:
    is_exact = spec.fc1.operands == "mxfp8_exact"

    def run(x: Tensor, w1: Tensor, w2: Tensor, mid: Tensor, y: Tensor, at: int, form: int, count: int, tickets: int,
            w1_scale: int, b1: int, b1_table: int, w2_scale: int, b2: int, b2_table: int, scale: int, limit: float,
            alpha: float, offset: float, num_sms: int, do_launch: int) -> None:  # fmt: skip
        assert do_launch in (0, 1)
        _check_mlp(spec.fc1, x, w1, w2, y, count, num_sms)
        _check_tensors(spec.dtype, [mid])
        rows = _equal(x.shape[0], mid.shape[0])
        _equal(x.shape[1], w1.shape[2])
        _equal(mid.shape[1], w2.shape[2])
        if not do_launch or not rows:
            return
        ends, params = _ends(at, form, count, rows), (limit, alpha, offset)
        mid.fill_(torch.nan)
        if is_exact:
            used = x[: ends[-1]]
            assert torch.equal(rounded_rows(used).to(x.dtype), used), "x holds other values than MXFP8's"
        act, _ = oracle.grouped_glu(
            x, _blocked(w1, w1_scale), ends, bias=_biases(b1, b1_table, count, w1.shape[1], x.dtype),
            row_scale=_scale(scale, rows), form=(spec.fc1.activation, spec.fc1.glu_layout), params=params,
        )  # fmt: skip
        _store(mid, rounded_rows(act) if is_exact else act, ends)
        y2 = oracle.grouped_mm(
            mid, _blocked(w2, w2_scale), ends, bias=_biases(b2, b2_table, count, y.shape[1], x.dtype),
            bias_scale=_scale(scale, rows),
        )  # fmt: skip
        _store(y, y2, ends)

    return run


def rounded_rows(x: Tensor) -> Tensor:
    return values(*mxfp8.quantized_rows(x.float(), 32))


def rounding(spec: QuantizeMxfp8Spec) -> Callable[..., None]:
    def run(x: Tensor, out: Tensor, offs: int, count: int, do_launch: int) -> None:
        _check_tensors(spec.dtype, [x, out])
        rows = _equal(x.shape[0], out.shape[0])
        _equal(x.shape[1], out.shape[1])
        if do_launch and rows:
            used = _ends(offs, 0, count, rows)[-1] if offs else rows
            out.fill_(torch.nan)
            out[:used] = rounded_rows(x[:used]).to(out.dtype)

    return run
