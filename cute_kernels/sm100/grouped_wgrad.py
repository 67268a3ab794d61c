"""Blackwell's weight gradient: dw[e] = dy_e^T @ x_e, contracted over the rows of group e."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Int64

from ..device.target import is_plain
from ..memory.scale_bands import ScaleBands, num_places
from ..sm90 import grouped_wgrad
from ..sm90.budget import ACROSS_REGISTERS
from ..specs import GemmSpec, WgradSpec
from ..tracing import DTYPES
from . import budget
from .block_scaled_wgrad import BlockScaledWgradMainloop, ClearingBlockScaledWgradMainloop, OperandScales
from .epilogue.wgrad import WgradEpilogue
from .mainloop import ClearingWgradMainloop, WgradMainloop
from .persistent import TensorMemoryGemm
from .tensor_memory import SLAB_LANES


class GroupedWgrad(TensorMemoryGemm, grouped_wgrad.GroupedWgrad):
    """The weight gradient in 16 bits, with the arguments of sm90.grouped_wgrad.GroupedWgrad.

    Attributes:
        mainloop_types: two classes. The first uses TMA addresses that wrap around 2^64 (memory/ragged.py); the second
            does not, for builds that avoid such addresses (`cute_kernels/plain.py`).
    """

    role_registers = ACROSS_REGISTERS  # the scheduler walks light and heavy groups, with two cursors
    epilogue_type = WgradEpilogue
    mainloop_types: tuple[type[WgradMainloop], type[WgradMainloop]] = WgradMainloop, ClearingWgradMainloop
    store_rows = SLAB_LANES

    def __init__(self, spec: GemmSpec, dtype: type[cutlass.Numeric], out_dtype: type[cutlass.Numeric]):
        self.mainloop_type = self.mainloop_types[is_plain("rows")]
        super().__init__(spec, dtype, out_dtype)


class GroupedMxfp8Wgrad(GroupedWgrad):
    """The weight gradient of dy [T, N] and x [T, K] in MXFP8, quantised by groups: a group's first block of 32 rows
    begins at the group's first row.
    """

    mainloop_types = BlockScaledWgradMainloop, ClearingBlockScaledWgradMainloop

    def __init__(self, spec: WgradSpec):
        super().__init__(spec, Float8E4M3FN, DTYPES[spec.out_dtype])

    @property
    def stages(self) -> int:
        return budget.block_scaled_stages(self.tile, self._slot_owners * self.shape.slots.num_bytes)

    @cute.jit
    def launch_scaled(
        self, dy: cute.Tensor, x: cute.Tensor, dw: cute.Tensor, scales: tuple[Int64, Int64],
        groups: tuple[Int64, Int32, Int32, Int64], dw_table: Int64, mask: Int64, accumulate: Int32, num_sms: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the kernel on `stream`.

        Args:
            scales: the addresses of dy's scales and of x's scales (memory/scale_bands.py).
            dy: [T, N] in E4M3.
            x: [T, K] in E4M3.
            dw: [E, N, K], the result.
            groups: address, encoding, count and tickets of schedule.groups.Groups.
            dw_table: the address of the offsets of experts' dw; 0: dw is packed.
            mask: the address of bool [E]: group e adds to dw[e] if mask[e] is true; 0: `accumulate` decides.
            accumulate: without a mask, all groups add to dw if this is not 0; else all overwrite dw.
        """
        num_rows = Int32(x.shape[0])
        places = num_places(num_rows, groups[2])
        operands = self.make_mainloop().operands(dy, x, Int64(0), Int64(0))
        operands = operands._replace(scales=OperandScales(*(ScaleBands(address, places) for address in scales)))
        self._launch(operands, num_rows, dy, x, dw, groups, dw_table, mask, accumulate, num_sms, stream)
