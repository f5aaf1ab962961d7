"""The job that trains. Runs in a child process, reports through `emit`, and never talks to MLflow.

    train(TrainJob(...), emit)

One step is one optimizer update. Its loss is the mean over the trainable tokens of *all* its micro-batches, however they
are split, so `batch_size` 2 x 1 and 1 x 2 learn the same. Validation uses every row, weighted by tokens, before the first
step (of a resumed run too) and after the last, and so always belongs to the adapter that is saved.

Resume is exact or refused: a checkpoint holds adapter and optimizer, and rows' order and dropout are functions of the seed
and the place in the run.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.interface import Backend, LoadSpec, LoraSpec, open_backend
from ..config import TrainSection
from ..data.batches import Batch, evaluation_batches, make_batch, plan_epoch, steps_per_epoch
from ..data.prepare import TokenRow, load_token_rows
from ..errors import Failure
from .schedule import learning_rate

Emit = Callable[..., None]
_PROBE_ROWS = 4


@dataclass(frozen=True)
class TrainJob:
    """What the job needs; JSON types only.

    Attributes:
        backend: `hf` or `mlx`.
        base: fields of `LoadSpec`.
        lora: fields of `LoraSpec`.
        train: the recipe's train section.
        tokens: path of tokens.npz.
        out: folder for adapter, checkpoints and probe logits.
        resume_from: folder of a checkpoint, or "".
    """

    backend: str
    base: dict[str, Any]
    lora: dict[str, Any]
    train: dict[str, Any]
    tokens: str
    out: str
    resume_from: str = ""


@dataclass
class _Totals:
    """Sums over the steps of this process."""

    seconds: float = 0.0
    tokens_all: int = 0
    tokens_non_padding: int = 0
    tokens_trainable: int = 0
    steps: int = 0


def lora_spec(fields: dict[str, Any]) -> LoraSpec:
    """A `LoraSpec` from JSON types."""
    return LoraSpec(**{**fields, "target_modules": tuple(fields["target_modules"])})


def train(job: TrainJob, emit: Emit) -> dict[str, Any]:
    """Train, save the adapter, and write probe logits for the reload test.

    Returns:
        what was loaded and trained, and the totals, as JSON types.

    Raises:
        Refusal: `target_modules_match_nothing`, `too_many_layers`.
        Failure: `non_finite_loss`, `non_finite_gradient`, `quantized_gradient_broken`.
    """
    settings = TrainSection.model_validate(job.train)
    out = Path(job.out)
    rows, valid = load_token_rows(Path(job.tokens), "train"), load_token_rows(Path(job.tokens), "valid")
    emit("phase", name="load", total=0)
    backend = open_backend(job.backend)
    backend.seed(settings.seed)
    base = backend.load_base(LoadSpec(**job.base))
    adapter = backend.add_adapter(lora_spec(job.lora), settings.seed)
    backend.prepare_training(settings.gradient_checkpointing, settings.weight_decay)
    emit(
        "loaded",
        device=base.device,
        quantization=base.quantization.to_json(),
        layers=base.layers,
        trainable_parameters=adapter.trainable_parameters,
        total_parameters=adapter.total_parameters,
        modules=len(adapter.modules),
        memory_source=backend.memory().source,
        framework_bytes=backend.memory().active or None,
    )
    total = total_steps(settings, len(rows))
    first = _restore(backend, job.resume_from) if job.resume_from else 0
    emit("phase", name="train", total=total, done=first)
    _validate(backend, valid, settings, first, emit)
    totals = _Totals()
    for step, epoch, micro in _steps(rows, settings, first, total):
        _one_step(backend, rows, micro, settings, step, total, epoch, totals, emit)
        if step == total or (settings.validate_every and step % settings.validate_every == 0):
            _validate(backend, valid, settings, step, emit)
        if settings.checkpoint_every and step % settings.checkpoint_every == 0 and step < total:
            _save_checkpoint(backend, out, step, emit)
    emit("phase", name="save", total=0)
    backend.save_adapter(out / "adapter")
    _save_probes(backend, valid, out)
    memory = backend.memory()
    return {
        "steps": totals.steps,
        "train_seconds": totals.seconds,
        "tokens_all": totals.tokens_all,
        "tokens_non_padding": totals.tokens_non_padding,
        "tokens_trainable": totals.tokens_trainable,
        "framework_peak_bytes": memory.peak,
        "framework_reserved_peak_bytes": memory.reserved_peak,
    }


def total_steps(settings: TrainSection, rows: int) -> int:
    """Optimizer updates of the whole run."""
    wanted = math.ceil(settings.epochs * steps_per_epoch(rows, settings.batch_size, settings.gradient_accumulation))
    return min(wanted, settings.max_steps) if settings.max_steps else wanted


def _steps(
    rows: list[TokenRow], settings: TrainSection, first: int, total: int
) -> Iterator[tuple[int, float, list[np.ndarray]]]:
    """Yields (step from 1, epochs done after it, micro-batches) from step `first` + 1 to `total`."""
    lengths = [len(row.ids) for row in rows]
    each = steps_per_epoch(len(rows), settings.batch_size, settings.gradient_accumulation)
    plan: list[list[np.ndarray]] = []
    for step in range(first + 1, total + 1):
        epoch, place = divmod(step - 1, each)
        if not plan or place == 0:
            plan = plan_epoch(lengths, settings.batch_size, settings.gradient_accumulation, settings.seed, epoch)
        yield step, step / each, plan[place]


def _one_step(
    backend: Backend,
    rows: list[TokenRow],
    micro: list[np.ndarray],
    settings: TrainSection,
    step: int,
    total: int,
    epoch: float,
    totals: _Totals,
    emit: Emit,
) -> None:
    started = time.perf_counter()
    batches: list[Batch] = [make_batch(rows, numbers) for numbers in micro]
    step_tokens = sum(batch.tokens_trainable for batch in batches)
    loss_sum = 0.0
    for number, batch in enumerate(batches):
        backend.seed(dropout_seed(settings.seed, step, number))
        loss_sum += backend.accumulate(batch, step_tokens)
        _refuse_non_finite("non_finite_loss", loss_sum, step)
    rate = learning_rate(step, total, settings.learning_rate, settings.schedule, settings.warmup_steps)
    norm = backend.update(rate, settings.max_grad_norm)
    _refuse_non_finite("non_finite_gradient", norm, step)
    seconds = time.perf_counter() - started
    totals.seconds += seconds
    totals.steps += 1
    totals.tokens_all += sum(batch.tokens_all for batch in batches)
    totals.tokens_non_padding += sum(batch.tokens_non_padding for batch in batches)
    totals.tokens_trainable += step_tokens
    memory = backend.memory()
    emit(
        "step",
        step=step,
        loss=loss_sum / step_tokens,
        learning_rate=rate,
        grad_norm=norm,
        tokens=step_tokens,
        epoch=epoch,
        seconds=seconds,
        framework_bytes=memory.active or None,
        framework_peak_bytes=memory.peak,
        framework_reserved_peak_bytes=memory.reserved_peak,
    )


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """A seed for each micro-batch, so that dropout depends on nothing that went before, and a resumed run draws the same."""
    return int(np.random.SeedSequence([seed, step, micro_batch]).generate_state(1)[0])


def _validate(backend: Backend, rows: list[TokenRow], settings: TrainSection, step: int, emit: Emit) -> None:
    started = time.perf_counter()
    loss_sum, tokens = 0.0, 0
    done = 0
    for numbers in evaluation_batches([len(row.ids) for row in rows], settings.batch_size):
        batch = make_batch(rows, numbers)
        done += len(numbers)
        loss_sum += backend.loss_sum(batch)
        tokens += batch.tokens_trainable
        emit("validating", done=done, total=len(rows))
    _refuse_non_finite("non_finite_metric", loss_sum, step)
    emit(
        "validation",
        step=step,
        loss=loss_sum / tokens,
        tokens=tokens,
        rows=len(rows),
        seconds=time.perf_counter() - started,
    )


def _refuse_non_finite(code: str, value: float, step: int) -> None:
    if math.isfinite(value):
        return
    what = {
        "non_finite_loss": "training loss",
        "non_finite_gradient": "gradient norm",
        "non_finite_metric": "validation loss",
    }[code]
    raise Failure(
        code,
        f"the {what} at step {step} is {value}",
        f"step {step}",
        "lower train.learning_rate, or use base.dtype: float32",
    )


def _save_checkpoint(backend: Backend, out: Path, step: int, emit: Emit) -> None:
    """Write checkpoint-<step>, whole or not at all, then drop the one before the last."""
    folder = out / f"checkpoint-{step:08d}"
    scratch = out / "checkpoint-unfinished"
    shutil.rmtree(scratch, ignore_errors=True)
    backend.save_state(scratch)
    backend.save_adapter(scratch / "adapter")
    (scratch / "progress.json").write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
    scratch.rename(folder)
    for old in sorted(out.glob("checkpoint-0*"))[:-2]:
        shutil.rmtree(old, ignore_errors=True)
    emit("checkpoint", step=step, folder=str(folder))


def _restore(backend: Backend, folder: str) -> int:
    backend.load_state(Path(folder))
    return int(json.loads((Path(folder) / "progress.json").read_text(encoding="utf-8"))["step"])


def probe_rows(valid: list[TokenRow]) -> list[TokenRow]:
    """The few validation rows, the shortest, whose logits must come back after a reload."""
    return sorted(valid, key=lambda row: (len(row.ids), row.where))[:_PROBE_ROWS]


def _save_probes(backend: Backend, valid: list[TokenRow], out: Path) -> None:
    rows = probe_rows(valid)
    arrays = {f"row{number}": backend.logits(make_batch([row], [0])) for number, row in enumerate(rows)}
    np.savez(out / "probes.npz", **arrays)  # type: ignore[arg-type]
