"""The mainloop for rows of x and weights w in MXFP8: tensor cores apply the scales of both operands, block by block.

A k-tile is 128 deep, so each row of x or w has four scales in it: one 32-bit word. The scales take this way:

    global memory    plain scales [rows, K / 32], as the quantiser writes them. One warp reads the scales of x, another
                     the scales of w, into registers.
    shared memory    the same warps write the scales in the order that tensor memory takes. In this order 128 rows form
                     an atom of 512 bytes (PTX ISA, "Scale factor layout"): the word of row i is at byte
                     16 (i % 32) + 4 (i / 32). So lane l reads the words of rows l, l + 32, l + 64 and l + 96, and
                     writes 16 bytes at once.
    tensor memory    `tcgen05.cp` copies an atom from shared memory before the stage's MMAs. One thread issues the copy
                     and the MMAs, so they are executed in this order.

A group may begin at any row, and rows of x may come by index; scales are never padded or copied in global memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100_utils
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Float8E4M3FN, Float8E8M0FNU, Int32, Int64, Uint8
from cutlass.cute.nvgpu import tcgen05

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.vectors import run_at
from ..device.warps import WARP
from ..formats import MXFP8
from ..memory.weights import GateRows, row_of
from ..schedule.work import WorkTile
from ..sm90.mainloop import gemm
from ..sm90.mainloop.base import Operands
from .mainloop import TensorCoreMainloop
from .tensor_memory import TensorMemory

FIELDS = "a_scales", "b_scales"
# Rows and bytes of an atom. A row has one word of scales in a k-tile.
ATOM_ROWS, ATOM_BYTES = 128, 512
LINES = ATOM_ROWS // WARP
WORD_BYTES, VECTOR_BYTES = 4, 16
# k-tiles whose scales are loaded at once: a 16-byte vector of each row.
AT_ONCE = VECTOR_BYTES // WORD_BYTES


class Scales(NamedTuple):
    """Addresses of the scales of both operands.

    Attributes:
        x: scales [rows, K / 32].
        w: scales [E, N, K / 32].
        weight_rows: N.
        gate: the order of a gated w's rows.
    """

    x: Int64
    w: Int64
    weight_rows: Int32
    gate: GateRows


class ScaleLines(Invariant):
    """The four rows of an atom (128 rows) whose scales a lane loads, and registers for these scales in the next AT_ONCE
    k-tiles.

    Attributes:
        pitch: number of scales of a row, each a byte.
        begins: for each of the four rows, the address of its scales.
        words: for each of the four rows, AT_ONCE words of scales, one for each k-tile.
    """

    def __init__(self, pitch: Int32):
        self.pitch = pitch
        self.begins = cute.make_rmem_tensor(LINES, Int64)
        self.words = cute.make_rmem_tensor(LINES * AT_ONCE, Int32)

    @cute.jit
    def fetch(self, k_tile: Int32, num_k_tiles: Int32):
        """Start to load the scales of AT_ONCE k-tiles, from `k_tile` on, into `words`.

        Nothing past the last k-tile is read. Scales past a row's last block become 0 (2^-127), since a NaN would turn
        the zeros of padding elements into NaN.

        Args:
            k_tile: index of the first k-tile to load.
            num_k_tiles: number of k-tiles of the tile.
        """
        alignment = Int32(self.begins[0]) | self.pitch
        if alignment % VECTOR_BYTES == 0:
            for line in cutlass.range_constexpr(LINES):
                if k_tile < num_k_tiles:
                    vector = run_at(Int32, self.begins[line], Int64(k_tile), AT_ONCE)
                    self._words(line).store(vector.load())
        else:
            for i in cutlass.range_constexpr(AT_ONCE):
                for line in cutlass.range_constexpr(LINES):
                    self.words[line * AT_ONCE + i] = self._word(self.begins[line], (k_tile + i) * WORD_BYTES)

    def _words(self, line: int) -> cute.Tensor:
        """Return the view of `words` for the lane's row number `line`."""
        return cute.make_tensor(self.words.iterator + line * AT_ONCE, cute.make_layout(AT_ONCE))

    @cute.jit
    def _word(self, begin: Int64, first: Int32) -> Int32:
        """Return four scales of a row, from scale number `first` on, as a word; 0 past the row's last scale.

        begin: the address of the row's scales.
        """
        word = Int32(0)
        if (Int32(begin) | self.pitch) % WORD_BYTES == 0:
            if first < self.pitch:
                word = vector_at(Int32, begin + first)[0]
        else:
            for i in cutlass.range_constexpr(WORD_BYTES):
                if first + i < self.pitch:
                    scale = Int32(vector_at(Uint8, begin + first + i)[0]) & 0xFF
                    word = word | scale << 8 * i
        return word

    def take(self) -> cute.Tensor:
        """Return a copy of the fetched words, which the next fetch does not overwrite."""
        taken = cute.make_rmem_tensor(LINES * AT_ONCE, Int32)
        taken.store(self.words.load())
        return taken


def put(words: cute.Tensor, atom: Int32, i: int) -> None:
    """Write the lane's four words of the i-th k-tile to an atom (the scales of 128 rows in a k-tile) in shared memory.

    Args:
        words: for each of the lane's four rows of the atom, AT_ONCE words of scales, one for each k-tile.
        atom: the atom's address.
        i: index of the k-tile in `words`.
    """
    pointer = cute.make_ptr(
        Int32, atom + cute.arch.lane_idx() * VECTOR_BYTES, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES
    )  # fmt: skip
    four = cute.make_rmem_tensor(LINES, Int32)
    for line in range(LINES):
        four[line] = words[line * AT_ONCE + i]
    cute.autovec_copy(four, cute.make_tensor(pointer, cute.make_layout(LINES)))


class BlockScaled(TensorCoreMainloop):
    """Mixin for mainloops of MXFP8 operands: issues MMAs that apply a scale for each 32 elements of the contraction.

    A class of sm90/mainloop loads the operands.
    """

    @property
    def _atoms(self) -> tuple[int, int]:
        """Number of atoms (scales of 128 rows in a k-tile) in a stage: of A, and of B."""
        return self.tile.m // ATOM_ROWS, self.tile.n // ATOM_ROWS

    @property
    def scale_columns(self) -> int:
        """Columns of tensor memory that a stage's scales take: 4 for an atom.

        An atom's 512 bytes fill 32 lanes of 4 columns, and are repeated in the lanes of each warp.
        """
        return sum(self._atoms) * ATOM_BYTES // (WARP * WORD_BYTES)

    def smem_fields(self) -> dict[str, Any]:
        array, aligned = cute.struct.MemRange, cute.struct.Align
        counts = {name: atoms * ATOM_BYTES * self.stages for name, atoms in zip(FIELDS, self._atoms, strict=True)}
        return {name: aligned[array[Uint8, count], ATOM_BYTES] for name, count in counts.items()}

    def tiled_mma(self) -> cute.TiledMma:
        return sm100_utils.make_blockscaled_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            self.a_major,
            self.b_major,
            Float8E8M0FNU,
            MXFP8.block,
            tcgen05.CtaGroup.ONE,
            (self.tile.m, self.tile.n),
        )

    def operands_of(self, storage: Any, memory: TensorMemory) -> tuple:
        """Return the operands of MMAs: (A, B, scales of A, scales of B).

        Scales are a tuple: the copy to tensor memory, its source, its target, and the tensor that MMAs read.

        Args:
            storage: the kernel's shared memory.
            memory: tensor memory, in which the scales follow the accumulators.
        """
        mma, shape = self.tiled_mma(), (self.tile.m, self.tile.n, self.tile.k)
        layouts = (
            blockscaled.make_smem_layout_sfa(mma, shape, MXFP8.block, self.stages),
            blockscaled.make_smem_layout_sfb(mma, shape, MXFP8.block, self.stages),
        )
        in_tensor_memory = blockscaled.make_tmem_layout_sfa, blockscaled.make_tmem_layout_sfb
        copies, column = [], 0
        for name, layout, make_layout, atoms in zip(FIELDS, layouts, in_tensor_memory, self._atoms, strict=True):
            smem = cute.recast_ptr(getattr(storage, name).data_ptr(), dtype=Float8E8M0FNU)
            of_stage = make_layout(mma, shape, MXFP8.block, cute.slice_(layout, (None, None, None, 0)))
            scales = cute.make_tensor(memory.after(column, Float8E8M0FNU), of_stage)
            copies.append((*_copy_of(cute.make_tensor(smem, layout), scales), scales))
            column += atoms * ATOM_BYTES // (WARP * WORD_BYTES)
        return *super().operands_of(storage, memory), *copies

    def before_steps(self, operands: tuple, stage: Int32, depth: Int32 | int) -> None:
        """Copy a stage's scales to tensor memory, where MMAs read them.

        Args:
            operands: A, B and their scales (`operands_of`).
            stage: the stage's index.
            depth: not used: all of the k-tile's scales are copied.
        """
        for copy, source, target, _ in operands[2:]:
            cute.copy(copy, source[None, None, None, None, stage], target)

    def step_of(self, operands: tuple, step: int, stage: Int32) -> tuple:
        a, b, of_a, of_b = operands
        at, scales_at = (None, None, step, stage), (None, None, step)
        return [a[at], of_a[3][scales_at]], [b[at], of_b[3][scales_at]]


class BlockScaledMainloop(BlockScaled, gemm.GemmMainloop):
    """The mainloop of rows of x times experts' weights, both in MXFP8.

    layout: the order of a gated w's rows, a key of specs.LAYOUT_FORMS.
    """

    scale_warps = len(FIELDS)

    def __init__(self, *arguments: Any, layout: str):
        super().__init__(Float8E4M3FN, *arguments)
        self.layout = layout

    @cute.jit
    def bring_scales(
        self, operands: Operands, storage: Any, stages: Any, state: pipeline.PipelineState, work: WorkTile, rank: Int32
    ):  # fmt: skip
        """Write the scales of x (rank 0) or of w (rank 1), for all k-tiles of one output tile, to their stages.

        Called by the warp with this rank. Return the pipeline's advanced state.

        Args:
            operands: the mainloop's inputs, with the addresses of the scales.
            storage: the kernel's shared memory.
            stages, state: the pipeline of the stages, and the warp's state in it.
            work: the output tile.
        """
        if rank == 0:
            lines = [self._row_lines(operands, work)]
            state = self._bring(lines, storage.a_scales.data_ptr(), operands, stages, state, work)
        else:
            lines = [self._weight_lines(operands, work, atom) for atom in range(self._atoms[1])]
            state = self._bring(lines, storage.b_scales.data_ptr(), operands, stages, state, work)
        return state

    def _pitch(self, operands: Operands) -> Int32:
        """Return the number of scales of a row."""
        return MXFP8.num_scales(cute.size(operands.a, mode=[1]))

    @cute.jit
    def _row_lines(self, operands: Operands, work: WorkTile):
        """Return the `ScaleLines` of this lane's rows of x.

        Rows past the group's end take the scales of its last row; their results are not stored.
        """
        lines = ScaleLines(self._pitch(operands))
        for line in cutlass.range_constexpr(LINES):
            row = cutlass.min(work.row + line * WARP + cute.arch.lane_idx(), work.group_end - 1)
            if operands.rows.address != 0:
                row = operands.rows.clamped(operands.rows.index_of(row))
            lines.begins[line] = operands.scales.x + Int64(row) * lines.pitch
        return lines

    def _weight_lines(self, operands: Operands, work: WorkTile, atom: int) -> ScaleLines:
        """Return the `ScaleLines` of this lane's weight rows in atom number `atom` of the tile.

        Columns of the tile past the last weight row take the last weight row's scales.
        """
        lines, scales = ScaleLines(self._pitch(operands)), operands.scales
        half = scales.weight_rows // self.parts
        for line in range(LINES):
            place = atom * ATOM_ROWS + line * WARP + cute.arch.lane_idx()
            part, column = place // self.part_n, work.n_tile * self.part_n + place % self.part_n
            row = column if self.parts == 1 else row_of(self.layout, scales.gate, column, part, half)
            row = cutlass.min(row, scales.weight_rows - 1)
            lines.begins[line] = scales.w + (Int64(work.expert) * scales.weight_rows + row) * lines.pitch
        return lines

    @cute.jit
    def _bring(
        self, lines: list[ScaleLines], to: cute.Pointer, operands: Operands, stages: Any,
        state: pipeline.PipelineState, work: WorkTile,
    ):  # fmt: skip
        """Write one operand's scales of all k-tiles to their stages, and load the scales of later k-tiles meanwhile.

        Return the pipeline's advanced state.

        Args:
            lines: the lane's rows of each atom (128 rows) of a stage.
            to: shared memory for the atoms of all stages.
            stages, state: the pipeline of the stages, and the warp's state in it.
            work: the output tile.
        """
        count, first = self.num_k_tiles(operands, work), Int32(to.toint())
        for each in lines:
            each.fetch(Int32(0), count)
        for k_tile in cutlass.range(0, count, AT_ONCE, unroll=1):
            taken = [each.take() for each in lines]
            for each in lines:
                each.fetch(k_tile + AT_ONCE, count)
            for i in cutlass.range_constexpr(AT_ONCE):
                if k_tile + i < count:
                    stages.sync_object_empty.wait(state.index, state.phase)
                    for number, words in enumerate(taken):
                        put(words, first + (state.index * len(taken) + number) * ATOM_BYTES, i)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.mbarrier_arrive(stages.sync_object_full.get_barrier(state.index))
                    state.advance()
        return state


def _copy_of(smem: cute.Tensor, memory: cute.Tensor) -> tuple:
    """Make the `tcgen05.cp` that copies a stage's scales from shared to tensor memory.

    It copies each atom four times, to the 32 lanes of each of the four warps. Return the copy, its source (descriptors
    of shared memory) and its target (tensor memory).

    Args:
        smem: the scales of all stages in shared memory.
        memory: the scales of one stage in tensor memory.
    """
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), Float8E8M0FNU)
    source, target = cute.filter_zeros(smem), cute.filter_zeros(memory)
    copy = tcgen05.make_s2t_copy(atom, target)
    part = copy.get_slice(0)
    return copy, tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(source)), part.partition_D(target)
