"""The documentation says what the code does: codes, recipe keys, metric names and links are compared, not trusted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lemon_mlflow.config import Recipe, canonical_text, flatten

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, *(path for path in [ROOT / "README.md"] if path.is_file())]
SOURCES = sorted((ROOT / "lemon_mlflow").rglob("*.py"))

RAISED_BY = {"Refusal", "Failure", "Stopped", "_Fault", "_RowError", "_refuse_non_finite"}
# Codes that are not written where they are raised, and where their values come from.
PASSED_ON = {
    "code": "_refuse_non_finite's own argument",
    "first.code": "a _Fault",
    "error.code": "a _RowError",
    "empty_code": "the keys of _REMEDIES in data/read.py",
    "breach.limit": "the keys of _REMEDIES in supervise/limits.py",
    "ending.stopped_by": "SIGNALS",
    "name": "SIGNALS",
    "signal.Signals(number).name": "SIGNALS",
}
SIGNALS = {"SIGINT", "SIGTERM"}
PLACEHOLDERS = {"exit_code": "<n>", "name": "<signal>"}


def calls_and_remedies() -> Iterator[tuple[str, ast.expr]]:
    """("call", first argument) of all that raises, and ("remedy", key) of each table of remedies."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                if ast.unparse(node.func) in RAISED_BY and node.args:
                    yield "call", node.args[0]
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                names = {ast.unparse(target) for target in node.targets}
                yield from (("remedy", key) for key in node.value.keys if key is not None and "_REMEDIES" in names)


def words_of(expression: ast.expr) -> set[str] | None:
    """The codes that an expression can be, None when it is passed on from elsewhere."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        return {expression.value}
    if isinstance(expression, ast.IfExp):
        one, other = words_of(expression.body), words_of(expression.orelse)
        return None if one is None or other is None else one | other
    if isinstance(expression, ast.JoinedStr):
        parts = [
            PLACEHOLDERS[ast.unparse(part.value)] if isinstance(part, ast.FormattedValue) else ast.literal_eval(part)
            for part in expression.values
        ]
        return {"".join(parts)}
    return None


def codes_in_the_source() -> set[str]:
    found = (words_of(expression) for _, expression in calls_and_remedies())
    return SIGNALS.union(*(words for words in found if words))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def headings(path: Path) -> list[str]:
    return re.findall(r"^#+ +(.*?) *$", without_code(path.read_text(encoding="utf-8")), flags=re.MULTILINE)


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_code_in_the_source_has_its_heading_and_no_heading_is_left_over() -> None:
    text = (ROOT / "docs" / "refusals.md").read_text(encoding="utf-8")
    documented = re.findall(r"^### (.+)$", text, flags=re.MULTILINE)
    assert len(set(documented)) == len(documented)
    assert set(documented) == codes_in_the_source()


def test_no_code_comes_from_an_expression_that_the_test_above_does_not_know() -> None:
    unknown = {ast.unparse(expression) for _, expression in calls_and_remedies() if words_of(expression) is None}
    assert unknown <= set(PASSED_ON)


def test_every_recipe_key_is_documented_with_its_default() -> None:
    text = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \| `([^`]*)` \|", text, flags=re.MULTILINE)
    assert rows == [(key, canonical_text(value) or '""') for key, value in flatten(Recipe()).items()]


def test_every_metric_that_the_source_names_is_documented() -> None:
    groups = re.compile(r"(train|valid|adapter|memory|speed)/[a-z_]+")
    names = {
        node.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and groups.fullmatch(node.value)
    }
    assert len(names) > 10
    text = (ROOT / "docs" / "tracking.md").read_text(encoding="utf-8")
    assert {name for name in names if f"| `{name}` |" not in text} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        path = (page.parent / name) if name else page
        assert path.exists(), f"{page.name} links to {target}"
        if fragment and path.suffix == ".md":
            assert fragment in map(anchor, headings(path)), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [path for path in DOCS if path.name != "design.md"], ids=lambda path: path.name)
def test_no_page_judges_an_adapter(page: Path) -> None:
    # design.md states the rule and names the words.
    assert not re.findall(r"\b(better|worse)\b", page.read_text(encoding="utf-8"), flags=re.IGNORECASE)
