"""What the parent knows of a run while it goes on, and how it becomes metrics, artifacts and the report."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from ..config import LoadedRecipe, canonical_text, flatten
from ..provenance import environment
from ..provenance.hashes import Manifest
from ..supervise.limits import Breach
from ..supervise.supervisor import Ending
from ..tracking import report, timeline
from ..tracking.run import RunLog
from ..tracking.timeline import Sample

_SERIES_SECONDS = 1.0


@dataclass
class Record:
    """Facts of one run, gathered as they come. Times are seconds since the training child began."""

    log: RunLog
    name: str
    started: float = field(default_factory=time.monotonic)
    started_text: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    available_start_pct: float = field(default_factory=lambda: _available_pct())
    train_began: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    train_points: list[tuple[int, float, float]] = field(default_factory=list)
    valid_points: list[tuple[int, float, float]] = field(default_factory=list)
    tokens_seen: int = 0
    loaded: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    removed: list[dict[str, Any]] = field(default_factory=list)
    hashes: list[tuple[str, str, str]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    reload: dict[str, Any] | None = None
    breach: Breach | None = None
    backend: str = ""
    base_name: str = ""
    _last_series: float = -math.inf

    def event(self, event: dict[str, Any]) -> None:
        """Take in one event of the training child."""
        seconds = time.monotonic() - self.train_began
        kind = event["event"]
        if kind == "phase":
            self.marks.append((seconds, str(event["name"])))
        elif kind == "loaded":
            self._loaded(event)
        elif kind == "step":
            self._step(event, seconds)
        elif kind == "validation":
            self.valid_points.append((event["step"], seconds, event["loss"]))
            self.metric("valid/loss", event["loss"], event["step"])
            if event["loss"] < 700:  # exp of more is not a float
                self.metric("valid/perplexity", math.exp(event["loss"]), event["step"])

    def sample(self, sample: Sample) -> None:
        """Take in one memory sample; all go to the timeline, one a second to MLflow."""
        self.samples.append(sample)
        if sample.seconds - self._last_series < _SERIES_SECONDS:
            return
        self._last_series = sample.seconds
        step = int(sample.seconds)
        if sample.framework_bytes is not None:
            self.log.metric("memory/framework_gb", sample.framework_bytes / 1e9, step)
        self.log.metric("memory/process_gb", sample.process_bytes / 1e9, step)
        self.log.metric("memory/system_available_pct", sample.system_available_pct, step)

    def metric(self, name: str, value: float, step: int = 0) -> None:
        """One metric, to MLflow and to the report's table of last values."""
        self.metrics[name] = value
        self.log.metric(name, value, step)

    def hash(self, what: str, manifest: Manifest, where: str) -> None:
        """One hash: as tag, as artifact, and in the report."""
        self.hashes.append((what, manifest.sha256, where))
        self.log.json(manifest.to_json(), f"hashes/{what}.json")
        self.log.tags(**{f"{what}__sha256": manifest.sha256})

    def _loaded(self, event: dict[str, Any]) -> None:
        self.loaded = event
        trainable, total = int(event["trainable_parameters"]), int(event["total_parameters"])
        self.metric("adapter/trainable_parameters", trainable)
        self.metric("adapter/trainable_pct", 100 * trainable / total)
        self.log.tags(
            base__quantization=event["quantization"]["fingerprint"],
            device=event["device"],
            framework_memory=event["memory_source"],
        )

    def _step(self, event: dict[str, Any], seconds: float) -> None:
        step = event["step"]
        self.tokens_seen += event["tokens"]
        self.train_points.append((step, seconds, event["loss"]))
        for name in ("loss", "learning_rate", "grad_norm", "epoch"):
            self.metric(f"train/{name}", event[name], step)
        self.metric("train/tokens", self.tokens_seen, step)

    def final_memory(self, ending: Ending, framework_peak_bytes: int, reserved_peak_bytes: int) -> None:
        """Peaks and minima of the training child."""
        if framework_peak_bytes:
            self.metric("memory/framework_peak_gb", framework_peak_bytes / 1e9)
        if reserved_peak_bytes:
            self.metric("memory/framework_reserved_peak_gb", reserved_peak_bytes / 1e9)
        self.metric("memory/process_peak_gb", ending.process_peak_bytes / 1e9)
        self.metric("memory/system_available_start_pct", self.available_start_pct)
        if ending.samples:
            lowest = min(ending.samples, key=lambda sample: sample.system_available_bytes)
            self.metric("memory/system_available_min_pct", lowest.system_available_pct)
            self.metric("memory/system_used_peak_gb", (lowest.system_total_bytes - lowest.system_available_bytes) / 1e9)
        gpu = [sample.gpu_used_bytes for sample in ending.samples if sample.gpu_used_bytes is not None]
        if gpu:
            self.metric("memory/gpu_used_peak_gb", max(gpu) / 1e9)

    def final_speed(self, result: dict[str, Any]) -> None:
        """Speeds of the training steps alone; everything else is overhead."""
        seconds = float(result["train_seconds"])
        self.metric("speed/train_seconds", seconds)
        self.metric("speed/overhead_seconds", max(0.0, time.monotonic() - self.started - seconds))
        if seconds > 0 and result["steps"]:
            self.metric("speed/train_tokens_per_s", result["tokens_trainable"] / seconds)
            self.metric("speed/train_total_tokens_per_s", result["tokens_non_padding"] / seconds)
            self.metric("speed/seconds_per_step", seconds / result["steps"])
        if result["tokens_all"]:
            padding = 100 * (1 - result["tokens_non_padding"] / result["tokens_all"])
            self.metric("train/padding_pct", padding)

    def write_files(self, folder: Path, recipe: LoadedRecipe | None, outcome: str, problem: str) -> None:
        """Timeline and report, as artifacts; `folder` is scratch."""
        line = recipe.recipe.limits.system_available_pct if recipe else 0.0
        if self.samples:
            timeline.write_csv(self.samples, folder / "timeline.csv")
            timeline.draw_png(self.samples, self.marks, line, folder / "timeline.png")
            self.log.artifact(folder / "timeline.csv", "memory")
            self.log.artifact(folder / "timeline.png", "memory")
        facts = report.RunFacts(
            title=self.name,
            run_id=self.log.run_id,
            outcome=outcome,
            backend=self.backend,
            device=str(self.loaded.get("device", "")),
            started=self.started_text,
            base_name=self.base_name,
            quantization=str(self.loaded.get("quantization", {}).get("fingerprint", "")),
            hashes=tuple(self.hashes),
            train_points=tuple(self.train_points),
            valid_points=tuple(self.valid_points),
            samples=tuple(self.samples),
            marks=tuple(self.marks),
            guard_line_pct=line,
            recipe={key: canonical_text(value) for key, value in flatten(recipe.recipe).items()} if recipe else {},
            data_splits=self.data.get("splits", {}),
            removed=tuple(self.removed),
            metrics=dict(self.metrics),
            environment=_short(self.machine),
            framework_memory_source=str(self.loaded.get("memory_source", "")),
            reload=self.reload,
            problem=problem,
        )
        report.write(facts, folder / "report.html")
        self.log.artifact(folder / "report.html")


def log_environment(record: Record, project: Path, extra: dict[str, Any]) -> None:
    """`environment/packages.txt` and `environment/machine.json`."""
    record.machine = {**environment.machine(project), **extra}
    record.log.text(environment.packages(), "environment/packages.txt")
    record.log.json(record.machine, "environment/machine.json")
    if not record.machine["gpus"]:
        record.log.tags(gpu_metrics=f"unavailable:{record.machine['gpus_unavailable']}")


def _short(machine: dict[str, Any]) -> dict[str, str]:
    wanted = ("os", "cpu", "cpu_flags", "cpu_count_logical", "memory_total_gb", "python", "git_commit", "mlx_blas")
    facts = {key: str(machine[key]) for key in wanted if machine.get(key)}
    if machine:
        facts["gpus"] = ", ".join(gpu["name"] for gpu in machine["gpus"]) or f"none ({machine['gpus_unavailable']})"
    return facts


def _available_pct() -> float:
    memory = psutil.virtual_memory()
    return 100.0 * memory.available / memory.total
