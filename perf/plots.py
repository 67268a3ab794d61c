"""Plots of results, as SVG: the same results give the same bytes.

The overview, which pages show, lies beside the results; the others lie in their folder `plots`, which git ignores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cases import OPS
from .cells import DENSE, OURS, ratio, work
from .layer_cases import FORWARD, TRAIN
from .layer_plots import draw_groups, groups_of
from .overview import Line, overview, shown_gpu
from .results import TRAINING, Result, gpu_slug
from .targets import target
from .training import KERNELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RATIO_SUITES = ("forward", "decode", "backward")
ROOFLINE_SUITES = ("forward", "decode", "rows", "backward")
SETTINGS = {"svg.hashsalt": "glulam", "svg.fonttype": "none", "font.size": 8.0, "axes.grid": True, "grid.alpha": 0.3}
TORCH = "#d1495b"  # in any of its ways
COLOURS = {
    OURS: "#1b6ca8",
    DENSE: "#7a7a7a",
    "torch": TORCH,
    "quack tuned": "#e6a700",
    "quack retuned": "#e6a700",
    "quack default": "#b8a45a",
    "QuACK": "#e6a700",
    "BF16": "#7a7a7a",
}
OP_MARKS = dict(zip((*OPS, *KERNELS), "os^vDP*", strict=True))
BAR = 0.8  # of the distance between two cases, all bars of a case together

Draw = Callable[[Result], "Figure"]


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(f"drawing needs matplotlib ({error}); pip install 'glulam[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _measured(result: Result) -> list[dict[str, Any]]:
    return [record for record in result["records"] if "times" in record and "op" in record]


def _names(records: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record["times"]))


def _ops(records: list[dict[str, Any]]) -> list[str]:
    present = {record["op"] for record in records}
    return [op for op in (*OPS, *KERNELS) if op in present]


def _tflops(record: dict[str, Any], name: str) -> float:
    return work(record)[0] / float(record["times"][name]["median_us"]) * 1e-6


def _bars(axes: Axes, records: list[dict[str, Any]]) -> None:
    """A group of bars a case, one bar a peer: its time over ours. A black stroke marks the target."""
    peers = [name for name in _names(records) if name != OURS]
    height = BAR / max(len(peers), 1)
    for number, name in enumerate(peers):
        having = [(place, record) for place, record in enumerate(records) if name in record["times"]]
        places = [place + (number - (len(peers) - 1) / 2) * height for place, _ in having]
        ratios = [ratio(record, name) or 0.0 for _, record in having]
        axes.barh(places, ratios, height, label=name, color=COLOURS.get(name))
        for place, (_, record) in zip(places, having, strict=True):
            if (wanted := target(record, name)) is not None:
                axes.plot([wanted, wanted], [place - height / 2, place + height / 2], color="black", linewidth=2)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(records)), [f"{r['case']['name']}\n{r['case']['routing']}" for r in records])
    axes.invert_yaxis()


def draw_ratios(result: Result) -> Figure:
    """Each peer's time over ours; right of the dotted line we are faster, right of a black stroke the target is met."""
    records = _measured(result)
    ops = _ops(records)
    rows = max(sum(record["op"] == op for record in records) for op in ops)
    figure = _figure(4.0 * len(ops), 0.8 + 0.45 * rows)
    for axes, op in zip(figure.subplots(1, len(ops), squeeze=False)[0], ops, strict=True):
        _bars(axes, [record for record in records if record["op"] == op])
        axes.set_title(op)
        axes.set_xlabel("peer's time / ours")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _curves(axes: Axes, records: list[dict[str, Any]], x: Callable[[dict[str, Any]], float]) -> None:
    """Useful TF/s of every contestant over `x`."""
    for name in _names(records):
        points = sorted((x(r), _tflops(r, name)) for r in records if name in r["times"])
        axes.plot([p[0] for p in points], [p[1] for p in points], marker=".", label=name, color=COLOURS.get(name))
    axes.set_ylabel("useful TF/s")


def _grid(result: Result, draw: Callable[[Axes, list[dict[str, Any]]], None]) -> Figure:
    """A row of axes a model, a column an operation."""
    records = _measured(result)
    models = list(dict.fromkeys(record["case"]["name"] for record in records))
    ops = _ops(records)
    figure = _figure(4.0 * len(ops), 0.6 + 2.6 * len(models))
    for row, model in zip(figure.subplots(len(models), len(ops), squeeze=False), models, strict=True):
        for axes, op in zip(row, ops, strict=True):
            draw(axes, [r for r in records if r["op"] == op and r["case"]["name"] == model])
            axes.set_title(f"{model}, {op}")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def draw_skew(result: Result) -> Figure:
    """Useful TF/s over skew, from even to one expert with half of the rows."""

    def draw(axes: Axes, records: list[dict[str, Any]]) -> None:
        _curves(axes, records, lambda record: float(record["skew"]["max_over_mean"]))
        axes.set_xlabel("largest expert / mean")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)

    return _grid(result, draw)


def draw_rows(result: Result) -> Figure:
    """Useful TF/s over rows an expert, both logarithmic: bytes bind on the left, FLOP on the right."""

    def draw(axes: Axes, records: list[dict[str, Any]]) -> None:
        _curves(axes, records, lambda record: record["case"]["rows"] / record["case"]["experts"])
        axes.set_xlabel("rows an expert")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")

    return _grid(result, draw)


def draw_roofline(results: list[Result]) -> Figure:
    """Our useful TF/s over FLOP a byte, under the limits measured in the same runs (the highest of each)."""
    figure = _figure(7.0, 4.5)
    axes = figure.subplots()
    peak = max(result["limits"]["cublas_8192_tflops"] for result in results)
    copy = max(result["limits"]["copy_tbps"] for result in results)
    records = [record for result in results for record in _measured(result) if work(record)[1]]
    intensities = [work(record)[0] / work(record)[1] for record in records]
    low, high = min([*intensities, 1.0]) / 2, max([*intensities, 1000.0]) * 2
    axes.plot([low, peak / copy, high], [low * copy, peak, peak], color="black", linewidth=1, label="limits")
    for op in _ops(records):
        points = [(x, _tflops(r, OURS)) for x, r in zip(intensities, records, strict=True) if r["op"] == op]
        axes.plot([p[0] for p in points], [p[1] for p in points], OP_MARKS[op], markersize=4, label=op)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("useful FLOP a byte")
    axes.set_ylabel("useful TF/s")
    axes.legend()
    return figure


def draw_layer(result: Result) -> Figure:
    """Even routing: our steps, each a call of its own, and everybody's whole, over our whole; replayed where that was
    measured. Between the steps' end and the dotted line is what separate calls cannot show.
    """
    sides = {op: groups for op in (FORWARD, TRAIN) if (groups := groups_of(result, op))}
    figure = _figure(6.5 * len(sides), 1.0 + 0.9 * max(map(len, sides.values())))
    for axes, (op, groups) in zip(figure.subplots(1, len(sides), squeeze=False)[0], sides.items(), strict=True):
        draw_groups(axes, groups)
        axes.set_title("forward" if op == FORWARD else "forward and backward")
    return figure


def draw_overview(lines: list[Line]) -> Figure:
    """Each peer's time over ours, a layer of one model; right of the dotted line we are faster."""
    figure = _figure(7.0, 0.8 + 0.5 * len(lines))
    axes = figure.subplots()
    axes.set_axisbelow(True)
    for place, line in enumerate(lines):
        height = BAR / max(len(line.peers), 1)
        for number, (title, ratios) in enumerate(line.peers.items()):
            y = place + (number - (len(line.peers) - 1) / 2) * height
            axes.barh(y, ratios[0], height, color=COLOURS.get(title, TORCH))
            axes.text(ratios[0], y, f" {title} {ratios[0]:.2f}", va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(lines)), [line.what.replace("`", "") for line in lines])
    axes.set_xlim(right=1.2 * max((ratios[0] for line in lines for ratios in line.peers.values()), default=1.0))
    axes.invert_yaxis()
    axes.set_xlabel("peer's time / ours")
    return figure


def draw_curves(result: Result) -> Figure:
    """The losses of training runs over each other, and the differences of their means from the first run's."""
    runs, window = [record for record in result["records"] if "loss" in record], result["records"][-1]["window"]
    first = smoothed(runs[0]["loss"], window)
    figure = _figure(8.0, 6.0)
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    for number, run in enumerate(runs):
        # Each curve is thinner than the one that it covers, so that both are seen.
        style: dict[str, Any] = {"linewidth": 1 + 5 * (len(runs) - 1 - number) / len(runs), "alpha": 0.8}
        above.plot(run["loss"], color=f"C{number}", label=f"{run['run']} (held out: {run['held_out']:.4f})", **style)
        if number:
            apart = [a - b for a, b in zip(smoothed(run["loss"], window), first, strict=True)]
            below.plot(apart, color=f"C{number}", linewidth=1.2, label=run["run"])
    above.set_ylabel("loss, nats a byte")
    above.set_title(f"{result['stamp']['gpu']}, commit {result['stamp']['commit'][:12]}")
    below.set_ylabel(f"minus {runs[0]['run']}")
    below.set_xlabel(f"step (differences are of means over {window} steps)")
    below.axhline(0, color="C0", linewidth=0.8)
    for axes in (above, below):
        axes.legend()
    return figure


def smoothed(losses: list[float], window: int) -> list[float]:
    """For each step the mean of the last `window` losses, of fewer at the start."""
    spans = [losses[max(0, end - window) : end] for end in range(1, len(losses) + 1)]
    return [sum(span) / len(span) for span in spans]


def save(draw: Callable[[], Figure], path: Path) -> None:
    """Draw and write a plot in the format of path's suffix. Raises RuntimeError without matplotlib."""
    _figure(1, 1)  # says what is missing
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(SETTINGS):
        draw().savefig(path, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)


def _plots_of(gpu: str, results: list[Result]) -> dict[str, Callable[[], Figure]]:
    """What can be drawn of one GPU's results, by file stem."""
    by_suite = {result["suite"]: result for result in results if _measured(result)}
    curves = {result["suite"]: result for result in results if result["suite"] in TRAINING}
    draws: dict[str, Draw] = dict.fromkeys(RATIO_SUITES, draw_ratios)
    draws |= {"skew": draw_skew, "rows": draw_rows}
    plots: dict[str, Callable[[], Figure]] = {
        f"{suite}-{gpu}": partial(draw, by_suite[suite]) for suite, draw in draws.items() if suite in by_suite
    }
    if "layer" in by_suite and any(groups_of(by_suite["layer"], op) for op in (FORWARD, TRAIN)):
        plots[f"layer-{gpu}"] = partial(draw_layer, by_suite["layer"])
    for suite in TRAINING:
        if suite in curves:
            plots[f"{suite}-{gpu}"] = partial(draw_curves, curves[suite])
    roofed = [by_suite[suite] for suite in ROOFLINE_SUITES if suite in by_suite]
    if roofed:
        plots[f"roofline-{gpu}"] = partial(draw_roofline, roofed)
    return plots


def overview_stem(results: list[Result]) -> str:
    """The file stem of the overview's plot."""
    return f"overview-{gpu_slug(shown_gpu(results))}"


def write_plots(results: list[Result], folder: Path) -> list[Path]:
    """Draw all that `results` hold; return the files' paths. Raises RuntimeError without matplotlib."""
    gpus: dict[str, list[Result]] = {}
    for result in results:
        gpus.setdefault(gpu_slug(result["stamp"]["gpu"]), []).append(result)
    plots = {stem: draw for gpu, held in gpus.items() for stem, draw in _plots_of(gpu, held).items()}
    paths = {folder / "plots" / f"{stem}.svg": draw for stem, draw in plots.items()}
    if lines := overview(results):
        paths[folder / f"{overview_stem(results)}.svg"] = partial(draw_overview, lines)
    for path, draw in paths.items():
        save(draw, path)
    return list(paths)
