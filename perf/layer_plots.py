"""The plot of the `layer` suite: what our time consists of, and beside it everybody's."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from .cells import OURS
from .layer_tables import STAGES, steps_of, whole_us
from .results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROUTING = "uniform"
BAR = 0.85  # of the distance between two cases, all bars of a case together
STEP_COLOURS = {
    "router GEMM": "#0b3954",
    "route": "#1b6ca8",
    "permute": "#6fb1e0",
    "FC1": "#2a9d8f",
    "FC2": "#6a994e",
    "combine": "#f4a261",
    "backward of combine": "#f9d0ab",
    "backward of FC2: dglu": "#4f6d3a",
    "backward of FC2: dw2": "#b5cfa3",
    "permute again": "#bcd9ee",
    "backward of FC1: dw1": "#93d3cb",
    "backward of FC1: dgrad": "#1d6b62",
    "backward of permute": "#d7a97e",
    "backward of route": "#7fa7c9",
    "backward of router GEMM": "#5a7486",
}
PEER_COLOURS = {"MLP alone": "#7a7a7a", "sorted by torch": "#8e6c8a", "torch": "#d1495b", "SonicMoE": "#e6a700"}


@dataclasses.dataclass(frozen=True)
class Group:
    """A case: each step's time and each peer's, over our time of the whole."""

    label: str
    stages: dict[str, float]
    peers: dict[str, float]


def groups_of(result: Result, op: str) -> list[Group]:
    """Every case of even routing whose steps were measured, "forward" or "train"."""
    timed = [record for record in result["records"] if record["op"] == op]
    found = []
    for record in result["records"]:
        if record["op"] != STAGES or record["of"] != op or not (whole := whole_us(record, timed)):
            continue
        steps = {name: us / whole for name, us in steps_of(record).items()}
        found.append(Group(_label(record["case"]), steps, _peers(record["case"], timed, whole)))
    return found


def _label(case: dict[str, Any]) -> str:
    name, tokens = case["name"], case["tokens"]
    return str(name) if str(tokens) in name else f"{name}\n{tokens} tokens"


def _peers(case: dict[str, Any], timed: list[dict[str, Any]], whole_us: float) -> dict[str, float]:
    """Of the same mode as ours: the last that was measured."""
    times = [record["times"] for record in timed if record["case"] == case and OURS in record["times"]][-1]
    return {name: summary["median_us"] / whole_us for name, summary in times.items() if name != OURS}


def draw_groups(axes: Axes, groups: list[Group]) -> None:
    """A group of bars a case: ours stacked by step, then a bar for each of the others."""
    steps = list(dict.fromkeys(name for group in groups for name in group.stages))
    peers = list(dict.fromkeys(name for group in groups for name in group.peers))
    height = BAR / (1 + len(peers))
    places = [place - BAR / 2 + height / 2 for place in range(len(groups))]
    done = [0.0] * len(groups)
    for name in steps:
        widths = [group.stages.get(name, 0.0) for group in groups]
        axes.barh(places, widths, height, left=done, label=name, color=STEP_COLOURS.get(name))
        done = [start + width for start, width in zip(done, widths, strict=True)]
    for number, name in enumerate(peers, 1):
        widths = [group.peers.get(name, 0.0) for group in groups]
        axes.barh([p + number * height for p in places], widths, height, label=name, color=PEER_COLOURS.get(name))
        for place, width in zip(places, widths, strict=True):
            if width:
                axes.text(width, place + number * height, f" {name} {width:.2f}", va="center", fontsize=6)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(groups)), [group.label for group in groups])
    axes.set_xlim(right=1.25 * max((w for g in groups for w in (*g.peers.values(), 1.0)), default=1.0))
    axes.invert_yaxis()
    axes.set_xlabel("time / ours as a whole")
    axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.25 / len(groups) - 0.02), ncols=5)
