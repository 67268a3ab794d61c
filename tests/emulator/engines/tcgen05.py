"""tcgen05: matrix multiplications by Blackwell's tensor core, with operands and results in shared and tensor memory."""

from __future__ import annotations

import numpy as np

from ..faults import Fault
from ..formats import ue8m0
from ..lanes import SHARED_BASE
from .asynchronous import Operation, post
from .operands import CHUNK, read_matrix
from .tensor_memory import COLUMNS, check_columns, tensor_words

SWIZZLES = {0: 0, 2: 3, 4: 2, 6: 1}  # bits 61 to 63 of a descriptor -> mode as in tensor maps
# Bits of an instruction descriptor that must be 0: sparsity, saturation, reserved ones; shift or K of 96.
OTHER_BITS, SCALED_OTHER_BITS = 0xE080004F, 0x8000004F
E8M0_SCALES = 1 << 23


class InstructionDescriptor:
    """Fields of a multiplication's 32-bit descriptor (PTX ISA, "tcgen05: Instruction descriptor").

    The table of .kind::f16 and, if `scaled`, the table of .kind::mxf8f6f4. NVIDIA's kernels confirm both, except which
    of the two formats and of the two scale ids is A's: they name the same for A and B.
    """

    def __init__(self, word: int, scaled: bool):
        if scaled:
            self.is_modelled = not word & SCALED_OTHER_BITS and bool(word & E8M0_SCALES)
        else:
            self.is_modelled = not word & OTHER_BITS
        self.n, self.m = (word >> 17 & 63) * 8, (word >> 24 & 31) * 16
        self.a_mn, self.b_mn = bool(word >> 15 & 1), bool(word >> 16 & 1)
        self.negate = word >> 13 & 3
        self.a_format, self.b_format = word >> 7 & 7, word >> 10 & 7
        self.c_format = None if scaled else word >> 4 & 3
        self.sfa_id, self.sfb_id = (word >> 29 & 3, word >> 4 & 3) if scaled else (0, 0)


class TensorCore:
    """tcgen05.mma, cp and commit of one CTA; PTX ISA, "TensorCore 5th Generation Family Instructions".

    "tcgen05.mma" of .kind::f16 and .kind::mxf8f6f4.block_scale (E4M3), M = 128, cta_group::1, accumulators float32;
    "tcgen05.cp" 32x128b.warpx4; "tcgen05.commit"; "Shared memory descriptor": bits 46-48 are 001, swizzle in 61-63.
    guess: operations of a CTA are done in the order of their issue (the ISA says so of mma after cp of one thread).
    Strides of K-major and of MN-major operands with the 128-byte swizzle, 16 and 8 bits wide, several atoms included,
    are confirmed by NVIDIA's kernels. guess: other swizzles, and none, as wgmma has them.
    guess: tcgen05.fence is not needed where an mbarrier orders; no kernel of NVIDIA's that was read has one.
    """

    def begin(self) -> None:
        """Do nothing: there is no state to set up."""

    def end(self) -> None:
        """Do nothing: threads wait for committed work at mbarriers."""

    def tcgen05(self, op: str, m, *args) -> None:
        """Run or issue an instruction. A single thread issues mma, cp and commit."""
        parts = op.split(".")
        lanes = self.lanes(m)

        def one(x):
            if isinstance(x, tuple):
                return [one(y) for y in x]
            return int(x if isinstance(x, int) else self.full(x)[lanes[0]])

        if "cta_group::2" in parts:
            raise Fault(f"{op}: cta_group::2 is not modelled")
        values = [one(a) for a in args]
        kind = parts[1]
        if kind in ("mma", "cp", "commit") and lanes.size != 1:
            raise Fault(f"{op} by {lanes.size} threads: it is one thread's")
        if kind == "alloc":
            self.allocate(*values[:2])
        elif kind == "dealloc":
            self.free(*values[:2])
        elif kind == "relinquish_alloc_permit":
            self.cta.may_allocate = False
        elif kind == "mma":
            self._multiply(op, parts, values)
        elif kind == "cp":
            self._copy_scales(op, parts, *values[:2])
        elif kind == "commit":
            self._commit(op, parts, values)
        elif kind == "wait::ld":
            self.wait_for_tensor_loads(m)
        elif not kind.startswith(("fence", "wait")):
            raise Fault(f"{op} is not modelled")

    def _enqueue(self, op: str, run) -> None:
        """Add an operation to the CTA's queue, which runs in order of issue."""
        queue = self.cta.tensor_queue
        queue.append(Operation(self, op, run))
        post(self, op, lambda _: queue.pop(0)())

    def _commit(self, op: str, parts: list[str], a: list) -> None:
        at = a[0]
        ranks = [at >> 24]
        if "multicast::cluster" in parts:
            ranks = [cta.rank for cta in self.cta.cluster.ctas if a[1] >> cta.rank & 1]

        def run(operation: Operation) -> None:
            for rank in ranks:
                self.mbarrier(rank << 24 | at & 0xFFFFFF).arrive(operation)

        self._enqueue(op, run)

    def _operand(self, word: int, op: str) -> tuple[int, tuple[int, int], int]:
        if word >> 46 & 7 != 1:
            raise Fault(f"{op}: descriptor {word:#x}, whose bits 46..48 are not 001")
        mode = SWIZZLES.get(word >> 61 & 7)
        if mode is None or word >> 49 & 7 or word >> 52 & 1:
            raise Fault(f"{op}: descriptor {word:#x}: its swizzle, base offset or absolute LBO is not modelled")
        return (word & 0x3FFF) << 4, ((word >> 16 & 0x3FFF) << 4, (word >> 32 & 0x3FFF) << 4), mode

    def _multiply(self, op: str, parts: list[str], a: list) -> None:
        scaled = "block_scale" in parts
        kind = next(part.split("::")[1] for part in parts if part.startswith("kind::"))
        d, left, right, word = a[:4]
        fields = InstructionDescriptor(word, scaled)
        sfa, sfb, keep = a[4:7] if scaled else (0, 0, a[-1])
        if not scaled and isinstance(a[4], list) and any(a[4]):
            raise Fault(f"{op}: disabled output lanes are not modelled")
        if not fields.is_modelled:
            raise Fault(f"{op}: instruction descriptor {word:#x} is not modelled")
        if d >> 16 or fields.m != 128 or fields.negate:
            raise Fault(f"{op}: M = {fields.m}, D at {d:#x}, negate {fields.negate}: not modelled")
        if kind == "f16" and fields.c_format == 1 and fields.a_format < 2 and fields.b_format < 2:
            depth, types = 16, [("f16", "bf16")[f] for f in (fields.a_format, fields.b_format)]
        elif kind == "mxf8f6f4" and scaled and (fields.a_format, fields.b_format) == (0, 0):
            depth, types = 32, ["e4m3", "e4m3"]
        else:
            raise Fault(f"{op}: formats {fields.a_format}, {fields.b_format}, {fields.c_format} are not modelled")
        cta, n = self.cta, fields.n
        check_columns(cta, d, n, op)
        left, right = self._operand(left, op), self._operand(right, op)

        def run(operation: Operation) -> None:
            x = read_matrix(self, operation, op, types[0], *left, fields.a_mn, 0, 128, depth)
            y = read_matrix(self, operation, op, types[1], *right, fields.b_mn, 0, n, depth)
            if scaled:
                x *= self._scales(operation, sfa, 128, fields.sfa_id)[:, None]
                y *= self._scales(operation, sfb, n, fields.sfb_id)[:, None]
            accumulators = tensor_words(cta)[:, d : d + n].view(np.float32)
            self._tell("write", operation, d, n)
            accumulators[...] = (x @ y.T + (accumulators if keep else 0)).astype(np.float32)

        self._enqueue(op, run)

    def _tell(self, action: str, operation: Operation, column: int, count: int) -> None:
        if self.observer is not None:
            places = np.arange(128)[:, None] * COLUMNS + column + np.arange(count)[None, :]
            getattr(self.observer, action)("tensor", self.cta, places, 4, operation)

    def _scales(self, operation: Operation, at: int, rows: int, which: int) -> np.ndarray:
        """Read scale factors: for row r, byte `which` of lane r % 32 (in each quarter of the lanes) and column r / 32.

        guess: the instruction descriptor's id is used, and bits 30, 31 of the address repeat it; here both must agree.
        """
        column, cta = at & 0x1FF, self.cta
        if at >> 30 != which:
            raise Fault(f"SF id {which} in the instruction descriptor, {at >> 30} in the address")
        check_columns(cta, column, (rows + 31) // 32, "scale factors")
        self._tell("read", operation, column, (rows + 31) // 32)
        r = np.arange(rows)
        found = [tensor_words(cta)[32 * quarter + r % 32, column + r // 32] for quarter in range(4)]
        if any((f != found[0]).any() for f in found):
            raise Fault("scale factors differ between the quarters of TMEM's lanes")
        return ue8m0(found[0] >> np.uint32(8 * which) & np.uint32(255))

    def _copy_scales(self, op: str, parts: list[str], to: int, word: int) -> None:
        """Copy 32 rows of 16 bytes to 4 columns, for each quarter of the lanes."""
        if "32x128b" not in parts or "warpx4" not in parts:
            raise Fault(f"{op} is not modelled")
        start, (_, sbo), mode = self._operand(word, op)
        if mode:
            raise Fault(f"{op}: a swizzled source is not modelled")
        column, cta = to & 0x1FF, self.cta
        check_columns(cta, column, 4, op)

        def run(operation: Operation) -> None:
            row = np.arange(32)
            offset, at = start - SHARED_BASE, row // 8 * sbo + row % 8 * CHUNK
            self.read_shared(cta, offset + at, CHUNK, operation, op)
            self._tell("write", operation, column, 4)
            words = cta.chunks[(offset + at) >> 4].view(np.uint32)
            tensor_words(cta)[:, column : column + 4] = np.tile(words, (4, 1))

        self._enqueue(op, run)
