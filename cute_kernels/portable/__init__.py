"""Grouped GEMMs of cp.async and mma.sync, which every GPU from Ampere on has."""
