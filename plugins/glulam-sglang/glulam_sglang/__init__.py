"""SGLang's mixture-of-experts layers on Glulam: `--moe-runner-backend glulam`. The entry point is `register`."""

from __future__ import annotations

import importlib.util

NAME = "glulam"
"""The backend's name: the value of --moe-runner-backend that selects it."""

if importlib.util.find_spec("sglang") is None:
    raise ImportError("glulam_sglang is a plugin of SGLang, which is not installed; install sglang 0.5.23")


def register() -> None:
    """Add the backend to SGLang's command line, MoE runner registry and MoE methods; called once per process.

    Never raises: SGLang would log the error and continue without the plugin. If this version of SGLang lacks something
    that the plugin needs, the first layer that would run on the backend raises one error that says so.
    """
    from .registration import register as register_all

    register_all()
