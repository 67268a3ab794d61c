"""A GPU played by the CPU: the whole host path runs on CPU tensors, up to functions that interpret their arguments.

`install` makes CPU tensors go to the "kernels". A function takes exactly what the compiled one takes: tensors, bare
addresses, numbers. It checks what TVM-FFI checks, reads group sizes, tables, biases and scales out of memory by
address, and computes with the oracle's formulas in float64. So a wrong order, form, table or address is a wrong result.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.specs import (
    FoldMxfp8Spec,
    GroupedDgluSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    QuantizeMxfp8Spec,
    Spec,
    draws_tickets,
)
from glulam import device, experts, groups, kernels, tickets
from glulam.kernels import Kernel
from glulam.plans import forget_plans

from . import fake_mhc, mxfp8, oracle

SM_COUNT = 132
GROUP_DTYPES = (torch.int32, torch.int32, torch.int64)


def _memory(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """The memory itself, to be written."""
    assert address and address % dtype.itemsize == 0
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def _read(address: int, count: int, dtype: torch.dtype) -> Tensor:
    return _memory(address, count, dtype).clone()


def _check_tensors(spec_dtype: str, tensors: list[Tensor]) -> None:
    """What a compiled function checks of the tensors that it takes."""
    for tensor in tensors:
        if tensor.dtype != getattr(torch, spec_dtype) or tensor.device.type != "cpu":
            raise TypeError("mismatched dtype or device")
        if tensor.data_ptr() % 16 or tensor.stride(-1) != 1 or any(s % 8 for s in tensor.stride()[:-1]):
            raise ValueError("misaligned tensor")
        if any(size % 8 for size in tensor.shape[1:]):
            raise ValueError("dimension is not divisible by 8")


def _check_counters(spec: Spec, address: int) -> None:
    """What kernels that draw tickets are given, if anything: memory of zeros."""
    if draws_tickets(spec) and address:
        assert not _memory(address, tickets.NUM_COUNTERS, torch.int32).any()


def _equal(*sizes: int) -> int:
    if len(set(sizes)) != 1:
        raise ValueError(f"mismatched dimensions {sizes}")
    return sizes[0]


def _ends(address: int, form: int, count: int, rows: int) -> list[int]:
    """Group ends as the kernels read them: clamped to the buffer."""
    values = _read(address, count, GROUP_DTYPES[form]).tolist()
    if form == groups.OFFS_INT32:
        clamped = [min(max(v, 0), rows) for v in values]
        return list(itertools.accumulate(clamped, max))
    return [min(total, rows) for total in itertools.accumulate(min(max(v, 0), rows) for v in values)]


def _weights(w: Tensor, table: int, count: int) -> list[Tensor]:
    if not table:
        assert w.shape[0] == count and w.is_contiguous()
        return list(w)
    assert w.shape[0] == 1
    _, n, k = w.shape
    addresses = [w.data_ptr() + 16 * units for units in _read(table, count, torch.int64).tolist()]
    return [_read(address, n * k, w.dtype).view(n, k) for address in addresses]


def _biases(address: int, table: int, count: int, width: int, dtype: torch.dtype) -> list[Tensor] | None:
    assert not (address and table)
    if table:
        return [_read(a, width, dtype) for a in _read(table, count, torch.int64).tolist()]
    return list(_read(address, count * width, dtype).view(count, width)) if address else None


def _scale(address: int, rows: int) -> Tensor | None:
    return _read(address, rows, torch.float32) if address else None


def _store(out: Tensor, result: Tensor, ends: list[int]) -> None:
    rows = ends[-1] if ends else 0
    out[:rows] = result[:rows].to(out.dtype)


def _mm(spec: GroupedMmSpec) -> Callable[..., None]:
    if spec.operands != "16bit":
        from . import fake_mxfp8  # which is made of what is here

        return fake_mxfp8.mm(spec) if spec.operands == "mxfp8" else fake_mxfp8.decoded_mm(spec)

    def run(x: Tensor, w: Tensor, y: Tensor, at: int, form: int, count: int, tickets: int, table: int, bias: int,
            bias_table: int, scale: int, num_sms: int, do_launch: int) -> None:  # fmt: skip
        _check_tensors(spec.dtype, [x, w, y])
        contracted, width = (1, 2) if spec.transpose_w else (2, 1)
        rows = _equal(x.shape[0], y.shape[0])
        _equal(x.shape[1], w.shape[contracted])
        _equal(y.shape[1], w.shape[width])
        assert num_sms == SM_COUNT
        if do_launch and rows:
            _check_counters(spec, tickets)
            ends = _ends(at, form, count, rows)
            result = oracle.grouped_mm(
                x, _weights(w, table, count), ends, bias=_biases(bias, bias_table, count, y.shape[1], x.dtype),
                bias_scale=_scale(scale, rows), transpose_w=spec.transpose_w,
            )  # fmt: skip
            _store(y, result, ends)

    return run


def _fc1(spec: GroupedGluSpec) -> Callable[..., None]:
    def run(tensors: tuple[Tensor, ...], at: int, form: int, count: int, tickets: int, table: int, bias: int,
            bias_table: int, scale: int, limit: float, alpha: float, offset: float, num_sms: int,
            do_launch: int) -> None:  # fmt: skip
        x, w1, act, *preact = tensors
        _check_tensors(spec.dtype, list(tensors))
        rows = _equal(x.shape[0], act.shape[0])
        _equal(x.shape[1], w1.shape[2])
        _equal(w1.shape[1], act.shape[1] * (2 if spec.gated else 1), *(h.shape[1] for h in preact))
        assert num_sms == SM_COUNT and all(type(p) is float for p in (limit, alpha, offset))
        if do_launch and rows:
            _check_counters(spec, tickets)
            ends = _ends(at, form, count, rows)
            result, h = oracle.grouped_glu(
                x, _weights(w1, table, count), ends, bias=_biases(bias, bias_table, count, w1.shape[1], x.dtype),
                row_scale=_scale(scale, rows), form=(spec.activation, spec.glu_layout), params=(limit, alpha, offset),
            )  # fmt: skip
            _store(act, result, ends)
            for out in preact:
                _store(out, h, ends)

    return run


def _glu(spec: GroupedGluSpec) -> Callable[..., None]:
    """Its functions differ: that of a spec with a preactivation goes on to FC2."""
    if spec.operands == "mxfp8":
        from . import fake_mxfp8

        return fake_mxfp8.glu_preact(spec)
    if spec.save_preact:
        return _glu_preact(spec)
    fc1 = _fc1(spec)
    return lambda x, w1, act, *rest: fc1((x, w1, act), *rest)


def _glu_preact(spec: GroupedGluSpec) -> Callable[..., None]:
    fc1, fc2 = _fc1(spec), _mm(GroupedMmSpec(spec.dtype, False, spec.tile, spec.arch))

    def run(x: Tensor, w1: Tensor, act: Tensor, preact: Tensor, w2: Tensor, y: Tensor, at: int, form: int, count: int,
            tickets: int, w1_table: int, b1: int, b1_table: int, w2_table: int, b2: int, b2_table: int, scale: int,
            limit: float, alpha: float, offset: float, num_sms: int, do_launch: int) -> None:  # fmt: skip
        assert do_launch in (0, 1, 2)
        _check_tensors(spec.dtype, [w2, y])
        _equal(x.shape[0], y.shape[0])
        groups, tail = (at, form, count, tickets), (num_sms, do_launch)
        fc1((x, w1, act, preact), *groups, w1_table, b1, b1_table, scale, limit, alpha, offset, *tail)
        if do_launch > 1:
            fc2(act, w2, y, *groups, w2_table, b2, b2_table, scale, *tail)

    return run


def _mlp(spec: GroupedMlpSpec) -> Callable[..., None]:
    if spec.fc1.operands != "16bit":
        from . import fake_mxfp8

        return fake_mxfp8.mlp(spec)
    fc1, fc2 = _glu(spec.fc1), _mm(spec.fc2)

    def run(x: Tensor, w1: Tensor, w2: Tensor, mid: Tensor, y: Tensor, at: int, form: int, count: int, tickets: int,
            w1_table: int, b1: int, b1_table: int, w2_table: int, b2: int, b2_table: int, scale: int, limit: float,
            alpha: float, offset: float, num_sms: int, do_launch: int) -> None:  # fmt: skip
        tail = (num_sms, do_launch)
        fc1(x, w1, mid, at, form, count, tickets, w1_table, b1, b1_table, scale, limit, alpha, offset, *tail)
        fc2(mid, w2, y, at, form, count, tickets, w2_table, b2, b2_table, scale, *tail)

    return run


def _dglu(spec: GroupedDgluSpec) -> Callable[..., None]:
    if spec.operands == "mxfp8":
        from . import fake_mxfp8

        return fake_mxfp8.dglu(spec)
    dgrad = _mm(GroupedMmSpec(spec.dtype, True, spec.dgrad, spec.arch))

    def run(dy: Tensor, w2: Tensor, preact: Tensor, dpreact: Tensor, act: Tensor, w1: Tensor, dx: Tensor, at: int,
            form: int, count: int, tickets: int, w2_table: int, w1_table: int, scale: int, d_scale: int, partials: int,
            limit: float, alpha: float, offset: float, num_sms: int,
            do_launch: int) -> None:  # fmt: skip
        assert do_launch in (0, 1, 2)
        _check_tensors(spec.dtype, [dy, w2, preact, dpreact, act, w1, dx])
        rows = _equal(dy.shape[0], preact.shape[0], dpreact.shape[0], act.shape[0], dx.shape[0])
        width = _equal(w2.shape[2], act.shape[1])
        _equal(dy.shape[1], w2.shape[1])
        _equal(preact.shape[1], dpreact.shape[1], width * (2 if spec.gated else 1))
        assert num_sms == SM_COUNT and all(type(p) is float for p in (limit, alpha, offset))
        if not do_launch or not rows:
            return
        _check_counters(spec, tickets)
        ends = _ends(at, form, count, rows)
        with ThreadPoolExecutor(1) as thread:  # where autograd works although a dispatcher may be below it here
            dh, m, ds = thread.submit(
                oracle.grouped_dglu, dy, _weights(w2, w2_table, count), preact, ends, row_scale=_scale(scale, rows),
                form=(spec.activation, spec.glu_layout), params=(limit, alpha, offset),
            ).result()  # fmt: skip
        _store(dpreact, dh, ends)
        _store(act, m, ends)
        if do_launch > 1:
            dgrad(dpreact, w1, dx, at, form, count, tickets, w1_table, 0, 0, 0, num_sms, 1)
            dx[ends[-1] :] = 0
        _row_sums(spec, ds, ends[-1], width, d_scale, partials)

    return run


def _row_sums(spec: GroupedDgluSpec, ds: Tensor, used: int, width: int, d_scale: int, partials: int) -> None:
    """What a kernel does to the memory for d_row_scale, and writes there."""
    if not d_scale:
        return
    rows = ds.shape[0]
    _memory(partials, -(-width // spec.tile.n) * rows, torch.float32).fill_(torch.nan)
    result = _memory(d_scale, rows, torch.float32)
    result[:used] = ds[:used].float()
    result[used:] = 0


def _wgrad(spec: GroupedWgradSpec) -> Callable[..., None]:
    def run(dy: Tensor, x: Tensor, dw: Tensor, at: int, form: int, count: int, tickets: int, dw_table: int, mask: int,
            accumulate: int, num_sms: int, do_launch: int) -> None:  # fmt: skip
        _check_tensors(spec.dtype, [dy, x])
        _check_tensors(spec.out_dtype, [dw])
        rows = _equal(dy.shape[0], x.shape[0])
        n, k = _equal(dy.shape[1], dw.shape[1]), _equal(x.shape[1], dw.shape[2])
        assert num_sms == SM_COUNT and accumulate in (0, 1)
        if not do_launch or not rows:
            return
        ends = _ends(at, form, count, rows)
        units = _read(dw_table, count, torch.int64).tolist() if dw_table else None
        one = n * k * dw.element_size()
        places = [dw.data_ptr() + (16 * units[e] if units else e * one) for e in range(count)]
        adds = _read(mask, count, torch.bool).tolist() if mask else [bool(accumulate)] * count
        for place, add, result in zip(places, adds, oracle.grouped_wgrad(dy, x, ends), strict=True):
            memory = _memory(place, n * k, dw.dtype).view(n, k)
            memory.copy_(memory + result.to(dw.dtype) if add else result.to(dw.dtype))

    return run


def _quantize(spec: QuantizeMxfp8Spec) -> Callable[..., None]:
    if spec.rounded:
        from . import fake_mxfp8

        return fake_mxfp8.rounding(spec)

    def run(x: Tensor, row_data: int, row_scale: int, col_data: int, col_scale: int, offs: int, count: int, wide: int,
            swizzled: int, do_launch: int) -> None:  # fmt: skip
        _check_tensors(spec.dtype, [x])
        if x.shape[1] % 32:
            raise ValueError("dimension is not divisible by 32")
        if not do_launch or not x.shape[0]:
            return
        assert (bool(row_data), bool(col_data)) == (spec.axis != "col", spec.axis != "row")
        ends = _ends(offs, groups.OFFS_INT32, count, x.shape[0]) if offs else None
        for axis, data, scale in (("row", row_data, row_scale), ("col", col_data, col_scale)):
            if data:
                wanted = mxfp8.quantized(x, axis, 128 if wide else 32, ends, padded=spec.axis != "row")
                mxfp8.store(wanted, _memory(data, x.numel(), torch.uint8), bool(swizzled),
                            lambda size, at=scale: _memory(at, size, torch.uint8))  # fmt: skip

    return run


def _fold(spec: FoldMxfp8Spec) -> Callable[..., None]:
    def run(w: Tensor, data: Tensor, scale: int, do_launch: int) -> None:
        _check_tensors(spec.dtype, [w])
        _check_tensors("float8_e4m3fn", [data])
        assert w.is_contiguous() and data.is_contiguous() and not w.shape[-1] % 32 and not w.shape[-2] % 32
        experts, out = (w[None], data[None]) if spec.axis == "row" else (w.mT, data)
        assert out.shape == experts.shape and w.dim() == (2 if spec.axis == "row" else 3)
        if do_launch:
            scales = _memory(scale, out.shape[:2].numel(), torch.uint8).view(out.shape[:2])
            for expert, its_data, its_scales in zip(experts, out, scales, strict=True):
                values, its_scales[:] = mxfp8.folded_rows(expert.float())
                its_data.view(torch.uint8)[:] = values

    return run


MAKERS: dict[str, Callable[[Any], Callable[..., None]]] = {
    "grouped_mm": _mm,
    "grouped_glu": _glu,
    "grouped_mlp": _mlp,
    "grouped_dglu": _dglu,
    "grouped_wgrad": _wgrad,
    "quantize_mxfp8": _quantize,
    "fold_mxfp8": _fold,
    "mhc": fake_mhc.make,
}


@dataclasses.dataclass
class FakeGpu:
    """What the host path did: specs asked for, in order, and of every call that was not refused arguments and work.

    `work`: the kernels launched, by the short names of their operators; "glu, mm" is one call with two launches.
    """

    specs: list[Spec] = dataclasses.field(default_factory=list)
    launches: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    work: list[str] = dataclasses.field(default_factory=list)
    stream: int = 0
    capturing: bool = False

    def find(self, spec: Spec) -> Kernel:
        self.specs.append(spec)
        function = MAKERS[spec.op](spec)

        def launch(*arguments: Any) -> None:
            if spec.op != "mhc":
                function(*arguments[:-1], 0)  # checks all arguments first, as a compiled function does
            self.launches.append(arguments)
            self.work.append(spec.op.removeprefix("grouped_") + (", mm" if arguments[-1] == 2 else ""))
            function(*arguments)

        return Kernel(launch, "shipped")


def install(patch: pytest.MonkeyPatch) -> FakeGpu:
    """Until `patch` is undone, CPU tensors are on a GPU. Host splits are then indistinguishable from device ones."""
    fake = FakeGpu()
    patch.setattr(device, "KERNEL_DEVICE", "cpu")
    patch.setattr(device, "gpu", lambda index: device.Gpu("fake", "sm_90a", SM_COUNT))
    patch.setattr(device, "is_only_one", lambda: True)
    patch.setattr(device, "raw_stream", lambda index: fake.stream)
    patch.setattr(device, "is_capturing", lambda: fake.capturing)
    patch.setattr(kernels, "find", fake.find)
    patch.setattr(experts, "_tables", {})
    patch.setattr(experts, "_kept_for_graphs", {})
    forget_plans()
    return fake
