"""A slab of accumulators, and the slots through which its results leave. Plain Python: no compiler is needed to say
what fits.
"""

# Of a warpgroup, which has the accumulators of a slab.
THREADS = 128
# Of a slab, and of a slot.
ROWS = 64
# A slot's rows are as long as the swizzle is wide.
ROW_BYTES = 128
SLOT_BYTES = ROWS * ROW_BYTES
SLOTS = 2
# Of a slot of 16-bit elements, as all but weight gradients and narrow chunks have.
COLS = ROW_BYTES // 2
