"""PersistentGemm: the kernel of every GEMM in this folder. A scheduler, a mainloop and an epilogue are its parts.

Persistent and warp-specialised: `tile.ctas_per_sm` CTAs on each SM (mostly one), in clusters that share operand tiles
by multicast.

    warp(s)              role             waits for                         signals
    0                    TMA loads        ring (tile), stages (empty)       stages (full, by transaction bytes)
    1                    scheduler        ring (empty)                      ring (full)
    2                    epilogue loads   ring (tile), loads (empty)        loads (full, by transaction bytes)
    2 and 3              gather rows, if an operand's rows come by index; 0 and 3 if warp 2 loads for the epilogue
                                          ring (tile), stages (empty)       stages (full, 1 a thread)
    4 .. 3 + 4 n         MMA, n warpgroups
                                          ring (tile), turns, sums,         stages (empty), ring (empty), turns,
                                          stages (full), loads (full)       loads (empty)
                                          decoded (full)                    decoded (empty)
    from 4 + 4 n on      decode weights, if the mainloop has decoding warpgroups, which take turns at k-tiles:
                         from memory into a stage
                                          ring (tile), stages (empty)       stages (full, 1 a thread), ring (empty)
                         or from a stage's packed weights into a ring of decoded k-tiles (mainloop/decoded_fp8.py)
                                          ring (tile), stages (full),       stages (empty), decoded (full, 1 a thread),
                                          decoded (empty)                   ring (empty)

    cooperative   n = tile.m / 64 warpgroups share every tile, 64 rows each.
    pingpong      n = 2 warpgroups take every other tile each; the epilogue of one runs during the MMAs of the other.
    swapped       weights are the rows of the MMA; warpgroups share every tile, 64 or 128 weight rows each, or every
                  second or fourth k-tile each (split_depth.py); or one warpgroup multiplies all weight rows, which
                  other warpgroups decode.

    ring      WorkRing, 4 slots, or 2 if clusters draw tickets. full: 1 arrival (scheduler); empty: 1 a consumer warp.
              Every warp of another role in this table reads every tile, and frees the slot once it has read it.
    stages    PipelineTmaAsync, as many stages as fit. full: the bytes of A and B; empty: 1 arrival from each warp that
              works on the tile, in each CTA that shares the stage.
    tickets   if clusters draw them: the first CTA draws a ticket for the cluster and sends it to the second CTA
              (schedule/tickets.py).
    loads     tensors that the epilogue combines with its accumulators, if they come by TMA: from the epilogue load warp
              (sm90/epilogue/preact.py), or from the warp that stores (sm90/epilogue/slot_loads.py).
    turns     pingpong only. Named barriers 3 + warpgroup order the warpgroups at the tensor cores; named barriers
              5 + warpgroup order their epilogues, if these share staging slots.
    sums      named barrier 7, if warpgroups share the depth of a tile: all MMA warpgroups have written their sums.
    slots     a warpgroup's staging slots for TMA stores, paced by bulk groups; named barrier 1 + warpgroup.

A tile, from start to end:

1. The scheduler writes the tile's coordinates into a slot of the ring, up to 4 (or 2) tiles ahead of the other roles.
2. The TMA warp reads the tile. For each k-tile it waits for an empty stage and starts the copies of A and B; the
   gathering or decoding warps fill their part of the same stages. When the tile has all its copies, the TMA warp goes
   on with the next tile, so that stages fill while an epilogue runs.
3. An MMA warpgroup reads the tile, starts loading small inputs such as the bias, waits for its turn (pingpong) and
   multiplies stage by stage. It frees a stage when the wgmmas that read it have ended.
4. The warpgroup passes the turn on and runs the epilogue: it turns accumulators into results, writes them into staging
   slots, and one of its warps starts TMA stores from there.
5. A tile with expert < 0 ends every role. The TMA warp first waits until all stages are empty, because the other CTA of
   a cluster may still write into this one; MMA warpgroups first wait until their stores have read the slots.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait

from ..device.naming import name_kernel
from ..device.select import select
from ..epilogue.shape import KernelEpilogue, Smem
from ..epilogue.sizes import THREADS
from ..epilogue.slots import smem_layout
from ..schedule.groups import OFFS_INT32, OFFS_OF_CALL, Groups
from ..schedule.tickets import BROADCAST_SLOTS, NUM_BARRIERS, Tickets
from ..schedule.tile_scheduler import GroupTileScheduler
from ..schedule.work import SLOT_WORDS, STAGES, TICKET_STAGES, TileGrid, WorkRing
from ..specs import GemmSpec
from . import budget
from .epilogue.store import Slots
from .gemm_policy import gemm_policy
from .mainloop.base import WARPS_PER_GROUP, Mainloop, Operands
from .roles import GemmRoles
from .split_depth import SharedSums, sums_size

LOAD_WARP, SCHEDULER_WARP, EPILOGUE_LOAD_WARP = 0, 1, 2


class PersistentGemm(GemmRoles):
    """The kernel of one spec. A subclass makes the mainloop and the scheduler; the caller passes the epilogue.

    Attributes:
        dtype: element type of the operands that are not decoded.
        load_registers: registers of a thread of the load warpgroup.
        decoding_warpgroups: number of warpgroups that only decode weights; most kernels have 0.
        beside_decoding: registers of a thread by kind of warpgroup; used if there are decoding warpgroups.
        slots_type: class of the staging slots through which MMA warpgroups store results.
    """

    load_registers = budget.LOAD_REGISTERS
    decoding_warpgroups = 0
    beside_decoding = budget.BESIDE_DECODING
    slots_type: Any = Slots

    def __init__(self, spec: GemmSpec, dtype: type[cutlass.Numeric], epilogue: KernelEpilogue):
        self.name = spec.name
        self.dtype = dtype
        self.tile = tile = spec.tile
        self.policy = gemm_policy(spec)
        self.epilogue = epilogue
        self.shape = epilogue.shape
        self.num_warpgroups = tile.warpgroups
        self.threads = (1 + self.num_warpgroups + self.decoding_warpgroups) * THREADS
        self.cluster_size = tile.cluster_m * tile.cluster_n

    def make_mainloop(self) -> Mainloop:
        raise NotImplementedError

    def make_scheduler(self, groups: Groups, grid: TileGrid, tickets: Tickets | None) -> GroupTileScheduler:
        raise NotImplementedError

    @property
    def first_spare_warp(self) -> int:
        """First warp of the load warpgroup that only gathers rows: 2, or 3 if warp 2 loads for the epilogue."""
        return EPILOGUE_LOAD_WARP + self.shape.has_load_warp

    @property
    def _registers(self) -> tuple[int, int]:
        """Registers of a thread of the load warpgroup, and of a thread of an MMA warpgroup."""
        if self.decoding_warpgroups:
            return self.beside_decoding.load, self.beside_decoding.mma
        return budget.registers(self.tile, self.load_registers)

    @property
    def _redistributes(self) -> bool:
        """True if warpgroups move registers by setmaxnreg. One MMA warpgroup alone has enough registers from the
        launch.
        """
        return self.num_warpgroups > 1 or self.decoding_warpgroups > 0

    @property
    def smem_percent(self) -> int | None:
        """Percentage of the memory for L1 and shared memory that becomes shared memory; None: no preference.

        Set only if several CTAs share an SM.
        """
        return None

    @property
    def _slot_owners(self) -> int:
        return 1 if self.shape.slots.shared else self.num_warpgroups

    @property
    def stages(self) -> int:
        staging = self._slot_owners * self.shape.slots.num_bytes
        return budget.stages(self.tile, staging, self.dtype.width // 8, "scales" in self.shape.names)

    @cute.jit
    def start(
        self, operands: Operands, stores: tuple, inputs: tuple, groups: Groups, grid: TileGrid,
        num_sms: Int32, stream: cuda.CUstream, position: Int32,
    ):  # fmt: skip
        """Launch the kernel on `stream`.

        Args:
            operands: the mainloop's inputs.
            stores: the epilogue's outputs.
            inputs: the epilogue's inputs.
            groups: group sizes on the device.
            grid: cluster tiles of one expert's output.
            num_sms: number of SMs to use; each gets `tile.ctas_per_sm` CTAs.
            position: how many kernels of the same call come before this one.

        If `position` is not 0, the kernel starts before the previous one has ended (programmatic dependent launch). If
        the call's first kernel writes the offs (`OFFS_OF_CALL`), the second kernel waits for it before it reads them;
        later kernels find them written.
        """
        name_kernel(self.kernel, self.name)
        is_there = (groups.encoding == OFFS_OF_CALL) & (position > 1)
        groups = groups._replace(encoding=select(is_there, Int32(OFFS_INT32), groups.encoding))
        self.kernel(operands, stores, inputs, groups, grid).launch(
            grid=(num_sms * self.tile.ctas_per_sm // self.cluster_size * self.cluster_size, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster_size, 1, 1),
            min_blocks_per_mp=self.tile.ctas_per_sm,
            preferred_smem_carveout=self.smem_percent,
            stream=stream,
            use_pdl=Int32(position > 0),
        )

    def _staging_layout(self) -> cute.ComposedLayout:
        slots = self.shape.slots
        return smem_layout(slots.dtype, slots.count, self._slot_owners, rows=slots.rows, cols=slots.columns())

    def _shared_storage(self, mainloop: Mainloop) -> type:
        return cute.struct(type("Storage", (), {"__annotations__": self._smem_fields(mainloop)}))

    def _smem_fields(self, mainloop: Mainloop) -> dict[str, Any]:
        """Fields of shared memory in their order: barriers, small arrays, operand stages, staging slots."""
        array, aligned, tickets = cute.struct.MemRange, cute.struct.Align, self.policy.tickets
        slots = cute.cosize(self._staging_layout())
        fields: dict[str, Any] = {
            "stage_barriers": array[Int64, 2 * (self.stages + mainloop.decoded_stages)],
            "ring_barriers": array[Int64, 2 * STAGES],
            "ticket_barriers": array[Int64, NUM_BARRIERS * tickets],
            "load_barriers": array[Int64, self.shape.load_barriers],
            "broadcast": array[Int32, BROADCAST_SLOTS * tickets],
            "ring": aligned[array[Int32, SLOT_WORDS * STAGES], 16],
        }
        for field in self.shape.smem:
            fields[field.name] = aligned[array[field.dtype, field.num_elements * self.num_warpgroups], 16]
        fields["a"] = aligned[array[mainloop.a_dtype, cute.cosize(mainloop.a_layout)], 1024]
        fields["b"] = aligned[array[mainloop.b_dtype, cute.cosize(mainloop.b_layout)], 1024]
        if self.decoding_warpgroups:
            fields["narrow"] = aligned[array[Uint8, mainloop.narrow_bytes], 1024]
        fields["staging"] = aligned[array[self.shape.slots.dtype, slots], 1024]
        if sums_size(self.tile):
            fields["sums"] = aligned[array[Float32, sums_size(self.tile)], 16]
        return fields

    def _loaded_weights(self, storage: Any, mainloop: Mainloop, sB: cute.Tensor) -> cute.Tensor:
        """Return the shared-memory tensor that TMA loads weights into: B itself, or the packed weights' stages if other
        warpgroups decode from there into B.

        storage: the kernel's shared memory (`_smem_fields`). sB: operand B in it.
        """
        return sB

    @cute.kernel
    def kernel(
        self, operands: Operands, stores: tuple, inputs: tuple, groups: Groups, grid: TileGrid,
    ):  # fmt: skip
        mainloop = self.make_mainloop()
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
        consumer_warps = 1 + has_load_warp + WARPS_PER_GROUP * (self.num_warpgroups + self.decoding_warpgroups)
        consumer_warps += select(gathers, Int32(WARPS_PER_GROUP - self.first_spare_warp), Int32(0))
        ring_stages = TICKET_STAGES if self.policy.tickets else STAGES
        ring = WorkRing(storage.ring_barriers.data_ptr(), storage.ring.data_ptr(), consumer_warps, ring_stages)
        tickets = None
        if const_expr(self.policy.tickets):
            barriers, broadcast = storage.ticket_barriers.data_ptr(), storage.broadcast.data_ptr()
            tickets = Tickets(groups.tickets, barriers, broadcast, self.cluster_size)
            if warp == SCHEDULER_WARP:
                tickets.make_barriers()
        slots_layout = self._staging_layout()
        staging = storage.staging.get_tensor(slots_layout.outer, swizzle=slots_layout.inner)
        loads = self.epilogue.make_ring(storage.load_barriers.data_ptr(), staging) if const_expr(has_loads) else None
        cluster = cute.make_layout((self.cluster_size, 1))
        pipeline_init_arrive(cluster, is_relaxed=True)
        sA = storage.a.get_tensor(mainloop.a_layout.outer, swizzle=mainloop.a_layout.inner)
        sB = storage.b.get_tensor(mainloop.b_layout.outer, swizzle=mainloop.b_layout.inner)
        pipeline_init_wait(cluster)

        # OFFS_OF_CALL: the previous kernel writes the offs, which every role reads, so all roles wait for it here. The
        # kernel after this one starts after this wait and finds the offs written.
        if groups.encoding == OFFS_OF_CALL:
            cute.arch.griddepcontrol_wait()
        # Until its own griddepcontrol_wait, a role overlaps the previous kernel and may read only what that kernel does
        # not write (weights), or has written before the wait above (group sizes).
        cute.arch.griddepcontrol_launch_dependents()

        of_mma = (mainloop, operands, stores, inputs, groups, storage, staging, loads, sA, sB, stages, ring)
        if warpgroup == 0:
            if const_expr(self._redistributes):
                cute.arch.setmaxregister_decrease(self._registers[0])
            if warp == LOAD_WARP:
                weights = self._loaded_weights(storage, mainloop, sB)
                self._load_role(mainloop, operands, sA, weights, stages, ring)
            elif warp == SCHEDULER_WARP:
                self.make_scheduler(groups, grid, tickets).run(ring)
            elif warp < self.first_spare_warp:
                if const_expr(has_load_warp):
                    self._epilogue_load_role(loads, inputs, ring)
            elif const_expr(mainloop.gathers):
                if gathers:
                    rank = warp - EPILOGUE_LOAD_WARP  # 0 or 1; if warp 2 loads for the epilogue, the TMA warp is rank 0
                    self._gather_role(mainloop, operands, sA, sB, stages, ring, rank)
        else:
            if const_expr(self.decoding_warpgroups > 0):
                if warpgroup > self.num_warpgroups:
                    cute.arch.setmaxregister_decrease(self.beside_decoding.decoding)
                    rank = warpgroup - (1 + self.num_warpgroups)
                    self._decode_role(mainloop, operands, sB, storage.narrow, stages, ring, rank)
                else:
                    self._mma_warpgroup(*of_mma)
            else:
                self._mma_warpgroup(*of_mma)

    def _mma_warpgroup(
        self, mainloop: Mainloop, operands: Operands, stores: tuple, inputs: tuple, groups: Groups, storage: Any,
        staging: cute.Tensor, loads: Any, sA: cute.Tensor, sB: cute.Tensor, stages: Any, ring: WorkRing,
    ) -> None:  # fmt: skip
        """Set up an MMA warpgroup (registers, staging slots, epilogue state), then run its role."""
        if self._redistributes:
            cute.arch.setmaxregister_increase(self._registers[1])
        thread, _, _ = cute.arch.thread_idx()
        index = cute.arch.make_warp_uniform(thread // THREADS) - 1
        own, shape = staging[None, None, None, 0 if self.shape.slots.shared else index], self.shape.slots
        slots = self.slots_type(own, shape.dtype, index, thread % THREADS, shape.chunks)
        state = self.epilogue.make_state(inputs, groups, slots, self._own_smem(storage, index), loads)
        sums = SharedSums(self.tile, storage.sums.data_ptr(), index) if self.tile.splits > 1 else None
        self._mma_role(mainloop, state, operands, stores, sA, sB, stages, ring, index, sums)

    def _own_smem(self, storage, index: Int32) -> Smem:
        """Return the shared memory of a warpgroup's epilogue besides its staging slots (biases, scales of columns), by
        name."""
        own = {}
        for field in self.shape.smem:
            everyone = cute.make_layout((*field.shape, self.num_warpgroups))
            mine = *[None] * len(field.shape), index
            own[field.name] = getattr(storage, field.name).get_tensor(everyone)[mine]
        return own
