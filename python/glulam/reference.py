"""The CPU reference of every operator, in plain torch operators, one expert at a time.

16-bit inputs compute in float32, and results are rounded once; float32 and float64 compute in their own dtype. Rows
after the last group are not written. Arguments for weights and biases hold E tensors: a packed tensor, a list, or any
object that can be indexed by an expert's number. `ends` is the cumulative end of each expert's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .activations import Activation, activate, activate_backward
from .host.experts import GateUp


def wide(x: Tensor) -> Tensor:
    """Return x in the dtype in which products are computed: float32 for 16-bit x, else x's own dtype."""
    return x.float() if x.dtype.itemsize == 2 else x


def groups_of(ends: Sequence[int], empty: bool = False) -> Iterator[tuple[int, slice]]:
    """Yield (expert, slice of its rows) for each expert that has rows; with `empty`, also for experts without rows."""
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if empty or end > begin:
            yield expert, slice(begin, end)


def _linear(x: Tensor, w: Any, biases: Any, expert: int, scale: Tensor | None, transpose_w: bool = False) -> Tensor:
    """Return x w^T + bias * scale for one expert, in x's dtype; with `transpose_w`, x w + bias * scale.

    biases None: no bias; scale None: 1.
    """
    weight = (torch.cat([half[expert] for half in w]) if isinstance(w, GateUp) else w[expert]).to(x.dtype)
    y: Tensor = x @ (weight if transpose_w else weight.mT)
    if biases is None:
        return y
    bias: Tensor = biases[expert].to(x.dtype)
    return y + (bias if scale is None else bias * scale)


def _column(scale: Tensor | None, rows: slice, like: Tensor) -> Tensor | None:
    return None if scale is None else scale[rows].to(like.dtype)[:, None]


def _scaled(values: Tensor, scale: Tensor | None) -> Tensor:
    return values if scale is None else values * scale


def grouped_mm(
    x: Tensor, w: Any, ends: Sequence[int], bias: Any, bias_scale: Tensor | None, transpose_w: bool, out: Tensor
) -> None:
    """Write out [T, N] = x w_e^T + bias_e * bias_scale; with `transpose_w`, x w_e + bias_e * bias_scale.

    bias None: no bias; bias_scale None: 1.
    """
    for expert, rows in groups_of(ends):
        values = wide(x[rows])
        scale = _column(bias_scale, rows, values)
        out[rows] = _linear(values, w, bias, expert, scale, transpose_w).to(out.dtype)


def grouped_glu(
    x: Tensor, w1: Any, ends: Sequence[int], bias: Any, row_scale: Tensor | None, function: Activation,
    out: Tensor, preact: Tensor | None, transpose_w: bool = False,
) -> None:  # fmt: skip
    """Write out [T, I] = activation(h) * row_scale with h = x w1_e^T + bias_e.

    preact [T, 2I or I] gets the preactivation h. None: h is not written.
    """
    for expert, rows in groups_of(ends):
        h = _linear(wide(x[rows]), w1, bias, expert, None, transpose_w)
        out[rows] = _scaled(activate(h, *function), _column(row_scale, rows, h)).to(out.dtype)
        if preact is not None:
            preact[rows] = h.to(preact.dtype)


def grouped_mlp(
    x: Tensor, w1: Any, w2: Any, ends: Sequence[int], b1: Any, b2: Any, row_scale: Tensor | None,
    function: Activation, out: Tensor, transpose_w: bool = False, preact: Tensor | None = None,
    rounded: Callable[[Tensor], Tensor] = lambda act: act,
) -> None:  # fmt: skip
    """Write the MLP's result to out [T, H], and the preactivation to preact [T, 2I or I] unless None.

    rounded: function that rounds the activation to the values that FC2 reads. row_scale multiplies the activation, and
    also the second bias.
    """
    for expert, rows in groups_of(ends):
        h = _linear(wide(x[rows]), w1, b1, expert, None, transpose_w)
        if preact is not None:
            preact[rows] = h.to(preact.dtype)
        scale = _column(row_scale, rows, h)
        mid = rounded(_scaled(activate(h, *function), scale))
        out[rows] = _linear(mid, w2, b2, expert, scale, transpose_w).to(out.dtype)


def grouped_dglu(
    dy: Tensor, w2: Any, preact: Tensor, ends: Sequence[int], row_scale: Tensor | None, function: Activation,
    dpreact: Tensor, out: Tensor, d_row_scale: Tensor | None, transpose_w: bool = False,
) -> None:  # fmt: skip
    """Write the gradients between FC2 and FC1: dpreact [T, 2I or I], the gradient of preact, and d_row_scale [T].

    Also writes the activation times row_scale to out [T, I].

    Args:
        dy: [T, H], the gradient of FC2's result.
        d_row_scale: None: it is not wanted.
    """
    for expert, rows in groups_of(ends):
        dm = _linear(wide(dy[rows]), w2, None, expert, None, not transpose_w)
        scale = _column(row_scale, rows, dm)
        dh, act = activate_backward(_scaled(dm, scale), preact[rows].to(dm.dtype), *function)
        dpreact[rows] = dh.to(dpreact.dtype)
        out[rows] = _scaled(act, scale).to(out.dtype)
        if d_row_scale is not None:
            d_row_scale[rows] = (dm * act).sum(dim=1).to(d_row_scale.dtype)


def grouped_wgrad(
    dy: Tensor, x: Tensor, ends: Sequence[int], adds: Sequence[bool], out: Any,
    rounded: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> None:  # fmt: skip
    """Write the weight gradients dy_e^T x_e to out, [E, N, K] or a list of E tensors [N, K].

    A group without rows writes zeros, or adds nothing.

    Args:
        adds: for each expert, True: the gradient is added to out; False: it overwrites out.
        rounded: function that rounds a group's rows to the values that the GEMM reads.
    """
    for expert, rows in groups_of(ends, empty=True):
        dw = wide(rounded(dy[rows])).mT @ wide(rounded(x[rows]))
        if not adds[expert]:
            out[expert].copy_(dw)
        elif rows.stop > rows.start:
            out[expert].add_(dw.to(out[expert].dtype))


def take_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return x[rows], or x if rows is None. Indices are clamped, since those after the last group may be any number."""
    if rows is None:
        return x
    matrix = x.view(torch.uint8) if x.element_size() == 1 else x  # index_select does not support FP8
    taken = matrix.index_select(0, rows.clamp(0, max(x.shape[0] - 1, 0)))
    return taken.view(x.dtype)
