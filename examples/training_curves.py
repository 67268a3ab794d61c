"""Learning curves laid over each other: how far apart they are, and a plot of them.

    python examples/training_curves.py build/training-curves-h200.csv

draws what `train_moe.py` or `train_megatron.py` wrote, on any machine with matplotlib, as
build/training-curves-h200.svg.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script has only its own folder on the path

from perf import report, results, tables
from perf.__main__ import show as show_table
from perf.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUITE = "training-curves"
WINDOW = 20  # steps that a smoothed loss averages over
GRADIENTS_ALLOWED = 4.0  # times the peers' rounding; seen: 0.8 to 1.2 in float32, up to 1.9 in bfloat16
HELD_OUT_ALLOWED = 0.03  # nats above the first run's; runs that differ by rounding alone scatter by 0.007
NOISE_ALLOWED = 2.0  # times the largest distance between the peers' curves, where gradients are not compared
SMALLEST_NOISE = 1e-4  # nats: in float32 curves part by 1e-7, until a rounding sends one token to another expert


class Distance(NamedTuple):
    """The distance between two smoothed curves, in nats a byte: the mean of the absolute differences, and the
    largest.
    """

    mean: float
    largest: float


def smoothed(losses: list[float], window: int = WINDOW) -> list[float]:
    """Return for each step the mean of the last `window` losses; at the start, of as many as there are."""
    spans = [losses[max(0, end - window) : end] for end in range(1, len(losses) + 1)]
    return [sum(span) / len(span) for span in spans]


def distance(losses: list[float], reference: list[float]) -> Distance:
    """Return how far two smoothed curves lie apart."""
    sizes = [abs(a - b) for a, b in zip(smoothed(losses), smoothed(reference), strict=True)]
    # Not max(): it passes over a NaN that is not the first.
    return Distance(sum(sizes) / len(sizes), sorted(sizes)[-1] if sum(sizes) == sum(sizes) else math.nan)


def noise(curves: list[list[float]]) -> Distance:
    """Return the distance that rounding alone causes: the largest between any two of the curves."""
    pairs = [distance(a, b) for a, b in itertools.combinations(curves, 2)]
    return Distance(max(pair.mean for pair in pairs), max(pair.largest for pair in pairs))


def within_noise(found: Distance, rounding: Distance) -> bool:
    """Return whether a curve is as close as curves that differ by rounding are to each other. A NaN is not."""
    allowed = [max(NOISE_ALLOWED * value, SMALLEST_NOISE) for value in rounding]
    return all(value <= most for value, most in zip(found, allowed, strict=True))


def make_result(stamp: dict[str, Any], records: list[dict[str, Any]], peers: int, suite: str = SUITE) -> Result:
    """Return the content of a result file.

    Args:
        suite: one of `results.TRAINING`.
        records: one of each run, and at the end the one that they share. The first `peers` runs differ in their
            rounding alone, and the others are judged by them: runs with "gradients" or a "recipe" by these
            gradients and the held-out loss, other runs by their curves. Each run but the first gets its distance
            from the first.
    """
    *runs, shared = records
    curves = [run["loss"] for run in runs]
    for run in runs:
        run["loss_at_end"] = smoothed(run["loss"])[-1]
    for run in runs[1:]:
        run["distance"] = distance(run["loss"], curves[0])._asdict()
    rounding = noise(curves[:peers])
    verdict: dict[str, Any] = {"noise": rounding._asdict(), "window": WINDOW}
    checked = [run for run in runs[peers:] if run.keys() & {"gradients", "recipe"}]
    if by_curve := [run["loss"] for run in runs[peers:] if not run.keys() & {"gradients", "recipe"}]:
        verdict["within_noise"] = all(within_noise(distance(curve, curves[0]), rounding) for curve in by_curve)
    if gradients := [{"run": run["run"], **run["gradients"]} for run in checked if "gradients" in run]:
        verdict["gradients"] = max(gradients, key=lambda found: _or_infinity(found["times"]))
    if held_out := [{"run": run["run"], "above": run["held_out"] - runs[0]["held_out"]} for run in checked]:
        verdict["held_out"] = max(held_out, key=lambda found: _or_infinity(found["above"]))
    return results.make_result(suite, stamp, {}, [*runs, {**shared, **verdict}])


def _or_infinity(value: float) -> float:
    """Return the value, or infinity for a NaN, which max() would pass over."""
    return math.inf if math.isnan(value) else value


def file_name(result: Result) -> str:
    return results.default_path(result["suite"], result["stamp"]["gpu"]).name


def show(result: Result, console: Console) -> bool:
    """Print the table and the verdicts; return whether all verdicts are good."""
    for table in tables.tables_of(result):
        show_table(table, console)
    found = list(verdicts(result["records"][-1]))
    for name, good, text in found:
        console.print(f"{name:<9} {'[green]ok[/]' if good else '[red]FAILED[/]'}: {text}", soft_wrap=True)
    return all(good for _, good, _ in found)


def verdicts(shared: dict[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """Yield, from the record that all runs share, each verdict: what is judged, whether it is good, and the
    numbers.
    """
    if gradients := shared.get("gradients"):
        ours = "{run}: from the same weights, that of {parameter} is {distance:.1e} from the peer's".format(**gradients)
        peers = f"the peer's other orders are up to {gradients['rounding']:.1e}"
        good = gradients["times"] <= GRADIENTS_ALLOWED
        yield "gradients", good, f"{ours}; {peers}, and the rule is {GRADIENTS_ALLOWED:g} times that"
    if held_out := shared.get("held_out"):
        ours = "{run}: a loss {above:+.2g} from the peer's".format(**held_out)
        yield "held out", held_out["above"] <= HELD_OUT_ALLOWED, f"{ours}; the rule is {HELD_OUT_ALLOWED:+g}"
    if (within := shared.get("within_noise")) is not None:
        mean, largest = shared["noise"].values()
        peers = f"the peer's runs, which round differently, are {mean:.2g} apart on average, {largest:.2g} at most"
        yield "curves", within, f"{peers}; the rule is {NOISE_ALLOWED:g} times that, or {SMALLEST_NOISE:g}"


def save(result: Result, path: Path, console: Console) -> None:
    """Write the result file, and the plot beside it if matplotlib is installed."""
    results.write(result, path)
    console.print(f"wrote {path}", soft_wrap=True)
    try:
        plot(result, path.with_suffix(".svg"))
        console.print(f"wrote {path.with_suffix('.svg')}", soft_wrap=True)
    except RuntimeError:
        console.print(f"no matplotlib, so no plot: `python {__file__} {path}` draws it where there is", soft_wrap=True)


def draw(result: Result) -> Figure:
    """The losses of training runs over each other, and the differences of their means from the first run's."""
    runs, window = [record for record in result["records"] if "loss" in record], result["records"][-1]["window"]
    first = smoothed(runs[0]["loss"], window)
    figure = report.new_figure(8.0, 6.0)
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


def plot(result: Result, path: Path) -> None:
    """Write both panels, the losses and their differences from the first run's, in the format of path's suffix.

    Raises:
        RuntimeError: matplotlib is not installed.
        ValueError: the result is of another suite.
    """
    if result["suite"] not in results.TRAINING:
        raise ValueError(f"the suite {result['suite']!r} has no curves; these have: {', '.join(results.TRAINING)}")
    report.save(partial(draw, result), path)


def main(
    result: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A result file of train_moe.py.")],
    out: Annotated[Path | None, typer.Option(help="The plot, SVG or PNG; default: beside the results.")] = None,
) -> None:
    """Plot the learning curves of a result file."""
    path = out or result.with_suffix(".svg")
    try:
        plot(results.read(result), path)
    except (RuntimeError, ValueError) as error:
        typer.echo(f"training_curves: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
