"""Device code of Glulam in CuTe DSL.

    tiles, formats, specs, signatures, ...     plain data: what there is, what it takes, which module makes it
    activation, device, memory, schedule       what kernels are made of, on any architecture
    quantize, layer, mhc                       kernels of any architecture
    sm90                                       Hopper's GEMMs, and which specs ship: `configs`

Only this package imports `cutlass`, and plain data does not, `sm90.configs`, `sm90.budget` and `mhc.shapes` among it:
naming and choosing kernels costs no compiler.
"""
