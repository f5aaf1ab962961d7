"""From `base.model` to a folder on this machine, with everything that identifies it.

    base = resolve_base(loaded)          # may download from a hub: the only place that does
    base.folder, base.manifest.sha256, base.tokenizer_sha256, base.licence

Three sources: the embedded base, a local folder, a hub id with a revision. A hub id is pinned to a commit; when the hub
cannot be reached, a cached copy of that revision is used, and when there is none the run is refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import LoadedRecipe
from ..errors import Refusal
from ..provenance.hashes import Manifest, manifest_of, model_files, tokenizer_files
from ..provenance.licence import declared_licence
from . import embedded

_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "README.md"]


@dataclass(frozen=True)
class BaseLocation:
    """Where the base's files are.

    Attributes:
        source: `embedded`, `folder` or `hub`.
        name: `base.model` as the recipe gives it.
        folder: the folder on this machine; not there yet when the embedded base must still be built.
        commit: the hub's commit, "" for the other sources.
    """

    source: str
    name: str
    folder: Path
    commit: str = ""


@dataclass(frozen=True)
class Base:
    """A base model, exactly.

    Attributes:
        location: where it came from.
        folder: the folder that is loaded (a converted copy, when the recipe asks for another quantization on mlx).
        config: its config.json.
        manifest: its model files with their hashes; `manifest.sha256` is the base hash.
        tokenizer_sha256: one hash over the tokenizer's files.
        licence: as declared by its card, "" when it declares none.
        converted_from: base hash of the folder that this one was quantized from, "" when it is the original.
    """

    location: BaseLocation
    folder: Path
    config: dict[str, Any]
    manifest: Manifest
    tokenizer_sha256: str
    licence: str
    converted_from: str = ""

    @property
    def is_quantized(self) -> bool:
        """Whether the stored weights are quantized."""
        return bool(self.config.get("quantization") or self.config.get("quantization_config"))


def locate_base(loaded: LoadedRecipe) -> BaseLocation:
    """Find or download the base's files.

    Raises:
        Refusal: `base_unavailable`, `unknown_embedded_base`, `base_incomplete`.
    """
    name, revision = loaded.recipe.base.model, loaded.recipe.base.revision
    if name.startswith("embedded:"):
        if name != embedded.NAME:
            raise Refusal(
                "unknown_embedded_base",
                f"there is no embedded base {name}",
                "base.model",
                f"did you mean {embedded.NAME}?",
            )
        return BaseLocation("embedded", name, embedded.embedded_folder())
    path = Path(name).expanduser()
    path = path if path.is_absolute() else loaded.folder_for("base.model") / path
    if path.is_dir():
        return BaseLocation("folder", name, path.resolve())
    if name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise Refusal(
            "base_unavailable",
            "there is no such folder",
            f"base.model: {name}",
            "give a folder with config.json, or a hub id",
        )
    return _from_hub(name, revision)


def _from_hub(name: str, revision: str | None) -> BaseLocation:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise Refusal(
            "backend_not_installed",
            "a hub base needs the package huggingface_hub",
            f"base.model: {name}",
            "pip install 'lemon-mlflow[hf]' (or [mlx])",
        ) from None
    errors = []
    for local_only in (False, True):
        try:
            folder = Path(
                snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES, local_files_only=local_only)
            )
        except Exception as error:  # network, authentication and validation errors have no common kind
            errors.append(type(error).__name__)
            continue
        # The cache names a snapshot's folder after its commit.
        return BaseLocation("hub", name, folder, folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else "")
    at = f"@{revision}" if revision else ""
    raise Refusal(
        "base_unavailable",
        f"the hub cannot be reached for {name}{at}, and no copy is cached ({', '.join(errors)})",
        f"base.model: {name}",
        "connect once, log in for a gated model, correct the name, or set base.model to a local folder",
    )


def describe_base(location: BaseLocation, folder: Path | None = None) -> Base:
    """Hash and read the base's files; `folder` is a converted copy when there is one.

    Raises:
        Refusal: `base_incomplete`.
    """
    folder = folder or location.folder
    config_path = folder / "config.json"
    try:
        config = _json_object(config_path)
    except (OSError, ValueError) as error:
        raise Refusal(
            "base_incomplete",
            f"config.json cannot be read ({type(error).__name__})",
            str(config_path),
            "give a folder as transformers or mlx-lm save it",
        ) from None
    if not list(folder.glob("*.safetensors")):
        raise Refusal(
            "base_incomplete",
            "there are no weights as safetensors",
            str(folder),
            "save the base as safetensors (pickled .bin weights can run code and are not loaded)",
        )
    _refuse_missing_shards(folder)
    manifest = manifest_of(folder, model_files(folder), subject=location.name)
    tokenizer = manifest_of(folder, tokenizer_files(folder))
    return Base(
        location,
        folder,
        config,
        manifest,
        tokenizer.sha256,
        declared_licence(folder) or declared_licence(location.folder),
    )


def _json_object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _refuse_missing_shards(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        wanted = set(_json_object(index).get("weight_map", {}).values())
    except (OSError, ValueError, AttributeError) as error:
        message = f"the list of weight files cannot be read ({type(error).__name__})"
        raise Refusal("base_incomplete", message, str(index), "download the base again") from None
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if missing:
        raise Refusal(
            "base_incomplete",
            f"{len(missing)} weight files are missing, the first is {missing[0]}",
            str(index),
            "download the base again",
        )
