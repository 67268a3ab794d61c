"""Grouped GEMMs built on cp.async and mma.sync, which every GPU since Ampere has."""
