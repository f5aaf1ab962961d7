"""A tiny base and its tokenised rows, made once for each test module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import tiny_base, tokenised, varied_folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def tokens(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    return tokenised(base, varied_folder(folder / "data"), folder / "out")
