"""Checks of arguments, the same for every device: each names the argument, what it got and what it needs.

They read metadata only (shapes, dtypes, devices, strides), so they also hold for the fake tensors of a trace; `memory`
looks at memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from cute_kernels.formulas import NUMBERS
from cute_kernels.specs import ACTIVATIONS, GATED, GLU_LAYOUTS

from ..activations import INTERLEAVED32_BLOCK, Numbers
from ..errors import GradientNotSupported
from ..host import device as gpus
from ..host.experts import ExpertList, GateUp
from ..host.groups import leading
from .memory import ALIGNMENT_BYTES as ALIGNMENT_BYTES
from .memory import LOWEST_ADDRESS as LOWEST_ADDRESS
from .memory import check_alignment as check_alignment
from .memory import check_disjoint
from .memory import check_no_overlap as check_no_overlap
from .memory import check_plain as check_plain
from .memory import extent as extent
from .memory import is_transformed as is_transformed
from .memory import tensors_of as tensors_of

MAX_ROWS = 2**26
ALIGNMENT_ELEMENTS = 8  # 16-bit elements in 16 bytes: what TMA asks of a row's stride
KERNEL_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
REFERENCE_DTYPES = (*KERNEL_DTYPES, torch.float32, torch.float64)
SPLITS_DTYPES = (torch.int32, torch.int64)
PLAIN_RECIPE = "bf16"
"""The name of the one that quantises nothing."""

Experts = Tensor | Sequence[Tensor] | ExpertList
"""Packed, or one tensor an expert; an ExpertList is the latter once it was checked. A GateUp is a sequence of two."""


def runs_kernels(x: Tensor) -> bool:
    return x.device.type == gpus.KERNEL_DEVICE


def shape_text(shape: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def mismatch(op: str, name: str, shape: Sequence[Any], wanted: Sequence[Any], why: str) -> NoReturn:
    raise ValueError(f"{op}: {name} has shape {shape_text(shape)}; it must be {shape_text(wanted)}, since {why}")


def any_requires_grad(*arguments: Any) -> bool:
    """Whether an argument, or a tensor of a list, requires a gradient. What is no tensor is refused elsewhere."""
    for argument in arguments:
        for one in argument if isinstance(argument, (list, tuple)) else (argument,):
            if getattr(one, "requires_grad", False):
                return True
    return False


def refuse_gradients(op: str, **arguments: Any) -> None:
    """Called where grad mode is on, by operators without a gradient; raises GradientNotSupported for what needs one."""
    for name, value in arguments.items():
        if any_requires_grad(value):
            raise GradientNotSupported(
                f"{op} has no gradient, and {name} requires one; call it under torch.no_grad() or "
                f"torch.inference_mode(), or give {name}.detach() (grouped_mm, grouped_glu and grouped_mlp are "
                "differentiable)"
            )


def refuse_rows(op: str) -> NoReturn:
    """Raises GradientNotSupported: rows come by index, and an argument requires a gradient."""
    raise GradientNotSupported(
        f"{op}: an argument requires a gradient, and rows= has none; give x[rows], or use glulam.moe"
    )


def refuse_out(op: str, out: Any) -> None:
    """Called where a gradient will be recorded: raises GradientNotSupported, since autograd sees no writes to `out`."""
    if out is not None:
        raise GradientNotSupported(
            f"{op}: out is given, and an argument requires a gradient; leave out out, or call it under torch.no_grad()"
        )


def check_written(op: str, name: str, out: Tensor) -> None:
    """Called of outputs that were given. Raises GradientNotSupported where grad mode is on and one is trained."""
    if torch.is_grad_enabled() and out.requires_grad:
        raise GradientNotSupported(
            f"{op}: {name} requires a gradient, and autograd would not know that it was written; give {name}.detach(), "
            "or call it under torch.no_grad()"
        )


def check_is_tensor(op: str, name: str, value: Any, what: str) -> Tensor:
    """A tensor of any kind. `what`: what errors ask for."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; give {what}")
    return value


def check_tensor(
    op: str, name: str, value: Any, what: str, like: Tensor | None = None, *, dtypes: Sequence[torch.dtype] = (),
    cast: str = "cast it", shape: Sequence[int] | None = None, why: str = "",
) -> Tensor:  # fmt: skip
    """A contiguous tensor.

    Args:
        what: what errors ask for where it is no tensor.
        like: whose device it is on; None: any.
        dtypes: one of these; empty: any. cast: what errors say to do for one.
        shape: None: any. why: what it comes from.
    """
    tensor = check_is_tensor(op, name, value, what)
    if dtypes and tensor.dtype not in dtypes:
        raise TypeError(f"{op}: {name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}, so {cast}")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        mismatch(op, name, tensor.shape, shape, why)
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, others on {like.device}; move it to {like.device}")
    _check_contiguous(op, name, tensor)
    return tensor


def _same_device(op: str, name: str, tensor: Tensor | ExpertList, x: Tensor) -> None:
    if tensor.device != x.device:
        of = leading(op)
        raise ValueError(f"{op}: {name} is on {tensor.device} but {of} is on {x.device}; move it to {x.device}")


def check_like_x(op: str, name: str, tensor: Tensor | ExpertList, x: Tensor, wide: bool = False) -> None:
    """Same dtype and device as x; `wide`: a 16-bit x also goes with float32."""
    valid = gradient_dtypes(x) if wide else (x.dtype,)
    if tensor.dtype not in valid:
        of, dtypes = leading(op), " or ".join(map(str, valid))
        raise TypeError(f"{op}: {name} is {tensor.dtype} but {of} is {x.dtype}; it must be {dtypes}, so cast it")
    _same_device(op, name, tensor, x)


def _remedy(name: str) -> str:
    """Say how to get a contiguous tensor; a copy of an output would not be written."""
    return "give a buffer that is" if name.startswith("out") else "call .contiguous()"


def _check_contiguous(op: str, name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        strides = shape_text(tensor.stride())
        raise ValueError(f"{op}: {name} is not contiguous (strides {strides}); {_remedy(name)}")


def _refuse_transposed(op: str, name: str, weights: Tensor) -> None:
    """Refuse weights that are a transposed view: a contiguous copy may not be what the caller wants to multiply by."""
    if not weights.is_contiguous() and weights.mT.is_contiguous():
        raise ValueError(
            f"{op}: {name} is a transposed view (strides {shape_text(weights.stride())}); give the tensor without .mT: "
            "as it is where torch's grouped_mm takes its .mT, since rows are multiplied by an expert's transpose here, "
            "or with transpose_w=True where its experts are [inputs, outputs]"
        )


def gradient_dtypes(x: Tensor) -> tuple[torch.dtype, ...]:
    return (x.dtype, torch.float32) if x.dtype.itemsize == 2 else (x.dtype,)


def check_out_dtype(op: str, dtype: Any, x: Tensor) -> None:
    """None, x's dtype, or float32 where x is 16-bit."""
    if dtype is not None and dtype not in gradient_dtypes(x):
        valid = " or ".join(map(str, gradient_dtypes(x)))
        raise TypeError(f"{op}: out_dtype is {dtype}; it must be {valid}")


def check_x(op: str, x: Any, dtypes: tuple[torch.dtype, ...] | None = None) -> tuple[int, int]:
    """x [T, K], or the operand that leads in its place: its rows and columns. `dtypes`: the operator's own."""
    name = leading(op)
    x = check_is_tensor(op, name, x, "a tensor [T, K]")
    on_gpu = runs_kernels(x)
    valid = dtypes or (KERNEL_DTYPES if on_gpu else REFERENCE_DTYPES)
    if x.dtype not in valid:
        who = "kernels take" if on_gpu else "the CPU reference takes"
        raise TypeError(f"{op}: {name} is {x.dtype}; {who} {', '.join(map(str, valid))}, so cast it")
    if x.dim() != 2:
        raise ValueError(f"{op}: {name} has shape {shape_text(x.shape)}; give [T, K], as {name}.flatten(0, -2) does")
    rows, columns = x.shape
    if isinstance(rows, int) and rows >= MAX_ROWS:  # no limit of a program that is traced for any T: calls check
        raise ValueError(f"{op}: {name} has {rows} rows; at most 2**26 - 1 are possible, so call once for each part")
    check_width(op, name, columns, on_gpu)
    _check_rows(op, name, x)
    return rows, columns


def check_width(op: str, name: str, width: int, on_gpu: bool) -> None:
    """A matrix dimension: positive, and on a GPU a multiple of 8."""
    if width == 0:
        raise ValueError(f"{op}: {name} has a dimension of 0 elements; give at least one")
    if on_gpu and width % ALIGNMENT_ELEMENTS:
        raise ValueError(
            f"{op}: {name} has a dimension of {width} elements; it must be a positive multiple of "
            f"{ALIGNMENT_ELEMENTS} (16 bytes), so pad it with zeros"
        )


def _check_rows(op: str, name: str, matrix: Tensor) -> None:
    """Rows that are dense and do not overlap; on a GPU also 16-byte multiples apart."""
    rows, width = matrix.shape
    stride, inner = matrix.stride()
    if inner != 1 and width > 1:
        raise ValueError(f"{op}: {name} has stride {inner} along its rows; it must be 1, so {_remedy(name)}")
    if isinstance(rows, int) and rows <= 1:
        return
    if stride < width:
        raise ValueError(f"{op}: {name} has rows of {width} elements only {stride} apart; they must not overlap")
    if runs_kernels(matrix) and stride % ALIGNMENT_ELEMENTS:
        raise ValueError(
            f"{op}: {name} has rows {stride} elements apart; the distance must be a multiple of {ALIGNMENT_ELEMENTS} "
            f"(16 bytes), so pad the rows or {_remedy(name)}"
        )


def check_rows_like(op: str, name: str, matrix: Any, x: Tensor, columns: int | None, why: str) -> int:
    """A matrix [T, columns] of x's rows, dtype and device; `columns` None: any number. Its columns."""
    matrix = check_is_tensor(op, name, matrix, "a tensor [T, columns]")
    check_like_x(op, name, matrix, x)
    if matrix.dim() != 2 or matrix.shape[0] != x.shape[0] or columns not in (None, matrix.shape[1]):
        mismatch(op, name, matrix.shape, (x.shape[0], "columns" if columns is None else columns), why)
    width = int(matrix.shape[1])
    check_width(op, name, width, runs_kernels(x))
    _check_rows(op, name, matrix)
    return width


def check_experts(op: str, name: str, value: Any, x: Tensor, letters: str, wide: bool = False) -> tuple[int, ...]:
    """Packed [E, *one] or a list of E tensors, `letters` naming the dimensions, as "E 2I H": the packed shape.

    `wide`: float32 will do as well where x is 16-bit.
    """
    if isinstance(value, ExpertList):
        check_like_x(op, name, value, x, wide)
        return tuple(value.shape[1:])
    dims = letters.split()
    packed, one = shape_text(dims), shape_text(dims[1:])
    if not isinstance(value, (list, tuple)):
        tensor = check_is_tensor(op, name, value, f"a tensor {packed} or a list of E tensors {one}")
        _check_expert(op, name, tensor, x, dims, is_weight=len(dims) == 3, wide=wide)
        if tensor.shape[0] == 0:
            raise ValueError(f"{op}: {name} has 0 experts (E = 0); give at least one")
        return tuple(tensor.shape)
    if not value:
        raise ValueError(f"{op}: {name} is an empty list (E = 0); give at least one expert")
    for index, tensor in enumerate(value):
        label = f"{name}[{index}]"
        _check_expert(
            op, label, check_is_tensor(op, label, tensor, f"a tensor {one}"), x, dims[1:], len(dims) == 3, wide
        )
        if tensor.shape != value[0].shape:
            raise ValueError(
                f"{op}: {label} has shape {shape_text(tensor.shape)} but {name}[0] has {shape_text(value[0].shape)}; "
                "all experts have one shape"
            )
    return (len(value), *value[0].shape)


def _check_expert(
    op: str, name: str, tensor: Tensor, x: Tensor, dims: Sequence[str], is_weight: bool, wide: bool
) -> None:
    """A packed tensor, or one of a list."""
    if tensor.dim() != len(dims):
        raise ValueError(f"{op}: {name} has shape {shape_text(tensor.shape)}; give {shape_text(dims)}")
    check_like_x(op, name, tensor, x, wide)
    if empty := next((dim for dim, size in zip(dims, tensor.shape, strict=True) if not size and dim != "E"), None):
        raise ValueError(f"{op}: {name} has shape {shape_text(tensor.shape)}, so {empty} = 0; give at least one")
    if is_weight and not name.startswith("out"):
        _refuse_transposed(op, name, tensor)
    _check_contiguous(op, name, tensor)
    # torch calls a tensor contiguous whatever the stride of a dimension of one element; kernels divide it by this.
    unit = min(ALIGNMENT_ELEMENTS, ALIGNMENT_BYTES // tensor.itemsize)
    if is_weight and runs_kernels(tensor) and any(stride % unit for stride in tensor.stride()[:-1]):
        raise ValueError(
            f"{op}: {name} has strides {shape_text(tensor.stride())}; all but the last must be multiples of "
            f"{unit}, so rebuild the view, as {name}.flatten().view({name}.shape) does"
        )


def check_halves(op: str, name: str, value: GateUp, x: Tensor, letters: str) -> tuple[int, ...]:
    """The shape of either tensor, `letters` naming the dimensions."""
    for part, tensor in value._asdict().items():
        check_is_tensor(op, f"{name}.{part}", tensor, f"a tensor {shape_text(letters.split())}")
    gate, up = (check_experts(op, f"{name}.{part}", one, x, letters) for part, one in value._asdict().items())
    if gate != up:
        mismatch(op, f"{name}.up", up, gate, f"that is the shape of {name}.gate")
    return gate


def check_contraction(
    op: str, name: str, shape: tuple[int, ...], columns: int, transpose_w: bool, over_rows: bool
) -> int:
    """Return the columns of [T, columns] times an expert's weight.

    Args:
        shape: [E, N, K]. over_rows: whether rows are multiplied with w_e, and not with its transpose.
    """
    experts, n, k = shape
    contracted, width = (n, k) if over_rows else (k, n)
    if contracted != columns:
        wanted = (experts, columns, k) if over_rows else (experts, n, columns)
        other = f", or give transpose_w={not transpose_w}" if width == columns else ""
        mismatch(op, name, shape, wanted, f"{leading(op)} has {columns} columns{other}")
    return width


def check_bias(op: str, name: str, bias: Any, x: Tensor, experts: int, width: int) -> None:
    """Biases [E, width], packed or a list; None passes."""
    if bias is None:
        return
    shape = check_experts(op, name, bias, x, "E N")
    if shape != (experts, width):
        mismatch(op, name, shape, (experts, width), "there is one bias for each expert and weight row")


def check_gradient_buffers(op: str, out: Any, x: Tensor, shape: tuple[int, int, int]) -> None:
    """Weight gradients [E, N, K], packed or a list of E, of x's dtype or, where that is 16-bit, of float32."""
    got = check_experts(op, "out", out, x, "E N K", wide=True)
    if got != shape:
        mismatch(op, "out", got, shape, "that is the result's shape")
    if isinstance(out, (list, tuple)):
        if other := next((tensor.dtype for tensor in out if tensor.dtype != out[0].dtype), None):
            raise TypeError(f"{op}: out holds {out[0].dtype} and {other}; give all experts one dtype")
        check_disjoint(op, out)


def _check_numbers(
    op: str, name: str, value: Any, what: str, x: Tensor, dtypes: Sequence[torch.dtype], count: int | None, why: str,
    cast: str = "cast it",
) -> Tensor:  # fmt: skip
    """A vector where x is; `count` None: of any length, or of any rank."""
    shape = None if count is None else (count,)
    tensor = check_tensor(op, name, value, what, dtypes=dtypes, cast=cast, shape=shape, why=why)
    _same_device(op, name, tensor, x)
    return tensor


def check_scale(op: str, name: str, scale: Any, x: Tensor) -> None:
    """A float32 number for each row; float64 too where x is float64. None passes."""
    if scale is not None:
        dtypes = (torch.float32, torch.float64) if x.dtype == torch.float64 else (torch.float32,)
        why = f"it holds a number for each row of {leading(op)}"
        _check_numbers(op, name, scale, "a float32 tensor [T]", x, dtypes, x.shape[0], why, "call .float()")


def check_indices(op: str, rows: Any, x: Tensor, name: str = "rows", of: str = "x", count: int | None = None) -> None:
    """int32 [T], which of x's rows each row of an operand is. None passes; what they hold is not looked at.

    Args:
        name, of: what errors call the indices, and x. count: T, where something else tells it.
    """
    if rows is None:
        return
    why = "the other operand has so many rows"
    rows = _check_numbers(op, name, rows, "an int32 tensor [T]", x, (torch.int32,), count, why)
    if rows.dim() != 1:
        raise ValueError(f"{op}: {name} has shape {shape_text(rows.shape)}; give [T]")
    if rows.shape[0] and not x.shape[0]:
        raise ValueError(f"{op}: {name} has {rows.shape[0]} indices, but {of} has no row")


def check_mask(op: str, mask: Any, x: Tensor, experts: int) -> None:
    """bool [E] on x's device; None passes."""
    if mask is not None:
        why, cast = "there is one flag for each expert", "cast it: whether to add to each group's out"
        _check_numbers(op, "mask", mask, "a bool tensor [E]", x, (torch.bool,), experts, why, cast)


def count_groups(op: str, offs: Any, splits: Any, x: Tensor) -> int:
    """E, where no argument but the groups tells it; these are checked."""
    groups = offs if splits is None else splits
    count = len(groups) if isinstance(groups, (list, tuple)) else 0
    if isinstance(groups, Tensor) and groups.dim():
        count = int(groups.shape[0])
    check_groups(op, offs, splits, x, count)
    if not count:
        raise ValueError(f"{op}: {'offs' if splits is None else 'splits'} has 0 groups (E = 0); give at least one")
    return count


def check_groups(
    op: str, offs: Any, splits: Any, x: Tensor, experts: int, counted: str = "", name: str = "offs"
) -> None:
    """Exactly one of offs and splits, for `experts` groups. What they hold is not looked at.

    Args:
        counted: the argument that has that many experts, where the groups themselves do not tell.
        name: what errors call offs.
    """
    if (offs is None) == (splits is None):
        got = "neither offs nor splits" if offs is None else "both offs and splits"
        raise ValueError(f"{op}: got {got}; give offs (cumulative ends, int32 [E]) or splits (row counts), not both")
    why = "there is one number for each expert" + (f" of {counted}" if counted else "")
    if splits is None:
        _check_numbers(op, name, offs, "a tensor [E]", x, (torch.int32,), experts, why)
    elif isinstance(splits, (list, tuple)):
        if len(splits) != experts:
            mismatch(op, "splits", (len(splits),), (experts,), why)
    else:
        on_host = isinstance(splits, Tensor) and splits.device.type == "cpu"
        like = splits if on_host else x
        _check_numbers(op, "splits", splits, "a tensor [E] or a list", like, SPLITS_DTYPES, experts, why)


def check_choice(op: str, name: str, got: Any, valid: Sequence[str]) -> None:
    if not isinstance(got, str) or got not in valid:
        raise ValueError(f"{op}: {name} is {got!r}; choose one of {', '.join(valid)}")


def check_flag(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} is {value!r}; give True or False")


def check_number(op: str, name: str, value: Any) -> None:
    """A host number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; give a Python float")


def check_recipe(op: str, recipe: Any) -> None:
    """Of code that computes in 16 bits: other recipes were told apart before."""
    check_choice(op, "recipe", recipe, (PLAIN_RECIPE,))


def check_activation(op: str, activation: Any, glu_layout: Any) -> None:
    check_choice(op, "activation", activation, ACTIVATIONS)
    check_choice(op, "glu_layout", glu_layout, GLU_LAYOUTS)
    if activation not in GATED and glu_layout != "concat":
        raise ValueError(
            f"{op}: glu_layout is {glu_layout!r}, but activation {activation!r} has no gate to lay out; leave it out"
        )


def check_numbers(op: str, numbers: Numbers) -> None:
    """Check the numbers of all formulas: host numbers, not NaN, and what formulas ask of them."""
    for (name, number), value in zip(NUMBERS.items(), numbers, strict=True):
        check_number(op, name, value)
        if math.isnan(value):
            raise ValueError(f"{op}: {name} is NaN; give a number")
        if not number.is_valid(value):
            raise ValueError(f"{op}: {name} is {value}; {number.remedy}")


def check_w1(
    op: str, w1: Any, x: Tensor, activation: str, glu_layout: str, transpose_w: bool
) -> tuple[int, int, int]:  # fmt: skip
    """w1 [E, 2I or I, H], with `transpose_w` [E, H, 2I or I], or a GateUp of [E, I, H], where x has H columns: E, 2I or
    I, and I.
    """
    columns, in_halves = x.shape[1], isinstance(w1, GateUp)
    name = "w1.gate" if in_halves else "w1"
    if in_halves:
        _check_goes_in_halves(op, activation, glu_layout, transpose_w)
        shape = check_halves(op, "w1", w1, x, "E I H")
    else:
        shape = check_experts(op, "w1", w1, x, "E H 2I" if transpose_w else "E 2I H")
    experts, rows, hidden = (shape[0], shape[2], shape[1]) if transpose_w else shape
    if hidden != columns:
        wanted = (experts, columns, rows) if transpose_w else (experts, rows, columns)
        other = f", or give transpose_w={not transpose_w}" if rows == columns and not in_halves else ""
        mismatch(op, name, shape, wanted, f"x has {columns} columns{other}")
    rows = 2 * rows if in_halves else rows
    width = intermediate_width(op, "w1", rows, activation, glu_layout, "columns" if transpose_w else "rows")
    check_width(op, "w1 (I)", width, runs_kernels(x))
    return experts, rows, width


def _check_goes_in_halves(op: str, activation: str, glu_layout: str, transpose_w: bool) -> None:
    if activation not in GATED:
        raise ValueError(
            f"{op}: w1 is a GateUp, but activation {activation!r} has no gate; give w1 as one tensor [E, I, H]"
        )
    if glu_layout != "concat":
        raise ValueError(f"{op}: w1 is a GateUp, in two halves, and glu_layout is {glu_layout!r}; leave it out")
    if transpose_w:
        raise ValueError(f"{op}: w1 is a GateUp, which is not transposed; leave out transpose_w, or give one tensor")


def intermediate_width(op: str, name: str, rows: int, activation: str, glu_layout: str, of: str = "rows") -> int:
    """I, from the rows of w1: half of them where the activation has a gate. `of`: what errors call them."""
    if activation not in GATED:
        return rows
    if rows % 2:
        raise ValueError(
            f"{op}: {name} has {rows} {of} an expert; {activation} has a gate, so it needs 2I, an even number"
        )
    width = rows // 2
    if glu_layout == "interleaved32" and width % INTERLEAVED32_BLOCK:
        raise ValueError(
            f"{op}: {name} has 2I = {rows} {of} an expert, so I = {width}; glu_layout 'interleaved32' needs I to be a "
            f"multiple of {INTERLEAVED32_BLOCK}; use another layout or pad I with zeros"
        )
    return width
