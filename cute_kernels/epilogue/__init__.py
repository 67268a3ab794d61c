"""Epilogues that all architectures share. An epilogue is the work on a tile's sums before the kernel stores them. Each
architecture has its own staging slots and stores. base.py defines the terms."""
