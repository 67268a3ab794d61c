"""Sizes of slabs of accumulators (64 rows) and of the slots that stage them in shared memory. Plain Python: the host
computes with them without a compiler."""

# Threads of a warpgroup, which hold the accumulators of a slab.
THREADS = 128
# Rows of a slab, and of a slot.
ROWS = 64
# A slot's rows are as long as the swizzle is wide.
ROW_BYTES = 128
SLOT_BYTES = ROWS * ROW_BYTES
SLOTS = 2
# Columns of a slot of 16-bit elements; weight gradients and narrow chunks have other slots.
COLS = ROW_BYTES // 2
