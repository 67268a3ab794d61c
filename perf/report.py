"""perf/results/README.md, and the overview in the main README, from the result files."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from .cells import Table
from .overview import overview, overview_table, shown_gpu
from .plots import (
    draw_layer,
    draw_overview,
    draw_ratios,
    draw_roofline,
    draw_rows,
    draw_skew,
    overview_stem,
    write_plots,
)
from .results import RESULTS, Result, default_path, gpu_slug, read_all
from .tables import TRAINING, tables_of

README = Path(__file__).resolve().parents[1] / "README.md"
CURVES: dict[str, Callable[..., object]] = {"skew": draw_skew, "rows": draw_rows, "layer": draw_layer}
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
HEAD = """# Measured

Written by `python -m perf report` from the JSON files beside it; do not edit. Medians in microseconds, ± half the
distance between the 10th and the 90th percentile. In brackets: the peer's time over ours, above 1 we are faster.
A rate is in brackets a share of the machine's limit that binds first: cuBLAS 8192^3 or a device copy, same run.
Contestants take turns within one run. Random data, BF16, SwiGLU, no bias; a row scale in the backward only.
Each section names its commit and a hash of its kernels' sources. Later commits may have other kernels, so that numbers
of two sections, as of an H100 and an H200, are not to be compared where these differ.
`training-curves` is one training run after another, of `examples/train_moe.py` on real text, and `megatron-*` of
`examples/train_megatron.py`.
"""


def markdown_table(table: Table) -> str:
    """A table as GitHub Markdown: first column left, the others right."""
    rule = ("---", *("---:" for _ in table.header[1:]))
    return "\n".join("| " + " | ".join(row) + " |" for row in (table.header, rule, *table.rows))


def markdown_stamp(result: Result) -> str:
    """How a result was measured, in two lines."""
    stamp = result["stamp"]
    versions = ", ".join(f"{name} {version}" for name, version in stamp["versions"].items())
    clocks = f"SM {stamp['sm_clock_mhz']} of {stamp['sm_clock_max_mhz']} MHz under load, {stamp['power_w']} W"
    return (
        f"`{stamp['command']}` at commit {stamp['commit'][:12]}, {stamp['date']}, {stamp['gpu']} "
        f"(driver {stamp['driver']}; {clocks}).\n{versions}."
    )


def tuning_note(result: Result) -> list[str]:
    """How QuACK was tuned, where it was: a line."""
    found = [t for r in result["records"] for by_op in r.get("tuning", {}).values() for t in by_op.values()]
    chosen = {(t["config"], t["timed"], t["seconds"]) for t in found}  # an operation's records share their case's
    if not chosen:
        return []
    timed, seconds = sum(t[1] for t in chosen), sum(t[2] for t in chosen)
    return [
        f"QuACK was tuned for each of {len(chosen)} cases and kernels, over its own configurations: "
        f"{timed} timed, {seconds:.0f} s with compiling."
    ]


def _picture(stem: str, draw: Callable[..., object], plots: Collection[str]) -> list[str]:
    """A plot with what it shows, where it was drawn."""
    return [f"![{stem}]({stem}.svg)", (draw.__doc__ or "").strip()] if stem in plots else []


def _section(result: Result, plots: Collection[str]) -> str:
    parts = [f"## {result['suite']}: {result['stamp']['gpu']}", markdown_stamp(result), *tuning_note(result)]
    stem = f"{result['suite']}-{gpu_slug(result['stamp']['gpu'])}"
    parts += _picture(stem, CURVES.get(result["suite"], draw_ratios), plots)
    for table in tables_of(result):
        parts += [f"### {table.title}", markdown_table(table)]
    return "\n\n".join([*parts, *_pictures(result)])


def _pictures(result: Result) -> list[str]:
    """Of a training run the plot, which lies beside the result file."""
    if result["suite"] not in TRAINING:
        return []
    name = default_path(result["suite"], result["stamp"]["gpu"]).with_suffix(".svg").name
    return [f"![Loss by step, all runs over each other, and their differences]({name})"]


def results_page(results: list[Result], plots: Collection[str] = ()) -> str:
    """The whole of perf/results/README.md. plots: the stems of what was drawn beside it."""
    gpus = dict.fromkeys(gpu_slug(result["stamp"]["gpu"]) for result in results)
    pictures = _picture(overview_stem(results), draw_overview, plots)
    pictures += [part for gpu in gpus for part in _picture(f"roofline-{gpu}", draw_roofline, plots)]
    sections = [_section(result, plots) for result in results] or ["Nothing has been measured yet."]
    return "\n\n".join([HEAD.rstrip(), *pictures, *sections]) + "\n"


def summary(results: list[Result], plots: Collection[str] = ()) -> str:
    """The measured part of the main README: a picture, where it was drawn, and a row for each kind of work."""
    lines = overview(results)
    if not lines:
        return "Nothing has been measured yet."
    stem, table = overview_stem(results), overview_table(lines)
    picture = [f"![{draw_overview.__doc__}](perf/results/{stem}.svg)"] if stem in plots else []
    return "\n\n".join([*picture, f"{table.title}, {shown_gpu(results)}:", markdown_table(table)])


def fill(page: str, text: str) -> str:
    """`page` with `text` between its two marks. Raises ValueError where a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the README needs the marks {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def write_report(folder: Path = RESULTS, readme: Path = README) -> list[Path]:
    """Draws the plots and writes both pages; returns all paths. Raises RuntimeError without matplotlib."""
    results = read_all(folder)
    plots = write_plots(results, folder)
    stems = {path.stem for path in plots}
    page = folder / "README.md"
    page.write_text(results_page(results, stems))
    readme.write_text(fill(readme.read_text(), summary(results, stems)))
    return [*plots, page, readme]
