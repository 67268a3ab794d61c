"""Block scales, and the kernels that use them: kernels that quantise along rows or columns, and kernels that fold
weights. Folding rescales the blocks of a weight row so that all of them share one scale."""
