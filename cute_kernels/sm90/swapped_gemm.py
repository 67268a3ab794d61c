"""The grouped GEMM of MXFP8 weights, decoded on the way: y[row]^T = epilogue(w[e] @ x[row]^T), ragged in rows."""

import math

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8

from ..memory.weights import weight_view
from ..schedule.groups import Groups
from ..schedule.tickets import Tickets
from ..schedule.tile_scheduler import GroupTileScheduler
from ..schedule.work import SLOT_WORDS, STAGES, TileGrid, WorkRing
from .budget import SMEM_BYTES, stage_k
from .epilogue.base import Inputs
from .epilogue.store import make_store, smem_layout
from .epilogue.swapped import WARPS, RowSmem, SwappedEpilogue, SwappedSlots
from .fragments import share_of
from .mainloop.base import Mainloop, Operands
from .mainloop.decoding import DecodingMainloop
from .persistent import PersistentGemm

# Barriers and the ring's slots, at most; then row scales and exponents, before the first buffer.
BARRIER_BYTES = 512
ALIGNMENT = 1024
# Tiles of so few rows of x leave the L1 cache a line for the scales of each weight row, read 4 bytes a k-tile. It costs
# a stage and saves 1 to 7 % of the time: what L2 gives an SM, scales and x beside the weights, is what bounds a decode.
FEW_ROWS = 32
LINE_BYTES = 128


class SwappedGemm(PersistentGemm):
    """A mainloop, an epilogue and slots that know rows of x as the columns of the MMA."""

    epilogue: SwappedEpilogue

    def make_mainloop(self) -> DecodingMainloop:
        return DecodingMainloop(self.dtype, self.tile, self.epilogue.parts, self.epilogue.layout, self.stages)

    def make_scheduler(self, groups: Groups, grid: TileGrid, tickets: Tickets | None) -> GroupTileScheduler:
        return GroupTileScheduler(self.tile, groups, grid)

    @property
    def stages(self) -> int:
        epilogue, tile = self.epilogue, self.tile
        chunk_bytes = epilogue.chunk_rows * epilogue.chunk_columns * self.dtype.width // 8
        stage = (tile.n * Float8E4M3FN.width + tile.m * self.dtype.width) * stage_k(tile) // 8
        row_scales = tile.m * self.num_warpgroups * Float32.width // 8
        small = BARRIER_BYTES + row_scales + math.prod(self._exponents_shape)
        before_stages = (small + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        slots = self.num_warpgroups * epilogue.num_slots * chunk_bytes
        cache = tile.n * LINE_BYTES if tile.m <= FEW_ROWS else 0
        return (SMEM_BYTES - cache - before_stages - slots) // stage

    def _staging_layout(self) -> cute.ComposedLayout:
        epilogue = self.epilogue
        owners = self.num_warpgroups
        rows, cols = epilogue.chunk_rows, epilogue.chunk_columns
        return smem_layout(self.dtype, epilogue.num_slots, owners, rows=rows, cols=cols)

    @property
    def _exponents_shape(self) -> tuple[int, int, int]:
        return self.epilogue.chunk_rows if self.epilogue.rounds else 0, WARPS, self.num_warpgroups

    def _shared_storage(self, mainloop: Mainloop) -> type:
        slots, rows = cute.cosize(self._staging_layout()), self.tile.m * self.num_warpgroups

        @cute.struct
        class Storage:
            stage_barriers: cute.struct.MemRange[Int64, 2 * self.stages]
            ring_barriers: cute.struct.MemRange[Int64, 2 * STAGES]
            load_barriers: cute.struct.MemRange[Int64, self.epilogue.num_barriers]
            ring: cute.struct.Align[cute.struct.MemRange[Int32, SLOT_WORDS * STAGES], 16]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, rows], 16]
            exponents: cute.struct.Align[cute.struct.MemRange[Uint8, math.prod(self._exponents_shape)], 16]
            a: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(mainloop.a_layout)], ALIGNMENT]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(mainloop.b_layout)], ALIGNMENT]
            staging: cute.struct.Align[cute.struct.MemRange[self.dtype, slots], ALIGNMENT]

        return Storage

    def _make_slots(self, staging: cute.Tensor, index: Int32, thread: Int32) -> SwappedSlots:
        return SwappedSlots(staging, self.dtype, index, thread, self.epilogue.chunks)

    def _small_smem(self, storage, index: Int32) -> RowSmem:
        scales = storage.scales.get_tensor(cute.make_layout((self.tile.m, self.num_warpgroups)))[None, index]
        if not self.epilogue.rounds:
            return RowSmem(scales, None)
        exponents = storage.exponents.get_tensor(cute.make_layout(self._exponents_shape))
        return RowSmem(scales, exponents[None, None, index])

    @cute.jit
    def _mma_role(
        self, mainloop: DecodingMainloop, state, operands: Operands, stores: tuple, sA: cute.Tensor, sB: cute.Tensor,
        stages, ring: WorkRing, index: Int32,
    ):  # fmt: skip
        """As any GEMM's, a tile ahead: the last k-tile of one asks for the first scales of the next."""
        share = share_of(self.tile, Int32(0), index)
        first, tCrB = mainloop.fragments(sA, sB, share.first_slab)
        acc = mainloop.accumulators()
        scales = mainloop.scales(operands, share)
        ring_state = ring.consumer_state()
        stage = mainloop.consumer_state()
        work = ring.get(ring_state)
        scales.begin(work)
        cute.arch.griddepcontrol_wait()
        while work.expert >= 0:
            ring_state.advance()
            next_work = ring.get(ring_state)
            prefetched = self.epilogue.begin(state, work, share)
            stage = mainloop.mma(acc, first, tCrB, scales, next_work, stages, stage)
            self.epilogue.finish(state, acc, prefetched, stores, work, share)
            work = next_work
        state.slots.drain()

    @cute.jit
    def launch(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, groups: tuple[Int64, Int32, Int32, Int64],
        inputs: Inputs, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch on `stream`. See PersistentGemm.start for `position`."""
        rows = Int32(w.shape[1])
        view, address = weight_view(w, Int64(0), self.epilogue.parts, self.epilogue.layout, False, inputs.gate)
        operands = self.make_mainloop().operands(x, view, address, rows, inputs.w_scale, inputs.gate)
        stores = (make_store(y, self.epilogue.chunk_rows, self.epilogue.chunk_columns),)
        grid = TileGrid(Int32(0), cute.ceil_div(rows, self.tile.n))
        self.start(operands, stores, inputs, Groups(*groups, x.shape[0]), grid, num_sms, stream, position)
