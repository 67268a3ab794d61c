"""Kernels of manifold-constrained hyper-connections (docs/mhc.md), roughly one file for each operator. Importing this
package without its modules imports no compiler."""
