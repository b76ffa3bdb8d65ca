"""A plan as a picture in the terminal and as PNG: which tokens of which sequence each fill of the buffer holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from mla.plan import PrefillPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mla.cli.batches import Batch
    from mla.cli.steps import Step

#: Paul Tol's "bright" colours and three of his "muted" ones, which remain apart for colour-blind eyes.
COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#882255", "#44AA99", "#999933", "#332288")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_UNUSED = "#EDEDED"


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of one fill of the buffer, all of one kind: ``cached``, ``new`` or ``padding``."""

    sequence: int
    kind: str
    start: int
    stop: int


def letter_of(sequence: int) -> str:
    """Return the letter that a picture calls a sequence by; after Z comes A again."""
    return _LETTERS[sequence % len(_LETTERS)]


def find_segments(plan: PrefillPlan, step: Step) -> list[list[Segment]]:
    """Read the segments of each required chunk from the plan's tables; copies them to the host."""
    chunks = []
    rows, offsets = plan.buffer_row_offsets.tolist(), plan.cache_offsets.tolist()
    for c in range(len(plan.host_lengths or ())):
        segments = []
        for s, (cached, length) in enumerate(zip(step.cached, step.lengths, strict=True)):
            first, last = rows[c][s], rows[c][s + 1]
            shift = first - offsets[c][s]  # buffer row of the sequence's position 0
            borders = [min(max(shift + at, first), last) for at in (0, cached, length)] + [last]
            for kind, start, stop in zip(("cached", "new", "padding"), borders, borders[1:], strict=False):
                if stop > start:
                    segments.append(Segment(s, kind, start, stop))
        chunks.append(segments)
    return chunks


def as_text(chunks: list[list[Segment]], buffer_rows: int, width: int = 52) -> Text:
    """Draw each chunk as a line of cells: the sequence's letter, ``/`` where a page ends empty, ``.`` for unused rows.

    A cell shows what most of its rows are, but padding is always drawn, if only one cell wide.
    """
    text = Text()
    for number, segments in enumerate(chunks):
        cells: list[tuple[str, str]] = [(".", "dim")] * width
        for segment in sorted(segments, key=lambda one: one.kind == "padding"):
            first, last = (round(row * width / buffer_rows) for row in (segment.start, segment.stop))
            if segment.kind == "padding":
                first = min(first, last - 1)
            colour, letter = COLOURS[segment.sequence % len(COLOURS)], letter_of(segment.sequence)
            label, style = {
                "cached": (letter.lower(), colour),
                "new": (letter, f"black on {colour}"),
                "padding": ("/", "bold"),
            }[segment.kind]
            cells[max(first, 0) : last] = [(label, style)] * (last - max(first, 0))
        text.append(f"chunk {number:2} |")
        for label, style in cells:
            text.append(label, style)
        text.append(f"| {max((one.stop for one in segments), default=0):6,} rows\n")
    text.append("a: cached tokens of sequence A; A: its new tokens; /: page padding; .: unused", "dim")
    return text


@dataclass(frozen=True, slots=True)
class Panel:
    """What the picture shows of one step."""

    step: Step
    batch: Batch
    chunks: list[list[Segment]]
    result: str  # a line of figures


def draw(panels: list[Panel], buffer_rows: int, page_size: int, title: str, path: Path) -> None:
    """Write a PNG with a row for each step: the buffer chunk by chunk, and the pages that its tokens come from."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [1.5 + 0.36 * len(panel.chunks) for panel in panels]
    figure = Figure(figsize=(13, 1.3 + sum(heights)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    grid = figure.add_gridspec(len(panels), 2, width_ratios=[4.2, 1], height_ratios=heights)
    for i, panel in enumerate(panels):
        _draw_chunks(figure.add_subplot(grid[i, 0]), panel, buffer_rows)
        _draw_pages(figure.add_subplot(grid[i, 1]), panel.batch)
    legend = [
        Patch(facecolor="#777777", label="new tokens"),
        Patch(facecolor=_tint("#777777"), label="cached tokens"),
        Patch(
            facecolor="white", edgecolor="black", hatch="//////", label=f"page padding (pages of {page_size} tokens)"
        ),
        Patch(facecolor=_UNUSED, label="unused rows, free pages"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    figure.savefig(path)


def _draw_chunks(axes: Axes, panel: Panel, buffer_rows: int) -> None:
    for number, segments in enumerate(panel.chunks):
        axes.barh(number, buffer_rows, color=_UNUSED, height=0.8, zorder=1)
        for one in segments:
            colour, letter = COLOURS[one.sequence % len(COLOURS)], letter_of(one.sequence)
            left, width = one.start, one.stop - one.start
            if one.kind == "padding":
                style: dict[str, Any] = {
                    "facecolor": "white",
                    "edgecolor": "black",
                    "hatch": "//////",
                    "linewidth": 0.6,
                }
            else:
                style = {"facecolor": colour if one.kind == "new" else _tint(colour), "edgecolor": "white"}
            axes.barh(number, width, left=left, height=0.8, zorder=3 if one.kind == "padding" else 2, **style)
            if one.kind != "padding" and width > 0.05 * buffer_rows:
                ink = "white" if one.kind == "new" and _is_dark(colour) else "black"
                words = f"{letter}: {width:,} {one.kind}" if width > 0.13 * buffer_rows else letter
                axes.text(left + width / 2, number, words, ha="center", va="center", fontsize=9, color=ink, zorder=4)
    step = panel.step
    axes.set_title(
        f"step {step.name}: {len(step.new)} sequences, {sum(step.cached):,} cached + {sum(step.new):,} new tokens\n"
        f"{panel.result}",
        loc="left",
        fontsize=10,
    )
    axes.set_xlim(0, buffer_rows)
    axes.set_ylim(len(panel.chunks) - 0.5, -0.5)
    axes.set_yticks(range(len(panel.chunks)), [f"chunk {c}" for c in range(len(panel.chunks))])
    axes.set_xlabel("row of the K/V buffer (in the bars: the sequence and its tokens)", fontsize=9)
    axes.tick_params(length=0, labelsize=9)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_pages(axes: Axes, batch: Batch) -> None:
    from matplotlib.colors import ListedColormap

    count = batch.collection.num_pages
    columns = math.ceil(math.sqrt(count * 1.4))
    owners = [-1.0] * count + [math.nan] * (-count % columns)
    for sequence, pages in enumerate(batch.pages):
        for page in pages:
            owners[page] = sequence % len(COLOURS)
    cells = [owners[first : first + columns] for first in range(0, len(owners), columns)]
    palette = ListedColormap([_UNUSED, *COLOURS])
    axes.pcolormesh(cells, cmap=palette, vmin=-1.5, vmax=len(COLOURS) - 0.5, edgecolors="white", linewidth=0.4)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.set_axis_off()
    used = sum(map(len, batch.pages))
    axes.set_title(f"{used} of {count} pages,\nby sequence", fontsize=10, loc="left")


def _parts(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def _is_dark(colour: str) -> bool:
    """Tell whether white text reads better on a colour than black does, by its luma."""
    return sum(weight * part for weight, part in zip((0.3, 0.59, 0.11), _parts(colour), strict=True)) < 140


def _tint(colour: str) -> str:
    """Mix a colour with white."""
    parts = _parts(colour)
    return "#" + "".join(f"{round(part + (255 - part) * 0.6):02x}" for part in parts)
