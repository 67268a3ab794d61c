"""Blackwell's own GEMMs, of 16-bit and MXFP8 operands: loads, schedules and epilogues are Hopper's, and tcgen05
multiplies."""
