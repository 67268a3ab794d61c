"""Formats of matrices, and the pairs of formats that GEMMs multiply. Plain data, which the host reads without a
compiler.

To add a format, write a file with its `Format`s, and add a row to `OPERANDS` for each pair in which a GEMM multiplies
it. Kernels decode a format by its element type and its scale type (`cute_kernels/decoding/`).
"""

from __future__ import annotations

from .format import BITS as BITS
from .format import BYTE as BYTE
from .format import DENSE as DENSE
from .format import E2M1 as E2M1
from .format import E4M3 as E4M3
from .format import E8M0 as E8M0
from .format import FLOAT32 as FLOAT32
from .format import ROW as ROW
from .format import WORD as WORD
from .format import WORD_ELEMENTS as WORD_ELEMENTS
from .format import Format as Format
from .fp8_block import FP8_BLOCK as FP8_BLOCK
from .fp8_block import FP8_ROWS as FP8_ROWS
from .mxfp4 import MXFP4 as MXFP4
from .mxfp4 import MXFP4_ROWS as MXFP4_ROWS
from .mxfp8 import MXFP8 as MXFP8
from .mxfp8 import MXFP8_FOLDED as MXFP8_FOLDED
from .mxfp8 import MXFP8_VALUES as MXFP8_VALUES
from .mxfp8 import MXFP8_WIDE as MXFP8_WIDE
from .nvfp4 import NVFP4 as NVFP4
from .operands import DECODED as DECODED
from .operands import OPERANDS as OPERANDS
from .operands import Operands as Operands
from .operands import next_operands as next_operands
