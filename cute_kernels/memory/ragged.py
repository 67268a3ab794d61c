"""Views of a group's rows that TMA clips at the group's end. The TMA descriptor is the same for all groups."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

# ROW_BOUND: bound of the row mode. WRAP_BYTES: the stride that cancels it in address arithmetic, as 2^30 x 2^34 = 2^64
# = 0.
ROW_BOUND = 2**30
WRAP_BYTES = 2**34
MODE_BOUND = 2**31 - 1


def ragged_rows(tensor: cute.Tensor) -> cute.Tensor:
    """Make a view (row, column modes..., wrap, end) of tensor (T, column modes...) whose rows can be clipped anywhere;
    `clipped` does that.

    TMA clips at the bounds of a mode. A descriptor fixes these, but a group may end at any row. So the row mode gets
    ROW_BOUND rows and is entered from its end: the coordinate of the group's last row is ROW_BOUND - 1. Two more modes
    correct the address. `wrap`, at coordinate ROW_BOUND, has a stride of WRAP_BYTES less a row, which cancels ROW_BOUND
    rows modulo 2^64. `end` is a second mode of rows, whose coordinate is the group's end. With rows of S bytes:

        (row + ROW_BOUND - end) S + ROW_BOUND (2^34 - S) + end S = row S   modulo 2^64

    Stores past the end are dropped, loads there give zeros, and no descriptor changes between groups. (If the base were
    moved back instead, stores would work but loads would fault: a clipped load still touches the base.)
    """
    row_stride = tensor.stride[0]
    wrap_stride = WRAP_BYTES * 8 // tensor.element_type.width - row_stride
    shape = (ROW_BOUND, *tensor.shape[1:], MODE_BOUND, MODE_BOUND)
    stride = (*tensor.stride, wrap_stride, row_stride)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def clipped(view: cute.Tensor, row: Int32, end: Int32, row_mode: int = 0) -> cute.Tensor:
    """Return the rows `row` .. `end` - 1 of a ragged view, without the modes `wrap` and `end`.

    Args:
        view: a view that `ragged_rows` made; its modes except `wrap` and `end` may be reordered.
        row_mode: the mode of the view that counts rows.
    """
    modes = cute.rank(view) - 2
    at = (*[None] * modes, ROW_BOUND, end)
    start = [0] * modes
    start[row_mode] = row + ROW_BOUND - end
    return cute.domain_offset(tuple(start), view[at])
