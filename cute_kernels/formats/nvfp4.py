"""NVFP4: E2M1 elements, an E4M3 scale for each 16 elements, and a float32 global scale.

Elements lie in the same words as elements of MXFP4. A weight's value is element x scale x global scale. Element x scale
is exactly a bfloat16 number. Kernels multiply sums of products by the global scale. An expert may have its own global
scale, and so may each half of a gated w1.
"""

from __future__ import annotations

from .format import E2M1, E4M3, Format

NVFP4 = Format("nvfp4", E2M1, E4M3, block=16, has_global=True)
