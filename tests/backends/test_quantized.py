"""4-bit and 8-bit bases: gradients are right, also after validation, and the fingerprint says what was loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lemon_mlflow.errors import Failure, Refusal
from tests.tiny_models import TinyRun, tiny_base, train_tiny


def fingerprint(run: TinyRun) -> str:
    return next(event["quantization"]["fingerprint"] for event in run.events if event["event"] == "loaded")


def lora_gradients(base: Path, tokens: Path, quantized: bool, avx512bf16: bool = False) -> np.ndarray:
    """All LoRA gradients of one batch, after an evaluation-mode forward, through NF4 or through its dequantized copy."""
    import bitsandbytes as bnb
    import torch
    from bitsandbytes.functional import dequantize_4bit

    from lemon_mlflow.backends.interface import LoadSpec, LoraSpec, open_backend
    from lemon_mlflow.data.batches import make_batch
    from lemon_mlflow.data.prepare import load_token_rows

    backend: Any = open_backend("hf")
    backend.seed(0)
    backend.load_base(LoadSpec(str(base), "tiny", "", "4bit", "bfloat16"))
    if not quantized:
        for module in list(backend._model.modules()):
            for name, part in list(module.named_children()):
                if isinstance(part, bnb.nn.Linear4bit):
                    plain = torch.nn.Linear(part.in_features, part.out_features, bias=False, dtype=torch.bfloat16)
                    plain.weight.data = dequantize_4bit(part.weight.data, part.weight.quant_state).to(torch.bfloat16)
                    plain.weight.requires_grad_(False)
                    setattr(module, name, plain)
    if avx512bf16:
        for part in backend._model.modules():
            if isinstance(part, bnb.nn.Linear4bit):
                part.support_avx512bf16_for_cpu = True
    backend.add_adapter(LoraSpec(4, 8.0, 0.0, -1, ()), 3)
    for name, parameter in backend._trainable():
        if "lora_B" in name:  # zeros would hide A's gradients
            generator = torch.Generator().manual_seed(len(name))
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    backend.prepare_training(False, 0.0)
    batch = make_batch(load_token_rows(tokens, "train"), [0, 1, 2])
    backend.loss_sum(batch)
    backend.accumulate(batch, batch.tokens_trainable)
    return np.concatenate([p.grad.flatten().float().numpy() for _, p in sorted(backend._trainable())])


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def test_gradients_through_nf4_are_those_of_the_dequantized_weights_also_after_validation(
    base: Path, tokens: Path
) -> None:
    found, expected = lora_gradients(base, tokens, True), lora_gradients(base, tokens, False)
    assert cosine(found, expected) >= 0.993
    assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(expected), rel=0.1)


def test_the_guard_catches_the_silent_fault_of_bitsandbytes(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes as bnb
    import torch

    from lemon_mlflow.backends import hf

    layer = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    if not getattr(layer, "support_avx512bf16_for_cpu", False):
        pytest.skip("this CPU has no AVX512-BF16, so bitsandbytes does not take the faulty path")
    monkeypatch.setattr(hf, "_keep_gradients_through_nf4", lambda model: None)
    backend = hf.open()
    with pytest.raises((Failure, UserWarning)) as caught:
        backend.load_base(hf.LoadSpec(str(base), "tiny", "", "4bit", "bfloat16"))
    assert "quantized_gradient_broken" in str(caught.value) or "autograd kernel" in str(caught.value)


def test_nf4_with_double_quantization_learns_and_is_named(base: Path, tokens: Path, tmp_path: Path) -> None:
    run = train_tiny(
        "hf", base, tokens, tmp_path / "a", base__quantization="4bit", train__validate_every=2, train__epochs=3
    )
    assert fingerprint(run) == "nf4-4bit-g64-double-float32"
    assert run.validations[-1]["loss"] < 0.8 * run.validations[0]["loss"]
    again = train_tiny(
        "hf", base, tokens, tmp_path / "b", base__quantization="4bit", train__validate_every=2, train__epochs=3
    )
    assert again.losses == run.losses


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_mlx_base_learns_and_is_named(bits: int, base: Path, tokens: Path, tmp_path: Path) -> None:
    from lemon_mlflow.backends.mlx import ConvertJob, convert

    folder = tmp_path / "converted"
    convert(ConvertJob(str(base), str(folder), bits), lambda *args, **fields: None)
    assert json.loads((folder / "config.json").read_text())["quantization"]["bits"] == bits
    assert [*tmp_path.iterdir()] == [folder]  # nothing half-written is left
    run = train_tiny("mlx", folder, tokens, tmp_path / "a", train__epochs=3)
    assert fingerprint(run) == f"affine-{bits}bit-g64-float32"
    assert run.validations[-1]["loss"] < 0.8 * run.validations[0]["loss"]


def test_a_width_that_does_not_divide_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lemon_mlflow.backends.mlx as mlx_backend

    base = tiny_base(tmp_path / "base")
    monkeypatch.setattr(mlx_backend, "_GROUP_SIZE", 48)
    with pytest.raises(Refusal) as caught:
        mlx_backend.convert(mlx_backend.ConvertJob(str(base), str(tmp_path / "out"), 4), lambda *args, **fields: None)
    assert caught.value.code == "quantization_unavailable"
    assert not (tmp_path / "out").exists()
