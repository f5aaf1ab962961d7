"""The learning rate of each step."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lemon_mlflow.train.schedule import learning_rate


def rates(steps: int, schedule: str, warmup: int = 0, peak: float = 1.0) -> list[float]:
    return [learning_rate(step, steps, peak, schedule, warmup) for step in range(1, steps + 1)]


def test_linear_falls_in_a_line_to_zero_one_step_after_the_last():
    assert rates(4, "linear") == [1.0, 0.75, 0.5, 0.25]
    assert learning_rate(5, 4, 1.0, "linear", 0) == 0.0


def test_constant_stays():
    assert rates(3, "constant", peak=2e-4) == [2e-4, 2e-4, 2e-4]


def test_cosine_falls_along_half_a_cosine():
    assert rates(4, "cosine") == pytest.approx([1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)])
    assert learning_rate(5, 4, 1.0, "cosine", 0) == pytest.approx(0.0)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_warmup_rises_in_a_line_to_the_peak_and_its_first_step_is_not_zero(schedule):
    assert rates(8, schedule, warmup=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_after_warmup_the_rest_of_the_run_is_the_whole_fall():
    assert rates(6, "linear", warmup=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_a_warmup_longer_than_the_run_never_reaches_the_peak():
    assert rates(2, "linear", warmup=10) == [0.1, 0.2]


def test_a_run_of_one_step_uses_the_peak():
    assert [rates(1, schedule) for schedule in ("linear", "cosine", "constant")] == [[1.0], [1.0], [1.0]]


@settings(deadline=None)
@given(
    steps=st.integers(1, 300),
    warmup=st.integers(0, 300),
    schedule=st.sampled_from(["linear", "cosine", "constant"]),
    peak=st.floats(1e-6, 1.0),
)
def test_every_rate_is_above_zero_and_at_most_the_peak_and_never_rises_after_warmup(steps, warmup, schedule, peak):
    found = rates(steps, schedule, warmup, peak)
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in found)
    after = found[warmup:]
    assert after == sorted(after, reverse=True)
