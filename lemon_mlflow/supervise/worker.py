"""The child's side: runs one job and says how it ended.

Started by `supervisor.run_job` as a fresh interpreter. The job is named `module:function:JobClass` and described by a JSON
file; its function gets the job and `emit`, and returns JSON types.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

from ..errors import RunEnded
from .events import EventWriter
from .sandbox import die_with_parent


def main(target: str, job_file: str, descriptor: int) -> int:
    """Run the job; the exit status is 0, or that of the refusal or failure."""
    die_with_parent()
    emit = EventWriter(descriptor)
    module_name, function_name, class_name = target.split(":")
    try:
        fields = json.loads(Path(job_file).read_text(encoding="utf-8"))
        module = importlib.import_module(module_name)
        job = getattr(module, class_name)(**fields)
        result = getattr(module, function_name)(job, emit)
    except RunEnded as ended:
        print(f"{ended.outcome_kind}: {ended}", file=sys.stderr)
        emit("ended", kind=ended.outcome_kind, **ended.as_dict())
        return ended.exit_status
    except MemoryError:
        traceback.print_exc()
        emit("error", type="MemoryError", message="the process was refused more memory")
        return 1
    except Exception as error:
        # The whole story goes to the log; the event carries the kind alone, since a message can quote data.
        traceback.print_exc()
        emit("error", type=type(error).__name__, message=_last_own_line(error))
        return 1
    emit("done", result=result)
    return 0


def _last_own_line(error: Exception) -> str:
    """`file:line` of the last frame, without any text of the program's data."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
