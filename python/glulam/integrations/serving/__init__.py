"""Helpers for plugins that run the experts of serving engines by `glulam.moe`.

An engine's plugin calls `gate_of` to translate the activation, makes a `ServedExperts` after weights are loaded, and
calls it in each forward. For a layer that Glulam cannot compute, these raise `NotServed`, before the layer's weights
are changed; the plugin then leaves the layer to the engine.
"""

from .experts import ServedExperts as ServedExperts
from .gates import NotServed as NotServed
from .gates import gate_of as gate_of
from .weights import mxfp4_kind as mxfp4_kind
from .weights import served_recipe as served_recipe
