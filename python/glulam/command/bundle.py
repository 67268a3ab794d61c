"""`glulam build`, `hub` and `info`: make a bundle, write it for the Hugging Face hub, or show its content."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from cute_kernels import plain
from cute_kernels.arch import serving
from ffi_bridge import build as builder
from ffi_bridge import host, hub, profiles, toolchain
from ffi_bridge.loader import ENV_BUNDLE, bundle_root, packaged_root
from ffi_bridge.manifest import Function
from ffi_bridge.verification import verify

from ..choose import records
from ..host.device import prefer_tried
from .app import REQUIRED, command, count, flag, megabytes, resources, row, say, show, word
from .doctor import find_gpu, installed_torch

ARCHS = word("Architecture, repeatable; default: this GPU's, or sm_90a.", profiles.CONFIGS)._replace(
    kind=list[str] | None
)
PROFILES = {"demo": "what the demo calls", "bf16": "all but float16", "full": "what a wheel has"}
IN_WORDS = ", ".join(f"{name} ({meaning})" for name, meaning in PROFILES.items())


def archs_here() -> list[str]:
    """Return a list of one architecture, the one to build for or to show on this machine.

    Of the architectures that the GPU can run, it is the best whose kernels were run on this GPU before. If none were,
    it is the best of all (`prefer_tried`). Without a GPU that has kernels it is profiles.DEFAULT, Hopper's.
    """
    gpu = find_gpu(installed_torch())
    return [(prefer_tried(serving(gpu.capability), gpu.name) if gpu else None) or profiles.DEFAULT]


@command(
    "build",
    arch=ARCHS,
    profile=word(f"{IN_WORDS}.", PROFILES, "bf16", listed=IN_WORDS),
    only=row("Functions by name, as 'grouped_mm_bf16_*'; repeatable; default: all.", list[str] | None),
    jobs=count("Compile processes; default: one a CPU."),
    out=row("Bundle folder; default: inside the installed package.", Path | None),
    keep=flag("Do nothing where the bundle has these functions already."),
    machine=word("CPU that launches them; with --out, as cross-compiled code does not run here.", host.HOSTS),
)
def build(
    arch: list[str] | None, profile: str, only: list[str] | None, jobs: int | None, out: Path | None, keep: bool,
    machine: str | None,
) -> None:  # fmt: skip
    """Compile the shipped kernels and link them into one library per architecture."""
    target = host.named(machine) if machine else host.here()
    if target != host.here() and out is None:
        raise ValueError(f"--machine {machine} needs --out: this machine is {host.here().machine}")
    for one in arch or archs_here():
        root = out or packaged_root()
        specs = profiles.shipped_specs(one, profile, only or ())
        manifest = (builder.find(specs, root) if keep else None) or builder.build(specs, root, jobs, machine=target)
        contents = f"{len(manifest.functions)} functions, {megabytes(manifest.size)}"
        say(f"{root / one / manifest.library}: {contents}")


def _tile(stage: dict[str, Any]) -> str:
    """Return a stage's tile, cluster and schedule as text. `stage`: its spec as a dict."""
    tile = stage.get("tile")
    if tile is None:
        return "-"
    adaptive = " adaptive" if tile["adaptive"] else ""
    cluster = f"c{tile['cluster_m']}x{tile['cluster_n']}{adaptive}"
    return f"{tile['m']}x{tile['n']}x{tile['k']} {cluster} {tile['schedule'][:4]}"


def _cells(functions: Mapping[str, Function], name: str) -> dict[str, str]:
    """Return the table cells that `info` prints for a function, by column heading.

    The spec of a function of several stages contains a spec for each stage.
    """
    spec = functions[name].spec
    registers, kilobytes = resources(functions, name)
    stages = [value for value in spec.values() if isinstance(value, dict) and "tile" in value] or [spec]
    first = stages[0]
    flags = [name for stage in stages for name, value in stage.items() if value is True]
    if "kernel" in first:
        flags += [first["kernel"], *(f"{name}={first[name]}" for name in ("n", "experts") if first.get(name))]
    return {
        "op": spec["op"],
        "dtype": first["dtype"],
        "activation": first.get("activation", "-"),
        "layout": first.get("glu_layout", "-"),
        "tile": " + ".join(dict.fromkeys(_tile(stage) for stage in stages)),
        "options": ", ".join(flags) or "-",
        "registers": registers,
        "smem KB": kilobytes,
    }


@command(
    "hub",
    arch=ARCHS._replace(kind=str | None),
    bundle=row(f"Folder; default: ${ENV_BUNDLE}, else the package's.", Path | None),
    out=row("The repository's folder.", Path, REQUIRED),
)
def write_for_hub(arch: str | None, bundle: Path | None, out: Path) -> None:
    """Write a bundle as a kernel of the Hugging Face hub, from which the package `kernels` loads functions by name."""
    folder = hub.write(bundle_root(bundle), arch or archs_here()[0], out)
    say(f"{records.shown(folder)}: {megabytes(sum(file.stat().st_size for file in folder.iterdir()))}")


@command(
    "info",
    arch=ARCHS,
    op=row("Show one operator's functions only, as grouped_mlp."),
    bundle=row(f"Folder; default: ${ENV_BUNDLE}, else the package's.", Path | None),
)
def info(arch: list[str] | None, op: str | None, bundle: Path | None) -> None:
    """Show what the bundle contains; nothing of it is loaded."""
    ops: set[str] = set()
    there = [one for one in profiles.CONFIGS if (bundle_root(bundle) / one).is_dir()]
    for one in arch or there or archs_here():
        folder = bundle_root(bundle) / one
        manifest = verify(folder, one)
        functions = manifest.functions
        ops |= {function.spec["op"] for function in functions.values()}
        rows = [_cells(functions, name) for name in functions if op in (None, functions[name].spec["op"])]
        if op is not None and not rows:
            continue
        table = Table(title=f"{manifest.arch}: {len(functions)} functions")
        for heading in rows[0] if rows else ():
            table.add_column(heading, justify="right" if heading in ("registers", "smem KB") else "left")
        for cells in rows:
            table.add_row(*cells.values())
        versions = ", ".join(f"{name} {version or '?'}" for name, version in manifest.versions.items())
        ranges = ", ".join(f"{name} {wanted}" for name, wanted in toolchain.RUNS_WITH.items())
        show(
            table,
            f"library   {folder / manifest.library} ({megabytes(manifest.size)})",
            f"sha256    {manifest.sha256}",
            f"built by  {versions}",
            f"runs with {ranges}, on any {manifest.host} CPU",
            *([f"plain     {', '.join(manifest.plain)} (${plain.ENV})"] if manifest.plain else []),
        )
    if op is not None and op not in ops:
        root = records.shown(bundle_root(bundle))
        raise ValueError(f"{root} has no function of operator {op!r}; it has those of {', '.join(sorted(ops))}")
