"""Block scales, and the kernels that quantise rows and fold weights (give a row of blocks one common scale)."""
