"""Which machine and which packages a run had: `environment/machine.json` and `environment/packages.txt`.

Nothing here imports a backend or needs a GPU; what a machine cannot tell is left out, never guessed.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU as NVML sees it; memory in bytes."""

    name: str
    memory_bytes: int
    driver: str


def gpus() -> tuple[tuple[Gpu, ...], str]:
    """The NVIDIA GPUs, and why there are none ("" when there are some)."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # pynvml raises its own kinds, and ImportError without the package
        return (), _why(error)
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(Gpu(_text(pynvml.nvmlDeviceGetName(handle)), int(memory.total), driver))
        return tuple(found), "" if found else "NVML lists no device"
    except Exception as error:
        return (), _why(error)
    finally:
        pynvml.nvmlShutdown()


def _why(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "the package nvidia-ml-py is not installed"
    return "no NVIDIA driver (NVML not found)" if "NotFound" in type(error).__name__ else type(error).__name__


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def packages() -> str:
    """Installed distributions as `name==version` lines, sorted."""
    found = {f"{dist.metadata['Name']}=={dist.version}" for dist in metadata.distributions() if dist.metadata["Name"]}
    return "".join(f"{line}\n" for line in sorted(found, key=str.lower))


def machine(project: Path) -> dict[str, Any]:
    """OS, chip, memory, GPUs, Python and the project's git commit, as JSON types."""
    found, why_none = gpus()
    memory = psutil.virtual_memory()
    return {
        "os": platform.platform(),
        "system": platform.system(),
        "architecture": platform.machine(),
        "python": sys.version.split()[0],
        "cpu": _cpu_name(),
        "cpu_flags": _cpu_flags(),
        "cpu_count_logical": psutil.cpu_count(),
        "cpu_count_physical": psutil.cpu_count(logical=False),
        "memory_total_gb": round(memory.total / 1e9, 3),
        "swap_total_gb": round(psutil.swap_memory().total / 1e9, 3),
        "gpus": [vars(gpu) for gpu in found],
        "gpus_unavailable": why_none,
        "nvidia_smi": _nvidia_smi(),
        "git_commit": git_commit(project),
    }


def git_commit(folder: Path) -> str:
    """The commit of the folder's checkout, with `-dirty` when tracked files differ; "" outside git."""
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    if not commit:
        return ""
    dirty = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if dirty else commit


def _cpu_name() -> str:
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string")
    return _proc_cpuinfo("model name") or platform.processor()


def _cpu_flags() -> str:
    """The flags that decide which kernels run; other kernels give other adapter hashes."""
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")
    flags = (_proc_cpuinfo("flags") or _proc_cpuinfo("Features")).split()
    return " ".join(flag for flag in wanted if flag in flags)


def _proc_cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":", 1)[0].strip() == key), "")


def _nvidia_smi() -> str:
    return _output(
        "nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used,temperature.gpu", "--format=csv"
    )


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
