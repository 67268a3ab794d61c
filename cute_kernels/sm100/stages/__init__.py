"""Blackwell's GEMMs to compile: the `trace` of each module joins a launch and a kernel of this architecture."""
