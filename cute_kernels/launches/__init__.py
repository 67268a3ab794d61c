"""Host functions that launch a GEMM's kernel. Each takes the arguments of its operator's signature;
`cute_kernels/signatures.py` describes them.

The modules of this folder serve all architectures. A module's function `trace(spec, gemm_type, ...)` makes the function
that is compiled for a spec. The folder `stages` of an architecture calls it with the architecture's kernel class
(`gemm_type`) and, if the architecture has its own epilogue, with the epilogue's class (`epilogue_type`). A call with T
= 0 rows launches no kernel, but still loads it.
"""
