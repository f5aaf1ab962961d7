"""The reload test passes what was saved whole, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lemon_mlflow.errors import Failure
from lemon_mlflow.evaluate.reload import ReloadJob, reload
from tests.tiny_models import TinyRun, tiny_base, train_tiny

both = pytest.mark.parametrize("backend", ("hf", "mlx"))


@pytest.fixture(scope="module")
def runs(base: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyRun]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: train_tiny(name, base, tokens, folder / name, train__max_steps=3) for name in ("hf", "mlx")}


def weights(backend: str) -> str:
    return "adapter_model.safetensors" if backend == "hf" else "adapters.safetensors"


def job(backend: str, base: Path, tokens: Path, run: TinyRun, adapter: Path) -> ReloadJob:
    spec = {"folder": str(base), "name": "tiny", "commit": "", "quantization": "none", "dtype": "auto"}
    return ReloadJob(backend, spec, str(adapter), str(tokens), str(run.out / "probes.npz"))


def changed(run: TinyRun, backend: str, to: Path, change) -> Path:
    shutil.copytree(run.adapter, to)
    save_file(change(load_file(to / weights(backend))), to / weights(backend), {"format": "pt"})
    return to


@both
def test_an_adapter_that_was_saved_whole_comes_back(
    backend: str, base: Path, tokens: Path, runs: dict[str, TinyRun]
) -> None:
    result = reload(job(backend, base, tokens, runs[backend], runs[backend].adapter), lambda *args, **fields: None)
    assert result["difference"] <= 1e-6
    assert result["effect_of_adapter"] > 1e-3
    assert result["rows"] == 4


def renamed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    first, *rest = sorted(tensors)
    return {
        first.replace("q_proj", "x_proj").replace("down_proj", "x_proj"): tensors[first],
        **{n: tensors[n] for n in rest},
    }


def without_one(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tensors[name] for name in sorted(tensors)[1:]}


def misshapen(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    first = min(tensors)
    return {**tensors, first: np.concatenate([tensors[first], tensors[first]])}


@both
@pytest.mark.parametrize("change", [renamed, without_one, misshapen])
def test_missing_surplus_and_misshapen_tensors_are_refused(
    backend: str, change, base: Path, tokens: Path, runs: dict[str, TinyRun], tmp_path: Path
) -> None:  # A01, A03
    adapter = changed(runs[backend], backend, tmp_path / "adapter", change)
    with pytest.raises(Failure) as caught:
        reload(job(backend, base, tokens, runs[backend], adapter), lambda *args, **fields: None)
    assert caught.value.code == "adapter_incomplete"


@both
def test_an_adapter_of_zeros_is_the_base(
    backend: str, base: Path, tokens: Path, runs: dict[str, TinyRun], tmp_path: Path
) -> None:  # A05
    adapter = changed(
        runs[backend], backend, tmp_path / "adapter", lambda tensors: {n: t * 0 for n, t in tensors.items()}
    )
    with pytest.raises(Failure) as caught:
        reload(job(backend, base, tokens, runs[backend], adapter), lambda *args, **fields: None)
    assert caught.value.code == "reload_differs"
    # Nor does it pass when the training process itself saw only the base.
    probes = tmp_path / "probes.npz"
    untrained = train_tiny(backend, base, tokens, tmp_path / "b", train__max_steps=1, train__learning_rate=1e-30)
    shutil.copy(untrained.out / "probes.npz", probes)
    with pytest.raises(Failure) as caught:
        reload(job(backend, base, tokens, untrained, adapter), lambda *args, **fields: None)
    assert caught.value.code == "adapter_is_base"


@both
def test_another_base_does_not_pass(backend: str, tokens: Path, runs: dict[str, TinyRun], tmp_path: Path) -> None:
    other = tiny_base(tmp_path / "other", seed=1)
    with pytest.raises(Failure) as caught:
        reload(job(backend, other, tokens, runs[backend], runs[backend].adapter), lambda *args, **fields: None)
    assert caught.value.code == "reload_differs"
