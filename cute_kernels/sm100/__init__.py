"""Blackwell's own GEMMs, of 16-bit and MXFP8 operands: loads, schedules and epilogues are Hopper's (sm90/), but tcgen05
instructions multiply, into tensor memory."""
