"""What is told of a machine, and what is said when it cannot be told."""

import json
import sys
from types import SimpleNamespace

import pytest

from lemon_mlflow.provenance import environment
from lemon_mlflow.provenance.environment import Gpu, git_commit, gpus, machine, packages


class NVMLError_LibraryNotFound(Exception):
    pass


def fake_nvml(devices=(), error=None):
    """A module as pynvml is: names may be bytes, as its older versions give them."""
    closed = []

    def init():
        if error:
            raise error

    return SimpleNamespace(
        nvmlInit=init,
        nvmlShutdown=lambda: closed.append(True),
        nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetCount=lambda: len(devices),
        nvmlDeviceGetHandleByIndex=lambda index: devices[index],
        nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(total=device[1]),
        nvmlDeviceGetName=lambda device: device[0],
        closed=closed,
    )


def test_gpus_are_listed_with_memory_and_driver(monkeypatch):
    module = fake_nvml([(b"First", 80), ("Second", 40)])
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert gpus() == ((Gpu("First", 80, "580.1"), Gpu("Second", 40, "580.1")), "")
    assert module.closed == [True]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (None, "the package nvidia-ml-py is not installed"),
        (fake_nvml(error=NVMLError_LibraryNotFound()), "no NVIDIA driver (NVML not found)"),
        (fake_nvml(error=PermissionError()), "PermissionError"),
        (fake_nvml(), "NVML lists no device"),
    ],
)
def test_no_gpu_comes_with_the_reason(monkeypatch, module, why):
    """Y17"""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert gpus() == ((), why)


def test_a_gpu_that_fails_while_it_is_asked_is_a_reason_too(monkeypatch):
    """Y17"""
    module = fake_nvml([("First", 80)])
    module.nvmlDeviceGetMemoryInfo = lambda device: 1 / 0
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert gpus() == ((), "ZeroDivisionError")
    assert module.closed == [True]


def test_packages_are_sorted_pins_of_what_is_installed():
    lines = packages().splitlines()
    assert lines == sorted(lines, key=str.lower)
    assert len(lines) == len(set(lines))
    assert any(line.startswith("lemon-mlflow==") for line in lines)
    assert all(name and version for name, _, version in (line.partition("==") for line in lines))


def test_the_machine_is_told_in_json_types(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([("First", 80)]))
    told = json.loads(json.dumps(machine(tmp_path)))
    assert told["gpus"] == [{"name": "First", "memory_bytes": 80, "driver": "580.1"}]
    assert told["gpus_unavailable"] == ""
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["memory_total_gb"] > 0.1
    assert told["cpu_count_logical"] >= 1


def fake_git(folder, monkeypatch, script: str) -> None:
    program = folder / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for git is a shell script")
@pytest.mark.parametrize(
    ("script", "commit"),
    [
        ('case "$*" in *rev-parse*) echo abc123;; *) ;; esac', "abc123"),
        ('case "$*" in *rev-parse*) echo abc123;; *status*) echo " M train.jsonl";; esac', "abc123-dirty"),
        ("echo 'fatal: not a git repository' >&2; exit 128", ""),
    ],
)
def test_the_commit_is_told_with_a_mark_when_files_differ(tmp_path, monkeypatch, script, commit):
    fake_git(tmp_path, monkeypatch, script)
    assert git_commit(tmp_path) == commit


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit(tmp_path) == ""


@pytest.mark.parametrize(
    ("cpuinfo", "flags"),
    [
        ({"flags": "fpu avx2 avx512f amx_bf16"}, "avx2 avx512f amx_bf16"),
        ({"Features": "fp asimd bf16"}, "asimd bf16"),
        ({}, ""),
    ],
)
def test_the_flags_that_choose_kernels_are_told(monkeypatch, cpuinfo, flags):
    monkeypatch.setattr(environment, "_proc_cpuinfo", lambda key: cpuinfo.get(key, ""))
    assert environment._cpu_flags() == flags
