"""Launches of Hopper's GEMMs."""
