"""Write the report from the result files: perf/results/README.md, the overview's plot beside it, the overview in the
main README, and the peers of serving in docs/serving.md.

The overview has six rows: prefill, decode, MXFP8, training and the host's share of one model's layer, and mHC.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .cells import HOST, OURS, Table, case_of, median, microseconds, rate, ratio, work
from .results import RESULTS, Record, Result, default_path, read_all
from .tables import tables_of
from .tables_recipes import serving_peers
from .targets import BF16, FP8_RECIPES, HOST_OURS, TORCH_FP8

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL, ROUTING = "Qwen3-30B-A3B", "uniform"
TITLE = f"One MoE layer of {MODEL}, the same rows for every expert"
HEADER = ("what", "us", "rate (of the limit)", "peer's time over ours (of all cases the least, the most)")
LIBRARIES = {"torch": "torch", "quack tuned": "QuACK"}
FP8_PEERS = {BF16: "BF16", TORCH_FP8: "torch's FP8"}
HOST_PEERS = {"torch mlp (out allocated)": "torch", "quack default mlp (out given)": "QuACK"}
REPOSITORY = Path(__file__).resolve().parents[1]
README, SERVING = REPOSITORY / "README.md", REPOSITORY / "docs/serving.md"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
SETTINGS = {"svg.hashsalt": "glulam", "svg.fonttype": "none", "font.size": 8.0, "axes.grid": True, "grid.alpha": 0.3}
TORCH = "#d1495b"  # in any of its ways
COLOURS = {"QuACK": "#e6a700", "BF16": "#7a7a7a"}
BAR = 0.8  # height of all bars of a line together, over the distance between two lines
NOTHING = "Nothing has been measured yet."
HEAD = """# Measured

Written by `python -m perf report` from the CSV files beside it; do not edit. Medians in microseconds, ± half the
distance between the 10th and the 90th percentile. In brackets: the peer's time over ours, above 1 we are faster.
A rate is in brackets a share of the machine's limit that binds first: cuBLAS 8192^3 or a device copy, same run.
Contestants take turns within one run. Random data, BF16, SwiGLU, no bias; a row scale in the backward only.
Each section names its commit and a hash of its kernels' sources. Later commits may have other kernels, so that numbers
of two sections, as of an H100 and an H200, are not to be compared where these differ.
`training-curves` is one training run after another, of `examples/train_moe.py` on real text, and `megatron-*` of
`examples/train_megatron.py`."""


class Line(NamedTuple):
    """A row of the overview: the case, our median time in us, and the rate as text.

    peers: {peer's title: its times over ours, first in this case, then in all cases}.
    """

    what: str
    us: float
    rate: str
    peers: dict[str, list[float]]


def _against(shown: Record, records: list[Record], ours: str, names: dict[str, str]) -> dict[str, list[float]]:
    """Return {peer's title: [its time over ours in `shown`, then in each of `records` that has both times]}.

    names: {peer's name in records: its title}.
    """
    return {
        title: [found for record in (shown, *records) if (found := ratio(record, name, ours)) is not None]
        for name, title in names.items()
        if name in shown["times"]
    }


def _layer(what: str, op: str, case: str, names: dict[str, str], ours: str, result: Result) -> Line | None:
    """Return the overview's row of one case of an operation; None if the case was not measured."""
    records = [record for record in result["records"] if record.get("op") == op and ours in record["times"]]
    for record in records:
        if (record["case"]["name"], record["case"]["routing"]) == (case, ROUTING):
            us = median(record, ours) or math.inf
            in_bf16 = ours == OURS  # the limit of FLOP is BF16's
            reached = rate(record, us, result["limits"]) if in_bf16 else f"{work(record)[0] / us * 1e-6:.0f} TF/s"
            return Line(f"{what}, {case_of(record).rows} rows", us, reached, _against(record, records, ours, names))
    return None


def _host(result: Result) -> Line | None:
    for record in result["records"]:
        if record["op"] == HOST and (us := median(record, HOST_OURS)):
            return Line("host: until `grouped_mlp` returns", us, "-", _against(record, [], HOST_OURS, HOST_PEERS))
    return None


def _mhc(result: Result) -> Line | None:
    records = [record for record in result["records"] if OURS in record.get("times", ())]
    for record in records:
        if (record["op"], record["direction"]) == ("pre", "forward"):
            us, size = median(record) or math.inf, record["size"]
            peers = _against(record, records, OURS, {"torch.compile": "torch.compile"})
            what = f"hyper-connections: `mhc` pre, {size['s'] * size['b']} tokens of {size['n']} x {size['c']}"
            return Line(what, us, rate(record, us, result["limits"]), peers)
    return None


LINES: dict[str, Callable[[Result], Line | None]] = {
    "forward": partial(_layer, "prefill: `grouped_mlp`", "mlp", MODEL, LIBRARIES, OURS),
    "decode": partial(_layer, "decode: `grouped_mlp`", "mlp", "Qwen3 decode", LIBRARIES, OURS),
    "fp8": partial(_layer, "`grouped_mlp` in MXFP8", "mlp", MODEL, FP8_PEERS, FP8_RECIPES[0]),
    "train": partial(_layer, "training: forward and backward", "layer", MODEL, LIBRARIES, OURS),
    "host": _host,
    "mhc": _mhc,
}


def shown_gpu(results: list[Result]) -> str:
    """Return the GPU that most of the overview's suites were measured on; "" if none was measured."""
    counted = collections.Counter(result["stamp"]["gpu"] for result in results if result["suite"] in LINES)
    return counted.most_common(1)[0][0] if counted else ""


def _shown(results: list[Result]) -> dict[str, Result]:
    """Return the results of the GPU that is shown, by suite."""
    gpu = shown_gpu(results)
    return {result["suite"]: result for result in results if result["stamp"]["gpu"] == gpu}


def overview(results: list[Result]) -> list[Line]:
    """Return a row for each suite of LINES that was measured on the GPU that is shown."""
    by_suite = _shown(results)
    lines = (line(by_suite[suite]) for suite, line in LINES.items() if suite in by_suite)
    return [line for line in lines if line]


def _peer(title: str, ratios: list[float]) -> str:
    here, *everywhere = ratios
    least_and_most = f" ({min(everywhere):.2f}, {max(everywhere):.2f})" if everywhere else ""
    return f"{title} {here:.2f}x{least_and_most}"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure. Raises RuntimeError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(f"drawing needs matplotlib ({error}); pip install 'glulam[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_overview(lines: list[Line]) -> Figure:
    """Each peer's time over ours, a layer of one model; right of the dotted line we are faster."""
    figure = new_figure(7.0, 0.8 + 0.5 * len(lines))
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


def save(draw: Callable[[], Figure], path: Path) -> None:
    """Draw and write a plot in the format of path's suffix. Raises RuntimeError without matplotlib."""
    new_figure(1, 1)  # says what is missing
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(SETTINGS):
        draw().savefig(path, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)


def markdown_table(table: Table) -> str:
    """Return a table as GitHub Markdown: first column left-aligned, the others right-aligned."""
    rule = ("---", *("---:" for _ in table.header[1:]))
    return "\n".join("| " + " | ".join(row) + " |" for row in (table.header, rule, *table.rows))


def _stamp(result: Result) -> str:
    """Return how a result was measured, in two lines."""
    stamp = result["stamp"]
    versions = ", ".join(f"{name} {version}" for name, version in stamp["versions"].items())
    clocks = f"SM {stamp['sm_clock_mhz']} of {stamp['sm_clock_max_mhz']} MHz under load, {stamp['power_w']} W"
    return (
        f"`{stamp['command']}` at commit {stamp['commit'][:12]}, {stamp['date']}, {stamp['gpu']} "
        f"(driver {stamp['driver']}; {clocks}).\n{versions}."
    )


def _section(result: Result) -> str:
    parts = [f"## {result['suite']}: {result['stamp']['gpu']}", _stamp(result)]
    if tuned := result["tuned"]:
        parts.append(
            f"QuACK was tuned for each of {tuned['kernels']} cases and kernels, over its own configurations: "
            f"{tuned['timed']} timed, {tuned['seconds']:.0f} s with compiling."
        )
    for table in tables_of(result):
        parts += [f"### {table.title}", markdown_table(table)]
    return "\n\n".join(parts)


def _plot(results: list[Result]) -> Path:
    return default_path("overview", shown_gpu(results), ".svg")


def results_page(results: list[Result]) -> str:
    """Return the whole of perf/results/README.md."""
    plot = _plot(results)
    picture = [f"![{plot.stem}]({plot.name})", str(draw_overview.__doc__)] if overview(results) else []
    sections = [_section(result) for result in results] or [NOTHING]
    return "\n\n".join([HEAD, *picture, *sections]) + "\n"


def summary(results: list[Result]) -> str:
    """Return the measured part of the main README: a picture, and a row for each kind of work."""
    lines = overview(results)
    if not lines:
        return NOTHING
    peers = ("; ".join(starmap(_peer, line.peers.items())) for line in lines)
    rows: list[tuple[str, ...]] = [
        (line.what, microseconds(line.us), line.rate, shown) for line, shown in zip(lines, peers, strict=True)
    ]
    picture = f"![{draw_overview.__doc__}](perf/results/{_plot(results).name})"
    return "\n\n".join([picture, f"{TITLE}, {shown_gpu(results)}:", markdown_table(Table(TITLE, HEADER, rows))])


def peers_of_serving(results: list[Result]) -> str:
    """Return the measured part of docs/serving.md: for each recipe, each peer's time over ours."""
    result = _shown(results).get("serving")
    if result is None:
        return NOTHING
    stamp = result["stamp"]
    tables = map(markdown_table, serving_peers(result))
    return "\n\n".join([f"{stamp['gpu']}, commit {stamp['commit'][:8]}:", *tables])


Parts = Mapping[Path, Callable[[list[Result]], str]]
FILLED: Parts = {README: summary, SERVING: peers_of_serving}
"""Pages with a measured part, and what writes it."""


def fill(page: str, text: str) -> str:
    """Return `page` with `text` between its two marks. Raises ValueError if a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page needs the marks {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def write_report(folder: Path = RESULTS, filled: Parts = FILLED) -> list[Path]:
    """Draw the overview and write all pages; return all paths. Raises RuntimeError without matplotlib.

    filled: the pages with a measured part, and what writes it.
    """
    results = read_all(folder)
    page, paths = folder / "README.md", []
    if lines := overview(results):
        paths.append(folder / _plot(results).name)
        save(partial(draw_overview, lines), paths[0])
    page.write_text(results_page(results))
    for path, text in filled.items():
        path.write_text(fill(path.read_text(), text(results)))
    return [*paths, page, *filled]
