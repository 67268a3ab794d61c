"""Kernel parameters read by computed address, for example an array of pointers in a loop."""

from __future__ import annotations

import numpy as np

from .engines import PARAM_BASE, EngineFault


def load(u, address, count, dtype, m):
    """Load `count` consecutive values for each lane, at generic addresses of parameters (PTX ISA, section ld)."""
    here = np.broadcast_to(m, u.n)
    places = np.broadcast_to(address, u.n).astype(np.int64) - PARAM_BASE
    size, end = np.dtype(dtype).itemsize, u.cta.kernel.param_bytes
    found = [np.zeros(u.n, dtype) for _ in range(count)]
    for place in np.unique(places[here]):
        if place < 0 or place + count * size > end or place % size:
            raise EngineFault(f"ld.param of {count} x {size} bytes at {place}: there are {end} bytes of parameters")
        for j, values in enumerate(found):
            values[here & (places == place)] = u.cta.params(int(place) + j * size, dtype)
    return found
