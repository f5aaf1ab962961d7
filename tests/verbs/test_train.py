"""One whole run through `train`, with real children and a real tracking store; and every way in which it can end."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import mlflow
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from lemon_mlflow.supervise.sandbox import worker_command
from lemon_mlflow.verbs.train import train
from tests.tiny import tiny_folder, write_jsonl
from tests.tiny_models import tiny_base, varied_folder

both = pytest.mark.parametrize("backend", ("hf", "mlx"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with base, data and recipe, and a tracking store of its own."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    tiny_base(tmp_path / "base")
    varied_folder(tmp_path / "data")
    (tmp_path / "recipe.yaml").write_text(
        "base: {model: base}\ndata: {path: data}\nlora: {rank: 4}\n"
        "train: {learning_rate: 1e-2, batch_size: 2, gradient_accumulation: 2, max_steps: 4}\n"
        "limits: {system_available_pct: 1}\ntrack: {experiment: tests}\n",
        encoding="utf-8",
    )
    return tmp_path


def only_run() -> Run:
    client = MlflowClient()
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert len(runs) == 1
    return runs[0]


def artifact_paths(run: Run, folder: str = "") -> set[str]:
    client = MlflowClient()
    found: set[str] = set()
    for item in client.list_artifacts(run.info.run_id, folder):
        found |= artifact_paths(run, item.path) if item.is_dir else {item.path}
    return found


def artifact_text(run: Run, path: str) -> str:
    return Path(MlflowClient().download_artifacts(run.info.run_id, path)).read_text(encoding="utf-8")


def faulty(fault: str) -> Callable[[str, str, int], list[str]]:
    """A worker in which `fault` happens in the third accumulation of the real backend."""

    def command(target: str, job: str, descriptor: int) -> list[str]:
        if ":train:" not in target:
            return worker_command(target, job, descriptor)
        body = textwrap.dedent("""
            import itertools, os, signal, sys
            import lemon_mlflow.train.loop as loop
            from lemon_mlflow.supervise.worker import main
            counter = itertools.count(1)
            real = loop.open_backend
            def opened(name):
                backend = real(name)
                accumulate = backend.accumulate
                def failing(batch, tokens):
                    if next(counter) == 5:
                        {fault}
                    return accumulate(batch, tokens)
                backend.accumulate = failing
                return backend
            loop.open_backend = opened
        """).replace("{fault}", fault)
        root = str(Path(__file__).parents[2])
        return [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {root!r})\n{body}\nsys.exit(main({target!r}, {job!r}, {descriptor}))",
        ]

    return command


@both
def test_a_run_ends_finished_with_everything_that_was_promised(backend: str, project: Path) -> None:
    assert train("recipe.yaml", {"train.backend": backend, "train.validate_every": "2"}) == 0
    run = only_run()
    assert run.info.status == "FINISHED"
    tags, metrics, params = run.data.tags, run.data.metrics, run.data.params
    assert tags["lemon.outcome"] == "completed"
    assert tags["lemon.backend"] == backend
    assert tags["lemon.base.quantization"] == "none-float32"
    assert tags["lemon.base.licence_declared"] == "cc0-1.0"
    assert {len(tags[f"lemon.{what}.sha256"]) for what in ("data", "base", "adapter")} == {64}
    assert params["lora.rank"] == "4" and params["train.max_steps"] == "4" and params["base.revision"] == "none"
    names = {
        "train/loss", "train/learning_rate", "train/grad_norm", "train/tokens", "train/epoch", "valid/loss", "valid/perplexity",
        "adapter/size_mb", "adapter/trainable_parameters", "adapter/trainable_pct",
        "memory/framework_peak_gb", "memory/process_peak_gb", "memory/system_available_min_pct",
        "memory/system_available_start_pct", "memory/system_used_peak_gb", "memory/framework_gb", "memory/process_gb",
        "memory/system_available_pct", "speed/train_tokens_per_s", "speed/train_total_tokens_per_s", "speed/seconds_per_step",
        "speed/train_seconds", "speed/overhead_seconds",
    }  # fmt: skip
    assert names <= set(metrics)
    assert metrics["train/tokens"] > 0 and 0 < metrics["adapter/trainable_pct"] < 10
    steps = [point.step for point in MlflowClient().get_metric_history(run.info.run_id, "train/loss")]
    assert steps == [1, 2, 3, 4]
    assert [point.step for point in MlflowClient().get_metric_history(run.info.run_id, "valid/loss")] == [0, 2, 4]
    weights = "adapter_model.safetensors" if backend == "hf" else "adapters.safetensors"
    assert {
        f"adapter/{weights}", "adapter/adapter_config.json", "hashes/data.json", "hashes/base.json", "hashes/adapter.json",
        "data/report.json", "data/removed.jsonl", "memory/timeline.csv", "memory/timeline.png", "environment/packages.txt",
        "environment/machine.json", "recipe.yaml", "logs/worker.log", "report.html",
    } <= artifact_paths(run)  # fmt: skip
    assert "mlflow==" in artifact_text(run, "environment/packages.txt")
    reload = json.loads(artifact_text(run, "adapter_reload.json"))
    assert reload["difference"] <= reload["tolerance"] < reload["effect_of_adapter"]


def test_no_text_of_the_data_reaches_mlflow(project: Path) -> None:
    marker = "zebrafinch"
    rows = [{"prompt": f"{marker} number {n}?", "completion": f"{marker} {n}."} for n in range(6)]
    for split in ("train", "valid", "test"):
        write_jsonl(project / "data" / f"{split}.jsonl", rows)
    assert train("recipe.yaml", {"train.backend": "hf"}) == 0
    run = only_run()
    assert marker not in str(run.to_dictionary())
    for path in artifact_paths(run):
        if not path.endswith((".png", ".safetensors")):
            assert marker not in artifact_text(run, path), path


@pytest.mark.parametrize(
    ("fault", "status", "outcome", "exit_status"),
    [
        ("raise ValueError('zebrafinch')", "FAILED", "failed:exception", 1),
        ("sys.exit(3)", "FAILED", "failed:exit_3", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", "FAILED", "failed:killed_SIGKILL", 1),
        ("os.kill(os.getpid(), signal.SIGTERM)", "KILLED", "stopped:SIGTERM", 143),
    ],
)
def test_a_child_that_dies_ends_the_run_with_the_cause(
    project: Path, capsys: pytest.CaptureFixture[str], fault: str, status: str, outcome: str, exit_status: int
) -> None:  # Y06, Y07, Y08
    assert train("recipe.yaml", {"train.backend": "hf"}, command=faulty(fault)) == exit_status
    run = only_run()
    assert (run.info.status, run.data.tags["lemon.outcome"]) == (status, outcome)
    assert run.info.end_time is not None
    assert "after step 2" in run.data.tags["lemon.problem"]
    assert "zebrafinch" not in str(run.to_dictionary())
    assert [point.step for point in MlflowClient().get_metric_history(run.info.run_id, "train/loss")] == [1, 2]
    assert {"logs/worker.log", "report.html", "memory/timeline.csv"} <= artifact_paths(run)
    assert not any(path.startswith("adapter/") for path in artifact_paths(run))
    error = capsys.readouterr().err
    assert "Traceback" not in error and outcome.split(":")[1] in error


@both
def test_a_stopped_run_is_resumed_exactly(backend: str, project: Path) -> None:  # S07
    keys = {"train.backend": backend, "lora.dropout": "0.1", "train.checkpoint_every": "1"}
    assert train("recipe.yaml", keys, command=faulty("os.kill(os.getpid(), signal.SIGKILL)")) == 1
    stopped = only_run()
    assert train("recipe.yaml", {**keys, "train.resume": stopped.info.run_id}) == 0
    assert train("recipe.yaml", {"train.backend": backend, "lora.dropout": "0.1"}) == 0
    client = MlflowClient()
    unbroken, resumed, _ = client.search_runs([stopped.info.experiment_id], order_by=["attributes.start_time DESC"])

    def losses(run: Run) -> dict[int, float]:
        return {point.step: point.value for point in client.get_metric_history(run.info.run_id, "train/loss")}

    assert list(losses(resumed)) == [3, 4]
    assert losses(stopped) | losses(resumed) == losses(unbroken)
    assert resumed.data.tags["lemon.adapter.sha256"] == unbroken.data.tags["lemon.adapter.sha256"]
    assert resumed.data.tags["lemon.resumed_from"] == stopped.info.run_id


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"train.learning_rate": "1e-3"}, "resume_mismatch"),
        ({"lora.alpha": "3"}, "resume_mismatch"),
        ({}, "checkpoint_not_found"),
    ],
)
def test_a_resume_that_would_not_be_exact_is_refused(project: Path, change: dict[str, str], code: str) -> None:
    assert train("recipe.yaml", {"train.backend": "hf", "train.max_steps": "1"}) == 0
    first = only_run()
    keys = {"train.backend": "hf", "train.max_steps": "1", "train.resume": first.info.run_id, **change}
    assert train("recipe.yaml", keys) == 2
    second = MlflowClient().search_runs([first.info.experiment_id], order_by=["attributes.start_time DESC"])[0]
    assert (second.info.status, second.data.tags["lemon.outcome"]) == ("FAILED", f"refused:{code}")


def test_a_limit_that_fires_is_a_result(project: Path) -> None:  # rule 2
    assert train("recipe.yaml", {"train.backend": "hf", "limits.process_gb": "0.3"}) == 3
    run = only_run()
    assert (run.info.status, run.data.tags["lemon.outcome"]) == ("KILLED", "stopped:process_gb")
    breach = json.loads(artifact_text(run, "guard/breach.json"))
    assert {"logs/worker.log", "report.html"} <= artifact_paths(run)
    assert breach["measured"] > breach["allowed"] == 0.3 and breach["remedy"]


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        ({"lora.rnk": "4"}, "unknown_recipe_key"),
        ({"lora.rank": "abc"}, "bad_recipe_value"),
        ({"data.path": "nowhere"}, "data_not_found"),
        ({"base.model": "./nowhere"}, "base_unavailable"),
        ({"base.model": "embedded:other"}, "unknown_embedded_base"),
        ({"train.max_seq_length": "5"}, "no_trainable_tokens"),
        ({"data.min_train_rows": "1000"}, "too_few_rows"),
        ({"base.quantization": "8bit", "train.backend": "hf"}, "quantization_unavailable"),
        ({"lora.target_modules": "q_projX", "train.backend": "hf"}, "target_modules_match_nothing"),
    ],
)  # fmt: skip
def test_a_users_mistake_is_one_line_and_a_failed_run(
    project: Path, capsys: pytest.CaptureFixture[str], overrides: dict[str, str], code: str
) -> None:  # M08
    assert train("recipe.yaml", overrides) == 2
    run = only_run()
    assert (run.info.status, run.data.tags["lemon.outcome"]) == ("FAILED", f"refused:{code}")
    refused = [line for line in capsys.readouterr().err.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 1 and f"{code}:" in refused[0] and "->" in refused[0]


def test_bad_rows_are_refused_before_the_base_is_touched(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # D01, D14
    tiny_folder(project / "data", train=[{"messages": []}])
    with (project / "data" / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write("{broken\n" * 3)
    assert train("recipe.yaml", {"base.model": "./nowhere"}) == 2
    assert only_run().data.tags["lemon.outcome"] == "refused:bad_row"
    error = capsys.readouterr().err
    assert "train.jsonl:1" in error and "train.jsonl:4: bad_json" in error


def test_several_processes_are_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # M13
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train("recipe.yaml", {}) == 2
    assert only_run().data.tags["lemon.outcome"] == "refused:distributed_not_supported"


def test_the_file_store_is_refused_with_the_remedy(project: Path, capsys: pytest.CaptureFixture[str]) -> None:  # M14
    mlflow.set_tracking_uri("file:./mlruns")
    assert train("recipe.yaml", {}) == 2
    assert "sqlite:///mlflow.db" in capsys.readouterr().err


def test_the_scratch_folder_is_removed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = project / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    assert train("recipe.yaml", {"train.backend": "hf"}, command=faulty("sys.exit(3)")) == 1
    assert [*scratch.glob("lemon-*")] == []


def test_an_artifact_store_that_fails_keeps_the_adapter_on_disk_and_ends_the_run_failed(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch = project / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    real = MlflowClient.log_artifacts

    def full(self: MlflowClient, run_id: str, folder: str, to: str | None = None) -> None:
        if to == "adapter":
            raise OSError(28, "No space left on device")
        real(self, run_id, folder, to)

    monkeypatch.setattr(MlflowClient, "log_artifacts", full)
    assert train("recipe.yaml", {"train.backend": "hf"}) == 1
    run = only_run()
    assert run.info.status == "FAILED" and run.data.tags["lemon.outcome"].startswith("failed:")
    kept = [*scratch.glob("lemon-*/out/adapter/adapter_model.safetensors")]
    partial = {path for path in artifact_paths(run) if path.startswith("partial/adapter/")}
    assert kept or partial
    assert "Traceback" not in capsys.readouterr().err
