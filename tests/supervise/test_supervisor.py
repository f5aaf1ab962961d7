"""However a child ends, its ending is named; limits fire; secrets stay out. Real child processes."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lemon_mlflow.config import LimitsSection
from lemon_mlflow.errors import Failure, Refusal, Stopped
from lemon_mlflow.supervise.supervisor import Ending, Surroundings, run_job

NO_LIMITS = LimitsSection(system_available_pct=0)


def script(body: str) -> Callable[[str, str, int], list[str]]:
    """A child that runs `body` with `emit` and `fd` in place of the worker."""
    head = """
        import json, os, signal, sys, time
        fd = int(sys.argv[1])
        def emit(event, **fields):
            os.write(fd, (json.dumps({"event": event, **fields}) + "\\n").encode())
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    return lambda target, job, descriptor: [sys.executable, "-c", code, str(descriptor)]


def supervised(
    tmp_path: Path, body: str, limits: LimitsSection = NO_LIMITS, environment: dict[str, str] | None = None, **more: Any
) -> Ending:
    around = Surroundings(
        tmp_path,
        tmp_path / "worker.log",
        limits,
        dict(os.environ) if environment is None else environment,
        command=script(body),
    )
    return run_job("m:f:C", {}, around, more.pop("on_event", lambda event: None), **more)


def test_a_job_that_is_done_gives_its_result_and_its_events_in_order(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    body = "emit('phase', name='train'); [emit('step', step=n, loss=1.0) for n in range(1, 4)]; emit('done', result={'a': 1})"
    ending = supervised(tmp_path, body, on_event=events.append)
    assert ending.result == {"a": 1}
    assert ending.problem is None and ending.breach is None and ending.exit_code == 0
    assert [event.get("step") for event in events] == [None, 1, 2, 3, None]


@pytest.mark.parametrize(
    ("body", "kind", "code"),
    [
        ("sys.exit(3)", Failure, "exit_3"),
        ("raise RuntimeError('secret text')", Failure, "exit_1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", Failure, "killed_SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", Stopped, "SIGTERM"),
        ("signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGINT)", Stopped, "SIGINT"),
        ("os.abort()", Failure, "killed_SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", Failure, "killed_SIGSEGV"),
        ("pass", Failure, "no_result"),
        ("os.close(fd); time.sleep(0.3); sys.exit(4)", Failure, "exit_4"),
        ("emit('done', result={}); sys.exit(5)", Failure, "exit_5"),
        ("emit('done', result={}); os.kill(os.getpid(), signal.SIGKILL)", Failure, "killed_SIGKILL"),
    ],
)  # fmt: skip
def test_every_other_ending_is_named(tmp_path: Path, body: str, kind: type, code: str) -> None:  # Y06, Y07
    ending = supervised(tmp_path, "emit('phase', name='train'); emit('step', step=2, loss=1.0)\n" + body)
    assert ending.result is None
    assert type(ending.problem) is kind
    assert ending.problem.code == code
    assert "secret" not in str(ending.problem)
    if code != "no_result":
        assert ending.problem.where == "train, after step 2"


def test_a_refusal_of_the_child_arrives_whole(tmp_path: Path) -> None:
    body = "emit('ended', kind='refused', code='c', message='m', where='f:3', remedy='r', details=['d']); sys.exit(2)"
    ending = supervised(tmp_path, body)
    assert isinstance(ending.problem, Refusal)
    assert str(ending.problem) == "c: m [f:3] -> r"
    assert ending.problem.details == ("d",)


def test_broken_events_are_counted_and_left_out(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    body = """
    os.write(fd, b'nonsense\\n[1]\\n{"event": 3}\\n\\xff\\xfe\\n')
    emit('step', step=1, loss=2.0); emit('done', result={})
    """
    ending = supervised(tmp_path, body, on_event=events.append)
    assert ending.broken_events == 4
    assert [event["event"] for event in events] == ["step", "done"]
    assert ending.result == {}


def test_output_goes_to_the_log_however_much_there_is(tmp_path: Path) -> None:
    ending = supervised(tmp_path, "[print('x' * 1000) for _ in range(20000)]; print('last'); emit('done', result={})")
    assert ending.result == {}
    assert (tmp_path / "worker.log").stat().st_size > 20_000_000
    assert (tmp_path / "worker.log").read_text().endswith("last\n")


def test_a_closed_pipe_costs_the_parent_no_spinning(tmp_path: Path) -> None:
    # As a share of the time that passed, which a busy machine stretches too.
    before = time.process_time()
    ending = supervised(tmp_path, "os.close(fd); time.sleep(2)")
    assert time.process_time() - before < 0.5 * ending.seconds


def test_the_child_sees_no_secret_and_no_hub(tmp_path: Path) -> None:  # Y13
    environment = {
        **os.environ, "HF_TOKEN": "planted", "AWS_SECRET_ACCESS_KEY": "planted", "MLFLOW_TRACKING_PASSWORD": "planted",
        "PYTHONPATH": "/planted", "MLFLOW_RUN_ID": "planted", "MY_OWN": "planted",
    }  # fmt: skip
    body = "emit('done', result={'env': dict(os.environ), 'cwd': os.listdir('.'), 'stdin': sys.stdin.read()})"
    result = supervised(tmp_path, body, environment=environment).result
    assert result is not None
    assert "planted" not in str(result["env"])
    assert result["env"]["HF_HUB_OFFLINE"] == result["env"]["TRANSFORMERS_OFFLINE"] == "1"
    assert result["cwd"] == [] and result["stdin"] == ""
    assert "PATH" in result["env"]


def test_the_time_limit_stops_the_child(tmp_path: Path) -> None:  # Y12
    ending = supervised(
        tmp_path, "emit('phase', name='train'); time.sleep(60)", LimitsSection(system_available_pct=0, minutes=1 / 60)
    )
    assert ending.breach is not None and ending.breach.limit == "minutes"
    assert ending.breach.phase == "train" and ending.breach.measured > ending.breach.allowed == 1 / 60
    assert ending.exit_code == -signal.SIGTERM
    assert ending.result is None


def test_growing_memory_is_stopped_by_the_process_limit(tmp_path: Path) -> None:  # Y02
    body = """
    kept = []
    for step in range(1, 200):
        kept.append(bytearray(b'x' * 50_000_000)); emit('step', step=step, loss=1.0); time.sleep(0.1)
    """
    ending = supervised(tmp_path, body, LimitsSection(system_available_pct=0, process_gb=0.4))
    assert ending.breach is not None and ending.breach.limit == "process_gb"
    assert 0.4 < ending.breach.measured < 1.0 and ending.breach.step >= 5
    assert "lower" in ending.breach.remedy


def test_a_reported_framework_peak_over_its_ceiling_stops_the_child(tmp_path: Path) -> None:
    body = "emit('step', step=1, loss=1.0, framework_bytes=10, framework_peak_bytes=2 * 10**9); time.sleep(60)"
    ending = supervised(tmp_path, body, LimitsSection(system_available_pct=0, framework_peak_gb=1.5))
    assert ending.breach is not None and (ending.breach.limit, ending.breach.measured) == ("framework_peak_gb", 2.0)


@pytest.mark.parametrize(("available_pct", "stops"), [(14.9, True), (15.1, False)])
def test_the_guard_line_on_system_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available_pct: float, stops: bool
) -> None:
    # Y01, Y03: the framework's own figure is small and constant; only the system's counts.
    real = psutil.virtual_memory()
    pretended = real._replace(available=int(real.total * available_pct / 100))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: pretended)
    ending = supervised(
        tmp_path,
        "emit('step', step=1, loss=1.0, framework_bytes=1000); time.sleep(1); emit('done', result={})",
        LimitsSection(),
    )
    assert (ending.breach is not None) is stops
    if ending.breach is not None:
        assert ending.breach.limit == "system_available_pct"
        assert ending.breach.measured == pytest.approx(14.9, abs=0.01)


def test_a_child_that_ignores_sigterm_is_killed_with_all_it_started(tmp_path: Path) -> None:
    body = """
    import subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = 'import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)'
    inner = subprocess.Popen([sys.executable, '-c', code])
    emit('grandchild', pid=inner.pid)
    time.sleep(60)
    """
    pids: list[int] = []
    ending = supervised(
        tmp_path, body, LimitsSection(system_available_pct=0, minutes=1.5 / 60),
        on_event=lambda event: pids.append(event["pid"]) if event["event"] == "grandchild" else None,
    )  # fmt: skip
    assert ending.exit_code == -signal.SIGKILL
    assert pids
    deadline = time.monotonic() + 3
    while psutil.pid_exists(pids[0]) and psutil.Process(pids[0]).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the grandchild lives on"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_stops_the_child(tmp_path: Path, number: signal.Signals) -> None:
    threading.Timer(1.0, lambda: os.kill(os.getpid(), number)).start()
    before = signal.getsignal(number)
    ending = supervised(tmp_path, "time.sleep(60)")
    assert ending.stopped_by == number.name
    assert ending.problem is None and ending.result is None
    assert signal.getsignal(number) is before


def test_samples_hold_process_tree_and_system(tmp_path: Path) -> None:
    body = """
    kept = bytearray(b'x' * 200_000_000); emit('step', step=1, loss=1.0, framework_bytes=123)
    time.sleep(1); emit('done', result={})
    """
    ending = supervised(tmp_path, body)
    assert len(ending.samples) >= 5
    assert ending.process_peak_bytes > 200_000_000
    last = ending.samples[-1]
    assert last.framework_bytes == 123
    assert 0 < last.system_available_bytes < last.system_total_bytes
    assert [sample.seconds for sample in ending.samples] == sorted(sample.seconds for sample in ending.samples)
