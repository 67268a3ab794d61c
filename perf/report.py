"""perf/results/README.md and the measured part of the main README, from the result files."""

from __future__ import annotations

from pathlib import Path

from .results import RESULTS, Result, default_path, read_all
from .tables import TRAIN_TITLES, Table, forward_tables, host_tables, tables_of, train_tables

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
HEAD = """# Measured

Written by `python -m perf report` from the JSON files beside it; do not edit. Medians in microseconds, ± half the
distance between the 10th and the 90th percentile. In brackets: the peer's time over ours, above 1 we are faster.
A rate is in brackets a share of the machine's limit that binds first: cuBLAS 8192^3 or a device copy, same run.
Contestants take turns within one run. Random data, BF16, SwiGLU, no bias, no row scale but in `train`.
`training-curves` is one training run after another, of `examples/train_moe.py` on real text.
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


def _section(result: Result) -> str:
    parts = [f"## {result['suite']}: {result['stamp']['gpu']}", markdown_stamp(result)]
    for table in tables_of(result):
        parts += [f"### {table.title}", markdown_table(table)]
    return "\n\n".join([*parts, *_pictures(result)])


def _pictures(result: Result, folder: str = "") -> list[str]:
    """Of a training run the plot, which lies beside the result file."""
    if result["suite"] != "training-curves":
        return []
    name = default_path(result["suite"], result["stamp"]["gpu"]).with_suffix(".svg").name
    return [f"![Loss by step, all runs over each other, and their differences]({folder}{name})"]


def results_page(results: list[Result]) -> str:
    """The whole of perf/results/README.md."""
    sections = [_section(result) for result in results] or ["Nothing has been measured yet."]
    return "\n\n".join([HEAD.rstrip(), *sections]) + "\n"


def _summary_of(result: Result) -> list[str]:
    if result["suite"] == "forward":
        chosen = [table for table in forward_tables(result) if "FC2" not in table.title]
    elif result["suite"] == "host":
        chosen = host_tables(result)[-1:]
    elif result["suite"] == "train":
        chosen = [table for table in train_tables(result) if table.title == TRAIN_TITLES["layer"]]
    elif result["suite"] == "training-curves":
        chosen = tables_of(result)
    else:
        return []
    parts = [f"{result['stamp']['gpu']}, `{result['stamp']['command']}`, commit {result['stamp']['commit'][:12]}:"]
    for table in chosen:
        parts += [f"**{table.title}**", markdown_table(table)]
    return [*parts, *_pictures(result, "perf/results/")]


def summary(results: list[Result]) -> str:
    """The measured part of the main README: FC1, the MLP, the host's share, a layer's training, and a model's."""
    parts = [part for result in results for part in _summary_of(result)]
    return "\n\n".join(parts) or "Nothing has been measured yet."


def fill(page: str, text: str) -> str:
    """`page` with `text` between its two marks. Raises ValueError where a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the README needs the marks {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def write_report(folder: Path = RESULTS, readme: Path = README) -> list[Path]:
    """Writes both pages; returns their paths."""
    results = read_all(folder)
    page = folder / "README.md"
    page.write_text(results_page(results))
    readme.write_text(fill(readme.read_text(), summary(results)))
    return [page, readme]
