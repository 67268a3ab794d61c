"""The GEMMs' launches: functions that launch a kernel, called with the arguments of `cute_kernels.signatures`.

`trace` takes the GEMM, and the epilogue if architectures have their own, as arguments; an architecture's `stages` pass
them. Without rows a launch starts nothing, but its kernel is still loaded.
"""
