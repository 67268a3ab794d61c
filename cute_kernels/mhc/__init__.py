"""Kernels of hyper-connections (docs/mhc.md), roughly one file for each operator. Importing the package itself, without
a module of it, imports no compiler."""
