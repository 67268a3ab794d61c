"""Scales, and the kernels that quantise rows and fold weights."""
