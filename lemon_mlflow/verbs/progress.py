"""The progress bar of a run, drawn by the parent from the child's events; plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_NAMES = {
    "fetch": "fetching the base",
    "dequantize": "building the embedded base",
    "convert": "quantizing the base for mlx",
    "hash": "hashing the base",
    "tokenise": "tokenising the rows",
    "load": "loading the base",
    "train": "training",
    "save": "saving the adapter",
    "reload": "reloading in a fresh process",
    "artifacts": "storing artifacts",
}


class ProgressView:
    """Shows phases and steps on standard error."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[extra]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, shown="", extra="")
        self._phase = ""
        self._total = 0
        self._next_line = 0
        self._started = time.monotonic()

    def __enter__(self) -> ProgressView:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._bar.stop()

    def phase(self, name: str, total: int = 0, done: int = 0) -> None:
        """A new phase begins; `total` 0 means that its length is not known."""
        self._phase, self._total, self._next_line = name, total, done
        self._bar.reset(
            self._task, total=total or None, completed=done, description=_NAMES.get(name, name), shown="", extra=""
        )
        self._line(_NAMES.get(name, name) + (f" ({total} steps)" if name == "train" else ""))

    def event(self, event: dict[str, Any]) -> None:
        """Show one event of the child."""
        kind = event["event"]
        if kind == "phase":
            self.phase(str(event["name"]), int(event.get("total") or 0), int(event.get("done") or 0))
        elif kind == "progress":
            self._bar.update(self._task, completed=event["done"], shown=f"{event['done']}/{self._total}")
        elif kind == "step":
            shown = f"step {event['step']}/{self._total}"
            self._bar.update(self._task, completed=event["step"], shown=shown, extra=f"loss {event['loss']:.3f}")
            if event["step"] >= self._next_line:
                self._next_line = event["step"] + max(1, self._total // 10)
                self._line(f"  {shown}  loss {event['loss']:.3f}")
        elif kind == "validating":
            self._bar.update(self._task, extra=f"validating, row {event['done']}/{event['total']}")
        elif kind == "validation":
            text = f"validation loss {event['loss']:.4f} after step {event['step']} ({event['rows']} rows)"
            self.console.print(f"  {text}")

    def say(self, text: str) -> None:
        """One line that stays."""
        self.console.print(text, soft_wrap=True, markup=False)

    def _line(self, text: str) -> None:
        if not self.console.is_terminal:
            print(f"[{time.monotonic() - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)
