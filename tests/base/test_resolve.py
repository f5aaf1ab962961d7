"""From `base.model` to a folder and its hashes. No test reaches a hub."""

import json
import sys
from types import SimpleNamespace

import pytest

from lemon_mlflow.base.embedded import NAME
from lemon_mlflow.base.resolve import BaseLocation, describe_base, locate_base
from lemon_mlflow.config import load_recipe
from lemon_mlflow.errors import Refusal
from lemon_mlflow.provenance.hashes import manifest_of, tokenizer_files
from tests.tiny import tiny_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path):
    """A folder with all that makes a base, except weights that mean something."""
    path = tiny_tokenizer(tmp_path / "base")
    (path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "README.md").write_text("---\nlicense: apache-2.0\n---\n", encoding="utf-8")
    return path


@pytest.fixture
def hub(monkeypatch):
    """Puts a stand-in for the hub's client in place, and returns the calls that it got."""
    calls = []

    def install(answer):
        def snapshot_download(name, revision, allow_patterns, local_files_only):
            calls.append((name, revision, local_files_only))
            return answer(local_files_only)

        monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
        return calls

    return install


def locate(model, path=None, cwd=None, **base):
    overrides = {"base.model": str(model), **{f"base.{key}": value for key, value in base.items()}}
    return locate_base(load_recipe(path, overrides, cwd=cwd))


def refused(function, *arguments, **keywords) -> Refusal:
    with pytest.raises(Refusal) as caught:
        function(*arguments, **keywords)
    return caught.value


# Where it is


def test_the_embedded_base_lies_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEMON_CACHE", str(tmp_path))
    found = locate(NAME)
    assert (found.source, found.name, found.commit) == ("embedded", NAME, "")
    assert found.folder.parent == tmp_path / "bases"


def test_an_unknown_embedded_base_is_refused_with_the_one_there_is():
    refusal = refused(locate, "embedded:smollm2-360m")
    assert (refusal.code, refusal.where) == ("unknown_embedded_base", "base.model")
    assert refusal.remedy == "did you mean embedded:smollm2-135m?"


def test_a_folder_is_found_by_its_full_path(folder):
    assert locate(folder) == BaseLocation("folder", str(folder), folder.resolve())


@pytest.mark.parametrize("written", ["base", "./base", "../{parent}/base"])
def test_a_relative_folder_starts_at_the_recipe(tmp_path, folder, written):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"base:\n  model: {written.format(parent=tmp_path.name)}\n", encoding="utf-8")
    assert locate_base(load_recipe(path, cwd=tmp_path / "base")).folder == folder.resolve()


def test_a_relative_folder_of_an_override_starts_at_the_working_folder(tmp_path, folder):
    (tmp_path / "project").mkdir()
    path = tmp_path / "project" / "recipe.yaml"
    path.write_text("", encoding="utf-8")
    assert locate("base", path, cwd=tmp_path).folder == folder.resolve()


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~nobody/base", "a/b/c", "two words"])
def test_what_can_only_be_a_folder_is_not_asked_of_the_hub(tmp_path, hub, name):
    calls = hub(lambda local: pytest.fail("the hub was asked"))
    refusal = refused(locate, name, cwd=tmp_path)
    assert (refusal.code, refusal.where, calls) == ("base_unavailable", f"base.model: {name}", [])


def test_a_hub_base_is_pinned_to_the_commit_that_the_revision_means(tmp_path, hub):
    """A10"""
    calls = hub(lambda local: str(tmp_path / "snapshots" / COMMIT))
    found = locate("owner/name", cwd=tmp_path, revision="main")
    assert found == BaseLocation("hub", "owner/name", tmp_path / "snapshots" / COMMIT, COMMIT)
    assert calls == [("owner/name", "main", False)]


def test_without_a_network_the_cached_copy_of_that_revision_is_used(tmp_path, hub):
    """A10, A14"""

    def answer(local):
        if not local:
            raise ConnectionError
        return str(tmp_path / COMMIT)

    calls = hub(answer)
    assert locate("owner/name", cwd=tmp_path, revision="v1").commit == COMMIT
    assert calls == [("owner/name", "v1", False), ("owner/name", "v1", True)]


def test_without_a_network_and_a_copy_the_base_is_refused(tmp_path, hub):
    def answer(local):
        raise (FileNotFoundError if local else ConnectionError)

    hub(answer)
    refusal = refused(locate, "owner/name", cwd=tmp_path, revision="v1")
    assert (refusal.code, refusal.where) == ("base_unavailable", "base.model: owner/name")
    assert "owner/name@v1" in refusal.message
    assert "ConnectionError, FileNotFoundError" in refusal.message


def test_a_hub_base_without_the_client_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refusal = refused(locate, "owner/name", cwd=tmp_path)
    assert (refusal.code, "pip install 'lemon-mlflow[hf]'" in refusal.remedy) == ("backend_not_installed", True)


# What it is


def test_a_base_is_told_by_its_files_its_tokenizer_and_its_licence(folder):
    base = describe_base(BaseLocation("folder", "my-base", folder))
    assert [file.name for file in base.manifest.files] == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert base.manifest.subject == "my-base"
    assert base.tokenizer_sha256 == manifest_of(folder, tokenizer_files(folder)).sha256
    assert (base.licence, base.config, base.is_quantized) == ("apache-2.0", {"model_type": "llama"}, False)


def test_another_chat_template_is_another_tokenizer_and_another_base(folder):
    """A15"""
    location = BaseLocation("folder", "my-base", folder)
    before = describe_base(location)
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    after = describe_base(location)
    assert before.tokenizer_sha256 != after.tokenizer_sha256
    assert before.manifest.sha256 != after.manifest.sha256


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_a_quantized_folder_is_known_as_such(folder, key):
    (folder / "config.json").write_text(json.dumps({key: {"bits": 4, "group_size": 64}}), encoding="utf-8")
    assert describe_base(BaseLocation("folder", "b", folder)).is_quantized


def test_a_converted_copy_is_hashed_itself_and_keeps_the_licence_of_its_source(folder, tmp_path):
    copy = tiny_tokenizer(tmp_path / "converted")
    (copy / "config.json").write_text('{"quantization": {"bits": 4}}', encoding="utf-8")
    (copy / "model.safetensors").write_bytes(b"fewer bits")
    location = BaseLocation("folder", "my-base", folder)
    base = describe_base(location, copy)
    assert (base.folder, base.location, base.licence, base.is_quantized) == (copy, location, "apache-2.0", True)
    assert base.manifest.sha256 != describe_base(location).manifest.sha256


@pytest.mark.parametrize("content", [None, "{", "[]", "null"])
def test_a_folder_without_a_readable_configuration_is_refused(folder, content):
    config = folder / "config.json"
    config.unlink()
    if content is not None:
        config.write_text(content, encoding="utf-8")
    refusal = refused(describe_base, BaseLocation("folder", "b", folder))
    assert (refusal.code, refusal.where) == ("base_incomplete", str(config))


def test_pickled_weights_are_not_taken(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refusal = refused(describe_base, BaseLocation("folder", "b", folder))
    assert (refusal.code, refusal.where) == ("base_incomplete", str(folder))
    assert "safetensors" in refusal.message


def test_a_missing_part_of_the_weights_is_refused_by_name(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00003.safetensors")
    parts = {f"layer.{number}": f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}), encoding="utf-8")
    refusal = refused(describe_base, BaseLocation("folder", "b", folder))
    assert (refusal.code, refusal.where) == ("base_incomplete", str(index))
    assert refusal.message == "2 weight files are missing, the first is model-00002-of-00003.safetensors"


@pytest.mark.parametrize("content", ['{"weight_map": {', "[]", '{"weight_map": []}'])
def test_a_list_of_weight_files_that_cannot_be_read_is_refused(folder, content):
    index = folder / "model.safetensors.index.json"
    index.write_text(content, encoding="utf-8")
    refusal = refused(describe_base, BaseLocation("folder", "b", folder))
    assert (refusal.code, refusal.where) == ("base_incomplete", str(index))
