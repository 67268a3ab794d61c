"""Grouped GEMMs for every GPU since Ampere, built on cp.async and mma.sync, without TMA and wgmma."""
