"""The page about one run: what it says, what it never says, and that it needs nothing from elsewhere."""

from __future__ import annotations

import dataclasses
import functools
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lemon_mlflow.tracking.report import RECHECK_COMMAND, RunFacts, draw_figure, not_shown, render, verdict, write
from lemon_mlflow.tracking.timeline import Sample, chart_style

SECTIONS = ["verdict", "picture", "numbers", "hashes", "data", "recipe", "environment", "not-shown"]
JUDGING_WORDS = re.compile(r"\b(better|improv\w*|worse\w*)\b", re.IGNORECASE)
VOID = {"meta", "br", "path", "use"}


class Page(HTMLParser):
    """The parsed page: texts by section, tags, attributes, and whether every element was closed in its order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.sections: dict[str, str] = {}
        self._open: list[str] = []
        self._section = ""
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
            self.sections[self._section] = ""
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self._section and "style" not in self._open:
            self.sections[self._section] += data + " "

    def text(self, section: str) -> str:
        return " ".join(self.sections[section].split())


def split(read: int, over_length: int, **more: Any) -> dict[str, Any]:
    return {
        "rows_read": read, "rows_kept": read - over_length, "removed_over_length": over_length,
        "removed_no_trainable_tokens": 0, "blank_lines": 1, "tokens_non_padding": 100 * read,
        "tokens_trainable": 7 * read, "longest_row_tokens": 900, "longest_kept_tokens": 500,
        "labels": {"SECRET-LABEL": 3, "billing": 9}, "ambiguous_rows": 2, "prompt_differs": 0, **more,
    }  # fmt: skip


def completed(**changes: Any) -> RunFacts:
    samples = tuple(
        Sample(n / 10, 10**9 if n > 20 else None, 2 * 10**9, (12 - n // 20) * 10**9, 16 * 10**9, None)
        for n in range(100)
    )
    facts = RunFacts(
        title="triage <pilot> & co", run_id="0a1b2c", outcome="completed", backend="hf", device="cpu",
        started="2025-05-01T10:00:00+00:00", base_name="embedded:smollm2-135m", quantization="none float32",
        hashes=(("data", "d" * 64, "the three files"), ("data content", "c" * 64, "rows"), ("base", "b" * 64, "hub"),
                ("tokenizer", "e" * 64, "part of the base"), ("adapter", "a" * 64, "adapter/")),
        train_points=((1, 3.0, 2.5), (2, 4.0, 2.25), (3, 5.0, 2.125)), valid_points=((0, 2.5, 3.0), (3, 5.5, 2.75)),
        samples=samples, marks=((0.0, "load"), (2.0, "train"), (6.0, "<save>")), guard_line_pct=15.0,
        recipe={"train.seed": "7", "lora.rank": "8", "base.model": "embedded:smollm2-135m"},
        data_splits={"train": split(1412, 63), "valid": split(1060, 0), "test": split(100, 2)},
        removed=({"split": "train", "where": "train.jsonl:9", "id": "row-9", "reason": "over_length", "tokens": 1513},),
        metrics={"train/loss": 2.125, "train/tokens": 3141, "train/padding_pct": 20.0, "valid/loss": 2.75,
                 "memory/process_peak_gb": 2.0, "speed/train_total_tokens_per_s": 50.0, "speed/train_seconds": 80.0,
                 "adapter/trainable_parameters": 2442240, "other": 1.5},
        environment={"os": "Linux", "python": "3.11"}, framework_memory_source="test allocator",
        reload={"rows": 4, "difference": 0.0, "tolerance": 1e-4, "effect_of_adapter": 0.31}, problem="",
    )  # fmt: skip
    return dataclasses.replace(facts, **changes)


def refused(**changes: Any) -> RunFacts:
    facts = RunFacts(
        title="", run_id="0a1b2c", outcome="refused:too_few_rows", backend="", device="", started="", base_name="",
        quantization="", hashes=(), train_points=(), valid_points=(), samples=(), marks=(), guard_line_pct=0.0,
        recipe={}, data_splits={}, removed=(), metrics={}, environment={}, framework_memory_source="", reload=None,
        problem="too_few_rows: train has 2 rows [train.jsonl:<2>] -> add rows",
    )  # fmt: skip
    return dataclasses.replace(facts, **changes)


ENDINGS = [
    completed(),
    completed(device="cuda", reload=None, guard_line_pct=0.0),
    completed(outcome="stopped:system_available_pct", reload=None, problem="limit"),
    completed(outcome="failed:reload_differs", samples=()),
    completed(train_points=(), valid_points=()),
    completed(train_points=((1, 3.0, 2.5),), valid_points=()),
    completed(samples=completed().samples[:1]),
    refused(),
    refused(outcome=""),
]
EACH_ENDING = pytest.mark.parametrize("ending", range(len(ENDINGS)))


@functools.cache
def page_of(ending: int) -> str:
    return render(ENDINGS[ending])


@EACH_ENDING
def test_all_sections_are_there_in_their_order_however_the_run_ended(ending: int) -> None:
    page = Page(page_of(ending))
    assert list(page.sections) == SECTIONS
    assert all(page.text(section) for section in SECTIONS)


@EACH_ENDING
def test_the_page_takes_nothing_from_elsewhere(ending: int) -> None:
    html = page_of(ending)
    page = Page(html)
    assert not {"script", "link", "iframe", "img", "object", "base", "form"} & set(page.tags)
    loaded = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "srcset", "data")]
    assert all(value.startswith("#") for value in loaded)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))
    assert "http://" not in html and "https://" not in html
    assert "@import" not in html


@EACH_ENDING
def test_no_loss_is_ever_judged(ending: int) -> None:
    assert not JUDGING_WORDS.search(page_of(ending))


def test_what_comes_from_outside_is_escaped_everywhere() -> None:
    evil = '<script>alert("1")</script>\'"&'
    facts = completed(
        title=evil, run_id=evil, outcome=f"failed:{evil}", backend=evil, device=evil, started=evil, base_name=evil,
        quantization=evil, hashes=((evil, evil, evil),), marks=((1.0, evil),), recipe={evil: evil, f"a.{evil}": evil},
        data_splits={evil: {"rows_read": evil}},
        removed=({"split": evil, "where": evil, "id": evil, "reason": evil, "tokens": evil},),
        metrics={f"a/{evil}": 1.0}, environment={evil: evil}, framework_memory_source=evil, problem=evil,
    )  # fmt: skip
    html = render(facts)
    assert "<script" not in html
    page = Page(html)
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert evil in page.text("data")


def test_the_verdict_gives_both_losses_with_their_steps_and_the_rows() -> None:
    assert verdict(completed())[1] == (
        "Training loss fell from 2.5000 (step 1) to 2.1250 (step 3); "
        "validation loss fell from 3.0000 (step 0) to 2.7500 (step 3) on 1,060 rows."
    )


def test_the_verdict_says_when_a_loss_rose_or_stayed() -> None:
    rose = completed(train_points=((1, 0.0, 1.0), (2, 1.0, 1.5)), valid_points=((0, 0.0, 1.0), (2, 1.0, 1.00001)))
    assert "Training loss rose from 1.0000 (step 1) to 1.5000 (step 2)" in verdict(rose)[1]
    assert "validation loss was 1.0000 at step 0 and at step 2" in verdict(rose)[1]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            completed(),
            "Completed: the adapter was saved, and a fresh process that loaded it computed the same logits",
        ),
        (completed(reload=None), "Completed. No reload test is recorded."),
        (completed(outcome="stopped:minutes"), "Stopped by limits.minutes after step 3. What it left is not"),
        (completed(outcome="stopped:SIGTERM", train_points=()), "Stopped by the signal SIGTERM before the first step"),
        (completed(outcome="failed:non_finite_loss"), "Failed (non_finite_loss) after step 3. Do not use what it left"),
        (refused(), "Refused (too_few_rows): nothing was trained."),
        (refused(outcome="odd"), "The run ended with the outcome odd."),
    ],
)
def test_the_verdict_begins_with_how_the_run_ended(facts: RunFacts, said: str) -> None:
    assert verdict(facts)[0].startswith(said)
    assert said in Page(render(facts)).text("verdict")


def test_the_cause_of_a_refusal_is_shown() -> None:
    text = Page(render(refused())).text("verdict")
    assert "Cause. too_few_rows: train has 2 rows [train.jsonl:<2>] -> add rows" in text


def test_the_picture_has_loss_above_memory_on_one_time_axis() -> None:
    with chart_style():
        loss, memory, percent = draw_figure(completed(), wide=True).axes
    assert loss.get_xlim() == memory.get_xlim() == (0.0, 9.9)
    assert loss.get_position().y0 > memory.get_position().y0
    drawn = {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in loss.get_lines()}
    assert drawn["training, each step"] == [[3.0, 2.5], [4.0, 2.25], [5.0, 2.125]]
    assert drawn["validation, all rows"] == [[2.5, 3.0], [5.5, 2.75]]
    (guard,) = [line for line in percent.get_lines() if line.get_gid() == "guard-line"]
    assert set(np.asarray(guard.get_ydata())) == {15.0}


def test_the_page_shows_the_picture_for_wide_and_narrow_screens_in_its_own_colours() -> None:
    html = page_of(0)
    assert html.count("<svg") == html.count("</svg>") == 2
    assert 'id="wide-guard-line"' in html and 'id="narrow-guard-line"' in html
    assert "guard line: 15 % available" in Page(html).text("picture")
    assert "var(--guard)" in html
    identifiers = [value for name, value in Page(html).attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    assert set(re.findall(r"url\(#([^)]*)\)", html)) <= set(identifiers)


def test_the_caption_says_the_memory_panel_in_words() -> None:
    text = Page(page_of(0)).text("picture")
    assert "process tree at most 2.00 GB; system available at least 50.0 %; the guard line is at 15 %" in text
    assert "no guard line was set" in Page(render(completed(guard_line_pct=0.0))).text("picture")


def test_a_long_run_keeps_the_page_small() -> None:
    samples = tuple(Sample(n / 10, n * 1000 % 7, n * 7919 % 10**9, n % 16, 16, n * 31 % 10**9) for n in range(50_000))
    points = tuple((n, n / 10, 1 / n) for n in range(1, 20_000))
    assert len(render(completed(samples=samples, train_points=points)).encode()) < 1_000_000


def test_the_same_facts_give_the_same_page() -> None:
    assert render(completed()) == page_of(0)


def test_numbers_are_grouped_and_have_units() -> None:
    text = Page(page_of(0)).text("numbers")
    assert "valid loss 2.75 nats per token train loss 2.125 nats per token padding_pct 20 % tokens 3,141 tokens" in text
    assert "memory process_peak_gb 2 GB" in text
    assert "trainable_parameters 2,442,240 parameters" in text
    assert "train_total_tokens_per_s 50 tokens/s" in text
    assert "difference 0 of the largest logit tolerance 0.0001 of the largest logit" in text


def test_every_hash_is_shown_with_what_it_covers_and_how_to_check_it() -> None:
    text = Page(page_of(0)).text("hashes")
    assert all(letter * 64 in text for letter in "dcbea")
    assert RECHECK_COMMAND in text
    assert "FILES: train.jsonl valid.jsonl test.jsonl" in text
    assert "FILES: those listed in hashes/adapter.json" in text


def test_the_data_section_tells_what_was_read_kept_and_removed() -> None:
    text = Page(page_of(0)).text("data")
    assert "train valid test rows read 1,412 1,060 100 rows removed: longer than the limit 63 0 2" in text
    assert "rows kept 1,349 1,060 98" in text
    assert "row-9 over_length 1,513" in text


def test_three_token_counts_of_training_are_given() -> None:
    text = Page(page_of(0)).text("data")
    assert "positions computed, with padding 5,000 tokens without padding 4,000 tokens that carry loss 3,141" in text


def test_labels_are_counted_and_not_named() -> None:
    html = page_of(0)
    assert "SECRET-LABEL" not in html
    assert "2 (3 to 9)" in html


def test_the_first_fifty_removed_rows_are_shown_and_the_rest_counted() -> None:
    row = {"split": "train", "where": "train.jsonl:1", "reason": "over_length", "tokens": 600}
    text = Page(render(completed(removed=tuple({**row, "id": f"id-{n}."} for n in range(1200))))).text("data")
    assert "id-49." in text and "id-50." not in text
    assert "And 1,150 more" in text
    assert "Removed rows: 1,200" in text


def test_recipe_and_environment_are_shown() -> None:
    page = Page(page_of(0))
    assert "lora rank 8" in page.text("recipe") and "train seed 7" in page.text("recipe")
    assert "os Linux python 3.11" in page.text("environment")


def test_what_a_completed_run_on_a_cpu_does_not_show() -> None:
    said = " ".join(not_shown(completed()))
    for part in (
        "A lower loss is not evidence of that: no evaluation on the holdout was made",
        "leaks between them were not checked by this version",
        "one seed (7) shows nothing about the spread between seeds",
        "latency was not measured",
        "it counts only its own allocator (source: test allocator)",
        "Anything about a GPU or a Mac",
        "the reload test shows only that its files are complete and go back on this base",
        "the licences of base and data were not judged",
        "two samples, which are 0.1 s apart",
    ):
        assert part in said
    assert "did not complete" not in said


def test_what_is_not_shown_follows_the_facts() -> None:
    facts = completed(device="cuda", reload=None, metrics={"eval/n": 9.0, "latency/base_ttft_ms": 3.0})
    said = " ".join(not_shown(facts))
    assert "a GPU or a Mac" not in said and "on one machine, on cuda" in said
    assert "no reload test was passed" in said
    assert "holdout" not in said and "latency" not in said
    assert "did not complete" in " ".join(not_shown(refused()))
    assert "it gave no figure" in " ".join(not_shown(refused()))


def test_the_file_holds_the_page_even_with_text_that_utf8_cannot_hold(tmp_path: Path) -> None:
    facts = completed(base_name="caf\udce9 ação")
    write(facts, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes() == render(facts).encode("utf-8", "replace")
    assert "caf? ação" in (tmp_path / "report.html").read_text(encoding="utf-8")
