"""Memory over time, as a table and as a picture."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from lemon_mlflow.tracking.timeline import (
    MOST_DRAWN_SAMPLES,
    PNG_SIZE_PIXELS,
    Sample,
    TimeScale,
    draw_marks,
    draw_memory,
    draw_png,
    thin,
    write_csv,
)


def sample(seconds: float, framework: int | None = None, available: int = 8 * 10**9, gpu: int | None = None) -> Sample:
    return Sample(seconds, framework, 1_500_000_000, available, 16_000_000_000, gpu)


def drawn(samples: list[Sample], guard_line_pct: float) -> tuple[Axes, Axes]:
    axes = Figure().subplots()
    return axes, draw_memory(axes, samples, guard_line_pct, TimeScale.of([s.seconds for s in samples]))


def labels(axes: Axes) -> dict[str, np.ndarray]:
    return {str(line.get_label()): np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()}


def test_available_memory_is_a_percentage_of_the_machines_memory() -> None:
    assert sample(0.0, available=4_000_000_000).system_available_pct == 25.0


def test_the_table_has_units_in_its_header_and_empty_fields_for_what_is_unknown(tmp_path: Path) -> None:
    write_csv([sample(0.1), sample(2.25, framework=750_000_000, gpu=5_000_000_001)], tmp_path / "timeline.csv")
    lines = (tmp_path / "timeline.csv").read_text(encoding="utf-8").splitlines()
    assert lines == [
        "seconds,framework_gb,process_gb,system_available_gb,system_available_pct,gpu_used_gb",
        "0.100,,1.500000,8.000000,50.000,",
        "2.250,0.750000,1.500000,8.000000,50.000,5.000000",
    ]


def test_the_table_holds_every_sample_however_many_there_are(tmp_path: Path) -> None:
    count = MOST_DRAWN_SAMPLES + 1
    write_csv([sample(number / 10) for number in range(count)], tmp_path / "timeline.csv")
    with (tmp_path / "timeline.csv").open(encoding="utf-8", newline="") as stream:
        assert len(list(csv.DictReader(stream))) == count


def test_a_table_without_samples_is_its_header(tmp_path: Path) -> None:
    write_csv([], tmp_path / "timeline.csv")
    assert (tmp_path / "timeline.csv").read_text(encoding="utf-8").count("\n") == 1


@pytest.mark.parametrize("count", [0, 1, 500])
def test_the_picture_is_a_png_of_the_promised_size(tmp_path: Path, count: int) -> None:
    samples = [sample(number / 10, framework=10**9, gpu=4 * 10**9) for number in range(count)]
    draw_png(samples, [(0.0, "load"), (5.0, "cost $x$ and $")], 15.0, tmp_path / "timeline.png")
    pixels = imread(tmp_path / "timeline.png")
    assert (pixels.shape[1], pixels.shape[0]) == PNG_SIZE_PIXELS
    assert pixels.std() > 0.01


def test_memory_is_drawn_in_gb_and_available_memory_in_percent_on_its_own_axis() -> None:
    axes, percent = drawn([sample(0.0), sample(1.0, framework=2_000_000_000, gpu=5_000_000_000)], 15.0)
    assert labels(axes)["process tree"].tolist() == [1.5, 1.5]
    assert labels(axes)["framework"][1] == 2.0
    assert np.isnan(labels(axes)["framework"][0])
    assert labels(axes)["GPU in use"][1] == 5.0
    assert labels(percent)["system available (right)"].tolist() == [50.0, 50.0]
    assert percent.get_ylim() == (0, 100)


def test_lines_without_a_known_value_are_left_out() -> None:
    axes, _ = drawn([sample(0.0), sample(1.0)], 15.0)
    assert set(labels(axes)) == {"process tree"}


def test_the_guard_line_is_drawn_and_labelled_at_its_percentage() -> None:
    _, percent = drawn([sample(0.0), sample(1.0)], 12.5)
    (line,) = [line for line in percent.get_lines() if line.get_gid() == "guard-line"]
    assert set(np.asarray(line.get_ydata())) == {12.5}
    assert [text.get_text() for text in percent.texts] == ["guard line: 12.5 % available"]


def test_no_guard_line_is_drawn_when_it_is_turned_off() -> None:
    _, percent = drawn([sample(0.0), sample(1.0)], 0.0)
    assert not [line for line in percent.get_lines() if line.get_gid() == "guard-line"]
    assert not percent.texts


def test_every_phase_change_is_a_line_and_near_labels_are_joined() -> None:
    axes = Figure().subplots()
    draw_marks(axes, [(0.0, "load"), (0.5, "tokenise"), (60.0, "train")], TimeScale.of([100.0]), labels=True)
    assert [np.asarray(line.get_xdata()).tolist() for line in axes.get_lines()] == [
        [0.0, 0.0],
        [0.5, 0.5],
        [60.0, 60.0],
    ]
    assert [text.get_text() for text in axes.texts] == ["load, tokenise", "train"]


def test_a_long_run_is_drawn_in_minutes_or_hours() -> None:
    assert TimeScale.of([599.0]) == TimeScale(1.0, "s", 599.0)
    assert TimeScale.of([1200.0], []) == TimeScale(60.0, "min", 20.0)
    assert TimeScale.of([], [36_000.0]) == TimeScale(3600.0, "h", 10.0)


def test_few_samples_are_drawn_as_they_are() -> None:
    assert thin([np.zeros(MOST_DRAWN_SAMPLES)]).tolist() == list(range(MOST_DRAWN_SAMPLES))


def test_thinning_keeps_first_last_peaks_and_minima() -> None:
    random = np.random.default_rng(3)
    one, other = random.random(100_000), random.random(100_000)
    one[54_321], other[98_765] = 7.0, -7.0
    one[:40_000] = np.nan
    kept = thin([one, other])
    assert len(kept) <= MOST_DRAWN_SAMPLES
    assert {0, 54_321, 98_765, 99_999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()


def test_a_dip_of_one_sample_reaches_the_picture_of_a_long_run() -> None:
    samples = [sample(number / 10) for number in range(30_000)]
    samples[12_345] = sample(1234.5, available=10**9)
    _, percent = drawn(samples, 15.0)
    line = labels(percent)["system available (right)"]
    assert len(line) <= MOST_DRAWN_SAMPLES
    assert line.min() == 6.25


def test_drawing_leaves_matplotlibs_settings_alone(tmp_path: Path) -> None:
    def settings() -> dict[str, object]:
        # Reading `backend` would make matplotlib choose one.
        return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}

    before = settings()
    draw_png([sample(0.0), sample(1.0)], [], 15.0, tmp_path / "timeline.png")
    assert settings() == before


def test_drawing_never_imports_pyplot(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lemon_mlflow.tracking.timeline import Sample, draw_png; "
        f"draw_png([Sample(0.0, None, 1, 1, 2, None)], [], 15.0, Path({str(tmp_path / 'timeline.png')!r})); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
