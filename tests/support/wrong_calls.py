"""Wrong calls: each argument of each public function, broken in every way that a caller may break one.

A call must end in an exception that names the argument, or in the right result, whether it is the first of its kind or
meets a plan that good calls made. `Operation` says what a good call is; `wrong_tensors` and `overlaps` break it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import glulam
from glulam import mhc

BF16 = torch.bfloat16
SIZES = (24, 0, 40, 32)
ROWS, EXPERTS, HIDDEN, INNER, WIDTH = sum(SIZES), len(SIZES), 128, 128, 128
OVERLAP = 16  # bytes that an output shares with an argument

Arguments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Operation:
    """A public function: `good(device)` makes arguments of a call that is right; `outputs` names its buffers.

    `wrong`: for arguments that are no tensors, values that are wrong. `legal`: words of changes after which groups
    end elsewhere than x, which only the device can know.
    """

    name: str
    call: Callable[..., Any]
    good: Callable[[str], Arguments]
    outputs: tuple[str, ...] = ()
    wrong: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    legal: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def _numbers(device: str, seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / 4).to(device, dtype)


def _offs(device: str) -> Tensor:
    return torch.tensor(SIZES).cumsum(0).to(device, torch.int32)


def _scale(device: str) -> Tensor:
    return _numbers(device, 9, ROWS, dtype=torch.float32).abs() + 0.5


def _mm(device: str) -> Arguments:
    return {
        "x": _numbers(device, 0, ROWS, HIDDEN),
        "w": _numbers(device, 1, EXPERTS, WIDTH, HIDDEN),
        "offs": _offs(device),
        "bias": _numbers(device, 2, EXPERTS, WIDTH),
        "bias_scale": _scale(device),
        "out": _numbers(device, 3, ROWS, WIDTH),
        "transpose_w": False,
    }


def _glu(device: str) -> Arguments:
    return {
        "x": _numbers(device, 0, ROWS, HIDDEN),
        "w1": _numbers(device, 1, EXPERTS, 2 * INNER, HIDDEN),
        "offs": _offs(device),
        "bias": _numbers(device, 2, EXPERTS, 2 * INNER),
        "row_scale": _scale(device),
        "out": _numbers(device, 3, ROWS, INNER),
        "activation": "swiglu",
        "glu_layout": "concat",
        "return_preact": False,
    }


def _mlp(device: str, recipe: str = "bf16") -> Arguments:
    return {
        "x": _numbers(device, 0, ROWS, HIDDEN),
        "w1": _numbers(device, 1, EXPERTS, 2 * INNER, HIDDEN),
        "w2": _numbers(device, 2, EXPERTS, HIDDEN, INNER),
        "offs": _offs(device),
        "row_scale": _scale(device),
        "b1": _numbers(device, 3, EXPERTS, 2 * INNER),
        "b2": _numbers(device, 4, EXPERTS, HIDDEN),
        "out": _numbers(device, 5, ROWS, HIDDEN),
        "activation": "swiglu",
        "recipe": recipe,
    }


def _mlp_transposed(device: str) -> Arguments:
    """Of w1 [E, H, 2I] and w2 [E, I, H]."""
    good = _mlp(device)
    weights = {name: good[name].mT.contiguous() for name in ("w1", "w2")}
    return {**good, **weights, "transpose_w": True}


def _mlp_of_lists(device: str) -> Arguments:
    good = _mlp(device)
    return {**good, **{name: list(good[name].unbind()) for name in ("w1", "w2", "b1", "b2")}}


def _dglu(device: str) -> Arguments:
    return {
        "dy": _numbers(device, 0, ROWS, HIDDEN),
        "w2": _numbers(device, 1, EXPERTS, HIDDEN, INNER),
        "preact": _numbers(device, 2, ROWS, 2 * INNER),
        "offs": _offs(device),
        "row_scale": _scale(device),
        "activation": "swiglu",
        "transpose_w": False,
    }


def _wgrad(device: str) -> Arguments:
    return {
        "dy": _numbers(device, 0, ROWS, WIDTH),
        "x": _numbers(device, 1, ROWS, HIDDEN),
        "offs": _offs(device),
        "mask": torch.tensor([True, False, False, True], device=device),
        "out": _numbers(device, 2, EXPERTS, WIDTH, HIDDEN),
    }


def _bias_grad(device: str) -> Arguments:
    return {"dy": _numbers(device, 0, ROWS, WIDTH), "offs": _offs(device), "row_scale": _scale(device)}


def _quantize(device: str) -> Arguments:
    return {"x": _numbers(device, 0, ROWS, HIDDEN), "offs": _offs(device), "axis": "row", "block": "1x32"}


STREAMS, TOKENS = 4, 20
_COEFFICIENTS = STREAMS * (STREAMS + 2)


def _aggregate(device: str) -> Arguments:
    return {
        "x": _numbers(device, 0, TOKENS, STREAMS, WIDTH),
        "h_pre": _numbers(device, 1, TOKENS, STREAMS, dtype=torch.float32),
        "out": _numbers(device, 2, TOKENS, WIDTH),
    }


def _sinkhorn(device: str) -> Arguments:
    made = [_numbers(device, seed, TOKENS, STREAMS, STREAMS, dtype=torch.float32) for seed in (0, 1)]
    return {"logits": made[0], "iters": 5, "eps": 1e-6, "out": made[1]}


def _post_mix(device: str) -> Arguments:
    return {
        "residual": _numbers(device, 0, TOKENS, STREAMS, WIDTH),
        "h_res": _numbers(device, 1, TOKENS, STREAMS, STREAMS, dtype=torch.float32),
        "h_post": _numbers(device, 2, TOKENS, STREAMS, dtype=torch.float32),
        "x": _numbers(device, 3, TOKENS, WIDTH),
        "bias": _numbers(device, 4, WIDTH),
        "out": _numbers(device, 5, TOKENS, STREAMS, WIDTH),
    }


def _project(device: str) -> Arguments:
    alphas = {f"alpha_{name}": _numbers(device, 6, 1) + 1 for name in ("pre", "post", "res")}
    return {
        "x": _numbers(device, 0, TOKENS, STREAMS, WIDTH),
        "weight": _numbers(device, 1, _COEFFICIENTS, STREAMS * WIDTH),
        **alphas,
        "bias": _numbers(device, 2, _COEFFICIENTS),
        "eps": 1e-6,
    }


def _project_normed(device: str) -> Arguments:
    """With float32 parameters and an RMSNorm's weight."""
    good = _project(device)
    wide = {name: value.float() for name, value in good.items() if isinstance(value, Tensor) and name != "x"}
    return {**good, **wide, "norm_weight": _numbers(device, 7, STREAMS * WIDTH, dtype=torch.float32) + 1}


_ACTIVATION = {"activation": ("nothing", 3, None, ["swiglu"])}
_GLU_LAYOUT = {"glu_layout": ("nothing", 3, None)}
_NUMBERS = {name: ("7", None, float("nan"), [7.0], torch.tensor(7.0)) for name in ("limit", "alpha", "offset")}
_SPLITS = {"splits": ("x", 3, [1, 2], [1.5] * EXPERTS, list(SIZES))}  # the last beside offs
_MLP_WRONG = {
    **_ACTIVATION,
    **_GLU_LAYOUT,
    **_NUMBERS,
    **_SPLITS,
    "recipe": ("nothing", 3, None),
    "recompute": (2, "x"),
}

OPERATIONS = (
    Operation("grouped_mm", glulam.grouped_mm, _mm, ("out",), {**_SPLITS, "transpose_w": (2, "x", None)}),
    Operation(
        "grouped_glu",
        glulam.grouped_glu,
        _glu,
        ("out",),
        {**_ACTIVATION, **_GLU_LAYOUT, **_NUMBERS, **_SPLITS, "return_preact": (2, "x")},
    ),
    Operation("grouped_mlp", glulam.grouped_mlp, _mlp, ("out",), _MLP_WRONG),
    Operation("grouped_mlp transposed", glulam.grouped_mlp, _mlp_transposed, ("out",), {"transpose_w": (2, "x", None)}),
    Operation("grouped_mlp of lists", glulam.grouped_mlp, _mlp_of_lists, ("out",)),
    *(
        Operation(f"grouped_mlp {recipe}", glulam.grouped_mlp, lambda d, r=recipe: _mlp(d, r), ("out",), _MLP_WRONG)  # type: ignore[misc]
        for recipe in ("mxfp8", "mxfp8_exact", "mxfp8_weight_only")
    ),
    Operation(
        "grouped_dglu",
        glulam.grouped_dglu,
        _dglu,
        (),
        {**_ACTIVATION, **_NUMBERS, "row_scale_grad": (2, "x"), "transpose_w": (2, "x", None)},
    ),
    Operation("grouped_wgrad", glulam.grouped_wgrad, _wgrad, ("out",), {"accumulate": (2, "x"), "out_dtype": (3,)}),
    Operation("grouped_bias_grad", glulam.grouped_bias_grad, _bias_grad, (), {"out_dtype": (3, torch.int32)}),
    Operation(
        "quantize_mxfp8",
        glulam.quantize_mxfp8,
        _quantize,
        (),
        {"axis": ("x", 3, None), "block": ("x", 3, None), "scale_layout": ("x", 3, None)},
        {"offs": ("one less", "one row less"), "x": ("one row less",)},
    ),
    Operation("aggregate", mhc.aggregate, _aggregate, ("out",)),
    Operation("sinkhorn", mhc.sinkhorn, _sinkhorn, ("out",), {"iters": (-1, 1.5, "x", None), "eps": (-1.0, "x", None)}),
    Operation("post_mix", mhc.post_mix, _post_mix, ("out",), {"transpose_res": (2, "x")}),
    Operation("project", mhc.project, _project, (), {"eps": (-1.0, "x", None)}),
    Operation("project, normed", mhc.project, _project_normed),
    Operation("pre", mhc.pre, _project, (), {"eps": (-1.0, "x", None), "iters": (-1, 1.5, "x", None)}),
    Operation("pre, normed", mhc.pre, _project_normed),
)


class Plain(Tensor):
    """A subclass that is nothing but data."""


class Wrapper(Tensor):
    """A subclass without memory, which no kernel can read."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise TypeError(f"Wrapper has no {function}")


def _freed(t: Tensor, begin: int = 0) -> Tensor:
    """A tensor whose storage is gone, `begin` elements behind the beginning of it."""
    storage = t.new_empty(begin + t.numel())
    view = storage[begin:].view(t.shape)
    storage.untyped_storage().resize_(0)
    return view


def wrong_tensors(t: Tensor) -> Iterator[tuple[str, Any]]:
    """What a caller may give in place of a tensor, with a word for it."""
    yield "another dtype", t.to(torch.float64)
    yield "an integer dtype", t.to(torch.int16)
    yield "on meta", t.to("meta")
    if t.device.type != "cpu":
        yield "on the CPU", t.cpu()
    yield "a string", "x"
    yield "a number", 3.5
    yield "an object", object()
    yield "one less", t[:-1].clone() if t.dim() == 1 else t[..., :-1].clone()
    yield "one row less", t[:-1]
    yield "eight columns less", t[..., : max(t.shape[-1] - 8, 0)]
    yield "of another rank", t[None]
    yield "a scalar", t.flatten()[0]
    yield "empty", t[:0]
    if t.dim() > 1:
        yield "transposed", t.mT.clone().mT
        yield "sparse", t.to_sparse()
    yield "every other", torch.stack((t, t), -1)[..., 0]
    yield "expanded", t[:1].expand_as(t)
    yield "misaligned", t.new_empty(t.numel() + 1)[1:].copy_(t.flatten()).view(t.shape)
    if t.dtype != torch.bool:
        yield "negated in the end", torch._neg_view(t)
    yield "a lazy zero", torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device)
    yield "freed", _freed(t)
    yield "freed, not from its beginning", _freed(t, 64)
    yield "of a plain subclass", t.as_subclass(Plain)
    yield "of a wrapper", Wrapper(t)
    if t.is_floating_point():
        yield "a parameter", torch.nn.Parameter(t)


def overlaps(good: Arguments, out: str) -> Iterator[tuple[str, Arguments]]:
    """Calls whose output shares its first bytes with the last of an argument."""
    target = good[out]
    for name, value in good.items():
        values = value if isinstance(value, list) else [value]
        if name == out or not isinstance(values[-1], Tensor):
            continue
        source = values[-1]
        memory = torch.zeros(source.nbytes + target.nbytes, dtype=torch.uint8, device=target.device)
        read = memory[: source.nbytes].view(source.dtype).view(source.shape).copy_(source)
        begin = max(source.nbytes - OVERLAP, 0)
        written = memory[begin : begin + target.nbytes].view(target.dtype).view(target.shape)
        given: Any = [*values[:-1], read] if isinstance(value, list) else read
        yield name, {**good, name: given, out: written}


def wrong_calls(operation: Operation, good: Arguments) -> Iterator[tuple[str, str, Arguments]]:
    """The argument's name, a word for what is wrong, and all arguments."""
    for name, value in good.items():
        if isinstance(value, Tensor):
            for word, wrong in wrong_tensors(value):
                if word not in operation.legal.get(name, ()):
                    yield name, word, {**good, name: wrong}
        elif isinstance(value, list):
            for word, wrong in wrong_tensors(value[1]):
                yield name, f"one {word}", {**good, name: [value[0], wrong, *value[2:]]}
    for name, values in operation.wrong.items():
        for wrong in values:
            yield name, repr(wrong), {**good, name: wrong}
    for out in operation.outputs:
        for other, arguments in overlaps(good, out):
            yield out, f"over {other}", arguments


DISAGREE = ("dtype", "meta", "CPU", "less", "rank", "scalar", "empty")
"""Words of changes after which two arguments do not fit each other: the error may name either."""


def _flat(result: Any) -> list[Tensor]:
    if isinstance(result, glulam.MXFP8Tensor):
        return [result.dequantize()]
    if isinstance(result, (tuple, list)):
        return [tensor for one in result if one is not None for tensor in _flat(one)]
    return [result.as_subclass(Tensor)]


def _on_cpu(value: Any) -> Any:
    """What a value says, as plain memory on the CPU; itself where it has none."""
    if isinstance(value, list):
        return [_on_cpu(one) for one in value]
    if not isinstance(value, Tensor) or isinstance(value, Wrapper) or value.is_meta or value.is_sparse:
        return value
    plain = value.as_subclass(Tensor).detach()
    if plain._is_zerotensor():
        return torch.zeros(plain.shape, dtype=plain.dtype)
    if plain.numel() and not plain.untyped_storage().nbytes():
        return value
    return plain.resolve_neg().cpu().clone()


def _is_named(name: str, word: str, words: str, arguments: Arguments) -> bool:
    names = arguments if any(change in word for change in DISAGREE) else (name,)
    return any(re.search(rf"\b{one}\b", words) for one in names)


def _difference(one: Tensor, right: Tensor) -> str:
    if one.shape != right.shape or one.is_meta:
        return f"a result of shape {tuple(one.shape)}"
    if not one.numel():
        return ""
    error, scale = (one.double().cpu() - right.double().cpu()).abs().max(), right.double().abs().max()
    return "" if error <= 0.05 * scale else f"a wrong result: off by {error:.3g} of {scale:.3g}"


def complaint(operation: Operation, name: str, word: str, arguments: Arguments, reference: Callable[..., Any]) -> str:
    """What is wrong with how a call ends; empty where it is an error that names the argument, or the right result.

    `reference`: calls a function with arguments on the CPU, where the CPU is not the GPU.
    """
    plain = {key: _on_cpu(value) for key, value in arguments.items()}
    try:
        with torch.no_grad():
            got = operation.call(**arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        is_known = _is_named(name, word, str(error), arguments) or "Wrapper" in str(error)
        return "" if is_known else f"{type(error).__name__} does not name it: {error!s:.200}"
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.200}"
    try:
        with torch.no_grad():
            wanted = reference(operation.call, plain)
    except Exception as error:
        return f"passes, which the reference refuses: {error!s:.200}"
    return next(filter(None, map(_difference, _flat(got), _flat(wanted))), "")


COLD, WARM, OF_OTHER_ROWS = BEFORE = ("cold", "warm", "of other rows")
"""What was called before: nothing, good calls, or good calls with fewer rows."""


def _with_fewer_rows(arguments: Arguments) -> Arguments:
    return {
        name: value[:-8] if isinstance(value, Tensor) and value.shape[:1] in ((ROWS,), (TOKENS,)) else value
        for name, value in arguments.items()
    }


def complaints(operation: Operation, device: str, reference: Callable[..., Any], before: str) -> list[str]:
    """One line for each wrong call that ends wrongly. `before`: one of BEFORE.

    Good calls behind them must be right, as if nothing had happened.
    """
    good = operation.good(device)
    for _ in range(0 if before == COLD else 3):
        first = operation.good(device)
        with torch.no_grad():
            operation.call(**(_with_fewer_rows(first) if before == OF_OTHER_ROWS else first))
    calls = [*wrong_calls(operation, good), ("", "good", operation.good(device))]
    lines = [(name, word, complaint(operation, name, word, given, reference)) for name, word, given in calls]
    return [f"{operation.name}: {name} {word}: {line}" for name, word, line in lines if line]


def named(name: str) -> Operation:
    return next(operation for operation in OPERATIONS if operation.name == name)


TRAINED = {
    "grouped_mm": ("w", "offs", "bias_scale"),
    "grouped_mlp": ("x", "w1", "w2", "offs", "row_scale"),
    "grouped_mlp transposed": ("x", "w1", "w2", "offs", "row_scale"),
    "grouped_mlp mxfp8": ("x", "w1", "w2", "offs", "row_scale"),
    "post_mix": ("residual", "h_res", "h_post", "x", "bias"),
    "project": ("x", "weight", "alpha_pre", "bias"),
}
"""Operations with a gradient, and arguments that their backward reads."""
STEPS = [(operation, name) for operation in OPERATIONS for name in TRAINED.get(operation.name, ())]


def trained(operation: Operation, device: str) -> tuple[Arguments, list[Tensor]]:
    """Arguments, of which matrices require a gradient, and the results of a call."""
    arguments = {name: value for name, value in operation.good(device).items() if name not in operation.outputs}
    for value in arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
            value.requires_grad_()
    return arguments, _flat(operation.call(**arguments))


def complaint_of_a_step(operation: Operation, name: str, device: str) -> str:
    """What is wrong with how a backward ends, before which the storage of an argument was freed."""
    arguments, results = trained(operation, device)
    gradients = [torch.ones_like(result) for result in results]
    arguments[name].untyped_storage().resize_(0)
    try:
        torch.autograd.backward(results, gradients)
    except (ValueError, TypeError, RuntimeError) as error:
        return "" if re.search(rf"\b{name}\b.*freed", str(error)) else f"{type(error).__name__}: {error!s:.300}"
    return "passes"


def gradients_of(operation: Operation, device: str, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The gradients of a step whose incoming gradients are changed."""
    arguments, results = trained(operation, device)
    incoming = [change(torch.linspace(-1, 1, r.numel(), device=device).view(r.shape).to(r.dtype)) for r in results]
    torch.autograd.backward(results, incoming)
    return {name: value.grad for name, value in arguments.items() if getattr(value, "grad", None) is not None}
