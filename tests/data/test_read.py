"""Data files: what is read, and which lines are refused with which words."""

import json
import os
import subprocess
import sys

import pytest

from lemon_mlflow.config import DataSection
from lemon_mlflow.data.read import Message, fill_instruction, read_folder
from lemon_mlflow.errors import Refusal
from tests.tiny import chat, tiny_folder, tiny_rows, write_jsonl

ANY = DataSection(min_train_rows=1)


def refused(folder, settings=ANY) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read_folder(folder, settings)
    return caught.value


def hashes(folder, settings=ANY) -> list[str]:
    return [row.sha256 for row in read_folder(folder, settings).splits["train"]]


def turns(*pairs) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


# What is read


def test_rows_know_their_split_file_line_and_turns(tmp_path):
    folder = tiny_folder(tmp_path, train=[chat("Hi", "Hello", system="Be brief."), chat("Bye", "See you")])
    data = read_folder(folder, ANY)
    first, second = data.splits["train"]
    assert (first.split, first.where, first.id, first.format) == ("train", "train.jsonl:1", "train.jsonl:1", "messages")
    assert first.messages == (Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Hello"))
    assert second.where == "train.jsonl:2"
    assert [len(data.splits[split]) for split in ("train", "valid", "test")] == [2, 2, 2]


def test_a_completion_row_is_a_chat_of_one_question(tmp_path):
    row = {"prompt": "2 + 2 =", "completion": " 4"}
    data = read_folder(tiny_folder(tmp_path, [row], [row], [row]), ANY)
    assert data.format == "completion"
    assert data.splits["train"][0].messages == (Message("user", "2 + 2 ="), Message("assistant", " 4"))


def test_a_text_row_keeps_its_text_and_has_no_turns(tmp_path):
    row = {"text": " Era uma vez\n"}
    data = read_folder(tiny_folder(tmp_path, [row], [row], [row]), ANY)
    assert (data.format, data.splits["train"][0].text, data.splits["train"][0].messages) == (
        "text",
        " Era uma vez\n",
        (),
    )


def test_a_classification_row_asks_the_instruction_and_answers_the_label(tmp_path):
    row = {"text": "Where is my invoice?", "label": "billing", "accepted": ["other", "billing"]}
    settings = DataSection(instruction="Which team?", labels=("billing", "other"), min_train_rows=1)
    data = read_folder(tiny_folder(tmp_path, [row], [row], [row]), settings)
    found = data.splits["test"][0]
    assert found.messages == (Message("user", "Which team?\n\nWhere is my invoice?"), Message("assistant", "billing"))
    assert (found.label, found.accepted) == ("billing", ("other", "billing"))


def test_rows_with_labels_are_plain_texts_when_the_recipe_says_text(tmp_path):
    row = {"text": "a", "label": "x"}
    data = read_folder(tiny_folder(tmp_path, [row], [row], [row]), DataSection(format="text", min_train_rows=1))
    assert (data.format, data.splits["train"][0].label) == ("text", "")


@pytest.mark.parametrize(
    ("instruction", "asked"),
    [("", "hi"), ("Sort it.", "Sort it.\n\nhi"), ("Sort <{text}>.", "Sort <hi>."), ("{text} or {text}?", "hi or hi?")],
)
def test_the_instruction_says_where_the_text_goes(instruction, asked):
    assert fill_instruction(instruction, "hi") == asked


def test_a_text_with_braces_is_not_filled_in_again():
    assert fill_instruction("Sort: {text}", "{text}{x}") == "Sort: {text}{x}"


@pytest.mark.parametrize(
    ("given", "shown"),
    [({"id": 7}, "7"), ({"id": 0}, "0"), ({"id": "a7"}, "a7"), ({"id": None}, "train.jsonl:1"), ({}, "train.jsonl:1")],
)
def test_a_row_without_an_id_is_called_by_its_place(tmp_path, given, shown):
    folder = tiny_folder(tmp_path, train=[{**chat("a", "b"), **given}])
    assert read_folder(folder, ANY).splits["train"][0].id == shown


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"conversation_id": 0}, "0"),
        ({"conversation_id": "c"}, "c"),
        ({"conversation_id": None}, ""),
        ({}, ""),
    ],
)
def test_conversation_zero_is_a_conversation(tmp_path, given, kept):
    folder = tiny_folder(tmp_path, train=[{**chat("a", "b"), **given}])
    assert read_folder(folder, ANY).splits["train"][0].conversation_id == kept


# Bytes


def test_blank_lines_are_skipped_and_counted_and_line_numbers_stay_true(tmp_path):
    """D02"""
    folder = tiny_folder(tmp_path)
    row = json.dumps(chat("a", "b"))
    (folder / "train.jsonl").write_text(f"{row}\n\n  \t\n{row}\n\n", encoding="utf-8")
    data = read_folder(folder, ANY)
    assert [row.where for row in data.splits["train"]] == ["train.jsonl:1", "train.jsonl:4"]
    assert data.blank_lines == {"train": 3, "valid": 0, "test": 0}


def test_a_last_line_without_a_line_end_is_read(tmp_path):
    folder = tiny_folder(tmp_path)
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in tiny_rows(2)), encoding="utf-8")
    assert len(read_folder(folder, ANY).splits["train"]) == 2


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda raw: b"\xef\xbb\xbf" + raw, id="BOM (D03)"),
        pytest.param(lambda raw: raw.replace(b"\n", b"\r\n"), id="CRLF (D06)"),
        pytest.param(lambda raw: b"\xef\xbb\xbf" + raw.replace(b"\n", b"\r\n"), id="both"),
        pytest.param(lambda raw: b"\n" + raw + b"\n\n", id="blank lines"),
    ],
)
def test_bytes_that_say_nothing_do_not_change_the_row_hashes(tmp_path, change):
    """D03, D06"""
    rows = [chat("Olá, não chegou", "Peço desculpa"), chat("a\nb", "c\r\nd")]
    plain, changed = tiny_folder(tmp_path / "plain", rows), tiny_folder(tmp_path / "changed", rows)
    for split in ("train", "valid", "test"):
        path = changed / f"{split}.jsonl"
        path.write_bytes(change(path.read_bytes()))
    assert (plain / "train.jsonl").read_bytes() != (changed / "train.jsonl").read_bytes()
    assert hashes(plain) == hashes(changed)
    assert read_folder(plain, ANY).content_sha256() == read_folder(changed, ANY).content_sha256()


def test_files_are_read_as_utf8_whatever_the_locale_says(tmp_path):
    """D05"""
    folder = tiny_folder(tmp_path, train=[chat("Não recebi a encomenda", "Peço desculpa pela situação")])
    code = (
        "import locale, sys; from pathlib import Path\n"
        "from lemon_mlflow.config import DataSection; from lemon_mlflow.data.read import read_folder\n"
        "row = read_folder(Path(sys.argv[1]), DataSection(min_train_rows=1)).splits['train'][0]\n"
        "print(locale.getpreferredencoding(False)); print(ascii(row.messages[1].content)); print(row.sha256)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    encoding, content, sha256 = done.stdout.split("\n")[:3]
    assert encoding.lower() not in ("utf-8", "utf8")
    assert content == ascii("Peço desculpa pela situação")
    assert sha256 == hashes(folder)[0]


def test_a_line_in_another_encoding_is_refused_with_its_line(tmp_path):
    folder = tiny_folder(tmp_path)
    good = json.dumps(chat("a", "b")).encode()
    (folder / "train.jsonl").write_bytes(good + b"\n" + '{"text": "ção"}'.encode("latin-1") + b"\n")
    refusal = refused(folder)
    assert (refusal.code, refusal.where, refusal.remedy) == ("not_utf8", "train.jsonl:2", "save the file as UTF-8")


# Hashes


def test_the_hash_of_a_row_ignores_its_id_place_and_key_order(tmp_path):
    """X04"""
    row = {"text": "a", "label": "x", "id": 1, "source": "s"}
    swapped = {"id": 99, "label": "x", "text": "a"}
    other = {"text": "a.", "label": "x"}
    first, second, third = hashes(tiny_folder(tmp_path, [row, swapped, other], [row], [row]))
    assert first == second
    assert first != third


def test_the_hash_of_the_folder_ignores_row_order_but_not_the_split(tmp_path):
    """X11"""
    rows = tiny_rows(3)
    forward = read_folder(tiny_folder(tmp_path / "1", rows), ANY).content_sha256()
    backward = read_folder(tiny_folder(tmp_path / "2", rows[::-1]), ANY).content_sha256()
    moved = read_folder(tiny_folder(tmp_path / "3", rows[:2], [*tiny_rows(2, 100), rows[2]]), ANY).content_sha256()
    assert forward == backward
    assert forward != moved


# What is refused


@pytest.mark.parametrize(
    ("line", "code", "reason"),
    [
        ('{"messages": [}', "bad_json", "column 15"),
        ('{"text": "a"} {"text": "b"}', "bad_json", "Extra data"),
        ("not json", "bad_json", "Expecting value"),
        ('{"text": NaN}', "bad_json", "NaN is not JSON"),
        ("[" * 100_000, "bad_json", ""),
        ('{"text": "half \\ud83d"}', "bad_json", "surrogate"),
        ('["text"]', "bad_row", "a list"),
        ("null", "bad_row", "null"),
        ('"text"', "bad_row", "a text"),
        ("{}", "bad_row", "none of the four"),
        ('{"question": "a", "answer": "b"}', "bad_row", "question, answer"),
    ],
)
def test_a_line_that_is_no_row_is_refused_with_file_line_and_reason(tmp_path, line, code, reason):
    """D01"""
    folder = tiny_folder(tmp_path, train=[{"text": "a"}, {"text": "b"}], valid=[{"text": "c"}], test=[{"text": "d"}])
    with (folder / "train.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(f"{line}\n")
    refusal = refused(folder)
    assert (refusal.code, refusal.where) == (code, "train.jsonl:3")
    assert reason in refusal.message
    assert refusal.remedy


def test_a_whole_emoji_written_as_two_escapes_is_read(tmp_path):
    folder = tiny_folder(tmp_path, [{"text": "a"}], [{"text": "c"}], [{"text": "d"}])
    (folder / "train.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n', encoding="utf-8")
    assert read_folder(folder, ANY).splits["train"][0].text == "😀"


def test_all_bad_lines_of_all_files_are_listed(tmp_path):
    """D01"""
    folder = tiny_folder(tmp_path)
    (folder / "train.jsonl").write_text(f"{{\n{json.dumps(chat('a', 'b'))}\n}}\n", encoding="utf-8")
    write_jsonl(folder / "test.jsonl", [chat("a", "b"), turns(("user", "a"))])
    refusal = refused(folder)
    assert (refusal.code, refusal.where) == ("bad_json", "train.jsonl:1")
    assert "and 2 more bad lines" in refusal.message
    assert [detail.split(": ")[:2] for detail in refusal.details] == [
        ["train.jsonl:1", "bad_json"],
        ["train.jsonl:3", "bad_json"],
        ["test.jsonl:2", "bad_roles"],
    ]


def test_of_many_bad_lines_the_first_twenty_are_listed_and_all_are_counted(tmp_path):
    """D01"""
    folder = tiny_folder(tmp_path)
    (folder / "train.jsonl").write_text("{\n" * 25, encoding="utf-8")
    refusal = refused(folder)
    assert "and 24 more bad lines" in refusal.message
    assert [detail.split(": ")[0] for detail in refusal.details] == [f"train.jsonl:{line}" for line in range(1, 21)]


def test_a_refusal_does_not_repeat_the_texts_of_the_data(tmp_path):
    folder = tiny_folder(tmp_path, train=[turns(("user", "my secret"), ("user", "another secret"))])
    assert "secret" not in json.dumps(refused(folder).as_dict())


@pytest.mark.parametrize(
    ("row", "code", "reason"),
    [
        (turns(("user", "a"), ("user", "b"), ("assistant", "c")), "bad_roles", "turn 2 has role user"),
        (turns(("assistant", "a"), ("user", "b")), "bad_roles", "turn 1 has role assistant"),
        (turns(("system", "s"), ("assistant", "a")), "bad_roles", "turn 2 has role assistant"),
        (turns(("system", "s")), "bad_roles", "the last turn is system"),
        (turns(("user", "a")), "bad_roles", "the last turn is user"),
        (turns(("user", "a"), ("assistant", "b"), ("user", "c")), "bad_roles", "the last turn is user"),
        (turns(("user", "a"), ("system", "s"), ("assistant", "b")), "bad_roles", "turn 2 has role system"),
        (turns(("user", "a"), ("tool", "b")), "bad_roles", "'tool'"),
        (turns(("user", ""), ("assistant", "b")), "empty_content", "turn 1 (user) is empty"),
        (turns(("user", "a"), ("assistant", " \n")), "empty_answer", "turn 2 (assistant) is empty"),
        (turns(("user", 3), ("assistant", "b")), "bad_row", "turn 1 (user) is a number"),
        (turns(("user", "a"), ("assistant", None)), "bad_row", "turn 2 (assistant) is null"),
        (turns(("user", [{"type": "text", "text": "a"}]), ("assistant", "b")), "bad_row", "turn 1 (user) is a list"),
        (turns((["user"], "a")), "bad_roles", "turn 1"),
        ({"messages": []}, "bad_row", "empty"),
        ({"messages": "a"}, "bad_row", "a text"),
        ({"messages": ["a"]}, "bad_row", "turn 1 is a text"),
    ],
)
def test_turns_that_cannot_be_learned_from_are_refused(tmp_path, row, code, reason):
    """K12, K13, D14"""
    refusal = refused(tiny_folder(tmp_path, train=[chat("a", "b"), row]))
    assert (refusal.code, refusal.where) == (code, "train.jsonl:2")
    assert reason in refusal.message


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"prompt": "a", "completion": ""}, "empty_answer"),
        ({"prompt": " ", "completion": "b"}, "empty_content"),
        ({"prompt": "a", "completion": 3}, "bad_row"),
        ({"prompt": ["a"], "completion": "b"}, "bad_row"),
    ],
)
def test_a_completion_row_needs_two_texts(tmp_path, row, code):
    """D14"""
    good = {"prompt": "a", "completion": "b"}
    refusal = refused(tiny_folder(tmp_path, [good, row], [good], [good]))
    assert (refusal.code, refusal.where) == (code, "train.jsonl:2")


@pytest.mark.parametrize(
    ("row", "code", "reason"),
    [
        ({"text": "a", "label": "Billing"}, "unknown_label", "'Billing' is not one of billing, other"),
        ({"text": "a", "label": "billing "}, "unknown_label", "'billing '"),
        ({"text": "a", "label": ""}, "empty_answer", "`label` is empty"),
        ({"text": "a", "label": 1}, "bad_row", "`label` is a number"),
        ({"text": "a", "label": None}, "bad_row", "`label` is null"),
        ({"text": ["a"], "label": "billing"}, "bad_row", "`text` is a list"),
        ({"text": "a", "label": "billing", "accepted": ["other"]}, "bad_row", "own label"),
        ({"text": "a", "label": "billing", "accepted": ["billing", "refund"]}, "unknown_label", "'refund'"),
        ({"text": "a", "label": "billing", "accepted": "billing"}, "bad_row", "a list of labels"),
        ({"text": "a", "label": "billing", "accepted": None}, "bad_row", "a list of labels"),
    ],
)
def test_a_label_outside_the_list_or_no_text_is_refused(tmp_path, row, code, reason):
    """D14"""
    good = {"text": "a", "label": "billing"}
    settings = DataSection(labels=("billing", "other"), min_train_rows=1)
    refusal = refused(tiny_folder(tmp_path, [good], [good, row], [good]), settings)
    assert (refusal.code, refusal.where) == (code, "valid.jsonl:2")
    assert reason in refusal.message


def test_every_row_must_have_the_format_of_the_first(tmp_path):
    """D13"""
    rows = [*tiny_rows(5), {"prompt": "a", "completion": "b"}, chat("x", "y"), {"text": "c"}]
    refusal = refused(tiny_folder(tmp_path, train=rows))
    assert (refusal.code, refusal.where) == ("mixed_formats", "train.jsonl:6")
    assert "format completion, the others messages" in refusal.message
    assert [detail.split(": ")[0] for detail in refusal.details] == ["train.jsonl:6", "train.jsonl:8"]


def test_the_splits_must_have_one_format(tmp_path):
    """D13"""
    refusal = refused(tiny_folder(tmp_path, test=[{"text": "a"}]))
    assert (refusal.code, refusal.where) == ("mixed_formats", "test.jsonl:1")


def test_the_format_that_the_recipe_names_is_asked_of_every_row(tmp_path):
    refusal = refused(tiny_folder(tmp_path), DataSection(format="completion"))
    assert (refusal.code, refusal.where) == ("mixed_formats", "train.jsonl:1")
    assert len(refusal.details) == 10


@pytest.mark.parametrize("count", [1, 2, 3])
def test_too_few_rows_are_refused_with_the_minimum(tmp_path, count):
    """D08"""
    refusal = refused(tiny_folder(tmp_path, train=tiny_rows(count)), DataSection())
    assert refusal.code == "too_few_rows"
    assert refusal.message == f"train has {count} rows, at least 4 are needed"


def test_the_minimum_of_rows_is_enough(tmp_path):
    """D08, D09: one validation row is enough whatever the batch size"""
    folder = tiny_folder(tmp_path, train=tiny_rows(4), valid=tiny_rows(1, 100), test=tiny_rows(1, 200))
    assert {split: len(rows) for split, rows in read_folder(folder, DataSection()).splits.items()} == {
        "train": 4, "valid": 1, "test": 1,
    }  # fmt: skip


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_missing_split_is_refused(tmp_path, split):
    """D11"""
    folder = tiny_folder(tmp_path)
    (folder / f"{split}.jsonl").unlink()
    refusal = refused(folder)
    assert (refusal.code, refusal.where) == ("missing_split", str(folder / f"{split}.jsonl"))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_split_of_blank_lines_alone_is_refused(tmp_path, split):
    folder = tiny_folder(tmp_path)
    (folder / f"{split}.jsonl").write_text("\n\n", encoding="utf-8")
    refusal = refused(folder)
    assert (refusal.code, refusal.where) == ("empty_split", str(folder / f"{split}.jsonl"))


def test_a_missing_folder_and_a_file_in_its_place_are_refused(tmp_path):
    (tmp_path / "data.jsonl").write_text("", encoding="utf-8")
    missing, file = refused(tmp_path / "nowhere"), refused(tmp_path / "data.jsonl")
    assert (missing.code, file.code) == ("data_not_found", "data_not_found")
    assert (missing.message, file.message) == ("the data folder is missing", "the data folder is a file")
