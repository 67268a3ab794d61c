"""Grouped GEMMs of cp.async and mma.sync, which every GPU from Ampere on has.

In construction: the forward in 16 bits is here and tested, compiled for Hopper. No call chooses it yet.
"""
