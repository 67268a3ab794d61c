"""The calls of a watched process: its share of a bundle's functions, with small inputs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

import ffi_bridge
from cute_kernels.chains import stages_of
from cute_kernels.layer.kernels import RANK_KERNELS
from cute_kernels.specs import LayerSpec, QuantizeMxfp8Spec, Spec, from_dict
from ffi_bridge.loader import bundle_root
from ffi_bridge.verification import verify
from glulam.choose import known
from glulam.host import device as gpus
from glulam.host import workspace
from glulam.host.plans import forget_plans
from glulam.validate import child
from glulam.validate.catalogue import trials_of
from glulam.validate.inputs import Size

SMALL = Size(rows=70, experts=4, kinds=("Zipf", "uniform"), has_odd=False, tokens=(65,), has_every_pair=False)
"""Sizes of calls: a tool makes a kernel 10 to 100 times slower."""


def shipped(index: int) -> tuple[str, dict[Spec, int]]:
    """Return a GPU's architecture, and for each function the number of its kernels in the manifest, 0 for a chain."""
    arch = gpus.gpu(index).arch
    manifest = verify(bundle_root() / arch, arch)
    return arch, {from_dict(function.spec): len(function.kernels) for function in manifest.functions.values()}


def is_out_of_reach(spec: Spec) -> bool:
    """Return True if no call on one GPU launches a spec: kernels between GPUs, and float32 rows rounded to MXFP8."""
    between_gpus = isinstance(spec, LayerSpec) and spec.kernel in RANK_KERNELS
    return between_gpus or (isinstance(spec, QuantizeMxfp8Spec) and spec.rounded and spec.dtype == "float32")


def missed(specs: Iterable[Spec], launched: Iterable[Spec], elsewhere: Iterable[Spec] = ()) -> list[str]:
    """Return the names of functions and stages that were not launched, except those out of reach.

    Args:
        specs: the functions of a run.
        launched: the functions that it called.
        elsewhere: stages that other runs launch (`Share.elsewhere`).
    """
    there = {stage for spec in specs for stage in (spec, *stages_of(spec))}
    touched = {stage for spec in launched for stage in (spec, *stages_of(spec))}
    return sorted(spec.name for spec in there - touched - set(elsewhere) if not is_out_of_reach(spec))


def shares(specs: Mapping[Spec, int], jobs: int) -> list[dict[Spec, int]]:
    """Divide functions among processes so that each launches about as many kernels; equal for equal arguments.

    A kernel's first launch, which loads and patches its module, takes most of the time. So each function goes to the
    process that then has the fewest kernels, and a stage counts once in a process, whatever number of chains launch it.

    Args:
        specs: for each function the number of its kernels, 0 for a chain.
        jobs: number of processes.
    """
    found: list[dict[Spec, int]] = [{} for _ in range(jobs)]
    stages: list[set[Spec]] = [set() for _ in range(jobs)]
    kernels = [0] * jobs
    for spec, count in specs.items():
        grown = [
            kernels[job] + sum(specs.get(one) or 1 for one in set(stages_of(spec)) - stages[job]) for job in range(jobs)
        ]
        job = min(range(jobs), key=lambda job: (grown[job], len(found[job])))
        found[job][spec] = count
        stages[job].update(stages_of(spec))
        kernels[job] = grown[job]
    return found


class Share(NamedTuple):
    """A watched process's share of the functions: they are divided into parts, and a part into jobs.

    Attributes:
        job, jobs: the process's number, from 0, and the number of processes.
        part, parts: the number of the run's part, from 1, and the number of parts.
    """

    job: int = 0
    jobs: int = 1
    part: int = 1
    parts: int = 1

    def part_of(self, specs: Mapping[Spec, int]) -> dict[Spec, int]:
        """Return the functions of the part. specs: for each function the number of its kernels, 0 for a chain."""
        return shares(specs, self.parts)[self.part - 1]

    def elsewhere(self, specs: Mapping[Spec, int]) -> set[Spec]:
        """Return the stages that chains of other parts launch, some of which no call of their own launches. specs: as
        for `part_of`."""
        here = self.part_of(specs)
        return {stage for spec in specs if spec not in here for stage in stages_of(spec) if stage != spec}

    def of(self, specs: Mapping[Spec, int]) -> dict[Spec, int]:
        """Return the functions of the process. specs: as for `part_of`."""
        return shares(self.part_of(specs), self.jobs)[self.job]


def touch(specs: Mapping[Spec, int], device: torch.device, size: Size = SMALL) -> None:
    """Make the first call of each function that has one, and all calls of a function with several kernels, since a call
    launches some of them: `mhc.boundary` finishes x in 16 bits or in MXFP8. Each call has scratch memory of its own.

    Args:
        specs: for each function the number of its kernels, 0 for a chain.
        device: the GPU.
        size: sizes of calls.
    """
    for spec, kernels in specs.items():
        for trial in itertools.islice(trials_of(spec, size), None if kernels > 1 else 1):
            known.forget()
            forget_plans()
            workspace.forget()
            child.prefer(spec)
            with torch.no_grad():
                trial.call(child._all(trial.given, lambda one: one.to(device)))


def run_child(index: int, share: Share, size: Size, out: Path) -> None:
    """Run a watched process: launch its share of the functions, and write the names of the called ones.

    Args:
        index: index of the GPU.
        share: which functions are the process's.
        size: sizes of calls.
        out: file for the names.
    """
    torch.cuda.set_device(index)
    arch, specs = shipped(index)
    touch(share.of(specs), torch.device("cuda", index), size)
    torch.cuda.synchronize()
    out.write_text(json.dumps(sorted(ffi_bridge.load(arch).given_out)))
