"""Kernels that send to other GPUs of the host, and wait for them."""
