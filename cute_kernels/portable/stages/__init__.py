"""Portable GEMMs to compile: the `trace` of each module joins a launch of cute_kernels/launches and a portable
kernel."""
