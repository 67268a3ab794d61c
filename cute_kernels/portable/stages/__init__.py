"""Portable GEMMs to compile, one module for each operator and operand format.

Each module's `trace` takes a spec. It joins the operator's launch (launches/) and a portable kernel.
"""
