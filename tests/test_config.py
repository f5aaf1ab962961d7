"""Recipes: what is read, what is refused, and where the refusal points."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lemon_mlflow.config import Recipe, canonical_text, flatten, load_recipe, to_yaml, valid_keys
from lemon_mlflow.errors import Refusal


@pytest.fixture
def recipe_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refused(path, overrides=None) -> Refusal:
    with pytest.raises(Refusal) as caught:
        load_recipe(path, overrides)
    return caught.value


# What is read


def test_an_empty_file_and_no_file_give_the_defaults(recipe_file):
    assert load_recipe(recipe_file("")).recipe == Recipe()
    assert load_recipe(None).recipe == Recipe()


def test_an_empty_section_keeps_its_defaults(recipe_file):
    assert load_recipe(recipe_file("train:\nlora:\n  rank: 4\n")).recipe == Recipe.model_validate({"lora": {"rank": 4}})


def test_text_from_a_command_line_becomes_the_type_of_its_key():
    recipe = load_recipe(None, {"lora.rank": "4", "lora.alpha": "8", "train.gradient_checkpointing": "true"}).recipe
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.train.gradient_checkpointing) == (4, 8.0, True)
    assert isinstance(recipe.lora.rank, int)
    assert isinstance(recipe.lora.alpha, float)


def test_an_override_wins_over_the_file_and_leaves_the_rest(recipe_file):
    loaded = load_recipe(recipe_file("lora:\n  rank: 4\n  alpha: 2\n"), {"lora.rank": "16"})
    assert (loaded.recipe.lora.rank, loaded.recipe.lora.alpha) == (16, 2.0)
    assert loaded.overridden == {"lora.rank"}


def test_an_exponent_without_a_point_is_a_number(recipe_file):
    # YAML 1.1 reads `1e-3` as text.
    assert load_recipe(recipe_file("train:\n  learning_rate: 1e-3\n")).recipe.train.learning_rate == 0.001


@pytest.mark.parametrize(
    "text", ["billing, technical,other", "[billing, technical, other]", "billing,technical,other,"]
)
def test_a_list_can_be_written_as_text_with_commas(text):
    assert load_recipe(None, {"data.labels": text}).recipe.data.labels == ("billing", "technical", "other")


def test_target_modules_are_a_list_or_all_linear():
    assert load_recipe(None, {"lora.target_modules": "q_proj,v_proj"}).recipe.lora.target_modules == (
        "q_proj",
        "v_proj",
    )
    assert load_recipe(None, {"lora.target_modules": "all-linear"}).recipe.lora.target_modules == "all-linear"


@pytest.mark.parametrize("word", ["none", "None", "null", ""])
@pytest.mark.parametrize("key", ["train.max_steps", "limits.minutes", "base.revision", "train.resume"])
def test_a_word_takes_an_optional_value_back(recipe_file, key, word):
    path = recipe_file("base:\n  revision: main\ntrain:\n  max_steps: 9\n  resume: abc\nlimits:\n  minutes: 5\n")
    assert flatten(load_recipe(path).recipe)[key] is not None
    assert flatten(load_recipe(path, {key: word}).recipe)[key] is None


def test_a_byte_order_mark_is_not_part_of_the_first_key(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xef\xbb\xbflora:\r\n  rank: 3\r\n")
    assert load_recipe(path).recipe.lora.rank == 3


def test_a_recipe_is_read_as_utf8_whatever_the_locale_says(recipe_file):
    """D05"""
    path = recipe_file("data:\n  instruction: Classifica a reclamação\n")
    code = (
        "import sys; from lemon_mlflow import load_recipe\n"
        "print(ascii(load_recipe(sys.argv[1]).recipe.data.instruction))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == ascii("Classifica a reclamação")


# Keys


def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_key(recipe_file):
    path = recipe_file("base:\n  model: x\nlora:\n  ranc: 4\n")
    refusal = refused(path)
    assert refusal.code == "unknown_recipe_key"
    assert refusal.where == f"{path}:4"
    assert refusal.remedy == "did you mean lora.rank?"


def test_an_unknown_section_is_refused_with_its_line_and_the_nearest_section(recipe_file):
    path = recipe_file("base:\n  model: x\nlorra:\n  rank: 4\n")
    refusal = refused(path)
    assert (refusal.code, refusal.where, refusal.remedy) == ("unknown_recipe_key", f"{path}:3", "did you mean lora?")


def test_an_unknown_override_names_the_command_line(recipe_file):
    refusal = refused(recipe_file(""), {"lora.rnk": "4"})
    assert (refusal.code, refusal.where) == ("unknown_recipe_key", "command line: --lora.rnk")
    assert refusal.remedy == "did you mean lora.rank?"


def test_an_override_without_its_section_is_told_the_whole_name():
    refusal = refused(None, {"rank": "4"})
    assert (refusal.code, refusal.remedy) == ("unknown_recipe_key", "did you mean lora.rank?")


def test_a_key_given_twice_is_refused_at_the_second(recipe_file):
    path = recipe_file("train:\n  seed: 1\n  epochs: 2\n  seed: 2\n")
    refusal = refused(path)
    assert (refusal.code, refusal.where) == ("bad_recipe", f"{path}:4")
    assert "train.seed" in refusal.message


def test_a_section_given_twice_is_refused(recipe_file):
    path = recipe_file("train:\n  seed: 1\nlora:\n  rank: 2\ntrain:\n  epochs: 2\n")
    assert (refused(path).code, refused(path).where) == ("bad_recipe", f"{path}:5")


OTHER_VALUES = {
    "base.model": "./base",
    "base.revision": "main",
    "base.quantization": "4bit",
    "base.dtype": "bfloat16",
    "data.path": "elsewhere",
    "data.format": "text",
    "data.instruction": "Classify.",
    "data.labels": "a,b",
    "data.train_on": "last_answer",
    "data.min_train_rows": "2",
    "lora.rank": "3",
    "lora.alpha": "5",
    "lora.dropout": "0.1",
    "lora.layers": "2",
    "lora.target_modules": "q_proj",
    "train.backend": "mlx",
    "train.seed": "11",
    "train.epochs": "2.5",
    "train.max_steps": "9",
    "train.batch_size": "2",
    "train.gradient_accumulation": "3",
    "train.learning_rate": "0.0001",
    "train.schedule": "cosine",
    "train.warmup_steps": "1",
    "train.weight_decay": "0.01",
    "train.max_grad_norm": "0.5",
    "train.max_seq_length": "64",
    "train.gradient_checkpointing": "true",
    "train.validate_every": "5",
    "train.checkpoint_every": "6",
    "train.resume": "abc",
    "limits.system_available_pct": "20",
    "limits.framework_peak_gb": "3",
    "limits.process_gb": "4",
    "limits.minutes": "1.5",
    "track.experiment": "e",
    "track.run_name": "n",
}


@pytest.mark.parametrize("key", valid_keys())
def test_every_key_can_be_overridden_with_text(key):
    before, after = flatten(Recipe()), flatten(load_recipe(None, {key: OTHER_VALUES[key]}).recipe)
    assert {name for name in before if before[name] != after[name]} == {key}
    assert canonical_text(after[key]) == OTHER_VALUES[key]


def test_the_valid_keys_are_those_of_the_flat_recipe():
    assert tuple(flatten(Recipe())) == valid_keys()


# Values


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("lora:\n  rank: four\n", "lora.rank", 2),
        ("lora:\n  alpha: 1\n  rank: 4.5\n", "lora.rank", 3),
        ("lora:\n  rank: 0\n", "lora.rank", 2),
        ("lora:\n  rank: [4]\n", "lora.rank", 2),
        ("lora:\n  rank: yes\n", "lora.rank", 2),
        ("train:\n  seed: true\n", "train.seed", 2),
        ("train:\n  learning_rate: on\n", "train.learning_rate", 2),
        ("limits:\n  minutes: no\n", "limits.minutes", 2),
        ("train:\n  max_steps: yes\n", "train.max_steps", 2),
        ("lora:\n  alpha: .inf\n", "lora.alpha", 2),
        ("lora:\n  alpha: .nan\n", "lora.alpha", 2),
        ("lora:\n  alpha: inf\n", "lora.alpha", 2),
        ("limits:\n  minutes: nan\n", "limits.minutes", 2),
        ("train:\n  learning_rate: 0\n", "train.learning_rate", 2),
        ("lora:\n  dropout: 1\n", "lora.dropout", 2),
        ("train:\n  max_seq_length: 1\n", "train.max_seq_length", 2),
        ("train:\n  seed: 4294967296\n", "train.seed", 2),
        ("train:\n  schedule: lineal\n", "train.schedule", 2),
        ("base:\n  quantization: nf4\n", "base.quantization", 2),
        ("base:\n  model: 1\n", "base.model", 2),
        ("data:\n  path: ''\n", "data.path", 2),
        ("data:\n  labels: [yes, no]\n", "data.labels", 2),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_line(recipe_file, text, key, line):
    path = recipe_file(text)
    refusal = refused(path)
    assert (refusal.code, refusal.where) == ("bad_recipe_value", f"{path}:{line}")
    assert f"`{key}`" in refusal.message


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "abc", "1,5", "true"])
def test_a_wrong_number_on_the_command_line_names_the_command_line(value):
    """M08"""
    refusal = refused(None, {"train.learning_rate": value})
    assert (refusal.code, refusal.where) == ("bad_recipe_value", "command line: --train.learning_rate")
    assert repr(value) in refusal.message


def test_all_wrong_values_are_listed_at_once(recipe_file):
    path = recipe_file("lora:\n  rank: a\n  alpha: b\n")
    refusal = refused(path, {"train.seed": "c"})
    assert refusal.where == f"{path}:2"
    assert [detail.split(": `")[0] for detail in refusal.details] == [f"{path}:3", "command line: --train.seed"]


def test_a_value_in_the_place_of_a_section_is_refused(recipe_file):
    path = recipe_file("lora: {}\ntrain: 3\n")
    assert (refused(path).code, refused(path).where) == ("bad_recipe_value", f"{path}:2")


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("lora:\n  rank: 2\n  layers: 0\n", "lora.layers", 3),
        ("lora:\n  rank: 2\n  target_modules: []\n", "lora.target_modules", 3),
        ("data:\n  path: d\n  labels: [a, b, a]\n", "data.labels", 3),
    ],
)
def test_a_rule_of_a_section_points_at_the_key_it_is_about(recipe_file, text, key, line):
    path = recipe_file(text)
    refusal = refused(path)
    assert (refusal.code, refusal.where) == ("bad_recipe_value", f"{path}:{line}")
    assert key in refusal.message


def test_a_rule_broken_by_an_override_points_at_the_command_line(recipe_file):
    refusal = refused(recipe_file("lora:\n  layers: 2\n"), {"lora.layers": "0"})
    assert refusal.where == "command line: --lora.layers"


def test_classification_needs_labels(recipe_file):
    path = recipe_file("data:\n  format: classification\n")
    refusal = refused(path)
    assert refusal.code == "bad_recipe_value"
    assert "data.labels is needed" in refusal.message
    assert load_recipe(path, {"data.labels": "a,b"}).recipe.data.labels == ("a", "b")


def test_a_loaded_recipe_cannot_be_changed():
    with pytest.raises(ValidationError):
        load_recipe(None).recipe.lora.rank = 3


# Files


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train:\n  seed: [1\n", 3),
        ("train:\n\tseed: 1\n", 2),
        ("train:\n  seed: 1\n   epochs: 2\n", 3),
        ("base: !!python/object/apply:os.getcwd []\n", 1),
        ("a: 1\n---\nb: 2\n", 2),
        ("- train\n", 1),
        ("train\n", 1),
    ],
)
def test_what_is_not_a_mapping_in_yaml_is_refused_with_its_line(recipe_file, text, line):
    path = recipe_file(text)
    assert (refused(path).code, refused(path).where) == ("bad_recipe", f"{path}:{line}")


@pytest.mark.parametrize("text", ["track:\n  run_name: 2024-99-99\n", "train: &t\n  seed: *t\n", "[" * 5000])
def test_what_yaml_itself_stumbles_over_is_refused_too(recipe_file, text):
    assert refused(recipe_file(text)).code in ("bad_recipe", "bad_recipe_value")


def test_a_recipe_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes("data:\n  instruction: reclamação\n".encode("latin-1"))
    assert (refused(path).code, refused(path).remedy) == ("bad_recipe", "save it as UTF-8 text")


def test_a_missing_recipe_names_the_nearest_file(tmp_path):
    (tmp_path / "recipe.yaml").write_text("", encoding="utf-8")
    refusal = refused(tmp_path / "recip.yaml")
    assert (refusal.code, refusal.remedy) == ("recipe_not_found", "did you mean recipe.yaml?")


def test_a_folder_is_not_a_recipe(tmp_path):
    assert refused(tmp_path).code == "bad_recipe"


def test_relative_paths_start_at_the_recipe_and_those_of_overrides_at_the_working_folder(tmp_path):
    project, working = tmp_path / "project", tmp_path / "working"
    project.mkdir()
    working.mkdir()
    (project / "recipe.yaml").write_text("data:\n  path: data\n", encoding="utf-8")
    loaded = load_recipe("../project/recipe.yaml", {"base.model": "./base"}, cwd=working)
    assert loaded.path == (project / "recipe.yaml").resolve()
    assert loaded.folder_for("data.path") == project.resolve()
    assert loaded.folder_for("base.model") == working
    assert load_recipe(None, cwd=working).folder_for("data.path") == working


# Out again


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"), (7.0, "7"), (0.0, "0"), (-0.0, "0"), (2e-4, "0.0002"), (1e-05, "1e-05"), (0.1, "0.1"), (True, "true"),
        (False, "false"), (None, "none"), ("all-linear", "all-linear"), (("q_proj", "v_proj"), "q_proj,v_proj"),
        ([], ""), (math.inf, "inf"), (1e300, "1e+300"),
    ],
)  # fmt: skip
def test_a_value_has_one_spelling(value, text):
    """M05"""
    assert canonical_text(value) == text


def test_the_same_number_typed_in_two_ways_is_logged_as_the_same_text(recipe_file):
    """M05"""
    spellings = ("7", "7.0", "7.00", "0.7e1")
    texts = {
        canonical_text(flatten(load_recipe(None, {"lora.alpha": text}).recipe)["lora.alpha"]) for text in spellings
    }
    assert texts == {"7"}


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_positive = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
_recipes = st.fixed_dictionaries(
    {
        "data": st.fixed_dictionaries(
            {"instruction": _texts, "labels": st.lists(_texts.map(str.strip).filter(bool), max_size=4, unique=True)}
        ),
        "lora": st.fixed_dictionaries(
            {
                "rank": st.integers(1, 512),
                "alpha": _positive,
                "dropout": st.floats(0, 1, exclude_max=True),
                "target_modules": st.just("all-linear") | st.lists(_texts.filter(str.strip), min_size=1, max_size=3),
            }
        ),
        "train": st.fixed_dictionaries(
            {
                "learning_rate": _positive,
                "seed": st.integers(0, 2**32 - 1),
                "max_steps": st.none() | st.integers(1, 10**6),
                "gradient_checkpointing": st.booleans(),
            }
        ),
        "track": st.fixed_dictionaries({"run_name": st.none() | _texts}),
    }
)


@settings(deadline=None, max_examples=100)
@given(values=_recipes)
def test_a_recipe_written_as_yaml_reads_back_equal(tmp_path_factory, values):
    recipe = Recipe.model_validate(values)
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(to_yaml(recipe), encoding="utf-8")
    assert load_recipe(path).recipe == recipe
