"""The job that turns a data folder into token rows, before any model is loaded. Runs in a child process.

    result = prepare(PrepareJob(...), emit)

It writes `tokens.npz` (read back with `load_token_rows`), `removed.jsonl` (ids and reasons, never texts) and returns the
counts that go into `data/report.json`. The same length policy holds for all three splits.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import DataSection
from ..errors import Refusal
from .read import SPLITS, Row, read_folder
from .tokens import Encoded, encode


@dataclass(frozen=True)
class PrepareJob:
    """What the job needs.

    Attributes:
        data_folder: the folder with the three files.
        data: the recipe's data section, as a dict.
        tokenizer_folder: the base's folder.
        max_seq_length: longest row kept, in tokens.
        out: folder for the job's files.
    """

    data_folder: str
    data: dict[str, Any]
    tokenizer_folder: str
    max_seq_length: int
    out: str


@dataclass(frozen=True)
class TokenRow:
    """One row, ready for a batch. `ids` (int32, shape [tokens]) and `trainable` (bool, same shape)."""

    where: str
    ids: np.ndarray
    trainable: np.ndarray

    @property
    def trainable_tokens(self) -> int:
        """Tokens that carry loss; position 0 is never predicted."""
        return int(self.trainable[1:].sum())


def prepare(job: PrepareJob, emit: Callable[..., None]) -> dict[str, Any]:
    """Tokenise all splits and write them.

    Returns:
        counts by split, as JSON types; see `_split_report`.

    Raises:
        Refusal: everything of `read_folder` and `encode`, and `no_trainable_tokens`, `too_few_rows`, `bad_tokenizer`.
    """
    settings = DataSection.model_validate(job.data)
    data = read_folder(Path(job.data_folder), settings)
    tokenizer = _load_tokenizer(job.tokenizer_folder)
    emit("phase", name="tokenise", total=sum(len(rows) for rows in data.splits.values()))
    out = Path(job.out)
    kept: dict[str, list[TokenRow]] = {}
    removed: list[dict[str, Any]] = []
    report: dict[str, Any] = {}
    done = 0
    for split in SPLITS:
        lengths: list[int] = []
        kept[split] = []
        differing = 0
        for row in data.splits[split]:
            encoded = encode(tokenizer, row, settings.train_on)
            lengths.append(len(encoded.ids))
            differing += not encoded.prompt_is_prefix
            reason = _why_removed(encoded, row, job.max_seq_length)
            if reason:
                removed.append(
                    {"split": split, "where": row.where, "id": row.id, "reason": reason, "tokens": lengths[-1]}
                )
            else:
                kept[split].append(_token_row(encoded, row))
            done += 1
            if done % 200 == 0:
                emit("progress", done=done)
        report[split] = _split_report(
            data.splits[split], kept[split], lengths, data.blank_lines[split], removed, split, bool(settings.labels)
        )
        report[split]["prompt_differs"] = differing
    _refuse_nothing_left(report, settings, job)
    _save(out / "tokens.npz", kept)
    (out / "removed.jsonl").write_text("".join(json.dumps(item) + "\n" for item in removed), encoding="utf-8")
    return {
        "format": data.format,
        "content_sha256": data.content_sha256(),
        "max_seq_length": job.max_seq_length,
        "train_on": settings.train_on if data.format != "text" else "all_tokens",
        "splits": report,
        "not_checked": ["leaks between splits", "duplicates", "personal data"],
    }


def _load_tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer  # late: importing it costs seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the library raises many kinds
        raise Refusal(
            "bad_tokenizer",
            f"the base's tokenizer cannot be loaded ({type(error).__name__})",
            folder,
            "use a base folder with tokenizer.json or tokenizer.model",
        ) from error
    if tokenizer.eos_token_id is None:
        raise Refusal(
            "bad_tokenizer", "the base's tokenizer names no end token", folder, "set eos_token in tokenizer_config.json"
        )
    return tokenizer


def _why_removed(encoded: Encoded, row: Row, limit: int) -> str:
    if len(encoded.ids) > limit:
        return "over_length"
    if encoded.trainable_tokens == 0:
        if row.split == "train":
            raise Refusal(
                "no_trainable_tokens", f"row {row.id} leaves no token to learn from", row.where, "write its answer"
            )
        return "no_trainable_tokens"
    return ""


def _token_row(encoded: Encoded, row: Row) -> TokenRow:
    trainable = np.asarray(encoded.trainable, dtype=bool)
    trainable[0] = False
    return TokenRow(row.where, np.asarray(encoded.ids, dtype=np.int32), trainable)


def _split_report(
    rows: tuple[Row, ...],
    kept: list[TokenRow],
    lengths: list[int],
    blank: int,
    removed: list[dict[str, Any]],
    split: str,
    name_labels: bool,
) -> dict[str, Any]:
    reasons = Counter(item["reason"] for item in removed if item["split"] == split)
    labels = Counter(row.label for row in rows if row.label)
    return {
        "rows_read": len(rows),
        "rows_kept": len(kept),
        "removed_over_length": reasons.get("over_length", 0),
        "removed_no_trainable_tokens": reasons.get("no_trainable_tokens", 0),
        "blank_lines": blank,
        "tokens_non_padding": int(sum(len(row.ids) for row in kept)),
        "tokens_trainable": int(sum(row.trainable_tokens for row in kept)),
        "longest_row_tokens": max(lengths, default=0),
        "longest_kept_tokens": max((len(row.ids) for row in kept), default=0),
        # Without data.labels a "label" can be any text, and texts do not go into reports.
        "labels": dict(sorted(labels.items())) if name_labels else {},
        "ambiguous_rows": sum(len(row.accepted) > 1 for row in rows),
    }


def _refuse_nothing_left(report: dict[str, Any], settings: DataSection, job: PrepareJob) -> None:
    for split in SPLITS:
        counts = report[split]
        if counts["rows_kept"]:
            continue
        raise Refusal(
            "no_trainable_tokens",
            f"no row of {split}.jsonl is left: {counts['removed_over_length']} of {counts['rows_read']} are longer than "
            f"{job.max_seq_length} tokens (the longest has {counts['longest_row_tokens']})",
            f"{split}.jsonl",
            f"raise train.max_seq_length to {counts['longest_row_tokens']}, or shorten the rows",
        )
    left, wanted = report["train"]["rows_kept"], settings.min_train_rows
    if left < wanted:
        raise Refusal(
            "too_few_rows",
            f"{left} train rows are left after {report['train']['removed_over_length']} over-long ones were removed, "
            f"at least {wanted} are needed",
            "train.jsonl",
            "raise train.max_seq_length, or lower data.min_train_rows if you mean it",
        )


def _save(path: Path, kept: dict[str, list[TokenRow]]) -> None:
    arrays: dict[str, np.ndarray] = {}
    for split, rows in kept.items():
        arrays[f"{split}_lengths"] = np.asarray([len(row.ids) for row in rows], dtype=np.int64)
        arrays[f"{split}_ids"] = np.concatenate([row.ids for row in rows])
        arrays[f"{split}_trainable"] = np.concatenate([row.trainable for row in rows])
        arrays[f"{split}_where"] = np.asarray([row.where for row in rows])
    np.savez(path, **arrays)  # type: ignore[arg-type]


def load_token_rows(path: Path, split: str) -> list[TokenRow]:
    """The kept rows of one split, in file order."""
    with np.load(path, allow_pickle=False) as stored:
        ends = np.cumsum(stored[f"{split}_lengths"])[:-1]
        ids = np.split(stored[f"{split}_ids"], ends)
        trainable = np.split(stored[f"{split}_trainable"], ends)
        return [TokenRow(str(w), i, t) for w, i, t in zip(stored[f"{split}_where"], ids, trainable, strict=True)]


def as_json(job: PrepareJob) -> dict[str, Any]:
    """The job as JSON types, for the worker."""
    return asdict(job)
