"""Kernels that send rows to other GPUs of the host, and wait for them."""
