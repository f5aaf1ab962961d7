"""What child and parent say to each other: one JSON object a line, on a pipe of its own.

    emit = EventWriter(descriptor)
    emit("step", step=3, loss=1.25)

    parser = EventParser()
    for event in parser.feed(data): ...          # {"event": "step", "step": 3, "loss": 1.25}

The pipe is not the child's output: libraries print what they like, and that goes to the log. A line that is not a JSON
object with a word under `event` is counted as broken and left out, never guessed at. Numbers that JSON does not have
(NaN, infinity) are written as null: a metric that is not finite is not a metric.
"""

from __future__ import annotations

import json
import math
import os
import threading
from typing import Any

_LONGEST_LINE = 1 << 20


class EventWriter:
    """Writes events; safe to call from several threads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def __call__(self, event: str, **fields: Any) -> None:
        """Send one event. When the parent is gone nobody guards the machine any more, so the process ends at once."""
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in fields.items()
        }
        data = (json.dumps({"event": event, **clean}, allow_nan=False) + "\n").encode("utf-8")
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except BrokenPipeError:
                os._exit(1)


class EventParser:
    """Turns bytes into events. `broken` counts the lines that were none."""

    def __init__(self) -> None:
        self._rest = b""
        self.broken = 0

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The events that are complete after these bytes."""
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            self._rest = b""
            self.broken += 1
        events = []
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                self.broken += 1
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events.append(event)
            else:
                self.broken += 1
        return events
