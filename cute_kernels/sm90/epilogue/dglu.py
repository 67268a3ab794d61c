"""Hopper's epilogue of grouped_dglu: warp 2 of a CTA, the epilogue load warp, loads preactivations by TMA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...epilogue import dglu
from ...epilogue.base import ColumnSmem
from ...epilogue.dglu import DgluInputs, DgluState
from ...epilogue.shape import EpilogueShape, SlotShape, Smem
from ...schedule.groups import Groups
from ...schedule.work import WorkTile
from ..budget import PAIRS, dglu_slots
from .preact import MatrixPair, PreactRing, make_loads


class DgluEpilogue(dglu.DgluEpilogue):
    """Epilogue of grouped_dglu in which all warpgroups of a CTA share the staging slots (64 rows of 128 bytes each in
    shared memory).

    Chunks (64 x 64 outputs) are numbered over all tiles of the CTA. A chunk's number determines its slots
    (`preact.PreactRing`).

    ring_type: class of the ring through which these slots are filled and freed.
    """

    ring_type: type[PreactRing] = PreactRing

    @property
    def shape(self) -> EpilogueShape:
        slots = SlotShape(self.dtype, self.chunks_per_share, dglu_slots(self.spec.gated), shared=True)
        return replace(super().shape, slots=slots, load_barriers=2 * PAIRS, has_load_warp=True)

    def kernel_inputs(self, inputs: DgluInputs) -> DgluInputs:
        return inputs._replace(preact=make_loads(inputs.preact, self.preact_layout))

    def make_ring(self, barriers: cute.Pointer, staging: cute.Tensor) -> PreactRing:
        return self.ring_type(barriers, staging, self.preact_layout)

    def make_state(self, inputs: DgluInputs, groups: Groups, slots: Any, smem: Smem, ring: Any) -> DgluState:
        return DgluState(inputs, groups, slots, ColumnSmem(**smem), ring, MatrixPair)

    @cute.jit
    def load(self, ring: PreactRing, inputs: DgluInputs, work: WorkTile, turn: Int32):
        for chunk in cutlass.range_constexpr(self.chunks_per_share):
            for first_slab in cutlass.range_constexpr(self.tile.warpgroups_per_tile):
                ring.load(inputs.preact, *self._chunk_at(work, turn, first_slab, chunk))
