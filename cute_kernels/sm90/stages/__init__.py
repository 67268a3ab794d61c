"""The GEMMs' stages: each a kernel and its launch, called with what its signature says (`cute_kernels.signatures`).

Without rows a stage launches nothing; its kernel is loaded all the same.
"""
