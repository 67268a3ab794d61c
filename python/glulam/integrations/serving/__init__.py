"""Running the experts of serving engines by `glulam.moe`: engines' activation names, engines' weights, and the call.

An engine's plugin calls `gate_of`, makes a `ServedExperts` after weights are loaded, and calls it in each forward. A
layer that Glulam cannot compute raises `NotServed` before its weights are changed; the plugin then leaves it to the
engine.
"""

from .experts import ServedExperts as ServedExperts
from .gates import NotServed as NotServed
from .gates import gate_of as gate_of
from .weights import mxfp4_kind as mxfp4_kind
from .weights import served_recipe as served_recipe
