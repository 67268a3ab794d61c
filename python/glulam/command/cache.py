"""`glulam cache`: compiled kernels, preferences, and objects for builds that are kept on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import typer
from rich.table import Table

from ffi_bridge import cache, objects

from ..choose import known, loadable, records
from .app import REQUIRED, command, flag, megabytes, row, say, show


def _size(found: Sequence[cache.Entry]) -> str:
    """Return the size of all entries as text."""
    return megabytes(sum(kept.size for kept in found))


def _states(found: Sequence[cache.Entry]) -> str:
    """Return the number of entries in each state as text."""
    counts = Counter(kept.state for kept in found)
    return ", ".join(f"{counts[state]} {state}" for state in cache.STATES)


def _summary(stored: Sequence[cache.Entry]) -> str:
    """Return one line about all objects (compiled, not linked), of which a build has hundreds."""
    place = records.shown(objects.folder())
    return f"{len(stored)} objects for builds in {place} ({_size(stored)}): {_states(stored)}"


@command("cache list")
def cache_list() -> None:
    """Show every kernel in the cache with its state, the preferred kernels, and the number of objects for builds."""
    stored = known.read_preferences()
    preferred = list(stored.preferred.values())
    found, root = list(cache.entries()), records.shown(cache.cache_root())
    grid = Table()
    for heading in ("kernel", "state", ""):
        grid.add_column(heading, overflow="fold")
    grid.add_column("KB", justify="right")
    for kept in found:
        name = kept.spec.name if kept.spec else records.shown(kept.name)
        mark = "preferred" if kept.spec in preferred and kept.state == "sound" else ""
        grid.add_row(name, kept.state, mark, f"{kept.size / 1024:.0f}")
    if found:
        show(f"compiled kernels in {root}:", grid)
    else:
        show(f"no compiled kernels in {root}; `glulam compile` makes one")
    sound = [kept.spec for kept in found if kept.state == "sound"]
    elsewhere = [
        f"preferred {'from the bundle' if loadable.in_bundle(spec) else 'but not compiled here'}: {spec.name}"
        for spec in preferred
        if spec not in sound
    ]
    show(_summary(list(objects.entries())), *elsewhere, *stored.ignored)


@command("cache verify")
def cache_verify() -> None:
    """Check every kernel and object; exit status 1 if one is damaged (it is made anew when it is next needed)."""
    found, stored = list(cache.entries()), list(objects.entries())
    for kept in [*found, *(kept for kept in stored if kept.state == "damaged")]:
        if kept.problem:
            say(f"{kept.state}: {records.shown(kept.name)}: {kept.problem}")
    for line in known.read_preferences().ignored:
        say(line)
    say(f"{len(found)} kernels in {records.shown(cache.cache_root())}: {_states(found)}")
    say(_summary(stored))
    raise typer.Exit(int(any(kept.state == "damaged" for kept in (*found, *stored))))


@command("cache forget", name=row("As `glulam cache list` names it.", str, REQUIRED)._replace(positional=True))
def cache_forget(name: str) -> None:
    """Drop the preference for one kernel: it stays in the cache, and its calls get tuned or shipped kernels again."""
    preferred = [spec.name for spec in known.read_preferences().preferred.values()]
    if not known.drop_preference(name):
        others = f"preferred are {', '.join(preferred)}" if preferred else "no kernel is"
        raise ValueError(f"{records.shown(name)} is not preferred; {others}")
    say(f"{name} is preferred no more; calls get what a tuned table says, else what ships")


@command(
    "cache clear",
    outdated=flag("Only what no installed version can use."),
    preferred=flag("Only the preferences; kernels stay."),
)
def cache_clear(outdated: bool, preferred: bool) -> None:
    """Remove compiled kernels, objects and preferences; running processes keep what they have loaded."""
    removed: list[cache.Entry] = []
    dropped: list[cache.Entry] = []
    if not preferred:
        states = ("outdated", "damaged", "aside") if outdated else cache.STATES
        removed, dropped = cache.clear(states=states), objects.clear(states)
    forgotten = 0 if outdated and not preferred else known.clear_preferences()
    size = sum(kept.size for kept in removed) / 1024
    root = records.shown(cache.cache_root())
    say(
        f"{root}: removed {len(removed)} kernels ({size:.0f} KB), {forgotten} preferences, "
        f"{len(dropped)} objects ({_size(dropped)})"
    )
    for line in known.read_preferences().ignored:
        say(line)
