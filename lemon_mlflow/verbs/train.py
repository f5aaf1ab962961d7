"""`lemon train`, and the entry points `main` and `train`: one supervised training run, recorded in MLflow.

    exit_status = train("projects/triage/recipe.yaml", {"lora.rank": "4"})

The steps are in `steps`; here is how they end. Whatever happens, the MLflow run ends: FINISHED only when the adapter was
saved and a fresh process got the same logits from it, else FAILED or KILLED with `lemon.outcome` naming the cause.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException

from ..config import LoadedRecipe, load_recipe
from ..errors import Failure, Refusal, RunEnded, Stopped
from ..supervise.sandbox import worker_command
from ..tracking.run import RunLog
from .progress import ProgressView
from .record import Record
from .steps import TrainRun, WorkerCommand


def train(
    recipe: str | None,
    overrides: Mapping[str, Any],
    problem: RunEnded | None = None,
    command: WorkerCommand = worker_command,
) -> int:
    """Run it; returns the exit status (0 completed, 1 failed, 2 refused, 3 stopped by a limit, 130 and 143 by a signal).

    Args:
        recipe: path of a recipe, None for the defaults.
        overrides: dotted recipe keys from the command line.
        problem: a refusal that the command line itself earned; the run is recorded as refused.
        command: how workers are started.
    """
    view = ProgressView()
    loaded: LoadedRecipe | None = None
    if problem is None:
        try:
            loaded = load_recipe(recipe, overrides)
        except Refusal as refusal:
            problem = refusal
    track = loaded.recipe.track if loaded else None
    try:
        log = RunLog.open(track.experiment if track else None, track.run_name if track else None)
    except RunEnded as unavailable:
        return _tell(problem or unavailable)
    record = Record(log, _title(log, recipe))
    scratch = Path(tempfile.mkdtemp(prefix="lemon-"))
    with view:
        ended, kept = _attempt(loaded, problem, record, view, scratch, command)
    with _signals(signal.SIG_IGN):
        stored = _finish(record, loaded, scratch, ended)
    if ended is None and not stored:
        ended = _not_stored()
    if kept and stored:
        shutil.rmtree(scratch, ignore_errors=True)
    else:
        view.say(f"MLflow did not take everything; the adapter and the log are kept in {scratch}")
    if ended is not None:
        return _tell(ended, log.run_id)
    _summary(view, record)
    return 0


def _attempt(
    loaded: LoadedRecipe | None,
    problem: RunEnded | None,
    record: Record,
    view: ProgressView,
    scratch: Path,
    command: WorkerCommand,
) -> tuple[RunEnded | None, bool]:
    """What ended the run (None: it completed), and whether MLflow has what there is of it."""
    if problem is not None or loaded is None:
        return problem, True
    run = TrainRun(loaded, record, view, scratch, command)
    ended: RunEnded
    try:
        with _signals(_raise_stopped):
            run.go()
        return None, True
    except RunEnded as error:
        ended = error
    except Exception as error:
        ended = _internal(error, scratch)
    with _signals(signal.SIG_IGN):
        return ended, run.keep_what_is_there()


def _raise_stopped(number: int, frame: object) -> None:
    raise Stopped(signal.Signals(number).name, "the run was told to stop", "", "repeat it")


@contextmanager
def _signals(handler: Callable[[int, Any], None] | signal.Handlers) -> Iterator[None]:
    """SIGINT and SIGTERM are handled so inside; while a child runs the supervisor handles them."""
    old = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            old[number] = signal.signal(number, handler)
        except ValueError:  # not the main thread
            break
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


def _finish(record: Record, loaded: LoadedRecipe | None, scratch: Path, ended: RunEnded | None) -> bool:
    """Write the last artifacts and end the run; False when MLflow took not all of it."""
    complete = True
    outcome, problem = (ended.outcome, str(ended)) if ended else ("completed", "")
    try:
        record.log.drain()
        if (scratch / "worker.log").is_file():
            record.log.artifact(scratch / "worker.log", "logs")
        if record.breach:
            record.log.json(record.breach.to_json(), "guard/breach.json")
        record.write_files(scratch, loaded, outcome, problem)
    except (MlflowException, RunEnded, OSError):
        complete = False
        if ended is None:
            ended = _not_stored()
            outcome, problem = ended.outcome, str(ended)
    try:
        if problem:
            record.log.tags(problem=problem[:4000])
        record.log.note(_note(record, outcome, problem))
        status = "FINISHED" if ended is None else "KILLED" if isinstance(ended, Stopped) else "FAILED"
        record.log.finish(status, outcome)
    except (MlflowException, OSError):
        complete = False
    return complete


def _not_stored() -> Failure:
    return Failure(
        "tracking_unavailable",
        "the run was done, but MLflow did not take its last artifacts",
        mlflow.get_tracking_uri(),
        "start the server again or free its disk, then repeat the run; the adapter is kept on this machine",
    )


def _note(record: Record, outcome: str, problem: str) -> str:
    lines = [f"**{outcome}**" + (f": {problem}" if problem else "")]
    if len(record.valid_points) > 1:
        lines.append(f"{_validation_words(record)} {_CAVEAT}")
    lines.append("Open the artifact `report.html` for the picture and for what this run does not show.")
    return "\n\n".join(lines)


_CAVEAT = "A lower loss is not evidence that the adapter helps: it was not evaluated on the holdout."


def _validation_words(record: Record) -> str:
    (first_step, _, first), (step, _, last) = record.valid_points[0], record.valid_points[-1]
    rows = record.data["splits"]["valid"]["rows_kept"]
    return f"Validation loss {first:.4f} after step {first_step}, {last:.4f} after step {step}, on {rows} rows."


def _summary(view: ProgressView, record: Record) -> None:
    adapter = next(sha for what, sha, _ in record.hashes if what == "adapter")
    uri = mlflow.get_tracking_uri()
    how = f"mlflow ui --backend-store-uri {uri}" if uri.startswith("sqlite") else f"open {uri}"
    experiment = record.log.client.get_run(record.log.run_id).info.experiment_id
    metrics = record.metrics
    view.say(f"completed: run {record.log.run_id} on {record.backend}, base {record.base_name}")
    view.say(f"  {_validation_words(record)}")
    view.say(f"  {_CAVEAT}")
    view.say(f"  adapter         {metrics['adapter/size_mb']:.1f} MB, sha256 {adapter}, reloaded in a fresh process")
    view.say(
        f"  memory          process peak {metrics['memory/process_peak_gb']:.2f} GB, system available at least "
        f"{metrics.get('memory/system_available_min_pct', 0):.0f} %"
    )
    view.say(
        f"  time            {metrics['speed/train_seconds']:.0f} s of training steps, "
        f"{metrics['speed/overhead_seconds']:.0f} s around them"
    )
    view.say(
        f"  see it          {how}   then http://127.0.0.1:5000/#/experiments/{experiment}/runs/{record.log.run_id}"
    )


def _tell(ended: RunEnded, run_id: str = "") -> int:
    print(f"{ended.outcome_kind}: {ended}", file=sys.stderr)
    for line in ended.details:
        print(f"  {line}", file=sys.stderr)
    if run_id:
        print(f"  recorded as run {run_id}, {ended.outcome}", file=sys.stderr)
    signals = {"SIGINT": 130, "SIGTERM": 143}
    return signals.get(ended.code, ended.exit_status)


def _internal(error: Exception, scratch: Path) -> Failure:
    """An error of ours: one line for the user, the whole story in the log artifact."""
    with (scratch / "worker.log").open("a", encoding="utf-8") as log:
        traceback.print_exception(error, file=log)
    if isinstance(error, MlflowException):
        return Failure(
            "tracking_unavailable",
            f"MLflow refused or could not be reached: {str(error)[:200]}",
            mlflow.get_tracking_uri(),
            "start the server again, then repeat the run",
        )
    if isinstance(error, OSError):
        return Failure(
            "io_error",
            f"a file could not be written or read: {error.strerror or type(error).__name__}",
            str(error.filename or ""),
            "free disk space or correct the permissions, then repeat the run",
        )
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Failure(
        "internal_error",
        type(error).__name__,
        f"{Path(frame.filename).name}:{frame.lineno}",
        "this is a fault of lemon-mlflow; please report it with logs/worker.log",
    )


def _title(log: RunLog, recipe: str | None) -> str:
    name = log.client.get_run(log.run_id).info.run_name or log.run_id
    return f"{name} ({recipe or 'default recipe'})"
