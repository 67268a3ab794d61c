"""Building blocks of every kernel: memory by address, lanes of a warp, selects, vectors."""
