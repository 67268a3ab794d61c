"""Kernels of expert parallelism between GPUs (ranks) of the same host. They store rows to the memory of other ranks,
and wait for the rows of the other ranks."""
