"""Looks at memory from outside: the child's process tree, the GPU, the whole system.

    sampler = Sampler(pid)
    sample = sampler.look(framework_bytes=None)

One look costs about 0.1 ms. Finding the child's own children costs ten times that, so it is done once a second: a process
that lives shorter than that can be missed in the tree's figure (never in the system's). The resident memory of a process
tree is a sum: pages that processes share are counted once for each, so it can be more than the tree costs the machine.
"""

from __future__ import annotations

import time
from typing import Any

import psutil

from ..tracking.timeline import Sample

_CHILDREN_SECONDS = 1.0


class Sampler:
    """Memory of one process tree and of the machine; seconds count from when it was made."""

    def __init__(self, pid: int) -> None:
        self._started = time.monotonic()
        self._process: psutil.Process | None
        try:
            self._process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            self._process = None
        self._children: list[psutil.Process] = []
        self._next_children = 0.0
        self._gpu = _Gpu()

    def look(self, framework_bytes: int | None) -> Sample:
        """One sample; `framework_bytes` is what the child last reported."""
        memory = psutil.virtual_memory()
        return Sample(
            time.monotonic() - self._started,
            framework_bytes,
            self._tree_bytes(),
            int(memory.available),
            int(memory.total),
            self._gpu.used_bytes(),
        )

    def peak_bytes(self) -> int:
        """The kernel's own high-water mark of the child (Linux), which no interval can miss; 0 elsewhere."""
        if self._process is None:
            return 0
        try:
            with open(f"/proc/{self._process.pid}/status", encoding="ascii", errors="replace") as status:  # noqa: PTH123
                for line in status:
                    if line.startswith("VmHWM:"):
                        return int(line.split()[1]) * 1024
        except (OSError, ValueError):
            pass
        return 0

    def _tree_bytes(self) -> int:
        if self._process is None:
            return 0
        now = time.monotonic()
        if now >= self._next_children:
            self._next_children = now + _CHILDREN_SECONDS
            try:
                self._children = self._process.children(recursive=True)
            except psutil.Error:
                self._children = []
        total = 0
        for process in [self._process, *self._children]:
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        return total


class _Gpu:
    """Memory used on all NVIDIA GPUs by everybody; None without NVML."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml: Any = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except Exception:  # pynvml raises its own kinds
            self._handles = []

    def used_bytes(self) -> int | None:
        if not self._handles:
            return None
        try:
            return sum(int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles)
        except Exception:
            return None
