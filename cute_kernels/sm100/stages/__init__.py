"""Launches of Blackwell's GEMMs."""
