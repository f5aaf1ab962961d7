"""What supervision costs: the same training as a supervised MLflow run and as a bare loop, in turn.

    python benchmarks/overhead.py                                # both backends, about nine minutes on two idle cores
    python benchmarks/overhead.py --runs 1 --steps 6 --backend hf

Prints `overhead_hf` and `overhead_mlx` (wall time of the training steps, run ÷ bare loop) and `fixed_cost_s` (seconds of a
whole run that are not training steps). `README.md` says what is in each figure and what is not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _models import HIDDEN, LAYERS, LINEAR, VOCABULARY, small_base, small_data

from lemon_mlflow.config import load_recipe
from lemon_mlflow.data.batches import make_batch, plan_epoch
from lemon_mlflow.data.prepare import PrepareJob, load_token_rows, prepare
from lemon_mlflow.supervise.sandbox import child_environment, mlx_blas

HERE = Path(__file__).resolve().parent
WARMUP, BATCH, ACCUMULATION, SEED = 2, 2, 2, 7
RANK, ALPHA, LEARNING_RATE, MAX_GRAD_NORM = 8, 16.0, 1e-4, 1.0


@dataclass(frozen=True)
class Run:
    """One run of either side.

    Attributes:
        steps: seconds of each counted step, up to the beginning of the next.
        losses: of all steps, those of the warm-up included.
        tokens: trainable ones, of all steps.
        fixed: seconds of the whole run that are not steps; 0 for the bare loop.
    """

    steps: list[float]
    losses: list[float]
    tokens: list[int]
    fixed: float = 0.0

    @property
    def training(self) -> float:
        """Seconds from the beginning of the first counted step to the end of the last."""
        return sum(self.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="pairs of runs for each backend (default 5)")
    parser.add_argument("--steps", type=int, default=40, help="counted steps of a run, after 2 of warm-up (default 40)")
    parser.add_argument("--backend", choices=("hf", "mlx", "both"), default="both")
    given = parser.parse_args()
    backends = ("hf", "mlx") if given.backend == "both" else (given.backend,)
    with tempfile.TemporaryDirectory(prefix="lemon-overhead-") as name:
        folder = Path(name)
        work = make_work(folder, given.steps)
        store_seconds = make_store(folder)
        fixed = {}
        for backend in backends:
            ours, bare = alternate(backend, folder, work, given.runs)
            say(f"overhead_{backend}", *overhead(backend, ours, bare, given.steps))
            fixed[backend] = spread([run.fixed for run in ours])
        value = max(seconds["median"] for seconds in fixed.values())
        detail = {**fixed, "value_is": "the slower backend's median", "not_in_it_store_creation_s": store_seconds}
        say("fixed_cost_s", value, given.runs, detail, unit="s")


def make_work(folder: Path, steps: int) -> Path:
    """Base, data, recipes, and the batches of the run as plain arrays; returns the peers' job file."""
    base = small_base(folder / "base")
    data = small_data(folder / "data", train_rows=(WARMUP + steps) * BATCH * ACCUMULATION)
    for backend in ("hf", "mlx"):
        recipe(folder, backend).write_text(
            f"base: {{model: base, dtype: float32}}\ndata: {{path: data}}\nlora: {{rank: {RANK}, alpha: {ALPHA}}}\n"
            f"train: {{backend: {backend}, seed: {SEED}, batch_size: {BATCH}, gradient_accumulation: {ACCUMULATION}, "
            f"learning_rate: {LEARNING_RATE}, schedule: constant, max_grad_norm: {MAX_GRAD_NORM}}}\n"
            "limits: {system_available_pct: 1}\ntrack: {experiment: overhead}\n",
            encoding="utf-8",
        )
    section = load_recipe(recipe(folder, "hf")).recipe.data.model_dump(mode="json")
    prepare(PrepareJob(str(data), section, str(base), 512, str(folder)), lambda *_, **__: None)
    rows = load_token_rows(folder / "tokens.npz", "train")
    arrays: dict[str, np.ndarray] = {}
    names: list[list[str]] = []
    for micro in plan_epoch([len(row.ids) for row in rows], BATCH, ACCUMULATION, SEED, epoch=0):
        names.append([])
        for numbers in micro:
            batch = make_batch(rows, numbers)
            name = f"batch{len(arrays) // 2}"
            arrays |= {f"{name}_tokens": batch.tokens, f"{name}_trainable": batch.trainable}
            names[-1].append(name)
    np.savez(folder / "batches.npz", **arrays)  # type: ignore[arg-type]
    work = folder / "work.json"
    settings = {
        "base": str(base), "batches": str(folder / "batches.npz"), "steps": names, "seed": SEED,
        "rank": RANK, "alpha": ALPHA, "linear": LINEAR, "learning_rate": LEARNING_RATE, "max_grad_norm": MAX_GRAD_NORM,
    }  # fmt: skip
    work.write_text(json.dumps(settings), encoding="utf-8")
    return work


def recipe(folder: Path, backend: str) -> Path:
    """Where a backend's recipe is."""
    return folder / f"recipe-{backend}.yaml"


def product_environment(folder: Path) -> dict[str, str]:
    """This shell's variables, with a tracking store of the benchmark's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    return {**kept, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "DO_NOT_TRACK": "1"}


def make_store(folder: Path) -> float:
    """Create MLflow's database, which a user does once and not in each run; returns the seconds."""
    code = "from mlflow.tracking import MlflowClient; MlflowClient().create_experiment('overhead')"
    began = time.perf_counter()
    checked([sys.executable, "-c", code], folder, product_environment(folder))
    return round(time.perf_counter() - began, 2)


def alternate(backend: str, folder: Path, work: Path, runs: int) -> tuple[list[Run], list[Run]]:
    """Run both sides `runs` times, the other one first in every second round."""
    ours: list[Run] = []
    bare: list[Run] = []
    for number in range(runs):
        if number % 2 == 0:
            ours.append(run_supervised(backend, folder))
        bare.append(run_bare(backend, folder, work))
        if number % 2 == 1:
            ours.append(run_supervised(backend, folder))
        refuse_different_work(ours[-1], bare[-1])
        print(
            f"{backend} {number + 1}/{runs}: supervised {ours[-1].training:.3f} s, bare {bare[-1].training:.3f} s, "
            f"around the steps {ours[-1].fixed:.1f} s",
            file=sys.stderr,
        )
    return ours, bare


def run_supervised(backend: str, folder: Path) -> Run:
    """A whole supervised run in a fresh process."""
    marks = folder / "marks.json"
    started = time.perf_counter()
    command = [sys.executable, str(HERE / "_supervised.py"), "run", str(recipe(folder, backend)), str(marks)]
    checked(command, folder, product_environment(folder))
    whole = time.perf_counter() - started
    steps = json.loads(marks.read_text(encoding="utf-8"))
    marks.unlink()
    in_steps = sum(step["ended"] - step["began"] for step in steps)
    began = [step["began"] for step in steps] + [steps[-1]["ended"]]
    return Run(counted(began), [step["loss"] for step in steps], [step["tokens"] for step in steps], whole - in_steps)


def run_bare(backend: str, folder: Path, work: Path) -> Run:
    """The bare loop in a fresh process, in the environment (threads, BLAS) that our worker gets."""
    command = [sys.executable, str(HERE / f"_bare_{backend}.py"), str(work)]
    answer = json.loads(checked(command, folder, child_environment(os.environ, backend)).splitlines()[-1])
    return Run(counted(answer["began"]), answer["losses"], answer["tokens"])


def counted(began: list[float]) -> list[float]:
    """Seconds of the steps after the warm-up; the last entry of `began` is the end of the last step."""
    return [after - before for before, after in zip(began[WARMUP:], began[WARMUP + 1 :], strict=False)]


def checked(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def refuse_different_work(ours: Run, bare: Run) -> None:
    """Same trainable tokens in every step, and the same loss before anything is learned: else no ratio is meant."""
    if ours.tokens != bare.tokens or abs(ours.losses[0] - bare.losses[0]) > 1e-3:
        sys.exit(
            f"the two sides did different work: tokens {ours.tokens[:3]} and {bare.tokens[:3]}, "
            f"first loss {ours.losses[0]} and {bare.losses[0]}"
        )


def overhead(backend: str, ours: list[Run], bare: list[Run], steps: int) -> tuple[float, int, dict[str, Any]]:
    """Ratio of the medians, the number of pairs, and what it was made of."""
    supervised, plain = spread([run.training for run in ours]), spread([run.training for run in bare])
    pairs = [one.training / other.training for one, other in zip(ours, bare, strict=True)]
    detail = {
        "supervised_s": supervised,
        "bare_s": plain,
        "ratio_of_each_pair": spread(pairs),
        "ratio_of_steps": round(typical(ours) / typical(bare), 4),
        "bare_step_ms": round(1000 * plain["median"] / steps, 1),
        "counted_steps": steps,
        "trainable_tokens": sum(ours[0].tokens[WARMUP:]),
        "model": f"llama, {LAYERS} layers of {HIDDEN}, vocabulary {VOCABULARY}, float32",
        "cores": os.cpu_count(),
    }
    if backend == "mlx":
        detail["blas"] = Path(mlx_blas(os.environ)).name or "mlx's own"
    return supervised["median"] / plain["median"], len(pairs), detail


def typical(runs: list[Run]) -> float:
    """Seconds of all counted steps, each the median over the runs: a short disturbance of one run leaves no trace."""
    return sum(statistics.median(step) for step in zip(*(run.steps for run in runs), strict=True))


def spread(values: list[float]) -> dict[str, Any]:
    """Median, extremes and the values themselves, in the order measured."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "values": [round(value, 4) for value in values],
    }


def say(claim: str, value: float, runs: int, detail: dict[str, Any], unit: str = "ratio") -> None:
    """One claim, as one line of JSON."""
    print(json.dumps({"claim": claim, "value": round(value, 4), "unit": unit, "runs": runs, "detail": detail}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
