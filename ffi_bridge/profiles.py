"""The specs that ship for an architecture, by profile, and the compiler complaints allowed for their kernels.

A profile is a named list of specs to build, for example "demo", "bf16" or "full".
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from cute_kernels.architectures import ARCHS
from cute_kernels.chains import stages_of
from cute_kernels.plain import plain_in
from cute_kernels.specs import Spec

# An architecture is a folder of cute_kernels; its configs list the shipped specs and the allowed complaints.
CONFIGS = {arch: f"cute_kernels.{each.folder}.configs" for arch, each in ARCHS.items()}
DEFAULT = "sm_90a"
"""The architecture to build for if none is named and there is no GPU."""

Allowed = Mapping[str, tuple[str, ...]]


def shipped_specs(arch: str, profile: str = "full", only: Sequence[str] = ()) -> list[Spec]:
    """Return the specs of a profile of an architecture.

    Args:
        arch: the architecture, for example "sm_90a".
        profile: the profile's name.
        only: patterns of spec names, for example "grouped_mm_bf16_*"; specs that match none are left out. Empty: all.

    Raises:
        ValueError: unknown architecture or profile (the message lists the choices), or a pattern that matches nothing.
    """
    if arch not in CONFIGS:
        raise ValueError(f"arch={arch!r} has no kernels; choose one of: {', '.join(CONFIGS)}")
    configs = importlib.import_module(CONFIGS[arch])
    if profile not in configs.PROFILES:
        raise ValueError(f"profile={profile!r} is none of {arch}; choose one of: {', '.join(configs.PROFILES)}")
    specs: list[Spec] = configs.shipped_specs(arch, profile)
    return matching(specs, only, f"profile {profile!r} of {arch}", functools.partial(_profiles_with, arch))


def _profiles_with(arch: str, pattern: str) -> str:
    """Return advice for an error message: how many functions of each profile match a pattern."""
    configs = importlib.import_module(CONFIGS[arch])
    names = {profile: [spec.name for spec in configs.shipped_specs(arch, profile)] for profile in configs.PROFILES}
    found = {profile: len(fnmatch.filter(names[profile], pattern)) for profile in names}
    if not any(found.values()):
        shortest = min((name for each in names.values() for name in each), key=len)
        return f"no other profile has one; names are as {shortest!r}"
    return "; ".join(f"profile {profile!r} has {number}" for profile, number in found.items() if number)


def matching(
    specs: Sequence[Spec],
    only: Sequence[str],
    where: str,
    instead: Callable[[str], str] = lambda pattern: "see `glulam info`",
) -> list[Spec]:
    """Return the specs whose names match a pattern of `only`, or all specs if `only` is empty.

    Args:
        specs: the specs to choose from.
        only: patterns of names.
        where: what the specs are, for the error message, for example "profile 'full' of sm_90a".
        instead: function of a pattern that matches nothing, which returns the error message's advice.

    Raises:
        ValueError: a pattern matches nothing.
    """
    for pattern in only:
        if not fnmatch.filter([spec.name for spec in specs], pattern):
            raise ValueError(f"only={pattern!r} matches no function of {where}; {instead(pattern)}")
    return [spec for spec in specs if not only or any(fnmatch.fnmatch(spec.name, pattern) for pattern in only)]


def profile_of(arch: str, name: str) -> str | None:
    """Return the smallest profile whose bundle has a function; None if no profile has it."""
    for profile in importlib.import_module(CONFIGS[arch]).PROFILES if arch in CONFIGS else ():
        specs = shipped_specs(arch, profile)
        if any(spec.name == name for spec in (*specs, *all_stages(specs))):
            return str(profile)
    return None


def allowed_diagnostics(arch: str) -> Allowed:
    """Return the complaints ('spills', 'C7510', ...) that the build of `arch` allows, by spec name.

    A build that leaves out a construct (`cute_kernels/plain.py`) may spill: its purpose is to find a fault, not speed.
    """
    allowed: Allowed = getattr(importlib.import_module(CONFIGS[arch]), "ALLOWED_DIAGNOSTICS", {})
    if plain_in(arch):
        may_spill = (stage.name for stage in all_stages(shipped_specs(arch, "full")))
        return {**dict.fromkeys(may_spill, ("spills",)), **allowed}
    return allowed


def all_stages(specs: Iterable[Spec]) -> list[Spec]:
    """Return the functions to compile for `specs`, each once: the stages of chains, and all other specs."""
    return list(dict.fromkeys(stage for spec in specs for stage in stages_of(spec)))
