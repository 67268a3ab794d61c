"""Block scales, and the kernels that quantise rows or columns and fold weights (rescale the blocks of a weight row so
that they share one scale)."""
