"""`lemon train`, and the entry points `main` and `train`: one supervised training run, recorded in MLflow.

    exit_status = train("projects/triage/recipe.yaml", {"lora.rank": "4"})

The parent process does what is here and imports no framework; each heavy piece of work is a child process. Whatever happens,
the MLflow run ends: FINISHED only when the adapter was saved and a fresh process got the same logits from it, else FAILED or
KILLED with `lemon.outcome` naming the cause.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException

from ..backends.interface import choose_backend
from ..base.resolve import Base
from ..config import LoadedRecipe, flatten, load_recipe, to_yaml
from ..data.prepare import PrepareJob
from ..data.read import DataFolder, read_folder
from ..errors import Failure, Refusal, RunEnded, Stopped
from ..provenance import environment
from ..provenance.hashes import all_files, manifest_of
from ..provenance.licence import declared_licence
from ..supervise.sandbox import mlx_blas, worker_command
from ..supervise.supervisor import Ending, Surroundings, run_job
from ..tracking.run import RunLog
from .bases import load_spec, ready_base
from .progress import ProgressView
from .record import Record, log_environment
from .resume import fetch_checkpoint

WorkerCommand = Callable[[str, str, int], list[str]]


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


class TrainRun:
    """The steps of one run, in order; each leaves what the next needs in an attribute."""

    def __init__(
        self, loaded: LoadedRecipe, record: Record, view: ProgressView, scratch: Path, command: WorkerCommand
    ) -> None:
        self.loaded = loaded
        self.recipe = loaded.recipe
        self.record = record
        self.log = record.log
        self.view = view
        self.scratch = scratch
        self.out = scratch / "out"
        self.out.mkdir()
        self._command = command
        self._adapter_stored = False

    def go(self) -> None:
        """All of it.

        Raises:
            RunEnded: whatever ended the run.
        """
        self.log.params(flatten(self.recipe))
        self.log.text(to_yaml(self.recipe), "recipe.yaml")
        _refuse_many_processes()
        found_gpus, _ = environment.gpus()
        backend = choose_backend(self.recipe, has_cuda=bool(found_gpus))
        self.record.backend = backend
        self.log.tags(backend=backend)
        data = self._read_data()
        log_environment(self.record, self._project(), {"mlx_blas": mlx_blas(os.environ) if backend == "mlx" else ""})
        base = ready_base(self.loaded, backend, self.job, self.view)
        self._log_base(base)
        self._prepare(data, base)
        checkpoint = self._checkpoint()
        spec = asdict(load_spec(self.loaded, base, backend))
        self._train(backend, spec, checkpoint)
        self._reload(backend, spec)
        self._store_adapter()
        self.log.drain()

    def job(self, target: str, fields: dict[str, Any], backend: str = "", training: bool = False) -> Ending:
        """Run a job in a child process, under the recipe's limits.

        Raises:
            RunEnded: what ended it, when it did not complete.
        """
        around = Surroundings(
            self.scratch, self.scratch / "worker.log", self.recipe.limits, os.environ, backend, self._command
        )

        def on_event(event: dict[str, Any]) -> None:
            self.view.event(event)
            if training:
                self.record.event(event)

        self.record.train_began = time.monotonic() if training else self.record.train_began
        ending = run_job(target, fields, around, on_event, self.record.sample if training else lambda sample: None)
        if training:
            last = ending.result or {}
            peak = max(last.get("framework_peak_bytes", 0), ending.framework_peak_bytes)
            self.record.final_memory(ending, peak, last.get("framework_reserved_peak_bytes", 0))
        if ending.breach:
            self.record.breach = ending.breach
            breach = ending.breach
            raise Stopped(
                breach.limit,
                f"measured {breach.measured:.3f}, the limit is {breach.allowed:g}",
                f"{breach.phase}, after step {breach.step}",
                breach.remedy,
            )
        if ending.stopped_by:
            raise Stopped(
                ending.stopped_by,
                "the run was told to stop",
                self.record.marks[-1][1] if self.record.marks else "",
                "repeat it, or go on with train.resume if it kept a checkpoint",
            )
        if ending.problem:
            raise ending.problem
        return ending

    def _project(self) -> Path:
        return self.loaded.path.parent if self.loaded.path else self.loaded.cwd

    def _read_data(self) -> DataFolder:
        path = Path(self.recipe.data.path).expanduser()
        folder = path if path.is_absolute() else self.loaded.folder_for("data.path") / path
        data = read_folder(folder, self.recipe.data)
        manifest = manifest_of(folder, data.files.values(), subject="data")
        self.record.hash("data", manifest, "the three files")
        content = data.content_sha256()
        self.record.hashes.append(("data content", content, "rows, whatever their order and ids"))
        self.log.tags(data__content_sha256=content, data__licence_declared=declared_licence(folder) or "none declared")
        return data

    def _log_base(self, base: Base) -> None:
        self.record.base_name = base.location.name
        self.record.hash("base", base.manifest, base.location.name)
        self.record.hashes.append(("tokenizer", base.tokenizer_sha256, "part of the base"))
        self.log.tags(
            tokenizer__sha256=base.tokenizer_sha256,
            base__source=base.location.source,
            base__licence_declared=base.licence or "none declared",
        )
        if base.converted_from:
            self.log.tags(base__converted_from=base.converted_from)
        if base.location.commit:
            self.log.tags(base__commit=base.location.commit)

    def _prepare(self, data: DataFolder, base: Base) -> None:
        job = PrepareJob(
            str(data.path.resolve()),
            self.recipe.data.model_dump(mode="json"),
            str(base.folder),
            self.recipe.train.max_seq_length,
            str(self.out),
        )
        result = self.job("lemon_mlflow.data.prepare:prepare:PrepareJob", asdict(job)).result
        assert result is not None
        self.record.data = result
        self.record.removed = [*_json_lines(self.out / "removed.jsonl")]
        self.log.json(result, "data/report.json")
        self.log.artifact(self.out / "removed.jsonl", "data")
        self.log.tags(data__trainable_tokens=str(result["splits"]["train"]["tokens_trainable"]))

    def _checkpoint(self) -> str:
        if not self.recipe.train.resume:
            return ""
        tags = self.log.client.get_run(self.log.run_id).data.tags
        same = {name: tags[name] for name in ("lemon.data.sha256", "lemon.base.sha256", "lemon.backend")}
        folder = self.scratch / "resumed"
        folder.mkdir()
        found = fetch_checkpoint(self.log.client, self.recipe, same, folder)
        self.log.tags(resumed_from=self.recipe.train.resume)
        return str(found)

    def _train(self, backend: str, spec: dict[str, Any], checkpoint: str) -> None:
        lora = self.recipe.lora
        targets = () if lora.target_modules == "all-linear" else lora.target_modules
        fields = {
            "backend": backend,
            "base": spec,
            "train": self.recipe.train.model_dump(mode="json"),
            "lora": {
                "rank": lora.rank,
                "alpha": lora.alpha,
                "dropout": lora.dropout,
                "layers": lora.layers,
                "target_modules": targets,
            },
            "tokens": str(self.out / "tokens.npz"),
            "out": str(self.out),
            "resume_from": checkpoint,
        }
        ending = self.job("lemon_mlflow.train.loop:train:TrainJob", fields, backend, training=True)
        assert ending.result is not None
        self.train_result = ending.result
        if not (self.out / "adapter").is_dir():
            raise Failure("no_adapter", "training ended without an adapter", "save", "see logs/worker.log")

    def _reload(self, backend: str, spec: dict[str, Any]) -> None:
        fields = {
            "backend": backend,
            "base": spec,
            "adapter": str(self.out / "adapter"),
            "tokens": str(self.out / "tokens.npz"),
            "probes": str(self.out / "probes.npz"),
        }
        ending = self.job("lemon_mlflow.evaluate.reload:reload:ReloadJob", fields, backend)
        self.record.reload = ending.result
        self.log.json(ending.result, "adapter_reload.json")

    def _store_adapter(self) -> None:
        self.view.phase("artifacts")
        folder = self.out / "adapter"
        manifest = manifest_of(folder, all_files(folder), subject="adapter")
        self.log.artifacts(folder, "adapter")
        self._adapter_stored = True
        self.record.hash("adapter", manifest, "adapter/")
        self.record.metric("adapter/size_mb", sum(file.size_bytes for file in manifest.files) / 1e6)
        self.record.final_speed(self.train_result)

    def keep_what_is_there(self) -> bool:
        """After an end that is not completion: the last checkpoint and a partial adapter go to the artifacts."""
        try:
            for folder in sorted(self.out.glob("checkpoint-0*"))[-1:]:
                self.log.artifacts(folder, f"checkpoint/{folder.name}")
            if (self.out / "adapter").is_dir() and not self._adapter_stored:
                self.log.artifacts(self.out / "adapter", "partial/adapter")
            return True
        except (MlflowException, OSError):
            return False


def _refuse_many_processes() -> None:
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise Refusal(
            "distributed_not_supported",
            "this run was started as one of several processes",
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}",
            "start it once, without torchrun or mlx.launch",
        )


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


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    import json

    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)
