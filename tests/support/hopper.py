"""The recipes that the fake GPU supports, which is a Hopper."""

from __future__ import annotations

from cute_kernels.architectures import ARCHS
from glulam.recipes import RECIPES

SERVED = {name: recipe for name, recipe in RECIPES.items() if recipe.operands not in ARCHS["sm_90a"].lacks}
"""Recipes whose operands the kernels of sm_90a multiply."""
