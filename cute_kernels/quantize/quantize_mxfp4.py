"""Quantisation of weights to MXFP4 along rows: two E2M1 numbers a byte, and an E8M0 scale for each 32 elements.

Rows follow each other without padding and hold whole blocks, so a matrix is one run of blocks. A warp has 32 blocks. L
neighbouring lanes share a block, 16 bytes each: L = 4, or 8 if elements are float32. They find the block's greatest
magnitude (amax) by shuffles. A lane has 16 bytes of each of L blocks. So L lanes share L blocks, and each of them
stores the scale of one block. A warp's 32 scales are a sector.

The scale is 2^(floor(log2 amax) - 2), so amax / scale is in 4 .. 8. Elements are rounded to nearest even, to at most 6.
A float32 in [2^e, 2^(e+1)) is rounded to multiples of 2^(e-1) by adding 2^(e+22) and subtracting it again; numbers
below 1 are rounded with e = 0. The result times 2^-14, as float16, has the two exponent bits and the significand bit of
E2M1 side by side. This includes 0 and 0.5, which are subnormal in both formats.

For each element, the kernel reads 2 or 4 bytes and writes 17/32 (half a byte, and 1/32 of a scale). While the bytes of
a 16-bit element pass at 4.3 TB/s, an SM can issue 17 instructions of a thread; the kernel needs 15 for each element.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int16, Int32, Int64, Uint8, const_expr

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.select import select
from ..device.warps import WARP
from ..formats import MXFP4
from ..specs import QuantizeMxfp4Spec
from ..tracing import DTYPES, Traced, traced
from .scales import E8M0_INF, E8M0_NAN, F32_INF, Magnitudes
from .tile import VECTOR_BYTES, WORDS, read_once

BLOCK = MXFP4.block
WARPS = 8
MIN_BLOCKS = 4  # CTAs of an SM: 32 warps, 2 or 4 KB of loads each
SMEM_PERCENT = 1  # no shared memory is used; loads in flight need it as cache
MAX_EXPONENT = 2  # exponent of the greatest element, 6 = 1.5 * 2^2
F32_EXPONENT_BITS, F32_MANTISSA_BITS = 0x7F800000, 23
AS_F16 = 2.0**-14  # factor from E2M1's least exponent to float16's
ROUNDING = 2.0**22
GREATEST = 0x0E000E00  # 6 * 2^-14 in both halves; `min` with a NaN (an Inf has become NaN) also gives 6
# A pair of float16 has its elements' bits at 9 to 11 and 25 to 27; signs are moved from 15 and 31 to 12 and 28.
SIGN_SHIFT, SIGNS = 3, 0x10001000
# Factor that brings both elements side by side into a word's upper byte.
SIDE_BY_SIDE = (1 << 15) + (1 << 3)


class QuantizeMxfp4(Invariant):
    """Kernel that quantises w (bfloat16, float16 or float32) to E2M1, with an E8M0 scale for each 32 elements."""

    def __init__(self, spec: QuantizeMxfp4Spec):
        self.name = spec.name
        self.dtype = DTYPES[spec.dtype]
        self.magnitudes = Magnitudes(self.dtype)
        self.vector = VECTOR_BYTES * 8 // self.dtype.width
        self.lanes = BLOCK // self.vector  # lanes of a block, and vectors of a lane
        self.vector_blocks = WARP // self.lanes
        self.cta_blocks = WARPS * WARP

    @cute.jit
    def __call__(self, w: cute.Tensor, data: cute.Tensor, scale: Int64, stream: cuda.CUstream):
        blocks = Int64(w.shape[0]) * (w.shape[1] // BLOCK)
        if blocks > 0:
            name_kernel(self.kernel, self.name)
            ctas = Int32((blocks + (self.cta_blocks - 1)) // self.cta_blocks)
            addresses = (Int64(w.iterator.toint()), Int64(data.iterator.toint()), scale)
            self.kernel(*addresses, blocks).launch(
                grid=(ctas, 1, 1), block=(WARPS * WARP, 1, 1),
                min_blocks_per_mp=MIN_BLOCKS, preferred_smem_carveout=SMEM_PERCENT, stream=stream,
            )  # fmt: skip

    @cute.kernel
    def kernel(self, w: Int64, data: Int64, scale: Int64, blocks: Int64):
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % WARP
        first = Int64(cta) * self.cta_blocks + thread // WARP * WARP
        count = Int32(cutlass.min(blocks - first, Int64(WARP)))
        values = self._load(w + first * (BLOCK * self.dtype.width // 8) + lane * VECTOR_BYTES, count, lane)
        exponents = self._exponents(cute.recast_tensor(values, Int32))
        target = data + first * (BLOCK // 2) + lane * (self.vector // 2)
        for i in cutlass.range_constexpr(self.lanes):
            bits = self._elements(values[None, i], exponents[i])
            if self._block(lane, i) < count:
                there = target + i * (WARP * self.vector // 2)
                if const_expr(self.magnitudes.packed):
                    vector_at(Int32, there)[0] = bits
                else:
                    vector_at(Int16, there)[0] = Int16(bits)
        mine = exponents[0]
        for i in cutlass.range_constexpr(1, self.lanes):
            mine = select(lane % self.lanes == i, exponents[i], mine)
        block = self._block(lane, lane % self.lanes)
        if block < count:
            vector_at(Uint8, scale + first)[block] = Uint8(mine)

    def _block(self, lane: Int32, vector: int | Int32) -> Int32:
        """Return which of the warp's 32 blocks contains vector number `vector` of a lane."""
        return vector * self.vector_blocks + lane // self.lanes

    @cute.jit
    def _load(self, source: Int64, count: Int32, lane: Int32) -> cute.Tensor:
        """Load this lane's vectors, [vector, lanes]; zeros for vectors of blocks past the warp's first `count`. If a
        warp has all 32 blocks, no load is conditional."""
        values = cute.make_rmem_tensor((self.vector, self.lanes), self.dtype)
        values.fill(0.0)
        atom = read_once(self.dtype)
        if count >= WARP:
            for i in cutlass.range_constexpr(self.lanes):
                cute.copy(atom, self._vector(source, i), values[None, i])
        else:
            for i in cutlass.range_constexpr(self.lanes):
                if self._block(lane, i) < count:
                    cute.copy(atom, self._vector(source, i), values[None, i])
        return values

    def _vector(self, source: Int64, index: int) -> cute.Tensor:
        pointer = cute.make_ptr(
            self.dtype, source + index * (WARP * VECTOR_BYTES), cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES
        )
        return cute.make_tensor(pointer, cute.make_layout(self.vector))

    def _exponents(self, words: cute.Tensor) -> cute.Tensor:
        """Return the scale byte for each of this lane's vectors: that of the block to which the vector belongs."""
        kind = self.magnitudes
        maxima = cute.make_rmem_tensor(self.lanes, Int32)
        for i in range(self.lanes):
            maxima[i] = kind.absolute(words[0, i])
            for j in range(1, WORDS):
                maxima[i] = kind.max(maxima[i], kind.absolute(words[j, i]))
        distance = 1
        while distance < self.lanes:
            for i in range(self.lanes):
                maxima[i] = kind.max(maxima[i], cute.arch.shuffle_sync_bfly(maxima[i], distance))
            distance *= 2
        exponents = cute.make_rmem_tensor(self.lanes, Int32)
        for i in range(self.lanes):
            amax = kind.greatest(maxima[i]).bitcast(Int32)
            exponent = cutlass.max((amax >> F32_MANTISSA_BITS) - MAX_EXPONENT, Int32(0))
            exponents[i] = select(amax > F32_INF, Int32(E8M0_NAN), exponent)
        return exponents

    def _elements(self, values: cute.Tensor, exponent: Int32) -> Int32:
        """Return the E2M1 elements of a vector, four bits each, side by side. All are 0 if the block has a NaN
        (exponent 255).

        Args:
            values: the vector, 16 bytes of w.
            exponent: the scale byte of the vector's block. Scales that are not NaN are at most 2^126.
        """
        multiplier = ((Int32(E8M0_INF) - exponent) << F32_MANTISSA_BITS).bitcast(Float32) * Float32(AS_F16)
        rounded = cute.make_rmem_tensor(self.vector, Float32)
        for i in range(self.vector):
            magnitude = _ptx("abs.f32", Float32, values[i].to(Float32) * multiplier)
            at_least_one = _ptx("max.f32", Float32, magnitude, Float32(AS_F16))
            binade = (at_least_one.bitcast(Int32) & Int32(F32_EXPONENT_BITS)).bitcast(Float32)
            added = binade * Float32(ROUNDING)
            rounded[i] = (magnitude + added) - added
        halves = cute.make_rmem_tensor(self.vector, Float16)
        halves.store(rounded.load().to(Float16))
        words = cute.recast_tensor(halves, Int32)
        pairs = [_at_most_6(words[i]) for i in range(self.vector // 2)]
        signs = self._signs(cute.recast_tensor(values, Int32))
        pair_bits = [
            (pairs[i] | ((signs[i] >> SIGN_SHIFT) & Int32(SIGNS))) * SIDE_BY_SIDE for i in range(self.vector // 2)
        ]
        bits = _upper_bytes(pair_bits)
        return select(exponent == E8M0_NAN, Int32(0), bits)

    def _signs(self, words: cute.Tensor) -> list[Int32]:
        """Return the signs of the vector's elements: a word for each pair of elements, with their signs at bits 15 and
        31."""
        if self.magnitudes.packed:
            return [words[i] for i in range(self.vector // 2)]
        return [_permuted(words[i], words[i + 1], 0x7632) for i in range(0, self.vector, 2)]


def _ptx(op: str, kind: type, *arguments: cutlass.Numeric) -> cutlass.Numeric:
    """Return the result, of type `kind`, of one PTX instruction `op` with these arguments."""
    operands = ", ".join(f"{{$r{i}}}" for i in range(len(arguments)))
    return kind(
        cute.arch.inline_ptx(f"{op} {{$w0}}, {operands};", write_only_types=[kind], read_only_args=[*arguments])
    )


def _at_most_6(pair: Int32) -> Int32:
    """Return two float16 magnitudes in a word, each clamped to 6 times 2^-14 (GREATEST), which a NaN also becomes."""
    ptx = f"{{ .reg .b32 most; mov.b32 most, {GREATEST}; min.f16x2 {{$w0}}, {{$r0}}, most; }}"
    return Int32(cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[pair]))


def _permuted(low: Int32, high: Int32, chosen: int) -> Int32:
    """Return four bytes of two words. chosen: a selector of the instruction prmt."""
    return Int32(cute.arch.prmt(low, high, Int32(chosen)))


def _upper_bytes(words: list[Int32]) -> Int32:
    """Join the upper bytes of two or four words into a word. With two words, the result's upper half is arbitrary."""
    pairs = [_permuted(words[i], words[i + 1], 0x7373) for i in range(0, len(words), 2)]
    return pairs[0] if len(pairs) == 1 else _permuted(pairs[0], pairs[1], 0x5410)


def trace(spec: QuantizeMxfp4Spec) -> Traced:
    return traced(spec, QuantizeMxfp4(spec))
