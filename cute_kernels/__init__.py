"""Device code of Glulam in CuTe DSL.

    tiles, formats, specs, signatures, ...     plain data: what there is, what it takes, which module makes it
    activation, device, memory, schedule       what kernels are made of, on any architecture
    decoding, epilogue, launches               what GEMMs are made of besides
    quantize, layer, ranks, mhc                kernels of any architecture
    sm90, portable                             Hopper's GEMMs and all other GPUs', and which specs ship: `configs`

Only this package imports `cutlass`, and plain data does not, `configs`, `sm90.budget`, `epilogue.sizes` and
`mhc.shapes` among it: naming and choosing kernels costs no compiler.
"""
