"""Epilogues for Blackwell. They are Hopper's, except for loads and stores of slabs (64 rows).

In tensor memory the rows of a slab are not neighbours: they are four runs of 16 rows of the tile (store.py).
"""
