"""Our side of `overhead.py`: one whole supervised run, whose training worker notes when each step began and ended.

    python _supervised.py run recipe.yaml marks.json

The run is `lemon train` in everything but that note: two readings of the clock a step. `marks.json` holds for each step
`began` and `ended` (seconds of `time.perf_counter` in the worker), `loss` and `tokens`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run(recipe: str, marks: str) -> int:
    """The parent's side: train, with workers that are started by this file where they train."""
    from lemon_mlflow.supervise.sandbox import worker_command
    from lemon_mlflow.verbs.train import train

    def command(target: str, job_file: str, descriptor: int) -> list[str]:
        if not target.startswith("lemon_mlflow.train.loop:"):
            return worker_command(target, job_file, descriptor)
        return [sys.executable, str(Path(__file__).resolve()), "worker", target, job_file, str(descriptor), marks]

    return train(recipe, {}, command=command)


def worker(target: str, job_file: str, descriptor: int, marks: str) -> int:
    """The training child: the product's own worker, with a clock around each step."""
    import lemon_mlflow.train.loop as loop
    from lemon_mlflow.supervise.worker import main

    one_step = loop._one_step
    noted: list[dict[str, float]] = []

    def timed(*rest: Any) -> None:
        *rest_, emit = rest

        def emit_and_keep(event: str, **fields: Any) -> None:
            noted.append({"loss": fields["loss"], "tokens": fields["tokens"]})
            emit(event, **fields)

        began = time.perf_counter()
        one_step(*rest_, emit_and_keep)
        noted[-1] |= {"began": began, "ended": time.perf_counter()}

    loop._one_step = timed
    status = main(target, job_file, descriptor)
    Path(marks).write_text(json.dumps(noted), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    role, *rest = sys.argv[1:]
    sys.exit(run(*rest) if role == "run" else worker(rest[0], rest[1], int(rest[2]), rest[3]))
