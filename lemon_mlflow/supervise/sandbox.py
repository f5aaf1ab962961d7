"""The surroundings of a child process: a clean environment, no hub, a folder of its own.

Covered: environment variables come from an allow-list, so no token, no MLFLOW_* and no PYTHONPATH reaches the child; the
hub libraries are told to stay offline; standard input is empty; the child has its own process group.

Not covered: the network itself is not cut, and the child can read every file that its user can.
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

_KEPT = {
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "TERM",
    "SHELL",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "LEMON_CACHE",
    "CUBLAS_WORKSPACE_CONFIG",
    "NUMBER_OF_PROCESSORS",
    "SYSTEMROOT",
}
_KEPT_PREFIXES = ("LC_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "CUDA_", "NVIDIA_", "PYTORCH_", "MLX_", "METAL_")
_FORCED = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUTF8": "1",
    "PYTHONUNBUFFERED": "1",
    # Sets of names are iterated in the same order in every process.
    "PYTHONHASHSEED": "0",
}


def child_environment(parent: Mapping[str, str], backend: str = "") -> dict[str, str]:
    """The child's whole environment.

    Args:
        parent: usually `os.environ`.
        backend: `mlx` on a Linux CPU gets a fast BLAS preloaded where one is installed; see `mlx_blas`.
    """
    kept = {name: value for name, value in parent.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    library = mlx_blas(parent) if backend == "mlx" else ""
    preload = {"LD_PRELOAD": library} if library else {}
    return {**kept, **_FORCED, **preload}


def mlx_blas(parent: Mapping[str, str]) -> str:
    """The library that takes over mlx's float32 products on a Linux CPU, or "".

    The Linux wheel of mlx carries a reference BLAS; torch's CPU library has the same functions some twenty times faster.
    Results differ in the last bits, so the choice is recorded with the run; `LEMON_MLX_BLAS=bundled` keeps mlx's own.
    """
    if platform.system() != "Linux" or parent.get("LEMON_MLX_BLAS") == "bundled":
        return ""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return ""
    if spec is None or not spec.origin:
        return ""
    library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    return str(library) if library.is_file() else ""


def worker_command(target: str, job_file: str, descriptor: int) -> list[str]:
    """How the worker is started: the package's own folder is put on the path, since PYTHONPATH is not."""
    root = str(Path(__file__).resolve().parents[2])
    code = (
        f"import sys; sys.path.insert(0, {root!r}); from lemon_mlflow.supervise.worker import main; "
        f"sys.exit(main({target!r}, {job_file!r}, {descriptor}))"
    )
    return [sys.executable, "-c", code]


def die_with_parent() -> None:
    """Called first in the worker: the kernel ends it when its parent dies (Linux); elsewhere its next event does."""
    if platform.system() == "Linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <linux/prctl.h>
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
