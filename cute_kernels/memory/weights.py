"""TMA's view of expert weights. One descriptor serves packed weights, lists of experts and every GLU layout.

A TMA descriptor only multiplies coordinates by strides. So the expert is not a dimension of size E but an address:
coordinates (lo, hi) give an offset from the descriptor's base, lo in units of 16 bytes and hi in units of 1 GiB. An
expert of a packed tensor is at offset e * stride. The offset of an expert of a list comes from a table.

A gated layer's tile has equally many rows of the activated half (h = 0) and of the linear half (h = 1). Two loads
(`parts` = 2) fill one shared-memory tile [a rows | u rows], so that both halves of an output are in the same thread's
accumulators. The layouts differ only in the strides of a half's rows. The table shows shape : stride of dimension i:

    layout         row i of half h            dimension of i          distance of the halves
    concat         h I + i                    I : K                   I K
    interleaved    2 i + h                    I : 2 K                 K
    interleaved32  64 (i / 32) + 32 h + i%32  (32, I/32) : (K, 64 K)  32 K

Kernels are compiled for one layout, or for one of two forms, which get their strides at run time. Form "blocked" has
blocks of 32 rows; it serves every layout if a half has whole blocks. Form "strided" has rows at one stride; it serves
the first two layouts. In "concat" the halves may be two tensors, whose distance is the difference of their addresses;
the descriptor's base is then the lower address.

The descriptor has the bounds of i and of k, so a tile past an edge is filled with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from ..device.gmem import vector_at
from ..device.select import select
from ..schedule.work import WorkTile
from ..specs import BLOCK_ROWS, LAYOUTS

UNIT_BYTES = 16
LOG2_UNITS_PER_HI = 26
# The descriptor's bounds of (lo, hi), past any address, since only the bounds of i and k should clip.
LO_BOUND = 2**31 - 1
HI_BOUND = 2**20
# L2's policies, as PTX's `createpolicy.fractional.L2::evict_first` and `evict_last` make them on sm_90: for data that
# is not read again, and for data that others read while much is written.
EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000
LINE_BYTES = 128


class ExpertAddress(NamedTuple):
    """Offsets of experts' weights in units of 16 bytes. They count from the base address of the tensor that
    `weight_view` returns, which is the base of its TMA descriptor, if there is one.

    Attributes:
        table: the address of int64 [E], the offset of each expert; 0: weights are packed, at equal distances.
        expert_units: the distance from one packed expert to the next.
        part_units: the distance from an expert's first part (a, the activated half of a gated layer) to its second part
            (u, the linear half); negative if u is a tensor of its own at a lower address.
    """

    table: Int64
    expert_units: Int64
    part_units: Int64


class GateRows(NamedTuple):
    """The order of a gated layer's weight rows, known at run time.

    Row i of half h (0: a, the activated half; 1: u, the linear half) is weight row

        i % 32 * step + i / 32 * block + h * half

    Attributes:
        layout: the layout's number in specs.LAYOUTS.
        step, block, half: see the formula.
    """

    layout: Int32
    step: Int32
    block: Int32
    half: Int32


NO_GATE = GateRows(Int32(0), Int32(1), Int32(BLOCK_ROWS), Int32(0))
"""The order of the weight rows of a layer without a gate."""


def gate_rows(layout: Int32, rows: Int32) -> GateRows:
    """Return the order (`GateRows`) of an expert's weight rows.

    Args:
        layout: the layout's number in specs.LAYOUTS.
        rows: number of an expert's weight rows, both halves together.
    """
    is_concat, is_interleaved = layout == LAYOUTS["concat"], layout == LAYOUTS["interleaved"]
    half = select(is_concat, rows // 2, select(is_interleaved, Int32(1), Int32(BLOCK_ROWS)))
    block = select(is_concat, Int32(BLOCK_ROWS), Int32(2 * BLOCK_ROWS))
    return GateRows(layout, select(is_interleaved, Int32(2), Int32(1)), block, half)


def _units(elements: Int64, dtype: type[cutlass.Numeric]) -> Int64:
    """Return how many units of 16 bytes `elements` elements fill."""
    num_bytes = elements * (dtype.width // 8) if dtype.width >= 8 else elements // (8 // dtype.width)
    return num_bytes // UNIT_BYTES


def low_weights(low: cute.Tensor, address: Int64, width: Int32, transposed: bool) -> cute.Tensor:
    """Make the tensor of a LoRA adapter's packed matrices b_e: [1, width, r] or, if transposed, [1, r, width].

    The first dimension has size 1 instead of E, since kernels address experts by offsets.

    Args:
        low: the rows [T, r] that the matrices multiply: low b_e^T or, if transposed, low b_e. It gives r and the dtype.
        address: the address of the first matrix.
        width: number of columns of the product.
        transposed: which of the two orders the matrices have.
    """
    rank = low.shape[1]
    rows, columns = (rank, width) if transposed else (width, rank)
    pointer = cute.make_ptr(low.element_type, address, cute.AddressSpace.gmem, assumed_align=UNIT_BYTES)
    return cute.make_tensor(pointer, cute.make_layout((1, rows, columns), stride=(Int64(rows) * columns, columns, 1)))


def weight_rows(w: cute.Tensor, up: Int64 | None) -> Int32:
    """Return the number of an expert's weight rows, both parts (halves of a gated layer) together.

    Args:
        w: weights [E, N, K].
        up: the address of the second part, if it is a tensor of its own, laid out like w. 0 or None: w has all parts.
    """
    rows = Int32(w.shape[1])
    return rows if up is None else select(up != 0, 2 * rows, rows)


@cute.jit
def weight_view(
    w: cute.Tensor, table: Int64, parts: cutlass.Constexpr[int], layout: cutlass.Constexpr[str],
    transposed: cutlass.Constexpr[bool], gate: GateRows = NO_GATE, up: Int64 | None = None,
):  # fmt: skip
    """Return a view (n, k, lo, hi) of one part of w [E, N, K], and the ExpertAddress of w. n counts columns of the
    GEMM's result, k the contraction. (lo, hi) is the offset of an expert and part (see the top of this file).

    A part is a half of a gated layer's weight rows: a, the activated half, or u, the linear half. Other layers have one
    part.

    Args:
        table: the address of int64 [E], the offset of each expert in units of 16 bytes; 0: w is packed.
        parts: 2 for a gated layer, else 1.
        layout: a key of specs.LAYOUT_FORMS; if it has several layouts, `gate` says at run time which.
        transposed: the GEMM contracts over w's rows, so n is w's last dimension and k its rows. With two parts, these
            are the halves of "concat"; columns of the other layouts stay in memory's order.
        up: the address of the second part, if it is a tensor of its own, laid out like w; w is then the first part. 0
            or None: w has all parts.
    """
    _, rows, cols = w.shape
    row_stride = Int64(cols)
    half = rows // parts
    if const_expr(up is not None and not transposed):
        half = weight_rows(w, up) // parts
    if const_expr(layout == "interleaved32"):
        n_shape, n_stride = (BLOCK_ROWS, half // BLOCK_ROWS), (row_stride, 2 * BLOCK_ROWS * row_stride)
        part_stride = BLOCK_ROWS * row_stride
    elif const_expr(layout == "interleaved"):
        n_shape, n_stride, part_stride = half, 2 * row_stride, row_stride
    elif const_expr(layout == "blocked"):
        n_shape, n_stride = (BLOCK_ROWS, half // BLOCK_ROWS), (gate.step * row_stride, gate.block * row_stride)
        part_stride = gate.half * row_stride
    elif const_expr(layout == "strided"):
        n_shape, n_stride, part_stride = half, gate.step * row_stride, gate.half * row_stride
    else:
        n_shape, n_stride, part_stride = half, row_stride, half * row_stride

    unit = UNIT_BYTES * 8 // w.element_type.width
    address_shape, address_stride = (LO_BOUND, HI_BOUND), (unit, unit << LOG2_UNITS_PER_HI)
    if const_expr(transposed):
        part_stride = cols if const_expr(parts == 1) else cols // parts
        view = cute.make_layout((part_stride, rows, *address_shape), stride=(1, row_stride, *address_stride))
    else:
        view = cute.make_layout((n_shape, cols, *address_shape), stride=(n_stride, 1, *address_stride))
    base, part_units = w.iterator, _units(Int64(part_stride), w.element_type)
    if const_expr(up is not None):
        first = w.iterator.toint()
        part_units = select(up != 0, (up - first) // UNIT_BYTES, part_units)
        lowest = select((up != 0) & (up < first), up, first)
        base = cute.make_ptr(w.element_type, lowest, cute.AddressSpace.gmem, assumed_align=UNIT_BYTES)
    address = ExpertAddress(table, _units(Int64(w.stride[0]), w.element_type), part_units)
    return cute.make_tensor(base, view), address


@cute.jit
def expert_offset(address: ExpertAddress, expert: Int32) -> Int64:
    """Return the offset of an expert's weights in units of 16 bytes. `ExpertAddress` says from which base it counts."""
    units = expert * address.expert_units
    if address.table != 0:
        units = vector_at(Int64, address.table)[expert]
    return units


def part_offset(address: ExpertAddress, part: int) -> Int64:
    """Return the offset of an expert's part, in units of 16 bytes. It counts from the part at the lower address.

    part: 0 (a, the activated half of a gated layer, or all rows without a gate) or 1 (u, the linear half).
    """
    return cutlass.max(address.part_units if part else -address.part_units, Int64(0))


def row_of(layout: str, gate: GateRows, column: Int32, part: int | Int32, half: Int32) -> Int32:
    """Return the index of the weight row that gives an output column of a gated layer's preactivation.

    Args:
        layout: a key of specs.LAYOUT_FORMS; if it has several layouts, `gate` says at run time which.
        gate: the order of weight rows, read if `layout` has several.
        column: the column's index in its part.
        part: 0 (a, the activated half) or 1 (u, the linear half).
        half: columns of each part.
    """
    if layout not in LAYOUTS:
        return column % BLOCK_ROWS * gate.step + column // BLOCK_ROWS * gate.block + part * gate.half
    rows = {
        "concat": part * half + column,
        "interleaved": 2 * column + part,
        "interleaved32": column // BLOCK_ROWS * (2 * BLOCK_ROWS) + part * BLOCK_ROWS + column % BLOCK_ROWS,
    }
    return rows[layout]


def lo_hi(units: Int64) -> tuple[Int32, Int32]:
    """Return the coordinates (lo, hi) of an offset in units of 16 bytes."""
    return Int32(units & ((1 << LOG2_UNITS_PER_HI) - 1)), Int32(units >> LOG2_UNITS_PER_HI)


def evict_first(work: WorkTile, tile_m: int, row_bytes: Int32) -> Boolean:
    """Return True if a tile's weights should be the first to leave L2. This is so if no other tile reads them, because
    the group has only one row tile.

    Return False if weight rows do not begin at lines of L2: a line that leaves half-read is read from memory again
    (rows of 2880 bytes, gpt-oss-120b in MXFP8: 5 % more time).

    Args:
        tile_m: rows of a tile.
        row_bytes: bytes of a weight row.
    """
    is_read_once = (work.m_tile == 0) & (work.group_end - work.row <= tile_m)
    return is_read_once & (row_bytes % LINE_BYTES == 0)
