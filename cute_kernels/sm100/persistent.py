"""TensorMemoryGemm: the kernel of all GEMMs in this folder. Unlike in Hopper's kernel, one warp issues all MMAs, into
tensor memory, and other warpgroups run epilogues.

Persistent and warp-specialised, one CTA on each SM:

    warp(s)     role             waits for                              signals
    0           TMA loads        ring (tile), stages (empty)            stages (full, by transaction bytes)
    1           scheduler        ring (empty)                           ring (full)
    2           epilogue loads   ring (tile), loads (empty)             loads (full, by transaction bytes)
    2           bring scales, for weight gradients in MXFP8 (block_scaled_wgrad.py)
                                 ring (tile), stages (empty)            stages (full, by transaction bytes)
    3           MMA              ring (tile), stages (full),            stages (empty, by commit),
                                 accumulators (empty)                   accumulators (full, by commit)
    4 .. 11     epilogue, two warpgroups, which take alternate tiles
                                 ring (tile), accumulators (full),      accumulators (empty), ring (empty), turns,
                                 turns, loads (full)                    loads (empty)
    12, 13      gather rows, if rows come by index
                                 ring (tile), stages (empty)            stages (full, 1 a thread)
    14, 15      bring scales, for MXFP8 operands (block_scaled.py)
                                 ring (tile), stages (empty)            stages (full, 1 a thread)

    accumulators   two in tensor memory; a CTA's tile number t uses accumulator t % 2 (tensor_memory.py).
    ring, stages, loads, turns, slots   as on Hopper (sm90/persistent.py).

Timeline of a CTA's tile number t:

    1. The scheduler warp finds the tile and puts it into the ring, from which all other roles read it.
    2. The load warp copies k-tiles of A and B into stages as these become empty; it runs ahead of the MMA warp and into
       the next tile. Warps that gather rows or bring scales fill their share of the same stages.
    3. The MMA warp waits until accumulator t % 2 is empty, then for each full stage issues MMAs into it. A commit frees
       the stage once its MMAs have read it, and after the last k-tile a commit marks the accumulator as full.
    4. Epilogue warpgroup t % 2 fetches biases and row scales, waits until the accumulator is full, reads it slab by
       slab, and stores results through its staging slots. Reading the last slab empties the accumulator.
    5. Meanwhile the MMA warp multiplies tile t + 1 into the other accumulator, for the other warpgroup.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait

from ..device.select import select
from ..device.target import is_plain
from ..epilogue.sizes import THREADS
from ..schedule.groups import OFFS_OF_CALL, Groups
from ..schedule.work import STAGES, TileGrid, WorkRing
from ..sm90.budget import LOAD_REGISTERS
from ..sm90.mainloop.base import WARPS_PER_GROUP, Operands
from ..sm90.mainloop.gathered_rows import WARPS
from ..sm90.persistent import EPILOGUE_LOAD_WARP, LOAD_WARP, SCHEDULER_WARP, PersistentGemm
from ..sm90.turns import EPILOGUE_BARRIER, Turns, share_of
from . import budget
from .epilogue.store import Slots
from .gemm_policy import gemm_policy
from .mainloop import TensorCoreMainloop
from .tensor_memory import NUM_ACCUMULATORS, NUM_BARRIERS, ShuffledAccumulators, TensorMemory, TileAccumulators

MMA_WARP = 3
GATHERING_WARPGROUP = 1 + NUM_ACCUMULATORS


class TensorMemoryGemm(PersistentGemm):
    """Mixin that gives a GEMM of sm90/ accumulators in tensor memory. A subclass lists it before that GEMM's class.

    Attributes:
        role_registers: registers of each thread of the first warpgroup, whose warps have the roles 0 to 3.
        gathers: True if there is a gathering warpgroup.
    """

    role_registers = LOAD_REGISTERS
    slots_type = Slots
    mainloop_type: Any

    def __init__(self, spec: Any, *arguments: Any, **named: Any):
        super().__init__(spec, *arguments, **named)
        self.policy = gemm_policy(spec)
        self.accumulators_type = ShuffledAccumulators if is_plain("tmem_loads") else TileAccumulators
        self.gathers = self.mainloop_type.gathers
        self.threads = (1 + NUM_ACCUMULATORS + self.gathers) * THREADS

    def _smem_fields(self, mainloop: Any) -> dict[str, Any]:
        fields = {"accumulator_barriers": cute.struct.MemRange[Int64, NUM_BARRIERS], "tensor_memory": Int32}
        return fields | mainloop.smem_fields() | super()._smem_fields(mainloop)

    @cute.kernel
    def kernel(
        self, operands: Operands, stores: tuple, inputs: tuple, groups: Groups, grid: TileGrid,
    ):  # fmt: skip
        mainloop: Any = self.make_mainloop()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(thread // THREADS)
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(operands.atom_a)
            cpasync.prefetch_descriptor(operands.atom_b)

        storage = cutlass.utils.SmemAllocator().allocate(self._shared_storage(mainloop))
        gathers = operands.rows.address != 0
        stages = mainloop.make_pipeline(storage.stage_barriers.data_ptr(), gathers)
        has_loads, has_load_warp = self.shape.load_barriers > 0, self.shape.has_load_warp
        # Warps that read the ring: epilogues, loads and MMA, and those that the shape, the mainloop and the call add.
        consumer_warps = WARPS_PER_GROUP * NUM_ACCUMULATORS + 2 + has_load_warp + mainloop.scale_warps
        consumer_warps += select(gathers, Int32(WARPS), Int32(0))
        ring = WorkRing(storage.ring_barriers.data_ptr(), storage.ring.data_ptr(), consumer_warps, STAGES)
        barriers, place = storage.accumulator_barriers.data_ptr(), storage.tensor_memory.ptr
        memory = TensorMemory(self.tile, barriers, place, mainloop.scale_columns)
        if warp == MMA_WARP:
            memory.make()
        slots_layout = self._staging_layout()
        staging = storage.staging.get_tensor(slots_layout.outer, swizzle=slots_layout.inner)
        loads = self.epilogue.make_ring(storage.load_barriers.data_ptr(), staging) if const_expr(has_loads) else None
        alone = cute.make_layout((1, 1))
        pipeline_init_arrive(alone, is_relaxed=True)
        sA = storage.a.get_tensor(mainloop.a_layout.outer, swizzle=mainloop.a_layout.inner)
        sB = storage.b.get_tensor(mainloop.b_layout.outer, swizzle=mainloop.b_layout.inner)
        pipeline_init_wait(alone)
        cute.arch.sync_threads()
        memory.found()

        # Waits and early launches as on Hopper.
        if groups.encoding == OFFS_OF_CALL:
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        registers = budget.registers(self.role_registers, self.gathers, mainloop.scale_warps > 0)
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(registers.roles)
            if warp == LOAD_WARP:
                self._load_role(mainloop, operands, sA, sB, stages, ring)
            elif warp == SCHEDULER_WARP:
                self.make_scheduler(groups, grid, None).run(ring)
            elif warp == EPILOGUE_LOAD_WARP:
                if const_expr(has_load_warp):
                    self._epilogue_load_role(loads, inputs, ring)
                elif const_expr(mainloop.scale_warps > 0 and not self.gathers):
                    self._scale_role(mainloop, operands, storage, stages, ring, Int32(0))
            else:
                self._multiply_role(mainloop, operands, mainloop.operands_of(storage, memory), stages, ring, memory)
        elif warpgroup <= NUM_ACCUMULATORS:
            cute.arch.setmaxregister_increase(registers.epilogue)
            index, shape = warpgroup - 1, self.shape.slots
            own = staging[None, None, None, 0 if shape.shared else index]
            slots = self.slots_type(own, shape.dtype, index, thread % THREADS, shape.chunks)
            state = self.epilogue.make_state(inputs, groups, slots, self._own_smem(storage, index), loads)
            self._finish_role(mainloop, operands, state, stores, ring, memory, index)
        elif const_expr(self.gathers):
            cute.arch.setmaxregister_decrease(registers.gathering)
            rank = warp - GATHERING_WARPGROUP * WARPS_PER_GROUP
            if gathers & (rank < WARPS):
                self._gather_role(mainloop, operands, sA, sB, stages, ring, rank)
            if const_expr(mainloop.scale_warps > 0):
                if rank >= WARPS:
                    self._scale_role(mainloop, operands, storage, stages, ring, rank - WARPS)
        cute.arch.sync_threads()
        if warp == MMA_WARP:
            memory.free()

    @cute.jit
    def _scale_role(
        self, mainloop: Any, operands: Operands, storage: Any, stages: Any, ring: WorkRing, rank: Int32
    ):  # fmt: skip
        """Run a warp that brings scales to shared memory, tile by tile: of rows of x (rank 0) or of weights (rank 1).

        In a weight gradient, rank 0 brings the scales of both operands.

        Args:
            storage: the kernel's shared memory.
            stages: the pipeline of the stages.
            ring: the ring from which the scheduler's tiles are read.
            rank: 0 or 1.
        """
        cute.arch.griddepcontrol_wait()
        ring_state, state = ring.consumer_state(), mainloop.producer_state()
        work = ring.get(ring_state)
        while work.expert >= 0:
            state = mainloop.bring_scales(operands, storage, stages, state, work, rank)
            ring_state.advance()
            work = ring.get(ring_state)

    @cute.jit
    def _multiply_role(
        self, mainloop: TensorCoreMainloop, operands: Operands, read: tuple, stages: Any, ring: WorkRing,
        memory: TensorMemory,
    ):  # fmt: skip
        """Run the MMA warp: multiply tile by tile, into the two accumulators alternately.

        Args:
            read: the operands of MMAs, from `mainloop.operands_of`.
            stages: the pipeline of the stages.
            ring: the ring from which the scheduler's tiles are read.
            memory: the two accumulators.
        """
        cute.arch.griddepcontrol_wait()
        layout = mainloop.accumulator_layout()
        ring_state, stage = ring.consumer_state(), mainloop.consumer_state()
        work = ring.get(ring_state)
        while work.expert >= 0:
            turn = ring_state.count
            memory.wait_empty(turn)
            acc = memory.accumulator(turn, layout)
            num_k_tiles = mainloop.num_k_tiles(operands, work)
            stage = mainloop.multiply(acc, read, work, num_k_tiles, stages, stage)
            memory.commit(turn)
            ring_state.advance()
            work = ring.get(ring_state)

    @cute.jit
    def _finish_role(
        self, mainloop: TensorCoreMainloop, operands: Operands, state: Any, stores: tuple, ring: WorkRing,
        memory: TensorMemory, index: Int32,
    ):  # fmt: skip
        """Run an epilogue warpgroup: finish every second tile.

        Args:
            state: the epilogue's state.
            stores: the epilogue's outputs, one for each output tensor.
            ring: the ring from which the scheduler's tiles are read.
            memory: the two accumulators.
            index: index of the warpgroup and of its accumulator, 0 or 1.
        """
        cute.arch.griddepcontrol_wait()
        turns = Turns(EPILOGUE_BARRIER, self.shape.slots.shared, index)
        ring_state = ring.consumer_state()
        turns.open()
        work = ring.get(ring_state)
        while work.expert >= 0:
            turn = ring_state.count
            if turn % NUM_ACCUMULATORS == index:
                share = share_of(self.tile, turn, index)
                has_sums = None
                if const_expr(mainloop.may_be_empty):
                    has_sums = Boolean(mainloop.num_k_tiles(operands, work) > 0)
                prefetched = self.epilogue.begin(state, work, share)
                memory.wait_full(turn)
                turns.wait()
                acc = self.accumulators_type(memory, index, state.slots.thread, has_sums)
                self.epilogue.finish(state, acc, prefetched, stores, work, share)
                turns.pass_on()
            ring_state.advance()
            work = ring.get(ring_state)
        state.slots.drain()
