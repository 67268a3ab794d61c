"""Kernels of expert parallelism that store rows to other GPUs (ranks) of the same host, and wait for the other ranks'
rows."""
