"""The order of the rows, and batches of them: the same on both backends, a function of the seed and nothing else.

    plan = plan_epoch([len(r.ids) for r in rows], batch_size=2, gradient_accumulation=4, seed=7, epoch=0)
    plan[0]                 # first step: up to 4 micro-batches, each an array of up to 2 row numbers
    make_batch(rows, plan[0][0])

Rows of similar length share a micro-batch, so that little is padded; the micro-batches are then shuffled. Every row is used
once an epoch: the last micro-batch and the last accumulation may be smaller than the others, they are never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .prepare import TokenRow


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right.

    Attributes:
        tokens: int32, shape [rows, longest]; padding is 0 and means nothing.
        trainable: bool, same shape; True where predicting this token counts in the loss. Column 0 is all False.
        lengths: int64, shape [rows].
    """

    tokens: np.ndarray
    trainable: np.ndarray
    lengths: np.ndarray

    @property
    def tokens_all(self) -> int:
        """Tokens that are computed, padding included."""
        return int(self.tokens.size)

    @property
    def tokens_non_padding(self) -> int:
        """Tokens of the rows themselves."""
        return int(self.lengths.sum())

    @property
    def tokens_trainable(self) -> int:
        """Tokens that carry loss."""
        return int(self.trainable.sum())


def make_batch(rows: Sequence[TokenRow], numbers: Sequence[int] | np.ndarray) -> Batch:
    """The rows with these numbers as one batch."""
    chosen = [rows[int(number)] for number in numbers]
    lengths = np.asarray([len(row.ids) for row in chosen], dtype=np.int64)
    tokens = np.zeros((len(chosen), int(lengths.max())), dtype=np.int32)
    trainable = np.zeros(tokens.shape, dtype=bool)
    for line, row in enumerate(chosen):
        tokens[line, : len(row.ids)] = row.ids
        trainable[line, : len(row.ids)] = row.trainable
    trainable[:, 0] = False
    return Batch(tokens, trainable, lengths)


def plan_epoch(
    lengths: Sequence[int], batch_size: int, gradient_accumulation: int, seed: int, epoch: int
) -> list[list[np.ndarray]]:
    """Row numbers for one epoch: steps of micro-batches.

    Args:
        lengths: tokens of each row.
        epoch: from 0; each epoch has another order.
    """
    generator = np.random.default_rng([seed, epoch])
    by_length = np.lexsort((generator.permutation(len(lengths)), np.asarray(lengths)))
    micro = [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]
    shuffled = [micro[number] for number in generator.permutation(len(micro))]
    return [shuffled[start : start + gradient_accumulation] for start in range(0, len(shuffled), gradient_accumulation)]


def evaluation_batches(lengths: Sequence[int], batch_size: int) -> list[np.ndarray]:
    """All rows, sorted by length, in batches; the last may be smaller."""
    by_length = np.argsort(np.asarray(lengths), kind="stable")
    return [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]


def steps_per_epoch(rows: int, batch_size: int, gradient_accumulation: int) -> int:
    """Optimizer updates in one epoch."""
    return math.ceil(math.ceil(rows / batch_size) / gradient_accumulation)
