"""Experts of serving engines on `glulam.moe`: gates by engines' names, weights as engines hold them, and the call.

An engine's plugin asks `gate_of`, makes a `ServedExperts` once weights are loaded, and calls it in each forward. What
Glulam does not compute raises `NotServed` before weights are touched; the plugin leaves such a layer to the engine.
"""

from .experts import ServedExperts as ServedExperts
from .gates import NotServed as NotServed
from .gates import gate_of as gate_of
from .weights import mxfp4_kind as mxfp4_kind
from .weights import served_recipe as served_recipe
