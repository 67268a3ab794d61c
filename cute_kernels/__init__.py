"""Device code of Glulam in CuTe DSL.

    tiles, formats, specs, signatures, ...     plain data: kernels, their arguments, the modules that make them
    activation, device, memory, schedule       parts of kernels for any architecture
    decoding, epilogue, launches               further parts of GEMMs
    quantize, layer, ranks, mhc                kernels for any architecture
    sm90, sm100, portable                      GEMMs of Hopper, of Blackwell, of all other GPUs

The module `configs` of each of the last three folders lists the kernels that ship. Only this package imports `cutlass`.
These modules of it do not: the plain data, `configs`, `sm90.budget`, `epilogue.sizes` and `mhc.shapes`. So naming and
choosing kernels needs no compiler.
"""
