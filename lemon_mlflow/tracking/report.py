"""`report.html`: one run on one page that needs nothing but a browser.

    facts = RunFacts(title="triage", run_id="0a1b...", outcome="completed", ...)
    write(facts, folder / "report.html")

The page holds everything itself: no link, no script, no font or picture from elsewhere. It shows what was measured, in
plain words, and ends with what the run does not show. Every text from outside is escaped by the template.

Not covered: the page is not signed, and repeats what it is given. Example texts and logs have no field in `RunFacts`;
the ids of removed rows are shown as the data names them.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .timeline import COLOURS, Sample, TimeScale, chart_style, draw_marks, draw_memory, thin

RECHECK_COMMAND = "cd FOLDER && sha256sum FILES | LC_ALL=C sort -k 2 | sha256sum"
SHOWN_REMOVED_ROWS = 50

Points: TypeAlias = tuple[tuple[int, float, float], ...]
"""(step, seconds since the training process began, loss in nats per token)."""

_MOST_DRAWN = 1200  # the picture is on the page twice, as text, once for a wide and once for a narrow screen


@dataclass(frozen=True)
class RunFacts:
    """Everything that the page says. Empty fields are left out of it or said to be unknown.

    Attributes:
        title: the run's name.
        run_id: MLflow's id of the run.
        outcome: `completed`, or `refused:<code>`, `failed:<code>`, `stopped:<limit or signal>`.
        backend: `hf` or `mlx`.
        device: for example `cpu`, `cuda`, `metal`.
        started: ISO 8601 with its time zone.
        base_name: the base as the recipe names it.
        quantization: the fingerprint of the base's quantization.
        hashes: (what, sha256 in hex, where) for example ("data", "9f86...", "the three files").
        train_points: see `Points`; each loss is over the rows of its step.
        valid_points: the same, each loss over all validation rows.
        samples: memory, in the order of time.
        marks: (seconds, phase) at each change of phase.
        guard_line_pct: training stops below this much available memory; 0 when no line was set.
        recipe: dotted key to text, of the effective recipe.
        data_splits: what `data.prepare.prepare` returns under `splits`.
        removed: one mapping for each removed row, with split, where, id, reason and tokens.
        metrics: last value of each metric, by its full name.
        environment: short facts about the machine.
        framework_memory_source: whose count the framework's memory is.
        reload: difference, tolerance, effect_of_adapter and rows of the reload test, None when it was not reached.
        problem: why the run did not complete, "" when it did.
    """

    title: str
    run_id: str
    outcome: str
    backend: str
    device: str
    started: str
    base_name: str
    quantization: str
    hashes: tuple[tuple[str, str, str], ...]
    train_points: Points
    valid_points: Points
    samples: tuple[Sample, ...]
    marks: tuple[tuple[float, str], ...]
    guard_line_pct: float
    recipe: Mapping[str, str]
    data_splits: Mapping[str, Mapping[str, Any]]
    removed: tuple[Mapping[str, Any], ...]
    metrics: Mapping[str, float]
    environment: Mapping[str, str]
    framework_memory_source: str
    reload: Mapping[str, Any] | None
    problem: str


def write(facts: RunFacts, path: Path) -> None:
    """Write the page. A character that UTF-8 cannot hold (half of a pair in a file's name) becomes a question mark."""
    path.write_bytes(render(facts).encode("utf-8", "replace"))


def render(facts: RunFacts) -> str:
    """The whole page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        facts=facts,
        kind=_kind(facts),
        verdict=verdict(facts),
        charts=_charts(facts),
        caption=_caption(facts),
        numbers=_numbers(facts),
        hashes=[(what, sha256, where, _hashed_files(what)) for what, sha256, where in facts.hashes],
        recheck=RECHECK_COMMAND,
        data_rows=_data_rows(facts),
        training_tokens=_training_tokens(facts),
        removed=facts.removed[:SHOWN_REMOVED_ROWS],
        removed_more=max(0, len(facts.removed) - SHOWN_REMOVED_ROWS),
        recipe=_by_prefix(facts.recipe, "."),
        not_shown=not_shown(facts),
        colours=COLOURS,
        number=_number,
    )


# ---- the verdict ----


def verdict(facts: RunFacts) -> list[str]:
    """What happened, the most important first. Says which way a loss went, never what that is worth."""
    sentences = [_ending(facts)]
    parts = []
    if facts.train_points:
        parts.append(f"training loss {_course(facts.train_points)}")
    if facts.valid_points:
        rows = facts.data_splits.get("valid", {}).get("rows_kept")
        parts.append(f"validation loss {_course(facts.valid_points)}" + (f" on {rows:,} rows" if rows else ""))
    if parts:
        text = "; ".join(parts)
        sentences.append(f"{text[0].upper()}{text[1:]}.")
    return sentences


def _kind(facts: RunFacts) -> str:
    kind = facts.outcome.partition(":")[0]
    return kind if kind in ("completed", "refused", "failed", "stopped") else "other"


def _ending(facts: RunFacts) -> str:
    kind, code = _kind(facts), facts.outcome.partition(":")[2]
    done = f" after step {facts.train_points[-1][0]}" if facts.train_points else " before the first step was done"
    if kind == "completed" and facts.reload:
        rows = facts.reload.get("rows")
        on = f" on {rows} validation rows" if rows else ""
        same = f"a fresh process that loaded it computed the same logits{on}, within the tolerance"
        return f"Completed: the adapter was saved, and {same}."
    if kind == "completed":
        return "Completed. No reload test is recorded."
    if kind == "refused":
        return f"Refused ({code}){done if facts.train_points else ': nothing was trained'}."
    if kind == "stopped":
        by = f"the signal {code}" if code.startswith("SIG") else f"limits.{code}"
        return f"Stopped by {by}{done}. What it left is not a finished adapter."
    if kind == "failed":
        return f"Failed ({code}){done}. Do not use what it left as an adapter."
    return f"The run ended with the outcome {facts.outcome or 'unknown'}."


def _course(points: Points) -> str:
    """ "fell from 2.1000 (step 1) to 1.9000 (step 40)"."""
    (first_step, _, first), (last_step, _, last) = points[0], points[-1]
    if len(points) == 1:
        return f"was {first:.4f} at step {first_step}"
    if f"{first:.4f}" == f"{last:.4f}":
        return f"was {first:.4f} at step {first_step} and at step {last_step}"
    return f"{'fell' if last < first else 'rose'} from {first:.4f} (step {first_step}) to {last:.4f} (step {last_step})"


# ---- the picture ----


def _charts(facts: RunFacts) -> list[tuple[str, Markup]]:
    """(screen, SVG) for a wide and a narrow screen; empty when there is nothing to draw."""
    if not (facts.samples or facts.train_points or facts.valid_points):
        return []
    with chart_style():
        return [(screen, _as_inline_svg(draw_figure(facts, screen == "wide"), screen)) for screen in ("wide", "narrow")]


def draw_figure(facts: RunFacts, wide: bool) -> Figure:
    """Loss above memory, on one time axis; a panel without data is left out. Call it inside `chart_style`."""
    losses = bool(facts.train_points or facts.valid_points)
    panels = int(losses) + int(bool(facts.samples))
    figure = Figure(figsize=(9.2 if wide else 4.9, 0.4 + (2.7 if wide else 2.9) * panels), layout="constrained")
    stack = list(figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])
    time = TimeScale.of(
        [sample.seconds for sample in facts.samples],
        [second for second, _ in facts.marks],
        [point[1] for point in (*facts.train_points, *facts.valid_points)],
    )
    for axes in stack:
        draw_marks(axes, facts.marks, time, labels=axes is stack[-1])
    if losses:
        axes = stack[0]
        _draw_loss(axes, facts.train_points, time, "training, each step", {"color": COLOURS["train"], "linewidth": 1.2})
        style = {"color": COLOURS["valid"], "linewidth": 1.6, "marker": "o", "markersize": 4}
        _draw_loss(axes, facts.valid_points, time, "validation, all rows", style)
        axes.set(xlim=(0, time.end), ylabel="loss (nats per token)")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, handlelength=1.6)
    if facts.samples:
        draw_memory(stack[-1], facts.samples, facts.guard_line_pct, time, _MOST_DRAWN, columns=4 if wide else 2)
    stack[-1].set_xlabel(f"time since the training process began ({time.unit})")
    figure.align_ylabels(stack)
    return figure


def _draw_loss(axes: Axes, points: Points, time: TimeScale, label: str, style: dict[str, Any]) -> None:
    if not points:
        return
    _, seconds, losses = np.asarray(points, dtype=float).T
    keep = thin([losses], _MOST_DRAWN)
    if len(keep) == 1:
        style = {"marker": "o", **style}  # a line of one point is invisible
    axes.plot(seconds[keep] / time.divisor, losses[keep], label=label, **style)


def _as_inline_svg(figure: Figure, prefix: str) -> Markup:
    """The figure as an `<svg>` element that follows the page's colours.

    What only a file needs goes: prolog, metadata and name spaces with their addresses. Ids get a prefix, since the page
    holds two pictures. The elements' texts were escaped by matplotlib.
    """
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"| version="[^"]*"', "", text[: text.index(">")]) + text[text.index(">") :]
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = text.replace('href="#', f'href="#{prefix}-').replace("url(#", f"url(#{prefix}-")
    for name, value in COLOURS.items():
        text = text.replace(value, f"var(--{name})")
    return Markup(text.replace("<svg", '<svg role="img" aria-label="loss and memory over time"', 1))


def _caption(facts: RunFacts) -> str:
    """The memory panel in words, for whoever does not see it."""
    if not facts.samples:
        return "No memory samples were taken."
    process = max(sample.process_bytes for sample in facts.samples) / 1e9
    lowest = min(sample.system_available_pct for sample in facts.samples)
    line = f"the guard line is at {facts.guard_line_pct:g} %" if facts.guard_line_pct > 0 else "no guard line was set"
    return (
        f"Memory, from {len(facts.samples):,} samples: process tree at most {process:.2f} GB; system available "
        f"at least {lowest:.1f} %; {line}. Dotted vertical lines are changes of phase."
    )


# ---- the tables ----

_GROUPS = ("valid", "train", "adapter", "memory", "speed", "latency", "eval")
_UNITS = (
    ("tokens_per_s", "tokens/s"),
    ("seconds_per_step", "s per step"),
    ("seconds", "s"),
    ("_gb", "GB"),
    ("_mb", "MB"),
    ("_pct", "%"),
    ("_ms", "ms"),
    ("_ratio", "times"),
    ("loss", "nats per token"),
    ("parameters", "parameters"),
    ("tokens", "tokens"),
    ("epoch", "epochs"),
)
_DATA_ROWS = (
    ("rows_read", "rows read"),
    ("removed_over_length", "rows removed: longer than the limit"),
    ("removed_no_trainable_tokens", "rows removed: no token carries loss"),
    ("rows_kept", "rows kept"),
    ("blank_lines", "blank lines skipped"),
    ("ambiguous_rows", "rows that accept more than one answer"),
    ("prompt_differs", "rows whose prompt the template writes another way when it asks"),
    ("tokens_non_padding", "tokens of kept rows, without padding"),
    ("tokens_trainable", "tokens of kept rows that carry loss"),
    ("longest_row_tokens", "longest row read, in tokens"),
    ("longest_kept_tokens", "longest row kept, in tokens"),
)


def _number(value: Any) -> str:
    """Whole numbers in full with separators, others with four significant digits."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def _numbers(facts: RunFacts) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """(group, rows of (name, value, unit)), the groups a reader looks for first before the others."""
    groups = _by_prefix(facts.metrics, "/")
    order = {name: place for place, name in enumerate(_GROUPS)}
    groups.sort(key=lambda group: (order.get(group[0], len(order)), group[0]))
    tables = [(group, [(name, _number(value), _unit(name)) for name, value in pairs]) for group, pairs in groups]
    if facts.reload:
        unit = "of the largest logit"
        rows = [(name, _number(value), "" if name == "rows" else unit) for name, value in facts.reload.items()]
        tables.append(("reload test", rows))
    return tables


def _unit(name: str) -> str:
    return next((unit for ending, unit in _UNITS if name.endswith(ending)), "")


def _by_prefix(values: Mapping[str, Any], separator: str) -> list[tuple[str, list[tuple[str, Any]]]]:
    """(what is before the separator, [(what is after it, value)]), both in the order of the alphabet."""
    parted = sorted((*_parted(key, separator), value) for key, value in values.items())
    groups = groupby(parted, key=lambda row: row[0])
    return [(prefix, [(rest, value) for _, rest, value in rows]) for prefix, rows in groups]


def _parted(key: str, separator: str) -> tuple[str, str]:
    prefix, found, rest = key.partition(separator)
    return (prefix, rest) if found else ("", key)


def _hashed_files(what: str) -> str:
    return {
        "data": "train.jsonl valid.jsonl test.jsonl",
        "data content": "no files: a hash of the rows, so the command does not apply",
        "tokenizer": "the tokenizer's files in the base's folder",
    }.get(what, f"those listed in hashes/{what}.json")


def _data_rows(facts: RunFacts) -> list[tuple[str, list[str]]]:
    """(label, one text for each split) for the counts that the data's report has."""
    splits = list(facts.data_splits.values())
    rows = [
        (label, [_number(split.get(key, "?")) for split in splits])
        for key, label in _DATA_ROWS
        if any(key in split for split in splits)
    ]
    if any(split.get("labels") for split in splits):
        # Labels are counted and not named: in data without a list of allowed labels they can be whole answers.
        rows.append(("labels (rows of the rarest and the most frequent)", [_label_spread(split) for split in splits]))
    return rows


def _label_spread(split: Mapping[str, Any]) -> str:
    counts = list(split.get("labels", {}).values())
    return f"{len(counts)} ({min(counts):,} to {max(counts):,})" if counts else "0"


def _training_tokens(facts: RunFacts) -> list[tuple[str, str]]:
    """The three token counts of all training steps, as far as the metrics give them."""
    metrics = facts.metrics
    counts: list[tuple[str, str]] = []
    rate, seconds = metrics.get("speed/train_total_tokens_per_s"), metrics.get("speed/train_seconds")
    if rate is not None and seconds is not None:
        real = rate * seconds
        padding_pct = metrics.get("train/padding_pct")
        if padding_pct is not None and padding_pct < 100:
            counts.append(("positions computed, with padding", _number(round(real / (1 - padding_pct / 100)))))
        counts.append(("tokens without padding", _number(round(real))))
    if "train/tokens" in metrics:
        counts.append(("tokens that carry loss", _number(metrics["train/tokens"])))
    return counts


# ---- what the run does not show ----


def not_shown(facts: RunFacts) -> list[str]:
    """What a reader could take this run to show, and it does not. Computed from the facts."""
    return [*_not_shown_of_the_result(facts), *_not_shown_of_the_data(facts), *_not_shown_of_the_machine(facts)]


def _not_shown_of_the_result(facts: RunFacts) -> list[str]:
    said = []
    if _kind(facts) != "completed":
        said.append("Anything about the time after it ended: this run did not complete.")
    if not any(name.startswith("eval/") for name in facts.metrics):
        said.append(
            "Whether the adapter helps. A lower loss is not evidence of that: no evaluation on the holdout was made."
            if facts.train_points or facts.valid_points
            else "Whether an adapter helps: there is no loss here, and no evaluation on the holdout was made."
        )
    if len(facts.train_points) > 1:
        said.append("A trend from two single training losses: each is over the rows of its own step, and rows differ.")
    seed = facts.recipe.get("train.seed")
    which = f"one seed ({seed})" if seed else "one seed"
    said.append(f"How much the result changes with the seed: {which} shows nothing about the spread between seeds.")
    if facts.reload:
        said.append(
            "That the adapter is good for anything: the reload test shows only that its files are complete and go back "
            "on this base."
        )
    else:
        said.append("That the adapter can be loaded: no reload test was passed.")
    if not any(name.startswith("latency/") for name in facts.metrics):
        said.append("How fast it answers: latency was not measured.")
    return said


def _not_shown_of_the_data(facts: RunFacts) -> list[str]:
    said = [
        "That the splits are separate: leaks between them were not checked by this version, nor were duplicates or "
        "personal data."
    ]
    if any(split.get("prompt_differs") for split in facts.data_splits.values()):
        said.append("What the model answers through its chat template: for some rows the template asks in other words.")
    said.append("That you may use or share the result: the licences of base and data were not judged.")
    return said


def _not_shown_of_the_machine(facts: RunFacts) -> list[str]:
    source = facts.framework_memory_source
    said = []
    if source and not source.startswith("unavailable"):
        said.append(f"All memory in the framework's figure: it counts only its own allocator (source: {source}).")
    else:
        said.append(f"The framework's own memory: it gave no figure{f' ({source})' if source else ''}.")
    if len(facts.samples) > 1:
        gap = float(np.median(np.diff([sample.seconds for sample in facts.samples])))
        said.append(f"Memory that came and went between two samples, which are {gap:.2g} s apart (median).")
    if facts.device.lower().startswith("cpu"):
        said.append("Anything about a GPU or a Mac: it ran on a CPU, and memory, speed and digits differ there.")
    elif facts.device:
        said.append(f"Anything about other hardware: it ran on one machine, on {facts.device}.")
    return said
