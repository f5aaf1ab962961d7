"""Memory that a process took from its C allocator, for frameworks that keep no count of their own (torch on a CPU).

    peak = AllocatorPeak()
    peak.read().peak

Not covered: spikes shorter than the interval, memory-mapped files until they are copied, and C libraries without `mallinfo2`
(glibc has it since 2.33).
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

from .interface import FrameworkMemory


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class AllocatorPeak:
    """Bytes handed out by the C allocator: torch keeps no count of its own on a CPU.

    A thread looks every 20 ms, so a shorter spike can be missed. Memory-mapped weights are not counted until they are copied.
    """

    def __init__(self, every_seconds: float = 0.02) -> None:
        try:
            self._mallinfo: Any = ctypes.CDLL(None).mallinfo2
            self._mallinfo.restype = _MallInfo2
        except (OSError, AttributeError):  # not glibc 2.33 or newer
            self._mallinfo = None
        self._peak = 0
        if self._mallinfo is not None:
            threading.Thread(target=self._watch, args=(every_seconds,), daemon=True).start()

    def _now(self) -> int:
        info = self._mallinfo()
        return int(info.uordblks + info.hblkhd)

    def _watch(self, every_seconds: float) -> None:
        while True:
            self._peak = max(self._peak, self._now())
            time.sleep(every_seconds)

    def read(self) -> FrameworkMemory:
        if self._mallinfo is None:
            return FrameworkMemory(
                0, 0, 0, "unavailable: torch counts nothing on this CPU, and the C library has no mallinfo2"
            )
        now = self._now()
        self._peak = max(self._peak, now)
        return FrameworkMemory(
            now, self._peak, 0, "C allocator of the training process (mallinfo2), sampled every 20 ms"
        )
