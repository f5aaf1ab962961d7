"""Manifests: which files, each with its sha256, and one hash over all of them.

    manifest = manifest_of(folder, model_files(folder))
    manifest.sha256

The one hash can be checked without this package: it is the sha256 of the `sha256sum` listing, sorted by file name.

    cd FOLDER && sha256sum FILES | LC_ALL=C sort -k 2 | sha256sum

The JSON form is an in-toto statement with the resources named as the OpenSSF model-signing format names them. It is not
signed: a manifest says which bytes there were, not who vouches for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MODEL_SUFFIXES = {".safetensors", ".gguf", ".json", ".model", ".txt", ".jinja", ".tiktoken", ".py"}
_TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class FileHash:
    """One file: its name relative to the folder (with `/`), size in bytes and sha256 in hex."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Files sorted by name, and `sha256`, the one hash over names and contents."""

    subject: str
    files: tuple[FileHash, ...]

    @property
    def sha256(self) -> str:
        """Hash of the listing that `sha256sum` prints for these files."""
        listing = "".join(f"{file.sha256}  {file.name}\n" for file in self.files)
        return hashlib.sha256(listing.encode("utf-8")).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """An in-toto statement (v1), unsigned."""
        return {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": self.subject, "digest": {"sha256": self.sha256}}],
            "predicateType": "https://model_signing/signature/v1.0",
            "predicate": {
                "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": True},
                "resources": [
                    {"name": file.name, "digest": file.sha256, "algorithm": "sha256", "size_bytes": file.size_bytes}
                    for file in self.files
                ],
            },
        }


def hash_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """sha256 of one file, read in pieces of 8 MiB; `progress` gets the bytes of each piece."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(8 << 20):
            digest.update(piece)
            if progress:
                progress(len(piece))
    return digest.hexdigest()


def manifest_of(
    folder: Path, files: Iterable[Path], subject: str = "", progress: Callable[[int], None] | None = None
) -> Manifest:
    """The manifest of `files`, which lie in `folder`."""
    entries = [
        FileHash(path.relative_to(folder).as_posix(), path.stat().st_size, hash_file(path, progress)) for path in files
    ]
    return Manifest(subject or folder.name, tuple(sorted(entries, key=lambda entry: entry.name)))


def model_files(folder: Path) -> list[Path]:
    """The files that make a model what it is: weights, configuration, tokenizer, template. Not its README."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix in _MODEL_SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and not path.name.upper().startswith("LICENSE")
    )


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of the tokenizer and its template."""
    return [folder / name for name in sorted(_TOKENIZER_NAMES) if (folder / name).is_file()]


def all_files(folder: Path) -> list[Path]:
    """Every regular file below `folder`."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
