"""Mainloops, from operands in memory to accumulators: loads by TMA or cp.async, decoding of weights, wgmma."""
