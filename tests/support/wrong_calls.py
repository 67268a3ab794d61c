"""Wrong calls: for each argument of each public function, every kind of wrong value that a caller may pass.

A call must raise an error that names the argument, or return the right result. This must hold for the first call of its
kind, and for a call that finds a plan made by good calls.

Good calls are made from the functions' own parameters: a value for each parameter name (`values`), further values for
some functions (`OWN`), and wrong values of options (`WRONG`). `unswept` returns the parameters that have neither, so a
new operator or parameter is covered or fails the tests.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import glulam
from cute_kernels.formulas import NUMBERS
from glulam import GateUp, MXFP4Tensor, MXFP8Tensor, Routing, mhc
from glulam.calls.memory import is_in_storage
from glulam.host.plans import forget_plans
from glulam.layer.choices import moe_of_choices

BF16, F32 = torch.bfloat16, torch.float32
SIZES = (24, 0, 40, 32)
ROWS, EXPERTS, HIDDEN, INNER = sum(SIZES), len(SIZES), 128, 128
STREAMS, TOKENS, CHOICES = 4, 20, 2
COEFFICIENTS = STREAMS * (STREAMS + 2)
OVERLAP = 16  # bytes that an output shares with an argument

Arguments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Operation:
    """A public function: `good(device)` returns arguments of a right call; `outputs` names its output buffers.

    `wrong`: wrong values, for arguments that are not tensors. `legal`: by argument, the words of changes that only the
    device could notice, since they move the groups' end; they are not tried.
    """

    name: str
    call: Callable[..., Any]
    good: Callable[[str], Arguments]
    outputs: tuple[str, ...] = ()
    wrong: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    legal: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def _numbers(device: str, seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cpu") / 4).to(device, dtype)


def _integers(device: str, seed: int, below: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(below, shape, generator=generator, device="cpu").to(device, dtype)


def _offs(device: str) -> Tensor:
    return torch.tensor(SIZES, device="cpu").cumsum(0).to(device, torch.int32)


def _ids(device: str) -> Tensor:
    return torch.stack([_integers("cpu", 20, EXPERTS, TOKENS), _integers("cpu", 21, EXPERTS, TOKENS)], 1).to(device)


def _id_weights(device: str) -> Tensor:
    return _numbers(device, 22, TOKENS, CHOICES, dtype=F32).abs() + 0.5


def _routing(device: str) -> Routing:
    return Routing.from_topk(_ids(device), _id_weights(device), EXPERTS)


def values(device: str) -> Arguments:
    """Return a right value for each parameter name, for T rows, N tokens, E experts and widths of 128."""
    return {
        "x": _numbers(device, 0, ROWS, HIDDEN),
        "dy": _numbers(device, 1, ROWS, HIDDEN),
        "y": _numbers(device, 2, TOKENS * CHOICES, HIDDEN),
        "preact": _numbers(device, 3, ROWS, 2 * INNER),
        "w": _numbers(device, 4, EXPERTS, HIDDEN, HIDDEN),
        "w1": _numbers(device, 5, EXPERTS, 2 * INNER, HIDDEN),
        "w2": _numbers(device, 6, EXPERTS, HIDDEN, INNER),
        "b1": _numbers(device, 7, EXPERTS, 2 * INNER),
        "b2": _numbers(device, 8, EXPERTS, HIDDEN),
        "bias": _numbers(device, 9, EXPERTS, HIDDEN),
        "row_scale": _numbers(device, 10, ROWS, dtype=F32).abs() + 0.5,
        "bias_scale": _numbers(device, 11, ROWS, dtype=F32).abs() + 0.5,
        "offs": _offs(device),
        "mask": torch.tensor([True, False, False, True], device=device),
        "out": _numbers(device, 12, ROWS, HIDDEN),
        "routing": _routing(device),
        "ids": _ids(device),
        "weights": _id_weights(device),
        "num_experts": EXPERTS,
        "expert_map": torch.tensor([2, 1, 0, 3, -1], dtype=torch.int32, device=device),
        "logits": _numbers(device, 13, TOKENS, EXPERTS, dtype=F32),
        "num_tokens": torch.tensor([TOKENS - 3], dtype=torch.int32, device=device),
        "k": CHOICES,
        "h_pre": _numbers(device, 14, TOKENS, STREAMS, dtype=F32),
        "h_post": _numbers(device, 15, TOKENS, STREAMS, dtype=F32),
        "h_res": _numbers(device, 16, TOKENS, STREAMS, STREAMS, dtype=F32),
        "weight": _numbers(device, 17, COEFFICIENTS, STREAMS * HIDDEN, dtype=F32),
        "norm_weight": _numbers(device, 18, STREAMS * HIDDEN, dtype=F32) + 1,
        **{f"alpha_{name}": _numbers(device, 19, 1, dtype=F32) + 1 for name in ("pre", "post", "res")},
    }


def _layer(device: str) -> Arguments:
    """Return right values for a layer's arguments, which have rows of tokens."""
    tokens = {name: _numbers(device, seed, TOKENS, HIDDEN) for seed, name in enumerate(("x", "residual", "out"), 30)}
    return {**tokens, "y": values(device)["y"]}


def _streams(device: str) -> Arguments:
    return {"x": _numbers(device, 40, TOKENS, STREAMS, HIDDEN), "bias": _numbers(device, 41, COEFFICIENTS, dtype=F32)}


def _coefficients(device: str) -> tuple[Tensor, ...]:
    """Return buffers for h_pre, h_post and the logits."""
    shapes = (STREAMS,), (STREAMS,), (STREAMS, STREAMS)
    return tuple(_numbers(device, 42 + place, TOKENS, *shape, dtype=F32) for place, shape in enumerate(shapes))


def _between_sublayers(device: str) -> Arguments:
    shapes = {"pre": (STREAMS,), "post": (STREAMS,), "comb": (STREAMS, STREAMS)}
    made = {name: _numbers(device, 45 + i, TOKENS, *end, dtype=F32) for i, (name, end) in enumerate(shapes.items())}
    made |= {"y": _numbers(device, 53, TOKENS, HIDDEN), "streams": _streams(device)["x"]}
    made |= {"scale": _numbers(device, 48, 3, dtype=F32), "base": _streams(device)["bias"]}
    return {**made, "norm_weight": _numbers(device, 49, HIDDEN, dtype=F32) + 1}


OWN: dict[str, Callable[[str], Arguments]] = {
    "grouped_glu": lambda d: {"bias": values(d)["b1"]},
    "grouped_wgrad": lambda d: {"out": _numbers(d, 50, EXPERTS, HIDDEN, HIDDEN)},
    "moe": _layer,
    "moe_of_choices": _layer,
    "permute": _layer,
    "combine": _layer,
    "route": lambda d: {"bias": _numbers(d, 51, EXPERTS, dtype=F32)},
    "load_balancing_loss": lambda d: {"routing": glulam.route(values(d)["logits"], CHOICES)},
    "quantize_mxfp8": lambda d: {
        "out": MXFP8Tensor(
            torch.zeros(ROWS, HIDDEN, dtype=torch.float8_e4m3fn, device=d),
            torch.ones(ROWS, HIDDEN // 32, device=d).to(torch.float8_e8m0fnu),
        )
    },
    "quantize_mxfp4": lambda d: {
        "out": MXFP4Tensor(
            torch.zeros(EXPERTS, HIDDEN, HIDDEN // 2, dtype=torch.uint8, device=d),
            torch.ones(EXPERTS, HIDDEN, HIDDEN // 32, device=d).to(torch.float8_e8m0fnu),
        )
    },
    "mxfp8_of_square_blocks": lambda d: {
        "data": torch.zeros(EXPERTS, HIDDEN, HIDDEN, dtype=torch.float8_e4m3fn, device=d),
        "scale": torch.ones(EXPERTS, HIDDEN // 32, HIDDEN // 32, device=d).to(torch.float8_e8m0fnu),
    },
    "aggregate": lambda d: {**_streams(d), "out": _numbers(d, 52, TOKENS, HIDDEN)},
    "sinkhorn": lambda d: {name: values(d)["h_res"] for name in ("logits", "out")},
    "post_mix": lambda d: {
        "x": _numbers(d, 53, TOKENS, HIDDEN),
        "bias": _numbers(d, 54, HIDDEN),
        "residual": _streams(d)["x"],
        "out": _numbers(d, 55, TOKENS, STREAMS, HIDDEN),
    },
    "project": lambda d: {**_streams(d), "out": _coefficients(d)},
    "pre": _streams,
    "boundary": _between_sublayers,
}
"""Values of parameters that mean something else in a function than in `values`, by the function's name."""

_FLAG, _NUMBER = (2, "x", None), ("7", None, float("nan"), [7.0], torch.tensor(7.0, device="cpu"))
WRONG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("activation", "glu_layout", "recipe", "score", "axis", "block", "scale_layout"), ("x", 3, None)),
    **{name: tuple(one for one in _NUMBER if one is not None or n.none is None) for name, n in NUMBERS.items()},
    **dict.fromkeys(("transpose_w", "transpose_res", "recompute", "return_preact", "accumulate", "normalize"), _FLAG),
    **dict.fromkeys(("row_scale_grad", "report", "in_halves", "return_x"), _FLAG),
    "x_block": ("x", 3),
    **dict.fromkeys(("eps", "sinkhorn_eps", "rms_eps", "norm_eps"), (-1.0, "x", None)),
    "iters": (-1, 1.5, "x", None),
    "splits": ("x", 3, [1, 2], [1.5] * EXPERTS, list(SIZES)),  # the last beside offs
    "out_dtype": (3, torch.int32),
    "parallel": ("x", 3, "world", "group"),
    "lora": ("x", 3, [None] * 5),
    "k": (0, EXPERTS + 1, 1.5, "x", None),
    "num_experts": (0, 2000, 1.5, "x", None),
    "first": (-1, 1.5, "x", None),
    "world_experts": (EXPERTS - 1, 1.5, "x"),
    "num_groups": (0, 3, 1.5, "x", None),
    "top_groups": (0, 2, 1.5, "x", None),
    "scale": ("x", None),
    "max_error": ("x", None, -1.0),
}
"""Wrong values of options by parameter name: every function must refuse them."""
LEGAL: dict[str, dict[str, tuple[str, ...]]] = {
    "quantize_mxfp8": {"offs": ("one less", "one row less"), "x": ("one row less",)},
    "permute": {"routing": ("one less",)},  # for K = 1 nobody writes rows past the end
    "route": {"logits": ("on meta",)},  # where one tensor is all, the result is on meta
    **dict.fromkeys(
        ("prepare_mxfp4_weight", "prepare_mxfp8_weight", "quantize_mxfp4", "quantize_nvfp4", "quantize_fp8_block"),
        {"w": ("on meta",)},
    ),
}

# Variants of calls, whose arguments differ from those that parameters tell.


def _transposed(good: Arguments) -> Arguments:
    return {**good, **{n: good[n].mT.contiguous() for n in ("w", "w1", "w2") if n in good}, "transpose_w": True}


def _of_lists(good: Arguments) -> Arguments:
    lists = {name: list(good[name].unbind()) for name in ("w", "w1", "w2", "b1", "b2", "bias") if name in good}
    return {**good, **lists, **{name: list(good[name]) for name in ("out",) if name in good and good[name].dim() == 3}}


def _in_halves(good: Arguments) -> Arguments:
    return {**good, "w1": GateUp(*(half.contiguous() for half in good["w1"].chunk(2, dim=1)))}


def _by_index(*names: str) -> Callable[[Arguments], Arguments]:
    """Return a function that changes good arguments to a call with indices.

    names: the indexed operand, and the index parameter.
    """
    of, rows = names

    def changed(good: Arguments) -> Arguments:
        device = str(good[of].device)
        return {**good, of: good[of][:40].clone(), rows: _integers(device, 60, 40, ROWS)}

    return changed


def _quantised(good: Arguments, recipe: str, make: Callable[[Tensor], Any]) -> Arguments:
    return {**good, **{name: make(good[name]) for name in ("w", "w1", "w2") if name in good}, "recipe": recipe}


def _recipe(recipe: str) -> Callable[[Arguments], Arguments]:
    return lambda good: {**good, "recipe": recipe}


def _folded(good: Arguments) -> Arguments:
    return _quantised(good, "mxfp8", glulam.prepare_mxfp8_weight)


def _rebased(good: Arguments) -> Arguments:
    return _quantised(good, "mxfp4", glulam.prepare_mxfp4_weight)


def _in_mxfp4(good: Arguments) -> Arguments:
    return _quantised(good, "mxfp4_weight_only", glulam.quantize_mxfp4)


def _in_nvfp4(good: Arguments) -> Arguments:
    return _quantised(good, "nvfp4_weight_only", glulam.quantize_nvfp4)


def _in_fp8_blocks(good: Arguments) -> Arguments:
    return _quantised(good, "fp8_block", lambda w: glulam.quantize_fp8_block(w, in_halves=w.shape[1] > HIDDEN))


def _in_mxfp8(good: Arguments) -> Arguments:
    def blocks(w: Tensor) -> MXFP8Tensor:
        made = glulam.quantize_mxfp8(w.flatten(0, 1))
        return MXFP8Tensor(made.data.view(w.shape), made.scale.view(*w.shape[:2], -1))

    return _quantised(good, "mxfp8_exact", blocks)


def _adapted(good: Arguments) -> Arguments:
    device, shapes = str(good["x"].device), ((8, HIDDEN), (2 * INNER, 8), (8, INNER), (HIDDEN, 8))
    matrices = [_numbers(device, 70 + place, EXPERTS, *shape) for place, shape in enumerate(shapes)]
    return {**good, "lora": glulam.ExpertLora(*matrices, 0.5)}


def _without(*names: str) -> Callable[[Arguments], Arguments]:
    return lambda good: {name: value for name, value in good.items() if name not in names}


def _without_update(good: Arguments) -> Arguments:
    return {**good, **dict.fromkeys(("y", "post", "comb"))}


def _x_in_mxfp8(good: Arguments) -> Arguments:
    return {**good, "x_block": "1x128", "return_x": True}


def _16_bit_parameters(good: Arguments) -> Arguments:
    kept = ("x", "norm_weight")
    narrow = {n: v.to(BF16) for n, v in good.items() if isinstance(v, Tensor) and n not in kept}
    return _without("norm_weight")({**good, **narrow})


_RECIPES = {recipe: _recipe(recipe) for recipe in ("mxfp8", "mxfp8_exact", "mxfp8_weight_only")}
_FORMATS = {
    "folded": _folded, "rebased": _rebased, "in MXFP8": _in_mxfp8, "in MXFP4": _in_mxfp4, "in NVFP4": _in_nvfp4,
    "in FP8 blocks": _in_fp8_blocks,
}  # fmt: skip
_WEIGHTS = {"transposed": _transposed, "of lists": _of_lists}
VARIANTS: dict[str, dict[str, Callable[[Arguments], Arguments]]] = {
    "grouped_mm": {**_WEIGHTS, "by index": _by_index("x", "rows")},
    "grouped_glu": {**_WEIGHTS, "in halves": _in_halves, "by index": _by_index("x", "rows")},
    "grouped_mlp": {
        **_WEIGHTS, "in halves": _in_halves, "by index": _by_index("x", "rows"), **_RECIPES, **_FORMATS,
        "adapted": _adapted,
    },
    "grouped_dglu": {**_WEIGHTS, "by index": _by_index("dy", "rows")},
    "grouped_wgrad": {
        "of lists": _of_lists, "x by index": _by_index("x", "x_rows"), "dy by index": _by_index("dy", "dy_rows"),
    },
    "grouped_bias_grad": {"by index": _by_index("dy", "rows")},
    "moe": {**_WEIGHTS, "in halves": _in_halves, **_RECIPES, **_FORMATS, "adapted": _adapted},
    "moe_of_choices": {"in halves": _in_halves, "mxfp8": _recipe("mxfp8"), "without map": _without("expert_map")},
    "Routing.from_topk": {"without map": _without("expert_map")},
    "project": {"without norm": _without("norm_weight"), "16-bit": _16_bit_parameters},
    "pre": {"without norm": _without("norm_weight"), "16-bit": _16_bit_parameters},
    "boundary": {"without update": _without_update, "in MXFP8": _x_in_mxfp8},
    "route": {"without bias": _without("bias", "num_tokens")},
}  # fmt: skip


def _public() -> dict[str, Callable[..., Any]]:
    """Return the public functions that take tensors, by name."""
    everything = {name: getattr(module, name) for module in (glulam, mhc) for name in module.__all__}
    functions = {name: f for name, f in everything.items() if inspect.isfunction(f)}
    functions["Routing.from_topk"] = Routing.from_topk
    functions["moe_of_choices"] = moe_of_choices
    return {name: function for name, function in functions.items() if _takes_tensors(function)}


def _takes_tensors(function: Callable[..., Any]) -> bool:
    """Return True if a function takes tensors.

    Checkpoint loaders do not count: tests/test_checkpoints.py sweeps them.
    """
    hints = typing.get_type_hints(function)
    kinds = [str(hint) for name, hint in hints.items() if name != "return"]
    return any(("Tensor" in kind or "Routing" in kind) and "Mapping" not in kind for kind in kinds)


PUBLIC = _public()


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _operations(name: str, function: Callable[..., Any]) -> Iterator[Operation]:
    """Yield the operations of one function, derived from its parameters, and its variants."""
    parameters = _parameters(function)
    outputs = tuple(parameter for parameter in parameters if parameter == "out")
    wrong = {parameter: WRONG[parameter] for parameter in parameters if parameter in WRONG}

    def good(device: str) -> Arguments:
        made = {**values(device), **OWN.get(name, lambda _: {})(device)}
        return {parameter: made[parameter] for parameter in parameters if parameter in made}

    legal = LEGAL.get(name, {})
    yield Operation(name, function, good, outputs, wrong, legal)
    for variant, change in VARIANTS.get(name, {}).items():
        yield Operation(f"{name} {variant}", function, lambda device, c=change: c(good(device)), outputs, {}, legal)  # type: ignore[misc]


OPERATIONS = tuple(operation for name, function in PUBLIC.items() for operation in _operations(name, function))


def unswept() -> list[str]:
    """Return the parameters of public functions that occur in no good call and have no known wrong value."""
    swept: dict[Any, set[str]] = {}
    for operation in OPERATIONS:
        swept.setdefault(operation.call, set()).update(operation.good("cpu"), operation.wrong)
    missing = {name: [p for p in _parameters(f) if p not in swept[f]] for name, f in PUBLIC.items()}
    return [f"{name}: {parameter}" for name, parameters in missing.items() for parameter in parameters]


class Plain(Tensor):
    """Subclass of Tensor without additional behaviour."""


class Wrapper(Tensor):
    """Subclass of Tensor without memory, which no kernel can read."""

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
    """Return a tensor whose storage was freed; it begins `begin` elements after the start of the storage."""
    storage = t.new_empty(begin + t.numel())
    view = storage[begin:].view(t.shape)
    storage.untyped_storage().resize_(0)
    return view


def _cut(t: Tensor) -> Tensor:
    """Return a tensor whose storage has only half of the tensor's bytes."""
    whole = t.clone()
    cut_short(whole)
    return whole


def cut_short(t: Tensor) -> None:
    """Shrink a tensor's storage to half of its bytes, in place."""
    storage = t.untyped_storage()
    storage.resize_(storage.nbytes() // 2)


def wrong_tensors(t: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield wrong values for a tensor argument, as (word that describes the change, value)."""
    for word, make in _BREAKS.items():
        try:
            made = make(t)
        except RuntimeError:
            if t.itemsize > 1:  # torch has few operators for elements of 8 bits
                raise
            continue
        if made is not None:
            yield word, made


_8_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e8m0fnu)
_BREAKS: dict[str, Callable[[Tensor], Any]] = {
    "another dtype": lambda t: t.to(torch.float64),
    "an integer dtype": lambda t: t.to(torch.int16),
    "on meta": lambda t: t.to("meta"),
    "on the CPU": lambda t: None if t.device.type == "cpu" else t.cpu(),
    "a string": lambda _: "x",
    "a number": lambda _: 3.5,
    "an object": lambda _: object(),
    "one less": lambda t: t[:-1].clone() if t.dim() == 1 else t[..., :-1].clone(),
    "one row less": lambda t: t[:-1],
    "eight columns less": lambda t: t[..., : max(t.shape[-1] - 8, 0)],
    "of another rank": lambda t: t[None],
    "a scalar": lambda t: t.flatten()[0],
    "empty": lambda t: t[:0],
    "no columns, empty": lambda t: t[..., :0],
    "transposed": lambda t: t.mT.clone().mT if t.dim() > 1 else None,
    "sparse": lambda t: t.to_sparse() if t.dim() > 1 else None,
    "every other": lambda t: torch.stack((t, t), -1)[..., 0],
    "expanded": lambda t: t[:1].expand_as(t),
    "misaligned": lambda t: t.new_empty(t.numel() + 1)[1:].copy_(t.flatten()).view(t.shape),
    "negated in the end": lambda t: None if t.dtype in (torch.bool, *_8_BIT_FLOATS) else torch._neg_view(t),
    "a lazy zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
    "freed": lambda t: _freed(t),
    "freed, not from its beginning": lambda t: _freed(t, 64),
    # A GPU's allocator may give the cut storage an address that a plan has seen, which is not looked at again.
    "cut short": lambda t: None if t.is_cuda else _cut(t),
    "of a plain subclass": lambda t: t.as_subclass(Plain),
    "of a wrapper": lambda t: Wrapper(t),
    "a parameter": lambda t: torch.nn.Parameter(t) if t.is_floating_point() else None,
}


def parts_of(value: Any) -> dict[Any, Tensor]:
    """Return the tensors of an argument, by the name that `with_part` takes.

    Of a list or tuple only the second tensor is returned.
    """
    if isinstance(value, Tensor):
        return {"": value}
    if isinstance(value, GateUp):
        return dict(value._asdict())
    if isinstance(value, (list, tuple)):
        return {1: value[1]}
    if dataclasses.is_dataclass(value):
        return {name: part for name, part in vars(value).items() if isinstance(part, Tensor)}
    return {}


def with_part(value: Any, name: Any, part: Any) -> Any:
    """Return an argument in which one tensor is replaced by `part`."""
    if isinstance(value, Tensor):
        return part
    if isinstance(value, GateUp):
        return value._replace(**{name: part})
    if isinstance(value, (list, tuple)):
        return type(value)([*value[:name], part, *value[name + 1 :]])
    return dataclasses.replace(value, **{name: part})


def overlaps(good: Arguments, out: str) -> Iterator[tuple[str, Arguments]]:
    """Yield calls in which an output begins at the last bytes of an input."""
    for its_part, target in parts_of(good[out]).items():
        for name, value in good.items():
            for part, source in parts_of(value).items() if name != out else ():
                memory = torch.zeros(source.nbytes + target.nbytes, dtype=torch.uint8, device=target.device)
                read = memory[: source.nbytes].view(source.dtype).view(source.shape).copy_(source)
                begin = max(source.nbytes - OVERLAP, 0)
                written = memory[begin : begin + target.nbytes].view(target.dtype).view(target.shape)
                given = {name: with_part(value, part, read), out: with_part(good[out], its_part, written)}
                yield f"{its_part} over {name} {part}", {**good, **given}


def wrong_calls(operation: Operation, good: Arguments) -> Iterator[tuple[str, str, Arguments]]:
    """Yield (argument name, word for the mistake, all arguments)."""
    for name, value in good.items():
        for part, tensor in parts_of(value).items():
            for word, wrong in wrong_tensors(tensor):
                if word in operation.legal.get(name, ()):
                    continue
                try:
                    broken = with_part(value, part, wrong)
                except (ValueError, TypeError, RuntimeError):  # refused by the class of the argument
                    continue
                yield name, f"{part} {word}".strip(), {**good, name: broken}
    parameters = inspect.signature(operation.call).parameters
    for name in good:
        if parameters[name].default is inspect.Parameter.empty:
            yield name, "None", {**good, name: None}
    for name, values in operation.wrong.items():
        for wrong in values:
            yield name, repr(wrong), {**good, name: wrong}
    for out in operation.outputs:
        for words, arguments in overlaps(good, out) if out in good else ():
            yield out, words, arguments


DISAGREE = ("dtype", "meta", "CPU", "less", "rank", "scalar", "empty")
"""Words of changes that make two arguments disagree, so that the error may name either argument."""


def _flat(result: Any) -> list[Tensor]:
    """Return the tensors of a result; quantised tensors are dequantised."""
    if hasattr(result, "dequantize") and not isinstance(result, Tensor):
        return [result.dequantize()]
    if isinstance(result, Routing):
        return [result.offs, result.row_of, result.weights]
    if isinstance(result, (tuple, list)):
        return [tensor for one in result if one is not None for tensor in _flat(one)]
    return [result.as_subclass(Tensor)]


def _on_cpu(value: Any) -> Any:
    """Return a value's content as plain CPU tensors; a value without memory is returned unchanged."""
    if isinstance(value, (list, tuple)):
        made = [_on_cpu(one) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if dataclasses.is_dataclass(value):
        parts = {name: _on_cpu(part) for name, part in vars(value).items()}
        copy = object.__new__(type(value))
        copy.__dict__.update(parts)
        return copy
    if not isinstance(value, Tensor) or isinstance(value, Wrapper) or value.is_meta or value.is_sparse:
        return value
    plain = value.as_subclass(Tensor).detach()
    if plain._is_zerotensor():
        return torch.zeros(plain.shape, dtype=plain.dtype)
    if not is_in_storage(plain):
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
    """Return text on how a call ended wrongly; empty if it ended right.

    It ends right if it raises an error that names the argument, or if its result is right.

    Args:
        operation: the function, and `arguments` its arguments.
        name, word: the changed argument and the word for the change; see `wrong_calls`.
        reference: calls a function with arguments on the CPU reference.
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


COLD, _, OF_OTHER_ROWS = BEFORE = ("cold", "warm", "of other rows")
"""The calls made before the wrong call: none, valid calls, or valid calls with fewer rows."""


def _fewer_rows(value: Any) -> Any:
    if isinstance(value, Routing) and value.logits is not None:
        return glulam.route(value.logits[:-8], CHOICES)
    if isinstance(value, Routing):
        return Routing.from_topk(value.ids[:-8], value.weights[:-8], value.num_experts)
    if isinstance(value, tuple) and not isinstance(value, GateUp):
        return tuple(map(_fewer_rows, value))
    if isinstance(value, MXFP8Tensor) and len(value.data) == ROWS:
        return MXFP8Tensor(value.data[:-8], value.scale[:-8])
    if isinstance(value, Tensor):
        cut = {ROWS: 8, TOKENS: 8, TOKENS * CHOICES: 8 * CHOICES}.get(len(value) if value.dim() else 0)
        return value[:-cut] if cut else value
    return value


def _with_fewer_rows(arguments: Arguments) -> Arguments:
    return {name: _fewer_rows(value) for name, value in arguments.items()}


def complaints(operation: Operation, device: str, reference: Callable[..., Any], before: str) -> list[str]:
    """Return one line for each wrong call that ends wrongly. `before`: one of BEFORE, the calls made beforehand.

    Good calls after the wrong ones must be right.
    """
    good = operation.good(device)
    for _ in range(0 if before == COLD else 3):
        first = operation.good(device)
        with torch.no_grad():
            operation.call(**(_with_fewer_rows(first) if before == OF_OTHER_ROWS else first))
    calls = [*wrong_calls(operation, good), ("", "good", operation.good(device))]
    lines = [(name, word, complaint(operation, name, word, given, reference)) for name, word, given in calls]
    return [f"{operation.name}: {name} {word}: {line}" for name, word, line in lines if line]


def _with_own_storages(value: Any) -> Any:
    """Return an argument in which each tensor, also in a list, has its own storage."""
    if isinstance(value, list):
        return [one.clone() for one in value]
    for name, part in parts_of(value).items():
        value = with_part(value, name, part.clone())
    return value


_OF_ROWS = {"offs", "token_of_row", "weight_of_row"}
UNREAD = {
    "moe": {"ids", "weights"},
    **dict.fromkeys(("permute", "combine"), {"ids", "weights", *_OF_ROWS}),
    "load_balancing_loss": {"weights", "row_of", *_OF_ROWS} - {"offs"},
}
"""Parts of a routing that a function does not read, by the function's name."""


def complaints_of_cuts(operation: Operation, device: str) -> list[str]:
    """Return a line for each tensor that is accepted although its storage was cut short after good calls with it."""
    lines = []
    for name, value in operation.good(device).items():
        unread = UNREAD.get(operation.call.__name__, set()) if name == "routing" else set()
        for part in parts_of(value).keys() - unread:
            forget_plans()
            good = {key: _with_own_storages(one) for key, one in operation.good(device).items()}
            with torch.no_grad():
                for _ in range(3):
                    operation.call(**good)
                cut_short(parts_of(good[name])[part])
                try:
                    operation.call(**good)
                except (ValueError, TypeError, RuntimeError) as error:
                    if re.search(rf"\b{name}\b.* cut short", str(error)):
                        continue
                    lines.append(f"{operation.name}: {name} {part}: {type(error).__name__}: {error!s:.200}")
                else:
                    lines.append(f"{operation.name}: {name} {part}: passes")
    return lines


def named(name: str) -> Operation:
    return next(operation for operation in OPERATIONS if operation.name == name)


TRAINED = {
    "grouped_mm": ("w", "offs", "bias_scale"),
    "grouped_mlp": ("x", "w1", "w2", "offs", "row_scale"),
    "grouped_mlp transposed": ("x", "w1", "w2", "offs", "row_scale"),
    "grouped_mlp mxfp8": ("x", "w1", "w2", "offs", "row_scale"),
    "post_mix": ("residual", "h_res", "h_post", "x", "bias"),
    "project 16-bit": ("x", "weight", "alpha_pre", "bias"),
}
"""Operations with a gradient, and for each the arguments that its backward reads."""
STEPS = [(operation, name) for operation in OPERATIONS for name in TRAINED.get(operation.name, ())]


def trained(operation: Operation, device: str) -> tuple[Arguments, list[Tensor]]:
    """Return arguments whose matrices require a gradient, and the results of a call."""
    arguments = {name: value for name, value in operation.good(device).items() if name not in operation.outputs}
    for value in arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
            value.requires_grad_()
    return arguments, _flat(operation.call(**arguments))


def complaint_of_a_step(operation: Operation, name: str, device: str) -> str:
    """Free an argument's storage, run backward, and return text on how it ended wrongly; empty: it ended right."""
    arguments, results = trained(operation, device)
    gradients = [torch.ones_like(result) for result in results]
    arguments[name].untyped_storage().resize_(0)
    try:
        torch.autograd.backward(results, gradients)
    except (ValueError, TypeError, RuntimeError) as error:
        return "" if re.search(rf"\b{name}\b.*freed", str(error)) else f"{type(error).__name__}: {error!s:.300}"
    return "passes"


def gradients_of(operation: Operation, device: str, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the gradients of a step whose incoming gradients are transformed by `change`."""
    arguments, results = trained(operation, device)
    incoming = [change(torch.linspace(-1, 1, r.numel(), device=device).view(r.shape).to(r.dtype)) for r in results]
    torch.autograd.backward(results, incoming)
    return {name: value.grad for name, value in arguments.items() if getattr(value, "grad", None) is not None}
