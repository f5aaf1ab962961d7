"""The order of rows: every row once an epoch, the same for the same seed, little padding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lemon_mlflow.data.batches import evaluation_batches, make_batch, plan_epoch, steps_per_epoch
from lemon_mlflow.data.prepare import TokenRow

_lengths = st.lists(st.integers(2, 512), min_size=1, max_size=80)
_batch = st.integers(1, 9)
_accumulation = st.integers(1, 5)
_seed = st.integers(0, 2**32 - 1)


def row(length: int, trained_from: int) -> TokenRow:
    ids = np.arange(1, length + 1, dtype=np.int32)
    return TokenRow(f"train.jsonl:{length}", ids, ids > trained_from)


def numbers(plan) -> list[list[list[int]]]:
    return [[micro.tolist() for micro in step] for step in plan]


def padding_share(lengths, batches) -> float:
    rows = [row(length, 1) for length in lengths]
    made = [make_batch(rows, batch) for batch in batches]
    computed = sum(batch.tokens_all for batch in made)
    return 1 - sum(batch.tokens_non_padding for batch in made) / computed


def test_three_token_counts_are_told_apart():
    """K15"""
    batch = make_batch([row(3, 1), row(9, 4)], [0, 1])
    assert (batch.tokens_all, batch.tokens_non_padding, batch.tokens_trainable) == (18, 12, 2 + 5)
    assert batch.tokens.shape == (2, 9)
    assert batch.lengths.tolist() == [3, 9]


def test_rows_are_padded_on_the_right_and_padding_carries_no_loss():
    batch = make_batch([row(3, 1), row(5, 2)], [1, 0])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]]
    assert batch.trainable.tolist() == [[False, False, True, True, True], [False, True, True, False, False]]
    assert (batch.tokens.dtype, batch.trainable.dtype, batch.lengths.dtype) == (np.int32, bool, np.int64)


def test_the_first_token_is_never_a_label():
    batch = make_batch([row(3, 0)], [0])
    assert batch.trainable.tolist() == [[False, True, True]]
    assert batch.tokens_trainable == 2


@settings(deadline=None)
@given(lengths=_lengths, batch_size=_batch, accumulation=_accumulation, seed=_seed, epoch=st.integers(0, 50))
def test_every_row_is_used_exactly_once_an_epoch(lengths, batch_size, accumulation, seed, epoch):
    plan = numbers(plan_epoch(lengths, batch_size, accumulation, seed, epoch))
    assert sorted(number for step in plan for micro in step for number in micro) == list(range(len(lengths)))


@settings(deadline=None)
@given(lengths=_lengths, batch_size=_batch, accumulation=_accumulation, seed=_seed)
def test_only_one_micro_batch_and_only_the_last_step_may_be_smaller(lengths, batch_size, accumulation, seed):
    """S03: they are smaller, never dropped"""
    plan = numbers(plan_epoch(lengths, batch_size, accumulation, seed, 0))
    sizes = [len(micro) for step in plan for micro in step]
    assert sum(size < batch_size for size in sizes) <= 1
    assert all(len(step) == accumulation for step in plan[:-1])
    assert 1 <= len(plan[-1]) <= accumulation
    assert len(plan) == steps_per_epoch(len(lengths), batch_size, accumulation)


def test_a_last_micro_batch_of_one_row_is_kept():
    plan = numbers(plan_epoch([4] * 7, 3, 2, 7, 0))
    assert sorted(len(micro) for step in plan for micro in step) == [1, 3, 3]
    assert [len(step) for step in plan] == [2, 1]


@pytest.mark.parametrize(
    ("rows", "batch_size", "accumulation", "steps"),
    [(1, 4, 4, 1), (8, 2, 2, 2), (9, 2, 2, 3), (10, 3, 1, 4), (5, 1, 2, 3), (100, 1, 1, 100)],
)
def test_steps_an_epoch_round_up(rows, batch_size, accumulation, steps):
    assert steps_per_epoch(rows, batch_size, accumulation) == steps


@settings(deadline=None)
@given(lengths=_lengths, batch_size=_batch, accumulation=_accumulation, seed=_seed, epoch=st.integers(0, 50))
def test_the_same_seed_and_epoch_give_the_same_order(lengths, batch_size, accumulation, seed, epoch):
    """S06"""
    first = plan_epoch(lengths, batch_size, accumulation, seed, epoch)
    np.random.seed(1)  # the global generator must not matter
    again = plan_epoch(np.asarray(lengths), batch_size, accumulation, seed, epoch)
    assert numbers(first) == numbers(again)


def test_another_seed_and_another_epoch_give_another_order():
    """S06"""
    lengths = list(range(8, 72))
    plans = [
        numbers(plan_epoch(lengths, 4, 2, seed, epoch)) for seed, epoch in [(7, 0), (8, 0), (7, 1), (8, 1), (1, 7)]
    ]
    assert all(plans[i] != plans[j] for i in range(5) for j in range(i))


def test_rows_of_equal_length_meet_other_rows_in_each_epoch():
    plans = [numbers(plan_epoch([9] * 32, 4, 1, 7, epoch)) for epoch in range(2)]
    first, second = ({frozenset(micro) for step in plan for micro in step} for plan in plans)
    assert first != second


def test_short_and_long_batches_are_mixed_in_time():
    plan = plan_epoch(list(range(8, 72)), 4, 1, 7, 0)
    longest = [int(step[0].max()) for step in plan]
    assert longest != sorted(longest)


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_like_length_share_a_batch_so_that_little_is_padded(seed):
    """L09"""
    lengths = np.random.default_rng(seed).integers(8, 513, 64).tolist()
    planned = [micro for step in plan_epoch(lengths, 8, 1, seed, 0) for micro in step]
    in_file_order = [range(start, start + 8) for start in range(0, 64, 8)]
    assert padding_share(lengths, planned) < 0.15
    assert padding_share(lengths, evaluation_batches(lengths, 8)) < 0.15
    assert padding_share(lengths, in_file_order) > 0.3


@settings(deadline=None)
@given(lengths=_lengths, batch_size=_batch)
def test_evaluation_uses_every_row_once_with_a_smaller_last_batch(lengths, batch_size):
    """D09"""
    batches = [batch.tolist() for batch in evaluation_batches(lengths, batch_size)]
    assert sorted(number for batch in batches for number in batch) == list(range(len(lengths)))
    assert all(len(batch) == batch_size for batch in batches[:-1])


def test_one_evaluation_row_is_one_batch_of_one():
    """D09"""
    assert [batch.tolist() for batch in evaluation_batches([5], 4)] == [[0]]
