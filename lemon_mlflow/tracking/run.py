"""One MLflow run, as this package writes it. Only the parent process uses it.

    log = RunLog.open(experiment="triage", run_name=None)
    log.metric("train/loss", 1.25, step=3)          # queued; a thread delivers in batches
    log.finish("FINISHED", "completed")

Under `mlflow run` the run exists already and is taken over (MLFLOW_RUN_ID); else one is made. `mlflow run` has stored the
declared parameters as shell-quoted text under their own names; those are never written again, and a recipe key whose stored
text says something else gets a second param `lemon.<key>` with the true value.

Not covered: when the tracking server cannot be reached, what was not delivered is lost with the run; the adapter is kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from ..config import canonical_text
from ..errors import Failure, Refusal

_LONGEST_PARAM = 6000
_BATCH = 900
# Each delivery takes a core for some 12 ms, and training on a CPU wants all of them.
_DELIVER_SECONDS = 5.0


class RunLog:
    """Writes to one run. Metrics are queued; everything else is sent at once."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        self._queue: queue.Queue[Metric | None] = queue.Queue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._deliver, name="mlflow-metrics", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, experiment: str | None, run_name: str | None) -> RunLog:
        """Take over the run of `mlflow run`, or start one.

        Raises:
            Refusal: `tracking_uri_unsupported`.
            Failure: `tracking_unavailable`.
        """
        refuse_file_store(mlflow.get_tracking_uri())
        try:
            client = MlflowClient()
            run_id = os.environ.get("MLFLOW_RUN_ID")
            if run_id:
                client.get_run(run_id)
                if run_name:
                    client.set_tag(run_id, "mlflow.runName", run_name)
                return cls(client, run_id)
            run = client.create_run(_experiment_id(client, experiment), run_name=run_name, tags=_source_tags())
            return cls(client, run.info.run_id)
        except MlflowException as error:
            raise Failure(
                "tracking_unavailable",
                f"MLflow cannot be reached: {str(error)[:200]}",
                mlflow.get_tracking_uri(),
                "start the server, or set MLFLOW_TRACKING_URI=sqlite:///mlflow.db",
            ) from None

    def params(self, values: Mapping[str, Any]) -> None:
        """Log params once each, in one spelling; over-long values by hash, with the whole text in params.json."""
        stored = dict(self.client.get_run(self.run_id).data.params)
        whole: dict[str, str] = {}
        new: dict[str, str] = {}
        for key, value in values.items():
            text = canonical_text(value)
            if len(text) > _LONGEST_PARAM:
                whole[key] = text
                text = f"sha256:{hashlib.sha256(text.encode('utf-8')).hexdigest()} (see params.json)"
            if key not in stored:
                new[key] = text
            elif stored[key] != text and stored.get(f"lemon.{key}") is None:
                new[f"lemon.{key}"] = text
        if whole:
            self.client.log_dict(self.run_id, whole, "params.json")
        items = [Param(key, text) for key, text in new.items()]
        for start in range(0, len(items), 100):
            self.client.log_batch(self.run_id, params=items[start : start + 100])

    def tags(self, **values: str) -> None:
        """Set tags `lemon.<name>`; `__` in a name stands for a dot."""
        tags = [RunTag(f"lemon.{name.replace('__', '.')}", value) for name, value in values.items()]
        self.client.log_batch(self.run_id, tags=tags)

    def note(self, markdown: str) -> None:
        """The run's description in the UI."""
        self.client.set_tag(self.run_id, "mlflow.note.content", markdown)

    def metric(self, name: str, value: float, step: int = 0) -> None:
        """Queue one value. A value that is not finite is no metric and raises ValueError."""
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
        self._queue.put(Metric(name, float(value), int(time.time() * 1000), step))

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Store one file, in `folder` of the run's artifacts."""
        self.client.log_artifact(self.run_id, str(path), folder)

    def artifacts(self, folder: Path, to: str) -> None:
        """Store a folder's files."""
        self.client.log_artifacts(self.run_id, str(folder), to)

    def text(self, text: str, name: str) -> None:
        """Store a text as an artifact file."""
        self.client.log_text(self.run_id, text, name)

    def json(self, value: Any, name: str) -> None:
        """Store JSON as an artifact file, sorted keys, so that equal values are equal bytes."""
        self.client.log_text(self.run_id, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", name)

    def drain(self) -> None:
        """Deliver all queued metrics.

        Raises:
            Failure: `tracking_unavailable`.
        """
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self._failure is not None:
            raise Failure(
                "tracking_unavailable",
                f"metrics could not be delivered: {str(self._failure)[:200]}",
                mlflow.get_tracking_uri(),
                "start the server again, then repeat the run",
            ) from None

    def finish(self, status: str, outcome: str) -> None:
        """End the run: tag `lemon.outcome`, status FINISHED, FAILED or KILLED."""
        self.client.set_tag(self.run_id, "lemon.outcome", outcome)
        self.client.set_terminated(self.run_id, status)

    def _deliver(self) -> None:
        done = False
        while not done:
            batch: list[Metric] = []
            deadline = time.monotonic() + _DELIVER_SECONDS
            while len(batch) < _BATCH and not done:
                try:
                    item = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    break
                if item is None:
                    done = True
                else:
                    batch.append(item)
            if batch:
                try:
                    self.client.log_batch(self.run_id, metrics=batch)
                except Exception as error:  # kept and raised by drain, in the thread that can act on it
                    self._failure = error


def refuse_file_store(uri: str) -> None:
    """Refuse the file store, which MLflow itself no longer takes, with the remedy.

    Raises:
        Refusal: `tracking_uri_unsupported`.
    """
    if uri.startswith("file:") or ("://" not in uri and uri.split(":")[0] not in ("databricks", "databricks-uc", "uc")):
        raise Refusal(
            "tracking_uri_unsupported",
            "MLflow 3.13 and newer keep no runs in plain files",
            f"MLFLOW_TRACKING_URI={uri}",
            "export MLFLOW_TRACKING_URI=sqlite:///mlflow.db, or give a server's http address",
        )


def _experiment_id(client: MlflowClient, name: str | None) -> str:
    if os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return os.environ["MLFLOW_EXPERIMENT_ID"]
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or name
    if not name:
        return "0"
    found = client.get_experiment_by_name(name)
    return found.experiment_id if found else client.create_experiment(name)


def _source_tags() -> dict[str, str]:
    return {"mlflow.source.name": "lemon", "mlflow.source.type": "LOCAL"}
