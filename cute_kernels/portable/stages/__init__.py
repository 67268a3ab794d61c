"""Launches of the portable GEMMs."""
