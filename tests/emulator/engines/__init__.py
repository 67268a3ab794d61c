"""Engines for work outside of the lanes: asynchronous copies, mbarriers, TMA, and three generations of tensor cores."""

from ..faults import Fault

EngineFault = Fault
PARAM_BASE = 0x7000_0000_0000  # generic addresses of kernel parameters: tensor maps lie there
