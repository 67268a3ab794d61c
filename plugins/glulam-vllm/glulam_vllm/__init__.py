"""Plugin of vLLM: mixture-of-experts layers on Glulam's kernels, where the environment variable GLULAM_VLLM says so.

vLLM calls `register`, an entry point of group `vllm.general_plugins`, in each of its processes.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("vllm") is None:
    raise ImportError("glulam_vllm is a plugin of vLLM, which is not installed; install vllm 0.33, or use glulam alone")

KNOWN_VERSIONS = ("0.33",)
"""Minor versions of vLLM that this was tested with."""


def register() -> None:
    """Let vLLM ask Glulam for experts of the formats that GLULAM_VLLM names. May be called repeatedly.

    Raises:
        ValueError: GLULAM_VLLM names a format that there is none.
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
