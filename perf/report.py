"""perf/results/README.md, plots, and the overview in the main README, from the result files."""

from __future__ import annotations

from pathlib import Path

from .cells import Table
from .overview import overview, overview_table, shown_gpu
from .plots import draw_overview, overview_stem, write_plots
from .results import RESULTS, Result, read_all
from .tables import tables_of

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
HEAD = """# Measured

Written by `python -m perf report` from the CSV files beside it; do not edit. Medians in microseconds, ± half the
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
    if not (tuned := result["tuned"]):
        return []
    return [
        f"QuACK was tuned for each of {tuned['kernels']} cases and kernels, over its own configurations: "
        f"{tuned['timed']} timed, {tuned['seconds']:.0f} s with compiling."
    ]


def _section(result: Result) -> str:
    parts = [f"## {result['suite']}: {result['stamp']['gpu']}", markdown_stamp(result), *tuning_note(result)]
    for table in tables_of(result):
        parts += [f"### {table.title}", markdown_table(table)]
    return "\n\n".join(parts)


def results_page(results: list[Result]) -> str:
    """Return the whole of perf/results/README.md."""
    stem = overview_stem(results)
    picture = [f"![{stem}]({stem}.svg)", str(draw_overview.__doc__)] if overview(results) else []
    sections = [_section(result) for result in results] or ["Nothing has been measured yet."]
    return "\n\n".join([HEAD.rstrip(), *picture, *sections]) + "\n"


def summary(results: list[Result]) -> str:
    """Return the measured part of the main README: a picture, and a row for each kind of work."""
    lines = overview(results)
    if not lines:
        return "Nothing has been measured yet."
    table = overview_table(lines)
    picture = f"![{draw_overview.__doc__}](perf/results/{overview_stem(results)}.svg)"
    return "\n\n".join([picture, f"{table.title}, {shown_gpu(results)}:", markdown_table(table)])


def fill(page: str, text: str) -> str:
    """`page` with `text` between its two marks. Raises ValueError where a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the README needs the marks {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def write_report(folder: Path = RESULTS, readme: Path = README) -> list[Path]:
    """Draw the plots and write both pages; return all paths. Raises RuntimeError without matplotlib."""
    results = read_all(folder)
    plots = write_plots(results, folder)
    page = folder / "README.md"
    page.write_text(results_page(results))
    readme.write_text(fill(readme.read_text(), summary(results)))
    return [*plots, page, readme]
