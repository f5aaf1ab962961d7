"""The parent's side: starts a job in a child process, listens, samples memory, and tells how the child ended.

    ending = run_job("lemon_mlflow.train.loop:train:TrainJob", fields, surroundings, on_event=print)
    ending.result                     # the job's result; None unless it was completed

Whatever happens to the child (a Python error, an exit status, a signal), `run_job` returns an `Ending` that names it. On
SIGINT or SIGTERM of the parent the child is stopped and `Ending.stopped_by` says so.

A SIGKILL of the parent ends the worker too: at once on Linux, elsewhere at its next event. The scratch folder is left then.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import LimitsSection
from ..errors import Failure, Refusal, RunEnded, Stopped
from ..tracking.timeline import Sample
from .events import EventParser
from .limits import Breach, first_breach
from .sampler import Sampler
from .sandbox import child_environment, worker_command

_SAMPLE_SECONDS = 0.1
_TERM_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Surroundings:
    """Where and under what a job runs.

    Attributes:
        folder: a scratch folder for the job's files.
        log: file that the child's output is appended to.
        limits: what stops it.
        environment: the parent's variables, of which an allow-list is kept.
        backend: `hf`, `mlx` or "".
        command: how the worker is started; tests put a wrapper here.
    """

    folder: Path
    log: Path
    limits: LimitsSection
    environment: Mapping[str, str]
    backend: str = ""
    command: Callable[[str, str, int], list[str]] = worker_command


@dataclass(frozen=True)
class Ending:
    """How a child ended.

    Attributes:
        result: what the job returned; None unless it was completed.
        problem: the refusal or failure that ended it, None when it was completed.
        breach: the limit that stopped it, if one did.
        stopped_by: `SIGINT` or `SIGTERM` when the parent was told to stop, else "".
        exit_code: of the child; negative for a signal.
        samples: memory over time.
        process_peak_bytes: the most that process tree or kernel high-water mark showed.
        framework_peak_bytes: the highest peak that the child reported, 0 when it reported none.
        seconds: from start to end.
        broken_events: lines on the pipe that were no events.
    """

    result: dict[str, Any] | None
    problem: RunEnded | None
    breach: Breach | None
    stopped_by: str
    exit_code: int
    samples: tuple[Sample, ...]
    process_peak_bytes: int
    framework_peak_bytes: int
    seconds: float
    broken_events: int


@dataclass
class _Watch:
    """What is known of the child while it runs."""

    phase: str = "start"
    step: int = 0
    framework_bytes: int | None = None
    framework_peak_bytes: int = 0
    last: dict[str, Any] = field(default_factory=dict)

    def note(self, event: dict[str, Any]) -> None:
        if event["event"] == "phase":
            self.phase = str(event.get("name", ""))
        elif event["event"] in ("done", "ended", "error"):
            self.last = event
        if isinstance(event.get("step"), int):
            self.step = event["step"]
        if isinstance(event.get("framework_bytes"), int):
            self.framework_bytes = event["framework_bytes"]
            self.framework_peak_bytes = max(
                self.framework_peak_bytes, self.framework_bytes, int(event.get("framework_peak_bytes") or 0)
            )


class _Stop:
    """Remembers SIGINT and SIGTERM while a child runs, and puts the old handlers back."""

    def __init__(self) -> None:
        self.name = ""
        self._old: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._old[number] = signal.signal(number, self._remember)
            except ValueError:  # not the main thread: whoever owns it handles signals
                break
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: object) -> None:
        self.name = signal.Signals(number).name


def run_job(
    target: str,
    fields: dict[str, Any],
    around: Surroundings,
    on_event: Callable[[dict[str, Any]], None],
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> Ending:
    """Run one job to its end.

    Args:
        target: `module:function:JobClass`.
        fields: the job's fields, JSON types.
        on_event: called with each event, in order.
        on_sample: called with each memory sample.
    """
    job_file = around.folder / f"job-{time.monotonic_ns()}.json"
    job_file.write_text(json.dumps(fields), encoding="utf-8")
    home = around.folder / "cwd"
    home.mkdir(exist_ok=True)
    reader, writer = os.pipe()
    started = time.monotonic()
    with around.log.open("ab") as log, _Stop() as stop:
        child = subprocess.Popen(
            around.command(target, str(job_file), writer),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home,
            env=child_environment(around.environment, around.backend),
            pass_fds=(writer,),
            start_new_session=True,
            umask=0o077,
        )
        os.close(writer)
        try:
            watch, samples, breach, peak, broken = _listen(child, reader, around.limits, stop, on_event, on_sample)
        finally:
            _end_group(child)
            os.close(reader)
    seconds = time.monotonic() - started
    problem = None if breach or stop.name else _problem(child.returncode, watch, around.log)
    completed = problem is None and breach is None and not stop.name
    return Ending(
        watch.last.get("result") if completed else None,
        problem,
        breach,
        stop.name,
        child.returncode,
        tuple(samples),
        max([peak, *(sample.process_bytes for sample in samples)]),
        watch.framework_peak_bytes,
        seconds,
        broken,
    )


def _listen(
    child: subprocess.Popen[bytes],
    reader: int,
    limits: LimitsSection,
    stop: _Stop,
    on_event: Callable[[dict[str, Any]], None],
    on_sample: Callable[[Sample], None],
) -> tuple[_Watch, list[Sample], Breach | None, int, int]:
    """Until the child is gone, a limit fires or the parent is told to stop."""
    watch, parser, sampler = _Watch(), EventParser(), Sampler(child.pid)
    samples: list[Sample] = []
    peak = 0
    os.set_blocking(reader, False)
    selector = selectors.DefaultSelector()
    selector.register(reader, selectors.EVENT_READ)
    next_sample = time.monotonic()
    try:
        while True:
            gone = child.poll() is not None
            for event in parser.feed(
                _read_all(selector, reader, 0 if gone else max(0.0, next_sample - time.monotonic()))
            ):
                watch.note(event)
                on_event(event)
            if gone:
                return watch, samples, None, peak, parser.broken
            if stop.name:
                return watch, samples, None, peak, parser.broken
            if time.monotonic() >= next_sample:
                next_sample = time.monotonic() + _SAMPLE_SECONDS
                sample = sampler.look(watch.framework_bytes)
                peak = max(peak, sampler.peak_bytes())
                samples.append(sample)
                on_sample(sample)
                breach = first_breach(limits, sample, watch.framework_peak_bytes, watch.phase, watch.step)
                if breach:
                    return watch, samples, breach, peak, parser.broken
    finally:
        selector.close()


def _read_all(selector: selectors.BaseSelector, reader: int, timeout: float) -> bytes:
    """Everything that is on the pipe now, waiting up to `timeout` seconds for the first byte."""
    if not selector.get_map():  # the child closed its end, and may still be at work
        time.sleep(timeout)
        return b""
    if not selector.select(timeout):
        return b""
    pieces = []
    while True:
        try:
            piece = os.read(reader, 1 << 16)
        except BlockingIOError:
            break
        if not piece:
            selector.unregister(reader)  # a closed pipe is always ready: the loop would spin
            break
        pieces.append(piece)
    return b"".join(pieces)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL, to everything the child started."""
    for number, grace in ((signal.SIGTERM, _TERM_GRACE_SECONDS), (signal.SIGKILL, _TERM_GRACE_SECONDS)):
        try:
            os.killpg(child.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        if child.poll() is None:
            try:
                child.wait(grace)
            except subprocess.TimeoutExpired:
                continue
    child.wait()


def _problem(exit_code: int, watch: _Watch, log: Path) -> RunEnded | None:
    """The refusal or failure that an ended child means; None when it completed."""
    last = watch.last
    place = f"{watch.phase}, after step {watch.step}"
    if last.get("event") == "ended":
        kind: type[RunEnded] = Refusal if last.get("kind") == "refused" else Failure
        return kind.from_dict(last)
    if last.get("event") == "error":
        return Failure(
            "exception",
            f"{last.get('type')} {last.get('message', '')}".strip(),
            place,
            f"see {log.name}, in the run's artifacts under logs/",
        )
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        if name in ("SIGTERM", "SIGINT"):
            return Stopped(
                name, f"somebody stopped the training process with {name}", place, "repeat the run, or resume it"
            )
        hint = {
            "SIGKILL": "somebody or the kernel's out-of-memory killer ended it; see dmesg, and lower train.max_seq_length",
            "SIGSEGV": "under a memory limit this is often out of memory; lower train.max_seq_length",
            "SIGABRT": "a library gave up; see logs/worker.log",
        }.get(name, "see logs/worker.log")
        return Failure(f"killed_{name}", f"the training process was ended by {name}", place, hint)
    if exit_code != 0:
        return Failure(
            f"exit_{exit_code}", f"the training process exited with status {exit_code}", place, "see logs/worker.log"
        )
    if last.get("event") != "done":
        return Failure("no_result", "the training process ended without a result", place, "see logs/worker.log")
    return None
