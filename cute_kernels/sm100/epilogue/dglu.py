"""Blackwell's epilogue of grouped_dglu: Hopper's, but with preactivations loaded in boxes of 16 rows (store.py)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from ...epilogue.dglu import DgluInputs
from ...epilogue.preact import PreactLayout
from ...epilogue.sizes import COLS
from ...epilogue.slots import smem_layout
from ...sm90.epilogue import dglu, preact
from ..tensor_memory import SLAB_LANES
from .store import box_copies, boxes_at


def make_loads(tensor: cute.Tensor, layout: PreactLayout) -> preact.PreactLoads:
    """Host side: make the TMA descriptor that loads boxes of 16 rows of preactivations into a slot (a buffer of 64 rows
    in shared memory).

    Args:
        tensor: the preactivation, [T, 2I] or, without a gate, [T, I].
        layout: where a and u of the gate lie in a row of the preactivation.
    """
    smem = smem_layout(tensor.element_type, rows=SLAB_LANES)
    op = cpasync.CopyBulkTensorTileG2SOp()
    return preact.PreactLoads(*cpasync.make_tiled_tma_atom(op, layout.view(tensor), smem, (SLAB_LANES, COLS)))


class PreactRing(preact.PreactRing):
    """Hopper's ring of preactivations, filled by one TMA copy for each box of 16 rows."""

    @cute.jit
    def bring(
        self, loads: preact.PreactLoads, row: Int32, at: Int32, half: cutlass.Constexpr[int | None], slot: Int32,
        barrier: cute.Pointer,
    ):  # fmt: skip
        """Start to load one slot (64 rows in shared memory) of preactivations, box by box.

        Args:
            loads: the TMA descriptor (`make_loads`).
            row, at, half: the slot's first row, first column, and half of the columns (0 or 1); half None: the tensor
                has no mode for halves.
            slot: the slot's index.
            barrier: the mbarrier that the bytes complete.
        """
        view = loads.tensor if const_expr(half is None) else loads.tensor[None, None, half]
        for target, source in box_copies(loads.atom, self.smem, boxes_at(view, row, at, COLS), slot):
            cute.copy(loads.atom, source, target, tma_bar_ptr=barrier)


class DgluEpilogue(dglu.DgluEpilogue):
    """Hopper's epilogue of grouped_dglu, which loads preactivations in boxes of 16 rows."""

    ring_type = PreactRing

    def kernel_inputs(self, inputs: DgluInputs) -> DgluInputs:
        return inputs._replace(preact=make_loads(inputs.preact, self.preact_layout))
