"""The data job: what is removed and counted, what is refused, and what a batch gets in the end."""

import json

import numpy as np
import pytest

from lemon_mlflow.data.batches import make_batch
from lemon_mlflow.data.prepare import PrepareJob, as_json, load_token_rows, prepare
from lemon_mlflow.errors import Refusal
from tests.tiny import CHATML, chat, load_tokenizer, tiny_folder, tiny_rows, tiny_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("base"))


@pytest.fixture
def job(tmp_path, base):
    """Makes a job over the given splits; `out` is `tmp_path / "out"`."""

    def make(limit=512, tokenizer=base, data=None, **splits) -> PrepareJob:
        (tmp_path / "out").mkdir(exist_ok=True)
        folder = tiny_folder(tmp_path / "data", **splits)
        settings = {"min_train_rows": 1, **(data or {})}
        return PrepareJob(str(folder), settings, str(tokenizer), limit, str(tmp_path / "out"))

    return make


def run(job):
    events = []
    report = prepare(job, lambda kind, **fields: events.append((kind, fields)))
    return report, events


def refused(job) -> Refusal:
    with pytest.raises(Refusal) as caught:
        run(job)
    return caught.value


def text_of(tokens: int) -> dict:
    """A text row that has `tokens` tokens with its end token: a digit is always one token here."""
    return {"text": "7" * (tokens - 1)}


def texts(*tokens: int) -> list[dict]:
    return [text_of(count) for count in tokens]


def removed(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "out" / "removed.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_row_of_exactly_the_limit_is_kept_and_one_token_more_is_removed_whole(tmp_path, job):
    """L01, L02"""
    report, _ = run(job(limit=20, train=texts(5, 21, 20), valid=texts(9), test=texts(9)))
    train = report["splits"]["train"]
    assert (train["rows_read"], train["rows_kept"], train["removed_over_length"]) == (3, 2, 1)
    assert (train["longest_row_tokens"], train["longest_kept_tokens"]) == (21, 20)
    assert removed(tmp_path) == [
        {"split": "train", "where": "train.jsonl:2", "id": "train.jsonl:2", "reason": "over_length", "tokens": 21}
    ]
    rows = load_token_rows(tmp_path / "out" / "tokens.npz", "train")
    assert [(row.where, len(row.ids)) for row in rows] == [("train.jsonl:1", 5), ("train.jsonl:3", 20)]


def test_the_length_is_counted_after_the_template_and_with_the_end_token(tmp_path, base, job):
    """L03"""
    tokenizer = load_tokenizer(base)
    row = chat("Where is it?", "On its way.")
    whole = len(
        tokenizer("<|im_start|>user\nWhere is it?<|im_end|>\n<|im_start|>assistant\nOn its way.<|im_end|>\n").input_ids
    )
    content = len(tokenizer("Where is it?On its way.").input_ids)
    assert whole > content + 6
    report, _ = run(job(limit=whole, train=[row], valid=[row], test=[row]))
    assert report["splits"]["train"]["longest_kept_tokens"] == whole
    kept = load_token_rows(tmp_path / "out" / "tokens.npz", "train")[0]
    assert tokenizer.decode(kept.ids[-2:]) == "<|im_end|>\n"
    refusal = refused(job(limit=whole - 1, train=[row], valid=[row], test=[row]))
    assert refusal.code == "no_trainable_tokens"


@pytest.mark.parametrize("split", ["valid", "test"])
def test_over_long_evaluation_rows_are_removed_and_counted_too(tmp_path, job, split):
    """L05, K07"""
    splits = {
        "train": texts(5, 6),
        "valid": texts(5),
        "test": texts(5),
        split: [*texts(5), {**text_of(21), "id": "long"}],
    }
    report, _ = run(job(limit=20, **splits))
    assert (report["splits"][split]["rows_read"], report["splits"][split]["rows_kept"]) == (2, 1)
    assert report["splits"][split]["removed_over_length"] == 1
    assert [(item["split"], item["where"], item["id"]) for item in removed(tmp_path)] == [
        (split, f"{split}.jsonl:2", "long")
    ]


def test_a_prompt_as_long_as_the_limit_removes_its_row_before_training(tmp_path, base, job):
    """L06"""
    row = chat("7" * 40, "12345")
    report, _ = run(job(limit=40, train=[*tiny_rows(2), row]))
    assert report["splits"]["train"]["removed_over_length"] == 1
    rows = load_token_rows(tmp_path / "out" / "tokens.npz", "train")
    assert [row.trainable_tokens > 0 for row in rows] == [True, True]


def test_when_no_train_row_fits_the_run_is_refused_with_the_length_that_would_do(job):
    """L07"""
    refusal = refused(job(limit=20, train=texts(*[30] * 7, 33), valid=texts(5), test=texts(5)))
    assert (refusal.code, refusal.where) == ("no_trainable_tokens", "train.jsonl")
    assert "8 of 8 are longer than 20 tokens (the longest has 33)" in refusal.message
    assert refusal.remedy == "raise train.max_seq_length to 33, or shorten the rows"


@pytest.mark.parametrize("split", ["valid", "test"])
def test_when_no_evaluation_row_fits_the_run_is_refused(job, split):
    """L05, K07"""
    splits = {"train": texts(5, 6), "valid": texts(5), "test": texts(5), split: texts(25)}
    refusal = refused(job(limit=20, **splits))
    assert (refusal.code, refusal.where) == ("no_trainable_tokens", f"{split}.jsonl")


def test_too_few_rows_after_the_removal_are_refused(job):
    """D08"""
    refusal = refused(
        job(limit=20, data={"min_train_rows": 3}, train=texts(5, 6, 21, 22), valid=texts(5), test=texts(5))
    )
    assert (refusal.code, refusal.where) == ("too_few_rows", "train.jsonl")
    assert "2 train rows are left after 2 over-long ones were removed, at least 3" in refusal.message


def test_a_train_row_without_a_token_to_learn_is_refused_and_an_evaluation_row_is_removed(tmp_path, job):
    """L06, K07: a text of the end token alone has nothing to predict"""
    nothing = {"text": "<|im_end|>", "id": "nothing"}
    refusal = refused(job(train=[text_of(5), nothing], valid=texts(5), test=texts(5)))
    assert (refusal.code, refusal.where) == ("no_trainable_tokens", "train.jsonl:2")
    assert "nothing" in refusal.message
    report, _ = run(job(train=texts(5), valid=[nothing, *texts(5)], test=texts(5)))
    assert report["splits"]["valid"]["removed_no_trainable_tokens"] == 1
    assert report["splits"]["valid"]["rows_kept"] == 1
    assert [item["reason"] for item in removed(tmp_path)] == ["no_trainable_tokens"]


def test_removed_rows_are_listed_without_their_texts(tmp_path, job):
    run(job(limit=20, train=[*texts(5), {"text": "secreto " * 40}], valid=texts(5), test=texts(5)))
    assert "secreto" not in (tmp_path / "out" / "removed.jsonl").read_text(encoding="utf-8")


def test_the_report_counts_tokens_labels_and_blank_lines(tmp_path, job, base):
    rows = [
        {"text": "Invoice?", "label": "billing"},
        {"text": "It is down", "label": "technical", "accepted": ["technical", "other"]},
        {"text": "Refund", "label": "billing"},
    ]
    made = job(train=rows, valid=rows[:1], test=rows[1:], data={"labels": ["billing", "technical", "other"]})
    with (tmp_path / "data" / "train.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("\n\n")
    report, events = run(made)
    train = report["splits"]["train"]
    assert report["format"] == "classification"
    assert (train["labels"], train["ambiguous_rows"], train["blank_lines"]) == ({"billing": 2, "technical": 1}, 1, 2)
    tokenizer = load_tokenizer(base)
    answers = ("billing", "technical", "billing")
    assert train["tokens_trainable"] == sum(len(tokenizer(answer).input_ids) + 1 for answer in answers)
    stored = load_token_rows(tmp_path / "out" / "tokens.npz", "train")
    assert train["tokens_non_padding"] == sum(len(row.ids) for row in stored)
    assert train["prompt_differs"] == 0
    assert events[0] == ("phase", {"name": "tokenise", "total": 6})


@pytest.mark.parametrize(("policy", "answers"), [("answers", ["First.", "Second."]), ("last_answer", ["Second."])])
def test_the_policy_is_reported_and_changes_the_count(base, job, policy, answers):
    """K02, K04"""
    tokenizer = load_tokenizer(base)
    report, _ = run(job(train=[chat("One?", "First.", "Two?", "Second.")], data={"train_on": policy}))
    assert report["train_on"] == policy
    assert report["splits"]["train"]["tokens_trainable"] == sum(len(tokenizer(text).input_ids) + 1 for text in answers)


def test_text_rows_are_reported_as_learned_whole_whatever_the_policy(job):
    report, _ = run(job(train=texts(5, 6), valid=texts(5), test=texts(5)))
    assert report["train_on"] == "all_tokens"
    assert report["splits"]["train"]["tokens_trainable"] == 4 + 5
    assert report["splits"]["train"]["tokens_non_padding"] == 5 + 6


def test_rows_whose_prompt_will_differ_later_are_counted(tmp_path, job):
    """K01"""
    template = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
    other = tiny_tokenizer(tmp_path / "other", template)
    report, _ = run(job(tokenizer=other))
    assert {split: counts["prompt_differs"] for split, counts in report["splits"].items()} == {
        "train": 6, "valid": 2, "test": 2,
    }  # fmt: skip


@pytest.mark.parametrize("eos_is_pad", [False, True])
def test_in_a_padded_batch_each_end_token_is_a_label_and_no_padding_is(tmp_path, job, eos_is_pad):
    """K09, K11"""
    folder = tiny_tokenizer(tmp_path / "made", eos_is_pad=eos_is_pad)
    run(job(tokenizer=folder, train=[chat("Hi", "Yes"), chat("Where is my order?", "It is on its way to you.")]))
    tokenizer = load_tokenizer(folder)
    batch = make_batch(load_token_rows(tmp_path / "out" / "tokens.npz", "train"), [0, 1])
    assert batch.lengths[0] < batch.lengths[1]
    labels = [tokenizer.decode(tokens[mask]) for tokens, mask in zip(batch.tokens, batch.trainable, strict=True)]
    assert labels == ["Yes<|im_end|>", "It is on its way to you.<|im_end|>"]
    assert not batch.trainable[0, batch.lengths[0] :].any()
    # The padded places hold another token than the end token, so nothing that compares ids can confuse the two.
    assert tokenizer.eos_token_id not in batch.tokens[0, batch.lengths[0] :]


def test_stored_rows_read_back_as_they_were_tokenised(tmp_path, base, job):
    run(job(train=[chat("Hi", "Yes"), chat("Olá", "Não há")]))
    rows = load_token_rows(tmp_path / "out" / "tokens.npz", "train")
    tokenizer = load_tokenizer(base)
    assert [row.where for row in rows] == ["train.jsonl:1", "train.jsonl:2"]
    assert tokenizer.decode(rows[1].ids) == "<|im_start|>user\nOlá<|im_end|>\n<|im_start|>assistant\nNão há<|im_end|>\n"
    assert tokenizer.decode(rows[1].ids[rows[1].trainable]) == "Não há<|im_end|>"
    assert (rows[0].ids.dtype, rows[0].trainable.dtype) == (np.int32, bool)
    assert not rows[0].trainable[0]


def test_the_same_data_gives_the_same_hash_and_other_data_another(job):
    first, _ = run(job(train=tiny_rows(3)))
    again, _ = run(job(train=tiny_rows(3)[::-1]))
    other, _ = run(job(train=tiny_rows(4)))
    assert first["content_sha256"] == again["content_sha256"] != other["content_sha256"]


def test_progress_is_told_every_two_hundred_rows(job):
    _, events = run(job(train=tiny_rows(399)))
    assert [fields["done"] for kind, fields in events if kind == "progress"] == [200, 400]


def test_a_fault_in_the_data_is_refused_before_the_tokenizer_is_loaded(tmp_path, job):
    made = job(tokenizer=tmp_path / "nowhere")
    write_jsonl(tmp_path / "data" / "train.jsonl", [{"nothing": 1}])
    assert refused(made).code == "bad_row"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path, job):
    (tmp_path / "empty").mkdir()
    refusal = refused(job(tokenizer=tmp_path / "empty"))
    assert (refusal.code, refusal.where) == ("bad_tokenizer", str(tmp_path / "empty"))


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path, job):
    folder = tiny_tokenizer(tmp_path / "made")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    refusal = refused(job(tokenizer=folder))
    assert (refusal.code, "names no end token" in refusal.message) == ("bad_tokenizer", True)


def test_the_job_survives_the_way_to_its_process_as_json(job):
    made = job()
    assert PrepareJob(**json.loads(json.dumps(as_json(made)))) == made
