"""The learning rate of each step, on both backends the same number."""

from __future__ import annotations

import math


def learning_rate(step: int, total_steps: int, peak: float, schedule: str, warmup_steps: int) -> float:
    """The rate used by one optimizer update.

    It rises in a line to `peak` over `warmup_steps` (the first step is not zero), and then stays (`constant`), falls in a
    line (`linear`) or along half a cosine (`cosine`), so that it would be zero one step after the last.

    Args:
        step: from 1.
        total_steps: steps of the whole run.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    done = (step - 1 - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * (1.0 - done) if schedule == "linear" else peak * 0.5 * (1.0 + math.cos(math.pi * done))
