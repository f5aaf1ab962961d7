"""The limits of a run, and which of them a sample breaks.

    breach = first_breach(recipe.limits, sample, framework_peak_bytes=..., seconds=...)

`system_available_pct` is the one that saves machines: it looks at the sum of everything. A limit is looked at as often as
samples are taken; memory that comes and goes between two looks is not seen.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..config import LimitsSection
from ..tracking.timeline import Sample

_REMEDIES = {
    "system_available_pct": "close other programs, or lower train.max_seq_length (one change at a time)",
    "framework_peak_gb": "lower train.max_seq_length, or set train.gradient_checkpointing: true",
    "process_gb": "lower train.max_seq_length, or lora.layers",
    "minutes": "lower train.max_steps, or raise limits.minutes",
}


@dataclass(frozen=True)
class Breach:
    """A limit that fired.

    Attributes:
        limit: its recipe key, without `limits.`.
        allowed: the limit's value, in the unit of its name.
        measured: what was measured, in the same unit.
        seconds: since the child began.
        phase: what the child was doing.
        step: the last finished step.
    """

    limit: str
    allowed: float
    measured: float
    seconds: float
    phase: str
    step: int

    @property
    def remedy(self) -> str:
        """What to change, one variable at a time."""
        return _REMEDIES[self.limit]

    def to_json(self) -> dict[str, Any]:
        """JSON types, with the remedy."""
        return {**asdict(self), "remedy": self.remedy}


def first_breach(
    limits: LimitsSection, sample: Sample, framework_peak_bytes: int, phase: str, step: int
) -> Breach | None:
    """The first limit that this sample breaks, None when it breaks none."""
    checks: list[tuple[str, float | None, float, bool]] = [
        ("system_available_pct", limits.system_available_pct, sample.system_available_pct, False),
        ("framework_peak_gb", limits.framework_peak_gb, framework_peak_bytes / 1e9, True),
        ("process_gb", limits.process_gb, sample.process_bytes / 1e9, True),
        ("minutes", limits.minutes, sample.seconds / 60, True),
    ]
    for name, allowed, measured, is_ceiling in checks:
        if allowed is None or (not is_ceiling and allowed == 0):
            continue
        if measured > allowed if is_ceiling else measured < allowed:
            return Breach(name, allowed, measured, sample.seconds, phase, step)
    return None
