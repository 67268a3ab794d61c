"""Hopper's GEMMs to compile, one module for each operator and operand format. Each module's `trace` takes a spec."""
