"""Roles of the warps of a `PersistentGemm` (persistent.py): what each warp does for every tile that it reads."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..device.invariant import Invariant
from ..epilogue.shape import EpilogueShape, KernelEpilogue
from ..schedule.work import WorkRing
from ..tiles import TileConfig
from .mainloop.base import AFTER_EPILOGUE, AFTER_MMA, BEFORE_MMA, Mainloop, MmaTile, Operands
from .turns import EPILOGUE_BARRIER, MMA_BARRIER, Turns, share_of


class GemmRoles(Invariant):
    """The loops of all roles except the scheduler's. Each reads tiles from the scheduler's ring until the end mark, a
    tile with expert < 0.

    Attributes:
        tile: the spec's tile.
        shape: the epilogue's memory and warps (`epilogue.shape`).
        epilogue: the kernel's epilogue.
    """

    tile: TileConfig
    shape: EpilogueShape
    epilogue: KernelEpilogue

    @cute.jit
    def _load_role(
        self, mainloop: Mainloop, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages, ring: WorkRing
    ):  # fmt: skip
        ring_state = ring.consumer_state()
        state = mainloop.producer_state()
        work = ring.get(ring_state)
        ahead = mainloop.load_ahead(operands, sA, sB, stages, state, work)
        cute.arch.griddepcontrol_wait()
        while work.expert >= 0:
            state = mainloop.load(operands, sA, sB, stages, state, work, ahead)
            ahead = Int32(0)
            ring_state.advance()
            work = ring.get(ring_state)
        # A CTA must outlive the other CTA's multicasts into it and arrivals on its barriers.
        stages.producer_tail(state)

    @cute.jit
    def _gather_role(
        self, mainloop: Mainloop, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages, ring: WorkRing,
        rank: Int32,
    ):  # fmt: skip
        cute.arch.griddepcontrol_wait()
        ring_state = ring.consumer_state()
        state = mainloop.producer_state()
        work = ring.get(ring_state)
        while work.expert >= 0:
            state = mainloop.gather(operands, sA, sB, stages, state, work, rank)
            ring_state.advance()
            work = ring.get(ring_state)

    @cute.jit
    def _epilogue_load_role(self, loads, inputs: tuple, ring: WorkRing):
        cute.arch.griddepcontrol_wait()
        ring_state = ring.consumer_state()
        work = ring.get(ring_state)
        while work.expert >= 0:
            self.epilogue.load(loads, inputs, work, ring_state.count)
            ring_state.advance()
            work = ring.get(ring_state)

    @cute.jit
    def _decode_role(
        self, mainloop: Mainloop, operands: Operands, sB: cute.Tensor, narrow, stages, ring: WorkRing, rank: Int32
    ):  # fmt: skip
        """Decode the weights of every tile; run by each thread of a decoding warpgroup.

        The role does not wait for the previous kernel (griddepcontrol_wait), because that kernel does not write
        weights.

        Args:
            sB: operand B in shared memory, which receives the decoded weights.
            narrow: the shared-memory array of packed weights, before they are decoded.
            stages: the pipeline of the stages (full and empty barriers).
            ring: the ring from which the scheduler's tiles are read.
            rank: index of the warpgroup among the decoding warpgroups.
        """
        lines, slots = mainloop.lines(operands), narrow.data_ptr().toint() + rank * mainloop.slots_bytes
        ring_state = ring.consumer_state()
        state = mainloop.decoding_state()
        work = ring.get(ring_state)
        while work.expert >= 0:
            state = mainloop.decode(lines, operands, sB, slots, stages, state, work, rank)
            ring_state.advance()
            work = ring.get(ring_state)

    @cute.jit
    def _mma_role(
        self, mainloop: Mainloop, state, operands: Operands, stores: tuple, sA: cute.Tensor, sB: cute.Tensor,
        stages, ring: WorkRing, index: Int32, sums: Any,
    ):  # fmt: skip
        """Multiply and store tile by tile; run by each MMA warpgroup.

        `mainloop.looks_ahead` says when the warpgroup reads its next tile from the ring.

        Args:
            state: the epilogue's state.
            stores: the epilogue's outputs, one for each output tensor.
            sA, sB: operands A and B in shared memory, all stages.
            stages: the pipeline of the stages (full and empty barriers).
            ring: the ring from which the scheduler's tiles are read.
            index: the warpgroup's index among the MMA warpgroups.
            sums: the SharedSums of warpgroups that share the depth of a tile; None: they do not share it.
        """
        looks_ahead = mainloop.looks_ahead
        if const_expr(not mainloop.scales_are_ready):
            cute.arch.griddepcontrol_wait()
        mma_turns = Turns(MMA_BARRIER, self.tile.takes_turns, index)
        epilogue_turns = Turns(EPILOGUE_BARRIER, self.tile.takes_turns and self.shape.slots.shared, index)
        first_share = share_of(self.tile, Int32(0), index)
        fragments = mainloop.fragments(sA, sB, first_share.first_slab)
        acc = mainloop.accumulators()
        scales = mainloop.scales(operands, first_share)
        ring_state = ring.consumer_state()
        stage = mainloop.consumer_state()
        mma_turns.open()
        epilogue_turns.open()
        work = ring.get(ring_state)
        scales.begin(work)
        if const_expr(mainloop.scales_are_ready):
            cute.arch.griddepcontrol_wait()
        while work.expert >= 0:
            turn, next_work = ring_state.count, work
            num_k_tiles = mainloop.num_k_tiles(operands, work)
            if const_expr(looks_ahead == BEFORE_MMA):
                ring_state.advance()
                next_work = ring.get(ring_state)
            if mma_turns.is_mine(turn):
                tile = MmaTile(work, next_work, share_of(self.tile, turn, index), num_k_tiles)
                prefetched = self.epilogue.begin(state, work, tile.share)
                stage = mainloop.mma(acc, fragments, scales, tile, stages, stage, mma_turns)
                if const_expr(looks_ahead == AFTER_MMA):
                    ring_state.advance()
                    next_work = ring.get(ring_state)
                    scales.begin(next_work)
                epilogue_turns.wait()
                if const_expr(sums is None):
                    self.epilogue.finish(state, acc, prefetched, stores, work, tile.share)
                elif sums.collect(acc, turn):
                    self.epilogue.finish(state, acc, prefetched, stores, work, tile.share)
                epilogue_turns.pass_on()
            else:
                stage.advance(num_k_tiles)
            if const_expr(looks_ahead == AFTER_EPILOGUE):
                ring_state.advance()
                next_work = ring.get(ring_state)
            work = next_work
        state.slots.drain()
