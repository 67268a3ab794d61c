"""The fake GPU's functions of hyper-connections; see `support.fake_gpu`.

Each takes addresses and numbers by name, reads memory by address and computes with the reference. The part of the
workspace that the kernel would use is filled with NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_kernels.architectures import ARCHS
from cute_kernels.mhc import boundary_backward_shapes as backward_shapes
from cute_kernels.mhc import boundary_shapes, shapes
from cute_kernels.specs import MhcSpec
from glulam.mhc import boundary_reference, reference

from .memory import dtype_in, memory, optional

F32 = torch.float32


def _fill(address: int, bytes_used: int) -> None:
    memory(address, bytes_used // 4, dtype=F32).fill_(math.nan)


def _write(places: list[Tensor | None], values: Any) -> None:
    for place, value in zip(places, values, strict=True):
        if place is not None:
            place.copy_(value)


class _Call:
    """Arguments of one call by name, and access to its tensors."""

    def __init__(self, spec: MhcSpec, at: Any) -> None:
        self.at = at
        self.dtype, self.n = getattr(torch, spec.dtype), spec.n
        self.arch = spec.arch

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor | None:
        return optional(getattr(self.at, name), *shape, dtype=dtype or self.dtype)

    def parameters(self) -> tuple[Any, ...]:
        """Return a projection's weight, alphas and bias."""
        rows, at = shapes.outputs(self.n), self.at
        alphas = tuple(self.get(f"alpha_{a}", 1, dtype=dtype_in(at.forms, 1)) for a in ("pre", "post", "res"))
        weight = self.get("weight", rows, self.n * at.width, dtype=dtype_in(at.forms, 0))
        return weight, alphas, self.get("bias", rows, dtype=dtype_in(at.forms, 2))


def _sinkhorn(c: _Call) -> None:
    shape, dtype = (c.at.matrices, c.n, c.n), dtype_in(c.at.forms, 0)
    logits, out = c.get("logits", *shape, dtype=dtype), c.get("out", *shape, dtype=dtype)
    _write([out], [reference.sinkhorn(logits, c.at.iters, c.at.eps)])


def _sinkhorn_backward(c: _Call) -> None:
    shape, dtype = (c.at.matrices, c.n, c.n), dtype_in(c.at.forms, 0)
    d_out, logits, d_logits = (c.get(name, *shape, dtype=dtype) for name in ("d_out", "logits", "d_logits"))
    _write([d_logits], [reference.sinkhorn_backward(d_out, logits, c.at.iters, c.at.eps)])


def _aggregate(c: _Call) -> None:
    t, w = c.at.tokens, c.at.width
    x, h_pre = c.get("x", t, c.n, w), c.get("h_pre", t, c.n, dtype=dtype_in(c.at.forms, 0))
    _write([c.get("out", t, w)], [reference.aggregate(x, h_pre)])


def _aggregate_backward(c: _Call) -> None:
    t, w, dtype = c.at.tokens, c.at.width, dtype_in(c.at.forms, 0)
    made = reference.aggregate_backward(
        c.get("d_out", t, w), c.get("x", t, c.n, w), c.get("h_pre", t, c.n, dtype=dtype)
    )
    _write([c.get("d_x", t, c.n, w), c.get("d_h_pre", t, c.n, dtype=dtype)], made)


def _mix_shapes(c: _Call) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    t, n, w, forms = c.at.tokens, c.n, c.at.width, c.at.forms
    return {
        "residual": ((t, n, w), c.dtype),
        "h_res": ((t, n, n), dtype_in(forms, 0)),
        "h_post": ((t, n), dtype_in(forms, 1)),
        "x": ((t, w), c.dtype),
        "bias": ((w,), dtype_in(forms, 2)),
    }


def _post_mix(c: _Call) -> None:
    given = [c.get(name, *shape, dtype=dtype) for name, (shape, dtype) in _mix_shapes(c).items()]
    _write([c.get("out", c.at.tokens, c.n, c.at.width)], [reference.post_mix(*given, bool(c.at.transpose))])


def _post_mix_backward(c: _Call) -> None:
    wanted = _mix_shapes(c)
    given = [c.get(name, *shape, dtype=dtype) for name, (shape, dtype) in wanted.items()]
    places = [c.get(f"d_{name}", *shape, dtype=dtype) for name, (shape, dtype) in wanted.items()]
    d_out = c.get("d_out", c.at.tokens, c.n, c.at.width)
    if places[-1] is not None:
        _fill(c.at.workspace, 4 * min(c.at.tokens, c.at.num_sms * shapes.CTAS_PER_SM) * c.at.width)
    _write(places, reference.post_mix_backward(d_out, *given, bool(c.at.transpose)))


def _check_slices(c: _Call) -> None:
    columns, at, cta = c.n * c.at.width, c.at, shapes.project_cta(c.arch)
    assert at.slices * at.slice_columns >= columns > (at.slices - 1) * at.slice_columns
    if dtype_in(at.forms, 0) is F32:
        taken = cta.warps * shapes.UNIT_TOKENS * shapes.exact_ring(c.n)[0]
        assert at.groups * taken >= at.tokens > (at.groups - 1) * taken
    else:
        assert at.slice_columns <= shapes.slice_capacity(cta, c.n, c.dtype.itemsize)
        assert at.slices * at.groups <= max(at.num_sms, at.slices)
    _fill(at.workspace, 4 * shapes.project_workspace(c.n, at.slices, at.tokens))


def _project(c: _Call) -> None:
    t, n = c.at.tokens, c.n
    _check_slices(c)
    made = reference.project(c.get("x", t, n, c.at.width), *c.parameters(), c.at.eps)
    places = [("h_pre", (n,)), ("h_post", (n,)), ("h_res", (n, n)), ("stats", (shapes.outputs(n) + 1,))]
    _write([c.get(name, t, *shape, dtype=F32) for name, shape in places], made)


def _project_backward(c: _Call) -> None:
    t, n, w, at = c.at.tokens, c.n, c.at.width, c.at
    rows = shapes.outputs(n)
    assert at.ctas >= 1 and 1 <= at.parts <= shapes.MAX_SPLITS
    _fill(at.workspace, shapes.backward_workspace(n, c.dtype.itemsize, w, t, at.ctas, at.parts).end)
    gradients = [
        c.get(name, t, *shape, dtype=F32) for name, shape in (("d_pre", (n,)), ("d_post", (n,)), ("d_res", (n, n)))
    ]
    x, stats = c.get("x", t, n, w), c.get("stats", t, rows + 1, dtype=F32)
    d_x, d_weight, sums = reference.project_backward(*gradients, x, *c.parameters(), stats, at.eps)
    d_aggregate, h_pre = c.get("d_aggregate", t, w), c.get("h_pre", t, n, dtype=F32)
    if d_aggregate is not None:
        d_x = reference.add_uses(d_x, d_aggregate, h_pre, c.get("d_residual", t, n, w))
    places = [
        c.get("d_x", t, n, w), c.get("d_weight", rows, n * w, dtype=dtype_in(at.forms, 0)),
        c.get("d_sums", rows + 3, dtype=F32),
    ]  # fmt: skip
    _write(places, [d_x, d_weight, sums])


def _coefficients(n: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a token's coefficients, by name."""
    return {"pre": (n,), "post": (n,), "comb": (n, n)}


def _numbers(at: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(at, name) for name in names}


def _boundary_stats(c: _Call) -> Tensor | None:
    return c.get("stats", c.at.tokens, shapes.outputs(c.n) + boundary_shapes.STATS, dtype=F32)


def _of_boundary(c: _Call) -> dict[str, Any]:
    """Return the tensors of a boundary by name."""
    t, n, w, forms = c.at.tokens, c.n, c.at.width, c.at.forms
    ends = _coefficients(n)
    sizes = {"weight": (shapes.outputs(n), n * w), "scale": (3,), "base": (shapes.outputs(n),), "norm_weight": (w,)}
    return {
        "y": c.get("y", t, w),
        "streams": c.get("streams", t, n, w),
        **{name: c.get(name, t, *end, dtype=F32) for name, end in ends.items()},
        **{name: c.get(name, *size, dtype=dtype_in(forms, i)) for i, (name, size) in enumerate(sizes.items())},
    }


def _boundary(c: _Call) -> None:
    t, n, w, at = c.at.tokens, c.n, c.at.width, c.at
    slices = boundary_shapes.slices_of(boundary_shapes.cta_of(c.arch, n), w)
    assert 1 <= at.parts <= boundary_shapes.tiles_of(t)
    _fill(at.workspace, 4 * boundary_shapes.workspace(n, slices, t, 0 if at.x else w))
    numbers = _numbers(at, "rms_eps", "eps", "norm_eps", "iters", "x_block")
    made = boundary_reference.boundary(**_of_boundary(c), **numbers)
    places = [c.get("new_streams", t, n, w), c.get("x", t, w)]
    places += [c.get(f"new_{name}", t, *end, dtype=F32) for name, end in _coefficients(n).items()]
    places += [_boundary_stats(c), c.get("x_data", t, w, dtype=torch.uint8)]
    places += [c.get("x_scale", t, -(-w // boundary_shapes.SCALE_COLUMNS), dtype=torch.uint8)]
    _write(places, [one if one is None or one.itemsize > 1 else one.view(torch.uint8) for one in made])


def _boundary_backward(c: _Call) -> None:
    t, n, w, at = c.at.tokens, c.n, c.at.width, c.at
    cta = backward_shapes.slice_cta(n, ARCHS[c.arch].smem_bytes - boundary_shapes.RESERVED_BYTES)
    assert at.token_ctas >= 1 and 1 <= at.parts <= -(-t // shapes.TOKEN_TILE)
    _fill(at.workspace, backward_shapes.backward_workspace(n, cta, w, t, at.token_ctas, at.parts).end)
    ends = _coefficients(n)
    gradients = {"d_new_streams": c.get("d_new_streams", t, n, w), "d_x": c.get("d_x", t, w)}
    gradients |= {f"d_new_{name}": c.get(f"d_new_{name}", t, *end, dtype=F32) for name, end in ends.items()}
    given = _of_boundary(c)
    made = boundary_reference.boundary_backward(
        **gradients, **given, x=c.get("x", t, w), stats=_boundary_stats(c), **_numbers(at, "eps", "iters")
    )
    names = ("y", "streams", "pre", "post", "comb", "weight", "norm_weight")
    places = [
        None if (one := given[name]) is None else c.get(f"d_{name}", *one.shape, dtype=one.dtype) for name in names
    ]
    _write([*places, c.get("d_sums", shapes.outputs(n) + 3, dtype=F32)], made)


KERNELS: dict[str, Callable[[_Call], None]] = {
    "sinkhorn": _sinkhorn,
    "sinkhorn_backward": _sinkhorn_backward,
    "aggregate": _aggregate,
    "aggregate_backward": _aggregate_backward,
    "post_mix": _post_mix,
    "post_mix_backward": _post_mix_backward,
    "project": _project,
    "project_backward": _project_backward,
    "pre_backward": _project_backward,
    "boundary": _boundary,
    "boundary_backward": _boundary_backward,
}


def run(spec: MhcSpec, at: Any) -> None:
    """Compute the kernel of a spec on its arguments, by name."""
    if getattr(at, "tokens", 1):
        KERNELS[spec.kernel](_Call(spec, at))
