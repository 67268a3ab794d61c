"""The GEMMs' stages: each a kernel and its launch, called with what its signature says (`cute_kernels.signatures`).

Which GEMM a launch is of, and which epilogue where architectures have their own, is its argument: an architecture's
`stages` name them. Without rows a stage launches nothing; its kernel is loaded all the same.
"""
