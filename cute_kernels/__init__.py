"""Device code of Glulam in CuTe DSL.

Only this package imports `cutlass`, and only its architecture folders do: `cute_kernels.specs` and
`cute_kernels.sm90.configs` are plain Python, so that naming and choosing kernels costs no compiler.
"""
