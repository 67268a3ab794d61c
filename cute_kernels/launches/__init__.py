"""Host functions that launch a GEMM's kernel. Each takes the arguments of its operator's signature in
`cute_kernels/signatures.py`, which also describes them.

A module of this folder serves all architectures. Its `trace(spec, gemm_type, ...)` makes the function that is compiled
for a spec. An architecture's folder `stages` calls it with that architecture's kernel class (`gemm_type`) and, if its
epilogue is its own, with the epilogue's class (`epilogue_type`). A call with T = 0 rows launches no kernel, but still
loads it.
"""
