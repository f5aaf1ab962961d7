"""Manifests: one hash that anybody can check with `sha256sum`."""

import hashlib
import json
import os
import shutil
import subprocess

import pytest

from lemon_mlflow.provenance.hashes import all_files, hash_file, manifest_of, model_files, tokenizer_files


@pytest.fixture
def folder(tmp_path):
    contents = {
        "config.json": b"{}",
        "model-00001-of-00002.safetensors": b"\x00\x01",
        "model-00002-of-00002.safetensors": b"\x02",
        "tokenizer.json": b'{"a": 1}',
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "sub/Zusatz ação.json": b"[]",
        "README.md": b"# A model",
        "LICENSE.txt": b"free",
        "pytorch_model.bin": b"pickled",
        ".cache/huggingface/model.json": b"{}",
        ".hidden.json": b"{}",
    }
    for name, content in contents.items():
        path = tmp_path / "base" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "base"


def names(folder, files) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in files]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_the_one_hash_is_what_sha256sum_says(folder):
    files = all_files(folder)
    done = subprocess.run(
        "find . -type f | sed 's,^./,,' | tr '\\n' '\\0' | xargs -0 sha256sum | LC_ALL=C sort -k 2 | sha256sum",
        shell=True, cwd=folder, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(files) == 12
    assert done.stdout.split()[0] == manifest_of(folder, files).sha256


def test_the_order_in_which_files_are_given_does_not_matter(folder):
    files = all_files(folder)
    assert manifest_of(folder, files) == manifest_of(folder, reversed(files))


@pytest.mark.parametrize("changed", ["config.json", "model-00002-of-00002.safetensors", "sub/Zusatz ação.json"])
def test_one_other_byte_is_another_hash_of_that_file_alone(folder, changed):
    """A15"""
    before = manifest_of(folder, model_files(folder))
    raw = bytearray((folder / changed).read_bytes())
    raw[0] ^= 1
    (folder / changed).write_bytes(raw)
    after = manifest_of(folder, model_files(folder))
    assert before.sha256 != after.sha256
    assert [a.name for a, b in zip(after.files, before.files, strict=True) if a.sha256 != b.sha256] == [changed]


def test_another_name_for_the_same_bytes_is_another_hash(folder):
    before = manifest_of(folder, model_files(folder)).sha256
    (folder / "config.json").rename(folder / "konfig.json")
    assert manifest_of(folder, model_files(folder)).sha256 != before


def test_the_hash_does_not_depend_on_where_the_folder_lies_or_what_it_is_called(folder, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    first, second = manifest_of(folder, all_files(folder)), manifest_of(copy, all_files(copy), subject="hub/name")
    assert first.sha256 == second.sha256
    assert (first.subject, second.subject) == ("base", "hub/name")


def test_a_model_is_its_weights_configuration_and_tokenizer_not_its_card_or_hidden_files(folder):
    assert names(folder, model_files(folder)) == [
        "chat_template.jinja", "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "sub/Zusatz ação.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_a_model_inside_a_hidden_folder_keeps_its_files(tmp_path):
    # Hub caches lie in ~/.cache: only hidden parts below the folder count.
    (tmp_path / ".cache" / "model").mkdir(parents=True)
    (tmp_path / ".cache" / "model" / "config.json").write_text("{}", encoding="utf-8")
    assert names(tmp_path / ".cache" / "model", model_files(tmp_path / ".cache" / "model")) == ["config.json"]


def test_a_tokenizer_is_its_files_and_its_template(folder):
    assert names(folder, tokenizer_files(folder)) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]


def test_a_linked_file_counts_with_the_bytes_it_points_to(folder, tmp_path):
    (tmp_path / "blob").write_bytes(b"{}")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "blob")
    entry = next(file for file in manifest_of(folder, model_files(folder)).files if file.name == "config.json")
    assert (entry.size_bytes, entry.sha256) == (2, hashlib.sha256(b"{}").hexdigest())


def test_a_file_longer_than_one_piece_is_hashed_whole_and_told_piece_by_piece(tmp_path):
    content = b"lemon" * (2 << 20)
    (tmp_path / "large").write_bytes(content)
    pieces = []
    assert hash_file(tmp_path / "large", pieces.append) == hashlib.sha256(content).hexdigest()
    assert pieces == [8 << 20, len(content) - (8 << 20)]


def test_the_json_form_is_a_statement_with_every_file(folder):
    manifest = manifest_of(folder, tokenizer_files(folder), subject="embedded:x")
    statement = json.loads(json.dumps(manifest.to_json()))
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [{"name": "embedded:x", "digest": {"sha256": manifest.sha256}}]
    assert statement["predicate"]["resources"][1] == {
        "name": "tokenizer.json",
        "digest": hashlib.sha256(b'{"a": 1}').hexdigest(),
        "algorithm": "sha256",
        "size_bytes": 8,
    }
