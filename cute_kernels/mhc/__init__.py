"""Kernels of hyper-connections (docs/mhc.md), roughly one file for each operator. Importing this package alone imports
no compiler."""
