"""Trials of hyper-connections: the forwards, and the gradients of all their tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from cute_kernels.specs import MhcSpec

from .. import mhc
from ..formats.mxfp8.layout import BLOCK_SIZES, round_up
from ..formats.scaled import BLOCK, SOURCE_DTYPES
from ..mhc.boundary_mxfp8 import quantised
from ..names import Block
from .inputs import Size, randn
from .trial import Given, Trial, gradients

ERRORS = {torch.bfloat16: (2e-2, 5e-2), torch.float16: (5e-3, 1e-2), torch.float32: (1e-5, 1e-4)}
"""Largest allowed (error of results, error of gradients), by the narrowest dtype among a call's tensors."""
OF_PRODUCTS = (5e-3, 1e-2)
"""Largest allowed (error of results, error of gradients) of projections of float32 streams.

With 16-bit weights they use TF32.
"""
_CALLS: dict[str, Callable[..., Any]] = {
    "sinkhorn": mhc.sinkhorn, "aggregate": mhc.aggregate, "post_mix": mhc.post_mix, "project": mhc.project,
    "pre": mhc.pre, "boundary": mhc.boundary,
}  # fmt: skip
_WEIGHTS = {"project": 1, "pre": 1, "boundary": 5}
"""Position of the projection's weight among an operator's tensors."""


def _shapes(name: str, lead: tuple[int, ...], n: int, c: int) -> list[tuple[tuple[int, ...], bool | None]]:
    """Return the shape and dtype of each tensor that an operator takes.

    The dtype is True for the streams' dtype, False for the parameters' dtype, None for float32.

    Args:
        name: the operator.
        lead: dimensions of the tokens.
        n, c: number of streams, and their width.
    """
    rows = n * n + 2 * n
    of_projection: list[tuple[tuple[int, ...], bool | None]] = [
        ((*lead, n, c), True), ((rows, n * c), False), *[((1,), False)] * 3, ((rows,), False)
    ]  # fmt: skip
    shapes: dict[str, list[tuple[tuple[int, ...], bool | None]]] = {
        "sinkhorn": [((*lead, n, n), False)],
        "aggregate": [((*lead, n, c), True), ((*lead, n), False)],
        "post_mix": [
            ((*lead, n, c), True), ((*lead, n, n), False), ((*lead, n), False), ((*lead, c), True), ((c,), False)
        ],
        "project": of_projection,
        "pre": of_projection,
        "boundary": [
            ((*lead, c), True), ((*lead, n, c), True), *[((*lead, n), None)] * 2, ((*lead, n, n), None),
            ((rows, n * c), False), ((3,), False), ((rows,), False), ((c,), False),
        ],
    }  # fmt: skip
    return shapes[name]


def _inputs(name: str, lead: tuple[int, ...], n: int, c: int, dtype: torch.dtype, of_params: torch.dtype) -> Given:
    """Return random tensors for an operator, by name; tokens differ in scale.

    Args:
        name: the operator.
        lead: dimensions of the tokens.
        n, c: number of streams, and their width.
        dtype: dtype of the streams.
        of_params: dtype of the parameters.
    """
    made = {}
    for place, (shape, is_stream) in enumerate(_shapes(name, lead, n, c)):
        values = randn(*shape, seed=place)
        if values.dim() > 1:
            values *= torch.linspace(-1, 1, shape[0]).exp2().view(-1, *[1] * (values.dim() - 1))
        if place == _WEIGHTS.get(name):
            values /= (n * c) ** 0.5  # or every gate would be shut
        made[f"a{place}"] = values.to(torch.float32 if is_stream is None else dtype if is_stream else of_params)
    return made


def _results(name: str, given: Sequence[Tensor]) -> list[Tensor]:
    made = _CALLS[name](*given)
    return list(made) if isinstance(made, (tuple, list)) else [made]


def _upstream(place: int, result: Tensor) -> Tensor:
    """Return the gradient of a result: random numbers that every dtype holds exactly."""
    return randn(*result.shape, seed=100 + place, dtype=torch.bfloat16)


def _joined(made: Sequence[Tensor]) -> list[Tensor]:
    """Append gradients of one element to the last larger gradient, which is the bias's; return the gradients.

    A one-element gradient is a sum over tokens and may be near zero, so an error relative to itself would say nothing.
    """
    single = [one for one in made if one.numel() == 1]
    if not single or len(single) == len(made):
        return list(made)
    others = [one for one in made if one.numel() > 1]
    return [*others[:-1], torch.cat((others[-1], *single))]


def _in_mxfp8(given: Given, block: Block, return_x: bool) -> list[Tensor]:
    """Return the results of `mhc.boundary` with x in MXFP8; x's bytes are replaced by 1.0 or 0.0 each.

    1.0: the byte equals the byte that a separate quantisation of x gives.
    """
    tensors = list(given.values())
    wanted = mhc.boundary(*tensors)
    if wanted.x.dtype not in SOURCE_DTYPES:
        scales = wanted.x.new_ones(*wanted.x.shape[:-1], -(-wanted.x.shape[-1] // BLOCK))
        return [*wanted, torch.ones_like(wanted.x), scales]
    made = mhc.boundary(*tensors, x_block=block, return_x=return_x)
    parts = zip((made.x_mxfp8.data, made.x_mxfp8.scale), quantised(wanted.x, BLOCK_SIZES[block]), strict=True)
    equal = [(one.view(torch.uint8) == other.view(torch.uint8)).float() for one, other in parts]
    return [made.streams, wanted.x if made.x is None else made.x, made.pre, made.post, made.comb, *equal]


def _boundary_in_mxfp8(spec: MhcSpec, size: Size) -> Iterator[Trial]:
    streams: torch.dtype = getattr(torch, spec.dtype)
    for block, return_x in (("1x32", False), ("1x128", True)):
        for lead, width in size.streams:
            c = round_up(width, BLOCK)
            given = _inputs("boundary", lead, spec.n, c, streams, torch.float32)
            call = functools.partial(_in_mxfp8, block=cast(Block, block), return_x=return_x)
            yield Trial(f"{list(lead)} x {spec.n} x {c}, x in {block}", given, call, tolerance=ERRORS[streams][0])


def hyper_connection(spec: MhcSpec, size: Size) -> Iterator[Trial]:
    """Yield trials of a hyper-connection's kernel, with parameters in float32 and in 16 bits."""
    name, is_gradient = spec.kernel.removesuffix("_backward"), "backward" in spec.kernel
    streams: torch.dtype = getattr(torch, spec.dtype)

    def call(given: Given) -> list[Tensor]:
        tensors = list(given.values())
        if not is_gradient:
            return _results(name, tensors)
        return _joined(gradients(_CALLS[name], tensors, _upstream))

    for of_params in dict.fromkeys((torch.float32, torch.bfloat16 if streams is torch.float32 else streams)):
        for lead, c in size.streams:
            given = _inputs(name, lead, spec.n, c, streams, of_params)
            errors = [ERRORS[one.dtype] for one in given.values()]
            if name in ("project", "pre") and streams is torch.float32:
                errors.append(OF_PRODUCTS)
            what = f"{list(lead)} x {spec.n} x {c}, parameters in {of_params}"
            yield Trial(what, given, call, tolerance=max(each[is_gradient] for each in errors))
    if spec.kernel == "boundary":
        yield from _boundary_in_mxfp8(spec, size)
