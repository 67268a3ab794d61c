"""MXFP8: scale bytes, and the kernels that quantise rows and fold weights."""
