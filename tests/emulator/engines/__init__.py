"""Engines beside the lanes: asynchronous copies, mbarriers, TMA, and the tensor cores' three generations."""

from ..faults import Fault

EngineFault = Fault
PARAM_BASE = 0x7000_0000_0000  # generic addresses of kernel parameters: tensor maps lie there
