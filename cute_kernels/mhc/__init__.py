"""Hyper-connection kernels, an operator a file. Importing this package imports no compiler."""
