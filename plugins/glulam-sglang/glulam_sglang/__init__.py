"""SGLang's mixture-of-experts layers on Glulam: `--moe-runner-backend glulam`. The entry point is `register`."""

from __future__ import annotations

import importlib.util

NAME = "glulam"
"""The value of --moe-runner-backend."""

if importlib.util.find_spec("sglang") is None:
    raise ImportError("glulam_sglang is a plugin of SGLang, which is not installed; install sglang 0.5.23")


def register() -> None:
    """Add the backend to SGLang's command line, its registry of MoE runners and its MoE methods; once a process.

    SGLang logs what a plugin raises and goes on without the plugin. So this never raises for a version of SGLang that
    lacks something: the first layer that is to run on this backend does, with one message.
    """
    from .registration import register as register_all

    register_all()
