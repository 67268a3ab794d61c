"""Kernels for Hopper (sm_90a): TMA loads, wgmma, persistent warp-specialised scheduling."""
