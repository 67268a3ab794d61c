"""Building blocks of every kernel: access to memory by address, exchanges between lanes of a warp, selects, vectors."""
