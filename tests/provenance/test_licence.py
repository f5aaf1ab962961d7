"""The licence is read from the front matter of a card, and from nowhere else."""

import pytest

from lemon_mlflow.provenance.licence import declared_licence


def card(folder, text, name="README.md"):
    (folder / name).write_bytes(text.encode("utf-8"))
    return declared_licence(folder)


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n# A model\n", "apache-2.0"),
        ("---\r\nlicense: apache-2.0\r\n---\r\n# A model\r\n", "apache-2.0"),
        ("\ufeff---\nlicense: mit\n---\n", "mit"),
        ("---\ntags: [a]\nlicense: ' mit '\n---", "mit"),
        ("---\nlicense: other\nlicense_name: gemma\n---\n", "gemma"),
        ("---\nlicense: other\n---\n", "other"),
        ("---\nlicense: mit\nlicense_name: gemma\n---\n", "mit"),
    ],
)
def test_the_licence_of_the_front_matter_is_told_as_it_is_written(tmp_path, text, licence):
    assert card(tmp_path, text) == licence


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# A model\n\nlicense: mit\n",
        "\n---\nlicense: mit\n---\n",
        "# A model\n---\nlicense: mit\n---\n",
        "---\ntags: [a]\n---\nlicense: mit\n",
        "---\nlicense: mit\n",
        "---\nlicense:\n---\n",
        "---\nlicense: [mit, apache-2.0]\n---\n",
        "---\n- license\n---\n",
        "---\nlicense: [mit\n---\n",
        "---\nlicense: mit\ndate: 2024-99-99\n---\n",
    ],
)
def test_what_is_no_declaration_is_not_taken_for_one(tmp_path, text):
    assert card(tmp_path, text) == ""


def test_a_data_card_is_read_too_but_the_readme_comes_first(tmp_path):
    assert card(tmp_path, "---\nlicense: cc-by-4.0\n---\n", "CARD.md") == "cc-by-4.0"
    assert card(tmp_path, "# no front matter\n") == "cc-by-4.0"
    assert card(tmp_path, "---\nlicense: mit\n---\n") == "mit"


def test_a_licence_file_alone_declares_nothing(tmp_path):
    assert card(tmp_path, "MIT License", "LICENSE") == ""


def test_a_card_in_another_encoding_is_still_read(tmp_path):
    (tmp_path / "README.md").write_bytes("---\nlicense: mit\nauthor: João\n---\n".encode("latin-1"))
    assert declared_licence(tmp_path) == "mit"
