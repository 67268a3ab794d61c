"""Options and fixtures of all tests. Tests run without a GPU; those marked `gpu` are selected with `-m gpu`."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile

import pytest

with contextlib.suppress(ImportError):  # no test of the GPU needs it
    from hypothesis import HealthCheck, settings

    # How long an example takes says how busy the machine is.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

# What a person compiled or tuned on this machine must not decide what tests see.
_own = tempfile.TemporaryDirectory(prefix="glulam-tests-")
os.environ["GLULAM_CACHE_DIR"] = _own.name
os.environ["GLULAM_TUNED"] = ""


ARCHS = {"native": "sm_90a", "portable": "sm_90"}


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "whose kernels serve the GPU: Hopper's own, or those that every GPU from Ampere on has, compiled for Hopper"
    parser.addoption("--arch", choices=ARCHS, default="native", help=text)


def pytest_configure(config: pytest.Config) -> None:
    arch = config.getoption("--arch")
    os.environ["GLULAM_ARCH"] = ARCHS[arch]
    if arch == "portable":  # these tests are what such kernels are tried by
        os.environ["GLULAM_ALLOW_UNVALIDATED"] = "1"


@functools.cache
def _gpu_arch_served() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _gpu_arch_served():
        pytest.skip("needs a GPU of compute capability 9.0")
