"""The reload test: a fresh process loads base and adapter from disk and must compute what the training process computed.

    reload(ReloadJob(...), emit)

It proves that the saved files are complete, that they go back on the same base, and that the adapter does something. It says
nothing about whether what it does is good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.interface import Backend, LoadSpec, open_backend
from ..data.batches import make_batch
from ..data.prepare import TokenRow, load_token_rows
from ..errors import Failure
from ..train.loop import probe_rows


@dataclass(frozen=True)
class ReloadJob:
    """What the job needs: the backend, the fields of `LoadSpec`, the adapter's folder, tokens.npz and probes.npz."""

    backend: str
    base: dict[str, Any]
    adapter: str
    tokens: str
    probes: str


def reload(job: ReloadJob, emit: Callable[..., None]) -> dict[str, Any]:
    """Compare logits of a few validation rows.

    Differences are the largest absolute difference of any logit, divided by the largest absolute logit of the training
    process. float32 on one machine gives 0; the tolerance leaves room for another order of additions, in bfloat16 for its
    8 bits of mantissa.

    Raises:
        Failure: `adapter_incomplete`, `reload_differs`, `adapter_is_base`.
    """
    emit("phase", name="reload", total=0)
    rows = probe_rows(load_token_rows(Path(job.tokens), "valid"))
    backend = open_backend(job.backend)
    backend.seed(0)
    base = backend.load_base(LoadSpec(**job.base))
    without = _logits(backend, rows)
    backend.load_adapter(Path(job.adapter))
    after = _logits(backend, rows)
    with np.load(job.probes, allow_pickle=False) as stored:
        trained = [stored[f"row{number}"] for number in range(len(rows))]
    tolerance = 2e-2 if base.quantization.compute_dtype in ("bfloat16", "float16") else 1e-4
    difference, effect = _difference(trained, after), _difference(without, after)
    result = {"rows": len(rows), "difference": difference, "tolerance": tolerance, "effect_of_adapter": effect}
    emit("reloaded", **result)
    if not difference <= tolerance:
        raise Failure(
            "reload_differs",
            f"reloaded logits differ from the training process's by {difference:.2e} of their size "
            f"(at most {tolerance:.0e})",
            "adapter/",
            "do not use this adapter; report the base and the versions",
        )
    if not effect > max(difference, 1e-7):
        raise Failure(
            "adapter_is_base",
            "base and adapter give the same logits: the adapter does nothing",
            "adapter/",
            "train longer, with a higher learning rate, or with more layers",
        )
    return result


def _logits(backend: Backend, rows: list[TokenRow]) -> list[np.ndarray]:
    return [backend.logits(make_batch([row], [0])) for row in rows]


def _difference(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Largest absolute difference over the largest absolute value of `one`; NaN counts as infinite."""
    size = max(float(np.abs(part).max()) for part in one)
    far = max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
    return far / size if np.isfinite(far) and size > 0 else float("inf")
