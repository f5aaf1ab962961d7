"""Memory over the time of a supervised run: `memory/timeline.csv` and `memory/timeline.png`.

    samples = [Sample(seconds=0.1, framework_bytes=None, process_bytes=210_000_000,
                      system_available_bytes=9_000_000_000, system_total_bytes=16_000_000_000, gpu_used_bytes=None)]
    write_csv(samples, folder / "timeline.csv")
    draw_png(samples, [(0.0, "load"), (2.5, "train")], 15.0, folder / "timeline.png")

The table holds every sample. The picture holds at most about 4000 of them, chosen so that no peak and no minimum is
lost.

Not covered: memory that comes and goes between two samples is in neither.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

CSV_COLUMNS = ("seconds", "framework_gb", "process_gb", "system_available_gb", "system_available_pct", "gpu_used_gb")
MOST_DRAWN_SAMPLES = 4000
PNG_SIZE_PIXELS = (1440, 660)

COLOURS = {
    "ink": "#24292f",
    "grid": "#d8dee4",
    "muted": "#656d76",
    "framework": "#0969da",
    "process": "#bc4c00",
    "gpu": "#8250df",
    "available": "#1a7f37",
    "guard": "#cf222e",
    "train": "#8c959f",
    "valid": "#bf3989",
}
"""What each thing is drawn in, on a light ground. No two are equal: the report exchanges them for its dark ones."""

_DPI = 120
_SERIES_COUNT = 4
# Phase changes closer than this share of the time shown get one label between them, or the labels would overlap.
_MARK_GAP_SHARE = 0.035


@dataclass(frozen=True)
class Sample:
    """One look at memory.

    Attributes:
        seconds: since the supervised run began.
        framework_bytes: what the framework's own allocator last reported, None before it has.
        process_bytes: resident memory of the run's process tree.
        system_available_bytes: what the whole system could still give without swapping.
        system_total_bytes: the machine's memory.
        gpu_used_bytes: used on all GPUs by everybody, None without a GPU that can be asked.
    """

    seconds: float
    framework_bytes: int | None
    process_bytes: int
    system_available_bytes: int
    system_total_bytes: int
    gpu_used_bytes: int | None

    @property
    def system_available_pct(self) -> float:
        """Available memory, in percent of the machine's memory."""
        return 100.0 * self.system_available_bytes / self.system_total_bytes


def write_csv(samples: Sequence[Sample], path: Path) -> None:
    """Write every sample as one line under a header; `_gb` is 10^9 bytes, an unknown value is an empty field."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(CSV_COLUMNS)
        for sample in samples:
            table.writerow(
                (
                    f"{sample.seconds:.3f}",
                    _gb_text(sample.framework_bytes),
                    _gb_text(sample.process_bytes),
                    _gb_text(sample.system_available_bytes),
                    f"{sample.system_available_pct:.3f}",
                    _gb_text(sample.gpu_used_bytes),
                )
            )


def draw_png(samples: Sequence[Sample], marks: Sequence[tuple[float, str]], guard_line_pct: float, path: Path) -> None:
    """Draw memory over time.

    Args:
        samples: in the order of time; may be empty.
        marks: (seconds, label) of each phase change, drawn as a thin vertical line.
        guard_line_pct: training stops below this much available memory; 0 means no line was set, and none is drawn.
        path: the file to write, a PNG of `PNG_SIZE_PIXELS`.
    """
    with chart_style():
        figure = Figure(figsize=(PNG_SIZE_PIXELS[0] / _DPI, PNG_SIZE_PIXELS[1] / _DPI), dpi=_DPI, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots()
        time = TimeScale.of([sample.seconds for sample in samples], [second for second, _ in marks])
        draw_memory(axes, samples, guard_line_pct, time)
        draw_marks(axes, marks, time, labels=True)
        axes.set_xlabel(f"time since the training process began ({time.unit})")
        canvas.print_png(str(path))


@dataclass(frozen=True)
class TimeScale:
    """The unit of a time axis: seconds are divided by `divisor`; `end` is the right edge, in that unit."""

    divisor: float
    unit: str
    end: float

    @classmethod
    def of(cls, *times_seconds: Sequence[float]) -> TimeScale:
        """Seconds up to ten minutes, minutes up to five hours, then hours."""
        last = max((time for times in times_seconds for time in times), default=1.0)
        divisor, unit = (1.0, "s") if last <= 600 else (60.0, "min") if last <= 5 * 3600 else (3600.0, "h")
        return cls(divisor, unit, max(last, 1e-3) / divisor)


@contextmanager
def chart_style() -> Iterator[None]:
    """The look of all charts, whatever the user's matplotlibrc says. Changes matplotlib's settings while it is open."""
    settings = {
        "font.family": "sans-serif",
        "font.size": 9.5,
        "axes.labelsize": 9.5,
        "legend.fontsize": 9.5,
        "text.color": COLOURS["ink"],
        "axes.labelcolor": COLOURS["ink"],
        "xtick.color": COLOURS["ink"],
        "ytick.color": COLOURS["ink"],
        "axes.edgecolor": COLOURS["muted"],
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": COLOURS["grid"],
        "grid.linewidth": 0.6,
        "axes.grid": True,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "lemon",
    }
    with matplotlib.style.context(["default", settings]):
        yield


def draw_memory(
    axes: Axes,
    samples: Sequence[Sample],
    guard_line_pct: float,
    time: TimeScale,
    most: int = MOST_DRAWN_SAMPLES,
    columns: int = 4,
) -> Axes:
    """Draw the memory lines on `axes` (GB) and on a second axis for what the system has available (percent).

    Args:
        axes: an empty plot; its horizontal axis is set to `time`.
        samples: in the order of time.
        guard_line_pct: see `draw_png`.
        time: the horizontal axis.
        most: about how many samples are drawn.
        columns: of the legend.

    Returns:
        the second axis.
    """
    values = _columns(samples)
    keep = thin(values[1:], most)
    seconds, framework, process, gpu, available = (column[keep] for column in values)
    at = seconds / time.divisor
    lines = axes.plot(at, process, color=COLOURS["process"], linewidth=1.4, label="process tree")
    for line, colour, name, pattern in ((framework, "framework", "framework", "-"), (gpu, "gpu", "GPU in use", "-.")):
        if np.isfinite(line).any():
            lines += axes.plot(at, line, color=COLOURS[colour], linewidth=1.4, linestyle=pattern, label=name)
    percent = axes.twinx()
    dashes = (0, (4, 1.5))
    lines += percent.plot(
        at, available, color=COLOURS["available"], linewidth=1.4, linestyle=dashes, label="system available (right)"
    )
    if guard_line_pct > 0:
        percent.axhline(guard_line_pct, color=COLOURS["guard"], linewidth=1.3, gid="guard-line")
        percent.annotate(
            f"guard line: {guard_line_pct:g} % available",
            (1.0, guard_line_pct),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=COLOURS["guard"],
        )
    axes.set(xlim=(0, time.end), ylim=(0, _headroom(process, framework, gpu)), ylabel="memory (GB)")
    percent.set(ylim=(0, 100))
    percent.set_ylabel("system available (%)", color=COLOURS["available"])
    percent.tick_params(axis="y", labelcolor=COLOURS["available"])
    percent.grid(False)
    axes.legend(
        handles=lines, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, handlelength=1.6, columnspacing=1.2
    )
    return percent


def draw_marks(axes: Axes, marks: Sequence[tuple[float, str]], time: TimeScale, labels: bool) -> None:
    """Draw each phase change as a thin vertical line, with its label at the top when `labels`."""
    for second, _ in marks:
        axes.axvline(second / time.divisor, color=COLOURS["muted"], linewidth=0.7, linestyle=":")
    for at, text in _grouped(marks, time) if labels else ():
        # A label is a name and not a formula: a dollar sign in it stays one.
        axes.annotate(
            text,
            (at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, -3),
            textcoords="offset points",
            rotation=90,
            ha="left",
            va="top",
            fontsize=8,
            color=COLOURS["muted"],
            parse_math=False,
        )


def thin(columns: Sequence[np.ndarray], most: int = MOST_DRAWN_SAMPLES) -> np.ndarray:
    """Which places to draw, in order, so that about `most` are left: first, last, and each stretch's extremes.

    Args:
        columns: float arrays of one length; NaN where a value is unknown.
        most: what is longer is thinned.

    Returns:
        indices, int array. The largest and the smallest value of every column are among them.
    """
    length = len(columns[0]) if columns else 0
    if length <= most:
        return np.arange(length)
    stretches = max(1, (most - 2) // (2 * len(columns)))
    edges = np.linspace(0, length, stretches + 1).astype(int)
    keep = {0, length - 1}
    for begin, end in pairwise(edges):
        for column in columns:
            part = column[begin:end]
            if np.isfinite(part).any():
                keep.update((begin + int(np.nanargmin(part)), begin + int(np.nanargmax(part))))
    return np.asarray(sorted(keep), dtype=int)


def _columns(samples: Sequence[Sample]) -> tuple[np.ndarray, ...]:
    """Seconds, framework GB, process GB, GPU GB, available percent."""
    rows = [
        (s.seconds, _gb(s.framework_bytes), _gb(s.process_bytes), _gb(s.gpu_used_bytes), s.system_available_pct)
        for s in samples
    ]
    table = np.asarray(rows, dtype=float).reshape(len(rows), _SERIES_COUNT + 1)
    return tuple(table.T)


def _grouped(marks: Sequence[tuple[float, str]], time: TimeScale) -> list[tuple[float, str]]:
    """(place on the axis, label) with the labels of near marks joined, at the last of them."""
    groups: list[tuple[float, str]] = []
    for second, label in sorted(marks, key=lambda mark: mark[0]):
        at = second / time.divisor
        if groups and at - groups[-1][0] < _MARK_GAP_SHARE * time.end:
            groups[-1] = (at, f"{groups[-1][1]}, {label}")
        else:
            groups.append((at, label))
    return groups


def _headroom(*columns: np.ndarray) -> float:
    """The upper edge of the GB axis: a quarter above the highest line, so that labels have room."""
    highest = [float(column[np.isfinite(column)].max()) for column in columns if np.isfinite(column).any()]
    return 1.25 * max(highest, default=0.0) or 1.0


def _gb(count_bytes: int | None) -> float:
    return math.nan if count_bytes is None else count_bytes / 1e9


def _gb_text(count_bytes: int | None) -> str:
    return "" if count_bytes is None else f"{count_bytes / 1e9:.6f}"
