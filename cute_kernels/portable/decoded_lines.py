"""The portable grouped GEMM that contracts over the rows of quantised weights: y[row] = epilogue(x[row] @ w[e]), with w
[E, K, N].

A stage holds a k-tile of weights as they lie in memory. When a k-tile has arrived, all threads decode it to 16-bit
numbers in shared memory (decoding/lines.py). After a second barrier, ldmatrix reads these numbers like transposed
16-bit weights.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from ..decoding.decoder import Decoder
from ..decoding.lines import DEPTH, DecodedLines, Experts, LineSources, experts_of
from ..decoding.scales import MOVED_E4M3_EXPONENT, SCALES, power
from ..epilogue.base import Epilogue, Inputs
from ..formats import E4M3, FLOAT32, Format
from ..schedule.groups import Groups
from ..schedule.work import TileGrid, WorkTile
from ..specs import GemmSpec
from .block_narrow import product_in_float32
from .grouped_gemm import GroupedGemm
from .mainloop import Mainloop
from .narrow import ELEMENTS, e4m3_pair, product
from .operands import Across, Along, Operand
from .sources import Rows, row_sources, rows_of
from .store import make_store


class PortableLines(DecodedLines):
    """Decoder of k-tiles by instructions that every GPU since Ampere has."""

    def pair(self, word: Int32, pair: int, value: Int32) -> Int32:
        element: Any = self.decoder.element
        if self.format.element == E4M3:
            number = product(e4m3_pair(word), Int32(power(MOVED_E4M3_EXPONENT)))
        else:
            number = product(element.spread(word, pair), Int32(power(-element.read_exponent)))
        return (product_in_float32 if self.format.scale == FLOAT32 else product)(number, value)


class DecodedAcross(Operand):
    """An operand of quantised weights that is contracted over weight rows.

    A stage holds a k-tile, 64 weight rows by `width` columns, as it lies in memory. One more buffer in shared memory,
    before the stages, holds the 16-bit numbers of the k-tile that was decoded last.
    """

    decodes = True

    def __init__(self, weights: Format, width: int):
        element = ELEMENTS[weights.element]()
        self.numbers = Across(BFloat16, width)
        self.decoded_bytes = self.numbers.stage_bytes
        self.of_thread = PortableLines(weights, Decoder(element, SCALES[weights.scale](element, product)), width)
        self.stage_bytes = self.of_thread.slot_bytes
        self.smem = Int32(0)

    def _slot(self, stage: Int32) -> Int32:
        """Return the address of a stage."""
        return self.smem + self.decoded_bytes + stage * self.stage_bytes

    def copy(self, sources: LineSources, stage: Int32, k: Int32, depth: Int32) -> None:
        """Start to copy a k-tile, 64 weight rows from row `k` on, into a stage.

        Args:
            sources: the addresses of the weights and of their scales.
            stage: the stage's index.
            k: the k-tile's first weight row.
            depth: not used.
        """
        self.of_thread.copy(sources, self._slot(stage), k)

    def advance(self, sources: LineSources, tile: Int32, before: Int32) -> None:
        """Start to load the scales of k-tile `tile` into registers, and write the previous k-tile's scales, which
        have arrived there, to its stage `before`.
        """
        self.of_thread.start_loads(sources, tile * DEPTH, self._slot(before))

    def decode(self, stage: Int32) -> None:
        """Decode the weights of a stage to 16-bit numbers in the buffer before the stages, where `columns` reads them.

        stage: index of the stage, whose copy has ended.
        """
        # The accumulators leave no registers for all chunks of 8-bit elements at once: sm_120 spills 144 bytes.
        for time in self.of_thread.times:
            chunks, scales = self.of_thread.read(self._slot(stage), (time,))
            self.of_thread.write(chunks, scales, self.smem, (time,))

    def columns(self, stage: Int32, pair: int, k: Int32 | int) -> cute.Tensor:
        """Read columns 16 * `pair` to 16 * `pair` + 15 of the k-tile that was decoded last, in step `k` (16 weight
        rows). Return them as words of mma.sync's operand b.
        """
        self.numbers.smem = self.smem
        return self.numbers.columns(Int32(0), pair, k)


class Operands(NamedTuple):
    """Inputs of the mainloop.

    Attributes:
        rows: the rows of x.
        experts: experts' quantised weights.
        depth: number of weight rows of an expert, over which the GEMM contracts.
    """

    rows: Rows
    experts: Experts
    depth: Int32


class DecodedLinesGemm(GroupedGemm):
    """The grouped GEMM of 16-bit rows of x and quantised weights w [E, K, N], contracted over weight rows (K).

    weights: the weights' format.
    """

    def __init__(self, spec: GemmSpec, dtype: type[cutlass.Numeric], epilogue: Epilogue, weights: Format):
        super().__init__(spec, dtype, epilogue)
        self.weights = weights

    def make_operands(self) -> tuple[Along, DecodedAcross]:
        return Along(self.dtype, self.tile.m), DecodedAcross(self.weights, self.tile.n)

    @cute.jit
    def launch(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, groups: tuple[Int64, Int32, Int32, Int64],
        inputs: Inputs, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the kernel on `stream`.

        Args:
            x: [T, K], 16-bit.
            w: [E, K, words or bytes of a row], quantised.
            y: [T, N], the result.
            groups: address, encoding, count and tickets of schedule.groups.Groups.
            inputs: the epilogue's inputs, which also hold the address of the weights' scales.
            position: ignored, since CTAs draw no tickets (`GroupedGemm.launch`).
        """
        columns = Int32(y.shape[1])
        experts = experts_of(w, inputs.w_scale, self.weights, columns)
        operands = Operands(rows_of(x, Int64(0)), experts, Int32(x.shape[1]))
        grid = TileGrid(Int32(0), cute.ceil_div(columns, self.tile.n))
        self.start(operands, (make_store(y),), inputs, Groups(*groups, y.shape[0]), grid, num_sms, stream)

    @cute.jit
    def multiply(self, mainloop: Mainloop, acc: cute.Tensor, operands: Operands, work: WorkTile):
        a = row_sources(operands.rows, work, mainloop.a)
        b = mainloop.b.of_thread.sources(operands.experts, work.expert, work.n_tile)
        mainloop.run(acc, a, b, operands.depth)
