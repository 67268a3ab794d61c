"""perf/results/README.md, the overview's plot beside it, and the overview in the main README, from the result files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from .cells import Table
from .overview import overview, overview_table, shown_gpu
from .plots import draw_overview, save
from .results import RESULTS, Result, gpu_slug, read_all
from .tables import tables_of

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
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


def markdown_table(table: Table) -> str:
    """A table as GitHub Markdown: first column left, the others right."""
    rule = ("---", *("---:" for _ in table.header[1:]))
    return "\n".join("| " + " | ".join(row) + " |" for row in (table.header, rule, *table.rows))


def _stamp(result: Result) -> str:
    """How a result was measured, in two lines."""
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


def _plot_name(results: list[Result]) -> str:
    return f"overview-{gpu_slug(shown_gpu(results))}"


def results_page(results: list[Result]) -> str:
    """Return the whole of perf/results/README.md."""
    name = _plot_name(results)
    picture = [f"![{name}]({name}.svg)", str(draw_overview.__doc__)] if overview(results) else []
    sections = [_section(result) for result in results] or [NOTHING]
    return "\n\n".join([HEAD, *picture, *sections]) + "\n"


def summary(results: list[Result]) -> str:
    """Return the measured part of the main README: a picture, and a row for each kind of work."""
    lines = overview(results)
    if not lines:
        return NOTHING
    table = overview_table(lines)
    picture = f"![{draw_overview.__doc__}](perf/results/{_plot_name(results)}.svg)"
    return "\n\n".join([picture, f"{table.title}, {shown_gpu(results)}:", markdown_table(table)])


def fill(page: str, text: str) -> str:
    """`page` with `text` between its two marks. Raises ValueError where a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the README needs the marks {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def write_report(folder: Path = RESULTS, readme: Path = README) -> list[Path]:
    """Draw the overview and write both pages; return all paths. Raises RuntimeError without matplotlib."""
    results = read_all(folder)
    page, paths = folder / "README.md", []
    if lines := overview(results):
        paths.append(folder / f"{_plot_name(results)}.svg")
        save(partial(draw_overview, lines), paths[0])
    page.write_text(results_page(results))
    readme.write_text(fill(readme.read_text(), summary(results)))
    return [*paths, page, readme]
