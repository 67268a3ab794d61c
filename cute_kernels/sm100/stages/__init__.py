"""Blackwell's GEMMs to compile, one module for each kind of spec: its `trace` joins a launch and a kernel of this
architecture."""
