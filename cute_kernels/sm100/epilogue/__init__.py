"""Epilogues of Blackwell. They are Hopper's, except for loads and stores of slabs: in tensor memory the 64 rows of a
slab lie in four places of a tile."""
