"""What reaches MLflow: one truth per param, finite metrics, nothing cut in silence. A real sqlite store."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlflow
import pytest
from mlflow.tracking import MlflowClient

from lemon_mlflow.errors import Failure, Refusal
from lemon_mlflow.tracking.run import RunLog, refuse_file_store


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLog:
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    return RunLog.open("tests", "one")


def stored(log: RunLog) -> dict[str, str]:
    return dict(MlflowClient().get_run(log.run_id).data.params)


def test_params_have_one_spelling_and_may_be_logged_twice(log: RunLog) -> None:  # M05
    log.params({"a": 7.0, "b": None, "c": ("x", "y"), "d": True})
    log.params({"a": 7, "b": None, "c": ["x", "y"], "d": True})
    assert stored(log) == {"a": "7", "b": "none", "c": "x,y", "d": "true"}


def test_a_param_stored_by_mlflow_run_is_left_and_its_true_value_gets_a_name_of_its_own(
    log: RunLog,
) -> None:  # M03, M04
    log.client.log_param(log.run_id, "data.path", "'a b'")
    log.client.log_param(log.run_id, "lora.rank", "4")
    log.params({"data.path": "a b", "lora.rank": 4})
    log.params({"data.path": "a b", "lora.rank": 4})
    assert stored(log) == {"data.path": "'a b'", "lemon.data.path": "a b", "lora.rank": "4"}


def test_a_long_param_is_kept_whole_in_a_file_and_told_apart_by_hash(log: RunLog) -> None:  # M01, M02
    first, second = "x" * 6000 + "a", "x" * 6000 + "b"
    log.params({"data.instruction": first, "short": "y" * 6000})
    params = stored(log)
    assert params["short"] == "y" * 6000
    assert params["data.instruction"].startswith("sha256:") and params["data.instruction"].endswith("(see params.json)")
    other = RunLog.open("tests", "two")
    other.params({"data.instruction": second})
    assert stored(other)["data.instruction"] != params["data.instruction"]
    path = Path(MlflowClient().download_artifacts(log.run_id, "params.json"))
    assert json.loads(path.read_text()) == {"data.instruction": first}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_no_metric(log: RunLog, value: float) -> None:  # M09
    with pytest.raises(ValueError, match="train/loss is"):
        log.metric("train/loss", value, 1)
    log.drain()
    assert MlflowClient().get_run(log.run_id).data.metrics == {}


def test_metrics_arrive_once_and_in_order_however_many(log: RunLog) -> None:
    for step in range(3000):
        log.metric("train/loss", step / 2, step)
    log.drain()
    history = MlflowClient().get_metric_history(log.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(step, step / 2) for step in range(3000)]


def test_metrics_that_cannot_be_delivered_are_a_failure(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*args: object, **fields: object) -> None:
        raise OSError("server is down")

    monkeypatch.setattr(log.client, "log_batch", down)
    log.metric("train/loss", 1.0, 1)
    with pytest.raises(Failure) as caught:
        log.drain()
    assert caught.value.code == "tracking_unavailable"


def test_the_run_of_mlflow_run_is_taken_over(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:  # M12
    monkeypatch.setenv("MLFLOW_RUN_ID", log.run_id)
    assert RunLog.open("elsewhere", None).run_id == log.run_id
    assert [e.name for e in MlflowClient().search_experiments()] == ["tests", "Default"]


@pytest.mark.parametrize("uri", ["file:./mlruns", "file:///tmp/mlruns", "./mlruns", "mlruns"])
def test_the_file_store_is_refused_with_its_remedy(uri: str) -> None:  # M14
    with pytest.raises(Refusal) as caught:
        refuse_file_store(uri)
    assert caught.value.code == "tracking_uri_unsupported" and "sqlite:///mlflow.db" in caught.value.remedy


def test_finishing_sets_status_and_outcome(log: RunLog) -> None:
    log.finish("KILLED", "stopped:minutes")
    run = MlflowClient().get_run(log.run_id)
    assert (run.info.status, run.data.tags["lemon.outcome"]) == ("KILLED", "stopped:minutes")
    assert run.info.end_time is not None
