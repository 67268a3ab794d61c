"""Epilogues that all architectures share: what a kernel does with a tile's sums before it stores them.

Each architecture brings its own staging slots and stores. base.py defines the terms.
"""
