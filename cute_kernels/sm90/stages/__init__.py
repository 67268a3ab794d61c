"""Functions that trace the launches of Hopper's GEMMs, one module for each kind of spec."""
