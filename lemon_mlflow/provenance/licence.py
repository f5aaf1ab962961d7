"""The licence that a base or a data set declares for itself. Declared, not judged: nothing here says what is allowed."""

from __future__ import annotations

import re
from pathlib import Path

import yaml


def declared_licence(folder: Path) -> str:
    """The `license` of the front matter of README.md or CARD.md in `folder`; "" when none is declared."""
    for name in ("README.md", "CARD.md"):
        path = folder / name
        if path.is_file():
            found = _front_matter_licence(path.read_text(encoding="utf-8", errors="replace"))
            if found:
                return found
    return ""


def _front_matter_licence(text: str) -> str:
    match = re.match(r"\A\ufeff?---\s*\n(.*?)\n---\s*(\n|\Z)", text, re.DOTALL)
    if not match:
        return ""
    try:
        front = yaml.safe_load(match.group(1))
    except (yaml.YAMLError, ValueError, RecursionError):  # the last two: an impossible date, nesting too deep
        return ""
    if not isinstance(front, dict):
        return ""
    value = front.get("license")
    if value == "other":
        value = front.get("license_name") or value
    return value.strip() if isinstance(value, str) else ""
