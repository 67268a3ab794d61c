"""Trials of the grouped GEMMs: every activation and layout that a function serves, every routing, odd sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_kernels.formats import DENSE, OPERANDS
from cute_kernels.specs import (
    ACTIVATION_FORMS,
    BLOCK_ROWS,
    LAYOUT_FORMS,
    FoldMxfp8Spec,
    GroupedDgluSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    is_gated,
)

from ..formats.mxfp8 import quantize_mxfp8
from ..host.experts import GateUp
from ..ops.adapted import adapted_dglu, adapted_glu, adapted_mm
from ..ops.grouped_dglu import grouped_dglu
from ..ops.grouped_glu import grouped_glu
from ..ops.grouped_mlp import grouped_mlp
from ..ops.grouped_mm import grouped_mm
from ..ops.grouped_wgrad import grouped_wgrad
from ..ops.quantized_weights import FORMS
from ..recipes import BF16, MXFP8, of_weight_gradients
from . import training
from .inputs import UNREACHED, Routing, Size, routings, rows_of, scales_of, spread, total_rows, weights_of
from .trial import Given, Trial, gradients

IN_16_BITS = BF16.operands
ODD = Routing("N = 1504, K = 736", spread(150, 4))
ROUNDED_TWICE = 3e-2
"""Tolerance for kernels that round the activation to FP8: a value halfway between two numbers may become either."""

RANK = 24
"""Rank of adapters in trials."""

Sized = tuple[Routing, int, int]
"""Groups, H and I of a trial."""


def _dtype(spec: Any) -> torch.dtype:
    found: torch.dtype = getattr(torch, spec.dtype)
    return found


def _sizes(size: Size, hidden: int) -> list[Sized]:
    """Return (routing, H, I) for every routing of the trials, and (ODD, 736, 1504) with `size.has_odd`.

    Args:
        size: the sizes of trials.
        hidden: H; with more than 100 experts H = I = 96 instead.
    """
    each = routings(size)
    small = [(96, 96) if len(routing.sizes) > 100 else (hidden, size.inter) for routing in each]
    odd = [(ODD._replace(tail=size.tail), 736, 1504)] if size.has_odd else []
    return [*((routing, *sizes) for routing, sizes in zip(each, small, strict=True)), *odd]


def _replayed(sized: Sized, size: Size) -> Given:
    """Return the group sizes for a graph's replay: those of the second routing, for a trial of the first one.

    Empty for trials of other routings, which are not replayed.
    """
    first, second, *_ = routings(size)
    return {"offs": second.offs} if sized[0] == first else {}


def mm(spec: GroupedMmSpec, size: Size) -> Iterator[Trial]:
    """Yield trials of grouped_mm.

    Weights in formats that grouped_mm does not decode are tried only as part of an MLP, see `mlp`.
    """
    if spec.in_halves:
        yield from _in_halves(spec, size)
        return
    dtype, is_decoded = _dtype(spec), spec.operands != IN_16_BITS
    if is_decoded and (spec.operands not in FORMS or FORMS[spec.operands].kind.weight_only != spec.operands):
        return
    for sized in _sizes(size, size.in_blocks if is_decoded else size.hidden):
        routing, k, n = sized
        total, experts = total_rows(routing), len(routing.sizes)
        if is_decoded and spec.transpose_w:
            k, n = n, k
        w = weights_of(experts, n, k, dtype, seed=2)
        if spec.transpose_w:
            w = w.mT.contiguous()
        given: dict[str, Any] = {
            "x": rows_of(total, k, dtype, routing.rows), "offs": routing.offs, "w": w,
        }  # fmt: skip
        if is_decoded:
            given["w"] = FORMS[spec.operands].quantized_tensor(w)
        given |= _low(spec, routing, n, spec.transpose_w)
        addends = {
            "bias": weights_of(experts, 1, n, dtype, seed=4)[:, 0].contiguous(),
            "bias_scale": scales_of(total, routing.rows),
        }
        for name, more in _ways(given, addends, () if is_decoded else ("w",), routing, routing == routings(size)[0]):
            call = _listed(adapted_mm if spec.adapted else grouped_mm, transpose_w=spec.transpose_w)
            yield Trial(
                f"{routing.name}, {name}", {**given, **more}, call, _ends(routing), True,
                replayed=_replayed(sized, size),
            )  # fmt: skip


def _low(spec: Any, routing: Routing, width: int, contracts_rows: bool) -> Given:
    """Return the arguments low [T, r] and low_w of a GEMM with LoRA adapters of rank r (`ops.adapted`).

    The GEMM adds low @ low_w_e^T. Empty if the spec is not adapted.

    Args:
        spec: the GEMM's spec.
        routing: the groups of rows.
        width: columns of the GEMM's result.
        contracts_rows: True: the GEMM contracts over the weights' rows, so low_w is transposed. False: over columns.
    """
    if not spec.adapted:
        return {}
    dtype, experts = _dtype(spec), len(routing.sizes)
    low_w = weights_of(experts, width, RANK, dtype, seed=10)
    return {
        "low": rows_of(total_rows(routing), RANK, dtype, routing.rows, seed=11),
        "low_w": low_w.mT.contiguous() if contracts_rows else low_w,
    }


def _ends(routing: Routing) -> tuple[int, int]:
    return routing.rows, total_rows(routing)


def _indices(routing: Routing) -> Tensor:
    """Return int32 [T]: random rows, and after the last group indices out of range, which no kernel may read."""
    generator = torch.Generator().manual_seed(9)
    indices = torch.randint(0, routing.rows, (total_rows(routing),), dtype=torch.int32, generator=generator)
    indices[routing.rows :] = 2**30
    return indices


def _ways(
    given: Given, addends: Given, lists: Sequence[str], routing: Routing, is_first: bool
) -> Iterator[tuple[str, Given]]:  # fmt: skip
    """Yield variants of a trial: (description, additional arguments).

    Every routing is tried with all biases and scales. The first routing is also tried without any of them and with a
    bias alone. If experts may be lists, the first routing is tried, too, with rows of x by index and with each expert's
    weights in separate memory.

    Args:
        given: the trial's arguments.
        addends: biases and scales, the bias first.
        lists: arguments that may be lists of experts. Empty: none.
        routing: the trial's routing.
        is_first: True: the routing is tried in all variants.
    """
    yield "with " + ", ".join(addends), addends
    if is_first:
        yield "plain", {}
        bias = next(iter(addends))
        yield f"with {bias}", {bias: addends[bias]}
        if lists:
            yield "by index", {"x": given["x"][: routing.rows], "rows": _indices(routing)}
            yield "lists", {name: list(given[name].unbind()) for name in lists}


def _listed(function: Callable[..., Any], **options: Any) -> Callable[[Given], list[Tensor]]:
    """Wrap `function`, called with a trial's arguments and `options`, so that its results are returned as a list."""

    def call(given: Given) -> list[Tensor]:
        made = function(**given, **options)
        return list(made) if isinstance(made, (tuple, list)) else [made]

    return call


def _in_halves(spec: GroupedMmSpec, size: Size) -> Iterator[Trial]:
    """Yield trials of x's gradient for a w1 in two tensors, a GateUp."""
    dtype = _dtype(spec)

    def call(given: Given) -> list[Tensor]:
        w1 = GateUp(given["gate"], given["up"])
        mlp = partial(grouped_mlp, w1=w1, w2=given["w2"], offs=given["offs"])
        return gradients(mlp, [given["x"]], lambda *_: given["dy"])

    for routing, hidden, inter in _sizes(size, size.hidden):
        if routing.rows < 2:  # another path serves a single row
            continue
        total, experts = total_rows(routing), len(routing.sizes)
        given = {
            "x": rows_of(total, hidden, dtype, routing.rows), "offs": routing.offs,
            "gate": weights_of(experts, inter, hidden, dtype, seed=2),
            "up": weights_of(experts, inter, hidden, dtype, seed=3),
            "w2": weights_of(experts, hidden, inter, dtype, seed=4),
            "dy": rows_of(total, hidden, dtype, routing.rows, seed=5),
        }  # fmt: skip
        yield Trial(f"gradient of x, {routing.name}", given, call, _ends(routing))


def _forms(activation: str, layout: str) -> list[tuple[str, str]]:
    """Return the pairs of activation and layout that a kernel compiled for `activation` and `layout` serves."""
    layouts = LAYOUT_FORMS[layout] if is_gated(activation) else ("concat",)
    return [(each, one) for each in ACTIVATION_FORMS[activation] for one in layouts]


def _fc1_sizes(spec: GroupedGluSpec, size: Size, hidden: int) -> list[Sized]:
    """Return the sizes of trials for a kernel of FC1.

    A kernel that takes any I (glu_layout "strided") gets an I that is no multiple of the layout's blocks; otherwise
    another kernel would serve the call.
    """
    less = BLOCK_ROWS // 4 if spec.glu_layout == "strided" else 0
    return [(r, h, i - less) for r, h, i in _sizes(size, hidden)]


def _formed_and_sized(spec: Any, sizes: Sequence[Sized]) -> Iterator[tuple[tuple[str, str], Sized]]:
    """Yield the pairs ((activation, layout), sizes) of trials.

    Not every combination is tried: all pairs (activation, layout) come with the first sizes, and only the first pair
    with all other sizes.
    """
    forms = _forms(spec.activation, spec.glu_layout)
    yield from ((form, sizes[0]) for form in forms)
    yield from ((forms[0], sized) for sized in sizes[1:])


def _is_first(spec: Any, size: Size, form: tuple[str, str], routing: Routing) -> bool:
    """Return True if this form (activation, layout) and this routing are tried in all variants of `_ways`."""
    forms = _forms(spec.activation, spec.glu_layout)
    return routing == routings(size)[0] and (size.has_every_pair or form == forms[0])


def _named(form: tuple[str, str]) -> dict[str, Any]:
    return {"activation": form[0], "glu_layout": form[1]}


def glu(spec: GroupedGluSpec, size: Size) -> Iterator[Trial]:
    if spec.operands != IN_16_BITS:
        return
    dtype = _dtype(spec)
    for form, sized in _formed_and_sized(spec, _fc1_sizes(spec, size, size.hidden)):
        routing, hidden, inter = sized
        total, experts, both = total_rows(routing), len(routing.sizes), inter * (1 + is_gated(form[0]))
        w1 = weights_of(experts, both, hidden, dtype, seed=2)
        given = {
            "x": rows_of(total, hidden, dtype, routing.rows), "offs": routing.offs,
            "w1": w1.mT.contiguous() if spec.transpose_w else w1, **_low(spec, routing, both, spec.transpose_w),
        }  # fmt: skip
        addends = {
            "bias": weights_of(experts, 1, both, dtype, seed=4)[:, 0].contiguous(),
            "row_scale": scales_of(total, routing.rows),
        }
        options = {**_named(form), "transpose_w": spec.transpose_w}
        if not spec.adapted:
            options["return_preact"] = spec.save_preact
        call = _listed(adapted_glu if spec.adapted else grouped_glu, **options)
        for name, more in _ways(given, addends, ("w1",), routing, _is_first(spec, size, form, routing)):
            yield Trial(
                f"{', '.join(form)}, {routing.name}, {name}", {**given, **more}, call, _ends(routing), True,
                replayed=_replayed(sized, size),
            )  # fmt: skip


def _weights(
    spec: GroupedMlpSpec, routing: Routing, hidden: int, both: int, inter: int, is_concatenated: bool
) -> dict[str, Any]:
    dtype, experts = _dtype(spec), len(routing.sizes)
    w1, w2 = weights_of(experts, both, hidden, dtype, seed=2), weights_of(experts, hidden, inter, dtype, seed=3)
    if spec.fc1.transpose_w:
        w1, w2 = w1.mT.contiguous(), w2.mT.contiguous()
    if spec.fc1.operands != IN_16_BITS:
        form = FORMS[spec.fc1.operands]
        first = form.of_gate(both) if is_concatenated else form
        return {"w1": first.quantized_tensor(w1), "w2": form.quantized_tensor(w2)}
    return {"w1": w1, "w2": w2}


def mlp(spec: GroupedMlpSpec, size: Size) -> Iterator[Trial]:
    """Yield trials of grouped_mlp.

    A forward that keeps its preactivation is called as training calls it, and only its result is compared; `glu`
    compares the preactivation. In MXFP8 such a forward is tried as part of a training step.
    """
    fc1, dtype = spec.fc1, _dtype(spec)
    is_plain = fc1.operands == IN_16_BITS
    if fc1.save_preact and not is_plain:
        yield from training.steps(spec, fc1.operands, _formed_and_sized(fc1, _sizes(size, size.in_blocks)))
        return
    recipe = BF16.name if is_plain else fc1.operands
    for form, sized in _formed_and_sized(fc1, _fc1_sizes(fc1, size, size.hidden if is_plain else size.in_blocks)):
        routing, hidden, inter = sized
        total, experts, both = total_rows(routing), len(routing.sizes), inter * (1 + is_gated(form[0]))
        given = {
            "x": rows_of(total, hidden, dtype, routing.rows), "offs": routing.offs,
            **_weights(spec, routing, hidden, both, inter, both > inter and form[1] == "concat"),
        }  # fmt: skip
        if spec.quantized:
            given["x"] = quantize_mxfp8(given["x"], block="1x128")
        addends = {
            "b1": weights_of(experts, 1, both, dtype, seed=4)[:, 0].contiguous(),
            "b2": weights_of(experts, 1, hidden, dtype, seed=5)[:, 0].contiguous(),
            "row_scale": scales_of(total, routing.rows),
        }
        options = {**_named(form), "recipe": recipe, "transpose_w": fc1.transpose_w}
        call = partial(_recorded, options) if fc1.save_preact else _listed(grouped_mlp, **options)
        has_lists = is_plain and not fc1.save_preact
        for name, more in _ways(
            given, addends, ("w1", "w2") if has_lists else (), routing, _is_first(fc1, size, form, routing)
        ):  # fmt: skip
            yield Trial(
                f"{', '.join(form)}, {routing.name}, {name}", {**given, **more}, call, _ends(routing), True,
                tolerance=ROUNDED_TWICE if OPERANDS[fc1.operands].act != DENSE else None,
                replayed={} if fc1.save_preact else _replayed(sized, size),
            )  # fmt: skip


def _recorded(options: dict[str, Any], given: Given) -> list[Tensor]:
    """Return the result of grouped_mlp while a gradient is recorded, so that forward keeps its preactivation."""
    with torch.enable_grad():
        made = grouped_mlp(**{**given, "x": given["x"].detach().requires_grad_()}, **options)
    return [made.detach()]


def dglu(spec: GroupedDgluSpec, size: Size) -> Iterator[Trial]:
    if spec.operands != IN_16_BITS:
        yield from training.steps(spec, spec.operands, _formed_and_sized(spec, _sizes(size, size.in_blocks)))
        return
    for form, sized in _formed_and_sized(spec, _sizes(size, size.hidden)):
        yield from (_data_path if spec.dgrad else _dglu_alone)(spec, form, sized)


def _dglu_alone(spec: GroupedDgluSpec, form: tuple[str, str], sized: Sized) -> Iterator[Trial]:
    (routing, hidden, inter), dtype = sized, _dtype(spec)
    total, experts = total_rows(routing), len(routing.sizes)
    w2 = weights_of(experts, hidden, inter, dtype, seed=3)
    given = {
        "dy": rows_of(total, hidden, dtype, routing.rows), "offs": routing.offs,
        "w2": w2.mT.contiguous() if spec.transpose_w else w2,
        "preact": rows_of(total, inter * (1 + is_gated(form[0])), dtype, routing.rows, seed=6),
        "row_scale": scales_of(total, routing.rows), **_low(spec, routing, inter, not spec.transpose_w),
    }  # fmt: skip

    function = adapted_dglu if spec.adapted else grouped_dglu
    call = _listed(function, **_named(form), transpose_w=spec.transpose_w)
    yield Trial(f"{', '.join(form)}, {routing.name}", given, call, _ends(routing))


def _data_path(spec: GroupedDgluSpec, form: tuple[str, str], sized: Sized) -> Iterator[Trial]:
    """Yield trials of an MLP's backward to its inputs, dx and d_row_scale.

    The activation's limit is so large that it is never reached: the gradient differs if rounding takes a preactivation
    across the limit. `_dglu_alone`, whose preactivations are inputs, tries the limit.
    """
    (routing, hidden, inter), dtype = sized, _dtype(spec)
    if routing.rows < 2:  # another path serves a single row
        return
    total, experts = total_rows(routing), len(routing.sizes)
    given = {
        "x": rows_of(total, hidden, dtype, routing.rows), "offs": routing.offs,
        "w1": weights_of(experts, inter * (1 + is_gated(form[0])), hidden, dtype, seed=2),
        "w2": weights_of(experts, hidden, inter, dtype, seed=3), "row_scale": scales_of(total, routing.rows),
        "dy": rows_of(total, hidden, dtype, routing.rows, seed=5),
    }  # fmt: skip

    def call(given: Given) -> list[Tensor]:
        others = {name: given[name] for name in ("w1", "w2", "offs")}

        def mlp(x: Tensor, row_scale: Tensor) -> Tensor:
            return grouped_mlp(x, row_scale=row_scale, **others, **_named(form), limit=UNREACHED)

        return gradients(mlp, [given["x"], given["row_scale"]], lambda *_: given["dy"])

    yield Trial(f"gradients, {', '.join(form)}, {routing.name}", given, call, _ends(routing))


def fold(spec: FoldMxfp8Spec, size: Size) -> Iterator[Trial]:
    """Yield trials of the kernels that fold weights: convert MXFP8's scales of 32 elements to one scale a weight row.

    Each trial is a training step of grouped_mlp with recipe "mxfp8", which folds its weights for FP8 GEMMs.
    """
    sized = _sizes(size, size.in_blocks)
    return training.steps(spec, MXFP8.name, ((("swiglu", "concat"), each) for each in sized))


def wgrad(spec: GroupedWgradSpec, size: Size) -> Iterator[Trial]:
    """Yield trials of grouped_wgrad that overwrite `out`, add to it, or do one or the other by an expert mask.

    Elements to be overwritten are NaN before the call.
    """
    dtype, out_dtype = _dtype(spec), getattr(torch, spec.out_dtype)
    recipe = of_weight_gradients(spec.operands)
    for sized in _sizes(size, size.hidden if recipe == BF16.name else size.in_blocks):
        routing, n, k = sized
        total, experts = total_rows(routing), len(routing.sizes)
        there = weights_of(experts, n, k, out_dtype, seed=7)
        mask = torch.arange(experts) % 2 == 0
        given = {
            "dy": rows_of(total, n, dtype, routing.rows), "x": rows_of(total, k, dtype, routing.rows, seed=8),
            "offs": routing.offs,
        }  # fmt: skip
        kinds: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("overwritten", {"out": torch.full_like(there, math.nan)}, {}),
            ("added to", {"out": there}, {"accumulate": True}),
            ("by a mask", {"out": torch.where(mask[:, None, None], there, math.nan), "mask": mask}, {}),
        ]
        if routing == routings(size)[0]:
            kinds.append(
                ("by index", {**kinds[0][1], "x": given["x"][: routing.rows], "x_rows": _indices(routing)}, {})
            )
        for name, more, options in kinds:
            call = partial(_wgrad, {**options, "recipe": recipe})
            yield Trial(f"{routing.name}, {name}", {**given, **more}, call, replayed=_replayed(sized, size))


def _wgrad(options: dict[str, Any], given: Given) -> list[Tensor]:
    """Return the result of grouped_wgrad, called with a copy of the buffer `out`, so that it can be called again."""
    out = torch.empty_like(given["out"]).copy_(given["out"])
    return [grouped_wgrad(**{**given, "out": out}, **options)]
