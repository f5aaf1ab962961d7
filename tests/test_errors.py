"""How a run without an adapter tells its reason."""

import json
import pickle

import pytest

from lemon_mlflow.errors import Failure, Refusal


def test_a_refusal_prints_code_place_and_remedy_in_one_line():
    refusal = Refusal(
        "too_few_rows", "train has 2 rows,\n4 are needed", where="train.jsonl", remedy="write\n\nmore rows"
    )
    assert str(refusal) == "too_few_rows: train has 2 rows, 4 are needed [train.jsonl] -> write more rows"


def test_what_is_not_known_leaves_no_empty_brackets():
    assert str(Failure("non_finite_loss", "the loss is nan")) == "non_finite_loss: the loss is nan"


def test_a_refusal_and_a_failure_end_with_their_own_status_and_outcome():
    refusal, failure = Refusal("bad_json", "m"), Failure("worker_died", "m")
    assert (refusal.exit_status, refusal.outcome) == (2, "refused:bad_json")
    assert (failure.exit_status, failure.outcome) == (1, "failed:worker_died")
    assert not isinstance(failure, Refusal)


def test_only_the_first_twenty_details_are_kept():
    refusal = Refusal("bad_json", "m", details=tuple(f"train.jsonl:{line}" for line in range(1, 31)))
    assert len(refusal.details) == 20
    assert refusal.details[-1] == "train.jsonl:20"


@pytest.mark.parametrize("kind", [Refusal, Failure])
def test_json_and_pickle_keep_every_field_and_the_kind(kind):
    original = kind(
        "bad_json", "não é JSON", "train.jsonl:3", "write one object a line", ("train.jsonl:3", "train.jsonl:9")
    )
    for copy in (
        kind.from_dict(json.loads(json.dumps(original.as_dict()))),
        pickle.loads(pickle.dumps(original)),
    ):
        assert type(copy) is kind
        assert copy.as_dict() == original.as_dict()
        assert copy.details == ("train.jsonl:3", "train.jsonl:9")


def test_a_refusal_without_place_and_details_reads_back_from_the_two_fields_it_needs():
    copy = Refusal.from_dict({"code": "bad_row", "message": "m"})
    assert (copy.where, copy.remedy, copy.details) == ("", "", ())
