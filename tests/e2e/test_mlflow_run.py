"""The product as its users start it: a real `mlflow run`, in a folder of its own, on a tiny real model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from tests.tiny_models import tiny_base, varied_folder

ROOT = Path(__file__).parents[2]

both = pytest.mark.parametrize("backend", ("hf", "mlx"))


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "GIT_PYTHON_REFRESH": "quiet",
    }


def command(project: Path, **params: object) -> list[str]:
    words = ["mlflow", "run", str(project), "--env-manager", "local"]
    for name, value in params.items():
        words += ["-P", f"{name.replace('__', '.')}={value}"]
    return words


def mlflow_run(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=cwd, env=environment(), capture_output=True, text=True, check=False, timeout=300)


def client_of(folder: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{folder}/mlflow.db")


def only_run(folder: Path) -> Run:
    runs = client_of(folder).search_runs(["0"])
    assert len(runs) == 1  # M12: one run, not one of ours beside that of `mlflow run`
    return runs[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder whose name holds a space, with base, data and recipe."""
    folder = tmp_path / "my project"
    tiny_base(folder / "base")
    varied_folder(folder / "data")
    (folder / "recipe.yaml").write_text(
        "base: {model: base}\ndata: {path: data}\nlora: {rank: 4}\n"
        "train: {batch_size: 2, gradient_accumulation: 2, max_steps: 6}\nlimits: {system_available_pct: 1}\n",
        encoding="utf-8",
    )
    return folder


@both
def test_mlflow_run_trains_and_the_ui_shows_the_run(backend: str, folder: Path) -> None:
    recipe = folder / "recipe.yaml"
    words = command(ROOT, recipe=recipe, backend=backend, seed=11, lora__rank=2, train__learning_rate="1e-2")
    done = mlflow_run(folder, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "completed: run" in done.stderr
    run = only_run(folder)
    assert run.info.status == "FINISHED"
    assert (run.data.tags["lemon.outcome"], run.data.tags["lemon.backend"]) == ("completed", backend)
    # M03, M04: what `mlflow run` stored is quoted text; the recipe's own names hold the value.
    assert run.data.params["recipe"] == f"'{recipe}'"
    assert run.data.params["lora.rank"] == "2"
    assert run.data.params["train.learning_rate"] == "1e-2"
    assert run.data.params["lemon.train.learning_rate"] == "0.01"
    assert run.data.params["train.seed"] == "11"
    history = client_of(folder).get_metric_history(run.info.run_id, "valid/loss")
    assert history[-1].value < history[0].value
    with ui(folder) as address:
        page = urllib.request.urlopen(f"{address}/", timeout=10).read().decode()
        assert "<title>MLflow</title>" in page
        request = urllib.request.Request(
            f"{address}/ajax-api/2.0/mlflow/runs/search",
            json.dumps({"experiment_ids": ["0"]}).encode(),
            {"Content-Type": "application/json"},
        )
        shown = json.loads(urllib.request.urlopen(request, timeout=10).read())["runs"]
        assert [item["info"]["run_id"] for item in shown] == [run.info.run_id]
        url = f"{address}/get-artifact?path=report.html&run_uuid={run.info.run_id}"
        assert "What this run does not show" in urllib.request.urlopen(url, timeout=10).read().decode()


class ui:
    """`mlflow ui` in a folder, on a free port of this machine."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder

    def __enter__(self) -> str:
        self.process = subprocess.Popen(
            ["mlflow", "ui", "--port", str(self.port), "--workers", "1"],
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        address = f"http://127.0.0.1:{self.port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2)
                return address
            except OSError:
                assert time.monotonic() < deadline, "mlflow ui did not start"
                time.sleep(0.3)

    def __exit__(self, *error: object) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.mark.parametrize(
    ("extra", "code", "said"),
    [
        ({"lora__rnk": 3}, "unknown_recipe_key", "did you mean lora.rank?"),
        ({"train__max_steps": "abc"}, "bad_recipe_value", "train.max_steps"),  # M08
        ({"seed": "x y"}, "bad_recipe_value", "train.seed"),
    ],
)
def test_a_mistake_in_a_parameter_ends_the_run_failed(
    folder: Path, extra: dict[str, object], code: str, said: str
) -> None:
    done = mlflow_run(folder, *command(ROOT, recipe=folder / "recipe.yaml", **extra))
    assert done.returncode != 0
    run = only_run(folder)
    assert (run.info.status, run.data.tags["lemon.outcome"]) == ("FAILED", f"refused:{code}")
    refused = [line for line in done.stderr.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 1 and said in refused[0]


def test_a_parameter_name_cannot_run_a_command(folder: Path) -> None:
    # M07. MLflow itself refuses the name, before our entry point is started; it leaves its run RUNNING, and nothing of ours
    # is there to end it.
    done = mlflow_run(folder, *command(ROOT, recipe=folder / "recipe.yaml"), "-P", "foo;touch x=1")
    assert done.returncode != 0
    assert "Names may only contain" in done.stderr
    assert not (folder / "x").exists() and not (ROOT / "x").exists()


@pytest.mark.parametrize("name", ["triage", "mac_pilot"])
def test_each_project_folder_is_an_mlflow_project_of_its_own(name: str, tmp_path: Path) -> None:
    # Refused at the data, after its own recipe was found and its rows were read: no base is needed for that.
    done = mlflow_run(tmp_path, *command(ROOT / "projects" / name, backend="mlx", data__min_train_rows=100000))
    assert done.returncode != 0
    assert only_run(tmp_path).data.tags["lemon.outcome"] == "refused:too_few_rows", done.stderr[-2000:]


@pytest.mark.parametrize("name", ["planned.yaml", "pilot.yaml"])
def test_a_base_that_cannot_be_had_is_refused(name: str, tmp_path: Path) -> None:
    words = command(ROOT / "projects" / "mac_pilot", recipe=name, base__model="nobody/nothing-here")
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**environment(), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode != 0
    assert only_run(tmp_path).data.tags["lemon.outcome"] == "refused:base_unavailable", done.stderr[-2000:]


@pytest.mark.parametrize(
    ("find", "number", "outcome"),
    [
        ("child", signal.SIGKILL, "failed:killed_SIGKILL"),
        ("child", signal.SIGTERM, "stopped:SIGTERM"),
        ("parent", signal.SIGTERM, "stopped:SIGTERM"),
        ("parent", signal.SIGINT, "stopped:SIGINT"),
    ],
)
def test_a_killed_run_says_what_killed_it(
    folder: Path, find: str, number: signal.Signals, outcome: str
) -> (
    None
):  # Y06, Y07. We set KILLED for a stopped run; `mlflow run` (3.17) then writes FAILED over every status but success.
    words = command(ROOT, recipe=folder / "recipe.yaml", backend="mlx", train__max_steps=100000, train__epochs=100000)
    process = subprocess.Popen(words, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)
    parent = _wait_for(process.pid, lambda line: line[1:4] == ["-m", "lemon_mlflow", "train"])
    child = _wait_for(process.pid, lambda line: any("TrainJob" in word for word in line))
    _wait_until_it_trains(folder)
    (child if find == "child" else parent).send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0
    run = only_run(folder)
    assert (run.info.status, run.data.tags["lemon.outcome"]) == ("FAILED", outcome)
    assert run.info.end_time is not None
    assert "Traceback" not in error
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert run.data.metrics["train/loss"] > 0


def test_a_killed_parent_takes_its_child_along(folder: Path) -> None:  # Y09
    words = [
        "lemon",
        "train",
        "--recipe",
        "recipe.yaml",
        "--backend",
        "mlx",
        "--train.max_steps",
        "100000",
        "--train.epochs",
        "100000",
    ]
    process = subprocess.Popen(
        words, cwd=folder, env={**environment(), "TMPDIR": str(folder)}, stderr=subprocess.DEVNULL
    )
    child = _wait_for(process.pid, lambda line: any("TrainJob" in word for word in line))
    _wait_until_it_trains(folder)
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs([child], timeout=5)
    assert gone and not alive


def _wait_for(pid: int, wanted: Callable[[list[str]], bool]) -> psutil.Process:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        for process in psutil.Process(pid).children(recursive=True):
            try:
                if wanted(process.cmdline()):
                    return process
            except psutil.Error:
                continue
        time.sleep(0.1)
    raise AssertionError("the process did not appear")


def _wait_until_it_trains(folder: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        runs = client_of(folder).search_runs(["0"])
        if runs and "train/loss" in runs[0].data.metrics:
            return
        time.sleep(0.3)
    raise AssertionError("no training loss arrived")
