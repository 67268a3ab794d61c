"""GEMMs for Blackwell, of 16-bit and of MXFP8 operands.

Loads, schedules and epilogues come from Hopper's kernels (sm90/), but tcgen05 instructions multiply, into tensor
memory.
"""
