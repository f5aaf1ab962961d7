"""The steps of one training run, in order: data, base, tokens, training, reload, adapter. How it ends is told in `train`.

The parent process does what is here and imports no framework; each heavy piece of work is a child process, started by `job`
under the recipe's limits.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException

from ..backends.interface import choose_backend
from ..base.resolve import Base
from ..config import LoadedRecipe, flatten, to_yaml
from ..data.prepare import PrepareJob
from ..data.read import DataFolder, read_folder
from ..errors import Failure, Refusal, Stopped
from ..provenance import environment
from ..provenance.hashes import all_files, manifest_of
from ..provenance.licence import declared_licence
from ..supervise.sandbox import mlx_blas
from ..supervise.supervisor import Ending, Surroundings, run_job
from .bases import load_spec, ready_base
from .progress import ProgressView
from .record import Record, log_environment
from .resume import fetch_checkpoint

WorkerCommand = Callable[[str, str, int], list[str]]
"""How a worker is started: (job target, job file, event descriptor) to a command line."""


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


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)
