"""A fake GPU on the CPU: the whole host path runs on CPU tensors, and Python functions take the place of kernels.

`install` sends CPU tensors to these functions. Each takes exactly the arguments of the compiled function: tensors,
addresses and numbers, bound to names by its signature. It makes TVM-FFI's checks, reads group sizes, tables, biases and
scales from memory by address, and computes with the oracle's formulas in float64. So a wrong order, type, table or
address gives a wrong result. A chain runs the same stages as the compiled chain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.arguments import DIVISOR, FLOAT32, TENSOR, Argument, Signature
from cute_kernels.chains import chain_of, signature_of
from cute_kernels.signatures import PARAMS
from cute_kernels.specs import (
    ACTIVATION_FORMS,
    ACTIVATIONS,
    DECODED,
    GATED,
    GLU_LAYOUTS,
    LAYOUT_FORMS,
    BackwardCleanupSpec,
    DgluSpec,
    FoldMxfp8Spec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    LayerSpec,
    MhcSpec,
    QuantizeFp8BlockSpec,
    QuantizeMxfp4Spec,
    QuantizeMxfp8Spec,
    Spec,
)
from cute_kernels.stages import draws_tickets
from glulam.choose import kernels
from glulam.choose.kernels import Kernel
from glulam.formats.mxfp4.codec import encoded
from glulam.host import device, experts, groups, tickets
from glulam.host.plans import forget_plans

from . import fake_fp8_block, fake_layer, fake_mhc, fake_mxfp8, fake_nvfp4, mxfp8, oracle
from .memory import memory, optional, read
from .steps import taken

SM_COUNT = 132
GROUP_DTYPES = (torch.int32, torch.int32, torch.int64)


def _ends(address: int, form: int, count: int, rows: int) -> list[int]:
    """Return group ends as kernels read them: clamped to the number of rows."""
    is_offs = form <= groups.OFFS_INT32
    values = read(address, count, dtype=torch.int32 if is_offs else GROUP_DTYPES[form]).tolist()
    if is_offs:
        clamped = [min(max(v, 0), rows) for v in values]
        return list(itertools.accumulate(clamped, max))
    return [min(total, rows) for total in itertools.accumulate(min(max(v, 0), rows) for v in values)]


def _weights(w: Tensor, table: int, count: int) -> list[Tensor]:
    if not table:
        assert w.shape[0] == count
        return list(w)
    assert w.shape[0] == 1
    _, n, k = w.shape
    addresses = [w.data_ptr() + 16 * units for units in read(table, count, dtype=torch.int64).tolist()]
    return [read(address, n, k, dtype=w.dtype) for address in addresses]


def _biases(address: int, table: int, count: int, width: int, dtype: torch.dtype) -> list[Tensor] | None:
    assert not (address and table)
    if table:
        return [read(a, width, dtype=dtype) for a in read(table, count, dtype=torch.int64).tolist()]
    return list(read(address, count, width, dtype=dtype)) if address else None


def _scale(address: int, rows: int) -> Tensor | None:
    return optional(address, rows, dtype=torch.float32)


def _store(out: Tensor, result: Tensor, ends: list[int]) -> None:
    rows = ends[-1] if ends else 0
    out[:rows] = result[:rows].to(out.dtype)


def bound(signature: Signature, values: tuple[Any, ...]) -> dict[str, Any]:
    """Return arguments by name. Raises TypeError for a wrong number of arguments or a wrong type."""
    if len(values) != len(signature.arguments):
        raise TypeError(f"takes {len(signature.arguments)} arguments, got {len(values)}")
    for argument, value in zip(signature.arguments, values, strict=True):
        kind = Tensor if argument.kind == TENSOR else float if argument.kind == FLOAT32 else int
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{argument.name} is a {type(value).__name__}, no {argument.kind}")
    return dict(zip(signature.names, values, strict=True))


def _check_tensor(argument: Argument, tensor: Tensor) -> None:
    if tensor.dtype != getattr(torch, argument.dtype) or tensor.device.type != "cpu":
        raise TypeError(f"mismatched dtype or device of {argument.name}")
    *outer, last = tensor.stride()
    if tensor.data_ptr() % 16 or last != 1 or any(s * tensor.itemsize % 16 for s in outer):
        raise ValueError(f"misaligned tensor {argument.name}")
    if (argument.packed or len(argument.shape) == 3) and not tensor.is_contiguous():
        raise ValueError(f"{argument.name} has padded rows")


def _check_arguments(signature: Signature, named: dict[str, Any]) -> None:
    """Make the checks of a compiled stage.

    They are dtypes, strides, divisibility, and that dimensions with equal names have equal sizes.
    """
    divisors, sizes = dict(signature.divisors), {}
    for argument in signature.arguments:
        if argument.kind == TENSOR:
            tensor = named[argument.name]
            _check_tensor(argument, tensor)
            for name, size in zip(argument.shape, tensor.shape, strict=True):
                if size % divisors.get(name, 1 if name in "TRE" else DIVISOR):
                    raise ValueError(f"dimension {name} of {argument.name} is not divisible")
                if name != "E" and sizes.setdefault(name, size) != size:
                    raise ValueError(f"mismatched dimension {name} of {argument.name}")
    assert named.get("num_sms", SM_COUNT) == SM_COUNT


def exported(spec: Spec, check_only: bool = False) -> Callable[..., None]:
    """Return the fake of a spec's exported function. `check_only`: it checks arguments, but computes nothing."""
    signature, chain = signature_of(spec), chain_of(spec)

    def stage(*values: Any) -> None:
        named = bound(signature, values)
        _check_arguments(signature, named)
        first = next((named[a.name] for a in signature.arguments if a.kind == TENSOR), None)
        if not check_only and (first is None or first.shape[0]):
            _STAGES[type(spec)](spec, SimpleNamespace(**named))

    def run(*values: Any) -> None:
        named = bound(signature, values)
        _check_sums(named)
        steps = [step for step in (chain.steps if chain else ()) if not step.when or named[step.when]]
        for position, step in enumerate(steps):
            exported(step.stage, check_only)(*signature_of(step.stage).pack(**taken(step, named, position)))

    return run if chain else stage


def _check_sums(named: dict[str, Any]) -> None:
    """Raise ValueError if a result by token is given without the row of each choice."""
    for name in ("out", "dx_tokens"):
        if named.get(name) and "row_of" in named and not (named["row_of"] and named["tokens"] and named["k"]):
            raise ValueError(f"{name} is given, and no tokens")


def _sizes(spec: Spec, c: Any, rows: int) -> list[int]:
    """Return group ends. If kernels draw tickets, also check that their counters are zeros."""
    if draws_tickets(spec) and c.tickets:
        assert not memory(c.tickets, tickets.NUM_COUNTERS, dtype=torch.int32).any()
    return _ends(c.groups, c.group_form, c.num_groups, rows)


FP8_ROWS: dict[str, Any] = {
    "mxfp8": fake_mxfp8.Rows, "mxfp4": fake_mxfp8.Rows, "fp8_block": fake_fp8_block.Rows,
}  # fmt: skip
"""Readers of rows, by operands whose rows are in FP8."""


def _weights_of(spec: Spec, c: Any, layout: str = "") -> list[Tensor]:
    """Return the values of a launch's weights, one tensor for each expert.

    layout: the gate layout of a gated w1; "" for other weights.
    """
    if spec.operands == "16bit":
        weights = _weights(c.w, c.w_table, c.num_groups)
        return _with_low(spec, c, weights) if spec.adapted else weights
    if spec.operands == "nvfp4_weight_only":
        return fake_nvfp4.words(c)
    if spec.operands.startswith("fp8_block"):
        return fake_fp8_block.weights(c, layout, is_decoded=spec.operands in DECODED)
    if spec.operands == "mxfp4":
        return fake_mxfp8.rebased(c)
    readers = {"mxfp8": fake_mxfp8.folded, "mxfp4_weight_only": fake_mxfp8.words}
    return readers.get(spec.operands, fake_mxfp8.blocked)(c.w, c.w_scale)


def _rows_of(spec: Spec, c: Any, count: int, used: int) -> Tensor:
    rows, by_index = c.x, getattr(c, "rows", 0)
    if spec.operands in FP8_ROWS:
        rows = FP8_ROWS[spec.operands](c.x, c.x_scale).read(len(c.x) if by_index else used)
    if spec.operands == "mxfp8_exact":
        fake_mxfp8.check_rounded(c.x[:used])
    rows = _taken(rows, by_index, count, used) if by_index else rows
    return torch.cat((rows, c.low), dim=1) if getattr(spec, "adapted", False) else rows


def _with_low(spec: Spec, c: Any, weights: list[Tensor]) -> list[Tensor]:
    """Return weights with low_w appended along the contraction, for kernels that also contract the adapter's `low`."""
    assert c.low_w % 16 == 0 and c.low.shape[1] % 8 == 0
    contracts_rows = spec.transpose_w != isinstance(spec, DgluSpec)
    width, rank = weights[0].shape[1 if contracts_rows else 0], c.low.shape[1]
    shape = (rank, width) if contracts_rows else (width, rank)
    low_w = read(c.low_w, c.num_groups, *shape, dtype=c.low.dtype)
    return [torch.cat(pair, dim=0 if contracts_rows else 1) for pair in zip(weights, low_w, strict=True)]


def _taken(x: Tensor, at: int, count: int, used: int) -> Tensor:
    """Return x[rows] for `count` int32 indices at address `at`.

    Rows from `used` on are NaN, since they must not be read.
    """
    rows = x[read(at, count, dtype=torch.int32).clamp(0, len(x) - 1).long()]
    rows[used:] = torch.nan
    return rows


def _with_up(c: Any) -> list[Tensor]:
    """Return packed weights [E, 2I, H] joined from the gate's half and the up-projection's half at another address."""
    assert c.w_up % 16 == 0 and not getattr(c, "w_table", 0) and len(c.w) == c.num_groups
    return list(torch.cat((c.w, read(c.w_up, *c.w.shape, dtype=c.w.dtype)), dim=1))


def _mm(spec: GroupedMmSpec, c: Any) -> None:
    rows = c.y.shape[0]
    ends = _sizes(spec, c, rows)
    if spec.in_halves:
        assert c.x.shape[1] == 2 * c.w.shape[1]
        _store(c.y, oracle.grouped_mm(c.x, _with_up(c), ends, transpose_w=True), ends)
        return
    result = oracle.grouped_mm(
        _rows_of(spec, c, rows, ends[-1]), _weights_of(spec, c), ends,
        bias=_biases(c.bias, c.bias_table, c.num_groups, c.y.shape[1], c.y.dtype),
        bias_scale=_scale(c.scale, rows), transpose_w=spec.transpose_w,
    )  # fmt: skip
    _store(c.y, result, ends)


def _params_of(activation: str, c: Any) -> oracle.Params:
    return oracle.params_of(activation, [getattr(c, argument.name) for argument in PARAMS])


def _glu(spec: GroupedGluSpec, c: Any) -> None:
    rows = c.act.shape[0]
    ends = _sizes(spec, c, rows)
    form = ACTIVATIONS[c.kind], GLU_LAYOUTS[c.glu_layout]
    assert form[0] in ACTIVATION_FORMS[spec.activation] and form[1] in LAYOUT_FORMS[spec.glu_layout]
    assert spec.glu_layout != "blocked" or c.act.shape[1] % 32 == 0
    is_apart = bool(getattr(c, "w_up", 0))
    assert not is_apart or (form[1] == "concat" and c.act.shape[1] == c.w.shape[1] and not spec.transpose_w)
    both = c.w.shape[1 + spec.transpose_w] * (1 + is_apart)
    layout = form[1] if form[0] in GATED else ""
    act, h = oracle.grouped_glu(
        _rows_of(spec, c, rows, ends[-1]), _with_up(c) if is_apart else _weights_of(spec, c, layout), ends,
        bias=_biases(c.bias, c.bias_table, c.num_groups, both, getattr(torch, spec.dtype)),
        row_scale=_scale(c.scale, rows), form=form, params=_params_of(form[0], c), transpose_w=spec.transpose_w,
    )  # fmt: skip
    if spec.save_preact:
        _store(c.preact, h, ends)
    if spec.operands in FP8_ROWS:
        mid = FP8_ROWS[spec.operands](c.act, c.act_scale)
        mid.poison()
        mid.write(act, ends[-1])
    else:
        _store(c.act, fake_mxfp8.rounded_rows(act) if spec.operands == "mxfp8_exact" else act, ends)


def _dglu(spec: DgluSpec, c: Any) -> None:
    """Compute a grouped_dglu. d_row_scale is left as partial sums: the first is the whole sum, the others are zeros."""
    rows, width = c.act.shape
    ends = _sizes(spec, c, rows)
    weights = _weights_of(spec, c)
    if spec.operands == "mxfp8" or spec.transpose_w:
        weights = [one.mT for one in weights]
    with ThreadPoolExecutor(1) as thread:  # where autograd works although a dispatcher may be below it here
        dh, m, ds = thread.submit(
            oracle.grouped_dglu, _rows_of(spec, c, rows, ends[-1]), weights, c.preact, ends,
            row_scale=_scale(c.scale, rows), form=(spec.activation, spec.glu_layout),
            params=_params_of(spec.activation, c),
        ).result()  # fmt: skip
    _store(c.dpreact, dh, ends)
    _store(c.act, m, ends)
    if c.partials:
        parts = memory(c.partials, -(-width // spec.tile.n), rows, dtype=torch.float32)
        parts.fill_(torch.nan)
        parts[:, : ends[-1]] = 0
        parts[0, : ends[-1]] = ds[: ends[-1]].float()


def _tail(spec: BackwardCleanupSpec, c: Any) -> None:
    rows, width = c.act.shape
    used = _ends(c.groups, c.group_form, c.num_groups, rows)[-1]
    if c.dx and not c.dx_tokens:
        for row in range(used, rows):
            memory(c.dx + row * c.dx_pitch * 2, c.dx_columns, dtype=getattr(torch, spec.dtype)).zero_()
    if c.d_scale:
        parts = read(c.partials, -(-width // c.part_columns), rows, dtype=torch.float32)
        result = memory(c.d_scale, rows, dtype=torch.float32)
        result[:used] = parts[:, :used].sum(0)
        result[used:] = 0


def _wgrad(spec: GroupedWgradSpec, c: Any) -> None:
    assert c.accumulate in (0, 1)
    n, k = c.dy.shape[1], c.x.shape[1]
    rows = c.x.shape[0] if c.dy_rows else c.dy.shape[0]
    ends = _ends(c.groups, c.group_form, c.num_groups, rows)
    dy = _taken(c.dy, c.dy_rows, rows, ends[-1]) if c.dy_rows else c.dy
    x = _taken(c.x, c.x_rows, rows, ends[-1]) if c.x_rows else c.x
    assert not (c.dy_rows and c.x_rows)
    units = read(c.dw_table, c.num_groups, dtype=torch.int64).tolist() if c.dw_table else None
    one = n * k * c.dw.element_size()
    places = [c.dw.data_ptr() + (16 * units[e] if units else e * one) for e in range(c.num_groups)]
    adds = read(c.mask, c.num_groups, dtype=torch.bool).tolist() if c.mask else [bool(c.accumulate)] * c.num_groups
    for place, add, result in zip(places, adds, oracle.grouped_wgrad(dy, x, ends), strict=True):
        made = memory(place, n, k, dtype=c.dw.dtype)
        made.copy_(made + result.to(c.dw.dtype) if add else result.to(c.dw.dtype))


def _quantize(spec: QuantizeMxfp8Spec, c: Any) -> None:
    ends = _ends(c.offs, groups.OFFS_INT32, c.num_groups, c.x.shape[0]) if c.offs else None
    if spec.rounded:
        used = ends[-1] if ends else c.x.shape[0]
        c.out.fill_(torch.nan)
        c.out[:used] = fake_mxfp8.rounded_rows(c.x[:used]).to(c.out.dtype)
        return
    assert (bool(c.row_data), bool(c.col_data)) == (spec.axis != "col", spec.axis != "row")
    for axis, data, scale in (("row", c.row_data, c.row_scale), ("col", c.col_data, c.col_scale)):
        if data:
            wanted = mxfp8.quantized(c.x, axis, 128 if c.wide else 32, ends, padded=spec.axis != "row")
            mxfp8.store(wanted, memory(data, c.x.numel(), dtype=torch.uint8), bool(c.swizzled),
                        lambda size, at=scale: memory(at, size, dtype=torch.uint8))  # fmt: skip


def _fold(spec: FoldMxfp8Spec, c: Any) -> None:
    experts, out = (c.w[None], c.data[None]) if spec.axis == "row" else (c.w.mT, c.data)
    scales = memory(c.scale, *out.shape[:2], dtype=torch.uint8)
    data, of_rows = mxfp8.folded_rows(experts.float().flatten(0, 1))
    out.view(torch.uint8)[:], scales[:] = data.view(out.shape), of_rows.view(scales.shape)


def _quantize4(spec: QuantizeMxfp4Spec, c: Any) -> None:
    data, scale = encoded(c.w)
    c.data.copy_(data)
    memory(c.scale, scale.numel(), dtype=torch.uint8).copy_(scale.flatten())


_STAGES: dict[type, Callable[[Any, Any], None]] = {
    GroupedMmSpec: _mm,
    GroupedGluSpec: _glu,
    DgluSpec: _dglu,
    BackwardCleanupSpec: _tail,
    GroupedWgradSpec: _wgrad,
    QuantizeMxfp8Spec: _quantize,
    QuantizeFp8BlockSpec: lambda spec, c: fake_fp8_block.quantize(c),
    FoldMxfp8Spec: _fold,
    QuantizeMxfp4Spec: _quantize4,
    MhcSpec: fake_mhc.run,
    LayerSpec: fake_layer.run,
}


def _work(spec: Spec) -> str:
    """Return the kernels of a call as the short names of their operators."""
    if isinstance(spec, GroupedMlpSpec) and spec.fc1.save_preact:
        return "glu, mm"
    return spec.op.removeprefix("grouped_") + (", mm" if getattr(spec, "dgrad", None) else "")


@dataclasses.dataclass
class FakeGpu:
    """Record of the host path's work.

    Attributes:
        specs: the requested specs, in order.
        launches: for each accepted call, its arguments by name.
        work: for each accepted call, the short names of its kernels' operators; "glu, mm" is one call with two
            launches.
    """

    specs: list[Spec] = dataclasses.field(default_factory=list)
    launches: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    work: list[str] = dataclasses.field(default_factory=list)
    stream: int = 0
    capturing: bool = False

    def find(self, spec: Spec) -> Kernel:
        self.specs.append(spec)
        check, run = exported(spec, check_only=True), exported(spec)

        def launch(*arguments: Any) -> None:
            check(*arguments)  # all arguments first, as a compiled function does
            self.launches.append(bound(signature_of(spec), arguments))
            self.work.append(_work(spec))
            with torch.device("cpu"):  # whatever the caller's default is
                run(*arguments)

        return Kernel(launch, "shipped")


@contextlib.contextmanager
def reference() -> Iterator[None]:
    """Context in which CPU tensors go to the CPU reference instead of an installed fake GPU."""
    forget_plans()
    device.KERNEL_DEVICE = "cuda"
    try:
        yield
    finally:
        device.KERNEL_DEVICE = "cpu"
        forget_plans()


def install(patch: pytest.MonkeyPatch) -> FakeGpu:
    """Send CPU tensors to a fake GPU until `patch` is undone.

    Group sizes on the host then look like group sizes on the device.
    """
    fake = FakeGpu()
    of_gpus = device.cuda_index
    patch.setattr(device, "KERNEL_DEVICE", "cpu")
    patch.setattr(device, "cuda_index", lambda op, where: 0 if where == torch.device("cpu") else of_gpus(op, where))
    patch.setattr(device, "gpu", lambda index: device.Gpu("fake", "sm_90a", SM_COUNT))
    patch.setattr(device, "has_single_gpu", lambda: True)
    patch.setattr(device, "raw_stream", lambda index: fake.stream)
    patch.setattr(device, "is_capturing", lambda: fake.capturing)
    patch.setattr(kernels, "find", fake.find)
    patch.setattr(experts, "_tables", {})
    patch.setattr(experts, "_kept_for_graphs", {})
    forget_plans()
    return fake
