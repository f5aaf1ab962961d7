"""The three ways in which a run ends without its adapter, as types.

A `Refusal` is something the user can mend: it is raised where the fact is known, it says what is wrong, where, and what
to do, and the command line prints it as one line and exits with status 2. A `Failure` is a run that started and could
not be finished honestly (a non-finite loss, a child that died); it exits with status 1. `Stopped` is a run that a limit or a
signal ended.

    raise Refusal("too_few_rows", "train has 2 rows, 4 are needed", where="data/train.jsonl",
                  remedy="add rows, or lower data.min_train_rows")

Codes are stable words. Each has an entry in `docs/refusals.md`; a test keeps that page complete.
"""

from __future__ import annotations

from typing import Any


class RunEnded(Exception):
    """What `Refusal`, `Failure` and `Stopped` share.

    Attributes:
        code: a stable word, for example `unknown_recipe_key`.
        message: what is wrong, without example texts from the data.
        where: the place, `file:line` when there is one, else the recipe key.
        remedy: what to do about it.
        details: further places with the same fault, one line each (at most 20).
    """

    exit_status = 1
    outcome_kind = "failed"

    def __init__(
        self, code: str, message: str, where: str = "", remedy: str = "", details: tuple[str, ...] = ()
    ) -> None:
        super().__init__(code, message, where, remedy, details)
        self.code = code
        self.message = message
        self.where = where
        self.remedy = remedy
        self.details = tuple(details[:20])

    @property
    def outcome(self) -> str:
        """The value of the run's tag `lemon.outcome`."""
        return f"{self.outcome_kind}:{self.code}"

    def as_dict(self) -> dict[str, Any]:
        """JSON form; `from_dict` of the same class reads it back."""
        return {
            "code": self.code,
            "message": self.message,
            "where": self.where,
            "remedy": self.remedy,
            "details": list(self.details),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> RunEnded:
        """The inverse of `as_dict`."""
        return cls(
            str(fields["code"]),
            str(fields["message"]),
            str(fields.get("where", "")),
            str(fields.get("remedy", "")),
            tuple(str(item) for item in fields.get("details", ())),
        )

    def __str__(self) -> str:
        parts = [f"{self.code}: {self.message}"]
        if self.where:
            parts.append(f"[{self.where}]")
        if self.remedy:
            parts.append(f"-> {self.remedy}")
        return " ".join(" ".join(part.split()) for part in parts)


class Refusal(RunEnded):
    """A mistake in what the user asked for or brought. Nothing was trained."""

    exit_status = 2
    outcome_kind = "refused"


class Failure(RunEnded):
    """A run that started and could not be finished honestly."""

    exit_status = 1
    outcome_kind = "failed"


class Stopped(RunEnded):
    """A run that was stopped: by a limit (`code` is the limit's name) or by a signal (`code` is the signal's name)."""

    exit_status = 3
    outcome_kind = "stopped"
