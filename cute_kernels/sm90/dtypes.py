"""The dtypes of specs as the DSL has them."""

import cutlass

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
