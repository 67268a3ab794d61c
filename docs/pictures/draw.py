"""Draw the pictures of the documentation, as SVG beside this file: `.venv/bin/python docs/pictures/draw.py`.

Positions are in units of the drawing, which matplotlib lays out without measuring text: the same bytes on any machine.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

SETTINGS = {"svg.hashsalt": "glulam", "svg.fonttype": "none", "font.size": 9.0}
COLOURS = ("#1b6ca8", "#e6a700", "#d1495b", "#3c8d5a")
INK = {"#1b6ca8": "white", "#d1495b": "white", "#3c8d5a": "white"}
TAIL, EPILOGUE, TEXT, LINE, PALE = "#d9d9d9", "#c3ccd4", "#222222", "#555555", "#f2f2f2"
SPLITS = (3, 0, 5, 2)
TAIL_ROWS = 2


class Drawing:
    """An SVG of `width` x `height` units, 40 to the inch, with y downwards."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width / 40, height / 40))
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(height, 0)
        self.axes.set_axis_off()

    def box(self, x: float, y: float, width: float, height: float, colour: str, text: str = "") -> None:
        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=1.0))
        if text:
            self.text(x + width / 2, y + height / 2, text, ink=INK.get(colour, TEXT))

    def text(self, x: float, y: float, text: str, *, align: str = "center", ink: str = "", bold: bool = False) -> None:
        weight = "bold" if bold else "normal"
        self.axes.text(x, y, text, ha=align, va="center", color=ink or TEXT, fontweight=weight)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str = LINE) -> None:
        style = {"arrowstyle": "-|>", "color": colour, "lw": 1.0, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", xy=end, xytext=start, arrowprops=style)

    def svg(self) -> bytes:
        content = io.BytesIO()
        self.figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
        return content.getvalue()


def rows_by_expert() -> Drawing:
    """Draw rows sorted by expert, with splits and offs."""
    drawing, left, top, wide = Drawing(400, 112), 56.0, 34.0, 27.0
    drawing.text(left - 8, top + 12, "x", align="right", bold=True)
    end = 0
    for expert, (rows, colour) in enumerate(zip(SPLITS, COLOURS, strict=True)):
        for row in range(end, end + rows):
            drawing.box(left + wide * row, top, wide, 24, colour)
        title, up = (f"expert {expert}", 10) if rows else (f"expert {expert}: no rows", 23)
        drawing.text(left + wide * (end + rows / 2), top - up, title, ink=colour)
        end += rows
        drawing.arrow((left + wide * end, top + 50), (left + wide * end, top + 27), colour)
    for row in range(end, end + TAIL_ROWS):
        drawing.box(left + wide * row, top, wide, 24, TAIL)
    drawing.text(left + wide * (end + TAIL_ROWS / 2), top + 12, "tail")
    ends = [sum(SPLITS[: expert + 1]) for expert in range(len(SPLITS))]
    drawing.text(left - 8, top + 58, "offs", align="right", bold=True)
    for at in sorted(set(ends)):
        shown = ", ".join(str(end) for end in ends if end == at)
        drawing.text(left + wide * at, top + 58, shown)
    summary = f"offs = {ends}    splits = {list(SPLITS)}    T = {sum(SPLITS) + TAIL_ROWS}"
    drawing.text(left, top + 72, summary, align="left")
    return drawing


def layer_launches() -> Drawing:
    """Draw the launches of `moe`'s forward over time, and what each reads and writes."""
    drawing, top = Drawing(520, 150), 30.0
    steps = [
        ("route", "logits [N, E]", "Routing: offs,\nrows, weights"),
        ("FC1", "x [N, H] by index,\nw1", "act [T, I]"),
        ("FC2", "act, w2", "y [T, H]"),
        ("combine", "y, residual", "out [N, H]"),
    ]
    for place, ((name, reads, writes), colour) in enumerate(zip(steps, COLOURS, strict=True)):
        x = 14.0 + 126 * place
        drawing.box(x, top + 28, 104, 34, colour, name)
        drawing.text(x + 52, top + 4, reads)
        drawing.text(x + 52, top + 92, writes)
        drawing.arrow((x + 52, top + 16), (x + 52, top + 27))
        drawing.arrow((x + 52, top + 63), (x + 52, top + 78))
        if place:
            drawing.arrow((x - 21, top + 45), (x - 1, top + 45))
    drawing.text(14, 12, "route", align="left", ink=COLOURS[0], bold=True)
    drawing.text(140, 12, "moe: one call, three launches", align="left", bold=True)
    return drawing


def between_gpus() -> Drawing:
    """Draw the path of a token's data from its own rank to its experts' ranks, and back."""
    drawing = Drawing(520, 210)
    for x, title in ((10.0, "rank s, which has the token"), (320.0, "rank d, which has some of its experts")):
        drawing.box(x, 26, 190, 176, PALE)
        drawing.text(x + 95, 14, title, bold=True)
    drawing.box(24, 40, 162, 34, COLOURS[0], "x[n], ids[n], weights[n]")
    drawing.box(334, 40, 162, 34, COLOURS[0], "x_here[r], Routing")
    drawing.box(334, 98, 162, 34, COLOURS[1], "FC1, FC2 of own experts")
    drawing.box(334, 156, 162, 34, COLOURS[2], "sum over own experts")
    drawing.box(24, 156, 162, 34, COLOURS[2], "y[n] = residual + sums")
    drawing.arrow((187, 57), (333, 57))
    drawing.arrow((415, 75), (415, 97))
    drawing.arrow((415, 133), (415, 155))
    drawing.arrow((333, 173), (187, 173))
    drawing.text(260, 46, "dispatch")
    drawing.text(260, 68, "once a rank")
    drawing.text(260, 162, "combine")
    drawing.text(260, 184, "one row back")
    return drawing


def kernel_roles() -> Drawing:
    """Draw the warps of a pingpong kernel over four tiles: one warpgroup's MMAs run beside the other's epilogue."""
    drawing, left, tall = Drawing(560, 178), 132.0, 26.0
    lanes = ["scheduler warp", "load warp (TMA)", "MMA warpgroup 0", "MMA warpgroup 1"]
    for lane, name in enumerate(lanes):
        y = 14.0 + 36 * lane
        drawing.text(left - 8, y + tall / 2, name, align="right")
        drawing.box(left, y, 420, tall, PALE)
    for tile, colour in enumerate(COLOURS):
        begin = left + 92 * tile
        drawing.box(begin, 14, 22, tall, colour, f"{tile}")
        drawing.box(begin + 14, 50, 90, tall, colour, f"stages of {tile}")
        mma = begin + 34
        y = 86.0 + 36 * (tile % 2)
        drawing.box(mma, y, 92, tall, colour, f"MMAs {tile}")
        rest = min(78.0, left + 420 - mma - 92)
        drawing.box(mma + 92, y, rest, tall, EPILOGUE, "epilogue" if rest > 60 else "")
    drawing.arrow((left, 168), (left + 420, 168))
    drawing.text(left - 8, 168, "time", align="right")
    return drawing


DRAWN: dict[str, Callable[[], Drawing]] = {
    "rows-by-expert": rows_by_expert,
    "layer-launches": layer_launches,
    "between-gpus": between_gpus,
    "kernel-roles": kernel_roles,
}


def pictures() -> dict[str, bytes]:
    """Return every picture as SVG, by the stem of its file."""
    with matplotlib.rc_context(SETTINGS):
        return {stem: draw().svg() for stem, draw in DRAWN.items()}


if __name__ == "__main__":
    for stem, content in pictures().items():
        (Path(__file__).parent / f"{stem}.svg").write_bytes(content)
