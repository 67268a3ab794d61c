"""Definitions of the operators that torchvision for CUDA needs and that a torch for the CPU lacks.

Serving engines import torchvision.
"""

from __future__ import annotations

import importlib.util

import torch

TORCHVISION_OPS = ("nms(Tensor a, Tensor b, float c) -> Tensor", "qnms(Tensor a, Tensor b, float c) -> Tensor")
_libraries: list[torch.library.Library] = []
"""Keeps the libraries alive, since operators are removed with their library."""


def define() -> None:
    """Define the missing operators, without kernels, if torchvision is installed."""
    missing = [op for op in TORCHVISION_OPS if not hasattr(torch.ops.torchvision, op.partition("(")[0])]
    if missing and importlib.util.find_spec("torchvision") is not None:
        _libraries.append(torch.library.Library("torchvision", "FRAGMENT"))
        for operator in missing:
            _libraries[-1].define(operator)
