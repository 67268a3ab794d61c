"""The small set of specs that tests of the bridge build, and where the sources of its kernels lie."""

from __future__ import annotations

import sys
from pathlib import Path

from cute_kernels.specs import GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, Spec

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
TOY_TRACER = "toy_kernels:trace"
TOY_SPECS: list[Spec] = [GroupedMmSpec(), GroupedGluSpec(save_preact=True), GroupedMlpSpec()]

if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))  # where the loader's check of the sources finds toy_kernels
