"""Checks of exact results, such as routings and bytes of quantised tensors, by the tests' own definitions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from support import mxfp4, mxfp8, routes
from torch import Tensor

from glulam import mhc
from glulam.formats.mxfp8.layout import BLOCK_SIZES

from .problem import Problem

GRAPHED = ("grouped_mm", "grouped_glu", "grouped_mlp", "grouped_bias_grad")
"""Functions that are captured as they are; group sizes of the others are part of larger objects."""
LARGEST_STEP = {"quantize_nvfp4": 1 / 6 + 1 / 16, "quantize_fp8_block": 1 / 16, "prepare_mxfp8_weight": 1 / 8,
                "prepare_mxfp4_weight": 0.26}  # fmt: skip
"""Largest error of a quantised number, relative to the largest of its row, by function name.

E2M1 has steps of 2 below 6 and E4M3 of 2^-3; an NVFP4 scale is itself rounded by 1 / 16; E2M1 clamps an MXFP4 block's
maximum of 7.99 to 6.
"""


def _rows_of_routing(made: Any) -> tuple[Any, Tensor, Tensor, int]:
    """Return the arguments of `routes.check_rows`: a routing, ids as local expert numbers, weights, and E."""
    ids = made.ids.long().cpu() - made.first
    if made.expert_map is not None:
        places = torch.cat((made.expert_map.cpu().long(), torch.tensor([-1])))
        ids = places[ids.clamp(-1, len(places) - 1)].where(ids >= 0, -1)
    return made, ids, made.weights.float().cpu(), made.num_experts


def _route(problem: Problem, given: dict[str, Any], made: Any) -> None:
    options = dict(problem.options)
    k, groups = options.pop("k", 1), options.get("num_groups", 1)
    limit = int(given["num_tokens"]) if "num_tokens" in given else None
    logits = given["logits"].float()
    told = {**options, "top_groups": max(groups - 1, 1), "num_tokens": limit, "bias": given.get("bias")}
    ids, weights = routes.route(logits, k, **told)
    assert made.ids.cpu().long().equal(ids), "other experts are chosen"
    torch.testing.assert_close(made.weights.cpu().double(), weights, rtol=1e-5, atol=1e-6)
    routes.check_rows(*_rows_of_routing(made))


def _from_topk(problem: Problem, given: dict[str, Any], made: Any) -> None:
    routes.check_rows(*_rows_of_routing(made))


def _quantize_mxfp8(problem: Problem, given: dict[str, Any], made: Any) -> None:
    options = problem.options
    axis, size = options.get("axis", "row"), BLOCK_SIZES[options.get("block", "1x32")]
    ends = list(itertools.accumulate(problem.sizes)) if "offs" in given else None
    both = made if axis == "both" else (made,)
    for one, its_axis in zip(both, ("row", "col") if axis == "both" else (axis,), strict=True):
        wanted = mxfp8.quantized(given["x"], its_axis, size, ends, padded=axis != "row")
        data = torch.zeros(one.data.numel(), dtype=torch.uint8)
        scales: list[Tensor] = []

        def memory(count: int, scales: list[Tensor] = scales) -> Tensor:
            scales.append(torch.zeros(count, dtype=torch.uint8))
            return scales[-1]

        mxfp8.store(wanted, data, options.get("scale_layout") == "swizzled", memory)
        used = _used(problem, given, its_axis, one.data)
        got = one.data.cpu().view(torch.uint8).reshape(-1)
        assert got[:used].equal(data[:used]), f"data of {its_axis}"


def _used(problem: Problem, given: dict[str, Any], axis: str, data: Tensor) -> int | None:
    """Return the number of elements in rows of groups, which alone are compared.

    None: the call has no groups, and all elements are compared.
    """
    return problem.rows * data.shape[-1] if "offs" in given else None


def _quantize_mxfp4(problem: Problem, given: dict[str, Any], made: Any) -> None:
    w = given["w"].float().reshape(-1, mxfp4.BLOCK)[:64]
    data, scale = made.data.cpu().reshape(-1, mxfp4.BLOCK // 2), made.scale.cpu().view(torch.uint8).reshape(-1)
    for block, bytes_of, byte in zip(w.tolist(), data.tolist(), scale.tolist(), strict=False):
        codes, wanted = mxfp4.quantized_block(block)
        assert byte == wanted and bytes_of == [a | b << 4 for a, b in zip(codes[::2], codes[1::2], strict=True)]


def _near(problem: Problem, given: dict[str, Any], made: Any) -> None:
    """Raise AssertionError unless a quantised weight is near the original weight."""
    w = given["w"].double()
    w = w.mT if problem.options.get("axis") == "col" and made.shape != w.shape else w
    got = made.dequantize().double().cpu()
    step = LARGEST_STEP[problem.call]
    if problem.call == "prepare_mxfp8_weight" and problem.options.get("axis") == "col":
        got = got if got.shape == w.shape else got.mT
    allowed = step * w.abs().amax() if problem.call == "quantize_fp8_block" else step * w.abs().amax(-1, keepdim=True)
    worst = float(((got - w).abs() - allowed).max())
    assert worst <= 0, f"off by {worst:.2g} more than a step"


def _square_blocks(problem: Problem, given: dict[str, Any], made: Any) -> None:
    assert made.data.cpu().view(torch.uint8).equal(given["data"].view(torch.uint8)), "data"
    wanted = given["scale"].view(torch.uint8).repeat_interleave(32, dim=1)
    assert made.scale.cpu().view(torch.uint8).equal(wanted), "scales"


def _boundary_in_mxfp8(problem: Problem, given: dict[str, Any], made: Any) -> None:
    """Check that x has the bytes of its quantisation, and that the other results equal a 16-bit call's."""
    options = dict(problem.options)
    size = BLOCK_SIZES[options.pop("x_block")]
    wanted = mhc.boundary(**{name: one.to(made.pre.device) for name, one in given.items()}, **options)
    for name, one in wanted._asdict().items():
        assert name == "x" and made.x is None or getattr(made, name).equal(one), name
    in_mxfp8 = mxfp8.quantized(wanted.x.cpu(), "row", size)
    assert made.x_mxfp8.data.cpu().view(torch.uint8).equal(in_mxfp8.data), "x_mxfp8's data"
    assert made.x_mxfp8.scale.cpu().view(torch.uint8).equal(in_mxfp8.scales), "x_mxfp8's scales"


CHECKS: dict[str, Callable[[Problem, dict[str, Any], Any], None]] = {
    "route": _route,
    "Routing.from_topk": _from_topk,
    "quantize_mxfp8": _quantize_mxfp8,
    "quantize_mxfp4": _quantize_mxfp4,
    **dict.fromkeys(("quantize_nvfp4", "quantize_fp8_block", "prepare_mxfp8_weight"), _near),
    "prepare_mxfp4_weight": lambda problem, given, made: None,  # the operators that read it compare its numbers
    "mxfp8_of_square_blocks": _square_blocks,
    "boundary in MXFP8": _boundary_in_mxfp8,
}
"""Checks of results by function name; a check raises AssertionError."""
