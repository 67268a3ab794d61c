"""Helpers of all backward passes: buffers of gradients, group sizes, bias sums, and operator names in errors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..calls.autograd import without_graph
from ..calls.checks import check_alignment, check_no_overlap, check_plain, check_rows_like, runs_kernels
from ..calls.group_checks import check_groups
from ..calls.memory import MAX_SEEN
from ..choose.problem import changed
from ..host import device as gpus
from ..host import groups as group_sizes
from ..host.experts import ExpertList
from ..host.plans import Kept
from ..ops.grouped_mm import grouped_mm

WeightGrad = Callable[[Tensor, Tensor, dict[str, Any]], Any]
"""A function that computes a weight's gradient in place of `grouped_wgrad`, for example into a buffer of the caller.

It is called with (dy, x, dict of other keywords of `grouped_wgrad`: group sizes, indices of rows, recipe). It returns
the gradient, as `grouped_wgrad` does, or None, if autograd shall get none.
"""


def contracted(w: Any, transpose_w: bool) -> int:
    """Return K of a weight (packed or a list), the number of columns of the matrix x with which it is multiplied.

    Args:
        w: the weight.
        transpose_w: True: an expert's weight is [K, N]. False: [N, K].
    """
    columns: int = (w[0] if isinstance(w, (list, tuple)) else w).shape[-2 if transpose_w else -1]
    return columns


BIAS_COLUMNS = 8
"""A bias is passed as row 0 of an [8, N] weight, the smallest that a kernel accepts."""


@dataclasses.dataclass(frozen=True)
class Targets:
    """Destinations that the caller gives for a call's result and gradients.

    Attributes:
        out: buffer for the result. None: a new tensor.
        grad_input: buffer for x's gradient, with the layout of x. None: a new tensor.
        weights: {weight's name: function that is called instead of `grouped_wgrad` for the weight's gradient}.
    """

    out: Tensor | None = None
    grad_input: Tensor | None = None
    weights: Mapping[str, WeightGrad] = dataclasses.field(default_factory=dict)

    def given_grad_input(self, dy: Tensor) -> Tensor | None:
        """Check that the buffer for x's gradient shares no memory with the incoming gradient dy, and return the buffer.

        None: there is no buffer.
        """
        if self.grad_input is not None and not gpus.is_traced(dy):
            check_no_overlap("backward", "grad_input", self.grad_input, "the incoming gradient", dy)
        return self.grad_input

    def new_grad_input(self, dy: Tensor, columns: int) -> Tensor:
        """Return a matrix [T, columns] of zeros for x's gradient: `grad_input`, zeroed here, or else a new tensor.

        A backward calls this before the GEMM that writes the gradient, since the GEMM does not write rows after the
        last group.

        Args:
            dy: the incoming gradient, which has T rows, and the dtype and device for a new tensor.
            columns: the number of columns.
        """
        buffer = self.given_grad_input(dy)
        return dy.new_zeros(dy.shape[0], columns) if buffer is None else buffer.zero_()


ORDINARY = Targets()


_checked: Kept[set[tuple[int, ...]]] = Kept()
"""{key of a call with buffers (`key_of`): the tuples of addresses that passed `check_targets`}."""


def key_of(call: Any, *buffers: Tensor | None) -> Hashable:
    """Return a key of a call and its buffers, structured like the keys of `Plans.look_up`.

    It has everything on which checks of the call and the buffers depend, except the tensors' addresses, and whether
    their memory holds their values (`memory.check_plain`).
    """
    options: list[Any] = [type(call)]
    layouts: list[Any] = []
    for value in (*vars(call).values(), *buffers):
        part = _layout(value)
        if isinstance(value, Tensor):
            layouts.append(part)
            part = Tensor
        options.append(part)
    return (tuple(options), *layouts)


def _layout(value: Any) -> Hashable:
    """Return a value's entry in a key: a tensor's metadata; a tuple of entries for a list; any other value itself."""
    if isinstance(value, Tensor):
        return value.__class__, value.shape, value.dtype, value.device, value.stride(), value.requires_grad
    return tuple([_layout(one) for one in value]) if isinstance(value, (list, tuple)) else value


def check_targets(call: Any, targets: Targets) -> None:
    """Check the buffers in `targets` as an operator checks `out`, and that they do not require gradients.

    Layouts are checked once for each key (`key_of`), addresses whenever they are new.

    call: the call to which the buffers belong.

    Raises:
        ValueError, TypeError: a buffer does not fit.
    """
    out, grad_input = targets.out, targets.grad_input
    if out is None and grad_input is None:
        return
    key = key_of(call, out, grad_input), torch.is_grad_enabled()
    try:
        seen = _checked.find(key)
    except TypeError:  # an argument that cannot be hashed is not a tensor: the checks name it
        _check_layouts(call, targets)
        raise
    inputs = call.tensors()
    if seen is None:
        _check_layouts(call, targets)
        _checked.keep(key, seen := set())
    at = tuple([0 if t is None else t.data_ptr() for t in (out, grad_input, *(tensor for _, tensor in inputs))])
    if at in seen:
        return
    for name, buffer, others in (("out", out, inputs), ("grad_input", grad_input, [*inputs, ("out", out)])):
        if buffer is None:
            continue
        check_plain(call.op, name, buffer)
        if runs_kernels(buffer):
            check_alignment(call.op, name, buffer)
        for label, tensor in others:
            if tensor is not None and tensor.device == buffer.device:
                check_no_overlap(call.op, name, buffer, label, tensor)
    if len(seen) >= MAX_SEEN:
        seen.clear()
    seen.add(at)


def _check_layouts(call: Any, targets: Targets) -> None:
    """Raise ValueError or TypeError if the buffers for the result or x's gradient do not fit, judging by metadata."""
    op, x, grad_input = call.op, call.x, targets.grad_input
    for name in ("out", "grad_input"):
        buffer = getattr(targets, name)
        if isinstance(buffer, Tensor) and buffer.requires_grad:
            raise ValueError(f"{op}: {name} requires a gradient; give a buffer that does not, as {name}.detach() is")
    changed(call, out=targets.out).check()
    if grad_input is None:
        return
    if not (torch.is_grad_enabled() and x.requires_grad):
        raise ValueError(
            f"{op}: grad_input is given, but x's gradient will not be computed, since x requires none or grad mode is "
            "off; leave grad_input out"
        )
    check_rows_like(op, "grad_input", grad_input, x, x.shape[1], "that is the shape of x")


def tensor_groups(op: str, offs: Tensor | None, splits: Any, x: Tensor) -> dict[str, Any]:
    """Return group sizes as a keyword, {"offs": tensor} or {"splits": tensor}, on x's device.

    Splits in host memory are checked and copied here, so that all parts of a step share one copy.

    op: the operator's name, for errors.
    """
    if (offs is None) == (splits is None):
        check_groups(op, offs, splits, x, experts=0)  # raises
    if offs is not None:
        return {"offs": offs}
    if isinstance(splits, Tensor) and splits.device == x.device:
        return {"splits": splits}
    if runs_kernels(x):
        return {"splits": group_sizes.on_device(op, splits, x.shape[0], x.device)}
    group_sizes.ends(op, None, splits, x.shape[0])
    where = splits.device if isinstance(splits, Tensor) else "cpu"
    return {"splits": torch.as_tensor(splits, dtype=torch.int64, device=where)}


def scale_of_bias_grad(dy: Tensor, bias: Any, groups: dict[str, Any]) -> Tensor:
    """Compute the gradient of bias_scale: for each row, the sum of dy[row] * bias_e over columns.

    This is a GEMM with the bias as a row of a weight. Such a GEMM needs no copy of dy, and no copy of the bias for each
    row.

    Args:
        dy: [T, N]; if `groups` has `rows`, [num_tokens, N].
        bias: [E, N], or a list of E tensors.
        groups: keywords of `grouped_mm`: offs or splits, and `rows`, the indices of dy's rows.

    Returns:
        [T] in float32, or in dy's dtype if that is wider; zero after the last group.
    """
    tensors = bias.tensors if isinstance(bias, ExpertList) else bias
    packed = bias if isinstance(bias, Tensor) else torch.stack(tuple(tensors))
    weight = packed.new_zeros(packed.shape[0], BIAS_COLUMNS, packed.shape[1])
    weight[:, 0] = packed
    rows = groups.get("rows")
    num_rows = (dy if rows is None else rows).shape[0]
    sums = grouped_mm(dy, weight, **groups, out=dy.new_zeros(num_rows, BIAS_COLUMNS))[:, 0]
    return sums.to(torch.promote_types(dy.dtype, torch.float32))


@contextlib.contextmanager
def backward_of(op: str) -> Iterator[None]:
    """Context of a backward: autograd records no graph, and errors of operators called in it name `op`'s backward."""
    with without_graph(), group_sizes.part_of(op):
        try:
            yield
        except (ValueError, TypeError) as error:
            if type(error) not in (ValueError, TypeError) or str(error).startswith(f"{op}: "):
                raise
            raise type(error)(f"{op}'s backward: {str(error).removeprefix('backward: ')}") from error
