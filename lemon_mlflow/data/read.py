"""Reads train.jsonl, valid.jsonl and test.jsonl into checked rows that know their file and line.

    data = read_folder(Path("projects/triage/data/en"), recipe.data)
    data.splits["train"][0].where            # "train.jsonl:1"

Every row is checked, not the first one: a row of another format, a role out of turn, an empty answer or a label outside
the list is a `Refusal` that names all such places (the first 20). Files are read as UTF-8 whatever the locale says, with
or without BOM and CR; blank lines are skipped and counted.

Not covered here: leaks between splits and duplicates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config import DataSection
from ..errors import Refusal

SPLITS = ("train", "valid", "test")
"""`test` is the holdout: never trained on, never used to choose anything."""

RowFormat = Literal["messages", "completion", "text", "classification"]


@dataclass(frozen=True)
class Message:
    """One turn of a chat. `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Row:
    """One example.

    Attributes:
        split: train, valid or test.
        where: `train.jsonl:12`.
        id: the row's own `id`, else `where`.
        format: which of the four row formats it was written in.
        messages: the chat, ending in the assistant's turn; empty for `text` rows.
        text: the whole text of a `text` row, else "".
        label: the class of a `classification` row, else "".
        accepted: every label that counts as right (an honestly ambiguous row has more than one).
        conversation_id: which conversation it belongs to, "" when it says nothing.
        sha256: hash of what is learned from the row: not of its id, its place, or the order of its keys.
    """

    split: str
    where: str
    id: str
    format: RowFormat
    messages: tuple[Message, ...]
    text: str
    label: str
    accepted: tuple[str, ...]
    conversation_id: str
    sha256: str


@dataclass(frozen=True)
class DataFolder:
    """The three splits of a folder.

    Attributes:
        path: the folder.
        splits: rows by split, in file order.
        files: path of each split's file.
        blank_lines: skipped blank lines by split.
        format: the one format of all rows.
    """

    path: Path
    splits: dict[str, tuple[Row, ...]]
    files: dict[str, Path]
    blank_lines: dict[str, int]
    format: RowFormat

    def content_sha256(self) -> str:
        """Hash of all rows by split, whatever their order, ids, line ends and BOM."""
        parts = {split: sorted(row.sha256 for row in rows) for split, rows in self.splits.items()}
        return hashlib.sha256(_canonical(parts)).hexdigest()


@dataclass(frozen=True)
class _Fault:
    code: str
    where: str
    message: str


class _RowError(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


_REMEDIES = {
    "bad_json": "write one JSON object a line",
    "not_utf8": "save the file as UTF-8",
    "bad_row": "see the row formats in docs/recipe.md",
    "mixed_formats": "write all rows in one format, or set data.format",
    "bad_roles": "write an optional system turn, then user and assistant in turn, ending with assistant",
    "empty_content": "write the turn, or remove the row",
    "empty_answer": "write the answer, or remove the row",
    "unknown_label": "correct the label, or add it to data.labels",
}


def read_folder(folder: Path, settings: DataSection) -> DataFolder:
    """Read and check all three splits.

    Raises:
        Refusal: `data_not_found`, `missing_split`, `empty_split`, `too_few_rows`, or a row fault: `bad_json`, `not_utf8`,
            `bad_row`, `mixed_formats`, `bad_roles`, `empty_content`, `empty_answer`, `unknown_label`.
    """
    files = _find_files(folder)
    faults: list[_Fault] = []
    splits: dict[str, tuple[Row, ...]] = {}
    blanks: dict[str, int] = {}
    expected: RowFormat | None = None if settings.format == "auto" else settings.format
    for split in SPLITS:
        rows: list[Row] = []
        blanks[split] = 0
        for line, parsed in _json_lines(files[split]):
            where = f"{files[split].name}:{line}"
            if parsed is None:
                blanks[split] += 1
            elif isinstance(parsed, _Fault):
                faults.append(parsed)
            else:
                try:
                    expected = expected or _format_of(parsed)
                    rows.append(_checked_row(parsed, split, where, expected, settings))
                except _RowError as error:
                    faults.append(_Fault(error.code, where, str(error)))
        splits[split] = tuple(rows)
    _refuse_faults(faults)
    _refuse_too_few(splits, files, settings)
    assert expected is not None
    return DataFolder(folder, splits, files, blanks, expected)


def _find_files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "missing"
        raise Refusal(
            "data_not_found",
            f"the data folder is {kind}",
            str(folder),
            "set data.path to a folder with train.jsonl, valid.jsonl and test.jsonl",
        )
    files = {split: folder / f"{split}.jsonl" for split in SPLITS}
    for split, path in files.items():
        if not path.is_file():
            why = {
                "train": "there is nothing to train on",
                "valid": "without it nobody sees whether learning generalises",
                "test": "the holdout is mandatory: it is the only evidence that an adapter can be promoted on",
            }[split]
            raise Refusal("missing_split", f"{path.name} is missing: {why}", str(path), f"write {path.name}")
    return files


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | _Fault | None]]:
    """Yields (line from 1, object), (line, fault) or (line, None) for a blank line."""
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            where = f"{path.name}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                yield number, _Fault("not_utf8", where, f"not UTF-8 at byte {error.start}")
                continue
            if not line:
                yield number, None
                continue
            try:
                parsed = json.loads(line, parse_constant=_no_constant)
                if "\\u" in line:
                    _canonical(parsed)
            except UnicodeEncodeError:
                yield (
                    number,
                    _Fault("bad_json", where, "a \\u escape is half of a surrogate pair, which is no character"),
                )
                continue
            except json.JSONDecodeError as error:
                yield number, _Fault("bad_json", where, f"{error.msg} at column {error.colno}")
                continue
            except (RecursionError, ValueError) as error:
                yield number, _Fault("bad_json", where, str(error) or "nested too deeply")
                continue
            if not isinstance(parsed, dict):
                yield number, _Fault("bad_row", where, f"a row is a JSON object, this is {_kind(parsed)}")
                continue
            yield number, parsed


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _format_of(row: dict[str, Any]) -> RowFormat:
    if "messages" in row:
        return "messages"
    if "prompt" in row and "completion" in row:
        return "completion"
    if "text" in row:
        return "classification" if "label" in row else "text"
    raise _RowError(
        "bad_row", f"none of the four row formats has just these keys: {', '.join(map(str, row)) or 'none'}"
    )


def _checked_row(row: dict[str, Any], split: str, where: str, expected: RowFormat, settings: DataSection) -> Row:
    if expected == "text" and "text" in row:
        found: RowFormat = "text"
    else:
        found = _format_of(row)
    if found != expected:
        raise _RowError("mixed_formats", f"this row has format {found}, the others {expected}")
    messages: tuple[Message, ...] = ()
    text = label = ""
    accepted: tuple[str, ...] = ()
    if found == "messages":
        messages = _checked_messages(row["messages"])
    elif found == "completion":
        messages = (
            Message("user", _text(row, "prompt", "empty_content")),
            Message("assistant", _text(row, "completion", "empty_answer")),
        )
    elif found == "text":
        text = _text(row, "text", "empty_content")
    else:
        label, accepted = _checked_label(row, settings)
        prompt = fill_instruction(settings.instruction, _text(row, "text", "empty_content"))
        messages = (Message("user", prompt), Message("assistant", label))
    learned = {"messages": [[m.role, m.content] for m in messages], "text": text, "accepted": sorted(accepted)}
    return Row(
        split=split,
        where=where,
        id=_name(row, "id") or where,
        format=found,
        messages=messages,
        text=text,
        label=label,
        accepted=accepted,
        conversation_id=_name(row, "conversation_id"),
        sha256=hashlib.sha256(_canonical(learned)).hexdigest(),
    )


def fill_instruction(instruction: str, text: str) -> str:
    """The user's turn of a classification row: the instruction with the message in its place."""
    if not instruction:
        return text
    if "{text}" in instruction:
        return instruction.replace("{text}", text)
    return f"{instruction}\n\n{text}"


def _name(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    return "" if value is None else str(value)


def _text(row: dict[str, Any], key: str, empty_code: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise _RowError("bad_row", f"`{key}` is {_kind(value)}, a text is needed")
    if not value.strip():
        raise _RowError(empty_code, f"`{key}` is empty")
    return value


def _checked_messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _RowError("bad_row", f"`messages` is {_kind(value) if value else 'empty'}, a list of turns is needed")
    messages = []
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, dict):
            raise _RowError("bad_row", f"turn {number} is {_kind(turn)}, an object with role and content is needed")
        role, content = turn.get("role"), turn.get("content")
        if role not in ("system", "user", "assistant"):
            raise _RowError("bad_roles", f"turn {number} has role {role!r}"[:80])
        if not isinstance(content, str):
            raise _RowError("bad_row", f"the content of turn {number} ({role}) is {_kind(content)}, a text is needed")
        if not content.strip():
            raise _RowError(
                "empty_answer" if role == "assistant" else "empty_content", f"turn {number} ({role}) is empty"
            )
        messages.append(Message(role, content))
    turns = [message.role for message in messages]
    dialogue = turns[1:] if turns[0] == "system" else turns
    for number, (role, wanted) in enumerate(zip(dialogue, ["user", "assistant"] * len(dialogue), strict=False), 1):
        if role != wanted:
            turn = number + len(turns) - len(dialogue)
            raise _RowError("bad_roles", f"turn {turn} has role {role}, {wanted} is due")
    if not dialogue or dialogue[-1] != "assistant":
        raise _RowError("bad_roles", f"the last turn is {turns[-1]}, an assistant turn is needed to learn from")
    return tuple(messages)


def _checked_label(row: dict[str, Any], settings: DataSection) -> tuple[str, tuple[str, ...]]:
    label = _text(row, "label", "empty_answer")
    accepted = row.get("accepted", [label])
    if not isinstance(accepted, list) or not all(isinstance(item, str) for item in accepted):
        raise _RowError("bad_row", "`accepted` is a list of labels")
    if label not in accepted:
        raise _RowError("bad_row", "`accepted` does not hold the row's own label")
    for item in accepted:
        if settings.labels and item not in settings.labels:
            raise _RowError("unknown_label", f"label {item[:40]!r} is not one of {', '.join(settings.labels)}")
    return label, tuple(accepted)


def _refuse_faults(faults: list[_Fault]) -> None:
    if not faults:
        return
    first = faults[0]
    same = f" (and {len(faults) - 1} more bad lines)" if len(faults) > 1 else ""
    details = tuple(f"{fault.where}: {fault.code}: {fault.message}" for fault in faults[:20])
    raise Refusal(
        first.code, first.message + same, first.where, _REMEDIES[first.code], details if len(faults) > 1 else ()
    )


def _refuse_too_few(splits: dict[str, tuple[Row, ...]], files: dict[str, Path], settings: DataSection) -> None:
    for split in SPLITS:
        if not splits[split]:
            raise Refusal("empty_split", f"{files[split].name} holds no row", str(files[split]), "write rows into it")
    count = len(splits["train"])
    if count < settings.min_train_rows:
        raise Refusal(
            "too_few_rows",
            f"train has {count} rows, at least {settings.min_train_rows} are needed",
            str(files["train"]),
            "write more rows, or lower data.min_train_rows if you mean it",
        )


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
