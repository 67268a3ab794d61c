"""Plugin of vLLM that runs mixture-of-experts layers by Glulam's kernels.

The variable GLULAM_VLLM selects the weight formats for which it does. vLLM calls `register`, an entry point of the
group `vllm.general_plugins`, in each of its processes.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("vllm") is None:
    raise ImportError("glulam_vllm is a plugin of vLLM, which is not installed; install vllm 0.33, or use glulam alone")

KNOWN_VERSIONS = ("0.33",)
"""Minor versions of vLLM with which this plugin was tested."""


def register() -> None:
    """Register Glulam's experts with vLLM for the formats that GLULAM_VLLM selects. May be called repeatedly.

    Raises:
        ValueError: GLULAM_VLLM contains an unknown format.
    """
    from .choice import BF16, chosen

    if not (formats := chosen()):
        return
    from glulam.integrations.versions import warn_if_untested

    warn_if_untested("vllm", KNOWN_VERSIONS)
    if BF16 in formats:
        from . import unquantised

        unquantised.register()
    if formats - {BF16}:
        from . import configs

        configs.register()
