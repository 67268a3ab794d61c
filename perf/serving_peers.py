"""The serving suite's contestants: our recipes, and other packages' experts where they can be imported."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

from glulam.layer.choices import moe_of_choices

from .cells import OURS
from .contest import or_left_out
from .serving_cases import ServingCase
from .serving_data import ROWS_16_BITS, ROWS_FP8, Call, Contestant

PACKAGES = {"humming": "serving_humming", "vllm": "serving_vllm"}
"""Packages and the modules that call them, each with a function `contestants` of models and recipes."""
FP8_ROWS = ("mxfp8", "mxfp4", "fp8_block")


def ours(recipe: Any) -> Contestant:
    """Return moe_of_choices by a recipe, as `ServedExperts` calls it, on weights as kernels read them."""

    def make(case: ServingCase, w1: Any, w2: Any) -> Call:
        return lambda b: moe_of_choices(
            b.x, b.ids, b.weights, case.experts, w1, w2, world_experts=case.world, recipe=recipe, out=b.out
        )

    return Contestant(OURS, (recipe,), recipe, make, ROWS_FP8 if recipe in FP8_ROWS else ROWS_16_BITS)


def find_peers(models: Sequence[ServingCase], recipes: Sequence[str]) -> list[Contestant]:
    """Return the peers of packages that can be imported. Warn of each package that is absent or cannot be."""
    found: list[Contestant] = []
    for package, module in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            warnings.warn(f"{package} is left out: it is not installed", stacklevel=2)
            continue
        with or_left_out(package):
            found += importlib.import_module(f".{module}", __package__).contestants(models, recipes)
    return found
